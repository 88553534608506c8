"""`zfabric drain`, `pause`, `resume`, `dead`, `producers`: orders to a broker."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from zfabric.cli import common
from zfabric.cli.common import duration
from zfabric.cli.parser import count
from zfabric.errors import ConfigError
from zfabric.words import counted

Run = Callable[[argparse.Namespace], int]
PRODUCER = "its name, as `zfabric producers ls` shows it"


def add(commands: common.Commands) -> None:
    """Add the commands."""
    _command(
        commands,
        "drain",
        run_drain,
        "end a broker in good order",
        "Tell the broker to end: it takes nothing new, lets the workers finish what they hold\n"
        "(for its --drain seconds at most), sends the results and exits.",
        "zfabric drain",
    )
    for name, run, text in (
        ("pause", run_pause, "Hand out no more batches of a model; what is running goes on."),
        ("resume", run_resume, "Hand out batches of a paused model again."),
    ):
        parser = _command(
            commands,
            name,
            run,
            text.split(";")[0].rstrip(".").lower(),
            text,
            f"zfabric {name} tiny",
        )
        parser.add_argument("model", metavar="MODEL", help="its name, as `zfabric status` shows it")
    _add_dead(commands)
    _add_producers(commands)


def _command(
    commands: common.Commands, name: str, run: Run, summary: str, text: str, example: str
) -> argparse.ArgumentParser:
    parser = common.add_command(commands, name, run, summary, text, example)
    common.add_json(parser)
    common.add_broker(parser)
    return parser


def _add_dead(commands: common.Commands) -> None:
    within = common.add_group(
        commands,
        "dead",
        "items that were given up",
        "Items that used up their attempts, because an engine died of them or their lease ran out\n"
        "each time. Their producers have an error result; here they can be run once more.",
        "zfabric dead ls",
    )
    parser = _command(
        within, "ls", run_dead_ls, "list them", "List dead items and why.", "zfabric dead ls --json"
    )
    parser.add_argument("--top", type=count, metavar="N", help="at most N items")
    for name, run, text in (
        ("requeue", run_dead_requeue, "Run dead items once more, as new items."),
        ("drop", run_dead_drop, "Forget dead items for good."),
    ):
        parser = _command(
            within, name, run, text.rstrip(".").lower(), text, f"zfabric dead {name} 3 4"
        )
        parser.add_argument("ids", nargs="*", type=int, metavar="ID", help="as `dead ls` shows")
        parser.add_argument("--all", action="store_true", help="all of them")


def _add_producers(commands: common.Commands) -> None:
    within = common.add_group(
        commands,
        "producers",
        "jobs and other producers",
        "Producers are known by name, even when they are away: their items and results are kept.",
        "zfabric producers ls",
    )
    parser = _command(
        within,
        "ls",
        run_producers_ls,
        "list them",
        "List the producers, what they submitted and what came of it.",
        "zfabric producers ls",
    )
    parser.add_argument("--top", type=count, metavar="N", help="the N newest")
    parser = _command(
        within,
        "cancel",
        run_producers_cancel,
        "end what waits of one",
        "End every item of a producer that is not with a worker yet, as cancelled.",
        "zfabric producers cancel nightly-eval",
    )
    parser.add_argument("name", metavar="NAME", help=PRODUCER)
    parser = _command(
        within,
        "forget",
        run_producers_forget,
        "forget one that is away",
        "Forget a producer that is not connected, and the results that it has not fetched.",
        "zfabric producers forget nightly-eval --force",
    )
    parser.add_argument("name", metavar="NAME", help=PRODUCER)
    parser.add_argument("--force", action="store_true", help="although items have not ended")


def _answer(args: argparse.Namespace, answer: Any, text: str) -> int:
    if args.json:
        common.show_json(answer)
    else:
        common.say(f"zfabric: {common.clean(text)}")
    return 0


def run_drain(args: argparse.Namespace) -> int:
    """End the broker."""
    answer = common.ask(args, "drain")
    return _answer(args, answer, f"draining; running: {counted(answer['pending_items'], 'item')}")


def run_pause(args: argparse.Namespace) -> int:
    """Pause a model."""
    answer = common.ask(args, "pause", model=args.model)
    return _answer(args, answer, f"{args.model} is paused; zfabric resume {args.model}")


def run_resume(args: argparse.Namespace) -> int:
    """Resume a model."""
    answer = common.ask(args, "resume", model=args.model)
    return _answer(args, answer, f"{args.model} goes on")


def _top(args: argparse.Namespace) -> dict[str, int]:
    return {} if args.top is None else {"top": args.top}


def run_dead_ls(args: argparse.Namespace) -> int:
    """List dead records."""
    rows = common.ask(args, "dead.ls", **_top(args))
    if args.json:
        common.show_json(rows)
        return 0
    if not rows:
        common.say("zfabric: nothing is dead")
        return 0
    headers = ("id", "producer", "item", "model", "tokens", "bytes", "attempts", "age", "reason")
    spare = ("bytes", "item", "tokens", "model", "attempts")
    texts = [
        [
            str(row["id"]),
            row["producer"],
            str(row["number"]),
            row["model"],
            row["length_tokens"],
            row["payload_bytes"],
            row["attempts"],
            duration(row["age_s"]),
            row["reason"],
        ]
        for row in rows
    ]
    common.show(common.table(headers, texts, spare=spare))
    return 0


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    if args.all == bool(args.ids):
        raise ConfigError("give the ids of dead items (zfabric dead ls), or --all")
    return {"all": True} if args.all else {"ids": args.ids}


def run_dead_requeue(args: argparse.Namespace) -> int:
    """Requeue dead items."""
    answer = common.ask(args, "dead.requeue", **_chosen(args))
    return _answer(args, answer, f"to run once more: {counted(answer['requeued'], 'item')}")


def run_dead_drop(args: argparse.Namespace) -> int:
    """Drop dead records."""
    answer = common.ask(args, "dead.drop", **_chosen(args))
    return _answer(args, answer, f"forgotten: {counted(answer['dropped'], 'item')}")


def run_producers_ls(args: argparse.Namespace) -> int:
    """List producers."""
    rows = common.ask(args, "producers.ls", **_top(args))
    if args.json:
        common.show_json(rows)
        return 0
    from zfabric.cli.look import jobs_text

    common.show(jobs_text(rows))
    return 0


def run_producers_cancel(args: argparse.Namespace) -> int:
    """Cancel a producer's waiting items."""
    answer = common.ask(args, "producers.cancel", name=args.name)
    unread = counted(answer["outstanding"], "item")
    text = f"{args.name}: what waits is being cancelled ({unread} unread)"
    return _answer(args, answer, text)


def run_producers_forget(args: argparse.Namespace) -> int:
    """Forget a producer."""
    answer = common.ask(args, "producers.forget", name=args.name, force=args.force)
    text = f"{args.name} is forgotten, with {counted(answer['dropped_results'], 'result')}"
    return _answer(args, answer, text)
