"""Memory while a long batch file runs: the broker's and run-batch's, at each tenth of the way.

Every part is a process of its own, as a user runs it: a broker with its data on disk, simulated
cards without cost, `zfabric run-batch`. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLE_S = 0.5
TENTHS = 10
PREFIXES = 20
# Two workers keep the broker busy on a small machine; more would only take its processor.
WORKERS = 2
MIB = 1024 * 1024


def write_input(path: Path, items: int, size: int) -> None:
    """`items` chat requests of about `size` bytes, with `PREFIXES` system prompts, interleaved."""
    with path.open("w", encoding="utf-8") as stream:
        for k in range(items):
            system = f"Task {k % PREFIXES}: " + "answer the question in one word. " * (size // 66)
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": f"question {k} " * (1 + k % 23)},
            ]
            body = {"model": "bench", "messages": messages, "max_tokens": 4}
            line = {"custom_id": f"q-{k}", "method": "POST", "url": "/v1/chat/completions"}
            stream.write(json.dumps({**line, "body": body}) + "\n")


def memory(directory: Path, items: int, size: int) -> dict[str, Any]:
    """Run `items` lines of about `size` bytes, and say what memory that took."""
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    write_input(source, items, size)
    with _processes(directory) as (broker, address, start):
        job = start(
            "run-batch", "-i", str(source), "-o", str(output), "--broker", address, "--quiet"
        )
        began = time.monotonic()
        samples: list[tuple[int, int, int]] = []
        while job.poll() is None:
            size_now = output.stat().st_size if output.exists() else 0
            samples.append((size_now, _rss_bytes(broker.pid), _rss_bytes(job.pid)))
            time.sleep(SAMPLE_S)
        seconds = time.monotonic() - began
        if job.returncode != 0:
            raise RuntimeError(f"run-batch ended with code {job.returncode}")
    whole = output.stat().st_size
    with output.open("rb") as stream:
        rows = sum(1 for _ in stream)
    return {
        "lines": items,
        "rows": rows,
        "input_bytes": source.stat().st_size,
        "seconds": round(seconds, 1),
        "lines_per_s": round(items / seconds),
        "broker_mib_by_tenth": _by_tenth(samples, whole, 1),
        "run_batch_mib_by_tenth": _by_tenth(samples, whole, 2),
        "broker_mib_max": round(max(each[1] for each in samples) / MIB),
        "run_batch_mib_max": round(max(each[2] for each in samples) / MIB),
    }


def _by_tenth(samples: list[tuple[int, int, int]], whole: int, column: int) -> str:
    """The most memory in each tenth of the output, in MiB."""
    tenths = [0] * TENTHS
    for sample in samples:
        place = min(TENTHS - 1, sample[0] * TENTHS // whole)
        tenths[place] = max(tenths[place], sample[column])
    return " ".join(str(round(each / MIB)) for each in tenths)


def _rss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def _processes(directory: Path) -> Iterator[Any]:
    """(broker, its address, what starts one more command); all are ended at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "zfabric", *words]
        with (directory / f"{len(started)}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        started.append(process)
        return process

    try:
        broker = start("broker", "--port", "0", "--json", "--data", str(directory / "data"))
        ready = broker.stdout.readline() if broker.stdout is not None else ""
        address = json.loads(ready)["producers"]
        contract = ("--max-batch", "256", "--max-tokens", "1048576", "--max-input", "8192")
        for k in range(WORKERS):
            name = f"w{k}"
            words = ("worker", "--engine", "sim", "--model", "bench", "--name", name)
            start(*words, *contract, "--broker", address, "--opt", "speed=0")
        yield broker, address, start
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
