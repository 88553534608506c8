"""Segments that one live item pins: the bytes of its dead neighbours go, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.disk import DiskBench
from tests.faultfiles import FaultFiles
from tests.harness import FakeProducer, FakeWorker
from zfabric import pins
from zfabric.cli import main
from zfabric.entries import ALIGN, pack_entries
from zfabric.files import place_of
from zfabric.osfiles import OsFiles
from zfabric.protocol import Status
from zfabric.scanning import scan_file
from zfabric.segment import ITEMS as ITEMS_KIND
from zfabric.segment import STATE_BYTES, Header, pack_header
from zfabric.shapes import Shape

ITEMS = 24
SIZE = 32_768
PINNING = 11


class PinBench(DiskBench):
    """A broker with a journal, and a worker that never finishes one of the items."""

    def __init__(self, root: Path) -> None:
        self.faults = FaultFiles(root)
        super().__init__(root, lease_s=600)

    def files(self) -> OsFiles:
        return self.faults if self.faults.root == self.root else super().files()

    def pin(self, payload: bytes = b"x" * SIZE) -> tuple[FakeProducer, FakeWorker]:
        producer = self.producer()
        producer.submit([100] * ITEMS, payload=payload)
        self.settle()
        worker = self.worker(batch=ITEMS)
        self.dispatch()
        (key,) = worker.batches
        worker.done(key, [k for k in range(ITEMS) if k != PINNING])
        self.settle()
        producer.ack()
        self.settle()
        return producer, worker

    def look_again(self) -> None:
        for _ in range(3):
            self.now += pins.PIN_CHECK_S
            self.tick(0.2)
            self.settle()


@pytest.fixture(autouse=True)
def small_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "HOLE_MIN_BYTES", 4 * SIZE)


def disk_use(root: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in (root / "segments").rglob("*.seg"))


def test_dead_neighbours_of_a_live_item_give_their_bytes_back(tmp_path: Path) -> None:
    bench = PinBench(tmp_path)
    _, worker = bench.pin()
    before, counted = disk_use(tmp_path), bench.status()["storage"]["segment_bytes"]
    assert before > ITEMS * SIZE
    bench.look_again()
    assert disk_use(tmp_path) < before - (ITEMS - 3) * SIZE
    assert bench.status()["storage"]["segment_bytes"] <= counted - (ITEMS - 1) * SIZE
    assert main(["segments", "verify", str(tmp_path)]) == 0
    bench.check()
    # The pinning item is whole, and its file goes with it.
    (key,) = worker.batches
    worker.done(key, [PINNING])
    for _ in range(4):
        bench.tick(0.3)
        bench.settle()
    assert not list((tmp_path / "segments").rglob("*.seg"))
    assert bench.status()["storage"]["segment_bytes"] == 0
    assert bench.status()["completed_items"] == ITEMS


def test_segment_with_holes_is_recovered_again_and_again(tmp_path: Path) -> None:
    bench = PinBench(tmp_path)
    producer, _ = bench.pin()
    bench.look_again()
    for _ in range(3):
        bench.crash()
        # What upkeep looks at is no hole.
        bench.tick(3.0)
        bench.check()
        status = bench.status()
        assert (status["accepted_items"], status["completed_items"]) == (ITEMS, ITEMS - 1)
        assert (status["ready_items"], status["ready_tokens"]) == (1, 100)
        assert status["completed_tokens"] == 100 * (ITEMS - 1)
        assert not bench.found.damaged
        assert not bench.found.quarantined
    producer.hello()
    bench.settle()
    assert producer.upto == ITEMS
    worker = bench.worker(batch=ITEMS)
    bench.dispatch()
    (key,) = worker.batches
    assert bytes(worker.batches[key].body) == b"x" * SIZE
    worker.done(key)
    bench.settle()
    assert producer.results[PINNING + 1] == [Status.OK]
    for _ in range(4):
        bench.tick(0.3)
        bench.settle()
    assert not list((tmp_path / "segments").rglob("*.seg"))
    bench.crash()
    assert bench.status()["completed_tokens"] == 100 * ITEMS
    bench.check()


def test_crash_at_every_point_of_making_holes(tmp_path: Path) -> None:
    bench = PinBench(tmp_path / "run")
    bench.pin()
    first = len(bench.faults.ops)
    bench.look_again()
    last = len(bench.faults.ops)
    bench.backing.close()
    assert any(len(op.data) > 4 * SIZE and not any(op.data) for op in bench.faults.ops[first:])
    ways = ["killed", "dropped", "kept", "torn", "torn again"]
    for at in range(first, last + 1):
        for seed, how in enumerate(ways):
            image = (
                bench.faults.killed(at, torn=True)
                if how == "killed"
                else bench.faults.unplugged(at, how.split()[0], seed)
            )
            root = tmp_path / f"{at}-{seed}"
            image.put(root)
            found = DiskBench(root)
            found.check()
            status = found.status()
            assert (status["accepted_items"], status["completed_items"]) == (ITEMS, ITEMS - 1)
            assert status["ready_items"] == 1
            assert status["completed_tokens"] == 100 * (ITEMS - 1)
            assert not found.found.damaged
            found.backing.close()


def test_file_that_a_crash_left_behind_its_record_is_no_damage(tmp_path: Path) -> None:
    bench = PinBench(tmp_path / "run")
    _, worker = bench.pin()
    bench.look_again()
    first = len(bench.faults.ops)
    (key,) = worker.batches
    worker.done(key, [PINNING])
    for _ in range(4):
        bench.tick(0.3)
        bench.settle()
    bench.backing.close()
    gone = [
        at
        for at, op in enumerate(bench.faults.ops)
        if at >= first and op.kind == "unlink" and op.path.startswith("segments")
    ]
    bench.faults.killed(gone[0]).put(tmp_path / "killed")
    assert list((tmp_path / "killed" / "segments").rglob("*.seg"))
    assert main(["segments", "verify", str(tmp_path / "killed")]) == 0


def test_segment_that_is_merely_busy_gets_no_holes(tmp_path: Path) -> None:
    bench = PinBench(tmp_path)
    bench.pin()
    before = len(bench.faults.ops)
    bench.now += pins.PIN_CHECK_S
    bench.tick(0.2)
    bench.settle()
    assert not [op for op in bench.faults.ops[before:] if len(op.data) >= SIZE]
    bench.backing.close()


def test_segment_that_was_over_at_a_start_is_not_looked_at_again(tmp_path: Path) -> None:
    bench = PinBench(tmp_path)
    producer, worker = bench.pin()
    (key,) = worker.batches
    worker.done(key, [PINNING])
    bench.dispatcher.flush(bench.now)
    bench.backing.sync()
    # All tombstones are written, and a crash comes before the record that its file may go.
    bench.dispatcher.synced()
    bench.crash()
    bench.look_again()
    assert not list((tmp_path / "segments").rglob("*.seg"))
    assert bench.status()["completed_items"] == ITEMS
    producer.hello()
    bench.settle()
    assert producer.results == {n: [Status.OK] for n in range(1, ITEMS + 1)}
    bench.check()


def test_many_pinned_segments_are_looked_at_in_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(pins, "holes_of", lambda segment: looked.append(segment.nonce) or ())
    kept = pins.Pins()
    segments: list[Any] = [SimpleNamespace(nonce=nonce) for nonce in range(100)]
    for segment in segments:
        kept.ended(segment)
    assert kept.due(0.0) == []
    kept.gone(segments[50])
    turns = []
    for turn in range(20):
        before = len(looked)
        kept.due(pins.PIN_CHECK_S + 0.1 * turn)
        turns.append(len(looked) - before)
    assert max(turns) <= pins.SEGMENTS_A_TURN
    assert sorted(looked) == [nonce for nonce in range(100) if nonce != 50]


def test_file_with_holes_is_copied_once_however_many_it_has() -> None:
    class Counted(bytes):
        """Bytes that know how many of them were copied."""

        copied = 0

        def __getitem__(self, key: Any) -> Any:
            taken = super().__getitem__(key)
            if isinstance(taken, bytes):
                Counted.copied += len(taken)
            return taken

    shape = Shape.of("m", "a")
    header = Header(5, ITEMS_KIND, "m", shape.signature, 0, shape.components, shape.tokens)
    rows = [(100, 0, number, 1, 10, 100, 0, bytes(SIZE)) for number in range(1, 65)]
    pieces, offsets, end = pack_entries(header, header.data_offset, 0, 1, rows)
    words = bytes(STATE_BYTES * header.capacity)
    data = Counted(b"".join((pack_header(header), words, *pieces)))
    begins = [header.data_offset + ALIGN * units for units in offsets]
    records = [{"hole": [k, k + 1, begins[k], begins[k + 1]], "ended": []} for k in range(0, 64, 2)]
    path = Path(place_of(header))
    found = scan_file(path, ITEMS_KIND, data, lambda _: path, lambda _: records)
    assert (found.places, found.end, len(found.holes)) == (64, end, 32)
    assert Counted.copied < 2 * len(data)
