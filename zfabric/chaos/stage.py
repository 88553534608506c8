"""The stage: a broker and workers as processes, at fixed ports, and what may be done to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from zfabric.chaos.load import MODEL
from zfabric.chaos.remote import Keys, ask
from zfabric.errors import FabricError
from zfabric.processes import Processes, Use, children, command, use, wait_for
from zfabric.words import counted

# Short, so that deaths are judged in seconds.
LEASE_S, HEARTBEAT_S = 3.0, 0.5
START_S = 60.0
CONTRACT = ("--max-batch", "16", "--max-tokens", "16384", "--max-input", "1024")
# Some hundred items a second for each worker, so that a fault finds work in hand.
ENGINE = ("--engine", "sim", "--opt", "speed=1", "--opt", "batch_us=20000", "--opt", "token_us=0.2",
          "--opt", "miss_token_us=0")  # fmt: skip


class Stage:
    """A fabric of processes in one directory, without keys."""

    keys = Keys()

    def __init__(self, processes: Processes, directory: Path, broker: Sequence[str] = ()) -> None:
        self.directory = directory
        self.workers: dict[str, subprocess.Popen[str]] = {}
        self.broker: subprocess.Popen[str] | None = None
        self.ports: tuple[int, ...] = ()
        self._processes = processes
        self._flags = tuple(broker)

    # -- broker -------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where producers and operators go."""
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def workers_address(self) -> str:
        """Where workers go."""
        return f"tcp://127.0.0.1:{self.ports[1]}"

    def start_broker(self, *flags: str, before: Sequence[str] = ()) -> None:
        """Start the broker, at the ports of the last one. Raises TimeoutError, FabricError.

        `before` are words that go before the command, such as a shell that sets a limit.
        """
        where = zip(("--port", "--consumer-port", "--stats-port"), self.ports or (0,), strict=False)
        words = ["broker", "--json", "--data", "data", "--lease", str(LEASE_S)]
        words += ["--heartbeat", str(HEARTBEAT_S), *self._flags, *flags]
        words += [str(word) for pair in where for word in pair]  # the same as before
        with (self.directory / "broker.log").open("ab") as log:
            self.broker = self._processes.start(
                [*before, *command(*words)], cwd=self.directory, stderr=log
            )
        line = self.broker.stdout.readline() if self.broker.stdout is not None else ""
        if not line:
            raise FabricError(f"the broker ended at its start: {self.log_tail()}")
        told = json.loads(line)
        bound = (told["producers"], told["workers"], told["stats"])
        self.ports = tuple(int(address.rsplit(":", 1)[1]) for address in bound)

    def log_tail(self) -> str:
        """The last line that the broker has said."""
        lines = (self.directory / "broker.log").read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def end_broker(self, sign: int = signal.SIGKILL) -> int:
        """Send the broker a signal and wait for its end; returns its exit code."""
        broker = self._broker()
        broker.send_signal(sign)
        broker.communicate(timeout=START_S)
        return broker.returncode

    def _broker(self) -> subprocess.Popen[str]:
        if self.broker is None:
            raise FabricError("there is no broker")
        return self.broker

    def used(self) -> Use:
        """What the broker uses."""
        return use(self._broker().pid)

    # -- workers ------------------------------------------------------------------------------

    def start_worker(self, name: str, *options: str, address: str | None = None) -> None:
        """Start a worker of the simulated engine; it counts once it is registered."""
        words = ["worker", *ENGINE, *CONTRACT, "--model", MODEL, "--name", name]
        for option in options:
            words += ["--opt", option]
        words += ["--broker", address or self.address]
        with (self.directory / f"{name}.log").open("ab") as log:
            self.workers[name] = self._processes.zfabric(*words, cwd=self.directory, stderr=log)

    def signal_worker(self, name: str, sign: int) -> None:
        """Send a worker a signal, and wait for its end where that is sure."""
        process = self.workers[name]
        process.send_signal(sign)
        if sign == signal.SIGKILL:
            process.communicate(timeout=START_S)

    def kill_engine(self, name: str) -> None:
        """Kill the process in which a worker's engine runs."""
        below = children(self.workers[name].pid)
        if not below:
            raise FabricError(f"worker {name} has no engine process")
        # A helper process of Python's may be among them; the engine is the one that works.
        for pid in below:
            # It may have ended by itself meanwhile, and its files with it.
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def await_workers(self, count: int) -> None:
        """Wait until so many workers are connected and take work. Raises TimeoutError."""
        wait_for(counted(count, "worker"), lambda: self.connected() >= count, START_S)

    def connected(self) -> int:
        """Workers that are connected now; 0 while nobody answers."""
        with contextlib.suppress(FabricError):
            rows = ask(self.address, self.keys.operator, "workers")
            return sum(1 for row in rows if row["live"] and row["granted"])
        return 0
