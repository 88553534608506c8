"""The workers' side of the rules, fault by fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.harness import Bench, FakeProducer, FakeWorker
from zfabric.operate import CANCEL_ITEMS
from zfabric.protocol import Status, Type
from zfabric.shapes import Shape


def begin(items: int = 4, **config: Any) -> tuple[Bench, FakeProducer, FakeWorker]:
    bench = Bench(**config)
    producer = bench.producer()
    worker = bench.worker()
    producer.submit([100] * items)
    bench.settle()
    return bench, producer, worker


def the_only(worker: FakeWorker) -> tuple[int, int]:
    (key,) = worker.batches
    return key


def errors(worker: FakeWorker) -> list[str]:
    return [m.fields["code"] for m in worker.inbox if m.kind is Type.ERROR]


def test_results_reach_their_producer_once() -> None:
    bench, producer, worker = begin(20)
    while bench.dispatch():
        for key in list(worker.batches):
            worker.done(key)
        bench.settle()
    assert producer.results == {n: [Status.OK] for n in range(1, 21)}
    bench.check()


def test_window_bounds_what_a_worker_is_sent() -> None:
    bench, _, worker = begin(100)
    worker.heartbeat(window=2)
    assert bench.dispatch() == 2
    worker.heartbeat(window=0)
    worker.done(next(iter(worker.batches)))
    bench.settle()
    assert bench.dispatch() == 0


@pytest.mark.parametrize("jump_s", [-3_600.0, 3_600.0])
def test_wall_clock_that_jumps_an_hour_changes_nothing(jump_s: float) -> None:
    bench, producer, worker = begin(4)
    bench.dispatch()
    (key,) = worker.batches
    worker.start(key)
    bench.dispatcher.tick(bench.now + 1.0, 1_000_000 + bench.now + jump_s, drained=True)
    bench.settle()
    status = bench.status()
    assert (status["pending_items"], status["redeliveries_total"]) == (4, 0)
    worker.done(key)
    bench.settle()
    assert producer.results == {n: [Status.OK] for n in range(1, 5)}
    bench.check()


def test_cut_link_frees_what_is_not_started_at_once() -> None:
    bench, _, worker = begin(16)
    bench.dispatch()
    first, _ = worker.batches
    worker.start(first)
    worker.cut()
    bench.tick(1.0)
    assert bench.status()["ready_items"] == 8
    assert bench.status()["pending_items"] == 8
    bench.check()


def test_worker_that_died_silent_makes_its_first_batch_suspect_and_alone() -> None:
    bench, _, worker = begin(16)
    bench.dispatch()
    worker.cut()
    bench.tick(1.0)
    assert bench.status()["ready_items"] == 8
    bench.tick(10.0)
    other = bench.worker("gpu1")
    sizes = []
    for _ in range(20):
        bench.dispatch(1)
        for key in list(other.batches):
            sizes.append(len(other.batches[key]))
            other.done(key)
        bench.settle()
    assert sorted(sizes) == [1] * 8 + [8]
    assert not bench.fabric.store.attempts


def test_expired_lease_charges_only_what_was_started() -> None:
    bench, producer, worker = begin(4, attempts_max=1)
    bench.dispatch()
    worker.send(Type.STARTED, {"epoch": the_only(worker)[0], "n": 1}, [b"\0\0\0\0"])
    worker.cut()
    bench.tick(1.0)
    assert bench.status()["ready_items"] == 3
    bench.tick(10.0)
    assert producer.results == {1: [Status.DEAD]}
    assert json.loads(producer.payloads[1])["code"] == "dead"
    bench.check()


def test_started_items_wait_for_a_worker_that_still_holds_them() -> None:
    bench, producer, worker = begin(4)
    bench.dispatch()
    key = the_only(worker)
    worker.start(key)
    worker.cut()
    bench.tick(3.0)
    worker.hello()
    bench.settle()
    bench.tick(1.0)
    assert bench.status()["pending_items"] == 4
    worker.done(key)
    bench.settle()
    assert len(producer.results) == 4
    assert bench.status()["redeliveries_total"] == 0


def test_worker_process_started_anew_is_charged_without_waiting_for_the_lease() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.start(the_only(worker))
    worker.cut()
    bench.tick(1.0)
    worker.batches.clear()
    worker.instance = 99
    worker.hello()
    bench.settle()
    assert bench.status()["ready_items"] == 4
    assert set(bench.fabric.store.attempts.values()) == {1}


def test_same_process_that_lost_a_batch_on_the_way_is_not_charged() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.start(the_only(worker))
    worker.cut()
    bench.tick(1.0)
    worker.batches.clear()
    worker.hello()
    bench.settle()
    assert bench.status()["ready_items"] == 4
    assert not bench.fabric.store.attempts


def test_worker_that_comes_back_after_its_lease_uncharges() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.start(the_only(worker))
    worker.cut()
    bench.tick(1.0)
    bench.tick(10.0)
    assert set(bench.fabric.store.attempts.values()) == {1}
    worker.hello()
    bench.settle()
    assert not bench.fabric.store.attempts


def test_late_result_wins_when_it_is_first() -> None:
    bench, producer, worker = begin(4)
    bench.dispatch()
    key = the_only(worker)
    late = worker.batches[key]
    worker.start(key)
    worker.cut()
    bench.tick(1.0)
    bench.tick(10.0)
    assert bench.status()["ready_items"] == 4
    worker.hello()
    worker.batches[key] = late
    worker.done(key)
    bench.settle()
    assert len(producer.results) == 4
    assert bench.status()["ready_items"] == 0
    bench.check()


def test_late_result_is_a_duplicate_when_it_is_second() -> None:
    bench, producer, worker = begin(4)
    bench.dispatch()
    key = the_only(worker)
    late = worker.batches[key]
    worker.start(key)
    worker.cut()
    bench.tick(1.0)
    bench.tick(10.0)
    other = bench.worker("gpu1")
    while bench.dispatch():
        for held in list(other.batches):
            other.done(held)
        bench.settle()
    worker.hello()
    worker.batches[key] = late
    worker.done(key, payload=b"late")
    bench.settle()
    assert all(len(statuses) == 1 for statuses in producer.results.values())
    assert set(producer.payloads.values()) == {b"r"}
    assert bench.status()["duplicates_total"] == 4
    assert worker.inbox[-1].fields["duplicates"] == 4


def test_result_for_an_item_another_worker_has_revokes_it_there() -> None:
    bench, producer, worker = begin(1)
    bench.dispatch()
    key = the_only(worker)
    late = worker.batches[key]
    worker.start(key)
    worker.cut()
    bench.tick(1.0)
    bench.tick(10.0)
    other = bench.worker("gpu1")
    bench.dispatch()
    (elsewhere,) = other.batches
    worker.hello()
    worker.batches[key] = late
    worker.done(key)
    bench.settle()
    assert producer.results == {1: [Status.OK]}
    assert elsewhere not in other.batches
    assert any(m.kind is Type.REVOKE for m in other.inbox)
    bench.check()


def test_same_ref_twice_in_one_done_completes_once() -> None:
    bench, producer, worker = begin(2)
    bench.dispatch()
    worker.done(the_only(worker), [0, 0, 1, 1])
    bench.settle()
    assert producer.results == {1: [Status.OK], 2: [Status.OK]}
    assert bench.status()["duplicates_total"] == 2


def test_poison_item_is_dead_at_the_limit_and_its_neighbours_finish() -> None:
    bench, producer, worker = begin(8)
    poison = 3
    for _ in range(60):
        bench.dispatch()
        for key, message in list(worker.batches.items()):
            refs = list(message.columns["entries"])
            worker.start(key)
            if poison - 1 in refs:
                worker.give_back(key, "engine_exit")
            else:
                worker.done(key)
        bench.settle()
    assert producer.results.pop(poison) == [Status.DEAD]
    assert set(map(tuple, producer.results.values())) == {(Status.OK,)}
    assert len(producer.results) == 7
    assert bench.status()["dead_items"] == 1
    bench.check()


def test_engine_exit_charges_started_items_alone() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    key = the_only(worker)
    worker.send(Type.STARTED, {"epoch": key[0], "n": key[1]}, [b"\0\0\0\0"])
    worker.give_back(key, "engine_exit")
    bench.settle()
    assert list(bench.fabric.store.attempts.values()) == [1]


@pytest.mark.parametrize("kind", ["unreachable", "leaving"])
def test_what_is_not_the_engines_fault_charges_nobody(kind: str) -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.start(the_only(worker))
    worker.give_back(the_only(worker), kind)
    bench.settle()
    assert not bench.fabric.store.attempts
    assert bench.status()["ready_items"] == 4


def test_dead_item_that_finds_no_place_stays_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, producer, _ = begin(1)
    (group,) = bench.fabric.groups.values()
    (queue,) = group.queues.values()
    (ref,) = bench.fabric.store.peek_all(queue)
    bench.fabric.bury(ref, "test", bench.now)
    bench.settle()
    monkeypatch.setattr("zfabric.fabric.MODELS_MAX", 0)
    bench.fabric.models.clear()
    assert "too_many_models" in producer.ask("dead.requeue", all=True)
    assert len(bench.fabric.dead) == 1 and not bench.fabric.retries


def test_cancels_of_one_producer_are_one_and_a_turn_does_a_step_of_one() -> None:
    bench, producer, _ = begin(1_000)
    others = bench.producer("others")
    for _ in range(50):
        others.send(Type.REQUEST, {"id": 1, "op": "producers.cancel", "args": {"name": "others"}})
        others.send(Type.REQUEST, {"id": 1, "op": "producers.cancel", "args": {"name": "job"}})
    before = bench.status()["ready_items"]
    bench.tick(0.0)
    bench.tick(0.0)
    assert before - bench.status()["ready_items"] <= CANCEL_ITEMS
    for _ in range(30):
        bench.tick(0.0)
    assert bench.status()["ready_items"] == 0
    bench.settle()
    assert set(map(tuple, producer.results.values())) == {(Status.CANCELLED,)}
    bench.check()


def test_out_of_memory_charges_its_items_and_retries_them_alone() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.give_back(the_only(worker), "out_of_memory")
    bench.settle()
    bench.dispatch(1)
    assert len(worker.batches[the_only(worker)]) == 1


def test_heartbeat_written_before_a_batch_arrived_does_not_take_it_back() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.send(Type.HEARTBEAT, {"received": 0, "holding": [], "window": 2})
    bench.settle()
    assert bench.status()["pending_items"] == 4


def test_batch_that_a_heartbeat_received_but_does_not_hold_is_taken_back() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.send(Type.HEARTBEAT, {"received": 1, "holding": [], "window": 0})
    bench.settle()
    assert bench.status()["ready_items"] == 4


def test_heartbeats_renew_a_lease_for_as_long_as_it_takes() -> None:
    bench, producer, worker = begin(4)
    bench.dispatch()
    key = the_only(worker)
    worker.start(key)
    for _ in range(40):
        bench.now += 1.0
        worker.heartbeat()
        producer.send(Type.HEARTBEAT, {})
        bench.tick()
    worker.done(key)
    bench.settle()
    assert len(producer.results) == 4
    assert bench.status()["redeliveries_total"] == 0


def test_batch_that_never_arrives_is_revoked_at_the_end_of_its_lease() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.batches.clear()
    worker.received = 0
    for _ in range(12):
        bench.now += 1.0
        worker.heartbeat(window=0)
        bench.tick()
    assert bench.status()["ready_items"] == 4
    assert any(m.kind is Type.REVOKE for m in worker.inbox)


def test_batch_that_crosses_a_goodbye_is_free_at_once() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.send(Type.BYE, {"reason": "done for today"})
    bench.settle()
    assert (bench.status()["ready_items"], bench.status()["pending_items"]) == (4, 0)
    assert not bench.fabric.store.attempts


def test_batch_of_a_worker_that_just_vanishes_waits_as_it_may_have_begun() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.cut()
    bench.tick(1.0)
    assert (bench.status()["ready_items"], bench.status()["pending_items"]) == (0, 4)


def test_nobody_is_judged_before_inbound_is_drained() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.start(the_only(worker))
    bench.tick(30.0, drained=False)
    assert bench.fabric.workers["gpu0"].peer is not None
    worker.heartbeat()
    bench.tick(0.0)
    assert bench.fabric.workers["gpu0"].peer is not None


def test_broker_that_was_late_judges_nobody_for_it() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    worker.start(the_only(worker))
    bench.now += 30.0
    bench.dispatcher.shift(30.0)
    bench.tick()
    assert bench.fabric.workers["gpu0"].peer is not None
    assert bench.status()["pending_items"] == 4


def test_second_live_worker_of_a_name_is_refused() -> None:
    bench, _, worker = begin()
    second = bench.worker("gpu0", instance=2)
    assert errors(second) == ["name_in_use", *errors(second)[1:]]
    assert bench.fabric.workers["gpu0"].peer.routing_id == worker.routing_id


def test_dead_holder_of_a_name_makes_way_by_the_second_try() -> None:
    bench, _, worker = begin()
    worker.cut()
    second = FakeWorker(bench, "gpu0", 2)
    second.hello()
    bench.settle()
    second.hello()
    bench.settle()
    assert bench.fabric.workers["gpu0"].peer.routing_id == second.routing_id


def test_messages_of_the_older_connection_are_not_known_any_more() -> None:
    bench, _, worker = begin()
    old = FakeWorker(bench, "gpu0", 1, worker.routing_id, True)
    worker.hello()
    bench.settle()
    bench.ends["workers", old.routing_id] = old
    old.heartbeat()
    bench.settle()
    assert [m.kind for m in old.inbox] == [Type.WHO_ARE_YOU]


@pytest.mark.parametrize(
    "hello",
    [
        {"batch": 0},
        {"batch": -1},
        {"batch": 2**40},
        {"batch": "8"},
        {"batch": 8.5},
        {"batch": True},
        {"batch": None},
        {"tokens": 0},
        {"longest": -5},
        {"tokens": 512, "longest": 1_024},
    ],
)
def test_nonsense_contract_is_refused_with_a_reason(hello: dict[str, Any]) -> None:
    bench = Bench()
    worker = bench.worker(**hello)
    assert errors(worker)[0] == "bad_contract"
    assert "gpu0" not in bench.fabric.workers


def test_another_input_maximum_is_refused_naming_both() -> None:
    bench, _, _ = begin()
    other = bench.worker("gpu1", longest=512)
    (error,) = [m for m in other.inbox if m.kind is Type.ERROR][:1]
    assert error.fields["code"] == "input_max_differs"
    assert "512" in error.fields["text"]
    assert "1024" in error.fields["text"]


def test_input_maximum_may_change_when_all_workers_are_gone() -> None:
    bench, _, worker = begin()
    worker.cut()
    bench.tick(1.0)
    bench.worker("gpu1", longest=512)
    assert bench.fabric.models["m"].input_tokens_max == 512


def test_item_over_the_contract_still_reaches_a_worker() -> None:
    bench = Bench()
    producer = bench.producer()
    worker = bench.worker(tokens=1_024, longest=1_024)
    producer.submit([5_000])
    bench.settle()
    assert bench.dispatch() == 1
    worker.done(the_only(worker), status=Status.TOO_LONG, payload=b"")
    bench.settle()
    assert producer.results == {1: [Status.TOO_LONG]}


def test_worker_cannot_report_what_only_the_broker_may() -> None:
    bench, producer, worker = begin()
    bench.dispatch()
    worker.done(the_only(worker), [0], status=Status.DEAD)
    bench.settle()
    assert errors(worker) == ["malformed"]
    assert not producer.results


def test_ragged_worker_takes_across_lanes_within_the_plain_sum() -> None:
    bench = Bench()
    producer = bench.producer()
    worker = bench.worker(batch=64, tokens=2_000, longest=1_000, ragged=True)
    producer.submit([10, 300, 700, 900, 20, 310])
    bench.settle()
    bench.dispatch(1)
    lengths = list(worker.batches[the_only(worker)].columns["lengths"])
    assert sum(lengths) <= 2_000
    assert len(lengths) > 2
    assert lengths[0] == max(lengths)
    assert "pad_to" not in worker.batches[the_only(worker)].fields


def test_all_workers_of_a_model_drain_the_same_shape() -> None:
    bench = Bench()
    producer = bench.producer()
    first, second = bench.worker("gpu0"), bench.worker("gpu1")
    small, large = Shape.of("m", "small"), Shape.of("m", "large")
    producer.submit([100] * 40, [small if k % 4 == 0 else large for k in range(40)])
    bench.settle()
    bench.dispatch()
    seen = {
        m.fields["shapes"][0]["components"] for w in (first, second) for m in w.batches.values()
    }
    assert len(seen) == 1


def test_fifo_sends_in_arrival_order_and_names_each_items_shape() -> None:
    bench = Bench(policy="fifo")
    producer = bench.producer()
    worker = bench.worker(batch=6)
    a, b = Shape.of("m", "a"), Shape.of("m", "b")
    producer.submit([50, 40, 30, 20, 10, 60], [a, b, a, b, a, b], order=[4, 3, 2, 1, 0, 5])
    bench.settle()
    bench.dispatch(1)
    message = worker.batches[the_only(worker)]
    assert list(message.columns["lengths"]) == [50, 40, 30, 20, 10, 60]
    assert list(message.columns["shape_index"]) == [0, 1, 0, 1, 0, 1]
    assert len(message.fields["shapes"]) == 2


def test_drain_grants_nothing_more_and_ends_when_nothing_is_pending() -> None:
    bench, producer, worker = begin(40)
    bench.dispatch()
    assert producer.ask("drain") == {"pending_items": 16}
    for key in list(worker.batches):
        worker.done(key)
    bench.settle()
    assert bench.dispatch() == 0
    assert bench.dispatcher.drained(bench.now)


def test_drain_gives_up_after_its_time() -> None:
    bench, producer, _ = begin(8, drain_s=30.0)
    bench.dispatch()
    producer.ask("drain")
    assert not bench.dispatcher.drained(bench.now + 29.0)
    assert bench.dispatcher.drained(bench.now + 30.0)


def test_nobody_takes_back_a_charge_for_the_batch_of_another() -> None:
    bench, _, worker = begin(4)
    bench.dispatch()
    key = the_only(worker)
    worker.start(key)
    worker.cut()
    bench.tick(1.0)
    bench.tick(10.0)
    liar = bench.worker("gpu1")
    liar.heartbeat(holding=[list(key)])
    bench.settle()
    assert set(bench.fabric.store.attempts.values()) == {1}


def test_fill_stays_a_share_when_an_item_is_over_the_contract() -> None:
    bench = Bench()
    producer = bench.producer()
    bench.worker(tokens=1_024, longest=1_024)
    producer.submit([2**31 - 8])
    bench.settle()
    assert bench.dispatch() == 1
    assert bench.status()["batch_fill_ratio"] == 1.0


@pytest.mark.parametrize("words", [{"model": "a\nb"}, {"engine": "\x1b[2J"}])
def test_words_that_command_a_terminal_are_refused(words: dict[str, Any]) -> None:
    worker = Bench().worker(**words)
    assert errors(worker)[0] == "malformed"


def test_ideal_hits_leave_out_what_is_not_run() -> None:
    bench = Bench()
    producer = bench.producer()
    bench.worker(tokens=4_096, longest=1_024)
    producer.submit([500, 500, 500, 3_000], Shape.of("m", "a", tokens=[400]))
    bench.settle()
    while bench.dispatch():
        pass
    (worker,) = bench.status()["workers"]
    assert worker["cache_hit_ratio_ideal"] == pytest.approx(800 / 1_500)
