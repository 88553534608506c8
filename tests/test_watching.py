"""Watching: a verdict that changed is an event, at the time at which it did, and only then."""

from __future__ import annotations

import itertools

from tests.dashboards import Day
from zfabric.watching import VERDICT_S


def test_verdict_that_changed_is_one_event_and_has_a_time() -> None:
    day = Day()
    day.submit("job", 3_000, 3_000)
    day.work(20.0, batches=2)
    names = [event for event in day.events if event["event"] == "waste_verdict"]
    verdicts = [event["verdict"] for event in names]
    assert verdicts and all(a != b for a, b in itertools.pairwise(verdicts))
    last = day.views[-1]
    assert last["waste_verdict"] == verdicts[-1]
    assert last["waste_verdict_since"] == names[-1]["time"]
    assert all(b["time"] - a["time"] >= VERDICT_S for a, b in itertools.pairwise(names))
