"""The catalog: the sum of records is the same after a rewrite; no bytes raise but StorageError."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zfabric import catalog as catalogs
from zfabric import cataloglog
from zfabric.catalog import Catalog, pack, pack_window, read, salvage
from zfabric.cataloglog import CatalogLog
from zfabric.entryfiles import Descriptors
from zfabric.errors import NoSpace, StorageError
from zfabric.osfiles import OsFiles
from zfabric.segment import FORMAT, NewerFormat

small = st.integers(0, 5)
count = st.integers(0, 2**63)
RECORDS = st.one_of(
    st.fixed_dictionaries({"t": st.just("producer"), "i": small, "name": st.text(max_size=9)}),
    st.fixed_dictionaries({"t": st.just("floor"), "i": small, "upto": count, "seq": count}),
    st.fixed_dictionaries(
        {
            "t": st.just("floor"),
            "i": small,
            "upto": st.just(0),
            "seq": st.just(0),
            "above": st.lists(count, max_size=4),
        }
    ),
    st.fixed_dictionaries({"t": st.just("forget"), "i": small}),
    st.fixed_dictionaries(
        {
            "t": st.just("retired"),
            "nonce": st.integers(1, 9),
            "items": small,
            "tokens": small,
            "dead_items": small,
            "dead_tokens": small,
            "quarantined_items": small,
            "quarantined_tokens": small,
        }
    ),
    st.fixed_dictionaries({"t": st.just("dead"), "id": small, "payload": st.binary(max_size=9)}),
    st.fixed_dictionaries({"t": st.just("undead"), "id": small}),
    st.fixed_dictionaries(
        {"t": st.just("pause"), "model": st.sampled_from("ab"), "paused": st.booleans()}
    ),
    st.fixed_dictionaries({"t": st.just("retry"), "number": count, "of": count}),
    st.fixed_dictionaries({"t": st.just("window"), "n": st.integers(1, 99)}),
    st.fixed_dictionaries({"t": st.just("of a later release"), "x": small}),
)
START: dict[str, Any] = {"t": "store", "id": 7, "format": FORMAT}


def log(records: list[dict[str, Any]]) -> bytes:
    return b"".join(pack(record) for record in [START, *records])


@given(st.lists(RECORDS, max_size=20))
def test_rewritten_catalog_says_the_same(records: list[dict[str, Any]]) -> None:
    data = log(records)
    known, end = read(data)
    assert end == len(data)
    again, _ = read(b"".join(map(pack, known.records(known.retired))))
    again.retired.discard(0)
    known.retired.discard(0)
    assert again == known


@given(st.lists(RECORDS, max_size=8), st.binary(max_size=300))
def test_any_bytes_are_a_catalog_or_a_storage_error(
    records: list[dict[str, Any]], tail: bytes
) -> None:
    for data in (tail, log(records) + tail):
        with contextlib.suppress(StorageError):
            known, end = read(data)
            assert isinstance(known, Catalog)
            assert end <= len(data)


@given(
    st.dictionaries(
        st.sampled_from(["t", "i", "id", "name", "format", "upto", "seq", "n", "records"]),
        st.none()
        | st.integers().filter(lambda n: -(2**63) <= n < 2**64)
        | st.text()
        | st.lists(st.none())
        | st.sampled_from(["store", "floor", "producer", "retired", "dead", "undead", "retry"]),
    )
)
def test_whole_record_without_sense_is_a_storage_error(record: dict[str, Any]) -> None:
    with contextlib.suppress(StorageError):
        read(pack(START) + pack({"t": "producer", "i": 0, "name": "a"}) + pack(record))
    with contextlib.suppress(StorageError):
        read(pack(record))


@given(st.lists(RECORDS, max_size=8), st.data())
def test_flipped_bit_never_passes_for_another_record(
    records: list[dict[str, Any]], draw: st.DataObject
) -> None:
    data = bytearray(log(records) + pack_window(100))
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    data[bit // 8] ^= 1 << bit % 8
    # The last record is only there to vouch for the others; it may pass for torn itself.
    try:
        known, end = read(bytes(data))
    except StorageError:
        return
    assert end == len(log(records))
    assert known == read(log(records))[0]


@given(st.lists(RECORDS, max_size=8), st.lists(RECORDS, max_size=8), st.data())
def test_torn_write_is_cut_off_and_what_was_before_it_is_kept(
    before: list[dict[str, Any]], torn: list[dict[str, Any]], draw: st.DataObject
) -> None:
    """Any part of the last write may be missing, in any order."""
    whole = log([r for r in before if r["t"] != "window"])
    write = bytearray(pack_window(50) + b"".join(pack(r) for r in torn if r["t"] != "window"))
    start, end = sorted(draw.draw(st.lists(st.integers(0, len(write)), min_size=2, max_size=2)))
    write[start:end] = bytes(end - start)
    known, position = read(whole + bytes(write))
    assert position >= len(whole)
    assert known.store_id == 7
    assert set(known.retired) >= set(read(whole)[0].retired)


def test_damage_before_a_later_window_refuses() -> None:
    first = pack_window(4) + pack({"t": "forget", "i": 1})
    data = bytearray(pack(START) + first + pack_window(5))
    data[len(pack(START)) + len(pack_window(4)) + 3] ^= 1
    with pytest.raises(StorageError, match="with whole records behind"):
        read(bytes(data))


def test_records_of_the_start_are_counted() -> None:
    known, _ = read(log([{"t": "producer", "i": 0, "name": "a"}]))
    records = known.records(())
    assert records[0]["records"] == len(records)
    data = b"".join(map(pack, records))
    for size in range(len(data)):
        with pytest.raises(StorageError):
            read(data[:size])


def test_later_release_is_named_with_both_versions() -> None:
    with pytest.raises(NewerFormat, match=rf"format {FORMAT + 1}.*up to {FORMAT}"):
        read(pack({**START, "format": FORMAT + 1}))


def test_retired_nonce_counts_once_and_goes_with_its_file() -> None:
    record = {
        "t": "retired",
        "nonce": 5,
        "items": 3,
        "tokens": 9,
        "dead_items": 0,
        "dead_tokens": 0,
    }
    known, _ = read(log([record, record]))
    assert (known.ended_items, known.ended_tokens) == (3, 9)
    assert [r["nonce"] for r in known.records([5]) if r["t"] == "retired"] == [0, 5]
    assert [r["nonce"] for r in known.records([6]) if r["t"] == "retired"] == [0]


def test_numbers_above_a_hole_go_when_the_floor_has_passed_them() -> None:
    producer = {"t": "producer", "i": 0, "name": "a"}
    above = {"t": "floor", "i": 0, "upto": 4, "seq": 0, "above": [7, 9]}
    known, _ = read(log([producer, above]))
    assert known.producers[0].above == {7, 9}
    known.take({"t": "floor", "i": 0, "upto": 7, "seq": 0})
    assert (known.producers[0].upto, known.producers[0].above) == (7, {9})


@given(st.lists(RECORDS, min_size=1, max_size=8), st.data())
def test_salvage_has_all_but_the_damaged_record(
    records: list[dict[str, Any]], data: st.DataObject
) -> None:
    lost = data.draw(st.integers(0, len(records) - 1))
    # As they are written: the type goes first.
    parts = [pack({"t": record["t"], **record}) for record in [START, *records]]
    bit = data.draw(st.integers(0, 8 * len(parts[lost + 1]) - 1))
    damaged = bytearray(parts[lost + 1])
    damaged[bit // 8] ^= 1 << bit % 8
    parts[lost + 1] = bytes(damaged)
    left, _ = read(log([*records[:lost], *records[lost + 1 :]]))
    found = salvage(b"".join(parts))
    assert found.records([]) == [
        {**record, "id": found.store_id} if record["t"] == "store" else record
        for record in left.records([])
    ]


def test_salvage_does_not_read_a_damaged_payload_from_each_of_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = 0

    def counted(data: bytes, position: int) -> bytes | None:
        nonlocal tried
        tried += 1
        return body(data, position)

    body = catalogs._body
    monkeypatch.setattr(catalogs, "_body", counted)
    # Any four of its bytes are a size that the log could hold.
    payload = bytes((0, 1, 0, 0)) * 50_000
    records = [{"t": "dead", "id": k, "payload": payload} for k in range(2)]
    data = bytearray(log(records))
    data[200] ^= 1
    assert list(salvage(bytes(data)).dead) == [1]
    assert tried < 10


# -- the log, while the broker works ---------------------------------------------------------------


class Bench:
    """A log of small thresholds in a directory, without a store."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cataloglog, "GROWN_BYTES", 10_000)
        monkeypatch.setattr(cataloglog, "SLICE_BYTES", 1_000)
        self.root = root
        self.files = FullFiles(root)
        self.catalog, _ = read(log([]))
        self.log = CatalogLog(self.files, Descriptors(self.files, 4), self.catalog)
        self.log.rewrite(())

    def put(self, **record: Any) -> None:
        self.catalog.take(record)
        self.log.append([pack(record)])

    def retire(self, count: int, *, gone: bool = True) -> None:
        """So many files come to their end."""
        for nonce in range(len(self.data), len(self.data) + count):
            ended = {"items": 4, "tokens": 40, "dead_items": 0, "dead_tokens": 0}
            self.put(t="retired", nonce=nonce, **ended)
            if gone:
                self.catalog.retired.discard(nonce)

    def windows(self, count: int) -> None:
        for _ in range(count):
            self.log.upkeep()
            window = object()
            self.log.begun(window)
            self.log.synced(window, on_device=True)

    @property
    def data(self) -> bytes:
        return (self.root / cataloglog.CATALOG).read_bytes()

    def check(self) -> None:
        """What is on disk says what is known."""
        found, end = read(self.data)
        assert end == len(self.data) == self.log.end
        assert found.retired >= self.catalog.retired
        found.retired, known = set(), replace(self.catalog, retired=set())
        assert found == known
        assert not (self.root / "catalog.new").exists()


class FullFiles(OsFiles):
    """`full` is a word in the name of the file for which there is no room."""

    full = ""

    def write(self, path: Path, descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        if self.full and self.full in path.name:
            raise NoSpace(f"{path}: No space left on device")
        return super().write(path, descriptor, pieces, offset)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_log_that_has_grown_is_written_anew_and_says_the_same(bench: Bench) -> None:
    bench.put(t="producer", i=0, name="job")
    bench.put(t="hole", nonce=2**40, hole=[0, 4, 4_096, 8_192], ended=[])
    bench.retire(3, gone=False)
    kept = set(bench.catalog.retired)
    bench.retire(300)
    grown = len(bench.data)
    assert grown > 20_000
    bench.windows(10)
    # Half of it is read. What comes meanwhile, and before the sync, is in the new one, too.
    bench.put(t="floor", i=0, upto=17, seq=5)
    assert bench.log.end > grown
    for _ in range(100):
        bench.windows(1)
        bench.put(t="window", n=9)
        if len(bench.data) < grown:
            break
    bench.put(t="pause", model="m", paused=True)
    bench.check()
    assert len(bench.data) < 2_000
    assert read(bench.data)[0].retired == {0, *kept}
    bench.windows(100)
    bench.check()


def test_log_grows_by_a_ratio_before_it_is_written_anew(bench: Bench) -> None:
    bench.put(t="dead", id=1, payload=b"x" * 30_000)
    bench.windows(100)
    # A record of many slices is read whole.
    assert (bench.log.end, bench.log._due) == (len(bench.data), 4 * len(bench.data))
    bench.retire(300)
    before = bench.data
    bench.windows(100)
    assert bench.data == before
    bench.retire(1_100)
    bench.windows(300)
    assert len(bench.data) < 32_000
    bench.check()


@pytest.mark.parametrize("when", [0, 25, 35])
def test_log_without_room_for_a_new_one_stays_and_is_tried_again(bench: Bench, when: int) -> None:
    bench.retire(200)
    grown = len(bench.data)
    bench.files.full = "" if when else ".new"
    for _ in range(when):
        bench.log.upkeep()
    bench.files.full = ".new"
    bench.put(t="producer", i=0, name="job")
    bench.windows(100)
    assert len(bench.data) > grown
    bench.check()
    bench.files.full = ""
    bench.windows(100)
    assert len(bench.data) > grown, "not before it has grown once more"
    bench.retire(200)
    bench.windows(100)
    assert len(bench.data) < 2_000
    bench.check()


def test_damage_in_the_log_is_left_for_a_start_to_report(bench: Bench) -> None:
    bench.retire(200)
    path = bench.root / cataloglog.CATALOG
    data = bytearray(path.read_bytes())
    data[5_000] ^= 1
    path.write_bytes(data)
    bench.windows(200)
    assert path.read_bytes() == data
    with pytest.raises(StorageError):
        read(path.read_bytes() + pack_window(3) * 2)
    bench.retire(1)
    assert len(path.read_bytes()) > len(data)
