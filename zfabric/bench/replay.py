"""Replay: the policies alone, one shape on a virtual clock, with lists in place of a store.

It runs the broker's own `lanes`, `draining`, `sweep` and `packing`. Lengths are tokens,
times virtual seconds. A closed loop: whatever is over the backlog is packed at once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter

from zfabric.draining import DrainLimits, Fullest, LaneDraining
from zfabric.lanes import Lanes
from zfabric.packing import (
    BATCH_COST_TOKENS,
    Packed,
    batch_fill,
    pack_group,
    pack_strict,
    pack_tight,
)
from zfabric.shapes import Contract
from zfabric.sweep import candidates, goes_on_below

# The contract of all measured figures of the design.
CONTRACT = Contract(32, 65_536, 65_536)
# Virtual seconds between two looks for idle lanes.
MAINTAIN_S = 0.1
# Of a packed batch: (items, pad-to).
_SIZE = itemgetter(0, 1)


class Totals:
    """What batches have cost, all shapes and tenths added up as one likes."""

    __slots__ = ("_contract", "_packed", "_sizes", "real_tokens")

    def __init__(self, contract: Contract = CONTRACT) -> None:
        self._contract = contract
        self.real_tokens = 0
        # All that is asked of a batch follows from (items, pad-to): how many of each there were,
        # and those that have not been counted yet.
        self._sizes: Counter[tuple[int, int]] = Counter()
        self._packed: list[Packed] = []

    def book(self, real_tokens: int, packed: Packed) -> None:
        """Count one batch."""
        self.real_tokens += real_tokens
        self._packed.append(packed)

    def sizes(self) -> Counter[tuple[int, int]]:
        """How many batches there were of each (items, pad-to)."""
        self._sizes.update(map(_SIZE, self._packed))
        self._packed.clear()
        return self._sizes

    @property
    def batches(self) -> int:
        """How many."""
        return self.sizes().total()

    @property
    def items(self) -> int:
        """Items in them."""
        return sum(n * count for (count, _), n in self.sizes().items())

    @property
    def padded_tokens(self) -> int:
        """Their tokens, padding included."""
        return sum(n * count * pad_to for (count, pad_to), n in self.sizes().items())

    def add(self, other: Totals) -> None:
        """Count another's batches too."""
        self.real_tokens += other.real_tokens
        self.sizes().update(other.sizes())

    def ratios(self) -> dict[str, float | None]:
        """Waste, mean fill and cost; None without batches."""
        batches, padded_tokens = self.batches, self.padded_tokens
        if not batches or not self.real_tokens:
            return {"waste_ratio": None, "fill_ratio": None, "cost": None}
        cost = padded_tokens + BATCH_COST_TOKENS * batches
        fills = (
            n * batch_fill(count, count * pad_to, self._contract)
            for (count, pad_to), n in self.sizes().items()
        )
        return {
            "waste_ratio": 1 - self.real_tokens / padded_tokens,
            "fill_ratio": math.fsum(fills) / batches,
            "cost": cost / self.real_tokens,
        }


class Replay:
    """One shape: its lanes, what waits in each of them, and what packing it has cost."""

    def __init__(self, lanes_limit: int, packing: str, contract: Contract = CONTRACT) -> None:
        self.lanes = Lanes(lanes_limit)
        self.order = LaneDraining(DrainLimits())
        self.contract = contract
        self.ready_items = 0
        self.totals = Totals(contract)
        self._pack = {"group": self._group, "tight": self._tight, "strict": self._strict}[packing]
        self._below: int | None = None
        self._lengths: defaultdict[int, list[int]] = defaultdict(list)
        self._maintain_at = 0.0

    def submit(self, lengths: Sequence[int], now: float) -> None:
        """One message arrives: assign it to lanes, enqueue it there, and count it as ready."""
        lane_ids, counts, _, _ = self.lanes.assign_runs(lengths, now)
        queues = map(self._lengths.__getitem__, lane_ids)
        # A deque without room only runs the map.
        if len(lane_ids) == len(lengths):
            deque(map(list.append, queues, lengths), maxlen=0)
            tokens: Iterable[int] = lengths
        else:
            ends = accumulate(counts, initial=0)
            parts = [lengths[start:stop] for start, stop in pairwise(ends)]
            deque(map(list.extend, queues, parts), maxlen=0)
            tokens = map(sum, parts)
        self.order.added_rows(list(zip(lane_ids, counts, tokens, strict=True)), now)
        self.ready_items += len(lengths)

    def maintain(self, now: float) -> None:
        """Retire idle lanes, every MAINTAIN_S."""
        if now >= self._maintain_at:
            self._maintain_at = now + MAINTAIN_S
            for lane in self.lanes.maintain(now):
                self.order.quiesce(lane)

    def drain(self, backlog: int, now: float) -> None:
        """Pack batches until no more than `backlog` items wait."""
        while self.ready_items > backlog:
            self._pack(now)

    def _tight(self, now: float) -> None:
        lane = self.order.choose(now)
        if lane is not None:
            front = self._lengths[lane][: self.contract.batch_items_max]
            packed = pack_tight(front, self.contract)
            self.totals.book(self._take(lane, front, packed.count, now), packed)

    def _strict(self, now: float) -> None:
        lane = self.order.choose(now)
        if lane is not None:
            queue = self._lengths[lane]
            front = queue[: self.contract.batch_items_max]
            packed = pack_strict(front, len(queue), max(queue), self.contract)
            self.totals.book(self._take(lane, front, packed.count, now), packed)

    def _group(self, now: float) -> None:
        queues, places = self._lengths, self.contract.batch_items_max
        rows, due = candidates(self.order, self.lanes, self._below, now)
        seen: list[tuple[int, int, list[int]]] = []

        def lengths() -> Iterable[tuple[int, list[int]]]:
            for lane, target in rows:
                front = queues[lane][:places]
                seen.append((lane, target, front))
                yield lane, front

        taken, packed = pack_group(lengths(), self.contract)
        tokens = 0
        for (lane, count), (_, _, front) in zip(taken, seen, strict=False):
            tokens += self._take(lane, front, count, now)
        self.totals.book(tokens, packed)
        if not due:
            lane, target, _ = seen[len(taken) - 1]
            left = self.order.ready(lane)
            self._below = goes_on_below(len(taken), target, left, self.contract)

    def _take(self, lane: int, front: list[int], count: int, now: float) -> int:
        """Take so many items from the front of the lane; returns their tokens."""
        tokens = sum(front if count == len(front) else front[:count])
        del self._lengths[lane][:count]
        self.ready_items -= count
        self.order.removed(lane, count, tokens, now, True)
        self.lanes.removed(lane, count)
        return tokens


class Classes:
    """One shape without lanes: a queue for each value of `key`, the fullest first, packed tight."""

    def __init__(self, key: Callable[[int], int], contract: Contract = CONTRACT) -> None:
        self.ready_items = 0
        self.totals = Totals(contract)
        self._key, self._contract = key, contract
        self._queues: defaultdict[int, list[int]] = defaultdict(list)
        self._order: Fullest[int] = Fullest()

    def submit(self, lengths: Sequence[int], now: float) -> None:
        """One message arrives."""
        for length in lengths:
            key = self._key(length)
            self._queues[key].append(length)
            self._order.set(key, self._order.tokens(key) + length)
        self.ready_items += len(lengths)

    def maintain(self, now: float) -> None:
        """Nothing here retires."""

    def drain(self, backlog: int, now: float) -> None:
        """Pack batches until no more than `backlog` items wait."""
        while self.ready_items > backlog and (key := self._order.first()) is not None:
            queue = self._queues[key]
            packed = pack_tight(queue[: self._contract.batch_items_max], self._contract)
            taken = queue[: packed.count]
            del queue[: packed.count]
            if queue:
                self._order.set(key, self._order.tokens(key) - sum(taken))
            else:
                self._order.discard(key)
            self.ready_items -= packed.count
            self.totals.book(sum(taken), packed)


class Windows:
    """One shape: `items` at a time are sorted, longest first, and cut into batches, all of them."""

    def __init__(self, items: int, contract: Contract = CONTRACT) -> None:
        self.ready_items = 0
        self.totals = Totals(contract)
        self._items, self._contract = items, contract
        self._window: list[int] = []

    def submit(self, lengths: Sequence[int], now: float) -> None:
        """One message arrives."""
        self._window += lengths
        self.ready_items += len(lengths)

    def maintain(self, now: float) -> None:
        """Nothing here retires."""

    def drain(self, backlog: int, now: float) -> None:
        """Pack every full window, and with a backlog of 0 the rest too."""
        while len(self._window) >= self._items or (self._window and not backlog):
            window, self._window = self._window[: self._items], self._window[self._items :]
            window.sort(reverse=True)
            start = 0
            while start < len(window):
                part = window[start : start + self._contract.batch_items_max]
                packed = pack_tight(part, self._contract)
                self.totals.book(sum(part[: packed.count]), packed)
                start += packed.count
            self.ready_items -= len(window)
