"""What the figures of a running fabric say: rates, ages, trends, alarms.

Pure: no clock, no terminal, no socket. Rates are per second of the broker's own time, so that a
dashboard that was late shows no burst; there is none across a restart of the broker or a stretch
of which nothing is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zfabric.words import counted
from zfabric_tui.text import BAD, WARN, duration, plain

Snapshot = dict[str, Any]
# A snapshot older than this is from a broker that has gone quiet, and a stretch of time longer than
# this between two is one of which nothing is known.
STALE_S = 3.0
# Rates of the fabric and its cards; batches end in bursts, and quarter seconds flicker.
RATE_S = 5.0
# Rates of jobs, for the time until they are done.
JOB_RATE_S = 30.0
TREND_S = 180
EVENTS_KEPT = 2_000
# Shapes whose lanes are kept: the one that is shown, and those that a recording takes along.
LANES_KEPT = 5
# A share of a lease after which a card's silence is worth a word.
QUIET_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Mark:
    """The counters of a snapshot that rates are made of."""

    time_s: float
    items: int
    real_tokens: int
    padded_tokens: int
    accepted: int
    # by name of card: items, real and padded tokens
    cards: dict[str, tuple[int, int, int]]
    # by name of job: ended items
    jobs: dict[str, int]


def mark(snapshot: Snapshot) -> Mark:
    """The counters of a snapshot."""
    return Mark(
        snapshot["time"],
        snapshot["completed_items"],
        snapshot["real_tokens"],
        snapshot["padded_tokens"],
        snapshot["accepted_items"],
        {
            w["name"]: (w["items_done"], w["real_tokens"], w["padded_tokens"])
            for w in snapshot["workers"]
        },
        {job["name"]: ended_items(job) for job in snapshot["jobs"]},
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second; None before there is anything to compare with."""

    items: float | None = None
    accepted: float | None = None
    real_tokens: float | None = None
    padded_tokens: float | None = None
    # by name: items, real and padded tokens
    cards: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    jobs: dict[str, float] = field(default_factory=dict)


def rates(before: Mark | None, marks: Sequence[Mark], after: Mark) -> Rates:
    """The rates from one mark to another; those of jobs from the first of `marks` that knows it."""
    if before is None or after.time_s <= before.time_s:
        return Rates()
    seconds = after.time_s - before.time_s
    cards = {
        name: tuple((now - then) / seconds for now, then in zip(counts, known, strict=True))
        for name, counts in after.cards.items()
        if (known := before.cards.get(name)) is not None and counts[0] >= known[0]
    }
    jobs = {}
    for name, ended in after.jobs.items():
        first = next((m for m in marks if name in m.jobs), after)
        if first.time_s < after.time_s and first.jobs[name] <= ended:
            jobs[name] = (ended - first.jobs[name]) / (after.time_s - first.time_s)
    return Rates(
        items=(after.items - before.items) / seconds,
        accepted=(after.accepted - before.accepted) / seconds,
        real_tokens=(after.real_tokens - before.real_tokens) / seconds,
        padded_tokens=(after.padded_tokens - before.padded_tokens) / seconds,
        cards={name: (c[0], c[1], c[2]) for name, c in cards.items()},
        jobs=jobs,
    )


class History:
    """What a dashboard remembers: counters of half a minute, a trend of three, events. Bounded."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.rates = Rates()
        self.lanes: dict[str, dict[str, Any]] = {}
        # by time and number: numbers begin again when the broker does
        self._events: dict[tuple[float, int], dict[str, Any]] = {}
        self._marks: deque[Mark] = deque()
        # items/s of each whole second of the broker's clock
        self._trend: deque[tuple[int, float]] = deque(maxlen=TREND_S)
        self._second: Mark | None = None

    def forget(self) -> None:
        """What comes next does not follow what was."""
        self._marks.clear()
        self._trend.clear()
        self._second = None
        self._events.clear()
        self.lanes.clear()
        self.rates = Rates()

    def add(self, snapshot: Snapshot) -> None:
        """The next snapshot."""
        if self.snapshot is not None and not _follows(self.snapshot, snapshot):
            self._marks.clear()
            self._second = None
        self.snapshot = snapshot
        now = mark(snapshot)
        self.rates = rates(self._back(now, RATE_S), self._marks, now)
        if not self._marks or now.time_s - self._marks[-1].time_s >= 1.0:
            self._marks.append(now)
            while now.time_s - self._marks[0].time_s > JOB_RATE_S + 1.0:
                self._marks.popleft()
        self._note_trend(now)

    def _back(self, now: Mark, seconds: float) -> Mark | None:
        """The newest mark that is so old, or else the oldest."""
        for known in reversed(self._marks):
            if now.time_s - known.time_s >= seconds:
                return known
        return self._marks[0] if self._marks else None

    def _note_trend(self, now: Mark) -> None:
        second = self._second
        if second is None:
            self._second = now
        elif now.time_s - second.time_s >= 1.0:
            rate = (now.items - second.items) / (now.time_s - second.time_s)
            self._trend.append((int(now.time_s), rate))
            self._second = now

    def add_events(self, events: Sequence[dict[str, Any]]) -> None:
        """More events, in any order; those that are known are left out."""
        known = self._events
        last = next(reversed(known), (0.0, 0))
        fresh = {(e["time"], e["seq"]): e for e in events if (e["time"], e["seq"]) not in known}
        if not fresh:
            return
        known |= fresh
        if min(fresh) < last:
            self._events = known = dict(sorted(known.items()))
        while len(known) > EVENTS_KEPT:
            del known[next(iter(known))]

    def add_lanes(self, lanes: dict[str, dict[str, Any]]) -> None:
        """Newer lanes of some shapes."""
        for signature, view in lanes.items():
            self.lanes.pop(signature, None)
            self.lanes[signature] = view
        while len(self.lanes) > LANES_KEPT:
            del self.lanes[next(iter(self.lanes))]

    def lanes_of(self, signature: str | None) -> dict[str, Any] | None:
        """The lanes of a shape, or those that came last; None where there are none."""
        if signature is not None:
            return self.lanes.get(signature)
        return self.lanes[next(reversed(self.lanes))] if self.lanes else None

    @property
    def events(self) -> list[dict[str, Any]]:
        """What has happened, oldest first."""
        return list(self._events.values())

    def trend(self, seconds: int) -> list[float | None]:
        """Items/s of each of the last `seconds`, oldest first; None where nothing is known."""
        if self.snapshot is None:
            return [None] * seconds
        last = int(self.snapshot["time"])
        known = dict(self._trend)
        # A second that no snapshot fell into, between two that have a rate, is not a gap.
        return [
            known.get(second, known.get(second + 1) if second - 1 in known else None)
            for second in range(last - seconds + 1, last + 1)
        ]


def _follows(before: Snapshot, after: Snapshot) -> bool:
    """Whether one broker said both, and no stretch of which nothing is known lies between."""
    seconds: float = after["time"] - before["time"]
    return before["boot_id"] == after["boot_id"] and 0 <= seconds <= STALE_S


# -- jobs -----------------------------------------------------------------------------------------


def ended_items(job: dict[str, Any]) -> int:
    """Items of a job that nothing more will come of; completed ones may have failed."""
    ended: int = job["completed_items"] + job["dead_items"] + job["refused_items"]
    return ended


def not_done(job: dict[str, Any]) -> int:
    """Items of a job that ended without a completion."""
    ends = ("failed_items", "cancelled_items", "dead_items", "refused_items")
    return sum(job[end] for end in ends)


def is_over(job: dict[str, Any]) -> bool:
    """Whether a job is done: all that it said, or all that it left here when it went away."""
    expected, ended = job["expected_items"], ended_items(job)
    if expected is not None and ended >= expected:
        return True
    return not job["live"] and ended >= job["accepted_items"] + job["refused_items"]


def total_items(job: dict[str, Any]) -> int | None:
    """All items of a job: as many as it said, or as it left here when it went away; else None."""
    total: int | None = job["expected_items"]
    if total is None and not job["live"]:
        total = job["accepted_items"] + job["refused_items"]
    return total


def eta_s(job: dict[str, Any], items_per_s: float | None) -> float | None:
    """Seconds until a job of which it is known how much it has is done, at this rate."""
    total = total_items(job)
    if not items_per_s or total is None:
        return None
    return max(0.0, (total - ended_items(job)) / items_per_s)


# -- alarms ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that is wrong: how bad (`bad`, `warn`), what, and where to look or what to run."""

    level: str
    text: str
    hint: str


def alarms(snapshot: Snapshot) -> list[Alarm]:
    """What is wrong, worst first; empty when the fabric is healthy."""
    found = [*_books(snapshot), *_models(snapshot), *_cards(snapshot)]
    if snapshot["dead_records"]:
        dead = counted(snapshot["dead_records"], "dead item")
        found.append(Alarm(WARN, dead, "zfabric dead ls; r sends them round again"))
    if snapshot["waste_verdict"] != "healthy":
        found.append(Alarm(WARN, f"padding: {snapshot['waste_verdict']}", "w explains"))
    recovery = snapshot["recovery"]
    if recovery is not None and (recovery["quarantined_items"] or recovery["quarantined_files"]):
        items = counted(recovery["quarantined_items"], "item")
        files = counted(recovery["quarantined_files"], "file")
        found.append(Alarm(WARN, f"set aside at the start: {items}, {files}", "docs/storage.md"))
    if snapshot["state"] == "draining":
        found.append(Alarm(WARN, "the broker is draining", "it ends when all is finished"))
    return sorted(found, key=lambda alarm: alarm.level != BAD)


def _books(snapshot: Snapshot) -> list[Alarm]:
    found = []
    if snapshot["residual_items"] or snapshot["residual_tokens"]:
        residual = counted(snapshot["residual_items"], "item")
        found.append(Alarm(BAD, f"RESIDUAL {residual}: the books do not balance", "5 flow"))
    if snapshot["storage"]["full"] is not None:
        found.append(Alarm(BAD, f"disk full: {plain(snapshot['storage']['full'], 60)}", "5 flow"))
    return found


def _models(snapshot: Snapshot) -> list[Alarm]:
    found = []
    for model in snapshot["models"]:
        name = plain(model["model"], 30)
        if model["paused"]:
            found.append(Alarm(WARN, f"{name} is paused", "p resumes it"))
        elif model["ready_items"] and not model["workers"]:
            found.append(Alarm(BAD, f"{name} has work and no worker", "zfabric worker"))
    return found


def _cards(snapshot: Snapshot) -> list[Alarm]:
    found = []
    for worker in snapshot["workers"]:
        name = plain(worker["name"], 30)
        if worker["in_flight"] and not worker["live"]:
            held = counted(worker["in_flight"], "batch")
            found.append(Alarm(BAD, f"{name} is gone with {held}", "4 cards"))
        elif worker["live"] and worker["heartbeat_age_s"] > QUIET_SHARE * worker["lease_s"]:
            silent = duration(worker["heartbeat_age_s"])
            found.append(Alarm(WARN, f"{name} is silent for {silent}", "4 cards"))
    return found
