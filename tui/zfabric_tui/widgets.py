"""Widgets: a page of lines with a chosen row, and the lanes with their map. They only draw.

Both paint line by line and only when what they show has changed: at ten pictures a second most
lines are the same as before.
"""

from __future__ import annotations

from typing import Any

from textual.events import Resize
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from zfabric.words import counted
from zfabric_tui import heat
from zfabric_tui.pages.page import Page, Row
from zfabric_tui.paint import NONE, Palette
from zfabric_tui.text import DIM, HEAD, Line, Span, amount, duration, line, percent, plain

# Rows that a foot leaves for what it is about.
ROWS_MIN = 3
# Lines of the lanes' page besides the map: three of title, the legend, three of detail.
AROUND_MAP = 7


class PageView(Widget):
    """A page: its head stays, its rows scroll, its foot tells of the chosen row."""

    class Chosen(Message):
        """Another row was chosen."""

    DEFAULT_CSS = "PageView { height: 1fr; }"

    def __init__(self, palette: Palette) -> None:
        super().__init__(id="page")
        self._palette = palette
        self._page = Page([])
        self._top = 0
        self._at = 0
        self.faint = False

    def show(self, page: Page, *, faint: bool) -> None:
        """Draw this from now on; a row that was chosen stays so, wherever it is now.

        Who has chosen none stays at the top: the first of a list may be its last in a moment.
        """
        chosen = self.chosen if self._at else None
        if page == self._page and faint == self.faint:
            return
        self._page, self.faint = page, faint
        if chosen is not None and chosen != self.chosen:
            keys = [row.key for row in page.rows]
            if chosen in keys:
                self._at = keys.index(chosen)
        self._settle()
        self.refresh()

    def restart(self) -> None:
        """From the top, for another page."""
        self._top = self._at = 0
        self._page = Page([])

    @property
    def chosen(self) -> str | None:
        """The key of the chosen row."""
        rows = self._page.rows
        return rows[min(self._at, len(rows) - 1)].key if rows else None

    @property
    def position(self) -> str | None:
        """Which lines are in sight, in words; None where all are."""
        total, seen = len(self._lines()), self._room()
        if total <= seen:
            return None
        return f"{self._top + 1}-{min(total, self._top + seen)} of {total}"

    def move(self, by: int) -> None:
        """Choose the row so far away, or scroll by so much."""
        if self._page.rows:
            self._at = min(max(0, self._at + by), len(self._page.rows) - 1)
        else:
            self._top += by
        self._settle()
        self.refresh()
        self.post_message(self.Chosen())

    def move_pages(self, by: int) -> None:
        """As many rows as are in sight."""
        self.move(by * max(1, self._room() - 1))

    def move_far(self, by: int) -> None:
        """To the first (-1) or the last (1)."""
        self.move(by * max(len(self._lines()), 1))

    def _lines(self) -> list[Line]:
        return [row.line for row in self._page.rows] or list(self._page.head)

    def _foot(self) -> list[Line]:
        """The foot, where there is room for it."""
        page = self._page
        if not page.rows or not page.foot:
            return []
        room = self.size.height - len(page.head) - min(ROWS_MIN, len(page.rows)) - 1
        foot = list(page.foot)[: max(0, room)]
        return [(), *foot] if foot else []

    def _room(self) -> int:
        """Lines for what scrolls."""
        if not self._page.rows:
            return max(1, self.size.height)
        return max(1, self.size.height - len(self._page.head) - len(self._foot()))

    def _settle(self) -> None:
        """Bring the chosen row, or some line, into sight."""
        room, rows = self._room(), self._page.rows
        if rows:
            self._at = min(self._at, len(rows) - 1)
            self._top = min(max(self._top, self._at - room + 1), self._at)
        self._top = max(0, min(self._top, len(self._lines()) - room))

    def on_resize(self, event: Resize) -> None:
        """There may be room for more."""
        self._settle()

    def render_line(self, y: int) -> Strip:
        """One line of the page."""
        width, page = self.size.width, self._page
        faint = self.faint
        if not page.rows:
            at = y + self._top
            shown = page.head[at] if at < len(page.head) else ()
            return self._palette.strip(shown, width, faint=faint)
        if y < len(page.head):
            return self._palette.strip(page.head[y], width, faint=faint)
        y -= len(page.head)
        room, foot = self._room(), self._foot()
        if y < room:
            return self._row(page.rows, y + self._top, width)
        y -= room
        return self._palette.strip(foot[y] if y < len(foot) else (), width, faint=faint)

    def _row(self, rows: Any, at: int, width: int) -> Strip:
        if at >= len(rows):
            return Strip.blank(width, NONE)
        row: Row = rows[at]
        chosen = at == self._at
        sign = "> " if chosen else "  "
        return self._palette.strip((Span(sign), *row.line), width, chosen=chosen, faint=self.faint)


class LanesView(Widget):
    """The lanes of one shape: title, map, legend, and all of the lane under the cursor."""

    DEFAULT_CSS = "LanesView { height: 1fr; }"

    def __init__(self, palette: Palette) -> None:
        super().__init__(id="lanes")
        self._palette = palette
        self._lanes: dict[str, Any] | None = None
        self._shape: dict[str, Any] | None = None
        self._none = ""
        self.metric, self.order = heat.WASTE, heat.BY_ID
        self._heat: heat.Heat | None = None
        self._rows: list[list[tuple[int | None, int | None]]] = []
        self._width = 1
        self._cursor = 0
        self.faint = False

    def show(
        self,
        lanes: dict[str, Any] | None,
        shape: dict[str, Any] | None,
        *,
        none: str,
        faint: bool,
    ) -> None:
        """Draw these lanes of this shape from now on; `none` says why there are none."""
        same = lanes is self._lanes and shape == self._shape and none == self._none
        if same and faint == self.faint:
            return
        self._lanes, self._shape, self._none = lanes, shape, none
        self.faint = faint
        self._map()

    def turn(self, what: str) -> bool:
        """The next metric or order; False where there is nothing to see of it."""
        if what == "metric":
            at = heat.METRICS.index(self.metric) + 1
            self.metric = heat.METRICS[at % len(heat.METRICS)]
        else:
            self.order = heat.BY_TARGET if self.order == heat.BY_ID else heat.BY_ID
            self._cursor = 0
        self._map()
        return self._heat is not None

    def move(self, key: str) -> None:
        """Move the cursor, see `heat.moved`."""
        if self._heat is not None and len(self._heat):
            self._cursor = heat.moved(self._cursor, key, self._width, len(self._heat))
            self.refresh()

    @property
    def lane(self) -> int | None:
        """The id of the lane under the cursor; None where there is none."""
        place = self._place()
        return None if place is None or self._lanes is None else int(self._lanes["id"][place])

    def _place(self) -> int | None:
        known = self._heat
        if known is None or not 0 <= self._cursor < len(known):
            return None
        return known.places[self._cursor]

    def _map(self) -> None:
        self._heat, self._rows = None, []
        if self._lanes is not None and self.size.width:
            known = heat.heat(self._lanes, self.metric, self.order)
            self._heat = known
            room = max(1, self.size.height - AROUND_MAP)
            self._width = heat.width_for(len(known), self.size.width, room)
            self._rows = heat.pairs(known.levels, self._width)
            self._cursor = max(0, min(self._cursor, len(known) - 1))
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        """The map may be wider."""
        self._map()

    def render_line(self, y: int) -> Strip:
        """One line of the page."""
        width = self.size.width
        if self._heat is None:
            return self._palette.strip(line(self._none, DIM) if y == 0 else (), width)
        lines = self._title()
        if y < len(lines):
            return self._palette.strip(lines[y], width, faint=self.faint)
        y -= len(lines)
        if y < len(self._rows):
            at = divmod(self._cursor, self._width)
            cursor = at[1] if at[0] // 2 == y else None
            return self._palette.cells(self._rows[y], width, cursor=cursor, faint=self.faint)
        y -= len(self._rows)
        if y == 0:
            return self._palette.legend(self.metric, width)
        detail = self._detail()
        return self._palette.strip(
            detail[y - 1] if y - 1 < len(detail) else (), width, faint=self.faint
        )

    def _title(self) -> list[Line]:
        lanes = self._lanes or {}
        used, limit = len(lanes["id"]), lanes["lanes_limit"]
        threshold = lanes["threshold_ratio"]
        retiring = sum(lanes["quiescing"])
        if threshold is None:
            use = "no lanes: the policy of this broker does not sort by length"
        elif not used:
            use = f"no lane is in use; this shape may have {limit:,}"
        else:
            use = (
                f"{used:,} of {counted(limit, 'lane')} in use, {retiring:,} of them retiring; "
                f"another opens over {percent(threshold)} waste"
            )
        two = "" if self._palette.color and not self._palette.ascii_only else ", hotter of two"
        return [
            (
                Span(lanes["signature"], HEAD),
                Span(f"  {plain(lanes['model'], 30)}, {self._state()}"),
            ),
            line(use),
            line(f"{self.metric}: {heat.MEANINGS[self.metric]}; by {self.order}{two}", DIM),
        ]

    def _state(self) -> str:
        """What is being done with the shape."""
        shape = self._shape
        if shape is None:
            return "not among those that are listed"
        if shape["current"]:
            return "being drained"
        return "waits for its turn" if shape["ready_items"] else "nothing waits"

    def _detail(self) -> list[Line]:
        place, lanes = self._place(), self._lanes
        if place is None or lanes is None:
            return [line(f"lane {self._cursor}: free")]
        age = lanes["oldest_age_s"][place]
        waste = heat.waste_ratio(lanes, place)
        state = "retiring" if lanes["quiescing"][place] else "open"
        return [
            (
                Span(f"lane {lanes['id'][place]}", HEAD),
                Span(f"  {state}, target {counted(lanes['target_tokens'][place], 'token')}, "),
                Span(f"{counted(lanes['outstanding_items'][place], 'item')} outstanding"),
            ),
            line(
                f"ready {counted(lanes['ready_items'][place], 'item')}, "
                f"{counted(lanes['ready_tokens'][place], 'token')}, oldest {duration(age)}"
            ),
            line(
                f"its batches: waste {percent(waste)}, "
                f"{amount(lanes['padded_tokens'][place])} padded tokens"
            ),
        ]
