"""Recording what a broker publishes: beside a dashboard, or headless in a thread of its own.

Lanes are kept every few seconds only: they are most of the bytes and change least.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgpack

import zfabric
from zfabric.errors import ConfigError
from zfabric.keys import ClientKey
from zfabric.protocol import TOPIC_EVENT, TOPIC_LANES, TOPIC_LENGTHS, TOPIC_SNAPSHOT
from zfabric_tui import recording
from zfabric_tui.feed import Arrived, LiveFeed

MIB = 1 << 20
# Lanes of a shape are kept this often.
LANES_S = 5.0
# How long the headless recorder waits for something before it looks whether it is to end.
WAIT_S = 0.5
KINDS = {
    TOPIC_SNAPSHOT: recording.SNAPSHOT,
    TOPIC_EVENT: recording.EVENT,
    TOPIC_LENGTHS: recording.LENGTHS,
}


class Recorder:
    """Puts what a feed brought into a recording. Raises ConfigError where the file cannot be."""

    def __init__(self, path: Path, limit_mib: int) -> None:
        self._writer = recording.Writer(
            path, release=zfabric.__version__, limit_bytes=limit_mib * MIB
        )
        self._lanes_s: dict[str, float] = {}

    def keep(self, arrived: Arrived) -> None:
        """Keep all of it."""
        for topic, raw in arrived.raw:
            kind = KINDS.get(topic, recording.LANES if topic.startswith(TOPIC_LANES) else None)
            if kind is None:
                continue
            value = msgpack.unpackb(raw)
            if kind != recording.LANES:
                self._writer.add(kind, value["time"], raw)
            elif self._is_due(value["signature"], value["time"]):
                self._writer.add(kind, value["time"], raw, value["signature"])
        self._writer.commit()

    def _is_due(self, signature: str, time_s: float) -> bool:
        if abs(time_s - self._lanes_s.get(signature, 0.0)) < LANES_S:
            return False
        # Shapes come and go; what is left out of the map is merely kept once more.
        if len(self._lanes_s) > 1_000:
            self._lanes_s.clear()
        self._lanes_s[signature] = time_s
        return True

    def close(self) -> None:
        """The recording is whole."""
        self._writer.close()


class Headless:
    """A recorder in a thread, until `close`. What ends it early is given to `failed`."""

    def __init__(
        self, stats_address: str, path: Path, limit_mib: int, key: ClientKey | None = None
    ) -> None:
        self._recorder = Recorder(path, limit_mib)
        self._feed = LiveFeed(stats_address, recording=True, key=key)
        self._ends = threading.Event()
        self.failed: ConfigError | None = None
        self._thread = threading.Thread(target=self._run, name="zfabric-recorder", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                self._recorder.keep(self._feed.poll(WAIT_S))
        except ConfigError as error:
            self.failed = error
        finally:
            self._feed.close()

    def close(self) -> None:
        """Take what is there, and end."""
        self._ends.set()
        self._thread.join(WAIT_S * 10)
        self._recorder.close()
