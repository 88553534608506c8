"""Transport: how the two client sides make their sockets. Options only; no message passes here."""

from __future__ import annotations

import zmq

# Small, so that a full channel is noticed; never 0, which means without limit.
HIGH_WATER = 64
SOCKET_BUFFER_BYTES = 256 * 1024


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, *, linger_ms: int = 2_000
) -> zmq.Socket[bytes]:
    """A DEALER that connects to `address`; messages queue only for a connection that is there."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.IMMEDIATE, 1),
        (zmq.LINGER, linger_ms),
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.SNDBUF, SOCKET_BUFFER_BYTES),
        (zmq.RCVBUF, SOCKET_BUFFER_BYTES),
        (zmq.HEARTBEAT_IVL, 5_000),
        (zmq.HEARTBEAT_TIMEOUT, 15_000),
        (zmq.HEARTBEAT_TTL, 15_000),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 5_000),
        (zmq.TCP_KEEPALIVE, 1),
    ):
        socket.setsockopt(option, value)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)
    return socket
