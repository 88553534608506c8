"""A line of the terminal that changes now and then: header, pages, timeline, keys."""

from __future__ import annotations

from textual.strip import Strip
from textual.widget import Widget

from zfabric_tui.paint import Palette
from zfabric_tui.text import Line


class LineView(Widget):
    """One line, drawn anew only when it is another one."""

    DEFAULT_CSS = "LineView { height: 1; width: 1fr; }"

    def __init__(self, palette: Palette, *, id: str) -> None:
        super().__init__(id=id)
        self._palette = palette
        self._line: Line = ()

    @property
    def shown(self) -> Line:
        """What it shows."""
        return self._line

    def show(self, spans: Line) -> None:
        """Show this line from now on."""
        if spans != self._line:
            self._line = spans
            self.refresh()

    def render_line(self, y: int) -> Strip:
        """The line."""
        return self._palette.strip(self._line, self.size.width)
