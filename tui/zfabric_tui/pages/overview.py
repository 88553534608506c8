"""The overview: in two seconds whether the fabric is well, in ten what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zfabric.words import counted
from zfabric_tui.model import Alarm, alarms, ended_items, eta_s, is_over, not_done, total_items
from zfabric_tui.pages.page import Page, View
from zfabric_tui.text import (
    BAD,
    BLANK,
    DIM,
    GOOD,
    HEAD,
    Column,
    Line,
    Span,
    amount,
    duration,
    factor,
    line,
    percent,
    plain,
    round_up,
    table,
    trend,
)

# Lines of everything but cards and jobs, which share what is left.
FIXED_LINES = 14
ROWS_MIN = 2
NAME_CHARS, CARD_CHARS = 34, 16
LABEL = 9


def page(view: View) -> Page:
    """Alarms, throughput, padding, flow, cards, jobs."""
    blocks = [_state(view), _pace(view), _padding(view), _cards(view), _jobs(view)]
    lines: list[Line] = []
    for block in blocks:
        lines += [*block, BLANK]
    return Page(lines[:-1])


def _state(view: View) -> list[Line]:
    found = alarms(view.snapshot)
    if view.old is not None:
        return [line(f"! {view.old}", BAD), *_listed(found)]
    return _listed(found) or [line("HEALTHY  nothing asks for you", GOOD)]


def _listed(found: Sequence[Alarm]) -> list[Line]:
    return [
        (Span(f"! {alarm.text}", alarm.level), Span(f"   {alarm.hint}", DIM)) for alarm in found[:5]
    ] + ([line(f"  and {len(found) - 5} more", DIM)] if len(found) > 5 else [])


def _rows_shown(view: View) -> int:
    """Rows for the cards, and as many for the jobs."""
    return max(ROWS_MIN, (view.height - FIXED_LINES) // 2)


def _label(text: str) -> Span:
    return Span(text.ljust(LABEL), DIM)


def _pace(view: View) -> list[Line]:
    rate, snapshot = view.rates, view.snapshot
    seconds = min(120, max(20, view.width - 48))
    values = view.history.trend(seconds)
    top = round_up(max([v for v in values if v is not None], default=0.0))
    drawn = trend(values, top)
    scale = f"  {seconds} s, 0 to {amount(top)}"
    return [
        (
            _label("items/s"),
            Span(amount(rate.items).ljust(9)),
            Span(drawn),
            Span(scale, DIM),
        ),
        (
            _label("tokens/s"),
            Span(f"{amount(rate.real_tokens)} real, {amount(rate.padded_tokens)} padded"),
            Span(f"   up {duration(snapshot['uptime_s'])}", DIM),
        ),
    ]


def _padding(view: View) -> list[Line]:
    s = view.snapshot
    ratios = f"waste {percent(s['waste_ratio'])}  fill {percent(s['batch_fill_ratio'])}  "
    lanes = f"{s['lanes_active']:,} in use, {s['lanes_limit']:,} a shape  "
    pressure = f"pressure {percent(s['lane_pressure_ratio'])}"
    books = " + ".join(
        f"{name} {s[f'{name}_items']:,}" for name in ("completed", "dead", "ready", "pending")
    )
    set_aside = s["quarantined_items"]
    books += f" + set aside {set_aside:,}" if set_aside else ""
    residual = s["residual_items"]
    return [
        (_label("padding"), Span(f"{ratios}cost {factor(s['cost_ratio'])}  "), _said(view)),
        (_label("lanes"), Span(lanes + pressure)),
        (_label("items"), Span(f"accepted {s['accepted_items']:,} = {books}")),
        (
            _label(""),
            Span(f"+ residual {residual:,}", "bad" if residual else ""),
            Span(f"   oldest waits {duration(s['oldest_item_age_s'])}", DIM),
        ),
    ]


def _said(view: View) -> Span:
    verdict, since = view.snapshot["waste_verdict"], view.snapshot["waste_verdict_since"]
    ago = "" if since is None else f" for {duration(view.snapshot['time'] - since)}"
    return Span(f"{verdict}{ago}", "" if verdict == "healthy" else "warn")


def _cards(view: View) -> list[Line]:
    workers = sorted(view.snapshot["workers"], key=lambda w: w["name"])
    if not workers:
        return [line("no workers: zfabric worker --help", DIM)]
    columns = (
        Column("card", left=True),
        Column("state"),
        Column("held"),
        Column("tokens/s"),
        Column("fill"),
        Column("hits"),
        Column("by"),
        Column("beat"),
    )
    shown = _rows_shown(view)
    head, rows = table(columns, [_card(view, w) for w in workers[:shown]], view.width)
    more = len(workers) - shown
    return [
        line(head, HEAD),
        *map(line, rows),
        *([line(f"and {counted(more, 'card')} more: 4", DIM)] if more > 0 else []),
    ]


def _card(view: View, w: dict[str, Any]) -> tuple[str, ...]:
    rate = view.rates.cards.get(w["name"])
    return (
        plain(w["name"], CARD_CHARS),
        plain(w["state"] or "live", 9) if w["live"] else "gone",
        f"{w['in_flight']}/{w['window']}",
        amount(rate[1] if rate else None),
        percent(w["batch_fill_ratio"]),
        percent(w["cache_hit_ratio"]),
        plain(w["measured_by"] or "n/a", NAME_CHARS),
        f"{w['heartbeat_age_s']:.1f} s",
    )


def _jobs(view: View) -> list[Line]:
    known = [job for job in view.snapshot["jobs"] if job["accepted_items"] or job["live"]]
    if not known:
        return [line("no jobs yet: zfabric run-batch --help", DIM)]
    columns = (
        Column("job", left=True),
        Column("done"),
        Column("of"),
        Column("%", spare=1),
        Column("items/s"),
        Column("failed"),
        Column("ETA"),
    )
    shown = _rows_shown(view)
    head, rows = table(columns, [_job(view, job) for job in known[:shown]], view.width)
    more = len(known) - shown
    return [
        line(head, HEAD),
        *map(line, rows),
        *([line(f"and {more:,} more: zfabric producers ls", DIM)] if more > 0 else []),
    ]


def _job(view: View, job: dict[str, Any]) -> tuple[str, ...]:
    ended, expected, over = ended_items(job), total_items(job), is_over(job)
    # A job that ended early, or was one part of several, is no longer on its way to that number.
    known = expected is not None and not (over and ended < expected)
    rate = None if over else view.rates.jobs.get(job["name"])
    return (
        plain(job["name"], NAME_CHARS),
        f"{ended:,}",
        f"{expected:,}" if known else "-",
        percent(ended / expected) if known and expected else "-",
        "-" if over else amount(rate),
        f"{not_done(job):,}",
        "ended" if over else duration(eta_s(job, rate)),
    )
