"""Peers of our own, on bare sockets: a crowd of workers, and clients that do not keep the rules.

They speak the real protocol, or nothing like it. Times are seconds.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket as sockets
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import zmq

from zfabric.chaos.judge import expected
from zfabric.config_keys import NO_KEY
from zfabric.connection import server_key
from zfabric.engine import Result
from zfabric.errors import FabricError, NotAllowed, TimeoutExpired
from zfabric.keys import client_key
from zfabric.protocol import FROM_BROKER, Message, Type, decode, encode
from zfabric.shapes import Contract
from zfabric.transport import connect_dealer, connect_watched
from zfabric.worker_session import WorkerSession

CONTRACT = Contract(8, 8_192, 1_024)
CONTRACT_FIELDS = {"batch_items_max": 8, "batch_tokens_max": 8_192, "input_tokens_max": 1_024}
ANSWER_S = 10.0


class Crowd:
    """Many workers on real connections, served by one thread; each answers as the engine would."""

    def __init__(
        self, address: str, count: int, model: str, key: str = NO_KEY, *, window: int = 2
    ) -> None:
        loaded = client_key(key, server_key())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 16)
        self._sessions: dict[zmq.Socket[bytes], WorkerSession] = {}
        self._poller = zmq.Poller()
        self._ending = threading.Event()
        for k in range(count):
            socket = connect_dealer(self._context, address, loaded, linger_ms=0)
            session = WorkerSession(
                f"{model}-{k}", secrets.randbits(63), model=model, contract=CONTRACT, window=window,
                engine="touch", simulated=True,
            )  # fmt: skip
            session.open(time.monotonic())
            session.serve(True, {})
            self._sessions[socket] = session
            self._poller.register(socket, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()
        for socket, session in self._sessions.items():
            session.leave("the crowd goes home")
            _send(socket, session)
            socket.close(200)
        self._context.term()

    def _run(self) -> None:
        everybody = time.monotonic()
        while not self._ending.is_set():
            ready = [socket for socket, _ in self._poller.poll(20)]
            now = time.monotonic()
            if now >= everybody:
                # Heartbeats are due each second; so many ticks a turn would be most of the work.
                ready, everybody = list(self._sessions), now + 0.2
            for socket in ready:
                self._serve(socket, self._sessions[socket], now)

    def _serve(self, socket: zmq.Socket[bytes], session: WorkerSession, now: float) -> None:
        while (frames := received(socket)) is not None:
            session.receive(frames, now)
        session.tick(now)
        while (begun := session.start()) is not None:
            serial, batch = begun
            results = [Result("ok", expected(payload)) for payload in batch.payloads]
            session.report(serial, range(len(results)), results, final=True)
            session.tick(now)
        _send(socket, session)


def received(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """A message that is there, or None."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _send(socket: zmq.Socket[bytes], session: WorkerSession) -> None:
    with contextlib.suppress(zmq.Again):
        while session.outbound:
            socket.send_multipart(session.outbound[0], zmq.NOBLOCK)
            session.outbound.popleft()


class Rogue:
    """One connection that says what it likes."""

    def __init__(self, address: str, key: str = NO_KEY) -> None:
        loaded = client_key(key, server_key())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_dealer(self._context, address, loaded, linger_ms=200)
        self._socket.setsockopt(zmq.SNDTIMEO, int(ANSWER_S * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close(200)
        self._context.term()

    def say(self, frames: Sequence[bytes]) -> None:
        """Send these frames. Raises FabricError where nobody takes them."""
        try:
            self._socket.send_multipart(list(frames))
        except zmq.Again:
            raise FabricError(f"no connection within {ANSWER_S:g} s") from None

    def tell(self, kind: Type, fields: dict[str, Any], *rest: Any) -> None:
        """Send a message of the protocol."""
        self.say(encode(kind, fields, *rest))

    def hello(self, name: str, model: str, /, **changed: Any) -> None:
        """Register as a worker, or with `changed` as something like one."""
        who = {"role": "worker", "name": name, "instance": secrets.randbits(63), "model": model}
        self.tell(Type.HELLO, {**who, **CONTRACT_FIELDS, **changed})

    def hear(self, *kinds: Type) -> Message:
        """The next message of one of these kinds. Raises FabricError where none comes."""
        until = time.monotonic() + ANSWER_S
        while (left := until - time.monotonic()) > 0:
            if self._socket.poll(int(left * 1000) + 1):
                message = decode(self._socket.recv_multipart(), FROM_BROKER)
                if message.kind in kinds:
                    return message
        raise FabricError(f"the broker did not answer with {' or '.join(k.name for k in kinds)}")


def garbage(chance: random.Random, size: int) -> bytes:
    """Bytes that mean nothing; some begin as a ZMTP greeting does."""
    start = b"\xff" + bytes(8) + b"\x7f\x03" if chance.random() < 0.3 else b""
    return start + chance.randbytes(size)


def scan(host: str, port: int, chance: random.Random, connections: int) -> None:
    """What port scanners and wrong clients do: connect, say nothing or anything, and go."""
    for _ in range(connections):
        with (
            contextlib.suppress(OSError),
            sockets.create_connection((host, port), 2.0) as connection,
        ):
            if chance.random() < 0.8:
                connection.sendall(garbage(chance, chance.randrange(1, 4_000)))
            if chance.random() < 0.3:
                connection.shutdown(sockets.SHUT_WR)


def visitors(address: str, count: int, hello: dict[str, Any], mark: str, key: str = NO_KEY) -> None:
    """Connect, say HELLO, hear WELCOME and vanish, so many times. Raises FabricError."""
    loaded = client_key(key, server_key())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for k in range(count):
            socket = connect_dealer(context, address, loaded, linger_ms=0)
            socket.setsockopt(zmq.SNDTIMEO, int(ANSWER_S * 1000))
            fields = {"name": f"{mark}-{k}", "instance": k + 1, **hello}
            with contextlib.suppress(zmq.Again):
                socket.send_multipart(encode(Type.HELLO, fields))
            welcomed = _is_welcomed(socket)
            socket.close(0)
            if not welcomed:
                raise FabricError(f"visitor {k} was not welcomed within {ANSWER_S:g} s")
    finally:
        # Not term: a signal may have come between a socket and its close.
        context.destroy(0)


def _is_welcomed(socket: zmq.Socket[bytes]) -> bool:
    until = time.monotonic() + ANSWER_S
    while socket.poll(max(0, int((until - time.monotonic()) * 1000))):
        message = decode(socket.recv_multipart(), FROM_BROKER)
        if message.kind is not Type.HEARTBEAT:
            return message.kind is Type.WELCOME
    return False


def admitted(address: str, key: str) -> None:
    """Whether a key opens this port, without a word said. Raises NotAllowed, TimeoutExpired."""
    loaded = client_key(key, server_key())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, handshakes = connect_watched(context, address, loaded)
    try:
        until = time.monotonic() + ANSWER_S
        # It may be written to once it is let in.
        while not socket.poll(100, zmq.POLLOUT):
            trouble = handshakes.trouble(loaded)
            if trouble is not None and trouble.code is not None:
                raise NotAllowed(f"{address}: {trouble.code}: {trouble.text}")
            if time.monotonic() > until:
                raise TimeoutExpired(f"no connection to {address} within {ANSWER_S:g} s")
    finally:
        handshakes.close()
        socket.close(0)
        context.term()
