"""`zfabric bench pipeline` and `peers`: real processes over loopback, and others beside them."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zfabric.cli import bench_policies as tables
from zfabric.cli import common
from zfabric.cli.progress import bar
from zfabric.errors import ConfigError
from zfabric.lanes import LANES_MAX
from zfabric.words import counted

PIPELINE = """
A real broker, one producer and two workers that only touch bytes, each a process: items a second,
CPU of each side for a million items, memory, and how long a promise and a whole item take. Every
combination of --shapes, --lanes, --backlogs and --durability is a row; --grid is the table of the
docs. The whole latency is mostly the backlog's.
"""
PEERS = """
The same load on Redis Streams, NATS JetStream and RabbitMQ, as far as their servers and clients
(pip install zfabric[peers]) are installed: interleaved in one run, each on a server of its own in a
new directory. A ratio is ours over theirs in the same round; beside it its spread.
"""
HOTPATH = """
What each step of the broker costs for an item, driven in this process without a socket: CPU
microseconds of accepting, writing, offering, committing, completing, acknowledging and ticking.
--check counts bytecode instructions instead, on a small load: a count hardly differs from machine
to machine, and 20% more than was recorded is exit code 1.
"""
DURABILITIES = ("fsync", "os", "memory")
SIXTEEN = 160_000
# (shapes, lanes, backlog, durability)
GRID = (
    (1, 60, SIXTEEN, "fsync"), (16, 60, SIXTEEN, "fsync"), (1_000, 1, SIXTEEN, "fsync"),
    (16, 1, SIXTEEN, "fsync"), (16, 450, SIXTEEN, "fsync"), (16, 60, 10_000, "fsync"),
    (16, 60, 1_000_000, "fsync"), (16, 60, 4_000_000, "fsync"), (16, 60, SIXTEEN, "os"),
    (16, 60, SIXTEEN, "memory"),
)  # fmt: skip


def add(within: common.Commands) -> None:
    """Add the commands."""
    pipeline = common.add_command(
        within, "pipeline", _pipeline, "the whole pipeline, in processes", PIPELINE,
        "zfabric bench pipeline --shapes 16 --lanes 60 --backlogs 160000",
    )  # fmt: skip
    _numbers(pipeline, "--shapes", [16], "shapes")
    _numbers(pipeline, "--lanes", [60], "lanes a shape may use")
    _numbers(pipeline, "--backlogs", [SIXTEEN], "items that wait, all shapes together")
    pipeline.add_argument(
        "--durability", nargs="+", choices=DURABILITIES, default=["fsync"], help="(fsync)"
    )
    pipeline.add_argument(
        "--grid", action="store_true", help="the table of the docs, 5 to 15 minutes"
    )
    tables.trace_flags(pipeline)
    _common(pipeline)
    peers = common.add_command(
        within, "peers", _peers, "the same load on other systems", PEERS,
        "zfabric bench peers --systems redis --rounds 3",
    )  # fmt: skip
    peers.add_argument(
        "--systems", nargs="+", default=["redis", "nats", "rabbitmq"], metavar="NAME",
        help="redis, nats, rabbitmq (all)",
    )  # fmt: skip
    tables.number(peers, "--rounds", 3, "rounds")
    tables.number(peers, "--shapes", 16, "our shapes")
    tables.number(peers, "--lanes", 60, "our lanes")
    tables.number(peers, "--backlog", SIXTEEN, "items that wait")
    peers.add_argument("--durability", choices=DURABILITIES, default="fsync", help="ours (fsync)")
    _common(peers)

    hotpath = common.add_command(
        within, "hotpath", _hotpath, "what each step of the broker costs", HOTPATH,
        "zfabric bench hotpath --shapes 16 --lanes 60",
    )  # fmt: skip
    for flag, default, text in (
        ("--shapes", 16, "shapes"), ("--lanes", 60, "lanes a shape may use"),
        ("--waiting", 10_000, "items of a shape that wait"), ("--items", 60_000, "items"),
        ("--size", 2_048, "payload bytes"),
    ):  # fmt: skip
        tables.number(hotpath, flag, default, text)
    hotpath.add_argument("--memory", action="store_true", help="keep items in memory")
    hotpath.add_argument("--check", action="store_true", help="count, and compare")
    hotpath.add_argument("--dir", type=Path, metavar="DIR", help="where to put files")
    common.add_json(hotpath)


def _numbers(parser: argparse.ArgumentParser, flag: str, default: list[int], text: str) -> None:
    shown = " ".join(map(str, default))
    parser.add_argument(
        flag, type=int, nargs="+", default=default, metavar="N", help=f"{text} ({shown})"
    )


def _common(parser: argparse.ArgumentParser) -> None:
    tables.number(parser, "--size", 2_048, "payload bytes")
    parser.add_argument(
        "--seconds", type=float, default=8.0, metavar="S", help="what is counted of each row (8)"
    )
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to put files")
    common.add_json(parser)


@contextmanager
def _directory(parent: Path | None) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="zfabric-bench-", dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _pipeline(args: argparse.Namespace) -> int:
    from zfabric.bench import lengths, pipeline

    tables.check_positive(args, "shapes", "lanes", "backlogs", "size", "seconds")
    if max(args.lanes) > LANES_MAX:
        raise ConfigError(f"--lanes must be at most {LANES_MAX}, not {max(args.lanes)}")
    lengths.trace(args.lengths, args.column)
    chosen = list(pipeline.cases(args.shapes, args.lanes, args.backlogs, args.durability))
    if args.grid:
        chosen = [pipeline.Case(*row) for row in GRID]
    trace = pipeline.Trace(str(args.lengths) if args.lengths else None, args.column)
    rows: list[dict[str, Any]] = []
    failed = 0
    for case in chosen:
        where = f"{counted(case.shapes, 'shape')}, {counted(case.lanes, 'lane')}"
        common.say(f"zfabric: {where}, {case.backlog:,} waiting")
        try:
            with _directory(args.dir) as directory, bar(case.backlog) as progress:
                rows.append(pipeline.run(case, directory, args.size, args.seconds, trace, progress))
        except TimeoutError as error:
            # What has been measured took its time, and is shown all the same.
            common.say(f"zfabric: error: nothing to measure: {error}")
            failed = 1
            continue
        rate, cpu_s = (rows[-1][name] for name in ("items_per_s", "broker_cpu_s_per_million"))
        common.say(f"zfabric: {rate:,.0f} items/s, {cpu_s:.3g} s of the broker's CPU a million")
    shown: dict[str, Callable[[Any], str]] = {
        "shapes": _plain, "lanes": _plain, "backlog": _plain, "durability": str,
        "items_per_s": _plain, "broker_cpu_s_per_million": _short,
        "producer_cpu_s_per_million": _short, "workers_cpu_s_per_million": _short,
        "broker_rss_bytes": _megabytes, "ack_p50_s": _millis, "ack_p99_s": _millis,
        "ack_p999_s": _millis, "whole_p50_s": _short, "whole_p99_s": _short,
        "whole_p999_s": _short, "batch_fill_ratio": _short, "cost_ratio": _short,
    }  # fmt: skip
    tables.print_rows(args, {"size": args.size, "seconds": args.seconds}, rows, shown)
    return failed


def _hotpath(args: argparse.Namespace) -> int:
    import sys

    from zfabric.bench import hotpath, lengths

    tables.check_positive(args, "shapes", "lanes", "waiting", "items", "size")
    with _directory(args.dir) as directory:
        if args.check:
            count = hotpath.counted(directory)
            before = hotpath.RECORDED.get(f"{sys.version_info.major}.{sys.version_info.minor}")
            growth = count / before - 1 if before else None
            row = {"instructions_per_item": count, "recorded": before, "growth": growth}
            tables.print_rows(args, {}, [row], tables.COUNTS)
            return tables.judge_counts([row], hotpath.GROWTH_MAX)
        load = hotpath.Load(args.shapes, args.lanes, args.waiting, args.items, args.size)
        figures = hotpath.run(None if args.memory else directory, load, lengths.synthetic())
    tables.print_rows(args, load._asdict(), [figures], dict.fromkeys(figures, _short))
    return 0


def _peers(args: argparse.Namespace) -> int:
    from zfabric.bench import peers, pipeline

    tables.check_positive(args, "rounds", "shapes", "lanes", "backlog", "size", "seconds")
    systems = peers.chosen(args.systems)
    absent = {system: why for system in systems if (why := peers.missing(system)) is not None}
    for system, why in absent.items():
        common.say(f"zfabric: without {system.name} ({system.durability}): {why}")
    here = [system for system in systems if system not in absent]
    if not here:
        raise ConfigError("none of the systems is installed here: nothing to compare with")
    case = pipeline.Case(args.shapes, args.lanes, args.backlog, args.durability)
    with _directory(args.dir) as directory:
        rows = _tried(lambda: peers.run(
            here, directory, case=case, size=args.size, seconds=args.seconds, rounds=args.rounds,
            say=lambda text: common.say(f"zfabric: {text}"),
        ))  # fmt: skip
    shown: dict[str, Callable[[Any], str]] = {
        "system": str, "durability": str, "items_per_s": _plain, "ratio": _short,
        "ratio_min": _short, "ratio_max": _short, "broker_cpu_s_per_million": _short,
        "broker_rss_bytes": _megabytes,
    }  # fmt: skip
    about = {**case._asdict(), "size": args.size, "rounds": args.rounds}
    about["not_here"] = [f"{s.name} ({s.durability}): {why}" for s, why in absent.items()]
    tables.print_rows(args, about, rows, shown)
    return 0


def _tried(measure: Any) -> Any:
    try:
        return measure()
    except TimeoutError as error:
        raise ConfigError(f"nothing to measure: {error}") from None


def _plain(value: float) -> str:
    return f"{value:,.0f}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _millis(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.3g} ms"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.0f} MB"
