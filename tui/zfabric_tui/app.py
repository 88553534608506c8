"""`zfabric top`: one feed, one picture a tick, pages by number. Draws, and sends what is confirmed.

What there is to see is the model's and the pages'; where it comes from is the feed's. A lost broker
is a DISCONNECTED header over the last values, never an exit. Times are seconds on the given clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.events import Event, Key
from textual.screen import Screen

from zfabric.errors import ConfigError, FabricError
from zfabric_tui import commands, orders
from zfabric_tui.commands import (
    COMMANDS,
    HELP,
    LANES,
    LIVE,
    OVERVIEW,
    REPLAY,
    SHAPES,
    WASTE,
)
from zfabric_tui.desk import LOOKING_ROLES, NOT_ALLOWED, Desk
from zfabric_tui.dialogs import Ask, Choose, When
from zfabric_tui.feed import CURRENT, Arrived, Feed, LiveFeed, Snapshot
from zfabric_tui.header import header
from zfabric_tui.hearing import Hearing
from zfabric_tui.model import History
from zfabric_tui.pages.book import BOOK
from zfabric_tui.pages.page import Page, View
from zfabric_tui.paint import Palette
from zfabric_tui.recorder import Recorder
from zfabric_tui.replay import ReplayFeed
from zfabric_tui.strips import LineView
from zfabric_tui.text import Line, line
from zfabric_tui.timeline import line as timeline
from zfabric_tui.timeline import parse
from zfabric_tui.widgets import LanesView, PageView

MESSAGE_S = 6.0
# Seconds to look round in after what was watched has ended; every key begins them anew.
LOOK_S = 120.0
ASCII_CSS = """
SearchIcon, CommandPalette LoadingIndicator { display: none; }
CommandPalette #--input { border: none; }
CommandPalette CommandList { border: none; }
CommandPalette CommandList.--populating { border: none; }
CommandPalette * { scrollbar-size: 0 0; }
"""


class TopApp(App[None]):
    """The dashboard over one feed."""

    TITLE = "zfabric"
    CSS = """
    Screen { layout: vertical; }
    .bar { height: 1; width: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = True
    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(command.keys, command.action, command.name, show=False)
        for command in {command.keys: command for command in COMMANDS}.values()
    ]

    def __init__(
        self,
        feed: Feed,
        address: str,
        *,
        desk: Desk | None = None,
        readonly: bool = False,
        hz: float = 4.0,
        ascii_only: bool = False,
        recorder: Recorder | None = None,
        ends: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Without colour the terminal's own two are used, and no code for any other is sent.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self._feed = feed
        self._replay = feed if isinstance(feed, ReplayFeed) else None
        self._address = address
        self._desk = desk
        self._readonly = readonly
        self._interval_s = 1 / hz
        self._recorder = recorder
        self._ends = ends
        self._leaves_s: float | None = None
        self._clock = clock
        self._palette = Palette(color=not self.no_color, ascii_only=ascii_only)
        self.history = History()
        self.page = OVERVIEW
        self._before = OVERVIEW
        # the shape whose lanes are shown; None is the current one
        self._shape: str | None = None
        self._held = False
        self.hearing = Hearing(clock, self._replay)
        self._asking = False
        self._boot: str | None = None
        # what a broker said that refused an order for want of a right
        self._denied: str | None = None
        self._message: tuple[str, float] | None = None
        if self._replay is not None:
            self._gaps = self._replay.reader.gaps()
            self._event_times = self._replay.reader.event_times()

    def compose(self) -> ComposeResult:
        """Header, pages, body, messages, keys."""
        palette = self._palette
        yield LineView(palette, id="header")
        yield LineView(palette, id="pages")
        yield PageView(palette)
        yield LanesView(palette)
        if self._replay is not None:
            yield LineView(palette, id="timeline")
        yield LineView(palette, id="keys")

    def on_mount(self) -> None:
        """Start drawing."""
        if self._palette.ascii_only:
            self.stylesheet.add_source(ASCII_CSS)
        self.query_one(LanesView).display = False
        self.set_interval(self._interval_s, self.refresh_picture)
        self.refresh_picture()

    def on_resize(self) -> None:
        """Another width has room for other columns; the widgets know theirs after a layout."""
        self.call_after_refresh(self.draw)

    async def on_event(self, event: Event) -> None:
        """Whoever presses a key is still there."""
        if self._leaves_s is not None and isinstance(event, Key):
            self._leaves_s = self._clock() + LOOK_S
        await super().on_event(event)

    def on_unmount(self) -> None:
        """The feed ends with the screen."""
        self._feed.close()
        if self._recorder is not None:
            self._recorder.close()

    # -- what is known ------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """live or replay."""
        return LIVE if self._replay is None else REPLAY

    @property
    def snapshot(self) -> Snapshot | None:
        """What is drawn."""
        return self.history.snapshot

    def refresh_picture(self) -> None:
        """Take what the feed has and draw it; leave some time after what was watched has ended."""
        if self._ends is not None and self._ends():
            now = self._clock()
            if self._leaves_s is None:
                self._leaves_s = now + LOOK_S
            elif now >= self._leaves_s:
                self.exit()
        try:
            self._take(self._feed.poll(0))
        except ConfigError as error:
            # A recording that is damaged in places can still be gone on in.
            self.say(str(error))
        self._look_for_broker()
        self.draw()

    def _take(self, arrived: Arrived) -> None:
        if self._recorder is not None:
            try:
                self._recorder.keep(arrived)
            except ConfigError as error:
                self._recorder = None
                self.say(str(error))
        self.hearing.note(arrived)
        if self._held and self._replay is None:
            return
        if arrived.restarted:
            self.history.forget()
        for snapshot in arrived.snapshots:
            self.history.add(snapshot)
        self.history.add_events(arrived.events)
        self.history.add_lanes(arrived.lanes)
        if arrived.snapshots and self._desk is not None:
            boot = arrived.snapshots[-1]["boot_id"]
            if boot != self._boot:
                self._boot, self._denied = boot, None
                self.run_worker(self._fetch_events, thread=True)

    def _fetch_events(self) -> None:
        """What happened before this dashboard was there. In a thread."""
        try:
            known = self._desk.ask("events") if self._desk is not None else []
        except FabricError:
            # They are shown as they come; what was before is not worth a word.
            return
        self.call_from_thread(self.history.add_events, known)

    def _look_for_broker(self) -> None:
        """A broker that is lost may have come back elsewhere."""
        if self._desk is not None and self.hearing.is_due() and not self._asking:
            self._asking = True
            self.run_worker(self._find_broker, thread=True)

    def _find_broker(self) -> None:
        """In a thread."""
        try:
            address = self._desk.stats_address() if self._desk is not None else None
        except FabricError:
            address = None
        self.call_from_thread(self._found, address)

    def _found(self, address: str | None) -> None:
        self._asking = False
        if address is not None and isinstance(self._feed, LiveFeed):
            self._feed.move(address)

    # -- drawing ------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw what is known."""
        if not self.is_running or not self.query("#keys"):
            return
        width = self.size.width
        self.query_one("#header", LineView).show(self._header())
        body = self._draw_body()
        self.query_one("#pages", LineView).show(commands.page_line(self.page, body, width))
        if self._replay is not None:
            position = self._replay.position_s
            span = self._replay.reader.span
            shown = timeline(span, self._gaps, self._event_times, position, width)
            self.query_one("#timeline", LineView).show(shown)
        self.query_one("#keys", LineView).show(self._key_line(width))

    def _header(self) -> Line:
        return header(
            self.snapshot, self._address, self.hearing, held=self._held, replay=self._replay
        )

    def _key_line(self, width: int) -> Line:
        if self._message is not None:
            text, until_s = self._message
            if self._clock() < until_s:
                return line(text, "head")
            self._message = None
        ended: Line = ()
        if self._leaves_s is not None:
            left_s = max(0.0, self._leaves_s - self._clock())
            ended = line(f"ENDED: q goes on ({left_s:.0f} s)  ", "head")
        width -= sum(len(span.text) for span in ended)
        orders = self._may_order is None
        return (*ended, *commands.key_line(self.mode, self.page, width, orders=orders))

    def _draw_body(self) -> str | None:
        """Draw the page; which lines of it are in sight."""
        pages, lanes = self.query_one(PageView), self.query_one(LanesView)
        if self.page == LANES:
            self._draw_lanes(lanes)
            return None
        faint = self.hearing.lost and self.page != HELP
        if self.snapshot is None and self.page != HELP:
            pages.show(Page([line("nothing heard yet", "dim")]), faint=False)
            return None
        size, chosen = pages.size, pages.chosen
        view = View(
            self.snapshot or {}, self.history, size.width, size.height, chosen, self.hearing.old
        )
        pages.show(BOOK[self.page](view), faint=faint)
        return pages.position

    def _draw_lanes(self, lanes: LanesView) -> None:
        rows = self.snapshot["shapes"] if self.snapshot is not None else []
        signature = self._shape
        if signature is None and rows and not any(row["current"] for row in rows):
            signature = rows[0]["signature"]
        self._feed.follow(signature or CURRENT)
        known = self.history.lanes_of(signature)
        if known is not None:
            signature = known["signature"]
        shape = next((row for row in rows if row["signature"] == signature), None)
        none = f"the lanes of {signature} are on their way"
        if signature is None:
            none = "no shapes yet: submit work, or zfabric run-batch --help"
        lanes.show(known, shape, none=none, faint=self.hearing.lost)

    def say(self, text: str) -> None:
        """A word in place of the keys, for a while."""
        self._message = (" ".join(text.split()), self._clock() + MESSAGE_S)
        self.draw()

    def action_command_palette(self) -> None:
        """Every command, by name."""
        if not CommandPalette.is_open(self):  # type: ignore[arg-type]
            self.push_screen(CommandPalette(placeholder="a command", id="--command-palette"))

    # -- keys ---------------------------------------------------------------------------------

    def action_open(self, page: str) -> None:
        """Show a page."""
        if page == self.page:
            return
        if self.page not in (WASTE, HELP):
            self._before = self.page
        self.page = page
        lanes = page == LANES
        self.query_one(LanesView).display = lanes
        view = self.query_one(PageView)
        view.display = not lanes
        view.restart()
        if not lanes:
            self._feed.follow(None)
        self.draw()

    def action_leave(self) -> None:
        """To the page before."""
        if self.page == LANES:
            self.action_open(SHAPES)
        elif self.page in (WASTE, HELP):
            self.action_open(self._before)

    def action_hold(self) -> None:
        """Stop or go on drawing new snapshots; in a replay, playing."""
        if self._replay is not None:
            self._replay.toggle()
        else:
            self._held = not self._held
        self.draw()

    def action_move(self, key: str) -> None:
        """Move in the map, the list or the text."""
        if self.page == LANES:
            self.query_one(LanesView).move(key)
            return
        view = self.query_one(PageView)
        if key in ("up", "down"):
            view.move(-1 if key == "up" else 1)
        elif key in ("pageup", "pagedown"):
            view.move_pages(-1 if key == "pageup" else 1)
        elif key in ("home", "end"):
            view.move_far(-1 if key == "home" else 1)

    def on_page_view_chosen(self) -> None:
        """The foot tells of the chosen row."""
        self.draw()

    def action_enter(self) -> None:
        """The lanes of the chosen shape."""
        if self.page != SHAPES:
            return
        chosen = self.query_one(PageView).chosen
        if chosen is None:
            self.say("there is no shape yet")
        else:
            self._shape = chosen
            self.action_open(LANES)

    def action_turn(self, what: str) -> None:
        """Another metric or order of the map."""
        if self.page == LANES and not self.query_one(LanesView).turn(what):
            self.say("there are no lanes yet")

    def action_shape(self, by: int) -> None:
        """The lanes of the next shape, or of the one before."""
        if self.page != LANES or self.snapshot is None:
            return
        known = [row["signature"] for row in self.snapshot["shapes"]]
        if known:
            lanes = self.history.lanes_of(self._shape)
            shown = self._shape or (None if lanes is None else lanes["signature"])
            at = known.index(shown) + by if shown in known else 0
            self._shape = known[at % len(known)]
            self.draw()
        else:
            self.say("there is no shape yet")

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """What the palette offers: every command of this page and mode."""
        allowed = self._may_order is None
        for command in commands.offered(self.mode, self.page, orders=allowed):
            if not command.action.startswith("move"):
                shown = command.shown or command.keys

                async def run(action: str = command.action) -> None:
                    await self.run_action(action)

                yield SystemCommand(command.name, f"key {shown}", run)

    # -- orders -------------------------------------------------------------------------------

    @property
    def _may_order(self) -> str | None:
        """Why nothing may be ordered here; None where it may."""
        if self._replay is not None:
            return "this is a replay: there is no broker to order"
        if self._readonly:
            return "--readonly: nothing is ordered from here"
        if self._desk is None:
            return "there is no broker to order"
        if self._desk.role in LOOKING_ROLES:
            return f"not allowed: the role of this key is {self._desk.role}, which may only look"
        if self._denied is not None:
            return f"not allowed: {self._denied}"
        return "the broker is lost" if self.hearing.lost else None

    def action_order(self, kind: str) -> None:
        """Ask, and if it is confirmed, order."""
        refused = self._may_order
        if refused is not None or self.snapshot is None:
            self.say(refused or "nothing heard yet")
            return
        chosen = self.query_one(PageView).chosen if self.page != LANES else None
        if kind == orders.PAUSE:
            chosen = orders.model_of(self.page, self.snapshot, chosen)
        found = orders.orders(kind, self.snapshot, chosen)
        if not found:
            self.say(orders.NOTHING[kind])
        elif len(found) == 1:
            self._confirm(found[0])
        else:
            titles = [order.title for order in found]
            self.push_screen(
                Choose(titles), lambda at: None if at is None else self._confirm(found[at])
            )

    def _confirm(self, order: orders.Order) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(lambda: self._send(order), thread=True)
            else:
                self.say("nothing was ordered")

        self.push_screen(Ask(order.question), answered)

    def _send(self, order: orders.Order) -> None:
        """In a thread."""
        try:
            if self._desk is not None:
                self._desk.ask(order.op, **order.args)
            said = order.done
        except FabricError as error:
            said = f"refused: {error}"
            code, _, text = str(error).partition(": ")
            if code == NOT_ALLOWED:
                self._denied = text
        self.call_from_thread(self.say, said)

    # -- replay -------------------------------------------------------------------------------

    def action_step(self, by: int) -> None:
        """One snapshot on or back."""
        if self._replay is not None:
            self._replay.step(by)
            self.refresh_picture()

    def action_seek(self, seconds: float) -> None:
        """So far on or back."""
        if self._replay is not None:
            self._replay.seek(self._replay.position_s + seconds)
            self.refresh_picture()

    def action_event(self, by: int) -> None:
        """The next event, or the one before."""
        if self._replay is not None:
            if not self._replay.seek_event(forward=by > 0):
                self.say("no event that way")
            self.refresh_picture()

    def action_faster(self, by: int) -> None:
        """Another speed."""
        if self._replay is not None:
            self._replay.faster(by)
            self.draw()

    def action_go(self) -> None:
        """Ask for a time and go there."""
        if self._replay is not None:
            self.push_screen(When(), self._went)

    def _went(self, text: str | None) -> None:
        if self._replay is None or text is None:
            return
        wanted = parse(text, self._replay.position_s)
        if wanted is None:
            self.say(f"{text!r} is not a time: HH:MM or HH:MM:SS")
            return
        self._replay.seek(wanted)
        self.refresh_picture()
