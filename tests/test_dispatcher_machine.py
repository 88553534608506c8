"""The dispatcher as a state machine: each accepted item is in exactly one state, always."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.harness import Bench, FakeWorker
from zfabric.protocol import BROKER_NUMBERS_FROM, RETURN_KINDS, Status, Type
from zfabric.shapes import Shape

SHAPES = [Shape.of("m", "a"), Shape.of("m", "b"), Shape.of("m", "a", "b"), Shape.of("other", "a")]
NAMES = ("gpu0", "gpu1", "gpu2")
pick = st.integers(0, 2**16)


class FabricMachine(RuleBasedStateMachine):
    """Two producers, three worker names, everything that a network and an engine can do to them."""

    @initialize(
        policy=st.sampled_from(["lanes", "lanes", "shape", "fifo"]),
        packing=st.sampled_from(["tight", "strict", "group", "group"]),
        lanes=st.sampled_from([1, 3, 2_048]),
        ragged=st.booleans(),
        attempts=st.sampled_from([1, 3]),
    )
    def begin(self, policy: str, packing: str, lanes: int, ragged: bool, attempts: int) -> None:
        self.bench = Bench(
            policy=policy,
            packing=packing,
            lanes=lanes,
            attempts_max=attempts,
            max_items=300,
            producer_items_max=250,
        )
        self.ragged = ragged
        self.producers = [self.bench.producer("a"), self.bench.producer("b")]
        self.workers: dict[str, FakeWorker] = {}
        self.gone: list[FakeWorker] = []
        self.accepted: list[set[int]] = [set(), set()]

    # -- producers ----------------------------------------------------------------------------

    @rule(
        who=st.integers(0, 1),
        lengths=st.lists(st.integers(0, 1_200), min_size=1, max_size=40),
        shape=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
        more=st.booleans(),
    )
    def submit(self, who: int, lengths: list[int], shape: list[Shape], more: bool) -> None:
        producer = self.producers[who]
        chosen = [shape[k % len(shape)] for k in range(len(lengths))]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        numbers = producer.submit(lengths, chosen, more=more, order=order)
        self.bench.settle()
        self.accepted[who] |= {n for n in numbers if n <= producer.upto}
        producer.last = producer.upto

    @rule(who=st.integers(0, 1), lengths=st.lists(st.integers(0, 900), min_size=1, max_size=9))
    def submit_again(self, who: int, lengths: list[int]) -> None:
        producer = self.producers[who]
        first = max(1, producer.upto - len(lengths) + 1)
        numbers = list(range(first, producer.upto + 1))
        if numbers:
            producer.submit(lengths[: len(numbers)], numbers=numbers, after=0)
            self.bench.settle()

    @rule(who=st.integers(0, 1))
    def acknowledge(self, who: int) -> None:
        self.producers[who].ack()
        self.bench.settle()

    @rule(who=st.integers(0, 1))
    def producer_reconnects(self, who: int) -> None:
        self.producers[who].cut()
        self.producers[who].hello()
        self.bench.settle()

    @rule(who=st.integers(0, 1))
    def cancel(self, who: int) -> None:
        self.producers[who].ask("producers.cancel", name="ab"[who])
        self.bench.tick()

    @rule()
    def requeue_dead(self) -> None:
        for record in self.producers[0].ask("dead.ls")[:3]:
            who = "ab".index(record["producer"])
            self.accepted[who].add(BROKER_NUMBERS_FROM + record["id"])
            self.producers[0].ask("dead.requeue", ids=[record["id"]])

    # -- workers ------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), batch=st.sampled_from([1, 4, 8]), window=st.integers(1, 3))
    def worker_joins(self, name: str, batch: int, window: int) -> None:
        if name not in self.workers:
            model = "other" if name == "gpu2" else "m"
            self.workers[name] = self.bench.worker(
                name, batch=batch, model=model, window=window, ragged=self.ragged
            )

    @rule(most=st.integers(1, 5))
    def dispatch(self, most: int) -> None:
        self.bench.dispatch(most)

    def some(self, k: int) -> tuple[FakeWorker, Any] | None:
        held = [(w, key) for w in self.workers.values() for key in w.batches]
        return held[k % len(held)] if held else None

    @rule(k=pick)
    def start(self, k: int) -> None:
        if chosen := self.some(k):
            chosen[0].start(chosen[1])
            self.bench.settle()

    @rule(k=pick, status=st.sampled_from([Status.OK, Status.FAILED, Status.TOO_LONG]))
    def done(self, k: int, status: Status) -> None:
        if chosen := self.some(k):
            chosen[0].done(chosen[1], status=status)
            self.bench.settle()

    @rule(k=pick, part=st.integers(1, 4))
    def done_in_part(self, k: int, part: int) -> None:
        if chosen := self.some(k):
            worker, key = chosen
            size = len(worker.batches[key])
            worker.done(key, range(min(part, size)))
            self.bench.settle()

    @rule(k=pick, kind=st.sampled_from(sorted(RETURN_KINDS)), first=st.integers(0, 2))
    def give_back(self, k: int, kind: str, first: int) -> None:
        if chosen := self.some(k):
            chosen[0].give_back(chosen[1], kind, [0] if first == 0 else [])
            self.bench.settle()

    @rule(k=pick)
    def heartbeat_that_lost_a_batch(self, k: int) -> None:
        if chosen := self.some(k):
            chosen[0].forget(chosen[1])
            chosen[0].heartbeat()
            self.bench.settle()

    @rule(name=st.sampled_from(NAMES))
    def link_is_cut(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if worker is not None:
            worker.cut()
            self.gone.append(worker)

    @precondition(lambda self: self.gone)
    @rule(restarted=st.booleans(), holds=st.booleans())
    def worker_comes_back(self, restarted: bool, holds: bool) -> None:
        worker = self.gone.pop()
        if worker.name in self.workers:
            return
        if restarted or not holds:
            worker.batches.clear()
            worker.started.clear()
        worker.instance += restarted
        # A living holder of the name is refused once; by the second try it is known to be dead.
        for _ in range(2):
            worker.hello(model="other" if worker.name == "gpu2" else "m", ragged=self.ragged)
            self.bench.settle()
        worker.heartbeat()
        self.bench.settle()
        self.workers[worker.name] = worker

    # -- time ---------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 6.0, 11.0]), beats=st.booleans())
    def time_passes(self, seconds: float, beats: bool) -> None:
        self.bench.now += seconds
        if beats:
            for worker in self.workers.values():
                worker.heartbeat()
        for producer in self.producers:
            producer.send(Type.HEARTBEAT, {})
        self.bench.settle()
        for _ in range(3):
            self.bench.tick()

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def each_accepted_item_is_in_exactly_one_state(self) -> None:
        self.bench.settle()
        self.bench.check()
        fabric = self.bench.fabric
        living: list[set[int]] = [set(), set()]
        refs = list(fabric.pending.by_ref)
        for group in fabric.groups.values():
            for queue in group.queues.values():
                refs += fabric.store.peek_all(queue)
        for ref in refs:
            known = fabric.store.describe(ref)
            assert known.number not in living[known.producer]
            living[known.producer].add(known.number)
        for who, producer in enumerate(self.producers):
            ended = set(producer.results)
            unsent = fabric.producers[who].outbox
            assert unsent.sent == unsent.last
            assert all(len(statuses) == 1 for statuses in producer.results.values())
            assert not living[who] & ended
            assert living[who] | ended == self.accepted[who]

    def teardown(self) -> None:
        """Left alone with a good worker for each model, everything ends."""
        if not hasattr(self, "bench"):
            return
        for worker in (*self.workers.values(), *self.gone):
            worker.cut()
        self.bench.tick(60.0)
        self.bench.tick(60.0)
        for producer in self.producers:
            producer.hello()
            self.bench.settle()
            producer.submit([], more=False)
        good = [self.bench.worker("good", model="m"), self.bench.worker("fine", model="other")]
        for _ in range(3_000):
            self.bench.tick(0.3)
            for worker in good:
                worker.heartbeat()
            self.bench.dispatch()
            for worker in good:
                for key in list(worker.batches):
                    worker.done(key)
            self.bench.settle()
            if not self.bench.fabric.store.items:
                break
        self.each_accepted_item_is_in_exactly_one_state()
        assert not self.bench.fabric.store.items


FabricMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MACHINE_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestFabric = FabricMachine.TestCase
