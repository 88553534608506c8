"""Shapes: what waits of each, what its padding costs, which is being drained."""

from __future__ import annotations

from typing import Any

from zfabric.words import counted
from zfabric_tui.pages.page import Page, Row, View, row_of
from zfabric_tui.text import (
    DIM,
    HEAD,
    Column,
    amount,
    duration,
    line,
    percent,
    plain,
    table,
)

COLUMNS = (
    Column("", left=True),
    Column("signature", left=True),
    Column("model", left=True),
    Column("ready"),
    Column("tokens"),
    Column("pending"),
    Column("done", spare=3),
    Column("waste"),
    Column("lanes"),
    Column("press.", spare=2),
    Column("oldest"),
    Column("prefix", spare=4),
    Column("batches", spare=5),
)


def page(view: View) -> Page:
    """The shapes with the most to do, the current one first."""
    s = view.snapshot
    shapes = s["shapes"]
    title = (
        f"{counted(s['shapes_active'], 'shape')} with work, {len(shapes)} shown; "
        f"{counted(s['shape_switches_total'], 'switch')}, "
        f"{s['forced_switches_total']:,} forced by max wait"
    )
    if not shapes:
        return Page([line("no shapes yet: submit work, or zfabric run-batch --help", DIM)])
    head, rows = table(COLUMNS, [_row(shape) for shape in shapes], view.width - 2)
    chosen = row_of(shapes, view.chosen, "signature")
    foot = []
    if chosen is not None:
        foot = [
            line(
                f"{chosen['signature']}  {counted(chosen['components'], 'component')}, prefix "
                f"{amount(chosen['prefix_tokens'], 'tokens')}, accepted "
                f"{counted(chosen['accepted_items'], 'item')}"
            ),
            line("enter: its lanes", DIM),
        ]
    return Page(
        [line(title, DIM), line(f"  {head}", HEAD)],
        [Row(shape["signature"], line(text)) for shape, text in zip(shapes, rows, strict=True)],
        foot,
    )


def _row(shape: dict[str, Any]) -> tuple[str, ...]:
    return (
        "*" if shape["current"] else "",
        shape["signature"],
        plain(shape["model"], 18),
        f"{shape['ready_items']:,}",
        amount(shape["ready_tokens"]),
        f"{shape['pending_items']:,}",
        f"{shape['completed_items']:,}",
        percent(shape["waste_ratio"]),
        "-" if shape["lanes_active"] is None else f"{shape['lanes_active']:,}",
        percent(shape["lane_pressure_ratio"]),
        duration(shape["oldest_item_age_s"]),
        amount(shape["prefix_tokens"]),
        f"{shape['batches']:,}",
    )
