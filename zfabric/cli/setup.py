"""`zfabric completion` and `zfabric version`."""

from __future__ import annotations

import argparse

import zfabric
from zfabric.cli import common
from zfabric.errors import ConfigError

COMPLETION = """
Print a completion script for a shell. Needs the package shtab: pip install 'zfabric[completion]'.
"""


def add(commands: common.Commands) -> None:
    """Add the commands."""
    parser = common.add_command(
        commands,
        "completion",
        run_completion,
        "completion script for bash or zsh",
        COMPLETION,
        'eval "$(zfabric completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that the script is for")
    parser = common.add_command(
        commands,
        "version",
        run_version,
        "print versions",
        "Print the version of zfabric, and with --json those that it stands on.",
        "zfabric version --json",
    )
    common.add_json(parser)


def run_completion(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            "completion needs the package shtab: pip install 'zfabric[completion]'"
        ) from None
    from zfabric.cli import build_parser

    common.show(shtab.complete(build_parser(), shell=args.shell).rstrip("\n"))
    return 0


def run_version(args: argparse.Namespace) -> int:
    """Print the versions."""
    if not args.json:
        common.show(f"zfabric {zfabric.__version__}")
        return 0
    import platform

    from zfabric.cli.doctor import package_versions
    from zfabric.protocol import VERSION

    common.show_json(
        {
            "zfabric": zfabric.__version__,
            "protocol": VERSION,
            "python": platform.python_version(),
            "packages": package_versions(),
        }
    )
    return 0
