"""Words and numbers on a screen: amounts, ages, aligned tables, in as many cells as there are.

Pure. A line is a row of spans, each with the name of a style (`STYLES`), so that a page needs no
terminal. Text that came from peers is made printable here. Widths are terminal cells: some
characters take two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size


class Span(NamedTuple):
    """Text in one style."""

    text: str
    style: str = ""


Line = tuple[Span, ...]
# Names of styles; what they look like is the widget's. No meaning may rest on a style alone.
HEAD, DIM, BAD, WARN, GOOD, MARK = "head", "dim", "bad", "warn", "good", "mark"
STYLES = (HEAD, DIM, BAD, WARN, GOOD, MARK)
BLANK: Line = ()
BARS, BARS_ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
# What stands for characters that a terminal without unicode cannot show, one cell for one.
ASCII = str.maketrans(
    {
        "…": "~",
        "·": ".",
        "↑": "^",
        "↓": "v",
        "│": "|",
        "─": "-",
        **dict(zip(BARS, BARS_ASCII, strict=True)),
    }
)


def line(text: str, style: str = "") -> Line:
    """A line of one span."""
    return (Span(text, style),)


def text_of(spans: Line) -> str:
    """A line without its styles."""
    return "".join(span.text for span in spans)


def plain_ascii(text: str) -> str:
    """`text` in as many cells, without anything but ASCII."""
    narrow = text.translate(ASCII)
    if narrow.isascii():
        return narrow
    return "".join(c if c.isascii() else "?" * cell_len(c) for c in narrow)


def clean(text: str) -> str:
    """`text` in one line, without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "·" for c in text)


def plain(text: str, width: int) -> str:
    """`text` made clean, its middle cut to `width` cells: names differ at their ends."""
    safe = clean(text)
    if cell_len(safe) <= width:
        return safe
    if width < 3:
        return set_cell_size(safe, width)
    left = width // 2
    tail = safe[-(width - left - 1) :]
    while cell_len(tail) > width - left - 1:
        tail = tail[1:]
    return set_cell_size(safe, left) + "…" + tail


def start(text: str, width: int) -> str:
    """`text` in `width` cells; what is left out at its end is marked."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def cut(spans: Line, width: int) -> Line:
    """A line in exactly `width` cells or fewer."""
    room, kept = width, []
    for text, style in spans:
        length = cell_len(text)
        if length > room:
            kept.append(Span(set_cell_size(text, room), style))
            break
        kept.append(Span(text, style))
        room -= length
    return tuple(kept)


def amount(value: float | None, unit: str = "") -> str:
    """1234567 as "1.23 M"; n/a for what is not known."""
    if value is None:
        return "n/a"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if prefix == "k" else size
            return f"{value / scale:.2f} {prefix}{unit}"
    return f"{value:,.0f}{' ' + unit if unit else ''}"


def percent(value: float | None) -> str:
    """0.1234 as "12.3%"; n/a for what is not measured."""
    return "n/a" if value is None else f"{100 * value:.1f}%"


def factor(value: float | None) -> str:
    """1.234 as "1.23"; n/a before there is anything to divide by."""
    return "n/a" if value is None else f"{value:.2f}"


def duration(seconds: float | None) -> str:
    """3700 as "1 h 01 min"; - for none."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def milliseconds(seconds: float | None) -> str:
    """0.0123 as "12.3 ms"; n/a for what is not measured."""
    return "n/a" if seconds is None else f"{1000 * seconds:,.1f} ms"


def ratio_bar(share: float, width: int) -> str:
    """A share of 0 to 1 as a bar of `width` cells: a fixed scale."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "·" * (width - full)


def trend(values: Sequence[float | None], top: float) -> str:
    """One character a value on the scale 0 to `top`; what is not known is a gap."""
    return "".join(
        " " if v is None else BARS[1 + min(7, int(8 * v / top))] if top > 0 else BARS[1]
        for v in values
    )


def round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten: a scale that does not follow every wiggle."""
    step = 1.0
    while step < value:
        for factor in (2.0, 5.0, 10.0):
            if step * factor >= value:
                return step * factor
        step *= 10.0
    return step


def pad(text: str, width: int, *, right: bool = False) -> str:
    """`text` in `width` cells, or more if it is longer."""
    blank = " " * max(0, width - cell_len(text))
    return blank + text if right else text + blank


class Column(NamedTuple):
    """A column of a table: `spare` ones go first where there is no room, the highest number first.

    `left` columns are aligned to the left, and only they may be cut.
    """

    title: str
    left: bool = False
    spare: int = 0


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int
) -> tuple[str, list[str]]:
    """Head and rows in at most `width` cells: spare columns go, then the widest left one is cut."""
    lines = [[column.title for column in columns], *map(list, rows)]
    widths = [max(cell_len(row[k]) for row in lines) for k in range(len(columns))]
    shown = list(range(len(columns)))
    for k in sorted(shown, key=lambda k: -columns[k].spare):
        if sum(widths[j] + 2 for j in shown) - 2 <= width or not columns[k].spare:
            break
        shown.remove(k)
    over = sum(widths[k] + 2 for k in shown) - 2 - width
    wide = max((k for k in shown if columns[k].left), key=widths.__getitem__, default=None)
    if over > 0 and wide is not None:
        widths[wide] = max(4, widths[wide] - over)
    texts = []
    for row in lines:
        cells = [
            pad(
                plain(row[k], widths[k]) if k == wide else row[k],
                widths[k],
                right=not columns[k].left,
            )
            for k in shown
        ]
        texts.append("  ".join(cells).rstrip())
    return texts[0], texts[1:]
