"""Logs: the broker's events as lines of text or JSON, on standard error.

One event is one line with the time (UTC), the level, the stable name (see `eventnames`), the text
and its fields. A reader that does not keep up must not hold up the broker: lines wait in a bounded
queue and a thread writes them; what does not fit is dropped, and how many is said with the next.
A file is opened anew when it was moved away or removed, so that it can be rotated without a signal;
to copy and truncate it works as well, since lines are appended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from zfabric.errors import ConfigError
from zfabric.eventnames import level_of
from zfabric.words import counted

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
    name = event["event"]
    line = f"{_clock(event['time'])} {level_of(name):<7} {name:<18} {event['text']}"
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in line)


def _clock(time_s: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time_s))
    return f"{whole}.{int(time_s % 1 * 1000):03d}Z"


class Lines(Protocol):
    """What takes lines: standard error, or a LogFile."""

    def write(self, text: str, /) -> object:
        """Take a text."""
        ...

    def flush(self) -> None:
        """Nothing is held back."""
        ...


class LogFile:
    """A file that lines are appended to, mode 0640 where it is made. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._stream = self._open()
        except OSError as error:
            raise ConfigError(f"cannot write the log {path}: {error.strerror}") from None

    def _open(self) -> TextIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.fdopen(os.open(self._path, flags, 0o640), "w", encoding="utf-8")

    def write(self, text: str, /) -> None:
        """Append a text, to the file that has the name now."""
        own = os.fstat(self._stream.fileno())
        try:
            named = self._path.stat()
            moved = (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino)
        except FileNotFoundError:
            moved = True
        if moved:
            former, self._stream = self._stream, self._open()
            with contextlib.suppress(OSError):
                # It may hold what a full disk did not take, and then cannot even be closed well.
                former.close()
        self._stream.write(text)

    def flush(self) -> None:
        """Nothing is held back."""
        self._stream.flush()

    def close(self) -> None:
        """No more will come; what the disk did not take is lost."""
        with contextlib.suppress(OSError):
            self._stream.close()


class EventLog:
    """Writes events in a thread of its own; `write` never blocks. Raises as LogFile."""

    def __init__(self, form: str, where: Lines | Path | None = None) -> None:
        self._line = json_line if form == "json" else text_line
        self._stream: Lines = LogFile(where) if isinstance(where, Path) else where or sys.stderr
        # lines, each with how many it says were dropped before it
        self._lines: queue.Queue[tuple[str, int] | None] = queue.Queue(LINES_MAX)
        self._thread = threading.Thread(target=self._run, name="zfabric-log", daemon=True)
        self._thread.start()
        self.dropped = 0

    def write(self, event: Mapping[str, Any]) -> None:
        """Log one event, or count it as dropped."""
        text, dropped = self._line(event), self.dropped
        if dropped and self._line is text_line:
            text = f"{text} ({counted(dropped, 'line')} dropped before it)"
        elif dropped:
            text = json.dumps({**json.loads(text), "dropped_before": dropped})
        try:
            self._lines.put_nowait((text, dropped))
            self.dropped -= dropped
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            text, dropped = line
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                # What takes nothing now may take the next: a full disk, a pipe that does not block.
                self.dropped += 1 + dropped

    def close(self) -> None:
        """Write what waits, and end; a reader that sleeps is not waited for."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if isinstance(self._stream, LogFile) and not self._thread.is_alive():
            self._stream.close()
