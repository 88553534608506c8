"""The store: where accepted items wait, and the only owner of cursors and tombstones.

Items rest in segments, each of one (model, signature, lane). A reference is one integer,
`slot << 32 | entry`: the slot names a segment of this process, the entry an item in it; on the wire
the slot is replaced by the segment's random nonce, which means the same after a restart.

What is taken in waits as rows until `publish` has it stored, each queue's in one write; nobody sees
it before. A queue reads in this order: items given back (in reference order), then what is stored
from its cursor on. Reading is a peek: `peek` changes nothing, `commit` verifies that all it is
about to move is where the peek saw it, and only then moves it.

Where the bytes of a segment rest is its backing's affair (`segments`). Lengths are tokens, payload
sizes bytes, times seconds on the caller's monotonic clock. The store must never decide which lane
or batch an item belongs in.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from sortedcontainers import SortedList

from zfabric.entries import Fresh
from zfabric.errors import InvariantError, NoSpace
from zfabric.queues import Columns, Known, LaneQueue, SegmentRun, Take, refs_of
from zfabric.segments import (
    ENTRY_BITS,
    ENTRY_MASK,
    LIVE,
    TOMBSTONE,
    Append,
    Backing,
    MemoryBacking,
    Segment,
    live_runs,
    runs_of,
)
from zfabric.shapes import Shape


class Store:
    """Queues, cursors and tombstones over segments that rest wherever the backing says."""

    def __init__(
        self,
        backing: Backing | None = None,
        random_u64: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self._random_u64 = random_u64
        self.backing = backing or MemoryBacking(random_u64())
        self._slots: dict[int, Segment] = {}
        self._slot_of_nonce: dict[int, int] = {}
        self._next_slot = 0
        # what was taken in and is not stored yet
        self._fresh: defaultdict[LaneQueue, list[Fresh]] = defaultdict(list)
        # the latest `publish` found no room, or ended before all was written
        self.no_space = self.cut_short = False
        # payload bytes taken in since then
        self.unwritten_bytes = 0
        self.attempts: dict[int, int] = {}
        # live items, and how many are ready: counted here alone, for the ledger to compare
        self.items = 0
        self.ready_items = 0
        self.ready_tokens = 0
        self.payload_bytes = 0

    @property
    def durability(self) -> str:
        """What survives: memory, os or fsync."""
        return self.backing.durability

    @property
    def store_id(self) -> int:
        """A random number that a new store draws: another one means that everything is gone."""
        return self.backing.store_id

    @property
    def memory_bytes(self) -> int:
        """Payload bytes of live items that rest in memory."""
        return self.payload_bytes + self.unwritten_bytes if self.durability == "memory" else 0

    # -- adding -------------------------------------------------------------------------------

    def open_queue(
        self, shape: Shape, signature: int, group: int, lane: int, *, mixed: bool = False
    ) -> LaneQueue:
        """A queue for a lane that has none; `mixed` where it is to hold several shapes."""
        return LaneQueue(shape, signature, group, lane, mixed=mixed)

    def adopt(
        self,
        queue: LaneQueue,
        make: Callable[[int], Segment],
        payload_bytes: int,
        attempts: Mapping[int, int],
    ) -> int:
        """Take over a segment that outlived its process: `make` is given its slot.

        Its cursor is at its start, and everything of it that is live is ready. Returns its slot.
        """
        segment = make(self._next_slot)
        self._next_slot += 1
        self._slots[segment.slot] = segment
        self._slot_of_nonce[segment.nonce] = segment.slot
        queue.segments.append(segment)
        segment.done_ahead = segment.deleted = segment.states.count(TOMBSTONE)
        live = [
            n for n, state in zip(segment.lengths, segment.states, strict=True) if state == LIVE
        ]
        self.items += len(live)
        self.payload_bytes += payload_bytes
        self._readied(queue, len(live), sum(live))
        if queue.longest_known is not None:
            queue.longest_known = max(queue.longest_known, max(live, default=0))
        if attempts:
            self._set_apart(segment, attempts)
        return segment.slot

    def _set_apart(self, segment: Segment, attempts: Mapping[int, int]) -> None:
        """All of a segment counts as given back: what has been charged goes out one to a batch."""
        queue, base = segment.queue, segment.slot << ENTRY_BITS
        if queue.returned is None:
            queue.returned = SortedList()
        queue.returned.update(base + k for k, state in enumerate(segment.states) if state == LIVE)
        segment.cursor, segment.done_ahead = len(segment.states), 0
        queue.solo = queue.solo or set()
        for place, charged in attempts.items():
            self.attempts[base + place] = charged
            queue.solo.add(base + place)

    def append(self, parts: Iterable[tuple[LaneQueue, int]], items: Append, now: float) -> None:
        """Take in `items`; `publish` stores them and makes them visible.

        `parts` say in order how many of them are for which queue.
        """
        fresh, rows = self._fresh, list(items.rows(self.backing.stamp_us(now)))
        start = 0
        for queue, count in parts:
            fresh[queue] += rows[start : start + count]
            start += count
        if start != len(rows):
            raise InvariantError(f"{len(rows)} items are taken in, and {start} have a queue")
        self.items += len(rows)
        self.unwritten_bytes += sum(map(len, items.payloads))

    def _new_segment(self, queue: LaneQueue) -> Segment:
        slot = self._next_slot
        self._next_slot += 1
        while (nonce := self._random_u64()) in self._slot_of_nonce:
            continue
        segment = self.backing.make(slot, nonce, queue)
        self._slots[slot] = segment
        self._slot_of_nonce[nonce] = slot
        return segment

    def publish(self, writes_max: int | None = None) -> list[tuple[LaneQueue, int, int]]:
        """Store what was taken in, a queue's items in one write, and make it visible.

        With `writes_max` it ends after about so many writes; `unwritten` says that there is more.
        Returns (queue, items, tokens) that became ready.
        """
        published, stored, writes = [], [], 0
        self.unwritten_bytes, self.no_space = 0, False
        for queue, rows in self._fresh.items():
            try:
                while rows:
                    items, tokens, calls = self._store(queue, rows)
                    published.append((queue, items, tokens))
                    writes += calls
            except NoSpace:
                # What is left of this queue is neither visible nor promised; it is tried again.
                self.no_space = True
                self._give_way()
                break
            stored.append(queue)
            if writes_max is not None and writes >= writes_max:
                break
        for queue in stored:
            del self._fresh[queue]
        self.cut_short = self.arriving
        return published

    def _store(self, queue: LaneQueue, rows: list[Fresh]) -> tuple[int, int, int]:
        """Store the first of `rows`, as many as one segment takes, and drop them from the list.

        Returns (items, tokens, system calls). Raises NoSpace, having stored nothing.
        """
        segments, limit = queue.segments, self.backing.segment_items_max
        if not segments or not self._has_room(segments[-1]):
            segments.append(self._new_segment(queue))
        segment = segments[-1]
        part = rows[: limit - len(segment.states)]
        lengths = [row[0] for row in part]
        size, calls = segment.extend(lengths, part)
        del rows[: len(part)]
        tokens = sum(lengths)
        self.payload_bytes += size
        self._readied(queue, len(part), tokens)
        if queue.longest_known is not None:
            queue.longest_known = max(queue.longest_known, max(lengths))
        return len(part), tokens, calls

    @property
    def unwritten(self) -> bool:
        """Whether items are taken in that are not stored yet, for want of time or space."""
        return bool(self._fresh)

    @property
    def arriving(self) -> bool:
        """Whether items that are taken in will be stored without anybody's help."""
        return bool(self._fresh) and not self.no_space

    # -- reading ------------------------------------------------------------------------------

    def peek(self, queue: LaneQueue, items_max: int) -> Take:
        """Up to `items_max` ready items of `queue`, in reading order. Changes nothing."""
        returned: list[int] = []
        if queue.returned:
            solo = queue.solo or ()
            for ref in queue.returned.islice(0, items_max):
                if ref in solo:
                    returned = returned or [ref]
                    alone = returned[0] in solo
                    return Take(queue, returned, [], list(map(self._length, returned)), solo=alone)
                returned.append(ref)
        runs: list[SegmentRun] = []
        lengths = list(map(self._length, returned))
        for segment in queue.segments:
            for first, stop in live_runs(segment, items_max - len(lengths)):
                runs.append((segment, first, stop))
                lengths += segment.lengths[first:stop]
        return Take(queue, returned, runs, lengths)

    def _length(self, ref: int) -> int:
        return self._slots[ref >> ENTRY_BITS].lengths[ref & ENTRY_MASK]

    def longest(self, queue: LaneQueue) -> int:
        """The longest ready item of `queue`, in tokens (0 when it is empty)."""
        if queue.longest_known is None:
            queue.longest_known = max(map(self._length, self.peek_all(queue)), default=0)
        return queue.longest_known

    def peek_all(self, queue: LaneQueue) -> list[int]:
        """References of every ready item of `queue`, in reading order."""
        refs = list(queue.returned or ())
        for segment in queue.segments:
            refs += refs_of((segment, *run) for run in live_runs(segment, len(segment.states)))
        return refs

    def oldest_s(self, queue: LaneQueue) -> float | None:
        """When the oldest ready item of `queue` was enqueued, or None when that is not known."""
        times = []
        if queue.returned:
            ref = queue.returned[0]
            times.append(self._slots[ref >> ENTRY_BITS].enqueued_s(ref & ENTRY_MASK))
        for segment in queue.segments:
            # Behind a restart or a cancelling the cursor may stand on what is over.
            first = segment.states.find(LIVE, segment.cursor)
            if first >= 0:
                times.append(segment.enqueued_s(first))
                break
        return min((when for when in times if when is not None), default=None)

    def waiting_of(self, refs: Sequence[int], producer: int) -> list[int]:
        """Those of `refs` that are ready still and that `producer` submitted."""
        found = []
        for ref in refs:
            segment, entry = self._slots.get(ref >> ENTRY_BITS), ref & ENTRY_MASK
            if segment is None or segment.states[entry] != LIVE or not self.is_waiting(ref):
                continue
            if segment.read(entry).producer == producer:
                found.append(ref)
        return found

    def columns(self, runs: Iterable[SegmentRun]) -> Columns:
        """What a batch of `runs` needs. Raises InvariantError where one is tombstoned."""
        out = Columns()
        for segment, first, stop in runs:
            if segment.states.count(LIVE, first, stop) != stop - first:
                raise InvariantError(f"items {first} to {stop} are to be read but one is not live")
            run = segment.run(first, stop)
            out.nonces += [segment.nonce] * (stop - first)
            out.entries += range(first, stop)
            out.owners += run.owners
            out.numbers += run.numbers
            (out.shapes if segment.queue.mixed else out.targets).extend(run.targets)
            out.tags += run.tags
            out.payloads += run.payloads
        return out

    def runs(self, refs: Sequence[int]) -> list[SegmentRun]:
        """`refs`, in their order, as runs. Raises InvariantError where a segment is gone."""
        found = []
        for first, count in runs_of(refs):
            segment = self._slots.get(first >> ENTRY_BITS)
            if segment is None:
                raise InvariantError(f"segment of item {first:#x} is gone")
            entry = first & ENTRY_MASK
            found.append((segment, entry, entry + count))
        return found

    # -- moving -------------------------------------------------------------------------------

    def verify(self, take: Take) -> list[tuple[Segment, int]]:
        """Check that everything in `take` is where the peek saw it; return the new cursors.

        Raises InvariantError and changes nothing where it is not.
        """
        queue = take.queue
        for k, ref in enumerate(take.returned):
            if queue.returned is None or ref != queue.returned[k]:
                raise InvariantError(f"returned item {ref:#x} moved under a batch")
        cursors: dict[int, tuple[Segment, int]] = {}
        for segment, first, stop in take.runs:
            _, cursor = cursors.get(segment.slot, (segment, segment.cursor))
            if segment.queue is not queue or not cursor <= first <= stop <= len(segment.states):
                raise InvariantError(f"items {first} to {stop} are not behind the cursor")
            if segment.states.count(LIVE, first, stop) != stop - first:
                raise InvariantError(f"one of items {first} to {stop} is already tombstoned")
            cursors[segment.slot] = segment, stop
        return list(cursors.values())

    def commit(self, take: Take, cursors: Sequence[tuple[Segment, int]] | None = None) -> None:
        """Advance past `take`: `cursors` are of `verify`, just now. Raises InvariantError."""
        if cursors is None:
            cursors = self.verify(take)
        queue = take.queue
        if take.returned and queue.returned is not None:
            del queue.returned[: len(take.returned)]
            if queue.solo:
                queue.solo.difference_update(take.returned)
        for segment, cursor in cursors:
            if segment.done_ahead:
                skipped = segment.states[segment.cursor : cursor].count(TOMBSTONE)
                segment.done_ahead -= skipped
            segment.cursor = cursor
        while len(queue.segments) > 1 and self._is_read(queue.segments[0]):
            del queue.segments[0]
        self._unready(queue, len(take), take.lengths)

    @staticmethod
    def _is_read(segment: Segment) -> bool:
        return segment.cursor >= len(segment.states)

    def _readied(self, queue: LaneQueue, items: int, tokens: int) -> None:
        queue.ready_items += items
        queue.ready_tokens += tokens
        self.ready_items += items
        self.ready_tokens += tokens

    def _unready(self, queue: LaneQueue, items: int, lengths: Sequence[int]) -> None:
        tokens = sum(lengths)
        queue.ready_items -= items
        queue.ready_tokens -= tokens
        self.ready_items -= items
        self.ready_tokens -= tokens
        if not queue.ready_items:
            queue.longest_known = 0
        elif queue.longest_known is not None and max(lengths, default=0) >= queue.longest_known:
            queue.longest_known = None

    def release(self, ref: int, *, solo: bool = False) -> LaneQueue:
        """Give a dispatched item back, ahead of its queue's cursor and in its order.

        A `solo` item is handed out in a batch of its own from now on. Returns its queue.
        """
        segment = self._slots[ref >> ENTRY_BITS]
        queue = segment.queue
        length = segment.lengths[ref & ENTRY_MASK]
        if queue.returned is None:
            queue.returned = SortedList()
        queue.returned.add(ref)
        if solo:
            if queue.solo is None:
                queue.solo = set()
            queue.solo.add(ref)
        self._readied(queue, 1, length)
        if queue.longest_known is not None:
            queue.longest_known = max(queue.longest_known, length)
        return queue

    def charge(self, ref: int, by: int = 1) -> int:
        """Count (or with `by` -1 take back) an attempt of a live item; returns how many it has."""
        attempts = self.attempts[ref] = max(0, self.attempts.get(ref, 0) + by)
        if not attempts:
            del self.attempts[ref]
        segment = self._slots.get(ref >> ENTRY_BITS)
        if segment is not None and segment.states[ref & ENTRY_MASK] == LIVE:
            segment.set_attempts(ref & ENTRY_MASK, attempts)
        return attempts

    # -- ending -------------------------------------------------------------------------------

    def locate(self, nonces: Sequence[int], entries: Sequence[int]) -> list[int | None]:
        """References of wire refs (nonce, entry): None where unknown or already tombstoned."""
        found: list[int | None] = []
        slot_of, slots = self._slot_of_nonce, self._slots
        for nonce, entry in zip(nonces, entries, strict=True):
            slot = slot_of.get(nonce)
            segment = slots.get(slot) if slot is not None else None
            if segment is None or entry >= len(segment.states) or segment.states[entry] != LIVE:
                found.append(None)
            else:
                found.append(segment.slot << ENTRY_BITS | entry)
        return found

    def describe(self, ref: int) -> Known:
        """What is known of a live item."""
        segment = self._slots[ref >> ENTRY_BITS]
        entry = ref & ENTRY_MASK
        row = segment.read(entry)
        return Known(segment.queue, row.producer, row.number, segment.lengths[entry], row.payload)

    def is_waiting(self, ref: int) -> bool:
        """Whether a live item is ready: given back, or not yet read by the cursor."""
        segment = self._slots[ref >> ENTRY_BITS]
        returned = segment.queue.returned
        return (ref & ENTRY_MASK) >= segment.cursor or (returned is not None and ref in returned)

    def complete(self, ref: int, *, dead: bool = False) -> None:
        """Write the tombstone of a live item, then count it. Its result must be stored already.

        Raises InvariantError where the item is tombstoned.
        """
        segment = self._slots.get(ref >> ENTRY_BITS)
        entry = ref & ENTRY_MASK
        if segment is None or segment.states[entry] != LIVE:
            raise InvariantError(f"item {ref:#x} would be completed twice")
        queue = segment.queue
        if entry >= segment.cursor:
            segment.done_ahead += 1
            self._unready(queue, 1, (segment.lengths[entry],))
        elif queue.returned is not None and ref in queue.returned:
            queue.returned.remove(ref)
            if queue.solo:
                queue.solo.discard(ref)
            self._unready(queue, 1, (segment.lengths[entry],))
        self._end(segment, entry, entry + 1, dead=dead)

    def complete_dispatched(self, refs: Sequence[int]) -> list[tuple[LaneQueue, int]]:
        """As `complete`, of items that are out with a worker: each ref once, none of them ready.

        Returns (queue, items) that have ended. Raises InvariantError, changing nothing, where one
        is tombstoned or was never dispatched.
        """
        runs = self.runs(refs)
        for segment, first, stop in runs:
            live = segment.states.count(LIVE, first, stop)
            if live != stop - first or stop > segment.cursor:
                raise InvariantError(f"of items {first} to {stop}, {live} are live: ended twice?")
        for segment, first, stop in runs:
            self._end(segment, first, stop, dead=False)
        return [(segment.queue, stop - first) for segment, first, stop in runs]

    def _end(self, segment: Segment, first: int, stop: int, *, dead: bool) -> None:
        count = stop - first
        segment.states[first:stop] = bytes((TOMBSTONE,)) * count
        self.payload_bytes -= segment.tombstone(first, stop, dead=dead)
        if self.attempts:
            base = segment.slot << ENTRY_BITS
            for entry in range(first, stop):
                self.attempts.pop(base + entry, None)
        segment.deleted += count
        self.items -= count
        if segment.deleted == len(segment.states) and not self._grows(segment):
            self._drop(segment)

    def _grows(self, segment: Segment) -> bool:
        """Whether what was taken in is about to be stored in the segment."""
        queue = segment.queue
        is_last = queue.segments[-1:] == [segment]
        has_room = self._has_room(segment)
        return queue in self._fresh and is_last and has_room and not self.no_space

    def _has_room(self, segment: Segment) -> bool:
        return len(segment.states) < self.backing.segment_items_max and not segment.is_large

    def _give_way(self) -> None:
        """There is no room: a file of which all is over is not kept for what waits."""
        for queue in self._fresh:
            last = queue.segments[-1] if queue.segments else None
            if last is not None and last.states and last.deleted == len(last.states):
                self._drop(last)

    def _drop(self, segment: Segment) -> None:
        del self._slots[segment.slot]
        del self._slot_of_nonce[segment.nonce]
        if segment in segment.queue.segments:
            segment.queue.segments.remove(segment)
        segment.drop()
