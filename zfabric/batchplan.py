"""What running a batch file would be like: shapes, tokens, and padding by policy. Nothing is run.

Decides nothing: it passes the lengths of the file through the same lanes and the same packing as
the broker, as if all of it were queued (`lanes`), or by shape in arrival order (`shape`), or in
arrival order alone (`fifo`). With group packing, what fills no batch of its own lane goes with its
neighbours. Counts are items and tokens. Memory: one packer for each shape and lane, each with less
than a batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zfabric.batchfile import BadLine, Request
from zfabric.lanes import Lanes
from zfabric.packing import batch_fill, pack_group, pack_tight
from zfabric.shapes import Contract, Shape

POLICIES = ("fifo", "shape", "lanes")


class Packer:
    """One queue in arrival order, packed to a contract as it grows."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._queue = array("I")

    @property
    def queue(self) -> array[int]:
        """What is in no batch yet."""
        return self._queue

    def add(self, length: int, into: Padding) -> None:
        """One more item; a batch goes out when it is sure what is in it."""
        self._queue.append(length)
        if len(self._queue) >= self._contract.batch_items_max:
            self._pack(into)

    def end(self, into: Padding) -> None:
        """What is left."""
        while self._queue:
            self._pack(into)

    def _pack(self, into: Padding) -> None:
        count, pad_to, _ = pack_tight(self._queue, self._contract)
        into.add(self._queue[:count], pad_to, self._contract)
        del self._queue[:count]


@dataclass(slots=True)
class Padding:
    """What one policy would send: batches, tokens with and without padding."""

    policy: str
    batches: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    fill_total: float = 0.0

    def add(self, lengths: Sequence[int], pad_to: int, contract: Contract) -> None:
        """One batch."""
        padded = len(lengths) * pad_to
        self.batches += 1
        self.real_tokens += sum(lengths)
        self.padded_tokens += padded
        self.fill_total += batch_fill(len(lengths), padded, contract)

    @property
    def waste_ratio(self) -> float:
        """Padding over all that is computed; 0 where nothing is."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def fill_ratio(self) -> float:
        """The mean over batches of how full each is."""
        return self.fill_total / self.batches if self.batches else 0.0


@dataclass(slots=True)
class ShapePlan:
    """One shape of the file."""

    shape: Shape
    items: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Plan:
    """The whole file. `small_items` are in shapes that do not fill one batch."""

    contract: Contract
    lines: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    items: int = 0
    tokens: int = 0
    too_long: int = 0
    shared_tokens: int = 0
    small_items: int = 0
    shapes: list[ShapePlan] = field(default_factory=list)
    paddings: list[Padding] = field(default_factory=list)


def plan_of(rows: Iterable[Request | BadLine], contract: Contract, *, grouped: bool = True) -> Plan:
    """Pass `rows`, with their shapes, through all policies; `grouped` is group packing."""
    plan = Plan(contract, paddings=[Padding(policy) for policy in POLICIES])
    shapes: dict[Shape, ShapePlan] = {}
    queues = _Queues(contract, plan.paddings)
    for row in rows:
        plan.lines += 1
        if isinstance(row, BadLine):
            plan.bad[row.code] = plan.bad.get(row.code, 0) + 1
            continue
        known = shapes.get(row.shape)
        if known is None:
            known = shapes[row.shape] = ShapePlan(row.shape)
        known.items += 1
        known.tokens += row.length_tokens
        plan.items += 1
        plan.tokens += row.length_tokens
        plan.shared_tokens += min(row.shape.prefix_tokens or 0, row.length_tokens)
        if row.length_tokens > contract.input_tokens_max:
            plan.too_long += 1
        else:
            queues.add(row.shape, row.length_tokens)
    queues.end(grouped=grouped)
    plan.shapes = sorted(shapes.values(), key=lambda each: -each.items)
    plan.small_items = sum(s.items for s in plan.shapes if s.items < contract.batch_items_max)
    return plan


class _Queues:
    """The queues of every policy at once."""

    def __init__(self, contract: Contract, paddings: list[Padding]) -> None:
        self._contract = contract
        self._into = dict(zip(POLICIES, paddings, strict=True))
        self._packers: dict[tuple[str, object], Packer] = {}
        self._lanes: dict[Shape, Lanes] = {}

    def add(self, shape: Shape, length: int) -> None:
        lanes = self._lanes.get(shape)
        if lanes is None:
            lanes = self._lanes[shape] = Lanes()
        lane = lanes.assign([length], 0.0).lane_ids[0]
        for policy, queue in (("fifo", shape.model), ("shape", shape), ("lanes", (shape, lane))):
            packer = self._packers.get((policy, queue))
            if packer is None:
                packer = self._packers[policy, queue] = Packer(self._contract)
            packer.add(length, self._into[policy])

    def end(self, *, grouped: bool) -> None:
        if grouped:
            for shape, lanes in self._lanes.items():
                packers = [self._packers["lanes", (shape, lane)] for lane in lanes.descending()]
                _pack_neighbours([p.queue for p in packers], self._contract, self._into["lanes"])
        for (policy, _), packer in self._packers.items():
            packer.end(self._into[policy])


def _pack_neighbours(queues: list[array[int]], contract: Contract, into: Padding) -> None:
    """Batches of adjacent lanes, from the longest down, until nothing is left."""
    while queues := [queue for queue in queues if queue]:
        taken, packed = pack_group(enumerate(queues), contract)
        lengths = [length for place, count in taken for length in queues[place][:count]]
        for place, count in taken:
            del queues[place][:count]
        into.add(lengths, packed.pad_to, contract)
