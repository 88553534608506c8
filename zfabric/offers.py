"""Offers: which worker is next, which items it gets, and what is counted once it has them.

An offer is computed without moving anything. The caller sends it; only when the channel has taken
it is it committed, and if the channel has not there is nothing to undo. Lengths are tokens, times
seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from zfabric.errors import InvariantError
from zfabric.fabric import Fabric
from zfabric.groups import Group, Model
from zfabric.lanes import Lanes
from zfabric.packing import (
    Packed,
    batch_fill,
    pack_group,
    pack_ragged,
    pack_strict,
    pack_tight,
)
from zfabric.peers import Worker
from zfabric.pending import Batch
from zfabric.protocol import Type, encode, packed
from zfabric.queues import Columns, Take, items_within, refs_of
from zfabric.shapes import Contract, Shape
from zfabric.sweep import candidates, goes_on_below

# Shapes that a worker's ideal hit ratio can tell apart, some 100 bytes each; beyond it is unknown.
SIGNATURES_SEEN_MAX = 100_000
# Payloads of one batch: it is in memory twice while it is sent, once for each batch that a worker
# may have. A single payload may be larger.
BATCH_BYTES_MAX = 64 * 1024**2


@dataclass(slots=True)
class Offer:
    """A batch for one worker that has not been sent: frames to send, and what to commit then."""

    worker: Worker
    group: Group
    takes: list[Take]
    batch: Batch
    columns: Columns
    lengths: list[int]
    packed: Packed | None
    frames: list[bytes]
    # what `Group.sweep_below` is once this is sent
    sweep_below: int | None


class Offers:
    """The hand that takes from the current shape and gives to whoever has room."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.draining = False
        # set by the intake when it had to refuse for lack of room
        self.intake_full = False
        # when `next` could answer differently without any event; None is never
        self.wake_at: float | None = None

    def next(self, now: float) -> Offer | None:
        """The next batch to send, or None. Moves no item; may settle which shape is current."""
        self.wake_at = None
        if self.draining:
            return None
        for model in self._fabric.models.values():
            if model.paused:
                continue
            # With nothing ready the choice is asked all the same: a job that is over must be seen
            # to be over, or the next one would start without its hold.
            if not model.draining.ready_items and model.draining.current is None:
                continue
            worker = self._next_worker(model) if model.draining.ready_items else None
            if worker is None and model.draining.ready_items:
                continue
            choice = model.draining.choose(
                now, pending_items=model.pending_items, intake_full=self.intake_full
            )
            if choice.key is not None and worker is not None:
                return self._offer(worker, self._fabric.groups[choice.key], now)
            if choice.wake_at is not None:
                self.wake_at = min(self.wake_at or choice.wake_at, choice.wake_at)
        return None

    def _next_worker(self, model: Model) -> Worker | None:
        while model.hungry:
            name = next(iter(model.hungry))
            worker = self._fabric.workers.get(name)
            if worker is not None and worker.credit > 0:
                return worker
            del model.hungry[name]
        return None

    def _offer(self, worker: Worker, group: Group, now: float) -> Offer:
        takes, padded, sweep_below = self._pack(worker.contract, group, now)
        store, runs, lengths = self._fabric.store, [], []
        for take in takes:
            runs += [*store.runs(take.returned), *take.runs] if take.returned else take.runs
            lengths += take.lengths
        if not runs:
            raise InvariantError(f"shape {group.id} counts as ready but has nothing to read")
        self._fabric.guard(group, runs)
        columns = store.columns(runs)
        refs = refs_of(runs)
        epoch = worker.peer.epoch if worker.peer else 0
        batch = Batch(
            id=(epoch, worker.sent + 1),
            worker=worker.name,
            refs=refs,
            owners=columns.owners,
            numbers=columns.numbers,
            lengths=lengths,
            wire_refs=(packed("Q", columns.nonces), packed("I", columns.entries)),
            outstanding=set(refs),
            lease_until=now + self._fabric.config.lease_s,
            sent_s=now,
            solo=takes[0].solo,
        )
        frames = _batch_frames(batch, group, columns, lengths, padded)
        return Offer(worker, group, takes, batch, columns, lengths, padded, frames, sweep_below)

    def _pack(
        self, contract: Contract, group: Group, now: float
    ) -> tuple[list[Take], Packed | None, int | None]:
        """Takes, the padded batch (None for a ragged one), and where a sweep goes on."""
        store, packing, at = self._fabric.store, self._fabric.config.packing, group.sweep_below
        if packing == "group" and group.lanes is not None and not contract.ragged:
            return self._pack_group(contract, group, group.lanes, now)
        lane = group.order.choose(now)
        if lane is None:
            raise InvariantError(f"shape {group.id} counts as ready but no lane of it is")
        queue = group.queues[lane]
        take = store.peek(queue, contract.batch_items_max)
        if contract.ragged:
            takes = [take] if take.solo else self._pack_ragged(contract, group, now)
            return self._within(takes), None, at
        if packing == "strict" and not take.solo:
            longest = store.longest(queue)
            packed_batch = pack_strict(take.lengths, queue.ready_items, longest, contract)
            takes = self._within([take.keep(packed_batch.count)])
            return takes, packed_batch._replace(count=len(takes[0])), at
        takes = self._within([take.keep(pack_tight(take.lengths, contract).count)])
        return takes, pack_tight(takes[0].lengths, contract), at

    def _within(self, takes: list[Take]) -> list[Take]:
        """As much of a batch as one message may hold."""
        runs = self._fabric.store.runs
        within = chain.from_iterable(chain(runs(take.returned), take.runs) for take in takes)
        left, kept = items_within(within, BATCH_BYTES_MAX), []
        for take in takes:
            if left > 0:
                kept.append(take.keep(min(left, len(take))))
            left -= len(take)
        return kept

    def _pack_group(
        self, contract: Contract, group: Group, lanes: Lanes, now: float
    ) -> tuple[list[Take], Packed, int | None]:
        """A batch of adjacent lanes (see `sweep`), and where the sweep goes on."""
        rows, due = candidates(group.order, lanes, group.sweep_below, now)
        seen: dict[int, tuple[int, Take]] = {}

        def lengths() -> Iterator[tuple[int, Sequence[int]]]:
            for lane, target in rows:
                take = self._fabric.store.peek(group.queues[lane], contract.batch_items_max)
                # An item that must go alone ends the batch before it, and begins the next one.
                if take.solo and seen:
                    return
                seen[lane] = target, take
                yield lane, take.lengths
                if take.solo:
                    return

        taken, packed_batch = pack_group(lengths(), contract)
        takes = self._within([seen[lane][1].keep(count) for lane, count in taken])
        lengths_kept = [length for take in takes for length in take.lengths]
        if len(lengths_kept) < packed_batch.count:
            packed_batch = pack_tight(lengths_kept, contract)
        if due:
            return takes, packed_batch, group.sweep_below
        last = takes[-1]
        left = (
            last.queue.ready_items - len(last),
            last.queue.ready_tokens - sum(last.lengths),
        )
        below = goes_on_below(len(takes), seen[last.queue.lane][0], left, contract)
        return takes, packed_batch, below

    def _pack_ragged(self, contract: Contract, group: Group, now: float) -> list[Take]:
        seen: dict[int, Take] = {}
        # Without lanes there is one queue; a store that had lanes before has what is left of them.
        ready = group.order.ready_lanes
        order = group.lanes.descending() if group.lanes is not None else iter(ready)
        # What goes before any order does so here, too: short prompts would never be reached else.
        due = group.order.due(now)

        def lanes() -> Iterator[tuple[int, Sequence[int]]]:
            for lane in order if due is None else chain([due], order):
                if lane in seen:
                    continue
                queue = group.queues.get(lane)
                if queue is None or not queue.ready_items:
                    continue
                take = self._fabric.store.peek(queue, contract.batch_items_max)
                if take.solo and seen:
                    continue
                seen[lane] = take
                yield lane, take.lengths
                if take.solo:
                    return

        return [seen[lane].keep(count) for lane, count in pack_ragged(lanes(), contract)]

    def commit(self, offer: Offer, now: float) -> None:
        """The channel has taken the offer."""
        worker, group, batch = offer.worker, offer.group, offer.batch
        self._fabric.dispatch(group, offer.takes, batch, now)
        padded_to = offer.packed.pad_to if offer.packed else None
        real = sum(offer.lengths)
        tokens = padded_to * len(batch.refs) if padded_to is not None else real
        fill = batch_fill(len(batch.refs), tokens, worker.contract)
        batch.padded_tokens = _count_padding(self._fabric, offer, fill)
        group.sweep_below = offer.sweep_below
        for take in offer.takes:
            taken = sum(take.lengths)
            put = taken if padded_to is None else padded_to * len(take.lengths)
            group.lane_padding.add(take.queue.lane, taken, put)
        worker.sent += 1
        worker.batches += 1
        worker.held[batch.id] = batch
        worker.real_tokens += real
        worker.padded_tokens += tokens
        worker.fill_sum += fill
        _predict(worker, group, offer)
        hungry = self._fabric.models[worker.model].hungry
        hungry.pop(worker.name, None)
        if worker.credit > 0:
            hungry[worker.name] = None


def _describe(shape: Shape) -> dict[str, Any]:
    packed_components = struct.pack(f"<{len(shape.components)}Q", *shape.components)
    return {"components": packed_components, "tokens": list(shape.tokens)}


def _batch_frames(
    batch: Batch, group: Group, columns: Columns, lengths: Sequence[int], padded: Packed | None
) -> list[bytes]:
    index: list[int] = []
    shapes = [group.shape]
    if columns.shapes:
        numbers = list(dict.fromkeys(columns.shapes))
        place = {number: k for k, number in enumerate(numbers)}
        index = [place[number] for number in columns.shapes]
        shapes = [group.shapes[number] for number in numbers]
    fields = {
        "epoch": batch.id[0],
        "n": batch.id[1],
        "model": group.model.name,
        "shapes": [_describe(shape) for shape in shapes],
    }
    if padded is not None:
        fields["pad_to"] = padded.pad_to
    return encode(
        Type.BATCH,
        fields,
        [
            *batch.wire_refs,
            packed("I", lengths),
            packed("I", map(len, columns.payloads)),
            packed("I", index),
        ],
        b"".join(columns.payloads),
    )


def _predict(worker: Worker, group: Group, offer: Offer) -> None:
    """What two caches would hit: one that holds just the last shape, and one without limit.

    The second is the ideal: every prompt but the first of a shape on this worker. Both are
    unknown where the token count of a component is.
    """
    if offer.columns.shapes:
        shapes = [group.shapes[number] for number in offer.columns.shapes]
        runs = [(s, s.signature, [n]) for s, n in zip(shapes, offer.lengths, strict=True)]
    else:
        runs = [(group.shape, group.signature, offer.lengths)]
    limit = worker.contract.input_tokens_max
    for shape, signature, asked in runs:
        # What is over the contract is not run, and asks no cache for anything.
        lengths = asked if max(asked) <= limit else [n for n in asked if n <= limit]
        if not lengths:
            continue
        worker.predicted_queries_tokens += sum(lengths)
        prefix = shape.prefix_tokens
        if prefix is None or len(worker.signatures_seen) >= SIGNATURES_SEEN_MAX:
            worker.predicted_known = False
            worker.signatures_seen.clear()
        if prefix is None or not worker.predicted_known:
            return
        hits = [min(prefix, length) for length in lengths]
        saved = sum(hits)
        last = signature == worker.last_signature
        worker.predicted_hits_tokens += saved if last else saved - hits[0]
        worker.ideal_hits_tokens += (
            saved if signature in worker.signatures_seen else saved - hits[0]
        )
        worker.signatures_seen.add(signature)
        worker.last_signature = signature


def _count_padding(fabric: Fabric, offer: Offer, fill: float) -> int:
    """Enter a batch into the waste ledger; returns its padded tokens."""
    group, lengths, columns = offer.group, offer.lengths, offer.columns
    real = padded = sum(lengths)
    if offer.packed is None:
        fabric.waste.record_ragged(lengths, fill=fill)
    else:
        count, pad_to, base = offer.packed
        laned = group.lanes is not None
        targets, tags = (columns.targets, columns.tags) if laned else (None, None)
        runs = [len(take) for take in offer.takes]
        fabric.waste.record(lengths, targets, tags, base, pad_to, fill=fill, runs=runs)
        padded = pad_to * count
    group.real_tokens += real
    group.padded_tokens += padded
    return padded
