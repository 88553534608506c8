"""Logs: the broker's events as lines of text or JSON, on standard error.

One event is one line with the time (UTC), the level, the stable name (see `eventnames`), the text
and its fields. A reader that does not keep up must not hold up the broker: lines wait in a bounded
queue and a thread writes them; what does not fit is dropped, and how many is said with the next.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

from zfabric.eventnames import level_of

# Lines that may wait for the writer.
LINES_MAX = 10_000
# How long the end waits for a reader that does not keep up, twice at most.
CLOSE_S = 1.0
# What every event has; the rest are its own fields.
COMMON = ("seq", "time", "event", "text")


def json_line(event: Mapping[str, Any]) -> str:
    """One JSON object, its time as RFC 3339."""
    fields = {k: v for k, v in event.items() if k not in COMMON}
    line = {
        "time": _clock(event["time"]),
        "level": level_of(event["event"]),
        "event": event["event"],
        "text": event["text"],
        **fields,
    }
    return json.dumps(line, ensure_ascii=True)


def text_line(event: Mapping[str, Any]) -> str:
    """One line for people: time, level, name, text; nothing in it that a terminal would obey."""
    clean = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in event["text"])
    name = event["event"]
    return f"{_clock(event['time'])} {level_of(name):<7} {name:<18} {clean}"


def _clock(time_s: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time_s))
    return f"{whole}.{int(time_s % 1 * 1000):03d}Z"


class EventLog:
    """Writes events in a thread of its own; `write` never blocks."""

    def __init__(self, form: str, stream: TextIO | None = None) -> None:
        self._line = json_line if form == "json" else text_line
        self._stream = stream or sys.stderr
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_MAX)
        self._thread = threading.Thread(target=self._run, name="zfabric-log", daemon=True)
        self._thread.start()
        self.dropped = 0

    def write(self, event: Mapping[str, Any]) -> None:
        """Log one event, or count it as dropped."""
        text = self._line(event)
        if self.dropped and self._line is text_line:
            text = f"{text} ({self.dropped} lines before it were dropped)"
        elif self.dropped:
            text = json.dumps({**json.loads(text), "dropped_before": self.dropped})
        try:
            self._lines.put_nowait(text)
            self.dropped = 0
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        while (text := self._lines.get()) is not None:
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                # Whoever read it is gone. What comes fills the queue and is counted as dropped.
                return

    def close(self) -> None:
        """Write what waits, and end; a reader that sleeps is not waited for."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
