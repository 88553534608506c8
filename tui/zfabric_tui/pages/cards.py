"""Cards: each worker's heartbeat, lease, work in hand, tokens, and what its prefix cache hits."""

from __future__ import annotations

from typing import Any

from zfabric.words import counted
from zfabric_tui.pages.page import Page, Row, View, row_of
from zfabric_tui.text import (
    BAD,
    DIM,
    HEAD,
    WARN,
    Column,
    Line,
    Span,
    amount,
    duration,
    line,
    percent,
    plain,
    ratio_bar,
    table,
)

COLUMNS = (
    Column("card", left=True),
    Column("state"),
    Column("beat"),
    Column("held"),
    Column("real/s"),
    Column("padded/s"),
    Column("fill"),
    Column("hits"),
    Column("10 s"),
    Column("ideal"),
    Column("by"),
    Column("items", spare=1),
    Column("model", left=True, spare=2),
    Column("lost", spare=3),
)
BAR = 20


def page(view: View) -> Page:
    """The workers, and all of the chosen one."""
    workers = sorted(view.snapshot["workers"], key=lambda w: w["name"])
    if not workers:
        return Page([line("no workers: zfabric worker --help", DIM)])
    live = sum(1 for w in workers if w["live"])
    head, rows = table(COLUMNS, [_row(view, w) for w in workers], view.width - 2)
    title = f"{live:,} of {counted(len(workers), 'card')} live; a beat is late over its lease"
    chosen = row_of(workers, view.chosen, "name")
    return Page(
        [line(title, DIM), line(f"  {head}", HEAD)],
        [Row(w["name"], line(text, _style(w))) for w, text in zip(workers, rows, strict=True)],
        [] if chosen is None else _detail(view, chosen),
    )


def _style(w: dict[str, Any]) -> str:
    if not w["live"]:
        return BAD if w["in_flight"] else DIM
    return WARN if w["heartbeat_age_s"] > w["lease_s"] / 2 else ""


def _row(view: View, w: dict[str, Any]) -> tuple[str, ...]:
    rate = view.rates.cards.get(w["name"]) if w["live"] else None
    return (
        plain(w["name"], 16),
        plain(w["state"] or "live", 9) if w["live"] else "gone",
        f"{w['heartbeat_age_s']:.1f} s",
        f"{w['in_flight']}/{w['window']}",
        amount(rate[1] if rate else None),
        amount(rate[2] if rate else None),
        percent(w["batch_fill_ratio"]),
        percent(w["cache_hit_ratio"]),
        percent(w["cache_hit_ratio_10s"]),
        percent(w["cache_hit_ratio_ideal"]),
        {"simulated": "sim", None: "n/a"}.get(w["measured_by"], plain(w["measured_by"] or "", 6)),
        f"{w['items_done']:,}",
        plain(w["model"], 18),
        f"{w['disconnects']:,}",
    )


def _detail(view: View, w: dict[str, Any]) -> list[Line]:
    contract, rate = w["contract"], view.rates.cards.get(w["name"])
    age, lease = w["heartbeat_age_s"], w["lease_s"]
    source = w["measured_by"] or "not measured: n/a"
    simulated = ", a simulated card" if w["simulated"] else ""
    lost = "never lost"
    if w["last_disconnect"] is not None:
        lost = (
            f"lost {counted(w['disconnects'], 'time')}, last {duration(w['last_disconnect_age_s'])}"
            f" ago: {plain(w['last_disconnect'], 50)}"
        )
    held = (
        f"holds {counted(w['in_flight'], 'batch')} of {w['window']} "
        f"({counted(w['in_flight_items'], 'item')}), done {counted(w['items_done'], 'item')} in "
        f"{counted(w['batches'], 'batch')}"
    )
    return [
        (
            Span(plain(w["name"], 30), HEAD),
            Span(f"  {plain(w['model'], 30)}, engine {plain(w['engine'], 20)}{simulated}"),
        ),
        (
            Span("heartbeat "),
            Span(ratio_bar(age / lease, BAR), WARN if age > lease / 2 else ""),
            Span(f" {age:.1f} s of the {lease:g} s that its lease lasts"),
        ),
        line(
            f"contract  {counted(contract['batch_items_max'], 'item')}, "
            f"{counted(contract['batch_tokens_max'], 'token')} a batch, input up to "
            f"{contract['input_tokens_max']:,}, {w['padding']}"
        ),
        line(f"work      {held}"),
        line(
            f"tokens/s  {amount(rate[1] if rate else None)} real, "
            f"{amount(rate[2] if rate else None)} padded, "
            f"{amount(rate[0] if rate else None)} items/s"
        ),
        line(
            f"cache     hits {percent(w['cache_hit_ratio'])} this run, "
            f"{percent(w['cache_hit_ratio_10s'])} last 10 s; the order allows "
            f"{percent(w['cache_hit_ratio_predicted'])}"
        ),
        line(
            f"          ideal {percent(w['cache_hit_ratio_ideal'])}; hits by: {plain(source, 30)}"
        ),
        line(f"away      {lost}"),
    ]
