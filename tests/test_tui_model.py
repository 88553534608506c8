"""What figures say: rates without bursts, trends with gaps, alarms that name what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboards import Day, a_day
from zfabric_tui.model import (
    EVENTS_KEPT,
    LANES_KEPT,
    TREND_S,
    History,
    alarms,
    eta_s,
    is_over,
    mark,
    rates,
)


@pytest.fixture(scope="module")
def day() -> Day:
    return a_day()


def test_rates_are_per_second_of_the_brokers_time(day: Day) -> None:
    before, after = day.views[-21], day.views[-1]
    found = rates(mark(before), [mark(before)], mark(after))
    items = after["completed_items"] - before["completed_items"]
    assert found.items == pytest.approx(items / (after["time"] - before["time"]))
    assert set(found.cards) == {"gpu0", "gpu1"}
    assert sum(each[0] for each in found.cards.values()) == pytest.approx(found.items)


def test_job_that_came_late_has_a_rate_from_its_first_moment(day: Day) -> None:
    history = History()
    for view in day.views[-100:]:
        history.add(view)
    assert history.rates.jobs["nightly-eval"] == pytest.approx(history.rates.items or 0, rel=0.5)


@pytest.mark.parametrize("what", ["restart", "gap", "clock"])
def test_no_rate_across_a_restart_a_gap_or_a_clock_that_went_back(day: Day, what: str) -> None:
    history = History()
    for view in day.views[-20:]:
        history.add(view)
    assert history.rates.items is not None
    view = dict(day.views[-1])
    view |= {
        "restart": {"boot_id": "another", "time": view["time"] + 0.25},
        "gap": {"time": view["time"] + 60.0},
        "clock": {"time": view["time"] - 60.0},
    }[what]
    history.add(view)
    assert history.rates.items is None


def test_trend_has_a_gap_where_nothing_was_heard(day: Day) -> None:
    history = History()
    for view in day.views[-80:-40] + day.views[-20:]:
        history.add(view)
    shown = history.trend(20)
    silent = [second for second, value in enumerate(shown) if value is None]
    assert len([v for v in shown if v is not None]) >= 10
    assert silent and len(set(silent)) >= 4


def test_everything_that_is_remembered_is_bounded(day: Day) -> None:
    history, view = History(), day.views[-1]
    for k in range(2_500):
        history.add({**view, "time": view["time"] + k})
        history.add_events([{"time": 1.0 * k, "seq": k, "event": "x", "text": ""}])
        history.add_lanes({f"{k:016x}": {}})
    assert len(history.events) == EVENTS_KEPT
    assert len(history.lanes) == LANES_KEPT
    assert len(history.trend(10_000)) == 10_000
    assert sum(v is not None for v in history.trend(10_000)) <= TREND_S


def test_events_that_are_heard_twice_or_late_are_shown_once_in_their_order() -> None:
    history = History()
    events = [{"time": 10.0 + k, "seq": k, "event": "e", "text": str(k)} for k in range(6)]
    history.add_events(events[3:])
    history.add_events(events[:4])
    assert history.events == events
    # A broker that begins anew numbers from one again.
    again = {"time": 99.0, "seq": 1, "event": "e", "text": "again"}
    history.add_events([again])
    assert history.events == [*events, again]


def test_what_went_before_a_jump_is_forgotten(day: Day) -> None:
    history = History()
    for view in day.views[-20:]:
        history.add(view)
    history.add_events(day.events)
    history.forget()
    history.add(day.views[5])
    assert (history.events, history.rates.items, history.lanes) == ([], None, {})


def test_eta_is_of_what_the_job_said_or_of_what_it_left_here() -> None:
    job: dict[str, Any] = {
        "expected_items": None, "completed_items": 0, "dead_items": 0, "refused_items": 0,
        "accepted_items": 30, "live": True,
    }  # fmt: skip
    assert eta_s({**job, "live": False, "completed_items": 10}, 10.0) == 2.0
    assert eta_s(job, 10.0) is None
    assert eta_s({**job, "expected_items": 50}, 10.0) == 5.0
    assert eta_s({**job, "expected_items": 50}, None) is None
    assert eta_s({**job, "expected_items": 50, "completed_items": 60}, 10.0) == 0.0


def test_job_that_ended_early_is_over_when_it_is_gone() -> None:
    job = {
        "expected_items": 100, "completed_items": 40, "dead_items": 1, "refused_items": 2,
        "accepted_items": 41, "live": True,
    }  # fmt: skip
    assert not is_over(job)
    assert is_over({**job, "live": False})
    assert not is_over({**job, "live": False, "accepted_items": 50})
    assert is_over({**job, "expected_items": 43})


def calm(view: dict[str, Any]) -> dict[str, Any]:
    return {**view, "waste_verdict": "healthy"}


def test_nothing_is_wrong_with_a_healthy_fabric(day: Day) -> None:
    assert alarms(calm(day.views[-1])) == []


@pytest.mark.parametrize(
    ("changed", "level", "said"),
    [
        ({"residual_items": 1}, "bad", "do not balance"),
        ({"residual_tokens": -1}, "bad", "do not balance"),
        ({"dead_records": 2}, "warn", "2 dead items"),
        ({"dead_records": 1}, "warn", "1 dead item"),
        ({"waste_verdict": "capacity"}, "warn", "padding: capacity"),
        ({"state": "draining"}, "warn", "draining"),
        ({"storage": {"full": "no room"}}, "bad", "disk full: no room"),
        ({"recovery": {"quarantined_items": 3, "quarantined_files": 1}}, "warn", "3 items, 1 file"),
    ],
)
def test_alarm_names_what_is_wrong_and_only_that(
    day: Day, changed: dict[str, Any], level: str, said: str
) -> None:
    found = alarms({**calm(day.views[-1]), **changed})
    assert [alarm.level for alarm in found] == [level]
    assert said in found[0].text
    assert found[0].hint


def test_alarms_of_cards_and_models(day: Day) -> None:
    view = calm(day.views[-1])
    card, model = view["workers"][0], view["models"][0]
    gone = {**card, "live": False, "in_flight": 1}
    assert alarms({**view, "workers": [gone]})[0].text.endswith("gone with 1 batch")
    silent = {**card, "heartbeat_age_s": 6.0}
    assert "silent for 6 s" in alarms({**view, "workers": [silent]})[0].text
    assert "paused" in alarms({**view, "models": [{**model, "paused": True}]})[0].text
    alone = {**model, "workers": 0}
    assert "no worker" in alarms({**view, "models": [alone]})[0].text


def test_the_worst_comes_first(day: Day) -> None:
    found = alarms({**calm(day.views[-1]), "dead_records": 1, "residual_items": 5})
    assert [alarm.level for alarm in found] == ["bad", "warn"]
