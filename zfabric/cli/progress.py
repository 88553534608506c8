"""Progress on standard error: a bar on a terminal, a plain line every five seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from zfabric.cli import common

if TYPE_CHECKING:
    from zfabric.batchwatch import Progress

PLAIN_EVERY_S = 5.0
BAR_CHARS = 12


class Lines(Protocol):
    """Where a run says how far it is."""

    def progress(self, now: Progress) -> None:
        """How far it is; called a few times a second."""

    def notice(self, text: str) -> None:
        """Something that the user should know."""

    def end(self) -> None:
        """No more will come."""


def reporter(*, quiet: bool = False, plain: bool = False) -> Lines:
    """What suits standard error."""
    if quiet:
        return Quiet()
    return Bar(sys.stderr) if sys.stderr.isatty() and not plain else Plain()


class Quiet:
    """Notices alone."""

    def progress(self, now: Progress) -> None:
        """Nothing."""

    def notice(self, text: str) -> None:
        """Say it."""
        common.say(f"zfabric: {common.clean(text)}")

    def end(self) -> None:
        """Nothing."""


class Plain(Quiet):
    """A line every five seconds."""

    def __init__(self) -> None:
        self._next_s = PLAIN_EVERY_S

    def progress(self, now: Progress) -> None:
        """Say how far it is, when it is time to."""
        if now.seconds >= self._next_s:
            self._next_s = now.seconds + PLAIN_EVERY_S
            common.say(f"zfabric: {in_words(now)}")


class Bar:
    """One line that is written over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = False

    def progress(self, now: Progress) -> None:
        """Draw the line."""
        width = shutil.get_terminal_size().columns - 1
        text = f"{_filled(now.done, now.total)} {in_words(now)}"[:width]
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
        self._drawn = True

    def notice(self, text: str) -> None:
        """Say it above the line."""
        self._stream.write("\r\x1b[K")
        common.say(f"zfabric: {common.clean(text)}")

    def end(self) -> None:
        """Leave the line as it is."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()


@contextmanager
def bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar for long work that only counts, on a terminal; call it with how many are done."""
    tty = sys.stderr.isatty()

    def show(done: int) -> None:
        if tty:
            sys.stderr.write(f"\r\x1b[K{_filled(done, total)} {done:,}/{total:,}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if tty:
            sys.stderr.write("\r\x1b[K")


def _filled(done: int, total: int | None) -> str:
    full = int(BAR_CHARS * min(1.0, done / total)) if total else 0
    return f"[{'#' * full}{'.' * (BAR_CHARS - full)}]"


def in_words(now: Progress) -> str:
    """One line: done, rate, time left, output tokens a second."""
    total = "?" if now.total is None else f"{'' if now.total_exact else '~'}{now.total:,}"
    parts = [f"{now.done:,}/{total}", f"{common.short(now.items_per_s)} items/s"]
    if now.output_tokens_per_s is not None:
        parts.append(f"{common.short(now.output_tokens_per_s)} tok/s out")
    parts.append(f"{common.duration(now.eta_s)} left" if now.eta_s is not None else "ETA unknown")
    if now.failed:
        parts.append(f"{now.failed:,} failed")
    return "  ".join(parts)
