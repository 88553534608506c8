"""`zfabric top`: a running fabric in the terminal, or a recording of one."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zfabric.addresses import format_address, parse_address
from zfabric.cli import common
from zfabric.cli.parser import count
from zfabric.errors import ConfigError

if TYPE_CHECKING:
    from zfabric.config import ClientConfig

# Bytes of a recording unless told otherwise, as for the broker's own.
RECORD_MIB = 512

TEXT = """
Watch a running fabric: overview, lanes, shapes, cards, flow, events, and what the padding comes
from. Keys: 1 to 6 and w choose a page, ? explains them, q ends. With --record keep what is seen in
a file, with --replay watch such a file, without a broker. With --once, print the broker's status a
single time and end, for which no terminal is needed.
"""


def add(commands: common.Commands) -> None:
    """The command."""
    parser = common.add_command(
        commands, "top", run, "watch a running fabric", TEXT, "zfabric top --hz 2"
    )
    flag = parser.add_argument
    flag("--hz", type=float, default=4.0, help="pictures a second (default: 4)")
    flag("--readonly", action="store_true", help="no orders: nothing can be changed from it")
    flag("--ascii", action="store_true", help="draw with ASCII only")
    flag("--record", type=Path, metavar="FILE", help="keep what is seen in this file")
    flag(
        "--record-mib",
        type=count,
        default=RECORD_MIB,
        metavar="N",
        help=f"size of that file at most, the oldest goes first (default: {RECORD_MIB})",
    )
    flag("--replay", type=Path, metavar="FILE", help="watch a recording in place of a broker")
    flag("--once", action="store_true", help="print once and end")
    common.add_json(parser)
    common.add_broker(parser)


def run(args: argparse.Namespace) -> int:
    """Show the screen until the user leaves it."""
    from zfabric.cli import look

    if args.replay is not None and (args.record is not None or args.once or args.json):
        raise ConfigError("--replay shows a file; leave out --record, --once and --json")
    if args.record is not None and (args.once or args.json):
        raise ConfigError("--once shows one status and records nothing; leave out --record")
    if args.once or args.json:
        return look.run_status(args)
    if not 0.1 <= args.hz <= 30:
        raise ConfigError(f"--hz must be between 0.1 and 30, not {args.hz:g}")
    if not on_terminal():
        raise ConfigError(
            "zfabric top draws on a terminal, and its input or output is something else; "
            "zfabric top --once prints the status a single time"
        )
    if args.replay is not None:
        return replay(args.replay, hz=args.hz, ascii_only=args.ascii)
    return watch(
        common.load(args).client,
        hz=args.hz,
        readonly=args.readonly,
        ascii_only=args.ascii,
        record=args.record,
        record_mib=args.record_mib,
    )


def on_terminal() -> bool:
    """Whether there is a terminal to draw on and to take keys from."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def _ascii_wanted(wanted: bool) -> bool:
    """Whether to do without unicode: where it was asked for, or the locale has none."""
    return wanted or (sys.stdout.encoding or "").lower().replace("-", "") not in ("utf8", "utf16")


def watch(
    settings: ClientConfig,
    *,
    hz: float = 4.0,
    readonly: bool = False,
    ascii_only: bool = False,
    record: Path | None = None,
    record_mib: int = RECORD_MIB,
    ends: Callable[[], bool] | None = None,
) -> int:
    """Draw the fabric behind a broker until the user leaves; 0, or 1 if that failed.

    Once `ends()` it says so, and leaves by itself after a while in which no key was pressed.

    Raises ConnectError.
    """
    key = common.key_of(settings)
    client = common.connect(settings)
    host, _ = parse_address(client.address)
    stats = format_address(host, client.welcome["stats_port"])
    address = client.address
    client.close()
    from zfabric.keys import client_key
    from zfabric_tui.app import TopApp
    from zfabric_tui.desk import BrokerDesk
    from zfabric_tui.feed import LiveFeed
    from zfabric_tui.recorder import Recorder

    recorder = None if record is None else Recorder(record, record_mib)
    app = TopApp(
        LiveFeed(stats, recording=record is not None, key=client_key(key)),
        address,
        desk=BrokerDesk(settings.broker, settings.timeout_s, key),
        readonly=readonly,
        hz=hz,
        ascii_only=_ascii_wanted(ascii_only),
        recorder=recorder,
        ends=ends,
    )
    app.run()
    return app.return_code or 0


def replay(path: Path, *, hz: float, ascii_only: bool) -> int:
    """Draw a recording until the user leaves; see `watch`. Raises ConfigError."""
    from zfabric_tui.app import TopApp
    from zfabric_tui.recording import Reader
    from zfabric_tui.replay import ReplayFeed

    feed = ReplayFeed(Reader(path), time.monotonic)
    app = TopApp(feed, os.fspath(path), hz=hz, ascii_only=_ascii_wanted(ascii_only))
    app.run()
    return app.return_code or 0
