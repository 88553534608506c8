"""What a screen shows: two snapshots become rates, ages and plain lines of text.

Pure: no clock, no terminal, no socket. Rates are per second of the broker's own time, so that a
dashboard that was late shows no burst. Text that came from peers is made printable here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Snapshot = dict[str, Any]
# A snapshot older than this many of its own intervals is from a broker that has gone quiet.
STALE_S = 3.0
# Widths with which the widest row fits in 80 columns.
CARD_CHARS, JOB_CHARS = 13, 34
JOBS_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between two snapshots; None before there are two."""

    items: float | None = None
    real_tokens: float | None = None
    padded_tokens: float | None = None


def rates(before: Snapshot | None, after: Snapshot) -> Rates:
    """The rates between two snapshots of one broker; none across a restart."""
    if before is None or before["boot_id"] != after["boot_id"]:
        return Rates()
    seconds = after["time"] - before["time"]
    if seconds <= 0:
        return Rates()
    return Rates(
        items=(after["completed_items"] - before["completed_items"]) / seconds,
        real_tokens=(after["real_tokens"] - before["real_tokens"]) / seconds,
        padded_tokens=(after["padded_tokens"] - before["padded_tokens"]) / seconds,
    )


def eta_s(job: dict[str, Any], items_per_s: float | None) -> float | None:
    """Seconds until a job that said how much it will submit is done, at this rate."""
    if not items_per_s or job["expected_items"] is None:
        return None
    left: int = job["expected_items"] - ended_items(job)
    return max(0.0, left / items_per_s)


def ended_items(job: dict[str, Any]) -> int:
    """Items of a job that nothing more will come of; completed ones may have failed."""
    ended: int = job["completed_items"] + job["dead_items"] + job["refused_items"]
    return ended


def is_over(job: dict[str, Any]) -> bool:
    """Whether a job is done: all that it said, or all that it left here when it went away."""
    expected, ended = job["expected_items"], ended_items(job)
    if expected is not None and ended >= expected:
        return True
    return not job["live"] and ended >= job["accepted_items"] + job["refused_items"]


def plain(text: str, width: int) -> str:
    """`text` in one line without anything that a terminal would obey, its middle cut to `width`.

    Names differ at their ends.
    """
    clean = "".join(c if c.isprintable() else " " if c.isspace() else "·" for c in text)
    if len(clean) <= width:
        return clean
    left = width // 2
    return f"{clean[:left]}…{clean[left + 1 - width :]}"


def counted(number: int, noun: str) -> str:
    """1 item, 2,000 batches."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def amount(value: float | None, unit: str = "") -> str:
    """1234567 as "1.23 M"; n/a for what is not known."""
    if value is None:
        return "n/a"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if prefix == "k" else size
            return f"{value / scale:.2f} {prefix}{unit}"
    return f"{value:,.0f}{' ' + unit if unit else ''}"


def percent(value: float | None) -> str:
    """0.1234 as "12.3%"; n/a for what is not measured."""
    return "n/a" if value is None else f"{100 * value:.1f}%"


def duration(seconds: float | None) -> str:
    """3700 as "1 h 01 min"; - for none."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def alarms(snapshot: Snapshot) -> list[str]:
    """What is wrong, worst first; empty when the fabric is healthy."""
    found = []
    if snapshot["residual_items"] or snapshot["residual_tokens"]:
        residual = counted(snapshot["residual_items"], "item")
        found.append(f"RESIDUAL {residual}: the books do not balance")
    for model in snapshot["models"]:
        if model["paused"]:
            found.append(f"{plain(model['model'], 30)} is paused")
        elif model["ready_items"] and not model["workers"]:
            found.append(f"{plain(model['model'], 30)} has work and no worker")
    if snapshot["dead_records"]:
        found.append(f"{counted(snapshot['dead_records'], 'dead item')}: zfabric dead ls")
    found += [
        f"{plain(worker['name'], 30)} is gone with {counted(worker['in_flight'], 'batch')}"
        for worker in snapshot["workers"]
        if worker["in_flight"] and not worker["live"]
    ]
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned text: the first column to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(row[k]) for row in lines) for k in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    ]


def overview(snapshot: Snapshot, before: Snapshot | None) -> dict[str, list[str]]:
    """The overview's sections, as lines: padding, flow, cards, jobs."""
    rate = rates(before, snapshot)
    return {
        "padding": _padding(snapshot, rate),
        "flow": _flow(snapshot),
        "cards": _cards(snapshot),
        "jobs": _jobs(snapshot, rate),
    }


def _padding(s: Snapshot, rate: Rates) -> list[str]:
    return [
        f"waste {percent(s['waste_ratio'])}   fill {percent(s['batch_fill_ratio'])}   "
        f"padding: {s['waste_verdict']}",
        f"real {amount(rate.real_tokens, 'tok/s')}   padded {amount(rate.padded_tokens, 'tok/s')}",
        f"lanes {s['lanes_active']:,}   pressure {percent(s['lane_pressure_ratio'])}   "
        f"shape switches {s['shape_switches_total']:,}",
    ]


def _flow(s: Snapshot) -> list[str]:
    names = ("accepted", "completed", "ready", "pending", "dead", "residual")
    rows = [(name, f"{s[f'{name}_items']:,}", amount(s[f"{name}_tokens"], "tok")) for name in names]
    return table(("", "items", "tokens"), rows)


def _cards(s: Snapshot) -> list[str]:
    rows = [
        (
            plain(w["name"], CARD_CHARS),
            plain(w["state"] or "live", CARD_CHARS) if w["live"] else "gone",
            f"{w['in_flight']}/{w['window']}",
            f"{w['items_done']:,}",
            percent(w["batch_fill_ratio"]),
            percent(w["cache_hit_ratio"]),
            w["measured_by"] or "n/a",
            f"{w['heartbeat_age_s']:.1f} s",
        )
        for w in s["workers"]
    ]
    head = ("card", "state", "held", "done", "fill", "hits", "by", "beat")
    return table(head, rows) if rows else ["no workers: zfabric worker --help"]


def _jobs(s: Snapshot, rate: Rates) -> list[str]:
    shown = [job for job in s["jobs"] if job["accepted_items"] or job["live"]][:JOBS_SHOWN]
    share = rate.items if sum(not is_over(job) for job in shown) == 1 else None
    rows = [_job_row(job, share) for job in shown]
    return table(("job", "done", "of", "failed", "ETA"), rows) if rows else ["no jobs yet"]


def _job_row(job: dict[str, Any], items_per_s: float | None) -> tuple[str, ...]:
    ended, expected, over = ended_items(job), job["expected_items"], is_over(job)
    # A job that ended early, or was one part of several, is no longer on its way to that number.
    known = expected is not None and not (over and ended < expected)
    return (
        plain(job["name"], JOB_CHARS),
        f"{ended:,}",
        f"{expected:,}" if known else "-",
        f"{_not_done(job):,}",
        "ended" if over else duration(eta_s(job, items_per_s)),
    )


def _not_done(job: dict[str, Any]) -> int:
    """Items of a job that ended without a completion."""
    ends = ("failed_items", "cancelled_items", "dead_items", "refused_items")
    return sum(job[end] for end in ends)
