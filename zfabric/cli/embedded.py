"""A batch file with a broker of its own: started for it, and gone with it when it is done.

Decides where the broker's data is (beside the output, so that a run that was killed goes on where
it was; in memory for fifo, which is kept nowhere else), which model its workers serve, and when the
data is of no more use: when every line has its row. An earlier broker on the same data is waited
for; it is ending. Times are seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zfabric.cli import common, fabric, owned
from zfabric.cli.children import Children
from zfabric.config import KEYS, Config
from zfabric.errors import ConfigError, TimeoutExpired
from zfabric.words import counted

# A broker whose parent was killed drains for 30 s at most, then it is gone.
EARLIER_S = 45.0
POLL_S = 0.1
# What of the broker a batch file may want to have otherwise.
BROKER_NAMES = ("policy", "packing", "lanes", "max_wait_s", "durability")


@dataclass(slots=True)
class Embedded:
    """The broker of this run: its address, and who looks after it and its workers.

    Whoever uses it sets `done` when every line has its row: nothing is kept then.
    """

    address: str
    watching: fabric.Watching
    done: bool = False


@contextmanager
def running(
    args: argparse.Namespace, config: Config, notice: Callable[[str], None]
) -> Iterator[Embedded]:
    """Broker and workers as the flags say, until the end of this block. Raises ConfigError."""
    engine, output = config.worker.engine, Path(args.output)
    if engine is None:
        raise ConfigError("say what runs the batches: --engine")
    options = fabric.engine_options(args, engine, args.workers)
    contract = fabric.contract_flags(engine, config.worker)
    model = args.model or first_model(Path(args.input))
    directory, keep = fabric.directory_of(output), args.resume or args.retry_failed
    _check_output(output, keep=keep or args.overwrite)
    with owned.owning(directory):
        # Once more: another run may have written it until the directory was ours.
        _check_output(output, keep=keep or args.overwrite)
        _await_earlier(directory / "data")
        if not keep:
            owned.empty(directory)
        with Children(directory) as children:
            address = fabric.start_broker(
                children, _storage(config, directory, notice), _broker_flags(config)
            )
            names = fabric.start_workers(
                children, address, engine, model, args.workers, contract, options
            )
            fabric.await_workers(children, address, names, lambda row: row["live"])
            many = counted(len(names), "worker")
            notice(f"a broker of its own at {address}, {many} with engine {engine}")
            own = Embedded(address, fabric.Watching(children, names, notice, directory))
            yield own
        if own.done:
            owned.empty(directory)


def _storage(config: Config, directory: Path, notice: Callable[[str], None]) -> list[str]:
    """Where the broker keeps what it has taken, as its flags."""
    if config.broker.policy != "fifo":
        return ["--data", str(directory / "data")]
    notice(
        "policy fifo keeps its items in memory only: after a stop, --resume runs every line again "
        "that had no row"
    )
    return ["--memory"]


def first_model(source: Path) -> str:
    """The model that the first sound line names. Raises ConfigError where there is none."""
    from zfabric.batchfile import Request, read_requests

    try:
        with source.open("rb") as stream:
            for row in read_requests(stream):
                if isinstance(row, Request):
                    return row.model
    except OSError as error:
        raise ConfigError(f"cannot read input {source}: {error.strerror}") from None
    raise ConfigError(f"no line of {source} can be run, or names a model; see --dry-run")


def _check_output(output: Path, *, keep: bool) -> None:
    """Raises ConfigError for an output with rows, unless it is told what becomes of them."""
    if not keep and output.exists() and output.stat().st_size:
        raise ConfigError(
            f"{output} is not empty: continue it with --resume, or start again with --overwrite"
        )


def _await_earlier(data: Path) -> None:
    """Return once no broker works on `data`. Raises TimeoutExpired."""
    from zfabric.files import LOCK

    lock, until, said = data / LOCK, time.monotonic() + EARLIER_S, False
    while lock.exists():
        with lock.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = stream.read(32).decode("ascii", "replace").strip()
        if time.monotonic() > until:
            raise TimeoutExpired(f"{data} is in use by another broker (pid {holder})")
        if not said:
            common.say(f"zfabric: waiting for the broker of an earlier run (pid {holder}) to end")
            said = True
        time.sleep(POLL_S)


def _broker_flags(config: Config) -> list[str]:
    words = []
    for name in BROKER_NAMES:
        key = KEYS[f"broker.{name}"]
        value = getattr(config.broker, name)
        if value != key.default:
            words += [key.flag, key.text(value)]
    return words
