"""Child processes of a command: started apart from the terminal, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from zfabric.errors import FabricError, TimeoutExpired
from zfabric.processes import children

STOP_S = 10.0
# Signals this close are one order: `timeout` sends its own to a process, and to the group it is in.
SAME_ORDER_S = 0.5
PR_SET_PDEATHSIG = 1
LOG_TAIL_CHARS = 600
# How the line begins that says why a command ended; see `cli.main`.
ERROR = "zfabric: error: "


class Children:
    """The commands that one command has started. Ends them all when it is closed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start `zfabric WORDS`; what it says goes to NAME.log."""
        with (self._directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "zfabric", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C in the terminal is for the parent, which ends the children in order.
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        self._started.append((name, process))
        return process

    def ready_line(self, name: str, process: subprocess.Popen[bytes], timeout_s: float) -> Any:
        """The JSON line that a child prints when it is ready."""
        if process.stdout is None:
            raise FabricError(f"{name} was started without an output")
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        line = process.stdout.readline() if ready else b""
        if not line:
            if ready:
                raise FabricError(f"{name} ended at its start: {self.log_tail(name)}")
            raise TimeoutExpired(f"{name} was not ready within {timeout_s:g} s")
        return json.loads(line)

    def ended(self) -> list[tuple[str, int]]:
        """(name, exit code) of each child that has ended by itself and was not told of before."""
        found = [(name, each) for name, each in self._started if each.poll() is not None]
        news = [(name, each.returncode) for name, each in found if name not in self._told]
        self._told.update(name for name, _ in news)
        return news

    def check(self) -> None:
        """Raise FabricError if a child has ended by itself."""
        for name, code in self.ended():
            raise FabricError(f"{name} ended with code {code}: {self.log_tail(name)}")

    def log_tail(self, name: str) -> str:
        """The error that ended a child as it told it, else the end of what it said."""
        text = (self._directory / f"{name}.log").read_text("utf-8", "replace").strip()
        before, told, error = text.rpartition(ERROR)
        ended_with_it = told and before[-1:] in ("", "\n") and "\n" not in error
        return (error if ended_with_it else text[-LOG_TAIL_CHARS:]) or "it said nothing"

    def stop(self) -> None:
        """End every child: politely, last started first, then for good."""
        for _, process in reversed(self._started):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        until = time.monotonic() + STOP_S
        for _, process in reversed(self._started):
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._started.clear()


@contextlib.contextmanager
def ending_on_signals(at_once: Callable[[], None] | None = None) -> Iterator[None]:
    """While this is open a signal ends the command like an exception, so that its children end too.

    The first one: those after it are ignored, so that nothing is left of what ends meanwhile. Where
    `at_once` is given, a second one calls it and ends the process.
    """
    first_s: list[float] = []

    def end(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first_s.append(now)
        if len(first_s) == 1:
            raise SystemExit(128 + number)
        if at_once is not None and now - first_s[0] > SAME_ORDER_S:
            at_once()
            os._exit(128 + number)

    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What nohup has told this process to ignore, it goes on ignoring.
    former = {n: signal.getsignal(n) for n in heard if signal.getsignal(n) != signal.SIG_IGN}
    for number in former:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def end_all(pids: Iterable[int]) -> None:
    """Kill these children and all that they have started."""
    for pid in pids:
        below = children(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        # Only now: a worker that lives would start its engine anew.
        end_all(below)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _end_with_parent() -> None:
    """In the child, before it becomes another program: end when the parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
