"""A million fuzzed frames at a live broker, beside a healthy client at a fixed rate.

    python -m tests.fuzz.frames [--frames N] [--rate ITEMS_A_SECOND] [--seed N] [--json]

A broker, a worker and a client are processes of their own; this one sends what `forge` makes over
TCP to all three endpoints, as strangers, as peers that said HELLO, and as connections that do not
speak ZeroMQ at all, and opens new connections all the while. The client submits its items at their
times, whatever happens. A frame counts when the broker has answered what was sent after it on the
same connection. It passes when the broker lives, its memory is flat after the first tenth, and the
client has a result of every item. Exit code 1 where it does not. Times are seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from tests.fuzz.forge import LOOKS, Forge
from zfabric.protocol import Type, encode

# Messages are made once and sent changed: the fuzzer must not be the slow side.
POOL = 4_000
CONNECTIONS = 24
# A connection is given up and made anew after so many messages.
MESSAGES_A_CONNECTION = 400
FULL_WAIT_MS = 1
# A line that finds no room for so long was dropped by the broker.
FULL_S = 5.0
# What every broker answers, whoever asks: another version, and the answer names it.
LAST_WORD, LAST_ANSWER = b"ZF\xc7\x01\x80", b"the other 199"
# Memory may grow by so much after the first tenth: buffers of the allocator, not state.
FLAT_BYTES = 24 * 1024 * 1024
PAYLOAD_MAX = 1024 * 1024
START_S, END_S = 30.0, 60.0
MODELS = ("fuzz-a", "fuzz-b")
NAMES = tuple(f"fuzz-{k}" for k in range(40)) + ("\x1b[2J", "x" * 256)
ZMTP_BEGIN = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"
Progress = Callable[[int, int], None]
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Line:
    """One connection: what went over it, and whether the broker has read all of that."""

    def __init__(self, socket_: zmq.Socket[bytes], until_s: float = 0.0) -> None:
        self.socket = socket_
        self.messages = self.frames = 0
        # when a line that sends no more is given up, whatever the broker says
        self.until_s = until_s
        self.read = False

    def hear(self) -> None:
        """Read what has come; the answer to the last word says that all before it was read."""
        with contextlib.suppress(zmq.Again):
            while True:
                answer = self.socket.recv_multipart(zmq.NOBLOCK)
                self.read = self.read or LAST_ANSWER in answer[0]

    def send(self, frames: list[bytes]) -> bool:
        """Send a message as soon as there is room; whether there was for a while."""
        until_s = time.monotonic() + FULL_S
        while time.monotonic() < until_s:
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                self.hear()
                self.socket.poll(FULL_WAIT_MS, zmq.POLLOUT)
                continue
            self.frames += len(frames)
            self.messages += 1
            return True
        return False


class Flood:
    """Sends messages to the routers; a socket is a peer for a while, then another one."""

    def __init__(self, addresses: dict[str, str], rng: random.Random) -> None:
        self._context = zmq.Context()
        self._addresses, self._rng = addresses, rng
        forge = Forge(rng, models=MODELS, names=NAMES, ops=LOOKS)
        self._pool = [self._usable(forge) for _ in range(POOL)]
        self._lines = [Line(self._open(k)) for k in range(CONNECTIONS)]
        # Lines that have said their last word: a connection that is closed before it is answered is
        # reset by the answer, and what the broker has not read of it is lost.
        self._last: deque[Line] = deque()
        self.sent_frames = self.arrived_frames = self.arrived_messages = 0
        self.connections = self.lost_connections = self.raw_connections = 0

    @staticmethod
    def _usable(forge: Forge) -> list[bytes]:
        while not (frames := forge.message()):
            pass
        return frames

    def _open(self, k: int) -> zmq.Socket[bytes]:
        endpoint = ("producers", "workers")[k % 2]
        made: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, 200)
        made.setsockopt(zmq.RCVHWM, 0)
        made.connect(self._addresses[endpoint])
        if self._rng.random() < 0.6:
            role = "worker" if k % 2 else self._rng.choice(("producer", "operator"))
            made.send_multipart(encode(Type.HELLO, self._hello(role)))
        return made

    def _hello(self, role: str) -> dict[str, Any]:
        name = self._rng.choice(NAMES[:40])
        fields: dict[str, Any] = {"role": role, "name": name, "instance": 1}
        if role == "worker":
            contract = dict.fromkeys(
                ("batch_items_max", "batch_tokens_max", "input_tokens_max"), 64
            )
            fields |= {"model": self._rng.choice(MODELS), **contract}
        return fields

    def send(self) -> None:
        """One message on some connection; waits where the broker does not keep up."""
        rng = self._rng
        k = rng.randrange(CONNECTIONS)
        frames = list(rng.choice(self._pool))
        at = rng.randrange(len(frames))
        if frames[at] and rng.random() < 0.7:
            changed = bytearray(frames[at])
            changed[rng.randrange(len(changed))] = rng.randrange(256)
            frames[at] = bytes(changed)
        line = self._lines[k]
        if not line.send(frames) or line.messages >= MESSAGES_A_CONNECTION:
            self._lines[k] = Line(self._open(k))
            self._end(line)
        self.sent_frames += len(frames)

    def _end(self, line: Line) -> None:
        pause = threading.Event()
        # As many connections as the broker answers: more would only be a longer queue.
        while len(self._last) >= CONNECTIONS:
            self.rest()
            pause.wait(0.001)
        line.send([LAST_WORD])
        line.until_s = time.monotonic() + END_S
        self._last.append(line)
        self.connections += 1

    def rest(self) -> None:
        """Read what has come; count and close lines whose last word was answered."""
        for line in self._lines:
            line.hear()
        for _ in range(len(self._last)):
            line = self._last.popleft()
            line.hear()
            if line.read:
                self.arrived_frames += line.frames
                self.arrived_messages += line.messages
            elif time.monotonic() < line.until_s:
                self._last.append(line)
                continue
            else:
                self.lost_connections += 1
            line.socket.close(0)

    def finish(self) -> None:
        """Everybody says the last word, and is listened to until it is answered."""
        lines, self._lines = self._lines, []
        for line in lines:
            self._end(line)
        pause = threading.Event()
        while self._last:
            self.rest()
            pause.wait(0.01)

    def noise(self) -> None:
        """A connection to each endpoint that is no ZeroMQ, or only the beginning of it."""
        for address in self._addresses.values():
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            begin = self._rng.choice((b"", ZMTP_BEGIN, b"GET / HTTP/1.1\r\n"))
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), 5) as raw,
            ):
                raw.sendall(begin + self._rng.randbytes(self._rng.randrange(200)))
            self.raw_connections += 1
        # Over the limit of a frame: the broker ends the connection.
        large = self._open(self._rng.randrange(2))
        large.send_multipart([b"ZF", bytes(2 * PAYLOAD_MAX)])
        large.close(1_000)
        with self._context.socket(zmq.SUB) as feed:
            feed.setsockopt(zmq.LINGER, 0)
            feed.connect(self._addresses["stats"])
            for _ in range(4):
                topic = self._rng.choice((b"lanes:", b"snapshot", b"event", b"lanes:zz", b"\xff"))
                feed.setsockopt(zmq.SUBSCRIBE, topic + self._rng.randbytes(self._rng.randrange(6)))

    def close(self) -> None:
        self._context.destroy(linger=0)


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "zfabric", *words]


def run(
    frames: int, rate: int, seed: int, progress: Progress = lambda done, rss: None
) -> dict[str, Any]:
    """Send so many frames; the figures."""
    environ = {**os.environ, "ZFABRIC_KEY": "none", "ZFABRIC_BROKER_KEYS": "none"}
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:

        def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
            process = subprocess.Popen(command, text=True, env=environ, **options)
            stack.callback(_end, process)
            return process

        broker = start(
            _command("broker", "--memory", "--port", "0", "--json", "--log", "off",
                     "--payload-bytes-max", str(PAYLOAD_MAX)),
            stdout=subprocess.PIPE,
        )  # fmt: skip
        ready = json.loads(broker.stdout.readline() if broker.stdout else "{}")
        address = ready["producers"]
        # A turn of a flooded loop lasts up to twice its slice of receiving, 0.1 s: a window of two
        # small batches of a worker that takes no time would be the limit then.
        start(
            _command("worker", "--engine", "sim", "--opt", "speed=0", "--model", "healthy",
                     "--max-batch", "256", "--max-tokens", "65536", "--max-input", "1024",
                     "--window", "8", "--broker", address),
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stop = Path(place) / "stop"
        healthy = start(
            [sys.executable, "-m", "tests.fuzz.steady", address, str(rate), str(stop)],
            stdout=subprocess.PIPE,
        )
        if healthy.stdout is None or healthy.stdout.readline().strip() != "ready":
            raise RuntimeError("the healthy client did not start")
        figures = _flood(broker, ready, frames, seed, progress)
        stop.touch()
        figures["client"] = json.loads(healthy.stdout.readline() or "{}")
        figures["alive"] = broker.poll() is None
        figures["rss_end_bytes"] = rss_bytes(broker.pid)
        figures["descriptors_end"] = descriptors(broker.pid)
    return judged(figures)


def _flood(
    broker: subprocess.Popen[str], ready: dict[str, Any], frames: int, seed: int, progress: Progress
) -> dict[str, Any]:
    addresses = {name: ready[name] for name in ("producers", "workers", "stats")}
    began_s, cpu_s = time.monotonic(), _cpu_s(broker.pid)
    figures: dict[str, Any] = {"descriptors_start": descriptors(broker.pid), "rss_bytes": []}
    flood = Flood(addresses, random.Random(seed))
    mark = step = max(1, frames // 10)
    try:
        for count in itertools.count():
            if flood.arrived_frames >= frames or broker.poll() is not None:
                break
            flood.send()
            if count % 500 == 0:
                flood.noise()
            if count % 50 == 0:
                flood.rest()
            if flood.arrived_frames >= mark:
                figures["rss_bytes"].append(rss_bytes(broker.pid))
                progress(flood.arrived_frames, figures["rss_bytes"][-1])
                mark += step
        flood.finish()
    finally:
        flood.close()
    seconds = time.monotonic() - began_s
    return figures | {
        "frames": flood.arrived_frames, "messages": flood.arrived_messages,
        "connections": flood.connections, "lost_connections": flood.lost_connections,
        "raw_connections": flood.raw_connections, "seconds": seconds,
        "frames_per_s": flood.arrived_frames / seconds, "broker_cpu_s": _cpu_s(broker.pid) - cpu_s,
        "refused": _refused(addresses["producers"]),
    }  # fmt: skip


def _refused(address: str) -> int:
    """Messages that the broker refused, or that were of nobody."""
    from zfabric.client import Client

    with contextlib.closing(Client(address, role="operator", key="none", timeout_s=60.0)) as client:
        counters = client.stats(60.0)["counters"]
    of = ("peer_errors_", "unknown_peer_messages")
    return sum(number for name, number in counters.items() if name.startswith(of))


def judged(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures, and whether they pass."""
    grown = max(figures["rss_bytes"]) - figures["rss_bytes"][0] if figures["rss_bytes"] else 0
    client = figures["client"]
    figures["rss_grown_bytes"] = grown
    figures["ok"] = bool(
        figures["alive"]
        and grown <= FLAT_BYTES
        and client.get("submitted")
        and client["completed"] == client["submitted"]
    )
    return figures


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def in_words(figures: dict[str, Any], args: argparse.Namespace) -> str:
    """The figures for people, with the command and the machine."""
    from zfabric.bench import machine

    client = figures["client"]
    memory = [figures["rss_bytes"][0], max(figures["rss_bytes"]), figures["rss_end_bytes"]]
    first, most, last = (f"{size / 1e6:.1f} MB" for size in memory)
    rows = {
        "command": f"python -m tests.fuzz.frames --frames {args.frames} --rate {args.rate} "
        f"--seed {args.seed}",
        "machine": str(machine()),
        "frames": f"{figures['frames']:,} read by the broker in {figures['messages']:,} messages, "
        f"{figures['seconds']:.1f} s, {figures['frames_per_s']:,.0f}/s",
        "refused": f"{figures['refused']:,} messages, or of nobody, by the broker's own count",
        "connections": f"{figures['connections']:,}, of which {figures['lost_connections']:,} were "
        f"dropped and not counted; {figures['raw_connections']:,} that are no ZeroMQ",
        "broker": f"alive {figures['alive']}, {figures['broker_cpu_s']:.1f} s of CPU",
        "broker memory": f"{first} after a tenth, at most {most}, {last} at the end",
        "broker files": f"{figures['descriptors_start']} before, "
        f"{figures['descriptors_end']} after",
        "healthy client": f"{client.get('submitted', 0):,} items at "
        f"{client.get('items_per_s', 0):,.0f}/s, {client.get('completed', 0):,} completed",
        "its latency": f"{client.get('p50_s', 0) * 1000:.0f} ms median, "
        f"{client.get('p99_s', 0) * 1000:.0f} ms p99, {client.get('worst_s', 0):.2f} s worst",
        "verdict": "passed" if figures["ok"] else "FAILED",
    }
    return "\n".join(f"{name:<16}  {value}" for name, value in rows.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=5_000, help="items/s of the healthy client")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    def progress(done: int, rss: int) -> None:
        print(f"{done:>10,} frames, broker {rss / 1e6:.1f} MB", file=sys.stderr, flush=True)

    figures = run(args.frames, args.rate, args.seed, progress)
    print(json.dumps(figures, indent=2) if args.json else in_words(figures, args))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
