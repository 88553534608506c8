"""Recovery: what a data directory says after its broker is gone, clean stop or not.

    lock; sync; read the catalog, every result, every segment; judge; then change what must change

Everything is read and judged before anything is changed, so that an error of the system (EIO,
EMFILE) or a directory of a later release stops the start and leaves all as it was. What a crash
tore was never promised and is dropped; what was safe and is damaged is set aside and told of (see
`segment` for how the two are told apart, `judging` for the rest). Evidence goes to quarantine/;
nothing is deleted that is not understood. The fabric decides what becomes of each item.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from zfabric import catalog as catalogs
from zfabric.cataloglog import CATALOG
from zfabric.entryfiles import SegmentFile
from zfabric.errors import NoSpace, StorageError
from zfabric.files import LOCK, OUTBOX, QUARANTINE, SEGMENTS, FileBacking, ResultFile
from zfabric.judging import FoundProducer, FoundSegment, Judge, Lost, Recovered
from zfabric.osfiles import OsFiles
from zfabric.protocol import BROKER_NUMBERS_FROM, NUMBER_MAX
from zfabric.scanning import Scanned, scan_file
from zfabric.segment import (
    DEAD_WORD,
    HEADER_BYTES,
    ITEMS,
    RESULTS,
    STATE_BYTES,
    NewerFormat,
    pack_header,
    word_offset,
)

__all__ = ["FoundProducer", "FoundSegment", "Lost", "Recovered", "nonce_of", "open_backing"]


def open_backing(
    root: Path, durability: str, files: OsFiles, *, rebuild: bool = False
) -> tuple[FileBacking, Recovered]:
    """Open a data directory, or make a new one; what it holds comes back as `Recovered`.

    With `rebuild`, a catalog that is damaged or missing is made anew from what can be read.
    Raises StorageError where the directory is in use, its catalog cannot be trusted or the system
    fails, NewerFormat where a later release wrote it.
    """
    started = time.monotonic()
    files.check_directory(root)
    files.make_directory(root)
    lock = files.lock(root / LOCK)
    backing: FileBacking | None = None
    try:
        for part in (SEGMENTS, OUTBOX, QUARANTINE):
            files.check_directory(root / part)
        # What a killed broker wrote may rest in memory only; nothing is concluded from that.
        files.sync_all()
        recovery = _Recovery(root, files, rebuild=rebuild)
        known = recovery.read_catalog()
        backing = FileBacking(files, durability, known, lock)
        recovery.read_files(backing)
        recovery.judge(backing)
        recovery.change(backing)
        # What a broker that was killed had no time to remove.
        for part in (SEGMENTS, OUTBOX):
            backing.left.update(dict.fromkeys(files.find_empty(root / part)))
    except BaseException:
        if backing is not None:
            backing.close()
        else:
            files.release()
            files.close(lock)
        raise
    recovery.found.seconds = time.monotonic() - started
    return backing, recovery.found


class _Recovery:
    """One start: read, judge, change."""

    def __init__(self, root: Path, files: OsFiles, *, rebuild: bool) -> None:
        self._root = root
        self._rebuild = rebuild
        self._files = files
        self.found = Recovered()
        self._results: list[Scanned] = []
        self._items: list[Scanned] = []
        # what is to be done once everything is judged, and its evidence before that
        self._evidence: list[tuple[Path, int, int]] = []
        self._changes: deque[Callable[[], None]] = deque()
        # and once the catalog is written
        self._words: deque[Callable[[], None]] = deque()

    # -- reading ------------------------------------------------------------------------------

    def read_catalog(self) -> catalogs.Catalog:
        """The catalog; an empty one for a new directory."""
        path = self._root / CATALOG
        if not self._files.exists(path):
            for part in (SEGMENTS, OUTBOX):
                if self._files.find(self._root / part, ".seg"):
                    return self._salvage(path, b"", f"is missing beside {part}")
            return catalogs.Catalog(store_id=secrets.randbits(64))
        data = self._read(path)
        try:
            known, end = catalogs.read(data)
        except NewerFormat as error:
            raise NewerFormat(f"{self._root}: {error}") from None
        except StorageError as error:
            return self._salvage(path, data, f"is {error}")
        if not known.store_id:
            return self._salvage(path, data, "does not begin with its store record")
        if end < len(data):
            self.found.torn_bytes += len(data) - end
            self._evidence.append((path, end, len(data)))
        return known

    def _salvage(self, path: Path, data: bytes, reason: str) -> catalogs.Catalog:
        """What can still be read, where that was asked for. Raises StorageError elsewhere."""
        if not self._rebuild:
            raise StorageError(
                f"{path} {reason}; restore it from a copy, or start with --rebuild-catalog to go "
                "on with what the segments say: producers whose name is lost are called lost-N"
            )
        try:
            known = catalogs.salvage(data)
        except NewerFormat as error:
            raise NewerFormat(f"{self._root}: {error}") from None
        self.found.quarantined_files.append(f"{path.name}: {reason}")
        if data:
            self._evidence.append((path, 0, len(data)))
        return known

    def _read(self, path: Path) -> bytes:
        size = self._files.file_bytes(path)
        if size is None:
            raise StorageError(f"{path} is not a plain file")
        descriptor = self._files.open(path)
        try:
            return self._files.read(path, descriptor, size, 0)
        finally:
            self._files.close(descriptor)

    def read_files(self, backing: FileBacking) -> None:
        """Every file of results and of items. Raises NewerFormat for one of a later release."""
        holes = backing.catalog.holes

        def holes_of(nonce: int) -> list[dict[str, Any]]:
            return holes.get(nonce, [])

        for part, kind, into in (
            (OUTBOX, RESULTS, self._results),
            (SEGMENTS, ITEMS, self._items),
        ):
            for path in self._files.find(self._root / part, ".seg"):
                if nonce_of(path) in backing.catalog.retired:
                    self._changes.append(partial(self._files.unlink, path))
                    continue
                if self._files.file_bytes(path) is None:
                    self._set_aside(path, "not a plain file")
                    continue
                data = self._read(path)
                self.found.bytes_read += len(data)
                try:
                    into.append(scan_file(path, kind, data, backing.path_of, holes_of))
                except NewerFormat:
                    raise
                except StorageError as error:
                    self._set_aside(path, str(error))

    # -- judging ------------------------------------------------------------------------------

    def judge(self, backing: FileBacking) -> None:
        """What is so, and what must change for that. Nothing is written."""
        known = backing.catalog
        scanned = [*self._results, *self._items]
        if known.salvaged:
            _name_the_lost(known, self._results, self._items)
        newest = max((max(file.windows, default=0) for file in scanned), default=0)
        # A window is begun when the last but one is safe; the catalog's when the last one is.
        safe = max(newest - 2, known.window - 1)
        backing.window = max(newest, known.window) + 1
        # No record of a dead item gets the id of one that a crash tore and that was requeued.
        highest = max((max(file.numbers, default=0) for file in scanned), default=0)
        known.next_dead = max(known.next_dead, highest - BROKER_NUMBERS_FROM + 1)

        def file_of(file: Scanned) -> SegmentFile:
            return SegmentFile(backing, file.header, file.offsets, file.end)

        judge = Judge(known, safe, self.found, file_of)
        by_owner: dict[int, list[Scanned]] = {owner: [] for owner in known.producers}
        for file in self._results:
            by_owner.setdefault(file.header.lane, []).append(file)
        for owner, files in by_owner.items():
            runs = [
                ResultFile(file_of(file), first, freed)
                for file, first, freed in judge.results(owner, files)
            ]
            if runs:
                backing.results[owner] = deque(runs)
        for file in self._items:
            segment = judge.segment(file)
            if segment is not None:
                self.found.segments.append(segment)
        judge.settle()
        self.found.segments.sort(key=lambda segment: segment.header.created_s)
        for file in scanned:
            self.found.entries += sum(map(bool, file.numbers))
            self._plan(file, file_of(file))

    def _plan(self, file: Scanned, entries: SegmentFile) -> None:
        """What is to be done to one file."""
        if file.set_aside and not file.places and file.size == HEADER_BYTES:
            file.set_aside, file.remove = False, True
        if file.set_aside:
            if not file.places and file.size <= file.header.data_offset:
                self._set_aside(file.path, "no entries")
            else:
                self._set_aside(file.path, None)
            return
        if file.remove:
            self._changes.append(partial(self._files.unlink, file.path))
            return
        self._evidence += [(file.path, start, end) for start, end in file.evidence]
        if file.size > file.end:
            self._changes.append(partial(self._truncate, file))
        used = [place for place in file.healed if place not in file.marks and place < file.places]
        for place in used:
            write = partial(entries.write_word, place, file.words[place], file.attempts[place])
            self._changes.append(write)
        words: dict[int, list[int]] = {}
        for place, word in file.marks.items():
            words.setdefault(word, []).append(place)
        for word, places in words.items():
            # A word that says dead stands for a record, which must be on the device before it.
            into = self._words if word == DEAD_WORD else self._changes
            into.append(partial(entries.write_tombstones, places, word))
        if any(file.words[file.places :]) or any(file.attempts[file.places :]):
            self._changes.append(partial(self._clear_words, file))
        if file.header_damaged:
            self._changes.append(partial(self._write, file, [pack_header(file.header)], 0))
        self.found.healed += len(file.healed) + file.header_damaged

    # -- changing -----------------------------------------------------------------------------

    def change(self, backing: FileBacking) -> None:
        """Keep the evidence, then do all that was planned, then write the catalog anew.

        Raises NoSpace where not even the reserve is enough.
        """
        try:
            self._change(backing)
        except NoSpace:
            if not backing.room.give_up_reserve():
                raise
            self._change(backing)

    def _change(self, backing: FileBacking) -> None:
        while self._evidence:
            self._keep_copy(*self._evidence[-1])
            self._evidence.pop()
        while self._changes:
            self._changes[0]()
            self._changes.popleft()
        backing.catalog.window = backing.window
        backing.log.rewrite(segment.header.nonce for segment in self.found.segments)
        while self._words:
            self._words[0]()
            self._words.popleft()

    def _set_aside(self, path: Path, reason: str | None) -> None:
        """Plan to move a file to quarantine/; with a reason, it is reported."""
        if reason is not None:
            self.found.quarantined_files.append(f"{path.relative_to(self._root)}: {reason}")
        else:
            self.found.torn_bytes += self._files.file_bytes(path) or 0

        def move() -> None:
            self._files.make_directory(self._root / QUARANTINE)
            self._files.rename(
                path, self._root / QUARANTINE / f"{path.name}.{secrets.token_hex(4)}"
            )

        self._changes.append(move)

    def _keep_copy(self, path: Path, start: int, end: int) -> None:
        """Copy bytes of a file to quarantine/, but for zeros, which say nothing."""
        descriptor = self._files.open(path)
        try:
            data = self._files.read(path, descriptor, end - start, start)
        finally:
            self._files.close(descriptor)
        if not any(data):
            return
        self._files.make_directory(self._root / QUARANTINE)
        copy = self._root / QUARANTINE / f"{path.name}.{start}.{secrets.token_hex(4)}"
        descriptor = self._files.open(copy, create=True)
        try:
            self._files.write(copy, descriptor, [data], 0)
        except StorageError:
            with contextlib.suppress(StorageError):
                self._files.unlink(copy)
            raise
        finally:
            self._files.close(descriptor)

    def _truncate(self, file: Scanned) -> None:
        descriptor = self._files.open(file.path)
        try:
            self._files.truncate(file.path, descriptor, file.end)
        finally:
            self._files.close(descriptor)

    def _write(self, file: Scanned, pieces: list[bytes], offset: int) -> None:
        descriptor = self._files.open(file.path)
        try:
            self._files.write(file.path, descriptor, pieces, offset)
        finally:
            self._files.close(descriptor)

    def _clear_words(self, file: Scanned) -> None:
        """Places that entries will have yet begin live and without attempts."""
        rest = len(file.words) - file.places
        self._write(file, [bytes(STATE_BYTES * rest)], word_offset(file.places))


def _name_the_lost(known: catalogs.Catalog, results: list[Scanned], items: list[Scanned]) -> None:
    """Give a name to every owner of which the catalog has lost the record, and a floor to all."""
    first: dict[int, int] = {}
    for file in (*results, *items):
        readable = [d.entry for d in file.damages if d.entry is not None]
        for owner, number in (
            *zip(file.owners, file.numbers, strict=True),
            *((entry.owner, entry.number) for entry in readable),
        ):
            # A requeued item has an owner, too, and a number that says nothing of the others.
            if number:
                told = number if number <= NUMBER_MAX else NUMBER_MAX + 1
                first[owner] = min(told, first.get(owner, told))
    for owner, number in first.items():
        if owner not in known.producers:
            known.take({"t": "producer", "i": owner, "name": f"lost-{owner}"})
        floor = known.producers[owner]
        if number <= NUMBER_MAX:
            floor.upto = max(floor.upto, number - 1)


def nonce_of(path: Path) -> int | None:
    """The nonce that a file's name tells, None where it is no name of ours."""
    try:
        return int(path.stem, 16)
    except ValueError:
        return None
