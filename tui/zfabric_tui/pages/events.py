"""Events: what has happened, the newest first, and what an event of that name means."""

from __future__ import annotations

import textwrap
import time
from typing import Any

from zfabric.eventnames import EVENTS, WARNING, level_of
from zfabric.words import counted
from zfabric_tui.pages.page import Page, Row, View
from zfabric_tui.text import DIM, HEAD, WARN, Line, clean, line, start

NAME_CHARS = 18
# Lines for the whole text of the chosen event; the texts of engines may be long.
DETAIL_LINES = 6


def clock(time_s: float) -> str:
    """The time of day, here."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def page(view: View) -> Page:
    """The events, and the whole text of the chosen one."""
    events = list(reversed(view.history.events))
    if not events:
        return Page([line("no events yet", DIM)])
    warnings = sum(1 for event in events if level_of(event["event"]) == WARNING)
    marked = f"{counted(warnings, 'warning')} (marked !)" if warnings else "no warnings"
    title = f"{counted(len(events), 'event')}, newest first; {marked}"
    keys = [f"{event['time']} {event['seq']}" for event in events]
    at = keys.index(view.chosen) if view.chosen in keys else 0
    return Page(
        [line(title, DIM), line(f"  {'time':<10}{'event':<{NAME_CHARS + 3}}what", HEAD)],
        [Row(key, _row(event, view.width - 2)) for key, event in zip(keys, events, strict=True)],
        _detail(events[at], view.width),
    )


def _row(event: dict[str, Any], width: int) -> Line:
    warns = level_of(event["event"]) == WARNING
    sign = "!" if warns else " "
    text = f"{clock(event['time']):<9}{sign}{clean(event['event']):<{NAME_CHARS + 3}}"
    what = start(clean(event["text"]), width - len(text))
    return line(f"{text}{what}", WARN if warns else "")


def _detail(event: dict[str, Any], width: int) -> list[Line]:
    known = EVENTS.get(event["event"])
    text = f"{event['event']}: {clean(event['text'])}"
    lines = textwrap.wrap(
        text, max(20, width - 2), max_lines=DETAIL_LINES, placeholder=" … (zfabric events --json)"
    )
    return [*map(line, lines), line(known.meaning if known is not None else "", DIM)]
