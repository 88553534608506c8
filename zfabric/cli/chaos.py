"""`zfabric chaos`: do to a real fabric what the world does, and judge what came out."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfabric import config as configuration
from zfabric.access import a
from zfabric.cli import common
from zfabric.cli.children import end_all, ending_on_signals
from zfabric.cli.parser import count
from zfabric.config_keys import NO_KEY
from zfabric.errors import ConfigError, Inconclusive, InvariantError, NotAllowed
from zfabric.processes import children
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.chaos.play import Report, Scenario
    from zfabric.chaos.remote import Keys

# Names in a line that says what is still there.
LEFT_SHOWN = 5
NEEDED = (
    "a run needs three keys, one each of role producer, worker and operator: `zfabric keys make "
    "USER --role ROLE` makes one, --key FILE names it"
)
TEXT = """
Start a real fabric (a broker, two workers of the simulated engine, a producer), do one fault to
it, and judge: every accepted item has one result, with the bytes of a run without faults; the
books balance; the broker keeps no descriptor and no thread. Each scenario gets a fabric of its
own, and is done again until --for is over. Exit code 5 says that an invariant broke, 6 that a limit
of somebody else's fabric kept a scenario from being tried.

With --against the harmless ones are done to a fabric that runs, under models and names of their
own, which are taken off its lists at the end. Where that fabric has keys, a run needs three, one of
each role that it plays: --key PRODUCER --key WORKER --key OPERATOR. The file says which is which;
ZFABRIC_KEY stands for the one of its role where --key gives none.
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
    flag("--key", action="append", default=[], dest="keys", metavar="FILE",
         help="a key for --against, three times: of role producer, worker, operator")  # fmt: skip
    configuration.add_flags(parser, "client", ["server_key"])
    flag("--dir", type=Path, metavar="DIR", help="where to put files; kept where something broke")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Play them; raises InvariantError where one broke."""
    from zfabric.chaos.remote import Keys, Remote

    if args.keys and args.against is None:
        raise ConfigError("--key goes with --against: a fabric of its own has no keys")
    chosen = _chosen(args)
    if args.list:
        return _list(args, chosen)
    keys = _keys(args) if args.against is not None else Keys()
    # Each peer is told of its key; none may come to another by the environment.
    common.without_keys()
    passing: list[Path] = []
    others = children(os.getpid())

    def end() -> None:
        """Whatever was started here, at once."""
        end_all(pid for pid in children(os.getpid()) if pid not in others)
        for directory in passing:
            shutil.rmtree(directory, ignore_errors=True)

    with ending_on_signals(end):
        if args.against is not None:
            # Whether it is there, and lets us in, is no verdict on it.
            try:
                Remote(args.against, keys)
            except NotAllowed as error:
                raise error if keys != Keys() else NotAllowed(f"{error}; {NEEDED}") from None
        try:
            reports = _play(args, chosen, keys, passing)
        except SystemExit:
            # It may have come between a process and whoever would have ended it.
            end()
            raise
        finally:
            for directory in passing:
                shutil.rmtree(directory, ignore_errors=True)
    _show(args, reports)
    return _verdict(reports)


def _verdict(reports: list[Report]) -> int:
    """0 where all held. Raises InvariantError where one broke, or Inconclusive."""
    broken = [report.scenario for report in reports if report.broken]
    if broken:
        raise InvariantError(f"{len(broken)} of {len(reports)} broke: {', '.join(broken)}")
    untried = [report.scenario for report in reports if report.inconclusive is not None]
    if untried:
        raise Inconclusive(
            f"{len(untried)} of {len(reports)} could not be tried, since a limit of that fabric "
            f"kept them from it: {', '.join(untried)}"
        )
    return 0


def _keys(args: argparse.Namespace) -> Keys:
    """The keys of the command line and the configuration by role. Raises ConfigError."""
    from zfabric.chaos.remote import Keys
    from zfabric.keys import load_client_key

    settings = common.load(args).client
    if settings.server_key is not None:
        os.environ["ZFABRIC_SERVER_KEY"] = settings.server_key
    roles = [field.name for field in dataclasses.fields(Keys)]
    found: dict[str, str] = {}
    for path in args.keys if args.keys != [NO_KEY] else []:
        role = load_client_key(path, settings.server_key).role
        if role not in roles:
            raise ConfigError(f"{path} is {a(role)}'s key; {NEEDED}")
        if role in found:
            raise ConfigError(f"{found[role]} and {path} are both {a(role)}'s key; {NEEDED}")
        found[role] = path
    if settings.key not in (None, NO_KEY) and args.keys != [NO_KEY]:
        found.setdefault(load_client_key(settings.key, settings.server_key).role, settings.key)
    missing = [role for role in roles if role not in found]
    if found and missing:
        raise ConfigError(f"no key of role {' or '.join(missing)} was given; {NEEDED}")
    # They are read again by processes that start elsewhere.
    return Keys(
        **{role: str(Path(path).resolve()) for role, path in found.items() if role in roles}
    )


def _play(
    args: argparse.Namespace, chosen: list[Scenario], keys: Keys, passing: list[Path]
) -> list[Report]:
    """Play them one after another. `passing` are directories that nobody needs when it is over."""
    from zfabric.chaos.play import Report, play

    reports: list[Report] = []
    for scenario in chosen:
        directory = Path(tempfile.mkdtemp(prefix=f"zfabric-{scenario.name}-", dir=args.dir))
        passing.append(directory)
        common.say(f"zfabric: {scenario.name}: {scenario.summary}")
        report = Report(scenario.name, scenario.faults)
        reports.append(report)
        try:
            play(
                scenario, directory, seed=args.seed, seconds=args.seconds, cycles=args.cycles,
                against=args.against, keys=keys, report=report,
            )  # fmt: skip
        finally:
            # Where a signal ended it, too: what is left on the lists of others is to be known.
            _tell(report, directory)
        if report.broken:
            passing.remove(directory)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return reports


def _tell(report: Report, directory: Path) -> None:
    if report.inconclusive is not None:
        limit = common.clean(report.inconclusive)
        common.say(f"zfabric: {report.scenario}: could not be tried: {limit}")
    for text in report.broken:
        common.say(f"zfabric: {report.scenario}: {common.clean(text)}")
    if report.broken:
        common.say(f"zfabric: {report.scenario}: its files are in {directory}")
    if report.left:
        left = common.clean(", ".join(report.left[:LEFT_SHOWN]))
        many = counted(len(report.left), "name")
        common.say(f"zfabric: {report.scenario}: {many} could not be taken off its lists: {left}")


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
            r.verdict,
        ]
        for r in reports
    ]  # fmt: skip
    common.show(common.table(headers, rows))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
