"""Memory while a long batch file runs: the broker's and run-batch's, at each tenth of the way.

Every part is a process of its own, as a user runs it: a broker with its data on disk, simulated
cards without cost, `zfabric run-batch`. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from zfabric.processes import Processes, use

SAMPLE_S = 0.5
TENTHS = 10
PREFIXES = 20
# Two workers keep the broker busy on a small machine; more would only take its processor.
WORKERS = 2
CONTRACT = ("--max-batch", "256", "--max-tokens", "1048576", "--max-input", "8192")
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
    samples: list[tuple[int, int, int]] = []
    with Processes() as processes:
        start = processes.zfabric
        broker = start("broker", "--port", "0", "--json", "--data", directory / "data")
        address = json.loads(broker.stdout.readline() if broker.stdout else "")["producers"]
        for k in range(WORKERS):
            words = ("worker", "--engine", "sim", "--model", "bench", "--name", f"w{k}")
            start(*words, *CONTRACT, "--broker", address, "--opt", "speed=0")
        job = start("run-batch", "-i", source, "-o", output, "--broker", address, "--quiet")
        began = time.monotonic()
        while job.poll() is None:
            size_now = output.stat().st_size if output.exists() else 0
            samples.append((size_now, use(broker.pid).rss_bytes, use(job.pid).rss_bytes))
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
