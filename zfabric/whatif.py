"""What if: the lengths that came last, run once more through a fabric with other settings.

It drives the broker's own state in memory, so that it knows no rule of its own: lanes, packing and
the order of draining are those that a broker would use. What waits is kept at the backlog that it
is given, and what is left at the end is not handed out. As many items go through it as went through
the broker, as far as that matters, so that the two can be compared. It is a simulation on a sample,
and says so. Lengths are tokens, times seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from zfabric import snapshot
from zfabric.config import BrokerConfig
from zfabric.errors import ConfigError
from zfabric.fabric import Fabric
from zfabric.offers import Offers
from zfabric.peers import Peer, Worker
from zfabric.protocol import Status as Ended
from zfabric.shapes import Contract, Shape
from zfabric.store import Store
from zfabric.upkeep import Upkeep
from zfabric.words import counted

# A backlog of more than this part of the sample would leave too little to look at.
BACKLOG_SHARE = 4
# Items under which a sample says nothing.
SAMPLE_MIN = 256
# Items after which lanes have settled: a budget that is too small shows late. Some 3 s of one core.
SETTLED_ITEMS = 100_000


class Run(NamedTuple):
    """Items of one shape that came together, `age_s` before the sample was taken."""

    model: str
    signature: str
    age_s: float
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fabric made of the sample."""

    lanes: int
    verdict: str
    waste_ratio: float
    batch_fill_ratio: float
    # None where nothing was handed out
    cost_ratio: float | None
    # the mean that items met
    lane_pressure_ratio_run: float
    padding_tokens: dict[str, int]

    def as_map(self) -> dict[str, Any]:
        """Plain maps."""
        return asdict(self)


def simulate(
    runs: Sequence[Run],
    *,
    lanes: int,
    packing: str,
    contract: Contract,
    backlog_items: int,
    accepted_items: int = SETTLED_ITEMS,
) -> Outcome:
    """Run a sample through a fabric with so many lanes. Raises ConfigError on a sample too small.

    Every model is served by one worker with `contract`. The sample is sent round, as if the same
    lengths went on coming at the same pace, until `accepted_items` came or the lanes have settled.
    """
    items = sum(len(run.lengths) for run in runs)
    if items < SAMPLE_MIN:
        raise ConfigError(
            f"only {counted(items, 'length')} known since the broker started, {SAMPLE_MIN} needed; "
            "submit more work and ask again"
        )
    config = BrokerConfig(memory=True, lanes=lanes, packing=packing, linger_ms=0, max_wait_s=0)
    fabric = Fabric(config, Store())
    card = _Card(fabric, contract)
    backlog = min(backlog_items, items // BACKLOG_SHARE)
    shapes: dict[tuple[str, str], Shape] = {}
    producer = fabric.producer("what-if", 0.0)
    for now, run in _rounds(runs, items, min(accepted_items, SETTLED_ITEMS)):
        key = run.model, run.signature
        shape = shapes.setdefault(key, Shape.of(run.model, run.signature))
        first = producer.accepted_items + 1
        numbers = range(first, first + len(run.lengths))
        payloads = [b""] * len(run.lengths)
        fabric.accept(shape, producer, numbers, run.lengths, payloads, now)
        fabric.publish(now)
        card.serve(now, backlog)
        producer.outbox.ack(producer.outbox.last)
    return _outcome(fabric, lanes, now)


def _rounds(runs: Sequence[Run], items: int, wanted_items: int) -> Iterator[tuple[float, Run]]:
    """(time, run) of the sample, over and over until so many items are wanted no more."""
    ages = [run.age_s for run in runs]
    span_s, rounds = max(ages) - min(ages), max(1, round(wanted_items / items))
    now = 0.0
    for turn in range(rounds):
        for run in runs:
            now = max(now, turn * span_s + max(ages) - run.age_s)
            yield now, run


class _Card:
    """A worker that is always ready and done at once."""

    def __init__(self, fabric: Fabric, contract: Contract) -> None:
        self._fabric = fabric
        self._contract = contract
        self._offers = Offers(fabric)
        self._workers: dict[str, Worker] = {}
        self._upkeep = Upkeep(fabric)

    def serve(self, now: float, backlog_items: int) -> None:
        """Hand out and end batches until only the backlog waits."""
        fabric = self._fabric
        self._upkeep.turn(now)
        while fabric.store.ready_items > backlog_items:
            for model in fabric.models.values():
                model.hungry[self._worker(model.name).name] = None
            offer = self._offers.next(now)
            if offer is None:
                return
            self._offers.commit(offer, now)
            count = len(offer.batch.refs)
            ended = (Ended.OK,) * count, (b"",) * count
            fabric.end_dispatched(offer.batch, offer.batch.refs, *ended)
            offer.worker.held.clear()

    def _worker(self, model: str) -> Worker:
        worker = self._workers.get(model)
        if worker is None:
            name = f"card-{len(self._workers)}"
            worker = Worker(name, model, self._contract, 2, "what-if", True, 1, granted=2)
            worker.peer = Peer("workers", name.encode(), "worker", name, 1, 1, 0.0)
            self._workers[model] = self._fabric.workers[name] = worker
        return worker


def _outcome(fabric: Fabric, lanes: int, now: float) -> Outcome:
    status = snapshot.status(fabric, now)
    return Outcome(
        lanes,
        status["waste_verdict"],
        status["waste_ratio"],
        status["batch_fill_ratio"],
        status["cost_ratio"],
        status["lane_pressure_ratio_run"],
        status["waste_tokens"],
    )


def contract_of(status: Mapping[str, Any]) -> Contract:
    """The contract of the largest padded worker of a status. Raises ConfigError: there is none."""
    padded = [w["contract"] for w in status["workers"] if w["padding"] == "padded"]
    if not padded:
        raise ConfigError("no worker that pads is known: start one, and ask again")
    largest = max(padded, key=lambda contract: contract["batch_tokens_max"])
    return Contract(
        largest["batch_items_max"], largest["batch_tokens_max"], largest["input_tokens_max"]
    )
