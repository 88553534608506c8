"""Peers: what the broker remembers of each producer and each worker.

A peer is a connection; a producer or a worker is a name, which outlives its connections. Times are
seconds on the caller's monotonic clock. Records only: no rule is decided here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zfabric.outbox import Outbox
from zfabric.pending import Batch, BatchId
from zfabric.protocol import LIVE
from zfabric.shapes import Contract, Shape

# Enough points for the last ten seconds of cache counters at one heartbeat a second.
CACHE_POINTS = 12


class Parcel(NamedTuple):
    """Frames for one peer."""

    endpoint: str
    routing_id: bytes
    frames: list[bytes]


@dataclass(slots=True)
class Peer:
    """One live connection. `endpoint` is "producers" or "workers", the socket it came in on."""

    endpoint: str
    routing_id: bytes
    role: str
    name: str
    instance: int
    epoch: int
    heard_s: float
    # public half of the key that its HELLO came with; None where no keys are asked for
    key: str | None = None
    # whose key it is; None too
    user: str | None = None
    state: str = LIVE
    # SHAPE ids of this connection: the shape, or the code of why it was refused
    shapes: dict[int, Shape | str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, bytes]:
        return self.endpoint, self.routing_id


@dataclass(slots=True)
class Producer:
    """A job: what it submitted, what came of it, and the results that it has not acknowledged."""

    index: int
    name: str
    first_seen_s: float
    outbox: Outbox = field(default_factory=Outbox)
    peer: Peer | None = None
    # every number up to here is accepted, refused for good, or skipped by the producer
    upto: int = 0
    # after a restart: numbers beyond `upto` that were found, since a crash can tear a hole
    above: set[int] = field(default_factory=set)
    more: bool = False
    outstanding: int = 0
    accepted_items: int = 0
    accepted_tokens: int = 0
    completed_items: int = 0
    failed_items: int = 0
    cancelled_items: int = 0
    dead_items: int = 0
    refused_items: int = 0
    acked_items: int = 0
    last_seen_s: float = 0.0
    # items that it means to submit altogether, where it said so
    expected_items: int | None = None


@dataclass(slots=True)
class Worker:
    """A consumer: its contract, what it holds, and what it says of its cache."""

    name: str
    model: str
    contract: Contract
    window: int
    engine: str
    simulated: bool
    instance: int
    peer: Peer | None = None
    # the window that it asks for now: 0 while its engine is loading or unreachable
    granted: int = 0
    sent: int = 0
    received: int = 0
    held: dict[BatchId, Batch] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    # (time, hits tokens, queries tokens), oldest first
    cache_points: deque[tuple[float, int, int]] = field(
        default_factory=lambda: deque(maxlen=CACHE_POINTS)
    )
    batches: int = 0
    items_done: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    fill_sum: float = 0.0
    last_signature: int | None = None
    predicted_queries_tokens: int = 0
    predicted_hits_tokens: int = 0
    ideal_hits_tokens: int = 0
    signatures_seen: set[int] = field(default_factory=set)
    predicted_known: bool = True
    disconnects: int = 0
    last_disconnect: str = ""
    last_disconnect_s: float | None = None
    heard_s: float = 0.0

    @property
    def credit(self) -> int:
        """How many more batches it may be sent now."""
        return self.granted - len(self.held) if self.peer is not None else 0
