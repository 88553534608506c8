"""The order of shapes: what a prefix cache hits, and what that costs in batch fill and waiting.

Requests with the blocks of their prompts go through the broker's own `draining` and `packing` to
one card on a virtual clock, whose cache keeps the blocks used last. A shape is the longest start of
a prompt that another prompt has too. Lengths are tokens, times virtual seconds.
"""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zfabric.bench import percentile
from zfabric.draining import Draining, DrainLimits
from zfabric.errors import ConfigError
from zfabric.packing import batch_fill, pack_ragged
from zfabric.shapes import Contract

# Tokens of one block of the trace, and blocks that the cache of the card keeps.
BLOCK_TOKENS = 512
CACHE_BLOCKS = 1_000
# Tokens that the card computes in a second: what the trace brings in arrival order keeps it busy.
CARD_TOKENS_PER_S = 40_000
# Seconds between two prompts of the synthetic trace.
SYNTHETIC_GAP_S = 0.25
CONTRACT = Contract(32, 65_536, 65_536, ragged=True)

Chain = tuple[int, ...]


class Request(NamedTuple):
    """One prompt: its blocks in order, those of them that make its shape, its length, its time."""

    blocks: Chain
    shape: Chain
    tokens: int
    at_s: float


class Cache:
    """A prefix cache: it hits from the start of a prompt, and forgets what was used longest ago."""

    def __init__(self, blocks_max: int | None) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def run(self, request: Request) -> int:
        """Tokens of the prompt that were there; all of it is there afterwards."""
        kept, hit = self._blocks, 0
        for block in request.blocks:
            if block not in kept:
                break
            hit += 1
        # The end of a prompt is of no use without its start: it must go first.
        for block in reversed(request.blocks):
            kept[block] = None
            kept.move_to_end(block)
        while self._blocks_max is not None and len(kept) > self._blocks_max:
            kept.popitem(last=False)
        return min(request.tokens, hit * BLOCK_TOKENS)


def read(path: Path) -> list[Request]:
    """Lines with `timestamp` (ms), `input_length`, `hash_ids`. Raises ConfigError."""
    found: list[tuple[Chain, int, float]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    blocks, at_s = tuple(map(int, row["hash_ids"])), row["timestamp"] / 1_000
                    found.append((blocks, int(row["input_length"]), at_s))
                except (ValueError, KeyError, TypeError):
                    raise ConfigError(
                        f"{path}, line {number}: no object with timestamp, input_length, hash_ids"
                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"{path} has no lines")
    return _with_shapes(found)


def synthetic(requests: int = 6_000, seed: int = 1) -> list[Request]:
    """Conversations that take turns: each prompt is the one before it and some blocks more."""
    rng = random.Random(seed)
    fresh = 1_000
    open_chains: list[Chain] = []
    found: list[tuple[Chain, int, float]] = []
    for number in range(requests):
        if not open_chains or rng.random() < 0.4:
            chain: Chain = (0, 1 + rng.randrange(8))
        else:
            chain = open_chains.pop(rng.randrange(len(open_chains)))
        grown = rng.randint(1, 12)
        chain += tuple(range(fresh, fresh + grown))
        fresh += grown
        tokens = len(chain) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
        found.append((chain, tokens, number * SYNTHETIC_GAP_S))
        if rng.random() < 0.8:
            open_chains.append(chain)
    return _with_shapes(found)


def _with_shapes(prompts: Sequence[tuple[Chain, int, float]]) -> list[Request]:
    uses = Counter(block for blocks, *_ in prompts for block in blocks)
    requests = []
    for blocks, tokens, at_s in prompts:
        shared = 0
        while shared < len(blocks) and uses[blocks[shared]] > 1:
            shared += 1
        requests.append(Request(blocks, blocks[:shared], tokens, at_s))
    return requests


class Arrivals:
    """When requests come: as long as fewer than `backlog` wait, or at their own times (None)."""

    def __init__(self, requests: Sequence[Request], backlog: int | None) -> None:
        self._coming = deque(requests)
        self._backlog = backlog

    def until(self, now: float, waiting: int) -> Iterator[Request]:
        """What has come by now, with so many waiting already."""
        coming, backlog = self._coming, self._backlog
        while coming and (coming[0].at_s <= now if backlog is None else waiting < backlog):
            waiting += 1
            yield coming.popleft()

    def next_s(self, now: float) -> float | None:
        """When the next one comes, None if there is none."""
        if not self._coming:
            return None
        return now if self._backlog is not None else max(now, self._coming[0].at_s)


class Card:
    """One card: its cache, its clock, and what its batches came to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.batches = 0
        self.waits: list[float] = []
        self._cache = Cache(CACHE_BLOCKS)
        self._hits = self._tokens = 0
        self._fill = 0.0

    def take(self, waiting: deque[tuple[Request, float]]) -> tuple[int, int]:
        """One batch from the front, from now on; returns its items and tokens."""
        front = [waiting[k] for k in range(min(len(waiting), CONTRACT.batch_items_max))]
        ((_, count),) = pack_ragged([(0, [r.tokens for r, _ in front])], CONTRACT)
        requests = [waiting.popleft()[0] for _ in range(count)]
        tokens = sum(request.tokens for request in requests)
        self.waits += [self.now - at_s for _, at_s in front[:count]]
        hits = sum(map(self._cache.run, requests))
        self._hits += hits
        self._tokens += tokens
        self._fill += batch_fill(len(requests), tokens, CONTRACT)
        self.batches += 1
        self.now += (tokens - hits) / CARD_TOKENS_PER_S
        return len(requests), tokens

    def row(self) -> dict[str, Any]:
        """What to print of it."""
        return {
            "hit_ratio": self._hits / self._tokens,
            "fill_ratio": self._fill / self.batches,
            "batches": self.batches,
            "wait_mean_s": sum(self.waits) / len(self.waits),
            "wait_p99_s": percentile(self.waits, 0.99),
            "wait_max_s": max(self.waits),
        }


def by_arrival(requests: Sequence[Request], backlog: int | None) -> dict[str, Any]:
    """One queue, shapes mixed, as `--policy fifo` does."""
    card, arrivals = Card(), Arrivals(requests, backlog)
    waiting: deque[tuple[Request, float]] = deque()
    while True:
        for request in arrivals.until(card.now, len(waiting)):
            waiting.append((request, card.now if backlog is not None else request.at_s))
        if waiting:
            card.take(waiting)
        elif (at_s := arrivals.next_s(card.now)) is not None:
            card.now = at_s
        else:
            return {**card.row(), "switches": None, "forced": None}


def by_shape(
    requests: Sequence[Request], backlog: int | None, max_wait_s: float, *, affinity: bool
) -> dict[str, Any]:
    """One shape at a time, by the broker's rules; the next one the fullest, or the nearest."""
    limits = DrainLimits(hold_s=0.0, linger_s=0.0, max_wait_s=max_wait_s)
    draining: Draining[Chain] = Draining(limits, _itself if affinity else None)
    card, arrivals = Card(), Arrivals(requests, backlog)
    waiting: dict[Chain, deque[tuple[Request, float]]] = {}
    while True:
        for request in arrivals.until(card.now, draining.ready_items):
            at_s = card.now if backlog is not None else request.at_s
            waiting.setdefault(request.shape, deque()).append((request, at_s))
            draining.added(request.shape, 1, request.tokens, card.now)
        now = card.now
        key = draining.choose(now, pending_items=0, intake_full=False).key
        if key is not None:
            items, tokens = card.take(waiting[key])
            if not waiting[key]:
                del waiting[key]
            draining.removed(key, items, tokens, now, served=True)
        elif (next_s := arrivals.next_s(now)) is not None:
            card.now = next_s
        else:
            break
    return {
        **card.row(),
        "switches": draining.switches_total,
        "forced": draining.forced_switches_total,
    }


def _itself(chain: Chain) -> Chain:
    return chain


def ceiling(requests: Sequence[Request]) -> float:
    """The hit ratio of a cache that forgets nothing, in any order of whole prompts."""
    cache = Cache(None)
    return sum(map(cache.run, requests)) / sum(request.tokens for request in requests)


def run(
    requests: Sequence[Request], backlogs: Sequence[int], waits_s: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """A row for each load, order and `max_wait`: all queued at once, backlogs, and as it came."""
    loads = [("queued", len(requests)), *(("backlog", n) for n in backlogs), ("as it came", None)]
    for load, backlog in loads:
        about = {"load": load, "backlog": backlog}
        yield {"order": "arrival", **about, "max_wait_s": None, **by_arrival(requests, backlog)}
        for max_wait_s in waits_s:
            for order in ("most_tokens", "affinity"):
                found = by_shape(requests, backlog, max_wait_s, affinity=order == "affinity")
                yield {"order": order, **about, "max_wait_s": max_wait_s, **found}
