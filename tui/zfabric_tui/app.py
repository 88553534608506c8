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
from textual.widgets import Footer, Static

from zfabric_tui.feed import Feed, Snapshot
from zfabric_tui.model import STALE_S, alarms, duration, overview

SECTIONS = ("padding", "flow", "cards", "jobs")


class TopApp(App[None]):
    """One screen: health, padding, flow, cards, jobs."""

    TITLE = "zfabric"
    CSS = """
    #header { height: 1; background: $primary-background; text-style: bold; padding: 0 1; }
    #header.lost { background: $error; }
    VerticalScroll { padding: 0 1; }
    Static.section { height: auto; margin-bottom: 1; }
    .lost Static.section { text-style: dim; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", key_display="q"),
        Binding("space", "hold", "hold the picture"),
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

    def compose(self) -> ComposeResult:
        """Header, sections, footer."""
        yield Static("", id="header", markup=False)
        with VerticalScroll(id="body"):
            for name in SECTIONS:
                yield Static("", id=name, classes="section", markup=False)
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
        self.query_one("#body").set_class(lost, "lost")

    def _keep(self, snapshot: Snapshot) -> None:
        # A rate over at least a second: quarter seconds flicker.
        if self._before is None or snapshot["time"] - self._before["time"] > 2:
            self._before = self._snapshot or snapshot
        self._snapshot = snapshot
        for name, lines in overview(snapshot, self._before).items():
            self.query_one(f"#{name}", Static).update("\n".join(lines))

    def _draw_header(self, age_s: float | None, *, lost: bool) -> None:
        header = self.query_one("#header", Static)
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
