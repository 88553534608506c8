"""Paint: lines and heat as the strips of a terminal. The only place that knows a colour.

What a style means is always in the text too, so that nothing is lost without colour. Every segment
has a style: one without crashes the filter that takes colours away.
"""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from zfabric_tui import heat
from zfabric_tui.text import BAD, DIM, GOOD, HEAD, MARK, WARN, Line, cut, plain_ascii

NONE = Style()
FAINT = Style(dim=True)
INKS = {
    "": NONE,
    HEAD: Style(bold=True),
    DIM: Style(dim=True),
    BAD: Style(bold=True, color="bright_red"),
    WARN: Style(color="yellow"),
    GOOD: Style(color="green"),
    MARK: Style(reverse=True),
}
# From cold to hot, even in lightness, so that it reads for the colour-blind too.
COLORS = ("#1d2a52", "#264e86", "#2f7f9e", "#46a58a", "#8fbf5a", "#e0c243", "#ee8a34", "#e0412f")
# A lane that nothing is known of, and a place where there is no lane.
UNKNOWN = "#20242c"
HALF = "▀"


class Palette:
    """How lines and cells look on one terminal."""

    def __init__(self, *, color: bool, ascii_only: bool) -> None:
        self.color = color
        self.ascii_only = ascii_only
        self._cells: dict[tuple[int | None, int | None], Style] = {}

    def text(self, text: str) -> str:
        """What the terminal can show of a text."""
        return plain_ascii(text) if self.ascii_only else text

    def strip(self, spans: Line, width: int, *, chosen: bool = False, faint: bool = False) -> Strip:
        """A line as a strip of exactly `width` cells."""
        segments = []
        for text, name in cut(spans, width):
            style = INKS[name] if self.color or name in ("", HEAD, DIM, MARK) else self._plain(name)
            if faint:
                style = style + FAINT
            if chosen:
                style = style + INKS[MARK]
            segments.append(Segment(self.text(text), style))
        rest = INKS[MARK] if chosen else NONE
        return Strip(segments).adjust_cell_length(width, rest)

    @staticmethod
    def _plain(name: str) -> Style:
        return Style(bold=True) if name == BAD else NONE

    def cells(
        self,
        row: list[tuple[int | None, int | None]],
        width: int,
        *,
        cursor: int | None,
        faint: bool,
    ) -> Strip:
        """A row of the heat map; `cursor` is the cell that it is on."""
        segments: list[Segment] = []
        for at, pair in enumerate(row):
            shown, style = self._cell(pair)
            if at == cursor:
                style = style + INKS[MARK]
                if shown == heat.EMPTY:
                    shown = "+"
            if faint:
                style = style + FAINT
            if segments and segments[-1].style == style:
                segments[-1] = Segment(segments[-1].text + shown, style)
            else:
                segments.append(Segment(shown, style))
        return Strip(segments).adjust_cell_length(width, NONE)

    def _cell(self, pair: tuple[int | None, int | None]) -> tuple[str, Style]:
        if not self.color or self.ascii_only:
            return heat.shade(pair, ascii_only=self.ascii_only), NONE
        style = self._cells.get(pair)
        if style is None:
            upper, lower = (UNKNOWN if each is None else COLORS[each] for each in pair)
            style = self._cells[pair] = Style(color=upper, bgcolor=lower)
        return HALF, style

    def legend(self, metric: str, width: int) -> Strip:
        """The scale of a metric, coldest first."""
        segments = [Segment(f"{metric} ", NONE)]
        for level, shade, name in heat.legend(metric, ascii_only=self.ascii_only):
            if self.color and not self.ascii_only:
                segments.append(Segment("  ", Style(bgcolor=COLORS[level])))
            else:
                segments.append(Segment(shade, NONE))
            segments.append(Segment(f" {name} ", FAINT))
        return Strip(segments).adjust_cell_length(width, NONE)
