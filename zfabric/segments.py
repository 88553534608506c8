"""Segments: what a store asks of them, and the kind that rests in memory.

A segment holds items of one (model, signature, lane), one entry an item, in arrival order. The
store moves its cursor; the segment knows where the bytes are. Lengths are tokens,
times seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from zfabric.entries import Fresh, Run
from zfabric.errors import InvariantError
from zfabric.outbox import Stored

if TYPE_CHECKING:
    from zfabric.queues import LaneQueue

# A full segment is dropped whole; this many entries keep one live item from pinning much.
MEMORY_SEGMENT_ITEMS_MAX = 16_384
LIVE, TOMBSTONE = 0, 1
# A reference is `slot << ENTRY_BITS | entry`.
ENTRY_BITS = 32
ENTRY_MASK = (1 << ENTRY_BITS) - 1


def runs_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """`places`, in their order, as runs of neighbours: (first, how many)."""
    count = len(places)
    if (
        count
        and places[-1] - places[0] == count - 1
        and places == list(range(places[0], places[-1] + 1))
    ):
        return [(places[0], count)]
    found, start = [], 0
    for stop in range(1, count + 1):
        if stop == count or places[stop] != places[stop - 1] + 1:
            found.append((places[start], stop - start))
            start = stop
    return found


@dataclass(slots=True)
class Append:
    """Items of one producer and one shape, as columns of equal length.

    `targets` is each item's lane target just after it was assigned, or the caller's shape number
    where a queue mixes shapes; `tags` is how it was assigned.
    """

    lengths: Sequence[int]
    targets: Sequence[int]
    tags: bytes | bytearray
    producer: int
    numbers: Sequence[int]
    payloads: Sequence[bytes]
    # number - the number that went before it, by which a restart knows what is missing
    gaps: Sequence[int] = ()

    def rows(self, when_us: int) -> Iterable[Fresh]:
        """An entry of each."""
        count = len(self.lengths)
        return zip(
            self.lengths,
            repeat(self.producer, count),
            self.numbers,
            self.gaps or repeat(1, count),
            repeat(when_us, count),
            self.targets,
            self.tags,
            self.payloads,
            strict=True,
        )


class Row(NamedTuple):
    """One item as its segment holds it. `target` is a shape number where a queue mixes shapes."""

    producer: int
    number: int
    target: int
    tag: int
    enqueued_s: float
    payload: bytes


class Segment(Protocol):
    """Items of one (model, signature, lane), one entry an item, in arrival order."""

    slot: int
    nonce: int
    queue: LaneQueue
    lengths: array[int]
    # LIVE or TOMBSTONE for each entry: what is not stored yet has none, and cannot be seen
    states: bytearray
    # entries below it have been dispatched
    cursor: int
    deleted: int
    # tombstones from the cursor on
    done_ahead: int

    def extend(self, lengths: Sequence[int], rows: Sequence[Fresh]) -> tuple[int, int]:
        """Store items, of these lengths; returns what their payloads take, in bytes, and about how
        many system calls it took.

        Raises StorageError, changing nothing, where they cannot be stored.
        """

    @property
    def is_large(self) -> bool:
        """Whether its bytes are enough: nothing more is stored in it then."""

    def read(self, entry: int) -> Row:
        """One live entry. Raises StorageError where it cannot be read."""

    def run(self, first: int, stop: int) -> Run:
        """Neighbouring live entries. Raises StorageError where one cannot be read."""

    def payload_bytes(self, first: int, stop: int) -> int:
        """About what the payloads of neighbouring entries take."""

    def enqueued_s(self, entry: int) -> float | None:
        """When a live entry was appended, on the caller's clock; None where it cannot be read."""

    def tombstone(self, first: int, stop: int, *, dead: bool) -> int:
        """Neighbouring entries are over (`dead`: given up); returns what their payloads took."""

    def set_attempts(self, entry: int, attempts: int) -> None:
        """How often the entry has been charged."""

    def drop(self) -> None:
        """Every entry is over."""


def live_runs(segment: Segment, items_max: int) -> Iterator[tuple[int, int]]:
    """Up to `items_max` entries that are ready, from the cursor on, as runs: (first, stop)."""
    states, stop = segment.states, segment.cursor
    while items_max and (first := states.find(LIVE, stop)) >= 0:
        last = min(first + items_max, len(states))
        over = states.find(TOMBSTONE, first, last)
        stop = last if over < 0 else over
        items_max -= stop - first
        yield first, stop


@dataclass(slots=True)
class Window:
    """What was promised or is owed between two syncs."""

    # of each file by nonce: the places whose items are completed
    tombstones: dict[int, tuple[Any, list[int]]] = field(default_factory=dict)
    # (file, place, word) of every other end
    words: list[tuple[Any, int, int]] = field(default_factory=list)
    freed: list[tuple[Any, list[int]]] = field(default_factory=list)
    retired: list[Any] = field(default_factory=list)
    # (segment, holes) to be recorded; (file, begin, end) that are recorded and may be made
    holes: list[tuple[Any, list[Any]]] = field(default_factory=list)
    punches: list[tuple[Any, int, int]] = field(default_factory=list)
    finished: list[Any] = field(default_factory=list)
    unlink: list[Any] = field(default_factory=list)
    # records that may only be written when everything of this window is durable
    later: list[dict[str, Any]] = field(default_factory=list)
    # producer -> (numbers accepted up to, last result), durable when the window's sync is over
    floors: dict[int, tuple[int, int]] = field(default_factory=dict)
    # items that were taken in found no room: the floors do not speak of all that is stored
    partial: bool = False

    def absorb(self, other: Window) -> None:
        """Owe what `other`, which is older, owes too."""
        for nonce, (file, places) in other.tombstones.items():
            self.tombstones.setdefault(nonce, (file, []))[1].extend(places)
        self.words += other.words
        self.freed += other.freed
        self.retired += other.retired
        self.holes += other.holes
        self.punches += other.punches
        # In sequence: a file of results that is gone before an older one looks like a loss.
        self.finished[:0] = other.finished
        self.unlink[:0] = other.unlink
        self.later += other.later

    @property
    def owes(self) -> bool:
        """Whether its end would do anything."""
        return bool(
            self.tombstones
            or self.words
            or self.freed
            or self.retired
            or self.holes
            or self.punches
            or self.finished
            or self.unlink
            or self.later
        )


class Backing(Protocol):
    """Where segments rest."""

    durability: str
    store_id: int
    segment_items_max: int

    def make(self, slot: int, nonce: int, queue: LaneQueue) -> Segment:
        """A new, empty segment."""

    def stamp_us(self, now: float) -> int:
        """What entries say of when they were taken in, that being now."""

    def keep_results(self, owner: int, seq: int, results: Sequence[Stored]) -> None:
        """Keep results of a producer, numbered from `seq` on."""

    def free_results(self, owner: int, upto: int, last: int) -> None:
        """The producer has its results up to sequence number `upto`; `last` is its newest."""

    def record(self, **fields: Any) -> None:
        """Keep what no segment can say of itself; see `catalog`."""

    def record_later(self, **fields: Any) -> None:
        """The same, once all that was stored before it is safe: it may take away its only copy."""

    def full(self, now: float) -> str | None:
        """Why nothing new may be taken in, or None where there is room."""

    def usage(self) -> dict[str, Any] | None:
        """What it takes of a disk and what it may take; None where it takes none."""

    def upkeep(self, now: float) -> None:
        """Give back what a few live items keep; to be called now and then."""

    @property
    def has_work(self) -> bool:
        """Whether something was written, or is owed, since the last window."""

    def begin(self, floors: dict[int, tuple[int, int]], *, partial: bool = False) -> Window:
        """Close a window: all of it is written. `floors` are the producers' (numbers, results).

        `partial`: they speak of items, too, that are taken in and not stored yet.
        """

    def end(self, window: Window) -> None:
        """The window is as durable as promised: do what waited for that."""

    def sync(self) -> None:
        """Make what is written durable; may run in another thread."""

    def seal(self, *, unwritten: bool = False) -> None:
        """The broker ends in order: what is written is durable, and a restart may rely on it.

        `unwritten` says that items were taken in that are not stored.
        """

    def close(self) -> None:
        """Let go of everything."""


# Words of `MemorySegment.meta` for each entry: number; producer << 32 | target; us << 8 | tag.
META_WORDS = 3


class MemorySegment:
    """A segment in memory.

    Few objects, since there may be millions of lanes: what is read only when an item is dispatched
    or ends shares one array.
    """

    __slots__ = (
        "cursor", "deleted", "done_ahead", "lengths", "meta", "nonce", "payloads",
        "queue", "slot", "states",
    )  # fmt: skip

    is_large = False

    def __init__(self, slot: int, nonce: int, queue: LaneQueue) -> None:
        self.slot = slot
        self.nonce = nonce
        self.queue = queue
        self.lengths = array("I")
        self.meta = array("Q")
        self.payloads: list[bytes | None] = []
        self.states = bytearray()
        self.cursor = 0
        self.deleted = 0
        self.done_ahead = 0

    def extend(self, lengths: Sequence[int], rows: Sequence[Fresh]) -> tuple[int, int]:
        """See Segment."""
        self.lengths.extend(lengths)
        words: list[int] = []
        size = 0
        for _, owner, number, _, when_us, target, tag, payload in rows:
            words += (number, owner << 32 | target, when_us << 8 | tag)
            self.payloads.append(payload)
            size += len(payload)
        self.meta.extend(words)
        self.states.extend(bytes(len(rows)))
        return size, 0

    def read(self, entry: int) -> Row:
        """See Segment."""
        number, owner, word = self.meta[META_WORDS * entry : META_WORDS * entry + META_WORDS]
        payload = self.payloads[entry]
        if payload is None:
            raise InvariantError(f"entry {entry} is read but has no payload")
        return Row(
            owner >> 32, number, owner & 0xFFFF_FFFF, word & 0xFF, (word >> 8) / 1e6, payload
        )

    def run(self, first: int, stop: int) -> Run:
        """See Segment."""
        words = self.meta[META_WORDS * first : META_WORDS * stop]
        payloads = [p for p in self.payloads[first:stop] if p is not None]
        if len(payloads) != stop - first:
            raise InvariantError(f"an entry from {first} to {stop} is read but has no payload")
        owners = words[1::META_WORDS]
        return Run(
            [owner >> 32 for owner in owners],
            words[::META_WORDS].tolist(),
            [owner & 0xFFFF_FFFF for owner in owners],
            bytes([word & 0xFF for word in words[2::META_WORDS]]),
            payloads,
        )

    def payload_bytes(self, first: int, stop: int) -> int:
        """See Segment."""
        return sum(len(payload) for payload in self.payloads[first:stop] if payload is not None)

    def enqueued_s(self, entry: int) -> float | None:
        """See Segment."""
        return (self.meta[META_WORDS * entry + 2] >> 8) / 1e6

    def tombstone(self, first: int, stop: int, *, dead: bool) -> int:
        """See Segment."""
        size = self.payload_bytes(first, stop)
        self.payloads[first:stop] = [None] * (stop - first)
        return size

    def set_attempts(self, entry: int, attempts: int) -> None:
        """See Segment."""

    def drop(self) -> None:
        """See Segment."""


class MemoryBacking:
    """Nothing outlives the process."""

    durability = "memory"
    segment_items_max = MEMORY_SEGMENT_ITEMS_MAX

    def __init__(self, store_id: int) -> None:
        self.store_id = store_id

    def make(self, slot: int, nonce: int, queue: LaneQueue) -> Segment:
        """See Backing."""
        return MemorySegment(slot, nonce, queue)

    def stamp_us(self, now: float) -> int:
        """See Backing."""
        return int(now * 1e6)

    def keep_results(self, owner: int, seq: int, results: Sequence[Stored]) -> None:
        """See Backing; the outbox itself is the memory."""

    def free_results(self, owner: int, upto: int, last: int) -> None:
        """See Backing."""

    def record(self, **fields: Any) -> None:
        """See Backing."""

    def record_later(self, **fields: Any) -> None:
        """See Backing."""

    def full(self, now: float) -> str | None:
        """See Backing; the store's own bounds are the intake's affair."""
        return None

    def usage(self) -> dict[str, Any] | None:
        """See Backing."""
        return None

    def upkeep(self, now: float) -> None:
        """See Backing."""

    @property
    def has_work(self) -> bool:
        """See Backing."""
        return False

    def begin(self, floors: dict[int, tuple[int, int]], *, partial: bool = False) -> Window:
        """See Backing."""
        return Window()

    def end(self, window: Window) -> None:
        """See Backing."""

    def sync(self) -> None:
        """See Backing."""

    def seal(self, *, unwritten: bool = False) -> None:
        """See Backing."""

    def close(self) -> None:
        """See Backing."""
