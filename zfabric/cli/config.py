"""`zfabric config`: what every setting is, where it came from, and a file to start from."""

from __future__ import annotations

import argparse
from pathlib import Path

from zfabric import config as configuration
from zfabric import config_text
from zfabric.cli import common
from zfabric.errors import ConfigError

TEXT = """
Settings come from, highest first: flags, ZFABRIC_* variables, ./zfabric.toml, the user's
config.toml, defaults.
"""


def add(commands: common.Commands) -> None:
    """Add the commands."""
    within = common.add_group(
        commands,
        "config",
        "settings: show them, or write a file of them",
        TEXT,
        "zfabric config show --origin",
    )
    show = common.add_command(
        within,
        "show",
        run_show,
        "print every setting",
        "Print every setting that is in force here, as lines of TOML; with --json, typed values,\n"
        "null where there is none.",
        "zfabric config show --origin",
    )
    show.add_argument("--origin", action="store_true", help="say where each value came from")
    common.add_json(show)
    init = common.add_command(
        within,
        "init",
        run_init,
        "write ./zfabric.toml",
        f"Write ./{configuration.FILE_NAME} with what every setting means and its default,\n"
        "commented out.",
        "zfabric config init",
    )
    init.add_argument("--stdout", action="store_true", help="print it instead")


def run_show(args: argparse.Namespace) -> int:
    """Print every setting."""
    rows = config_text.show(common.load(args))
    if args.json:
        common.show_json({k.full_name: {"value": value, "origin": at} for k, value, at in rows})
        return 0
    lines = [
        f"# {key.full_name} is not set" if value is None else f"{key.full_name} = {key.toml(value)}"
        for key, value, _ in rows
    ]
    if args.origin:
        width = max(map(len, lines))
        lines = [
            f"{line.ljust(width)}  # {at}" for line, (_, _, at) in zip(lines, rows, strict=True)
        ]
    common.show("\n".join(lines))
    return 0


def run_init(args: argparse.Namespace) -> int:
    """Write the file, never over another one."""
    if args.stdout:
        common.show(config_text.template().rstrip("\n"))
        return 0
    path = Path(configuration.FILE_NAME)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(config_text.template())
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already; zfabric config init --stdout prints one"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    common.say(f"zfabric: {path} written")
    return 0
