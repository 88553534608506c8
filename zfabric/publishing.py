"""Publishing: what goes to those who watch, and how often. Nothing is made while nobody does.

A topic is what a subscriber asked for: `snapshot` at the broker's rate, `event` as they happen,
`lanes:<signature>` and `lanes:current` (the lanes of each model's current shape) once a second,
`lengths` (of what was accepted since the last time) every ten. Times are seconds on the caller's
monotonic clock. It sends nothing itself and changes nothing of the fabric but the queue of fresh
events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zfabric import snapshot
from zfabric.dispatcher import Dispatcher
from zfabric.groups import Group
from zfabric.protocol import TOPIC_EVENT, TOPIC_LANES, TOPIC_LENGTHS, TOPIC_SNAPSHOT

# Topics that are served: a dashboard has four.
TOPICS_MAX = 64
# 2,048 lanes cost some 7 ms, and a heat map that moves more often than once a second flickers.
LANES_S = 1.0
LENGTHS_S = 10.0
# A pass over thousands of shapes costs some 4 ms a thousand; so many are passed over each time.
FEW_SHAPES = 100
SURVEY_S = 1.0
CURRENT = b"current"


class Publishing:
    """What subscribers are to get. Ask it in every turn of the loop."""

    def __init__(self, dispatcher: Dispatcher, hz: float) -> None:
        self._dispatcher = dispatcher
        self.interval_s = 1 / hz
        self._topics: set[bytes] = set()
        self._next_s = self._next_lanes_s = self._next_lengths_s = 0.0
        self._lengths_taken = 0
        self._next_survey_s = 0.0
        self._survey: tuple[snapshot.Survey, list[Group]] = (snapshot.Survey(), [])

    def changed(self, change: bytes) -> None:
        """A subscription began (its first byte is 1) or ended (0), as XPUB tells it."""
        if change[:1] == b"\x01" and len(self._topics) < TOPICS_MAX:
            self._topics.add(change[1:])
            # Whoever has just come is not to wait for lanes longer than for a snapshot.
            self._next_lanes_s = 0.0
        elif change[:1] == b"\x00":
            self._topics.discard(change[1:])

    def nobody_watches(self) -> None:
        """The socket is a new one: whoever comes again says what it wants."""
        self._topics.clear()

    @property
    def next_s(self) -> float | None:
        """When something is due; None while nobody watches."""
        return self._next_s if self._topics else None

    def view(self, now: float) -> dict[str, Any]:
        """The whole fabric, as of now."""
        fabric = self._dispatcher.fabric
        found, chosen = self._surveyed(now)
        view = {**self._dispatcher.meta(now), **snapshot.status(fabric, now, found)}
        view["shapes"] = snapshot.shapes(fabric, now, chosen=chosen)
        return view

    def _surveyed(self, now: float) -> tuple[snapshot.Survey, list[Group]]:
        """Sums over all shapes, and which of them to show: where there are many, a moment old."""
        fabric = self._dispatcher.fabric
        if len(fabric.groups) <= FEW_SHAPES or now >= self._next_survey_s:
            self._next_survey_s = now + SURVEY_S
            self._survey = (snapshot.survey(fabric), snapshot.top_groups(fabric))
        return self._survey

    def messages(self, now: float) -> Iterator[tuple[bytes, Any]]:
        """(topic, value) of everything that is due."""
        fresh = self._dispatcher.fabric.fresh_events
        if not self._topics:
            fresh.clear()
            return
        if not self._wanted(TOPIC_EVENT):
            fresh.clear()
        while fresh:
            yield TOPIC_EVENT, fresh.popleft()
        if now < self._next_s:
            return
        self._next_s = now + self.interval_s
        if self._wanted(TOPIC_SNAPSHOT):
            yield TOPIC_SNAPSHOT, self.view(now)
        if now >= self._next_lanes_s:
            self._next_lanes_s = now + LANES_S
            for topic in [t for t in self._topics if t.startswith(TOPIC_LANES)]:
                yield from self._lanes(topic, now)
        if now >= self._next_lengths_s and self._wanted(TOPIC_LENGTHS):
            self._next_lengths_s = now + LENGTHS_S
            recent = self._dispatcher.fabric.recent
            if recent.taken > self._lengths_taken:
                value = snapshot.lengths(self._dispatcher.fabric, self._lengths_taken, now)
                self._lengths_taken = recent.taken
                yield TOPIC_LENGTHS, value

    def _wanted(self, topic: bytes) -> bool:
        return any(topic.startswith(wanted) for wanted in self._topics)

    def _lanes(self, topic: bytes, now: float) -> Iterator[tuple[bytes, Any]]:
        wanted = topic[len(TOPIC_LANES) :]
        if wanted == CURRENT:
            for view in snapshot.current_lanes(self._dispatcher.fabric, now):
                yield topic, view
            return
        try:
            signature = int(wanted, 16)
        except ValueError:
            return
        for model in self._dispatcher.fabric.models.values():
            group = model.groups.get(signature)
            if group is not None:
                yield topic, snapshot.lanes(self._dispatcher.fabric, group, now)
