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
# Tokens that the card computes in a second; only waiting depends on it.
CARD_TOKENS_PER_S = 20_000
CONTRACT = Contract(32, 65_536, 65_536, ragged=True)

Chain = tuple[int, ...]


class Request(NamedTuple):
    """One prompt: its blocks in order, those of them that make its shape, and its length."""

    blocks: Chain
    shape: Chain
    tokens: int


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
    """Lines with `input_length` and `hash_ids`. Raises ConfigError, saying what is wrong where."""
    found: list[tuple[Chain, int]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    found.append((tuple(map(int, row["hash_ids"])), int(row["input_length"])))
                except (ValueError, KeyError, TypeError):
                    raise ConfigError(
                        f"{path}, line {number}: not an object with input_length and hash_ids"
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
    found: list[tuple[Chain, int]] = []
    for _ in range(requests):
        if not open_chains or rng.random() < 0.4:
            chain: Chain = (0, 1 + rng.randrange(8))
        else:
            chain = open_chains.pop(rng.randrange(len(open_chains)))
        grown = rng.randint(1, 12)
        chain += tuple(range(fresh, fresh + grown))
        fresh += grown
        found.append((chain, len(chain) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)))
        if rng.random() < 0.8:
            open_chains.append(chain)
    return _with_shapes(found)


def _with_shapes(prompts: Sequence[tuple[Chain, int]]) -> list[Request]:
    uses = Counter(block for blocks, _ in prompts for block in blocks)
    requests = []
    for blocks, tokens in prompts:
        shared = 0
        while shared < len(blocks) and uses[blocks[shared]] > 1:
            shared += 1
        requests.append(Request(blocks, blocks[:shared], tokens))
    return requests


class Card:
    """One card: its cache, its clock, and what its batches came to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.batches = 0
        self.waits: list[float] = []
        self._cache = Cache(CACHE_BLOCKS)
        self._hits = self._tokens = 0
        self._fill = 0.0

    def run(self, requests: Sequence[Request], arrived: Sequence[float]) -> None:
        """One batch, from now on."""
        tokens = sum(request.tokens for request in requests)
        self.waits += [self.now - each for each in arrived]
        hits = sum(map(self._cache.run, requests))
        self._hits += hits
        self._tokens += tokens
        self._fill += batch_fill(len(requests), tokens, CONTRACT)
        self.batches += 1
        self.now += (tokens - hits) / CARD_TOKENS_PER_S

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


def by_arrival(requests: Sequence[Request], backlog: int) -> dict[str, Any]:
    """One queue, shapes mixed, as `--policy fifo` does."""
    card = Card()
    waiting: deque[tuple[Request, float]] = deque()
    coming = iter(requests)
    while True:
        _refill(waiting, coming, backlog, card.now)
        if not waiting:
            return {**card.row(), "switches": None, "forced": None}
        front = [waiting[k] for k in range(min(len(waiting), CONTRACT.batch_items_max))]
        ((_, count),) = pack_ragged([(0, [r.tokens for r, _ in front])], CONTRACT)
        for _ in range(count):
            waiting.popleft()
        card.run([r for r, _ in front[:count]], [at for _, at in front[:count]])


def _refill(
    waiting: deque[tuple[Request, float]], coming: Iterator[Request], backlog: int, now: float
) -> None:
    while len(waiting) < backlog and (request := next(coming, None)) is not None:
        waiting.append((request, now))


def by_shape(
    requests: Sequence[Request], backlog: int, max_wait_s: float, *, affinity: bool
) -> dict[str, Any]:
    """One shape at a time, by the broker's rules; the next one the fullest, or the nearest."""
    limits = DrainLimits(hold_s=0.0, linger_s=0.0, max_wait_s=max_wait_s)
    draining: Draining[Chain] = Draining(limits, _itself if affinity else None)
    card = Card()
    waiting: dict[Chain, deque[tuple[Request, float]]] = {}
    coming = iter(requests)
    while True:
        while draining.ready_items < backlog and (request := next(coming, None)) is not None:
            waiting.setdefault(request.shape, deque()).append((request, card.now))
            draining.added(request.shape, 1, request.tokens, card.now)
        key = draining.choose(card.now, pending_items=0, intake_full=False).key
        if key is None:
            break
        queue = waiting[key]
        front = [queue[k] for k in range(min(len(queue), CONTRACT.batch_items_max))]
        ((_, count),) = pack_ragged([(0, [r.tokens for r, _ in front])], CONTRACT)
        taken = [queue.popleft() for _ in range(count)]
        if not queue:
            del waiting[key]
        tokens = sum(r.tokens for r, _ in taken)
        draining.removed(key, count, tokens, card.now, served=True)
        card.run([r for r, _ in taken], [at for _, at in taken])
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
    """A row for each order, backlog (None is everything queued at once) and `max_wait`."""
    for backlog in (None, *backlogs):
        places = len(requests) if backlog is None else backlog
        where = {"backlog": backlog}
        yield {"order": "arrival", **where, "max_wait_s": None, **by_arrival(requests, places)}
        for max_wait_s in waits_s:
            about = {**where, "max_wait_s": max_wait_s}
            for order in ("most_tokens", "affinity"):
                found = by_shape(requests, places, max_wait_s, affinity=order == "affinity")
                yield {"order": order, **about, **found}
