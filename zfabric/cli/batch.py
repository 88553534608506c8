"""`zfabric run-batch`: an OpenAI Batch file through a broker, with progress while it runs."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from zfabric import config as configuration
from zfabric.cli import common
from zfabric.cli.embedded import BROKER_NAMES
from zfabric.cli.parser import count
from zfabric.cli.progress import Lines, reporter
from zfabric.cli.worker import add_engine_flags
from zfabric.config import KEYS, Config
from zfabric.errors import ConfigError, TimeoutExpired
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.batchoptions import Summary
    from zfabric.batchwatch import Progress
    from zfabric.cli.fabric import Watching

# What a worker of its own may be told; its model is the file's, its name is made up.
EMBEDDED_WORKER = ("engine", "max_batch", "max_tokens", "max_input", "ragged", "window")
STOPPING = b"\nzfabric: stopping; what the broker has taken stays there (again to end at once)\n"
TEXT = """
Run an OpenAI Batch file: one request a line (custom_id, method, url, body) for
/v1/chat/completions, /v1/completions or /v1/embeddings. Results are appended to the output as
they come, one row a line of the input; failures and bad lines go to the errors file. After any
kind of crash, --resume goes on where the run stopped: what is queued at the broker is adopted, and
no custom_id is written twice. With another --model than before, what is queued is cancelled and
sent again. Dead items that were requeued (zfabric dead requeue) replace their failures, also with
--resume once the run has ended. Progress goes to standard error, the summary of --json to standard
output. Exit code 1 means that some lines have no result.

With --engine no broker need run: one is started with --workers workers, keeps its data in
OUTPUT.fabric, and is gone when every line has its row. Prompts that share their beginning are found
without being declared; --dry-run shows what was found, and what the order of work saves.
"""


def add(commands: common.Commands) -> None:
    """Add the command."""
    example = "zfabric run-batch -i in.jsonl -o out.jsonl --model llama-3-8b"
    parser = common.add_command(
        commands, "run-batch", run, "run an OpenAI Batch file", TEXT, example
    )
    flag = parser.add_argument
    flag("-i", "--input", required=True, metavar="FILE", help="requests, one a line")
    flag("-o", "--output", metavar="FILE", help="results, one a line, appended")
    flag(
        "--errors",
        metavar="FILE",
        help="failures and bad lines (default: out.errors.jsonl for out.jsonl, else OUTPUT.errors)",
    )
    flag("--model", metavar="NAME", help="replace the model of every request")
    flag("--resume", action="store_true", help="go on with a run; skip what the output has")
    flag("--retry-failed", action="store_true", help="resume, and run the failures once more")
    flag("--overwrite", action="store_true", help="empty the output and errors files first")
    flag("--force", action="store_true", help="resume although the input or errors file differs")
    flag(
        "--no-wait-for-workers",
        action="store_true",
        help="end with code 4 when no worker serves what is left, instead of waiting for one",
    )
    flag(
        "--stall-timeout",
        type=_seconds,
        metavar="S",
        help="end with code 4 when no result has come for S seconds (default: wait)",
    )
    flag("--quiet", action="store_true", help="no progress; errors and warnings only")
    flag(
        "--tokenizer",
        metavar="T",
        help="count lengths with a tokenizer.json, a sentencepiece model, a tiktoken encoding or "
        "mistral:NAME (default: estimated, and corrected by the engine's usage)",
    )
    flag("--dry-run", action="store_true", help="print shapes, tokens and padding; run nothing")
    common.add_json(parser)
    common.add_broker(parser)
    own = parser.add_argument_group("with a broker and workers of its own (--engine)")
    configuration.add_flags(own, "worker", EMBEDDED_WORKER)
    own.add_argument(
        "--workers", type=count, default=1, metavar="N", help="workers to start (default: 1)"
    )
    add_engine_flags(own)
    configuration.add_flags(own, "broker", BROKER_NAMES)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError(text)
    return value


def run(args: argparse.Namespace) -> int:
    """Run the file; 0 when every line has a result."""
    config = common.load(args)
    if args.resume and args.overwrite:
        raise ConfigError("--overwrite and --resume exclude each other; choose one")
    if args.dry_run:
        from zfabric.cli.dryrun import run_dry

        return run_dry(args, config)
    if args.output is None:
        raise ConfigError("say where the results go: -o/--output FILE (or --dry-run)")
    from zfabric.batchfile import check_paths

    # Before a broker of its own is started, which takes seconds and leaves a directory.
    errors = None if args.errors is None else Path(args.errors)
    check_paths(Path(args.input), Path(args.output), errors)
    args.count = load_count(args.tokenizer)
    if args.worker_engine is None:
        return _run(args, config, reporter(quiet=args.quiet))
    if args.client_broker is not None:
        raise ConfigError("--engine starts a broker of its own: leave out --broker, or --engine")
    return _run_embedded(args, config, reporter(quiet=args.quiet))


def _run_embedded(args: argparse.Namespace, config: Config, lines: Lines) -> int:
    """The file with a broker and workers that live as long as the run."""
    from zfabric.cli import embedded
    from zfabric.config_keys import NO_KEY

    with embedded.running(args, config, lines.notice) as own:
        client = dataclasses.replace(config.client, broker=own.address, key=NO_KEY)
        try:
            code = _run(args, dataclasses.replace(config, client=client), lines, own.watching)
        except TimeoutExpired:
            own.watching.explain()
            raise
        own.done = code in (0, 1) and not args.incomplete
    return code


def _run(
    args: argparse.Namespace,
    config: Config,
    lines: Lines,
    watching: Watching | None = None,
) -> int:
    from zfabric.batchrun import run_batch

    def progress(now: Progress) -> None:
        if watching is not None:
            watching.check()
        lines.progress(now)

    settings = config.client
    options: dict[str, Any] = {
        "broker": settings.broker,
        "key": common.key_of(settings),
        "timeout_s": settings.timeout_s,
        "count": args.count,
        "errors": args.errors,
        "resume": args.resume,
        "overwrite": args.overwrite,
        "retry_failed": args.retry_failed,
        "force": args.force,
        "model": args.model,
        "stall_timeout_s": args.stall_timeout,
        "wait_for_workers": not args.no_wait_for_workers and watching is None,
        "why": None if watching is None else watching.why,
        "progress": progress,
        "notice": lines.notice,
    }
    with stopping() as (stop, signals):
        try:
            summary = run_batch(args.input, args.output, stop=stop, **options)
        finally:
            lines.end()
    args.incomplete = not summary.complete
    if args.json:
        common.show_json(dataclasses.asdict(summary) | {"ok": summary.ok})
    if not args.quiet:
        common.say(in_words(summary))
    if not summary.complete:
        common.say(f"zfabric: stopped. To go on: {resume_command(args)}")
        return 128 + signals[0] if signals else 1
    return 0 if summary.ok else 1


@contextmanager
def stopping() -> Iterator[tuple[threading.Event, list[int]]]:
    """While this is open the first signal asks the run to stop, and a second one ends it."""
    stop, signals = threading.Event(), list[int]()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        # Not the event is asked: this may come in the midst of its being set.
        if len(signals) > 1:
            raise KeyboardInterrupt
        stop.set()
        # Not through print: the signal may have come in the middle of one.
        os.write(2, STOPPING)

    former = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop, signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def resume_command(args: argparse.Namespace) -> str:
    """The command that goes on with this run."""
    import shlex

    words = ["zfabric", "run-batch", "-i", args.input, "-o", args.output, "--resume"]
    for flag, value in (
        ("--errors", args.errors),
        ("--model", args.model),
        ("--tokenizer", args.tokenizer),
        ("--broker", args.client_broker),
        ("--key", args.client_key),
        ("--server-key", args.client_server_key),
    ):
        if value is not None:
            words += [flag, value]
    return shlex.join(words + _own_words(args))


def _own_words(args: argparse.Namespace) -> list[str]:
    """The flags of a broker and workers of its own, as they were given."""
    if args.worker_engine is None:
        return []
    names = [f"worker.{name}" for name in EMBEDDED_WORKER] + [f"broker.{n}" for n in BROKER_NAMES]
    given = [(KEYS[name].flag, getattr(args, KEYS[name].dest)) for name in names]
    given += [("--model-path", args.model_path), ("--url", args.url)]
    words = ["--workers", str(args.workers)]
    for flag, value in given:
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [flag, str(value)]
    for option in args.opt:
        words += ["--opt", option]
    return words


def load_count(name: str | None) -> Callable[[str], int] | None:
    """What counts the tokens of a text; None where they are to be estimated."""
    if name is None:
        return None
    from zfabric_workers.tokenizing import load_tokenizer

    return load_tokenizer(name)


def in_words(summary: Summary) -> str:
    """A summary for people, in one line."""
    parts = [counted(summary.done, "result")]
    if summary.failed:
        parts.append(f"{summary.failed:,} failed")
    if summary.bad:
        parts.append(counted(summary.bad, "bad line"))
    for number, name in (
        (summary.too_long, "too long to run"),
        (summary.resumed, "done in an earlier run"),
        (summary.adopted, "adopted from the broker"),
        (summary.resubmitted, "sent again"),
    ):
        if number:
            parts.append(f"{number:,} {name}")
    text = f"zfabric: {', '.join(parts)}; {common.duration(summary.seconds)}"
    if summary.output_tokens is not None and summary.seconds > 0:
        rate = common.short(summary.output_tokens / summary.seconds)
        text += f"; {summary.output_tokens:,} output tokens, {rate} tok/s"
    if summary.length_ratio is not None:
        text += "; lengths estimated"
        if summary.length_ratio != 1:
            text += f", corrected by {summary.length_ratio:.2f} from usage"
    if summary.failed or summary.bad:
        text += f"; reasons in {summary.errors}"
    return text
