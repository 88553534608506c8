"""Brokers, workers and batch files for tests that run them: real sockets, real engine processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from zfabric.broker import Broker
from zfabric.client import Client
from zfabric.config import BrokerConfig
from zfabric.shapes import Contract
from zfabric.worker import Worker
from zfabric_workers.sim import SimEngine

PATIENCE_S = 60.0
CONTRACT = Contract(8, 8_192, 1_024)
FAST = functools.partial(SimEngine, speed=0)
# A few items a second at most, so that a run can be caught in the middle.
SLOW = functools.partial(SimEngine, batch_us=100_000.0)
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def until(holds, patience_s=PATIENCE_S):
    """Wait until `holds()`; its value."""
    pause = threading.Event()
    deadline = time.monotonic() + patience_s
    while not (value := holds()):
        assert time.monotonic() < deadline, "it did not come to pass"
        pause.wait(0.01)
    return value


class RunningBroker:
    """A broker in a thread, which can be replaced by another one at the same ports."""

    def __init__(self, **config):
        self.config = {"port": 0, "hold_s": 0.2, "linger_ms": 0, "memory": True, **config}
        self.start()

    def start(self):
        self.broker = Broker(BrokerConfig(**self.config))
        bound = self.broker.bind()
        ports = [int(address.rsplit(":", 1)[1]) for address in bound]
        names = ("port", "consumer_port", "stats_port")
        self.config |= dict(zip(names, ports, strict=True))
        self.address = bound.producers
        self.thread = threading.Thread(target=self.broker.run, name="broker")
        self.thread.start()

    def stop(self):
        self.broker.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def restart(self):
        self.stop()
        self.start()


@contextlib.contextmanager
def brokering(**config):
    running = RunningBroker(**config)
    try:
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def serving(factory, address, *, model="m", name="w", contract=CONTRACT, **options):
    """A worker in a thread, stopped at the end."""
    worker = Worker(factory, broker=address, model=model, contract=contract, name=name, **options)
    thread = threading.Thread(target=worker.run, name=f"worker-{name}")
    thread.start()
    try:
        yield worker
    finally:
        worker.stop(drain=False)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def operating(address):
    client = Client(address, role="operator")
    try:
        yield client
    finally:
        client.close()


def request(custom_id, text="hello", *, url=CHAT, model="m", system="You are terse.", **body):
    """A line of a batch file, as a map."""
    if url == CHAT:
        body["messages"] = [
            {"role": "system", "content": system},
            {"role": "user", "content": text},
        ]
    else:
        body["prompt" if url == COMPLETIONS else "input"] = text
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": model, **body}}


def write_batch(path: Path, rows) -> Path:
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write((row if isinstance(row, str) else json.dumps(row)) + "\n")
    return path


def read_rows(path: Path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def lines_in(path: Path):
    """Whole lines of a file; 0 while it is not there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ids_of(path: Path):
    return sorted(row["custom_id"] for row in read_rows(path))


def zfabric(*words, cwd, timeout=PATIENCE_S, **options):
    """The command as a user runs it, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "zfabric", *map(str, words)],
        cwd=cwd,
        env={**os.environ, **options.pop("env", {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


def start_zfabric(*words, cwd, **options):
    """The command, started."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-m", "zfabric", *map(str, words)], cwd=cwd, **{**pipes, **options}
    )
