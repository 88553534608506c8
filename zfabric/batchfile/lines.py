"""Lines of JSON: read from a stream in bounded memory, and written compactly.

Line numbers are 1-based, sizes are bytes. Python's json reads and writes NaN and Infinity, which
are not JSON; here they are errors in both directions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

MIB = 1 << 20
# The largest payload that the broker takes; a longer line could not be submitted anyway.
LINE_BYTES_MAX = 64 * MIB
BLOCK_BYTES = 1 * MIB


def bounded_lines(
    stream: BinaryIO, line_bytes_max: int = LINE_BYTES_MAX
) -> Iterator[tuple[int, bytes | None, int]]:
    """(line number, line with its ending, bytes read) for each line of `stream`.

    A line of more than `line_bytes_max` bytes, its ending not counted, comes as None: it is
    skipped a block at a time and never held.
    """
    number = 0
    while line := stream.readline(line_bytes_max + 2):
        number += 1
        size = len(line)
        whole = line.endswith(b"\n") or size < line_bytes_max + 2
        if whole and len(line.rstrip(b"\r\n")) <= line_bytes_max:
            yield number, line, size
            continue
        while not line.endswith(b"\n") and (line := stream.readline(BLOCK_BYTES)):
            size += len(line)
        yield number, None, size


def count_lines(stream: BinaryIO) -> tuple[int, int]:
    """(lines, bytes) from here to the end, read a block at a time; blank lines count too."""
    lines = total_bytes = 0
    last = b"\n"
    while block := stream.read(BLOCK_BYTES):
        lines += block.count(b"\n")
        total_bytes += len(block)
        last = block[-1:]
    return lines + (last != b"\n"), total_bytes


def parse_json(text: bytes) -> Any:
    """The value of UTF-8 JSON. Raises ValueError (or its child UnicodeDecodeError) otherwise."""
    try:
        return json.loads(text.decode(), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def compact_json(value: object) -> bytes:
    """`value` as UTF-8 JSON without spaces. Raises ValueError for what JSON cannot say."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair has no UTF-8; as an escape it survives.
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
