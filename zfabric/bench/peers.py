"""The same load on other systems that are installed here: interleaved in one run, with ratios.

One producer and two consumers that only read the bytes, 2 KiB items, every item acknowledged, a
backlog that is kept up, durability named. Each round measures every system for a few seconds, on a
server of its own in a new directory and on loopback; a ratio is of the same round. Rates are items
per second, CPU is the server's seconds per million items. Ours stores a result for each item and
hands it to the producer; of the others only the one that says so does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zfabric.bench import pipeline
from zfabric.errors import ConfigError
from zfabric.processes import Processes, use, wait_for

CONSUMERS = 2
START_S, FILL_S = 60.0, 600.0
LOADS = "zfabric.bench.peerloads"
OURS = "zfabric"
# Where distributions put servers that are not on everybody's path.
MORE_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/lib/rabbitmq/bin"))


class Server(NamedTuple):
    """A server that has been started, and how many items wait in it."""

    process: subprocess.Popen[str]
    port: int


class System(NamedTuple):
    """A peer: the program it needs, the Python client it needs, and how it is started.

    `loads` names its two ends in `peerloads`; its first word is what `--systems` calls it.
    """

    name: str
    durability: str
    program: str
    client: str
    loads: str
    start: Callable[[Processes, Path, str], Server]

    @property
    def family(self) -> str:
        """What `--systems` calls it."""
        return self.loads.partition("-")[0]


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _start_redis(processes: Processes, directory: Path, durability: str) -> Server:
    import redis

    port = free_port()
    words = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
    words += ["--appendonly", "yes", "--appendfsync", durability, "--save", ""]
    process = processes.start(words)
    wait_for("redis-server", lambda: _answers(port), START_S)
    server = redis.Redis(port=port)
    server.xgroup_create("bench", "workers", id="0", mkstream=True)
    return Server(process, port)


def _start_nats(processes: Processes, directory: Path, durability: str) -> Server:
    port = free_port()
    process = processes.start(
        ["nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory)]
    )
    wait_for("nats-server", lambda: _answers(port), START_S)

    async def prepare() -> None:
        import nats
        from nats.js.api import RetentionPolicy, StorageType, StreamConfig

        connection = await nats.connect(f"nats://127.0.0.1:{port}")
        await connection.jetstream().add_stream(
            StreamConfig(
                name="bench",
                subjects=["bench"],
                retention=RetentionPolicy.WORK_QUEUE,
                storage=StorageType.FILE,
            )
        )
        await connection.close()

    asyncio.run(prepare())
    return Server(process, port)


def _start_rabbit(processes: Processes, directory: Path, durability: str) -> Server:
    port, epmd = free_port(), str(free_port())
    settings = directory / "rabbitmq.conf"
    settings.write_text(f"listeners.tcp.default = 127.0.0.1:{port}\n")
    told = {
        "PATH": MORE_PATH,
        "HOME": str(directory),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": epmd,
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_CONFIG_FILE": str(settings),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    program = shutil.which("rabbitmq-server", path="/usr/lib/rabbitmq/bin" + os.pathsep + MORE_PATH)
    # Its node table is a process of ours too, and not a daemon.
    processes.start([_found("epmd"), "-address", "127.0.0.1", "-port", epmd])
    process = processes.start([program or "rabbitmq-server"], env=os.environ | told)
    wait_for("rabbitmq-server", lambda: _answers(port), START_S)

    async def prepare() -> None:
        import aio_pika

        connection = await aio_pika.connect(port=port)
        channel = await connection.channel()
        kind = {"x-queue-type": durability}
        await channel.declare_queue("bench", durable=True, arguments=kind)
        await connection.close()

    asyncio.run(prepare())
    return Server(process, port)


def _found(program: str) -> str:
    return shutil.which(program, path=MORE_PATH) or program


SYSTEMS = (
    System("Redis Streams", "everysec", "redis-server", "redis", "redis", _start_redis),
    System("Redis Streams", "always", "redis-server", "redis", "redis", _start_redis),
    System(
        "Redis Streams, results returned",
        "everysec",
        "redis-server",
        "redis",
        "redis-results",
        _start_redis,
    ),
    System("NATS JetStream", "file", "nats-server", "nats", "nats", _start_nats),
    System("RabbitMQ", "quorum", "rabbitmq-server", "aio_pika", "rabbitmq", _start_rabbit),
    System("RabbitMQ", "classic", "rabbitmq-server", "aio_pika", "rabbitmq", _start_rabbit),
)


def missing(system: System) -> str | None:
    """Why a system cannot be measured here, or None."""
    if shutil.which(system.program, path=MORE_PATH) is None:
        return f"{system.program} is not installed"
    if importlib.util.find_spec(system.client) is None:
        return f"its client {system.client} is not installed: pip install zfabric[peers]"
    return None


def chosen(names: Sequence[str]) -> list[System]:
    """The systems with these names (redis, nats, rabbitmq). Raises ConfigError for another."""
    known = {system.family for system in SYSTEMS}
    if unknown := set(names) - known:
        raise ConfigError(f"--systems knows {', '.join(sorted(known))}, not {', '.join(unknown)}")
    return [system for system in SYSTEMS if system.family in names]


def measure(
    system: System, directory: Path, size: int, backlog: int, seconds: float
) -> dict[str, float]:
    """One system, once. Raises TimeoutError where nothing moves."""
    directory.mkdir(parents=True)
    with Processes() as processes:
        server = system.start(processes, directory, system.durability)
        producer = processes.python(
            LOADS, f"{system.loads}-produce", port=server.port, size=size, backlog=backlog
        )
        _await_backlog(producer)
        role = f"{system.loads}-consume"
        readers = [
            _Reader(processes.python(LOADS, role, port=server.port, name=f"c{k}"))
            for k in range(CONSUMERS)
        ]

        def done() -> int:
            return sum(reader.items for reader in readers)

        wait_for("the first items", lambda: done() >= pipeline.WARM_ITEMS, FILL_S)
        began, first, before = time.monotonic(), done(), use(server.process.pid)
        time.sleep(seconds)
        items, took = done() - first, time.monotonic() - began
        cpu_s = use(server.process.pid).cpu_s - before.cpu_s
        return {"items_per_s": items / took, "broker_cpu_s_per_million": cpu_s / items * 1e6,
                "broker_rss_bytes": use(server.process.pid).rss_bytes}  # fmt: skip


def _await_backlog(producer: subprocess.Popen[str]) -> None:
    if producer.stdout is None or producer.stdout.readline().strip() != "full":
        raise TimeoutError("the producer ended before its backlog was there")


class _Reader:
    """The latest number that a consumer printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.items = 0
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.items = int(line)


def run(
    systems: Sequence[System],
    directory: Path,
    *,
    case: pipeline.Case,
    size: int,
    seconds: float,
    rounds: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each system, ours first: medians over the rounds, and the spread of the ratios."""
    ours: list[dict[str, Any]] = []
    theirs: dict[System, list[dict[str, float]]] = {system: [] for system in systems}
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}: {OURS}")
        place = directory / f"{turn}-ours"
        place.mkdir()
        ours.append(pipeline.run(case, place, size, seconds, pipeline.Trace(None, "")))
        shutil.rmtree(place)
        for k, system in enumerate(systems):
            say(f"round {turn + 1} of {rounds}: {system.name}, {system.durability}")
            place = directory / f"{turn}-{k}"
            theirs[system].append(measure(system, place, size, case.backlog, seconds))
            shutil.rmtree(place, ignore_errors=True)
    rows = [{"system": OURS, "durability": case.durability, **_medians(ours), "ratio": 1.0,
             "ratio_min": 1.0, "ratio_max": 1.0}]  # fmt: skip
    for system, found in theirs.items():
        ratios = [a["items_per_s"] / b["items_per_s"] for a, b in zip(ours, found, strict=True)]
        rows.append({
            "system": system.name, "durability": system.durability, **_medians(found),
            "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        })  # fmt: skip
    return rows


def _medians(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = ("items_per_s", "broker_cpu_s_per_million", "broker_rss_bytes")
    return {name: statistics.median(row[name] for row in found) for name in names}
