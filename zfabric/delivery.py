"""Delivery: who serves, what they say of their batches, and what becomes of a lost worker's.

Started items wait for their worker or the end of its lease; what is not started is free at once.
Times are seconds on the caller's monotonic clock. This module decides; every change of an item's
state is the fabric's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

from zfabric.errors import ConfigError, PeerError
from zfabric.fabric import Fabric
from zfabric.groups import Model
from zfabric.peers import Peer, Worker
from zfabric.pending import Batch, BatchId, part
from zfabric.protocol import CHARGING_KINDS, WORKER_STATUSES, Message, Type, packed, split
from zfabric.shapes import NAME_BYTES_MAX, Contract
from zfabric.words import counted

# (peer, type, fields, columns, body)
Send = Callable[..., None]
# A worker that is gone and holds nothing is remembered for its last words, this many of them.
ABSENT_WORKERS_MAX = 1_000


class Delivery:
    """The workers' side of the broker's rules."""

    def __init__(self, fabric: Fabric, send: Send, boot_id: int) -> None:
        self._fabric = fabric
        self._send = send
        self._boot_id = boot_id

    # -- coming -------------------------------------------------------------------------------

    def hello(self, peer: Peer, fields: dict[str, Any], now: float) -> None:
        """A worker registers, or comes back. Raises PeerError for a contract nobody can serve."""
        contract = _contract(fields)
        model = self._fabric.model(fields["model"])
        self._check_input_max(model, contract, peer.name)
        worker = self._fabric.workers.get(peer.name)
        same_process = worker is not None and worker.instance == peer.instance
        if worker is not None and worker.peer is not None:
            self.lost(worker, "connected again", now, "connected_again")
        if worker is None or worker.model != model.name or not same_process:
            worker = self._register(peer, model, contract, fields, worker)
        worker.contract, worker.window = contract, fields.get("window", 2)
        worker.peer, worker.heard_s = peer, now
        worker.sent = worker.received = worker.granted = 0
        if model.input_tokens_max is None:
            model.input_tokens_max = contract.input_tokens_max
        held = [tuple(pair) for pair in fields.get("held", ())]
        if fields.get("boot") != self._boot_id:
            held = []
        self._settle_held(worker, set(held), same_process, now)
        self._fabric.event(
            "worker_joined", f"{worker.name} serves {model.name}", now, worker=worker.name
        )

    def _check_input_max(self, model: Model, contract: Contract, name: str) -> None:
        for other in self._fabric.workers.values():
            if other.model != model.name or other.peer is None or other.name == name:
                continue
            if other.contract.input_tokens_max != contract.input_tokens_max:
                raise PeerError(
                    "input_max_differs",
                    f"{name} registers input_tokens_max {contract.input_tokens_max}, but "
                    f"{other.name} serves {model.name} with {other.contract.input_tokens_max}; "
                    "all workers of a model must register the same",
                )
        model.input_tokens_max = contract.input_tokens_max

    def _register(
        self,
        peer: Peer,
        model: Model,
        contract: Contract,
        fields: dict[str, Any],
        previous: Worker | None,
    ) -> Worker:
        worker = Worker(
            peer.name,
            model.name,
            contract,
            fields.get("window", 2),
            fields.get("engine", "custom"),
            fields.get("simulated", False),
            peer.instance,
        )
        if previous is not None:
            worker.held = previous.held
            worker.disconnects = previous.disconnects
            worker.last_disconnect = previous.last_disconnect
            worker.last_disconnect_s = previous.last_disconnect_s
            self._unlist(previous)
        self._fabric.workers[peer.name] = worker
        return worker

    def _settle_held(
        self, worker: Worker, claimed: set[BatchId], same_process: bool, now: float
    ) -> None:
        lease = self._fabric.config.lease_s
        for batch_id in claimed - worker.held.keys():
            self._uncharge(worker, batch_id)
            self._revoke(worker, batch_id)
        for batch_id, batch in list(worker.held.items()):
            if batch_id in claimed:
                batch.lease_until = now + lease
            elif same_process:
                # It is alive and does not have it: the batch was lost on the way, nobody's fault.
                self._free(worker, batch, batch.in_order(batch.outstanding), now, batch.solo)
            else:
                self._expire(worker, batch, "its worker was started anew", now)

    def _uncharge(self, worker: Worker, batch_id: BatchId) -> None:
        for ref in self._fabric.pending.uncharged(worker.name, batch_id):
            self._fabric.store.charge(ref, by=-1)

    # -- telling ------------------------------------------------------------------------------

    def heartbeat(self, worker: Worker, fields: dict[str, Any], now: float) -> None:
        """Renew leases, take back what the worker says it does not hold, note its counters."""
        worker.heard_s = now
        received = fields.get("received", 0)
        if received > worker.sent:
            raise PeerError("malformed", f"received up to {received} of {worker.sent} batches")
        worker.received = max(worker.received, received)
        holding = {tuple(pair) for pair in fields.get("holding", ())}
        started = {tuple(pair) for pair in fields.get("started", ())}
        until = now + self._fabric.config.lease_s
        epoch = worker.peer.epoch if worker.peer else 0
        for batch_id, batch in list(worker.held.items()):
            if batch_id in holding:
                batch.lease_until = until
                if batch_id in started and not batch.was_started:
                    batch.start(())
            elif batch_id[0] != epoch or batch_id[1] <= worker.received:
                self._free(worker, batch, batch.in_order(batch.outstanding), now, batch.solo)
        for batch_id in holding - worker.held.keys():
            self._uncharge(worker, batch_id)
            self._revoke(worker, batch_id)
        if "window" in fields:
            worker.granted = min(fields["window"], worker.window)
        if "stats" in fields:
            self._note_stats(worker, fields["stats"], now)
        self._list(worker)

    @staticmethod
    def _note_stats(worker: Worker, stats: dict[str, Any], now: float) -> None:
        hits, queries = stats.get("hits_tokens"), stats.get("queries_tokens")
        worker.stats = {
            k: v
            for k, v in stats.items()
            if type(k) is str and len(k) <= 64 and (type(v) in (int, float) or _is_word(v))
        }
        if type(hits) is int and type(queries) is int and 0 <= hits <= queries:
            worker.cache_points.append((now, hits, queries))
        else:
            worker.stats.pop("hits_tokens", None)
            worker.stats.pop("queries_tokens", None)

    def started(self, worker: Worker, message: Message, now: float) -> None:
        """The engine is about to run these items; a batch that is not its own is revoked."""
        batch_id = (message.fields["epoch"], message.fields["n"])
        batch = worker.held.get(batch_id)
        if batch is None:
            self._revoke(worker, batch_id)
        else:
            batch.start(message.columns["indices"])
            batch.lease_until = now + self._fabric.config.lease_s

    def done(self, worker: Worker, message: Message, now: float) -> None:
        """Results: the first for a live item completes it, any other is a duplicate."""
        statuses = message.columns["statuses"]
        if not WORKER_STATUSES.issuperset(statuses):
            raise PeerError("malformed", "a worker reports ok, too_long or failed, nothing else")
        payloads = split(message.body, message.columns["sizes"])
        batch_id = (message.fields["epoch"], message.fields["n"])
        batch = worker.held.get(batch_id)
        nonces, entries = message.columns["nonces"], message.columns["entries"]
        if _is_whole(batch, (packed("Q", nonces), packed("I", entries))):
            duplicates = self._end_together(worker, batch, batch.refs, statuses, payloads)
        else:
            refs = self._fabric.store.locate(nonces, entries)
            duplicates = self._end(worker, refs, statuses, payloads, now)
        self._fabric.flow.duplicates += duplicates
        if "stats" in message.fields:
            self._note_stats(worker, message.fields["stats"], now)
        self._send(
            worker.peer,
            Type.DONE_ACK,
            {"epoch": batch_id[0], "n": batch_id[1], "duplicates": duplicates},
        )
        self._list(worker)

    def _end(
        self,
        worker: Worker,
        refs: Sequence[int | None],
        statuses: Sequence[int],
        payloads: Sequence[bytes],
        now: float,
    ) -> int:
        """The first result for a live item ends it; returns how many were not the first."""
        pending = self._fabric.pending.by_ref
        live = [ref for ref in refs if ref is not None]
        batch = pending.get(live[0]) if live else None
        whole = len(live) == len(refs) == len(set(live))
        if whole and batch is not None and batch.outstanding.issuperset(live):
            return self._end_together(worker, batch, live, statuses, payloads)
        duplicates = 0
        for ref, status, payload, again in zip(
            refs, statuses, payloads, _repeats(refs), strict=True
        ):
            if ref is None or again:
                duplicates += 1
                continue
            batch = pending.get(ref)
            self._fabric.end(ref, status, payload, now)
            worker.items_done += 1
            if batch is not None:
                self._drop_if_empty(batch, worker)
        return duplicates

    def _end_together(
        self,
        worker: Worker,
        batch: Batch,
        refs: Sequence[int],
        statuses: Sequence[int],
        payloads: Sequence[bytes],
    ) -> int:
        """Items of one batch end that are out with its worker, each once; none is a duplicate."""
        self._fabric.end_dispatched(batch, refs, statuses, payloads)
        worker.items_done += len(refs)
        self._drop_if_empty(batch, worker)
        return 0

    def _drop_if_empty(self, batch: Batch, reporter: Worker) -> None:
        holder = self._fabric.workers.get(batch.worker)
        if holder is None or batch.outstanding:
            return
        holder.held.pop(batch.id, None)
        if holder is not reporter:
            self._revoke(holder, batch.id)
        self._list(holder)

    def returned(self, worker: Worker, message: Message, now: float) -> None:
        """The worker gives items back, and says whether the engine is to blame."""
        kind, text = message.fields["kind"], message.fields.get("text", "")
        batch = worker.held.get((message.fields["epoch"], message.fields["n"]))
        if batch is None:
            return
        indices = message.columns["indices"]
        if len(indices):
            chosen = {batch.refs[k] for k in indices if k < len(batch.refs)} & batch.outstanding
        else:
            chosen = set(batch.outstanding)
        charged: set[int] = set()
        if kind in CHARGING_KINDS:
            charged = chosen if kind == "out_of_memory" else chosen & batch.started
            self._fabric.event(kind, f"{worker.name}: {text}", now, worker=worker.name)
        reason = f"{kind} on {worker.name}: {text}" if text else f"{kind} on {worker.name}"
        self._charge(batch.in_order(charged), reason, now)
        self._free(worker, batch, batch.in_order(chosen - charged), now, batch.solo)
        self._drop_if_empty(batch, worker)
        self._fabric.count(f"returned_{kind}", len(chosen))

    # -- going --------------------------------------------------------------------------------

    def lost(self, worker: Worker, reason: str, now: float, kind: str) -> None:
        """The connection is gone: free what is not started, let the rest wait for its lease.

        `reason` is for people; `kind` is one of few words, for the counter.
        """
        if worker.peer is None:
            return
        worker.peer = None
        worker.granted = 0
        worker.disconnects += 1
        worker.last_disconnect, worker.last_disconnect_s = reason, now
        self._unlist(worker)
        self._fabric.count("worker_disconnects")
        self._fabric.count(f"worker_disconnects_{kind}")
        if kind == "left":
            self._fabric.event("worker_left", f"{worker.name}: {reason}", now, worker=worker.name)
        else:
            self._fabric.event("worker_lost", f"{worker.name}: {reason}", now, worker=worker.name)
        for parting in part(list(worker.held.values()), orderly=kind == "left"):
            self._free(worker, parting.batch, parting.free, now, parting.batch.solo)
        if not worker.held:
            self._forget_absent()

    def _forget_absent(self) -> None:
        absent = [w for w in self._fabric.workers.values() if w.peer is None and not w.held]
        for worker in absent[: max(0, len(absent) - ABSENT_WORKERS_MAX)]:
            del self._fabric.workers[worker.name]

    def judge(self, now: float) -> None:
        """End leases. Drain inbound first, and give up silent workers (see `lost`)."""
        for worker in list(self._fabric.workers.values()):
            for batch in [b for b in worker.held.values() if now > b.lease_until]:
                if worker.peer is None:
                    self._expire(worker, batch, "its lease ended", now)
                else:
                    self._revoke(worker, batch.id)
                    self._free(worker, batch, batch.in_order(batch.outstanding), now, batch.solo)

    def shift(self, late_s: float) -> None:
        """The broker itself was late: nobody else may be judged for that time."""
        for worker in self._fabric.workers.values():
            worker.heard_s += late_s
            for batch in worker.held.values():
                batch.lease_until += late_s

    def _expire(self, worker: Worker, batch: Batch, why: str, now: float) -> None:
        started = batch.in_order(batch.outstanding & batch.started)
        # Where the worker never said what it started, the whole batch is suspect: alone from now
        # on, but not charged.
        suspect = batch.in_order(batch.outstanding - batch.started)
        self._fabric.pending.remember_expired(batch, started)
        self._fabric.event(
            "lease_expired",
            f"batch of {worker.name}: {why}; {counted(len(started), 'item')} charged",
            now,
            worker=worker.name,
        )
        self._charge(started, f"{why} ({worker.name})", now)
        self._free(worker, batch, suspect, now, solo=batch.solo or not batch.was_started)
        self._drop_if_empty(batch, worker)

    def _charge(self, refs: Sequence[int], reason: str, now: float) -> None:
        for ref in refs:
            if self._fabric.store.charge(ref) >= self._fabric.config.attempts_max:
                self._fabric.bury(ref, reason, now)
            else:
                self._fabric.give_back([ref], now, solo=True)

    def _free(
        self, worker: Worker, batch: Batch, refs: Sequence[int], now: float, solo: bool
    ) -> None:
        if refs:
            self._fabric.give_back(refs, now, solo=solo)
        if not batch.outstanding:
            worker.held.pop(batch.id, None)
        self._list(worker)

    def _revoke(self, worker: Worker, batch_id: BatchId) -> None:
        if worker.peer is not None:
            self._send(worker.peer, Type.REVOKE, {"epoch": batch_id[0], "n": batch_id[1]}, [b""])

    # -- hunger ------------------------------------------------------------------------------

    def _list(self, worker: Worker) -> None:
        model = self._fabric.models[worker.model]
        if worker.credit > 0 and worker.name not in model.hungry:
            model.hungry[worker.name] = None

    def pass_over(self, worker: Worker) -> None:
        """Offer this worker nothing until it is heard of again."""
        self._unlist(worker)

    def _unlist(self, worker: Worker) -> None:
        self._fabric.models[worker.model].hungry.pop(worker.name, None)


def _contract(fields: dict[str, Any]) -> Contract:
    if "model" not in fields:
        raise PeerError("malformed", "a worker's HELLO names its model")
    try:
        return Contract(
            fields.get("batch_items_max"),  # type: ignore[arg-type]  # checked by Contract
            fields.get("batch_tokens_max"),  # type: ignore[arg-type]
            fields.get("input_tokens_max"),  # type: ignore[arg-type]
            fields.get("ragged", False),
        )
    except ConfigError as error:
        raise PeerError("bad_contract", str(error)) from None


def _is_word(value: object) -> bool:
    """Whether a peer's value is text that a terminal can be given."""
    return type(value) is str and len(value) <= NAME_BYTES_MAX and value.isprintable()


def _repeats(refs: Sequence[int | None]) -> Iterator[bool]:
    """For each ref, whether it stood earlier in the same message."""
    seen: set[int | None] = set()
    for ref in refs:
        yield ref in seen
        seen.add(ref)


def _is_whole(batch: Batch | None, wire_refs: tuple[bytes, bytes]) -> TypeGuard[Batch]:
    """Whether a whole batch is meant, of which nothing has ended."""
    return (
        batch is not None
        and batch.wire_refs == wire_refs
        and len(batch.outstanding) == len(batch.refs)
    )
