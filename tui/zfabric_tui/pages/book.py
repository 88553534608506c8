"""The book: every page that is made of lines, by its name. Lanes have a widget of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zfabric_tui.commands import CARDS, EVENTS, FLOW, HELP, OVERVIEW, SHAPES, WASTE
from zfabric_tui.pages import cards, events, flow, overview, shapes, waste
from zfabric_tui.pages import help as help_page
from zfabric_tui.pages.page import Page, View

BOOK: Mapping[str, Callable[[View], Page]] = {
    OVERVIEW: overview.page,
    SHAPES: shapes.page,
    CARDS: cards.page,
    FLOW: flow.page,
    EVENTS: events.page,
    WASTE: waste.page,
    HELP: lambda view: help_page.page(),
}
