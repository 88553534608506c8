"""The broker's hot path in one process: what each step costs for each item, without a socket.

A producer, two workers and a store are driven as the broker's loop drives them. Timed, for people;
the same drive is counted in bytecode instructions by a check. CPU is microseconds an item.
"""

from __future__ import annotations

import random
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import zfabric
from zfabric.access import PRODUCERS, WORKERS
from zfabric.bench.lengths import synthetic
from zfabric.config import BrokerConfig
from zfabric.dispatcher import Dispatcher
from zfabric.osfiles import OsFiles
from zfabric.outgoing import sending_order
from zfabric.protocol import FROM_BROKER, Type, decode, encode, packed
from zfabric.recovery import open_backing
from zfabric.results import window_items
from zfabric.shapes import Shape
from zfabric.store import Store

MODEL = "bench"
ITEMS_MAX = 10**8
CONTRACT = {"batch_items_max": 32, "batch_tokens_max": 65_536, "input_tokens_max": 65_536}
# Of a message, and that are submitted and finished between two syncs.
MESSAGE_ITEMS, TURN_ITEMS = 512, 2_048
WORKERS_NAMES = (b"w0", b"w1")
# Of the drive's clock, which goes on where nothing moves, too.
ITEMS_PER_S, TURN_S = 15_000, 0.001
STEPS = ("accept", "write", "offer", "commit", "done", "ack", "tick")


class Load(NamedTuple):
    """What is driven: `waiting` items a shape are queued all along, `items` are counted."""

    shapes: int = 16
    lanes: int = 60
    waiting: int = 10_000
    items: int = 60_000
    size: int = 2_048


class Drive:
    """A dispatcher, and everything around it that a broker's loop would be."""

    def __init__(self, directory: Path | None, load: Load, lengths: Sequence[int]) -> None:
        backing = None
        if directory is not None:
            backing, _ = open_backing(directory, "fsync", OsFiles(directory))
        config = BrokerConfig(
            data=str(directory) if directory else None,
            lanes=load.lanes,
            # Waiting for a trickle would be counted as work.
            linger_ms=0,
            hold_s=0.0,
            max_items=ITEMS_MAX,
            producer_items_max=ITEMS_MAX,
            max_bytes=10**12,
        )
        self.dispatcher = Dispatcher(config, Store(backing), 1)
        self.backing = self.dispatcher.fabric.store.backing
        self.spent: Counter[str] = Counter()
        self.completed = 0
        self._rng = random.Random(1)
        self._lengths, self._payload = lengths, bytes(load.size)
        self._shapes = [Shape.of(MODEL, str(k)) for k in range(load.shapes)]
        # places in the shapes, and lengths, that go next, of a window as the SDK sends them
        self._window: list[tuple[int, int]] = []
        self._window_items = window_items(load.shapes * load.waiting)
        self._next = 1
        self._turns = 0
        self._held: dict[bytes, deque[Any]] = {name: deque() for name in WORKERS_NAMES}
        self._acked = 0
        self._say(PRODUCERS, b"p", Type.HELLO, {"role": "producer", "name": "p", "instance": 1})
        for k, shape in enumerate(self._shapes):
            words = struct.pack("<Q", shape.components[0])
            self._say(PRODUCERS, b"p", Type.SHAPE, {"id": k, "model": MODEL, "components": words})
        for name in WORKERS_NAMES:
            hello = {"role": "worker", "name": name.decode(), "instance": 1, "model": MODEL}
            self._say(WORKERS, name, Type.HELLO, {**hello, **CONTRACT})
            self._say(WORKERS, name, Type.HEARTBEAT, {"received": 0, "window": 2})

    def _say(
        self,
        endpoint: str,
        name: bytes,
        kind: Type,
        fields: dict[str, Any],
        columns: Sequence[bytes] = (),
        body: bytes | None = None,
    ) -> None:
        frames = encode(kind, fields, columns, body)
        self.dispatcher.receive(endpoint, name, frames, self._now_s)

    @property
    def _now_s(self) -> float:
        """A clock that goes with the work, so that counts do not depend on the machine's speed."""
        return (self._next + self.completed) / 2 / ITEMS_PER_S + self._turns * TURN_S

    @property
    def ready_items(self) -> int:
        """Items that wait."""
        return self.dispatcher.fabric.store.ready_items

    @property
    def submitted(self) -> int:
        """Items that the producer has sent."""
        return self._next - 1

    def submit(self, upto: int) -> None:
        """Messages of a producer, until `upto` items are submitted: one turn's at most."""
        for _ in range(TURN_ITEMS // MESSAGE_ITEMS):
            if self.submitted < upto:
                self._submit()

    def _submit(self) -> None:
        if not self._window:
            drawn = self._rng.choices(self._lengths, k=self._window_items)
            of = [k % len(self._shapes) for k in range(self._window_items)]
            order = sending_order([self._shapes[k] for k in of], drawn)
            self._window = [(of[k], drawn[k]) for k in order]
        message, self._window = self._window[:MESSAGE_ITEMS], self._window[MESSAGE_ITEMS:]
        items, lengths = len(message), [length for _, length in message]
        numbers = range(self._next, self._next + items)
        order = sorted(range(items), key=lengths.__getitem__, reverse=True)
        columns = [
            packed("Q", numbers),
            packed("I", lengths),
            packed("I", [len(self._payload)] * items),
            packed("I", [shape for shape, _ in message]),
            packed("I", order),
        ]
        frames = encode(
            Type.SUBMIT, {"after": self._next - 1, "more": True}, columns, self._payload * items
        )
        self._next += items
        with Timed(self.spent, "accept"):
            self.dispatcher.receive(PRODUCERS, b"p", frames, self._now_s)

    def turn(self) -> None:
        """What one turn of the loop does, with its sync."""
        self._turns += 1
        now = self._now_s
        for peer in self.dispatcher.peers.values():
            peer.heard_s = now
        with Timed(self.spent, "tick"):
            self.dispatcher.tick(now, time.time(), drained=True)
        with Timed(self.spent, "write"):
            self.dispatcher.flush(now)
            while self.dispatcher.writing:
                self.dispatcher.flush(now)
        if self.dispatcher.sync_wanted:
            self.backing.sync()
            with Timed(self.spent, "write"):
                self.dispatcher.synced()

    def hand_out(self) -> None:
        """Offers until there are none."""
        while True:
            now = self._now_s
            with Timed(self.spent, "offer"):
                offer = self.dispatcher.next_offer(now)
            if offer is None or offer.worker.peer is None:
                return
            with Timed(self.spent, "commit"):
                self.dispatcher.commit(offer, now)
            self._held[offer.worker.peer.routing_id].append(offer.frames)

    def finish(self) -> None:
        """Each worker starts and finishes all that it has."""
        for name, held in self._held.items():
            while held:
                message = decode(held.popleft(), FROM_BROKER)
                batch_id = {k: message.fields[k] for k in ("epoch", "n")}
                items = len(message.columns["nonces"])
                columns = [
                    packed("Q", message.columns["nonces"]),
                    packed("I", message.columns["entries"]),
                    bytes(items),
                    packed("I", [8] * items),
                ]
                started = encode(Type.STARTED, batch_id, [b""])
                done = encode(Type.DONE, batch_id, columns, bytes(8 * items))
                with Timed(self.spent, "done"):
                    self.dispatcher.receive(WORKERS, name, started, self._now_s)
                    self.dispatcher.receive(WORKERS, name, done, self._now_s)
                self.completed += items

    def read(self) -> None:
        """The producer takes its results."""
        outgoing = self.dispatcher.outgoing
        seq = 0
        while outgoing:
            frames = outgoing.popleft().frames
            if frames[0][3] == Type.RESULT:
                message = decode(frames, FROM_BROKER)
                seq = message.fields["seq"] + len(message.columns["numbers"]) - 1
        if seq:
            ack = encode(Type.RESULT_ACK, {"upto": seq})
            with Timed(self.spent, "ack"):
                self.dispatcher.receive(PRODUCERS, b"p", ack, self._now_s)


class Timed:
    """CPU seconds of a block, added to a counter; what it cost to look is taken off."""

    def __init__(self, spent: Counter[str], step: str) -> None:
        self._spent, self._step = spent, step

    def __enter__(self) -> None:
        self._started = time.thread_time()

    def __exit__(self, *exc: object) -> None:
        self._spent[self._step] += time.thread_time() - self._started  # type: ignore[assignment]


# Small enough for a test; its instructions for each item, by version of Python.
COUNTED = Load(shapes=4, lanes=60, waiting=1_024, items=2_048)
RECORDED = {"3.11": 1_118.0}
# Growth that fails the check.
GROWTH_MAX = 1.2


def run(
    directory: Path | None,
    load: Load,
    lengths: Sequence[int],
    begins: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """CPU microseconds an item of each step; in memory where there is no directory.

    `begins` is called once everything that is to be counted follows.
    """
    drive = Drive(directory, load, lengths)
    waiting = load.shapes * load.waiting
    while drive.submitted < waiting:
        drive.submit(waiting)
        drive.turn()
        drive.read()
    drive.spent.clear()
    begins()
    while drive.completed < load.items:
        before = drive.completed
        while drive.completed - before < TURN_ITEMS and drive.ready_items:
            drive.hand_out()
            drive.finish()
        drive.submit(waiting + drive.completed)
        drive.turn()
        drive.read()
    figures = {f"{step}_us": drive.spent[step] * 1e6 / drive.completed for step in STEPS}
    drive.backing.close()
    return {**figures, "total_us": sum(figures.values())}


def counted(directory: Path, load: Load = COUNTED) -> float:
    """Bytecode instructions of this package for each item, the drive itself left out."""
    package = str(Path(zfabric.__file__).parent)
    before, instructions = sys.gettrace(), 0

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(package) or name == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal instructions
        instructions += event == "opcode"
        return count

    try:
        run(directory, load, synthetic(), lambda: sys.settrace(enter))
    finally:
        sys.settrace(before)
    return instructions / load.items
