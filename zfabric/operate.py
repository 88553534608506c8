"""Operating: the requests of `zfabric status`, `drain`, `dead`, `producers` and their like.

A request is a name and a map of arguments; the answer is a plain value. Anything wrong with a
request is a PeerError whose text goes to the person who asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zfabric import snapshot
from zfabric.errors import PeerError
from zfabric.fabric import Fabric
from zfabric.groups import Group, Model
from zfabric.outbox import error_payload
from zfabric.peers import Producer
from zfabric.protocol import NUMBER_MAX, Status
from zfabric.words import counted

LIST_MAX = 1_000
# Requests that change what is kept: their answer is a promise, and waits for the store.
CHANGES = frozenset(
    {"dead.requeue", "dead.drop", "producers.forget", "workers.forget", "pause", "resume"}
)
# Those of them that take in items: their answer waits until these are written, too.
TAKES_IN = frozenset({"dead.requeue"})
# Items cancelled in a turn, some 100 us each on disk.
CANCEL_ITEMS = 256
# Names in an error text; a list of all would be longer than a text may be.
NAMED_MAX = 20


class Operations:
    """What an operator may ask and order. `cancel` and `drain` are the dispatcher's own."""

    def __init__(
        self,
        fabric: Fabric,
        meta: Callable[[float], dict[str, Any]],
        drain: Callable[[float], None],
        cancel: Callable[[Producer], None],
        drop_producer: Callable[[Producer, float], None],
    ) -> None:
        self._fabric = fabric
        self._meta = meta
        self._drain = drain
        self._cancel = cancel
        self._drop_producer = drop_producer
        self._table: dict[str, Callable[[dict[str, Any], float], Any]] = {
            "status": self._status,
            "shapes": self._shapes,
            "lanes": self._lanes,
            "workers": self._workers,
            "workers.forget": self._workers_forget,
            "events": self._events,
            "lengths": self._lengths,
            "drain": self._do_drain,
            "pause": lambda args, now: self._pause(args, now, True),
            "resume": lambda args, now: self._pause(args, now, False),
            "models.forget": self._models_forget,
            "dead.ls": self._dead_ls,
            "dead.requeue": self._dead_requeue,
            "dead.drop": self._dead_drop,
            "producers.ls": self._producers_ls,
            "producers.cancel": self._producers_cancel,
            "producers.forget": self._producers_forget,
        }

    def request(self, op: str, args: dict[str, Any], now: float) -> Any:
        """Carry out one request. Raises PeerError where it cannot be."""
        handler = self._table.get(op)
        if handler is None:
            raise PeerError(
                "unknown_request", f"no request {op!r}; there are {sorted(self._table)}"
            )
        return handler(args, now)

    def _status(self, args: dict[str, Any], now: float) -> Any:
        return {**self._meta(now), **snapshot.status(self._fabric, now)}

    def _shapes(self, args: dict[str, Any], now: float) -> Any:
        return snapshot.shapes(self._fabric, now, _count(args, "top", snapshot.TOP_ROWS_MAX))

    def _lanes(self, args: dict[str, Any], now: float) -> Any:
        return snapshot.lanes(self._fabric, self._group(args), now)

    def _group(self, args: dict[str, Any]) -> Group:
        model, wanted = args.get("model"), args.get("signature")
        if wanted is not None and type(wanted) is not str:
            raise PeerError("malformed", "signature must be text: its first hex digits")
        groups = [
            g
            for g in self._fabric.groups.values()
            if (model is None or g.model.name == model)
            and (wanted is None or f"{g.signature:016x}".startswith(wanted.lower()))
        ]
        if not groups:
            raise PeerError("not_found", "no such shape; `zfabric shapes` lists them")
        if wanted is not None and len(groups) > 1:
            raise PeerError("ambiguous", f"{len(groups)} shapes start with {wanted[:20]!r}")
        return max(
            groups,
            key=lambda g: (g.model.draining.current == g.id, g.ready_tokens, g.accepted_items),
        )

    def _workers(self, args: dict[str, Any], now: float) -> Any:
        return [snapshot.worker(self._fabric, w, now) for w in self._fabric.workers.values()]

    def _workers_forget(self, args: dict[str, Any], now: float) -> Any:
        worker = self._fabric.workers.get(_word(args, "name"))
        if worker is None:
            name = args["name"]
            raise PeerError("not_found", f"no worker {name!r}; `zfabric workers` lists them")
        if worker.peer is not None:
            raise PeerError("in_use", f"{worker.name} is connected; end it first, with SIGTERM")
        if worker.held:
            raise PeerError(
                "in_use",
                f"{worker.name} is gone with {counted(len(worker.held), 'started batch')}; they "
                f"are retried when its lease ends ({self._fabric.config.lease_s:g} s)",
            )
        del self._fabric.workers[worker.name]
        self._fabric.claims.drop("worker", worker.name)
        self._fabric.event("worker_forgotten", worker.name, now, worker=worker.name)
        return {"name": worker.name}

    def _lengths(self, args: dict[str, Any], now: float) -> Any:
        return snapshot.lengths(self._fabric, 0, now)

    def _events(self, args: dict[str, Any], now: float) -> Any:
        since = _count(args, "since", 0)
        return [e for e in self._fabric.events if e["seq"] > since]

    def _do_drain(self, args: dict[str, Any], now: float) -> Any:
        self._drain(now)
        return {"pending_items": self._fabric.pending.items}

    def _model(self, args: dict[str, Any]) -> Model:
        model = self._fabric.models.get(_word(args, "model"))
        if model is None:
            known = ", ".join(list(self._fabric.models)[:NAMED_MAX]) or "none yet"
            raise PeerError("not_found", f"no model {args['model']!r}; models here: {known}")
        return model

    def _models_forget(self, args: dict[str, Any], now: float) -> Any:
        model = self._model(args)
        if model.paused:
            raise PeerError(
                "in_use",
                f"{model.name} is paused, and would run when it comes back; "
                f"`zfabric resume {model.name}` first",
            )
        if not self._fabric.drop_idle_model(model.name):
            raise PeerError(
                "in_use",
                f"{model.name} has work, or workers; end and forget these first",
            )
        self._fabric.event("model_forgotten", model.name, now, model=model.name)
        return {"model": model.name}

    def _pause(self, args: dict[str, Any], now: float, paused: bool) -> Any:
        model = self._model(args)
        if model.paused != paused:
            model.paused = paused
            self._fabric.store.backing.record(t="pause", model=model.name, paused=paused)
        kind = "model_paused" if paused else "model_resumed"
        self._fabric.event(kind, model.name, now, model=model.name)
        return {"model": model.name, "paused": paused}

    def _dead_ls(self, args: dict[str, Any], now: float) -> Any:
        return [
            {
                "id": record.id,
                "producer": record.producer,
                "number": record.number,
                "model": record.shape.model,
                "signature": f"{record.shape.signature:016x}",
                "length_tokens": record.length,
                "payload_bytes": len(record.payload),
                "reason": record.reason,
                "attempts": record.attempts,
                "age_s": now - record.at_s,
            }
            for record in list(self._fabric.dead)[: _count(args, "top", LIST_MAX)]
        ]

    def _chosen_dead(self, args: dict[str, Any]) -> list[int]:
        if args.get("all") is True:
            return [record.id for record in self._fabric.dead]
        ids = args.get("ids")
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise PeerError("malformed", "give the ids of dead records, or all")
        missing = [i for i in ids if i not in self._fabric.dead]
        if missing:
            raise PeerError("not_found", f"no dead records {missing[:10]}; `zfabric dead ls`")
        return list(dict.fromkeys(ids))

    def _dead_requeue(self, args: dict[str, Any], now: float) -> Any:
        chosen = self._chosen_dead(args)
        no_space = self._fabric.full(now)
        if no_space is not None:
            raise PeerError("storage_full", no_space)
        requeued = 0
        for record_id in chosen:
            try:
                self._fabric.requeue(record_id, now)
            except PeerError:
                # What went round already is said; the others stay dead, and say why when asked.
                if not requeued:
                    raise
                break
            requeued += 1
        self._fabric.event("dead_requeued", counted(requeued, "item"), now)
        return {"requeued": requeued}

    def _dead_drop(self, args: dict[str, Any], now: float) -> Any:
        chosen = self._chosen_dead(args)
        for record_id in chosen:
            self._fabric.dead.drop(record_id)
        self._fabric.event("dead_dropped", counted(len(chosen), "record"), now)
        return {"dropped": len(chosen)}

    def _producers_ls(self, args: dict[str, Any], now: float) -> Any:
        known = [p for p in self._fabric.producers if p is not None]
        top = _count(args, "top", LIST_MAX)
        return [snapshot.job(p, now) for p in known[max(0, len(known) - top) :]]

    def _named(self, args: dict[str, Any]) -> Producer:
        index = self._fabric.producer_index.get(_word(args, "name"))
        producer = self._fabric.producers[index] if index is not None else None
        if producer is None:
            raise PeerError(
                "not_found", f"no producer {args['name']!r}; `zfabric producers ls` lists them"
            )
        return producer

    def _producers_cancel(self, args: dict[str, Any], now: float) -> Any:
        producer = self._named(args)
        self._cancel(producer)
        self._fabric.event("producer_cancelled", producer.name, now, producer=producer.name)
        return {"name": producer.name, "outstanding": producer.outstanding}

    def _producers_forget(self, args: dict[str, Any], now: float) -> Any:
        producer = self._named(args)
        if producer.peer is not None:
            raise PeerError("in_use", f"{producer.name} is connected; stop it first, or cancel it")
        waiting = producer.outstanding - len(producer.outbox)
        if waiting and args.get("force") is not True:
            raise PeerError(
                "in_use",
                f"{producer.name} has {counted(waiting, 'open item')}; cancel it first, or "
                "forget it with --force",
            )
        results = len(producer.outbox)
        self._drop_producer(producer, now)
        return {"name": producer.name, "dropped_results": results}


def cancelling(
    fabric: Fabric, producer: Producer, last: int, clock: Callable[[], float]
) -> Iterator[bool]:
    """End what waits of a producer up to its number `last`, some items a turn.

    Where items wait to be written, too, it goes over all once more when some or all of them were.
    Yields whether the next turn may go on; else it is the one behind the next writing that may.
    """
    payload = error_payload("cancelled", "cancelled by an operator")
    whole = False
    while not whole:
        whole, seen = not fabric.store.unwritten, 0
        for group in list(fabric.groups.values()):
            for queue in list(group.queues.values()):
                refs = fabric.store.peek_all(queue)
                for start in range(0, len(refs), CANCEL_ITEMS):
                    some = refs[start : start + CANCEL_ITEMS]
                    if seen + len(some) > CANCEL_ITEMS:
                        yield True
                        seen = 0
                    seen += len(some)
                    for ref in fabric.store.waiting_of(some, producer.index):
                        # What is submitted after the cancel is not meant.
                        if not last < fabric.store.describe(ref).number <= NUMBER_MAX:
                            fabric.end(ref, Status.CANCELLED, payload, clock())
        if not whole:
            yield False


def _count(args: dict[str, Any], name: str, default: int) -> int:
    value = args.get(name, default)
    if type(value) is not int or not 0 <= value < 2**53:
        raise PeerError("malformed", f"{name} must be a whole number")
    return value


def _word(args: dict[str, Any], name: str) -> str:
    value = args.get(name)
    if type(value) is not str or not value:
        raise PeerError("malformed", f"{name} must be given")
    return value
