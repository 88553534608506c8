"""A lane's segment on disk: lengths, states and cursors in memory, everything else in its file.

Lengths are tokens, times seconds on the caller's monotonic clock. Decides nothing; `files` says
when what it owes is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zfabric.entries import WHEN, Fresh, Run
from zfabric.entryfiles import SegmentFile
from zfabric.pins import Hole
from zfabric.segment import DEAD_WORD
from zfabric.segments import Row

if TYPE_CHECKING:
    from zfabric.files import FileBacking
    from zfabric.queues import LaneQueue


class FileSegment:
    """A lane's segment on disk: cursors here, bytes in its file."""

    __slots__ = (
        "_backing",
        "_oldest",
        "counts",
        "cursor",
        "deleted",
        "done_ahead",
        "file",
        "hole_tokens",
        "holes",
        "lengths",
        "nonce",
        "queue",
        "slot",
        "states",
    )  # fmt: skip

    def __init__(
        self, slot: int, queue: LaneQueue, backing: FileBacking, file: SegmentFile
    ) -> None:
        self.slot = slot
        self.nonce = file.header.nonce
        self.queue = queue
        self.file = file
        self._backing = backing
        self.lengths = array("I")
        self.states = bytearray()
        self.cursor = 0
        self.deleted = 0
        self.done_ahead = 0
        # (entry, when it was appended), of the one that was asked for last or is waited for first
        self._oldest: tuple[int, float] | None = None
        # (items, tokens) that ended other than completed, by state word
        self.counts: dict[int, tuple[int, int]] | None = None
        # runs of entries whose bytes were given back
        self.holes: list[Hole] | None = None
        # of entries whose bytes, and lengths, were gone when the file was found
        self.hole_tokens = 0

    def extend(self, lengths: Sequence[int], rows: Sequence[Fresh]) -> tuple[int, int]:
        """See Segment."""
        stored = self.file.append(rows)
        if self.cursor == len(self.states):
            self._oldest = self.cursor, rows[0][WHEN] / 1e6 - self._backing.wall_offset_s
        self.lengths.extend(lengths)
        self.states.extend(bytes(len(lengths)))
        return stored

    @property
    def is_large(self) -> bool:
        """See Segment."""
        return self.file.is_large

    def read(self, entry: int) -> Row:
        """See Segment."""
        found, payload = self.file.entry(entry)
        enqueued_s = found.when_us / 1e6 - self._backing.wall_offset_s
        return Row(found.owner, found.number, found.target, found.tag, enqueued_s, payload)

    def run(self, first: int, stop: int) -> Run:
        """See Segment."""
        return self.file.run(first, stop)

    def payload_bytes(self, first: int, stop: int) -> int:
        """See Segment."""
        return self.file.payload_bytes(first, stop)

    def enqueued_s(self, entry: int) -> float | None:
        """See Segment."""
        if self._oldest is None or self._oldest[0] != entry:
            head = self.file.head(entry)
            if head is None:
                # Whoever hands it out finds the damage; a look at its age is no reason to stop.
                return None
            self._oldest = entry, head.when_us / 1e6 - self._backing.wall_offset_s
        return self._oldest[1]

    def tombstone(self, first: int, stop: int, *, dead: bool) -> int:
        """See Segment; written when the results it speaks of are durable."""
        self._backing.pins.ended(self)
        if dead:
            for entry in range(first, stop):
                self.count(DEAD_WORD, self.lengths[entry])
                self._backing.owe_word(self.file, entry, DEAD_WORD)
        else:
            self._backing.owe_tombstones(self.file, range(first, stop))
        return self.payload_bytes(first, stop)

    def count(self, word: int, tokens: int) -> None:
        """An entry ended, and not completed."""
        if self.counts is None:
            self.counts = {}
        items, before = self.counts.get(word, (0, 0))
        self.counts[word] = (items + 1, before + tokens)

    def set_attempts(self, entry: int, attempts: int) -> None:
        """See Segment."""
        self._backing.set_attempts(self, entry, attempts)

    def drop(self) -> None:
        """See Segment."""
        self._backing.pins.gone(self)
        self._backing.owe_retirement(self)
