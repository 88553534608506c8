"""`zfabric top`: the overview of a running fabric in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from zfabric.addresses import format_address, parse_address
from zfabric.cli import common
from zfabric.errors import ConfigError

if TYPE_CHECKING:
    from zfabric.config import ClientConfig

TEXT = """
Watch a running fabric: padding, the books, the cards, the jobs. Keys: space holds the picture, ?
explains it, q ends. With --once, print the broker's status a single time and end, for which no
terminal is needed.
"""


def add(commands: common.Commands) -> None:
    """The command."""
    parser = common.add_command(
        commands, "top", run, "watch a running fabric", TEXT, "zfabric top --hz 2"
    )
    parser.add_argument("--hz", type=float, default=4.0, help="pictures a second (default: 4)")
    parser.add_argument("--once", action="store_true", help="print once and end")
    common.add_json(parser)
    common.add_broker(parser)


def run(args: argparse.Namespace) -> int:
    """Show the screen until the user leaves it."""
    from zfabric.cli import look

    if args.once or args.json:
        return look.run_status(args)
    if not 0.1 <= args.hz <= 30:
        raise ConfigError(f"--hz must be between 0.1 and 30, not {args.hz:g}")
    if not on_terminal():
        raise ConfigError(
            "zfabric top draws on a terminal, and its input or output is something else; "
            "zfabric top --once prints the status a single time"
        )
    watch(common.load(args).client, hz=args.hz)
    return 0


def on_terminal() -> bool:
    """Whether there is a terminal to draw on and to take keys from."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def watch(
    settings: ClientConfig, *, hz: float = 4.0, ends: Callable[[], bool] | None = None
) -> None:
    """Draw the fabric behind a broker until the user leaves or `ends()`. Raises ConnectError."""
    client = common.connect(settings)
    host, _ = parse_address(client.address)
    stats = format_address(host, client.welcome["stats_port"])
    client.close()
    from zfabric_tui.app import TopApp
    from zfabric_tui.feed import LiveFeed

    TopApp(LiveFeed(stats), client.address, hz=hz, ends=ends).run()
