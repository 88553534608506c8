"""The backing on disk: segment files, result files, the catalog, and the order they are written in.

Durability is named: `fsync` (a promise is made after the data is on the device) or `os` (after
write(), which survives SIGKILL but not power loss). There is no write-ahead log; a segment is the
durable copy. A commit window is what is written between two syncs; the order on completion is

    window n     the result is written
    end of n     its sync is over: tombstones of items with results in n are written, and what n
                 promised goes out (ACCEPTED, DONE_ACK, RESULT)
    window n+1   segments whose last tombstone has been written are recorded as retired
    end of n+1   their files are unlinked

so that at no point a tombstone is on the device without its result, or a file gone without its
record. In mode `os` a window ends as soon as it is written. Only this module orders writes.
"""

from __future__ import annotations

import secrets
import struct
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import xxhash

from zfabric import catalog as catalogs
from zfabric.errors import StorageError
from zfabric.osfiles import OsFiles, descriptor_limit
from zfabric.outbox import Stored
from zfabric.segment import (
    CAPACITY,
    ITEMS,
    RESULTS,
    TOMBSTONE_WORD,
    Column,
    Header,
    pack_entries,
    pack_header,
    payload_of,
    read_entry,
    word_offset,
)
from zfabric.segments import Append, Row, Segment, Window

if TYPE_CHECKING:
    from zfabric.store import LaneQueue

# Free space is looked at this often, and intake stops under the low-water mark, so that running
# into the end of the disk is the exception. The reserve is given up then: results need room.
SPACE_CHECK_S = 0.25
MIN_FREE_BYTES = 64 * 1024 * 1024
RESERVE_BYTES = 16 * 1024 * 1024
RESERVE = "reserve"
CATALOG, LOCK, SEGMENTS, OUTBOX, QUARANTINE = (
    "catalog.log",
    "lock",
    "segments",
    "outbox",
    "quarantine",
)
# Directory names longer than this are cut and made unique by a digest.
NAME_CHARS_MAX = 180


def encoded(name: str) -> str:
    """A name as one path component: percent-encoded, bounded, never `.` or `..`."""
    safe = quote(name, safe="").replace(".", "%2E")
    if len(safe) <= NAME_CHARS_MAX:
        return safe
    return f"{safe[:NAME_CHARS_MAX]}~{xxhash.xxh3_64_hexdigest(name.encode())}"


class Descriptors:
    """Open descriptors by path, least recently used first out."""

    def __init__(self, files: OsFiles, limit: int) -> None:
        self._files = files
        self._limit = limit
        self._open: OrderedDict[Path, int] = OrderedDict()

    def get(self, path: Path, *, create: bool = False) -> int:
        """A descriptor of `path`."""
        descriptor = self._open.get(path)
        if descriptor is None:
            while len(self._open) >= self._limit:
                self._files.close(self._open.popitem(last=False)[1])
            descriptor = self._open[path] = self._files.open(path, create=create)
        else:
            self._open.move_to_end(path)
        return descriptor

    def forget(self, path: Path) -> None:
        """Close the descriptor of `path`, if there is one."""
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            self._files.close(descriptor)

    def close(self) -> None:
        """Close all."""
        while self._open:
            self._files.close(self._open.popitem()[1])


class SegmentFile:
    """A file of entries: append, read, tombstone. Whole entries only; nothing is ever moved."""

    __slots__ = ("_backing", "_pieces", "flushed", "header", "offsets", "path", "sizes", "tail")

    def __init__(self, backing: FileBacking, path: Path, header: Header) -> None:
        self._backing = backing
        self.path = path
        self.header = header
        # of each entry: where it begins behind the state words, in units of 8 bytes
        self.offsets = array("I")
        self.sizes = array("I")
        self._pieces: list[bytes] = []
        self.tail = header.data_offset
        self.flushed = 0

    def append(self, column: Column) -> None:
        """Take entries; `flush` writes them."""
        pieces, offsets, self.tail = pack_entries(
            self.header.nonce, self.tail, len(self.offsets), column
        )
        self._pieces += pieces
        base = self.header.data_offset
        self.offsets.extend([(offset - base) // 8 for offset in offsets])
        self.sizes.extend(map(len, column.payloads))

    def flush(self) -> None:
        """Write what was taken, and the header before the first of it."""
        if not self._pieces:
            return
        backing = self._backing
        if not self.flushed:
            backing.files.make_directory(self.path.parent)
            descriptor = backing.descriptors.get(self.path, create=True)
            backing.files.write(self.path, descriptor, [pack_header(self.header)], 0)
            self.flushed = self.header.data_offset
        descriptor = backing.descriptors.get(self.path)
        before = self.flushed
        self.flushed = backing.files.write(self.path, descriptor, self._pieces, self.flushed)
        self._pieces = []
        if self.header.kind == ITEMS:
            backing.segment_bytes += self.flushed - before
        backing.dirty = True

    def entry(self, place: int) -> tuple[Any, bytes]:
        """(the entry, its payload). Raises StorageError where it is damaged."""
        offset = self.header.data_offset + 8 * self.offsets[place]
        size = 56 + self.sizes[place]
        descriptor = self._backing.descriptors.get(self.path)
        block = self._backing.files.read(self.path, descriptor, size, offset)
        try:
            entry = read_entry(self.header.nonce, offset, block)
            return entry, payload_of(self.header.nonce, entry, block)
        except StorageError as error:
            raise StorageError(f"{self.path}: entry {place}: {error}") from None

    def write_word(self, place: int, word: int, attempts: int) -> None:
        """Set the state word and the attempts of one entry, in place."""
        descriptor = self._backing.descriptors.get(self.path)
        data = struct.pack("<II", word, attempts)
        self._backing.files.write(self.path, descriptor, [data], word_offset(place))
        self._backing.dirty = True

    def write_tombstones(self, places: list[int]) -> None:
        """Tombstones for `places`, one write for each run of neighbours."""
        descriptor = self._backing.descriptors.get(self.path)
        word = struct.pack("<II", TOMBSTONE_WORD, 0)
        places.sort()
        start = 0
        for k in range(1, len(places) + 1):
            if k == len(places) or places[k] != places[k - 1] + 1:
                data = word * (k - start)
                offset = word_offset(places[start])
                self._backing.files.write(self.path, descriptor, [data], offset)
                start = k
        self._backing.dirty = True


class FileSegment:
    """A lane's segment on disk: cursors here, bytes in its file."""

    __slots__ = (
        "_backing", "boundary", "cursor", "dead_items", "dead_tokens", "deleted", "done_ahead",
        "file", "lengths", "nonce", "queue", "slot", "states", "tokens",
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
        self.boundary = 0
        self.cursor = 0
        self.deleted = 0
        self.done_ahead = 0
        self.tokens = 0
        self.dead_items = 0
        self.dead_tokens = 0

    def extend(self, items: Append, now: float) -> None:
        """See Segment."""
        when_us = int((now + self._backing.wall_offset_s) * 1e6)
        gaps = [min(gap, 2**32 - 1) for gap in items.gaps] or [1] * len(items.lengths)
        self.file.append(
            Column(
                items.lengths,
                items.producer,
                items.numbers,
                when_us,
                items.targets,
                items.tags,
                gaps,
                items.payloads,
            )
        )
        self.lengths.extend(items.lengths)
        self.states.extend(bytes(len(items.lengths)))
        self.tokens += sum(items.lengths)

    def flush(self) -> None:
        """See Segment."""
        self.file.flush()

    def read(self, entry: int) -> Row:
        """See Segment."""
        found, payload = self.file.entry(entry)
        enqueued_s = found.when_us / 1e6 - self._backing.wall_offset_s
        return Row(found.owner, found.number, found.target, found.tag, enqueued_s, payload)

    def enqueued_s(self, entry: int) -> float:
        """See Segment."""
        return self.read(entry).enqueued_s

    def tombstone(self, entry: int, *, dead: bool) -> int:
        """See Segment; written when the result it speaks of is durable."""
        if dead:
            self.dead_items += 1
            self.dead_tokens += self.lengths[entry]
        self._backing.owe_tombstone(self, entry)
        return self.file.sizes[entry]

    def set_attempts(self, entry: int, attempts: int) -> None:
        """See Segment."""
        self.file.write_word(entry, 0, attempts)

    def drop(self) -> None:
        """See Segment."""
        self._backing.owe_retirement(self)


@dataclass(slots=True)
class ResultFile:
    """Results of one producer, in sequence; `first_seq` is that of entry 0."""

    file: SegmentFile
    first_seq: int
    freed: int = 0


class FileBacking:
    """Segments in a directory. Make it with `zfabric.recovery.open_store`."""

    segment_items_max = CAPACITY

    def __init__(
        self, files: OsFiles, durability: str, catalog: catalogs.Catalog, lock: int
    ) -> None:
        self.files = files
        self._lock = lock
        self.root = files.root
        self.durability = durability
        self.catalog = catalog
        self.store_id = catalog.store_id
        self.descriptors = Descriptors(files, descriptor_limit())
        self.wall_offset_s = time.time() - time.monotonic()
        # something was written that no sync has covered
        self.dirty = False
        self._open_window = Window()
        self._log: list[bytes] = []
        self._log_path = files.root / CATALOG
        self._log_end = 0
        self.results: dict[int, deque[ResultFile]] = {}
        self._floors: dict[int, tuple[int, int]] = {}
        self.syncs = 0
        self.min_free_bytes = MIN_FREE_BYTES
        self.max_disk_bytes: int | None = None
        self.segment_bytes = 0
        self._space_checked_s = -SPACE_CHECK_S
        self._no_space: str | None = None
        self._reserved = False

    # -- segments -----------------------------------------------------------------------------

    def make(self, slot: int, nonce: int, queue: LaneQueue) -> Segment:
        """See Backing."""
        header = Header(
            nonce,
            ITEMS,
            queue.shape.model,
            queue.signature,
            queue.lane,
            queue.shape.components,
            queue.shape.tokens,
            created_s=time.time(),
        )
        directory = self.root / SEGMENTS / encoded(queue.shape.model) / f"{queue.signature:016x}"
        path = directory / str(queue.lane) / f"{nonce:016x}.seg"
        return FileSegment(slot, queue, self, SegmentFile(self, path, header))

    def owe_tombstone(self, segment: FileSegment, entry: int) -> None:
        """The item is over; its result is written in this window."""
        owed = self._open_window.tombstones.setdefault(segment.slot, (segment, []))
        owed[1].append(entry)

    def owe_retirement(self, segment: FileSegment) -> None:
        """Every entry of the segment is over."""
        self._open_window.retired.append(segment)

    # -- results ------------------------------------------------------------------------------

    def keep_result(self, owner: int, seq: int, result: Stored) -> None:
        """Write a result of a producer, numbered `seq`."""
        kept = self.results.setdefault(owner, deque())
        if not kept or len(kept[-1].file.offsets) >= CAPACITY:
            nonce = secrets.randbits(64)
            header = Header(nonce, RESULTS, "", 0, owner, created_s=time.time())
            path = self.root / OUTBOX / str(owner) / f"{nonce:016x}.seg"
            kept.append(ResultFile(SegmentFile(self, path, header), seq))
        retry = result.retry_of or 0
        kept[-1].file.append(
            Column(
                (0,),
                owner,
                (result.number,),
                seq,
                (retry & 0xFFFF_FFFF,),
                (int(result.status),),
                (retry >> 32,),
                (result.payload,),
            )
        )

    def free_results(self, owner: int, upto: int, last: int) -> None:
        """The producer has its results up to sequence number `upto` of `last`; see Backing."""
        for kept in self.results.get(owner, ()):
            count = len(kept.file.offsets)
            stop = min(upto - kept.first_seq + 1, count)
            if stop > kept.freed:
                self._open_window.freed.append((kept, list(range(kept.freed, stop))))
                kept.freed = stop
        files = self.results.get(owner)
        while (
            files
            and files[0].freed == len(files[0].file.offsets)
            and (len(files) > 1 or upto >= last)
        ):
            self._open_window.finished.append(files.popleft())

    # -- catalog ------------------------------------------------------------------------------

    def record(self, **fields: Any) -> None:
        """Add a record to the catalog, in this window."""
        self.catalog.take(fields)
        self._log.append(catalogs.pack(fields))

    def rewrite_catalog(self, nonces: Iterable[int]) -> None:
        """Replace the log by one that says the same in few records. Not while a window is open."""
        fresh = self._log_path.with_suffix(".new")
        self.descriptors.forget(self._log_path)
        self.files.unlink(fresh)
        descriptor = self.files.open(fresh, create=True)
        records = self.catalog.records(nonces)
        try:
            pieces = [catalogs.pack(record) for record in records]
            self._log_end = self.files.write(fresh, descriptor, pieces, 0)
        finally:
            self.files.close(descriptor)
        self.files.sync_all()
        self.files.rename(fresh, self._log_path)
        self.files.sync_all()

    # -- room ---------------------------------------------------------------------------------

    def full(self, now: float) -> str | None:
        """See Backing: under the low-water mark, or over what this store may use."""
        if now >= self._space_checked_s + SPACE_CHECK_S:
            self._space_checked_s = now
            free = self.files.free_bytes()
            self._no_space = None
            if free < self.min_free_bytes:
                self._no_space = f"{free} bytes are free, {self.min_free_bytes} are kept back"
                self._give_up_reserve()
            elif self.max_disk_bytes is not None and self.disk_bytes() >= self.max_disk_bytes:
                self._no_space = f"the store uses the {self.max_disk_bytes} bytes that it may"
            else:
                self._take_reserve()
        return self._no_space

    def _reserve_path(self) -> Path:
        return self.root / RESERVE

    def _take_reserve(self) -> None:
        """Keep room for results on a disk that others may fill."""
        if not self._reserved:
            self.files.reserve(self._reserve_path(), RESERVE_BYTES)
            self._reserved = True

    def _give_up_reserve(self) -> None:
        if self._reserved:
            self.files.unlink(self._reserve_path())
            self._reserved = False

    def disk_bytes(self) -> int:
        """Bytes of all segment and result files, as far as they were written."""
        return self.segment_bytes + sum(
            kept.file.flushed for files in self.results.values() for kept in files
        )

    # -- windows ------------------------------------------------------------------------------

    def write(self) -> None:
        """Write everything of this window that is not written yet: results, then records."""
        for files in self.results.values():
            if files:
                files[-1].file.flush()
        if self._log:
            descriptor = self.descriptors.get(self._log_path)
            end = self.files.write(self._log_path, descriptor, self._log, self._log_end)
            self._log_end = end
            self._log = []
            self.dirty = True

    @property
    def has_work(self) -> bool:
        """Whether a window would do anything."""
        window = self._open_window
        return bool(
            self.dirty
            or self._log
            or window.tombstones
            or window.freed
            or window.retired
            or window.finished
            or window.unlink
        )

    def begin(self, floors: dict[int, tuple[int, int]]) -> Window:
        """Close the window: it is written, and what it owes is due when its sync is over."""
        self.write()
        window, self._open_window = self._open_window, Window()
        window.floors = floors
        self.dirty = False
        return window

    def end(self, window: Window) -> None:
        """The window's sync is over: its results are durable, so its tombstones may be written."""
        for path in window.unlink:
            self.descriptors.forget(path)
            self.files.unlink(path)
            self.files.remove_empty(path.parent)
            self.files.remove_empty(path.parent.parent)
        for segment, places in window.tombstones.values():
            segment.file.write_tombstones(places)
        for kept, places in window.freed:
            kept.file.write_tombstones(places)
        following = self._open_window
        self._floors.update(window.floors)
        if window.retired or window.finished:
            # A file may only go when the catalog says what its entries had shown.
            for owner, (upto, seq) in self._floors.items():
                self.record(t="floor", i=owner, upto=upto, seq=seq)
            self._floors.clear()
        for segment in window.retired:
            self.record(
                t="retired",
                nonce=segment.nonce,
                items=len(segment.states) - segment.dead_items,
                tokens=segment.tokens - segment.dead_tokens,
                dead_items=segment.dead_items,
                dead_tokens=segment.dead_tokens,
            )
            following.unlink.append(segment.file.path)
            self.segment_bytes -= segment.file.flushed - segment.file.header.data_offset
        following.unlink += [kept.file.path for kept in window.finished]
        self.syncs += 1

    def sync(self) -> None:
        """Bring all that is written to the device. Runs in another thread; touches no state."""
        self.files.sync_all()

    def close(self) -> None:
        """Close every descriptor; the directory may have another broker then."""
        self.descriptors.close()
        self.files.close(self._lock)
