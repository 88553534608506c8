"""Entries of a segment file: packed, read back, checked, and found again behind damage.

`segment` has the layout. Offsets are bytes from the start of a file, sizes bytes, lengths tokens.
Nothing here opens a file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import xxhash

from zfabric.errors import StorageError
from zfabric.segment import Header

# An entry begins at a multiple of this.
ALIGN = 8
ENTRY = struct.Struct("<IIIIQQQQIHBB")
_CRCS = struct.Struct("<II")
# Of both together what a batch needs: magic, size, owner, number, target, tag, kind, checksums.
_READ = struct.Struct("<I4xIIQ24xI2xBBII")
_HEAD_BYTES = ENTRY.size
ENTRY_HEADER_BYTES = ENTRY.size + _CRCS.size
ENTRY_MAGIC = 0x5AE17B0D
_MAGIC_BYTES = struct.pack("<I", ENTRY_MAGIC)
_SEED = struct.Struct("<QQ")
CRC32_KIND, XXH3_KIND = 0, 1
_KIND_AT = ENTRY.size - 1
_LOW_HALF = 0xFFFF_FFFF


def aligned(size: int) -> int:
    """`size` rounded up to the entry alignment."""
    return -(-size // ALIGN) * ALIGN


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


# An entry to append: length, owner, number, gap, when_us, target, tag, payload; see `segment`.
Fresh: TypeAlias = tuple[int, int, int, int, int, int, int, bytes]
WHEN: Final = 4


def pack_entries(
    header: Header, offset: int, index: int, window: int, rows: Iterable[Fresh]
) -> tuple[list[bytes], list[int], int]:
    """(pieces to write at `offset`, where each entry begins, the offset behind them).

    An entry's beginning is told in units of ALIGN behind the state words. `index` is that of the
    first entry, `window` the commit window that they are written in.
    """
    nonce, base = header.nonce, header.data_offset
    pieces: list[bytes] = []
    offsets: list[int] = []
    pack, seed_of, crcs_of, crc32 = ENTRY.pack, _SEED.pack, _CRCS.pack, zlib.crc32
    xxh3 = xxhash.xxh3_64_intdigest
    for place, (length, owner, number, gap, when, target, tag, payload) in enumerate(rows, index):
        size = len(payload)
        seed = crc32(seed_of(nonce, offset))
        head = pack(
            ENTRY_MAGIC, length, size, owner, number, gap, when, window, target, place, tag,
            XXH3_KIND,
        )  # fmt: skip
        pieces += (head, crcs_of(crc32(head, seed), xxh3(payload, seed) & _LOW_HALF), payload)
        offsets.append((offset - base) // ALIGN)
        # ENTRY_HEADER_BYTES is a multiple of ALIGN.
        if pad := -size % ALIGN:
            pieces.append(bytes(pad))
            size += pad
        offset += ENTRY_HEADER_BYTES + size
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

    owners: Sequence[int]
    numbers: Sequence[int]
    targets: Sequence[int]
    tags: bytes
    payloads: Sequence[bytes | memoryview]


def unpack_run(header: Header, begins: Sequence[int], block: bytes) -> Run:
    """Entries of a file; `block` is what lies there from the first of them on.

    They begin at `begins`, told as in `pack_entries`. Raises StorageError, naming the offset, where
    one is damaged.
    """
    rows: list[tuple[int, int, int, int, bytes | memoryview]] = []
    view, end, nonce, base = memoryview(block), len(block), header.nonce, header.data_offset
    first = base + ALIGN * begins[0]
    unpack, seed_of, crc32 = _READ.unpack_from, _SEED.pack, zlib.crc32
    xxh3 = xxhash.xxh3_64_intdigest
    for units in begins:
        offset = base + ALIGN * units
        start = offset - first
        begin = start + ENTRY_HEADER_BYTES
        if begin <= end:
            magic, size, owner, number, target, tag, kind, head_crc, told = unpack(block, start)
            payload = view[begin : begin + size]
            seed = crc32(seed_of(nonce, offset))
            if (
                magic == ENTRY_MAGIC
                and kind == XXH3_KIND
                and begin + size <= end
                and head_crc == crc32(view[start : start + _HEAD_BYTES], seed)
                and told == xxh3(payload, seed) & _LOW_HALF
            ):
                rows.append((owner, number, target, tag, payload))
                continue
        try:
            entry = read_entry(nonce, offset, block, start=start)
            whole = payload_of(nonce, entry, block, start=start)
        except StorageError as error:
            raise StorageError(f"the entry at {offset}: {error}") from None
        rows.append((entry.owner, entry.number, entry.target, entry.tag, whole))
    owners, numbers, targets, tags, payloads = zip(*rows, strict=True)
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
