"""Recent: the lengths of the items that were accepted last, for the question "what if".

Kept as runs, one a message and shape: model, signature, lengths in tokens, and when (seconds on the
caller's monotonic clock). Bounded in items; it never sees a payload, and nothing is decided by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

# Enough to fill 2,048 lanes several times over, and less than 1 MiB.
ITEMS_MAX = 16_384


class Run(NamedTuple):
    """Items of one shape that came together."""

    model: str
    signature: int
    lengths: Sequence[int]
    at_s: float


class Recent:
    """The last `ITEMS_MAX` lengths."""

    __slots__ = ("_items", "_runs", "taken")

    def __init__(self) -> None:
        self._runs: deque[Run] = deque()
        self._items = 0
        # runs that were ever noted: what comes after such a number is new
        self.taken = 0

    def note(self, model: str, signature: int, lengths: Sequence[int], now: float) -> None:
        """Items were accepted; `lengths` is kept as it is, and must not change."""
        kept = lengths if len(lengths) <= ITEMS_MAX else lengths[-ITEMS_MAX:]
        self._runs.append(Run(model, signature, kept, now))
        self.taken += 1
        self._items += len(kept)
        while self._items > ITEMS_MAX:
            self._items -= len(self._runs.popleft().lengths)

    def since(self, taken: int = 0) -> list[Run]:
        """The runs after the first `taken`, as far as they are still kept; oldest first."""
        fresh = min(len(self._runs), self.taken - taken)
        return [self._runs[k] for k in range(len(self._runs) - fresh, len(self._runs))]
