"""`zfabric explain waste`: where the padding comes from, and what other settings would do."""

from __future__ import annotations

import argparse
import textwrap
import time
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfabric.cli import common
from zfabric.cli.common import duration, percent
from zfabric.cli.parser import count
from zfabric.config import KEYS
from zfabric.errors import ConfigError

if TYPE_CHECKING:
    from zfabric.explain import Explanation
    from zfabric.whatif import Outcome, Run

# Lengths that a recording gives to the simulation, as many as a broker keeps.
SAMPLE_ITEMS = 16_384
# What is taken to wait where nothing does: some sixty batches.
BACKLOG_ITEMS = 2_000
WIDTH_MAX = 100


def add(commands: common.Commands) -> None:
    """Add the commands."""
    within = common.add_group(
        commands,
        "explain",
        "why things are as they are",
        "Say why, with the rule, the numbers, and what to do.",
        "zfabric explain waste",
    )
    parser = common.add_command(
        within,
        "waste",
        run_waste,
        "where the padding comes from",
        "Split the padding by cause (the parts add up), name the verdict with its rule, since\n"
        "when it holds and the command to run; fill and cost stand beside, since waste alone can\n"
        "be gamed. With --what-if lanes=N, run the lengths of the last items through a fabric\n"
        "with N lanes and through one with the lanes that there are, in memory, and compare;\n"
        "what was measured stands beside, to tell how good the simulation is.",
        "zfabric explain waste --what-if lanes=2048",
    )
    parser.add_argument(
        "--what-if", metavar="lanes=N", help="simulate the last items with so many lanes"
    )
    parser.add_argument(
        "--backlog",
        type=count,
        metavar="N",
        help="items that wait meanwhile (default: as many as now; if none do, 2,000)",
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="the end of a recording")
    common.add_json(parser)
    common.add_broker(parser)


def run_waste(args: argparse.Namespace) -> int:
    """Explain."""
    from zfabric.explain import explain

    lanes = None if args.what_if is None else _lanes(args.what_if)
    if args.replay is not None:
        status, runs = _recorded(args.replay, lanes is not None)
    else:
        status, runs = _asked(args, lanes is not None)
    said = explain(status)
    backlog = args.backlog or status["ready_items"] or BACKLOG_ITEMS
    outcomes = [] if lanes is None else _what_if(status, runs, lanes, backlog)
    if args.json:
        value = said.as_map()
        if outcomes:
            value["what_if"] = [outcome.as_map() for outcome in outcomes]
        common.show_json(value)
        return 0
    common.show(text(said, status["time"]))
    if outcomes:
        common.show("\n" + what_if_text(status, outcomes, runs, backlog))
    return 0


def _lanes(text_given: str) -> int:
    name, _, value = text_given.partition("=")
    if name != "lanes" or not value.isdecimal():
        raise ConfigError(f"--what-if takes lanes=N, not {text_given!r}")
    key = KEYS["broker.lanes"]
    number: int = key.value_of(value, "--what-if")
    return number


def _asked(args: argparse.Namespace, wants_lengths: bool) -> tuple[dict[str, Any], list[Run]]:
    with common.operator(args) as client:
        status = common.ask_on(client, args, "status")
        said = [common.ask_on(client, args, "lengths")] if wants_lengths else []
    return status, _runs(said, status["time"])


def _recorded(path: Path, wants_lengths: bool) -> tuple[dict[str, Any], list[Run]]:
    from zfabric_tui.recording import Reader

    with Reader(path) as reader:
        last = reader.span[1]
        status = reader.snapshots(last - 1.0, last, 1)[0]
        said: list[dict[str, Any]] = []
        if wants_lengths:
            items = 0
            for value in reader.lengths(last):
                said.insert(0, value)
                items += sum(len(row[3]) // 4 for row in value["runs"])
                if items >= SAMPLE_ITEMS:
                    break
    return status, _runs(said, last)


def _runs(said: Iterable[Mapping[str, Any]], now_s: float) -> list[Run]:
    from zfabric.whatif import Run

    runs = []
    for value in said:
        for model, signature, age_s, lengths in value["runs"]:
            column = array("I")
            column.frombytes(lengths)
            runs.append(Run(model, signature, now_s - value["time"] + age_s, column))
    return runs


def _what_if(status: Mapping[str, Any], runs: list[Run], lanes: int, backlog: int) -> list[Outcome]:
    """The lanes that there are, then those asked for, on the same items."""
    from zfabric import whatif

    if status["config"]["policy"] != "lanes":
        raise ConfigError("--what-if lanes=N needs a broker with --policy lanes")
    contract = whatif.contract_of(status)
    packing = status["config"]["packing"]
    wanted = dict.fromkeys((status["lanes_limit"], lanes))
    return [
        whatif.simulate(
            runs,
            lanes=each,
            packing=packing,
            contract=contract,
            backlog_items=backlog,
            accepted_items=status["accepted_items"],
        )
        for each in wanted
    ]


# -- text -----------------------------------------------------------------------------------------


def text(said: Explanation, now_s: float) -> str:
    """The explanation for people."""
    width = min(common.columns() or WIDTH_MAX, WIDTH_MAX)
    since = "too soon to say"
    if said.since is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(said.since))
        since = f"{clock} (for {duration(now_s - said.since)})"
    rows = [
        ("verdict", said.verdict),
        ("since", since),
        ("rule", said.rule),
        ("waste", f"{percent(said.waste_ratio)} of {said.padded_tokens:,} padded tokens"),
        ("beside it", f"fill {percent(said.batch_fill_ratio)}, cost {_factor(said.cost_ratio)}"),
        ("do", said.advice),
        ("run", said.command),
    ]
    blocks = [common.pairs(rows)]
    if said.warning is not None:
        blocks.append(textwrap.fill(f"! {said.warning}", width))
    parts = [
        [part.cause, part.tokens, percent(part.share), part.meaning]
        for part in sorted(said.parts, key=lambda part: -part.tokens)
    ]
    padding = said.padded_tokens - said.real_tokens
    parts.append(["padding", padding, percent(1.0 if padding else 0.0), "padded - real"])
    blocks.append(common.table(("cause", "tokens", "share", "what"), parts))
    numbers = [(name, common.cell(value)) for name, value in said.numbers.items()]
    blocks.append(common.pairs(numbers))
    return "\n\n".join(blocks)


def _factor(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{ratio:.3f}"


def what_if_text(
    status: Mapping[str, Any], outcomes: list[Outcome], runs: list[Run], backlog: int
) -> str:
    """The comparison for people."""
    items = sum(len(run.lengths) for run in runs)
    measured = [
        "measured",
        status["lanes_limit"],
        status["waste_verdict"],
        percent(status["waste_ratio"]),
        percent(status["batch_fill_ratio"]),
        _factor(status["cost_ratio"]),
        percent(status["lane_pressure_ratio_run"]),
    ]
    rows = [measured] + [
        [
            "simulated",
            outcome.lanes,
            outcome.verdict,
            percent(outcome.waste_ratio),
            percent(outcome.batch_fill_ratio),
            _factor(outcome.cost_ratio),
            percent(outcome.lane_pressure_ratio_run),
        ]
        for outcome in outcomes
    ]
    head = ("by", "lanes", "verdict", "waste", "fill", "cost", "pressure")
    note = (
        f"measured: all that was handed out since the start. Simulated: the lengths of the last "
        f"{items:,} items, sent round until as many came as were accepted (or the lanes have "
        f"settled), one card always ready, {backlog:,} waiting. Compare simulated rows with each "
        "other; how far the first is from what was measured tells how well it fits"
    )
    width = min(common.columns() or WIDTH_MAX, WIDTH_MAX)
    return f"{common.table(head, rows)}\n\n{textwrap.fill(note, width)}"
