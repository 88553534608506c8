"""Recovery: what a data directory says after its broker is gone, clean stop or not.

    lock; read the catalog; read every result; scan every segment; complete what has a result

Decides what is an entry, what is damage and what was never finished; the fabric decides what
becomes of each item. Evidence is moved to quarantine/, never deleted; an error of the system
(EIO, EMFILE, ENOSPC) is never taken for damage and stops the start. A directory of a later release
is left untouched.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from zfabric import catalog as catalogs
from zfabric.errors import StorageError
from zfabric.files import (
    CATALOG,
    LOCK,
    OUTBOX,
    QUARANTINE,
    SEGMENTS,
    FileBacking,
    ResultFile,
    SegmentFile,
)
from zfabric.osfiles import OsFiles
from zfabric.outbox import Stored
from zfabric.protocol import BROKER_NUMBERS_FROM
from zfabric.segment import (
    HEADER_BYTES,
    RESULTS,
    Damage,
    Entry,
    Header,
    NewerFormat,
    decode_word,
    read_header,
    scan,
    words_of,
)
from zfabric.segments import TOMBSTONE


@dataclass(slots=True)
class FoundSegment:
    """A segment of items as it was found."""

    file: SegmentFile
    header: Header
    lengths: array[int]
    states: bytearray
    attempts: dict[int, int]
    target: int
    live_bytes: int
    # of each entry: owner and number, for the books of its producer; the gap before it
    owners: array[int]
    numbers: array[int]
    gaps: array[int]


@dataclass(slots=True)
class FoundProducer:
    """A producer as the catalog, the results and the segments tell of it."""

    index: int
    name: str
    upto: int
    above: set[int] = field(default_factory=set)
    acked_seq: int = 0
    results: list[Stored] = field(default_factory=list)


@dataclass(slots=True)
class Recovered:
    """Everything that a new process takes over."""

    producers: dict[int, FoundProducer] = field(default_factory=dict)
    segments: list[FoundSegment] = field(default_factory=list)
    seconds: float = 0.0
    bytes_read: int = 0
    entries: int = 0
    completed_by_result: int = 0
    torn_bytes: int = 0
    damaged: list[Damage] = field(default_factory=list)
    quarantined_files: list[str] = field(default_factory=list)


def open_backing(root: Path, durability: str, files: OsFiles) -> tuple[FileBacking, Recovered]:
    """Open a data directory, or make a new one; what it holds comes back as `Recovered`.

    Raises StorageError where the directory is in use, its catalog cannot be trusted or the system
    fails, NewerFormat where a later release wrote it.
    """
    started = time.monotonic()
    files.make_directory(root)
    lock = files.lock(root / LOCK)
    try:
        known = _read_catalog(files, root)
    except BaseException:
        files.close(lock)
        raise
    backing = FileBacking(files, durability, known, lock)
    scanner = _Scanner(backing, Recovered())
    scanner.read_results()
    scanner.read_segments()
    scanner.settle_numbers()
    backing.rewrite_catalog(segment.header.nonce for segment in scanner.found.segments)
    files.sync_all()
    scanner.found.seconds = time.monotonic() - started
    return backing, scanner.found


def _read_catalog(files: OsFiles, root: Path) -> catalogs.Catalog:
    path = root / CATALOG
    if not path.exists():
        if any((root / SEGMENTS).rglob("*.seg")):
            raise StorageError(f"{path} is missing beside segments; restore it from a copy")
        return catalogs.Catalog(store_id=secrets.randbits(64))
    descriptor = files.open(path)
    try:
        data = files.read(path, descriptor, path.stat().st_size, 0)
    finally:
        files.close(descriptor)
    try:
        known, _ = catalogs.read(data)
    except NewerFormat as error:
        raise NewerFormat(f"{root}: {error}") from None
    if not known.store_id:
        raise StorageError(f"{path} does not begin with its store record; restore it from a copy")
    return known


class _Scanner:
    """Reads files into `found`; complains in quarantine/."""

    def __init__(self, backing: FileBacking, found: Recovered) -> None:
        self._backing = backing
        self._files = backing.files
        self.found = found
        self._answered: set[tuple[int, int]] = set()
        for index, floor in backing.catalog.producers.items():
            found.producers[index] = FoundProducer(index, floor.name, floor.upto)

    # -- files --------------------------------------------------------------------------------

    def _load(self, path: Path) -> tuple[Header, bytes] | None:
        """(header, whole file), None where the file was set aside."""
        descriptor = self._backing.descriptors.get(path)
        data = self._files.read(path, descriptor, path.stat().st_size, 0)
        self.found.bytes_read += len(data)
        if not any(data[:HEADER_BYTES]):
            # Never synced: created, and nothing of it reached the device.
            self._set_aside(path, "empty")
            return None
        try:
            header = read_header(data[:HEADER_BYTES])
        except NewerFormat as error:
            raise NewerFormat(f"{path}: {error}") from None
        except StorageError as error:
            self._set_aside(path, str(error))
            self.found.quarantined_files.append(f"{path.name}: {error}")
            return None
        return header, data

    def _set_aside(self, path: Path, reason: str) -> None:
        quarantine = self._backing.root / QUARANTINE
        self._files.make_directory(quarantine)
        self._backing.descriptors.forget(path)
        self._files.rename(path, quarantine / f"{path.name}.{secrets.token_hex(4)}")

    def _keep_copy(self, path: Path, offset: int, data: bytes) -> None:
        quarantine = self._backing.root / QUARANTINE
        self._files.make_directory(quarantine)
        copy = quarantine / f"{path.name}.{offset}.{secrets.token_hex(4)}"
        descriptor = self._files.open(copy, create=True)
        try:
            self._files.write(copy, descriptor, [data], 0)
        finally:
            self._files.close(descriptor)

    def _entries(self, path: Path, header: Header, data: bytes) -> tuple[list[Entry], int]:
        """(whole entries, where the last of them ends); damage is set aside, a torn end cut off."""
        entries: list[Entry] = []
        end = header.data_offset
        for found in scan(header, data[header.data_offset :]):
            if isinstance(found, Damage):
                self.found.damaged.append(found)
                self._keep_copy(path, found.offset, data[found.offset : found.end])
            else:
                entries.append(found)
                end = found.end
        if len(data) > end:
            self.found.torn_bytes += len(data) - end
            if any(data[end:]):
                self._keep_copy(path, end, data[end:])
            self._files.truncate(path, self._backing.descriptors.get(path), end)
        self.found.entries += len(entries)
        return entries, end

    def _file_of(
        self, path: Path, header: Header, entries: list[Entry], end: int
    ) -> tuple[SegmentFile, int]:
        """(the file, ready to be appended to, how many places it has)."""
        file = SegmentFile(self._backing, path, header)
        places = max((entry.place + 1 for entry in entries), default=0)
        file.offsets.extend(bytes(places))
        file.sizes.extend(bytes(places))
        for entry in entries:
            file.offsets[entry.place] = (entry.offset - header.data_offset) // 8
            file.sizes[entry.place] = entry.size
        file.tail = file.flushed = max(end, header.data_offset)
        return file, places

    # -- results ------------------------------------------------------------------------------

    def read_results(self) -> None:
        """Every result that its producer has not acknowledged."""
        for path in sorted((self._backing.root / OUTBOX).rglob("*.seg")):
            loaded = self._load(path)
            if loaded is None:
                continue
            header, data = loaded
            if header.kind != RESULTS or header.lane not in self.found.producers:
                self._set_aside(path, "of a producer that is not known")
                continue
            self._read_result_file(path, header, data)
        for producer in self.found.producers.values():
            files = self._backing.results.get(producer.index)
            if files:
                ordered = sorted(files, key=lambda kept: kept.first_seq)
                self._backing.results[producer.index] = deque(ordered)

    def _read_result_file(self, path: Path, header: Header, data: bytes) -> None:
        entries, end = self._entries(path, header, data)
        words, _ = words_of(data[HEADER_BYTES : header.data_offset])
        producer = self.found.producers[header.lane]
        floor = self._backing.catalog.producers[header.lane]
        file, places = self._file_of(path, header, entries, end)
        if not entries:
            self._set_aside(path, "no results")
            return
        first = entries[0].when_us - entries[0].place
        kept = ResultFile(file, first, freed=places)
        for entry in entries:
            floor.seq = max(floor.seq, entry.when_us)
            if decode_word(words[entry.place])[0]:
                continue
            kept.freed = min(kept.freed, entry.place)
            start = entry.offset + 56
            payload = data[start : start + entry.size]
            retry = entry.target | entry.gap << 32
            stored = Stored(entry.number, entry.tag, payload, retry or None)
            producer.results.append(stored)
            self._answered.add((header.lane, entry.number))
        self._backing.results.setdefault(header.lane, deque()).append(kept)

    # -- segments -----------------------------------------------------------------------------

    def read_segments(self) -> None:
        """Every segment of items; what has a result is completed."""
        for path in sorted((self._backing.root / SEGMENTS).rglob("*.seg")):
            loaded = self._load(path)
            if loaded is None:
                continue
            header, data = loaded
            if header.nonce in self._backing.catalog.retired:
                self._backing.descriptors.forget(path)
                self._files.unlink(path)
                continue
            if f"{header.nonce:016x}" != path.stem or path.parent.name != str(header.lane):
                self._set_aside(path, "its header does not fit its path")
                self.found.quarantined_files.append(
                    f"{path.name}: its header does not fit its path"
                )
                continue
            segment = self._read_segment(path, header, data)
            if segment is not None:
                self.found.segments.append(segment)
        self.found.segments.sort(key=lambda segment: segment.header.created_s)

    def _read_segment(self, path: Path, header: Header, data: bytes) -> FoundSegment | None:
        entries, end = self._entries(path, header, data)
        words, attempts = words_of(data[HEADER_BYTES : header.data_offset])
        file, places = self._file_of(path, header, entries, end)
        if not places:
            self._set_aside(path, "no entries")
            return None
        found = FoundSegment(
            file,
            header,
            array("I", bytes(4 * places)),
            bytearray([TOMBSTONE]) * places,
            {},
            0,
            0,
            array("I", bytes(4 * places)),
            array("Q", bytes(8 * places)),
            array("I", bytes(4 * places)),
        )
        answered = []
        for entry in entries:
            place = entry.place
            found.lengths[place] = entry.length
            found.owners[place] = entry.owner
            found.numbers[place] = entry.number
            found.gaps[place] = entry.gap
            found.target = max(found.target, entry.target, entry.length)
            if decode_word(words[place])[0]:
                continue
            if (entry.owner, entry.number) in self._answered:
                answered.append(place)
                continue
            found.states[place] = 0
            found.live_bytes += entry.size
            if attempts[place]:
                found.attempts[place] = attempts[place]
        if answered:
            self.found.completed_by_result += len(answered)
            file.write_tombstones(answered)
        return found

    def settle_numbers(self) -> None:
        """How far each producer's numbers are accepted without a hole, and which lie above."""
        seen: dict[int, dict[int, int]] = {}
        for segment in self.found.segments:
            for owner, number, gap in zip(
                segment.owners, segment.numbers, segment.gaps, strict=True
            ):
                if 0 < number < BROKER_NUMBERS_FROM:
                    seen.setdefault(owner, {})[number] = gap
        for index, producer in self.found.producers.items():
            for result in producer.results:
                # A number that was refused for good has a result and no entry.
                if result.number < BROKER_NUMBERS_FROM:
                    seen.setdefault(index, {}).setdefault(result.number, 1)
            for number in sorted(seen.get(index, {})):
                if number <= producer.upto:
                    continue
                if number - seen[index][number] <= producer.upto and not producer.above:
                    producer.upto = number
                else:
                    producer.above.add(number)
            floor = self._backing.catalog.producers[index]
            floor.upto = producer.upto
            producer.acked_seq = floor.seq - len(producer.results)
