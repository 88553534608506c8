"""The sweep over lanes, and group packing, against the rules in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zfabric.draining import DrainLimits, LaneDraining
from zfabric.errors import InvariantError
from zfabric.lanes import Lanes
from zfabric.shapes import Contract
from zfabric.sweep import candidates, goes_on_below

CONTRACT = Contract(4, 1_000, 1_000)


def shape(*targets: int, ready: tuple[int, ...] = ()) -> tuple[LaneDraining, Lanes]:
    """Lane k has target `targets[k]` and one ready item of that length, or those of `ready`."""
    lanes, order = Lanes(), LaneDraining(DrainLimits())
    for lane, target in enumerate(targets):
        lanes.restore(lane, target, 1, 0.0)
        if not ready or lane in ready:
            order.added(lane, 1, target, 0.0)
    return order, lanes


def test_sweep_starts_at_the_longest_lane_and_goes_down() -> None:
    order, lanes = shape(100, 300, 200)
    rows, due = candidates(order, lanes, None, 0.0)
    assert (list(rows), due) == ([(1, 300), (2, 200), (0, 100)], False)


def test_sweep_goes_on_where_it_was_and_does_not_wrap_within_a_batch() -> None:
    order, lanes = shape(100, 300, 200)
    assert list(candidates(order, lanes, 300, 0.0).rows) == [(2, 200), (0, 100)]


def test_sweep_begins_again_when_nothing_is_left_below() -> None:
    order, lanes = shape(100, 300, 200, ready=(1, 2))
    assert list(candidates(order, lanes, 200, 0.0).rows) == [(1, 300), (2, 200)]


def test_lanes_without_ready_items_are_passed() -> None:
    order, lanes = shape(100, 300, 200, ready=(0, 1))
    assert list(candidates(order, lanes, None, 0.0).rows) == [(1, 300), (0, 100)]


def test_quiescing_lane_goes_first_and_takes_its_neighbours_below_along() -> None:
    order, lanes = shape(100, 300, 200)
    lanes.assign([100, 300], 9.0)
    assert lanes.maintain(9.0) == [2]
    order.quiesce(2)
    rows, due = candidates(order, lanes, 101, 9.0)
    assert (list(rows), due) == ([(2, 200), (0, 100)], True)


def test_overdue_lane_goes_first() -> None:
    order, lanes = shape(100, 300, 200)
    order.removed(1, 1, 300, 299.0, served=True)
    order.added(1, 1, 300, 299.0)
    rows, due = candidates(order, lanes, 400, 300.0)
    assert (list(rows), due) == ([(0, 100)], True)


def test_nothing_ready_is_refused() -> None:
    order, lanes = shape(100, ready=(7,))
    with pytest.raises(InvariantError):
        candidates(order, lanes, None, 0.0)


@pytest.mark.parametrize(
    ("lanes_taken", "left", "below"),
    [
        (1, (0, 0), 200),
        (2, (0, 0), 200),
        # Neighbours filled the batch: what is left begins the next one.
        (2, (1, 200), 201),
        # A full lane: another full batch is worth it, by places or by tokens; a rest is not.
        (1, (4, 400), 201),
        (1, (3, 801), 201),
        (1, (3, 600), 200),
    ],
)
def test_where_the_sweep_goes_on(lanes_taken: int, left: tuple[int, int], below: int) -> None:
    assert goes_on_below(lanes_taken, 200, left, CONTRACT) == below


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=60), st.integers(1, 30))
def test_every_lane_is_reached_within_one_sweep(lengths: list[int], limit: int) -> None:
    lanes, order = Lanes(limit), LaneDraining(DrainLimits())
    for lane, length in zip(lanes.assign(lengths, 0.0).lane_ids, lengths, strict=True):
        order.added(lane, 1, length, 0.0)
    below: int | None = None
    seen: list[int] = []
    while order.ready_items:
        rows, _ = candidates(order, lanes, below, 0.0)
        lane, target = next(rows)
        seen.append(lane)
        order.removed(lane, *order.ready(lane), 0.0, served=True)
        below = goes_on_below(1, target, (0, 0), CONTRACT)
    assert sorted(seen) == sorted(set(seen)), "one sweep, each lane once"
    targets = [lanes.target(lane) for lane in seen]
    assert targets == sorted(targets, reverse=True)
