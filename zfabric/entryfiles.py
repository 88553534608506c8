"""Entry files: open descriptors, and one file of entries that is appended to, read and marked.

Offsets and sizes are bytes, places are entry numbers. Decides nothing; `files` orders the writes,
`segment` knows the layout.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zfabric.entries import (
    ALIGN,
    ENTRY_HEADER_BYTES,
    Entry,
    Fresh,
    Run,
    pack_entries,
    payload_of,
    read_entry,
    scan,
    unpack_run,
)
from zfabric.errors import InvariantError, NoSpace, StorageError
from zfabric.osfiles import NoDescriptors, OsFiles
from zfabric.segment import (
    HEADER_BYTES,
    ITEMS,
    TOMBSTONE_WORD,
    Header,
    pack_header,
    word_offset,
    words_of,
)
from zfabric.segments import runs_of

if TYPE_CHECKING:
    from zfabric.files import FileBacking


# A new file is looked for, made with its directory, opened, and gets a header; measured here, that
# costs as much as eight writes of an item.
NEW_FILE_CALLS = 8
# A file gets no entry behind this. Where entries begin is kept in 32 bits, in units of 8 bytes, and
# a start reads a file whole.
FILE_BYTES_MAX = 1024**3


class Opened(NamedTuple):
    """An open file."""

    path: Path
    descriptor: int


class Descriptors:
    """Open files by key, least recently used first out.

    The path of a file is kept only while it is open: there may be millions of files.
    """

    def __init__(self, files: OsFiles, limit: int) -> None:
        self._files = files
        self._limit = limit
        self._open: OrderedDict[int | str, Opened] = OrderedDict()

    def get(self, key: int | str, path_of: Callable[[], Path], *, create: bool = False) -> Opened:
        """The file with this key; `path_of` says where it is."""
        found = self._open.get(key)
        if found is not None:
            self._open.move_to_end(key)
            return found
        self._shrink(self._limit - 1)
        path = path_of()
        try:
            descriptor = self._files.open(path, create=create)
        except NoDescriptors:
            # Sockets may have taken more than their half: go on with fewer files.
            if not self._open:
                raise
            self._shrink(len(self._open) // 2)
            descriptor = self._files.open(path, create=create)
        opened = self._open[key] = Opened(path, descriptor)
        return opened

    def _shrink(self, count: int) -> None:
        while len(self._open) > count:
            self._files.close(self._open.popitem(last=False)[1].descriptor)

    def forget(self, key: int | str) -> None:
        """Close the file with this key, if it is open."""
        found = self._open.pop(key, None)
        if found is not None:
            self._files.close(found.descriptor)

    def take(self, key: int | str) -> int | None:
        """The descriptor of the file with this key, if it is open; it is the caller's from now."""
        found = self._open.pop(key, None)
        return None if found is None else found.descriptor

    def close(self) -> None:
        """Close all."""
        while self._open:
            self._files.close(self._open.popitem()[1].descriptor)


class SegmentFile:
    """A file of entries: append, read, tombstone. Whole entries only; nothing is ever moved.

    Few bytes an entry and few objects a file, since there may be millions of each: where an entry
    begins is kept, what it holds is read.
    """

    __slots__ = ("_backing", "end", "header", "offsets")

    def __init__(
        self,
        backing: FileBacking,
        header: Header,
        offsets: array[int] | None = None,
        end: int = 0,
    ) -> None:
        """A new file, or with `offsets` and `end` one that has entries already."""
        self._backing = backing
        self.header = header
        # of each entry: where it begins behind the state words, in units of 8 bytes
        self.offsets = array("I") if offsets is None else offsets
        # where the next entry will be; 0 while there is no file
        self.end = end

    @property
    def is_large(self) -> bool:
        """Whether its bytes are enough: nothing more is stored in it then."""
        return self.end >= FILE_BYTES_MAX

    def path(self) -> Path:
        """Where it lies."""
        return self._backing.path_of(self.header)

    def _opened(self) -> Opened:
        return self._backing.descriptors.get(self.header.nonce, self.path)

    def append(self, rows: Sequence[Fresh]) -> tuple[int, int]:
        """Write entries behind the others, and the header before the first of them.

        Returns (bytes that they take, without headers; about how many system calls it took).
        Raises InvariantError over the file's capacity, StorageError where they cannot be written;
        no entry is there then.
        """
        backing, header, place, calls = self._backing, self.header, len(self.offsets), 1
        if place + len(rows) > header.capacity:
            raise InvariantError(f"{self.path()} has places for {header.capacity} entries")
        if not self.end:
            self._make()
            calls = NEW_FILE_CALLS
        begin = self.end
        pieces, offsets, end = pack_entries(header, begin, place, backing.window, rows)
        path, descriptor = self._opened()
        try:
            backing.files.write(path, descriptor, pieces, begin)
        except NoSpace:
            # Some are whole: a restart would find them here and where they are stored after all.
            backing.files.truncate(path, descriptor, begin if place else HEADER_BYTES)
            raise
        self.offsets.extend(offsets)
        self.end = end
        backing.dirty = True
        if header.kind == ITEMS:
            backing.segment_bytes += end - begin
        return end - begin - len(rows) * ENTRY_HEADER_BYTES, calls

    def _make(self) -> None:
        backing, path = self._backing, self.path()
        backing.files.make_directory(path.parent)
        _, descriptor = backing.descriptors.get(self.header.nonce, lambda: path, create=True)
        backing.files.write(path, descriptor, [pack_header(self.header)], 0)
        backing.left.pop(path.parent, None)
        self.end = self.header.data_offset
        if self.header.kind == ITEMS:
            backing.segment_files += 1
            backing.segment_bytes += self.end

    def payload_bytes(self, first: int, stop: int) -> int:
        """What the payloads of neighbouring entries take in the file, with their padding.

        Damage that lies behind an entry counts as its own.
        """
        span = self.end_of(stop - 1) - self.begin_of(first)
        return span - (stop - first) * ENTRY_HEADER_BYTES

    def begin_of(self, place: int) -> int:
        """The offset at which an entry begins."""
        return self.header.data_offset + ALIGN * self.offsets[place]

    def end_of(self, place: int) -> int:
        """The offset at which what follows an entry begins."""
        offsets = self.offsets
        for following in range(place + 1, len(offsets)):
            # Places that were lost have an offset of 0.
            if offsets[following]:
                return self.header.data_offset + ALIGN * offsets[following]
        return self.end

    def _span(self, place: int) -> int:
        return self.end_of(place) - self.begin_of(place)

    def entry(self, place: int) -> tuple[Entry, bytes]:
        """(the entry, its payload). Raises StorageError where it is damaged."""
        offset = self.begin_of(place)
        path, descriptor = self._opened()
        block = self._backing.files.read(path, descriptor, self._span(place), offset)
        try:
            entry = read_entry(self.header.nonce, offset, block)
            return entry, payload_of(self.header.nonce, entry, block)
        except StorageError as error:
            raise StorageError(f"{path}: entry {place}: {error}") from None

    def run(self, first: int, stop: int) -> Run:
        """Neighbouring entries, none of them lost. Raises StorageError where one is damaged."""
        begin = self.begin_of(first)
        path, descriptor = self._opened()
        block = self._backing.files.read(path, descriptor, self.end_of(stop - 1) - begin, begin)
        try:
            return unpack_run(self.header, self.offsets[first:stop], block)
        except StorageError as error:
            raise StorageError(f"{path}: {error}") from None

    def head(self, place: int) -> Entry | None:
        """What an entry says of itself, None where that is damaged; its payload is not read."""
        offset = self.begin_of(place)
        path, descriptor = self._opened()
        block = self._backing.files.read(path, descriptor, ENTRY_HEADER_BYTES, offset)
        try:
            return read_entry(self.header.nonce, offset, block)
        except StorageError:
            return None

    def entries(self) -> list[Entry]:
        """All of them, read from the file; payloads are not looked at."""
        path, descriptor = self._opened()
        start = self.header.data_offset
        data = self._backing.files.read(path, descriptor, self.end - start, start)
        found = scan(self.header, data, payloads=False)
        return [entry for entry in found if isinstance(entry, Entry)]

    def words(self) -> Sequence[int]:
        """The state word of every place, read from the file."""
        path, descriptor = self._opened()
        size = self.header.data_offset - HEADER_BYTES
        return words_of(self._backing.files.read(path, descriptor, size, HEADER_BYTES))[0]

    def punch(self, begin: int, end: int) -> None:
        """Give the bytes between two offsets back to the disk."""
        path, descriptor = self._opened()
        self._backing.files.punch(path, descriptor, begin, end - begin)

    def write_word(self, place: int, word: int, attempts: int) -> None:
        """Set the state word and the attempts of one entry, in place."""
        path, descriptor = self._opened()
        data = struct.pack("<II", word, attempts)
        self._backing.files.write(path, descriptor, [data], word_offset(place))
        self._backing.dirty = True

    def write_tombstones(self, places: list[int], word: int = TOMBSTONE_WORD) -> None:
        """The same state word for `places`, one write for each run of neighbours."""
        path, descriptor = self._opened()
        pair = struct.pack("<II", word, 0)
        places.sort()
        for first, count in runs_of(places):
            self._backing.files.write(path, descriptor, [pair * count], word_offset(first))
        self._backing.dirty = True
