"""Draining: decides which shape of a model is served now, and which lane of a shape goes next.

Readiness counts items, order counts tokens, times are monotonic seconds that the caller gives and
never go back. Both policies know only keys and sums. This module must never leave a shape that
has ready items (unless `max_wait` forces it), read a clock, or keep anything of a key that has
nothing ready, except which one is current.

The current shape of a model:

    None --hold over--> current --ran empty, linger over--> the one with the most ready tokens
     ^                     |`--another passed over for max_wait--> that one
     `--nothing ready or pending, linger over--'

With `chain_of`, what follows a current shape is the ready one that shares the longest start of its
chain of components (of equals, the one that has been ready longest), instead of the fullest.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, KeysView, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from zfabric.affinity import Affinity
from zfabric.errors import ConfigError, InvariantError

K = TypeVar("K", bound=Hashable)

_KEY, _ITEMS, _TOKENS = itemgetter(0), itemgetter(1), itemgetter(2)
# Places beyond two per live key before all are sorted anew: few stale ones are not worth it.
HEAP_SLACK = 64
# Moves of one key in so many sort all anew: that is done in one go, and leaves no stale place.
REBUILD_PAYS = 4
# Items of other shapes that a wait may leave undone: what it saves is one miss for each card.
WAIT_COSTS_ITEMS = 100


@dataclass(frozen=True, slots=True)
class DrainLimits:
    """How long to wait before choosing, and how long anything may be passed over."""

    # Items ready that end the hold at a start: enough for the largest shape to show itself.
    hold_items: int = 20_000
    # Seconds since the first waiting item that end the hold, however little came.
    hold_s: float = 5.0
    # Seconds after the current shape ran empty: a switch costs a cold cache, a short gap does not.
    linger_s: float = 0.2
    # Seconds that a shape or lane may be passed over; 0 is for ever.
    max_wait_s: float = 300.0

    def __post_init__(self) -> None:
        for field in ("hold_items", "hold_s", "linger_s", "max_wait_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field} must be a finite number of at least 0, not {value!r}")


class Choice(NamedTuple, Generic[K]):
    """The shape to serve, or None to wait; and when asking again could answer differently."""

    key: K | None
    # Monotonic seconds; None if only an event can change the answer.
    wake_at: float | None


class Fullest(Generic[K]):
    """Keys by tokens, most first; of equals, the one that was added first.

    A change only notes the key, so that an order that nobody asks for costs nothing. Asked, it
    sorts all keys where many have changed since they were sorted last, and takes one after the
    other from the end; where few have, those leave their place and wait in a heap beside it.
    """

    __slots__ = ("_heap", "_moved", "_sorted", "added", "changed", "live", "order")

    def __init__(self) -> None:
        # Tokens of each key. Whoever changes one here says so in `changed`, and numbers a new one.
        self.live: dict[K, int] = {}
        self.order: dict[K, int] = {}
        self.changed: set[K] = set()
        self.added = 0
        # The fullest last. Keys that are not live are passed over, and those that have moved.
        self._sorted: list[K] = []
        self._moved: set[K] = set()
        self._heap: list[tuple[int, int, K]] = []

    def __len__(self) -> int:
        return len(self.live)

    def tokens(self, key: K) -> int:
        """Tokens of the key; 0 if it is not here."""
        return self.live.get(key, 0)

    def set(self, key: K, tokens: int) -> None:
        """Add the key, or give it another number of tokens (0 is a number)."""
        if key not in self.live:
            self.order[key] = self.added
            self.added += 1
        self.live[key] = tokens
        self.changed.add(key)

    def discard(self, key: K) -> None:
        """Forget the key, if it is here."""
        if self.live.pop(key, None) is not None:
            del self.order[key]
            self.changed.discard(key)
            if not self.live:
                self._sort()

    def first(self) -> K | None:
        """The key with the most tokens, or None if there is no key."""
        live, moved = self.live, self._moved
        if self.changed:
            self._settle()
        keys, heap, order = self._sorted, self._heap, self.order
        while keys and (keys[-1] in moved or keys[-1] not in live):
            keys.pop()
        while heap:
            tokens, number, key = heap[0]
            if live.get(key) == -tokens and order[key] == number:
                ahead = keys and (-live[keys[-1]], order[keys[-1]]) < (tokens, number)
                return keys[-1] if ahead else key
            heappop(heap)
        return keys[-1] if keys else None

    def _settle(self) -> None:
        """Give each changed key its new place."""
        live, changed, heap = self.live, self.changed, self._heap
        self._moved |= changed
        held = len(self._sorted) + len(heap) + len(changed)
        if len(self._moved) * REBUILD_PAYS >= len(live) or held > 2 * len(live) + HEAP_SLACK:
            self._sort()
        else:
            for key in changed:
                heappush(heap, (-live[key], self.order[key], key))
            changed.clear()

    def _sort(self) -> None:
        # Sorting keeps the order of equals, and a dict that of adding.
        self._sorted = list(reversed(self.live))
        self._sorted.sort(key=self.live.__getitem__)
        for noted in (self._heap, self._moved, self.changed):
            noted.clear()


class _Ready(Generic[K]):
    """What is ready of each key, since when it is passed over, and when max_wait may force it."""

    __slots__ = ("forced_at", "fullest", "items", "max_wait_s", "since")

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self.items: dict[K, int] = {}
        self.fullest: Fullest[K] = Fullest()
        # When each key became ready or was last served: the first one is passed over longest.
        # Not a dict, which takes longer to find its first key the more were removed before it.
        self.since: OrderedDict[K, float] = OrderedDict()
        self.forced_at: float | None = None

    def added(self, key: K, items: int, tokens: int, now: float) -> None:
        self.added_rows([(key, items, tokens)], now)

    def added_rows(self, rows: Sequence[tuple[K, int, int]], now: float) -> None:
        if not rows:
            return
        if min(map(_ITEMS, rows)) < 1 or min(map(_TOKENS, rows)) < 0:
            raise InvariantError("a key cannot become ready without an item")
        ready, fullest, live = self.items, self.fullest, self.fullest.live
        for key, items, tokens in rows:
            if key in ready:
                ready[key] += items
                live[key] += tokens
            else:
                ready[key] = items
                self.since[key] = now
                live[key] = tokens
                fullest.order[key] = fullest.added
                fullest.added += 1
        fullest.changed.update(map(_KEY, rows))

    def removed(self, key: K, items: int, tokens: int, now: float, served: bool) -> bool:
        """True if nothing of the key is left."""
        ready, fullest, live = self.items, self.fullest, self.fullest.live
        items_left = ready.get(key, 0) - items
        tokens_left = live.get(key, 0) - tokens
        if items < 1 or tokens < 0 or items_left < 0 or tokens_left < 0:
            raise InvariantError(f"{items} items of {tokens} tokens were not ready")
        if not items_left:
            if tokens_left:
                raise InvariantError(f"no items left of a key, but {tokens_left} tokens")
            del ready[key], self.since[key]
            fullest.discard(key)
            return True
        ready[key] = items_left
        live[key] = tokens_left
        fullest.changed.add(key)
        if served:
            self.since[key] = now
            self.since.move_to_end(key)
        return False

    def overdue(self, besides: K | None = None) -> tuple[K, float] | None:
        """(key, when) of the next key that may be forced, `besides` excepted; two steps at most.

        One is forced per max_wait: under overload everything is overdue, and obeying all of it
        would hop from key to key with tiny batches.
        """
        if not self.max_wait_s:
            return None
        for key, since in self.since.items():
            if key != besides:
                latest = since if self.forced_at is None else max(since, self.forced_at)
                return key, latest + self.max_wait_s
        return None

    def is_overdue(self, key: K, now: float) -> bool:
        """Whether this is the key that may be forced, and may be by now."""
        since = self.since.get(key, now)
        if not self.max_wait_s or now < since + self.max_wait_s:
            return False
        overdue = self.overdue()
        return overdue is not None and overdue[0] == key and now >= overdue[1]

    def passed_over_s(self, key: K, now: float) -> float:
        return now - self.since.get(key, now)


class Draining(Generic[K]):
    """Sticky draining over the shapes of one model; every consumer of the model follows it."""

    __slots__ = (
        "_affinity", "_arrived_at", "_chain", "_chain_of", "_entered_at", "_first_at", "_leave_at",
        "_limits", "_more", "_ready", "_served_items", "current", "forced_switches_total",
        "ready_items", "ready_tokens", "switches_total",
    )  # fmt: skip

    def __init__(
        self,
        limits: DrainLimits | None = None,
        chain_of: Callable[[K], Sequence[int]] | None = None,
    ) -> None:
        self._limits = limits or DrainLimits()
        self._ready: _Ready[K] = _Ready(self._limits.max_wait_s)
        self._affinity: Affinity[K] = Affinity()
        self._chain_of = chain_of
        # Of the current shape, or of the last one: it may be forgotten while it is current.
        self._chain: Sequence[int] = ()
        self._more: set[Hashable] = set()
        # Of all shapes together.
        self.ready_items = 0
        self.ready_tokens = 0
        self.current: K | None = None
        # Changes from one shape to another (a start is none), and those that max_wait forced.
        self.switches_total = 0
        self.forced_switches_total = 0
        # When the first of the items that are ready now came; a hold counts from here.
        self._first_at = 0.0
        # When an empty current shape may be left: fixed when it FIRST ran empty on this visit, or
        # a trickle into it, an item per 200 ms, would starve all others.
        self._leave_at: float | None = None
        # Of this visit: when it began, and what it handed out.
        self._entered_at = 0.0
        self._served_items = 0
        # When each ready shape last got an item: one that gets none any more is not waited for.
        self._arrived_at: dict[K, float] = {}

    def ready(self, key: K) -> tuple[int, int]:
        """(items, tokens) ready of one shape."""
        return self._ready.items.get(key, 0), self._ready.fullest.tokens(key)

    def passed_over_s(self, key: K, now: float) -> float:
        """Seconds since the shape became ready or was last served; 0 if nothing of it is ready."""
        return self._ready.passed_over_s(key, now)

    def added(self, key: K, items: int, tokens: int, now: float) -> None:
        """Items of the shape became dispatchable: newly flushed, or given back.

        Raises InvariantError, changing nothing, without at least one item.
        """
        was_idle = not self._ready.items
        self._ready.added(key, items, tokens, now)
        self.ready_items += items
        self.ready_tokens += tokens
        if self._chain_of is not None:
            self._affinity.add(key, self._chain_of(key))
        self._arrived_at[key] = now
        if was_idle:
            self._first_at = now

    def removed(self, key: K, items: int, tokens: int, now: float, served: bool) -> None:
        """Ready items were dispatched (`served`), or completed or cancelled where they lay.

        Raises InvariantError, changing nothing, if so much was not ready.
        """
        left = self._ready.removed(key, items, tokens, now, served)
        self.ready_items -= items
        self.ready_tokens -= tokens
        if served and key == self.current:
            self._served_items += items
        if not left:
            return
        if self._chain_of is not None:
            self._affinity.discard(key, self._chain_of(key))
        arrived_at = self._arrived_at.pop(key)
        if key == self.current and self._leave_at is None:
            # Waiting is for a shape that items still trickle into. Where each prompt has a shape
            # of its own, lingering on each for 200 ms would serve five prompts a second.
            trickles = now - arrived_at < self._limits.linger_s
            self._leave_at = now + self._limits.linger_s if trickles else now

    def set_more(self, producer: Hashable, more: bool) -> None:
        """The producer's last submit said whether it knows of more to come."""
        if more:
            self._more.add(producer)
        else:
            self._more.discard(producer)

    def drop_producer(self, producer: Hashable) -> None:
        """The producer is gone; nothing more is expected of it."""
        self._more.discard(producer)

    def choose(self, now: float, *, pending_items: int, intake_full: bool) -> Choice[K]:
        """Settle the current shape; ask when a consumer has room, and at `wake_at`.

        A returned key is current and has ready items. No key means that nothing is ready, or that
        waiting is better than what could be served now.
        """
        if not self._ready.items:
            return self._choose_idle(now, pending_items)
        if self.current is None:
            held_until = self._held_until(now, intake_full)
            if held_until is not None:
                return Choice(None, held_until)
            self._settle_on(self._ready.fullest.first(), now)
        overdue = self._ready.overdue(besides=self.current)
        if overdue is not None and now >= overdue[1]:
            self._switch(overdue[0], now)
            self._ready.forced_at = now
            self.forced_switches_total += 1
        elif self.current not in self._ready.items:
            leave_at = self._leave_at
            if leave_at is not None and self._waits(now, leave_at, pending_items):
                return Choice(None, min(leave_at, overdue[1] if overdue else leave_at))
            follows = self._ready.fullest.first()
            if self._chain_of is not None:
                follows = self._affinity.nearest(self._chain)
            self._switch(follows, now)
        return self._stay()

    def _waits(self, now: float, leave_at: float, pending_items: int) -> bool:
        """Whether the empty current shape is waited for, rather than others served meanwhile.

        At the pace of this visit so many items of others would be left undone, but no more than
        there are.
        """
        if now >= leave_at or self.ready_items <= WAIT_COSTS_ITEMS:
            return now < leave_at
        done = self._served_items - pending_items
        return done * (leave_at - now) <= WAIT_COSTS_ITEMS * (now - self._entered_at)

    def _stay(self) -> Choice[K]:
        overdue = self._ready.overdue(besides=self.current)
        return Choice(self.current, overdue[1] if overdue else None)

    def _choose_idle(self, now: float, pending_items: int) -> Choice[K]:
        # While items are pending the job is not over: they may come back, and belong here.
        if self.current is None or pending_items:
            return Choice(None, None)
        if self._leave_at is not None and now < self._leave_at:
            return Choice(None, self._leave_at)
        # The next job is a start again, with its own hold.
        self.current = None
        self._leave_at = None
        return Choice(None, None)

    def _held_until(self, now: float, intake_full: bool) -> float | None:
        """When a start may choose, None if it may now."""
        held_until = self._first_at + self._limits.hold_s
        enough = intake_full or self.ready_items >= self._limits.hold_items
        return held_until if self._more and not enough and now < held_until else None

    def _settle_on(self, key: K | None, now: float) -> None:
        self.current, self._entered_at, self._served_items = key, now, 0
        if self._chain_of is not None and key is not None:
            self._chain = self._chain_of(key)

    def _switch(self, key: K | None, now: float) -> None:
        self._settle_on(key, now)
        self._leave_at = None
        self.switches_total += 1


class LaneDraining:
    """The order of the lanes within one shape, by id. There is no stickiness between lanes."""

    __slots__ = ("_calm_until", "_quiescing", "_ready", "forced_total")

    def __init__(self, limits: DrainLimits | None = None) -> None:
        self._ready: _Ready[int] = _Ready((limits or DrainLimits()).max_wait_s)
        # No lane is overdue before this: the longest passed over only ever changes for a later one.
        self._calm_until = -math.inf
        # Insertion order is the order in which they quiesced. Ready lanes only.
        self._quiescing: dict[int, None] = {}
        self.forced_total = 0

    @property
    def ready_items(self) -> int:
        """Items ready, all lanes together."""
        return sum(self._ready.items.values())

    @property
    def ready_tokens(self) -> int:
        """Tokens ready, all lanes together."""
        return sum(self._ready.fullest.live.values())

    @property
    def ready_lanes(self) -> KeysView[int]:
        """The lanes of which anything is ready."""
        return self._ready.items.keys()

    def ready(self, lane: int) -> tuple[int, int]:
        """(items, tokens) ready of one lane."""
        ready = self._ready
        return ready.items.get(lane, 0), ready.fullest.live.get(lane, 0)

    def passed_over_s(self, lane: int, now: float) -> float:
        """Seconds since the lane became ready or was last served; 0 if nothing of it is ready."""
        return self._ready.passed_over_s(lane, now)

    def added(self, lane: int, items: int, tokens: int, now: float) -> None:
        """Items of the lane became dispatchable.

        Raises InvariantError, changing nothing, without at least one item.
        """
        self._ready.added(lane, items, tokens, now)

    def added_rows(self, rows: Sequence[tuple[int, int, int]], now: float) -> None:
        """Many lanes at once: (lane, items, tokens) of each.

        Raises InvariantError, changing nothing, where a lane has no item.
        """
        self._ready.added_rows(rows, now)

    def removed(self, lane: int, items: int, tokens: int, now: float, served: bool) -> None:
        """Ready items were dispatched (`served`), or completed or cancelled where they lay.

        Raises InvariantError, changing nothing, if so much was not ready.
        """
        forced = served and now >= self._calm_until and self._is_forced(lane, now)
        if self._ready.removed(lane, items, tokens, now, served) and self._quiescing:
            self._quiescing.pop(lane, None)
        if forced:
            self._ready.forced_at = now
            self.forced_total += 1

    def _is_forced(self, lane: int, now: float) -> bool:
        """Whether serving the lane is due to max_wait alone."""
        return lane not in self._quiescing and self._ready.is_overdue(lane, now)

    def quiesce(self, lane: int) -> None:
        """Serve the lane's ready items first; ends with them, so that a reused id starts afresh.

        Whoever gives items back to a lane that is still quiescing calls this again after `added`.
        """
        if lane in self._ready.items:
            self._quiescing[lane] = None

    def choose(self, now: float) -> int | None:
        """The lane to serve next, None if nothing is ready. Pure: a batch not taken costs nothing.

        Quiescing lanes come first, then one that is overdue, then the one with the most tokens.
        """
        if self._quiescing or now >= self._calm_until:
            due = self.due(now)
            if due is not None:
                return due
        return self._ready.fullest.first()

    def due(self, now: float) -> int | None:
        """The lane that goes before any order: the first to quiesce, or one that is overdue."""
        if self._quiescing:
            return next(iter(self._quiescing))
        if now < self._calm_until or (overdue := self._ready.overdue()) is None:
            return None
        lane, at = overdue
        if now >= at:
            return lane
        self._calm_until = at
        return None
