"""What commands share: parsers with an example, the operator's connection, text for people.

Names and texts that come from peers pass through `clean` before they reach a terminal. Numbers for
people have thousands separators or a unit; data (`--json`) is never rounded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from zfabric import config as configuration
from zfabric.errors import ConfigError, FabricError

if TYPE_CHECKING:
    from zfabric.client import Client

Commands = Any
# A cell longer than this would push the others off the screen.
CELL_CHARS_MAX = 64
# Requests that the broker refused because of what was asked, not of what happened.
USAGE_CODES = ("malformed", "not_found", "ambiguous", "unknown_request", "in_use")


def _layout(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the layout of our texts and errs in one line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _layout)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """One line that names the way to more."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    text: str,
    example: str,
) -> argparse.ArgumentParser:
    """A command with its help: what it does, and one example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=text.strip(), epilog=f"example:\n  {example}"
    )
    parser.set_defaults(run=run)
    add_traceback(parser)
    return parser


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """The flag that shows where an error came from."""
    text = "show where an error came from"
    parser.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag for output that programs read."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_broker(parser: argparse.ArgumentParser) -> None:
    """Where the broker is, and how long to wait for it."""
    configuration.add_flags(parser, "client")


def load(args: argparse.Namespace) -> configuration.Config:
    """The configuration, with this command line's flags on top."""
    return configuration.load(configuration.flags_of(args))


@contextmanager
def operator(args: argparse.Namespace) -> Iterator[Client]:
    """A connection that asks and orders but submits nothing."""
    from zfabric.client import Client

    settings = load(args).client
    client = Client(settings.broker, role="operator", timeout_s=settings.timeout_s)
    try:
        yield client
    finally:
        client.close()


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
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Data: to standard output."""
    print(text, flush=True)


def show_json(value: object, *, indent: int | None = 2) -> None:
    """A value as JSON on standard output."""
    show(json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False))


def clean(text: object) -> str:
    """`text` without control characters, so that a peer's name cannot move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


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
    text = clean(value)
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


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


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns: numbers to the right, text to the left."""
    raw = [list(row) for row in rows]
    texts = [
        [each if isinstance(each, str) and not each else cell(each) for each in row] for row in raw
    ]
    widths = [max(map(len, column)) for column in zip(headers, *texts, strict=True)]
    right = [bool(raw) and all(_is_number(row[k]) for row in raw) for k in range(len(headers))]
    lines = []
    for row in (list(headers), *texts):
        cells = [
            text.rjust(width) if numeric else text.ljust(width)
            for text, width, numeric in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(value: object) -> bool:
    return value is None or (
        isinstance(value, int | float | str)
        and not isinstance(value, bool)
        and (not isinstance(value, str) or value[:1].isdigit() or value in ("-", "n/a"))
    )


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, one pair a line, values aligned."""
    known = list(rows)
    width = max((len(name) for name, _ in known), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in known)
