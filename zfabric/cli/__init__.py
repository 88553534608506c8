"""The command `zfabric`: which commands there are, and what an error becomes.

Standard output is data, standard error is talk. Exit codes: 0; 1 work failed; 2 usage or
configuration; 3 broker not reached; 4 time-out; 5 invariant broken; 6 inconclusive; 130 and 143
signals. Whatever a command needs that is slow to import (sockets, engines, screens) is imported
when it runs, never for `--help`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence

import zfabric
from zfabric.cli import (
    batch,
    bench,
    broker,
    chaos,
    common,
    config,
    demo,
    doctor,
    explain,
    keys,
    look,
    operate,
    segments,
    setup,
    top,
    worker,
)
from zfabric.cli.parser import Parser
from zfabric.errors import (
    ConfigError,
    ConnectError,
    Inconclusive,
    InvariantError,
    NameInUse,
    NotAllowed,
    ProtocolError,
    TimeoutExpired,
)

EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHED, EXIT_TIMEOUT, EXIT_INVARIANT = 1, 2, 3, 4, 5
EXIT_INCONCLUSIVE = 6
EXIT_SIGINT, EXIT_SIGPIPE = 130, 141

GROUPS = (
    demo, broker, worker, batch, top, look, explain, operate, keys, segments, bench, chaos, config,
    doctor, setup,
)  # fmt: skip

DESCRIPTION = """\
A brokered work fabric for GPU inference: one broker decides which batch every item belongs in,
workers run the batches, producers get their results back, and nothing is lost on the way.

  zfabric demo                                  see it all at work, on simulated cards
  zfabric broker                                start a broker
  zfabric worker --engine sim --model tiny --max-batch 32 --max-tokens 65536 --max-input 8192
  zfabric run-batch -i in.jsonl -o out.jsonl    run an OpenAI Batch file through it
"""

EPILOG = """\
exit codes: 0 done; 1 work failed; 2 usage or configuration; 3 broker not reached; 4 time-out;
5 invariant broken; 6 inconclusive: it could not be tried; 130, 143 ended by a signal
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(prog="zfabric", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"zfabric {zfabric.__version__}")
    common.add_traceback(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for group in GROUPS:
        group.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and never raises for what a user can cause."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # Some parents leave it so, and then how a process of ours has ended is never known.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    wants_traceback = "--traceback" in (sys.argv[1:] if argv is None else argv)
    try:
        code = _run(argv)
        common.put()
        return code
    except KeyboardInterrupt:
        return EXIT_SIGINT
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does.
        common.silence()
        return EXIT_SIGPIPE
    except Exception as error:  # noqa: BLE001 - the edge: every error becomes one line and a code
        if wants_traceback:
            common.say(traceback.format_exc())
        text = " ".join(common.clean(str(error)).split()) or type(error).__name__
        common.say(f"zfabric: error: {text}")
        return exit_code(error)


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        return code
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_USAGE


def exit_code(error: Exception) -> int:
    """What an error that ended a command means to a script."""
    if isinstance(error, ConfigError | NameInUse | NotAllowed | common.OutputError):
        return EXIT_USAGE
    if isinstance(error, TimeoutExpired):
        return EXIT_TIMEOUT
    if isinstance(error, ConnectError | ProtocolError):
        return EXIT_UNREACHED
    if isinstance(error, InvariantError):
        return EXIT_INVARIANT
    if isinstance(error, Inconclusive):
        return EXIT_INCONCLUSIVE
    return EXIT_FAILED
