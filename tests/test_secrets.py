"""Secrets: none of a key's secret half is in a log, an event, a recording, a status or an error."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import zlib
from pathlib import Path

import pytest

from tests.running import PATIENCE_S, request, start_zfabric, write_batch, zfabric
from zfabric.keys import Keyring, load_client_key

ROLES = {"alice": "producer", "gpu": "worker", "op": "operator", "mon": "monitor"}


def everything(directory: Path) -> bytes:
    """All bytes of all files, those that a recording packs unpacked too."""
    pieces = []
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            pieces.append(path.read_bytes())
        if path.suffix == ".rec":
            with sqlite3.connect(path) as db:
                for (name,) in db.execute("select name from sqlite_master where type = 'table'"):
                    for row in db.execute(f"select * from {name}"):
                        for value in row:
                            data = value if isinstance(value, bytes) else str(value).encode()
                            pieces.append(data)
                            with contextlib.suppress(zlib.error):
                                pieces.append(zlib.decompress(data))
            db.close()
    return b"\0".join(pieces)


@pytest.mark.e2e
def test_a_run_with_keys_leaves_no_secret_outside_the_directory_of_keys(tmp_path: Path) -> None:
    """Broker with log, recording, data; worker; batch run; refusals of every kind; drain."""
    ring = Keyring(tmp_path / "keys")
    secrets = [load_client_key(ring.make(user, role)).pair.secret for user, role in ROLES.items()]
    secrets.append(ring.server().secret)
    ring.make("old", "operator")
    secrets.append(load_client_key(ring.directory / "old.key").pair.secret)
    ring.revoke("old")
    place = tmp_path / "place"
    place.mkdir()
    said: list[str] = []

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        done = zfabric(*words, cwd=place)
        said.append(done.stdout + done.stderr)
        return done

    def key(user: str) -> str:
        return str(ring.directory / f"{user}.key")

    broker = start_zfabric(
        "broker", "--port", "0", "--json", "--data", "data", "--keys", str(ring.directory),
        "--log", "json", "--log-file", "events.json", "--record", "it.rec", cwd=place,
    )  # fmt: skip
    worker = None
    try:
        ready = json.loads(broker.stdout.readline())
        address, port = ready["producers"], ready["workers"].rsplit(":", 1)[1]
        worker = start_zfabric(
            "worker", "--engine", "sim", "--model", "m", "--opt", "speed=0", "--max-batch", "8",
            "--max-tokens", "8192", "--max-input", "1024", "--broker", address, "--key", key("gpu"),
            "--broker-port", port, cwd=place,
        )  # fmt: skip
        write_batch(place / "in.jsonl", [request(f"q{k}") for k in range(20)])
        where = ("--broker", address)
        done = run("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *where, "--key", key("alice"))
        assert done.returncode == 0, done.stderr
        for user in ("gpu", "old"):
            assert run("status", *where, "--key", key(user), "--traceback").returncode == 2
        assert run("status", *where, "--key", "none").returncode == 2
        assert run("drain", *where, "--key", key("mon")).returncode == 2
        assert run("status", "--json", *where, "--key", key("mon")).returncode == 0
        assert run("events", *where, "--key", key("op")).returncode == 0
        for words in (("keys", "list"), ("keys", "list", "--json"), ("keys", "server")):
            run(*words, "--keys", str(ring.directory))
        assert run("drain", *where, "--key", key("op")).returncode == 0
        broker.wait(PATIENCE_S)
    finally:
        for process in (worker, broker):
            if process is not None:
                process.terminate()
                out, err = process.communicate(timeout=PATIENCE_S)
                said.append(out + err)
    found = everything(place) + "".join(said).encode()
    assert b"producer_joined" in found and b"batch-out" in found, "it looked at what is there"
    for secret in secrets:
        assert secret.encode() not in found
