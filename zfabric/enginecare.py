"""What a worker keeps of its engines over their restarts: how long it waits, what they counted.

Times are seconds. Nothing here starts or ends a process.
"""

from __future__ import annotations

from typing import Any

from zfabric.engine import CacheStats

# An engine that died, or that cannot be reached, is tried again after this long, then twice that.
BACKOFF_S, BACKOFF_MAX_S = 0.5, 30.0


class Backoff:
    """Waits that double, from the first one again after a success."""

    def __init__(self, first_s: float = BACKOFF_S, longest_s: float = BACKOFF_MAX_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    def take(self) -> float:
        """How long to wait now."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._longest_s)
        return wait_s

    def reset(self) -> None:
        """It worked."""
        self._next_s = self._first_s


class CacheCount:
    """Cache counters over all engines of this worker; each engine begins again at 0."""

    def __init__(self) -> None:
        self._before = (0, 0)
        self._now: CacheStats | None = None

    def begin(self) -> None:
        """A new engine counts from here on."""
        if self._now is not None:
            queries, hits = self._before
            self._before = (queries + self._now.queries_tokens, hits + self._now.hits_tokens)
        self._now = None

    def note(self, stats: CacheStats | None) -> None:
        """What the engine of now says."""
        self._now = stats

    def fields(self) -> dict[str, Any]:
        """For the broker; empty where the engine does not measure."""
        if self._now is None:
            return {}
        return {
            "queries_tokens": self._before[0] + self._now.queries_tokens,
            "hits_tokens": self._before[1] + self._now.hits_tokens,
            "measured_by": self._now.measured_by,
        }
