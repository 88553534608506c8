"""Orders: what an operator may tell the broker from the dashboard, and how it is asked about.

Pure: which orders there are follows from a snapshot and the chosen row. Sending one is for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zfabric.words import counted
from zfabric_tui.text import plain

PAUSE, DRAIN, REQUEUE, FORGET = "pause", "drain", "requeue", "forget"
NOTHING = {
    PAUSE: "there is no model yet",
    DRAIN: "there is no broker",
    REQUEUE: "nothing is dead",
    FORGET: "no worker is gone",
}


@dataclass(frozen=True, slots=True)
class Order:
    """A request to the broker: what is asked of the person first, and what is said when it is done.

    `title` is how it stands in a list of several.
    """

    title: str
    question: str
    done: str
    op: str
    args: dict[str, Any] = field(default_factory=dict)


def orders(kind: str, snapshot: dict[str, Any], chosen: str | None) -> Sequence[Order]:
    """The orders of a kind that make sense now; one alone where a row says which."""
    found = _MAKERS[kind](snapshot)
    named = [order for order in found if chosen is not None and chosen in order.args.values()]
    return named or found


def model_of(page: str, snapshot: dict[str, Any], chosen: str | None) -> str | None:
    """The model of the chosen row of a page."""
    rows, key = {"shapes": ("shapes", "signature"), "cards": ("workers", "name")}.get(
        page, ("", "")
    )
    models = [row["model"] for row in snapshot.get(rows, ()) if row[key] == chosen]
    return models[0] if models else None


def _pause(snapshot: dict[str, Any]) -> list[Order]:
    return [_of_model(row) for row in snapshot["models"]]


def _of_model(row: dict[str, Any]) -> Order:
    name = plain(row["model"], 40)
    if row["paused"]:
        return Order(
            f"resume {name}",
            f"Let the batches of {name} go on?",
            f"{name} goes on",
            "resume",
            {"model": row["model"]},
        )
    running = counted(row["pending_items"], "item")
    return Order(
        f"pause {name}",
        f"Hand out no more batches of {name}? What is running ({running}) goes on.",
        f"{name} is paused",
        "pause",
        {"model": row["model"]},
    )


def _drain(snapshot: dict[str, Any]) -> list[Order]:
    waiting = counted(snapshot["ready_items"], "item")
    if not snapshot["ready_items"]:
        left = "Nothing else waits."
    elif snapshot["durability"] == "memory":
        left = f"{waiting} would be left and lost: this broker keeps everything in memory."
    else:
        left = f"{waiting} would be left, kept for the next start."
    return [
        Order(
            "drain the broker",
            f"End the broker? It finishes what workers hold. {left}",
            "the broker drains",
            "drain",
        )
    ]


def _requeue(snapshot: dict[str, Any]) -> list[Order]:
    if not snapshot["dead_records"]:
        return []
    dead = counted(snapshot["dead_records"], "dead item")
    return [
        Order(
            "requeue dead items",
            f"Run {dead} once more? What broke an engine may break it again.",
            f"{dead} to run once more",
            "dead.requeue",
            {"all": True},
        )
    ]


def _forget(snapshot: dict[str, Any]) -> list[Order]:
    return [
        Order(
            f"forget {plain(row['name'], 40)}",
            f"Forget {plain(row['name'], 40)}, which is gone? Its figures go with it.",
            f"{plain(row['name'], 40)} is forgotten",
            "workers.forget",
            {"name": row["name"]},
        )
        for row in snapshot["workers"]
        if not row["live"]
    ]


_MAKERS = {PAUSE: _pause, DRAIN: _drain, REQUEUE: _requeue, FORGET: _forget}
