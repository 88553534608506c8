"""`zfabric top`: the overview of a running fabric, drawn from one feed.

Draws and nothing else: what to show is the model's, where it comes from the feed's. A lost broker
is a DISCONNECTED header over the last values, never an exit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from zfabric_tui.feed import Feed, Snapshot
from zfabric_tui.model import STALE_S, alarms, duration, overview

SECTIONS = ("padding", "flow", "cards", "jobs")
HELP = """\
waste    padding's part of all tokens that the cards ran
fill     items in a batch, of those that would have fitted
padding  where most of it comes from: healthy, capacity (no lane was
         free), tolerance, growth (a lane's target rose after items
         came), short prompts, one noisy shape, strict packing,
         neighbours or arrival order
flow     accepted = completed + dead + ready + pending + residual, and
         residual is 0, or the books do not balance
cards    held: batches on the card, of its window; hits: of its prefix
         cache, and who measured them; beat: since it was last heard
jobs     done: every end; failed: those of them that are failed,
         cancelled, refused or dead

space    hold the picture, and go on
up down  scroll, where the picture is longer than the terminal
q        end; the fabric goes on"""


class Body(VerticalScroll):
    """The sections; the footer says that they scroll where they do."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "scroll_down", "scroll", key_display="↑↓"),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """No scrolling where all is in sight."""
        return action != "scroll_down" or self.max_scroll_y > 0

    def watch_virtual_size(self) -> None:
        """What is in sight may have changed."""
        self.refresh_bindings()


class Help(ModalScreen[None]):
    """What the words of the picture mean."""

    CSS = """
    Help { align: center middle; }
    Help Static { width: 76; height: auto; border: round $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "back to the picture"),
        Binding("q,ctrl+c,enter,space,question_mark", "dismiss", show=False),
    ]

    def compose(self) -> ComposeResult:
        """The text."""
        yield Static(HELP, markup=False)
        yield Footer()


class TopApp(App[None]):
    """One screen: health, padding, flow, cards, jobs."""

    TITLE = "zfabric"
    CSS = """
    #header { height: 1; background: $primary-background; text-style: bold; padding: 0 1; }
    #header.lost { background: $error; }
    Body { padding: 0 1; }
    Static.section { height: auto; margin-bottom: 1; }
    .lost Static.section { text-style: dim; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", key_display="q"),
        Binding("space", "hold", "hold the picture"),
        Binding("question_mark", "explain", "help", key_display="?"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        feed: Feed,
        address: str,
        *,
        hz: float = 4.0,
        ends: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()
        self._ends = ends
        self._feed = feed
        self._address = address
        self._interval_s = 1 / hz
        self._snapshot: Snapshot | None = None
        self._before: Snapshot | None = None
        self._seen_s: float | None = None
        self._held = False
        self._header = Static("", id="header", markup=False)
        self._sections = {
            name: Static("", id=name, classes="section", markup=False) for name in SECTIONS
        }
        self._body = Body(*self._sections.values(), id="body")

    def compose(self) -> ComposeResult:
        """Header, sections, footer."""
        yield self._header
        yield self._body
        yield Footer()

    def on_mount(self) -> None:
        """Start drawing."""
        self.set_interval(self._interval_s, self.refresh_picture)
        self.refresh_picture()

    def on_unmount(self) -> None:
        """The feed ends with the screen."""
        self._feed.close()

    def action_hold(self) -> None:
        """Stop or go on drawing new snapshots."""
        self._held = not self._held

    def action_explain(self) -> None:
        """Say what the words mean."""
        self.push_screen(Help())

    def refresh_picture(self) -> None:
        """Take what the feed has and draw it; leave when what was watched has ended."""
        if self._ends is not None and self._ends():
            self.exit()
        now = time.monotonic()
        snapshot = self._feed.poll(0).snapshot
        if snapshot is not None:
            self._seen_s = now
            if not self._held:
                self._keep(snapshot)
        age_s = None if self._seen_s is None else now - self._seen_s
        lost = age_s is None or age_s > STALE_S
        self._draw_header(age_s, lost=lost)
        self._body.set_class(lost, "lost")

    def _keep(self, snapshot: Snapshot) -> None:
        # A rate over at least a second: quarter seconds flicker.
        if self._before is None or snapshot["time"] - self._before["time"] > 2:
            self._before = self._snapshot or snapshot
        self._snapshot = snapshot
        for name, lines in overview(snapshot, self._before).items():
            self._sections[name].update("\n".join(lines))

    def _draw_header(self, age_s: float | None, *, lost: bool) -> None:
        header = self._header
        header.set_class(lost, "lost")
        if age_s is None:
            header.update(f"DISCONNECTED  {self._address}: nothing heard yet")
        elif lost:
            header.update(f"DISCONNECTED  {self._address}: last heard {duration(age_s)} ago")
        elif self._snapshot is not None:
            wrong = alarms(self._snapshot)
            state = "; ".join(wrong) if wrong else "healthy"
            held = "  HELD" if self._held else ""
            header.update(f"{self._address}  {age_s:.1f} s old{held}  {state}")
