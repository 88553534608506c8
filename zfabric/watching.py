"""Watching: what the broker asks itself once a second, so that it is known when an answer changed.

What does the padding come from, and is there room on the disk: a change of either is an event.
Times are seconds on the caller's monotonic clock. Nothing about work is decided here.
"""

from __future__ import annotations

from zfabric import snapshot
from zfabric.fabric import Fabric

# A verdict costs a pass over all shapes.
WATCH_S = 1.0


class Watch:
    """Looks at one fabric, as often as is due."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._next_s = 0.0

    def look(self, now: float) -> None:
        """Take note of the verdict and of the room, where that is due."""
        if now < self._next_s:
            return
        self._next_s = now + WATCH_S
        fabric, diagnosis = self._fabric, self._fabric.diagnosis
        verdict = snapshot.diagnose(fabric)
        if diagnosis.judge(verdict, fabric.waste.padded_tokens, now):
            fabric.event("waste_verdict", f"{verdict}: zfabric explain waste", now, verdict=verdict)
        no_space = fabric.store.backing.full(now)
        if diagnosis.found_room(no_space, now):
            kind = "storage_available" if no_space is None else "storage_full"
            fabric.event(kind, no_space or "submits are taken again", now)
