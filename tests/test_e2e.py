"""The whole line from a shell, on real prompts where they are at hand: what a user would run."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.running import lines_in, read_rows, until
from zfabric.batchfile import Discovery, Request, read_requests
from zfabric.cli.prompts import BBH, write_batch_file
from zfabric.client import Client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / BBH
CONTRACT = ("--max-batch", "32", "--max-tokens", "65536", "--max-input", "8192")


class Fabric:
    """A broker and workers as processes of the command, on free ports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[str]] = []
        self.address = ""

    def start(self, *words: str) -> subprocess.Popen[str]:
        with (self.directory / f"{len(self.processes)}.err").open("w") as talk:
            process = subprocess.Popen(
                [sys.executable, "-m", "zfabric", *words],
                cwd=self.directory,
                stdout=subprocess.PIPE,
                stderr=talk,
                text=True,
            )
        self.processes.append(process)
        return process

    def broker(self, *flags: str) -> None:
        process = self.start("broker", "--port", "0", "--json", *flags)
        assert process.stdout is not None
        self.address = json.loads(process.stdout.readline())["producers"]

    def worker(self, name: str, *flags: str) -> subprocess.Popen[str]:
        return self.start(
            "worker", "--engine", "sim", "--model", "tiny", "--name", name, *CONTRACT,
            "--broker", self.address, *flags,
        )  # fmt: skip

    def run_batch(self, source: Path, *flags: str) -> subprocess.Popen[str]:
        output = self.directory / "out.jsonl"
        return self.start(
            "run-batch", "-i", str(source), "-o", str(output), "--broker", self.address, "--json",
            *flags,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "zfabric", "status", "--json", "--broker", self.address]
        answer: dict[str, Any] = json.loads(subprocess.check_output(command, text=True))
        return answer

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes:
            process.wait(20)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    running = Fabric(tmp_path)
    yield running
    running.close()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interleaved real prompts, or as many made-up ones where there are none."""
    path = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    with contextlib.chdir(ROOT):
        write_batch_file(path, None if PROMPTS.is_dir() else 4_761, "tiny")
    return path


def requests_of(path: Path) -> list[Request]:
    with path.open("rb") as stream:
        return [
            row for row in Discovery().assign(read_requests(stream)) if isinstance(row, Request)
        ]


def quarter_of_the_prefixes(path: Path) -> int:
    shapes = {request.shape for request in requests_of(path)}
    return sum(shape.prefix_tokens or 0 for shape in shapes) // 4


def check_output(fabric: Fabric, source: Path) -> None:
    rows = read_rows(fabric.directory / "out.jsonl")
    wanted = [request.custom_id for request in requests_of(source)]
    assert sorted(row["custom_id"] for row in rows) == sorted(wanted)
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == {"id", "custom_id", "response", "error"}
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
    for row in rows[::50]:
        completion = ChatCompletion.model_validate(row["response"]["body"])
        assert completion.choices[0].message.content


def check_books(status: dict[str, Any], items: int) -> None:
    assert status["completed_items"] == status["accepted_items"] == items
    assert (status["residual_items"], status["residual_tokens"]) == (0, 0)
    assert (status["ready_items"], status["pending_items"], status["dead_items"]) == (0, 0, 0)


@pytest.mark.parametrize("policy", ["lanes", "fifo"])
def test_every_prompt_comes_back_once_and_order_decides_the_cache(
    fabric: Fabric, prompts: Path, policy: str
) -> None:
    cache = quarter_of_the_prefixes(prompts)
    fabric.broker("--policy", policy)
    for name in ("gpu0", "gpu1"):
        fabric.worker(name, "--opt", f"cache_tokens={cache}")
    assert fabric.run_batch(prompts).wait(200) == 0
    # Counters travel with heartbeats; the last of them has arrived when all queries are counted.
    status = until(lambda: _when_counted(fabric.status()))
    check_output(fabric, prompts)
    check_books(status, len(requests_of(prompts)))
    for worker in status["workers"]:
        share = worker["cache_hit_ratio"] / worker["cache_hit_ratio_ideal"]
        assert worker["measured_by"] == "simulated"
        assert worker["items_done"] > 0.2 * status["completed_items"]
        if policy == "lanes":
            assert share >= 0.995
        else:
            assert worker["cache_hit_ratio"] < 0.3


def _when_counted(status: dict[str, Any]) -> dict[str, Any] | None:
    counted = sum(worker["cache_queries_tokens"] or 0 for worker in status["workers"])
    return status if counted == status["completed_tokens"] else None


def test_worker_killed_in_the_middle_loses_nothing(fabric: Fabric, prompts: Path) -> None:
    fabric.broker("--lease", "3", "--heartbeat", "0.5")
    fabric.worker("gpu0")
    victim = fabric.worker("gpu1")
    job = fabric.run_batch(prompts)
    until(lambda: lines_in(fabric.directory / "out.jsonl") > 500)
    victim.kill()
    assert job.wait(200) == 0
    check_output(fabric, prompts)
    status = fabric.status()
    check_books(status, len(requests_of(prompts)))
    assert status["redeliveries_total"] > 0


def test_worker_stopped_for_longer_than_its_lease_changes_nothing(
    fabric: Fabric, prompts: Path
) -> None:
    fabric.broker("--lease", "2", "--heartbeat", "0.5")
    fabric.worker("gpu0", "--opt", "speed=0.5")
    frozen = fabric.worker("gpu1", "--opt", "speed=0.5")
    job = fabric.run_batch(prompts)
    until(lambda: lines_in(fabric.directory / "out.jsonl") > 500)
    frozen.send_signal(signal.SIGSTOP)
    with Client(fabric.address, name="watcher") as watcher:
        until(lambda: not _worker(watcher.stats(), "gpu1")["live"])
    frozen.send_signal(signal.SIGCONT)
    assert job.wait(200) == 0
    check_output(fabric, prompts)
    check_books(fabric.status(), len(requests_of(prompts)))


def _worker(status: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [worker for worker in status["workers"] if worker["name"] == name]
    return found


def test_client_killed_in_the_middle_and_resumed_leaves_each_id_once(
    fabric: Fabric, prompts: Path
) -> None:
    fabric.broker()
    for name in ("gpu0", "gpu1"):
        fabric.worker(name)
    job = fabric.run_batch(prompts)
    until(lambda: lines_in(fabric.directory / "out.jsonl") > 500)
    job.kill()
    job.wait(20)
    assert lines_in(fabric.directory / "out.jsonl") < len(requests_of(prompts))
    resumed = fabric.run_batch(prompts, "--resume")
    assert resumed.wait(200) == 0
    assert resumed.stdout is not None
    summary = json.loads(resumed.stdout.read())
    assert summary["resumed"] > 0
    check_output(fabric, prompts)
    check_books(fabric.status(), len(requests_of(prompts)))


def test_real_prompts_are_what_the_issue_says_where_they_are_at_hand(prompts: Path) -> None:
    if not PROMPTS.is_dir():
        pytest.skip(f"no {BBH} beside the project: made-up prompts were used")
    requests = requests_of(prompts)
    assert len(requests) == 4_761
    assert len({request.shape for request in requests}) == 18
    assert prompts.stat().st_size > 10_000_000
