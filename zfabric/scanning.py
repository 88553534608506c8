"""Scanning: what one file holds, read and judged by itself. Changes nothing on disk.

Columns are by place; a number of 0 is a place without a whole entry. Whether bytes that are no
entry were torn by a crash or damaged later is for `recovery` to say, which sees all files. Errors
of the system are raised as they are; they say nothing about the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from zfabric.entries import ENTRY_HEADER_BYTES, Damage, Entry, aligned, scan
from zfabric.errors import ConfigError, StorageError
from zfabric.outbox import Stored
from zfabric.pins import Hole, around
from zfabric.protocol import NUMBER_MAX
from zfabric.segment import (
    HEADER_BYTES,
    ITEMS,
    LIVE_WORD,
    RESULTS,
    TOMBSTONE_WORD,
    Header,
    NewerFormat,
    decode_word,
    is_whole,
    read_header,
    words_of,
)
from zfabric.shapes import Shape

_NOTHING = Entry(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class Scanned:
    """One file as it was found."""

    path: Path
    header: Header
    size: int
    # a header copy that is not as it should be
    header_damaged: bool
    # behind the last whole entry
    end: int = 0
    # of every place of the file, entry or not; decoded
    words: array[int] = field(default_factory=lambda: array("I"))
    attempts: array[int] = field(default_factory=lambda: array("I"))
    # places whose state word was damaged
    healed: list[int] = field(default_factory=list)
    lengths: array[int] = field(default_factory=lambda: array("I"))
    owners: array[int] = field(default_factory=lambda: array("I"))
    numbers: array[int] = field(default_factory=lambda: array("Q"))
    gaps: array[int] = field(default_factory=lambda: array("Q"))
    windows: array[int] = field(default_factory=lambda: array("Q"))
    # as SegmentFile keeps them
    offsets: array[int] = field(default_factory=lambda: array("I"))
    sizes: array[int] = field(default_factory=lambda: array("I"))
    target: int = 0
    damages: list[Damage] = field(default_factory=list)
    # entries whose bytes were given back, and what the catalog says of them: word, items, tokens
    holes: list[Hole] = field(default_factory=list)
    ended: list[tuple[int, int, int]] = field(default_factory=list)
    # of a file of results: those that are not freed, by place; the first one's sequence number
    results: dict[int, Stored] = field(default_factory=dict)
    first_seq: int | None = None
    # what recovery decided: words to write, bytes to keep a copy of, and what becomes of the file
    marks: dict[int, int] = field(default_factory=dict)
    evidence: list[tuple[int, int]] = field(default_factory=list)
    set_aside: bool = False
    remove: bool = False

    @property
    def places(self) -> int:
        """How many entries the file has, whole or not."""
        return len(self.numbers)

    def put(self, entry: Entry) -> None:
        """Enter what an entry says at its place, and nothing for places that were left out."""
        place = entry.place
        if place == len(self.numbers):
            self.lengths.append(entry.length)
            self.owners.append(entry.owner)
            self.numbers.append(entry.number)
            self.gaps.append(entry.gap)
            self.windows.append(entry.window)
            self.offsets.append((entry.offset - self.header.data_offset) // 8)
            self.sizes.append(entry.size)
            self._seen(entry)
            return
        while len(self.numbers) <= place:
            for column in (self.lengths, self.owners, self.offsets, self.sizes):
                column.append(0)
            for wide in (self.numbers, self.gaps, self.windows):
                wide.append(0)
        self.lengths[place], self.owners[place] = entry.length, entry.owner
        self.numbers[place], self.gaps[place] = entry.number, entry.gap
        self.windows[place] = entry.window
        self.offsets[place] = (entry.offset - self.header.data_offset) // 8
        self.sizes[place] = entry.size
        self._seen(entry)

    def _seen(self, entry: Entry) -> None:
        self.target = max(self.target, entry.target, entry.length)
        if self.header.kind == RESULTS and self.first_seq is None:
            self.first_seq = entry.when_us - entry.place

    def skip(self, hole: Hole) -> None:
        """Entries whose bytes are gone, all of them over."""
        for place in range(hole.first, hole.stop):
            self.put(_NOTHING._replace(offset=hole.begin, place=place))
            if self.words[place] == LIVE_WORD:
                self.words[place] = self.marks[place] = TOMBSTONE_WORD
        self.holes.append(hole)
        self.end = hole.end

    def is_hole(self, place: int) -> bool:
        """Whether the bytes of an entry were given back."""
        return bool(self.holes) and any(h.first <= place < h.stop for h in self.holes)

    def blank(self, place: int) -> None:
        """The place holds nothing that was ever accepted."""
        self.lengths[place] = self.owners[place] = self.numbers[place] = 0

    def cut(self, places: int) -> None:
        """Forget every entry from this place on."""
        for column in (self.lengths, self.owners, self.offsets, self.sizes):
            del column[places:]
        for wide in (self.numbers, self.gaps, self.windows):
            del wide[places:]
        self.results = {place: kept for place, kept in self.results.items() if place < places}
        ends = [
            aligned(8 * self.offsets[place] + ENTRY_HEADER_BYTES + self.sizes[place])
            for place in range(places)
            if self.numbers[place]
        ]
        self.end = self.header.data_offset + max(ends, default=0)


def scan_file(
    path: Path,
    kind: str,
    data: bytes,
    path_of: Callable[[Header], Path],
    holes_of: Callable[[int], Iterable[Mapping[str, Any]]] = lambda nonce: (),
) -> Scanned:
    """What the bytes of the file at `path` say; `holes_of` has the catalog's records of holes.

    Raises NewerFormat for a later release's file, StorageError where it is not one of this store.
    """
    if not any(data[:HEADER_BYTES]):
        # Created, and nothing of it reached the device; or wiped.
        raise StorageError("empty")
    try:
        header = read_header(data[:HEADER_BYTES])
    except NewerFormat as error:
        raise NewerFormat(f"{path}: {error}") from None
    _check_place(path, kind, header, path_of)
    found = Scanned(path, header, len(data), not is_whole(data[:HEADER_BYTES], header))
    _read_words(found, data)
    records = holes_of(header.nonce)
    found.ended = [(w, items, tokens) for r in records for w, items, tokens in r["ended"]]
    found.end = base = header.data_offset
    holes = sorted(Hole(*r["hole"]) for r in records)
    entries = data[base:]
    for (start, stop), hole in zip_longest(around(holes, base), holes):
        _read_entries(found, entries, start, stop)
        if hole is not None:
            found.skip(hole)
    return found


def _check_place(path: Path, kind: str, header: Header, path_of: Callable[[Header], Path]) -> None:
    if header.kind != kind or path_of(header) != path:
        raise StorageError("its header does not fit its path")
    if kind == ITEMS:
        try:
            shape = Shape(header.model, header.components, header.tokens)
        except ConfigError as error:
            raise StorageError(f"its shape is impossible: {error}") from None
        if shape.signature != header.signature:
            raise StorageError("its components do not have its signature")


def _read_words(found: Scanned, data: bytes) -> None:
    capacity = found.header.capacity
    found.words, found.attempts = words_of(data[HEADER_BYTES : found.header.data_offset])
    missing = capacity - len(found.words)
    found.words.extend([LIVE_WORD] * missing)
    found.attempts.extend([0] * missing)
    if any(found.words):
        for place, word in enumerate(found.words):
            if word != LIVE_WORD:
                found.words[place], damaged = decode_word(word)
                if damaged:
                    found.healed.append(place)


def _read_entries(found: Scanned, data: bytes, start: int, stop: int | None = None) -> None:
    """Enter what lies between two places of a file's data part."""
    header = found.header
    of_results = header.kind == RESULTS
    for entry in scan(header, data, start=start, stop=stop):
        if isinstance(entry, Damage):
            found.damages.append(entry)
            continue
        if entry.place < found.places or not entry.number:
            reason = "its index is taken" if entry.number else "it has no number"
            found.damages.append(Damage(entry.offset, entry.end, reason, None))
            continue
        found.put(entry)
        found.end = entry.end
        if of_results and found.words[entry.place] == LIVE_WORD:
            begin = entry.offset - header.data_offset + ENTRY_HEADER_BYTES
            payload = data[begin : begin + entry.size]
            # What a requeued item retries rests where others have their gap.
            retry = entry.gap if entry.number > NUMBER_MAX else None
            gap = 0 if retry is not None else entry.gap
            found.results[entry.place] = Stored(entry.number, entry.tag, payload, retry, gap)
