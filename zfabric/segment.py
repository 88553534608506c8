"""Segment files: one (model, signature, lane) each, append only, tombstones in place.

    offset 0       header, copy 1     offset 2,048   header, copy 2
    offset 4,096   state words        capacity x (state u32, attempts u32)
    after them     entries            each 8-byte aligned

All integers are little-endian. A header copy is `ZFSEGMNT`, format u32, size u32, then `size` bytes
of msgpack (nonce, kind, model, signature, lane, components, tokens, capacity, created), then the
CRC-32 of all that. An entry is 64 bytes and its payload, padded with zeros to 8:

    magic u32 · length u32 (tokens) · size u32 (payload bytes) · owner u32 (producer)
    number u64 · gap u64 (number - the number that went before it; 0 is not known)
    when u64 (microseconds, wall clock) · window u64 (the commit window that it was written in)
    target u32 · index u16 (of the entry in its file) · tag u8 · kind of payload checksum u8
    header CRC u32 (of the 56 bytes before) · payload checksum u32

Both are seeded with nonce and offset. A payload's checksum is the low half of its XXH3-64 (kind 1),
which takes a tenth of the time of a CRC-32 (kind 0, of format 1, still read).

The state words lie apart from the entries: a batch of tombstones in a row is then one write of a
few bytes into one page, where words beside the entries would dirty every page of the batch. A word
of 0 is live: it has never been written. Any two of the others differ in 16 bits or more; a damaged
word is the one within 4 bits, else live. CRCs leave state words out.

The window tells a write that a crash tore from damage to what was safe: a window is begun when the
last but one is on the device, so an entry of window n vouches for every entry of n - 2. Only
this module and `entries` know the layout.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from dataclasses import dataclass
from typing import Any

import msgpack

from zfabric.errors import StorageError

FORMAT = 2
MAGIC = b"ZFSEGMNT"
HEADER_COPY_BYTES = 2_048
HEADER_BYTES = 2 * HEADER_COPY_BYTES
STATE_BYTES = 8
# Entries of one file: its state words fill 32 KiB, and one live item pins no more than this many.
CAPACITY = 4_096
# An entry's index has 16 bits.
CAPACITY_MAX = 65_536
ITEMS, RESULTS = "items", "results"

_PREFIX = struct.Struct("<8sII")

# Live; completed; given up; damaged and told to its producer; never accepted.
LIVE_WORD, TOMBSTONE_WORD, DEAD_WORD = 0x0000_0000, 0xF0F0_F0F0, 0x0FF0_0FF0
QUARANTINED_WORD, VOID_WORD = 0x00FF_FF00, 0xFF00_FF00
WORDS = (LIVE_WORD, TOMBSTONE_WORD, DEAD_WORD, QUARANTINED_WORD, VOID_WORD)
# A word this many bits from a constant is taken for it: single and double flips heal.
HEAL_BITS = 4


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself; the routing keys live here once."""

    nonce: int
    kind: str
    model: str
    signature: int
    lane: int
    components: tuple[int, ...] = ()
    tokens: tuple[int | None, ...] = ()
    capacity: int = CAPACITY
    created_s: float = 0.0

    @property
    def data_offset(self) -> int:
        """Where the first entry begins."""
        return HEADER_BYTES + STATE_BYTES * self.capacity


def pack_header(header: Header, version: int = FORMAT) -> bytes:
    """Both copies of a header, HEADER_BYTES long. Raises StorageError where it does not fit."""
    fields: bytes = msgpack.packb(
        {
            "nonce": header.nonce,
            "kind": header.kind,
            "model": header.model,
            "signature": header.signature,
            "lane": header.lane,
            "components": list(header.components),
            "tokens": list(header.tokens),
            "capacity": header.capacity,
            "created": header.created_s,
        }
    )
    body = _PREFIX.pack(MAGIC, version, len(fields)) + fields
    body += struct.pack("<I", zlib.crc32(body))
    if len(body) > HEADER_COPY_BYTES:
        raise StorageError(f"a segment header of {len(body)} bytes; {HEADER_COPY_BYTES} fit")
    return bytes(body.ljust(HEADER_COPY_BYTES, b"\0") * 2)


def is_whole(block: bytes, header: Header) -> bool:
    """Whether both copies are as this release or an earlier one wrote them."""
    return any(block == pack_header(header, version) for version in range(FORMAT, 0, -1))


def read_header(block: bytes) -> Header:
    """The header in the first HEADER_BYTES of a file, from whichever copy is whole.

    Raises NewerFormat for a file of a later format, StorageError where neither copy is whole.
    """
    reasons = []
    for start in (0, HEADER_COPY_BYTES):
        try:
            return _read_copy(block[start : start + HEADER_COPY_BYTES])
        except NewerFormat:
            raise
        except StorageError as error:
            reasons.append(str(error))
    raise StorageError(f"neither header copy is whole: {'; '.join(reasons)}")


class NewerFormat(StorageError):
    """The file was written by a later release; it is left untouched."""


def _read_copy(block: bytes) -> Header:
    if len(block) < _PREFIX.size:
        raise StorageError("cut short")
    magic, version, size = _PREFIX.unpack_from(block)
    if magic != MAGIC:
        raise StorageError("no magic")
    end = _PREFIX.size + size
    if end + 4 > len(block):
        raise StorageError("its size is impossible")
    (crc,) = struct.unpack_from("<I", block, end)
    if crc != zlib.crc32(block[:end]):
        raise StorageError("its checksum is wrong")
    if version > FORMAT:
        raise NewerFormat(f"format {version}; this release reads up to {FORMAT}")
    try:
        header = _header(msgpack.unpackb(block[_PREFIX.size : end]))
    except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise StorageError(f"its fields make no sense: {error!r}") from None
    return header


def _header(fields: dict[str, Any]) -> Header:
    header = Header(
        nonce=fields["nonce"],
        kind=fields["kind"],
        model=fields["model"],
        signature=fields["signature"],
        lane=fields["lane"],
        components=tuple(fields["components"]),
        tokens=tuple(fields["tokens"]),
        capacity=fields["capacity"],
        created_s=fields["created"],
    )
    words = (header.nonce, header.signature, *header.components)
    if not all(type(word) is int and 0 <= word < 2**64 for word in words):
        raise ValueError("a word out of range")
    if type(header.capacity) is not int or not 1 <= header.capacity <= CAPACITY_MAX:
        raise ValueError("capacity out of range")
    if type(header.lane) is not int or not 0 <= header.lane < 2**32:
        raise ValueError("lane out of range")
    if type(header.model) is not str or header.kind not in (ITEMS, RESULTS):
        raise ValueError("neither items nor results")
    return header


def decode_word(word: int) -> tuple[int, bool]:
    """(the constant of WORDS that a state word is, whether it was damaged)."""
    if word in WORDS:
        return word, False
    for constant in WORDS:
        if (word ^ constant).bit_count() <= HEAL_BITS:
            return constant, True
    return LIVE_WORD, True


def words_of(block: bytes) -> tuple[array[int], array[int]]:
    """(state words, attempts) of a file's state part."""
    pairs = array("I")
    pairs.frombytes(block[: len(block) // STATE_BYTES * STATE_BYTES])
    return pairs[::2], pairs[1::2]


def word_offset(entry: int) -> int:
    """Where the state word of an entry lies."""
    return HEADER_BYTES + STATE_BYTES * entry
