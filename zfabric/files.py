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
record. Entries carry the number of their window, by which recovery tells what was safe from what
was not (see `segment`). In mode `os` a window ends as soon as it is written; as nothing is known to
be on the device then, the number stays. Only this module orders writes.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import xxhash

from zfabric import catalog as catalogs
from zfabric.cataloglog import CatalogLog
from zfabric.diskroom import DiskRoom
from zfabric.entries import Fresh
from zfabric.entryfiles import Descriptors, SegmentFile
from zfabric.errors import NoSpace
from zfabric.filesegment import FileSegment
from zfabric.osfiles import OsFiles, descriptor_limit
from zfabric.outbox import Stored
from zfabric.pins import Hole, Pins
from zfabric.protocol import BROKER_NUMBERS_FROM, NUMBER_MAX
from zfabric.segment import CAPACITY, DEAD_WORD, ITEMS, QUARANTINED_WORD, RESULTS, Header
from zfabric.segments import LIVE, Segment, Window

if TYPE_CHECKING:
    from zfabric.queues import LaneQueue

LOCK, SEGMENTS, OUTBOX, QUARANTINE = "lock", "segments", "outbox", "quarantine"
# Empty directories are looked for this often, so many at a time, some 50 us each.
SWEEP_S, SWEPT_MAX = 5.0, 1_000
# Windows of an orderly end: results, their tombstones, the records of files, their end; and some.
SEALING_WINDOWS_MAX = 8
# Directory names longer than this are cut and made unique by a digest.
NAME_CHARS_MAX = 180


@functools.lru_cache(maxsize=4_096)
def encoded(name: str) -> str:
    """A name as one path component: percent-encoded, bounded, never `.` or `..`."""
    safe = quote(name, safe="").replace(".", "%2E")
    if len(safe) <= NAME_CHARS_MAX:
        return safe
    return f"{safe[:NAME_CHARS_MAX]}~{xxhash.xxh3_64_hexdigest(name.encode())}"


def place_of(header: Header) -> str:
    """Where in a data directory the file with this header belongs."""
    place = f"{header.lane}/{header.nonce:016x}.seg"
    if header.kind == RESULTS:
        return f"{OUTBOX}/{place}"
    return f"{SEGMENTS}/{encoded(header.model)}/{header.signature:016x}/{place}"


@dataclass(slots=True)
class ResultFile:
    """Results of one producer, in sequence; `first_seq` is that of entry 0."""

    file: SegmentFile
    first_seq: int
    freed: int = 0
    # those that are not written yet
    fresh: list[Fresh] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.file.offsets) + len(self.fresh)

    @property
    def room(self) -> int:
        """How many more results it takes."""
        return 0 if self.file.is_large else self.file.header.capacity - len(self)


class FileBacking:
    """Segments in a directory. Make it with `zfabric.recovery.open_store`."""

    # entries of a new file, of items or of results
    segment_items_max = CAPACITY

    def __init__(
        self, files: OsFiles, durability: str, catalog: catalogs.Catalog, lock: int
    ) -> None:
        self.files = files
        self._lock: int | None = lock
        self.root = files.root
        self.durability = durability
        self.catalog = catalog
        self.store_id = catalog.store_id
        self.descriptors = Descriptors(files, descriptor_limit())
        self.wall_offset_s = time.time() - time.monotonic()
        # something was written that no sync has covered
        self.dirty = False
        self._open_window = Window()
        # what partial windows may not do, for the next whole one
        self._put_off = Window()
        self.log = CatalogLog(files, self.descriptors, catalog)
        # records that are not written yet
        self._records: list[bytes] = []
        self.results: dict[int, deque[ResultFile]] = {}
        # those of them, by nonce, of which not all is written yet
        self._unwritten: dict[int, ResultFile] = {}
        # the number of the open window
        self.window = catalog.window
        # floors that are durable and not in the catalog yet; those that wait for their window
        self._floors: dict[int, tuple[int, int]] = {}
        self._owed_floors: dict[int, tuple[int, int]] = {}
        self.syncs = 0
        # files of items that have been written, and their bytes
        self.segment_files = 0
        self.segment_bytes = 0
        # directories that a file was removed from; mostly the lane's next file is soon in there
        self.left: dict[Path, None] = {}
        self._next_sweep_s = 0.0
        self.room = DiskRoom(files)
        self.pins = Pins()
        # attempts that a full disk did not take yet, by (nonce, entry): the segment and how many
        self._charged: dict[tuple[int, int], tuple[FileSegment, int]] = {}

    # -- segments -----------------------------------------------------------------------------

    def make(self, slot: int, nonce: int, queue: LaneQueue) -> Segment:
        """See Backing."""
        shape = queue.shape
        header = Header(
            nonce, ITEMS, shape.model, queue.signature, queue.lane, shape.components, shape.tokens,
            self.segment_items_max, time.time(),
        )  # fmt: skip
        return FileSegment(slot, queue, self, SegmentFile(self, header))

    def stamp_us(self, now: float) -> int:
        """See Backing."""
        return max(0, int((now + self.wall_offset_s) * 1e6))

    def path_of(self, header: Header) -> Path:
        """Where the file with this header belongs."""
        return self.root / place_of(header)

    def owe_tombstones(self, file: SegmentFile, places: Iterable[int]) -> None:
        """The items are completed; their results are written in this window."""
        owed = self._open_window.tombstones.setdefault(file.header.nonce, (file, []))
        owed[1].extend(places)

    def owe_word(self, file: SegmentFile, place: int, word: int) -> None:
        """The item ended otherwise; what says so is written in this window."""
        self._open_window.words.append((file, place, word))

    def set_attempts(self, segment: FileSegment, entry: int, attempts: int) -> None:
        """Write how often a live entry was charged: now, or as soon as the disk has room for it."""
        self._charged[segment.nonce, entry] = segment, attempts
        self._write_attempts()

    def _write_attempts(self) -> None:
        with contextlib.suppress(NoSpace):
            for key, (segment, attempts) in list(self._charged.items()):
                # What has ended meanwhile has another word.
                if segment.states[key[1]] == LIVE:
                    segment.file.write_word(key[1], 0, attempts)
                del self._charged[key]

    def owe_retirement(self, segment: FileSegment) -> None:
        """Every entry of the segment is over."""
        self._open_window.retired.append(segment)

    # -- results ------------------------------------------------------------------------------

    def keep_results(self, owner: int, seq: int, results: Sequence[Stored]) -> None:
        """See Backing."""
        files = self.results.setdefault(owner, deque())
        # Entries of a file are in sequence; damage at a file's end may have cost some.
        following = files[-1].first_seq + len(files[-1]) if files else None
        rows = [
            (0, owner, number, gap if retry_of is None else retry_of, n, 0, status, payload)
            for n, (number, status, payload, retry_of, gap) in enumerate(results, seq)
        ]
        while rows:
            if seq != following or files[-1].room <= 0:
                capacity, nonce = self.segment_items_max, secrets.randbits(64)
                header = Header(nonce, RESULTS, "", 0, owner, (), (), capacity, time.time())
                files.append(ResultFile(SegmentFile(self, header), seq))
            last = files[-1]
            room = last.room
            last.fresh += rows[:room]
            self._unwritten[last.file.header.nonce] = last
            del rows[:room]
            seq = following = last.first_seq + len(last)

    def free_results(self, owner: int, upto: int, last: int) -> None:
        """The producer has its results up to sequence number `upto` of `last`; see Backing."""
        for kept in self.results.get(owner, ()):
            stop = min(upto - kept.first_seq + 1, len(kept))
            if stop > kept.freed:
                self._open_window.freed.append((kept, list(range(kept.freed, stop))))
                kept.freed = stop
        files = self.results.get(owner)
        while files and files[0].freed == len(files[0]) and (len(files) > 1 or upto >= last):
            self._open_window.finished.append(files.popleft())

    # -- catalog ------------------------------------------------------------------------------

    def record(self, **fields: Any) -> None:
        """Add a record to the catalog, in this window."""
        if fields["t"] == "dead":
            # Until this window is over, recovery doubts it: the result may be torn.
            fields["window"] = self.window
        if fields["t"] == "forget":
            self._open_window.finished += self.results.pop(fields["i"], ())
        self.catalog.take(fields)
        self._records.append(catalogs.pack(fields))

    def record_later(self, **fields: Any) -> None:
        """Add a record to the catalog when this window, and all that waits, is durable."""
        self.catalog.take(fields)
        self._open_window.later.append(fields)

    # -- room ---------------------------------------------------------------------------------

    def full(self, now: float) -> str | None:
        """See Backing."""
        return self.room.refusal(now, self.disk_bytes)

    def count_file(self, segment: FileSegment, sign: int = 1) -> None:
        """The file of a segment is there, or with -1 gone."""
        if segment.file.end:
            holes = sum(hole.end - hole.begin for hole in segment.holes or ())
            self.segment_files += sign
            self.segment_bytes += sign * (segment.file.end - holes)

    def disk_bytes(self) -> int:
        """Bytes of all segment and result files, as far as they were written."""
        return self.segment_bytes + sum(
            kept.file.end for files in self.results.values() for kept in files
        )

    def usage(self) -> dict[str, Any] | None:
        """See Backing."""
        return {
            "disk_bytes": self.disk_bytes(),
            "disk_bytes_limit": self.room.max_disk_bytes,
            "disk_reserve_bytes": self.room.reserve_bytes,
            "disk_min_free_bytes": self.room.min_free_bytes,
            "segment_files": self.segment_files,
            "segment_bytes": self.segment_bytes,
        }

    def upkeep(self, now: float) -> None:
        """See Backing."""
        self.log.upkeep()
        self._open_window.holes += self.pins.due(now)
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + SWEEP_S
            self._sweep(SWEPT_MAX)

    def _sweep(self, directories_max: int) -> None:
        """Remove directories that are still empty, at most so many."""
        for directory in list(islice(self.left, directories_max)):
            del self.left[directory]
            self.files.remove_empty(directory)
            self.files.remove_empty(directory.parent)

    # -- windows ------------------------------------------------------------------------------

    def write(self) -> None:
        """Write everything of this window that is not written yet: results, then records."""
        for nonce, kept in list(self._unwritten.items()):
            kept.file.append(kept.fresh)
            kept.fresh = []
            del self._unwritten[nonce]
        if self._records:
            mark = [catalogs.pack_window(self.window)] if self.durability == "fsync" else []
            self.log.append(mark + self._records)
            self._records, self.dirty = [], True

    @property
    def has_work(self) -> bool:
        """Whether a window would do anything."""
        return bool(self.dirty or self._records or self._open_window.owes or self._unwritten)

    def begin(self, floors: dict[int, tuple[int, int]], *, partial: bool = False) -> Window:
        """Close the window: it is written, and what it owes is due when its sync is over.

        See Backing. Raises NoSpace where it cannot be written; it is still open then.
        """
        self._owed_floors.update(floors)
        self.write()
        if not partial:
            self._open_window.absorb(self._put_off)
            self._put_off = Window()
        window, self._open_window = self._open_window, Window()
        # Floors speak of all that was taken in; items that found no room are not stored.
        window.partial = partial
        if partial:
            window.floors = {owner: (0, seq) for owner, (_, seq) in self._owed_floors.items()}
        else:
            window.floors, self._owed_floors = self._owed_floors, {}
        self.dirty = False
        if self.durability == "fsync" and not partial:
            # What is left carries this number, and must not look older than what is safe.
            self.window += 1
        self.log.begun(window)
        return window

    def end(self, window: Window) -> None:
        """The window's sync is over: its results are durable, so its tombstones may be written.

        What finds no room (the first state word in a page takes some) is left to the next window.
        """
        self.log.synced(window, on_device=self.durability == "fsync")
        for owner, floor in window.floors.items():
            before = self._floors.get(owner, (0, 0))
            self._floors[owner] = (max(before[0], floor[0]), max(before[1], floor[1]))
        following = self._open_window
        try:
            self._mark(window)
        except NoSpace:
            following.absorb(window)
            return
        if window.partial:
            # The floors do not cover the numbers of all that is in a file.
            # Nor is every item there whose record may go.
            self._put_off.holes += window.holes
            self._put_off.later += window.later
            window.holes.clear()
            window.later.clear()
        if window.retired or window.finished or window.holes:
            # A file may only go when the catalog says what its entries had shown.
            for owner, (upto, seq) in self._floors.items():
                self.record(t="floor", i=owner, upto=upto, seq=seq)
            self._floors.clear()
        for file in (*(s.file for s in window.retired), *(kept.file for kept in window.finished)):
            if window.partial:
                self._record_numbers(file)
            following.unlink.append(file)
        for segment, holes in window.holes:
            self._record_holes(segment, holes, following)
        for segment in window.retired:
            self._record_retired(segment)
        self._records += [catalogs.pack(fields) for fields in window.later]
        self.syncs += 1

    def _mark(self, window: Window) -> None:
        """Unlink and mark what is over; what is done is no longer in the window."""
        gone = []
        while window.unlink:
            # The oldest first: results are in sequence, and a gap in it would look like a loss.
            file = window.unlink[0]
            path = file.path()
            self.files.unlink(path)
            gone.append(window.unlink.pop(0).header.nonce)
            if (descriptor := self.descriptors.take(file.header.nonce)) is not None:
                (self.files.let_go or self.files.close)(descriptor)
            self.left[path.parent] = None
        while window.punches:
            file, begin, end = window.punches.pop()
            if file.header.nonce not in self.catalog.retired:
                file.punch(begin, end)
        self.catalog.retired.difference_update(gone)
        for nonce, (file, places) in list(window.tombstones.items()):
            file.write_tombstones(places)
            del window.tombstones[nonce]
        while window.words:
            file, place, word = window.words[-1]
            file.write_tombstones([place], word)
            window.words.pop()
        while window.freed:
            kept, places = window.freed[-1]
            kept.file.write_tombstones(places)
            window.freed.pop()
        self._write_attempts()

    def _record_holes(self, segment: FileSegment, holes: list[Hole], following: Window) -> None:
        """Keep what entries say of themselves whose bytes are about to go."""
        if segment.deleted == len(segment.states):
            return
        words, lengths = segment.file.words(), segment.lengths
        known = segment.holes = segment.holes or []
        for hole in holes:
            # One that had to wait may have been found again meanwhile, or within a longer one.
            if any(hole.first < other.stop and other.first < hole.stop for other in known):
                continue
            counts: dict[int, tuple[int, int]] = {}
            for place in range(hole.first, hole.stop):
                items, tokens = counts.get(words[place], (0, 0))
                counts[words[place]] = (items + 1, tokens + lengths[place])
            ended = [[word, items, tokens] for word, (items, tokens) in counts.items()]
            self.record(t="hole", nonce=segment.nonce, hole=list(hole), ended=ended)
            following.punches.append((segment.file, hole.begin, hole.end))
            self.segment_bytes -= hole.end - hole.begin
            known.append(hole)

    def _record_retired(self, segment: FileSegment) -> None:
        counts = segment.counts or {}
        dead, quarantined = counts.get(DEAD_WORD, (0, 0)), counts.get(QUARANTINED_WORD, (0, 0))
        self.record(
            t="retired",
            nonce=segment.nonce,
            items=len(segment.states) - sum(items for items, _ in counts.values()),
            tokens=sum(segment.lengths)
            + segment.hole_tokens
            - sum(tokens for _, tokens in counts.values()),
            dead_items=dead[0],
            dead_tokens=dead[1],
            quarantined_items=quarantined[0],
            quarantined_tokens=quarantined[1],
        )
        self.count_file(segment, -1)

    def _record_numbers(self, file: SegmentFile) -> None:
        """Keep what a file says that goes before floors and records put off may say it."""
        numbers: dict[int, list[int]] = {}
        for found in file.entries():
            floor = self.catalog.producers.get(found.owner)
            if floor is not None and floor.upto < found.number <= NUMBER_MAX:
                numbers.setdefault(found.owner, []).append(found.number)
            if found.number > NUMBER_MAX:
                # Its entry showed that the item was requeued.
                self.record(t="undead", id=found.number - BROKER_NUMBERS_FROM)
        for owner, above in numbers.items():
            self.record(t="floor", i=owner, upto=0, seq=0, above=above)

    def seal(self, *, unwritten: bool = False) -> None:
        """Say that everything is on the device: the broker ends in order. Raises StorageError.

        Nothing is said where a full disk did not take all: neither of items that are `unwritten`,
        whose numbers are owed, nor of state words. The next start then looks as after a crash.
        """
        # Holes must wait for whole windows, and there may be none any more.
        self._open_window.holes.clear()
        self._put_off.holes.clear()
        self.log.abandon()
        partial = unwritten or bool(self._owed_floors)
        if partial:
            # A requeued item may not be there; a restart drops the record of one that is.
            self._open_window.later.clear()
        for _ in range(SEALING_WINDOWS_MAX):
            if not self.has_work:
                break
            window = self.begin({}, partial=partial)
            self.sync()
            self.end(window)
        self._sweep(len(self.left))
        if partial or self.has_work:
            self.sync()
            return
        self.window += 1
        self.log.append([catalogs.pack_window(self.window)])
        self.sync()

    def sync(self) -> None:
        """Bring all that is written to the device. Runs in another thread; touches no state."""
        self.files.sync_all()

    def close(self) -> None:
        """Close every descriptor; the directory may have another broker then."""
        self.log.close()
        self.descriptors.close()
        self.files.release()
        if self._lock is not None:
            self.files.close(self._lock)
            self._lock = None
