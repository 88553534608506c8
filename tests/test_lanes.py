"""Lanes against a plain oracle: dicts, exact fractions, and the rules as the design words them."""

from __future__ import annotations

import copy
import tracemalloc
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zfabric.errors import ConfigError, InvariantError
from zfabric.lanes import (
    LANES_MAX,
    TAG_FLOOR,
    TAG_FORCED,
    TAG_THRESHOLD,
    Lanes,
)
from zfabric.shapes import TOKENS_MAX


@dataclass
class NaiveLane:
    target: int
    outstanding: int = 0
    touched: float = 0.0
    quiescing: bool = False


def fraction(gap: int, whole: int) -> Fraction:
    return Fraction(gap, whole) if whole else Fraction(0)


class NaiveLanes:
    """The rules, one item at a time, with no regard for speed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lanes: dict[int, NaiveLane] = {}

    def threshold(self) -> Fraction:
        return Fraction(1, 100) + Fraction(9, 100) * Fraction(len(self.lanes), self.limit)

    def open_lanes(self) -> list[tuple[int, int]]:
        return sorted((lane.target, id) for id, lane in self.lanes.items() if not lane.quiescing)

    def better(self, length: int) -> tuple[int, int, Fraction] | None:
        """(id, gap, waste) of the candidate that the rules prefer."""
        upper = [(t, id) for t, id in self.open_lanes() if t >= length]
        lower = [(t, id) for t, id in self.open_lanes() if t < length]
        candidates = []
        if upper:
            target, id = upper[0]
            candidates.append((id, target - length, fraction(target - length, target)))
        if lower:
            target, id = lower[-1]
            candidates.append((id, length - target, fraction(length - target, length)))
        return min(candidates, key=lambda c: c[2], default=None)

    def assign_one(self, length: int, now: float) -> tuple[int, int, int]:
        best = self.better(length)
        tag = TAG_THRESHOLD
        wants_lane = best is None
        if best is not None:
            _, gap, waste = best
            over = waste > self.threshold()
            wants_lane = (over and gap >= 16) or gap > 128
            tag = TAG_FLOOR if over else TAG_THRESHOLD
        if wants_lane and len(self.lanes) < self.limit:
            id = min(set(range(self.limit)) - set(self.lanes))
            self.lanes[id] = NaiveLane(length)
            tag = TAG_THRESHOLD
        else:
            assert best is not None
            id = best[0]
            if wants_lane:
                tag = TAG_FORCED
        lane = self.lanes[id]
        lane.target = max(lane.target, length)
        lane.outstanding += 1
        lane.touched = now
        return id, lane.target, tag

    def maintain(self, now: float) -> list[int]:
        open_lanes = self.open_lanes()
        idle = [
            id
            for _, id in open_lanes
            if self.lanes[id].outstanding < 4 and now - self.lanes[id].touched >= 5
        ]
        freed = [id for id in idle if self.lanes[id].outstanding == 0]
        if len(idle) == len(open_lanes) and len(self.lanes) - len(freed) >= self.limit:
            idle = idle[:-1]
        for id in idle:
            self.lanes[id].quiescing = True
            if self.lanes[id].outstanding == 0:
                del self.lanes[id]
        return [id for id in idle if id in self.lanes]

    def removed(self, id: int, count: int) -> bool:
        lane = self.lanes[id]
        lane.outstanding -= count
        if lane.quiescing and lane.outstanding == 0:
            del self.lanes[id]
            return True
        return False

    def rows(self) -> list[tuple[int, int, int, bool]]:
        return [
            (id, lane.target, lane.outstanding, lane.quiescing)
            for id, lane in sorted(self.lanes.items())
        ]


# Close together, so that neighbours compete, and far apart, so that lanes open outright.
LENGTHS = st.one_of(
    st.integers(0, 80),
    st.integers(900, 1_100),
    st.integers(0, 20_000),
    st.sampled_from([16, 128, 129, 1_600, TOKENS_MAX]),
)
STEPS = st.lists(
    st.one_of(
        # Short and long messages: the search goes over an array or over a copy of it.
        st.tuples(st.just("assign"), st.lists(LENGTHS, max_size=8)),
        st.tuples(st.just("assign"), st.lists(LENGTHS, min_size=20, max_size=60)),
        # From the longest down, as clients send them: the search goes over runs.
        st.tuples(
            st.just("assign"),
            st.lists(LENGTHS, max_size=60).map(lambda lengths: sorted(lengths, reverse=True)),
        ),
        st.tuples(st.just("remove"), st.tuples(st.integers(0, 30), st.integers(1, 6))),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 1.0, 5.0])),
    ),
    max_size=25,
)


def check_invariants(lanes: Lanes, live_targets: dict[int, int]) -> None:
    rows = lanes.rows()
    ids = [row.id for row in rows]
    assert len(set(ids)) == len(ids) == lanes.lanes_active <= lanes.lanes_limit
    assert all(0 <= id < 65_536 for id in ids)
    assert lanes.threshold == pytest.approx(0.01 + 0.09 * len(ids) / lanes.lanes_limit)
    searched = [id for id in lanes.descending() if not lanes.is_quiescing(id)]
    targets = {row.id: row.target for row in rows}
    ascending = [targets[id] for id in reversed(searched)]
    assert ascending == sorted(set(ascending)), "open targets rise strictly"
    assert sorted(lanes.descending()) == ids
    for id, target in targets.items():
        assert target >= live_targets.get(id, 0), "a target never falls while its lane lives"
    live_targets.clear()
    live_targets.update(targets)


@settings(max_examples=400)
@given(limit=st.one_of(st.integers(1, 7), st.just(50)), steps=STEPS)
def test_every_assignment_matches_the_oracle(limit: int, steps: list[tuple[str, object]]) -> None:
    lanes, naive = Lanes(limit), NaiveLanes(limit)
    live_targets: dict[int, int] = {}
    now, items = 0.0, 0
    for step, value in steps:
        if step == "assign":
            assert isinstance(value, list)
            got = lanes.assign(value, now)
            want = [naive.assign_one(length, now) for length in value]
            assert list(zip(got.lane_ids, got.targets, got.tags, strict=True)) == want
            items += len(value)
        elif step == "remove":
            assert isinstance(value, tuple)
            rows = lanes.rows()
            if not rows:
                continue
            row = rows[value[0] % len(rows)]
            count = min(value[1], row.outstanding)
            freed = lanes.removed(row.id, count)
            assert freed == naive.removed(row.id, count)
            if freed:
                live_targets.pop(row.id)
        else:
            assert isinstance(value, float)
            now += value
            assert lanes.maintain(now) == naive.maintain(now)
            live_targets = {id: t for id, t in live_targets.items() if id in naive.lanes}
        assert lanes.rows() == naive.rows()
        check_invariants(lanes, live_targets)
    assert lanes.opened_total + lanes.reused_total + lanes.forced_total == items


def lanes_with(*targets: int, limit: int = LANES_MAX) -> Lanes:
    lanes = Lanes(limit)
    for id, target in enumerate(targets):
        lanes.restore(id, target, 1, 0.0)
    return lanes


@given(st.lists(LENGTHS, max_size=60), st.integers(1, 9), st.booleans())
def test_runs_are_the_items_of_a_message_in_its_order(
    lengths: list[int], limit: int, descending: bool
) -> None:
    whole, by_runs = Lanes(limit), Lanes(limit)
    for message in (lengths, sorted(lengths, reverse=True) if descending else lengths):
        lane_ids, counts, targets, tags = by_runs.assign_runs(message, 0.0)
        assert whole.assign(message, 0.0) == (
            [lane for lane, n in zip(lane_ids, counts, strict=True) for _ in range(n)],
            [target for target, n in zip(targets, counts, strict=True) for _ in range(n)],
            bytearray(tag for tag, n in zip(tags, counts, strict=True) for _ in range(n)),
        )
        assert whole.rows() == by_runs.rows()


@settings(max_examples=150)
@given(
    st.sampled_from([1, 3, 16, 2_048]),
    st.lists(st.lists(st.one_of(LENGTHS, st.integers(0, 20)), max_size=60), max_size=5),
)
def test_sorted_message_joins_the_lanes_that_its_items_join_alone(
    limit: int, messages: list[list[int]]
) -> None:
    at_once, alone = Lanes(limit), Lanes(limit)
    for message in messages:
        message.sort(reverse=True)
        rows = [alone.assign([length], 0.0) for length in message]
        lane_ids, targets, tags = at_once.assign(message, 0.0)
        assert (lane_ids, targets, list(tags)) == (
            [row.lane_ids[0] for row in rows],
            [row.targets[0] for row in rows],
            [row.tags[0] for row in rows],
        )
        assert at_once.rows() == alone.rows()


def test_descending_message_joins_a_lane_in_one_run() -> None:
    lanes = lanes_with(1_000)
    assert lanes.assign_runs([1_000, 995, 991, 991], 0.0) == ([0], [4], [1_000], b"\0")


def test_of_two_lanes_of_one_target_the_first_takes_what_fits() -> None:
    """After a restart: a lane that was quiescing may come back beside one of its target."""
    for message in ([500, 500, 500], [500, 499, 500]):
        lanes = lanes_with(500, 500)
        (first, *_) = reversed(list(lanes.descending()))
        assert set(lanes.assign(message, 0.0).lane_ids) == {first}


def test_equal_waste_goes_to_the_upper_lane_and_raises_nothing() -> None:
    # (2500 - 2450) / 2500 == (2450 - 2401) / 2450 == 0.02
    lanes = lanes_with(2_401, 2_500, limit=2)
    assert lanes.assign([2_450], 0.0) == ([1], [2_500], bytearray([TAG_THRESHOLD]))
    assert [row.target for row in lanes.rows()] == [2_401, 2_500]


def test_lower_lane_with_less_waste_is_raised_to_the_item() -> None:
    lanes = lanes_with(2_402, 2_500, limit=2)
    assert lanes.assign([2_450], 0.0).lane_ids == [0]
    assert [row.target for row in lanes.rows()] == [2_450, 2_500]


@pytest.mark.parametrize(
    ("target", "length", "opens", "tag"),
    [
        (1_000, 1_000, False, TAG_THRESHOLD),
        (100, 85, False, TAG_FLOOR),
        (100, 84, True, TAG_THRESHOLD),
        # One lane of 100: the threshold is 1.09%, and 109 of 10,000 is not over it.
        (10_000, 9_891, False, TAG_THRESHOLD),
        (10_000, 9_890, True, TAG_THRESHOLD),
        (1_000_000, 999_872, False, TAG_THRESHOLD),
        (1_000_000, 999_871, True, TAG_THRESHOLD),
        (1_000_000, 1_000_129, True, TAG_THRESHOLD),
        (0, 15, False, TAG_FLOOR),
        (0, 16, True, TAG_THRESHOLD),
    ],
)
def test_opening_rule_at_its_edges(target: int, length: int, opens: bool, tag: int) -> None:
    lanes = lanes_with(target, limit=100)
    assigned = lanes.assign([length], 0.0)
    assert (assigned.lane_ids == [1], list(assigned.tags)) == (opens, [tag])


def test_threshold_rises_within_one_message() -> None:
    # At limit 2 the first lane brings 5.5%: 950 of 1,000 joins, where an empty shape's 1% would
    # have opened.
    assert Lanes(2).assign([1_000, 950], 0.0).lane_ids == [0, 0]
    assert Lanes(100).assign([1_000, 950], 0.0).lane_ids == [0, 1]


def test_length_zero_opens_joins_and_does_not_divide_by_zero() -> None:
    lanes = Lanes()
    assert lanes.assign([0, 0, 500, 0], 0.0).lane_ids == [0, 0, 1, 0]
    assert lanes_with(500).assign([0], 0.0).targets == [0]
    assert lanes_with(500, limit=1).assign([0], 0.0) == ([0], [500], bytearray([TAG_FORCED]))


def test_at_the_budget_items_are_forced_into_the_better_lane() -> None:
    lanes = lanes_with(100, 10_000, limit=2)
    assigned = lanes.assign([5_000, 200], 0.0)
    assert assigned.lane_ids == [1, 0]
    assert list(assigned.tags) == [TAG_FORCED, TAG_FORCED]
    assert (lanes.opened_total, lanes.reused_total, lanes.forced_total) == (0, 0, 2)


def test_quiescing_lane_takes_no_items_and_keeps_its_id_until_empty() -> None:
    lanes = Lanes()
    lanes.assign([1_000, 1_000], 0.0)
    assert lanes.maintain(4.9) == []
    assert lanes.maintain(5.0) == [0]
    assert lanes.is_quiescing(0)
    assert lanes.pressure == 1 / LANES_MAX
    assert lanes.assign([1_000], 5.0).lane_ids == [1]
    assert not lanes.removed(0, 1)
    assert lanes.removed(0, 1)
    assert lanes.assign([5_000], 5.0).lane_ids == [0], "the lowest free id comes back first"


def test_idle_lane_with_four_items_stays_open() -> None:
    lanes = Lanes()
    lanes.assign([1_000] * 4, 0.0)
    assert lanes.maintain(100.0) == []
    assert not lanes.removed(0, 1)
    assert lanes.maintain(100.0) == [0]


def test_idle_empty_lane_is_freed_at_once() -> None:
    lanes = Lanes()
    lanes.assign([1_000], 0.0)
    assert not lanes.removed(0, 1), "an open lane may be empty"
    assert lanes.lanes_active == 1
    assert lanes.maintain(5.0) == []
    assert (lanes.lanes_active, lanes.rows()) == (0, [])


def test_last_searchable_lane_does_not_quiesce_at_the_budget() -> None:
    lanes = Lanes(2)
    lanes.assign([100, 5_000], 0.0)
    assert lanes.maintain(5.0) == [0]
    assert lanes.assign([9_000], 5.0) == ([1], [9_000], bytearray([TAG_FORCED]))


def test_one_lane_budget_still_retires_its_empty_lane() -> None:
    lanes = Lanes(1)
    lanes.assign([100], 0.0)
    lanes.removed(0, 1)
    lanes.maintain(5.0)
    assert lanes.assign([9_000], 5.0) == ([0], [9_000], bytearray([TAG_THRESHOLD]))


@pytest.mark.parametrize(("lane", "count"), [(0, 3), (0, -1), (1, 1), (7, 0)])
def test_removing_what_is_not_outstanding_changes_nothing(lane: int, count: int) -> None:
    lanes = Lanes()
    lanes.assign([10, 10], 0.0)
    before = lanes.rows()
    with pytest.raises(InvariantError):
        lanes.removed(lane, count)
    assert lanes.rows() == before


@pytest.mark.parametrize("bad", [-1, TOKENS_MAX + 1])
def test_length_out_of_range_changes_nothing(bad: int) -> None:
    lanes = Lanes()
    with pytest.raises(InvariantError):
        lanes.assign([10, bad], 0.0)
    assert (lanes.rows(), lanes.opened_total) == ([], 0)


def test_restored_lanes_keep_ids_and_are_not_opened_again() -> None:
    lanes = Lanes()
    lanes.restore(3, 1_000, 2, 0.0)
    lanes.restore(1, 1_000, 1, 0.0)
    assert lanes.assign([1_000, 4_000], 1.0).lane_ids == [1, 0]
    assert lanes.opened_total == 1
    with pytest.raises(InvariantError):
        lanes.restore(3, 50, 1, 0.0)
    lanes.restore(65_535, 50, 1, 0.0)
    with pytest.raises(InvariantError):
        lanes.restore(65_536, 50, 1, 0.0)


@pytest.mark.parametrize(("target", "items"), [(-1, 1), (TOKENS_MAX + 1, 1), (50, 0)])
def test_restoring_a_lane_that_cannot_be_changes_nothing(target: int, items: int) -> None:
    lanes = Lanes()
    with pytest.raises(InvariantError):
        lanes.restore(0, target, items, 0.0)
    assert lanes.rows() == []


def test_lowered_budget_after_restart_opens_nothing_until_lanes_retire() -> None:
    lanes = lanes_with(100, 200, 300, limit=2)
    assert lanes.pressure == 1.0
    assert lanes.assign([5_000], 0.0) == ([2], [5_000], bytearray([TAG_FORCED]))
    assert lanes.maintain(5.0) == [0, 1], "the longest stays for what must be forced"
    assert lanes.removed(0, 1) and lanes.removed(1, 1)
    assert lanes.assign([100], 5.0).lane_ids == [0]


def test_descending_order_starts_with_quiescing_lanes() -> None:
    lanes = lanes_with(100, 300, 200)
    lanes.assign([300], 9.0)
    lanes.maintain(9.0)
    assert list(lanes.descending()) == [2, 0, 1]


@pytest.mark.parametrize("limit", [0, 65_537])
def test_limit_beyond_sixteen_bits_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError):
        Lanes(limit)


def full_lanes() -> Lanes:
    lanes = Lanes()
    lanes.assign([129 * n for n in range(LANES_MAX)], 0.0)
    assert lanes.lanes_active == LANES_MAX
    return lanes


def test_thousand_shapes_with_all_lanes_in_use_stay_under_64_mib() -> None:
    full = full_lanes()
    tracemalloc.start()
    try:
        shapes = [copy.deepcopy(full) for _ in range(1_000)]
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(shapes) * LANES_MAX == 2_048_000
    assert used < 64 * 2**20


def test_memory_comes_back_when_ids_are_released() -> None:
    tracemalloc.start()
    try:
        lanes = full_lanes()
        full, _ = tracemalloc.get_traced_memory()
        for row in lanes.rows():
            lanes.removed(row.id, 1)
        lanes.maintain(5.0)
        empty, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lanes.lanes_active == 0
    assert full > 30_000
    assert empty < full / 8
