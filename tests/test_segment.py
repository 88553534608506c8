"""The segment format: what is written is read back; no bytes raise anything but StorageError."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zfabric.entries import (
    ALIGN,
    ENTRY_HEADER_BYTES,
    Damage,
    Entry,
    Fresh,
    pack_entries,
    payload_of,
    read_entry,
    scan,
)
from zfabric.errors import StorageError
from zfabric.segment import (
    CAPACITY_MAX,
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    ITEMS,
    RESULTS,
    STATE_BYTES,
    Header,
    decode_word,
    pack_header,
    read_header,
    word_offset,
    words_of,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    U64,
    st.sampled_from([ITEMS, RESULTS]),
    st.text(max_size=60),
    U64,
    U32,
    st.lists(U64, max_size=64).map(tuple),
    st.lists(st.none() | st.integers(0, 2**31), max_size=64).map(tuple),
    st.integers(1, CAPACITY_MAX),
    st.floats(0, 1e11),
)
ROWS = st.lists(
    st.tuples(
        U32, st.integers(1, 2**64 - 1), U64, U32, st.integers(0, 255), st.binary(max_size=90)
    ),
    max_size=9,
)


def fresh(rows: list[tuple[Any, ...]], owner: int = 3) -> list[Fresh]:
    return [
        (length, owner, number, gap, 1_000, target, tag, payload)
        for length, number, gap, target, tag, payload in rows
    ]


def packed(header: Header, rows: list[tuple[Any, ...]]) -> tuple[bytes, list[int]]:
    """(the data part of a file, where each entry begins in it)."""
    pieces, offsets, end = pack_entries(header, header.data_offset, 0, 5, fresh(rows))
    data = b"".join(pieces)
    assert end == header.data_offset + len(data)
    return data, [ALIGN * units for units in offsets]


@given(HEADERS)
def test_header_is_read_from_either_copy(header: Header) -> None:
    block = pack_header(header)
    assert len(block) == HEADER_BYTES
    assert read_header(block) == header
    assert read_header(bytes(HEADER_COPY_BYTES) + block[HEADER_COPY_BYTES:]) == header
    assert read_header(block[:HEADER_COPY_BYTES] + bytes(HEADER_COPY_BYTES)) == header


def test_header_that_does_not_fit_is_refused() -> None:
    with pytest.raises(StorageError, match="2048 fit"):
        pack_header(Header(1, ITEMS, "m" * 2_100, 1, 1))


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_bytes_that_are_no_header_are_a_storage_error(block: bytes) -> None:
    with pytest.raises(StorageError):
        read_header(block)


@given(HEADERS, st.integers(0, 8 * HEADER_BYTES - 1), st.integers(0, 8 * HEADER_BYTES - 1))
def test_two_flipped_bits_of_a_header_give_it_back_or_a_storage_error(
    header: Header, first: int, second: int
) -> None:
    block = bytearray(pack_header(header))
    for bit in {first, second}:
        block[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(StorageError):
        assert read_header(bytes(block)) == header


@pytest.mark.parametrize(
    "wrong",
    [
        {"nonce": -1},
        {"nonce": 1.5},
        {"kind": "others"},
        {"model": 7},
        {"signature": 2**64 - 1, "lane": -1},
        {"components": ("a",)},
        {"capacity": 0},
        {"capacity": CAPACITY_MAX + 1},
    ],
)
def test_whole_header_with_senseless_fields_is_a_storage_error(wrong: dict[str, Any]) -> None:
    import dataclasses

    header = dataclasses.replace(Header(1, ITEMS, "m", 2, 3), **wrong)
    with pytest.raises(StorageError):
        read_header(pack_header(header))


@given(U64, ROWS)
def test_entries_are_read_back(nonce: int, rows: list[tuple[Any, ...]]) -> None:
    header = Header(nonce, ITEMS, "m", 1, 2, capacity=16)
    data, offsets = packed(header, rows)
    found = list(scan(header, data))
    assert len(found) == len(rows)
    for place, (entry, row, start) in enumerate(zip(found, rows, offsets, strict=True)):
        assert isinstance(entry, Entry)
        assert start % ALIGN == 0
        assert entry.place == place
        assert (entry.length, entry.number, entry.gap, entry.target, entry.tag) == row[:5]
        assert (entry.owner, entry.when_us, entry.window) == (3, 1_000, 5)
        assert payload_of(nonce, entry, data, start=start) == row[5]


@given(U64, st.binary(max_size=2_000))
def test_scan_of_any_bytes_ends_and_covers_them(nonce: int, data: bytes) -> None:
    header = Header(nonce, ITEMS, "m", 1, 2)
    position = header.data_offset
    for found in scan(header, data):
        assert isinstance(found, Damage)
        assert found.offset == position < found.end
        position = found.end
    assert position == header.data_offset + len(data)


@settings(deadline=None)
@given(U64, ROWS, st.data())
def test_flipped_bit_damages_one_entry_and_leaves_its_number_readable(
    nonce: int, rows: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    assume(rows)
    header = Header(nonce, ITEMS, "m", 1, 2, capacity=16)
    block = bytearray(packed(header, rows)[0])
    whole = list(scan(header, bytes(block)))
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    block[bit // 8] ^= 1 << bit % 8
    found = list(scan(header, bytes(block)))
    assert [e for e in found if isinstance(e, Entry)] == [e for e in whole if e in found]
    damages = [e for e in found if isinstance(e, Damage)]
    assert len(damages) + sum(isinstance(e, Entry) for e in found) == len(whole)
    assert len(damages) <= 1
    for damage in damages:
        assert damage.entry in whole
        assert (damage.owner, damage.number) == (3, damage.entry.number)
        assert damage.end == damage.entry.end


@given(U64, ROWS, st.integers(0, 2_000))
def test_cut_off_end_keeps_every_whole_entry(
    nonce: int, rows: list[tuple[Any, ...]], size: int
) -> None:
    header = Header(nonce, ITEMS, "m", 1, 2, capacity=16)
    data, offsets = packed(header, rows)
    cut = data[:size]
    found = [e for e in scan(header, cut) if isinstance(e, Entry)]
    ends = [
        start + ENTRY_HEADER_BYTES + len(row[5]) for start, row in zip(offsets, rows, strict=True)
    ]
    assert len(found) == sum(end <= len(cut) for end in ends)


@given(U64, U64, ROWS, st.integers(0, 64))
def test_entry_elsewhere_or_of_another_file_is_no_entry(
    nonce: int, other: int, rows: list[tuple[Any, ...]], shift: int
) -> None:
    assume(rows and (nonce != other or shift))
    header = Header(nonce, ITEMS, "m", 1, 2, capacity=16)
    data, offsets = packed(header, rows)
    with pytest.raises(StorageError):
        read_entry(other, header.data_offset + ALIGN * shift, data, start=offsets[0])


def test_entry_over_the_capacity_is_damage() -> None:
    header = Header(9, ITEMS, "m", 1, 2, capacity=2)
    data, _ = packed(header, [(1, n, 1, 1, 0, b"") for n in (1, 2, 3)])
    found = list(scan(header, data))
    assert [isinstance(e, Entry) for e in found] == [True, True, False]


def test_payload_full_of_magics_hides_no_entry_and_costs_no_time() -> None:
    from zfabric.entries import ENTRY_MAGIC

    header = Header(9, ITEMS, "m", 1, 2, capacity=16)
    decoys = ENTRY_MAGIC.to_bytes(4, "little") * 50_000
    data = bytearray(packed(header, [(1, n, 1, 1, 0, decoys) for n in (1, 2, 3)])[0])
    data[10] ^= 0xFF
    data[20] ^= 0xFF
    found = list(scan(header, bytes(data)))
    assert [e.number for e in found] == [None, 2, 3]


@given(st.binary(max_size=100))
def test_words_of_any_bytes(block: bytes) -> None:
    words, attempts = words_of(block)
    assert len(words) == len(attempts) == len(block) // STATE_BYTES
    assert all(decode_word(word) for word in words)


def test_words_lie_between_header_and_entries() -> None:
    header = Header(1, ITEMS, "m", 1, 2, capacity=7)
    assert word_offset(0) == HEADER_BYTES
    assert word_offset(7) == header.data_offset
    assert header.data_offset % ALIGN == 0
