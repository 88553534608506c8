"""Measuring `zfabric top`: what the dashboard costs, and what publishing costs the broker.

A broker in this process holds shapes with every lane in use; `zfabric top` runs in a terminal of
its own beside it, as a user's would. CPU is a share of one core, read from the system's own
accounts over some seconds; with and without a subscriber by turns, so that both see the same
machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import resource
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zfabric.broker import Broker

SIZE = (120, 40)
# Tokens between two lanes, over which a lane of its own opens whatever the threshold.
STEP_TOKENS = 130
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A dashboard that has just started draws everything once.
SETTLE_S = 4.0
PAIRS = 2
# Seconds of the fabric's time for which snapshots are made, as fast as they can be.
MADE_S = 20
# Turns of the loop in which nobody watches; a busy broker makes some thousands a second.
TURNS = 100_000


def measure(
    shapes: int, lanes: int, seconds: int, snapshots: int, only: str | None
) -> Iterator[tuple[str, Any]]:
    """(name, value) of every figure once it is known, since all of them take minutes.

    Those of the CPU or of the memory alone where `only` says so.
    """
    made: dict[str, Any] = {}
    with _broker(shapes, lanes, made) as (broker, address):
        yield from made.items()
        yield "lanes_in_use", broker.ask(60.0)["lanes_active"]
        if only != "memory":
            with _worker(address):
                yield from _publishing(broker, address, seconds).items()
                yield from _dashboard(broker, address, seconds)
        view = broker.ask(60.0)
    if only != "cpu":
        yield from _memory(view, snapshots).items()


@contextlib.contextmanager
def _broker(shapes: int, lanes: int, figures: dict[str, Any]) -> Iterator[tuple[Broker, str]]:
    """A broker in a thread of this process, every lane of every shape in use.

    What making its snapshots costs is measured before it runs, and added to `figures`.
    """
    from zfabric.broker import Broker
    from zfabric.config import BrokerConfig
    from zfabric.shapes import Shape

    broker = Broker(BrokerConfig(memory=True, port=0, lanes=lanes, log="off"))
    address = broker.bind().producers
    fabric = broker.dispatcher.fabric
    producer = fabric.producer("bench", time.monotonic())
    lengths = [STEP_TOKENS * (k + 1) for k in range(lanes)]
    payloads = [b""] * lanes
    for number in range(shapes):
        first = producer.accepted_items + 1
        numbers = range(first, first + lanes)
        shape = Shape.of("bench", f"shape {number}")
        fabric.accept(shape, producer, numbers, lengths, payloads, time.monotonic())
    fabric.publish(time.monotonic())
    fabric.models["bench"].draining.choose(time.monotonic(), pending_items=0, intake_full=True)
    figures |= _making(broker)
    thread = threading.Thread(target=broker.run, name="broker", daemon=True)
    thread.start()
    try:
        yield broker, address
    finally:
        broker.stop()
        thread.join()


@contextlib.contextmanager
def _worker(address: str) -> Iterator[None]:
    """A slow worker, so that figures move and pictures differ."""
    contract = ["--max-batch", "32", "--max-tokens", "1048576", "--max-input", "1048576"]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "zfabric", "worker", "--engine", "sim", "--model", "bench",
            "--name", "card", "--broker", address, *contract, "--opt", "batch_us=100000",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _making(broker: Broker) -> dict[str, Any]:
    """CPU of making and packing what a dashboard on its lanes gets, percent of one core.

    And of asking in each turn of the loop whether there is anything to make, while nobody watches.
    Nothing else runs, so that it is no difference of two larger loads; sending is not in it.
    """
    import msgpack

    from zfabric.publishing import Publishing

    nobody = Publishing(broker.dispatcher, 4)
    started = time.process_time()
    for _ in range(TURNS):
        for _ in nobody.messages(time.monotonic()):
            pass
    used_s = time.process_time() - started
    figures = {"publishing_us_a_turn_unwatched": 1e6 * used_s / TURNS}
    for hz in (4, 10):
        made = Publishing(broker.dispatcher, hz)
        for topic in (b"snapshot", b"event", b"lanes:current"):
            made.changed(b"\x01" + topic)
        now, started = time.monotonic(), time.process_time()
        for k in range(hz * MADE_S):
            for _, value in made.messages(now + k / hz):
                msgpack.packb(value)
        used_s = time.process_time() - started
        figures[f"making_cpu_percent_{hz}_hz"] = 100 * used_s / MADE_S
    return figures


class _Terminal:
    """`zfabric top` in a terminal that somebody reads."""

    def __init__(self, address: str, hz: int, page: str) -> None:
        self._fd, inner = pty.openpty()
        size = struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0)
        fcntl.ioctl(inner, termios.TIOCSWINSZ, size)
        words = ["top", "--broker", address, "--hz", str(hz)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zfabric", *words],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(inner)
        self.rest(SETTLE_S)
        os.write(self._fd, page.encode())
        self.rest(SETTLE_S)

    def rest(self, seconds: float) -> None:
        """Read what it writes, for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._fd], [], [], left)[0]:
                os.read(self._fd, 65_536)

    def cpu_s(self) -> float:
        """What it has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def close(self) -> None:
        """The end."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def _share(used_s: Callable[[], float], rest: Callable[[float], None], seconds: int) -> float:
    """CPU over a while, in percent of one core."""
    before, started = used_s(), time.monotonic()
    rest(seconds)
    return 100 * (used_s() - before) / (time.monotonic() - started)


def _publishing(broker: Broker, address: str, seconds: int) -> dict[str, Any]:
    """The broker's CPU with nobody watching, and with one dashboard on its lanes."""
    idle: list[float] = []
    watched: dict[int, list[float]] = {4: [], 10: []}
    for _ in range(PAIRS):
        idle.append(_share(time.process_time, time.sleep, seconds))
        for hz, shares in watched.items():
            broker.publishing.interval_s = 1 / hz
            terminal = _Terminal(address, hz, "2")
            shares.append(_share(time.process_time, terminal.rest, seconds))
            terminal.close()
        time.sleep(1.0)
    base = sum(idle) / PAIRS
    return {
        "broker_cpu_percent_unwatched": idle,
        **{f"broker_cpu_percent_watched_{hz}_hz": shares for hz, shares in watched.items()},
        **{
            f"publishing_cpu_percent_{hz}_hz": sum(shares) / PAIRS - base
            for hz, shares in watched.items()
        },
    }


def _dashboard(broker: Broker, address: str, seconds: int) -> Iterator[tuple[str, float]]:
    """The dashboard's CPU by page and rate."""
    for hz in (4, 10):
        broker.publishing.interval_s = 1 / hz
        for name, key in (("overview", "1"), ("lanes", "2"), ("shapes", "3")):
            terminal = _Terminal(address, hz, key)
            share = _share(terminal.cpu_s, terminal.rest, seconds)
            terminal.close()
            yield f"dashboard_cpu_percent_{name}_{hz}_hz", share


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _memory(view: dict[str, Any], snapshots: int) -> dict[str, Any]:
    """A dashboard in this process that is fed snapshots that all differ; its memory by tenths."""
    import asyncio

    from zfabric_tui.app import TopApp
    from zfabric_tui.feed import Arrived

    class Endless:
        """Snapshots a quarter second apart, with an event now and then."""

        def __init__(self) -> None:
            self.given = 0

        def poll(self, timeout_s: float) -> Arrived:
            self.given += 1
            k, at = self.given, view["time"] + self.given / 4
            done = {"completed_items": k * 40, "real_tokens": k * 900, "padded_tokens": k * 950}
            events = [{"seq": k, "time": at, "event": "worker_joined", "text": f"gpu{k}"}]
            return Arrived([{**view, "time": at, **done}], events if not k % 7 else [])

        def follow(self, signature: str | None) -> None:
            """There are no lanes."""

        def close(self) -> None:
            """Nothing to close."""

    feed = Endless()
    app = TopApp(feed, "bench", hz=0.001)
    seen: list[float] = []

    async def feed_it() -> None:
        async with app.run_test(size=SIZE):
            for k in range(10):
                app.action_open(("overview", "shapes", "events", "flow", "waste")[k % 5])
                while feed.given < snapshots * (k + 1) // 10:
                    app.refresh_picture()
                    if not feed.given % 8:
                        await asyncio.sleep(0)
                seen.append(_rss_mib())

    started = time.monotonic()
    asyncio.run(feed_it())
    return {
        "snapshots": snapshots,
        "memory_mib_after_each_tenth": [round(mib, 1) for mib in seen],
        "ms_a_snapshot": 1_000 * (time.monotonic() - started) / snapshots,
    }
