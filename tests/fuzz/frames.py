"""A million fuzzed frames at a live broker, beside a healthy client at a fixed rate.

    python -m tests.fuzz.frames [--frames N] [--rate ITEMS_A_SECOND] [--seed N] [--json]

A broker, a worker and a client are processes of their own; this one sends what `forge` makes over
TCP to all three endpoints, as strangers, as peers that said HELLO, and as connections that do not
speak ZeroMQ at all, and opens new connections all the while. The client submits its items at their
times, whatever happens. It passes when the broker lives, its memory is flat after the first tenth,
and the client has a result of every item. Exit code 1 where it does not. Times are seconds.
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
import time
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
# For what was sent to leave.
LINGER_MS = 5_000
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


class Flood:
    """Sends messages to the routers; a socket is a peer for a while, then another one."""

    def __init__(self, addresses: dict[str, str], rng: random.Random) -> None:
        self._context = zmq.Context()
        self._addresses, self._rng = addresses, rng
        forge = Forge(rng, models=MODELS, names=NAMES, ops=LOOKS)
        self._pool = [self._usable(forge) for _ in range(POOL)]
        self._sockets = [self._open(k) for k in range(CONNECTIONS)]
        self._sent_by = [0] * CONNECTIONS
        self.frames = self.messages = self.connections = self.raw_connections = 0

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
        elif rng.random() < 0.0005:
            # Over the limit of a frame: the broker drops the connection.
            frames.append(bytes(2 * PAYLOAD_MAX))
        self._put(k, frames)
        self._sent_by[k] += 1
        if self._sent_by[k] >= MESSAGES_A_CONNECTION:
            # What it has sent is to arrive.
            self._sockets[k].close(LINGER_MS)
            self._sockets[k] = self._open(k)
            self._sent_by[k] = 0
            self.connections += 1

    def _put(self, k: int, frames: list[bytes]) -> None:
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            try:
                self._sockets[k].send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._sockets[k].recv_multipart(zmq.NOBLOCK)
                self._sockets[k].poll(FULL_WAIT_MS, zmq.POLLOUT)
                continue
            self.frames += len(frames)
            self.messages += 1
            return
        # It takes nothing any more: dropped for what it sent before.
        self._sent_by[k] = MESSAGES_A_CONNECTION

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
        with self._context.socket(zmq.SUB) as feed:
            feed.setsockopt(zmq.LINGER, 0)
            feed.connect(self._addresses["stats"])
            for _ in range(4):
                topic = self._rng.choice((b"lanes:", b"snapshot", b"event", b"lanes:zz", b"\xff"))
                feed.setsockopt(zmq.SUBSCRIBE, topic + self._rng.randbytes(self._rng.randrange(6)))

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)


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
        start(
            _command("worker", "--engine", "sim", "--opt", "speed=0", "--model", "healthy",
                     "--max-batch", "256", "--max-tokens", "65536", "--max-input", "1024",
                     "--broker", address),
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
        figures["refused"] = _refused(address)
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
    marks = iter(range(frames // 10, frames + 1, max(1, frames // 10)))
    mark = next(marks)
    try:
        for count in itertools.count():
            if flood.frames >= frames or broker.poll() is not None:
                break
            flood.send()
            if count % 500 == 0:
                flood.noise()
            if flood.frames >= mark:
                figures["rss_bytes"].append(rss_bytes(broker.pid))
                progress(flood.frames, figures["rss_bytes"][-1])
                mark = next(marks, frames * 2)
    finally:
        flood.close()
    seconds = time.monotonic() - began_s
    cpu_s = _cpu_s(broker.pid) - cpu_s
    return figures | {
        "frames": flood.frames, "messages": flood.messages, "connections": flood.connections,
        "raw_connections": flood.raw_connections, "seconds": seconds,
        "frames_per_s": flood.frames / seconds, "broker_cpu_s": cpu_s,
    }  # fmt: skip


def _refused(address: str) -> int:
    """Messages that the broker itself counted as refused, or as of nobody."""
    from zfabric.client import Client

    with contextlib.closing(Client(address, role="operator", key="none")) as client:
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
        "frames": f"{figures['frames']:,} in {figures['messages']:,} messages, "
        f"{figures['seconds']:.1f} s, {figures['frames_per_s']:,.0f}/s",
        "refused": f"{figures['refused']:,} messages, by the broker's own count",
        "connections": f"{figures['connections']:,} made anew, "
        f"{figures['raw_connections']:,} that are no ZeroMQ",
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
