"""The producers' side of the rules, fault by fault."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import Bench, FakeProducer
from zfabric import snapshot
from zfabric.operate import CANCEL_ITEMS
from zfabric.outbox import Outbox, Stored
from zfabric.protocol import Status, Type, encode, packed
from zfabric.shapes import Shape


def codes(producer: FakeProducer) -> list[str]:
    return [m.fields["code"] for m in producer.inbox if m.kind is Type.ERROR]


def refusals(producer: FakeProducer) -> list[tuple[int, str]]:
    accepted = [m.fields for m in producer.inbox if m.kind is Type.ACCEPTED]
    return [(f["from"], f["code"]) for f in accepted if "code" in f]


def test_resent_items_are_filtered_one_by_one() -> None:
    bench = Bench()
    producer = bench.producer()
    producer.submit([10, 20, 30])
    producer.submit([20, 30, 40], numbers=[2, 3, 4], after=1)
    bench.settle()
    assert producer.upto == 4
    assert bench.status()["accepted_items"] == 4
    assert bench.status()["accepted_tokens"] == 100


def test_numbers_may_have_gaps_where_the_producer_says_so() -> None:
    bench = Bench()
    producer = bench.producer()
    producer.submit([10, 10], numbers=[5, 9], after=0)
    producer.submit([10], numbers=[100], after=9)
    bench.settle()
    assert producer.upto == 100
    assert bench.status()["accepted_items"] == 3


def test_what_a_crash_left_beyond_a_gap_is_not_taken_in_again() -> None:
    bench = Bench()
    producer = bench.producer()
    producer.submit([10], numbers=[2], after=0)
    bench.settle()
    known = bench.fabric.producers[0]
    assert known is not None
    known.upto, known.above = 0, {2}
    shapes = [Shape.of("m", name) for name in "abc"]
    producer.submit([10, 10, 10], shapes, numbers=[1, 2, 3], after=0)
    bench.settle()
    assert producer.upto == 3
    assert bench.status()["accepted_items"] == 3
    assert bench.status()["counters"]["resent_items"] == 1


def test_message_behind_a_lost_one_is_refused_until_it_is_resent() -> None:
    bench = Bench()
    producer = bench.producer()
    producer.submit([10], numbers=[3], after=2)
    bench.settle()
    assert refusals(producer) == [(1, "gap")]
    assert bench.status()["accepted_items"] == 0
    producer.submit([10, 10], numbers=[1, 2], after=0)
    producer.submit([10], numbers=[3], after=2)
    bench.settle()
    assert producer.upto == 3


def test_full_broker_takes_what_fits_and_names_where_to_go_on() -> None:
    bench = Bench(max_items=5)
    producer = bench.producer()
    producer.submit([10] * 8)
    producer.submit([10])
    bench.settle()
    assert producer.upto == 5
    assert refusals(producer) == [(6, "busy")]
    assert bench.status()["accepted_items"] == 5


def test_bytes_bound_what_the_broker_holds() -> None:
    bench = Bench(max_bytes=1_000, payload_bytes_max=1_000)
    producer = bench.producer()
    producer.submit([10] * 8, payload=b"x" * 300)
    bench.settle()
    assert producer.upto == 3
    assert snapshot.held_bytes(bench.fabric) == 900


def test_limit_that_is_met_hides_none_that_is_tighter() -> None:
    bench = Bench(max_items=6, producer_items_max=5, max_bytes=1_000, payload_bytes_max=1_000)
    first, second = bench.producer("first"), bench.producer("second", instance=2)
    # Of its own it may have five; two of these fill the broker's memory.
    first.submit([10] * 9, payload=b"x" * 400)
    second.submit([10] * 9, payload=b"")
    bench.settle()
    assert refusals(first) == [(3, "busy")]
    # And here the broker has four places left.
    assert refusals(second) == [(5, "busy")]
    assert bench.fabric.store.items == 6
    assert snapshot.held_bytes(bench.fabric) == 800


def test_producer_that_reads_no_results_is_capped_and_others_are_not() -> None:
    bench = Bench(producer_items_max=4)
    slow, other = bench.producer("slow"), bench.producer("other", instance=2)
    slow.submit([10] * 6)
    other.submit([10] * 3)
    bench.settle()
    assert refusals(slow) == [(5, "outbox_full")]
    assert other.upto == 3


def test_cap_opens_again_as_results_are_acknowledged() -> None:
    bench = Bench(producer_items_max=4)
    producer = bench.producer()
    worker = bench.worker()
    producer.submit([10] * 4)
    bench.settle()
    bench.dispatch()
    for key in list(worker.batches):
        worker.done(key)
    bench.settle()
    producer.submit([10])
    bench.settle()
    assert producer.upto == 4
    producer.ack()
    producer.submit([10], numbers=[5], after=4)
    bench.settle()
    assert producer.upto == 5


def test_item_that_is_too_large_consumes_its_number_with_an_error_result() -> None:
    bench = Bench(payload_bytes_max=100)
    producer = bench.producer()
    producer.declare(Shape.of("m", "a"))
    columns = [packed("Q", [1, 2]), packed("I", [5, 5]), packed("I", [101, 1]), packed("I", [0, 0])]
    producer.send(Type.SUBMIT, {"after": 0, "more": False}, [*columns, b""], b"x" * 102)
    bench.settle()
    assert producer.upto == 2
    assert producer.results == {1: [Status.REFUSED]}
    assert json.loads(producer.payloads[1])["code"] == "too_large"
    assert bench.status()["accepted_items"] == 1
    assert bench.status()["refused_items"] == 1


def test_unknown_shape_is_an_error_result_not_a_crash() -> None:
    bench = Bench()
    producer = bench.producer()
    columns = [packed("Q", [1]), packed("I", [5]), packed("I", [1]), packed("I", [77]), b""]
    producer.send(Type.SUBMIT, {"after": 0, "more": False}, columns, b"x")
    bench.settle()
    assert json.loads(producer.payloads[1])["code"] == "unknown_shape"


def test_signature_with_other_components_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    producer = bench.producer()
    producer.submit([10], Shape.of("m", "a"))
    bench.settle()
    known = Shape.of("m", "a").signature
    monkeypatch.setattr("zfabric.shapes.signature_of", lambda hashes: known)
    producer.submit([10], Shape.of("m", "b"))
    bench.settle()
    assert codes(producer) == ["shape_conflict"]
    assert json.loads(producer.payloads[2])["code"] == "shape_conflict"
    bench.check()


def test_dead_item_of_a_shape_whose_signature_is_now_anothers_stays_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zfabric.shapes.signature_of", lambda hashes: 7)
    monkeypatch.setattr("zfabric.fabric.IDLE_SHAPES_MAX", 0)
    bench = Bench(attempts_max=1)
    producer, worker = bench.producer(), bench.worker()
    producer.submit([10], Shape.of("m", "a"))
    bench.settle()
    bench.dispatch()
    (key,) = worker.batches
    worker.give_back(key, "out_of_memory")
    bench.settle()
    # Nothing of the first shape is here, so another one may have its signature.
    producer.submit([10], Shape.of("m", "b"))
    bench.settle()
    assert producer.ask("dead.requeue", all=True).startswith("shape_conflict")
    assert len(bench.fabric.dead) == 1
    bench.check()


def test_producer_that_died_continues_at_its_next_number() -> None:
    bench = Bench()
    first = bench.producer("job", instance=1)
    first.submit([10] * 7)
    bench.settle()
    first.cut()
    second = FakeProducer(bench, "job", 2)
    second.hello()
    bench.settle()
    second.hello()
    bench.settle()
    assert second.upto == 7


def test_second_live_producer_of_a_name_is_refused() -> None:
    bench = Bench()
    first = bench.producer("job", instance=1)
    second = bench.producer("job", instance=2)
    assert codes(second) == ["name_in_use"]
    assert first.ask("status")["accepted_items"] == 0


def test_unacknowledged_results_come_again_after_a_reconnect() -> None:
    bench = Bench()
    producer = bench.producer()
    worker = bench.worker()
    producer.submit([10] * 5)
    bench.settle()
    bench.dispatch()
    producer.cut()
    for key in list(worker.batches):
        worker.done(key)
    bench.settle()
    again = FakeProducer(bench, "job", 1)
    again.hello()
    bench.settle()
    assert set(again.results) == {1, 2, 3, 4, 5}
    again.ack()
    bench.settle()
    third = FakeProducer(bench, "job", 1)
    third.hello()
    bench.settle()
    assert third.results == {}


def test_acknowledging_more_than_was_sent_is_an_error() -> None:
    bench = Bench()
    producer = bench.producer()
    producer.send(Type.RESULT_ACK, {"upto": 10})
    bench.settle()
    assert codes(producer) == ["malformed"]


def test_result_bytes_on_their_way_are_bounded() -> None:
    bench = Bench(result_bytes_inflight=1_000)
    producer = bench.producer()
    worker = bench.worker(batch=64, tokens=64_000)
    producer.submit([10] * 40)
    bench.settle()
    bench.dispatch()
    for key in list(worker.batches):
        worker.done(key, payload=b"y" * 600_000)
    bench.settle()
    assert 1 <= len(producer.results) < 5
    for _ in range(100):
        producer.ack()
        bench.settle()
    assert len(producer.results) == 40


def test_hold_waits_for_more_and_ends_with_it() -> None:
    bench = Bench()
    producer = bench.producer()
    bench.worker()
    producer.submit([10] * 5, more=True)
    bench.settle()
    assert bench.dispatch() == 0
    assert bench.dispatcher.wake_at == bench.now + 5.0
    producer.submit([], more=False)
    bench.settle()
    assert bench.dispatch() == 1


def test_next_job_is_held_as_the_first_was() -> None:
    bench = Bench()
    producer = bench.producer()
    worker = bench.worker()
    producer.submit([10] * 5)
    bench.settle()
    bench.dispatch()
    for key in list(worker.batches):
        worker.done(key)
    bench.settle()
    assert bench.dispatch() == 0
    bench.now += 0.3
    assert bench.dispatch() == 0
    producer.submit([10] * 5, more=True)
    bench.settle()
    assert bench.dispatch() == 0
    producer.submit([], more=False)
    bench.settle()
    assert bench.dispatch() == 1


def test_hold_ends_when_the_intake_is_full() -> None:
    bench = Bench(max_items=10)
    producer = bench.producer()
    bench.worker()
    producer.submit([10] * 20, more=True)
    bench.settle()
    assert bench.dispatch() == 2


def test_hold_ends_when_its_producer_is_gone() -> None:
    bench = Bench()
    producer = bench.producer()
    bench.worker()
    producer.submit([10] * 5, more=True)
    bench.settle()
    producer.cut()
    bench.tick(1.0)
    assert bench.dispatch() == 1


@pytest.mark.parametrize("numbers", [[0, 1], [2, 1], [1, 1], [2**63, 2**63 + 1], [1, 2**64 - 1]])
def test_numbers_that_do_not_ascend_are_refused_whole(numbers: list[int]) -> None:
    bench = Bench()
    producer = bench.producer()
    producer.submit([10, 10], numbers=numbers, after=0)
    bench.settle()
    assert codes(producer) == ["malformed"]
    assert bench.status()["accepted_items"] == 0


def test_order_that_is_no_permutation_is_refused() -> None:
    bench = Bench()
    producer = bench.producer()
    producer.submit([10, 10], order=[0, 0])
    bench.settle()
    assert codes(producer) == ["malformed"]


def test_components_are_at_most_64_and_whole() -> None:
    bench = Bench()
    producer = bench.producer()
    for words in (b"1234567", struct.pack("<65Q", *range(65))):
        producer.send(Type.SHAPE, {"id": 0, "model": "m", "components": words})
    bench.settle()
    assert codes(producer) == ["malformed", "malformed"]


def test_cancel_ends_what_waits_and_forget_frees_the_name() -> None:
    bench = Bench()
    producer = bench.producer()
    operator = bench.producer("op", instance=5)
    producer.submit([10] * 30)
    bench.settle()
    operator.ask("producers.cancel", name="job")
    bench.tick(0.1)
    assert {s for r in producer.results.values() for s in r} == {Status.CANCELLED}
    assert len(producer.results) == 30
    assert bench.status()["residual_items"] == 0
    assert "connected" in operator.ask("producers.forget", name="job")
    producer.cut()
    bench.tick(1.0)
    assert operator.ask("producers.forget", name="job") == {"name": "job", "dropped_results": 30}
    assert snapshot.held_bytes(bench.fabric) == 0
    assert bench.producer("job", instance=9).upto == 0


def test_forgetting_a_producer_with_work_asks_for_force() -> None:
    bench = Bench()
    producer = bench.producer()
    operator = bench.producer("op", instance=5)
    producer.submit([10] * 3)
    producer.cut()
    bench.tick(1.0)
    assert "--force" in operator.ask("producers.forget", name="job")
    operator.ask("producers.forget", name="job", force=True)
    bench.tick(0.1)
    assert bench.fabric.store.items == 0
    assert bench.status()["residual_items"] == 0


def test_requeued_dead_letter_is_a_new_item_that_says_what_it_retries() -> None:
    bench = Bench(attempts_max=1)
    producer = bench.producer()
    worker = bench.worker()
    producer.submit([10])
    bench.settle()
    bench.dispatch()
    worker.start(next(iter(worker.batches)))
    worker.give_back(next(iter(worker.batches)), "engine_exit")
    bench.settle()
    (record,) = producer.ask("dead.ls")
    assert record["attempts"] == 1
    producer.ask("dead.requeue", ids=[record["id"]])
    bench.tick(0.3)
    worker.heartbeat()
    bench.dispatch()
    worker.done(next(iter(worker.batches)))
    bench.settle()
    message = producer.inbox[-1]
    (number,) = message.columns["numbers"]
    assert message.fields["retry_of"] == {str(number): 1}
    assert bench.status()["accepted_items"] == 2
    assert bench.status()["residual_items"] == 0
    assert producer.ask("dead.ls") == []


def test_wrong_version_is_answered_with_both_versions() -> None:
    bench = Bench()
    end = FakeProducer(bench, "old", 1, b"old")
    bench.ends["producers", b"old"] = end
    frames = encode(Type.HELLO, {"role": "producer", "name": "old", "instance": 1})
    bench.to_broker("producers", b"old", [frames[0][:2] + b"\x63" + frames[0][3:]])
    bench.settle()
    (error,) = end.inbox
    assert error.fields["code"] == "version_mismatch"
    assert "99" in error.fields["text"]
    assert "version 1" in error.fields["text"]


def test_role_on_the_wrong_endpoint_is_refused() -> None:
    bench = Bench()
    end = FakeProducer(bench, "job", 1, b"x")
    bench.ends["workers", b"x"] = end
    hello = {"role": "producer", "name": "job", "instance": 1}
    bench.to_broker("workers", b"x", encode(Type.HELLO, hello))
    bench.settle()
    assert codes(end) == ["wrong_endpoint"]


def test_message_of_a_stranger_is_asked_for_its_name() -> None:
    bench = Bench()
    end = FakeProducer(bench, "job", 1, b"x")
    bench.ends["producers", b"x"] = end
    bench.to_broker("producers", b"x", encode(Type.HEARTBEAT))
    bench.settle()
    assert [m.kind for m in end.inbox] == [Type.WHO_ARE_YOU]


def test_models_beyond_the_cap_are_refused_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfabric.fabric.MODELS_MAX", 3)
    bench = Bench()
    producer = bench.producer()
    producer.submit([10] * 5, [Shape.of(f"m{k}", "a") for k in range(5)])
    bench.settle()
    assert producer.results == {4: [Status.REFUSED], 5: [Status.REFUSED]}
    assert json.loads(producer.payloads[4])["code"] == "too_many_models"
    assert bench.status()["accepted_items"] == 3
    bench.check()


def test_model_without_work_or_workers_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfabric.fabric.MODELS_MAX", 1)
    bench = Bench()
    producer = bench.producer()
    producer.submit([10], Shape.of("old", "a"))
    producer.ask("producers.cancel", name="job")
    bench.tick(0.1)
    producer.submit([10], Shape.of("new", "a"))
    bench.settle()
    assert list(bench.fabric.models) == ["new"]
    assert bench.status()["accepted_items"] == 2
    bench.check()


def test_cancel_reaches_every_item_of_the_largest_message() -> None:
    bench = Bench()
    producer = bench.producer()
    producer.submit([10] * 65_536)
    bench.settle()
    producer.ask("producers.cancel", name="job")
    while bench.dispatcher.busy:
        bench.tick(0.001)
    assert bench.status()["ready_items"] == 0
    assert bench.status()["cancelled_items"] == 65_536


def test_item_requeued_twice_is_still_the_one_its_producer_numbered() -> None:
    bench = Bench(attempts_max=1)
    producer = bench.producer()
    worker = bench.worker()
    producer.submit([10])
    bench.settle()
    for _ in range(2):
        bench.tick(0.3)
        worker.heartbeat()
        bench.dispatch()
        worker.start(next(iter(worker.batches)))
        worker.give_back(next(iter(worker.batches)), "engine_exit")
        bench.settle()
        (record,) = producer.ask("dead.ls")
        assert record["number"] == 1
        producer.ask("dead.requeue", ids=[record["id"]])
    bench.tick(0.3)
    worker.heartbeat()
    bench.dispatch()
    worker.done(next(iter(worker.batches)))
    bench.settle()
    (number,) = producer.inbox[-1].columns["numbers"]
    assert producer.inbox[-1].fields["retry_of"] == {str(number): 1}


def test_unread_results_of_one_producer_do_not_shut_out_the_others() -> None:
    bench = Bench(max_bytes=10_000, payload_bytes_max=10_000)
    slow, other = bench.producer("slow"), bench.producer("other", instance=2)
    worker = bench.worker(batch=64, tokens=64_000)
    slow.submit([10] * 5)
    bench.settle()
    bench.dispatch()
    for key in list(worker.batches):
        worker.done(key, payload=b"y" * 4_000)
    bench.settle()
    slow.submit([10])
    other.submit([10] * 4, payload=b"x" * 1_000)
    bench.settle()
    assert refusals(slow) == [(6, "outbox_full")]
    assert other.upto == 4


def test_absent_names_with_nothing_here_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfabric.fabric.PRODUCERS_MAX", 2)
    bench = Bench()
    busy, idle = bench.producer("busy"), bench.producer("idle", instance=2)
    busy.submit([10])
    busy.cut()
    idle.cut()
    bench.tick(1.0)
    third = bench.producer("third", instance=3)
    assert codes(third) == []
    assert set(bench.fabric.producer_index) == {"busy", "third"}
    assert codes(bench.producer("fourth", instance=4)) == ["too_many_producers"]


def test_cancelling_a_full_lane_leaves_the_loop_its_turns() -> None:
    bench = Bench(lanes=1)
    producer = bench.producer()
    producer.submit([10] * 1_000)
    bench.settle()
    producer.ask("producers.cancel", name="job")
    left = []
    while bench.fabric.store.items:
        bench.tick()
        left.append(bench.fabric.store.items)
    assert len(left) >= 3
    assert max(a - b for a, b in zip([1_000, *left], left, strict=False)) <= CANCEL_ITEMS
    bench.settle()
    assert producer.results == {n: [Status.CANCELLED] for n in range(1, 1_001)}


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 9), st.integers(0, 20))
def test_results_go_out_in_order_up_to_a_size_and_never_none(
    sizes: list[int], items_max: int, bytes_max: int
) -> None:
    outbox = Outbox()
    results = [Stored(k, Status.OK, bytes(size), None) for k, size in enumerate(sizes)]
    assert outbox.add(results) == sum(sizes)
    while outbox.sent < outbox.last:
        before = outbox.sent
        first, taken = outbox.take(items_max, bytes_max)
        assert (first, taken) == (before + 1, results[before : outbox.sent])
        size = sum(len(result.payload) for result in taken)
        assert len(taken) == 1 or (len(taken) <= items_max and size <= bytes_max)
        following = sizes[outbox.sent : outbox.sent + 1]
        assert not following or len(taken) == items_max or size + following[0] > bytes_max
    assert outbox.bytes_in_flight == sum(sizes)
    assert outbox.ack(outbox.last) == len(sizes)
    assert (outbox.bytes_in_flight, outbox.payload_bytes) == (0, 0)


def test_new_model_takes_the_place_of_none_that_an_operator_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zfabric.fabric.MODELS_MAX", 2)
    bench = Bench()
    producer = bench.producer()
    for name in ("paused", "idle"):
        bench.fabric.model(name)
    producer.ask("pause", model="paused")
    producer.submit([10], Shape.of("new", "a"))
    bench.settle()
    assert list(bench.fabric.models) == ["paused", "new"]
    assert bench.fabric.models["paused"].paused
    bench.check()
