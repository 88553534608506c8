"""Transport: how the client sides make their sockets and move messages through them, and what is
known of a failed handshake.

Nothing here looks into a message. A key that the broker refuses is refused for good, and libzmq
then does not try again; every other failure may pass (the broker may be just starting).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from zfabric.access import KEY_MISSING, KEY_UNKNOWN, SERVER_KEY_WRONG
from zfabric.keys import ClientKey

# Small, so that a full channel is noticed; never 0, which means without limit.
HIGH_WATER = 64
SOCKET_BUFFER_BYTES = 256 * 1024
# A line whose other end is gone without a word ends after 30 s, silent or with bytes on their way.
# Not HEARTBEAT_IVL: libzmq 4.3.5 ends the process (assertion !_io_error) when that timer comes
# while a channel that nobody reads was reset, which any peer can bring about. Ours are heartbeats
# of the protocol, each second.
DEAD_LINE_OPTIONS = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 15),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 3),
    (zmq.TCP_MAXRT, 30_000),
)
# What the broker's answer to a key that it does not take is in libzmq's event.
REFUSED_STATUS = 400
# And to one whose user connects too often.
LATER_STATUS = 500
# Value of the event where the two sides differ in asking for keys: <zmq.h>.
MECHANISM_MISMATCH = 0x11000002
FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
LIFE = zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED
# Plain integers: to combine zmq's own flags makes an object each time.
NOW, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# Addresses of monitors: the number makes them differ within a process.
_numbers = itertools.count(1)

Socket = zmq.Socket[bytes]


class Trouble(NamedTuple):
    """Why there is no connection. With a `code` no further attempt can cure it.

    `later` is where the broker asks for patience: this user connects too often.
    """

    code: str | None
    text: str
    later: bool = False


class Handshakes:
    """What became of a socket's handshakes. Made before it connects, closed before it is.

    `before` is what spoke against the last connection: it does so until this one knows better.
    """

    def __init__(
        self, context: zmq.Context[Socket], socket: Socket, before: Trouble | None = None
    ) -> None:
        address = f"inproc://zfabric-client-{next(_numbers)}"
        socket.monitor(address, FAILURES | LIFE)
        self._socket = socket
        self._monitor: Socket = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(address)
        self._before = before
        self._failed = False
        self._connected = False
        # an attempt ended before there was a connection: nothing listens there, or not yet
        self.unreached = False
        self._refused = False
        self._later = False
        self._mismatched = False

    def read(self) -> None:
        """Take what has happened since."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_CLOSED:
                self.unreached = self.unreached or not self._connected
                self._before = None if self.unreached else self._before
                continue
            self._connected, self.unreached = True, False
            if event["event"] == zmq.EVENT_CONNECTED:
                # What became of the last attempt holds until this one is over.
                continue
            self._before = None
            self._failed = bool(event["event"] & FAILURES)
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused = self._refused or event["value"] == REFUSED_STATUS
                self._later = event["value"] == LATER_STATUS
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._mismatched = self._mismatched or event["value"] == MECHANISM_MISMATCH

    def trouble(self, key: ClientKey | None) -> Trouble | None:
        """What speaks against a connection; None while nothing does."""
        self.read()
        if self._refused and key is not None:
            return Trouble(
                KEY_UNKNOWN,
                f"the broker refuses the key of {key.user} ({key.role}): it is not known there, "
                "was revoked, or its role may not use this port",
            )
        if self._mismatched and key is None:
            return Trouble(KEY_MISSING, "the broker asks for a key: give --key FILE or ZFABRIC_KEY")
        if self._mismatched:
            return Trouble(
                SERVER_KEY_WRONG,
                "what listens there takes no keys, so it is not the broker that this key is for",
            )
        if not self._failed:
            return self._before
        if self._later and key is not None:
            text = f"the keys of {key.user} connect too often; the broker lets in more later"
            return Trouble(None, text, later=True)
        said = "it has another key than the one in your key's file" if key else "it asks for a key"
        return Trouble(None, f"what listens there ends every connection: {said}, or is no broker")

    def close(self) -> None:
        """Before its socket: libzmq's thread would wait for ever for somebody to take an event."""
        self._socket.disable_monitor()
        self._monitor.close(0)


def set_key(socket: Socket, key: ClientKey | None) -> None:
    """Connect with this key only, and to no other broker than it is for."""
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.pair.secret.encode())


def connect_dealer(
    context: zmq.Context[Socket],
    address: str,
    key: ClientKey | None = None,
    *,
    linger_ms: int = 2_000,
) -> Socket:
    """A DEALER that connects to `address`, with a key if there is one.

    Messages queue only for a connection that is there.
    """
    socket = _dealer(context, address, linger_ms)
    set_key(socket, key)
    socket.connect(address)
    return socket


def connect_watched(
    context: zmq.Context[Socket],
    address: str,
    key: ClientKey | None,
    *,
    before: Trouble | None = None,
    linger_ms: int = 2_000,
) -> tuple[Socket, Handshakes]:
    """The same, and what becomes of its handshakes; `before` is what spoke against the last one.

    Where it raises nothing stays open, or the context's end would wait for it for ever.
    """
    socket = _dealer(context, address, linger_ms)
    handshakes = None
    try:
        set_key(socket, key)
        handshakes = Handshakes(context, socket, before)
        socket.connect(address)
    except zmq.ZMQError:
        if handshakes is not None:
            handshakes.close()
        socket.close(0)
        raise
    return socket, handshakes


def _dealer(context: zmq.Context[Socket], address: str, linger_ms: int) -> Socket:
    socket: Socket = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.IMMEDIATE, 1),
        (zmq.LINGER, linger_ms),
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.SNDBUF, SOCKET_BUFFER_BYTES),
        (zmq.RCVBUF, SOCKET_BUFFER_BYTES),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 5_000),
        *DEAD_LINE_OPTIONS,
    ):
        socket.setsockopt(option, value)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    return socket


def frames_of(socket: Socket) -> list[zmq.Frame]:
    """The frames of the next message that is there, not copied yet; none where there is none.

    Such a frame says whether another one follows; to ask the socket is dearer: 18 us for a message
    of 7 frames with their bytes, recv_multipart takes 25.
    """
    try:
        frame = socket.recv(NOW, copy=False)
    except zmq.Again:
        return []
    frames = [frame]
    while frame.more:
        frame = socket.recv(NOW, copy=False)
        frames.append(frame)
    return frames


def receive(socket: Socket) -> list[bytes] | None:
    """The next message that is there, or None."""
    return [frame.bytes for frame in frames_of(socket)] or None


def send(socket: Socket, frames: Sequence[bytes]) -> None:
    """Send a message, or raise ZMQError (zmq.Again where there is no room) and send none of it.

    6 us for one of 6 frames; send_multipart takes 18.
    """
    for frame in frames[:-1]:
        socket.send(frame, MORE)
    socket.send(frames[-1], NOW)


def send_out(socket: Socket, outbound: deque[list[bytes]]) -> None:
    """Send messages until none is left or the socket takes no more; what it took is removed."""
    while outbound:
        try:
            send(socket, outbound[0])
        except zmq.Again:
            return
        outbound.popleft()
