"""Pace: whether something may happen once more now. A token bucket, and nothing else.

`burst` may happen at once, `per_s` a second in the long run. Times are seconds on the caller's
monotonic clock. What happens to one that comes too early is for others to decide.
"""

from __future__ import annotations


class Pace:
    """One bucket, full at first."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._filled_s: float | None = None

    def take(self, now: float) -> bool:
        """Whether there was room for one more; takes it."""
        if self._filled_s is not None:
            gained = max(0.0, now - self._filled_s) * self._per_s
            self._left = min(float(self._burst), self._left + gained)
        self._filled_s = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
