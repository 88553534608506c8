"""What the store on disk costs: recovery, memory, one group commit, the latency of a promise.

The first three drive the dispatcher in this process, so that nothing else is measured; `ack` starts
a real broker. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zfabric.bench import percentile
from zfabric.config import BrokerConfig
from zfabric.dispatcher import PRODUCERS, Dispatcher
from zfabric.osfiles import OsFiles
from zfabric.protocol import Type, encode, packed
from zfabric.recovery import open_backing
from zfabric.restore import restore
from zfabric.shapes import Shape
from zfabric.store import Store

MESSAGE = 1_024
PEER = b"bench"


class Feeder:
    """A dispatcher on a directory, and a producer that only submits."""

    def __init__(self, directory: Path, shapes: int, lengths: Iterator[int], size: int) -> None:
        self.backing, self.found = open_backing(directory, "fsync", OsFiles(directory))
        config = BrokerConfig(data=str(directory), max_items=10**8, producer_items_max=10**8)
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

    def commit(self) -> tuple[float, float]:
        """Write and sync what was submitted: (seconds of writing, seconds of the sync)."""
        started = time.perf_counter()
        self.dispatcher.flush(time.monotonic())
        written = time.perf_counter()
        if self.dispatcher.sync_wanted:
            self.backing.sync()
        synced = time.perf_counter()
        self.dispatcher.synced()
        self.dispatcher.outgoing.clear()
        return written - started, synced - written


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


def _rss_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def memory(directory: Path, items: int, size: int) -> dict[str, Any]:
    """Memory of the broker's state for each queued item, over an empty broker's."""
    empty = Feeder(directory / "empty", 16, _cycle(20, 4_000), size)
    base = _rss_bytes()
    feeder = _fill(directory / "full", items, size)
    queued = feeder.dispatcher.fabric.store.items
    used = _rss_bytes() - base
    empty.backing.close()
    feeder.backing.close()
    return {"items": queued, "bytes": used, "bytes_per_item": used / queued}


def recovery(directory: Path, items: int, size: int) -> dict[str, Any]:
    """Start on a directory of queued items that a broker left when it was killed."""
    feeder = _fill(directory, items, size)
    queued = feeder.dispatcher.fabric.store.items
    feeder.backing.close()
    del feeder
    floor_s = _read_all(directory)
    started = time.perf_counter()
    backing, found = open_backing(directory, "fsync", OsFiles(directory))
    config = BrokerConfig(data=str(directory), max_items=10**8, producer_items_max=10**8)
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
    return {
        "dirty_lanes": active,
        "first_write_s": first[0],
        "first_sync_s": first[1],
        "write_s": min(write for write, _ in later),
        "sync_s": min(sync for _, sync in later),
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
    from zfabric.client import Client
    from zfabric.results import Item, Results

    words = ["broker", "--port", "0", "--data", str(directory), "--json"]
    command = [sys.executable, "-m", "zfabric", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            ready = broker.stdout.readline() if broker.stdout is not None else ""
            client = Client(json.loads(ready)["producers"], name="bench")
            shape, payload, sink = Shape.of("bench", "a"), bytes(size), Results()
            group = max(1, rate // 200)
            latencies: list[float] = []
            started = time.perf_counter()
            for k in range(int(seconds * rate / group)):
                pause = started + k * group / rate - time.perf_counter()
                if pause > 0:
                    time.sleep(pause)
                sent = time.perf_counter()
                items = [Item(shape, payload, 100 + k % 50) for _ in range(group)]
                accepted = client.enqueue(items, sink)
                if accepted is not None:
                    accepted.add_done_callback(_note(latencies, sent))
            client.stats()
            took = time.perf_counter() - started
            sync_s = client.stats().get("sync_s")
            client.close()
        finally:
            broker.kill()
    return {
        "rate_items_per_s": rate,
        "reached_items_per_s": group * len(latencies) / took,
        "p50_s": percentile(latencies, 0.5),
        "p99_s": percentile(latencies, 0.99),
        "floor_sync_s": sync_s,
    }


def _note(latencies: list[float], sent: float) -> Callable[[Any], None]:
    return lambda _: latencies.append(time.perf_counter() - sent)
