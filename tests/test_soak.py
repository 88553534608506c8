"""A broker that is killed again and again under load: each result is there once, the books balance.

SOAK_KILLS says how often (`make soak`: 200); the short run is part of the suite.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.running import PATIENCE_S, ids_of, lines_in, request, start_zfabric, until, write_batch
from zfabric.client import Client
from zfabric.errors import FabricError

KILLS = int(os.environ.get("SOAK_KILLS", "5"))
ITEMS_A_KILL = 400
CONTRACT = ("--max-batch", "32", "--max-tokens", "65536", "--max-input", "8192")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120 + 20 * KILLS)]


def test_killed_broker_goes_on_where_it_was(tmp_path: Path) -> None:
    chance = random.Random(KILLS)
    items = ITEMS_A_KILL * KILLS
    rows = [
        request(
            f"q{k}", "why " * chance.randrange(1, 200), model="tiny", system=f"You are {k % 7}."
        )
        for k in range(items)
    ]
    source, output = write_batch(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    broker, ports = start_broker(tmp_path, 0)
    address = f"tcp://127.0.0.1:{ports}"
    others = [
        start_zfabric(
            *("worker", "--engine", "sim", "--model", "tiny", "--name", f"gpu{k}", *CONTRACT),
            *("--broker", address, "--opt", "batch_us=60000"),
            cwd=tmp_path,
        )
        for k in range(2)
    ]
    job = start_zfabric(
        *("run-batch", "-i", source, "-o", output, "--broker", address, "--json"), cwd=tmp_path
    )
    kills = 0
    try:
        while job.poll() is None and kills < KILLS:
            enough = lines_in(output) + chance.randrange(20, ITEMS_A_KILL // 2)
            until(lambda enough=enough: job.poll() is not None or lines_in(output) >= enough)
            broker.kill()
            broker.communicate()
            kills += 1
            broker, _ = start_broker(tmp_path, ports)
        talk, _ = job.communicate(timeout=PATIENCE_S + 10 * KILLS)
        assert job.returncode == 0
        assert json.loads(talk)["done"] == items
        assert ids_of(output) == sorted(f"q{k}" for k in range(items))
        status = until(lambda: settled(address))
        assert status["accepted_items"] == status["completed_items"] == items
        assert (status["residual_items"], status["residual_tokens"]) == (0, 0)
        assert status["recovery"]["damaged_records"] == 0
        assert kills == KILLS
    finally:
        for process in (broker, job, *others):
            process.kill()
            process.communicate()


def start_broker(directory: Path, port: int) -> tuple[Any, int]:
    """(the process, its port) once it is ready."""
    ports = ("--port", port, *(("--consumer-port", port + 1) if port else ()))
    stats = ("--stats-port", port + 2) if port else ()
    broker = start_zfabric(
        *("broker", "--data", "data", "--json", "--lease", 3, "--heartbeat", 0.5, *ports, *stats),
        cwd=directory,
    )
    line = broker.stdout.readline()
    assert line, broker.communicate()[1]
    return broker, int(json.loads(line)["producers"].rsplit(":", 1)[1])


def settled(address: str) -> dict[str, Any] | None:
    """The status, once nothing is with a worker. Results whose acknowledgement a kill has
    swallowed wait for their producer; its output has them."""
    try:
        client = Client(address, name="watcher", role="operator", timeout_s=5)
    except FabricError:
        return None
    try:
        status = client.stats()
    finally:
        client.close()
    return None if status["pending_items"] else status
