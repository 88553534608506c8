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
from zfabric.chaos.lines import ANSWER_S, HELLO_AGAIN_S, LIMITS, TRY_S, Line, limit_in, wait
from zfabric.config_keys import NO_KEY
from zfabric.connection import Key, server_key
from zfabric.errors import FabricError, TooManyConnections, TooManyHandshakes
from zfabric.keys import client_key
from zfabric.protocol import FROM_BROKER, Message, Type, decode, encode
from zfabric.shapes import Contract
from zfabric.worker_session import LIVE, WorkerSession

CONTRACT = Contract(8, 8_192, 1_024)
CONTRACT_FIELDS = {"batch_items_max": 8, "batch_tokens_max": 8_192, "input_tokens_max": 1_024}


class Crowd:
    """Many workers on real connections, served by one thread; each answers as the engine would.

    One that the broker's limits keep out tries on. Of those that hear nothing one at a time is
    watched, to know why: watching all would take more descriptors than a process may have.
    """

    def __init__(
        self, address: str, count: int, model: str, key: str = NO_KEY, *, window: int = 2
    ) -> None:
        self._address = address
        self._key = client_key(key, server_key())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * count + 16)
        self._sessions: dict[zmq.Socket[bytes], WorkerSession] = {}
        self._lines: dict[zmq.Socket[bytes], Line] = {}
        self._scout: Line | None = None
        # the limit that kept one of them out last
        self._limit: FabricError | None = None
        self._poller = zmq.Poller()
        self._ending = threading.Event()
        for k in range(count):
            session = WorkerSession(
                f"{model}-{k}", secrets.randbits(63), model=model, contract=CONTRACT, window=window,
                engine="touch", simulated=True,
            )  # fmt: skip
            self._connect(session, watched=False)
            session.serve(True, {})
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)

    def _connect(self, session: WorkerSession, *, watched: bool) -> Line:
        line = Line(self._context, self._address, self._key, watched=watched)
        session.open(time.monotonic())
        self._lines[line.socket], self._sessions[line.socket] = line, session
        self._poller.register(line.socket, zmq.POLLIN)
        return line

    @property
    def waited(self) -> bool:
        """Whether a limit of the broker's has kept one of them out so far."""
        return self._limit is not None

    @property
    def kept_out(self) -> FabricError | None:
        """The limit that keeps some of them out now, or did when they went home."""
        everybody = all(session.state == LIVE for session in list(self._sessions.values()))
        return None if everybody else self._limit

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._ending.set()
            self._thread.join()
            self._limit = self.kept_out
            for socket, session in self._sessions.items():
                session.leave("the crowd goes home")
                _send(socket, session)
                self._lines[socket].close(200)
        finally:
            # Once more: a signal may have come while it was waited for.
            self._thread.join()
            for line in self._lines.values():
                line.close()
            self._context.term()

    def _run(self) -> None:
        everybody = time.monotonic()
        while not self._ending.is_set():
            ready = [socket for socket, _ in self._poller.poll(20)]
            now = time.monotonic()
            if now >= everybody:
                # Heartbeats are due each second; so many ticks a turn would be most of the work.
                ready, everybody = list(self._sessions), now + 0.2
                self._ask_the_scout()
            for socket in ready:
                self._serve(socket, self._sessions[socket], now)

    def _serve(self, socket: zmq.Socket[bytes], session: WorkerSession, now: float) -> None:
        ended = False
        while (frames := received(socket)) is not None:
            news = session.receive(frames, now)
            ended = ended or news.reconnect
            for code, text in news.errors:
                if code in LIMITS:
                    self._limit = TooManyConnections(f"{code}: {text}")
        if ended or session.tick(now).reconnect:
            self._dial_again(socket, session)
            return
        while (begun := session.start()) is not None:
            serial, batch = begun
            answers = [expected(payload) for payload in batch.payloads]
            session.report(serial, range(len(batch)), ["ok"] * len(batch), answers, final=True)
            session.tick(now)
        _send(socket, session)

    def _dial_again(self, socket: zmq.Socket[bytes], session: WorkerSession) -> None:
        line = self._lines.pop(socket)
        if line is self._scout:
            self._scout = None
        del self._sessions[socket]
        self._poller.unregister(socket)
        line.close()
        fresh = self._connect(session, watched=self._scout is None)
        self._scout = self._scout or fresh

    def _ask_the_scout(self) -> None:
        if self._scout is None:
            return
        trouble = self._scout.trouble()
        if self._sessions[self._scout.socket].state == LIVE:
            self._scout = None
        elif trouble is not None and trouble.later:
            self._limit = TooManyHandshakes(f"{self._address}: {trouble.text}")


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
    """One connection that says what it likes; in a `context` of its own, where none is given."""

    def __init__(
        self,
        address: str,
        key: Key = NO_KEY,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._context = context if context is not None else zmq.Context()
        self._owns_context = context is None
        linger_ms = 200 if self._owns_context else 0
        self._line = Line(
            self._context, address, client_key(key, server_key()), linger_ms=linger_ms
        )
        self._linger_ms = linger_ms
        self._greeting: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._line.close(self._linger_ms)
        if self._owns_context:
            self._context.term()

    def say(self, frames: Sequence[bytes]) -> None:
        """Send these frames. Raises FabricError as `Line.await_open` does."""
        self._line.await_open()
        self._line.socket.send_multipart(list(frames))

    def tell(self, kind: Type, fields: dict[str, Any], *rest: Any) -> None:
        """Send a message of the protocol."""
        self.say(encode(kind, fields, *rest))

    def greet(self, fields: dict[str, Any]) -> None:
        """Send a HELLO, which is said again where one of the broker's limits refuses it."""
        self._greeting = encode(Type.HELLO, fields)
        self.say(self._greeting)

    def hello(self, name: str, model: str, /, **changed: Any) -> None:
        """Register as a worker, or with `changed` as something like one."""
        who = {"role": "worker", "name": name, "instance": secrets.randbits(63), "model": model}
        self.greet({**who, **CONTRACT_FIELDS, **changed})

    def hear(self, *kinds: Type) -> Message:
        """The next message of one of these kinds.

        Raises FabricError where none comes within ANSWER_S, TooManyConnections where HELLO is
        refused for TRY_S because the broker has enough connections.
        """
        until = time.monotonic() + TRY_S
        answer_by = time.monotonic() + ANSWER_S
        while (left := answer_by - time.monotonic()) > 0:
            if not self._line.socket.poll(int(left * 1000) + 1):
                break
            message = decode(self._line.socket.recv_multipart(), FROM_BROKER)
            limit = limit_in(message) if self._greeting else None
            if limit is not None:
                if time.monotonic() > until:
                    raise limit
                wait(HELLO_AGAIN_S)
                self.say(self._greeting)
                answer_by = time.monotonic() + ANSWER_S
            elif message.kind in kinds:
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
            with Rogue(address, loaded or NO_KEY, context) as visitor:
                visitor.greet({"name": f"{mark}-{k}", "instance": k + 1, **hello})
                told = visitor.hear(Type.WELCOME, Type.ERROR)
            if told.kind is not Type.WELCOME:
                raise FabricError(f"visitor {k} was not welcomed: {told.fields['text']}")
    finally:
        # Not term: a signal may have come between a socket and its close.
        context.destroy(0)


def admitted(address: str, key: str) -> None:
    """Whether a key opens this port, without a word said. Raises as `Line.await_open` does."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = Line(context, address, client_key(key, server_key()))
    try:
        line.await_open()
    finally:
        line.close()
        context.term()
