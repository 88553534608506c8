"""A broker that comes back to its directory: nothing accepted is lost, nothing is visible twice."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from tests.disk import DiskBench
from tests.harness import FakeProducer, FakeWorker
from zfabric.broker import Broker
from zfabric.client import Client
from zfabric.config import BrokerConfig
from zfabric.errors import StorageError
from zfabric.files import SWEEP_S, FileBacking
from zfabric.osfiles import OsFiles
from zfabric.protocol import FROM_BROKER, Status, Type, decode
from zfabric.recovery import open_backing
from zfabric.results import Item
from zfabric.shapes import Shape


def again(bench: DiskBench, producer: FakeProducer) -> FakeProducer:
    """The producer finds the new broker, as the same process."""
    producer.hello()
    bench.settle()
    return producer


def run_all(bench: DiskBench, worker: FakeWorker) -> None:
    for _ in range(200):
        bench.tick(0.3)
        worker.heartbeat()
        if not bench.dispatch() and not bench.fabric.store.items:
            break
        for key in list(worker.batches):
            worker.done(key)
        bench.settle()
    bench.settle()


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_queued_items_survive_and_are_done_once(tmp_path: Path, durability: str) -> None:
    bench = DiskBench(tmp_path, durability=durability)
    producer = bench.producer()
    lengths = [100, 200, 300, 1_000] * 25
    producer.submit(lengths, [Shape.of("m", "a"), Shape.of("m", "b")] * 50)
    bench.settle()
    assert producer.upto == 100
    bench.crash()
    bench.check()
    assert bench.status()["ready_items"] == 100
    assert bench.status()["ready_tokens"] == sum(lengths)
    again(bench, producer)
    assert producer.upto == 100
    run_all(bench, bench.worker())
    assert producer.results == {n: [Status.OK] for n in range(1, 101)}
    bench.check()


def test_completed_items_stay_completed_and_results_come_again(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    producer = bench.producer()
    worker = bench.worker()
    producer.submit([100] * 16)
    bench.settle()
    bench.dispatch(1)
    producer.cut()
    for key in list(worker.batches):
        worker.done(key)
    bench.settle()
    bench.crash()
    bench.check()
    assert bench.status()["completed_items"] == 8
    assert bench.status()["ready_items"] == 8
    (job,) = bench.status()["jobs"]
    assert (job["live"], job["accepted_items"], job["completed_items"]) == (False, 16, 8)
    heir = FakeProducer(bench, "job", 1)
    heir.hello()
    bench.settle()
    assert set(heir.results) == set(range(1, 9))
    run_all(bench, bench.worker())
    assert heir.results == {n: [Status.OK] for n in range(1, 17)}


def test_acknowledged_results_do_not_come_again(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    producer = bench.producer()
    producer.submit([100] * 16)
    bench.settle()
    run_all(bench, bench.worker())
    producer.ack()
    bench.settle()
    bench.tick(1.0)
    bench.crash()
    heir = FakeProducer(bench, "job", 1)
    heir.hello()
    bench.settle()
    assert heir.results == {}
    assert heir.upto == 16
    assert bench.status()["completed_items"] == bench.status()["accepted_items"] == 16
    (job,) = bench.status()["jobs"]
    assert (job["accepted_items"], job["completed_items"], job["acked_items"]) == (16, 16, 16)


def test_worker_that_held_a_batch_reports_it_to_the_new_broker(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    producer = bench.producer()
    worker = bench.worker()
    producer.submit([100] * 4)
    bench.settle()
    bench.dispatch()
    (key,) = worker.batches
    worker.start(key)
    bench.settle()
    bench.crash()
    again(bench, producer)
    worker.hello()
    bench.settle()
    worker.done(key)
    bench.settle()
    assert producer.results == {n: [Status.OK] for n in range(1, 5)}
    assert bench.status()["ready_items"] == 0
    bench.check()


def test_nothing_of_a_finished_run_stays_on_disk(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    producer = bench.producer()
    producer.submit([100, 500, 900] * 40)
    bench.settle()
    run_all(bench, bench.worker())
    producer.ack()
    for _ in range(4):
        bench.tick(1.0)
    assert not list((tmp_path / "segments").rglob("*.seg"))
    bench.crash()
    assert bench.status()["completed_items"] == 120
    assert bench.status()["residual_items"] == 0


def test_attempts_and_dead_records_survive(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, attempts_max=2)
    producer = bench.producer()
    worker = bench.worker(batch=1)
    producer.submit([100, 100])
    bench.settle()
    bench.dispatch(1)
    worker.start(next(iter(worker.batches)))
    worker.give_back(next(iter(worker.batches)), "engine_exit")
    bench.settle()
    bench.crash()
    assert list(bench.fabric.store.attempts.values()) == [1]
    again(bench, producer)
    worker = bench.worker(batch=1)
    while not producer.results:
        bench.dispatch(1)
        worker.start(next(iter(worker.batches)))
        worker.give_back(next(iter(worker.batches)), "engine_exit")
        bench.settle()
    bench.crash()
    again(bench, producer)
    (record,) = producer.ask("dead.ls")
    assert record["attempts"] == 2
    producer.ask("dead.requeue", ids=[record["id"]])
    bench.crash()
    again(bench, producer)
    run_all(bench, bench.worker())
    assert bench.status()["residual_items"] == 0
    assert len(producer.results) == 3
    assert producer.ask("dead.ls") == []


def test_resent_item_is_recognised_and_a_lost_one_is_taken(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    producer = bench.producer()
    producer.submit([100] * 6)
    bench.settle()
    bench.crash()
    again(bench, producer)
    producer.submit([100] * 8, numbers=list(range(1, 9)), after=0)
    bench.settle()
    assert producer.upto == 8
    assert bench.status()["accepted_items"] == 8


def test_second_broker_on_a_directory_is_refused_with_the_pid(tmp_path: Path) -> None:
    DiskBench(tmp_path)
    with pytest.raises(StorageError, match="pid"):
        open_backing(tmp_path, "fsync", OsFiles(tmp_path))


def test_file_in_place_of_its_directory_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.write_text("a thesis")
    with pytest.raises(StorageError, match=f"{place} is no directory"):
        open_backing(place, "fsync", OsFiles(place))
    assert place.read_text() == "a thesis"


@pytest.mark.parametrize("part", ["segments", "outbox", "quarantine"])
@pytest.mark.parametrize("kind", ["file", "dead link"])
def test_something_else_in_place_of_its_directories_is_refused_and_left(
    part: str, kind: str, tmp_path: Path
) -> None:
    place = tmp_path / part
    if kind == "file":
        place.write_text("a thesis")
    else:
        place.symlink_to("nowhere")
    with pytest.raises(StorageError, match=f"{place} is no directory.*move it away"):
        open_backing(tmp_path, "fsync", OsFiles(tmp_path))
    assert place.is_symlink() or place.read_text() == "a thesis"
    place.unlink()
    backing, _ = open_backing(tmp_path, "fsync", OsFiles(tmp_path))
    backing.close()


def test_drained_broker_seals_its_store_so_that_damage_is_told_from_torn(tmp_path: Path) -> None:
    broker = Broker(BrokerConfig(port=0, data=str(tmp_path)))
    at = broker.bind()
    thread = threading.Thread(target=broker.run, daemon=True)
    thread.start()
    client = Client(at.producers, name="job")
    client.submit_many([Item(Shape.of("m", "a"), b"payload", 10)], timeout=20)
    client.request("drain")
    thread.join(20)
    client.close()
    (segment,) = (tmp_path / "segments").rglob("*.seg")
    data = bytearray(segment.read_bytes())
    data[data.index(b"payload")] ^= 1
    segment.write_bytes(data)
    backing, found = open_backing(tmp_path, "fsync", OsFiles(tmp_path))
    assert [lost.number for lost in found.quarantined] == [1]
    backing.close()


def test_answer_to_a_requeue_waits_until_it_is_kept(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, attempts_max=1)
    producer = bench.producer()
    worker = bench.worker()
    producer.submit([100])
    bench.settle()
    bench.dispatch()
    worker.start(next(iter(worker.batches)))
    worker.give_back(next(iter(worker.batches)), "engine_exit")
    bench.settle()
    producer.inbox.clear()
    producer.send(Type.REQUEST, {"id": 1, "op": "dead.requeue", "args": {"all": True}})
    bench.dispatcher.flush(bench.now)
    assert bench.dispatcher.sync_wanted
    assert not bench.dispatcher.outgoing
    bench.settle()
    assert [m.kind for m in producer.inbox if m.kind is Type.REPLY] == [Type.REPLY]


def answered(bench: DiskBench, producer: FakeProducer, op: str, **args: object) -> None:
    """Ask, and stop the broker in the moment in which the answer is on its way."""
    producer.send(Type.REQUEST, {"id": 1, "op": op, "args": args})
    bench.dispatcher.flush(bench.now)
    if bench.durability == "fsync":
        assert bench.dispatcher.sync_wanted
        assert not bench.dispatcher.outgoing
        bench.backing.sync()
        bench.dispatcher.synced()
    told = [decode(parcel.frames, FROM_BROKER).kind for parcel in bench.dispatcher.outgoing]
    assert told == [Type.REPLY]


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_dead_record_that_was_dropped_stays_away_from_the_answer_on(
    tmp_path: Path, durability: str
) -> None:
    bench = DiskBench(tmp_path, durability=durability, attempts_max=1)
    producer = bench.producer_of_dead(2)
    kept, dropped = (record.id for record in bench.fabric.dead)
    answered(bench, producer, "dead.drop", ids=[dropped])
    bench.crash()
    assert [record.id for record in bench.fabric.dead] == [kept]
    bench.check()


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_name_of_a_forgotten_worker_is_free_from_the_answer_on(
    tmp_path: Path, durability: str
) -> None:
    bench = DiskBench(tmp_path, durability=durability)
    producer, worker = bench.producer(), bench.worker("gpu0")
    bench.fabric.claims.claim("worker", "gpu0", "alice")
    worker.send(Type.BYE, {"reason": "done"})
    bench.settle()
    answered(bench, producer, "workers.forget", name="gpu0")
    bench.crash()
    assert bench.fabric.claims.user_of("worker", "gpu0") is None


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_pause_of_a_model_outlives_the_broker_and_its_end_does_too(
    tmp_path: Path, durability: str
) -> None:
    bench = DiskBench(tmp_path, durability=durability)
    producer = bench.producer()
    producer.submit([100])
    bench.settle()
    answered(bench, producer, "pause", model="m")
    # Whatever the catalog was written anew for meanwhile.
    for _ in range(2):
        bench.crash()
        worker = bench.worker()
        bench.dispatch()
        assert not worker.batches
    again(bench, producer)
    answered(bench, producer, "resume", model="m")
    bench.crash()
    worker = bench.worker()
    bench.dispatch()
    assert worker.batches


def test_requeue_among_more_than_a_window_writes_is_answered_when_its_item_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zfabric.dispatcher.WRITES_MAX", 2)
    monkeypatch.setattr("zfabric.dispatcher.CUT_TURNS_MAX", 2)
    bench = DiskBench(tmp_path, attempts_max=1)
    producer = bench.producer_of_dead()
    # Each shape is a file of its own, and all are written before the item that is requeued.
    producer.submit([100] * 60, [Shape.of("m", f"s{k}") for k in range(60)])
    producer.send(Type.REQUEST, {"id": 1, "op": "dead.requeue", "args": {"all": True}})
    syncs = bench.backing.syncs
    while bench.backing.syncs < syncs + 3:
        bench.dispatcher.flush(bench.now)
        if bench.dispatcher.sync_wanted:
            bench.backing.sync()
            bench.dispatcher.synced()
    assert bench.fabric.store.unwritten
    told = [decode(parcel.frames, FROM_BROKER).kind for parcel in bench.dispatcher.outgoing]
    assert Type.REPLY not in told
    bench.crash()
    assert [record.number for record in bench.fabric.dead] == [1]


# -- a catalog that is made anew ------------------------------------------------------------------


def left_behind(root: Path) -> None:
    """Two producers' items, some done and their results unread, and a broker that was killed."""
    bench = DiskBench(root, lanes=1)
    one, other = bench.producer("one"), bench.producer("other", instance=2)
    one.submit([100] * 6)
    other.submit([100] * 4)
    bench.settle()
    worker = bench.worker(batch=3)
    bench.dispatch(1)
    one.cut()
    for key in list(worker.batches):
        worker.done(key)
    bench.settle()
    bench.crash()
    bench.backing.close()


def test_lost_catalog_refuses_the_start_and_can_be_made_anew(tmp_path: Path) -> None:
    left_behind(tmp_path)
    (tmp_path / "catalog.log").unlink()
    with pytest.raises(StorageError, match="--rebuild-catalog"):
        open_backing(tmp_path, "fsync", OsFiles(tmp_path))
    bench = DiskBench(tmp_path, rebuild=True, lanes=1)
    bench.check()
    assert bench.found.quarantined_files
    assert not bench.found.quarantined
    status = bench.status()
    assert (status["ready_items"], status["completed_items"]) == (7, 3)
    run_all(bench, bench.worker())
    names = [p.name for p in bench.fabric.producers if p is not None]
    assert names == ["lost-0", "lost-1"]
    first, second = bench.producer("lost-0"), bench.producer("lost-1", instance=2)
    assert first.results == {n: [Status.OK] for n in range(1, 7)}
    assert second.results == {n: [Status.OK] for n in range(1, 5)}
    bench.check()
    bench.crash()
    bench.check()


@pytest.mark.parametrize("seed", range(40))
def test_damaged_catalog_is_made_anew_of_what_is_whole(tmp_path: Path, seed: int) -> None:
    left_behind(tmp_path)
    path = tmp_path / "catalog.log"
    before = path.read_bytes()
    chance = random.Random(seed)
    begin = chance.randrange(len(before))
    damage = chance.randbytes(chance.randrange(1, 40))
    path.write_bytes(before[:begin] + damage + before[begin + len(damage) :])
    bench = DiskBench(tmp_path, rebuild=True, lanes=1)
    bench.check()
    assert not bench.found.quarantined
    names = [p.name for p in bench.fabric.producers if p is not None]
    assert len(names) == 2
    assert set(names) <= {"one", "other", "lost-0", "lost-1"}
    run_all(bench, bench.worker())
    results = [bench.producer(name, instance=k + 1).results for k, name in enumerate(sorted(names))]
    assert sorted(map(len, results)) == [4, 6]
    assert all(s == [Status.OK] for found in results for s in found.values())
    bench.check()
    if bench.found.quarantined_files:
        assert list((tmp_path / "quarantine").glob("catalog.log.*"))


def test_charged_items_are_retried_apart_after_a_restart(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, lanes=1, attempts_max=3)
    producer = bench.producer()
    producer.submit([100] * 6)
    bench.settle()
    worker = bench.worker(batch=3)
    bench.dispatch(1)
    (key,) = worker.batches
    worker.start(key)
    worker.give_back(key, "engine_exit")
    bench.settle()
    bench.crash()
    bench.check()
    again(bench, producer)
    worker = bench.worker(batch=6, instance=2)
    sizes = []
    for _ in range(6):
        bench.dispatch(1)
        for key in list(worker.batches):
            sizes.append(len(worker.batches[key]))
            worker.done(key)
        bench.settle()
    assert sizes == [1, 1, 1, 3]
    assert producer.results == {n: [Status.OK] for n in range(1, 7)}
    bench.check()


def test_cursor_on_what_is_over_does_not_stop_the_broker(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, lanes=1)
    producer = bench.producer()
    producer.submit([100] * 3)
    bench.settle()
    bench.now += 50.0
    other = bench.producer("other", instance=2)
    other.submit([100])
    bench.settle()
    producer.ask("producers.cancel", name="job")
    while bench.dispatcher.busy:
        bench.tick(0.1)
    bench.tick(3.0)
    assert bench.status()["oldest_item_age_s"] < 10
    bench.crash()
    bench.tick(3.0)
    bench.check()
    assert bench.status()["ready_items"] == 1


def test_damaged_head_of_a_lane_does_not_stop_the_broker(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, lanes=1)
    producer = bench.producer()
    producer.submit([100] * 3, payload=b"x" * 100)
    bench.settle()
    bench.backing.seal()
    bench.backing.close()
    (path,) = (tmp_path / "segments").rglob("*.seg")
    data = bytearray(path.read_bytes())
    data[4096 + 8 * 4096 + 64 + 10] ^= 1
    path.write_bytes(data)
    bench.start_broker(99)
    for _ in range(5):
        bench.tick(1.0)
    bench.check()
    again(bench, producer)
    run_all(bench, bench.worker())
    assert producer.results == {1: [Status.QUARANTINED], 2: [Status.OK], 3: [Status.OK]}


@pytest.mark.parametrize("packing", ["tight", "strict", "group"])
@pytest.mark.parametrize("ragged", [False, True])
def test_what_lanes_hold_is_served_when_a_start_has_none(
    tmp_path: Path, packing: str, *, ragged: bool
) -> None:
    bench = DiskBench(tmp_path, packing=packing)
    producer = bench.producer()
    producer.submit([10, 300, 700, 1_000])
    bench.settle()
    bench.config = BrokerConfig(memory=True, policy="shape", packing=packing)
    bench.crash()
    again(bench, producer)
    producer.submit([20, 500])
    run_all(bench, bench.worker(batch=2, ragged=ragged))
    assert producer.results == {n: [Status.OK] for n in range(1, 7)}
    bench.check()


def dead_and_requeued(bench: DiskBench, *, flush: bool) -> FakeProducer:
    """An item dies and is requeued, all in one window, whose sync is not over at the crash."""
    producer, worker = bench.producer(), bench.worker()
    producer.submit([100])
    bench.settle()
    bench.dispatch()
    (key,) = worker.batches
    worker.start(key)
    worker.give_back(key, "out_of_memory")
    producer.send(Type.REQUEST, {"id": 1, "op": "dead.requeue", "args": {"all": True}})
    if flush:
        bench.dispatcher.flush(bench.now)
    else:
        bench.fabric.publish(bench.now)
    return producer


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_requeued_item_whose_death_was_torn_is_there_once(tmp_path: Path, durability: str) -> None:
    bench = DiskBench(tmp_path, durability=durability, attempts_max=1)
    producer = dead_and_requeued(bench, flush=False)
    # The new entry is written, and neither the result nor a record is.
    bench.crash()
    bench.check()
    assert bench.status()["ready_items"] == 1
    again(bench, producer)
    run_all(bench, bench.worker("gpu1", instance=2))
    assert producer.results == {1: [Status.OK]}
    bench.crash()
    bench.check()
    assert bench.status()["completed_items"] == bench.status()["accepted_items"] == 1


def test_requeued_item_whose_result_was_torn_is_there_once(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, attempts_max=1)
    producer = dead_and_requeued(bench, flush=True)
    # All is written, and of what no sync covered the device has lost the result.
    (path,) = (tmp_path / "outbox").rglob("*.seg")
    path.unlink()
    bench.crash()
    bench.check()
    again(bench, producer)
    run_all(bench, bench.worker("gpu1", instance=2))
    assert producer.results == {1: [Status.OK]}
    assert not len(bench.fabric.dead)


def test_record_of_a_retry_goes_with_its_item(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, attempts_max=1)
    dead_and_requeued(bench, flush=True)
    bench.settle()
    bench.crash()
    assert len(bench.fabric.retries) == 1
    run_all(bench, bench.worker("gpu1", instance=2))
    bench.crash()
    assert not bench.fabric.retries


def test_dead_record_gets_no_id_that_a_requeued_item_has(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, attempts_max=1)
    producer = dead_and_requeued(bench, flush=True)
    bench.settle()
    (tmp_path / "catalog.log").unlink()
    bench.rebuild = True
    bench.crash()
    worker = bench.worker("gpu1", instance=2, batch=1, model="other")
    producer = bench.producer("second")
    producer.submit([100], Shape.of("other", "a"))
    bench.settle()
    bench.dispatch()
    (key,) = worker.batches
    worker.start(key)
    worker.give_back(key, "out_of_memory")
    bench.settle()
    bench.crash()
    assert [(record.producer, record.number) for record in bench.fabric.dead] == [("second", 1)]
    bench.check()


def only_file(root: Path, shape: Shape) -> Path:
    (path,) = (root / "segments" / shape.model / f"{shape.signature:016x}").rglob("*.seg")
    return path


def test_what_was_beyond_a_gap_is_known_after_a_damage_elsewhere(tmp_path: Path) -> None:
    a, b, c = (Shape.of("m", name) for name in "abc")
    bench = DiskBench(tmp_path)
    producer = bench.producer()
    producer.submit([100], c)
    bench.settle()
    producer.submit([100, 100], [a, b])
    bench.fabric.publish(bench.now)
    # Of two items that were not promised the device has lost the first.
    only_file(tmp_path, a).unlink()
    bench.crash()
    again(bench, producer)
    run_all(bench, bench.worker())
    producer.ack()
    for _ in range(4):
        bench.tick(1.0)
    assert producer.results == {1: [Status.OK], 3: [Status.OK]}
    assert not list((tmp_path / "segments").rglob("*.seg"))
    producer.submit([100], a, numbers=[2], after=1)
    bench.settle()
    producer.submit([100, 100, 100], [b, b, c], numbers=[3, 4, 5], after=2)
    bench.settle()
    assert producer.upto == 5
    for number in (6, 7, 8):
        producer.submit([100], b, numbers=[number], after=number - 1)
        bench.settle()
    path = only_file(tmp_path, c)
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    # The second start finds what the first did; the file of number 3 went long ago.
    for _ in range(2):
        bench.crash()
        assert [lost.number for lost in bench.found.quarantined] == [5]
    again(bench, producer)
    run_all(bench, bench.worker("gpu1", instance=2))
    assert producer.results.pop(5) == [Status.QUARANTINED]
    assert producer.results == {n: [Status.OK] for n in (1, 2, 3, 4, 6, 7, 8)}
    bench.check()


def test_file_of_large_items_ends_where_a_place_can_still_be_told(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    producer = bench.producer()
    producer.submit([100])
    bench.settle()
    (segment,) = bench.fabric.store._slots.values()
    # As if there were entries of 32 GiB: a hole takes no room.
    end, segment.file.end = segment.file.end, segment.file.header.data_offset + 8 * 2**32
    producer.submit([100])
    bench.settle()
    assert producer.upto == 2
    segment.file.end = end
    assert len(list((tmp_path / "segments").rglob("*.seg"))) == 2
    run_all(bench, bench.worker())
    assert producer.results == {1: [Status.OK], 2: [Status.OK]}


def test_large_files_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfabric.entryfiles.FILE_BYTES_MAX", 50_000)
    bench = DiskBench(tmp_path)
    producer, worker = bench.producer(), bench.worker(batch=2)
    for _ in range(20):
        producer.submit([100, 100], payload=b"x" * 4_000)
        # What is over is dropped although something more of its lane is about to be stored.
        bench.dispatch(1)
        for key in list(worker.batches):
            worker.done(key)
        bench.settle()
        worker.heartbeat()
    files = [path.stat().st_size for path in (tmp_path / "segments").rglob("*.seg")]
    assert max(files) < 60_000
    bench.crash()
    bench.check()
    again(bench, producer)
    run_all(bench, bench.worker("gpu1", instance=2))
    producer.ack()
    for _ in range(4):
        bench.tick(1.0)
    assert producer.results == {n: [Status.OK] for n in range(1, 41)}
    assert not list((tmp_path / "segments").rglob("*.seg"))


def test_results_that_are_read_slowly_leave_no_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zfabric.entryfiles.FILE_BYTES_MAX", 50_000)
    bench = DiskBench(tmp_path)
    producer, worker = bench.producer(), bench.worker(batch=1)
    for _ in range(20):
        producer.submit([100])
        bench.settle()
        bench.tick(0.3)
        bench.dispatch(1)
        for key in list(worker.batches):
            worker.done(key, payload=b"x" * 8_000)
        bench.settle()
        worker.heartbeat()
        # One is always unread, so that its file stays.
        producer.send(Type.RESULT_ACK, {"upto": producer.seq - 1})
        bench.settle()
    files = [path.stat().st_size for path in (tmp_path / "outbox").rglob("*.seg")]
    assert max(files) < 60_000
    bench.crash()
    heir = FakeProducer(bench, "job", 1)
    heir.hello()
    bench.settle()
    assert heir.results == {20: [Status.OK]}
    bench.check()


@pytest.mark.parametrize("left", ["requeued", "damaged"])
def test_rebuilt_catalog_knows_whose_only_item_has_no_plain_number(
    tmp_path: Path, left: str
) -> None:
    bench = DiskBench(tmp_path, attempts_max=1)
    if left == "requeued":
        producer = bench.producer_of_dead()
        producer.ack()
        assert producer.ask("dead.requeue", all=True) == {"requeued": 1}
    else:
        bench.producer().submit([100])
        bench.settle()
    # Of another producer there are items: the first one's number must not look forgotten.
    bench.producer("other", 5).submit([100] * 2, Shape.of("m", "other"))
    bench.settle()
    bench.crash()
    bench.backing.close()
    if left == "damaged":
        signature = Shape.of("m", "a").signature
        (path,) = (tmp_path / "segments" / "m" / f"{signature:016x}").rglob("*.seg")
        with path.open("r+b") as handle:
            handle.seek(-8, os.SEEK_END)
            handle.write(b"\xff")
    (tmp_path / "catalog.log").unlink()
    bench = DiskBench(tmp_path, rebuild=True, attempts_max=1)
    assert {found.name for found in bench.found.producers.values()} == {"lost-0", "lost-1"}
    assert bench.status()["ready_items"] == 2 + (left == "requeued")
    assert [lost.number for lost in bench.found.quarantined] == [1] * (left == "damaged")
    bench.check()


@pytest.mark.parametrize("capacity", [4, 4_096])
def test_file_of_results_that_are_read_goes_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    monkeypatch.setattr(FileBacking, "segment_items_max", capacity)
    bench = DiskBench(tmp_path)
    producer, worker = bench.producer(), bench.worker()
    producer.submit([100] * 8)
    bench.settle()
    run_all(bench, worker)
    producer.ack()
    bench.dispatcher.flush(bench.now)
    bench.backing.sync()
    bench.dispatcher.synced()
    # What is read is marked by now, and its files are there still.
    bench.crash()
    assert list((tmp_path / "outbox").rglob("*.seg"))
    for _ in range(4):
        bench.tick(1.0)
    assert not list((tmp_path / "outbox").rglob("*.seg"))
    # The sequence goes on where it was.
    again(bench, producer)
    producer.submit([100] * 2)
    bench.settle()
    run_all(bench, bench.worker("gpu1", instance=2))
    assert (producer.seq, producer.results) == (10, {n: [Status.OK] for n in range(1, 11)})
    bench.crash()
    heir = FakeProducer(bench, "job", 1)
    heir.hello()
    bench.settle()
    assert set(heir.results) == {9, 10}
    bench.check()


def test_empty_directories_that_a_killed_broker_left_are_removed(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    producer = bench.producer()
    producer.submit([100] * 20, [Shape.of("m", str(k)) for k in range(20)])
    bench.settle()
    run_all(bench, bench.worker())
    producer.ack()
    for _ in range(3):
        bench.now += 0.1
        bench.settle()
    assert not list(tmp_path.rglob("*.seg"))
    assert len(list((tmp_path / "segments" / "m").iterdir())) == 20
    bench.crash()
    for _ in range(3):
        bench.tick(SWEEP_S)
    assert not list((tmp_path / "segments").glob("m/*"))
    again(bench, producer)
    producer.submit([100])
    bench.settle()
    assert list((tmp_path / "segments").rglob("*.seg"))
    bench.check()
