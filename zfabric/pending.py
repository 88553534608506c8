"""Pending: which items are with which worker, by batch and by reference. Memory only.

After a crash nothing here is needed: an item that was pending is simply ready again. Lengths are
tokens, times seconds on the caller's monotonic clock. This module decides what is released, what
waits and what is charged when a worker goes, and never touches a queue itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zfabric.errors import InvariantError

# (epoch of the connection, number of the batch on it)
BatchId = tuple[int, int]

# A worker that comes back after its lease is uncharged while its batch is remembered here; each
# remembered batch is a few hundred bytes.
EXPIRED_MAX = 10_000


@dataclass(slots=True)
class Batch:
    """One batch that a worker took: columns of its items, in its order.

    `owners` are producers, `numbers` theirs; `outstanding` and `started` hold references.
    """

    id: BatchId
    worker: str
    refs: list[int]
    owners: list[int]
    numbers: list[int]
    lengths: list[int]
    # (nonces, entries) as they went out
    wire_refs: tuple[bytes, bytes]
    outstanding: set[int]
    lease_until: float
    sent_s: float
    solo: bool = False
    padded_tokens: int = 0
    started: set[int] = field(default_factory=set)
    was_started: bool = False
    # place of each reference, once somebody asks for some of them
    place_of: dict[int, int] | None = None

    def start(self, indices: Sequence[int]) -> None:
        """Mark the items at `indices` (all of them where it is empty) as started."""
        self.was_started = True
        if not len(indices):
            self.started = set(self.refs)
        else:
            self.started.update(self.refs[k] for k in indices if k < len(self.refs))

    def chosen(self, column: list[int], refs: Sequence[int]) -> list[int]:
        """What a column of the batch says of each of `refs`; mostly they are all of it."""
        if refs == self.refs:
            return column
        if self.place_of is None:
            self.place_of = {ref: k for k, ref in enumerate(self.refs)}
        return [column[self.place_of[ref]] for ref in refs]

    def in_order(self, refs: Iterable[int]) -> list[int]:
        """`refs` in the order of the batch."""
        chosen = set(refs)
        return [ref for ref in self.refs if ref in chosen]


class Parting(NamedTuple):
    """What to do with one batch of a worker that went: free these now, let those wait."""

    batch: Batch
    free: list[int]
    waits: bool


class Pending:
    """Every dispatched item that has not ended, and the batches they went out in."""

    def __init__(self) -> None:
        self.by_ref: dict[int, Batch] = {}
        self.batches: dict[BatchId, Batch] = {}
        self.tokens = 0
        # batch id -> (its worker, the references that its expiry charged)
        self.expired: OrderedDict[BatchId, tuple[str, list[int]]] = OrderedDict()

    @property
    def items(self) -> int:
        return len(self.by_ref)

    def add(self, batch: Batch) -> None:
        """Every item of `batch` is now with its worker."""
        self.batches[batch.id] = batch
        self.by_ref.update(dict.fromkeys(batch.refs, batch))
        self.tokens += sum(batch.lengths)

    def settle(self, batch: Batch, refs: Sequence[int]) -> list[int]:
        """`refs`, each once and all outstanding in `batch`, are no longer pending.

        Returns the length of each, in tokens. Raises InvariantError, changing nothing, where one
        is not.
        """
        if not batch.outstanding.issuperset(refs):
            raise InvariantError(f"an item of batch {batch.id} is settled that is not out with it")
        lengths = batch.chosen(batch.lengths, refs)
        for ref in refs:
            del self.by_ref[ref]
        batch.outstanding.difference_update(refs)
        self.tokens -= sum(lengths)
        if not batch.outstanding:
            self.batches.pop(batch.id, None)
        return lengths

    def remember_expired(self, batch: Batch, charged: list[int]) -> None:
        """Keep who was charged, for a worker that comes back late; bounded."""
        self.expired[batch.id] = (batch.worker, charged)
        while len(self.expired) > EXPIRED_MAX:
            self.expired.popitem(last=False)

    def uncharged(self, worker: str, batch_id: BatchId) -> list[int]:
        """The references that `worker` had been charged for with this batch; none the next time."""
        holder, charged = self.expired.get(batch_id, ("", []))
        if holder != worker:
            return []
        del self.expired[batch_id]
        return charged


def part(batches: Sequence[Batch], *, orderly: bool = False) -> list[Parting]:
    """What becomes of a lost worker's batches, given in the order they were sent.

    What is not started is free at once. Started items wait, for the worker to come back or for
    the end of the lease. Where nothing was said to be started, the word may have died with the
    worker: then the first batch is suspect and waits whole. After an `orderly` goodbye nothing is:
    it came behind all that was said.
    """
    silent = not orderly and not any(batch.was_started for batch in batches)
    partings = []
    for k, batch in enumerate(batches):
        if silent and k == 0:
            partings.append(Parting(batch, [], waits=True))
            continue
        free = batch.in_order(batch.outstanding - batch.started)
        partings.append(Parting(batch, free, waits=len(free) < len(batch.outstanding)))
    return partings
