"""The store on disk from a shell: what a run leaves behind, and directories that are refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import until
from tests.test_e2e import Fabric, check_output, prompts
from zfabric.segment import FORMAT, HEADER_BYTES, HEADER_COPY_BYTES, MAGIC

__all__ = ["prompts"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    running = Fabric(tmp_path)
    yield running
    running.close()


def disk_bytes(directory: Path) -> int:
    """What the files of a directory take, its own included."""
    found = 0
    for parent, _, names in os.walk(directory):
        for path in (Path(parent), *(Path(parent) / name for name in names)):
            with contextlib.suppress(FileNotFoundError):
                found += 512 * path.lstat().st_blocks
    return found


def digest(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    found = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {name: value for name, value in found.items() if not name.endswith("/lock")}


def refused(directory: Path) -> str:
    """Start a broker that must not start; what it says."""
    command = [sys.executable, "-m", "zfabric", "broker", "--port", "0", "--data", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2), done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def segment_files(directory: Path) -> list[str]:
    """As rglob finds them, which fails where the broker removes a directory meanwhile."""
    return [name for _, _, names in os.walk(directory) for name in names if name.endswith(".seg")]


def written(directory: Path) -> list[Path]:
    """Segment files that have a header: one that was just made may have none yet."""
    found = []
    for folder, _, names in os.walk(directory):
        for path in sorted(Path(folder) / name for name in names if name.endswith(".seg")):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size >= HEADER_BYTES:
                    found.append(path)
    return found


def test_real_prompts_leave_no_segment_and_no_bytes(fabric: Fabric, prompts: Path) -> None:
    data = fabric.directory / "data"
    fabric.broker("--data", str(data))
    for name in ("gpu0", "gpu1"):
        fabric.worker(name)
    # The first items make the reserve and what a broker always has.
    first = fabric.directory / "first.jsonl"
    first.write_text("".join(prompts.read_text().splitlines(keepends=True)[:40]))
    job = fabric.run_batch(first, "--overwrite")
    assert job.wait(120) == 0
    until(lambda: not segment_files(data))
    baseline = disk_bytes(data)
    job = fabric.run_batch(prompts, "--overwrite")
    until(lambda: segment_files(data / "segments"))
    assert job.wait(240) == 0
    check_output(fabric, prompts)
    until(lambda: not segment_files(data))
    status = fabric.status()
    assert (status["residual_items"], status["storage"]["segment_files"]) == (0, 0)
    assert status["storage"]["disk_bytes"] == 0
    # The catalog has grown by some records until the next start rewrites it.
    catalog = (data / "catalog.log").stat().st_size
    # Directories that have become empty are swept every few seconds.
    until(lambda: disk_bytes(data) - baseline <= catalog + 4_096 * 8)


def test_second_broker_on_a_directory_is_told_who_holds_it(fabric: Fabric) -> None:
    data = fabric.directory / "data"
    fabric.broker("--data", str(data))
    (holder,) = fabric.processes
    text = refused(data)
    assert f"pid {holder.pid}" in text
    assert "in use" in text


def test_newer_format_is_refused_untouched_with_both_versions(
    fabric: Fabric, prompts: Path
) -> None:
    data = fabric.directory / "data"
    fabric.broker("--data", str(data))
    job = fabric.run_batch(prompts)
    until(lambda: written(data / "segments"))
    job.kill()
    (broker, *_) = fabric.processes
    broker.kill()
    broker.wait()
    path = written(data / "segments")[0]
    block = bytearray(path.read_bytes()[:HEADER_BYTES])
    for start in (0, HEADER_COPY_BYTES):
        _, _, size = struct.unpack_from("<8sII", block, start)
        struct.pack_into("<8sII", block, start, MAGIC, FORMAT + 1, size)
        end = start + 16 + size
        struct.pack_into("<I", block, end, zlib.crc32(block[start:end]))
    with path.open("r+b") as file:
        file.write(block)
    before = digest(data)
    text = refused(data)
    assert f"format {FORMAT + 1}" in text
    assert f"up to {FORMAT}" in text
    assert digest(data) == before


def test_verify_names_the_damaged_record_and_status_counts_it(
    fabric: Fabric, prompts: Path
) -> None:
    data = fabric.directory / "data"
    fabric.broker("--data", str(data))
    job = fabric.run_batch(prompts)
    until(lambda: fabric.status()["ready_items"] > 1_000)
    job.kill()
    (broker, *_) = fabric.processes
    broker.terminate()
    assert broker.wait(60) == 0
    path = max((data / "segments").rglob("*.seg"), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"\xff" * 2)
    command = [sys.executable, "-m", "zfabric", "segments", "verify", "--json", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (found,) = json.loads(done.stdout)["damaged"]
    assert (data / found["file"]) == path
    assert found["number"] > 0
    fabric.broker("--data", str(data))
    status = fabric.status()
    assert status["recovery"]["damaged_records"] == 1
    assert status["quarantined_items"] == 1
    assert list((data / "quarantine").iterdir())


def test_a_file_in_place_of_its_segments_ends_the_broker_with_code_2(tmp_path: Path) -> None:
    (tmp_path / "segments").write_text("a thesis")
    command = [sys.executable, "-m", "zfabric", "broker", "--port", "0", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'segments'} is no directory" in done.stderr
