"""The configuration as text: what is set and from where, and a file to begin with."""

from __future__ import annotations

import textwrap
from typing import Any

from zfabric.config import KEYS, SECTIONS, Config
from zfabric.config_keys import Key


def show(config: Config) -> list[tuple[Key, Any, str]]:
    """Rows (key, value, origin) for `zfabric config show`, in the table's order."""
    return [
        (key, getattr(getattr(config, key.section), key.name), config.origins[name])
        for name, key in KEYS.items()
    ]


def template() -> str:
    """A zfabric.toml for `zfabric config init`: every key at its default, commented out.

    Settings have no space after their #; prose, and keys that have no default, do.
    """
    lines = _comment(
        "Settings of zfabric; flags and ZFABRIC_* variables override them. Every setting below is "
        "at its default and commented out: to change one, take away its # and give a value."
    )
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for key in (key for key in KEYS.values() if key.section == section):
            lines += [
                "",
                *_comment(key.help),
                *_comment(f"{key.expectation}; also {key.flag}, {key.env_name}"),
            ]
            lines.append(
                f"# {key.name} = (not set)"
                if key.default is None
                else f"#{key.name} = {key.toml(key.default)}"
            )
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
