"""A disk that is full while files end: what is said at the end, what is given back, and when."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import zfabric.files as files
from tests.disk import DiskBench
from tests.faultfiles import Fault, FaultFiles
from tests.harness import FakeProducer, FakeWorker
from tests.test_disk_full import FullBench, SmallDisk
from tests.test_recovery import again
from zfabric import pins
from zfabric.errors import NoSpace
from zfabric.osfiles import OsFiles
from zfabric.protocol import Status, Type
from zfabric.segment import HEADER_BYTES
from zfabric.shapes import Shape

A, B, C = (Shape.of("m", name) for name in "abc")


class OddDisk(SmallDisk):
    """A disk that counts blocks, and may take a part of a write or no state words."""

    # bytes that the next writes of items get before there is no room
    cut: int | None = None
    no_words = False

    def write(self, path: Path, descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        items = "segments" in str(path)
        if items and self.cut is not None:
            os.pwrite(descriptor, b"".join(pieces)[: self.cut], offset)
            raise NoSpace(f"{path}: No space left on device")
        if items and self.no_words and offset >= HEADER_BYTES and len(pieces) == 1:
            raise NoSpace(f"{path}: No space left on device")
        # A hole in a sparse file takes no block.
        end, size = offset + sum(map(len, pieces)), path.stat().st_size
        grows = max(0, end - max(offset, -(-size // 4096) * 4096))
        if grows and self.used() + grows > self.size:
            raise NoSpace(f"{path}: No space left on device")
        return OsFiles.write(self, path, descriptor, pieces, offset)


class OddBench(FullBench):
    disk: OddDisk

    def __init__(self, root: Path, size: int = 50_000_000, **config: object) -> None:
        self.disk, self.min_free = OddDisk(root, size), 0
        DiskBench.__init__(self, root, **config)  # type: ignore[arg-type]

    def seal(self) -> None:
        if self.dispatcher.sync_wanted:
            self.backing.sync()
            self.dispatcher.synced()
        self.backing.seal(unwritten=self.fabric.store.unwritten)


def finish(bench: DiskBench, worker: FakeWorker, rounds: int) -> None:
    for _ in range(rounds):
        bench.now += 0.1
        worker.heartbeat()
        bench.dispatch(4)
        for key in list(worker.batches):
            worker.done(key)


def test_rows_without_room_during_the_last_sync_are_not_sealed_as_taken(tmp_path: Path) -> None:
    bench = FullBench(tmp_path, 200_000_000, min_free=0)
    producer, worker = bench.producer(), bench.worker(batch=8)
    producer.submit([100] * 2, shape=A, payload=b"x" * 2_000)
    bench.dispatcher.flush(bench.now)
    assert bench.dispatcher.sync_wanted, "the window is whole, and its sync runs"
    bench.disk.size = bench.disk.used() + 3_000_000
    order = [7, *range(7)]
    producer.submit([100] * 8, shape=[B] * 7 + [C], payload=b"x" * 1_000_000, order=order)
    bench.dispatcher.flush(bench.now)
    assert bench.fabric.store.unwritten and not bench.backing._owed_floors
    finish(bench, worker, 6)
    bench.backing.sync()
    bench.dispatcher.synced()
    bench.backing.seal(unwritten=bench.fabric.store.unwritten)
    bench.disk.size = 400_000_000
    bench.crash()
    producer.results.clear()
    again(bench, producer)
    assert producer.upto == 2, "3 to 9 were never stored: the producer sends them again"
    bench.check()


def test_numbers_that_found_no_room_are_not_told_as_lost_after_an_end_in_order(
    tmp_path: Path,
) -> None:
    bench = FullBench(tmp_path, 50_000_000, min_free=0)
    producer = bench.producer()
    producer.submit([100] * 4, shape=A, payload=b"x" * 2_000)
    bench.settle()
    bench.disk.size = bench.disk.used() + 75_000
    order = [*range(10, 20), *range(10)]
    producer.submit([100] * 20, shape=[B] * 10 + [C] * 10, payload=b"x" * 2_000, order=order)
    bench.settle()
    assert bench.fabric.store.unwritten
    bench.backing.seal(unwritten=bench.fabric.store.unwritten)
    bench.disk.size = 50_000_000
    bench.crash()
    assert not bench.found.quarantined
    again(bench, producer)
    assert (producer.upto, producer.results) == (4, {})
    bench.check()


def test_write_that_a_full_disk_tore_is_no_damage_after_an_end_in_order(tmp_path: Path) -> None:
    bench = OddBench(tmp_path)
    producer = bench.producer()
    producer.submit([100] * 4, payload=b"x" * 2_000)
    bench.settle()
    bench.disk.cut = 5_000
    producer.submit([100] * 6, payload=b"x" * 2_000)
    bench.settle()
    bench.seal()
    bench.disk.cut = None
    bench.crash()
    assert not bench.found.quarantined
    again(bench, producer)
    assert producer.upto == 4 and not producer.results, "what was written in part was taken back"
    bench.check()


def test_end_in_order_ends_where_state_words_find_no_room(tmp_path: Path) -> None:
    bench = OddBench(tmp_path)
    producer, worker = bench.producer(), bench.worker()
    producer.submit([100] * 8, payload=b"x" * 2_000)
    bench.settle()
    bench.dispatch()
    bench.disk.no_words = True
    for key in list(worker.batches):
        worker.done(key)
    bench.settle()
    bench.seal()
    assert bench.backing.has_work, "the words are owed still"
    bench.disk.no_words = False
    bench.crash()
    again(bench, producer)
    assert set(producer.results) == set(range(1, 9))
    assert bench.status()["completed_items"] == 8 and not bench.status()["ready_items"]
    bench.check()


def test_file_of_which_all_is_over_makes_room_for_what_waits_for_it(tmp_path: Path) -> None:
    bench = OddBench(tmp_path, 1_000_000, lease_s=6_000.0)
    producer, worker = bench.producer(), bench.worker(batch=8)
    while not bench.fabric.store.unwritten:
        producer.submit([100] * 20, payload=b"x" * 2_000)
        bench.settle()
    for _ in range(40):
        finish(bench, worker, 1)
        bench.settle()
        producer.ack()
        bench.tick(0.1)
    assert not bench.fabric.store.unwritten
    assert set(producer.results) == set(range(1, producer.last + 1))
    bench.check()


def test_hole_that_had_to_wait_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "HOLE_MIN_BYTES", 100_000)
    bench = FullBench(tmp_path, 50_000_000, min_free=0, lease_s=6_000.0)
    producer, worker = bench.producer(), bench.worker(batch=24)
    producer.submit([100] * 24, payload=b"x" * 32_768)
    bench.settle()
    bench.dispatch()
    (key,) = worker.batches
    worker.done(key, [k for k in range(24) if k != 11])
    bench.settle()
    producer.ack()
    bench.settle()
    bench.disk.size = bench.disk.used() + 60_000
    producer.submit([100] * 24, shape=B, payload=b"x" * 32_768)
    bench.settle()
    assert bench.fabric.store.unwritten
    for _ in range(4):
        bench.now += pins.PIN_CHECK_S
        worker.heartbeat()
        producer.send(Type.HEARTBEAT, {})
        bench.tick(0.2)
        producer.submit([100], shape=B, payload=b"x")
        bench.settle()
    bench.disk.size = 50_000_000
    for _ in range(4):
        bench.tick(0.3)
        bench.settle()
    holes = [hole for s in bench.fabric.store._slots.values() for hole in s.holes or ()]
    assert [(hole.first, hole.stop) for hole in holes] == [(0, 11), (12, 24)]
    assert bench.status()["completed_items"] == 23
    bench.check()
    bench.crash()
    assert bench.status()["completed_items"] == 23
    bench.check()


def test_results_are_unlinked_in_their_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.FileBacking, "segment_items_max", 5)

    class Watched(DiskBench):
        def files(self) -> OsFiles:
            return watched

    watched = FaultFiles(tmp_path / "a")
    bench = Watched(tmp_path / "a")
    producer, worker = bench.producer(), bench.worker(batch=4)
    producer.submit([100] * 14)
    finish_all(bench, producer, worker)
    first = len(watched.ops)
    producer.send(Type.RESULT_ACK, {"upto": 10})
    for _ in range(3):
        bench.settle()
        bench.tick(0.3)
    unlinks = [
        k for k, op in enumerate(watched.ops)
        if k >= first and op.kind == "unlink" and "outbox" in op.path
    ]  # fmt: skip
    assert len(unlinks) == 2
    for number, at in enumerate(unlinks):
        place = tmp_path / f"killed{number}"
        watched.killed(at).put(place)
        left = DiskBench(place).fabric.producers[0]
        assert left is not None
        told = [result.number for result in left.outbox._results]
        assert (left.outbox.acked, told) == (10, [11, 12, 13, 14])


def finish_all(bench: DiskBench, producer: FakeProducer, worker: FakeWorker) -> None:
    bench.settle()
    while len(producer.results) < producer.last:
        finish(bench, worker, 1)
        bench.settle()
    assert set(map(tuple, producer.results.values())) == {(Status.OK,)}


def test_files_of_results_go_oldest_first_although_their_words_found_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.FileBacking, "segment_items_max", 2)
    disk = FaultFiles(tmp_path / "run")

    class Bench(DiskBench):
        def files(self) -> OsFiles:
            return disk

    bench = Bench(disk.root)
    producer, worker = bench.producer(), bench.worker(batch=2)
    for _ in range(3):
        producer.submit([100] * 2)
        bench.settle()
        bench.tick(0.3)
        bench.dispatch()
        for key in list(worker.batches):
            worker.done(key)
        bench.settle()
        worker.heartbeat()
    producer.send(Type.RESULT_ACK, {"upto": 2})
    bench.dispatcher.flush(bench.now)
    # The second file is read while the sync runs after which the first one's words find no room.
    producer.send(Type.RESULT_ACK, {"upto": 4})
    disk.fault = Fault(0, errno.ENOSPC, 1, frozenset({"write"}))
    bench.backing.sync()
    bench.dispatcher.synced()
    first = len(disk.ops)
    for _ in range(4):
        bench.tick(0.3)
    bench.backing.close()
    gone = [
        at
        for at, op in enumerate(disk.ops)
        if at >= first and op.kind == "unlink" and op.path.startswith("outbox")
    ]
    assert len(gone) == 2
    disk.killed(gone[1]).put(tmp_path / "killed")
    found = DiskBench(tmp_path / "killed")
    heir = FakeProducer(found, "job", 1)
    heir.hello()
    found.settle()
    assert heir.results == {5: [Status.OK], 6: [Status.OK]}
    found.check()
