"""Segment files: one (model, signature, lane) each, append only, tombstones in place.

    offset 0       header, copy 1     offset 2,048   header, copy 2
    offset 4,096   state words        capacity x (state u32, attempts u32)
    after them     entries            each 8-byte aligned

All integers are little-endian. A header copy is `ZFSEGMNT`, format u32, size u32, then `size` bytes
of msgpack (nonce, kind, model, signature, lane, components, tokens, capacity, created), then the
CRC-32 of all that. An entry is 56 bytes and its payload, padded with zeros to 8:

    magic u32 · length u32 (tokens) · size u32 (payload bytes) · owner u32 (producer)
    number u64 · when u64 (microseconds, wall clock) · target u32 · tag u32
    gap u32 (number - the number that went before it) · index u32 (of the entry in its file)
    header CRC u32 (of the 48 bytes before, seeded with nonce and offset) · payload CRC u32

The state words lie apart from the entries: a batch of tombstones in a row is then one write of a
few bytes into one page, where words beside the entries would dirty every page of the batch. A word
of 0 is live: it has never been written. A tombstone differs from it in 16 bits; a damaged word is
whichever is within 4 bits, else live. CRCs leave state words out.

A file grows only at its end. What is behind the last whole entry after a crash was never synced,
never acknowledged, and is cut off; an entry that is damaged with whole ones behind it is set aside
and the scan goes on at the next magic. This module is the only one that knows the layout.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from zfabric.errors import StorageError

FORMAT = 1
MAGIC = b"ZFSEGMNT"
HEADER_COPY_BYTES = 2_048
HEADER_BYTES = 2 * HEADER_COPY_BYTES
STATE_BYTES = 8
# Entries of one file: its state words fill 32 KiB, and one live item pins no more than this many.
CAPACITY = 4_096
ITEMS, RESULTS = "items", "results"

_PREFIX = struct.Struct("<8sII")
ENTRY = struct.Struct("<IIIIQQIIII")
_CRCS = struct.Struct("<II")
ENTRY_HEADER_BYTES = ENTRY.size + _CRCS.size
ENTRY_MAGIC = 0x5AE17B0D
_MAGIC_BYTES = struct.pack("<I", ENTRY_MAGIC)
_SEED = struct.Struct("<QQ")

LIVE_WORD, TOMBSTONE_WORD = 0x0000_0000, 0xF0F0_F0F0
# A word this many bits from a constant is taken for it: single and double flips heal.
HEAL_BITS = 4
ALIGN = 8


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


class Entry(NamedTuple):
    """One entry as it lies in a file, without its payload."""

    offset: int
    length: int
    size: int
    owner: int
    number: int
    when_us: int
    target: int
    tag: int
    gap: int
    place: int

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + aligned(ENTRY_HEADER_BYTES + self.size)


class Damage(NamedTuple):
    """Bytes that are no entry, with whole entries behind them. `number` where it can be read."""

    offset: int
    end: int
    reason: str
    owner: int | None
    number: int | None


def aligned(size: int) -> int:
    """`size` rounded up to the entry alignment."""
    return -(-size // ALIGN) * ALIGN


def pack_header(header: Header) -> bytes:
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
    body = _PREFIX.pack(MAGIC, FORMAT, len(fields)) + fields
    body += struct.pack("<I", zlib.crc32(body))
    if len(body) > HEADER_COPY_BYTES:
        raise StorageError(f"a segment header of {len(body)} bytes; {HEADER_COPY_BYTES} fit")
    return bytes(body.ljust(HEADER_COPY_BYTES, b"\0") * 2)


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
    return _header(msgpack.unpackb(block[_PREFIX.size : end]))


def _header(fields: dict[str, Any]) -> Header:
    return Header(
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


class Column(NamedTuple):
    """Entries to append, as columns of equal length."""

    lengths: Sequence[int]
    owner: int
    numbers: Sequence[int]
    when_us: int
    targets: Sequence[int]
    tags: Sequence[int]
    gaps: Sequence[int]
    payloads: Sequence[bytes]


def pack_entries(
    nonce: int, offset: int, index: int, column: Column
) -> tuple[list[bytes], list[int], int]:
    """(pieces to write at `offset`, each entry's offset, the offset behind them).

    `index` is that of the first entry.
    """
    pieces: list[bytes] = []
    offsets: list[int] = []
    pack, crc32, owner, when = ENTRY.pack, zlib.crc32, column.owner, column.when_us
    for length, number, target, tag, gap, payload in zip(
        column.lengths,
        column.numbers,
        column.targets,
        column.tags,
        column.gaps,
        column.payloads,
        strict=True,
    ):
        size = len(payload)
        head = pack(ENTRY_MAGIC, length, size, owner, number, when, target, tag, gap, index)
        index += 1
        seed = crc32(_SEED.pack(nonce, offset))
        crcs = _CRCS.pack(crc32(head, seed), crc32(payload, seed))
        pad = -(ENTRY_HEADER_BYTES + size) % ALIGN
        pieces += (head, crcs, payload, bytes(pad)) if pad else (head, crcs, payload)
        offsets.append(offset)
        offset += ENTRY_HEADER_BYTES + size + pad
    return pieces, offsets, offset


def read_entry(nonce: int, offset: int, block: bytes, *, start: int = 0) -> Entry:
    """The entry whose bytes begin at `start` of `block` and at `offset` of its file.

    Raises StorageError where its header is damaged; the payload is not looked at.
    """
    if len(block) - start < ENTRY_HEADER_BYTES:
        raise StorageError("cut short")
    fields = ENTRY.unpack_from(block, start)
    if fields[0] != ENTRY_MAGIC:
        raise StorageError("no entry begins here")
    header_crc, _ = _CRCS.unpack_from(block, start + ENTRY.size)
    seed = zlib.crc32(_SEED.pack(nonce, offset))
    if header_crc != zlib.crc32(block[start : start + ENTRY.size], seed):
        raise StorageError("its header's checksum is wrong")
    return Entry(offset, *fields[1:])


def payload_of(nonce: int, entry: Entry, block: bytes, *, start: int = 0) -> bytes:
    """The payload of an entry that begins at `start` of `block`. Raises StorageError if damaged."""
    begin = start + ENTRY_HEADER_BYTES
    payload = block[begin : begin + entry.size]
    if len(payload) < entry.size:
        raise StorageError("its payload is cut short")
    _, crc = _CRCS.unpack_from(block, start + ENTRY.size)
    if crc != zlib.crc32(payload, zlib.crc32(_SEED.pack(nonce, entry.offset))):
        raise StorageError("its payload's checksum is wrong")
    return payload


def scan(header: Header, data: bytes, *, payloads: bool = True) -> Iterator[Entry | Damage]:
    """Every entry of a file's data part (`data` begins at `header.data_offset`), and every damage.

    Ends at the last whole entry; whatever is behind that is a torn tail (see `tail_of`).
    """
    base, nonce = header.data_offset, header.nonce
    position = 0
    bad_from: int | None = None
    reason = ""
    while position < len(data):
        try:
            entry = read_entry(nonce, base + position, data, start=position)
            if payloads:
                payload_of(nonce, entry, data, start=position)
        except StorageError as error:
            if bad_from is None:
                bad_from, reason = position, str(error)
            following = data.find(_MAGIC_BYTES, position + 1)
            while following >= 0 and following % ALIGN:
                following = data.find(_MAGIC_BYTES, following + 1)
            if following < 0:
                return
            position = following
            continue
        if bad_from is not None:
            yield _damage(header, data, bad_from, position, reason)
            bad_from = None
        yield entry
        position = entry.end - base


def _damage(header: Header, data: bytes, start: int, end: int, reason: str) -> Damage:
    """What is known of bad bytes: the number, where the entry's own header is whole."""
    base = header.data_offset
    try:
        entry = read_entry(header.nonce, base + start, data, start=start)
    except StorageError:
        return Damage(base + start, base + end, reason, None, None)
    return Damage(base + start, base + end, reason, entry.owner, entry.number)


def decode_word(word: int) -> tuple[bool, bool]:
    """(whether a state word is a tombstone, whether it was damaged)."""
    if word in (LIVE_WORD, TOMBSTONE_WORD):
        return word == TOMBSTONE_WORD, False
    return (word ^ TOMBSTONE_WORD).bit_count() <= HEAL_BITS, True


def words_of(block: bytes) -> tuple[array[int], array[int]]:
    """(state words, attempts) of a file's state part."""
    pairs = array("I")
    pairs.frombytes(block[: len(block) // STATE_BYTES * STATE_BYTES])
    return pairs[::2], pairs[1::2]


def word_offset(entry: int) -> int:
    """Where the state word of an entry lies."""
    return HEADER_BYTES + STATE_BYTES * entry
