"""Waste: where the padding comes from, by what rule that is said, since when, what to do."""

from __future__ import annotations

import textwrap

from zfabric.explain import Explanation, explain
from zfabric_tui.pages.page import Page, View
from zfabric_tui.text import (
    BLANK,
    DIM,
    GOOD,
    HEAD,
    WARN,
    Column,
    Line,
    Span,
    duration,
    factor,
    line,
    percent,
    ratio_bar,
    table,
)

BAR = 14
LABEL = 10


def page(view: View) -> Page:
    """The verdict, then the ledger."""
    said = explain(view.snapshot)
    return Page([*_verdict(said, view), BLANK, *_ledger(said, view.width)])


def _wrapped(label: str, text: str, width: int, style: str = "") -> list[Line]:
    lines = textwrap.wrap(text, max(20, width - LABEL)) or [""]
    first, *rest = lines
    return [
        (Span(label.ljust(LABEL), DIM), Span(first, style)),
        *((Span(" " * LABEL), Span(more, style)) for more in rest),
    ]


def _verdict(said: Explanation, view: View) -> list[Line]:
    now = view.snapshot["time"]
    ago = "too soon to say" if said.since is None else f"for {duration(now - said.since)}"
    style = GOOD if said.verdict == "healthy" else WARN
    numbers = said.numbers
    lead = numbers["largest_part"]
    figures = (
        f"waste {percent(said.waste_ratio)} (healthy up to "
        f"{percent(_number(numbers['healthy_waste_max']))}); largest cause "
        f"{lead or 'none'}, {percent(_number(numbers['largest_part_share']))} of the padding; as "
        f"items came, {percent(_number(numbers['lane_pressure_ratio_run']))} of "
        f"{numbers['lanes_limit']:,} lanes were in use (now "
        f"{percent(_number(numbers['lane_pressure_ratio']))}) and the threshold was "
        f"{percent(_number(numbers['waste_threshold_ratio_run']))}"
    )
    lines = [
        (Span("verdict".ljust(LABEL), DIM), Span(said.verdict, style), Span(f"  {ago}", DIM)),
        *_wrapped("rule", said.rule, view.width),
        *_wrapped("numbers", figures, view.width),
        *_wrapped("do", said.advice, view.width),
        *_wrapped("run", said.command, view.width, HEAD),
        (
            Span("beside".ljust(LABEL), DIM),
            Span(f"fill {percent(said.batch_fill_ratio)}  cost {factor(said.cost_ratio)}"),
            Span("   waste alone can be gamed", DIM),
        ),
    ]
    if said.warning is not None:
        lines += _wrapped("!", said.warning, view.width, WARN)
    return lines


def _number(value: float | int | str | None) -> float | None:
    return value if isinstance(value, int | float) else None


def _ledger(said: Explanation, width: int) -> list[Line]:
    columns = (
        Column("cause", left=True),
        Column("tokens"),
        Column("share"),
        Column("", left=True),
        Column("", left=True, spare=1),
    )
    ordered = sorted(said.parts, key=lambda part: -part.tokens)
    rows = [
        (
            part.cause,
            f"{part.tokens:,}",
            percent(part.share),
            ratio_bar(part.share, BAR),
            part.meaning,
        )
        for part in ordered
    ]
    padding = said.padded_tokens - said.real_tokens
    rows.append(("padding", f"{padding:,}", "", "", f"{said.padded_tokens:,} padded - real"))
    head, texts = table(columns, rows, width)
    return [line(head, HEAD), *map(line, texts)]
