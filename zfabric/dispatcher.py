"""The dispatcher: sole owner of the fabric's state. Messages and the time go in, frames come out.

It has no socket and no clock: the broker hands it every message with the time of its arrival,
takes offers from it, and sends what it leaves in `outgoing`. Whatever a peer sends, `receive`
raises nothing but InvariantError, which must end the process. Times are seconds on the caller's
monotonic clock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import zfabric
from zfabric import operate
from zfabric.access import KEY_REVOKED, PRODUCERS, WORKERS
from zfabric.config import BrokerConfig
from zfabric.delivery import Delivery
from zfabric.errors import NoSpace, PeerError
from zfabric.fabric import Fabric
from zfabric.gate import Gate, is_hello
from zfabric.intake import Intake
from zfabric.offers import Offer, Offers
from zfabric.peers import Parcel, Peer, Producer
from zfabric.protocol import (
    GONE,
    TO_BROKER,
    VERSION,
    Frame,
    Message,
    Type,
    decode,
    encode,
    next_state,
)
from zfabric.segments import Window
from zfabric.store import Store
from zfabric.upkeep import Upkeep
from zfabric.watching import Watch
from zfabric.words import counted

ENDPOINT_OF_ROLE = {"producer": PRODUCERS, "operator": PRODUCERS, "worker": WORKERS}
# Connections at once; each costs a few kilobytes here and a descriptor in the socket.
PEERS_MAX = 20_000
# Judgement is due this often; a busy loop turns a thousand times a second.
JUDGE_S = 0.1
# Writes of a turn, some 20 us each: in between, workers that are done get their next batch.
WRITES_MAX = 128
# Turns that a window waits for all that was taken in to be written. One that closes before is
# partial: what retires in it must say which numbers it held, and that is read from its files.
CUT_TURNS_MAX = 16
# Payload bytes that wait in memory for a sync to end.
GATHERED_BYTES_MAX = 4 * 1024 * 1024
# Characters of a refusal's text, well under what a REPLY may hold.
REPLY_TEXT_MAX = 2_000
# Leases that a producer or operator may say nothing; it loses nothing when it is gone.
SILENT_LEASES = 1.5
# What tells a peer that something is safe; it goes out when that is so.
PROMISES = frozenset({Type.ACCEPTED, Type.RESULT, Type.DONE_ACK})


class Dispatcher:
    """All decisions of one broker. Drive it from one thread."""

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        boot_id: int,
        ports: Mapping[str, int] | None = None,
    ) -> None:
        self.config = config
        self.boot_id = boot_id
        self.ports = dict(ports or {})
        self.fabric = Fabric(config, store)
        self.gate = Gate(self.fabric)
        self.outgoing: deque[Parcel] = deque()
        self.peers: dict[tuple[str, bytes], Peer] = {}
        self._epoch = 0
        self._intake = Intake(self.fabric, self._send)
        self._delivery = Delivery(self.fabric, self._send, boot_id)
        self._offers = Offers(self.fabric)
        self._watch = Watch(self.fabric)
        self._operations = operate.Operations(
            self.fabric, self.meta, self.drain, self._cancel, self._forget
        )
        self._next_heartbeat_s = 0.0
        self._next_judgement_s = 0.0
        self._promised: deque[Parcel] = deque()
        # the window whose sync runs, and what goes out when it is over
        self._window: Window | None = None
        self._cut_turns = 0
        self._due: deque[Parcel] = deque()
        self._upkeep = Upkeep(self.fabric)
        # cancels by producer: those that go on, and those that do when more is written
        self._chores: dict[int, Iterator[bool]] = {}
        self._resting: dict[int, Iterator[bool]] = {}
        self._started_s: float | None = None
        self._now = 0.0  # of the latest tick, for chores that run across ticks
        self.draining_since: float | None = None
        # for status: what the broker measured of its own loop, and found in its directory
        self.gauges: dict[str, Any] = {}
        self.recovery: dict[str, Any] | None = None
        self._handlers: dict[Type, Callable[[Peer, Message, float], None]] = {
            Type.SHAPE: lambda peer, m, now: self._intake.shape(peer, m.fields),
            Type.SUBMIT: self._on_submit,
            Type.RESULT_ACK: lambda peer, m, now: self._intake.result_ack(
                self._producer(peer), m.fields["upto"]
            ),
            Type.REQUEST: self._on_request,
            Type.HEARTBEAT: self._on_heartbeat,
            Type.BYE: lambda peer, m, now: self._gone(peer, m.fields.get("reason", "left"), now),
            Type.STARTED: lambda peer, m, now: self._delivery.started(self._worker(peer), m, now),
            Type.DONE: lambda peer, m, now: self._delivery.done(self._worker(peer), m, now),
            Type.RETURNED: lambda peer, m, now: self._delivery.returned(self._worker(peer), m, now),
        }

    # -- messages in --------------------------------------------------------------------------

    def receive(
        self,
        endpoint: str,
        routing_id: bytes,
        frames: Sequence[Frame],
        now: float,
        key: str | None = None,
    ) -> None:
        """One message from one connection, whose `key` the socket knows, where keys are asked for.

        A message that is refused changes nothing.
        """
        peer = self.peers.get((endpoint, routing_id))
        try:
            self.gate.speaks(peer, endpoint, key)
            message = decode(frames, TO_BROKER)
            if message.kind is Type.HELLO:
                self._hello(endpoint, routing_id, peer, message.fields, now, key)
            elif peer is None:
                self.fabric.count("unknown_peer_messages")
                if message.kind is not Type.BYE:
                    self._post(endpoint, routing_id, encode(Type.WHO_ARE_YOU))
            else:
                following = next_state(peer.role, peer.state, message.kind)
                peer.heard_s = now
                self._handlers[message.kind](peer, message, now)
                peer.state = following
        except PeerError as error:
            self._refuse(endpoint, routing_id, peer, frames, error, now)

    def _refuse(
        self,
        endpoint: str,
        routing_id: bytes,
        peer: Peer | None,
        frames: Sequence[Frame],
        error: PeerError,
        now: float,
    ) -> None:
        """Count it, and say so where somebody is there to read it."""
        told = peer is not None or error.code == "version_mismatch" or is_hello(frames)
        if told:
            fields = {"code": error.code, "text": error.text[:4096], "version": VERSION}
            self._post(endpoint, routing_id, encode(Type.ERROR, fields))
        who = peer.name if peer is not None else "a new peer"
        self.gate.refused(error, who, now, told=told)

    def _hello(
        self,
        endpoint: str,
        routing_id: bytes,
        peer: Peer | None,
        fields: dict[str, Any],
        now: float,
        key: str | None,
    ) -> None:
        role, name, instance = fields["role"], fields["name"], fields["instance"]
        if ENDPOINT_OF_ROLE[role] != endpoint:
            port = self.ports.get("worker_port")
            raise PeerError(
                "wrong_endpoint",
                f"this is the endpoint of {endpoint}; the one of workers has port {port}",
            )
        if peer is not None and (peer.role, peer.name) != (role, name):
            raise PeerError("out_of_state", f"this connection belongs to {peer.role} {peer.name}")
        if peer is None and len(self.peers) >= PEERS_MAX:
            raise PeerError("too_many_peers", f"the broker serves {PEERS_MAX} connections at most")
        self.gate.greets(role, name, key)
        former = self._former(role, name, instance, routing_id)
        fresh = Peer(endpoint, routing_id, role, name, instance, self._epoch + 1, now, key)
        self.gate.makes_room(fresh, former)
        answer: dict[str, Any] = {}
        if role == "worker":
            self._delivery.hello(fresh, fields, now)
        elif role == "producer":
            producer = self._intake.hello(fresh, now)
            answer = {"upto": producer.upto, "acked": producer.outbox.acked}
        # Nothing was refused: only now the old connection of this name goes.
        if former is not None:
            self.peers.pop(former.address, None)
            self.gate.left(former)
        self._epoch += 1
        self.peers[endpoint, routing_id] = fresh
        self.gate.greeted(fresh, now)
        # It tells a producer what is accepted; a full disk must not shut out the others.
        self._send(fresh, Type.WELCOME, self._welcome(fresh) | answer, promise=bool(answer))

    def _welcome(self, peer: Peer) -> dict[str, Any]:
        return {
            "boot": self.boot_id,
            "epoch": peer.epoch,
            "store": self.fabric.store.store_id,
            "durability": self.fabric.store.durability,
            "payload_bytes_max": self.config.payload_bytes_max,
            "heartbeat_s": self.config.heartbeat_s,
            "lease_s": self.config.lease_s,
            "release": zfabric.__version__,
            **self.ports,
            **self.gate.role_of(peer),
        }

    def _former(self, role: str, name: str, instance: int, routing_id: bytes) -> Peer | None:
        """Who makes way for a new holder of a name. Raises PeerError where another one is alive."""
        holder = self.gate.holder(role, name)
        if holder is not None and holder.instance != instance and holder.routing_id != routing_id:
            # If it is dead this message cannot be delivered, and the next attempt gets the name.
            self._send(holder, Type.HEARTBEAT, {"boot": self.boot_id})
            raise PeerError("name_in_use", f"another live {role} is called {name!r}")
        return None if holder is None or holder.routing_id == routing_id else holder

    # -- handlers -----------------------------------------------------------------------------

    def _worker(self, peer: Peer) -> Any:
        return self.fabric.workers[peer.name]

    def _producer(self, peer: Peer) -> Producer:
        producer = self.fabric.producers[self.fabric.producer_index[peer.name]]
        if producer is None:
            raise PeerError("forgotten", f"{peer.name} was forgotten; connect again")
        return producer

    def _on_submit(self, peer: Peer, message: Message, now: float) -> None:
        self._intake.submit(self._producer(peer), message, now)
        self._offers.intake_full = self._intake.full

    def _on_heartbeat(self, peer: Peer, message: Message, now: float) -> None:
        if peer.role == "worker":
            self._delivery.heartbeat(self._worker(peer), message.fields, now)

    def _on_request(self, peer: Peer, message: Message, now: float) -> None:
        number, op = message.fields["id"], message.fields["op"]
        args = message.fields.get("args", {})
        try:
            self.gate.asks(peer, op, args, now)
            if op == "expect" and peer.role == "producer":
                value: Any = self._intake.expect(self._producer(peer), args)
            else:
                value = self._operations.request(op, args, now)
            answer = {"id": number, "ok": True, "value": value}
        except PeerError as error:
            text = f"{error.code}: {error.text}"[:REPLY_TEXT_MAX]
            answer = {"id": number, "ok": False, "text": text}
        if op in operate.TAKES_IN and answer["ok"]:
            self._intake.owe_reply(peer, answer)
        else:
            self._send(peer, Type.REPLY, answer, promise=op in operate.CHANGES)

    # -- going --------------------------------------------------------------------------------

    def unreachable(self, endpoint: str, routing_id: bytes, reason: str, now: float) -> None:
        """A send to this connection failed: whatever the error, it is a disconnect."""
        peer = self.peers.get((endpoint, routing_id))
        if peer is not None:
            self._gone(peer, reason, now, "unreachable")

    def turn_out(self, keys: set[str], now: float) -> None:
        """These keys count no more: who came with them is told, and is gone."""
        for peer in [p for p in self.peers.values() if p.key in keys]:
            self._send(peer, Type.ERROR, {"code": KEY_REVOKED, "text": "this key was revoked"})
            self._gone(peer, "its key was revoked", now, "revoked")

    def _gone(self, peer: Peer, reason: str, now: float, kind: str = "left") -> None:
        self.peers.pop(peer.address, None)
        self.gate.left(peer)
        peer.state = GONE
        holder = self.gate.holder(peer.role, peer.name)
        if holder is not peer:
            return
        if peer.role == "worker":
            self._delivery.lost(self._worker(peer), reason, now, kind)
        elif peer.role == "producer":
            self._intake.lost(self._producer(peer), reason, now)

    # -- time ---------------------------------------------------------------------------------

    def tick(self, now: float, wall_s: float, *, drained: bool) -> None:
        """Heartbeats, upkeep and, when inbound has been `drained`, judgement."""
        self.fabric.wall_offset_s = wall_s - now
        if self._started_s is None:
            self._started_s = now
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self.config.heartbeat_s
            for peer in list(self.peers.values()):
                self._send(peer, Type.HEARTBEAT, {"boot": self.boot_id})
        self._now = now
        self._work_off_chores(1)
        self._upkeep.turn(now)
        self._watch.look(now)
        self.gate.turn(now)
        if drained and now >= self._next_judgement_s:
            self._next_judgement_s = now + JUDGE_S
            self._judge(now)

    def _judge(self, now: float) -> None:
        # A worker that is given up is no peer either: only WHO_ARE_YOU makes it say HELLO again.
        worker_s = self.config.lease_s
        other_s = worker_s * SILENT_LEASES
        for peer in [p for p in self.peers.values() if now - p.heard_s > worker_s]:
            silent_s = now - peer.heard_s
            if peer.role == "worker" or silent_s > other_s:
                self._gone(peer, f"silent for {silent_s:.1f} s", now, "silent")
        self._delivery.judge(now)

    def shift(self, late_s: float) -> None:
        """The broker was late by so much: no deadline of anybody else may count that time."""
        self._delivery.shift(late_s)
        for peer in self.peers.values():
            peer.heard_s += late_s

    def _work_off_chores(self, steps: int) -> None:
        for index in list(self._chores)[:steps]:
            chore = self._chores.pop(index)
            if (goes_on := next(chore, None)) is not None:
                (self._chores if goes_on else self._resting)[index] = chore

    @property
    def busy(self) -> bool:
        """Whether the next turn should go on at once with what this one left."""
        return bool(self._chores) or self.writing

    @property
    def writing(self) -> bool:
        """Whether more is taken in than one turn could write; until then nothing more should be."""
        return self.fabric.store.cut_short

    def flush(self, now: float) -> None:
        """End of a turn: publish what was stored, promise it, and keep what needs no sync."""
        much = self.fabric.store.unwritten_bytes >= GATHERED_BYTES_MAX
        if self._window is None or self.writing or much:
            # What comes in while a sync runs is gathered: a lane's items are one write then.
            self._publish(now)
        if self.fabric.unsent:
            self._intake.send_results()
        if self._window is None and (not self.writing or self._cut_turns >= CUT_TURNS_MAX):
            self._cut_turns = 0
            with contextlib.suppress(NoSpace):
                self._close_window()

    def _publish(self, now: float) -> None:
        """Write items and promise them; what is left, and all after it, waits for another turn."""
        readied = self.fabric.publish(now, WRITES_MAX)
        if self._resting and (readied or not self.fabric.store.unwritten):
            # Now, before any of it is handed out.
            steps = len(self._resting)
            self._chores, self._resting = self._resting | self._chores, {}
            self._work_off_chores(steps)
        self._cut_turns += self.writing
        if self.fabric.store.no_space:
            self.fabric.count("storage_full_turns")
        elif not self.fabric.store.unwritten:
            self._intake.acknowledge()

    def _close_window(self) -> None:
        """Write what is due and keep its promises, now or after a sync. Raises NoSpace."""
        backing, partial = self.fabric.store.backing, self.fabric.store.unwritten
        if backing.durability == "fsync" and backing.has_work:
            self._window = backing.begin(self._floors(), partial=partial)
            self._due, self._promised = self._promised, deque()
            return
        if backing.has_work:
            backing.end(backing.begin(self._floors(), partial=partial))
        self.outgoing += self._promised
        self._promised.clear()

    def _floors(self) -> dict[int, tuple[int, int]]:
        """How far the numbers and results of producers go that a window is about to cover."""
        touched, self.fabric.touched = self.fabric.touched, set()
        producers = [self.fabric.producers[index] for index in touched]
        return {p.index: (p.upto, p.outbox.last) for p in producers if p is not None}

    @property
    def sync_wanted(self) -> bool:
        """Whether a window waits for `store.backing.sync`, after which `synced` is to be called."""
        return self._window is not None

    def synced(self) -> None:
        """The window's sync is over: what it promised goes out, what it owes is written."""
        if self._window is None:
            return
        window, self._window = self._window, None
        self.fabric.store.backing.end(window)
        self.outgoing += self._due
        self._due.clear()

    @property
    def settled(self) -> bool:
        """Whether nothing that was promised waits for a sync."""
        return self._window is None and not self._promised

    # -- offers -------------------------------------------------------------------------------

    def next_offer(self, now: float) -> Offer | None:
        """The next batch to send, or None; moves no item."""
        return self._offers.next(now)

    def commit(self, offer: Offer, now: float) -> None:
        """The channel took `offer`."""
        self._offers.commit(offer, now)

    def refused(self, offer: Offer) -> None:
        """The worker's channel is full. There is nothing to undo; its next heartbeat asks again."""
        self._delivery.pass_over(offer.worker)

    @property
    def wake_at(self) -> float | None:
        """When `next_offer` could answer differently without any message; None is never."""
        return self._offers.wake_at

    # -- ending -------------------------------------------------------------------------------

    def drain(self, now: float) -> None:
        """Grant nothing more and take nothing more; what workers hold may finish."""
        if self.draining_since is None:
            self.draining_since = now
            self._offers.draining = self._intake.draining = True
            self.fabric.event(
                "draining", f"{counted(self.fabric.pending.items, 'item')} pending", now
            )

    def drained(self, now: float) -> bool:
        """Whether a drain is over: nothing pending and every result sent, or out of time."""
        if self.draining_since is None:
            return False
        if now - self.draining_since >= self.config.drain_s:
            return True
        open_items = self.fabric.pending.items or self.fabric.store.arriving
        return self.settled and not (open_items or self.fabric.unsent)

    def farewell(self, reason: str) -> None:
        """Tell every peer that this broker ends."""
        for peer in self.peers.values():
            self._send(peer, Type.BYE, {"reason": reason})

    # -- small parts ------------------------------------------------------------------------------

    def _cancel(self, producer: Producer) -> None:
        last = max(producer.upto, max(producer.above, default=0))
        # One a producer: a later cancel means all that an earlier one did, and more.
        self._resting.pop(producer.index, None)
        chore = operate.cancelling(self.fabric, producer, last, lambda: self._now)
        self._chores[producer.index] = chore

    def _forget(self, producer: Producer, now: float) -> None:
        self._cancel(producer)
        self.fabric.forget(producer)
        self.fabric.event("producer_forgotten", producer.name, now, producer=producer.name)

    def meta(self, now: float) -> dict[str, Any]:
        """What a snapshot says of the broker itself."""
        return {
            "boot_id": f"{self.boot_id:016x}",
            "store_id": f"{self.fabric.store.store_id:016x}",
            "uptime_s": now - self._started_s if self._started_s is not None else 0.0,
            "time": now + self.fabric.wall_offset_s,
            "state": "draining" if self.draining_since is not None else "running",
            "peers": len(self.peers),
            "security": self.gate.view(),
            "recovery": self.recovery,
            **self.gauges,
        }

    def _send(
        self,
        peer: Peer,
        kind: Type,
        fields: Mapping[str, Any] | None = None,
        columns: Sequence[bytes] = (),
        body: bytes | None = None,
        *,
        promise: bool = False,
    ) -> None:
        parcel = Parcel(peer.endpoint, peer.routing_id, encode(kind, fields, columns, body))
        if promise or kind in PROMISES:
            self._promised.append(parcel)
        else:
            self.outgoing.append(parcel)

    def _post(self, endpoint: str, routing_id: bytes, frames: list[bytes]) -> None:
        self.outgoing.append(Parcel(endpoint, routing_id, frames))
