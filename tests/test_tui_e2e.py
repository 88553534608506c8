"""The dashboard in a real terminal, over a real broker that dies and returns."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest

from tests.running import PATIENCE_S, request, until, write_batch
from tests.test_e2e import Fabric

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
CONTRACT = ("--max-batch", "8", "--max-tokens", "8192", "--max-input", "1024")
ITEMS = 600
BOOKS = ("accepted", "completed", "dead", "ready", "pending", "residual")


class Terminal:
    """A command in a terminal of its own: what it shows, and what it wrote."""

    def __init__(
        self, *words: str, size: tuple[int, int] = (80, 24), cwd: Path | None = None, **env: str
    ) -> None:
        self._screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._screen)
        self.wrote = b""
        self._fd, inner = pty.openpty()
        rows = struct.pack("HHHH", size[1], size[0], 0, 0)
        fcntl.ioctl(inner, termios.TIOCSWINSZ, rows)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zfabric", *words],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True, cwd=cwd,
            env={**os.environ, "TERM": "xterm-256color", **env},
        )  # fmt: skip
        os.close(inner)

    def read(self, wait_s: float = 0.05) -> None:
        """Take what was written."""
        while select.select([self._fd], [], [], wait_s)[0]:
            try:
                data = os.read(self._fd, 65_536)
            except OSError:
                return
            if not data:
                return
            self.wrote += data
            self._stream.feed(data)
            wait_s = 0.0

    @property
    def lines(self) -> list[str]:
        self.read()
        return [line.rstrip() for line in self._screen.display]

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def until(self, holds: Callable[[list[str]], Any]) -> list[str]:
        """Wait for the screen to be so; returns it."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds(lines := self.lines):
            shown = "\n".join(lines)
            assert self.process.poll() is None, f"it ended:\n{shown}"
            assert time.monotonic() < deadline, f"it did not come to pass:\n{shown}"
        return lines

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(20)
        os.close(self._fd)


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    running = Fabric(tmp_path)
    yield running
    running.close()


@contextlib.contextmanager
def terminal(*words: str, **options: Any) -> Iterator[Terminal]:
    shown = Terminal(*words, **options)
    try:
        yield shown
    finally:
        shown.close()


def start_broker(fabric: Fabric, *flags: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A broker; and the flags with which another one takes its place."""
    process = fabric.start("broker", "--json", *(flags or ("--port", "0")))
    assert process.stdout is not None
    bound = json.loads(process.stdout.readline())
    fabric.address = bound["producers"]
    ports = [bound[name].rsplit(":", 1)[1] for name in ("producers", "workers", "stats")]
    names = ("--port", "--consumer-port", "--stats-port")
    return process, [word for pair in zip(names, ports, strict=True) for word in pair]


def start_worker(fabric: Fabric, name: str) -> None:
    fabric.start(
        "worker", "--engine", "sim", "--model", "tiny", "--name", name, *CONTRACT,
        "--broker", fabric.address, "--opt", "batch_us=100000",
    )  # fmt: skip


def run_job(fabric: Fabric, directory: Path) -> None:
    rows = [request(f"q{k}", "word " * (1 + k % 50), model="tiny") for k in range(ITEMS)]
    source = write_batch(directory / "in.jsonl", rows)
    job = fabric.run_batch(source)
    assert job.wait(PATIENCE_S) == 0


def flow_on_screen(lines: list[str]) -> dict[str, tuple[int, int]]:
    """What the flow page says of items and tokens."""
    found = {}
    for line in lines:
        match = re.match(rf"[=+ ]*({'|'.join(BOOKS)}) +([\d,]+) +([\d,]+)", line)
        if match:
            found[match[1]] = (int(match[2].replace(",", "")), int(match[3].replace(",", "")))
    return found


def flow_of(status: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {name: (status[f"{name}_items"], status[f"{name}_tokens"]) for name in BOOKS}


def test_figures_on_screen_are_those_of_the_status(fabric: Fabric, tmp_path: Path) -> None:
    start_broker(fabric)
    start_worker(fabric, "gpu0")
    start_worker(fabric, "gpu1")
    with terminal("top", "--broker", fabric.address, TZ="UTC") as top:
        top.until(lambda lines: any("gpu0" in line for line in lines))
        rows = [request(f"q{k}", "word " * (1 + k % 50), model="tiny") for k in range(ITEMS)]
        job = fabric.run_batch(write_batch(tmp_path / "in.jsonl", rows))
        # While it runs the job has a rate and a time at which it will be done.
        top.until(lambda lines: any(re.search(r"of +% +items/s", line) for line in lines))
        top.until(lambda lines: any(re.match(r"batch-out.* \d+ s$", line) for line in lines))
        assert job.wait(PATIENCE_S) == 0
        status = fabric.status()
        assert status["completed_items"] == ITEMS
        top.press("5")
        top.until(lambda lines: flow_on_screen(lines) == flow_of(status))
        top.press("4")
        done = {worker["name"]: worker for worker in status["workers"]}
        lines = top.until(lambda lines: "contract  8 items, 8,192 tokens" in "\n".join(lines))
        assert f"done {done['gpu0']['items_done']:,} items" in "\n".join(lines)
        top.press("w")
        padding = status["padded_tokens"] - status["real_tokens"]
        top.until(lambda lines: any(re.match(rf"padding +{padding:,}\b", row) for row in lines))
        top.press("q")
        top.read(0.5)
        assert top.process.wait(PATIENCE_S) == 0
        assert b"Traceback" not in top.wrote


def test_broker_that_dies_and_returns_is_disconnected_and_then_live(fabric: Fabric) -> None:
    broker, same_ports = start_broker(fabric)
    start_worker(fabric, "gpu0")
    with terminal("top", "--broker", fabric.address) as top:
        before = top.until(lambda lines: any("gpu0" in line for line in lines))
        broker.send_signal(signal.SIGKILL)
        broker.wait(20)
        wrote = len(top.wrote)
        lines = top.until(lambda lines: lines[0].startswith("DISCONNECTED"))
        # The connection's end is what is seen, not the silence after it.
        assert re.search(r"last heard [01] s ago", lines[0]), lines[0]
        assert lines[2] == "! the broker does not answer: these are its last values"
        lines = top.until(lambda lines: "trying again in" in lines[0])
        assert [line.split()[:1] for line in lines[3:-1]] == [
            line.split()[:1] for line in before[3:-1]
        ]
        # The last values are still there, and faint (SGR 2).
        assert re.search(rb"\x1b\[(?:\d+;)*2(?:;\d+)*mgpu0", top.wrote[wrote:])
        start_broker(fabric, *same_ports)
        lines = top.until(lambda lines: re.search(r"\d s old", lines[0]))
        top.until(lambda lines: any(re.match(r"gpu0 +(idle|live|loading)", line) for line in lines))
        assert top.process.poll() is None
        top.press("q")
        top.read(0.5)
        assert top.process.wait(PATIENCE_S) == 0
        assert b"Traceback" not in top.wrote


def test_terminal_without_colour_and_unicode_gets_neither(fabric: Fabric, tmp_path: Path) -> None:
    start_broker(fabric)
    start_worker(fabric, "gpu0")
    run_job(fabric, tmp_path)
    with terminal("top", "--ascii", "--broker", fabric.address, NO_COLOR="1") as top:
        shown = top.until(lambda lines: any("gpu0" in line for line in lines))
        for key, word in (("2", "lane 0"), ("3", "signature"), ("4", "heartbeat"),
                          ("5", "residual"), ("6", "worker_joined"), ("w", "verdict"),
                          ("?", "keys"), ("d", "[y] yes")):  # fmt: skip
            top.press(key)
            shown = top.until(lambda lines, word=word: any(word in line for line in lines))
            assert all(line.isascii() for line in shown), shown
        top.press("n")
        top.press("q")
        assert top.process.wait(PATIENCE_S) == 0
    # SGR 30 to 49 and 90 to 107 are colours, but for 39 and 49, which are the terminal's own.
    codes = re.findall(rb"\x1b\[([\d;]*)m", top.wrote)
    numbers = {int(number) for code in codes for number in code.split(b";") if number}
    assert not {n for n in numbers if 30 <= n <= 48 or 90 <= n <= 107} - {39}
    assert 7 in numbers


def comparable(status: dict[str, Any]) -> dict[str, Any]:
    """A status without what is another from moment to moment."""
    moving = ("time", "uptime_s", "peers", "messages_total", "frames_total")
    still = {k: v for k, v in status.items() if k not in moving}
    ages = (
        "heartbeat_age_s", "age_s", "seen_age_s", "last_disconnect_age_s", "cache_hit_ratio_10s",
    )  # fmt: skip
    for rows in ("workers", "jobs"):
        still[rows] = [{k: v for k, v in row.items() if k not in ages} for row in still[rows]]
    return {k: v for k, v in still.items() if not k.startswith("dispatch_slice")}


def test_top_once_agrees_with_status_and_stdout_is_pure(fabric: Fabric, tmp_path: Path) -> None:
    start_broker(fabric)
    start_worker(fabric, "gpu0")
    run_job(fabric, tmp_path)
    until(lambda: all(worker["state"] == "idle" for worker in fabric.status()["workers"]))
    # Lanes retire some seconds after the last item: not between the two answers.
    until(lambda: not fabric.status()["lanes_active"])
    command = [sys.executable, "-m", "zfabric"]
    where = ["--json", "--broker", fabric.address]
    answers = []
    for words in (["top", "--once"], ["status"]):
        done = subprocess.run(
            [*command, *words, *where], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        answers.append(comparable(json.loads(done.stdout)))
    assert answers[0] == answers[1]


def test_headless_recording_of_a_broker_replays_on_a_terminal(
    fabric: Fabric, tmp_path: Path
) -> None:
    broker, _ = start_broker(fabric, "--port", "0", "--record", str(tmp_path / "run.db"))
    start_worker(fabric, "gpu0")
    run_job(fabric, tmp_path)
    status = fabric.status()
    broker.send_signal(signal.SIGTERM)
    assert broker.wait(PATIENCE_S) == 0
    with terminal("top", "--replay", str(tmp_path / "run.db")) as top:
        top.until(lambda lines: lines[0].startswith("REPLAY"))
        top.press(">")
        top.press("5")
        top.until(lambda lines: flow_on_screen(lines) == flow_of(status))
        for key, word in (
            ("2", "lane "),
            ("3", "signature"),
            ("4", "gpu0"),
            ("6", "worker_joined"),
        ):
            top.press(key)
            top.until(lambda lines, word=word: any(word in line for line in lines))
        top.press("q")
        assert top.process.wait(PATIENCE_S) == 0
        assert b"Traceback" not in top.wrote


def test_demo_stays_for_a_look_and_then_prints_its_summary(tmp_path: Path) -> None:
    with terminal("demo", "--items", "100", "--opt", "speed=0", cwd=tmp_path) as demo:
        demo.until(lambda lines: lines[-1].startswith("ENDED: q goes on"))
        demo.press("5")
        demo.until(lambda lines: flow_on_screen(lines).get("completed", (0, 0))[0] == 100)
        demo.press("4")
        demo.until(lambda lines: any("sim-0  demo" in line for line in lines))
        demo.press("q")
        deadline = time.monotonic() + PATIENCE_S
        while demo.process.poll() is None and time.monotonic() < deadline:
            demo.read()
        assert demo.process.returncode == 0
        assert re.search(rb"items +100 of 100", demo.wrote), demo.lines
        assert b"Traceback" not in demo.wrote


def test_top_records_what_it_shows(fabric: Fabric, tmp_path: Path) -> None:
    start_broker(fabric)
    start_worker(fabric, "gpu0")
    path = tmp_path / "seen.db"
    with terminal("top", "--broker", fabric.address, "--record", str(path)) as top:
        top.until(lambda lines: any("gpu0" in line for line in lines))
        run_job(fabric, tmp_path)
        status = fabric.status()
        top.press("5")
        top.until(lambda lines: flow_on_screen(lines) == flow_of(status))
        top.press("q")
        top.read(0.5)
        assert top.process.wait(PATIENCE_S) == 0
    words = ["explain", "waste", "--replay", str(path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "zfabric", *words], capture_output=True, text=True, timeout=60
    )
    said = json.loads(done.stdout)
    assert said["padded_tokens"] == status["padded_tokens"]
    assert sum(part["tokens"] for part in said["parts"]) == (
        status["padded_tokens"] - status["real_tokens"]
    )
