"""`zfabric status`, `shapes`, `lanes`, `workers`, `events`: what a broker says of itself."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping
from typing import Any

from zfabric.cli import common
from zfabric.cli.common import duration, percent, size
from zfabric.cli.parser import count
from zfabric.words import counted

Map = Mapping[str, Any]

# `events --follow` asks this often; the broker keeps far more events than come in between.
FOLLOW_S = 0.5
LANES_SHOWN = 50
JSON_LINES = "print JSON, one object a line"


def add(commands: common.Commands) -> None:
    """Add the commands."""
    for name, run, summary, text, example in (
        (
            "status",
            run_status,
            "the whole fabric at a glance",
            "Show the broker's books: what was accepted, what became of it, what padding and\n"
            "cache misses cost. A narrow terminal gets fewer columns; --json has every figure,\n"
            "unrounded.",
            "zfabric status --json | jq .residual_items",
        ),
        (
            "shapes",
            run_shapes,
            "prompt shapes: what waits of each",
            "List the shapes (prefixes that items share), the one being drained first, then those\n"
            "with the most waiting tokens.",
            "zfabric shapes --top 20",
        ),
        (
            "lanes",
            run_lanes,
            "length lanes of one shape",
            "List the lanes of one shape: the current one, or the one whose signature starts with\n"
            "--shape.",
            "zfabric lanes --model tiny --shape 3f2a",
        ),
        (
            "workers",
            run_workers,
            "workers, what they hold and what they hit",
            "List the workers: contract, what they hold, fill of their batches, and prefix-cache\n"
            "hits (n/a where the engine does not measure them; simulated cards are marked).",
            "zfabric workers",
        ),
        (
            "events",
            run_events,
            "what has happened lately",
            "Print the broker's latest events, and with --follow those to come. With --json, one\n"
            "object a line.",
            "zfabric events --follow",
        ),
    ):
        parser = common.add_command(commands, name, run, summary, text, example)
        common.add_json(parser, JSON_LINES if name == "events" else "print JSON")
        common.add_broker(parser)
        if name == "shapes":
            parser.add_argument("--top", type=count, metavar="N", help="at most N shapes")
        elif name == "lanes":
            parser.add_argument("--model", metavar="NAME", help="of this model")
            parser.add_argument("--shape", metavar="PREFIX", help="start of its signature")
        elif name == "events":
            parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C")


def run_status(args: argparse.Namespace) -> int:
    """Print the status."""
    status = common.ask(args, "status")
    if args.json:
        common.show_json(status)
    else:
        common.show(status_text(status))
    return 0


def status_text(status: Map) -> str:
    """The status for people."""
    flow = [
        [name, *(status[f"{key}_{unit}"] for unit in ("items", "tokens"))]
        for name, key in (
            ("accepted", "accepted"),
            ("completed", "completed"),
            ("ready", "ready"),
            ("pending", "pending"),
            ("dead", "dead"),
            ("quarantined", "quarantined"),
            ("residual", "residual"),
        )
    ]
    model_rows = [
        [
            row["model"],
            row["workers"],
            row["ready_items"],
            row["pending_items"],
            row["current_signature"],
            "paused" if row["paused"] else "",
        ]
        for row in status["models"]
    ]
    blocks = [
        common.pairs(_headline(status)),
        common.table(("flow", "items", "tokens"), flow),
        common.table(("model", "workers", "ready", "pending", "current shape", ""), model_rows),
        workers_text(status["workers"]) if status["workers"] else "no workers",
    ]
    if status["jobs"]:
        blocks.append(jobs_text(status["jobs"][:10]))
    return "\n\n".join(blocks)


def _headline(status: Map) -> Iterable[tuple[str, str]]:
    held, limit = status["held_bytes"], status["held_bytes_limit"]
    yield (
        "broker",
        f"{status['state']}, up {duration(status['uptime_s'])}, release "
        f"{common.clean(status['release'])}, {status['durability']} store, policy "
        f"{status['config']['policy']}",
    )
    yield (
        "padding",
        f"{percent(status['waste_ratio'])} waste, {percent(status['batch_fill_ratio'])} fill, "
        f"{counted(status['batches'], 'batch')}, verdict: {common.clean(status['waste_verdict'])}",
    )
    yield (
        "lanes",
        f"{status['lanes_active']:,} active (limit {status['lanes_limit']:,} a shape), pressure "
        f"{percent(status['lane_pressure_ratio'])}; {status['lanes_opened_total']:,} opened, "
        f"{counted(status['lanes_reused_total'], 'item')} to lanes that were open, "
        f"{status['lanes_forced_total']:,} forced",
    )
    yield (
        "shapes",
        f"{status['shapes_active']:,} active, {counted(status['shape_switches_total'], 'switch')}, "
        f"{status['forced_switches_total']:,} forced",
    )
    yield (
        "faults",
        f"{status['redeliveries_total']:,} redelivered, "
        f"{counted(status['duplicates_total'], 'duplicate')}, "
        f"{status['failed_items']:,} failed, {status['cancelled_items']:,} cancelled, "
        f"{status['refused_items']:,} refused, {status['dead_records']:,} dead",
    )
    yield (
        "held",
        f"{size(held)} of {size(limit)}, oldest {duration(status['oldest_item_age_s'])}",
    )
    yield "access", _access(status["security"])
    yield from _storage(status)


def _access(security: Map) -> str:
    """Whether keys are asked for, and who was refused."""
    refused = [f"{number:,} {reason}" for reason, number in security["refusals"].items() if number]
    said = f"keys of {counted(security['users'], 'user')}" if security["keys"] else "no keys"
    return f"{said}; refused: {', '.join(refused) or 'nobody'}"


def _storage(status: Map) -> Iterable[tuple[str, str]]:
    """What the store takes, why it takes nothing, and what was found at the start."""
    storage, found = status["storage"], status["recovery"]
    if storage["disk_bytes"] is not None:
        limit = storage["disk_bytes_limit"]
        room = f" of {size(limit)}" if limit is not None else ""
        files = counted(storage["segment_files"], "segment file")
        reserve = storage["disk_reserve_bytes"]
        kept = f", and a reserve of {size(reserve)}" if reserve else ""
        yield "disk", f"{size(storage['disk_bytes'])}{room}, {files}{kept}"
    if storage["full"] is not None:
        yield "FULL", f"nothing is taken: {common.clean(storage['full'])}"
    if found is not None:
        aside = found["damaged_records"] + found["quarantined_files"] + found["quarantined_items"]
        text = f"{counted(found['entries'], 'record')} in {found['seconds']:.2f} s"
        if aside:
            text += (
                f"; {counted(found['quarantined_items'], 'item')} and "
                f"{counted(found['quarantined_files'], 'file')} set aside in quarantine/"
            )
        yield "recovery", text


def jobs_text(jobs: Iterable[Map]) -> str:
    """Producers for people."""
    rows = [
        [
            row["name"],
            "yes" if row["live"] else f"left {duration(row['seen_age_s'])} ago",
            row["accepted_items"],
            row["completed_items"],
            row["failed_items"],
            row["cancelled_items"],
            row["refused_items"],
            row["dead_items"],
            row["outbox_items"],
        ]
        for row in jobs
    ]
    headers = (
        *("producer", "connected", "accepted", "completed", "failed", "cancelled", "refused"),
        *("dead", "unread"),
    )
    return common.table(headers, rows, spare=("unread", "refused"))


def run_shapes(args: argparse.Namespace) -> int:
    """Print the shapes."""
    rows = common.ask(args, "shapes", **({} if args.top is None else {"top": args.top}))
    if args.json:
        common.show_json(rows)
        return 0
    headers = (
        *("model", "shape", "", "ready", "ready tok", "pending", "accepted", "prefix tok"),
        *("waste", "lanes", "pressure", "oldest", "example"),
    )
    texts = [
        [
            row["model"],
            row["signature"],
            "now" if row["current"] else "",
            row["ready_items"],
            row["ready_tokens"],
            row["pending_items"],
            row["accepted_items"],
            row["prefix_tokens"],
            percent(row["waste_ratio"]),
            row["lanes_active"],
            percent(row["lane_pressure_ratio"]),
            duration(row["oldest_item_age_s"]),
            row["example"],
        ]
        for row in rows
    ]
    spare = ("prefix tok", "pressure", "accepted", "lanes", "pending", "oldest", "example")
    common.show(common.table(headers, texts, spare=spare))
    return 0


def run_lanes(args: argparse.Namespace) -> int:
    """Print the lanes of one shape."""
    wanted = {"model": args.model, "signature": args.shape}
    found = common.ask(args, "lanes", **{k: v for k, v in wanted.items() if v is not None})
    if args.json:
        common.show_json(found)
        return 0
    columns = (
        *("id", "target_tokens", "ready_items", "ready_tokens"),
        *("outstanding_items", "quiescing", "oldest_age_s"),
    )
    rows = list(zip(*(found[name] for name in columns), strict=True))
    rows.sort(key=lambda row: -row[3])
    common.show(
        f"{common.clean(found['model'])} {found['signature']}: {counted(len(rows), 'lane')} of "
        f"{found['lanes_limit']:,}, threshold {percent(found['threshold_ratio'])}"
    )
    headers = ("lane", "target", "ready", "ready tok", "outstanding", "quiescing", "oldest")
    shown = [[*row[:6], duration(row[6])] for row in rows[:LANES_SHOWN]]
    common.show(common.table(headers, shown))
    if len(rows) > LANES_SHOWN:
        common.say(f"and {len(rows) - LANES_SHOWN:,} more; --json has all")
    return 0


def run_workers(args: argparse.Namespace) -> int:
    """Print the workers."""
    rows = common.ask(args, "workers")
    if args.json:
        common.show_json(rows)
    else:
        common.show(workers_text(rows) if rows else "no workers")
    return 0


def workers_text(rows: Iterable[Map]) -> str:
    """Workers for people."""
    headers = (
        *("worker", "model", "engine", "contract", "state", "in flight", "done"),
        *("fill", "cache hits", "last 10 s", "ideal", "measured by", "heartbeat"),
    )
    # What is left always says by whom it was measured.
    spare = ("contract", "ideal", "last 10 s", "engine", "model", "heartbeat")
    return common.table(headers, [_worker_row(row) for row in rows], spare=spare)


def _worker_row(row: Map) -> list[object]:
    contract = row["contract"]
    limits = "x".join(
        str(contract[key]) for key in ("batch_items_max", "batch_tokens_max", "input_tokens_max")
    )
    simulated = " (simulated)" if row["simulated"] else ""
    state = row["state"] or "live" if row["live"] else "gone"
    return [
        row["name"],
        row["model"],
        f"{row['engine']}{simulated}",
        limits + (" ragged" if row["padding"] == "ragged" else ""),
        state,
        f"{row['in_flight']}/{row['window']}",
        row["items_done"],
        percent(row["batch_fill_ratio"]),
        percent(row["cache_hit_ratio"]),
        percent(row["cache_hit_ratio_10s"]),
        percent(row.get("cache_hit_ratio_ideal")),
        row["measured_by"],
        duration(row["heartbeat_age_s"]),
    ]


def run_events(args: argparse.Namespace) -> int:
    """Print events, and go on where --follow says so."""
    with common.operator(args) as client:
        seen, store = 0, client.welcome["boot"]
        while True:
            if client.connected and client.welcome["boot"] != store:
                seen, store = 0, client.welcome["boot"]
            for event in common.ask_on(client, args, "events", since=seen):
                seen = event["seq"]
                if args.json:
                    common.show_json(event, indent=None)
                else:
                    common.show(event_text(event))
            if not args.follow:
                return 0
            time.sleep(FOLLOW_S)


def event_text(event: Map) -> str:
    """An event in one line."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    return f"{clock}  {event['event']:<20}  {common.clean(event['text'])}"
