"""A crash at every point of a run: nothing accepted is lost, nothing is visible twice.

One run of a broker on a directory is recorded, with what its peers knew at each operation. For each
operation the files are as SIGKILL or a power loss leaves them there; a new broker opens them, the
producers send again what was not acknowledged to them, and good workers finish everything.

A sample of the points is tried; CRASH_POINTS=all tries every one.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.disk import DiskBench
from tests.faultfiles import Crash, Fault, FaultFiles, Image
from tests.harness import PATIENCE_TURNS, Bench, FakeProducer, FakeWorker
from zfabric.cataloglog import CATALOG
from zfabric.errors import NoSpace, StorageError
from zfabric.files import FileBacking
from zfabric.osfiles import OsFiles
from zfabric.outbox import Stored
from zfabric.protocol import BROKER_NUMBERS_FROM, Message, Status, Type, packed
from zfabric.shapes import Shape

ALL_POINTS = os.environ.get("CRASH_POINTS") == "all"
POINTS_MAX = 45
SEEDS = range(4) if ALL_POINTS else range(2)
A, B, OTHER = Shape.of("m", "a"), Shape.of("m", "b"), Shape.of("other", "a")
# Payloads are long enough for a torn write to end within some entries and between others.
PAYLOAD_MAX = 400


class Job(FakeProducer):
    """A producer whose items can be told apart, and which keeps what it may have to send again."""

    def __init__(self, bench: Bench, name: str, instance: int = 1) -> None:
        super().__init__(bench, name, instance)
        self.items: dict[int, tuple[int, Shape, bytes]] = {}
        # the highest number that it was told is accepted
        self.promised = 0
        self.told = 0

    def hello(self) -> None:
        """As a real client: said again while the disk is full."""
        super().hello()
        for _ in range(PATIENCE_TURNS):
            self.bench.settle()
            last = self.inbox[-1] if self.inbox else None
            if last is None or last.fields.get("code") != "storage_full":
                return
            super().hello()

    def put(self, numbers: list[int], lengths: list[int], shapes: list[Shape], *, big: int = 0):
        """Submit items; the one numbered `big` is over the limit."""
        for number, length, shape in zip(numbers, lengths, shapes, strict=True):
            size = PAYLOAD_MAX + 1 if number == big else 150 + 37 * number % 200
            payload = b"%s:%d " % (self.name.encode(), number)
            self.items[number] = (length, shape, payload.ljust(size, b"."))
        self._send(numbers)
        self.last = numbers[-1]

    def _send(self, numbers: list[int]) -> None:
        rows = [self.items[number] for number in numbers]
        ids = [self.declare(shape) for _, shape, _ in rows]
        before = max((n for n in self.items if n < numbers[0]), default=0)
        columns = [
            packed("Q", numbers),
            packed("I", [length for length, _, _ in rows]),
            packed("I", [len(payload) for _, _, payload in rows]),
            packed("I", ids),
            packed("I", []),
        ]
        body = b"".join(payload for _, _, payload in rows)
        self.send(Type.SUBMIT, {"after": min(before, self.told), "more": False}, columns, body)

    def hear(self, frames: list[bytes]) -> None:
        super().hear(frames)
        if self.inbox[-1].kind in (Type.WELCOME, Type.ACCEPTED):
            self.promised = max(self.promised, self.upto)
            self.told = self.upto

    def send_again(self) -> None:
        """Everything that it was not told is accepted, in two messages."""
        open_numbers = sorted(n for n in self.items if n > self.upto)
        half = len(open_numbers) // 2
        for part in (open_numbers[:half], open_numbers[half:]):
            if part:
                self._send(part)


@dataclass
class Known:
    """What the peers know at a point of the run."""

    jobs: list[Job] = field(default_factory=list)
    batches: dict[tuple[int, int], Message] = field(default_factory=dict)
    boot: int = 0


def finish(worker: FakeWorker, key: tuple[int, int], most: int | None = None) -> None:
    """Results for a batch, or its first items, that say which item they are of."""
    message = worker.batches[key]
    payloads = [b"done " + payload for payload in payloads_of(message)][:most]
    count = len(payloads)
    columns = [
        packed("Q", message.columns["nonces"][:count]),
        packed("I", message.columns["entries"][:count]),
        packed("B", [Status.OK] * count),
        packed("I", [len(payload) for payload in payloads]),
    ]
    worker.send(Type.DONE, {"epoch": key[0], "n": key[1]}, columns, b"".join(payloads))
    if count == len(message):
        worker.forget(key)


def payloads_of(message: Message) -> list[bytes]:
    sizes = message.columns["sizes"]
    ends = list(itertools.accumulate(sizes))
    return [bytes(message.body[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def item_of(payload: bytes) -> tuple[str, int]:
    name, number = payload.split()[0].decode().split(":")
    return name, int(number)


class RecordedBench(DiskBench):
    """A broker whose syncs take a turn of the loop, and whose files keep a journal."""

    def __init__(self, faults: FaultFiles) -> None:
        self.faults = faults
        self.backing = None
        # what happens while the next sync runs
        self.meanwhile: Callable[[], None] | None = None

    def open(self, durability: str) -> None:
        """Start the first broker."""
        DiskBench.__init__(self, self.faults.root, durability=durability, **CONFIG)

    def files(self) -> OsFiles:
        return self.faults

    def settle(self) -> None:
        for _ in range(12):
            Bench.settle(self)
            if not self.dispatcher.sync_wanted:
                return
            covers = self.faults.begin_sync()
            happens, self.meanwhile = self.meanwhile, None
            if happens is not None:
                happens()
                Bench.settle(self)
            self.faults.end_sync(covers)
            self.dispatcher.synced()


CONFIG: dict[str, Any] = {"lanes": 3, "attempts_max": 2, "payload_bytes_max": PAYLOAD_MAX}


def scenario(bench: RecordedBench, note: Callable[[list[Job], FakeWorker], None]) -> None:
    """Everything that leaves traces on disk."""
    a, b, c = Job(bench, "a"), Job(bench, "b"), Job(bench, "c")
    worker = FakeWorker(bench, "gpu0", 1)
    note([a, b, c], worker)
    # HELLO and the first items in one turn: the producer's record and the items are in one window.
    a.hello()
    a.put([1, 2, 3, 4, 5], [10, 200, 900, 11, 12], [A, A, A, B, B])
    bench.settle()
    b.hello()
    bench.settle()
    b.put([10, 20, 21, 40], [50, 60, 70, 300], [A, OTHER, A, B], big=21)
    bench.settle()
    worker.hello(batch=2)
    worker.heartbeat(window=3)
    bench.settle()
    bench.dispatch(3)
    # While the sync of these results runs, more comes in and more is finished.
    first, others = list(worker.batches)[:1], list(worker.batches)[1:]
    for key in first:
        worker.start(key)
        finish(worker, key)

    def more() -> None:
        a.put(list(range(6, 14)), [20, 21, 22, 23, 24, 800, 801, 30], [A] * 4 + [B] * 4)
        for key in others:
            if key in worker.batches:
                finish(worker, key, 1)

    bench.meanwhile = more
    bench.settle()
    a.ack()
    bench.settle()
    for key in list(worker.batches):
        worker.give_back(key, "leaving")
    bench.settle()
    # One item takes its engine with it until it is given up; an operator sends it out again.
    worker.hello(batch=1)
    worker.heartbeat(window=1)
    bench.settle()
    for _ in range(40):
        if any(Status.DEAD in statuses for job in (a, b) for statuses in job.results.values()):
            break
        bench.tick(0.3)
        bench.dispatch(1)
        for key in list(worker.batches):
            worker.start(key)
            worker.give_back(key, "engine_exit")
        bench.settle()
    records = a.ask("dead.ls")[:1]
    a.put([14, 15], [40, 41], [A, A])
    for record in records:
        a.ask("dead.requeue", ids=[record["id"]])
    bench.settle()
    c.hello()
    c.put([1, 2, 3], [10, 10, 10], [A, B, OTHER])
    bench.settle()
    b.ask("producers.cancel", name="b")
    bench.tick(0.1)
    b.ack()
    bench.settle()
    c.cut()
    bench.settle()
    bench.dispatcher.unreachable("producers", c.routing_id, "gone", bench.now)
    a.ask("producers.forget", name="c", force=True)
    bench.tick(0.1)
    bench.crash()
    for job in (a, b):
        job.hello()
    bench.settle()
    b.put([50, 60, 61], [50, 51, 52], [A, A, B])
    bench.settle()
    work_off(bench, worker, [a, b])
    a.ack()
    b.ack()
    for _ in range(4):
        bench.tick(0.3)
    a.put([20, 21], [70, 71], [A, A])
    bench.settle()
    work_off(bench, worker, [a, b])
    a.ack()
    for _ in range(4):
        bench.tick(0.3)


def work_off(
    bench: Bench,
    worker: FakeWorker,
    jobs: list[Job],
    see: Callable[[Message], None] = lambda message: None,
) -> None:
    """A worker for each model does everything there is."""
    worker.cut()
    worker.instance += 1
    worker.batches.clear()
    other = FakeWorker(bench, "other", worker.instance)
    # A name whose holder may live is refused once; by the second try it is known to be dead.
    for _ in range(2):
        worker.hello(batch=4)
        other.hello(batch=4, model="other")
        bench.settle()
    for _ in range(200):
        bench.tick(0.3)
        for one in (worker, other):
            one.heartbeat()
        for job in jobs:
            job.send(Type.HEARTBEAT, {})
        if not bench.dispatch() and not bench.fabric.store.items:
            break
        for one in (worker, other):
            for key in list(one.batches):
                see(one.batches[key])
                finish(one, key)
        bench.settle()
    bench.settle()
    other.cut()


class Recording:
    """A run, its journal, and what was known at each of its operations."""

    def __init__(
        self,
        root: Path,
        durability: str,
        crash_at: int | None = None,
        fault: Fault | None = None,
        write_max: int | None = None,
    ) -> None:
        self.known: list[Known] = []
        self._peers: tuple[list[Job], FakeWorker | None] = ([], None)
        self._latest: tuple[Any, Known] = (None, Known())
        self.faults = FaultFiles(root)
        self.faults.before = self._note
        self.faults.crash_at, self.faults.fault = crash_at, fault
        self.faults.write_max = write_max
        self.ended_by: BaseException | None = None
        bench = RecordedBench(self.faults)
        try:
            bench.open(durability)
            scenario(bench, self._meet)
        except (Crash, StorageError) as error:
            self.ended_by = error
            self.faults.dead, self.faults.crash_at, self.faults.fault = False, None, None
        else:
            bench.check()
            assert not bench.fabric.store.items
        self.known.append(self._known())
        if bench.backing is not None:
            bench.backing.close()

    def _meet(self, jobs: list[Job], worker: FakeWorker) -> None:
        self._peers = (jobs, worker)

    def _known(self) -> Known:
        jobs, worker = self._peers
        if worker is None:
            return Known()
        stamp = (
            [(j.last, j.upto, j.seq, len(j.items), j.routing_id) for j in jobs],
            list(worker.batches),
        )
        if self._latest[0] != stamp:
            copies = []
            for job in jobs:
                twin = copy.copy(job)
                twin.items, twin.payloads = dict(job.items), dict(job.payloads)
                twin.results = {n: list(s) for n, s in job.results.items()}
                copies.append(twin)
            self._latest = (stamp, Known(copies, dict(worker.batches), worker.boot))
        return self._latest[1]

    def _note(self, number: int) -> None:
        while len(self.known) <= number:
            self.known.append(self._known())


def go_on(image: Image, known: Known, root: Path, durability: str, *, old_worker: bool) -> None:
    """A new broker on what is left, and the peers as they were; checks all that is promised."""
    image.put(root)
    bench = DiskBench(root, durability=durability, **CONFIG)
    try:
        assert not bench.found.damaged
        assert not bench.found.quarantined
        bench.check()
        _finish_and_check(bench, known, old_worker)
    finally:
        bench.backing.close()
        shutil.rmtree(root)


def _finish_and_check(bench: DiskBench, known: Known, old_worker: bool) -> None:
    # The forgotten one does not come back.
    jobs = [_twin(job, bench) for job in known.jobs if job.name != "c" and job.items]
    before = {job.name: dict(job.results) for job in jobs}
    for job in jobs:
        job.hello()
        bench.settle()
        assert job.upto >= job.promised, "what was promised is forgotten"
    if old_worker and known.batches:
        late = FakeWorker(bench, "gpu0", 1, batches=dict(known.batches), boot=known.boot)
        late.hello(batch=2)
        bench.settle()
        for key in list(known.batches):
            late.batches[key] = known.batches[key]
            finish(late, key)
        late.cut()
        bench.settle()
    for job in jobs:
        job.send_again()
        bench.settle()
        bench.check()

    def see(message: Message) -> None:
        for payload in payloads_of(message):
            name, number = item_of(payload)
            seen = before.get(name, {}).get(number)
            assert seen in (None, [Status.DEAD]), f"{name} #{number} runs again"

    work_off(bench, FakeWorker(bench, "gpu0", 1), jobs, see)
    for _ in range(2):
        _check_results(bench, jobs)
        for job in jobs:
            job.ack()
        for _ in range(4):
            bench.tick(0.3)
        assert not list((bench.root / "segments").rglob("*.seg"))
        bench.crash()
        bench.check()
        for job in jobs:
            job.hello()
            bench.settle()
            assert job.upto == max(job.items)


def _twin(job: Job, bench: Bench) -> Job:
    twin = copy.copy(job)
    twin.bench, twin.inbox, twin.shapes = bench, [], {}
    twin.items, twin.payloads = dict(job.items), dict(job.payloads)
    twin.results = {n: list(s) for n, s in job.results.items()}
    return twin


def _check_results(bench: DiskBench, jobs: list[Job]) -> None:
    bench.check()
    assert not bench.fabric.store.items
    given_up = sum(s == [Status.DEAD] for job in jobs for s in job.results.values())
    sent_again = sum(n >= BROKER_NUMBERS_FROM for job in jobs for n in job.results)
    assert len(bench.fabric.dead) + sent_again == given_up
    assert bench.status()["dead_items"] == given_up
    for job in jobs:
        own = {n: s for n, s in job.results.items() if n < BROKER_NUMBERS_FROM}
        assert set(own) == set(job.items), f"of {job.name}"
        assert all(len(statuses) == 1 for statuses in job.results.values()), job.results
        for number, (status,) in own.items():
            payload = job.items[number][2]
            if len(payload) > PAYLOAD_MAX:
                assert status == Status.REFUSED
            else:
                assert status in (Status.OK, Status.DEAD, Status.CANCELLED)
            if status == Status.OK:
                assert job.payloads[number] == b"done " + payload


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few entries, so that many are filled, retired and unlinked."""
    monkeypatch.setattr(FileBacking, "segment_items_max", 6)
    monkeypatch.setattr(OsFiles, "sync_all", lambda files: None)
    monkeypatch.setattr(OsFiles, "reserve", lambda files, path, size: None)


def points(count: int) -> Iterator[int]:
    """Operations to crash at: all, or a sample that moves through the run."""
    stride = 1 if ALL_POINTS else max(1, count // POINTS_MAX)
    return iter(range(0, count + 1, stride))


@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("torn", [False, True], ids=["between", "half"])
def test_sigkill_at_every_operation(tmp_path: Path, durability: str, torn: bool) -> None:
    run = Recording(tmp_path / "run", durability)
    for at in points(len(run.faults.ops)):
        image = run.faults.killed(at, torn=torn)
        old = at % 2 == 0
        go_on(image, run.known[at], tmp_path / f"at{at}", durability, old_worker=old)


@pytest.mark.parametrize("how", ["killed", "dropped", "torn"])
def test_crash_while_what_came_in_is_written_in_many_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("zfabric.dispatcher.WRITES_MAX", 1)
    run = Recording(tmp_path / "run", "fsync")
    for at in points(len(run.faults.ops)):
        image = run.faults.killed(at) if how == "killed" else run.faults.unplugged(at, how)
        go_on(image, run.known[at], tmp_path / f"at{at}", "fsync", old_worker=False)


@pytest.fixture
def log_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog's log is written anew again and again, some at a time."""
    monkeypatch.setattr("zfabric.cataloglog.GROWN_BYTES", 200)
    monkeypatch.setattr("zfabric.cataloglog.GROWN_RATIO", 1)
    monkeypatch.setattr("zfabric.cataloglog.SLICE_BYTES", 500)
    begin = FileBacking.begin

    def begin_after_upkeep(backing: FileBacking, *args: Any, **more: Any) -> Any:
        backing.log.upkeep()
        window = begin(backing, *args, **more)
        backing.log.upkeep()
        return window

    monkeypatch.setattr(FileBacking, "begin", begin_after_upkeep)


@pytest.mark.usefixtures("log_anew")
@pytest.mark.parametrize("how", ["killed", "killed-os", "dropped", "kept", "torn"])
def test_crash_while_the_log_is_written_anew(tmp_path: Path, how: str) -> None:
    durability = "os" if how == "killed-os" else "fsync"
    run = Recording(tmp_path / "run", durability)
    anew = [at for at, op in enumerate(run.faults.ops) if op.to == CATALOG]
    assert len(anew) >= 4
    near = {max(0, at + k) for at in anew for k in range(-4, 5)}
    for at in sorted({*near, *points(len(run.faults.ops))} - {len(run.faults.ops) + 1}):
        killed = how.startswith("killed")
        image = run.faults.killed(at) if killed else run.faults.unplugged(at, how, at)
        go_on(image, run.known[at], tmp_path / f"at{at}", durability, old_worker=at % 2 == 0)


@pytest.mark.usefixtures("log_anew")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_fault_while_the_log_is_written_anew_loses_nothing(tmp_path: Path, code: int) -> None:
    calls = Recording(tmp_path / "run", "fsync").faults.calls
    for at in range(0, calls, 1 if ALL_POINTS else 29):
        kinds = frozenset({"write"}) if code == errno.ENOSPC else CHANGES
        fault = Fault(at, code, 1, kinds)
        run = Recording(tmp_path / f"run{at}", "fsync", fault=fault)
        image = run.faults.killed(len(run.faults.ops))
        go_on(image, run.known[-1], tmp_path / f"on{at}", "fsync", old_worker=False)


def test_item_that_waited_windows_to_be_written_is_torn_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zfabric.dispatcher.WRITES_MAX", 1)
    bench = RecordedBench(FaultFiles(tmp_path / "run"))
    bench.open("fsync")
    job = Job(bench, "a")
    job.hello()
    shapes = [Shape.of("m", str(k)) for k in range(8)]
    job.put(list(range(1, 9)), [10] * 8, [A] * 8)
    bench.settle()
    workers = [FakeWorker(bench, f"gpu{k}", 1) for k in range(4)]
    for worker in workers:
        worker.hello(batch=1)
        worker.heartbeat(window=2)
    bench.settle()
    assert bench.dispatch(8) == 8

    def more() -> None:
        """Results make windows of their own, while items wait to be written."""
        for worker in [worker for worker in workers if worker.batches][:1]:
            finish(worker, next(iter(worker.batches)))
            bench.meanwhile = more

    bench.meanwhile = more
    job.put(list(range(9, 17)), [10] * 8, shapes)
    bench.settle()
    assert (job.upto, len(job.results)) == (16, 8)
    bench.backing.close()
    for at, seed in itertools.product(range(len(bench.faults.ops) + 1), SEEDS):
        root = tmp_path / f"at{at}-{seed}"
        bench.faults.unplugged(at, "torn", seed).put(root)
        found = DiskBench(root, **CONFIG)
        assert not found.found.damaged
        assert not found.found.quarantined
        found.check()
        found.backing.close()


@pytest.mark.parametrize(
    ("how", "seed"), [("dropped", 0), ("kept", 0), *(("torn", seed) for seed in SEEDS)]
)
def test_power_loss_at_every_operation(tmp_path: Path, how: str, seed: int) -> None:
    run = Recording(tmp_path / "run", "fsync")
    for at in points(len(run.faults.ops)):
        image = run.faults.unplugged(at, how, seed)
        old = at % 2 == 1
        go_on(image, run.known[at], tmp_path / f"at{at}", "fsync", old_worker=old)


def test_power_loss_while_a_killed_broker_recovers(tmp_path: Path) -> None:
    count = len(Recording(tmp_path / "run", "fsync").faults.ops)
    for at in range(3, count, 5 if ALL_POINTS else 31):
        run = Recording(tmp_path / f"killed{at}", "fsync", crash_at=at)
        begin = len(run.faults.ops)
        again = RecordedBench(run.faults)
        again.open("fsync")
        again.settle()
        again.backing.close()
        for then in range(begin, len(run.faults.ops) + 1):
            for how in ("dropped", "torn"):
                image = run.faults.unplugged(then, how, at)
                root = tmp_path / f"at{at}-{then}-{how}"
                go_on(image, run.known[at], root, "fsync", old_worker=False)


def test_images_are_what_a_crash_really_leaves(tmp_path: Path) -> None:
    count = len(Recording(tmp_path / "run", "fsync").faults.ops)
    for at in range(0, count, max(1, count // 9)):
        root = tmp_path / f"real{at}"
        run = Recording(root, "fsync", crash_at=at)
        assert len(run.faults.ops) == at
        want = run.faults.killed(at)
        found = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        found.pop("lock", None)
        assert found == {name: bytes(want.files.get(f, b"")) for name, f in want.names.items()}


def test_short_writes_are_finished(tmp_path: Path) -> None:
    run = Recording(tmp_path / "run", "fsync", write_max=7)
    image = run.faults.killed(len(run.faults.ops))
    go_on(image, run.known[-1], tmp_path / "on", "fsync", old_worker=False)


CHANGES = frozenset({"mkdir", "open", "write", "rename", "unlink", "truncate", "sync"})


@pytest.mark.parametrize("times", [1, 1_000_000], ids=["once", "for-good"])
def test_eio_stops_the_broker_and_a_restart_loses_nothing(tmp_path: Path, times: int) -> None:
    calls = Recording(tmp_path / "run", "fsync").faults.calls
    for at in range(0, calls, 1 if ALL_POINTS else 17):
        fault = Fault(at, errno.EIO, times, CHANGES)
        run = Recording(tmp_path / f"run{at}", "fsync", fault=fault)
        if not isinstance(run.ended_by, StorageError):
            # The last calls are reads.
            assert run.ended_by is None
            assert fault.times
        image = run.faults.killed(len(run.faults.ops))
        go_on(image, run.known[-1], tmp_path / f"on{at}", "fsync", old_worker=False)


@pytest.mark.parametrize("times", [1, 3, 25])
def test_full_disk_at_every_write_loses_nothing(tmp_path: Path, times: int) -> None:
    calls = Recording(tmp_path / "run", "fsync").faults.calls
    for at in range(0, calls, 1 if ALL_POINTS else 23):
        fault = Fault(at, errno.ENOSPC, times, frozenset({"mkdir", "write"}))
        run = Recording(tmp_path / f"run{at}", "fsync", fault=fault)
        # It goes on when there is room again; only a start does not wait for that.
        assert run.ended_by is None or isinstance(run.ended_by, NoSpace)
        image = run.faults.killed(len(run.faults.ops))
        go_on(image, run.known[-1], tmp_path / f"on{at}", "fsync", old_worker=False)
        image = run.faults.unplugged(len(run.faults.ops), "dropped")
        go_on(image, run.known[-1], tmp_path / f"off{at}", "fsync", old_worker=False)


class OneFull(FaultFiles):
    """No room for one shape's items."""

    full = ""

    def write(self, path: Path, descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        if self.full and self.full in str(path):
            raise NoSpace(f"{path}: No space left on device")
        return super().write(path, descriptor, pieces, offset)


def test_numbers_behind_one_without_room_are_not_forgotten_with_their_file(tmp_path: Path) -> None:
    """All but item 2 of a message are stored, done and gone while that one waits for room."""
    faults = OneFull(tmp_path / "run")
    bench = RecordedBench(faults)
    bench.open("fsync")
    job = Job(bench, "a")
    job.hello()
    bench.settle()
    faults.full = f"{B.signature:016x}"
    job.put([1, 2, 3, 4], [20, 10, 20, 20], [A, B, A, A])
    bench.settle()
    worker = bench.worker(batch=4)
    for _ in range(30):
        bench.tick(0.3)
        worker.heartbeat()
        bench.dispatch()
        for key in list(worker.batches):
            finish(worker, key)
        bench.settle()
    assert (set(job.results), job.promised) == ({1, 3, 4}, 0)
    job.ack()
    for _ in range(3):
        bench.tick(0.3)
    assert not list((faults.root / "segments" / "m" / f"{A.signature:016x}").rglob("*.seg"))
    bench.backing.close()
    known = Known([job], {}, 0)
    go_on(faults.killed(len(faults.ops)), known, tmp_path / "end", "fsync", old_worker=False)


def test_refused_number_behind_a_skip_is_still_accepted_after_a_crash(tmp_path: Path) -> None:
    """Its result knows how far back the number before it is; nothing else does."""
    bench = DiskBench(tmp_path, **CONFIG)
    job = Job(bench, "a")
    job.hello()
    job.put([10, 30], [10, 10], [A, A])
    bench.settle()
    producer = bench.fabric.producers[0]
    bench.fabric.post(producer, (Stored(50, Status.REFUSED, b"{}", None, gap=20),))
    producer.upto = 50
    bench.settle()
    bench.crash()
    job.hello()
    bench.settle()
    assert job.upto == 50
    bench.backing.close()
