"""What a page is given and what it gives back.

A page has a head that stays, rows of which one may be chosen, and a foot about the chosen row. One
without rows is all head, and scrolls as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zfabric_tui.model import History, Rates, Snapshot
from zfabric_tui.text import Line


@dataclass(frozen=True, slots=True)
class View:
    """What the pages draw: one snapshot with what came before it, in so many cells."""

    snapshot: Snapshot
    history: History
    width: int
    height: int
    # the key of the chosen row of this page
    chosen: str | None = None
    # why these are not the values of now; None where they are
    old: str | None = None

    @property
    def rates(self) -> Rates:
        """Per second."""
        return self.history.rates


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be chosen: by what key it is known, and how it looks."""

    key: str
    line: Line


@dataclass(frozen=True, slots=True)
class Page:
    """The lines of a page."""

    head: Sequence[Line]
    rows: Sequence[Row] = field(default_factory=list)
    foot: Sequence[Line] = field(default_factory=list)


def row_of(rows: Sequence[dict[str, Any]], chosen: str | None, key: str) -> dict[str, Any] | None:
    """The chosen one of some maps, or the first; None where there is none."""
    for row in rows:
        if row[key] == chosen:
            return row
    return rows[0] if rows else None
