"""Offers of `--packing group`: batches over several lanes of one shape, end to end in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.disk import DiskBench
from tests.harness import Bench, FakeProducer, FakeWorker
from zfabric import offers
from zfabric.errors import InvariantError
from zfabric.shapes import Shape

SHAPE = Shape.of("m", "a")
# Five lanes: each is over 128 tokens and 10% away from the next.
LENGTHS = [200, 400, 600, 800, 1_000]


def begin(
    lengths: list[int], *, batch: int = 8, **config: object
) -> tuple[Bench, FakeProducer, FakeWorker]:
    bench = Bench(packing="group", **config)
    producer = bench.producer("job")
    worker = bench.worker("gpu0", batch=batch, window=1)
    producer.submit(lengths, [SHAPE] * len(lengths))
    bench.settle()
    return bench, producer, worker


def taken(bench: Bench, worker: FakeWorker) -> list[int]:
    """Lengths of the batch that the worker holds after one dispatch."""
    assert bench.dispatch(1) == 1
    ((_, message),) = worker.batches.items()
    bench.check()
    return list(message.columns["lengths"])


def finish(bench: Bench, worker: FakeWorker) -> None:
    for key in list(worker.batches):
        worker.done(key)
    bench.settle()


def test_batch_takes_adjacent_lanes_from_the_longest_down() -> None:
    bench, _, worker = begin(LENGTHS, batch=3)
    assert taken(bench, worker) == [1_000, 800, 600]
    assert worker.batches[next(iter(worker.batches))].fields["pad_to"] == 1_000
    finish(bench, worker)
    assert taken(bench, worker) == [400, 200]


def test_sweep_goes_on_below_and_leaves_what_came_above_for_the_next() -> None:
    bench, producer, worker = begin(LENGTHS, batch=3)
    assert taken(bench, worker) == [1_000, 800, 600]
    finish(bench, worker)
    producer.submit([1_000], [SHAPE])
    bench.settle()
    assert taken(bench, worker) == [400, 200]
    finish(bench, worker)
    assert taken(bench, worker) == [1_000]


def test_batch_that_is_not_sent_leaves_the_sweep_where_it_was() -> None:
    bench, _, _ = begin(LENGTHS, batch=3)
    group = next(iter(bench.fabric.groups.values()))
    first = bench.dispatcher.next_offer(bench.now)
    second = bench.dispatcher.next_offer(bench.now)
    assert first.batch.refs == second.batch.refs
    assert group.sweep_below is None
    bench.dispatcher.commit(second, bench.now)
    assert group.sweep_below == 600


def test_ledger_books_neighbours_apart_and_adds_up() -> None:
    bench, _, worker = begin(LENGTHS, batch=3)
    taken(bench, worker)
    parts = bench.fabric.waste.parts
    assert (parts.neighbour, sum(parts)) == (200 + 400, 600)


def test_returned_items_come_back_to_their_own_lanes_and_first() -> None:
    bench, producer, worker = begin(LENGTHS, batch=3)
    assert taken(bench, worker) == [1_000, 800, 600]
    producer.submit([1_000, 800], [SHAPE] * 2)
    bench.settle()
    worker.give_back(next(iter(worker.batches)), "leaving")
    bench.settle()
    worker.cut()
    bench.tick()
    again = bench.worker("gpu1", batch=8, window=1)
    # The sweep stands below 600: first the rest, then from the top, what came back before what
    # came later.
    assert taken(bench, again) == [400, 200]
    finish(bench, again)
    assert taken(bench, again) == [1_000, 1_000, 800, 800], "the budget is 4,096 tokens"


def test_item_that_must_go_alone_ends_a_batch_and_begins_the_next() -> None:
    bench, _, worker = begin([1_000, 800, 600], batch=1)
    bench.dispatch(1)
    worker.give_back(next(iter(worker.batches)), "out_of_memory")
    bench.settle()
    worker.cut()
    bench.tick()
    again = bench.worker("gpu1", batch=8, window=1)
    assert taken(bench, again) == [800, 600]
    finish(bench, again)
    assert taken(bench, again) == [1_000]


def test_two_shapes_are_never_in_one_batch() -> None:
    bench = Bench(packing="group", linger_ms=0)
    producer = bench.producer("job")
    worker = bench.worker("gpu0", batch=8, window=9)
    shapes = [SHAPE, Shape.of("m", "b")]
    producer.submit([200, 210, 400, 410], shapes * 2)
    bench.settle()
    bench.dispatch()
    lengths = sorted(list(m.columns["lengths"]) for m in worker.batches.values())
    assert lengths == [[400, 200], [410, 210]]


def test_a_batch_of_a_moved_queue_changes_nothing() -> None:
    bench, _, _ = begin(LENGTHS, batch=5)
    stale = bench.dispatcher.next_offer(bench.now)
    fresh = bench.dispatcher.next_offer(bench.now)
    bench.dispatcher.commit(fresh, bench.now)
    before = bench.status()
    with pytest.raises(InvariantError):
        bench.fabric.dispatch(stale.group, stale.takes, stale.batch, bench.now)
    assert bench.status() == before
    bench.check()


def test_ragged_worker_is_not_touched_by_group_packing() -> None:
    bench = Bench(packing="group")
    producer = bench.producer("job")
    worker = bench.worker("gpu0", batch=3, window=1, ragged=True)
    producer.submit(LENGTHS, [SHAPE] * 5)
    bench.settle()
    bench.dispatch(1)
    ((_, message),) = worker.batches.items()
    assert list(message.columns["lengths"]) == [1_000, 800, 600]
    assert "pad_to" not in message.fields
    assert next(iter(bench.fabric.groups.values())).sweep_below is None


@pytest.mark.parametrize("packing", ["tight", "strict", "group"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_batch_holds_no_more_payload_than_one_message_may(
    packing: str, *, ragged: bool, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "BATCH_BYTES_MAX", 3_000)
    bench = DiskBench(tmp_path, packing=packing) if on_disk else Bench(packing=packing)
    producer = bench.producer("job")
    worker = bench.worker("gpu0", batch=8, window=1, ragged=ragged)
    producer.submit([100] * 4 + [500] * 3, payload=b"p" * 1_000)
    producer.submit([100], payload=b"large" * 2_000)
    producer.submit([100], payload=b"p" * 1_000)
    bench.settle()
    # What came back goes by the same rule.
    assert bench.dispatch(1) == 1
    worker.give_back(next(iter(worker.batches)), "leaving")
    bench.settle()
    worker.cut()
    bench.tick()
    worker = bench.worker("gpu1", batch=8, window=1, ragged=ragged)
    bodies = []
    while bench.dispatch(1):
        ((_, message),) = worker.batches.items()
        bodies.append(len(message.body))
        if not ragged and packing != "strict":
            assert message.fields["pad_to"] == -(-max(message.columns["lengths"]) // 8) * 8
        bench.check()
        finish(bench, worker)
        worker.heartbeat()
    assert sorted(producer.results) == list(range(1, 10))
    # Three of 1,000 bytes at most, and the large one by itself.
    assert sum(bodies) == 8_000 + 10_000
    assert max(size for size in bodies if size != 10_000) == 3_000


@pytest.mark.parametrize("packing", ["tight", "strict", "group"])
@pytest.mark.parametrize("ragged", [False, True])
def test_no_lane_is_passed_over_for_longer_than_max_wait(packing: str, *, ragged: bool) -> None:
    bench = Bench(packing=packing, max_wait_s=10.0)
    producer = bench.producer("job")
    worker = bench.worker("gpu0", batch=2, tokens=2_000, window=1, ragged=ragged)
    # More long ones than can be served, and a few short ones, for ever.
    for _ in range(30):
        producer.submit([900, 900, 900, 10])
        bench.tick(1.0)
        bench.dispatch(1)
        finish(bench, worker)
        worker.heartbeat()
    assert 4 in producer.results
    bench.check()
