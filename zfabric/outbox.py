"""The outbox: results of one producer, kept in order until it acknowledges them.

Every result has a sequence number, from 1, that only grows. `sent` moves ahead as results go out
and back to `acked` when the producer connects again; nothing is forgotten before `ack`. Sizes are
payload bytes. It never decides whether a result may be sent; it says what would be next.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, islice, repeat
from operator import attrgetter
from typing import NamedTuple


class Stored(NamedTuple):
    """One result: the producer's number, how it ended, what came out, what it is a retry of."""

    number: int
    status: int
    payload: bytes
    retry_of: int | None
    # of an item that was refused: its number - the one before it, 0 where that is not known
    gap: int = 0


_PAYLOAD = attrgetter("payload")
# What a named tuple is made by is Python code, which for each result costs as much as its write.
_AS_STORED = partial(tuple.__new__, Stored)


def stored(
    numbers: Sequence[int],
    statuses: Sequence[int],
    payloads: Sequence[bytes],
    retries: Iterable[int | None],
) -> list[Stored]:
    """Results of items that were accepted, from columns."""
    return list(map(_AS_STORED, zip(numbers, statuses, payloads, retries, repeat(0), strict=False)))


class Outbox:
    """Results in sequence; `acked` < `sent` <= `last`."""

    def __init__(self) -> None:
        self._results: deque[Stored] = deque()
        self.acked = 0
        self.sent = 0
        self.payload_bytes = 0
        self.bytes_in_flight = 0

    def __len__(self) -> int:
        return len(self._results)

    @property
    def last(self) -> int:
        """Sequence number of the newest result."""
        return self.acked + len(self._results)

    def add(self, results: Sequence[Stored]) -> int:
        """Keep more results; returns the bytes of their payloads."""
        self._results.extend(results)
        size = sum(map(len, map(_PAYLOAD, results)))
        self.payload_bytes += size
        return size

    def rewind(self) -> None:
        """Send everything unacknowledged again: the producer has a new connection."""
        self.sent = self.acked
        self.bytes_in_flight = 0

    def take(self, items_max: int, bytes_max: int) -> tuple[int, list[Stored]]:
        """The next unsent results, at least one if there is any: (first sequence number, results).

        At most `items_max` and, but for a single larger one, `bytes_max`.
        """
        start = self.sent - self.acked
        chosen = list(islice(self._results, start, start + items_max))
        sizes = list(accumulate(map(len, map(_PAYLOAD, chosen))))
        del chosen[max(1, bisect_right(sizes, bytes_max)) :]
        first = self.sent + 1
        self.sent += len(chosen)
        self.bytes_in_flight += sizes[len(chosen) - 1] if chosen else 0
        return first, chosen

    def ack(self, upto: int) -> int:
        """Free results up to sequence number `upto`; returns how many.

        They may be beyond `sent`: sent on an earlier connection, acknowledged on this one.
        """
        count = max(0, min(upto, self.last) - self.acked)
        freed = [self._results.popleft() for _ in range(count)]
        sizes = list(map(len, map(_PAYLOAD, freed)))
        self.payload_bytes -= sum(sizes)
        self.bytes_in_flight -= sum(sizes[: max(0, self.sent - self.acked)])
        self.acked += count
        self.sent = max(self.sent, self.acked)
        return count


def error_payload(code: str, text: str) -> bytes:
    """What a result that is no completion says: UTF-8 JSON, as engines write it too."""

    return json.dumps({"code": code, "message": text}).encode()
