"""A stranger's flood: connections with keys that nobody made, one after the other, as fast as goes.

    python -m tests.knocking ADDRESS SERVER_KEY SECONDS [--open N]

A process of its own, so that it takes no turn from a broker that it knocks at.
"""

from __future__ import annotations

import argparse
import sys
import time

import zmq

from zfabric.keys import ClientKey, KeyPair
from zfabric.transport import FAILURES, set_key


def knock(address: str, server: str, seconds: float, open_max: int) -> tuple[int, int]:
    """Open connections for so long, `open_max` at a time; (how many there were, and ended)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # A ROUTER connects to one address as often as it is told; none is tried again.
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    set_key(socket, ClientKey("eve", "worker", KeyPair.fresh(), server))
    failures = socket.get_monitor_socket(FAILURES)
    until, opened, ended = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        while opened - ended < open_max:
            socket.connect(address)
            opened += 1
        if failures.poll(100):
            failures.recv_multipart()
            ended += 1
    socket.disable_monitor()
    context.destroy(linger=0)
    return opened, ended


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("server")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--open", type=int, default=200)
    given = parser.parse_args()
    opened, ended = knock(given.address, given.server, given.seconds, given.open)
    sys.stdout.write(f"{opened} {ended}\n")
