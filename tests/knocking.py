"""A stranger's flood: connections with keys that nobody made, one after the other, as fast as goes.

    python -m tests.knocking ADDRESS SERVER_KEY SECONDS [--open N] [--hasty]

Patient strangers wait for an answer, `--open` of them at a time. Hasty ones wait for none: some
1,000 connections a second, each of which is gone after a quarter of a second. A process of its own,
so that it takes no turn from a broker that it knocks at.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque

import zmq

from zfabric.keys import ClientKey, KeyPair
from zfabric.transport import FAILURES, set_key

# Hasty: so many connections of one socket, a new socket this often, so many sockets at a time.
CROWD, ROUND_MS, ROUNDS = 25, 25, 10

Socket = zmq.Socket[bytes]


def socket_of(context: zmq.Context[Socket], key: ClientKey) -> Socket:
    """A ROUTER connects to one address as often as it is told; no connection is tried again."""
    socket: Socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    set_key(socket, key)
    return socket


def patient(context: zmq.Context[Socket], key: ClientKey, given: argparse.Namespace) -> int:
    """Knock, and hear the answers; returns how many connections were opened."""
    socket = socket_of(context, key)
    failures = socket.get_monitor_socket(FAILURES)
    until, opened, ended = time.monotonic() + given.seconds, 0, 0
    while time.monotonic() < until:
        while opened - ended < given.open:
            socket.connect(given.address)
            opened += 1
        if failures.poll(100):
            failures.recv_multipart()
            ended += 1
    socket.disable_monitor()
    return opened


def hasty(context: zmq.Context[Socket], key: ClientKey, given: argparse.Namespace) -> int:
    """Knock and go; returns how many connections were opened."""
    waiting: deque[Socket] = deque()
    until, opened = time.monotonic() + given.seconds, 0
    while time.monotonic() < until:
        if len(waiting) >= ROUNDS:
            waiting.popleft().close(0)
        waiting.append(socket_of(context, key))
        for _ in range(CROWD):
            waiting[-1].connect(given.address)
        opened += CROWD
        waiting[-1].poll(ROUND_MS)
    return opened


def main() -> None:
    """See above; prints how many connections were opened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("server")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--open", type=int, default=200)
    parser.add_argument("--hasty", action="store_true")
    given = parser.parse_args()
    context: zmq.Context[Socket] = zmq.Context()
    key = ClientKey("eve", "worker", KeyPair.fresh(), given.server)
    opened = (hasty if given.hasty else patient)(context, key, given)
    sys.stdout.write(f"{opened}\n")
    sys.stdout.flush()
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
