"""The live feed: snapshots and events of a running broker, over its statistics endpoint.

One type for every source: a feed is asked with `poll` and answers with what has arrived since. It
never blocks longer than it is told to, and a broker that goes away is simply silent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import msgpack
import zmq

from zfabric.protocol import TOPIC_EVENT, TOPIC_LANES, TOPIC_SNAPSHOT

Snapshot = dict[str, Any]


@dataclass(slots=True)
class Arrived:
    """What came since the last poll: the newest snapshot (None if none), events, lanes by shape."""

    snapshot: Snapshot | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    lanes: dict[str, dict[str, Any]] = field(default_factory=dict)


class Feed(Protocol):
    """A source of snapshots: live, replayed or made up."""

    def poll(self, timeout_s: float) -> Arrived:
        """What has arrived, waiting up to `timeout_s` for something if there is nothing."""
        ...

    def close(self) -> None:
        """The end."""
        ...


class LiveFeed:
    """Subscribes to a broker's statistics endpoint; `lanes` follows one shape's signature (hex)."""

    def __init__(self, stats_address: str, *, lanes: str | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 256)
        if "[" in stats_address:
            self._socket.setsockopt(zmq.IPV6, 1)
        for topic in (TOPIC_SNAPSHOT, TOPIC_EVENT):
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        if lanes is not None:
            self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC_LANES + lanes.encode())
        self._socket.connect(stats_address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def poll(self, timeout_s: float) -> Arrived:
        """What has arrived, waiting up to `timeout_s` for something if there is nothing."""
        arrived = Arrived()
        self._socket.poll(int(timeout_s * 1000))
        while True:
            try:
                topic, value = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return arrived
            self._note(arrived, topic, msgpack.unpackb(value))

    @staticmethod
    def _note(arrived: Arrived, topic: bytes, value: dict[str, Any]) -> None:
        if topic == TOPIC_SNAPSHOT:
            arrived.snapshot = value
        elif topic == TOPIC_EVENT:
            arrived.events.append(value)
        elif topic.startswith(TOPIC_LANES):
            arrived.lanes[topic[len(TOPIC_LANES) :].decode("ascii", "replace")] = value

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
