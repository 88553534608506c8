"""Publishing: what subscribers get and how often, and nothing while there are none."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tests.dashboards import Day, a_day
from zfabric import snapshot
from zfabric.publishing import (
    FEW_SHAPES,
    LANES_S,
    LENGTHS_S,
    SURVEY_S,
    TOPICS_MAX,
    Publishing,
)
from zfabric.recent import ITEMS_MAX, Recent
from zfabric.shapes import Shape


@pytest.fixture(scope="module")
def day() -> Day:
    return a_day()


def publishing(day: Day) -> Publishing:
    return Publishing(day.bench.dispatcher, 4.0)


def topics_at(made: Publishing, now: float) -> list[bytes]:
    return [topic for topic, _ in made.messages(now)]


def test_nothing_is_made_while_nobody_watches(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    made = publishing(day)

    def never(*_: Any) -> Any:
        raise AssertionError("a snapshot was made for nobody")

    for name in ("status", "shapes", "lanes", "lengths", "current_lanes"):
        monkeypatch.setattr(snapshot, name, never)
    day.bench.fabric.event("worker_joined", "x", day.bench.now)
    assert topics_at(made, day.bench.now) == []
    assert not day.bench.fabric.fresh_events
    assert made.next_s is None


def test_snapshots_come_at_the_rate_and_events_at_once(day: Day) -> None:
    made, now = publishing(day), day.bench.now
    made.changed(b"\x01snapshot")
    made.changed(b"\x01event")
    counts = [topics_at(made, now + k / 20).count(b"snapshot") for k in range(20)]
    assert sum(counts) == 4
    day.bench.fabric.event("worker_joined", "x", now)
    assert topics_at(made, now + 1.01) == [b"event", b"snapshot"]
    made.changed(b"\x00snapshot")
    made.changed(b"\x00event")
    assert topics_at(made, now + 9.0) == []


def test_lanes_come_once_a_second_and_at_once_to_who_has_just_come(day: Day) -> None:
    made, now = publishing(day), day.bench.now
    signature = day.lanes[0]["signature"].encode()
    made.changed(b"\x01lanes:" + signature)
    seen = [bool(topics_at(made, now + k / 4)) for k in range(12)]
    assert seen == [k % 4 == 0 for k in range(12)]
    assert LANES_S == 1.0
    made.changed(b"\x01lanes:current")
    assert sorted(topics_at(made, now + 3.3)) == sorted([b"lanes:current", b"lanes:" + signature])


@pytest.mark.parametrize("topic", [b"lanes:", b"lanes:xyz", b"lanes:0000000000000000", b"\xff"])
def test_topic_that_nothing_answers_to_is_harmless(day: Day, topic: bytes) -> None:
    made = publishing(day)
    made.changed(b"\x01" + topic)
    assert topics_at(made, day.bench.now) == []


def test_topics_are_bounded(day: Day) -> None:
    made = publishing(day)
    for k in range(TOPICS_MAX * 3):
        made.changed(b"\x01lanes:%016x" % k)
    assert len(made._topics) == TOPICS_MAX


def test_lengths_are_published_once_each_and_only_when_there_are_new_ones() -> None:
    day = Day()
    made, now = Publishing(day.bench.dispatcher, 4.0), day.bench.now
    made.changed(b"\x01lengths")
    assert topics_at(made, now) == []
    day.submit("job", 100, 100)
    said = [value for _, value in made.messages(now + LENGTHS_S + 1)]
    column = array("I")
    for _, _, _, packed in said[0]["runs"]:
        column.frombytes(packed)
    assert len(column) == 100 and min(column) > 600
    assert topics_at(made, now + 3 * LENGTHS_S) == []


def test_recent_lengths_are_bounded_and_the_newest() -> None:
    recent = Recent()
    for k in range(300):
        recent.note("m", 7, [k] * 100, float(k))
    kept = [length for run in recent.since() for length in run.lengths]
    assert ITEMS_MAX - 100 < len(kept) <= ITEMS_MAX
    assert kept[-1] == 299
    assert [run.at_s for run in recent.since(298)] == [298.0, 299.0]
    assert recent.since(300) == []


# -- what a snapshot says of lanes and storage -----------------------------------------------------


def test_padding_of_lanes_adds_up_to_the_padding_of_the_shape() -> None:
    day = Day()
    day.submit("job", 2_000, 2_000)
    day.bench.dispatch()
    fabric = day.bench.fabric
    group = fabric.groups[fabric.models["llama-3-8b"].draining.current]
    seen = snapshot.lanes(fabric, group, day.bench.now)
    assert sum(seen["padded_tokens"]) == group.padded_tokens > 0
    assert sum(seen["real_tokens"]) == group.real_tokens


def test_lane_that_is_used_again_begins_at_nothing() -> None:
    day = Day()
    group = None
    for count in (64, 64):
        day.submit("job", count, 128)
        day.work(4.0, batches=9)
        fabric = day.bench.fabric
        group = next(g for g in fabric.groups.values() if g.batches)
        day.bench.tick(30.0)
        for card in day.cards:
            card.heartbeat()
        day.work(0.5)
    assert group is not None
    day.submit("job", 64, 192)
    for lane in group.queues:
        assert group.lane_padding.padded_tokens(lane) == 0


def test_figures_of_a_pass_agree_with_those_of_each_shape(day: Day) -> None:
    view = day.views[-1]
    fabric = day.bench.fabric
    groups = list(fabric.groups.values())
    assert view["lanes_active"] == sum(g.lanes.lanes_active for g in groups)
    pressures = [g.lanes.pressure for g in groups if g.lanes.lanes_active]
    thresholds = [g.lanes.threshold for g in groups if g.lanes.lanes_active]
    assert view["lane_pressure_ratio"] == pytest.approx(sum(pressures) / len(pressures))
    assert view["waste_threshold_ratio"] == pytest.approx(sum(thresholds) / len(thresholds))
    oldest = max(row["oldest_item_age_s"] or 0 for row in view["shapes"])
    assert view["models"][0]["oldest_item_age_s"] == pytest.approx(oldest)


def test_full_disk_is_said_with_its_reason_and_when_it_is_over() -> None:
    day = Day()
    backing = day.bench.fabric.store.backing
    answers = iter([None, "0 bytes are free", "0 bytes are free", None])
    backing.full = lambda now: next(answers)
    seen = []
    for _ in range(4):
        day.bench.tick(1.0)
        day.publish()
        seen.append(day.views[-1]["storage"]["full"])
    assert seen == [None, "0 bytes are free", "0 bytes are free", None]
    names = [event["event"] for event in day.events]
    assert names.count("storage_full") == names.count("storage_available") == 1


def test_of_many_shapes_the_sums_are_a_moment_old_and_the_books_are_not() -> None:
    day = Day()
    producer = day.bench.producer("many")
    for k in range(FEW_SHAPES + 1):
        producer.submit([100 + k], Shape.of("llama-3-8b", f"shape {k}", tokens=[9]))
    day.bench.settle()
    now = day.bench.now
    first = day.publishing.view(now)
    producer.submit([5_000], Shape.of("llama-3-8b", "one more", tokens=[9]))
    day.bench.settle()
    soon, later = day.publishing.view(now + 0.5), day.publishing.view(now + SURVEY_S)
    assert soon["lanes_active"] == first["lanes_active"] == later["lanes_active"] - 1
    assert soon["accepted_items"] == later["accepted_items"] == first["accepted_items"] + 1
    assert soon["residual_items"] == 0
    assert later["shapes"][0]["ready_tokens"] == 5_000
