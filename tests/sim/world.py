"""The simulated fabric: a real dispatcher, store and recovery, real sessions, a simulated world.

Everything that could happen in any order happens in an order drawn from one seed: when messages
arrive, how long syncs and engines take, who dies. Connections behave as TCP does under ZeroMQ: in
order and whole while they live; when one goes, what was on its way is lost, either side may learn
of it late, and what an older connection had on its way may come after the newer one's HELLO.
Times are seconds of a simulated clock.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.harness import check_books
from tests.sim.memfiles import ROOT, MemFiles
from zfabric.config import BrokerConfig
from zfabric.dispatcher import PRODUCERS, WORKERS, Dispatcher
from zfabric.errors import NoSpace
from zfabric.protocol import Status
from zfabric.recovery import open_backing
from zfabric.restore import restore
from zfabric.session import Session
from zfabric.shapes import Contract, Shape
from zfabric.store import Store
from zfabric.worker_session import WorkerSession

STEPS_S = (0.01, 0.03, 0.1, 0.3)
# Faults happen for so long; then everything heals, and has so long to come to rest.
FAULTS_S, REST_S = 20.0, 240.0
LEASE_S, HEARTBEAT_S = 3.0, 0.5
# A turn later than this is the broker's own fault; see `zfabric.broker`.
LATE_S = 0.5
POISON = b"poison"
ATTEMPTS_MAX = 3
# Of the plans, those without faults: what a fault would explain is wrong there.
CALM_SHARE = 0.15
BLOWS = frozenset(
    {"cut", "rewire", "half_open", "hold_up", "hold_down", "worker_kill", "worker_pause"}
)
KINDS = (
    "broker_kill", "broker_power", "broker_stop", "broker_pause", "cut", "rewire", "half_open",
    "hold_up", "hold_down", "worker_kill", "worker_pause", "worker_leave", "producer_kill",
    "producer_pause", "disk_full", "slow_sync", "cancel",
)  # fmt: skip


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time; `who` chooses among those that it can happen to."""

    at: float
    kind: str
    who: int
    for_s: float


@dataclass(frozen=True)
class Plan:
    """One run: everything else follows from the seed."""

    seed: int
    faults: tuple[Fault, ...]
    items: int
    producers: int
    workers: int
    durability: str
    lanes: int
    # nothing goes wrong: then nothing may run twice
    calm: bool = False

    @classmethod
    def of(cls, seed: int) -> Plan:
        draw = random.Random(seed)
        calm = draw.random() < CALM_SHARE
        faults = (
            []
            if calm
            else [
                Fault(
                    draw.uniform(0, FAULTS_S),
                    draw.choice(KINDS),
                    draw.randrange(100),
                    draw.choice((0.05, 0.5, 2.0, 3.5, 6.0)),
                )
                for _ in range(draw.randrange(1, 14))
            ]
        )
        return cls(
            seed,
            tuple(sorted(faults, key=lambda fault: fault.at)),
            draw.randrange(5, 60),
            draw.randrange(1, 3),
            draw.randrange(1, 4),
            draw.choice(("fsync", "fsync", "os")),
            draw.choice((1, 4, 64)),
            calm,
        )


class Link:
    """A connection: frames on their way, in order, each way."""

    def __init__(self, endpoint: str, routing_id: bytes) -> None:
        self.endpoint = endpoint
        self.routing_id = routing_id
        self.up: deque[list[bytes]] = deque()
        self.down: deque[list[bytes]] = deque()
        self.hold_up_until = self.hold_down_until = 0.0
        # what the broker sends vanishes until then, and after that it is told
        self.half_open_until: float | None = None


@dataclass
class Client:
    """A process with a session, and its connection."""

    world: World
    endpoint: str
    name: str
    session: Any = None
    link: Link | None = None
    paused_until: float = 0.0
    # until then the broker may take it for dead
    troubled_until: float = 0.0
    instance: int = 0

    def connect(self) -> None:
        """A new socket: HELLO on it."""
        self.rewire()
        self.session.open(self.world.now)

    def rewire(self) -> None:
        """A new connection that the session does not know of, as zmq makes it."""
        self.cut()
        self.link = Link(self.endpoint, b"id%d" % self.world.next_id())
        self.world.links[self.endpoint, self.link.routing_id] = self.link

    def cut(self) -> None:
        """The connection goes; what it had on its way up may still arrive."""
        self.trouble(self.world.now)
        if self.link is not None:
            self.world.links.pop((self.endpoint, self.link.routing_id), None)
            if self.world.draw.random() < 0.5:
                self.world.late.append(self.link)
            self.link = None

    def step(self) -> None:
        world = self.world
        if world.now < self.paused_until:
            return
        if self.link is None:
            self.rewire()
        link = self.link
        arrived = 0
        if link is not None and world.now >= link.hold_down_until:
            arrived = world.some(len(link.down))
        for _ in range(arrived):
            if link is self.link and link is not None:
                self.act(self.session.receive(link.down.popleft(), world.now))
        self.act(self.session.tick(world.now))
        self.work()
        while self.session.outbound:
            frames = self.session.outbound.popleft()
            if self.link is not None:
                self.link.up.append(frames)

    def act(self, news: Any) -> None:
        if news.fatal is not None:
            raise Violation(f"{self.name} was told {news.fatal}")
        self.heed(news)
        if news.reconnect:
            self.connect()

    def heed(self, news: Any) -> None:
        raise NotImplementedError

    def work(self) -> None:
        raise NotImplementedError

    def pause(self, until: float) -> None:
        """Its process is stopped."""
        self.paused_until = until
        self.trouble(until)

    def trouble(self, until: float) -> None:
        """It may be taken for dead, by a lease that began before `until`."""
        self.troubled_until = max(self.troubled_until, until + 2 * LEASE_S)


class Producer(Client):
    """Submits items, keeps its results as a batch file would, and may die at any time."""

    def __init__(self, world: World, name: str, items: int) -> None:
        super().__init__(world, PRODUCERS, name)
        self.items = items
        # what was submitted, what came of it: these outlive the process
        self.payloads: dict[int, bytes] = {}
        self.results: dict[int, tuple[int, bytes]] = {}
        self.promised = 0
        self.cancelled = False
        self.start()

    def start(self) -> None:
        """A process begins: it asks how far it had come."""
        self.instance += 1
        self.session = Session(self.name, self.instance)
        self.seen: set[int] = set()
        self.unacked: list[tuple[float, int]] = []
        self.fresh = True
        self.connect()

    def kill(self) -> None:
        self.cut()
        self.start()

    def heed(self, news: Any) -> None:
        if news.lost:
            raise Violation(f"{self.name} is told that the store is another one")
        if news.welcomed and self.fresh:
            self.fresh = False
            self.add([n for n in self.payloads if n > self.session.upto])
        if news.welcomed and self.session.upto < self.promised:
            raise Violation(f"{self.name}: accepted to {self.promised}, now {self.session.upto}")
        if news.accepted:
            self.promised = max(self.promised, self.session.upto)
        for arrival in news.arrivals:
            got = (arrival.status, arrival.payload)
            if arrival.number in self.seen:
                raise Violation(f"{self.name} #{arrival.number} has two results")
            self.seen.add(arrival.number)
            if self.results.setdefault(arrival.number, got) != got:
                raise Violation(f"{self.name} #{arrival.number} has two different results")
            self.judge(arrival.number, *got)
        if news.seq:
            self.unacked.append((self.world.now + self.world.draw.uniform(0, 0.4), news.seq))

    def judge(self, number: int, status: int, payload: bytes) -> None:
        sent = self.payloads[number]
        if status == Status.OK:
            wrong = payload != b"done " + sent
        elif status == Status.DEAD:
            # A poison item may charge its neighbours once; from then on it goes alone.
            charges = self.world.blows + self.world.is_poisoned
            wrong = not sent.startswith(POISON) and charges < ATTEMPTS_MAX
        else:
            wrong = status != Status.CANCELLED or not self.cancelled
        if wrong:
            raise Violation(f"{self.name} #{number} ended with {status} {payload[:80]!r}")

    def add(self, numbers: list[int]) -> None:
        draw = random.Random(self.world.plan.seed)
        shapes = [Shape.of("m", str(n * 7919 % 3)) for n in numbers]
        lengths = [8 + n * 104_729 % (40 + draw.randrange(500)) for n in numbers]
        self.session.add(shapes, lengths, [self.payloads[n] for n in numbers], numbers)

    def work(self) -> None:
        draw, now = self.world.draw, self.world.now
        if not self.fresh and len(self.payloads) < self.items and draw.random() < 0.4:
            first = len(self.payloads) + 1
            count = min(draw.randrange(1, 12), self.items - first + 1)
            numbers = list(range(first, first + count))
            for n in numbers:
                kind = POISON if n % 23 == 11 and not self.world.plan.calm else b"item"
                self.payloads[n] = kind + b" %s:%d" % (self.name.encode(), n)
            self.add(numbers)
        self.session.more = len(self.payloads) < self.items
        self.session.pump()
        while self.unacked and self.unacked[0][0] <= now:
            self.session.acknowledge(self.unacked.pop(0)[1])

    @property
    def done(self) -> bool:
        everything = len(self.payloads) == self.items and len(self.results) == self.items
        return everything and not self.unacked


class Worker(Client):
    """Runs batches in drawn times; a poison item takes the engine with it."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, WORKERS, name)
        self.start()

    def start(self) -> None:
        """A process begins."""
        self.instance += 1
        contract = Contract(4, 8_192, 4_096)
        self.session = WorkerSession(self.name, self.instance, model="m", contract=contract)
        self.running: tuple[float, int, Any] | None = None
        self.session.serve(True, {})
        self.connect()

    def kill(self) -> None:
        self.cut()
        self.start()

    def heed(self, news: Any) -> None:
        if news.restarted and self.world.draw.random() < 0.2:
            self.running = None if self.running is None else self.running

    def work(self) -> None:
        draw, now = self.world.draw, self.world.now
        if self.session.leaving and self.session.settled:
            self.session.leave("leaves")
            self.flush()
            self.start()
            return
        if self.running is not None and now >= self.running[0]:
            _, serial, batch = self.running
            self.running = None
            if any(payload.startswith(POISON) for payload in batch.payloads):
                self.session.give_back(serial, "engine_exit", "the engine is gone")
            else:
                self.finish(serial, batch)
        elif self.running is not None and draw.random() < 0.1:
            self.finish_some(*self.running[1:])
        if self.running is None and (found := self.session.start()) is not None:
            self.running = (now + draw.choice((0.0, 0.05, 0.5, 5.0)), *found)

    def finish(self, serial: int, batch: Any) -> None:
        answers = [b"done " + payload for payload in batch.payloads]
        self.session.report(serial, range(len(batch)), ["ok"] * len(batch), answers, final=True)

    def finish_some(self, serial: int, batch: Any) -> None:
        """An engine that reports items as they end."""
        if not batch.payloads[0].startswith(POISON):
            self.session.report(serial, [0], ["ok"], [b"done " + batch.payloads[0]], final=False)

    def flush(self) -> None:
        """Its last words are sent before its process ends."""
        while self.session.outbound and self.link is not None:
            self.link.up.append(self.session.outbound.popleft())
        if self.link is not None:
            self.world.links.pop((self.endpoint, self.link.routing_id), None)
            self.world.late.append(self.link)
            self.link = None


class World:
    """One run of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.draw = random.Random(plan.seed * 2 + 1)
        self.now = 1_000.0
        self.began = self.now
        self.links: dict[tuple[str, bytes], Link] = {}
        # connections that are gone, with frames that may still arrive
        self.late: list[Link] = []
        self.files = MemFiles()
        self.dispatcher: Dispatcher | None = None
        self.backing: Any = None
        self._ids = 0
        self._boot = 0
        self.down_until = 0.0
        self.paused_until = 0.0
        self._turned_s = self.now
        self._sync: tuple[float, int] | None = None
        self.sync_s = 0.02
        self.full_until = self.slow_until = 0.0
        self.log: list[str] = []
        # faults that may have cost a healthy item an attempt
        self.blows = 0
        self.trace: list[tuple[float, str, int]] = []
        self.config = BrokerConfig(
            memory=True,
            lanes=plan.lanes,
            lease_s=LEASE_S,
            attempts_max=ATTEMPTS_MAX,
            heartbeat_s=HEARTBEAT_S,
            hold_s=0.2,
            linger_ms=20,
        )
        self.start_broker()
        self.producers = [Producer(self, f"p{k}", plan.items) for k in range(plan.producers)]
        self.workers = [Worker(self, f"w{k}") for k in range(plan.workers)]

    @property
    def is_poisoned(self) -> bool:
        """Whether anybody submits an item that takes the engine with it."""
        sent = (payload for producer in self.producers for payload in producer.payloads.values())
        return any(payload.startswith(POISON) for payload in sent)

    def next_id(self) -> int:
        """A number that was not given before."""
        self._ids += 1
        return self._ids

    def some(self, count: int) -> int:
        """How many of so many waiting things happen now."""
        return count if self.draw.random() < 0.7 else self.draw.randrange(count + 1)

    @property
    def fabric(self) -> Any:
        return self.dispatcher.fabric if self.dispatcher is not None else None

    # -- the broker ---------------------------------------------------------------------------

    def start_broker(self) -> None:
        self._boot += 1
        self.backing, found = open_backing(ROOT, self.plan.durability, self.files)
        # A file that was made and got no header, or half of one, is set aside: it may be cut,
        # and nobody could tell. That nothing is lost by it the promises say.
        new = (": empty", ": no entries")
        strange = [file for file in found.quarantined_files if not file.endswith(new)]
        if found.damaged or found.quarantined or strange:
            raise Violation(f"recovery finds damage: {found}")
        self.backing.room.min_free_bytes = 1
        self.dispatcher = Dispatcher(self.config, Store(self.backing), self._boot)
        restore(self.dispatcher.fabric, self.backing, found, self.now)
        self._turned_s = self.now
        check_books(self.fabric, self.now)

    def end_broker(self, *, power: bool) -> None:
        """The broker's process, or its machine, is gone."""
        self.dispatcher = None
        self._sync = None
        if power and self.plan.durability == "fsync":
            self.files.unplugged(self.draw)
        else:
            self.files.killed()
        for link in self.links.values():
            link.up.clear()
        for client in (*self.producers, *self.workers):
            client.rewire()
        self.late.clear()

    def turn(self) -> None:
        """What `broker.Broker.turn` does, on this world's sockets."""
        broker, now = self.dispatcher, self.now
        if broker is None or now < self.paused_until:
            return
        late_s = now - self._turned_s - max(STEPS_S)
        if late_s > LATE_S:
            broker.shift(late_s)
        self._turned_s = now
        self._end_sync(broker)
        drained = self.receive(broker)
        broker.tick(now, 1e6 + now, drained=drained)
        broker.flush(now)
        if self._sync is None and broker.sync_wanted:
            self._sync = (now + self.draw.uniform(0, 2 * self.sync_s), self.files.begin_sync())
        self.send(broker)
        self.hand_out(broker)

    def _end_sync(self, broker: Dispatcher) -> None:
        if self._sync is not None and self.now >= self._sync[0]:
            self.files.end_sync(self._sync[1])
            self._sync = None
            broker.synced()

    def receive(self, broker: Dispatcher) -> bool:
        drained = True
        links = [*self.late, *self.links.values()]
        self.draw.shuffle(links)
        for link in links:
            if self.now < link.hold_up_until:
                continue
            if link.endpoint == PRODUCERS and broker.writing:
                drained = False
                continue
            count = self.some(len(link.up))
            drained = drained and count == len(link.up)
            for _ in range(count):
                frames = link.up.popleft()
                self.trace.append((self.now, link.endpoint, sum(map(len, frames))))
                broker.receive(link.endpoint, link.routing_id, frames, self.now)
        self.late = [link for link in self.late if link.up]
        return drained

    def deliver(self, broker: Dispatcher, address: tuple[str, bytes], frames: list[bytes]) -> bool:
        """Whether the channel took it; one that is gone is told."""
        link = self.links.get(address)
        if link is None or (link.half_open_until is not None and self.now > link.half_open_until):
            broker.unreachable(*address, "host unreachable", self.now)
            return False
        if link.half_open_until is None:
            link.down.append(frames)
        return True

    def send(self, broker: Dispatcher) -> None:
        while broker.outgoing:
            parcel = broker.outgoing.popleft()
            self.deliver(broker, (parcel.endpoint, parcel.routing_id), parcel.frames)

    def hand_out(self, broker: Dispatcher) -> None:
        while (offer := broker.next_offer(self.now)) is not None:
            peer = offer.worker.peer
            if self.draw.random() < 0.1:
                broker.refused(offer)
            elif self.deliver(broker, peer.address, offer.frames):
                broker.commit(offer, self.now)

    # -- faults -------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Let it happen."""
        self.log.append(f"{self.now - self.began:7.2f} {fault.kind} {fault.who} {fault.for_s}")
        until = self.now + fault.for_s
        clients: list[Any] = [*self.producers, *self.workers]
        client = clients[fault.who % len(clients)]
        worker = self.workers[fault.who % len(self.workers)]
        producer = self.producers[fault.who % len(self.producers)]
        kind = fault.kind
        self.blows += kind in BLOWS
        if kind in ("broker_kill", "broker_power", "broker_stop"):
            if self.dispatcher is not None:
                if kind == "broker_stop":
                    self.stop_broker()
                self.end_broker(power=kind == "broker_power")
                self.down_until = until
        elif kind == "broker_pause":
            self.paused_until = until
        elif kind == "cut":
            client.cut()
        elif kind == "rewire":
            client.rewire()
        elif kind == "half_open" and client.link is not None:
            client.link.half_open_until = until
            client.trouble(until)
        elif kind == "hold_up" and client.link is not None:
            client.link.hold_up_until = until
            client.trouble(until)
        elif kind == "hold_down" and client.link is not None:
            client.link.hold_down_until = until
            client.trouble(until)
        elif kind in ("worker_kill", "producer_kill"):
            (worker if kind == "worker_kill" else producer).kill()
        elif kind in ("worker_pause", "producer_pause"):
            (worker if kind == "worker_pause" else producer).pause(until)
        elif kind == "worker_leave":
            worker.session.drain()
        elif kind == "disk_full":
            self.full_until = until
        elif kind == "slow_sync":
            self.slow_until = until
        elif kind == "cancel" and self.dispatcher is not None and not producer.cancelled:
            producer.cancelled = True
            producer.session.request("producers.cancel", {"name": producer.name})

    def stop_broker(self) -> None:
        """An orderly end, as far as a full disk lets it."""
        if self._sync is not None and self.dispatcher is not None:
            self.files.end_sync(self._sync[1])
            self.dispatcher.synced()
        with suppress(NoSpace):
            unwritten = self.dispatcher is not None and self.fabric.store.unwritten
            self.backing.seal(unwritten=unwritten)

    # -- the run ------------------------------------------------------------------------------

    def run(self) -> None:
        """Faults, then rest. Raises Violation where a promise was broken."""
        faults = deque(self.plan.faults)
        until = self.began + FAULTS_S
        steps = 0
        while self.now < until or faults:
            while faults and self.now - self.began >= faults[0].at:
                self.inject(faults.popleft())
            self.step(steps)
            steps += 1
        self.heal()
        deadline = self.now + REST_S
        while not self.at_rest:
            if self.now > deadline:
                raise Violation(f"it does not come to rest: {self.open_items()}")
            self.step(steps)
            steps += 1
        for _ in range(30):
            self.step(steps)
        self.check_end()

    def step(self, number: int) -> None:
        self.now += self.draw.choice(STEPS_S)
        self.files.full = self.now < self.full_until
        self.sync_s = 1.0 if self.now < self.slow_until else 0.02
        if self.dispatcher is None and self.now >= self.down_until and not self.files.full:
            self.start_broker()
        actors = [self.turn, *(client.step for client in (*self.producers, *self.workers))]
        self.draw.shuffle(actors)
        for act in actors:
            act()
        if self.dispatcher is not None:
            self.check(number)

    def check(self, number: int) -> None:
        """What holds after every step."""
        fabric = self.fabric
        while fabric.fresh_events:
            event = fabric.fresh_events.popleft()
            if event["event"] == "worker_lost" and "silent" in event["text"]:
                self.check_death(event)
        pending = (fabric.pending.items, fabric.pending.tokens)
        store = fabric.store
        balance = fabric.flow.balance((store.ready_items, store.ready_tokens), pending)
        if balance.residual_items or balance.residual_tokens:
            raise Violation(f"the books do not balance: {balance}")
        if store.items - self.untold(store) != store.ready_items + pending[0]:
            raise Violation(f"{store.items} items, {store.ready_items} ready, {pending[0]} pending")
        if number % 16 == 0 and not store.unwritten:
            check_books(fabric, self.now)

    def check_death(self, event: dict[str, Any]) -> None:
        """Nobody who speaks and is heard is declared dead."""
        (worker,) = [w for w in self.workers if w.name == event["worker"]]
        if self.now > worker.troubled_until:
            raise Violation(f"a false death: {event['text']}")

    @staticmethod
    def untold(store: Any) -> int:
        """Items that are taken in and not stored yet."""
        return sum(map(len, store._fresh.values()))

    def heal(self) -> None:
        self.log.append(f"{self.now - self.began:7.2f} heals")
        self.down_until = self.paused_until = self.full_until = self.slow_until = self.now
        for client in (*self.producers, *self.workers):
            client.paused_until = self.now
            if client.link is not None:
                client.link.hold_up_until = client.link.hold_down_until = self.now
                if client.link.half_open_until is not None:
                    client.cut()

    @property
    def at_rest(self) -> bool:
        if self.dispatcher is None or not all(producer.done for producer in self.producers):
            return False
        idle = not self.fabric.store.items and not self.fabric.pending.items
        return idle and not any(p and len(p.outbox) for p in self.fabric.producers)

    def open_items(self) -> str:
        said = [
            f"{p.name}: {len(p.payloads)} of {p.items} sent, {len(p.results)} results, accepted "
            f"{p.session.upto}, {p.session.state}"
            for p in self.producers
        ]
        store = self.fabric.store if self.fabric is not None else None
        left = f"store {store.items} ({store.ready_items} ready)" if store else "no broker"
        return "; ".join([*said, left])

    def check_end(self) -> None:
        check_books(self.fabric, self.now)
        flow = self.fabric.flow
        wanted = sum(producer.items for producer in self.producers)
        if flow.accepted_items != wanted:
            raise Violation(f"{flow.accepted_items} accepted, {wanted} submitted")
        if self.plan.calm and flow.redeliveries:
            raise Violation(f"nothing went wrong, and {flow.redeliveries} items went out again")
        left = [name for name in self.files.names() if name.startswith("segments/")]
        if left:
            raise Violation(f"segments are left: {left}")


@contextmanager
def ruled(world_seed: int) -> Iterator[None]:
    """Whatever else draws or reads a clock does so from the seed."""
    draw = random.Random(world_seed * 3 + 2)
    clock = SimpleNamespace(time=lambda: 1e6, monotonic=lambda: 0.0)
    with (
        mock.patch("secrets.randbits", draw.getrandbits),
        mock.patch("secrets.token_hex", lambda size=4: f"{draw.getrandbits(8 * size):x}"),
        mock.patch("zfabric.files.time", clock),
        mock.patch("zfabric.recovery.time", clock),
    ):
        yield


@dataclass
class Outcome:
    """What became of a plan."""

    plan: Plan
    failure: str | None
    log: list[str] = field(default_factory=list)
    # every message that arrived at the broker, by its length
    trace: list[tuple[float, str, int]] = field(default_factory=list)


def run(plan: Plan) -> Outcome:
    """Run a plan; every exception is a failure."""
    with ruled(plan.seed):
        world: World | None = None
        try:
            world = World(plan)
            world.run()
        except Exception as error:  # noqa: BLE001
            log, trace = (world.log, world.trace) if world is not None else ([], [])
            return Outcome(plan, f"{type(error).__name__}: {error}", log, trace)
    return Outcome(plan, None, world.log, world.trace)
