"""Flow: where everything accepted is, what it may use, and how long it waits.

The only alarm of the books is the residual: everything else may be as large as it likes.
"""

from __future__ import annotations

from zfabric.words import counted
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
    line,
    milliseconds,
    percent,
    plain,
    ratio_bar,
    table,
)

ROWS = (
    ("accepted", "accepted"),
    ("= completed", "completed"),
    ("+ dead", "dead"),
    ("+ set aside", "quarantined"),
    ("+ ready", "ready"),
    ("+ pending", "pending"),
)
BAR = 24
OLDEST_SHOWN = 12
RECOVERED = (
    ("entries", "entries"),
    ("damaged records", "damaged_records"),
    ("files set aside", "quarantined_files"),
    ("torn bytes", "torn_bytes"),
    ("healed words", "healed"),
)


def page(view: View) -> Page:
    """The books, the limits, the disk, the oldest of each shape."""
    blocks = [_books(view), _limits(view), _disk(view), _oldest(view)]
    lines: list[Line] = []
    for block in blocks:
        lines += [*block, BLANK]
    return Page(lines[:-1])


def _books(view: View) -> list[Line]:
    s = view.snapshot
    columns = (Column("", left=True), Column("items"), Column("tokens"))
    rows = [(name, f"{s[f'{k}_items']:,}", f"{s[f'{k}_tokens']:,}") for name, k in ROWS]
    rows.append(("+ residual", f"{s['residual_items']:,}", f"{s['residual_tokens']:,}"))
    head, texts = table(columns, rows, view.width)
    wrong = bool(s["residual_items"] or s["residual_tokens"])
    said = "! THE BOOKS DO NOT BALANCE: report it" if wrong else "the books balance"
    *known, residual = texts
    return [
        line(head, HEAD),
        *map(line, known),
        (Span(residual, BAD if wrong else ""), Span(f"   {said}", BAD if wrong else GOOD)),
        line(
            f"of the completed: failed {s['failed_items']:,}, cancelled {s['cancelled_items']:,};  "
            f"refused {s['refused_items']:,}",
            DIM,
        ),
        line(
            f"sent again {s['redeliveries_total']:,}, duplicates {s['duplicates_total']:,}, "
            f"results unread {s['outbox_items']:,}",
            DIM,
        ),
    ]


def _use(name: str, used: float | None, limit: float | None) -> Line:
    if used is None:
        return (Span(name.ljust(8)), Span("n/a: everything is in memory", DIM))
    if not limit:
        return (Span(name.ljust(8)), Span(f"{amount(used, 'B')}, no limit set"))
    share = used / limit
    return (
        Span(name.ljust(8)),
        Span(ratio_bar(share, BAR), BAD if share > 0.9 else ""),
        Span(f" {percent(share)}  {amount(used, 'B')} of {amount(limit, 'B')}"),
    )


def _limits(view: View) -> list[Line]:
    s, storage = view.snapshot, view.snapshot["storage"]
    lines = [
        _use("memory", s["held_bytes"], s["held_bytes_limit"]),
        _use("disk", storage["disk_bytes"], storage["disk_bytes_limit"]),
    ]
    reserve = storage["disk_reserve_bytes"]
    if reserve:
        lines.append(line(f"        and a reserve of {amount(reserve, 'B')} for results", DIM))
    if storage["full"] is not None:
        for_s = duration(storage["full_for_s"])
        full = f"! NOTHING IS TAKEN for {for_s}: {plain(storage['full'], view.width - 30)}"
        lines.append(line(full, BAD))
    return lines


def _disk(view: View) -> list[Line]:
    s = view.snapshot
    lines = [
        line(
            f"durability {s['durability']}; sync {milliseconds(s.get('sync_s'))}, longest "
            f"{milliseconds(s.get('sync_max_s'))}, {counted(s.get('syncs_total', 0), 'sync')}"
        ),
        line(
            f"handing out: longest slice {milliseconds(s.get('dispatch_slice_max_s'))}, "
            f"{s['dispatch_yields_total']:,} cut short"
        ),
    ]
    if s["recovery"] is not None:
        found = ", ".join(f"{name} {s['recovery'][key]:,}" for name, key in RECOVERED)
        seconds = s["recovery"]["seconds"]
        lines += [line(f"the start took {seconds:.2f} s to recover:"), line(f"  {found}")]
    return lines


def _oldest(view: View) -> list[Line]:
    waiting = [row for row in view.snapshot["shapes"] if row["oldest_item_age_s"] is not None]
    waiting.sort(key=lambda row: -row["oldest_item_age_s"])
    bound = view.snapshot["config"]["max_wait_s"]
    if not waiting:
        return [line("nothing waits", DIM)]
    columns = (
        Column("oldest of", left=True),
        Column("model", left=True),
        Column("waits"),
        Column("ready"),
    )
    rows = [
        (
            row["signature"],
            plain(row["model"], 24),
            duration(row["oldest_item_age_s"]),
            counted(row["ready_items"], "item"),
        )
        for row in waiting[:OLDEST_SHOWN]
    ]
    head, texts = table(columns, rows, view.width)
    limit = f"{bound:g} s" if bound else "without limit"
    return [line(f"longest that anything is passed over: {limit}", DIM), line(head, HEAD),
            *map(line, texts)]  # fmt: skip
