"""The two ends of the pipeline benchmark: `python -m zfabric.bench.loads ROLE JSON`, a process each.

The producer keeps so many items open and submits whenever there is room, through the SDK. A worker
has the real conversation (`WorkerSession`) on a bare socket: no engine process, it reads every byte
of each payload and answers with a digest of 8 bytes. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
from itertools import cycle
from typing import Any

import xxhash
import zmq

from zfabric.bench.lengths import trace
from zfabric.client import Client
from zfabric.engine import Result
from zfabric.results import CHUNK_ITEMS, Item, Results
from zfabric.session import Arrival
from zfabric.shapes import Contract, Shape
from zfabric.transport import connect_dealer
from zfabric.worker_session import WorkerSession

MODEL = "bench"
# Chunks of ready-made items that are submitted over and over.
CHUNKS = 256


def produce(address: str, size: int, shapes: int, open_items: int, seed: int) -> None:
    """Keep `open_items` open until SIGTERM; then print the latencies as one JSON line."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    room = threading.Semaphore(0)
    submitted: dict[int, float] = {}
    ack_s: list[float] = []
    whole_s: list[float] = []

    def on_results(arrivals: list[Arrival], seq: int) -> None:
        if not seq:
            return
        now = time.monotonic()
        # One item of each chunk is timed: its last.
        for number in {arrival.number for arrival in arrivals} & submitted.keys():
            whole_s.append(now - submitted.pop(number))
        client.acknowledge(seq)
        room.release()

    client = Client(address, name="load", buffer_items=open_items, on_results=on_results)
    payload = os.urandom(size)
    of = [Shape.of(MODEL, str(k)) for k in range(shapes)]
    lengths = cycle(trace(None, "")[seed:])
    chunks = [
        [
            Item(of[(c * CHUNK_ITEMS + k) % shapes], payload, next(lengths))
            for k in range(CHUNK_ITEMS)
        ]
        for c in range(CHUNKS)
    ]
    sink = Results()
    with client.stream():
        for chunk in cycle(chunks):
            began = time.monotonic()
            while not ending.is_set() and (accepted := client.enqueue(chunk, sink)) is None:
                room.acquire(timeout=0.1)
                began = time.monotonic()
            if ending.is_set():
                break
            accepted.add_done_callback(lambda _, t=began: ack_s.append(time.monotonic() - t))
            submitted[client._session.next_number - 1] = began
    print(json.dumps({"ack_s": ack_s, "whole_s": whole_s}), flush=True)
    client.close()


def work(address: str, name: str, items_max: int, tokens_max: int) -> None:
    """Serve until SIGTERM."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    contract = Contract(items_max, tokens_max, tokens_max)
    session = WorkerSession(
        name, secrets.randbits(63), model=MODEL, contract=contract, engine="touch"
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = connect_dealer(context, address)
    session.open(time.monotonic())
    session.serve(True, {})
    while not ending.is_set():
        socket.poll(100)
        now = time.monotonic()
        for _ in range(64):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            session.receive(frames, now)
        session.tick(now)
        while (begun := session.start()) is not None:
            serial, batch = begun
            _send(session, socket)
            results = [Result("ok", xxhash.xxh3_64_digest(p)) for p in batch.payloads]
            session.report(serial, range(len(results)), results, final=True)
            session.tick(now)
            _send(session, socket)
        _send(session, socket)
    session.leave("the benchmark is over")
    _send(session, socket)
    socket.close(500)
    context.term()


def _send(session: WorkerSession, socket: zmq.Socket[bytes]) -> None:
    while session.outbound:
        socket.send_multipart(session.outbound.popleft())


if __name__ == "__main__":
    told: dict[str, Any] = json.loads(sys.argv[2])
    {"produce": produce, "work": work}[sys.argv[1]](**told)
