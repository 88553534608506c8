"""A damaged directory: at most the damaged record is lost, its producer is told, evidence is kept.

Everything here was safe on the device before it was damaged. A sample of bits and lengths is tried;
DAMAGE_POINTS=all tries every one.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.disk import DiskBench
from tests.faultfiles import Fault, FaultFiles
from tests.harness import FakeProducer, FakeWorker
from tests.test_recovery import run_all
from zfabric import catalog as catalogs
from zfabric.cli import main
from zfabric.entries import CRC32_KIND, ENTRY_HEADER_BYTES, Entry, scan
from zfabric.errors import StorageError
from zfabric.files import FileBacking
from zfabric.osfiles import OsFiles
from zfabric.protocol import Status
from zfabric.recovery import open_backing
from zfabric.segment import (
    FORMAT,
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    LIVE_WORD,
    MAGIC,
    STATE_BYTES,
    TOMBSTONE_WORD,
    WORDS,
    NewerFormat,
    decode_word,
    pack_header,
    read_header,
    word_offset,
)
from zfabric.shapes import Shape

ALL_POINTS = os.environ.get("DAMAGE_POINTS") == "all"
CAPACITY = 8
ITEMS = 10
# Items of the first shape: six, in one lane, in one file, the first two of them completed.
ALIVE, DONE = range(3, 7), (1, 2)


def small_and_quick(patch: pytest.MonkeyPatch) -> None:
    """Files of a few entries; nothing waits for a device that is not asked for its bytes."""
    patch.setattr(FileBacking, "segment_items_max", CAPACITY)
    patch.setattr(OsFiles, "sync_all", lambda files: None)
    patch.setattr(OsFiles, "reserve", lambda files, path, size: None)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    small_and_quick(monkeypatch)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with items that wait, items that are done, and results that nobody took."""
    root = tmp_path_factory.mktemp("template") / "data"
    with pytest.MonkeyPatch.context() as patch:
        small_and_quick(patch)
        bench = DiskBench(root, lanes=1)
        producer = bench.producer()
        shapes = [Shape.of("m", "a")] * 6 + [Shape.of("m", "b")] * 4
        producer.submit([100] * ITEMS, shapes)
        bench.settle()
        worker = bench.worker(batch=2)
        bench.dispatch(1)
        producer.cut()
        for key in list(worker.batches):
            worker.done(key)
        bench.settle()
        # A start makes sure that everything is on the device, and says so in the catalog.
        bench.crash()
        bench.backing.close()
    return root


def stride(count: int, wanted: int) -> Iterator[int]:
    """Points of a range: all, or about `wanted` that share no pattern with bytes or words."""
    step = 1 if ALL_POINTS else max(1, count // wanted) | 1
    return iter(range(0, count, step))


def one(root: Path, part: str, shape: Shape | None = None) -> Path:
    """The one file below a part of the directory, of a shape if there are several."""
    pattern = f"**/{shape.signature:016x}/**/*.seg" if shape is not None else "**/*.seg"
    (found,) = (root / part).glob(pattern)
    return found


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def tree(root: Path) -> dict[str, bytes]:
    files = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    files.pop("lock", None)
    return files


def finish(bench: DiskBench) -> FakeProducer:
    """The producer comes back, and a good worker does what is left."""
    producer = FakeProducer(bench, "job", 1)
    producer.hello()
    bench.settle()
    bench.check()
    run_all(bench, bench.worker())
    bench.check()
    assert bench.status()["residual_items"] == 0
    assert not bench.fabric.store.items
    assert all(len(statuses) == 1 for statuses in producer.results.values()), producer.results
    return producer


def open_and_finish(root: Path) -> tuple[DiskBench, FakeProducer]:
    """A broker on a damaged directory, twice: what it told once is not told again."""
    bench = DiskBench(root, lanes=1)
    try:
        producer = finish(bench)
        found = bench.found
        producer.ack()
        for _ in range(3):
            bench.tick(1.0)
        results, upto = dict(producer.results), producer.upto
        bench.crash()
        heir = finish(bench)
        assert heir.upto >= upto
        assert not heir.results
        producer.results = results
        bench.found = found
        return bench, producer
    finally:
        bench.backing.close()


def bits_of(path: Path) -> Iterator[int]:
    """Bits of a file to flip: what is used, and some of what is padding."""
    size = path.stat().st_size
    header = read_header(path.read_bytes()[:HEADER_BYTES])
    used = len(path.read_bytes()[:HEADER_COPY_BYTES].rstrip(b"\0")) + 1
    spans = [
        (0, used, 40),
        (used, HEADER_COPY_BYTES, 4),
        (HEADER_COPY_BYTES, HEADER_COPY_BYTES + used, 40),
        (HEADER_COPY_BYTES + used, HEADER_BYTES, 4),
        (HEADER_BYTES, header.data_offset, 64),
        (header.data_offset, size, 220),
    ]
    for start, end, wanted in spans:
        for k in stride(8 * (end - start), wanted):
            yield 8 * start + k


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as handle:
        handle.seek(bit // 8)
        byte = handle.read(1)[0]
        handle.seek(bit // 8)
        handle.write(bytes([byte ^ 1 << bit % 8]))


# -- single bits ----------------------------------------------------------------------------------


def test_single_bit_of_a_segment_costs_at_most_its_record(template: Path, tmp_path: Path) -> None:
    for bit in bits_of(one(template, "segments", Shape.of("m", "a"))):
        root = tmp_path / str(bit)
        shutil.copytree(template, root)
        path = one(root, "segments", Shape.of("m", "a"))
        header = read_header(path.read_bytes()[:HEADER_BYTES])
        flip(path, bit)
        bench, producer = open_and_finish(root)
        found = bench.found
        assert set(producer.results) == set(range(1, ITEMS + 1)), f"bit {bit}"
        told = [n for n, s in producer.results.items() if s == [Status.QUARANTINED]]
        assert all(s in ([Status.OK], [Status.QUARANTINED]) for s in producer.results.values())
        assert len(told) <= 1
        assert not found.quarantined_files
        byte = bit // 8
        if byte < HEADER_BYTES:
            assert (found.healed, told) == (1, [])
        elif byte < header.data_offset:
            is_state = byte % STATE_BYTES < 4
            assert (found.healed, told) == (int(is_state), [])
        elif told:
            assert [(lost.owner, lost.number) for lost in found.quarantined] == [(0, told[0])]
            assert len(found.damaged) == 1
            assert list((root / "quarantine").iterdir())
        shutil.rmtree(root)


def test_every_live_entry_and_nothing_else_can_be_damaged(template: Path, tmp_path: Path) -> None:
    """One bit in each payload: a live item is told of, a completed one was over anyway."""
    path = one(template, "segments", Shape.of("m", "a"))
    data = path.read_bytes()
    header = read_header(data[:HEADER_BYTES])
    entries = [e for e in scan(header, data[header.data_offset :]) if isinstance(e, Entry)]
    assert [e.number for e in entries] == [*DONE, *ALIVE]
    for entry in entries:
        root = tmp_path / str(entry.number)
        shutil.copytree(template, root)
        flip(one(root, "segments", Shape.of("m", "a")), 8 * (entry.offset + ENTRY_HEADER_BYTES))
        bench, producer = open_and_finish(root)
        told = [n for n, s in producer.results.items() if s == [Status.QUARANTINED]]
        assert told == ([entry.number] if entry.number in ALIVE else [])
        assert len(bench.found.damaged) == 1
        assert set(producer.results) == set(range(1, ITEMS + 1))


def test_single_bit_of_a_result_costs_at_most_that_result(template: Path, tmp_path: Path) -> None:
    for bit in bits_of(one(template, "outbox")):
        root = tmp_path / str(bit)
        shutil.copytree(template, root)
        flip(one(root, "outbox"), bit)
        _, producer = open_and_finish(root)
        assert set(producer.results) == set(range(1, ITEMS + 1)), f"bit {bit}"
        told = [n for n, s in producer.results.items() if s == [Status.QUARANTINED]]
        assert len(told) <= 1
        assert set(told) <= set(DONE)
        shutil.rmtree(root)


def test_single_bit_of_the_catalog_refuses_the_start(template: Path, tmp_path: Path) -> None:
    size = (template / "catalog.log").stat().st_size
    for bit in stride(8 * size, 500):
        root = tmp_path / str(bit)
        shutil.copytree(template, root)
        flip(root / "catalog.log", bit)
        before = tree(root)
        with pytest.raises(StorageError, match=r"catalog\.log"):
            open_backing(root, "fsync", OsFiles(root))
        assert tree(root) == before
        shutil.rmtree(root)


def grown(template: Path, root: Path, *, sealed: bool) -> int:
    """A directory whose catalog has grown since its start; returns the size it started with."""
    shutil.copytree(template, root)
    bench = DiskBench(root, lanes=1)
    size = (root / "catalog.log").stat().st_size
    for name in ("x", "y"):
        producer = bench.producer(name)
        producer.submit([10, 20])
        bench.settle()
    if sealed:
        bench.backing.seal()
    bench.backing.close()
    return size


@pytest.mark.parametrize("sealed", [False, True])
def test_single_bit_behind_the_start_of_the_catalog(
    template: Path, tmp_path: Path, sealed: bool
) -> None:
    base = tmp_path / "base"
    start = grown(template, base, sealed=sealed)
    data = (base / "catalog.log").read_bytes()
    marks = [k - 8 for k in range(len(data)) if data.startswith(b"\x82\xa1t\xa6window", k)]
    for bit in stride(8 * (len(data) - start), 200):
        root = tmp_path / str(bit)
        shutil.copytree(base, root)
        flip(root / "catalog.log", 8 * start + bit)
        before = tree(root)
        try:
            bench = DiskBench(root, lanes=1)
        except StorageError:
            assert tree(root) == before
        else:
            # Only what was written last may pass for torn: after an end in order, nothing.
            assert start + bit // 8 >= marks[-1]
            assert bench.found.torn_bytes
            bench.check()
            finish(bench)
            bench.backing.close()
        shutil.rmtree(root)


# -- lengths --------------------------------------------------------------------------------------


def test_truncated_segment_loses_what_was_cut_and_no_more(template: Path, tmp_path: Path) -> None:
    path = one(template, "segments", Shape.of("m", "a"))
    data = path.read_bytes()
    header = read_header(data[:HEADER_BYTES])
    entries = [e for e in scan(header, data[header.data_offset :]) if isinstance(e, Entry)]
    for size in [0, *stride(len(data), 150), len(data) - 1]:
        root = tmp_path / str(size)
        shutil.copytree(template, root)
        os.truncate(one(root, "segments", Shape.of("m", "a")), size)
        bench, producer = open_and_finish(root)
        whole = {e.number for e in entries if e.offset + ENTRY_HEADER_BYTES + e.size <= size}
        right = {n for n, s in producer.results.items() if s == [Status.OK]}
        assert right >= whole | set(DONE) | set(range(7, ITEMS + 1)), f"{size} bytes"
        told = {n for n, s in producer.results.items() if s == [Status.QUARANTINED]}
        assert len(told) <= 1
        if size < header.data_offset:
            assert bench.found.quarantined_files or size == HEADER_BYTES
        shutil.rmtree(root)


def test_truncated_results_never_come_twice(template: Path, tmp_path: Path) -> None:
    size = one(template, "outbox").stat().st_size
    for length in [0, *stride(size, 100), size - 1]:
        root = tmp_path / str(length)
        shutil.copytree(template, root)
        os.truncate(one(root, "outbox"), length)
        _, producer = open_and_finish(root)
        assert set(producer.results) - {0} >= set(range(3, ITEMS + 1))
        shutil.rmtree(root)


@pytest.mark.parametrize("sealed", [None, False, True])
def test_truncated_catalog(template: Path, tmp_path: Path, sealed: bool | None) -> None:
    base = tmp_path / "base"
    if sealed is None:
        shutil.copytree(template, base)
    else:
        grown(template, base, sealed=sealed)
    size = (base / "catalog.log").stat().st_size
    for length in stride(size, 150):
        root = tmp_path / str(length)
        shutil.copytree(base, root)
        os.truncate(root / "catalog.log", length)
        before = tree(root)
        try:
            bench = DiskBench(root, lanes=1)
        except StorageError:
            assert tree(root) == before
        else:
            assert sealed is not None
            finish(bench)
            bench.backing.close()
        shutil.rmtree(root)


# -- whole files ----------------------------------------------------------------------------------


def test_missing_segment_is_noticed_where_numbers_have_a_hole(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, lanes=1)
    producer = bench.producer()
    producer.submit([100] * 3, [Shape.of("m", "a"), Shape.of("m", "b"), Shape.of("m", "c")])
    bench.settle()
    bench.backing.seal()
    bench.backing.close()
    one(tmp_path, "segments", Shape.of("m", "b")).unlink()
    bench, producer = open_and_finish(tmp_path)
    assert producer.results == {1: [Status.OK], 2: [Status.QUARANTINED], 3: [Status.OK]}
    assert producer.upto == 3


def test_foreign_files_are_left_or_set_aside_and_named(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    path = one(root, "segments", Shape.of("m", "a"))
    (root / "segments" / "README.txt").write_text("not ours")
    (root / "notes").write_text("not ours either")
    (path.parent / "empty.seg").touch()
    (path.parent / "garbage.seg").write_bytes(os.urandom(9_000))
    (path.parent / "folder.seg").mkdir()
    (path.parent / "link.seg").symlink_to("/etc/hostname")
    shutil.copy(path, path.parent / "0123456789abcdef.seg")
    elsewhere = root / "segments" / "m" / "0000000000000000" / "0"
    elsewhere.mkdir(parents=True)
    shutil.copy(path, elsewhere / path.name)
    shutil.copy(path, one(root, "outbox").parent / "fedcba9876543210.seg")
    bench, producer = open_and_finish(root)
    assert producer.results == {n: [Status.OK] for n in range(1, ITEMS + 1)}
    named = " ".join(bench.found.quarantined_files)
    for name in (
        "empty.seg: empty",
        "garbage.seg: neither header copy",
        "folder.seg: not a plain file",
        "link.seg: not a plain file",
        "0123456789abcdef.seg: its header does not fit its path",
        f"0000000000000000/0/{path.name}: its header does not fit its path",
        "fedcba9876543210.seg: its header does not fit its path",
    ):
        assert name in named
    assert len(bench.found.quarantined_files) == 7
    assert len(list((root / "quarantine").iterdir())) == 7
    assert (root / "segments" / "README.txt").read_text() == "not ours"
    assert (root / "notes").exists()


def test_header_whose_components_lack_its_signature_is_set_aside(
    template: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    from zfabric.segment import pack_header

    root = tmp_path / "data"
    shutil.copytree(template, root)
    path = one(root, "segments", Shape.of("m", "a"))
    data = bytearray(path.read_bytes())
    wrong = replace(read_header(bytes(data[:HEADER_BYTES])), components=(1, 2, 3))
    data[:HEADER_BYTES] = pack_header(wrong)
    path.write_bytes(data)
    bench, producer = open_and_finish(root)
    assert "signature" in bench.found.quarantined_files[0]
    assert {n for n, s in producer.results.items() if s == [Status.OK]} >= {7, 8, 9, 10}


def test_both_header_copies_damaged_sets_the_file_aside(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    path = one(root, "segments", Shape.of("m", "a"))
    before = path.read_bytes()
    flip(path, 8 * 20)
    flip(path, 8 * (HEADER_COPY_BYTES + 20))
    damaged = path.read_bytes()
    assert damaged != before
    bench, producer = open_and_finish(root)
    assert len(bench.found.quarantined_files) == 1
    (kept,) = (root / "quarantine").iterdir()
    assert kept.read_bytes() == damaged
    assert {n for n, s in producer.results.items() if s == [Status.OK]} >= {7, 8, 9, 10}


@pytest.mark.parametrize("part", ["segments", "outbox"])
def test_catalog_missing_beside_files_refuses_the_start(
    template: Path, tmp_path: Path, part: str
) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    (root / "catalog.log").unlink()
    shutil.rmtree(root / ("outbox" if part == "segments" else "segments"))
    before = tree(root)
    with pytest.raises(StorageError, match="missing beside"):
        open_backing(root, "fsync", OsFiles(root))
    assert tree(root) == before


# -- later releases -------------------------------------------------------------------------------


def newer_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for start in (0, HEADER_COPY_BYTES):
        _, _, size = struct.unpack_from("<8sII", data, start)
        struct.pack_into("<8sII", data, start, MAGIC, FORMAT + 1, size)
        end = start + 16 + size
        struct.pack_into("<I", data, end, zlib.crc32(data[start:end]))
    path.write_bytes(data)


def newer_catalog(path: Path) -> None:
    record = {"t": "store", "id": 1, "format": FORMAT + 1, "records": 1}
    path.write_bytes(catalogs.pack(record) + path.read_bytes())


def test_directory_of_format_1_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("zfabric.segment.pack_header.__defaults__", (1,))
        patch.setattr("zfabric.catalog.FORMAT", 1)
        patch.setattr("zfabric.entries.XXH3_KIND", CRC32_KIND)
        crc32 = SimpleNamespace(xxh3_64_intdigest=zlib.crc32)
        patch.setattr("zfabric.entries.xxhash", crc32)
        bench = DiskBench(tmp_path)
        bench.producer().submit([100] * 4)
        bench.settle()
        bench.backing.close()
    assert main(["segments", "verify", str(tmp_path)]) == 0, capsys.readouterr().out
    bench = DiskBench(tmp_path)
    assert (bench.found.healed, bench.found.damaged) == (0, [])
    finish(bench).submit([100], numbers=[5], after=4)
    bench.settle()
    bench.crash()
    assert (bench.found.healed, bench.found.damaged) == (0, [])
    assert set(finish(bench).results) == {1, 2, 3, 4, 5}
    bench.backing.close()


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (newer_header, lambda root: one(root, "segments", Shape.of("m", "b"))),
        (newer_header, lambda root: one(root, "outbox")),
        (newer_catalog, lambda root: root / "catalog.log"),
    ],
    ids=["segment", "results", "catalog"],
)
def test_newer_format_is_refused_untouched_with_both_versions(
    template: Path, tmp_path: Path, damage: Callable[[Path], None], where: Any
) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    # Other damage that would be repaired if it were not for the newer file.
    flip(one(root, "segments", Shape.of("m", "a")), 8 * 20)
    damage(where(root))
    before = tree(root)
    with pytest.raises(NewerFormat, match=rf"format {FORMAT + 1}.*up to {FORMAT}"):
        open_backing(root, "fsync", OsFiles(root))
    assert tree(root) == before


# -- state words ----------------------------------------------------------------------------------


def test_words_are_far_from_each_other() -> None:
    assert LIVE_WORD == 0
    for k, word in enumerate(WORDS):
        assert all((word ^ other).bit_count() >= 16 for other in WORDS[:k])


def test_damaged_word_is_the_nearest_or_live() -> None:
    for word in WORDS:
        assert decode_word(word) == (word, False)
        for first in range(32):
            for second in range(first):
                assert decode_word(word ^ 1 << first ^ 1 << second) == (word, True)
            assert decode_word(word ^ 1 << first) == (word, True)
    assert decode_word(0x5555_5555) == (LIVE_WORD, True)
    assert decode_word(TOMBSTONE_WORD ^ 0x1F) == (LIVE_WORD, True)


def test_absurd_attempts_are_clamped(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    path = one(root, "segments", Shape.of("m", "a"))
    with path.open("r+b") as handle:
        for place, attempts in ((2, 0xFFFF_FFFF), (3, 3), (4, 1)):
            handle.seek(word_offset(place) + 4)
            handle.write(struct.pack("<I", attempts))
    bench = DiskBench(root, lanes=1, attempts_max=3)
    assert sorted(bench.fabric.store.attempts.values()) == [1, 2, 2]
    # The next failure is the last, and one without failure is none.
    producer = finish(bench)
    assert producer.results == {n: [Status.OK] for n in range(1, ITEMS + 1)}
    bench.backing.close()


def test_words_of_cut_off_entries_do_not_mark_the_next_ones(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    path = one(root, "segments", Shape.of("m", "a"))
    header = read_header(path.read_bytes()[:HEADER_BYTES])
    with path.open("r+b") as handle:
        handle.seek(word_offset(3))
        handle.write(struct.pack("<II", TOMBSTONE_WORD, 0) * 3)
    data = path.read_bytes()
    entries = [e for e in scan(header, data[header.data_offset :]) if isinstance(e, Entry)]
    os.truncate(path, entries[3].offset)
    bench = DiskBench(root, lanes=1)
    producer = FakeProducer(bench, "job", 1, last=ITEMS)
    producer.hello()
    bench.settle()
    producer.submit([100] * 3)
    bench.settle()
    bench.crash()
    producer = finish(bench)
    assert {n for n in producer.results if n > ITEMS} == {11, 12, 13}
    bench.backing.close()


# -- errors of the system -------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ENOSPC])
def test_system_error_in_a_recovery_stops_the_start(
    template: Path, tmp_path: Path, code: int
) -> None:
    base = tmp_path / "base"
    shutil.copytree(template, base)
    # So that there is something to repair: a header, a word, an entry, a torn end, a foreign file.
    path = one(base, "segments", Shape.of("m", "a"))
    flip(path, 8 * 20)
    flip(path, 8 * word_offset(4))
    flip(path, 8 * (path.stat().st_size - 3))
    other = one(base, "segments", Shape.of("m", "b"))
    other.write_bytes(other.read_bytes() + b"torn")
    (other.parent / "garbage.seg").write_bytes(b"garbage")
    clean = FaultFiles(tmp_path / "clean")
    shutil.copytree(base, clean.root)
    first_change: list[int] = []
    clean.before = lambda number: first_change.append(clean.calls) if number == 1 else None
    backing, _ = open_backing(clean.root, "fsync", clean)
    backing.close()
    assert clean.calls > 20
    for at in range(clean.calls):
        root = tmp_path / str(at)
        shutil.copytree(base, root)
        before = tree(root)
        files = FaultFiles(root)
        files.fault = Fault(at, code)
        with pytest.raises(StorageError, match=os.strerror(code)) as caught:
            open_backing(root, "fsync", files)
        assert str(root) in str(caught.value)
        if at < first_change[0] - 1:
            assert tree(root) == before, "changed before all was read"
        _, producer = open_and_finish(root)
        assert set(producer.results) == set(range(1, ITEMS + 1))
        shutil.rmtree(root)


def test_descriptors_run_out_and_files_are_closed_for_others(
    template: Path, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    files = FaultFiles(root)
    backing, _ = open_backing(root, "fsync", files)
    paths = [one(root, "segments", Shape.of("m", "a")), one(root, "outbox")]
    for path in paths:
        backing.descriptors.get(path.name, lambda path=path: path)
    files.fault = Fault(files.calls, errno.EMFILE)
    opened = backing.descriptors.get("catalog.log", lambda: root / "catalog.log")
    assert opened.path == root / "catalog.log"
    files.fault = Fault(files.calls, errno.EMFILE, times=9)
    with pytest.raises(StorageError, match="Too many open files"):
        backing.descriptors.get("lock", lambda: root / "lock")
    backing.close()


def test_descriptors_and_lock_are_given_back_when_a_start_fails(
    template: Path, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    before = descriptors()
    for at in range(8):
        files = FaultFiles(root)
        files.fault = Fault(at, errno.EIO, times=99)
        with pytest.raises(StorageError):
            open_backing(root, "fsync", files)
    assert descriptors() == before
    backing, _ = open_backing(root, "fsync", OsFiles(root))
    backing.close()
    assert descriptors() == before


def test_full_disk_at_a_start_takes_the_reserve(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    (root / "reserve").write_bytes(bytes(1_000))
    files = FaultFiles(root)
    files.fault = Fault(0, errno.ENOSPC, kinds=frozenset({"write"}))
    backing, _ = open_backing(root, "fsync", files)
    assert not (root / "reserve").exists()
    backing.close()


def test_damage_of_several_bits_is_told_by_the_hole_in_the_numbers(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, lanes=1)
    producer = bench.producer()
    producer.submit([100] * 6)
    bench.settle()
    bench.backing.seal()
    bench.backing.close()
    path = one(tmp_path, "segments")
    data = bytearray(path.read_bytes())
    header = read_header(bytes(data[:HEADER_BYTES]))
    entries = [e for e in scan(header, bytes(data[header.data_offset :])) if isinstance(e, Entry)]
    data[entries[2].offset : entries[3].offset + 40] = os.urandom(
        entries[3].offset + 40 - entries[2].offset
    )
    path.write_bytes(data)
    bench, producer = open_and_finish(tmp_path)
    told = {n for n, s in producer.results.items() if s == [Status.QUARANTINED]}
    assert told == {3, 4}
    assert set(producer.results) == {1, 2, 3, 4, 5, 6}
    assert bench.found.damaged


def bad_signature(path: Path) -> None:
    data = bytearray(path.read_bytes())
    header = read_header(bytes(data[:HEADER_BYTES]))
    data[:HEADER_BYTES] = pack_header(replace(header, components=(*header.components, 5)))
    path.write_bytes(data)


def bad_word(path: Path) -> None:
    flip(path, 8 * (word_offset(0) + 2))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (bad_signature, "its components do not have its signature"),
        (bad_word, "its state word is damaged, item 7"),
    ],
)
def test_verify_tells_what_a_start_would_find(
    template: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    damage(one(root, "segments", Shape.of("m", "b")))
    assert main(["segments", "verify", str(root)]) == 1
    assert f": {reason}\n" in capsys.readouterr().out


def test_list_names_the_files_that_it_cannot_read(
    template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    bad_signature(one(root, "segments", Shape.of("m", "b")))
    assert main(["segments", "ls", str(root)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert err.count(": its components") == 1


def test_the_same_damage_in_two_files_is_counted_twice(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, lanes=1)
    producer = bench.producer()
    producer.submit([100] * 12, [Shape.of("m", "a"), Shape.of("m", "b")] * 6)
    bench.settle()
    bench.crash()
    bench.backing.close()
    for path in (tmp_path / "segments").rglob("*.seg"):
        begin = read_header(path.read_bytes()[:HEADER_BYTES]).data_offset
        with path.open("r+b") as handle:
            handle.seek(begin + 100)
            handle.write(bytes(100))
    bench, _ = open_and_finish(tmp_path)
    assert len(bench.found.damaged) == 2


def test_worker_is_never_given_a_damaged_payload(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(template, root)
    path = one(root, "segments", Shape.of("m", "a"))
    flip(path, 8 * (path.stat().st_size - 8))
    bench = DiskBench(root, lanes=1)
    worker: FakeWorker = bench.worker()
    for _ in range(20):
        bench.tick(0.3)
        bench.dispatch()
    payloads = {bytes(m.body[k : k + 1]) for m in worker.batches.values() for k in range(len(m))}
    assert payloads <= {b"p"}
    bench.backing.close()
