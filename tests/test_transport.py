"""Sockets: a peer that fills a channel nobody reads, and resets it, must not end the process."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
import zmq

from tests.running import until
from zfabric.transport import Trouble, connect_watched, receive, send_out

ROOT = Path(__file__).parents[1]
# Longer than any interval at which libzmq would speak of its own accord.
STILL_S = 6.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
MESSAGE = b"\x00\x64" + b"x" * 100

STANDING_BROKER = f"""
import threading
from zfabric.broker import Broker
from zfabric.config import BrokerConfig
broker = Broker(BrokerConfig(port=0, memory=True))
print(broker.bind().producers, flush=True)
input()
threading.Event().wait({STILL_S})
broker.close()
print("alive", flush=True)
"""
# A client whose thread is held up, connected to us.
STANDING_CLIENT = f"""
import sys, threading, zmq
from zfabric.transport import connect_watched
context = zmq.Context()
dealer, handshakes = connect_watched(context, sys.argv[1], None)
input()
threading.Event().wait({STILL_S})
print("alive", flush=True)
handshakes.close()
context.destroy(linger=0)
"""


def fill_and_reset(peer: socket.socket) -> None:
    """Speak just enough ZMTP, send until nothing more is taken, and reset the connection."""
    peer.settimeout(30)
    peer.sendall(GREETING)
    wanted = 64
    while wanted:
        wanted -= len(peer.recv(wanted))
    peer.sendall(b"\x04" + bytes([len(READY)]) + READY)
    assert peer.recv(1)
    peer.settimeout(0.5)
    with pytest.raises(TimeoutError):
        while True:
            peer.sendall(MESSAGE * 200)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def start(code: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.e2e
def test_reset_of_a_channel_that_the_broker_does_not_read() -> None:
    process = start(STANDING_BROKER)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip().rsplit(":", 1)[1]
        fill_and_reset(socket.create_connection(("127.0.0.1", int(port))))
        out, err = process.communicate("\n", timeout=60)
        assert (process.returncode, out) == (0, "alive\n"), err
    finally:
        process.kill()
        process.communicate()


@pytest.mark.e2e
def test_reset_of_a_channel_that_a_client_does_not_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = start(STANDING_CLIENT, f"tcp://127.0.0.1:{server.getsockname()[1]}")
        try:
            server.settimeout(30)
            peer, _ = server.accept()
            server.close()
            fill_and_reset(peer)
            out, err = process.communicate("\n", timeout=60)
            assert (process.returncode, out) == (0, "alive\n"), err
        finally:
            process.kill()
            process.communicate()


@pytest.mark.e2e
@pytest.mark.parametrize("listening", [True, False])
def test_trouble_of_the_last_connection_holds_until_the_next_one_knows_better(
    listening: bool,
) -> None:
    before = Trouble(None, "the keys connect too often", later=True)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if not listening:
            silent.close()
        _, handshakes = connect_watched(context, f"tcp://127.0.0.1:{port}", None, before=before)
        try:
            if listening:
                # It is taken, and nothing is said to it: nothing new is known.
                connection, _ = silent.accept()
                assert connection.recv(64)
                assert handshakes.trouble(None) == before
                connection.close()
                until(lambda: handshakes.trouble(None) != before)
                trouble = handshakes.trouble(None)
                assert trouble is not None and "ends every connection" in trouble.text
            else:
                assert handshakes.trouble(None) in (before, None)
                until(lambda: handshakes.trouble(None) is None)
                assert handshakes.unreached
        finally:
            handshakes.close()
            context.destroy(0)


def test_messages_go_whole_and_wait_where_the_socket_takes_no_more() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        ours.setsockopt(zmq.SNDHWM, 2)
        theirs.setsockopt(zmq.RCVHWM, 2)
        theirs.bind("inproc://whole")
        ours.connect("inproc://whole")
        assert receive(theirs) is None
        messages = [[b"%d" % k, b"", b"x" * 100_000][: 1 + k % 3] for k in range(9)]
        outbound, got = deque(messages), []
        send_out(ours, outbound)
        assert 0 < len(outbound) < len(messages)
        for _ in messages:
            while (frames := receive(theirs)) is not None:
                got.append(frames)
            assert ours.poll(5_000, zmq.POLLOUT)
            send_out(ours, outbound)
        assert got == messages and not outbound
    finally:
        context.destroy(0)


def test_connection_that_cannot_be_made_leaves_nothing_open() -> None:
    """Its context would never end."""
    code = """
import zmq
from zfabric.transport import connect_watched
context = zmq.Context()
try:
    connect_watched(context, "tcp://$:1", None)
except zmq.ZMQError:
    context.term()
    print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stdout == "ended\n"
