"""Pins: segments that a few live items keep on the disk, and what of them may be given back.

A file goes when its last item ends; until then nothing is moved, since references hold. Where the
items that remain stay for long, the bytes of their dead neighbours are given back as holes. Sizes
are bytes, times seconds. It decides which runs of entries go; `files` says when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from zfabric.segments import TOMBSTONE

if TYPE_CHECKING:
    from zfabric.filesegment import FileSegment

# A segment is looked at this often, and left alone when it is seen for the first time: most that
# have begun to end are gone soon.
PIN_CHECK_S = 30.0
# A hole is a system call and a record in the catalog; less than this is not worth them.
HOLE_MIN_BYTES = 1024 * 1024
# Segments looked at in one turn, 1 to 2 ms each where they are full.
SEGMENTS_A_TURN = 16


class Hole(NamedTuple):
    """Neighbouring entries of a file that are over: places, and offsets behind the state words."""

    first: int
    stop: int
    begin: int
    end: int


class Pins:
    """Segments of which some items have ended and some have not."""

    def __init__(self) -> None:
        self._partly: dict[int, FileSegment] = {}
        self._seen: set[int] = set()
        # those that are still to be looked at in this round
        self._round: list[int] = []
        self._next_s = 0.0

    def ended(self, segment: FileSegment) -> None:
        """An item of the segment ended."""
        self._partly[segment.nonce] = segment

    def gone(self, segment: FileSegment) -> None:
        """All items of the segment have ended."""
        self._partly.pop(segment.nonce, None)
        self._seen.discard(segment.nonce)

    def due(self, now: float) -> list[tuple[FileSegment, list[Hole]]]:
        """Holes that are worth making, of segments that were here at the last look already.

        A look at all of them takes as many calls as it needs.
        """
        if not self._round and now >= self._next_s:
            self._next_s = now + PIN_CHECK_S
            self._round = [nonce for nonce in self._partly if nonce in self._seen]
            self._seen = set(self._partly)
        chosen = []
        for nonce in self._round[-SEGMENTS_A_TURN:]:
            segment = self._partly.get(nonce)
            if segment is not None:
                holes = [h for h in holes_of(segment) if h.end - h.begin >= HOLE_MIN_BYTES]
                if holes:
                    chosen.append((segment, holes))
        del self._round[-SEGMENTS_A_TURN:]
        return chosen


def around(holes: Iterable[Hole], base: int) -> list[tuple[int, int | None]]:
    """What lies between holes: (start, stop) behind `base`, stop None for the end of the file."""
    starts, stops = [0], []
    for hole in sorted(holes):
        stops.append(hole.begin - base)
        starts.append(hole.end - base)
    return list(zip(starts, [*stops, None], strict=True))


def holes_of(segment: FileSegment) -> Iterator[Hole]:
    """Runs of entries that are over, stored, and not holes yet; a place that was lost ends one."""
    file, states = segment.file, segment.states
    holes = iter(sorted(segment.holes or ()))
    hole = next(holes, None)
    first: int | None = None
    for place in range(len(states) + 1):
        while hole is not None and hole.stop <= place:
            hole = next(holes, None)
        over = (
            place < len(states)
            and states[place] == TOMBSTONE
            and (file.offsets[place] or not place)
            and not (hole is not None and hole.first <= place)
        )
        if over and first is None:
            first = place
        elif not over and first is not None:
            begin, end = file.begin_of(first), file.end_of(place - 1)
            yield Hole(first, place, begin, end)
            first = None
