"""`zfabric bench`: figures that anyone can print again."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zfabric.cli import bench_pipeline, bench_policies, bench_top, common
from zfabric.cli.children import ending_on_signals
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
    within = group.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    bench_top.add(within)
    for name, run, summary in (
        ("recovery", _recovery, "start on a directory of queued items"),
        ("memory", _memory, "memory for each queued item"),
        ("commit", _commit, "one group commit with every lane dirty"),
        ("ack", _ack, "latency from submit to accepted, in fsync"),
        ("batchfile", _batchfile, "memory of broker and run-batch along a long file"),
        ("embed", _embed, "padding: a sentence-embedding model, three orders of work"),
        ("transformers", _transformers, "padding: a causal model, three orders of work"),
        ("gpu", _gpu, "the same on a CUDA GPU: 1 B random weights, prefixes kept"),
    ):
        parser = common.add_command(
            within, name, _runner(name, run), summary, TEXT, f"zfabric bench {name}"
        )
        parser.add_argument("--items", type=int, default=1_000_000, metavar="N", help="items")
        parser.add_argument("--model-path", metavar="DIR", help="model of embed and transformers")
        parser.add_argument("--cpu", action="store_true", help="try `gpu` here, with a small model")
        parser.add_argument("--size", type=int, default=2_048, metavar="BYTES", help="payload size")
        parser.add_argument("--rate", type=int, default=10_000, metavar="N", help="items/s (ack)")
        parser.add_argument("--shapes", type=int, default=16, metavar="N", help="shapes (commit)")
        parser.add_argument("--lanes", type=int, default=2_048, metavar="N", help="lanes (commit)")
        parser.add_argument(
            "--dir", type=Path, default=None, metavar="DIR", help="where to put files"
        )
        common.add_json(parser)
    bench_pipeline.add(within)
    bench_policies.add(within)
    for each in set(within.choices.values()):
        each.set_defaults(run=_leaving_nothing(each.get_default("run")))


def _leaving_nothing(
    run: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """A benchmark that a signal ends leaves no process and no file."""

    def measure(args: argparse.Namespace) -> int:
        if (parent := getattr(args, "dir", None)) is not None and not parent.is_dir():
            raise ConfigError(f"--dir {parent} is no directory: make it first")
        with ending_on_signals():
            return run(args)

    return measure


def _need_more() -> int:
    raise ConfigError("say what to measure; `zfabric bench --help` lists the benchmarks")


def _runner(
    name: str, run: Callable[[argparse.Namespace, Path], dict[str, Any]]
) -> Callable[[argparse.Namespace], int]:
    def measure(args: argparse.Namespace) -> int:
        common.without_keys()
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


def _batchfile(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from zfabric.bench import batchfile

    return batchfile.memory(directory, args.items, args.size)


def _engine_threads() -> str:
    """Processors for the model: all but one, which broker, client and supervisor share.

    torch's threads wait for each other after every operation, so one that has to share its
    processor holds up all of them, and short operations the most.
    """
    return str(max(1, (os.cpu_count() or 1) - 1))


def _embed(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from zfabric.bench import padding
    from zfabric_workers import engine_factory
    from zfabric_workers.embed import packaged_model
    from zfabric_workers.tokenizing import load_tokenizer

    path = args.model_path or str(packaged_model())
    count = load_tokenizer(path)
    # the model puts one token before and one after each text
    factory = engine_factory("embed", {"model_path": path, "threads": _engine_threads()})
    return padding.compare(padding.EMBED, factory, lambda text: 2 + count(text))


def _transformers(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from zfabric.bench import padding
    from zfabric_workers import engine_factory
    from zfabric_workers.tinymodel import write_tiny_model
    from zfabric_workers.tokenizing import load_tokenizer

    path = args.model_path
    if path is None:
        texts = padding.texts_of(padding.CAUSAL)
        model = write_tiny_model(
            directory / "model", hidden=256, layers=4, feed_forward=512, texts=texts
        )
        path = str(model)
    factory = engine_factory("transformers", {"model_path": path, "threads": _engine_threads()})
    return padding.compare(padding.CAUSAL, factory, load_tokenizer(path))


def _gpu(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """About 1 B parameters: 20 layers of width 2,048, in bfloat16."""

    from zfabric.bench import padding
    from zfabric_workers import engine_factory
    from zfabric_workers.causal import cuda_name
    from zfabric_workers.tinymodel import write_tiny_model
    from zfabric_workers.tokenizing import load_tokenizer

    device = "cpu" if args.cpu else cuda_name()
    if device is None:
        return {"skipped": "there is no CUDA GPU here (--cpu tries the check itself)"}
    load, texts = padding.GPU, padding.texts_of(padding.GPU)
    if args.cpu:
        load = dataclasses.replace(load, items=100)
        model = write_tiny_model(directory / "model", texts=texts)
        options = {"device": "cpu"}
    else:
        model = write_tiny_model(
            directory / "model", hidden=2_048, layers=20, heads=16, feed_forward=5_632,
            texts=texts, dtype="bfloat16",
        )  # fmt: skip
        options = {"device": "cuda", "dtype": "bfloat16"}
    factory = engine_factory("transformers", {"model_path": str(model), **options})
    return {"device": device, **padding.compare(load, factory, load_tokenizer(str(model)))}
