"""Replay: a recording as a feed, with a clock that can be stopped, sped up and set.

What it brings is what a live feed would have brought at that time, so that every screen replays.
Positions are the broker's time, seconds since the epoch; the clock that drives them is given.
"""

from __future__ import annotations

from collections.abc import Callable

from zfabric_tui.feed import CURRENT, Arrived
from zfabric_tui.recording import GAP_S, Reader

SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
# Seconds before a position whose snapshots are brought along when it is jumped to: for rates.
BEFORE_S = 12.0
# Snapshots brought at once: at sixty times the speed only the last of many is worth decoding.
SNAPSHOTS_MAX = 64
EVENTS_MAX = 2_000
FOREVER_S = 1e12


class ReplayFeed:
    """Plays a recording from its start."""

    def __init__(self, reader: Reader, clock: Callable[[], float]) -> None:
        self.reader = reader
        self._clock = clock
        self._clock_s = clock()
        self.position_s = reader.span[0]
        self.playing = True
        self.speed = 1.0
        self._jumped = True
        self._shown_s = self.position_s
        self._followed: str | None = None
        self._lanes_time: tuple[str | None, float] | None = None

    @property
    def at_end(self) -> bool:
        """Whether there is nothing after this."""
        return self.position_s >= self.reader.span[1]

    @property
    def age_s(self) -> float | None:
        """How old the last snapshot is at this position; None: there is none."""
        before = self.reader.before(self.position_s)
        return None if before is None else self.position_s - before

    @property
    def in_gap(self) -> bool:
        """Whether nothing is known of this moment."""
        age_s = self.age_s
        return age_s is None or (age_s > GAP_S and not self.at_end)

    # -- steering -----------------------------------------------------------------------------

    def toggle(self) -> None:
        """Stop or go on."""
        self._advance()
        self.playing = not self.playing

    def faster(self, by: int) -> None:
        """The next speed up (1) or down (-1)."""
        self._advance()
        at = SPEEDS.index(self.speed) + by
        self.speed = SPEEDS[min(max(at, 0), len(SPEEDS) - 1)]

    def seek(self, time_s: float) -> None:
        """Go to a time; what lies outside of the recording is its start or its end."""
        self._clock_s = self._clock()
        first, last = self.reader.span
        self.position_s = min(max(time_s, first), last)
        self._jumped = True

    def step(self, by: int) -> None:
        """Go to the next snapshot (1) or the one before (-1), and stop there."""
        self._advance()
        self.playing = False
        shown = self.reader.before(self.position_s)
        if by > 0:
            wanted = self.reader.after(self.position_s)
        else:
            wanted = None if shown is None else self.reader.before(shown - 1e-6)
        if wanted is not None:
            self.seek(wanted)

    def seek_event(self, *, forward: bool) -> bool:
        """Go to the next event or the last one, and stop there; whether there was one."""
        self._advance()
        wanted = self.reader.event_time(self.position_s, forward=forward)
        if wanted is None:
            return False
        self.playing = False
        self.seek(wanted)
        return True

    # -- the feed -----------------------------------------------------------------------------

    def follow(self, signature: str | None) -> None:
        """See Feed."""
        self._followed = signature

    def poll(self, timeout_s: float) -> Arrived:
        """See Feed; never waits."""
        self._advance()
        arrived = Arrived(restarted=self._jumped)
        at = self.position_s
        since_s = at - BEFORE_S if self._jumped else self._shown_s
        if self._jumped or at > self._shown_s:
            arrived.snapshots = self.reader.snapshots(since_s, at, SNAPSHOTS_MAX)
            if self._jumped and not arrived.snapshots:
                before = self.reader.before(at)
                if before is not None:
                    arrived.snapshots = self.reader.snapshots(before - BEFORE_S, before, 64)
            events_s = -FOREVER_S if self._jumped else self._shown_s
            arrived.events = self.reader.events(events_s, at, EVENTS_MAX)
        self._jumped = False
        self._shown_s = at
        self._bring_lanes(arrived, at)
        return arrived

    def _bring_lanes(self, arrived: Arrived, at: float) -> None:
        if self._followed is None:
            return
        wanted = None if self._followed == CURRENT else self._followed
        lanes = self.reader.lanes(wanted, at)
        if lanes is None:
            self._lanes_time = None
            return
        known = (lanes["signature"], lanes["time"])
        if known != self._lanes_time or arrived.restarted:
            self._lanes_time = known
            arrived.lanes[lanes["signature"]] = lanes

    def _advance(self) -> None:
        now = self._clock()
        if self.playing:
            last = self.reader.span[1]
            self.position_s = min(last, self.position_s + (now - self._clock_s) * self.speed)
            self.playing = self.position_s < last
        self._clock_s = now

    def close(self) -> None:
        """Close the recording."""
        self.reader.close()
