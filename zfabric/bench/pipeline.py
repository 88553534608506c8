"""The whole pipeline: a real broker, one producer, two workers that only touch bytes.

Everything is a process of its own and talks over loopback. The producer keeps a backlog waiting
throughout; what is counted begins when it is there and both workers run. Rates are items per
second, CPU is seconds per million items, sizes bytes, times seconds.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zfabric.bench import percentile
from zfabric.client import Client
from zfabric.processes import Processes, stop, use, wait_for
from zfabric.results import window_items

WORKERS = 2
BATCH_ITEMS_MAX, BATCH_TOKENS_MAX = 32, 65_536
# No bound of the broker's may come before the backlog that is asked for.
ITEMS_MAX, BYTES_MAX = 10**8, 10**13
FILL_TIMEOUT_S = 1_800.0
# Items that are completed before anything is counted, at most.
WARM_ITEMS = 5_000
LOADS = "zfabric.bench.loads"


class Case(NamedTuple):
    """One row: lanes are a limit for each shape, `backlog` is all shapes together."""

    shapes: int
    lanes: int
    backlog: int
    durability: str


class Trace(NamedTuple):
    """Where lengths come from; no path is the synthetic trace."""

    path: str | None
    column: str


def cases(
    shapes: Sequence[int],
    lanes: Sequence[int],
    backlogs: Sequence[int],
    durabilities: Sequence[str],
) -> Iterator[Case]:
    """Every combination."""
    for durability, backlog, lane, shape in itertools.product(
        durabilities, backlogs, lanes, shapes
    ):
        yield Case(shape, lane, backlog, durability)


def run(
    case: Case,
    directory: Path,
    size: int,
    seconds: float,
    trace: Trace,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Measure one case. Raises TimeoutError where nothing moves."""
    with Processes() as processes:
        broker, ready = _broker(processes, case, directory)
        operator = Client(ready["producers"], role="operator", timeout_s=30.0)
        try:
            producer = processes.python(
                LOADS, "produce", address=ready["producers"], size=size, shapes=case.shapes,
                open_items=case.backlog, lengths=trace.path, column=trace.column,
            )  # fmt: skip
            _fill(operator, case.backlog, progress)
            workers = [
                processes.python(
                    LOADS, "work", address=ready["workers"], name=f"w{k}",
                    items_max=BATCH_ITEMS_MAX, tokens_max=BATCH_TOKENS_MAX,
                )
                for k in range(WORKERS)
            ]  # fmt: skip
            warm = min(WARM_ITEMS, case.backlog)
            wait_for("the first items", lambda: _completed(operator) >= warm, FILL_TIMEOUT_S)
            figures = _measure(operator, broker, producer, workers, seconds)
            told = json.loads(stop(producer))
            for worker in workers:
                stop(worker)
        finally:
            operator.close()
    return {**case._asdict(), **figures, **_latencies(told)}


def _broker(
    processes: Processes, case: Case, directory: Path
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    words = [sys.executable, "-m", "zfabric", "broker", "--port", "0", "--json"]
    words += ["--lanes", str(case.lanes), "--max-bytes", str(BYTES_MAX)]
    words += ["--max-items", str(ITEMS_MAX), "--producer-items-max", str(ITEMS_MAX)]
    if case.durability != "memory":
        words += ["--data", str(directory / "data"), "--durability", case.durability]
    broker = processes.start(words)
    line = broker.stdout.readline() if broker.stdout is not None else ""
    if not line:
        raise TimeoutError("the broker did not start")
    return broker, json.loads(line)


def _fill(operator: Client, backlog: int, progress: Callable[[int], None]) -> None:
    def full() -> bool:
        ready: int = operator.stats(120.0)["ready_items"]
        progress(ready)
        # The next window does not fit.
        return ready > backlog - window_items(backlog)

    wait_for("the backlog", full, FILL_TIMEOUT_S)


def _completed(operator: Client) -> int:
    done: int = operator.stats(120.0)["completed_items"]
    return done


def _measure(
    operator: Client,
    broker: subprocess.Popen[str],
    producer: subprocess.Popen[str],
    workers: list[subprocess.Popen[str]],
    seconds: float,
) -> dict[str, Any]:
    pids = {"broker": [broker.pid], "producer": [producer.pid], "workers": [w.pid for w in workers]}
    producer.send_signal(signal.SIGUSR1)
    began, first = time.monotonic(), _completed(operator)
    before = {who: sum(use(pid).cpu_s for pid in those) for who, those in pids.items()}
    time.sleep(seconds)
    status = operator.stats(120.0)
    took, items = time.monotonic() - began, status["completed_items"] - first
    after = {who: sum(use(pid).cpu_s for pid in those) for who, those in pids.items()}
    cpu = {
        f"{who}_cpu_s_per_million": (after[who] - before[who]) / max(1, items) * 1e6 for who in pids
    }
    return {
        "items_per_s": items / took,
        **cpu,
        "broker_rss_bytes": use(broker.pid).rss_bytes,
        "lanes_active": status["lanes_active"],
        "batch_fill_ratio": status["batch_fill_ratio"],
        "cost_ratio": status["cost_ratio"],
        "residual_items": status["residual_items"],
    }


def _latencies(told: dict[str, list[float]]) -> dict[str, float | None]:
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    return {
        f"{what}_{name}_s": percentile(told[f"{what}_s"], share) if told[f"{what}_s"] else None
        for what in ("ack", "whole")
        for name, share in shares.items()
    }
