"""What the tests of the dashboard look at: a day in the life of a real dispatcher, and screens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from tests.harness import Bench, FakeProducer
from zfabric import snapshot
from zfabric.protocol import Type
from zfabric.publishing import Publishing
from zfabric.shapes import Shape
from zfabric_tui.app import TopApp
from zfabric_tui.feed import CURRENT, Arrived
from zfabric_tui.recording import EVENT, LANES, SNAPSHOT, Writer

ADDRESS = "tcp://127.0.0.1:7410"
SIZES = ((80, 24), (120, 40), (200, 60))
SHAPES = 6


class Day:
    """A fabric with two cards, six shapes and two jobs, of which it keeps what was published."""

    def __init__(self, seed: int = 3, **config: Any) -> None:
        self.chance = random.Random(seed)
        self.bench = Bench(**config)
        self.bench.tick()
        self.publishing = Publishing(self.bench.dispatcher, 4.0)
        contract = {"model": "llama-3-8b", "batch": 32, "tokens": 65_536, "longest": 8_192}
        self.cards = [self.bench.worker(name, **contract) for name in ("gpu0", "gpu1")]
        self.shapes = [
            Shape.of("llama-3-8b", f"task {k}", tokens=[600 + 40 * k]) for k in range(SHAPES)
        ]
        self.producers: list[FakeProducer] = []
        self.views: list[dict[str, Any]] = []
        self.lanes: list[dict[str, Any]] = []
        # the lanes of every fifth second
        self.all_lanes: list[dict[str, Any]] = []

    def submit(self, name: str, count: int, expected: int) -> None:
        producer = self.bench.producer(name)
        self.producers.append(producer)
        producer.ask("expect", items=expected)
        lengths = [640 + int(self.chance.lognormvariate(5.2, 0.7)) for _ in range(count)]
        producer.submit(lengths, [self.chance.choice(self.shapes) for _ in range(count)])
        self.bench.settle()

    def work(self, seconds: float, batches: int = 1) -> None:
        """So many batches of each card every quarter second, each published."""
        for _ in range(int(seconds * 4)):
            for producer in self.producers:
                producer.send(Type.HEARTBEAT, {})
            self.bench.dispatch()
            for card in self.cards:
                for _ in range(batches):
                    if card.batches:
                        card.done(min(card.batches))
                queries = self.bench.fabric.workers[card.name].real_tokens
                stats = {"hits_tokens": int(queries * 0.884), "queries_tokens": queries}
                card.heartbeat(stats={**stats, "measured_by": "simulated", "state": "running"})
            self.bench.dispatch()
            self.bench.tick(0.25)
            self.publish()

    def publish(self) -> None:
        self.views.append(self.publishing.view(self.bench.now))
        self.lanes = snapshot.current_lanes(self.bench.fabric, self.bench.now)
        if len(self.views) % 20 == 0:
            self.all_lanes += self.lanes

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(self.bench.fabric.events)

    @property
    def lanes_by_signature(self) -> dict[str, dict[str, Any]]:
        return {lanes["signature"]: lanes for lanes in self.lanes}


def a_day() -> Day:
    """A job that has ended, and one of thousands of items under way."""
    day = Day()
    day.submit("bbh-few-shot", 1_800, 1_800)
    day.work(12.0, batches=4)
    day.submit("nightly-eval", 9_000, 24_000)
    day.work(30.0)
    return day


class FakeFeed:
    """What is given to it: the first `first` snapshots at once, then one a poll. For tests."""

    def __init__(
        self,
        views: Sequence[dict[str, Any]],
        events: Sequence[dict[str, Any]] = (),
        lanes: dict[str, dict[str, Any]] | None = None,
        *,
        first: int = 1,
    ) -> None:
        self.views = list(views)
        self._first = first
        self.events = list(events)
        self.lanes = lanes or {}
        self.followed: list[str | None] = []
        self.closed = False
        # what the connection is to say of itself, one a poll
        self.cuts: list[bool] = []

    def poll(self, timeout_s: float) -> Arrived:
        arrived = Arrived(events=self.events, cut=self.cuts.pop(0) if self.cuts else None)
        self.events = []
        arrived.snapshots, self.views = self.views[: self._first], self.views[self._first :]
        self._first = 1
        wanted = self.followed[-1] if self.followed else None
        if wanted == CURRENT:
            wanted = next(reversed(self.lanes), None)
        if wanted in self.lanes:
            arrived.lanes = {wanted: self.lanes[wanted]}
        return arrived

    def follow(self, signature: str | None) -> None:
        self.followed.append(signature)

    def close(self) -> None:
        self.closed = True


class FakeDesk:
    """Remembers what it was asked; answers or refuses as it was told."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers = answers or {}
        self.role: str | None = None

    def ask(self, op: str, **args: Any) -> Any:
        if op == "events":
            return []
        self.asked.append((op, args))
        answer = self.answers.get(op)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stats_address(self) -> str:
        return "tcp://127.0.0.1:7412"


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def recorded(day: Day, path: Path, leave_out: slice = slice(0, 0)) -> Path:
    """A recording of the day, without some of its snapshots."""
    writer = Writer(path, release="test", limit_bytes=1 << 30)
    lost = set(range(len(day.views))[leave_out])
    for k, view in enumerate(day.views):
        if k not in lost:
            writer.add(SNAPSHOT, view["time"], msgpack.packb(view))
    for event in day.events:
        writer.add(EVENT, event["time"], msgpack.packb(event))
    for lanes in day.all_lanes:
        writer.add(LANES, lanes["time"], msgpack.packb(lanes), lanes["signature"])
    writer.close()
    return path


def screen_of(app: TopApp) -> list[str]:
    """What the terminal shows, a text a line."""
    strips = app.screen._compositor.render_strips()
    return [strip.text.rstrip() for strip in strips]


def golden(name: str) -> Path:
    return Path(__file__).parent / "screens" / f"{name}.txt"
