"""`zfabric bench`: figures that anyone can print again."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zfabric.cli import bench_policies, bench_top, common
from zfabric.cli.progress import bar
from zfabric.errors import ConfigError

TEXT = """
Measure one thing and print the command, the machine and the figures, with the floor (what the
device does at best) beside them. Files go to a new directory under --dir and are removed.
"""


def add(commands: common.Commands) -> None:
    """Add the commands."""
    group = common.add_command(
        commands,
        "bench",
        lambda args: _need_more(),
        "print the figures of this machine",
        TEXT,
        "zfabric bench recovery --items 1000000",
    )
    within = group.add_subparsers(metavar="BENCHMARK")
    bench_top.add(within)
    for name, run, summary in (
        ("recovery", _recovery, "start on a directory of queued items"),
        ("memory", _memory, "memory for each queued item"),
        ("commit", _commit, "one group commit with every lane dirty"),
        ("ack", _ack, "latency from submit to accepted, in fsync"),
    ):
        parser = common.add_command(
            within, name, _runner(name, run), summary, TEXT, f"zfabric bench {name}"
        )
        parser.add_argument("--items", type=int, default=1_000_000, metavar="N", help="items")
        parser.add_argument("--size", type=int, default=2_048, metavar="BYTES", help="payload size")
        parser.add_argument("--rate", type=int, default=10_000, metavar="N", help="items/s (ack)")
        parser.add_argument("--shapes", type=int, default=16, metavar="N", help="shapes (commit)")
        parser.add_argument("--lanes", type=int, default=2_048, metavar="N", help="lanes (commit)")
        parser.add_argument(
            "--dir", type=Path, default=None, metavar="DIR", help="where to put files"
        )
        common.add_json(parser)
    bench_policies.add(within)


def _need_more() -> int:
    raise ConfigError("say what to measure; `zfabric bench --help` lists the benchmarks")


def _runner(
    name: str, run: Callable[[argparse.Namespace, Path], dict[str, Any]]
) -> Callable[[argparse.Namespace], int]:
    def measure(args: argparse.Namespace) -> int:
        from zfabric.bench import machine

        directory = Path(tempfile.mkdtemp(prefix="zfabric-bench-", dir=args.dir))
        try:
            figures = run(args, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        report = {"command": "zfabric " + " ".join(sys.argv[1:]), "machine": machine(), **figures}
        if args.json:
            common.show_json(report)
        else:
            common.show(common.pairs([(k, _shown(v)) for k, v in report.items()]))
        return 0

    return measure


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1_000 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _recovery(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from zfabric.bench import storage

    return storage.recovery(directory, args.items, args.size)


def _memory(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from zfabric.bench import storage

    with bar(args.items) as progress:
        return storage.memory(directory, args.items, args.size, progress)


def _commit(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from zfabric.bench import storage

    return storage.commit(directory, args.shapes, args.lanes, args.size)


def _ack(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from zfabric.bench import storage

    return storage.ack(directory, args.rate, 5.0, args.size)
