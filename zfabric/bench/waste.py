"""The frontier of waste against batch fill: one trace, one shape, every way of packing it.

The first quarter of the items only warms up: a shape opens most of its lanes then. What is left at
the end, when the backlog cannot be kept, is not counted. Lengths are tokens; cost is (padded tokens
+ 2,000 per batch) / real tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from zfabric.bench.replay import Classes, Replay, Totals, Windows
from zfabric.lanes import LANES_MAX

# Items of one message, drawn and packed together.
MESSAGE = 256
# Share of the items that is not measured.
WARM_UP = 0.25
# Virtual arrivals per second.
RATE = 2_225


class Packer(Protocol):
    """What takes messages and packs batches until only so many items wait."""

    totals: Totals

    def submit(self, lengths: Sequence[int], now: float) -> None:
        """One message arrives."""

    def maintain(self, now: float) -> None:
        """Time has passed."""

    def drain(self, backlog: int, now: float) -> None:
        """Pack until no more than `backlog` items wait."""


def policies(backlog: int, items: int, lanes: int) -> dict[str, Callable[[], Packer]]:
    """The rows of one backlog, by name."""
    return {
        "lanes strict": lambda: Replay(lanes, "strict"),
        "lanes tight": lambda: Replay(lanes, "tight"),
        "lanes group": lambda: Replay(lanes, "group"),
        "fifo": lambda: Classes(lambda length: 0),
        "power-of-two buckets": lambda: Classes(lambda length: max(0, length - 1).bit_length()),
        "64-token ranges": lambda: Classes(lambda length: -(-length // 64)),
        "sorted windows": lambda: Windows(backlog),
        "sort everything": lambda: Windows(items),
    }


def run(
    lengths: Sequence[int],
    items: int,
    backlogs: Sequence[int],
    lanes: int = LANES_MAX,
    seed: int = 1,
) -> Iterator[dict[str, Any]]:
    """One row for each policy and backlog; the floor, which has no backlog, comes once."""
    for k, backlog in enumerate(backlogs):
        for name, make in policies(backlog, items, lanes).items():
            floor = name == "sort everything"
            if floor and k:
                continue
            totals = measure(make(), lengths, items, 0 if floor else backlog, seed)
            yield {
                "policy": name,
                "backlog": None if floor else backlog,
                "waste_ratio": totals.ratios()["waste_ratio"],
                "fill_ratio": totals.ratios()["fill_ratio"],
                "batches": totals.batches,
                "padded_tokens": totals.padded_tokens,
                "cost": totals.ratios()["cost"],
            }


def measure(packer: Packer, lengths: Sequence[int], items: int, backlog: int, seed: int) -> Totals:
    """Draw `items` with the seed and pack them; what all but the first quarter has cost."""
    rng = random.Random(seed)
    now, done = 0.0, 0
    while done < items:
        if done >= items * WARM_UP > done - MESSAGE:
            packer.totals = Totals()
        count = min(MESSAGE, items - done)
        done += count
        now = done / RATE
        message = rng.choices(lengths, k=count)
        # A backlog of 0 is the floor: everything has come before anything goes, and nothing of it
        # must warm up.
        if backlog:
            packer.maintain(now)
            packer.submit(message, now)
            packer.drain(backlog, now)
        elif done > items * WARM_UP:
            packer.submit(message, now)
    if not backlog:
        packer.drain(0, now)
    return packer.totals
