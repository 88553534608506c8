"""`zfabric broker`: one broker in this process, until a signal or `zfabric drain` ends it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from zfabric import config as configuration
from zfabric.cli import common
from zfabric.errors import ConfigError, StorageError
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.broker import Broker, Endpoints
    from zfabric.config import BrokerConfig
    from zfabric.recovery import Recovered
    from zfabric_tui.recorder import Headless

# A scrape that the loop does not answer for so long is answered with nothing.
SCRAPE_S = 5.0

# Of <malloc.h>; and what counts as large: a message of 256 items of 2 KiB is four times that.
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 128 * 1024
# New objects before the collector of cycles looks at them: some 5 ms of work.
NEW_OBJECTS_MAX = 100_000

TEXT = """
Start a broker. It prints its addresses when it is ready and runs until it is told to end:
SIGTERM, Ctrl-C and `zfabric drain` let the workers finish what they hold (--drain); a second
signal ends it at once. With --data DIR everything accepted is kept in segment files there, and a
broker that is killed goes on where it was; without it everything is kept in memory. Events are
logged to standard error (--log); --metrics-port serves Prometheus metrics; --record keeps what
happens in a file for `zfabric top --replay`.
"""


def add(commands: common.Commands) -> None:
    """Add the command."""
    parser = common.add_command(
        commands, "broker", run, "start a broker", TEXT, "zfabric broker --data ./fabric"
    )
    common.add_json(parser)
    parser.add_argument(
        "--rebuild-catalog",
        action="store_true",
        help="where catalog.log of --data is damaged or missing, go on with what can be read",
    )
    configuration.add_flags(parser, "broker")


def give_buffers_back() -> None:
    """Let the buffers of large messages go back to the system when they are freed.

    By itself glibc keeps them for the next ones: after a burst 50 MB stayed for good. Elsewhere
    nothing is changed.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def collect_rarely() -> None:
    """Have the collector of cycles look at new objects less often; the broker makes few cycles.

    By itself it looks after 700 of them, which waiting items are at once: 2 to 6% of CPU.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_MAX, 5, 5)


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; 130 where that was Ctrl-C."""
    settings = common.load(args).broker
    from zfabric.broker import Broker

    if args.rebuild_catalog and settings.data is None:
        raise ConfigError("--rebuild-catalog needs --data DIR")
    give_buffers_back()
    collect_rarely()
    try:
        broker = Broker(settings, rebuild_catalog=args.rebuild_catalog)
    except StorageError as error:
        # Nothing was done yet: the directory is not one that this broker can use.
        raise ConfigError(str(error)) from error
    endpoints = broker.bind()
    with _watched(broker, endpoints.stats, settings) as metrics:
        return _serve(broker, endpoints, settings, metrics, json=args.json)


@contextmanager
def _watched(broker: Broker, stats: str, settings: BrokerConfig) -> Iterator[str | None]:
    """What looks on from threads of its own while the broker serves: log, metrics, recording.

    Gives the address of the metrics, if there are any.
    """
    with ExitStack() as stack:
        address = None
        if settings.log != "off":
            from zfabric.logs import EventLog

            log = EventLog(
                settings.log, None if settings.log_file is None else Path(settings.log_file)
            )
            stack.callback(log.close)
            broker.on_event = log.write
        if settings.metrics_port is not None:
            from zfabric import metrics

            port, end = metrics.serve(
                settings.metrics_at, settings.metrics_port, lambda: broker.ask(SCRAPE_S)
            )
            stack.callback(end)
            at = settings.metrics_at
            address = f"http://{f'[{at}]' if ':' in at else at}:{port}/metrics"
        if settings.record is not None:
            from zfabric_tui.recorder import Headless

            key = None if broker.door is None else broker.door.own_key()
            recorder = Headless(stats, Path(settings.record), settings.record_mib, key)
            stack.callback(_end_recording, recorder)
        yield address


def _end_recording(recorder: Headless) -> None:
    recorder.close()
    if recorder.failed is not None:
        common.say(f"zfabric: recording ended early: {recorder.failed}")


def _serve(
    broker: Broker,
    endpoints: Endpoints,
    settings: BrokerConfig,
    metrics: str | None,
    *,
    json: bool,
) -> int:
    """Run until told to end; 130 where that was Ctrl-C."""
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        # First of all: another signal may come in the midst of this one.
        signals.append(number)
        if len(signals) > 1:
            broker.stop()
        else:
            broker.drain()
            tell_systemd("STOPPING=1")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    if broker.recovered is not None:
        common.say(f"zfabric: {recovery_in_words(settings.data, broker.recovered)}")
    elif not settings.memory:
        common.say("zfabric: everything is kept in memory: a restart loses what is queued")
    served = {} if metrics is None else {"metrics": metrics}
    if json:
        common.show_json({**endpoints._asdict(), **served, "pid": os.getpid()}, indent=None)
    else:
        common.show(
            f"broker ready: {endpoints.producers} (workers {endpoints.workers}, statistics "
            f"{endpoints.stats}{'' if metrics is None else f', metrics {metrics}'})"
        )
    tell_systemd("READY=1")
    broker.run()
    if signal.SIGINT in signals:
        return 130
    return 143 if len(signals) > 1 else 0


def tell_systemd(state: str) -> None:
    """Say how far this is to whoever started it as a unit of Type=notify; else to nobody."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def recovery_in_words(directory: str | None, found: Recovered) -> str:
    """What the broker found in its directory."""
    waiting = sum(segment.states.count(0) for segment in found.segments)
    results = sum(len(producer.results) for producer in found.producers.values())
    text = (
        f"{directory}: {counted(waiting, 'item')} and {counted(results, 'result')} from "
        f"{counted(found.entries, 'entry')} in {found.seconds:.2f} s"
    )
    if found.damaged or found.quarantined_files:
        set_aside = len(found.damaged) + len(found.quarantined_files)
        text += f"; {set_aside} damaged, kept in {directory}/quarantine"
    return text
