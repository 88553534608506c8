"""`zfabric broker`: one broker in this process, until a signal or `zfabric drain` ends it."""

from __future__ import annotations

import argparse
import os
import signal
from types import FrameType

from zfabric import config as configuration
from zfabric.cli import common
from zfabric.config import BrokerConfig
from zfabric.errors import ConfigError

TEXT = """
Start a broker. It prints its addresses when it is ready and runs until it is told to end:
SIGTERM, Ctrl-C and `zfabric drain` let the workers finish what they hold (--drain); a second
signal ends it at once. This release keeps everything in memory.
"""


def add(commands: common.Commands) -> None:
    """Add the command."""
    parser = common.add_command(
        commands, "broker", run, "start a broker", TEXT, "zfabric broker --port 7410 --lanes 2048"
    )
    common.add_json(parser)
    configuration.add_flags(parser, "broker")


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; 130 where that was Ctrl-C."""
    settings = common.load(args).broker
    check_store(settings)
    from zfabric.broker import Broker

    broker = Broker(settings)
    endpoints = broker.bind()
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if signals:
            broker.stop()
        else:
            broker.drain()
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    if not settings.memory:
        common.say("zfabric: everything is kept in memory: a restart loses what is queued")
    if args.json:
        common.show_json({**endpoints._asdict(), "pid": os.getpid()}, indent=None)
    else:
        common.show(
            f"broker ready: {endpoints.producers} (workers {endpoints.workers}, statistics "
            f"{endpoints.stats})"
        )
    broker.run()
    if signal.SIGINT in signals:
        return 130
    return 143 if len(signals) > 1 else 0


def check_store(settings: BrokerConfig) -> None:
    """Raise ConfigError for a store that this release does not have."""
    if settings.data is not None:
        raise ConfigError(
            f"broker.data {settings.data!r}: segment storage comes with a later release; leave "
            "it out, or say --memory, to keep everything in memory"
        )
