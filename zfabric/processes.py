"""Processes of a benchmark or of a chaos run: started, watched for what they use, and ended.

Only processes that were started here are ended, with their children. Times are seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

# A process that was told to end is killed after this long.
END_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Use(NamedTuple):
    """CPU seconds since the start; and now: bytes in memory, open descriptors, threads."""

    cpu_s: float
    rss_bytes: int
    descriptors: int
    threads: int


def use(pid: int) -> Use:
    """What a process and its children use now; nothing where it is gone."""
    cpu, pages, descriptors, threads = 0.0, 0, 0, 0
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        cpu, threads = (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[17])
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        for child in children(pid):
            below = use(child)
            cpu, pages = cpu + below.cpu_s, pages + below.rss_bytes // _PAGE
            descriptors, threads = descriptors + below.descriptors, threads + below.threads
    return Use(cpu, pages * _PAGE, descriptors, threads)


def children(pid: int) -> list[int]:
    """The processes that a process has started; none where it is gone."""
    with contextlib.suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Processes:
    """Everything that one run has started; leaving it ends them, the newest first."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in reversed(self._started):
            # One that is stopped would not hear that it is to end.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in reversed(self._started):
            try:
                process.communicate(timeout=END_S)
            except ValueError:
                process.wait()  # its output has been read before
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def start(self, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command; its standard output can be read, what it says to people is dropped."""
        options = {"stderr": subprocess.DEVNULL, **options}
        process = subprocess.Popen(list(words), stdout=subprocess.PIPE, text=True, **options)
        self._started.append(process)
        return process

    def python(self, module: str, role: str, **told: Any) -> subprocess.Popen[str]:
        """Start one of our own modules with a role and what it is told."""
        return self.start([sys.executable, "-m", module, role, json.dumps(told)])

    def zfabric(self, *words: object, **options: Any) -> subprocess.Popen[str]:
        """Start a command of ours."""
        return self.start(command(*words), **options)


def command(*words: object) -> list[str]:
    """A command of ours, as this Python runs it."""
    return [sys.executable, "-m", "zfabric", *map(str, words)]


def stop(process: subprocess.Popen[str], timeout_s: float = END_S) -> str:
    """Tell a process to end; returns what it has printed. Raises TimeoutError."""
    process.terminate()
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"process {process.pid} does not end") from None


def wait_for(what: str, holds: Callable[[], bool], timeout_s: float) -> None:
    """Wait until something holds. Raises TimeoutError, saying what it was."""
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)
