"""Dead letters: how many are kept, whose they are, and that they end with their producer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.disk import DiskBench
from tests.harness import Bench
from zfabric import deadletters
from zfabric.protocol import Status


def ids(bench: Bench) -> list[int]:
    return [record.id for record in bench.fabric.dead]


def test_they_are_bounded_in_bytes_and_the_oldest_go() -> None:
    bench = Bench(attempts_max=1, max_bytes=4_000, payload_bytes_max=3_000)
    producer = bench.producer_of_dead(3, b"p" * 600)
    first, second, third = ids(bench)
    bench.die(producer, 1, b"p" * 1_200)
    assert ids(bench) == [third, third + 1]
    assert bench.status()["events_total"]["dead_dropped"] == 1
    assert bench.fabric.dead.get(first) is bench.fabric.dead.get(second) is None
    # One that is larger than all their room is kept, alone.
    producer.ack()
    bench.die(producer, 1, b"p" * 2_100)
    assert ids(bench) == [third + 2]
    assert 2_100 < bench.fabric.dead.held_bytes < 2_200
    assert set(producer.results) == set(range(1, 6))
    producer.ask("dead.drop", all=True)
    assert bench.fabric.dead.held_bytes == 0


def test_they_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadletters, "DEAD_RECORDS_MAX", 5)
    bench = Bench(attempts_max=1)
    producer = bench.producer_of_dead(4)
    bench.die(producer, 3, b"p")
    assert ids(bench) == [3, 4, 5, 6, 7]


def test_what_made_room_for_others_stays_away(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, attempts_max=1, max_bytes=4_000, payload_bytes_max=3_000)
    bench.producer_of_dead(3, b"p" * 600)
    bench.die(bench.producer("other"), 1, b"p" * 1_200)
    kept = ids(bench)
    bench.crash()
    assert ids(bench) == kept == [3, 4]
    bench.check()


def test_they_end_with_their_producer_and_no_heir_of_its_name_gets_them(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, attempts_max=1)
    producer = bench.producer_of_dead(2)
    other = bench.producer("other")
    bench.die(other, 1, b"p")
    producer.cut()
    bench.dispatcher.unreachable("producers", producer.routing_id, "gone", bench.now)
    assert other.ask("producers.forget", name="job", force=True)["name"] == "job"
    assert ids(bench) == [3]
    heir = bench.producer("job", 2)
    bench.crash()
    assert ids(bench) == [3]
    heir.hello()
    other.hello()
    bench.settle()
    assert other.ask("dead.requeue", all=True) == {"requeued": 1}
    assert heir.results == {}


def test_what_an_earlier_release_kept_of_a_forgotten_producer_is_dropped(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, attempts_max=1)
    bench.producer_of_dead(1)
    orphan = replace(bench.fabric.dead.get(1), id=2, producer="(forgotten)")
    bench.fabric.dead.add(orphan, bench.fabric.wall_offset_s)
    bench.crash()
    assert ids(bench) == [1]


def test_an_item_of_a_forgotten_producer_that_dies_leaves_no_record() -> None:
    bench = Bench(attempts_max=1)
    producer, other, worker = bench.producer(), bench.producer("other"), bench.worker()
    producer.submit([100])
    bench.settle()
    bench.dispatch()
    (key,) = worker.batches
    worker.start(key)
    producer.cut()
    bench.dispatcher.unreachable("producers", producer.routing_id, "gone", bench.now)
    other.ask("producers.forget", name="job", force=True)
    worker.give_back(key, "out_of_memory")
    bench.settle()
    assert bench.status()["dead_items"] == 1
    assert ids(bench) == []
    assert Status.DEAD not in [status for row in producer.results.values() for status in row]
    bench.check()
