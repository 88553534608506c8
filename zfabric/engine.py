"""What a worker's author writes against: a batch comes in, one result an item goes out.

Decides the vocabulary between a worker's supervisor and its engine, nothing else. Lengths and
pad-to are tokens; payloads are the bytes that the producer encoded, and no one before the engine
has read them. Nothing here does I/O, keeps time or knows of sockets and processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from zfabric.errors import FabricError, ProtocolError
from zfabric.shapes import Shape
from zfabric.words import counted

Status: TypeAlias = Literal["ok", "too_long", "failed"]
STATUSES: frozenset[str] = frozenset(("ok", "too_long", "failed"))
MeasuredBy: TypeAlias = Literal["simulated", "engine", "worker"]
MEASURERS: frozenset[str] = frozenset(("simulated", "engine", "worker"))


class OutOfMemory(FabricError):
    """The engine lacked memory for this batch. Its items are charged and retried one by one."""


class EngineUnreachable(FabricError):
    """What the engine stands for cannot be reached. The worker pauses; no item is charged."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Items that run together, as columns of equal length, in the broker's order.

    `pad_to` (tokens) is None where the engine does not pad (ragged). `shapes` are the distinct
    shapes of the batch and `shape_index` says which of them each item has: all 0 in a shape-pure
    batch. Raises ProtocolError if the columns contradict each other.
    """

    model: str
    pad_to: int | None
    lengths: tuple[int, ...]
    payloads: tuple[bytes, ...]
    shapes: tuple[Shape, ...]
    shape_index: tuple[int, ...]

    def __post_init__(self) -> None:
        items = len(self.payloads)
        if not len(self.lengths) == len(self.shape_index) == items:
            raise ProtocolError(
                f"batch columns disagree: {counted(len(self.lengths), 'length')}, "
                f"{counted(items, 'payload')}, {len(self.shape_index)} shape indices"
            )
        if items and not 0 <= min(self.shape_index) <= max(self.shape_index) < len(self.shapes):
            raise ProtocolError(f"a shape index is outside the batch's {len(self.shapes)} shapes")
        if items and self.pad_to is not None and self.pad_to < max(self.lengths):
            raise ProtocolError(f"pad-to {self.pad_to} is under the length {max(self.lengths)}")

    def __len__(self) -> int:
        return len(self.payloads)

    @property
    def padded_tokens(self) -> int:
        """Tokens that the engine computes: items x pad-to, or the plain sum where ragged."""
        if self.pad_to is None:
            return sum(self.lengths)
        return self.pad_to * len(self)


@dataclass(frozen=True, slots=True)
class Result:
    """How one item ended. `failed` is final (bad request, refused): the item is not retried."""

    status: Status
    payload: bytes

    @classmethod
    def ok(cls, payload: bytes) -> Result:
        """A completion; `payload` goes to the producer as it is."""
        return cls("ok", payload)

    @classmethod
    def too_long(cls) -> Result:
        """An empty completion: the item is longer than this engine can take and did not run."""
        return cls("too_long", b"")

    @classmethod
    def failed(cls, code: str, message: str) -> Result:
        """A final failure. The payload is UTF-8 JSON: {"code": ..., "message": ...}."""
        return cls("failed", json.dumps({"code": code, "message": message}).encode())


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Prefix-cache counters in tokens since load(); a restarted engine begins again at 0.

    An engine that does not measure returns None in place of a CacheStats, never zeros.
    """

    queries_tokens: int
    hits_tokens: int
    measured_by: MeasuredBy


class Room:
    """Said by an engine's iterator, once: it has begun all of its batch and could begin another.

    What is left of the batch then comes from another thread, while run() is called for the next.
    """


ROOM = Room()


class Engine(Protocol):
    """One model, loaded, that runs batches one after the other.

    An engine may also have `close() -> None`, called once before a polite end. Its constructor
    must be cheap: what is heavy belongs into load().
    """

    def load(self) -> None:
        """Make the model ready. Called once, before the first run()."""

    def run(self, batch: Batch) -> Sequence[Result] | Iterator[tuple[int, Result] | Room]:
        """Run every item of `batch`.

        A sequence gives one result for each item, in order. An iterator gives (item's index in
        the batch, result) as items finish, each index once; each pair is passed on at once. It may
        give `ROOM` where batches can overlap.
        Raises OutOfMemory, EngineUnreachable, or anything else: an engine error, for which the
        items without a result are charged.
        """
        ...

    def cache_stats(self) -> CacheStats | None:
        """Counters since load(), or None if prefix hits are not measured."""
        ...


EngineFactory: TypeAlias = Callable[[], Engine]
