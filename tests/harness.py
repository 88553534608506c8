"""A fabric in memory: a real dispatcher and store, peers made of frames, a given clock."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from typing import Any, Protocol

from zfabric.config import BrokerConfig
from zfabric.dispatcher import PRODUCERS, WORKERS, Dispatcher
from zfabric.protocol import FROM_BROKER, Message, Status, Type, decode, encode, packed
from zfabric.shapes import Shape
from zfabric.store import Store

BatchKey = tuple[int, int]
# Turns of the broker that a peer waits for an answer.
PATIENCE_TURNS = 40


class End(Protocol):
    """The far end of a connection."""

    def hear(self, frames: list[bytes]) -> None:
        """A message from the broker arrives."""


@dataclass
class FakeWorker:
    """The worker's end of a connection, driven by hand."""

    bench: Bench
    name: str
    instance: int
    routing_id: bytes = b""
    connected: bool = False
    inbox: list[Message] = field(default_factory=list)
    batches: dict[BatchKey, Message] = field(default_factory=dict)
    started: set[BatchKey] = field(default_factory=set)
    received: int = 0
    boot: int = 0

    def send(self, kind: Type, fields: dict[str, Any], columns: Any = (), body: Any = None) -> None:
        if self.connected:
            self.bench.to_broker(WORKERS, self.routing_id, encode(kind, fields, columns, body))

    def hello(
        self,
        *,
        model: str = "m",
        batch: int = 8,
        tokens: int = 4_096,
        longest: int = 1_024,
        **more: Any,
    ) -> None:
        self.routing_id = self.bench.new_id()
        self.connected = True
        self.received = 0
        self.bench.ends[WORKERS, self.routing_id] = self
        fields = {
            "role": "worker",
            "name": self.name,
            "instance": self.instance,
            "model": model,
            "batch_items_max": batch,
            "batch_tokens_max": tokens,
            "input_tokens_max": longest,
            "held": [list(key) for key in self.batches],
            "boot": self.boot,
        }
        self.send(Type.HELLO, {**fields, **more})

    def heartbeat(self, window: int = 2, **more: Any) -> None:
        holding = [list(key) for key in self.batches]
        fields = {"received": self.received, "holding": holding, "window": window, **more}
        self.send(Type.HEARTBEAT, fields)

    def start(self, key: BatchKey) -> None:
        self.started.add(key)
        self.send(Type.STARTED, {"epoch": key[0], "n": key[1]}, [b""])

    def done(
        self, key: BatchKey, indices: Any = None, status: int = Status.OK, payload: bytes = b"r"
    ) -> None:
        message = self.batches[key]
        chosen = list(range(len(message))) if indices is None else list(indices)
        columns = [
            packed("Q", [message.columns["nonces"][k] for k in chosen]),
            packed("I", [message.columns["entries"][k] for k in chosen]),
            packed("B", [status] * len(chosen)),
            packed("I", [len(payload)] * len(chosen)),
        ]
        fields = {"epoch": key[0], "n": key[1]}
        self.send(Type.DONE, fields, columns, payload * len(chosen))
        if indices is None:
            self.forget(key)

    def give_back(self, key: BatchKey, kind: str, indices: Any = ()) -> None:
        fields = {"epoch": key[0], "n": key[1], "kind": kind, "text": "as told"}
        self.send(Type.RETURNED, fields, [packed("I", indices)])
        if not indices:
            self.forget(key)

    def forget(self, key: BatchKey) -> None:
        self.batches.pop(key, None)
        self.started.discard(key)

    def cut(self) -> None:
        """The connection is gone; the broker finds out when it sends."""
        self.connected = False
        self.bench.ends.pop((WORKERS, self.routing_id), None)

    def hear(self, frames: list[bytes]) -> None:
        message = decode(frames, FROM_BROKER)
        self.inbox.append(message)
        if message.kind is Type.WELCOME:
            self.boot = message.fields["boot"]
        if message.kind is Type.BATCH:
            key = (message.fields["epoch"], message.fields["n"])
            self.batches[key] = message
            self.received = message.fields["n"]
        if message.kind is Type.REVOKE:
            key = (message.fields["epoch"], message.fields["n"])
            if key not in self.started:
                self.forget(key)


@dataclass
class FakeProducer:
    """The producer's end of a connection, driven by hand. Results are kept once each."""

    bench: Bench
    name: str
    instance: int
    routing_id: bytes = b""
    inbox: list[Message] = field(default_factory=list)
    results: dict[int, list[int]] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    seq: int = 0
    upto: int = 0
    last: int = 0
    asked: int = 0
    shapes: dict[Shape, int] = field(default_factory=dict)

    def send(self, kind: Type, fields: dict[str, Any], columns: Any = (), body: Any = None) -> None:
        self.bench.to_broker(PRODUCERS, self.routing_id, encode(kind, fields, columns, body))

    def hello(self) -> None:
        self.routing_id = self.bench.new_id()
        self.bench.ends[PRODUCERS, self.routing_id] = self
        self.shapes.clear()
        self.send(Type.HELLO, {"role": "producer", "name": self.name, "instance": self.instance})

    def cut(self) -> None:
        self.bench.ends.pop((PRODUCERS, self.routing_id), None)

    def declare(self, shape: Shape) -> int:
        number = self.shapes.get(shape)
        if number is None:
            number = self.shapes[shape] = len(self.shapes)
            words = struct.pack(f"<{len(shape.components)}Q", *shape.components)
            fields = {"id": number, "model": shape.model, "components": words}
            if shape.tokens:
                fields["tokens"] = list(shape.tokens)
            self.send(Type.SHAPE, fields)
        return number

    def submit(
        self,
        lengths: list[int],
        shape: Shape | list[Shape] | None = None,
        *,
        more: bool = False,
        numbers: list[int] | None = None,
        payload: bytes = b"p",
        after: int | None = None,
        order: list[int] | None = None,
    ) -> list[int]:
        chosen = shape if isinstance(shape, list) else [shape or Shape.of("m", "a")] * len(lengths)
        ids = [self.declare(s) for s in chosen]
        given = numbers or list(range(self.last + 1, self.last + 1 + len(lengths)))
        columns = [
            packed("Q", given),
            packed("I", lengths),
            packed("I", [len(payload)] * len(lengths)),
            packed("I", ids),
            packed("I", order or []),
        ]
        fields = {"after": self.last if after is None else after, "more": more}
        self.send(Type.SUBMIT, fields, columns, payload * len(lengths))
        self.last = max([self.last, *given])
        return given

    def ack(self) -> None:
        self.send(Type.RESULT_ACK, {"upto": self.seq})

    def ask(self, op: str, **args: Any) -> Any:
        self.asked += 1
        self.send(Type.REQUEST, {"id": self.asked, "op": op, "args": args})
        # An answer that is a promise waits while the disk is full.
        for _ in range(PATIENCE_TURNS):
            self.bench.settle()
            for message in reversed(self.inbox):
                if message.kind is Type.REPLY and message.fields["id"] == self.asked:
                    return message.fields["value" if message.fields["ok"] else "text"]
        raise AssertionError(f"no answer to {op!r}")

    def hear(self, frames: list[bytes]) -> None:
        message = decode(frames, FROM_BROKER)
        self.inbox.append(message)
        if message.kind is Type.WELCOME or message.kind is Type.ACCEPTED:
            self.upto = message.fields["upto"]
        elif message.kind is Type.RESULT:
            self._take_results(message)

    def _take_results(self, message: Message) -> None:
        first = message.fields["seq"]
        sizes = message.columns["sizes"]
        starts = [0, *itertools.accumulate(sizes)]
        for k, number in enumerate(message.columns["numbers"]):
            if first + k <= self.seq:
                continue
            self.seq = first + k
            self.results.setdefault(number, []).append(message.columns["statuses"][k])
            self.payloads[number] = message.body[starts[k] : starts[k + 1]]


class Bench:
    """A broker without sockets: delivers frames both ways at once, keeps the clock."""

    def __init__(self, **config: Any) -> None:
        self.config = BrokerConfig(memory=True, **config)
        self.now = 100.0
        self._ids = itertools.count(1)
        self._nonces = itertools.count(1)
        self.ends: dict[tuple[str, bytes], End] = {}
        self.offers = 0
        self.start_broker(boot=7)

    def start_broker(self, boot: int) -> None:
        """A broker with an empty store: what a memory broker is after a crash."""
        store = Store(random_u64=lambda: next(self._nonces) * 0x9E3779B97F4A7C15 % 2**64)
        self.dispatcher = Dispatcher(
            self.config, store, boot, {"worker_port": 7411, "stats_port": 7412}
        )

    @property
    def fabric(self) -> Any:
        return self.dispatcher.fabric

    def new_id(self) -> bytes:
        return b"id%d" % next(self._ids)

    def producer(self, name: str = "job", instance: int = 1) -> FakeProducer:
        fresh = FakeProducer(self, name, instance)
        fresh.hello()
        self.settle()
        return fresh

    def worker(self, name: str = "gpu0", instance: int = 1, **hello: Any) -> FakeWorker:
        fresh = FakeWorker(self, name, instance)
        fresh.hello(**hello)
        fresh.heartbeat()
        self.settle()
        return fresh

    def producer_of_dead(self, items: int = 1, payload: bytes = b"p") -> FakeProducer:
        """A producer whose items were given up (with attempts_max 1); no worker is left."""
        producer = self.producer()
        self.die(producer, items, payload)
        assert len(self.fabric.dead) == items
        return producer

    def die(self, producer: FakeProducer, items: int, payload: bytes) -> None:
        """So many items of a producer are given up, at most a batch of them."""
        worker = self.worker()
        producer.submit([100] * items, payload=payload)
        self.settle()
        self.dispatch()
        (key,) = worker.batches
        worker.start(key)
        worker.give_back(key, "out_of_memory")
        self.settle()
        worker.cut()

    def to_broker(self, endpoint: str, routing_id: bytes, frames: list[bytes]) -> None:
        self.dispatcher.receive(endpoint, routing_id, frames, self.now)

    def settle(self) -> None:
        """Deliver what the dispatcher wants sent, as the broker's turn does. No offers."""
        self.dispatcher.flush(self.now)
        while self.dispatcher.writing:
            self.dispatcher.flush(self.now)
        while self.dispatcher.outgoing:
            endpoint, routing_id, frames = self.dispatcher.outgoing.popleft()
            end = self.ends.get((endpoint, routing_id))
            if end is None:
                self.dispatcher.unreachable(endpoint, routing_id, "host unreachable", self.now)
            else:
                end.hear(frames)

    def dispatch(self, most: int = 1_000_000) -> int:
        """Hand out up to `most` batches; returns how many were taken."""
        taken = 0
        while taken < most:
            offer = self.dispatcher.next_offer(self.now)
            if offer is None:
                break
            peer = offer.worker.peer
            assert peer is not None
            end = self.ends.get(peer.address)
            if end is None:
                self.dispatcher.unreachable(*peer.address, "host unreachable", self.now)
                continue
            self.dispatcher.commit(offer, self.now)
            end.hear(offer.frames)
            taken += 1
        self.offers += taken
        return taken

    def tick(self, seconds: float = 0.0, *, drained: bool = True) -> None:
        self.now += seconds
        self.dispatcher.tick(self.now, 1_000_000 + self.now, drained=drained)
        self.settle()

    def status(self) -> dict[str, Any]:
        from zfabric import snapshot

        return snapshot.status(self.dispatcher.fabric, self.now)

    # -- the books ----------------------------------------------------------------------------

    def check(self) -> None:
        """See `check_books`."""
        check_books(self.fabric, self.now)


def check_books(fabric: Any, now: float) -> None:
    """Every count equals a recount from the store, and nothing is anywhere twice."""
    ready: list[int] = []
    for group in fabric.groups.values():
        group_refs: list[int] = []
        for lane, queue in group.queues.items():
            refs = fabric.store.peek_all(queue)
            lengths = [fabric.store.describe(r).length for r in refs]
            assert queue.ready_items == len(refs)
            assert queue.ready_tokens == sum(lengths)
            assert group.order.ready(lane) == (len(refs), sum(lengths))
            assert fabric.store.longest(queue) == max(lengths, default=0)
            group_refs += refs
        assert group.ready_items == len(group_refs)
        assert group.model.draining.ready(group.id) == (group.ready_items, group.ready_tokens)
        pending = [
            r for r in fabric.pending.by_ref if fabric.store.describe(r).queue.group == group.id
        ]
        assert group.pending_items == len(pending)
        assert group.outstanding == len(group_refs) + len(pending)
        if group.lanes is not None:
            counted: dict[int, int] = {}
            for ref in group_refs + pending:
                lane = fabric.store.describe(ref).queue.lane
                counted[lane] = counted.get(lane, 0) + 1
            rows = {row.id: row.outstanding for row in group.lanes.rows()}
            assert {k: v for k, v in rows.items() if v} == counted
        ready += group_refs
    tokens = sum(fabric.store.describe(ref).length for ref in ready)
    assert (fabric.store.ready_items, fabric.store.ready_tokens) == (len(ready), tokens)
    everywhere = ready + list(fabric.pending.by_ref)
    assert len(everywhere) == len(set(everywhere)) == fabric.store.items
    held = [b for w in fabric.workers.values() for b in w.held.values()]
    assert {b.id for b in held} == set(fabric.pending.batches)
    assert sum(len(b.outstanding) for b in held) == fabric.pending.items
    from zfabric import snapshot

    status = snapshot.status(fabric, now)
    assert status["residual_items"] == 0
    assert status["residual_tokens"] == 0
    assert sum(fabric.waste.parts) == fabric.waste.padded_tokens - fabric.waste.real_tokens
