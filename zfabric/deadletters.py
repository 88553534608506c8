"""Dead letters: items that were given up, kept whole so that an operator can try them again.

Bounded in number and in bytes, oldest first out. Times are seconds on the caller's clock. Decides
nothing: the fabric says what dies, the operator what lives again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zfabric.segments import Backing
from zfabric.shapes import Shape

# A record of a dead item keeps its payload, so that it can be requeued; these are few or a fault.
DEAD_RECORDS_MAX = 100_000


@dataclass(slots=True, frozen=True)
class DeadRecord:
    """An item that ended without a completion and can be requeued."""

    id: int
    producer: str
    number: int
    shape: Shape
    length: int
    payload: bytes
    reason: str
    attempts: int
    at_s: float

    @property
    def held_bytes(self) -> int:
        """What it takes of the memory, about."""
        return len(self.payload) + len(self.reason)

    def fields(self, wall_offset_s: float) -> dict[str, Any]:
        """The record as the catalog keeps it; its time becomes that of the wall clock."""
        return {
            "id": self.id,
            "producer": self.producer,
            "number": self.number,
            "model": self.shape.model,
            "components": list(self.shape.components),
            "tokens": list(self.shape.tokens),
            "length": self.length,
            "payload": self.payload,
            "reason": self.reason,
            "attempts": self.attempts,
            "at": self.at_s + wall_offset_s,
        }

    @classmethod
    def of(cls, fields: dict[str, Any], wall_offset_s: float) -> DeadRecord:
        """The record that `fields` were made of."""
        shape = Shape(fields["model"], tuple(fields["components"]), tuple(fields["tokens"]))
        return cls(
            fields["id"],
            fields["producer"],
            fields["number"],
            shape,
            fields["length"],
            fields["payload"],
            fields["reason"],
            fields["attempts"],
            fields["at"] - wall_offset_s,
        )


class DeadLetters:
    """The records by id, in the order in which their items died; kept by the store's backing."""

    def __init__(self, backing: Backing, bytes_max: int) -> None:
        self._backing = backing
        self._bytes_max = bytes_max
        self._records: OrderedDict[int, DeadRecord] = OrderedDict()
        self._of: Counter[str] = Counter()
        self.next_id = 1
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, record_id: int) -> bool:
        return record_id in self._records

    def __iter__(self) -> Iterator[DeadRecord]:
        return iter(self._records.values())

    def get(self, record_id: int) -> DeadRecord | None:
        """The record of that id, if there is one."""
        return self._records.get(record_id)

    def add(self, record: DeadRecord, wall_offset_s: float) -> int:
        """Keep a record, whatever its size; returns how many of the oldest had to go for it."""
        self.restore(record)
        self.next_id = record.id + 1
        self._backing.record(t="dead", **record.fields(wall_offset_s))
        dropped = 0
        while len(self) > DEAD_RECORDS_MAX or (self.held_bytes > self._bytes_max and len(self) > 1):
            self.drop(next(iter(self._records)))
            dropped += 1
        return dropped

    def restore(self, record: DeadRecord) -> None:
        """Enter a record that is kept already."""
        self._records[record.id] = record
        self._of[record.producer] += 1
        self.held_bytes += record.held_bytes

    def drop(self, record_id: int) -> DeadRecord | None:
        """Forget a record for good; returns it, or None if there is none of that id."""
        return self._remove(record_id, self._backing.record)

    def forget(self, producer: str) -> None:
        """Forget all of a producer for good, as nobody is left to read what would come of it."""
        if self._of[producer]:
            for record_id in [r.id for r in self._records.values() if r.producer == producer]:
                self.drop(record_id)

    def requeued(self, record_id: int) -> DeadRecord | None:
        """As `drop`, of one whose item goes round once more: kept until that item is durable."""
        return self._remove(record_id, self._backing.record_later)

    def _remove(self, record_id: int, keep: Callable[..., None]) -> DeadRecord | None:
        record = self._records.pop(record_id, None)
        if record is not None:
            self.held_bytes -= record.held_bytes
            self._of[record.producer] -= 1
            if not self._of[record.producer]:
                del self._of[record.producer]
            keep(t="undead", id=record_id)
        return record
