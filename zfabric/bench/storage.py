"""What the store on disk costs: recovery, memory, one group commit, the latency of a promise.

Recovery and commit drive the dispatcher in this process, so that nothing else is measured; memory
and ack start a real broker. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zfabric.access import PRODUCERS
from zfabric.bench import percentile
from zfabric.client import Client
from zfabric.config import BrokerConfig
from zfabric.dispatcher import Dispatcher
from zfabric.osfiles import OsFiles
from zfabric.protocol import Type, encode, packed
from zfabric.recovery import open_backing
from zfabric.restore import restore
from zfabric.results import Item, Results
from zfabric.shapes import Shape
from zfabric.store import Store

MESSAGE = 1_024
# items that fill an allocator's pools before anything is measured
ROUND = 128 * MESSAGE
ITEMS_MAX = 10**8
# Messages that were on their way are gone after this long.
SETTLE_S = 3.0
LIMITS: dict[str, Any] = {"max_items": ITEMS_MAX, "producer_items_max": ITEMS_MAX}
PEER = b"bench"


class Commit(NamedTuple):
    """What a group commit took: seconds in all and of the longest turn, and how many turns."""

    write_s: float
    sync_s: float
    turn_max_s: float
    turns: int


class Feeder:
    """A dispatcher on a directory, and a producer that only submits."""

    def __init__(self, directory: Path, shapes: int, lengths: Iterator[int], size: int) -> None:
        self.backing, self.found = open_backing(directory, "fsync", OsFiles(directory))
        config = BrokerConfig(
            data=str(directory), max_items=ITEMS_MAX, producer_items_max=ITEMS_MAX
        )
        self.dispatcher = Dispatcher(config, Store(self.backing), 1)
        self._shapes, self._lengths, self._payload = shapes, lengths, bytes(size)
        self._next = 1
        self._send(Type.HELLO, {"role": "producer", "name": "bench", "instance": 1})
        for k in range(shapes):
            words = struct.pack("<Q", Shape.of("bench", str(k)).components[0])
            self._send(Type.SHAPE, {"id": k, "model": "bench", "components": words})

    def _send(
        self, kind: Type, fields: dict[str, Any], columns: Any = (), body: Any = None
    ) -> None:
        frames = encode(kind, fields, columns, body)
        self.dispatcher.receive(PRODUCERS, PEER, frames, time.monotonic())

    def submit(self, items: int) -> None:
        """One message; nothing is written before `commit`."""
        lengths = [next(self._lengths) for _ in range(items)]
        numbers = range(self._next, self._next + items)
        columns = [
            packed("Q", numbers),
            packed("I", lengths),
            packed("I", [len(self._payload)] * items),
            packed("I", [number % self._shapes for number in numbers]),
            b"",
        ]
        fields = {"after": self._next - 1, "more": True}
        self._send(Type.SUBMIT, fields, columns, self._payload * items)
        self._next += items

    def commit(self) -> Commit:
        """Write and sync what was submitted, in as many turns of the loop as that takes."""
        turns: list[float] = []
        sync_s = 0.0
        while not turns or self.dispatcher.writing or self.dispatcher.sync_wanted:
            started = time.perf_counter()
            self.dispatcher.flush(time.monotonic())
            written = time.perf_counter()
            turns.append(written - started)
            if self.dispatcher.sync_wanted and not self.dispatcher.writing:
                # A sync takes other turns' time: here, all is written before the first one ends.
                self.backing.sync()
                sync_s += time.perf_counter() - written
                self.dispatcher.synced()
        self.dispatcher.outgoing.clear()
        return Commit(sum(turns), sync_s, max(turns), len(turns))


def _cycle(shortest: int, longest: int) -> Iterator[int]:
    """Lengths that walk through a range in steps that share no factor with it."""
    span, at = longest - shortest + 1, 0
    while True:
        at = (at + 7_919) % span
        yield shortest + at


def _fill(directory: Path, items: int, size: int) -> Feeder:
    feeder = Feeder(directory, 16, _cycle(20, 4_000), size)
    done = 0
    while done < items:
        for _ in range(16):
            feeder.submit(MESSAGE)
        feeder.commit()
        done += 16 * MESSAGE
    return feeder


class _Process:
    """A real broker on `directory`, and a client that submits to it."""

    def __init__(self, directory: Path) -> None:
        limits = ("--max-items", str(ITEMS_MAX), "--producer-items-max", str(ITEMS_MAX))
        words = ["broker", "--port", "0", "--data", str(directory), "--json", *limits]
        words += ["--max-bytes", str(ITEMS_MAX * MESSAGE)]
        command = [sys.executable, "-m", "zfabric", *words]
        self.broker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            ready = self.broker.stdout.readline() if self.broker.stdout is not None else ""
            self.client = Client(
                json.loads(ready)["producers"], name="bench", buffer_items=ITEMS_MAX
            )
        except BaseException:
            self.broker.kill()
            raise

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self.broker.kill()
        self.broker.wait()

    def await_queued(self, items: int) -> None:
        """Wait until so many items wait in the broker."""
        while self.client.stats(60.0)["ready_items"] != items:
            time.sleep(0.1)

    def rss_bytes(self) -> int:
        """What the broker's process has in memory, once it is at rest."""
        time.sleep(SETTLE_S)
        pages = Path(f"/proc/{self.broker.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _submit(
    client: Client,
    items: int,
    size: int,
    lengths: Iterator[int],
    shapes: int,
    progress: Callable[[int], None],
) -> None:
    of = [Shape.of("bench", str(k)) for k in range(shapes)]
    payload, sink = bytes(size), Results()
    for start in range(0, items, MESSAGE):
        count = min(MESSAGE, items - start)
        client.enqueue_waiting(
            [Item(of[k % shapes], payload, next(lengths)) for k in range(count)], sink, None
        )
        progress(start + count)


def memory(
    directory: Path, items: int, size: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Memory of a real broker for each queued item, over the same broker when it was empty.

    Before that it takes in one round of items, all in one lane, and gives them up again, so that
    what its allocator keeps for messages on their way is no part of the figure.
    """
    with _Process(directory) as process:
        _submit(process.client, ROUND, size, itertools.repeat(1), 1, lambda done: None)
        process.await_queued(ROUND)
        process.client.request("producers.cancel", 60.0, name="bench")
        process.await_queued(0)
        empty = process.rss_bytes()
        _submit(process.client, items, size, _cycle(20, 4_000), 16, progress)
        process.await_queued(items)
        used = process.rss_bytes() - empty
        stats = process.client.stats(60.0)
    return {
        "items": items,
        "lanes": stats["lanes_active"],
        "empty_bytes": empty,
        "bytes": used,
        "bytes_per_item": used / items,
    }


def recovery(directory: Path, items: int, size: int) -> dict[str, Any]:
    """Start on a directory of queued items that a broker left when it was killed.

    Both the floor, which reads every file once, and the start begin with nothing in the cache.
    """
    feeder = _fill(directory, items, size)
    queued = feeder.dispatcher.fabric.store.items
    feeder.backing.close()
    del feeder
    _evict(directory)
    floor_s = _read_all(directory)
    _evict(directory)
    started = time.perf_counter()
    backing, found = open_backing(directory, "fsync", OsFiles(directory))
    config = BrokerConfig(data=str(directory), **LIMITS)
    dispatcher = Dispatcher(config, Store(backing), 2)
    restore(dispatcher.fabric, backing, found, time.monotonic())
    seconds = time.perf_counter() - started
    recovered = dispatcher.fabric.store.items
    backing.close()
    return {
        "items": queued,
        "recovered": recovered,
        "seconds": seconds,
        "items_per_s": recovered / seconds,
        "mb_per_s": found.bytes_read / 1e6 / seconds,
        "floor_mb_per_s": found.bytes_read / 1e6 / floor_s,
        "share_of_floor": floor_s / seconds,
    }


def _evict(directory: Path) -> None:
    """Let the system forget what it has read or written of these files."""
    OsFiles(directory).sync_all()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _read_all(directory: Path) -> float:
    """The floor: seconds to read every segment once, in order."""
    started = time.perf_counter()
    for path in sorted(directory.rglob("*.seg")):
        path.read_bytes()
    return time.perf_counter() - started


def commit(directory: Path, shapes: int, lanes: int, size: int) -> dict[str, Any]:
    """One group commit with every lane of every shape dirty, and the floor: a bare sync."""
    step = 129
    feeder = Feeder(directory, shapes, _Rising(lanes, shapes, step), size)
    rounds = []
    for _ in range(3):
        left = shapes * lanes
        while left > 0:
            feeder.submit(min(left, MESSAGE))
            left -= MESSAGE
        rounds.append(feeder.commit())
    empty = time.perf_counter()
    feeder.backing.sync()
    floor_s = time.perf_counter() - empty
    active = sum(g.lanes.lanes_active for g in feeder.dispatcher.fabric.groups.values() if g.lanes)
    feeder.backing.close()
    first, *later = rounds
    best = min(later, key=lambda found: found.write_s)
    return {
        "dirty_lanes": active,
        "first_write_s": first.write_s,
        "first_sync_s": first.sync_s,
        "first_turns": first.turns,
        "first_turn_max_s": first.turn_max_s,
        "write_s": best.write_s,
        "sync_s": best.sync_s,
        "turn_max_s": best.turn_max_s,
        "floor_sync_s": floor_s,
    }


class _Rising:
    """Lengths by which each shape gets an item in each of its lanes, in turn."""

    def __init__(self, lanes: int, shapes: int, step: int) -> None:
        self._lanes, self._shapes, self._step = lanes, shapes, step
        self._at = 0

    def __iter__(self) -> _Rising:
        return self

    def __next__(self) -> int:
        lane = self._at // self._shapes % self._lanes
        self._at += 1
        return self._step * (lane + 1)


def ack(directory: Path, rate: int, seconds: float, size: int) -> dict[str, Any]:
    """From submit to ACCEPTED at a steady rate, against a real broker in mode fsync."""
    shape, payload, sink = Shape.of("bench", "a"), bytes(size), Results()
    group = max(1, rate // 200)
    latencies: list[float] = []
    with _Process(directory) as process:
        started = time.perf_counter()
        for k in range(int(seconds * rate / group)):
            pause = started + k * group / rate - time.perf_counter()
            if pause > 0:
                time.sleep(pause)
            sent = time.perf_counter()
            items = [Item(shape, payload, 100 + k % 50) for _ in range(group)]
            accepted = process.client.enqueue(items, sink)
            if accepted is not None:
                accepted.add_done_callback(_note(latencies, sent))
        process.client.stats(60.0)
        took = time.perf_counter() - started
        sync_s = process.client.stats(60.0).get("sync_s")
    return {
        "rate_items_per_s": rate,
        "reached_items_per_s": group * len(latencies) / took,
        "p50_s": percentile(latencies, 0.5),
        "p99_s": percentile(latencies, 0.99),
        "floor_sync_s": sync_s,
    }


def _note(latencies: list[float], sent: float) -> Callable[[Any], None]:
    return lambda _: latencies.append(time.perf_counter() - sent)
