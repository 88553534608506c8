"""Watching: what the broker asks itself now and then, so that it is known when an answer changed.

What does the padding come from, and is there room on the disk: a change of either is an event.
Times are seconds on the caller's monotonic clock. Nothing about work is decided here.
"""

from __future__ import annotations

from zfabric import snapshot
from zfabric.fabric import Fabric

# A verdict costs a pass over all shapes, some 3 ms for a thousand.
VERDICT_S = 5.0
# Room is what the backing found at its last look: cheap.
ROOM_S = 1.0


class Watch:
    """Looks at one fabric, as often as is due."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._next_verdict_s = 0.0
        self._next_room_s = 0.0

    def look(self, now: float) -> None:
        """Take note of the verdict and of the room, where that is due."""
        if now >= self._next_verdict_s:
            self._next_verdict_s = now + VERDICT_S
            self._judge(now)
        if now >= self._next_room_s:
            self._next_room_s = now + ROOM_S
            self._look_for_room(now)

    def _judge(self, now: float) -> None:
        fabric = self._fabric
        verdict = snapshot.diagnose(fabric)
        if fabric.diagnosis.judge(verdict, fabric.waste.padded_tokens, now):
            fabric.event("waste_verdict", f"{verdict}: zfabric explain waste", now, verdict=verdict)

    def _look_for_room(self, now: float) -> None:
        fabric = self._fabric
        no_space = fabric.full(now)
        if fabric.diagnosis.found_room(no_space, now):
            kind = "storage_available" if no_space is None else "storage_full"
            fabric.event(kind, no_space or "submits are taken again", now)
