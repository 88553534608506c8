"""The wall: what happens when a shape needs more lanes than it may have.

The policies alone over a length trace, on a virtual clock. Each shape draws its own lengths, in the
order in which a service would see them: the rules take items one by one, and sorting a message
first (as the client does) hides the wall. Rates are items per virtual second and shape, lengths
tokens, and of the run itself seconds.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from zfabric.bench.replay import Replay, Totals

# Points of the plot; a tenth is six of them.
SLICES = 60
TENTHS = 10
# Items that arrive together.
MESSAGE = 256


@dataclass(frozen=True)
class Load:
    """One run: `items` and `backlog` are per shape."""

    lengths: Sequence[int]
    lanes: int
    items: int
    shapes: int
    backlog: int
    rate: float
    packing: str
    sort: bool
    seed: int


class Slice:
    """A sixtieth of the run: what its batches cost, and the lanes at its end, all shapes added."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.shapes = 0
        self.lanes = self.opened = self.reused = self.forced = 0
        self.pressure = self.threshold = 0.0

    def close(self, replay: Replay, before: tuple[int, int, int]) -> tuple[int, int, int]:
        """Note the lanes as they are now; returns their counters, for the next slice."""
        lanes = replay.lanes
        counters = (lanes.opened_total, lanes.reused_total, lanes.forced_total)
        self.totals, self.shapes = replay.totals, 1
        # Counts its batches, so that no slice keeps a row of each.
        self.totals.sizes()
        self.lanes, self.pressure, self.threshold = (
            lanes.lanes_active,
            lanes.pressure,
            lanes.threshold,
        )
        self.opened, self.reused, self.forced = (
            n - b for n, b in zip(counters, before, strict=True)
        )
        return counters

    def beside(self, other: Slice) -> None:
        """Add the same slice of another shape."""
        self.totals.add(other.totals)
        for field in ("shapes", "lanes", "opened", "reused", "forced", "pressure", "threshold"):
            setattr(self, field, getattr(self, field) + getattr(other, field))

    def row(self) -> dict[str, Any]:
        """As printed: ratios are means over shapes, `lanes` is the sum."""
        return {
            **self.totals.ratios(),
            "lanes": self.lanes,
            "pressure": self.pressure / self.shapes,
            "threshold": self.threshold / self.shapes,
            "opened": self.opened,
            "reused": self.reused,
            "forced": self.forced,
            "packed_items": self.totals.items,
            "batches": self.totals.batches,
            "padded_tokens": self.totals.padded_tokens,
        }


def _after(first: Slice, rest: Sequence[Slice]) -> Slice:
    """One slice made of several in a row: the lanes are those at its end."""
    whole, last = Slice(), rest[-1] if rest else first
    for part in (first, *rest):
        whole.totals.add(part.totals)
        whole.opened += part.opened
        whole.reused += part.reused
        whole.forced += part.forced
    whole.shapes, whole.lanes = last.shapes, last.lanes
    whole.pressure, whole.threshold = last.pressure, last.threshold
    return whole


def replay_shape(load: Load, number: int) -> tuple[list[Slice], float]:
    """One shape from its first item to its last; returns its slices and the CPU seconds."""
    rng = random.Random(load.seed * 1_000_003 + number)
    replay = Replay(load.lanes, load.packing)
    slices: list[Slice] = []
    counters, done, now = (0, 0, 0), 0, 0.0
    started = time.process_time()
    for end in range(1, SLICES + 1):
        current = Slice()
        replay.totals = Totals()
        stop = load.items * end // SLICES
        while done < stop:
            count = min(MESSAGE, stop - done)
            lengths = rng.choices(load.lengths, k=count)
            if load.sort:
                lengths.sort(reverse=True)
            done += count
            now = done / load.rate
            replay.maintain(now)
            replay.submit(lengths, now)
            replay.drain(load.backlog, now)
        counters = current.close(replay, counters)
        slices.append(current)
    return slices, time.process_time() - started


def run(load: Load, processes: int | None = None) -> dict[str, Any]:
    """The whole run: figures by tenth, over all, and the points of the plot."""
    started = time.perf_counter()
    whole: list[Slice] = []
    cpu_s = 0.0
    for slices, seconds in _shapes(load, processes or os.cpu_count() or 1):
        cpu_s += seconds
        if not whole:
            whole = slices
            continue
        for mine, other in zip(whole, slices, strict=True):
            mine.beside(other)
    took = time.perf_counter() - started
    width = SLICES // TENTHS
    tenths = [_after(whole[k], whole[k + 1 : k + width]).row() for k in range(0, SLICES, width)]
    items = load.items * load.shapes
    return {
        "items": items,
        "shapes": load.shapes,
        "lanes_limit": load.lanes,
        "backlog": load.backlog,
        "rate": load.rate,
        "packing": load.packing,
        "sorted": load.sort,
        **_after(whole[0], whole[1:]).row(),
        "seconds": took,
        "cpu_s": cpu_s,
        "items_per_s": items / took,
        "items_per_cpu_s": items / cpu_s if cpu_s else None,
        "tenths": tenths,
        "points": [
            {"waste_ratio": row["waste_ratio"], "fill_ratio": row["fill_ratio"]}
            for row in (part.row() for part in whole)
        ],
    }


def _shapes(load: Load, processes: int) -> Iterator[tuple[list[Slice], float]]:
    """Shapes share nothing, so each core takes some of them."""
    numbers = range(load.shapes)
    if processes == 1 or load.shapes == 1:
        yield from (replay_shape(load, number) for number in numbers)
        return
    # Ctrl-C goes to all of them; whoever reads their results ends them.
    quiet = (signal.SIGINT, signal.SIG_IGN)
    count = min(processes, load.shapes)
    with get_context("spawn").Pool(count, signal.signal, quiet) as pool:
        yield from pool.imap(functools.partial(replay_shape, load), numbers)
