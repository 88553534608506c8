"""Both ends of the pipeline benchmark, a process each: `python -m zfabric.bench.loads ROLE JSON`.

The producer keeps so many items open and submits whenever there is room, through the SDK. A worker
has the real conversation (`WorkerSession`) on a bare socket: no engine process, it reads every byte
of each payload and answers with a digest of 8 bytes. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import xxhash
import zmq

from zfabric.bench.lengths import trace
from zfabric.client import Client
from zfabric.results import Item, Results, window_items
from zfabric.session import Arrival
from zfabric.shapes import Contract, Shape
from zfabric.transport import connect_dealer, receive, send_out
from zfabric.worker_session import WorkerSession

MODEL = "bench"
# Ready-made items that are submitted over and over, windows of them at a time as the SDK does it.
READY_ITEMS = 262_144
# Batches on their way to a worker: one that only touches bytes is done in half a millisecond, and
# the two that a GPU asks for would leave it waiting for the next turn of the broker's loop.
WINDOW = 8
# A worker that is told to end hands in what it has, and waits so long for the broker to have it.
LEAVE_S = 3.0
# Waits of a loop that looks whether it is to end.
LOOK_S = 0.1


class Latencies:
    """Of the last item of each window: until it was accepted, until its result was here."""

    def __init__(self) -> None:
        self.ack_s: list[float] = []
        self.whole_s: list[float] = []
        self._submitted: dict[int, float] = {}

    def submitted(self, number: int) -> None:
        """The item leaves now."""
        self._submitted[number] = time.monotonic()

    def accepted(self, number: int) -> None:
        """The broker has it."""
        began = self._submitted.get(number)
        if began is not None:
            self.ack_s.append(time.monotonic() - began)

    def ended(self, arrivals: list[Arrival]) -> None:
        """Results are here."""
        now, timed = time.monotonic(), self._submitted
        for number in {arrival.number for arrival in arrivals} & timed.keys():
            self.whole_s.append(now - timed.pop(number))

    def begin(self) -> None:
        """What was measured until now does not count."""
        self.ack_s.clear()
        self.whole_s.clear()


def produce(
    address: str, size: int, shapes: int, open_items: int, lengths: str | None, column: str
) -> None:
    """Keep `open_items` open until SIGTERM; then print the latencies since SIGUSR1 as JSON."""
    ending, times = threading.Event(), Latencies()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    signal.signal(signal.SIGUSR1, lambda *_: times.begin())

    def on_results(arrivals: list[Arrival], seq: int) -> None:
        if seq:
            times.ended(arrivals)
            client.acknowledge(seq)

    client = Client(address, name="load", buffer_items=open_items, on_results=on_results)
    payload, drawn = os.urandom(size), cycle(trace(Path(lengths) if lengths else None, column))
    of = [Shape.of(MODEL, str(k)) for k in range(shapes)]
    ready = [Item(of[k % shapes], payload, next(drawn)) for k in range(READY_ITEMS)]
    # As many windows as all that may be open: a rest that is smaller would never go.
    step = open_items // -(-open_items // window_items(open_items))
    windows = [ready[start : start + step] for start in range(0, READY_ITEMS, step)]
    number = client.accepted_upto
    with client.stream():
        for window in cycle(windows):
            times.submitted(number + len(window))
            while (accepted := client.enqueue(window, Results())) is None and not ending.is_set():
                room = client.room(len(window))
                with contextlib.suppress(TimeoutError):
                    room.result(LOOK_S)
                client.leave(room)
                times.submitted(number + len(window))
            if accepted is None or ending.is_set():
                break
            number += len(window)
            accepted.add_done_callback(lambda _, last=number: times.accepted(last))  # type: ignore[misc]
    sys.stdout.write(json.dumps({"ack_s": times.ack_s, "whole_s": times.whole_s}) + "\n")
    sys.stdout.flush()
    client.close()


def work(address: str, name: str, items_max: int, tokens_max: int) -> None:
    """Serve until SIGTERM."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    contract = Contract(items_max, tokens_max, tokens_max)
    session = WorkerSession(
        name, secrets.randbits(63), model=MODEL, contract=contract, engine="touch", window=WINDOW
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = connect_dealer(context, address)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    session.open(time.monotonic())
    session.serve(True, {})
    leave_by = math.inf
    while not (ending.is_set() and session.settled) and time.monotonic() < leave_by:
        if ending.is_set() and not session.leaving:
            session.drain()
            leave_by = time.monotonic() + LEAVE_S
        send_out(socket, session.outbound)
        poller.poll(int(LOOK_S * 1000))
        now = time.monotonic()
        while (frames := receive(socket)) is not None:
            session.receive(frames, now)
        session.tick(now)
        while (begun := session.start()) is not None:
            serial, batch = begun
            answers = [xxhash.xxh3_64_digest(payload) for payload in batch.payloads]
            session.report(serial, range(len(batch)), ["ok"] * len(batch), answers, final=True)
            session.tick(now)
    session.leave("the benchmark is over")
    send_out(socket, session.outbound)
    socket.close(500)
    context.term()


ROLES: dict[str, Callable[..., None]] = {"produce": produce, "work": work}


if __name__ == "__main__":
    told: dict[str, Any] = json.loads(sys.argv[2])
    ROLES[sys.argv[1]](**told)
