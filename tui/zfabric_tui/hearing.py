"""Hearing: whether the broker is heard, how old what is known of it is, and when to look for it.

A connection that ended is known at once, a broker that is silent by the age of its last snapshot.
Of a replay the recording says it. Times are seconds on the given clock; nothing is sent from here.
"""

from __future__ import annotations

from collections.abc import Callable

from zfabric_tui.feed import Arrived
from zfabric_tui.model import STALE_S
from zfabric_tui.replay import ReplayFeed

# A snapshot that is older is late: at the default rate four were due meanwhile.
LATE_S = 1.0
# Times the broker's own interval before it is late or lost, where it publishes less often. An
# interval is at most that of the lowest rate there is.
INTERVALS, INTERVAL_MAX_S = 2.5, 10.0
# A broker that is lost is looked for this often.
RETRY_S = 5.0


class Hearing:
    """What is known of the connection to the broker."""

    def __init__(self, clock: Callable[[], float], replay: ReplayFeed | None) -> None:
        self._clock = clock
        self._replay = replay
        self._seen_s: float | None = None
        self._cut = False
        self._interval_s = 0.0
        self._time_s: float | None = None
        self._retry_s: float | None = None

    def note(self, arrived: Arrived) -> None:
        """Take note of what has come."""
        if arrived.cut is not None:
            self._cut = arrived.cut
        for snapshot in arrived.snapshots:
            if self._time_s is not None:
                self._interval_s = min(max(0.0, snapshot["time"] - self._time_s), INTERVAL_MAX_S)
            self._time_s = snapshot["time"]
        if arrived.snapshots:
            self._seen_s, self._retry_s = self._clock(), None

    @property
    def age_s(self) -> float | None:
        """How old the last snapshot is; None: there is none."""
        if self._replay is not None:
            return self._replay.age_s
        return None if self._seen_s is None else self._clock() - self._seen_s

    @property
    def lost(self) -> bool:
        """Whether the broker is gone, or nothing was recorded at this time."""
        if self._replay is not None:
            return self._replay.in_gap
        return self._cut or self._is_older(STALE_S)

    @property
    def late(self) -> bool:
        """Whether the next snapshot should have come."""
        return self._replay is None and self._is_older(LATE_S)

    def _is_older(self, limit_s: float) -> bool:
        age_s = self.age_s
        return age_s is None or age_s > max(limit_s, INTERVALS * self._interval_s)

    @property
    def old(self) -> str | None:
        """Why what is drawn is not of now; None where it is."""
        if self._replay is not None:
            return "nothing was recorded now: the last values before" if self.lost else None
        if self.lost:
            return "the broker does not answer: these are its last values"
        return "no word from the broker: these are its last values" if self.late else None

    @property
    def retry_s(self) -> float | None:
        """Seconds until a lost broker is looked for again."""
        return None if self._retry_s is None else max(0.0, self._retry_s - self._clock())

    def is_due(self) -> bool:
        """Whether a lost broker is to be looked for now; says so once each time."""
        if self._replay is not None or not self.lost:
            return False
        now = self._clock()
        due = self._retry_s is not None and now >= self._retry_s
        if due or self._retry_s is None:
            self._retry_s = now + RETRY_S
        return due
