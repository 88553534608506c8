"""Feeds: where snapshots, events and lanes come from, live or recorded.

One type for every source: a feed is asked with `poll` and answers with what has arrived since. It
never blocks longer than it is told to, and a broker that goes away is simply silent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import msgpack
import zmq
from zmq.utils.monitor import recv_monitor_message

from zfabric.keys import ClientKey
from zfabric.protocol import TOPIC_EVENT, TOPIC_LANES, TOPIC_LENGTHS, TOPIC_SNAPSHOT
from zfabric.transport import set_key

Snapshot = dict[str, Any]
Lanes = dict[str, Any]
# The lanes of whatever shape is current.
CURRENT = "current"
# Messages taken in one poll; a screen that was stopped finds more waiting and goes on next time.
MESSAGES_MAX = 512
# What the socket itself says of its connection: a broker that died is known at once.
CUT: dict[int, bool] = {zmq.EVENT_DISCONNECTED: True, zmq.EVENT_HANDSHAKE_SUCCEEDED: False}


@dataclass(slots=True)
class Arrived:
    """What came since the last poll, oldest first; `lanes` by signature.

    `restarted` says that what was known before does not come before these: the feed has jumped.
    `cut` says whether the connection has ended since, or is back; None: neither.
    """

    snapshots: list[Snapshot] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    lanes: dict[str, Lanes] = field(default_factory=dict)
    restarted: bool = False
    cut: bool | None = None
    # (topic, message as it was published), for a recording
    raw: list[tuple[bytes, bytes]] = field(default_factory=list)


class Feed(Protocol):
    """A source of snapshots: live, replayed or made up."""

    def poll(self, timeout_s: float) -> Arrived:
        """What has arrived, waiting up to `timeout_s` for something if there is nothing."""
        ...

    def follow(self, signature: str | None) -> None:
        """From now on bring the lanes of this shape; None is of none."""
        ...

    def close(self) -> None:
        """The end."""
        ...


class LiveFeed:
    """Subscribes to a broker's statistics endpoint; with `recording`, to all that is worth it."""

    def __init__(
        self, stats_address: str, *, recording: bool = False, key: ClientKey | None = None
    ) -> None:
        self._key = key
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._topics = {TOPIC_SNAPSHOT, TOPIC_EVENT}
        self._followed: bytes | None = None
        if recording:
            self._topics |= {TOPIC_LENGTHS, TOPIC_LANES + CURRENT.encode()}
        self._socket = self._connect(stats_address)
        self._monitor = self._socket.get_monitor_socket(zmq.Event(sum(CUT)))

    def _connect(self, stats_address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 256)
        if "[" in stats_address:
            socket.setsockopt(zmq.IPV6, 1)
        set_key(socket, self._key)
        for topic in self._topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        if self._followed is not None:
            socket.setsockopt(zmq.SUBSCRIBE, self._followed)
        socket.connect(stats_address)
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def move(self, stats_address: str) -> None:
        """The broker is to be found elsewhere now."""
        self._socket.disable_monitor()
        self._socket.close(0)
        self._socket = self._connect(stats_address)
        self._monitor = self._socket.get_monitor_socket(zmq.Event(sum(CUT)))

    def follow(self, signature: str | None) -> None:
        """See Feed."""
        topic = None if signature is None else TOPIC_LANES + signature.encode()
        if topic == self._followed:
            return
        if self._followed is not None:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, self._followed)
        if topic is not None:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._followed = topic

    def poll(self, timeout_s: float) -> Arrived:
        """See Feed."""
        arrived = Arrived()
        if timeout_s > 0:
            self._socket.poll(int(timeout_s * 1000))
        while self._monitor.poll(0):
            arrived.cut = CUT.get(recv_monitor_message(self._monitor)["event"], arrived.cut)
        for _ in range(MESSAGES_MAX):
            try:
                topic, raw = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            arrived.raw.append((topic, raw))
            value = msgpack.unpackb(raw)
            if topic == TOPIC_SNAPSHOT:
                arrived.snapshots.append(value)
            elif topic == TOPIC_EVENT:
                arrived.events.append(value)
            elif topic.startswith(TOPIC_LANES):
                arrived.lanes[value["signature"]] = value
        return arrived

    def close(self) -> None:
        """Close the socket."""
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
