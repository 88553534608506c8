"""Upkeep: idle lanes retire, ages are found, what few items pin on a disk is given back.

A round over all lanes is shared out over many turns of the loop, so that each stays short. Times
are seconds on the caller's monotonic clock. It decides when somebody is looked after; what that
means for a lane is `lanes`' and `draining`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from zfabric.fabric import Fabric
from zfabric.groups import Group

# A turn of upkeep is due this often.
UPKEEP_S = 0.1
# A round over all lanes begins this often at most: lanes retire after seconds, ages are for people.
ROUND_S = 1.0
# Lanes looked after in one turn, some 2 us each.
UPKEEP_LANES = 4_096


class Upkeep:
    """Looks after every lane in turn."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._next_s = self._next_round_s = 0.0
        self._round: Iterator[int] = iter(())

    def turn(self, now: float) -> None:
        """Do what is due; call it with every turn of the loop."""
        if now < self._next_s:
            return
        self._next_s = now + UPKEEP_S
        self._fabric.store.backing.upkeep(now)
        lanes = 0
        while lanes < UPKEEP_LANES:
            number = next(self._round, None)
            if number is None:
                if now >= self._next_round_s:
                    self._next_round_s = now + ROUND_S
                    self._round = iter(list(self._fabric.groups))
                return
            group = self._fabric.groups.get(number)
            if group is not None:
                lanes += 1 + len(group.queues)
                self._look_after(group, now)

    def _look_after(self, group: Group, now: float) -> None:
        """Retire the idle lanes of one shape and find the age of its oldest ready item."""
        if group.lanes is not None:
            for lane in group.lanes.maintain(now):
                group.order.quiesce(lane)
            if len(group.queues) > group.lanes.lanes_active:
                held = {row.id for row in group.lanes.rows()}
                for lane in [lane for lane in group.queues if lane not in held]:
                    del group.queues[lane]
        oldest_s = self._fabric.store.oldest_s
        ready = [queue for queue in group.queues.values() if queue.ready_items]
        times = [t for queue in ready if (t := oldest_s(queue)) is not None]
        group.oldest_s = min(times, default=None)
