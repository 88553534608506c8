"""Dialogs: a question before anything is changed, a choice of several, a time to go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from zfabric_tui.text import pad

BOX = """
{name} {{ align: center middle; }}
{name} Static, {name} Input {{ width: 70; max-width: 100%; height: auto; padding: 0 1; }}
{name} Static {{ border: ascii $foreground; }}
{name} Input {{ border: none; background: $surface; }}
"""
CHOICES_MAX = 9


class Ask(ModalScreen[bool]):
    """Yes or no. Nothing happens but by `y`."""

    DEFAULT_CSS = BOX.format(name="Ask")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,escape,q,ctrl+c,enter", "dismiss(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question, and how to answer it."""
        yield Static(f"\n{self._question}\n\n[y] yes   [n] no\n", markup=False)


class Choose(ModalScreen[int | None]):
    """One of several, by its number."""

    DEFAULT_CSS = BOX.format(name="Choose")
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(k + 1), f"choose({k})") for k in range(CHOICES_MAX)),
        Binding("n,escape,q,ctrl+c", "dismiss(None)", "none"),
    ]

    def __init__(self, titles: Sequence[str]) -> None:
        super().__init__()
        self._titles = titles

    def compose(self) -> ComposeResult:
        """The titles, and how to choose."""
        shown = [f"[{k + 1}] {title}" for k, title in enumerate(self._titles[:CHOICES_MAX])]
        more = len(self._titles) - CHOICES_MAX
        if more > 0:
            shown.append(f"and {more} more: choose a row of shapes or cards first")
        yield Static("\n" + "\n".join(shown) + "\n\n[n] none of them\n", markup=False)

    def action_choose(self, at: int) -> None:
        """This one, if it is there."""
        if at < len(self._titles):
            self.dismiss(at)


class When(ModalScreen[str | None]):
    """A time of day."""

    DEFAULT_CSS = BOX.format(name="When")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "dismiss(None)", "no")]

    def compose(self) -> ComposeResult:
        """What is asked, and where to answer."""
        yield Static(pad("\nGo to what time? HH:MM or HH:MM:SS; escape: stay\n", 68), markup=False)
        yield Input(placeholder="HH:MM:SS", max_length=8)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """That time."""
        self.dismiss(event.value)
