"""The line under a replay: how far it is, where events are, and where nothing is known.

Pure. A gap in the recording is a gap in the line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from zfabric_tui.text import DIM, HEAD, Line, Span

# Less than this apart nothing happens.
SHORTEST_S = 1e-6
KNOWN, GAP, EVENT, HERE = "-", " ", "+", "#"


def bar(
    span: tuple[float, float],
    gaps: Sequence[tuple[float, float]],
    events: Sequence[float],
    position_s: float,
    width: int,
) -> str:
    """A character for each of `width` equal parts of the recording."""
    first, last = span
    step = max((last - first) / width, SHORTEST_S)

    def place(time_s: float) -> int:
        return min(width - 1, int((min(max(time_s, first), last) - first) / step))

    cells = [KNOWN] * width
    for before, after in gaps:
        # Only what lies in the gap altogether; and of a gap too small to see at least its place.
        start, end = place(before) + 1, place(after)
        for k in range(start, end):
            cells[k] = GAP
        if start >= end and after - before > step / 2:
            cells[place((before + after) / 2)] = GAP
    for event in events:
        cells[place(event)] = EVENT
    cells[place(position_s)] = HERE
    return "".join(cells)


def clock(time_s: float) -> str:
    """Day and time, here."""
    return time.strftime("%m-%d %H:%M:%S", time.localtime(time_s))


def line(
    span: tuple[float, float],
    gaps: Sequence[tuple[float, float]],
    events: Sequence[float],
    position_s: float,
    width: int,
) -> Line:
    """The whole line: where it begins, the bar, where it ends."""
    start, end = clock(span[0]), clock(span[1])
    room = max(8, width - len(start) - len(end) - 4)
    drawn = bar(span, gaps, events, position_s, room)
    return (Span(start, DIM), Span(f" [{drawn}] ", HEAD), Span(end, DIM))


def parse(text: str, now_s: float) -> float | None:
    """A time of day (HH:MM or HH:MM:SS) on the day of `now_s`, here; None where it is none."""
    parts = text.strip().split(":")
    if not 2 <= len(parts) <= 3 or not all(part.isdecimal() and len(part) <= 2 for part in parts):
        return None
    hour, minute, second = (*map(int, parts), 0)[:3]
    if hour > 23 or minute > 59 or second > 59:
        return None
    day = time.localtime(now_s)
    return time.mktime((*day[:3], hour, minute, second, 0, 0, -1))
