"""Lengths for the benchmarks of the policies: a column of a CSV file, or a synthetic trace.

Lengths are whole tokens. Both are drawn from with a seed, so that a run can be repeated exactly.
"""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

from zfabric.errors import ConfigError
from zfabric.shapes import TOKENS_MAX

# Lengths of the synthetic trace, and the tokens that they stay within.
SYNTHETIC_LENGTHS = 8_192
SYNTHETIC_MIN_TOKENS, SYNTHETIC_MAX_TOKENS = 8, 8_192


def synthetic(seed: int = 1) -> list[int]:
    """Lengths as services see them: a wide body, short questions, and prompts near a full context.

    Three log-normal parts: (share, median in tokens, sigma).
    """
    rng = random.Random(seed)
    parts = ((0.6, 1_500, 0.8), (0.25, 120, 0.7), (0.15, 4_500, 0.25))
    found: list[int] = []
    for share, median, sigma in parts:
        for _ in range(round(share * SYNTHETIC_LENGTHS)):
            length = round(rng.lognormvariate(math.log(median), sigma))
            found.append(min(SYNTHETIC_MAX_TOKENS, max(SYNTHETIC_MIN_TOKENS, length)))
    return found


def read(path: Path, column: str) -> list[int]:
    """The whole numbers of a CSV column. Raises ConfigError, saying what is wrong and where."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if column not in (rows.fieldnames or ()):
                names = ", ".join(rows.fieldnames or ()) or "none"
                raise ConfigError(f"{path} has no column {column!r}; it has: {names}")
            found = [_length(row[column], path, rows.line_num) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"{path} has no rows")
    return found


def _length(text: str | None, path: Path, line: int) -> int:
    try:
        length = int(text or "")
    except ValueError:
        length = -1
    if not 0 <= length <= TOKENS_MAX:
        raise ConfigError(f"{path}, line {line}: {text!r} is no length of 0 to {TOKENS_MAX} tokens")
    return length


def trace(path: Path | None, column: str) -> list[int]:
    """The lengths of `path`, or the synthetic trace where there is none. Raises ConfigError."""
    return synthetic() if path is None else read(path, column)
