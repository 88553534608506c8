"""How many requests a server is given at once: as told, or found by climbing.

Found: begin low, double while that makes the work done per second grow by a tenth or more, go back
to the best when it does not. Either way halve when the server says that it is busy, and double up
to where that was for each minute in which it does not. Times are seconds on the caller's clock;
work is in any unit that stays the same (tokens computed).
"""

from __future__ import annotations

START, LIMIT_MAX = 4, 256
GROWTH_MIN = 1.10
# A level is judged on this many answers for each place; fewer say too little.
ROUNDS = 3
# All requests in flight are told at once that the server is busy: that is one word, not many.
BUSY_AGAIN_S = 1.0
# A limit of requests or tokens is mostly by the minute.
QUIET_S = 60.0


class Limit:
    """The number of requests in flight, in `value`; `fixed` never climbs."""

    def __init__(self, fixed: int | None = None) -> None:
        self.value = START if fixed is None else fixed
        self._climbing = fixed is None
        self._best: tuple[float, int] | None = None
        self._busy_s: float | None = None
        # where it was before the server was busy, and since when it is lower than that
        self._before, self._lowered_s = 0, 0.0
        # The measurement of the present level: since when, and what came.
        self._began_s: float | None = None
        self._answers = self._work = 0

    def settle(self, value: int) -> None:
        """The server has told how many it works on at once."""
        self.value, self._climbing = max(1, min(value, LIMIT_MAX)), False

    def busy(self, now: float) -> None:
        """The server took no more."""
        if self._busy_s is None or now - self._busy_s >= BUSY_AGAIN_S:
            self._busy_s = self._lowered_s = now
            self._before = max(self._before, self.value)
            self.value, self._climbing = max(1, self.value // 2), False

    def note(self, now: float, work: int, *, full: bool) -> None:
        """An answer came; `full` says whether every place was in use until then."""
        if self.value < self._before and now - self._lowered_s >= QUIET_S:
            self._lowered_s, self.value = now, min(2 * self.value, self._before)
        if not self._climbing:
            return
        if not full or self._began_s is None:
            self._began_s = now if full else None
            self._answers = self._work = 0
            return
        self._answers += 1
        self._work += work
        if self._answers < ROUNDS * self.value or now <= self._began_s:
            return
        rate = self._work / (now - self._began_s)
        self._began_s = None
        if self._best is not None and rate < GROWTH_MIN * self._best[0]:
            self.value, self._climbing = self._best[1], False
            return
        self._best = (rate, self.value)
        self._climbing = self.value < LIMIT_MAX
        self.value = min(2 * self.value, LIMIT_MAX)
