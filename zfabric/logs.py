"""Logs: the broker's events as lines of text or JSON, on standard error.

One event is one line with the time (UTC), the level, the stable name (see `eventnames`), the text
and its fields. A reader that does not keep up must not hold up the broker: lines wait in a bounded
queue and a thread writes them; what does not fit is dropped, and how many is said with the next.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import time
from collections.abc import Mapping
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

from zfabric.eventnames import INFO, level_of

# Lines that may wait for the writer.
LINES_MAX = 10_000
# What every event has; the rest are its own fields.
COMMON = ("seq", "time", "event", "text")
LEVELS = {INFO: logging.INFO}


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
        self._queue: queue.Queue[Any] = queue.Queue(LINES_MAX)
        self._handler = QueueHandler(self._queue)
        writer = logging.StreamHandler(stream or sys.stderr)
        self._listener = QueueListener(self._queue, writer)
        self._listener.start()
        self.dropped = 0

    def write(self, event: Mapping[str, Any]) -> None:
        """Log one event, or count it as dropped."""
        if self._queue.full():
            self.dropped += 1
            return
        text = self._line(event)
        if self.dropped:
            text = f"{text} ({self.dropped} lines before it were dropped)"
            self.dropped = 0
        level = LEVELS.get(level_of(event["event"]), logging.WARNING)
        record = logging.LogRecord("zfabric", level, "", 0, text, None, None)
        self._handler.enqueue(record)

    def close(self) -> None:
        """Write what waits, and end."""
        self._listener.stop()
