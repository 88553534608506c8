"""What commands share: parsers with an example, the operator's connection, text for people.

Names and texts that come from peers pass through `clean` before they reach a terminal. Numbers for
people have thousands separators or a unit; data (`--json`) is never rounded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zfabric import config as configuration
from zfabric.config_keys import NO_KEY
from zfabric.errors import ConfigError, ConnectError, FabricError

if TYPE_CHECKING:
    from zfabric.client import Client
    from zfabric.keys import ClientKey

Commands = Any
# A cell longer than this would push the others off the screen.
CELL_CHARS_MAX = 64
# A name cut shorter than this says too little.
NAME_CHARS_MIN = 12
# Requests that the broker refused because of what was asked, not of what happened.
USAGE_CODES = ("malformed", "not_found", "ambiguous", "unknown_request", "in_use")


# Control characters, but for the ends of lines and tabs.
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class OutputError(FabricError):
    """Standard output takes nothing: its disk is full, or it was closed."""


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    text: str,
    example: str,
) -> argparse.ArgumentParser:
    """A command with its help: what it does, and one example."""
    parser = _add(commands, name, summary, text, example)
    parser.set_defaults(run=run)
    return parser


def add_group(commands: Commands, name: str, summary: str, text: str, example: str) -> Commands:
    """A command that has commands of its own; where to add them."""
    parser = _add(commands, name, summary, text, example)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _add(
    commands: Commands, name: str, summary: str, text: str, example: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=text.strip(), epilog=f"example:\n  {example}"
    )
    add_traceback(parser)
    return parser


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """The flag that shows where an error came from."""
    text = "show where an error came from"
    parser.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=text)


def add_json(parser: argparse.ArgumentParser, text: str = "print JSON") -> None:
    """The flag for output that programs read."""
    parser.add_argument("--json", action="store_true", help=text)


def add_broker(parser: argparse.ArgumentParser) -> None:
    """Where the broker is, and how long to wait for it."""
    configuration.add_flags(parser, "client")


def load(args: argparse.Namespace) -> configuration.Config:
    """The configuration, with this command line's flags on top."""
    return configuration.load(configuration.flags_of(args))


@contextmanager
def operator(args: argparse.Namespace) -> Iterator[Client]:
    """A connection that asks and orders but submits nothing. Raises ConnectError."""
    client = connect(load(args).client)
    try:
        yield client
    finally:
        client.close()


def connect(settings: configuration.ClientConfig) -> Client:
    """An operator's connection. Raises ConnectError: at once where nothing listens."""
    from zfabric.client import Client

    key = key_of(settings)
    try:
        if key == NO_KEY:
            socket.create_connection(settings.address, timeout=settings.timeout_s).close()
        else:
            # A broker with keys counts who connects and says nothing: it is only looked up here.
            socket.getaddrinfo(*settings.address)
    except OSError as error:
        raise ConnectError(
            f"no broker answered at {settings.broker}: {error.strerror or error}; start one with "
            "`zfabric broker`, or name another with --broker or ZFABRIC_BROKER"
        ) from None
    timeout_s = settings.timeout_s
    return Client(settings.broker, role="operator", timeout_s=timeout_s, key=key, patient=False)


def key_of(settings: configuration.ClientConfig) -> ClientKey | str:
    """The key to connect with, as the SDK takes it. Raises ConfigError for one of no use."""
    from zfabric.keys import client_key

    # What the environment says is in the settings already; nothing else is to be looked at.
    return client_key(settings.key, settings.server_key) or NO_KEY


def without_keys() -> None:
    """From now on brokers and clients of this process, and those it starts, use no keys."""
    os.environ.update({"ZFABRIC_KEY": "none", "ZFABRIC_BROKER_KEYS": "none"})


def ask(args: argparse.Namespace, op: str, **arguments: Any) -> Any:
    """One request on a connection of its own. Raises ConfigError where the question was wrong."""
    with operator(args) as client:
        return ask_on(client, args, op, **arguments)


def ask_on(client: Client, args: argparse.Namespace, op: str, **arguments: Any) -> Any:
    """One request; see `ask`."""
    try:
        return client.request(op, load(args).client.timeout_s, **arguments)
    except FabricError as error:
        code, _, text = str(error).partition(": ")
        if code in USAGE_CODES:
            raise ConfigError(text) from None
        raise


# -- text -----------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Talk: to standard error."""
    print(inert(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Data: to standard output. Raises OutputError."""
    put(inert(text) + "\n")


def inert(text: str) -> str:
    """`text` without what a terminal would obey, for whoever forgot to `clean` it."""
    if text.isascii() and OBEYED.search(text) is None:
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def put(text: str = "") -> None:
    """Write to standard output, and what it holds back. Raises OutputError or BrokenPipeError."""
    if sys.stdout is None:
        if text:
            raise OutputError("cannot write to standard output: it is closed")
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence()
        raise OutputError(f"cannot write to standard output: {error.strerror}") from None


def silence() -> None:
    """Python must not try again to write what standard output did not take."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_json(value: object, *, indent: int | None = 2) -> None:
    """A value as JSON on standard output; what a terminal would obey is escaped, so it is data."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    show("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def clean(text: object) -> str:
    """`text` in one line without control characters: a peer's name cannot move the cursor."""
    line = str(text).replace("\r\n", "\n")
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in line)


def middle(text: str, width: int) -> str:
    """`text` cut to `width` in its middle: names differ at their ends."""
    if len(text) <= width:
        return text
    left = width // 2
    return f"{text[:left]}…{text[left + 1 - width :]}"


def cell(value: object) -> str:
    """One value of a table, for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return middle(clean(value), CELL_CHARS_MAX)


def size(count: float) -> str:
    """Bytes in few characters: 0 B, 4.29 GB."""
    text = short(count)
    return f"{text}B" if " " in text else f"{text} B"


def percent(ratio: float | None) -> str:
    """A ratio of 0 to 1 as a percentage; n/a where it was not measured."""
    return "n/a" if ratio is None else f"{100 * ratio:.2f}%"


def short(number: float) -> str:
    """A number in few characters: 950, 12.3 k, 4.56 M."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def duration(seconds: float | None) -> str:
    """Seconds for people: 0.4 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def columns() -> int | None:
    """Width of the terminal that data goes to; None where it goes to a file or a program."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, spare: Sequence[str] = ()
) -> str:
    """Aligned columns: numbers to the right, text to the left.

    A terminal that is too narrow gets it without the columns named in `spare`, as few of them as
    must be, in that order; then the widest column is cut.
    """
    raw = [list(row) for row in rows]
    texts = [
        [each if isinstance(each, str) and not each else cell(each) for each in row] for row in raw
    ]
    widths = [max(map(len, column)) for column in zip(headers, *texts, strict=True)]
    right = [bool(raw) and all(_is_number(row[k]) for row in raw) for k in range(len(headers))]
    shown, over = _fitting(headers, widths, spare)
    widest = max(shown, key=widths.__getitem__)
    if over > 0:
        widths[widest] = max(min(widths[widest], NAME_CHARS_MIN), widths[widest] - over)
    lines = []
    for row in (list(headers), *texts):
        row[widest] = middle(row[widest], widths[widest])
        cells = [row[k].rjust(widths[k]) if right[k] else row[k].ljust(widths[k]) for k in shown]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _fitting(
    headers: Sequence[str], widths: Sequence[int], spare: Sequence[str]
) -> tuple[list[int], int]:
    """Which columns to show, and by how much they are still too wide."""
    shown, limit = list(range(len(headers))), columns()
    if limit is None:
        return shown, 0
    dropping = [headers.index(name) for name in spare]
    while (over := sum(widths[k] + 2 for k in shown) - 2 - limit) > 0 and dropping:
        shown.remove(dropping.pop(0))
    return shown, over


def _is_number(value: object) -> bool:
    return value is None or (
        isinstance(value, int | float | str)
        and not isinstance(value, bool)
        and (not isinstance(value, str) or value[:1].isdigit() or value in ("-", "n/a"))
    )


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, one pair a line, values aligned and wrapped to the terminal."""
    known, limit = list(rows), columns()
    width = max((len(name) for name, _ in known), default=0)
    lines = []
    for name, value in known:
        room = max(NAME_CHARS_MIN, (limit or sys.maxsize) - width - 2)
        first, *rest = textwrap.wrap(value, room) or [""]
        lines.append(f"{name.ljust(width)}  {first}".rstrip())
        lines += [f"{' ' * width}  {more}" for more in rest]
    return "\n".join(lines)
