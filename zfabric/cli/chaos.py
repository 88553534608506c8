"""`zfabric chaos`: do to a real fabric what the world does, and judge what came out."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfabric.cli import common
from zfabric.cli.parser import count
from zfabric.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from zfabric.chaos.play import Report, Scenario

TEXT = """
Start a real fabric (a broker, two workers of the simulated engine, a producer), do one fault to
it, and judge: every accepted item has one result, with the bytes of a run without faults; the
books balance; the broker keeps no descriptor and no thread. Each scenario gets a fabric of its
own, and is done again until --for is over. With --against the harmless ones are done to a fabric
that runs, under models and names of their own. Exit code 5 says that an invariant broke.
"""


def add(commands: common.Commands) -> None:
    """Add the command."""
    parser = common.add_command(
        commands, "chaos", run, "faults done to a real fabric, and what came out", TEXT,
        "zfabric chaos broker_killed link_reset --seed 7 --for 60",
    )  # fmt: skip
    flag = parser.add_argument
    flag("scenarios", nargs="*", metavar="SCENARIO", help="which (all); --list names them")
    flag("--list", action="store_true", help="name the scenarios and end")
    flag("--seed", type=int, default=1, metavar="N", help="what is drawn by chance (1)")
    flag("--for", dest="seconds", type=float, default=0.0, metavar="S",
         help="do each again until so many seconds are over (once)")  # fmt: skip
    flag("--cycles", type=count, default=300, metavar="N", help="of come_and_go (300)")
    flag("--against", metavar="ADDRESS", help="a fabric that runs: only what is harmless")
    flag("--dir", type=Path, metavar="DIR", help="where to put files; kept where something broke")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Play them; raises InvariantError where one broke."""
    from zfabric.chaos.play import Remote, play

    if args.against is None:
        common.without_keys()
    chosen = _chosen(args)
    if args.list:
        return _list(args, chosen)
    if args.against is not None:
        # Whether it is there, and lets us in, is no verdict on it.
        Remote(args.against)
    reports = []
    for scenario in chosen:
        directory = Path(tempfile.mkdtemp(prefix=f"zfabric-{scenario.name}-", dir=args.dir))
        common.say(f"zfabric: {scenario.name}: {scenario.summary}")
        report = play(
            scenario, directory, seed=args.seed, seconds=args.seconds, cycles=args.cycles,
            against=args.against,
        )  # fmt: skip
        reports.append(report)
        for text in report.broken:
            common.say(f"zfabric: {scenario.name}: {common.clean(text)}")
        if report.broken:
            common.say(f"zfabric: {scenario.name}: its files are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    _show(args, reports)
    broken = [report.scenario for report in reports if report.broken]
    if broken:
        raise InvariantError(f"{len(broken)} of {len(reports)} broke: {', '.join(broken)}")
    return 0


def _chosen(args: argparse.Namespace) -> list[Scenario]:
    from zfabric.chaos.scenarios import BY_NAME, SCENARIOS

    unknown = [name for name in args.scenarios if name not in BY_NAME]
    if unknown:
        raise ConfigError(f"no scenario {unknown[0]!r}; `zfabric chaos --list` names them")
    chosen = [BY_NAME[name] for name in args.scenarios] or list(SCENARIOS)
    if args.against is None:
        return chosen
    if harmful := [s.name for s in chosen if args.scenarios and not s.is_harmless]:
        raise ConfigError(f"{harmful[0]} would harm a fabric that serves others")
    return [scenario for scenario in chosen if scenario.is_harmless]


def _list(args: argparse.Namespace, chosen: list[Scenario]) -> int:
    rows = [
        {"name": s.name, "faults": list(s.faults), "harmless": s.is_harmless, "summary": s.summary}
        for s in chosen
    ]
    if args.json:
        common.show_json(rows)
    else:
        table = [[r["name"], _numbers(r["faults"]), r["harmless"], r["summary"]] for r in rows]
        common.show(common.table(["scenario", "fault", "harmless", "what is done"], table))
    return 0


def _numbers(faults: Any) -> str:
    return " ".join(map(str, faults))


def _show(args: argparse.Namespace, reports: list[Report]) -> None:
    if args.json:
        common.show_json({"seed": args.seed, "rows": [dataclasses.asdict(r) for r in reports]})
        return
    headers = ["scenario", "fault", "tries", "items", "recovered in", "worst", "lost",
               "visible twice", "residual", "verdict"]  # fmt: skip
    rows = [
        [
            r.scenario, _numbers(r.faults), r.tries, f"{r.items:,}", _seconds(r.recovered_median_s),
            _seconds(r.recovered_worst_s), r.lost, r.visible_twice, r.residual_items,
            "BROKEN" if r.broken else "held",
        ]
        for r in reports
    ]  # fmt: skip
    common.show(common.table(headers, rows))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
