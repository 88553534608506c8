"""The fabric's state, and the one place where an item changes state.

    accept -> (publish) -> ready -> dispatch -> pending -> end
                             ^                     |
                             +------ give_back ----+

Every method here moves items along one of these arrows and keeps the store, the lanes, both
drain orders and the ledger in step; nothing else may. Verify first, then mutate: a method that
raises has changed nothing. Lengths are tokens, times seconds on the caller's monotonic clock.
No socket, no clock, no message: those who decide when (`intake`, `dispatch`) call in here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, TypeVar

from zfabric.claims import Claims
from zfabric.config import BrokerConfig
from zfabric.deadletters import DeadLetters, DeadRecord
from zfabric.diagnosis import Diagnosis
from zfabric.draining import Draining, DrainLimits
from zfabric.errors import InvariantError, PeerError
from zfabric.groups import Group, Model
from zfabric.lanes import Lanes
from zfabric.ledger import Flow, Waste
from zfabric.outbox import Stored, error_payload, stored
from zfabric.peers import Producer, Worker
from zfabric.pending import Batch, Pending
from zfabric.protocol import BROKER_NUMBERS_FROM, Status
from zfabric.queues import LaneQueue, SegmentRun, Take
from zfabric.recent import Recent
from zfabric.segments import Append
from zfabric.shapes import Shape
from zfabric.store import Store

T = TypeVar("T")
# Shapes that have nothing left are kept for `zfabric shapes`, this many; the oldest use goes first.
IDLE_SHAPES_MAX = 4_096
EVENTS_MAX = 2_000
PRODUCERS_MAX, MODELS_MAX = 100_000, 4_096


class Fabric:
    """All state of one broker. Only the dispatcher and the rules it calls may hold it."""

    def __init__(self, config: BrokerConfig, store: Store) -> None:
        self.config = config
        self.store = store
        self.models: dict[str, Model] = {}
        self.groups: OrderedDict[int, Group] = OrderedDict()
        self.idle: OrderedDict[int, Group] = OrderedDict()
        self._next_group = 1
        self.pending = Pending()
        self.producers: list[Producer | None] = []
        self.producer_index: dict[str, int] = {}
        self.workers: dict[str, Worker] = {}
        self.claims = Claims(store.backing.record)
        self.flow = Flow()
        self.waste = Waste()
        self.dead = DeadLetters(store.backing, config.max_bytes // 2)
        self.retries: dict[int, int] = {}
        self.outbox_bytes = 0
        # producers that have results which did not go out yet
        self.unsent: set[int] = set()
        # producers whose numbers or results have changed since the last window
        self.touched: set[int] = set()
        self.counters: dict[str, int] = {}
        self.event_counts: dict[str, int] = {}
        self.diagnosis = Diagnosis()
        self.recent = Recent()
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self.fresh_events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._next_event = 1
        self.wall_offset_s = 0.0
        self.limits = DrainLimits(
            hold_items=min(config.hold_items, config.max_items, config.producer_items_max),
            hold_s=config.hold_s,
            linger_s=config.linger_ms / 1000,
            max_wait_s=config.max_wait_s,
        )
        # lanes of shapes that have been evicted still count in the totals
        self.retired_lanes = {"opened": 0, "reused": 0, "forced": 0, "crowded": 0}

    # -- names --------------------------------------------------------------------------------

    def event(self, kind: str, text: str, now: float, **fields: Any) -> None:
        """Remember something that an operator should see."""
        at_s = now + self.wall_offset_s
        entry = {"seq": self._next_event, "time": at_s, "event": kind, "text": text, **fields}
        self._next_event += 1
        self.event_counts[kind] = self.event_counts.get(kind, 0) + 1
        self.events.append(entry)
        self.fresh_events.append(entry)

    def count(self, counter: str, by: int = 1) -> None:
        """Add to a named counter."""
        self.counters[counter] = self.counters.get(counter, 0) + by

    def model(self, name: str) -> Model:
        """The model called `name`, made if need be. Raises PeerError over MODELS_MAX."""
        model = self.models.get(name)
        if model is None:
            if len(self.models) >= MODELS_MAX and not self.drop_idle_model():
                raise PeerError("too_many_models", f"{MODELS_MAX} models are in use")
            affine = self.config.next_shape == "affinity"
            chain_of = (lambda number: self.groups[number].shape.components) if affine else None
            model = self.models[name] = Model(name, Draining(self.limits, chain_of))
        return model

    def drop_idle_model(self, only: str | None = None) -> bool:
        """Forget the oldest model (or `only`) not in use and not served; whether there was one."""
        served = {worker.model for worker in self.workers.values()}
        for name, model in [(only, self.models[only])] if only else self.models.items():
            if name not in served and not model.in_use:
                for group in list(model.groups.values()):
                    self._evict(group)
                self.count("shape_switches_gone", model.draining.switches_total)
                self.count("forced_switches_gone", model.draining.forced_switches_total)
                del self.models[name]
                return True
        return False

    def check_shape(self, shape: Shape) -> None:
        """Raises PeerError where another component vector has the signature of `shape`."""
        model = self.models.get(shape.model)
        group = model.groups.get(shape.signature) if model else None
        if group is not None and self.config.policy != "fifo":
            known = group.shape.components
            if known != shape.components:
                raise PeerError(
                    "shape_conflict",
                    f"signature {shape.signature:016x} already stands for other components",
                )

    def group_for(self, shape: Shape) -> Group:
        """The group that items of `shape` belong to, made if need be."""
        model = self.model(shape.model)
        key = 0 if self._is_fifo else shape.signature
        group = model.groups.get(key)
        if group is None:
            lanes = Lanes(self.config.lanes) if self.config.policy == "lanes" else None
            own = Shape(shape.model) if self._is_fifo else shape
            group = Group(self._next_group, model, own, lanes, self.limits)
            self._next_group += 1
            model.groups[key] = self.groups[group.id] = group
        elif group.id in self.idle:
            del self.idle[group.id]
        if shape.label and not group.shape.label and not self._is_fifo:
            # restored from disk, where no example is kept
            group.shape = shape
        return group

    def producer(self, name: str, now: float) -> Producer:
        """The producer called `name`, made if need be. Raises PeerError over PRODUCERS_MAX."""
        index = self.producer_index.get(name)
        known = self.producers[index] if index is not None else None
        if known is not None:
            return known
        if len(self.producer_index) >= PRODUCERS_MAX:
            self._forget_absent()
        fresh = Producer(len(self.producers), name, now, last_seen_s=now)
        self.producers.append(fresh)
        self.producer_index[name] = fresh.index
        self.store.backing.record(t="producer", i=fresh.index, name=name)
        return fresh

    def _forget_absent(self) -> None:
        """Make room for new names: forget the longest absent ones that have nothing here."""
        idle = [p for p in self.producers if p is not None and p.peer is None and not p.outstanding]
        if not idle:
            raise PeerError("too_many_producers", f"{PRODUCERS_MAX} producers have work here")
        idle.sort(key=lambda p: p.last_seen_s)
        for producer in idle[: max(1, len(idle) // 10)]:
            self.forget(producer)

    def forget(self, producer: Producer) -> None:
        """Drop a producer's name, numbers, results and dead records; its items end unseen."""
        self.dead.forget(producer.name)
        self.outbox_bytes -= producer.outbox.payload_bytes
        self.producers[producer.index] = None
        self.store.backing.record(t="forget", i=producer.index)
        self.producer_index.pop(producer.name, None)
        self.claims.drop("producer", producer.name)
        self.unsent.discard(producer.index)

    def room_bytes(self) -> int:
        """Payload bytes that may still be taken into memory; a disk has limits of its own.

        Results and dead records count up to half of the limit, so that one producer that reads
        nothing cannot shut out the others.
        """
        limit = self.config.max_bytes
        unread = min(self.outbox_bytes + self.dead.held_bytes, limit // 2)
        return limit - unread - self.store.memory_bytes

    def full(self, now: float) -> str | None:
        """Why nothing new may be taken in, or None where there is room.

        A disk may have no room for a new file though bytes are free: inodes, or a quota. What was
        taken in waits in memory then, and nothing may join it.
        """
        waits = "the disk is full: what was taken in cannot be written (bytes, inodes, quota?)"
        return self.store.backing.full(now) or (waits if self.store.no_space else None)

    # -- accept -------------------------------------------------------------------------------

    def accept(
        self,
        shape: Shape,
        producer: Producer,
        numbers: Sequence[int],
        lengths: Sequence[int],
        payloads: Sequence[bytes],
        now: float,
        gaps: Sequence[int] = (),
    ) -> None:
        """Assign lanes to new items of one shape and store them; `publish` makes them ready."""
        group = self.group_for(shape)
        targets: Sequence[int]
        if group.lanes is None:
            parts = [(self.queue(group, 0), len(lengths))]
            targets = (group.number_of(shape),) * len(lengths) if self._is_fifo else lengths
            tags = bytearray(len(lengths))
        else:
            runs, find = group.lanes.assign_runs(lengths, now), group.queues.get
            queues = [find(lane) or self.queue(group, lane) for lane in runs.lane_ids]
            parts = list(zip(queues, runs.counts, strict=True))
            targets, tags = list(runs.each(runs.targets)), bytearray(runs.each(runs.tags))
        found = Append(lengths, targets, tags, producer.index, numbers, payloads, gaps)
        self.store.append(parts, found, now)
        self.recent.note(shape.model, shape.signature, lengths, now)
        items, tokens = len(lengths), sum(lengths)
        group.outstanding += items
        group.accepted_items += items
        group.accepted_tokens += tokens
        producer.outstanding += items
        producer.accepted_items += items
        producer.accepted_tokens += tokens

    @property
    def _is_fifo(self) -> bool:
        return self.config.policy == "fifo"

    def queue(self, group: Group, lane: int) -> LaneQueue:
        """The queue of a lane, made if need be."""
        queue = group.queues.get(lane)
        if queue is None:
            signature = 0 if self._is_fifo else group.signature
            queue = self.store.open_queue(
                group.shape, signature, group.id, lane, mixed=self._is_fifo
            )
            group.queues[lane] = queue
            group.lane_padding.opened(lane)
        return queue

    def readied(self, group: Group, lane: int, items: int, tokens: int, now: float) -> None:
        """Items that outlived a restart are ready; they count as accepted by their shape."""
        group.outstanding += items
        group.accepted_items += items
        group.accepted_tokens += tokens
        group.order.added(lane, items, tokens, now)
        self._readied(group, items, tokens, now)

    def restored(self, producers: int, next_dead: int, retries: dict[int, int]) -> None:
        """Numbers that were given out before a restart are not given out again."""
        self.producers += [None] * (producers - len(self.producers))
        self.dead.next_id = next_dead
        self.retries.update(retries)

    def publish(self, now: float, writes_max: int | None = None) -> bool:
        """Make stored items ready; returns whether there were any."""
        rows: dict[int, list[tuple[int, int, int]]] = {}
        for queue, items, tokens in self.store.publish(writes_max):
            rows.setdefault(queue.group, []).append((queue.lane, items, tokens))
        for number, lanes in rows.items():
            group = self.groups[number]
            group.order.added_rows(lanes, now)
            if group.lanes is not None and group.lanes.any_quiescing:
                # They take no new items, but a full disk may have held up what they took before.
                for lane in filter(group.lanes.is_quiescing, [row[0] for row in lanes]):
                    group.order.quiesce(lane)
            _, items_of, tokens_of = zip(*lanes, strict=True)
            self.flow.accept(sum(items_of), sum(tokens_of))
            self._readied(group, sum(items_of), sum(tokens_of), now)
        return bool(rows)

    @staticmethod
    def _readied(group: Group, items: int, tokens: int, now: float) -> None:
        group.ready_items += items
        group.ready_tokens += tokens
        group.model.draining.added(group.id, items, tokens, now)

    def _unreadied(
        self, queue: LaneQueue, items: int, tokens: int, now: float, *, served: bool
    ) -> None:
        group = self.groups[queue.group]
        group.ready_items -= items
        group.ready_tokens -= tokens
        group.order.removed(queue.lane, items, tokens, now, served)
        group.model.draining.removed(group.id, items, tokens, now, served)

    # -- dispatch -----------------------------------------------------------------------------

    def guard(self, group: Group, runs: Iterable[SegmentRun]) -> None:
        """Every chunk of a batch is of the shape being drained, or the process must end.

        Raises InvariantError: a poisoned prefix cache is worse than a restart.
        """
        if self._is_fifo:
            return
        current = group.model.draining.current
        if current != group.id:
            raise InvariantError(f"a batch of shape {group.id} while {current} is current")
        wanted = (group.model.name, group.signature)
        for segment, _, _ in runs:
            found = (segment.queue.shape.model, segment.queue.signature)
            if found != wanted:
                raise InvariantError(
                    f"a segment of signature {found[1]:016x} in a batch of {wanted[1]:016x}"
                )

    def dispatch(self, group: Group, takes: Sequence[Take], batch: Batch, now: float) -> None:
        """The channel has taken `batch`: verify every take, then advance, then add to pending."""
        cursors = [self.store.verify(take) for take in takes]
        for take, found in zip(takes, cursors, strict=True):
            self.store.commit(take, found)
            self._unreadied(take.queue, len(take), sum(take.lengths), now, served=True)
        self.pending.add(batch)
        group.pending_items += len(batch.refs)
        group.model.pending_items += len(batch.refs)
        group.batches += 1

    def give_back(self, refs: Sequence[int], now: float, *, solo: bool = False) -> None:
        """Pending items become ready again, ahead of their lanes' cursors and in their order."""
        for ref in refs:
            batch = self.pending.by_ref.get(ref)
            if batch is None:
                raise InvariantError(f"item {ref:#x} is given back but was not pending")
            (length,) = self.pending.settle(batch, (ref,))
            queue = self.store.release(ref, solo=solo)
            group = self.groups[queue.group]
            group.pending_items -= 1
            group.model.pending_items -= 1
            group.order.added(queue.lane, 1, length, now)
            if group.lanes is not None and group.lanes.is_quiescing(queue.lane):
                group.order.quiesce(queue.lane)
            self._readied(group, 1, length, now)
        self.flow.redeliveries += len(refs)

    # -- end ----------------------------------------------------------------------------------

    def end(self, ref: int, status: int, payload: bytes, now: float) -> None:
        """An item ends: result into the outbox, then the tombstone, then the counts."""
        known = self.store.describe(ref)
        self._post_end((known.producer,), (known.number,), (status,), (payload,))
        batch = self.pending.by_ref.get(ref)
        self.store.complete(ref, dead=status == Status.DEAD)
        group = self.groups[known.queue.group]
        if batch is None:
            self._unreadied(known.queue, 1, known.length, now, served=False)
        else:
            self._settled(group, batch, (ref,))
        self._count_end(group, (known.producer,), (status,), known.length)
        self._left(group, known.queue.lane, 1)

    def end_dispatched(
        self, batch: Batch, refs: Sequence[int], statuses: Sequence[int], payloads: Sequence[bytes]
    ) -> None:
        """As `end`, of items of one batch that are out with its worker, each once."""
        owners, numbers = (batch.chosen(column, refs) for column in (batch.owners, batch.numbers))
        self._post_end(owners, numbers, statuses, payloads)
        runs = self.store.complete_dispatched(refs)
        group = self.groups[runs[0][0].group]
        self._count_end(group, owners, statuses, self._settled(group, batch, refs))
        for queue, items in runs:
            self._left(group, queue.lane, items)

    def _settled(self, group: Group, batch: Batch, refs: Sequence[int]) -> int:
        """Items are no longer pending; returns their tokens."""
        group.pending_items -= len(refs)
        group.model.pending_items -= len(refs)
        return sum(self.pending.settle(batch, refs))

    def _left(self, group: Group, lane: int, items: int) -> None:
        """Items of a lane are gone for good."""
        if group.lanes is not None and group.lanes.removed(lane, items):
            del group.queues[lane]
        group.outstanding -= items
        if not group.outstanding:
            self._rest(group)

    def _count_end(
        self, group: Group, owners: Sequence[int], statuses: Sequence[int], tokens: int
    ) -> None:
        items, dead = len(statuses), statuses.count(Status.DEAD)
        for owner, column in _by_owner(owners, statuses):
            producer = self.producers[owner]
            if producer is not None:
                producer.dead_items += column.count(Status.DEAD)
                producer.completed_items += len(column) - column.count(Status.DEAD)
                producer.failed_items += column.count(Status.FAILED)
                producer.cancelled_items += column.count(Status.CANCELLED)
        if dead:
            self.flow.bury(items, tokens)
            return
        failed, cancelled = statuses.count(Status.FAILED), statuses.count(Status.CANCELLED)
        self.flow.complete(items, tokens, failed=failed, cancelled=cancelled)
        group.completed_items += items

    def _post_end(
        self,
        owners: Sequence[int],
        numbers: Sequence[int],
        statuses: Sequence[int],
        payloads: Sequence[bytes],
    ) -> None:
        """The results of items that end."""
        retries = self.retries
        firsts = [retries.pop(n, None) for n in numbers] if retries else repeat(None)
        results = stored(numbers, statuses, payloads, firsts)
        for owner, column in _by_owner(owners, results):
            producer = self.producers[owner]
            if producer is not None:
                self.post(producer, column)

    def post(self, producer: Producer, results: Sequence[Stored]) -> None:
        """Put results into their producer's outbox."""
        first = producer.outbox.last + 1
        self.outbox_bytes += producer.outbox.add(results)
        self.store.backing.keep_results(producer.index, first, results)
        self.touched.add(producer.index)
        self.unsent.add(producer.index)

    def bury(self, ref: int, reason: str, now: float) -> None:
        """An item has used up its attempts: a dead record, an error result, then the tombstone."""
        known = self.store.describe(ref)
        producer, attempts = self.producers[known.producer], self.store.attempts.get(ref, 0)
        first = self.retries.get(known.number, known.number)  # as its producer numbered it
        text = f"given up after attempt {attempts}: {reason}"
        name = "(forgotten)" if producer is None else producer.name
        if producer is not None:  # or nobody could read what comes of another try
            what = (name, first, self._shape_of(ref), known.length, known.payload)
            record = DeadRecord(self.dead.next_id, *what, reason, attempts, now)
            if dropped := self.dead.add(record, self.wall_offset_s):
                self.event("dead_dropped", f"the oldest of them, {dropped}, to make room", now)
        self.end(ref, Status.DEAD, error_payload("dead", text), now)
        self.event("item_dead", f"{name} #{first} {text}", now, producer=name)

    def requeue(self, record_id: int, now: float) -> int | None:
        """A dead item becomes a new one: its number, or None. Raises PeerError: nothing changed."""
        record = self.dead.get(record_id)
        if record is None:
            return None
        self.check_shape(record.shape)
        producer = self.producer(record.producer, now)
        self.group_for(record.shape)
        self.dead.requeued(record_id)
        number = BROKER_NUMBERS_FROM + record.id
        self.retries[number] = record.number
        self.store.backing.record(t="retry", number=number, of=record.number)
        self.accept(record.shape, producer, [number], [record.length], [record.payload], now)
        # The backing keeps its floor, and so knows that something of it waits to be written.
        self.touched.add(producer.index)
        return number

    def _shape_of(self, ref: int) -> Shape:
        columns = self.store.columns(self.store.runs([ref]))
        group = self.groups[self.store.describe(ref).queue.group]
        return group.shapes[columns.shapes[0]] if columns.shapes else group.shape

    def _rest(self, group: Group) -> None:
        """A group with nothing left is kept for the record, until there are too many."""
        if self._is_fifo:
            group.shapes.clear()
            group.shape_numbers.clear()
        self.idle[group.id] = group
        while len(self.idle) > IDLE_SHAPES_MAX:
            self._evict(next(iter(self.idle.values())))

    def _evict(self, group: Group) -> None:
        """Forget a group that has nothing left, but for its part in the totals."""
        self.idle.pop(group.id, None)
        del self.groups[group.id]
        group.model.groups.pop(0 if self._is_fifo else group.signature, None)
        if group.lanes is not None:
            for name in self.retired_lanes:
                self.retired_lanes[name] += getattr(group.lanes, f"{name}_total")


def _by_owner(owners: Sequence[int], column: Sequence[T]) -> Iterable[tuple[int, Sequence[T]]]:
    """(owner, its entries of `column`, in order); mostly there is one."""
    if owners.count(owners[0]) == len(owners):
        return ((owners[0], column),)
    parts: dict[int, list[T]] = {}
    for owner, entry in zip(owners, column, strict=True):
        parts.setdefault(owner, []).append(entry)
    return parts.items()
