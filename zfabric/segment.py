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
last but one is on the device, so an entry of window n vouches for every entry of n - 2. This module
is the only one that knows the layout.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import xxhash

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
ENTRY = struct.Struct("<IIIIQQQQIHBB")
_CRCS = struct.Struct("<II")
ENTRY_HEADER_BYTES = ENTRY.size + _CRCS.size
ENTRY_MAGIC = 0x5AE17B0D
_MAGIC_BYTES = struct.pack("<I", ENTRY_MAGIC)
_SEED = struct.Struct("<QQ")
CRC32_KIND, XXH3_KIND = 0, 1
_KIND_AT = ENTRY.size - 1
_LOW_HALF = 0xFFFF_FFFF

# Live; completed; given up; damaged and told to its producer; never accepted.
LIVE_WORD, TOMBSTONE_WORD, DEAD_WORD = 0x0000_0000, 0xF0F0_F0F0, 0x0FF0_0FF0
QUARANTINED_WORD, VOID_WORD = 0x00FF_FF00, 0xFF00_FF00
WORDS = (LIVE_WORD, TOMBSTONE_WORD, DEAD_WORD, QUARANTINED_WORD, VOID_WORD)
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
    gap: int
    when_us: int
    window: int
    target: int
    place: int
    tag: int

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + aligned(ENTRY_HEADER_BYTES + self.size)


class Damage(NamedTuple):
    """Bytes that are no whole entry. `entry` is what its header says, where that can be read."""

    offset: int
    end: int
    reason: str
    entry: Entry | None

    @property
    def owner(self) -> int | None:
        """Whose it was."""
        return self.entry.owner if self.entry else None

    @property
    def number(self) -> int | None:
        """Its producer's number."""
        return self.entry.number if self.entry else None


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


class Column(NamedTuple):
    """Entries to append, as columns of equal length."""

    lengths: Sequence[int]
    owner: int
    numbers: Sequence[int]
    gaps: Sequence[int]
    when_us: int
    window: int
    targets: Sequence[int]
    tags: Sequence[int]
    payloads: Sequence[bytes]
    # how much later each entry is than the one before it; results count, items do not
    when_step: int = 0


def pack_entries(
    nonce: int, offset: int, index: int, column: Column
) -> tuple[list[bytes], list[int], int]:
    """(pieces to write at `offset`, each entry's offset, the offset behind them).

    `index` is that of the first entry.
    """
    pieces: list[bytes] = []
    offsets: list[int] = []
    pack, seed_of, crcs_of, crc32 = ENTRY.pack, _SEED.pack, _CRCS.pack, zlib.crc32
    xxh3 = xxhash.xxh3_64_intdigest
    owner, when, step, window = column.owner, column.when_us, column.when_step, column.window
    for length, number, gap, target, tag, payload in zip(
        column.lengths,
        column.numbers,
        column.gaps,
        column.targets,
        column.tags,
        column.payloads,
        strict=True,
    ):
        size = len(payload)
        head = pack(
            ENTRY_MAGIC,
            length,
            size,
            owner,
            number,
            gap,
            when,
            window,
            target,
            index,
            tag,
            XXH3_KIND,
        )
        seed = crc32(seed_of(nonce, offset))
        crcs = crcs_of(crc32(head, seed), xxh3(payload, seed) & _LOW_HALF)
        offsets.append(offset)
        # ENTRY_HEADER_BYTES is a multiple of ALIGN.
        if pad := -size % ALIGN:
            pieces += (head, crcs, payload, bytes(pad))
        else:
            pieces += (head, crcs, payload)
        offset += ENTRY_HEADER_BYTES + size + pad
        index += 1
        when += step
    return pieces, offsets, offset


def _payload_checksum(kind: int, payload: bytes | memoryview, seed: int) -> int | None:
    """What an entry's second checksum must be; None where nobody knows its kind."""
    if kind == XXH3_KIND:
        return xxhash.xxh3_64_intdigest(payload, seed) & _LOW_HALF
    return zlib.crc32(payload, seed) if kind == CRC32_KIND else None


def read_entry(nonce: int, offset: int, block: bytes | bytearray, *, start: int = 0) -> Entry:
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
    return Entry(offset, *fields[1:-1])


def payload_of(nonce: int, entry: Entry, block: bytes, *, start: int = 0) -> bytes:
    """The payload of an entry that begins at `start` of `block`. Raises StorageError if damaged."""
    begin = start + ENTRY_HEADER_BYTES
    payload = block[begin : begin + entry.size]
    if len(payload) < entry.size:
        raise StorageError("its payload is cut short")
    _, told = _CRCS.unpack_from(block, start + ENTRY.size)
    seed = zlib.crc32(_SEED.pack(nonce, entry.offset))
    if told != _payload_checksum(block[start + _KIND_AT], payload, seed):
        raise StorageError("its payload's checksum is wrong")
    return payload


class Run(NamedTuple):
    """Neighbouring entries as columns of equal length; payloads are views of what was read."""

    owners: list[int]
    numbers: list[int]
    targets: list[int]
    tags: bytes
    payloads: Sequence[bytes | memoryview]


def unpack_run(nonce: int, offsets: Sequence[int], block: bytes) -> Run:
    """The entries at `offsets` of a file; `block` is what lies there from the first of them on.

    Raises StorageError, naming the offset, where one is damaged.
    """
    owners: list[int] = []
    numbers: list[int] = []
    targets: list[int] = []
    tags = bytearray()
    payloads: list[memoryview] = []
    view, base, crc32 = memoryview(block), offsets[0], zlib.crc32
    unpack, seed_of, crcs_of, head_bytes = ENTRY.unpack, _SEED.pack, _CRCS.unpack, ENTRY.size
    xxh3 = xxhash.xxh3_64_intdigest
    for offset in offsets:
        start = offset - base
        begin = start + ENTRY_HEADER_BYTES
        head, crcs = view[start : start + head_bytes], view[start + head_bytes : begin]
        if len(crcs) == _CRCS.size:
            magic, _, size, owner, number, _, _, _, target, _, tag, kind = unpack(head)
            payload = view[begin : begin + size]
            seed = crc32(seed_of(nonce, offset))
            if (
                magic == ENTRY_MAGIC
                and kind == XXH3_KIND
                and len(payload) == size
                and crcs_of(crcs) == (crc32(head, seed), xxh3(payload, seed) & _LOW_HALF)
            ):
                owners.append(owner)
                numbers.append(number)
                targets.append(target)
                tags.append(tag)
                payloads.append(payload)
                continue
        try:
            entry = read_entry(nonce, offset, block, start=start)
            whole = payload_of(nonce, entry, block, start=start)
        except StorageError as error:
            raise StorageError(f"the entry at {offset}: {error}") from None
        owners.append(entry.owner)
        numbers.append(entry.number)
        targets.append(entry.target)
        tags.append(entry.tag)
        payloads.append(memoryview(whole))
    return Run(owners, numbers, targets, bytes(tags), payloads)


def scan(
    header: Header, data: bytes, *, payloads: bool = True, start: int = 0, stop: int | None = None
) -> Iterator[Entry | Damage]:
    """Every entry of a file's data part (`data` begins at `header.data_offset`), and every damage.

    With `start` and `stop`, which are places in `data`, only what lies between them.
    Damage behind the last entry may be a torn end: only who knows the windows can tell.
    """
    base, nonce = header.data_offset, header.nonce
    position = start
    end = len(data) if stop is None else min(stop, len(data))
    while position < end:
        whole = _whole(nonce, base, data, position, header.capacity)
        if whole is not None:
            yield whole
            position = whole.end - base
            continue
        try:
            entry = read_entry(nonce, base + position, data, start=position)
            if payloads:
                payload_of(nonce, entry, data, start=position)
            if entry.place >= header.capacity:
                raise StorageError("its index is impossible")
        except StorageError as error:
            damage = _damage(header, data, position, end, str(error))
            yield damage
            position = damage.end - base
            continue
        yield entry
        position = entry.end - base


def _whole(nonce: int, base: int, data: bytes, position: int, capacity: int) -> Entry | None:
    """The entry at `position`, if nothing is wrong with it: what `scan` finds nearly always."""
    begin = position + ENTRY_HEADER_BYTES
    if begin > len(data):
        return None
    fields = ENTRY.unpack_from(data, position)
    stop = begin + fields[2]
    if fields[0] != ENTRY_MAGIC or stop > len(data) or fields[9] >= capacity:
        return None
    crc32 = zlib.crc32
    seed = crc32(_SEED.pack(nonce, base + position))
    header_crc, payload_crc = _CRCS.unpack_from(data, position + ENTRY.size)
    if header_crc != crc32(data[position : position + ENTRY.size], seed):
        return None
    if payload_crc != _payload_checksum(fields[11], memoryview(data)[begin:stop], seed):
        return None
    return Entry(base + position, *fields[1:-1])


def _damage(header: Header, data: bytes, start: int, stop: int, reason: str) -> Damage:
    """The damage at `start` of `data`, up to where something can be read again, or to `stop`."""
    base, nonce = header.data_offset, header.nonce
    known = _header_at(nonce, base + start, data, start) or _mended(
        nonce, base + start, data, start
    )
    if known is not None and known.place < header.capacity:
        return Damage(base + start, min(known.end, base + stop), reason, known)
    end = data.find(_MAGIC_BYTES, start + 1, stop)
    while end >= 0 and (end % ALIGN or _header_at(nonce, base + end, data, end) is None):
        end = data.find(_MAGIC_BYTES, end + 1, stop)
    return Damage(base + start, base + (end if end >= 0 else stop), reason, None)


def _header_at(nonce: int, offset: int, block: bytes | bytearray, start: int) -> Entry | None:
    try:
        return read_entry(nonce, offset, block, start=start)
    except StorageError:
        return None


def _mended(nonce: int, offset: int, data: bytes, start: int) -> Entry | None:
    """What an entry's header said before one of its bits was flipped, if that is what happened.

    So few bytes under a CRC-32 differ in five bits or more, so there is one answer or none.
    """
    block = data[start : start + ENTRY_HEADER_BYTES]
    if not any(block):
        return None
    trial = bytearray(block)
    for bit in range(8 * (len(block) - _CRCS.size // 2)):
        trial[bit >> 3] ^= 1 << (bit & 7)
        entry = _header_at(nonce, offset, trial, 0)
        if entry is not None:
            return entry
        trial[bit >> 3] ^= 1 << (bit & 7)
    return None


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
