"""The catalog's log: appended to, and written anew in few records when it has grown.

A start writes it anew at once. At work that is shared out over many turns: what it said up to a
point is read as a start reads it and written beside it, and from then on every record goes to both.
When a sync has covered all that, the new one takes the name. So a crash finds one of the two,
whole, and no turn waits for a disk. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zfabric import catalog as catalogs
from zfabric.entryfiles import Descriptors
from zfabric.errors import NoSpace, StorageError
from zfabric.osfiles import OsFiles

CATALOG = "catalog.log"
# It is written anew when it has grown by so much, and to so many times what it was.
GROWN_BYTES, GROWN_RATIO = 32 * 1024**2, 4
# What one turn reads of it: some 2,000 records, of 3 us each.
SLICE_BYTES = 256 * 1024


@dataclass(slots=True)
class _Rewriting:
    """Where a rewriting at work stands."""

    # it reads up to here, so much a turn
    stop: int
    slice_bytes: int
    catalog: catalogs.Catalog = field(default_factory=catalogs.Catalog)
    position: int = 0
    # the new file, once it is there, and its end
    descriptor: int | None = None
    end: int = 0
    # the first window that covers all of it
    window: object = None


class CatalogLog:
    """`catalog.log` in the directory of `files`; `catalog` is what it says, and what is to come."""

    def __init__(self, files: OsFiles, descriptors: Descriptors, catalog: catalogs.Catalog) -> None:
        self._files = files
        self._descriptors = descriptors
        self._catalog = catalog
        self._path = files.root / CATALOG
        self._fresh_path = self._path.with_suffix(".new")
        self.end = 0
        # the size at which it is written anew
        self._due = GROWN_BYTES
        self._rewriting: _Rewriting | None = None

    def append(self, records: Sequence[bytes]) -> None:
        """Write records behind all others. Raises NoSpace: none of them counts."""
        path, descriptor = self._descriptors.get(CATALOG, lambda: self._path)
        self.end = self._files.write(path, descriptor, records, self.end)
        now = self._rewriting
        if now is not None and now.descriptor is not None:
            try:
                now.end = self._files.write(self._fresh_path, now.descriptor, records, now.end)
            except NoSpace:
                self.abandon()

    def rewrite(self, nonces: Iterable[int]) -> None:
        """Write it anew at once, as at a start: `nonces` are the files that are still there."""
        there = set(nonces)
        self._descriptors.forget(CATALOG)
        self._files.unlink(self._fresh_path)
        descriptor = self._files.open(self._fresh_path, create=True)
        try:
            end = self._write(descriptor, self._catalog, there)
        finally:
            self._files.close(descriptor)
        self._files.sync_all()
        self._files.rename(self._fresh_path, self._path)
        self._files.sync_all()
        self._catalog.retired &= there
        self._is_new(end)

    def _is_new(self, end: int) -> None:
        self.end = end
        self._due = max(end + GROWN_BYTES, GROWN_RATIO * end)

    def _write(self, descriptor: int, catalog: catalogs.Catalog, there: Iterable[int]) -> int:
        pieces = [catalogs.pack(record) for record in catalog.records(there)]
        return self._files.write(self._fresh_path, descriptor, pieces, 0)

    # -- at work ------------------------------------------------------------------------------

    def upkeep(self) -> None:
        """A slice of what is to be done where it has grown."""
        now = self._rewriting
        if now is None:
            if self.end >= self._due:
                self._rewriting = _Rewriting(self.end, SLICE_BYTES)
            return
        if now.position < now.stop:
            self._read_on(now)
        elif now.descriptor is None:
            self._begin_fresh(now)

    def _read_on(self, now: _Rewriting) -> None:
        path, descriptor = self._descriptors.get(CATALOG, lambda: self._path)
        size = min(now.slice_bytes, now.stop - now.position)
        data = self._files.read(path, descriptor, size, now.position)
        try:
            whole, _, _ = catalogs.enter(now.catalog, data)
        except StorageError:
            self.abandon()
            return
        now.position += whole
        # A record may be longer than a slice; what never becomes whole is for a start to report.
        if not whole:
            now.slice_bytes *= 2
            if size == now.stop - now.position:
                self.abandon()

    def _begin_fresh(self, now: _Rewriting) -> None:
        # What is retired is known for as long as its file is there, and so are holes.
        there = {*self._catalog.retired, *now.catalog.holes}
        self._files.unlink(self._fresh_path)
        now.descriptor = self._files.open(self._fresh_path, create=True)
        try:
            now.end = self._write(now.descriptor, now.catalog, there)
            path, descriptor = self._descriptors.get(CATALOG, lambda: self._path)
            rest = self._files.read(path, descriptor, self.end - now.stop, now.stop)
            now.end = self._files.write(self._fresh_path, now.descriptor, [rest], now.end)
        except NoSpace:
            self.abandon()

    def begun(self, window: object) -> None:
        """A window was closed: its sync covers everything that was appended before."""
        now = self._rewriting
        if now is not None and now.descriptor is not None and now.window is None:
            now.window = window

    def synced(self, window: object, *, on_device: bool) -> None:
        """A window's sync is over; without `on_device` there was none."""
        now = self._rewriting
        if now is None or now.descriptor is None or now.window is not window:
            return
        if not on_device:
            self._files.sync_all()
        try:
            self._files.rename(self._fresh_path, self._path)
        except NoSpace:
            self.abandon()
            return
        self._descriptors.forget(CATALOG)
        self.close()
        self._is_new(now.end)

    def abandon(self) -> None:
        """Leave the log as it is, until it has grown once more."""
        self._due = self.end + GROWN_BYTES
        if self.close():
            self._files.unlink(self._fresh_path)

    def close(self) -> bool:
        """Close the new file; whether there was one."""
        now, self._rewriting = self._rewriting, None
        if now is None or now.descriptor is None:
            return False
        self._files.close(now.descriptor)
        return True
