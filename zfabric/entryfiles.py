"""Entry files: open descriptors, and one file of entries that is appended to, read and marked.

Offsets and sizes are bytes, places are entry numbers. Decides nothing; `files` orders the writes,
`segment` knows the layout.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from zfabric.errors import InvariantError, StorageError
from zfabric.osfiles import NoDescriptors, OsFiles
from zfabric.segment import (
    ENTRY_HEADER_BYTES,
    ITEMS,
    TOMBSTONE_WORD,
    Column,
    Entry,
    Header,
    pack_entries,
    pack_header,
    payload_of,
    read_entry,
    scan,
    word_offset,
)

if TYPE_CHECKING:
    from zfabric.files import FileBacking


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
            self._shrink(self._limit - 1)
            try:
                descriptor = self._files.open(path, create=create)
            except NoDescriptors:
                # Sockets may have taken more than their half: go on with fewer files.
                if not self._open:
                    raise
                self._shrink(len(self._open) // 2)
                descriptor = self._files.open(path, create=create)
            self._open[path] = descriptor
        else:
            self._open.move_to_end(path)
        return descriptor

    def _shrink(self, count: int) -> None:
        while len(self._open) > count:
            self._files.close(self._open.popitem(last=False)[1])

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

    def __init__(
        self,
        backing: FileBacking,
        path: Path,
        header: Header,
        offsets: array[int] | None = None,
        sizes: array[int] | None = None,
        end: int | None = None,
    ) -> None:
        """A new file, or with `offsets`, `sizes` and `end` one that has entries already."""
        self._backing = backing
        self.path = path
        self.header = header
        # of each entry: where it begins behind the state words, in units of 8 bytes
        self.offsets = array("I") if offsets is None else offsets
        self.sizes = array("I") if sizes is None else sizes
        self._pieces: list[bytes] = []
        self.tail = header.data_offset if end is None else end
        self.flushed = 0 if end is None else end

    def append(self, column: Column) -> None:
        """Take entries; `flush` writes them. Raises InvariantError over the file's capacity."""
        if len(self.offsets) + len(column.payloads) > self.header.capacity:
            raise InvariantError(f"{self.path} has places for {self.header.capacity} entries")
        pieces, offsets, self.tail = pack_entries(
            self.header.nonce, self.tail, len(self.offsets), column
        )
        self._pieces += pieces
        base = self.header.data_offset
        self.offsets.extend([(offset - base) // 8 for offset in offsets])
        self.sizes.extend(map(len, column.payloads))
        self._backing.unwritten[self.header.nonce] = self

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
        backing.unwritten.pop(self.header.nonce, None)
        if self.header.kind == ITEMS:
            backing.segment_bytes += self.flushed - before
        backing.dirty = True

    def entry(self, place: int) -> tuple[Entry, bytes]:
        """(the entry, its payload). Raises StorageError where it is damaged."""
        offset = self.header.data_offset + 8 * self.offsets[place]
        size = ENTRY_HEADER_BYTES + self.sizes[place]
        descriptor = self._backing.descriptors.get(self.path)
        block = self._backing.files.read(self.path, descriptor, size, offset)
        try:
            entry = read_entry(self.header.nonce, offset, block)
            return entry, payload_of(self.header.nonce, entry, block)
        except StorageError as error:
            raise StorageError(f"{self.path}: entry {place}: {error}") from None

    def entries(self) -> list[Entry]:
        """All of them, read from the file; payloads are not looked at."""
        descriptor = self._backing.descriptors.get(self.path)
        start = self.header.data_offset
        data = self._backing.files.read(self.path, descriptor, self.flushed - start, start)
        found = scan(self.header, data, payloads=False)
        return [entry for entry in found if isinstance(entry, Entry)]

    def write_word(self, place: int, word: int, attempts: int) -> None:
        """Set the state word and the attempts of one entry, in place."""
        descriptor = self._backing.descriptors.get(self.path)
        data = struct.pack("<II", word, attempts)
        self._backing.files.write(self.path, descriptor, [data], word_offset(place))
        self._backing.dirty = True

    def write_tombstones(self, places: list[int], word: int = TOMBSTONE_WORD) -> None:
        """The same state word for `places`, one write for each run of neighbours."""
        descriptor = self._backing.descriptors.get(self.path)
        pair = struct.pack("<II", word, 0)
        places.sort()
        start = 0
        for k in range(1, len(places) + 1):
            if k == len(places) or places[k] != places[k - 1] + 1:
                data = pair * (k - start)
                offset = word_offset(places[start])
                self._backing.files.write(self.path, descriptor, [data], offset)
                start = k
        self._backing.dirty = True
