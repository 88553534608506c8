"""A set of 64-bit digests in one array: custom_ids remembered at 12 to 24 bytes each.

A Python set of integers costs about 90 bytes an entry, which a file of 25 million lines would
feel. Two ids share a digest with probability n * n / 2**65: 2e-5 for 25 million ids. The price of
such a clash is one request reported as a duplicate.
"""

from __future__ import annotations

from array import array

import xxhash

SLOTS_MIN = 1024
# Linear probing stays short below two thirds full.
FULL_NUMERATOR, FULL_DENOMINATOR = 2, 3
GROWTH = 2


class DigestSet:
    """Membership by xxh3_64 digest. Open addressing over an array of unsigned 64-bit slots."""

    def __init__(self) -> None:
        self._slots = array("Q", [0]) * SLOTS_MIN
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, text: str | bytes) -> bool:
        digest = _digest(text)
        return self._slots[self._slot(digest)] == digest

    def add(self, text: str | bytes) -> bool:
        """Remember `text`; False if it (or its digest) was there already."""
        digest = _digest(text)
        slot = self._slot(digest)
        if self._slots[slot] == digest:
            return False
        self._slots[slot] = digest
        self._count += 1
        if self._count * FULL_DENOMINATOR > len(self._slots) * FULL_NUMERATOR:
            self._grow()
        return True

    def _slot(self, digest: int) -> int:
        """The slot that holds `digest`, or the free one where it belongs."""
        slots = self._slots
        mask = len(slots) - 1
        slot = digest & mask
        while slots[slot] and slots[slot] != digest:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old = self._slots
        self._slots = array("Q", [0]) * (len(old) * GROWTH)
        for digest in old:
            if digest:
                self._slots[self._slot(digest)] = digest


def _digest(text: str | bytes) -> int:
    """The digest of `text`, never 0: that marks a free slot."""
    return xxhash.xxh3_64_intdigest(text.encode() if isinstance(text, str) else text) or 1
