"""Replay: the policies alone, one shape on a virtual clock, with lists where the broker has a store.

It runs the broker's own `lanes`, `draining`, `sweep`, `packing` and `ledger`. Lengths are tokens,
times virtual seconds. A closed loop: whatever is over the backlog is packed at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from zfabric.draining import DrainLimits, Fullest, LaneDraining
from zfabric.lanes import Lanes
from zfabric.ledger import Waste
from zfabric.packing import Packed, batch_fill, pack_group, pack_strict, pack_tight
from zfabric.shapes import Contract
from zfabric.sweep import candidates, goes_on_below

# The contract of all measured figures of the design.
CONTRACT = Contract(32, 65_536, 65_536)
# Virtual seconds between two looks for idle lanes.
MAINTAIN_S = 0.1


class Replay:
    """One shape: its lanes, what waits in each of them, and what packing it has cost."""

    def __init__(
        self, lanes_limit: int, packing: str, contract: Contract = CONTRACT, *, booked: bool = True
    ) -> None:
        self.lanes = Lanes(lanes_limit)
        self.order = LaneDraining(DrainLimits())
        self.contract = contract
        self.ready_items = 0
        self.waste = Waste()
        self._pack = {"group": self._group, "tight": self._tight, "strict": self._strict}[packing]
        self._booked = booked
        self._below: int | None = None
        self._lengths: defaultdict[int, list[int]] = defaultdict(list)
        self._targets: defaultdict[int, list[int]] = defaultdict(list)
        self._tags: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._maintain_at = 0.0

    def submit(self, lengths: Sequence[int], now: float) -> None:
        """One message arrives: assign it to lanes, enqueue it there, and count it as ready."""
        lane_ids, targets, tags = self.lanes.assign(lengths, now)
        queues = self._lengths
        for lane, length in zip(lane_ids, lengths, strict=True):
            queues[lane].append(length)
        if self._booked:
            targets_of, tags_of = self._targets, self._tags
            for lane, target, tag in zip(lane_ids, targets, tags, strict=True):
                targets_of[lane].append(target)
                tags_of[lane].append(tag)
        added = self.order.added
        for lane, items in Counter(lane_ids).items():
            added(lane, items, sum(queues[lane][-items:]), now)
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
            lengths = self._lengths[lane][: self.contract.batch_items_max]
            packed = pack_tight(lengths, self.contract)
            self._take(((lane, packed.count),), packed, now)

    def _strict(self, now: float) -> None:
        lane = self.order.choose(now)
        if lane is not None:
            queue = self._lengths[lane]
            places = self.contract.batch_items_max
            packed = pack_strict(queue[:places], len(queue), max(queue), self.contract)
            self._take(((lane, packed.count),), packed, now)

    def _group(self, now: float) -> None:
        queues, places = self._lengths, self.contract.batch_items_max
        rows, due = candidates(self.order, self.lanes, self._below, now)
        targets: list[int] = []

        def lengths() -> Iterable[tuple[int, list[int]]]:
            for lane, target in rows:
                targets.append(target)
                yield lane, queues[lane][:places]

        taken, packed = pack_group(lengths(), self.contract)
        self._take(taken, packed, now)
        if not due:
            left = self.order.ready(taken[-1][0])
            target = targets[len(taken) - 1]
            self._below = goes_on_below(len(taken), target, left, self.contract)

    def _take(self, taken: Sequence[tuple[int, int]], packed: Packed, now: float) -> None:
        """Take so many items from the front of each of these lanes, as one batch."""
        lengths: list[int] = []
        for lane, count in taken:
            queue = self._lengths[lane]
            lengths += (part := queue[:count])
            del queue[:count]
            self.order.removed(lane, count, sum(part), now, served=True)
            self.lanes.removed(lane, count)
        self.ready_items -= packed.count
        if self._booked:
            self._book(taken, packed, lengths)

    def _book(
        self, taken: Sequence[tuple[int, int]], packed: Packed, lengths: list[int]
    ) -> None:
        targets: list[int] = []
        tags = bytearray()
        for lane, count in taken:
            targets += self._targets[lane][:count]
            tags += self._tags[lane][:count]
            del self._targets[lane][:count], self._tags[lane][:count]
        book(self.waste, lengths, packed, self.contract, (targets, tags), [n for _, n in taken])


class Classes:
    """One shape without lanes: a queue for each value of `key`, the fullest first, packed tight."""

    def __init__(self, key: Callable[[int], int], contract: Contract = CONTRACT) -> None:
        self.ready_items = 0
        self.waste = Waste()
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
            book(self.waste, taken, packed, self._contract)


class Windows:
    """One shape: `items` at a time are sorted, longest first, and cut into batches, all of them."""

    def __init__(self, items: int, contract: Contract = CONTRACT) -> None:
        self.ready_items = 0
        self.waste = Waste()
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
                book(self.waste, part[: packed.count], packed, self._contract)
                start += packed.count
            self.ready_items -= len(window)


def book(
    waste: Waste,
    lengths: Sequence[int],
    packed: Packed,
    contract: Contract,
    assigned: tuple[Sequence[int], Sequence[int]] | None = None,
    runs: Sequence[int] = (),
) -> None:
    """Enter one batch; `assigned` are its (targets, tags) where lanes took part."""
    targets, tags = assigned or (None, None)
    fill = batch_fill(packed.count, packed.count * packed.pad_to, contract)
    waste.record(lengths, targets, tags, packed.base, packed.pad_to, fill=fill, runs=runs)
