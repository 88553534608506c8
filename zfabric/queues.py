"""Queues: what is ready of one lane, what a look at it saw, and what a batch needs of its items.

Records only; `store` is the owner of every one of them. Lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from sortedcontainers import SortedList

from zfabric.segments import ENTRY_BITS, Segment
from zfabric.shapes import Shape


class LaneQueue:
    """What is ready of one lane. `group` is the caller's number for the shape it belongs to."""

    __slots__ = (
        "group", "lane", "longest_known", "mixed", "ready_items", "ready_tokens", "returned",
        "segments", "shape", "signature", "solo",
    )  # fmt: skip

    def __init__(self, shape: Shape, signature: int, group: int, lane: int, *, mixed: bool) -> None:
        self.shape = shape
        self.signature = signature
        self.group = group
        self.lane = lane
        self.mixed = mixed
        # oldest first; a list, since there is mostly one and a deque weighs ten times as much
        self.segments: list[Segment] = []
        self.returned: SortedList[int] | None = None
        self.solo: set[int] | None = None
        self.ready_items = 0
        self.ready_tokens = 0
        # The longest ready item, or None when the last longest left and nobody has asked since.
        self.longest_known: int | None = 0


# (segment, the first of neighbouring entries, the one behind the last)
SegmentRun: TypeAlias = tuple[Segment, int, int]


def refs_of(runs: Iterable[SegmentRun]) -> list[int]:
    """References of the entries of `runs`, in their order."""
    refs: list[int] = []
    for segment, first, stop in runs:
        base = segment.slot << ENTRY_BITS
        refs += range(base + first, base + stop)
    return refs


def items_within(runs: Iterable[SegmentRun], bytes_max: int) -> int:
    """How many entries of `runs`, from the first on, hold so many bytes of payload: at least 1."""
    left, items = bytes_max, 0
    for segment, first, stop in runs:
        size = segment.payload_bytes(first, stop)
        if size > left:
            while (size := segment.payload_bytes(first, first + 1)) <= left:
                left, items, first = left - size, items + 1, first + 1
            return max(1, items)
        left, items = left - size, items + stop - first
    return items


@dataclass(slots=True)
class Take:
    """What a peek saw, in reading order: items that were given back, then runs of entries.

    `lengths` are of all of them. `solo` says that the only item of the take must have a batch to
    itself.
    """

    queue: LaneQueue
    returned: list[int]
    runs: list[SegmentRun]
    lengths: list[int]
    solo: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def refs(self) -> list[int]:
        """A reference of each."""
        return self.returned + refs_of(self.runs)

    def keep(self, count: int) -> Take:
        """The first `count` items of this take."""
        if count == len(self):
            return self
        returned, runs = self.returned[:count], []
        left = count - len(returned)
        for segment, first, stop in self.runs:
            if not left:
                break
            stop = min(stop, first + left)
            runs.append((segment, first, stop))
            left -= stop - first
        return Take(self.queue, returned, runs, self.lengths[:count], self.solo)


@dataclass(slots=True)
class Columns:
    """What a batch needs of its items, in batch order."""

    nonces: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    tags: bytearray = field(default_factory=bytearray)
    shapes: list[int] = field(default_factory=list)
    payloads: list[bytes | memoryview] = field(default_factory=list)


class Known(NamedTuple):
    """What the store knows of a live item."""

    queue: LaneQueue
    producer: int
    number: int
    length: int
    payload: bytes
