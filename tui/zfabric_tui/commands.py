"""Commands: every key of the dashboard, what it does, and where it is offered. One table.

The bindings, the line of keys at the bottom, and the command palette are made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zfabric_tui.orders import DRAIN, FORGET, PAUSE, REQUEUE
from zfabric_tui.text import HEAD, Line, Span

OVERVIEW, LANES, SHAPES, CARDS, FLOW, EVENTS, WASTE, HELP = (
    "overview", "lanes", "shapes", "cards", "flow", "events", "waste", "help",
)  # fmt: skip
PAGES = (OVERVIEW, LANES, SHAPES, CARDS, FLOW, EVENTS)
EVERYWHERE = (*PAGES, WASTE, HELP)
LIVE, REPLAY = "live", "replay"
BOTH = (LIVE, REPLAY)


class Command(NamedTuple):
    """A key: what it does (an action of the app), its name, on which pages and in which modes.

    `short` is its name in the line at the bottom, None where it is not named there.
    """

    keys: str
    action: str
    name: str
    short: str | None = None
    shown: str = ""
    pages: tuple[str, ...] = EVERYWHERE
    modes: tuple[str, ...] = BOTH
    orders: bool = False


COMMANDS = (
    *(
        Command(str(k + 1), f"open('{name}')", f"show {name}", shown=str(k + 1))
        for k, name in enumerate(PAGES)
    ),
    Command("w", f"open('{WASTE}')", "explain waste"),
    Command("question_mark", f"open('{HELP}')", "help", "help", "?"),
    Command("q,ctrl+c", "quit", "quit", "quit", "q"),
    Command("space", "hold", "hold the picture, or go on", "hold", "space", modes=(LIVE,)),
    Command("space", "hold", "play, or stop", "play", "space", modes=(REPLAY,)),
    Command("enter", "enter", "lanes of the shape", "lanes", "enter", (SHAPES,)),
    Command("escape", "leave", "back", "back", "esc", (WASTE, HELP, LANES)),
    Command("c", "turn('metric')", "colour lanes by waste, depth, age", "colour", "c", (LANES,)),
    Command("o", "turn('order')", "order lanes by id, target", "order", "o", (LANES,)),
    Command("left_square_bracket", "shape(-1)", "lanes of the shape before", pages=(LANES,)),
    Command("right_square_bracket", "shape(1)", "lanes of next shape", "shape", "[ ]", (LANES,)),
    Command("p", f"order('{PAUSE}')", "pause or resume a model", "pause", "p", orders=True),
    Command("d", f"order('{DRAIN}')", "drain the broker", "drain", "d", orders=True),
    Command("r", f"order('{REQUEUE}')", "requeue dead items", "requeue", "r", orders=True),
    Command("f", f"order('{FORGET}')", "forget a worker that is gone", "forget", "f", orders=True),
    Command("full_stop", "step(1)", "next snapshot", "step", ", .", modes=(REPLAY,)),
    Command("comma", "step(-1)", "snapshot before", modes=(REPLAY,)),
    Command("greater_than_sign", "seek(60)", "a minute on", "minute", "< >", modes=(REPLAY,)),
    Command("less_than_sign", "seek(-60)", "a minute back", modes=(REPLAY,)),
    Command("e", "event(1)", "next event", "event", "e E", modes=(REPLAY,)),
    Command("E", "event(-1)", "event before", modes=(REPLAY,)),
    Command("plus", "faster(1)", "faster", "speed", "- +", modes=(REPLAY,)),
    Command("minus", "faster(-1)", "slower", modes=(REPLAY,)),
    Command("g", "go", "go to a time", "go to", "g", modes=(REPLAY,)),
    *(
        Command(key, f"move('{key}')", f"{key} in the list or map")
        for key in ("up", "down", "left", "right", "pageup", "pagedown", "home", "end")
    ),
)  # fmt: skip
PALETTE_KEY = ("ctrl+p", "^p", "all")


def offered(mode: str, page: str, *, orders: bool) -> Iterator[Command]:
    """The commands of a mode on a page."""
    for command in COMMANDS:
        if mode in command.modes and page in command.pages and (orders or not command.orders):
            yield command


def key_line(mode: str, page: str, width: int, *, orders: bool) -> Line:
    """As many keys as there is room for, and always help and the palette, which name the rest."""
    last = [("?", "help"), (PALETTE_KEY[1], PALETTE_KEY[2])]
    named = [
        (command.shown, command.short)
        for command in offered(mode, page, orders=orders)
        if command.short is not None and (command.shown, command.short) not in last
    ]
    # What is special to a page goes first: what is common to all is soon known.
    special = {
        (c.shown, c.short)
        for c in COMMANDS
        if c.short is not None and (len(c.pages) < len(EVERYWHERE) or c.modes == (REPLAY,))
    }
    named.sort(key=lambda pair: pair not in special)
    room = width - sum(len(key) + len(name) + 3 for key, name in last)
    spans: list[Span] = []
    for key, name in named:
        room -= len(key) + len(name) + 3
        if room < 0:
            break
        spans += [Span(key, HEAD), Span(f" {name}  ")]
    for key, name in last:
        spans += [Span(key, HEAD), Span(f" {name}  ")]
    return tuple(spans)


def page_line(page: str, position: str | None, width: int) -> Line:
    """The pages by number, which one this is, and what of it is in sight."""
    spans: list[Span] = []
    for key, name in [*((str(k + 1), name) for k, name in enumerate(PAGES)), ("w", WASTE)]:
        here = name == page
        spans += [Span(key, HEAD), Span(f"[{name}]" if here else f" {name} ", HEAD if here else "")]
    used = sum(len(span.text) for span in spans)
    if position is not None and used + len(position) + 2 <= width:
        spans.append(Span(position.rjust(width - used)))
    return tuple(spans)
