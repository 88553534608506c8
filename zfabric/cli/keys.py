"""`zfabric keys`: make, list and revoke the keys that may connect to a broker."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zfabric import config as configuration
from zfabric.access import KEY_ROLES, a
from zfabric.cli import common
from zfabric.errors import ConfigError
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.keys import Keyring, Row

TEXT = """
Keys say who may connect to a broker and what they may do there. A role is one of
  producer   submits items and gets their results
  worker     runs batches
  operator   looks, and gives orders: drain, pause, dead, producers
  monitor    only looks
`keys make` writes USER.key, a file of mode 0600 with all that this user needs: carry it to where
it is used, name it with --key or ZFABRIC_KEY, and remove it here. The first one also makes the
broker's own key. Start the broker with --keys DIR; it sees a change of its list within a second.
"""
MAKE_TEXT = "Make a key for a user, and the broker's own before the first. Prints the new file."
REVOKE_TEXT = """
Revoke every key of a user. A running broker ends its connections within a second; the names that
the user claimed stay the user's, for a new key of the same user.
"""


def add(commands: common.Commands) -> None:
    """Add the commands."""
    within = common.add_group(
        commands, "keys", "who may connect", TEXT, "zfabric keys make alice --role producer"
    )
    make = _command(
        within, "make", run_make, "make one", MAKE_TEXT, "zfabric keys make gpu0 --role worker"
    )
    make.add_argument("user", metavar="USER", help="whose it is: letters, digits, . _ -")
    make.add_argument("--role", required=True, choices=KEY_ROLES, help="what it may do")
    make.add_argument("--replace", action="store_true", help="and revoke the one there is")
    text = "List the keys that were made here, and which are revoked. Prints no secret."
    _command(within, "list", run_list, "list them", text, "zfabric keys list --json")
    revoke = _command(
        within, "revoke", run_revoke, "revoke one", REVOKE_TEXT, "zfabric keys revoke alice"
    )
    revoke.add_argument("user", metavar="USER", help="as `keys list` shows it")
    text = "Print the broker's public key, for --server-key where it is not in a key's file."
    _command(within, "server", run_server, "the broker's public key", text, "zfabric keys server")


def _command(
    within: common.Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    text: str,
    example: str,
) -> argparse.ArgumentParser:
    parser = common.add_command(within, name, run, summary, text, example)
    common.add_json(parser)
    configuration.add_flags(parser, "broker", ["keys"])
    return parser


def _ring(args: argparse.Namespace) -> Keyring:
    from zfabric.keys import Keyring, default_directory

    directory = common.load(args).broker.keys_directory
    return Keyring(directory or default_directory())


def run_make(args: argparse.Namespace) -> int:
    """Make a key."""
    ring = _ring(args)
    first = not ring.rows()
    path = ring.make(args.user, args.role, replace=args.replace)
    if args.json:
        made = {"user": args.user, "role": args.role, "file": str(path)}
        common.show_json({**made, "keys": str(ring.directory), "server": ring.server().public})
        return 0
    common.show(str(path))
    common.say(
        f"zfabric: {a(args.role)}'s key for {args.user}; carry it to where it is used (0600), name "
        "it there with --key or ZFABRIC_KEY, and remove it here"
    )
    if first:
        common.say(f"zfabric: start the broker with --keys {ring.directory}")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """List the keys."""
    ring = _ring(args)
    rows = ring.rows()
    if args.json:
        common.show_json([row._asdict() | {"file": _file(ring, row)} for row in rows])
        return 0
    if not rows:
        common.say(f"zfabric: no keys in {ring.directory}; `zfabric keys make` makes one")
        return 0
    headers = ("user", "role", "public key", "made", "revoked", "file")
    texts = [[*row, _file(ring, row) or "-"] for row in rows]
    common.show(common.table(headers, texts, spare=("made", "file")))
    return 0


def _file(ring: Keyring, row: Row) -> str | None:
    """The client's file, where it still lies beside the list."""
    path = ring.directory / f"{row.user}.key"
    return str(path) if row.revoked is None and path.exists() else None


def run_revoke(args: argparse.Namespace) -> int:
    """Revoke a user's keys."""
    ring = _ring(args)
    ended = ring.revoke(args.user)
    if args.json:
        common.show_json({"user": args.user, "revoked": ended})
    else:
        common.say(f"zfabric: revoked {counted(ended, 'key')} of {args.user}")
    return 0


def run_server(args: argparse.Namespace) -> int:
    """Print the broker's public key."""
    ring = _ring(args)
    if not Path(ring.directory).is_dir():
        raise ConfigError(f"no keys in {ring.directory}; `zfabric keys make` makes one")
    public = ring.server().public
    if args.json:
        common.show_json({"server": public, "keys": str(ring.directory)})
    else:
        common.show(public)
    return 0
