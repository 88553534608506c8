"""A set of 64-bit digests on disk: custom_ids remembered without memory that grows with the file.

A table of pages in an unnamed temporary file, which ends with the process. The first bits of a
digest name its page; a page that is full doubles the table, each page becoming two that lie side by
side, so that this is one pass from front to back. An id costs 10 to 20 bytes of disk, three times
that while the table doubles, and one read and one write of the page cache; memory is a few pages
and two bytes for each page, a hundredth of a byte an id.

Digests are seeded anew for each set, so nobody can make ids that all want one page. Two ids share a
digest with probability n * n / 2**65: 2e-5 for 25 million ids. The price of such a clash is one
request reported as a duplicate.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import weakref
from array import array
from pathlib import Path

import xxhash

from zfabric.errors import StorageError

DIGEST_BITS, DIGEST_BYTES = 64, 8
# What the page cache reads at once.
PAGE_BYTES = 4096
PAGE_DIGESTS = PAGE_BYTES // DIGEST_BYTES
# Pages read, and twice as many written, at once while the table doubles.
DOUBLING_PAGES = 64


class DigestSet:
    """Membership by xxh3_64 digest, in a file in `directory` (None: the system's for such files).

    Every method raises StorageError where that file cannot be written or read.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._seed = secrets.randbits(DIGEST_BITS)
        self._directory = directory
        self._table = _Table(directory)
        # Bits of a digest that name its page, and the digests in each page.
        self._bits = 0
        self._used = array("H", [0])
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, text: str | bytes) -> bool:
        digest = self._digest(text)
        return self._holds(digest >> (DIGEST_BITS - self._bits), _packed(digest))

    def add(self, text: str | bytes) -> bool:
        """Remember `text`; False if it (or its digest) was there already."""
        digest = self._digest(text)
        packed = _packed(digest)
        page = digest >> (DIGEST_BITS - self._bits)
        if self._holds(page, packed):
            return False
        while self._used[page] == PAGE_DIGESTS:
            self._double()
            page = digest >> (DIGEST_BITS - self._bits)
        self._table.write(packed, page * PAGE_BYTES + self._used[page] * DIGEST_BYTES)
        self._used[page] += 1
        self._count += 1
        return True

    def _digest(self, text: str | bytes) -> int:
        data = text.encode() if isinstance(text, str) else text
        return xxhash.xxh3_64_intdigest(data, self._seed)

    def _holds(self, page: int, packed: bytes) -> bool:
        digests = self._table.read(page * PAGE_BYTES, self._used[page] * DIGEST_BYTES)
        at = digests.find(packed)
        # Found across two digests it is not.
        while at % DIGEST_BYTES and at >= 0:
            at = digests.find(packed, at + 1)
        return at >= 0

    def _double(self) -> None:
        """Write the table anew, with one bit more to tell pages apart."""
        bit = 1 << (DIGEST_BITS - 1 - self._bits)
        table, used = _Table(self._directory), array("H")
        for first in range(0, 1 << self._bits, DOUBLING_PAGES):
            written = bytearray()
            for page in range(first, min(first + DOUBLING_PAGES, 1 << self._bits)):
                packed = self._table.read(page * PAGE_BYTES, self._used[page] * DIGEST_BYTES)
                digests = array("Q", packed)
                for half in (
                    array("Q", [digest for digest in digests if not digest & bit]),
                    array("Q", [digest for digest in digests if digest & bit]),
                ):
                    written += half.tobytes().ljust(PAGE_BYTES, b"\0")
                    used.append(len(half))
            table.write(written, 2 * first * PAGE_BYTES)
        self._table, self._used = table, used
        self._bits += 1


class _Table:
    """Bytes in a file without a name."""

    def __init__(self, directory: Path | None) -> None:
        self._place = directory or Path(tempfile.gettempdir())
        try:
            with tempfile.TemporaryFile(dir=self._place) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._failure(error) from error
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`."""
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise self._failure(error) from error

    def write(self, data: bytes | bytearray, offset: int) -> None:
        """All of `data` at `offset`."""
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot keep custom_ids in a temporary file in {self._place}: {error.strerror}; make "
            "room there and start again"
        )


def _packed(digest: int) -> bytes:
    return digest.to_bytes(DIGEST_BYTES, sys.byteorder)
