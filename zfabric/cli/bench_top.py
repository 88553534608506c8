"""`zfabric bench top`: what the dashboard costs, and what publishing costs the broker."""

from __future__ import annotations

import argparse
import sys

from zfabric.cli import common
from zfabric.cli.parser import count

TEXT = """
Measure the CPU of the dashboard at 4 and 10 pictures a second and on its busiest pages, of
publishing at the broker, and the memory of a dashboard over many snapshots. The default fills
1,000 shapes with 2,048 lanes each: that takes 3 GB, and some 15 minutes, half of them for the
memory. Each figure is said as soon as it is known.
"""


def add(commands: common.Commands) -> None:
    """Add the benchmark."""
    parser = common.add_command(
        commands, "top", run, "what the dashboard costs", TEXT, "zfabric bench top --shapes 100"
    )
    flag = parser.add_argument
    flag("--shapes", type=count, default=1_000, metavar="N", help="shapes (default: 1000)")
    flag("--lanes", type=count, default=2_048, metavar="N", help="lanes of each (default: 2048)")
    flag("--seconds", type=count, default=10, metavar="S", help="of each measurement (default: 10)")
    flag(
        "--snapshots", type=count, default=100_000, metavar="N",
        help="snapshots that the memory is measured over (default: 100000)",
    )  # fmt: skip
    flag("--only", choices=("cpu", "memory"), help="one half of it")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from zfabric.bench import machine
    from zfabric.cli.bench_watch import measure

    report: dict[str, object] = {
        "command": "zfabric " + " ".join(sys.argv[1:]), "machine": machine(),
    }  # fmt: skip
    for name, value in measure(args.shapes, args.lanes, args.seconds, args.snapshots, args.only):
        common.say(f"{name} {_shown(value)}")
        report[name] = value
    if args.json:
        common.show_json(report)
    else:
        common.show(common.pairs([(name, _shown(value)) for name, value in report.items()]))
    return 0


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:,.2f}" if isinstance(value, float) else f"{value}"
