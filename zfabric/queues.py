"""Queues: what is ready of one lane, what a look at it saw, and what a batch needs of its items.

Records only; `store` is the owner of every one of them. Lengths are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sortedcontainers import SortedList

from zfabric.segments import Segment
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


@dataclass(slots=True)
class Take:
    """What a peek saw: references and lengths in reading order, the first `returned` given back.

    `solo` says that the only item of the take must have a batch to itself.
    """

    queue: LaneQueue
    refs: list[int]
    lengths: list[int]
    returned: int
    solo: bool = False

    def keep(self, count: int) -> Take:
        """The first `count` items of this take."""
        return Take(
            self.queue,
            self.refs[:count],
            self.lengths[:count],
            min(self.returned, count),
            self.solo,
        )


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
