"""A full disk refuses what is new, finishes what is in hand, and needs no restart to recover."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.disk import DiskBench
from tests.harness import FakeProducer
from tests.test_recovery import again, run_all
from zfabric import diskroom
from zfabric.entries import ENTRY_HEADER_BYTES
from zfabric.errors import NoSpace
from zfabric.osfiles import OsFiles
from zfabric.pins import Hole
from zfabric.protocol import Status, Type
from zfabric.segment import CAPACITY, HEADER_BYTES, STATE_BYTES
from zfabric.shapes import Shape


class SmallDisk(OsFiles):
    """A disk of `size` bytes, of which writes behind the end of files take their part."""

    def __init__(self, root: Path, size: int) -> None:
        super().__init__(root)
        self.size = size

    def used(self) -> int:
        return sum(p.stat().st_blocks * 512 for p in self.root.rglob("*") if p.is_file())

    def write(self, path: Path, descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        grows = offset + sum(map(len, pieces)) - path.stat().st_size
        if grows > 0 and self.used() + grows > self.size:
            raise NoSpace(f"{path}: No space left on device")
        return super().write(path, descriptor, pieces, offset)

    def reserve(self, path: Path, size: int) -> None:
        """None here: the test is about the writes that fail."""

    def free_bytes(self) -> int:
        return max(0, self.size - self.used())


class NoInodes(SmallDisk):
    """A disk with bytes enough that at times takes no new file."""

    takes_files = True

    def open(self, path: Path, *, create: bool = False) -> int:
        if create and not self.takes_files and not path.exists():
            raise NoSpace(f"{path}: No space left on device")
        return super().open(path, create=create)


class NoNewPages(NoInodes):
    """A disk that is full to the last block: no page of state words is added to a file."""

    takes_pages = True

    def write(self, path: Path, descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        if not self.takes_pages and HEADER_BYTES <= offset < HEADER_BYTES + STATE_BYTES * CAPACITY:
            raise NoSpace(f"{path}: No space left on device")
        return super().write(path, descriptor, pieces, offset)


class TakesSome(OsFiles):
    """A disk that takes no more than `room` bytes, and as many of a write as still fit."""

    room: int | None = None

    def _write_some(
        self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int
    ) -> int:
        data = b"".join(pieces)
        if self.room is None or offset + len(data) <= os.fstat(descriptor).st_size:
            return super()._write_some(descriptor, pieces, offset)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super()._write_some(descriptor, [data[: self.room]], offset)
        self.room -= written
        return written

    def reserve(self, path: Path, size: int) -> None:
        """None here: the test is about a write that ends half way."""


class FullBench(DiskBench):
    def __init__(self, root: Path, size: int, *, min_free: int, **config: object) -> None:
        self.disk = NoNewPages(root, size)
        self.min_free = min_free
        super().__init__(root, **config)  # type: ignore[arg-type]

    def files(self) -> OsFiles:
        return self.disk

    def start_broker(self, boot: int) -> None:
        super().start_broker(boot)
        self.backing.room.min_free_bytes = self.min_free


def refusals(producer: FakeProducer) -> list[str]:
    return [
        m.fields["code"] for m in producer.inbox if m.kind is Type.ACCEPTED and "code" in m.fields
    ]


@pytest.mark.parametrize("min_free", [0, 300_000])
def test_full_disk_refuses_and_recovers_without_a_restart(tmp_path: Path, min_free: int) -> None:
    bench = FullBench(tmp_path, 1_000_000, min_free=min_free)
    producer = bench.producer()
    sent = 0
    for _ in range(60):
        bench.now += 0.3
        producer.submit([100] * 20, payload=b"x" * 2_000)
        bench.settle()
        sent += 20
        if "storage_full" in refusals(producer) or producer.upto < sent:
            break
    accepted = producer.upto
    assert 0 < accepted < sent
    worker = bench.worker(batch=8)
    bench.dispatch(2)
    for key in list(worker.batches):
        worker.done(key)
    if min_free:
        bench.settle()
        assert "storage_full" in refusals(producer)
        assert len(producer.results) == 16
    bench.disk.size = 50_000_000
    bench.now += 1.0
    bench.settle()
    producer.last = producer.upto
    producer.submit([100] * 20)
    bench.settle()
    assert producer.upto >= accepted + 20
    run_all(bench, worker)
    assert set(producer.results) == set(range(1, producer.upto + 1))
    assert all(statuses == [Status.OK] for statuses in producer.results.values())
    bench.check()


def test_what_was_accepted_before_the_disk_filled_survives_a_crash(tmp_path: Path) -> None:
    bench = FullBench(tmp_path, 600_000, min_free=0)
    producer = bench.producer()
    for _ in range(40):
        producer.submit([100] * 20, payload=b"x" * 2_000)
        bench.settle()
    accepted = producer.upto
    bench.crash()
    again(bench, producer)
    assert producer.upto >= accepted
    bench.disk.size = 50_000_000
    bench.now += 1.0
    run_all(bench, bench.worker())
    assert set(range(1, accepted + 1)) <= set(producer.results)
    bench.check()


def test_producer_is_never_told_of_items_that_the_disk_did_not_take(tmp_path: Path) -> None:
    bench = FullBench(tmp_path, 400_000, min_free=0)
    producer = bench.producer()
    while not bench.fabric.store.unwritten:
        producer.submit([100] * 20, payload=b"x" * 2_000)
        bench.settle()
    told = producer.upto
    producer.hello()
    bench.settle()
    assert producer.upto == told
    assert producer.inbox[-1].fields["code"] == "storage_full"
    bench.crash()
    bench.disk.size = 50_000_000
    again(bench, producer)
    assert producer.upto >= told
    bench.check()


def test_end_in_order_promises_nothing_that_a_full_disk_did_not_take(tmp_path: Path) -> None:
    bench = FullBench(tmp_path, 50_000_000, min_free=0)
    producer, worker = bench.producer(), bench.worker()
    for name in ("a", "b"):
        producer.submit([100] * 10, shape=Shape.of("m", name), payload=b"x" * 2_000)
    bench.settle()
    bench.dispatch()
    first, last = list(worker.batches)
    bench.disk.size = bench.disk.used() + 45_000
    producer.submit([100] * 20, shape=Shape.of("m", "c"), payload=b"x" * 2_000)
    worker.done(first)
    bench.settle()
    assert bench.fabric.store.unwritten
    # A hole that is due then must not keep the end from coming.
    segments = bench.fabric.store._slots.values()
    segment = next(s for s in segments if s.queue.shape == Shape.of("m", "b"))
    hole = Hole(0, 1, segment.file.begin_of(0), segment.file.end_of(0))
    bench.backing._open_window.holes.append((segment, [hole]))
    worker.done(last)
    bench.backing.seal(unwritten=bench.fabric.store.unwritten)
    bench.disk.size = 50_000_000
    bench.crash()
    again(bench, producer)
    assert producer.upto == 20
    bench.check()


class Reserving(OsFiles):
    """A disk with `size` bytes for the reserve and whatever else."""

    size = 0

    def free_bytes(self) -> int:
        return self.size - diskroom.RESERVE_BYTES * self.exists(self.root / diskroom.RESERVE)

    def reserve(self, path: Path, size: int) -> None:
        path.touch()


def test_the_reserve_itself_does_not_fill_the_disk(tmp_path: Path) -> None:
    disk = Reserving(tmp_path)
    disk.size = diskroom.MIN_FREE_BYTES + 3 * diskroom.RESERVE_BYTES
    room = diskroom.DiskRoom(disk)

    def looks(start: int) -> list[bool]:
        return [room.refusal(float(start + k), lambda: 0) is not None for k in range(6)]

    assert looks(0) == [False] * 6
    assert room.reserve_bytes
    # Others fill the disk; there is room without the reserve and none with it.
    disk.size = diskroom.MIN_FREE_BYTES + diskroom.RESERVE_BYTES - 1
    assert looks(10) == [True] + [False] * 5
    assert not room.reserve_bytes
    disk.size = diskroom.MIN_FREE_BYTES - 1
    assert looks(20) == [True] * 6
    disk.size = diskroom.MIN_FREE_BYTES + diskroom.RESERVE_BYTES
    assert looks(30) == [False] * 6
    assert room.reserve_bytes


def test_reserve_without_blocks_gets_them_at_the_next_start(tmp_path: Path) -> None:
    reserve = tmp_path / diskroom.RESERVE
    reserve.touch()
    room = diskroom.DiskRoom(OsFiles(tmp_path))
    room.min_free_bytes = 0
    assert room.refusal(1.0, lambda: 0) is None
    assert 512 * reserve.stat().st_blocks >= diskroom.RESERVE_BYTES
    assert room.give_up_reserve()
    assert not reserve.exists()


def test_half_a_write_that_met_the_end_of_the_disk_is_not_found_again(tmp_path: Path) -> None:
    disk = TakesSome(tmp_path)

    class Halfway(DiskBench):
        def files(self) -> OsFiles:
            return disk

    bench = Halfway(tmp_path)
    producer, worker = bench.producer(), bench.worker()
    producer.submit([100] * 4)
    bench.settle()
    bench.dispatch()
    disk.room = 3 * ENTRY_HEADER_BYTES + 30
    producer.submit([100] * 4, payload=b"12345678")
    for key in list(worker.batches):
        worker.done(key)
    # The file of what is done gives way, and the rest is stored in another when there is room.
    bench.dispatcher.flush(bench.now)
    assert bench.fabric.store.no_space
    disk.room = None
    bench.now += 1.0
    bench.dispatcher.flush(bench.now)
    assert not bench.fabric.store.unwritten
    bench.crash()
    again(bench, producer)
    run_all(bench, bench.worker())
    assert producer.results == {n: [Status.OK] for n in range(1, 9)}
    bench.check()


def replies(producer: FakeProducer) -> list[bool]:
    return [m.fields["ok"] for m in producer.inbox if m.kind is Type.REPLY]


@pytest.mark.parametrize("ends", ["killed", "in order"])
def test_requeued_item_that_the_disk_did_not_take_is_dead_still(tmp_path: Path, ends: str) -> None:
    bench = FullBench(tmp_path, 50_000_000, min_free=0, attempts_max=1)
    producer = bench.producer_of_dead(payload=b"x" * 30_000)
    bench.disk.size = bench.disk.used() + 20_000
    producer.send(Type.REQUEST, {"id": 1, "op": "dead.requeue", "args": {"all": True}})
    for _ in range(5):
        bench.tick(0.3)
    assert bench.fabric.store.no_space
    assert replies(producer) == []
    if ends == "in order":
        bench.backing.sync()
        bench.dispatcher.synced()
        bench.backing.seal()
    bench.disk.size = 50_000_000
    bench.crash()
    assert [record.number for record in bench.fabric.dead] == [1]
    assert bench.fabric.store.items == 0
    bench.check()


@pytest.mark.parametrize("ends", ["killed", "in order"])
@pytest.mark.parametrize("read", [False, True])
def test_requeued_item_that_is_over_is_not_dead_again(
    tmp_path: Path, ends: str, *, read: bool
) -> None:
    bench = FullBench(tmp_path, 50_000_000, min_free=0, attempts_max=1)
    producer = bench.producer_of_dead(payload=b"x" * 3_000)
    worker = bench.worker("gpu1", instance=2)
    producer.submit([100], Shape.of("m", "b"), payload=b"x" * 60_000)
    bench.tick(1.0)
    bench.dispatch()
    (key,) = worker.batches
    worker.start(key)
    worker.give_back(key, "out_of_memory")
    producer.ack()
    bench.tick(1.0)
    # Of the two the disk takes the first, which is done while the other waits for room.
    bench.disk.size = bench.disk.used() + 60_000
    producer.send(Type.REQUEST, {"id": 1, "op": "dead.requeue", "args": {"all": True}})
    bench.tick(1.0)
    worker.heartbeat()
    bench.dispatch()
    (key,) = worker.batches
    worker.done(key)
    bench.settle()
    assert sorted(producer.results.values()) == [[Status.OK], [Status.DEAD], [Status.DEAD]]
    if read:
        producer.ack()
    for _ in range(4):
        bench.tick(1.0)
    assert bench.fabric.store.no_space
    if ends == "in order":
        bench.backing.seal(unwritten=True)
    bench.disk.size = 50_000_000
    bench.crash()
    assert [record.number for record in bench.fabric.dead] == [2]
    assert bench.status()["ready_items"] == 0
    bench.check()


def test_requeue_is_answered_when_there_is_room_and_its_item_survives(tmp_path: Path) -> None:
    bench = FullBench(tmp_path, 50_000_000, min_free=0, attempts_max=1)
    producer = bench.producer_of_dead(payload=b"x" * 30_000)
    bench.disk.size = bench.disk.used() + 20_000
    producer.send(Type.REQUEST, {"id": 1, "op": "dead.requeue", "args": {"all": True}})
    bench.tick(0.3)
    bench.disk.size = 50_000_000
    bench.tick(0.3)
    assert replies(producer) == [True]
    bench.crash()
    again(bench, producer)
    assert not len(bench.fabric.dead)
    run_all(bench, bench.worker())
    assert sorted(status for statuses in producer.results.values() for status in statuses) == [
        Status.OK,
        Status.DEAD,
    ]
    bench.check()


def test_what_waits_for_a_file_is_bounded_and_written_when_there_is_one(tmp_path: Path) -> None:
    bench = FullBench(tmp_path, 50_000_000, min_free=0, attempts_max=1)
    producer = bench.producer_of_dead(payload=b"x")
    bench.disk.takes_files = False
    waiting = []
    for _ in range(20):
        producer.submit([100] * 8, Shape.of("m", "new"), payload=bytes(10_000))
        bench.tick(0.3)
        waiting.append(bench.fabric.store.items)
    assert bench.backing.full(bench.now) is None
    assert waiting == [8] * 20
    assert producer.upto == 1
    assert "inodes" in producer.ask("dead.requeue", all=True)
    assert bench.status()["storage"]["full"].startswith("the disk is full")
    bench.disk.takes_files = True
    bench.tick(0.3)
    # Nobody sent anything: what waited was written, and the refusal says where to go on.
    assert producer.upto == 9
    assert refusals(producer) == ["storage_full"]
    producer.submit([100] * 8, Shape.of("m", "new"), numbers=list(range(10, 18)), after=9)
    bench.tick(1.0)
    assert producer.upto == 17
    assert bench.status()["storage"]["full"] is None
    bench.check()


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("room", [180_000, 50_000_000])
def test_cancel_ends_what_the_disk_did_not_take_yet(
    tmp_path: Path, room: int, *, joins: bool
) -> None:
    bench = FullBench(tmp_path, 50_000_000, min_free=0)
    producer = bench.producer()
    producer.submit([100] * 4, payload=b"x" * 2_000)
    bench.settle()
    full = bench.disk.size = bench.disk.used() + 1_000
    for name in ("b", "c"):
        producer.submit([100] * 5, Shape.of("m", name), payload=b"x" * 20_000)
    bench.settle()
    producer.ask("producers.cancel", name="job")
    for _ in range(20):
        bench.tick(0.3)
        assert not bench.dispatcher.busy
    assert set(producer.results) <= set(range(1, 5))
    worker = bench.worker("gpu1", instance=2)
    bench.disk.size = full + room
    if joins:
        # What it is told to be accepted must be stored, which is no reason to hand it out.
        FakeProducer(bench, "other", 2).hello()
    for _ in range(3):
        bench.tick(0.3)
        assert bench.dispatch() == 0
    # Where one shape alone fits, its end makes room for the other.
    assert bench.status()["cancelled_items"] == 14
    bench.disk.size = 50_000_000
    for _ in range(3):
        bench.tick(0.3)
        assert bench.dispatch() == 0
    assert producer.results == {n: [Status.CANCELLED] for n in range(1, 15)}
    producer.submit([100], Shape.of("m", "b"))
    run_all(bench, worker)
    assert producer.results[15] == [Status.OK]
    bench.check()


def test_cancel_leaves_what_is_submitted_after_it(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    producer = bench.producer()
    # A sync runs, and what comes in meanwhile is written when it is over.
    producer.submit([100])
    bench.dispatcher.flush(bench.now)
    assert bench.dispatcher.sync_wanted
    producer.submit([100])
    producer.send(Type.REQUEST, {"id": 1, "op": "producers.cancel", "args": {"name": "job"}})
    bench.dispatcher.tick(bench.now, 1e6, drained=True)
    producer.submit([100])
    bench.settle()
    bench.tick(0.3)
    run_all(bench, bench.worker())
    assert producer.results == {1: [Status.CANCELLED], 2: [Status.CANCELLED], 3: [Status.OK]}
    bench.check()


@pytest.mark.parametrize("kind", ["out_of_memory", "lease"])
def test_charge_that_finds_no_room_is_written_when_there_is_some(tmp_path: Path, kind: str) -> None:
    bench = FullBench(tmp_path, 50_000_000, min_free=0, attempts_max=3)
    producer, worker = bench.producer(), bench.worker()
    producer.submit([100] * 3)
    bench.settle()
    bench.dispatch()
    (key,) = worker.batches
    worker.start(key)
    bench.disk.takes_pages = False
    if kind == "lease":
        worker.cut()
        bench.tick(6.0)
        bench.tick(6.0)
    else:
        worker.give_back(key, kind)
        bench.settle()
    bench.tick(1.0)
    bench.check()
    assert set(bench.fabric.store.attempts.values()) == {1}
    bench.disk.takes_pages = True
    producer.submit([100], Shape.of("m", "b"))
    bench.settle()
    bench.crash()
    assert list(bench.fabric.store.attempts.values()) == [1, 1, 1]
    again(bench, producer)
    run_all(bench, bench.worker("gpu1", instance=2))
    assert producer.results == {n: [Status.OK] for n in range(1, 5)}
    bench.check()
