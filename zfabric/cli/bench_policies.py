"""`zfabric bench wall`, `waste`, `order` and `policies`: the rules alone, without a broker."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zfabric.cli import common
from zfabric.errors import ConfigError
from zfabric.lanes import LANES_MAX
from zfabric.words import counted

WALL = """
Replay a length trace through the lanes of each shape, on a virtual clock: how waste, fill and cost
change by tenth of the run. With few lanes the targets only grow until nothing fits: the wall.
"""
WASTE = """
Pack one trace in every way there is, at several backlogs, and print padding against batch fill. A
batch of one wastes nothing and fills nothing: read cost, (padded tokens + 2,000 per batch) / real.
"""
ORDER = """
Send the prompts of a trace to one card, shape by shape, and print what its prefix cache (1,000
blocks of 512 tokens) hits: in order of arrival, the fullest shape next, the one that shares most
next. Beside it the batch fill, and how long items wait: what max_wait gains and costs.
"""
POLICIES = """
How many items a second one core assigns to lanes, enqueues and packs, and how many bytecode
instructions each of them takes: a count is the same on every machine with the same Python.
"""
PACKINGS = ("strict", "tight", "group")


def add(within: common.Commands) -> None:
    """Add the commands."""
    for add_one in (_add_wall, _add_waste, _add_order, _add_policies):
        add_one(within)


def _add_wall(within: common.Commands) -> None:
    example = "zfabric bench wall --lanes 128 --lengths lengths.csv --column context_tokens"
    wall = common.add_command(within, "wall", _wall, "waste as lanes run out", WALL, example)
    number(wall, "--lanes", LANES_MAX, "lanes a shape may use")
    number(wall, "--items", 22_000_000, "items, all shapes together")
    number(wall, "--shapes", 8, "shapes")
    trace_flags(wall)
    number(wall, "--backlog", 2_000, "items of a shape that wait before a batch is packed")
    wall.add_argument(
        "--rate", type=float, default=2_225.0, metavar="R", help="arrivals/s of a shape (2225)"
    )
    wall.add_argument(
        "--packing", choices=PACKINGS, default="tight", help="what a batch takes (tight)"
    )
    wall.add_argument(
        "--sort", action="store_true", help="sort messages from the longest down, as clients do"
    )
    number(wall, "--processes", 0, "processes to share the shapes; 0 is one a core")
    wall.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="write the plot as SVG too (a PNG of it: rsvg-convert -o FILE.png FILE.svg)",
    )
    common.add_json(wall)


def _add_waste(within: common.Commands) -> None:
    example = "zfabric bench waste --backlogs 2000 20000"
    waste = common.add_command(within, "waste", _waste, "waste against batch fill", WASTE, example)
    number(waste, "--items", 400_000, "items")
    number(waste, "--lanes", LANES_MAX, "lanes a shape may use")
    trace_flags(waste)
    waste.add_argument(
        "--backlogs", type=int, nargs="+", default=[2_000, 20_000], metavar="N", help="items"
    )
    common.add_json(waste)


def _add_order(within: common.Commands) -> None:
    example = "zfabric bench order --trace conversation.jsonl --backlogs 2000"
    order = common.add_command(within, "order", _order, "cache hits by order", ORDER, example)
    order.add_argument(
        "--trace",
        type=Path,
        metavar="JSONL",
        help="lines with timestamp, input_length, hash_ids of 512-token blocks (a synthetic trace)",
    )
    order.add_argument(
        "--backlogs", type=int, nargs="+", default=[2_000], metavar="N", help="items (2000)"
    )
    order.add_argument(
        "--max-waits",
        type=float,
        nargs="+",
        default=[0.0, 300.0, 10.0],
        metavar="S",
        help="seconds that a shape may be passed over; 0 is for ever (0 300 10)",
    )
    common.add_json(order)


def _add_policies(within: common.Commands) -> None:
    example = "zfabric bench policies --check"
    policies = common.add_command(
        within, "policies", _policies, "speed of the rules alone", POLICIES, example
    )
    number(policies, "--items", 200_000, "items")
    trace_flags(policies)
    policies.add_argument(
        "--check",
        action="store_true",
        help="only count, on the synthetic trace; exit 1 where a count grew by more than 20%%",
    )
    common.add_json(policies)


def number(parser: argparse.ArgumentParser, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} ({default})")


def trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=Path, metavar="CSV", help="lengths to draw from (a synthetic trace)"
    )
    parser.add_argument(
        "--column", default="context_tokens", metavar="NAME", help="its column (context_tokens)"
    )
    number(parser, "--seed", 1, "seed of the draw")


def check_positive(args: argparse.Namespace, *flags: str) -> None:
    """Raises ConfigError where a number that must be positive is not."""
    for flag in flags:
        value = getattr(args, flag)
        for each in value if isinstance(value, list) else [value]:
            if not each > 0:
                raise ConfigError(f"--{flag} must be more than 0, not {each}")


def judge_counts(rows: Sequence[dict[str, Any]], growth_max: float) -> int:
    """The exit code of counted instructions: 1 where one grew by more, and says what it cannot."""
    if any(row["recorded"] is None for row in rows):
        python = ".".join(map(str, sys.version_info[:2]))
        common.say(
            f"zfabric: nothing is recorded for Python {python}: these counts were not judged"
        )
    return 1 if any((row["growth"] or 0) > growth_max - 1 for row in rows) else 0


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2%}"


# How a row of counted instructions is shown.
COUNTS: dict[str, Callable[[Any], str]] = {
    "instructions_per_item": "{:.1f}".format,
    "recorded": lambda n: "-" if n is None else f"{n:.1f}",
    "growth": _share,
}


def head() -> dict[str, Any]:
    from zfabric.bench import machine

    return {"command": "zfabric " + " ".join(sys.argv[1:]), "machine": machine()}


def show_head(head: Mapping[str, Any]) -> None:
    machine = ", ".join(f"{name} {value}" for name, value in head["machine"].items())
    common.show(common.pairs([("command", head["command"]), ("machine", machine)]))
    common.show("")


def _wall(args: argparse.Namespace) -> int:
    from zfabric.bench import lengths, plot, wall

    check_positive(args, "lanes", "items", "shapes", "backlog", "rate")
    if args.processes < 0:
        raise ConfigError(f"--processes must be 0 or more, not {args.processes}")
    if args.items // args.shapes < wall.SLICES:
        raise ConfigError(f"--items must be at least {wall.SLICES} for each of the --shapes")
    if args.plot:
        _check_plot(args.plot)
    load = wall.Load(
        lengths=lengths.trace(args.lengths, args.column),
        lanes=args.lanes,
        items=args.items // args.shapes,
        shapes=args.shapes,
        backlog=args.backlog,
        rate=args.rate,
        packing=args.packing,
        sort=args.sort,
        seed=args.seed,
    )
    over = f"{counted(args.items, 'item')} over {counted(args.shapes, 'shape')}"
    common.say(f"zfabric: replaying {over}")
    found = wall.run(load, args.processes or None)
    if args.plot:
        text = plot.svg(
            {
                "waste": [p["waste_ratio"] for p in found["points"]],
                "fill": [p["fill_ratio"] for p in found["points"]],
            },
            f"{counted(args.lanes, 'lane')}, {args.packing}: waste and batch fill",
            f"{over}, from left to right",
        )
        try:
            args.plot.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot {args.plot} cannot be written: {error}") from None
    top = head()
    if args.json:
        common.show_json({**top, **found})
        return 0
    show_head(top)
    rows = [(f"{k}/{wall.TENTHS}", row) for k, row in enumerate(found["tenths"], 1)]
    common.show(_tenths([*rows, ("all", found)]))
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    common.show("\nwaste over the run")
    common.show(plot.terminal([p["waste_ratio"] for p in found["points"]], plain=plain))
    common.show(
        f"\n{counted(found['items'], 'item')} in {found['seconds']:.1f} s "
        f"({found['cpu_s']:.1f} s of CPU): "
        f"{found['items_per_cpu_s']:,.0f} items/s on one core, drawing included"
    )
    return 0


def _check_plot(path: Path) -> None:
    """Before a run of a minute, not after it. Raises ConfigError."""
    if path.suffix.lower() != ".svg":
        raise ConfigError(
            f"--plot {path} must end in .svg: the plot is an SVG; for a PNG, write the SVG and "
            "convert it, for example with rsvg-convert -o wall.png wall.svg"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path} cannot be written: there is no folder {path.parent}")


def _tenths(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    headers = ("part", "waste", "fill", "cost", "lanes", "pressure", "threshold", "opened",
               "reused", "forced")  # fmt: skip
    return common.table(
        headers,
        [
            (
                name,
                _share(row["waste_ratio"]),
                _share(row["fill_ratio"]),
                _ratio(row["cost"]),
                f"{row['lanes']:,}",
                _share(row["pressure"]),
                _share(row["threshold"]),
                f"{row['opened']:,}",
                f"{row['reused']:,}",
                f"{row['forced']:,}",
            )
            for name, row in rows
        ],
        spare=("reused", "threshold"),
    )


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def _ratio(cost: float | None) -> str:
    return "-" if cost is None else f"{cost:.4f}"


def _waste(args: argparse.Namespace) -> int:
    from zfabric.bench import lengths, waste

    check_positive(args, "items", "lanes", "backlogs")
    trace = lengths.trace(args.lengths, args.column)
    if args.items <= max(args.backlogs):
        raise ConfigError("--items must be more than each of the --backlogs")
    rows = list(waste.run(trace, args.items, args.backlogs, args.lanes, args.seed))
    print_rows(
        args,
        {"items": args.items, "lanes_limit": args.lanes},
        rows,
        {
            "policy": str,
            "backlog": lambda n: "all" if n is None else f"{n:,}",
            "waste_ratio": _share,
            "fill_ratio": _share,
            "batches": "{:,}".format,
            "padded_tokens": "{:,}".format,
            "cost": _ratio,
        },
    )
    return 0


def _order(args: argparse.Namespace) -> int:
    from zfabric.bench import order

    check_positive(args, "backlogs")
    if min(args.max_waits) < 0:
        raise ConfigError(f"--max-waits must be at least 0, not {min(args.max_waits)}")
    requests = order.synthetic() if args.trace is None else order.read(args.trace)
    about = {
        "requests": len(requests),
        "shapes": len({request.shape for request in requests}),
        "cache_blocks": order.CACHE_BLOCKS,
        "ceiling_ratio": order.ceiling(requests),
    }
    rows = list(order.run(requests, args.backlogs, args.max_waits))
    print_rows(
        args,
        about,
        rows,
        {
            "order": str,
            "load": str,
            "backlog": _whole,
            "max_wait_s": _whole,
            "hit_ratio": _share,
            "fill_ratio": _share,
            "batches": "{:,}".format,
            "switches": _whole,
            "forced": _whole,
            "wait_mean_s": _whole,
            "wait_p99_s": _whole,
            "wait_max_s": _whole,
        },
    )
    return 0


def _policies(args: argparse.Namespace) -> int:
    from zfabric.bench import lengths, policies
    from zfabric.outgoing import MESSAGE_ITEMS

    check_positive(args, "items")
    if args.check:
        return _check_counts(args)
    rows = list(policies.run(lengths.trace(args.lengths, args.column), args.items, args.seed))
    about = {"items": args.items, "message": MESSAGE_ITEMS, "backlog": policies.BACKLOG}
    shown: dict[str, Callable[[Any], str]] = {
        "lanes": "{:,}".format,
        "packing": str,
        "window": "{:,}".format,
        "items_per_s": _whole,
        "instructions_per_item": "{:.1f}".format,
    }
    print_rows(args, about, rows, shown)
    return 0


def _check_counts(args: argparse.Namespace) -> int:
    from zfabric.bench import policies

    rows = list(policies.check())
    print_rows(args, {}, rows, {"case": str, **COUNTS})
    return judge_counts(rows, policies.GROWTH_MAX)


def _about(name: str, value: object) -> str:
    """What a report says of its load."""
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _share(value) if name.endswith("_ratio") else f"{value:g}"
    return str(value)


def print_rows(
    args: argparse.Namespace,
    about: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    shown: Mapping[str, Callable[[Any], str]],
) -> None:
    """The report as JSON, or as one table with a column for each of `shown`."""
    top = head()
    if args.json:
        common.show_json({**top, **about, "rows": rows})
        return
    show_head(top)
    if about:
        common.show(common.pairs([(k, _about(k, v)) for k, v in about.items()]) + "\n")
    headers = [name.removesuffix("_ratio") for name in shown]
    common.show(
        common.table(headers, [[f(row[name]) for name, f in shown.items()] for row in rows])
    )
