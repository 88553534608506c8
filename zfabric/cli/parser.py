"""The command line's parser: argparse with our layout, and errors of one line that name a way on.

Whatever a command does not know is an error of that command, with the nearest that it does know.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from zfabric.errors import ConfigError

HELP_POSITION_MAX = 28
# What argparse calls by the name of a Python function.
KINDS = {"int": "a whole number", "float": "a number"}


class Layout(argparse.RawDescriptionHelpFormatter):
    """Our texts as they are, and the name of every command on the line of its summary."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_POSITION_MAX)

    def add_argument(self, action: argparse.Action) -> None:
        """As argparse does it, counting that a command's name is indented once more."""
        super().add_argument(action)
        for nested in self._iter_indented_subactions(action):
            length = len(self._format_action_invocation(nested)) + self._current_indent
            self._action_max_length = max(self._action_max_length, length)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the layout of our texts and errs in one line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", Layout)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self._positionals.title = "arguments"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Leaves nothing for another parser: what this one does not know is an error of its own."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            if word.startswith("-"):
                self.error(f"unknown flag {word}{_nearest(word, self._option_string_actions)}")
            self.error(f"unexpected argument {word!r}")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        hint = _nearest(str(value), known) or f" (one of {', '.join(known)})"
        raise argparse.ArgumentError(action, f"no {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        """One line that names the way to more."""
        plain = re.sub(r"invalid (\w+) value: (.+)", _wrong_value, message)
        raise ConfigError(f"{plain}; see {self.prog} --help")


def count(text: str) -> int:
    """The type of a flag that takes a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _wrong_value(found: re.Match[str]) -> str:
    return f"{found[2]} is not {KINDS.get(found[1], 'a value that it takes')}"
