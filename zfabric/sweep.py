"""Sweep: decides which lanes of one shape the next batch of group packing takes, in which order.

A sweep goes over the lanes by target, from the longest down, one batch where the last one ended,
and then begins again. What it reaches has had a whole sweep to gather, twice what an average lane
holds, so neighbours fill a batch with the least padding; and nothing is passed over for longer than
one sweep. Targets, lengths and budgets are tokens. This module must never move an item or a sweep:
it says where to go on, and whoever sends the batch remembers it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from zfabric.draining import LaneDraining
from zfabric.errors import InvariantError
from zfabric.lanes import Lanes
from zfabric.packing import fills_batch
from zfabric.shapes import Contract


class Candidates(NamedTuple):
    """Ready lanes for one batch: (id, target), the first of which it must take from."""

    rows: Iterator[tuple[int, int]]
    # Whether the first goes before its turn; then the sweep goes on where it was.
    due: bool


def candidates(order: LaneDraining, lanes: Lanes, below: int | None, now: float) -> Candidates:
    """The ready lanes below the target `below` (None is all), descending; all if none is there.

    A lane that is due (quiescing, or passed over for max_wait) comes before them, and then its
    neighbours below. Raises InvariantError if nothing is ready.
    """
    due, ready = order.due(now), order.ready_lanes
    if due is not None:
        target = lanes.target(due)
        others = (row for row in lanes.below(target + 1, ready) if row[0] != due)
        return Candidates(chain([(due, target)], others), due=True)
    rows = lanes.below(below, ready)
    head = next(rows, None)
    if head is None:
        rows = lanes.below(None, ready)
        head = next(rows, None)
        if head is None:
            raise InvariantError("a batch was asked of a shape of which no lane is ready")
    return Candidates(chain([head], rows), due=False)


def goes_on_below(
    lanes_taken: int, last_target: int, left: tuple[int, int], contract: Contract
) -> int:
    """The target below which the sweep goes on after a batch of so many lanes.

    `left` is (items, tokens) of the last of them. It comes first next time if anything of it is
    left; but what a lane leaves that filled its batch alone is not worth a batch: it waits for the
    next sweep, and for more.
    """
    items, tokens = left
    if items and (lanes_taken > 1 or fills_batch(items, tokens, last_target, contract)):
        return last_target + 1
    return last_target
