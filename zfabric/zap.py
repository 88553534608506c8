"""The authenticator: answers libzmq's question about every connection (ZAP, RFC 27).

It has no thread: its socket is one more of those that the broker's loop polls. libzmq holds each
handshake until it is answered, and with ZAP_ENFORCE_DOMAIN it refuses all of them where nobody
answers, so a loop that stands still lets nobody in. Decided here: what each failure of a handshake
is called, and which answer a refusal gets; who may open what, and how often, is the gate's. A
message carries the public half of its connection's key as `User-Id`, put there by the answer,
never by the peer.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from zfabric import access
from zfabric.errors import ConfigError, PeerError
from zfabric.gate import Gate
from zfabric.keys import CannotRead, ClientKey, KeyPair, Keyring

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
# version, request id, domain, address, routing id, mechanism, then the key
CURVE_FRAMES = 7
# Time of a turn that answers may take, some 130 us each on a busy machine: what is left waits for
# the next turn, so that a flood takes a share of the loop and never all of it.
ANSWERS_S = 0.02
# Failures read in a turn, some 10 us each.
FAILURES_MAX = 1_024
# The list of keys is looked at this often: a revoked key is good for no longer.
LOOK_S = 0.5
# Values of ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL: <zmq.h>, ZMQ_PROTOCOL_ERROR_ZMTP_*.
CRYPTOGRAPHIC, MECHANISM_MISMATCH = 0x11000001, 0x11000002
# A peer without a key may see that one is asked for before this side does, and go: no detail then.
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
REASON_OF = {
    CRYPTOGRAPHIC: access.SERVER_KEY_WRONG,
    MECHANISM_MISMATCH: access.KEY_MISSING,
}
# What a refusal is in ZAP. Our clients read 500 as "later" and try again after 5 s; 300, which is
# meant for that, tells them nothing, and libzmq 4.3.5 does not even end the connection.
REFUSED, LATER = b"400", b"500"
# Addresses of monitors: the number makes them differ within a process.
_numbers = itertools.count(1)

Socket = zmq.Socket[bytes]


class Authenticator:
    """Guards the sockets of one broker. Raises ConfigError where its keys cannot be had."""

    def __init__(self, context: zmq.Context[Socket], directory: Path, gate: Gate) -> None:
        self._context = context
        self._gate = gate
        self._ring = Keyring(directory)
        self._server = self._ring.server()
        self._stamp: tuple[int, ...] | None = self._ring.stamp()
        # what was said of a list that cannot be read
        self._said = ""
        gate.replace(self._ring.table())
        self._next_look_s = 0.0
        self._questions: Socket = context.socket(zmq.ROUTER)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(ENDPOINT)
        # the guarded sockets, and where their failures are read
        self._monitors: dict[str, tuple[Socket, Socket]] = {}

    def secure(self, socket: Socket, endpoint: str) -> None:
        """Ask for keys at a socket that is not bound yet."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._server.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, endpoint.encode())
        # Without it libzmq lets everybody in while nobody answers.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        address = f"inproc://zfabric-handshakes-{next(_numbers)}"
        socket.monitor(address, FAILURES)
        monitor: Socket = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(address)
        self._monitors[endpoint] = socket, monitor

    def release(self, endpoint: str) -> None:
        """Before a socket is closed: libzmq's thread would wait for ever for its events' reader."""
        socket, monitor = self._monitors.pop(endpoint)
        if not socket.closed:
            socket.disable_monitor()
        monitor.close(0)

    @property
    def waits_on(self) -> Socket:
        """What to poll; failures are read in the turns that come anyway."""
        return self._questions

    def own_key(self) -> ClientKey:
        """A key for this process, which may look; it is in no file."""
        pair = KeyPair.fresh()
        self._gate.add_own(pair.public)
        return ClientKey("zfabric", "monitor", pair, self._server.public)

    def turn(self, now: float) -> None:
        """Answer who knocks, for a slice at most, and count who failed."""
        until = time.monotonic() + ANSWERS_S
        while time.monotonic() < until:
            try:
                question = self._questions.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._answer(question, now)
        for endpoint, (_, monitor) in self._monitors.items():
            for reason, times in _failures(monitor).items():
                text = f"{access.REASONS[reason]}, at {endpoint}"
                self._gate.turned_away(reason, text, now, times)

    def look(self, now: float) -> set[str]:
        """Read the list of keys where it has changed; returns keys that count no more.

        A list that cannot be read changes nothing, and is said once; it is looked at again, since
        a key that is revoked in it would be good for ever.
        """
        if now < self._next_look_s:
            return set()
        self._next_look_s = now + LOOK_S
        stamp = self._ring.stamp()
        if stamp == self._stamp:
            return set()
        self._stamp = stamp
        try:
            if stamp is None:
                raise ConfigError(f"{self._ring.clients_path} is gone")
            table = self._ring.table()
        except ConfigError as error:
            if isinstance(error, CannotRead):
                self._stamp = ()
            if str(error) != self._said:
                self._said = str(error)
                self._gate.unreadable(self._said, now)
            return set()
        self._said = ""
        ended = self._gate.replace(table)
        self._gate.reloaded(len(table), now)
        return ended

    def _answer(self, question: list[bytes], now: float) -> None:
        routing_id, _, version, request, domain, address, _, mechanism, *credentials = (
            question if len(question) >= CURVE_FRAMES + 2 else [*question, *[b""] * 9]
        )
        public, endpoint = "", domain.decode("ascii", "replace")
        status: bytes | None = b"200"
        try:
            if version != VERSION or mechanism != b"CURVE" or len(credentials[0]) != 32:
                raise PeerError(access.HANDSHAKE, access.REASONS[access.HANDSHAKE])
            public = z85.encode(credentials[0]).decode("ascii")
            self._gate.opens(endpoint, public, now)
        except PeerError as error:
            public, status = "", _status_of(error.code, endpoint)
            where = f"{address.decode('ascii', 'replace')} at {endpoint}"
            self._gate.turned_away(error.code, f"{where}: {error.text}", now)
        if status is not None:
            answer = [VERSION, request, status, b"", public.encode(), b""]
            # It may have gone away meanwhile: the answer is dropped then.
            self._questions.send_multipart([routing_id, b"", *answer], zmq.NOBLOCK)

    def close(self) -> None:
        """Before the guarded sockets: answer nobody any more, from now on nothing gets in."""
        for endpoint in list(self._monitors):
            self.release(endpoint)
        self._questions.close(0)


def _status_of(code: str, endpoint: str) -> bytes | None:
    """How a refusal is answered. Without an answer libzmq ends a connection after HANDSHAKE_IVL.

    A subscriber has nobody who would dial again; where it is not answered, its libzmq does.
    """
    if code == access.TOO_MANY_STRANGERS:
        return None
    if code == access.TOO_MANY_HANDSHAKES:
        return None if endpoint == access.STATS else LATER
    return REFUSED


def _failures(monitor: Socket) -> Counter[str]:
    """How many handshakes failed since, by reason."""
    failed: Counter[str] = Counter()
    for _ in range(FAILURES_MAX):
        try:
            event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
        detailed = event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        failed[REASON_OF.get(event["value"] if detailed else 0, access.HANDSHAKE)] += 1
    return failed


def key_of(frame: zmq.Frame) -> str | None:
    """Public half of the key of the connection that a message's first frame came by."""
    try:
        return str(frame.get("User-Id")) or None
    except zmq.ZMQError:
        # No authenticator has seen this connection: nobody is to be believed.
        return None
