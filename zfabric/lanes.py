"""Lanes: decides which rolling length class of one shape an item joins, and when a lane retires.

Lengths, targets and gaps are whole tokens; times are monotonic seconds that the caller gives; a
waste fraction is padding over padded length. A target orders the search and only grows while its
lane lives; it never pads, because pad-to comes from the items of a batch. This module must never
read a clock, move a queued item, merge two lanes or look at another shape.

The life of a lane id:

    free -> open (in the search list, takes items) -> quiescing (takes none) -> free
                `-> free, at once, when nothing of it is outstanding
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from math import inf, isqrt
from typing import NamedTuple

from zfabric.errors import ConfigError, InvariantError
from zfabric.shapes import TOKENS_MAX

# Lanes of one shape. 128 of them end near 50% waste on real traces; with 2,048 it stays under 1%.
LANES_MAX = 2_048
# Ids travel and rest as unsigned 16-bit integers.
LANE_IDS_MAX = 65_536
# Waste fraction that an empty shape tolerates: under it, one more lane saves less than it costs.
THRESHOLD_BASE = 0.01
# Waste fraction added at full pressure: the last lanes open only where they save the most.
THRESHOLD_SPAN = 0.09
# Tokens: a gap under two pad multiples is mostly rounding, whatever fraction it is.
OPEN_FLOOR_TOKENS = 16
# Tokens: a gap over this opens a lane even where it is a small fraction of a long prompt.
OPEN_ALWAYS_TOKENS = 128
# Items: a lane with fewer outstanding cannot fill a batch worth waiting for.
QUIESCE_ITEMS = 4
# Seconds without a new item after which a lane counts as idle.
QUIESCE_AFTER_S = 5.0

# Lanes for each item of a message up to which a list to search is worth making: a search of a list
# saves some 100 ns over one of an array, and the copy takes some 20 ns a lane.
LIST_PAYS_LANES = 4

# Why an item may be padded, fixed when it is assigned; the waste ledger adds up by these.
TAG_THRESHOLD = 0  # within the moving threshold, or it opened its lane
TAG_FLOOR = 1  # over the threshold, but by fewer than OPEN_FLOOR_TOKENS
TAG_FORCED = 2  # the rules wanted a new lane; the lane budget was reached

# The threshold in whole percents: comparisons are exact, and products stay in one machine word.
_BASE_PERCENT = round(THRESHOLD_BASE * 100)
_SPAN_PERCENT = round(THRESHOLD_SPAN * 100)


class Assigned(NamedTuple):
    """Columns, one entry per item of the message, in its order."""

    lane_ids: list[int]
    # Tokens: the target of that lane just after this item was assigned.
    targets: list[int]
    # TAG_THRESHOLD, TAG_FLOOR or TAG_FORCED.
    tags: bytearray


class Runs(NamedTuple):
    """Columns, one entry per run: items in a row that join one lane with one tag."""

    lane_ids: Sequence[int]
    counts: Sequence[int]
    # As in `Assigned`, of each item of the run.
    targets: Sequence[int]
    tags: Sequence[int]

    def each(self, column: Sequence[int]) -> Iterator[int]:
        """One of the columns, an entry an item."""
        return chain.from_iterable(map(repeat, column, self.counts))


class LaneRow(NamedTuple):
    """One lane in use, as a dashboard shows it."""

    id: int
    target: int
    outstanding: int
    quiescing: bool


class Lanes:
    """The rolling lanes of one shape: at most `lanes_limit` ids in use, quiescing ones included."""

    __slots__ = (
        "_ids",
        "_outstanding",
        "_quiescing",
        "_targets",
        "_touched",
        "_used",
        "crowded_total",
        "forced_total",
        "lanes_limit",
        "opened_total",
        "reused_total",
    )

    def __init__(self, lanes_limit: int = LANES_MAX) -> None:
        if not 1 <= lanes_limit <= LANE_IDS_MAX:
            raise ConfigError(f"lanes_limit must be 1 to {LANE_IDS_MAX}, not {lanes_limit}")
        self.lanes_limit = lanes_limit
        # Every item counts in exactly one of these.
        self.opened_total = 0
        self.reused_total = 0
        self.forced_total = 0
        # Of every item, the lanes in use once its message was placed: over the items and the limit
        # it is the mean pressure that they met.
        self.crowded_total = 0
        # The search list: targets ascending, ids beside them. Open lanes only.
        self._targets = array("I")
        self._ids = array("H")
        # Columns by lane id, as long as the highest id in use needs. Touched is when an open lane
        # last got an item, and infinity of any other id.
        self._outstanding: list[int] = []
        self._touched = array("d")
        # Bit n is lane id n in use. The lowest clear bit is the lowest free id and its length is
        # what the columns need, so that the free list costs 256 bytes and no bookkeeping.
        self._used = 0
        # Of lanes that have left the search list: the target that each had then, by id.
        self._quiescing: dict[int, int] = {}

    @property
    def lanes_active(self) -> int:
        """Lane ids that are not free."""
        return self._used.bit_count()

    @property
    def pressure(self) -> float:
        """Lanes in use over the lane budget, 0 to 1."""
        return min(1.0, self.lanes_active / self.lanes_limit)

    @property
    def threshold(self) -> float:
        """The waste fraction above which a new lane opens, now."""
        return THRESHOLD_BASE + THRESHOLD_SPAN * self.pressure

    def assign(self, lengths: Sequence[int], now: float) -> Assigned:
        """Place the items of one message, in order; each counts as outstanding in its lane.

        The first target >= length is compared with its lower neighbour on waste fraction; since
        taking an item raises the lower lane to the item's length, a fraction is always gap over
        target after, and the lower one is less exactly where length < sqrt(target x lower target).
        A tie goes to the upper lane, which need not grow.

        Raises InvariantError, changing nothing, if a length is not 0 to TOKENS_MAX.
        """
        runs = self.assign_runs(lengths, now)
        lane_ids, targets, tags = map(runs.each, (runs.lane_ids, runs.targets, runs.tags))
        return Assigned(list(lane_ids), list(targets), bytearray(tags))

    def assign_runs(self, lengths: Sequence[int], now: float) -> Runs:
        """As `assign`, but what joins a lane in one step is one entry of the columns.

        In a message sorted from the longest down, all items down to where the answer would change
        join in one step; in any other, each item is a run of its own.
        """
        backwards = list(reversed(lengths))
        # To sort what is sorted takes one look at each.
        rising = sorted(backwards)
        if rising and not 0 <= rising[0] <= rising[-1] <= TOKENS_MAX:
            raise InvariantError(f"a length of {rising[0]} to {rising[-1]} reached the lanes")
        lanes = len(self._ids)
        if lengths and not lanes:
            self._open(0, lengths[0], self._targets)
        # A list is searched faster than an array, but has to be made and written back.
        copied = len(lengths) * LIST_PAYS_LANES >= lanes
        targets = self._targets.tolist() if copied else self._targets
        if rising and rising == backwards:
            runs = self._place_runs(rising, targets, now)
        else:
            runs = self._place_each(lengths, targets, now)
        if copied:
            self._targets = array("I", targets)
        self._count(runs, len(lengths), opened=len(self._ids) - lanes)
        return runs

    def _place_each(
        self, lengths: Sequence[int], targets: array[int] | list[int], now: float
    ) -> Runs:
        """The rule of `assign`, item by item; changes the targets."""
        ids, lanes, find = self._ids, len(self._ids), bisect_left
        outstanding, touched = self._outstanding, self._touched
        room, allowance, scale = self._threshold()
        lane_ids: list[int] = []
        targets_after: list[int] = []
        tags = bytearray(len(lengths))
        for length in lengths:
            position = find(targets, length)
            if position < lanes:
                target = targets[position]
                gap = target - length
                if position and length * length < target * targets[position - 1]:
                    position -= 1
                    gap = length - targets[position]
                    targets[position] = target = length
            else:
                position -= 1
                gap = length - targets[position]
                targets[position] = target = length
            if gap > OPEN_ALWAYS_TOKENS or gap * scale > target * allowance:
                raised = target == length
                if gap < OPEN_FLOOR_TOKENS:
                    tags[len(lane_ids)] = TAG_FLOOR
                elif room:
                    if raised:
                        targets[position] = length - gap
                    position, target = position + raised, length
                    self._open(position, length, targets)
                    room, lanes, allowance = room - 1, lanes + 1, allowance + _SPAN_PERCENT
                else:
                    tags[len(lane_ids)] = TAG_FORCED
            lane = ids[position]
            outstanding[lane] += 1
            touched[lane] = now
            lane_ids.append(lane)
            targets_after.append(target)
        return Runs(lane_ids, [1] * len(lengths), targets_after, tags)

    def _place_runs(self, rising: list[int], targets: array[int] | list[int], now: float) -> Runs:
        """The rule of `assign` for these from the longest down; changes the targets.

        It goes down the lanes with them. What a run leaves is either still over the lane below, and
        then `nearer` tells which of the two it joins, or is searched for from here down.
        """
        ids, find, outstanding, touched = self._ids, bisect_left, self._outstanding, self._touched
        room, allowance, scale = self._threshold()
        lane_ids: list[int] = []
        counts: list[int] = []
        targets_after: list[int] = []
        tags = bytearray()
        # Before the first: as if in a lane over all others, of which nothing is near.
        position, target, below, nearer = len(ids), 0, targets[-1], TOKENS_MAX + 1
        left = len(rising)
        while left:
            length, tag = rising[left - 1], TAG_THRESHOLD
            if length > below:
                raised = length < nearer
            else:
                position = find(targets, length, 0, position)
                target = targets[position]
                below = targets[position - 1] if position else -1
                raised = length * length < target * below
            if raised:
                position -= 1
                target, gap = length, length - below
                below = targets[position - 1] if position else -1
            else:
                gap = target - length
            widest = target * allowance // scale
            if widest > OPEN_ALWAYS_TOKENS:
                widest = OPEN_ALWAYS_TOKENS
            if gap > widest:
                if gap < OPEN_FLOOR_TOKENS:
                    tag, widest = TAG_FLOOR, OPEN_FLOOR_TOKENS - 1
                elif room:
                    position, target, raised = position + raised, length, False
                    self._open(position, length, targets)
                    room, allowance = room - 1, allowance + _SPAN_PERCENT
                    widest = min(OPEN_ALWAYS_TOKENS, length * allowance // scale)
                    below = targets[position - 1] if position else -1
                else:
                    tag, widest = TAG_FORCED, target
            targets[position] = target
            # From the square root of target x below upwards, rounded up, this lane wastes less.
            nearer = isqrt(target * below - 1) + 1 if below > 0 else below + 1
            lowest = nearer if nearer > target - widest else target - widest
            # What follows is nearer to a target that this item has raised than it was to the old.
            stop = left - 1 if tag and raised else find(rising, lowest, 0, left)
            lane, count = ids[position], left - stop
            outstanding[lane] += count
            touched[lane] = now
            lane_ids.append(lane)
            counts.append(count)
            targets_after.append(target)
            tags.append(tag)
            left = stop
        return Runs(lane_ids, counts, targets_after, tags)

    def _threshold(self) -> tuple[int, int, int]:
        """(lanes that may still open, allowance, scale): a gap may be target * allowance / scale.

        Each lane that opens adds _SPAN_PERCENT to the allowance.
        """
        limit = self.lanes_limit
        room = max(0, limit - self.lanes_active)
        return room, _BASE_PERCENT * limit + _SPAN_PERCENT * (limit - room), 100 * limit

    def _open(self, position: int, target: int, targets: array[int] | list[int]) -> None:
        """The lowest free id begins at that place of the search list."""
        self._ids.insert(position, self._claim())
        targets.insert(position, target)

    def _count(self, runs: Runs, items: int, opened: int) -> None:
        """Count what was assigned: each item once."""
        forced = 0
        if TAG_FORCED in runs.tags:
            forced = sum(compress(runs.counts, map(TAG_FORCED.__eq__, runs.tags)))
        self.opened_total += opened
        self.forced_total += forced
        self.crowded_total += items * min(self.lanes_active, self.lanes_limit)
        self.reused_total += items - opened - forced

    def removed(self, lane_id: int, count: int) -> bool:
        """`count` items of the lane are gone for good; True if its id became free now.

        Raises InvariantError, changing nothing, if so many were not outstanding.
        """
        try:
            left = self._outstanding[lane_id] - count
        except IndexError:
            left = -1
        # What is free has none outstanding, and not even none can be taken from it.
        if left < 0 or count < 0 or not (count or self._used >> lane_id & 1):
            raise InvariantError(f"lane {lane_id} does not have {count} items outstanding")
        self._outstanding[lane_id] = left
        if left or lane_id not in self._quiescing:
            return False
        self._free((lane_id,))
        return True

    def maintain(self, now: float) -> list[int]:
        """Retire idle lanes; return the ids that are newly quiescing and still hold items."""
        outstanding, touched = self._outstanding, self._touched
        if not touched or now - min(touched) < QUIESCE_AFTER_S:
            return []
        idle = [
            lane
            for lane in self._ids
            if now - touched[lane] >= QUIESCE_AFTER_S and outstanding[lane] < QUIESCE_ITEMS
        ]
        if not idle:
            return []
        empty = sum(not outstanding[lane] for lane in idle)
        if len(idle) == len(self._ids) and self.lanes_active - empty >= self.lanes_limit:
            # With no id free, an item must still find a lane to be forced into: keep the longest.
            idle.pop()
        gone = set(idle)
        targets = dict(zip(self._ids, self._targets, strict=True))
        self._ids = array("H", [lane for lane in self._ids if lane not in gone])
        self._targets = array("I", [targets[lane] for lane in self._ids])
        for lane in idle:
            touched[lane] = inf
        quiescing = {lane: targets[lane] for lane in idle if outstanding[lane]}
        self._quiescing |= quiescing
        self._free(gone.difference(quiescing))
        return list(quiescing)

    def restore(self, lane_id: int, target: int, outstanding: int, now: float) -> None:
        """Reopen a lane that the store still holds items of, as it was before a restart.

        A limit that was lowered meanwhile is honoured by opening nothing until lanes retire.
        Raises InvariantError, changing nothing, if the id is taken or a number out of range.
        """
        if not 0 <= lane_id < LANE_IDS_MAX or self._used >> lane_id & 1:
            raise InvariantError(f"lane {lane_id} cannot be restored: taken or out of range")
        if not 0 <= target <= TOKENS_MAX or outstanding < 1:
            raise InvariantError(f"lane {lane_id} cannot hold {outstanding} items up to {target}")
        position = bisect_left(self._targets, target)
        self._claim(lane_id)
        self._targets.insert(position, target)
        self._ids.insert(position, lane_id)
        self._outstanding[lane_id] = outstanding
        self._touched[lane_id] = now

    @property
    def any_quiescing(self) -> bool:
        """Whether a lane waits for its last items."""
        return bool(self._quiescing)

    def is_quiescing(self, lane_id: int) -> bool:
        """Whether the lane left the search list and waits for its last items."""
        return lane_id in self._quiescing

    def descending(self) -> Iterator[int]:
        """Ids by descending target, quiescing lanes first; assign nothing while iterating."""
        quiescing = self._quiescing
        yield from sorted(quiescing, key=lambda lane: (-quiescing[lane], lane))
        yield from reversed(self._ids)

    def below(
        self, target: int | None = None, among: Collection[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """(id, target) of the open lanes below `target` and `among` these, descending.

        None is all of them. Assign nothing while iterating.
        """
        ids, targets = self._ids, self._targets
        stop = len(ids) if target is None else bisect_left(targets, target)
        for position in range(stop - 1, -1, -1):
            lane = ids[position]
            if among is None or lane in among:
                yield lane, targets[position]

    def target(self, lane_id: int) -> int:
        """The target of a lane in use, in tokens. Raises InvariantError if it is free."""
        if lane_id in self._quiescing:
            return self._quiescing[lane_id]
        if not self._used >> lane_id & 1:
            raise InvariantError(f"lane {lane_id} is free and has no target")
        return self._targets[self._ids.index(lane_id)]

    def rows(self) -> list[LaneRow]:
        """Every lane in use, by id."""
        targets = dict(zip(self._ids, self._targets, strict=True)) | self._quiescing
        return [
            LaneRow(lane, targets[lane], self._outstanding[lane], self.is_quiescing(lane))
            for lane in sorted(targets)
        ]

    def _claim(self, lane_id: int | None = None) -> int:
        """Take a free id, the lowest if none is named; its columns start at zero."""
        if lane_id is None:
            lane_id = (~self._used & (self._used + 1)).bit_length() - 1
        missing = lane_id + 1 - len(self._outstanding)
        if missing > 0:
            self._outstanding.extend(repeat(0, missing))
            self._touched.extend(repeat(inf, missing))
        self._outstanding[lane_id] = 0
        self._used |= 1 << lane_id
        return lane_id

    def _free(self, lane_ids: Iterable[int]) -> None:
        for lane_id in lane_ids:
            self._used &= ~(1 << lane_id)
            self._quiescing.pop(lane_id, None)
        size = self._used.bit_length()
        del self._outstanding[size:], self._touched[size:]
