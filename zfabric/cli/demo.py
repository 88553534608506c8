"""`zfabric demo`: a broker, workers and a batch file, each a process of its own, and the books."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfabric.cli import common, fabric
from zfabric.cli.batch import in_words, stopping
from zfabric.cli.children import Children, ending_on_signals
from zfabric.cli.common import percent
from zfabric.cli.parser import count
from zfabric.cli.progress import reporter
from zfabric.cli.top import on_terminal, watch
from zfabric.config import KEYS, ClientConfig, WorkerConfig
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.batchoptions import Summary
    from zfabric.batchwatch import Progress

OUT = Path("demo-out")
START_S = 30.0
# A cache that holds a quarter of the prefixes shows what the order of work is worth.
CACHE_SHARE = 4
# A real model on two cores answers some 30 of these a second.
GGUF_ITEMS = 720

TEXT = """
See it all at work on this machine: start a broker and workers as processes, run a batch file
of few-shot prompts through them, and print what padding and the prefix cache did. With the
engine `sim` the cards are simulated, and so is every figure of theirs; with `llamacpp` a real
llama.cpp runs a GGUF file, and its cache hits are its own. Files stay in ./demo-out/.
Try it once more with --policy fifo, the order in which an ordinary queue would serve.
"""


def add(commands: common.Commands) -> None:
    """Add the command."""
    parser = common.add_command(
        commands,
        "demo",
        run,
        "a broker, workers and a batch file, at work",
        TEXT,
        "zfabric demo --workers 2 --items 2000",
    )
    flag = parser.add_argument
    flag("--items", type=count, metavar="N", help="requests to run (default: what there is)")
    flag("--workers", type=count, default=2, metavar="N", help="workers (default: 2)")
    flag("--engine", default="sim", metavar="NAME", help="engine of the workers (default: sim)")
    flag(
        "--model",
        default="demo",
        metavar="NAME",
        help="model name to use (default: demo); with llamacpp, a GGUF file of yours",
    )
    policies = KEYS["broker.policy"].choices
    flag("--policy", choices=policies, default="lanes", help="order of work (default: lanes)")
    flag("--opt", action="append", default=[], metavar="NAME=VALUE", help="an option of the engine")
    flag("--headless", action="store_true", help="plain lines in place of the dashboard")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run it all; 0 if every request has its result and the books balance."""
    from zfabric.cli.prompts import write_batch_file

    OUT.mkdir(exist_ok=True)
    if args.engine == "llamacpp":
        _choose_gguf(args)
    options = fabric.engine_options(args, args.engine, args.workers)
    source, output = OUT / "in.jsonl", OUT / "out.jsonl"
    items, what = write_batch_file(source, args.items, args.model)
    prefixes = shared_prefixes(source)
    if args.engine == "sim" and "cache_tokens" not in options:
        options["cache_tokens"] = str(sum(prefixes) // CACHE_SHARE)
    common.say(f"zfabric: {counted(items, 'request')} ({what}) in {source}")
    with (
        ending_on_signals(),
        _data_directory(args.policy) as data,
        Children(OUT) as children,
    ):
        address = _start(children, args, options, data)
        summary, signals = _work(address, source, output, args)
        status = _status(address)
    balanced = status["residual_items"] == 0 and status["residual_tokens"] == 0
    ok = summary.ok and summary.done == items and balanced
    if args.json:
        common.show_json({"ok": ok, "summary": dataclasses.asdict(summary), "status": status})
    else:
        common.show(_report(summary, status, args, prefixes))
    common.say(in_words(summary))
    if signals:
        return 128 + signals[0]
    return 0 if ok else 1


def _work(
    address: str, source: Path, output: Path, args: argparse.Namespace
) -> tuple[Summary, list[int]]:
    """Run the batch file, under the dashboard where there is a terminal to draw it on."""
    from zfabric.batchrun import run_batch

    lines = reporter(plain=args.headless)
    screen = not (args.headless or args.json) and on_terminal()
    drawn = threading.Event()

    def progress(now: Progress) -> None:
        if not drawn.is_set():
            lines.progress(now)

    with stopping() as (stop, signals):
        job = functools.partial(
            run_batch,
            source,
            output,
            broker=address,
            key="none",
            overwrite=True,
            stop=stop,
            progress=progress,
            notice=lines.notice,
        )
        try:
            if not screen:
                return job(), signals
            with ThreadPoolExecutor(1) as pool:
                drawn.set()
                running = pool.submit(job)
                where = ClientConfig(broker=address, key="none", timeout_s=START_S)
                watch(where, ends=running.done)
                drawn.clear()
                return running.result(), signals
        finally:
            lines.end()


def _choose_gguf(args: argparse.Namespace) -> None:
    """The user's own model, or a small one with random weights; and fewer items than simulated."""
    path = Path(args.model)
    if path.suffix != ".gguf":
        from zfabric_workers.tinygguf import write_tiny_gguf

        path = write_tiny_gguf(OUT / "tiny.gguf")
        common.say(f"zfabric: {path} has random weights: what it writes means nothing")
    args.model, args.model_path = path.stem, str(path)
    args.items = args.items or GGUF_ITEMS


def shared_prefixes(source: Path) -> list[int]:
    """Tokens of each distinct prefix of a batch file, as they are estimated for its shapes."""
    from zfabric.batchfile import Discovery, Request, read_requests

    with source.open("rb") as stream:
        shapes = {
            row.shape
            for row in Discovery().assign(read_requests(stream))
            if isinstance(row, Request)
        }
    return [shape.prefix_tokens for shape in shapes if shape.prefix_tokens]


@contextmanager
def _data_directory(policy: str) -> Iterator[Path | None]:
    """A new directory for the broker, removed in the end; none for fifo, which mixes shapes."""
    if policy == "fifo":
        yield None
        return
    data = Path(tempfile.mkdtemp(prefix="data-", dir=OUT))
    try:
        yield data
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _start(
    children: Children, args: argparse.Namespace, options: dict[str, str], data: Path | None
) -> str:
    """Start the broker and the workers; returns the broker's address once all are ready."""
    where = ["--data", str(data)] if data else ["--memory"]
    address = fabric.start_broker(children, where, ["--policy", args.policy])
    kept = f"items in {data}" if data else "items in memory, as fifo keeps them"
    common.say(f"zfabric: broker at {address}, policy {args.policy}, {kept}")
    contract = fabric.contract_flags(args.engine, WorkerConfig())
    names = fabric.start_workers(
        children, address, args.engine, args.model, args.workers, contract, options
    )
    fabric.await_workers(children, address, names, lambda row: row["live"] and row["granted"])
    simulated = " (simulated cards)" if args.engine == "sim" else ""
    common.say(f"zfabric: {counted(args.workers, 'worker')} ready, engine {args.engine}{simulated}")
    return address


def _status(address: str) -> dict[str, Any]:
    from zfabric.client import Client

    client = Client(address, role="operator", timeout_s=START_S, key="none")
    try:
        return client.stats(START_S)
    finally:
        client.close()


def prefixes_in_words(prefixes: Sequence[int]) -> str:
    """What the cache can hit: without a shared prefix 0% is all that there is, the ideal too."""
    from zfabric.batchfile.discovery import COUNT_MIN

    if prefixes:
        return f"{len(prefixes):,}, of {counted(sum(prefixes), 'token')}"
    return (
        f"none, so there is nothing to hit: a prefix counts once {COUNT_MIN} requests share it; "
        "try more --items"
    )


def _report(
    summary: Summary,
    status: Mapping[str, Any],
    args: argparse.Namespace,
    prefixes: Sequence[int],
) -> str:
    kept, files = status["durability"], status["storage"]["segment_files"]
    if files is not None:
        kept += f", {counted(files, 'segment file')} left"
    rows = [
        ("policy", args.policy),
        ("durability", kept),
        ("items", f"{status['completed_items']:,} of {status['accepted_items']:,}"),
        (
            "residual",
            ", ".join(counted(status[f"residual_{unit}s"], unit) for unit in ("item", "token")),
        ),
        ("shared prefixes", prefixes_in_words(prefixes)),
        ("padding waste", percent(status["waste_ratio"])),
        ("batch fill", percent(status["batch_fill_ratio"])),
        ("shape switches", f"{status['shape_switches_total']:,}"),
        ("lanes opened", f"{status['lanes_opened_total']:,}"),
        ("time", common.duration(summary.seconds)),
        ("output", summary.output),
    ]
    headers = ("worker", "items", "batches", "fill", "cache hits", "ideal", "measured by")
    workers = [
        [
            row["name"],
            row["items_done"],
            row["batches"],
            percent(row["batch_fill_ratio"]),
            percent(row["cache_hit_ratio"]),
            percent(row.get("cache_hit_ratio_ideal")),
            row["measured_by"] or "not measured",
        ]
        for row in status["workers"]
    ]
    return f"{common.pairs(rows)}\n\n{common.table(headers, workers)}"
