"""`zfabric worker`: one engine in a child process, served by this one, for one model."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Iterable
from types import FrameType

from zfabric import config as configuration
from zfabric.cli import common, fabric
from zfabric.config import WorkerConfig
from zfabric.errors import ConfigError

TEXT = """
Start a worker: it registers its contract (the most that it can take in a batch), runs the batches
that the broker gives it, and reports each item's result. SIGTERM and Ctrl-C finish what is running
and give the rest back; a second signal ends it at once. Engine options are given as
--opt NAME=VALUE; --list-options says which there are.
"""
EXAMPLE = (
    "zfabric worker --engine sim --model tiny --max-batch 32 --max-tokens 65536 --max-input 8192 "
    "--opt cache_tokens=20000"
)


def add(commands: common.Commands) -> None:
    """Add the command."""
    parser = common.add_command(
        commands, "worker", run, "start a worker with an engine", TEXT, EXAMPLE
    )
    configuration.add_flags(parser, "worker")
    add_engine_flags(parser)
    parser.add_argument(
        "--list-options", action="store_true", help="print the engine's options and end"
    )
    common.add_broker(parser)


def add_engine_flags(parser: argparse._ActionsContainer) -> None:
    """What engines are told; most of them need one of the first two."""
    flag = parser.add_argument
    flag("--model-path", metavar="PATH", help="the engine's model: a file or a directory")
    flag("--url", metavar="URL", help="address of the server of the engine openai")
    flag("--opt", action="append", default=[], metavar="NAME=VALUE", help="an option of the engine")


def run(args: argparse.Namespace) -> int:
    """Serve until told to end."""
    settings = common.load(args)
    engine = _engine_name(settings.worker)
    from zfabric_workers import engine_class, engine_factory

    if args.list_options:
        common.show(options_table(engine))
        return 0
    contract = settings.worker.contract()
    if not getattr(engine_class(engine), "pads", True) and args.worker_ragged is None:
        contract = dataclasses.replace(contract, ragged=True)
    if settings.worker.model is None:
        raise ConfigError("say which model this worker serves: --model NAME")
    factory = engine_factory(engine, fabric.engine_options(args, engine, 1))
    from zfabric.cli.worklog import to_standard_error
    from zfabric.worker import Worker
    from zfabric.worklog import say

    logger = logging.getLogger("zfabric.worker")
    worker = Worker(
        factory,
        broker=settings.client.broker,
        model=settings.worker.model,
        contract=contract,
        name=settings.worker.name or f"{engine}-{socket.gethostname()}-{os.getpid()}",
        window=settings.worker.window,
        engine=engine,
        simulated=getattr(engine_class(engine), "simulated", engine == "sim"),
        timeout_s=settings.client.timeout_s,
        key=common.key_of(settings.client),
        broker_port=settings.worker.broker_port,
    )
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        worker.stop(drain=len(signals) == 1)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    text = f"serves {settings.worker.model} with engine {engine}, broker {settings.client.broker}"
    with to_standard_error(settings.worker.log):
        say(logger, "worker_started", text, worker=worker.name, engine=engine)
        worker.run()
        say(logger, "worker_ended", "has ended", worker=worker.name)
    if signal.SIGINT in signals:
        return 130
    return 143 if len(signals) > 1 else 0


def _engine_name(settings: WorkerConfig) -> str:
    if settings.engine is not None:
        return settings.engine
    from zfabric_workers import ENGINES

    raise ConfigError(f"say what runs the batches: --engine, one of {', '.join(sorted(ENGINES))}")


def parse_opts(given: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE texts as a map. Raises ConfigError for one without `=`, or a name given twice."""
    options: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"--opt {text!r} must be NAME=VALUE; see --list-options")
        name = name.strip().replace("-", "_")
        if name in options:
            raise ConfigError(f"--opt {name} is given twice")
        options[name] = value
    return options


def options_table(engine: str) -> str:
    """The options of an engine, for people."""
    from zfabric_workers import describe_options

    rows = [(name, default or "''", text) for name, default, text in describe_options(engine)]
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(
        f"{name.ljust(width)}  {text} (default: {default})" for name, default, text in rows
    )
