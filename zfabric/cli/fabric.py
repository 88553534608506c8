"""A fabric of one's own: a broker and workers as child processes, for a demo or for one batch file.

Decides how they are started, when they are ready, and what the death of one means. Times are
seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zfabric.cli.children import Children
from zfabric.config import WorkerConfig
from zfabric.errors import ConfigError, FabricError, TimeoutExpired
from zfabric.shapes import Contract

START_S = 30.0
# A worker that has left its broker is gone, and has said why, after this.
EXIT_S = 2.0
POLL_S = 0.05
# A child that ended with this was told something that it cannot use.
EXIT_USAGE = 2
# What a worker's log says when the server of its engine was not there, or wanted nothing of it.
UNREACHABLE = "a batch failed: unreachable: "
# What follows it: where it was raised.
PLACE = r"\s+at \S+:\d+ in \S+\s*$"
# The end of a log in which that is looked for; an entry is 2 KiB at most, with a place after it.
LOG_BYTES = 16 * 1024
# A contract where the user gives none: batches of 32, and room for long few-shot prompts.
MAX_BATCH, MAX_TOKENS, MAX_INPUT = 32, 65_536, 8_192


def contract_of(engine: str | None, given: WorkerConfig) -> Contract:
    """What was given, else what suits the engine, else what suits most. Raises ConfigError."""
    from zfabric_workers import engine_class

    known = None if engine is None else engine_class(engine)
    items, tokens = getattr(known, "suits", (MAX_BATCH, MAX_TOKENS))
    return Contract(
        given.max_batch or items,
        given.max_tokens or tokens,
        given.max_input or MAX_INPUT,
        ragged=bool(given.ragged) or not getattr(known, "pads", True),
    )


def contract_flags(engine: str, given: WorkerConfig) -> list[str]:
    """The same as flags of a worker."""
    contract = contract_of(engine, given)
    words = ["--max-batch", str(contract.batch_items_max)]
    words += ["--max-tokens", str(contract.batch_tokens_max)]
    words += ["--max-input", str(contract.input_tokens_max), "--window", str(given.window)]
    return [*words, "--ragged" if contract.ragged else "--no-ragged"]


def engine_options(args: argparse.Namespace, engine: str, workers: int) -> dict[str, str]:
    """The options of the engine from --opt and the flags that stand for one.

    Processors are shared out among the workers, or each would use all of them.
    Raises ConfigError for what the engine does not take.
    """
    from zfabric.cli.worker import parse_opts
    from zfabric_workers import describe_options, engine_factory

    options = parse_opts(args.opt)
    for name in ("model_path", "url"):
        value = getattr(args, name, None)
        if value is not None:
            options[name] = value
    if workers > 1 and "threads" in {name for name, _, _ in describe_options(engine)}:
        options.setdefault("threads", str(max(1, (os.cpu_count() or 1) // workers)))
    engine_factory(engine, options)
    return options


def start_broker(children: Children, storage: Sequence[str], flags: Sequence[str]) -> str:
    """Start a broker on loopback, on free ports; its address once it is ready."""
    words = ["broker", "--bind", "127.0.0.1", "--port", "0", "--json", "--keys", "none"]
    words += [*storage, *flags]
    broker = children.start("broker", words)
    address: str = children.ready_line("broker", broker, START_S)["producers"]
    return address


def start_workers(
    children: Children,
    address: str,
    engine: str,
    model: str,
    workers: int,
    contract: Sequence[str],
    options: dict[str, str],
) -> list[str]:
    """Start `workers` workers of one engine; their names."""
    names = [f"{engine}-{k}" for k in range(workers)]
    for name in names:
        words = ["worker", "--engine", engine, "--model", model, "--name", name]
        words += ["--broker", address, "--key", "none", *contract]
        for option, value in options.items():
            words += ["--opt", f"{option}={value}"]
        children.start(name, words)
    return names


def await_workers(
    children: Children, address: str, names: Sequence[str], ready: Callable[[Any], bool]
) -> None:
    """Return when the broker's row of each worker is `ready`. Raises FabricError if one ends."""
    from zfabric.client import Client

    until = time.monotonic() + START_S
    client = Client(address, role="operator", timeout_s=START_S, key="none")
    try:
        while True:
            rows = client.request("workers", START_S)
            if sum(1 for row in rows if row["name"] in names and ready(row)) >= len(names):
                return
            children.check()
            if time.monotonic() > until:
                raise TimeoutExpired(f"the workers were not ready within {START_S:g} s")
            time.sleep(POLL_S)
    finally:
        client.close()


class Watching:
    """Looks after the children of a run: it goes on while the broker and one worker live."""

    def __init__(
        self,
        children: Children,
        workers: Sequence[str],
        notice: Callable[[str], None],
        directory: Path,
    ) -> None:
        self._children = children
        self._directory = directory
        self._workers = set(workers)
        self._notice = notice

    def check(self) -> None:
        """Raises FabricError where nothing can go on; says it when a worker has ended."""
        for name, code in self._children.ended():
            text = f"{name} ended with code {code}: {self._children.log_tail(name)}"
            if name not in self._workers:
                raise FabricError(text)
            self._workers.discard(name)
            if not self._workers:
                wrong = ConfigError if code == EXIT_USAGE else FabricError
                raise wrong(f"no worker is left; {text}")
            self._notice(text)

    def why(self, quiet_s: float) -> str | None:
        """Why no batch has been run for `quiet_s`, as the workers' logs say it; None: they do not.

        What a log said before that has been overcome.
        """
        for name in sorted(self._workers):
            path = self._directory / f"{name}.log"
            with contextlib.suppress(OSError), path.open("rb") as log:
                if time.time() - path.stat().st_mtime > quiet_s:
                    continue
                log.seek(max(0, path.stat().st_size - LOG_BYTES))
                _, found, said = log.read().decode("utf-8", "replace").rpartition(UNREACHABLE)
                if found:
                    # The exception, without its class and the place where it was raised.
                    said = said.splitlines()[0].partition("EngineUnreachable: ")[2]
                    return f"{name}: {re.sub(PLACE, '', said)}"
        return None

    def explain(self) -> None:
        """Raises FabricError if what a run waits for in vain is a worker that is just ending."""
        until = time.monotonic() + EXIT_S
        while time.monotonic() < until:
            self.check()
            time.sleep(POLL_S)


def directory_of(output: Path) -> Path:
    """Where the broker of a run that has none keeps its data: beside the output."""
    return output.with_name(output.name + ".fabric")
