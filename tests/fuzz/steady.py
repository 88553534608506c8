"""A healthy client: submits items at fixed times until a file appears; prints what came of them.

    python -m tests.fuzz.steady ADDRESS ITEMS_A_SECOND STOP_FILE

An item's latency counts from when it was due, so that a client that was held up does not look good.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from zfabric.client import Client
from zfabric.results import Item, Results
from zfabric.shapes import Shape

# Items of one submit; the times between submits follow from the rate.
CHUNK = 50
PATIENCE_S = 60.0


def main() -> int:
    address, rate, stop = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    shape = Shape.of("healthy", "system")
    payload = b"x" * 200
    results, due_s, latencies = Results(), [], []
    pause = threading.Event()
    with Client(address, name="healthy", timeout_s=30.0) as client:
        print("ready", flush=True)

        def take(timeout_s: float) -> None:
            for result in results.take(timeout_s):
                assert result.ok, result
                latencies.append(time.monotonic() - due_s[result.number - 1])

        began_s = time.monotonic()
        while not stop.exists():
            at_s = began_s + len(due_s) / rate
            pause.wait(max(0.0, at_s - time.monotonic()))
            due_s += [began_s + (len(due_s) + k) / rate for k in range(CHUNK)]
            client.enqueue_waiting([Item(shape, payload, 100)] * CHUNK, results, None)
            take(0)
        seconds = time.monotonic() - began_s
        until_s = time.monotonic() + PATIENCE_S
        while len(latencies) < len(due_s) and time.monotonic() < until_s:
            take(1.0)
    latencies.sort()
    print(json.dumps({
        "submitted": len(due_s), "completed": len(latencies), "items_per_s": len(due_s) / seconds,
        "p50_s": latencies[len(latencies) // 2], "p99_s": latencies[len(latencies) * 99 // 100],
        "worst_s": latencies[-1],
    }), flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
