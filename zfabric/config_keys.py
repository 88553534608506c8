"""Keys: one row of the configuration table, and how text or a TOML value becomes its value.

A row is a dataclass field; `key_row`, `count_row` and `port_row` make one. `Key` is the same row
as flags, variables and files see it. Units are in `Key.unit`; bounds are inclusive.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from zfabric.addresses import PORT_MAX
from zfabric.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
ENV_PREFIX = "ZFABRIC_"
# Where a client finds its broker and its key: no name of a key of a section can be these.
SHORT_VARIABLES = {
    "client.broker": "ZFABRIC_BROKER", "client.key": "ZFABRIC_KEY",
    "client.server_key": "ZFABRIC_SERVER_KEY",
}  # fmt: skip
# Largest count or byte size that a key may hold: exact in a float and in JSON of every reader.
COUNT_MAX = 2**53 - 1
SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB|TiB)", re.IGNORECASE)
SIZE_UNITS = {"b": 1, "kib": 1 << 10, "mib": MIB, "gib": GIB, "tib": 1 << 40}
# In place of a file or a directory of keys: without one, whatever is said elsewhere.
NO_KEY = "none"
TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off"})
METAVARS = {"s": "S", "ms": "MS", "Hz": "HZ", "bytes": "SIZE"}
# Counts are written in groups of three from here on, as TOML and Python read them.
GROUPED_MIN = 10_000
EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def key_row(
    default: Any,
    text: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str = "",
) -> Any:
    """A row of the key table: a dataclass field with its default, help, unit and bounds.

    `metavar` stands for a value in `--help`; where it is not given, the unit's does.
    """
    metadata = {"help": text, "unit": unit, "low": low, "high": high, "choices": choices}
    return field(
        default=default, metadata={**metadata, "metavar": metavar or METAVARS.get(unit, "N")}
    )


def count_row(default: int, text: str, unit: str = "items", high: float = COUNT_MAX) -> Any:
    """A row that holds a count of at least one."""
    return key_row(default, text, unit=unit, low=1, high=high)


def port_row(default: int | None, text: str) -> Any:
    """A row that holds a TCP port; 0 means any free one."""
    return key_row(default, text, low=0, high=PORT_MAX, metavar="PORT")


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table, as flags, variables and files see it."""

    section: str
    name: str
    kind: type
    optional: bool
    default: Any
    unit: str
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    metavar: str
    help: str

    @property
    def full_name(self) -> str:
        """`section.name`, as errors and `config show` print it."""
        return f"{self.section}.{self.name}"

    @property
    def env_name(self) -> str:
        """The variable that sets it."""
        if self.full_name in SHORT_VARIABLES:
            return SHORT_VARIABLES[self.full_name]
        return f"{ENV_PREFIX}{self.section}_{self.name}".upper()

    @property
    def flag(self) -> str:
        """The flag that sets it: the name without its unit of time (`--linger`, in ms)."""
        return "--" + re.sub(r"_(ms|s)$", "", self.name).replace("_", "-")

    @property
    def dest(self) -> str:
        """Where argparse puts the flag's text."""
        return f"{self.section}_{self.name}"

    @property
    def expectation(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        text = EXPECTED[self.kind]
        if self.unit == "bytes":
            text += ' (bytes, or text such as "4 GiB")'
        elif self.unit:
            text += f" ({self.unit})"
        if self.low is not None and self.high == COUNT_MAX:
            text += f", at least {self.text(self.low)}"
        elif self.low is not None and self.high is not None:
            text += f" from {self.text(self.low)} to {self.text(self.high)}"
        return text

    def text(self, value: Any) -> str:
        """A value as flags and variables take it, and as people read it."""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float) and not value.is_integer():
            return repr(value)
        if not isinstance(value, int | float):
            return str(value)
        whole = int(value)
        if self.unit == "bytes":
            return _size_text(whole)
        return f"{whole:_}" if self.unit and whole >= GROUPED_MIN else str(whole)

    def toml(self, value: Any) -> str:
        """A value as TOML writes it; it reads back to the same value."""
        text = self.text(value)
        is_text = isinstance(value, str) or not text[-1].isdigit()
        quoted = is_text and not isinstance(value, bool)
        return json.dumps(text, ensure_ascii=False) if quoted else text

    def value_of(self, raw: object, origin: str, *, typed: bool = False) -> Any:
        """`raw` (text, or a value) as this key's type, checked. Raises ConfigError.

        Text of a `typed` origin (TOML) must be meant as text, except for sizes such as "4 GiB".
        """
        readable = not typed or self.unit == "bytes"
        value = _from_text(self, raw) if readable and isinstance(raw, str) else raw
        if self.kind is float and type(value) is int:
            value = float(value) if abs(value) <= COUNT_MAX else math.inf
        if not _fits(self, value):
            raise ConfigError(
                f"{self.full_name} ({origin}) must be {self.expectation}, not {raw!r}"
            )
        return value


def _from_text(key: Key, text: str) -> object:
    """Text as the key's type where it reads as one, else the text itself (refused later)."""
    word = text.strip()
    if key.kind is bool and word.lower() in TRUE_WORDS | FALSE_WORDS:
        return word.lower() in TRUE_WORDS
    if key.kind is int and key.unit == "bytes" and (size := SIZE.fullmatch(word)):
        return int(size[1]) * SIZE_UNITS[size[2].lower()]
    if key.kind in (int, float):
        try:
            number: object = key.kind(word)
        except ValueError:
            return text
        return number
    return text


def _fits(key: Key, value: object) -> bool:
    if type(value) is not key.kind:
        return False
    if isinstance(value, str):
        return value in key.choices if key.choices else bool(value) and value.isprintable()
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(value, (int, float)) and key.low is not None and key.high is not None:
        return key.low <= value <= key.high
    return True


def _size_text(size: int) -> str:
    """Bytes in the largest unit that divides them: 4 GiB; as a plain number where none does."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if size and size % scale == 0:
            return f"{size // scale} {unit}"
    return str(size)
