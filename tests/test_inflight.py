from __future__ import annotations

import pytest

from zfabric_workers.inflight import LIMIT_MAX, ROUNDS, START, Limit


def served(limit, capacity, answers=20_000):
    """A server that works on `capacity` at once, each answer taking a second; the last level."""
    now = 0.0
    for _ in range(answers):
        now += 1 / min(limit.value, capacity)
        limit.note(now, 100, full=True)
    return limit.value


@pytest.mark.parametrize("capacity", [1, 4, 16, 60])
def test_it_stops_where_more_at_once_does_no_more(capacity):
    found = served(Limit(), capacity)
    assert found >= min(capacity, LIMIT_MAX)
    assert found <= max(START, 2 * capacity)


def test_it_never_goes_over_its_ceiling():
    assert served(Limit(), 10**6, answers=3 * ROUNDS * LIMIT_MAX) == LIMIT_MAX


def test_what_was_told_is_kept():
    assert served(Limit(7), 100) == 7


def test_places_that_were_empty_prove_nothing():
    limit = Limit()
    for k in range(1_000):
        limit.note(float(k), 100, full=False)
    assert limit.value == START


def test_many_refusals_at_one_moment_are_one_refusal():
    limit = Limit(64)
    for _ in range(64):
        limit.busy(5.0)
    assert limit.value == 32
    for now in (6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0):
        limit.busy(now)
    assert limit.value == 1


@pytest.mark.parametrize("limit", [Limit(64), Limit()], ids=["told", "found"])
def test_a_limit_of_a_minute_is_not_one_for_ever(limit):
    now, before = 1_000.0, 64
    if limit.value != before:
        limit.settle(before)
    for _ in range(10):
        now += 1
        limit.busy(now)
    assert limit.value == 1
    levels = []
    for _ in range(400):
        now += 1
        limit.note(now, 100, full=True)
        levels.append(limit.value)
    assert set(levels[:58]) == {1}
    assert levels[-1] == max(levels) == before
