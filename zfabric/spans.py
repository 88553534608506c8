"""Spans: where a row of payloads is cut, so that each part fits in a message. Sizes are bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate


def spans(sizes: Iterable[int], items_max: int, bytes_max: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each part; a payload larger than `bytes_max` goes alone."""
    ends = list(accumulate(sizes))
    start = total = 0
    while start < len(ends):
        last = min(start + items_max, len(ends))
        stop = max(start + 1, bisect_right(ends, total + bytes_max, start, last))
        yield start, stop
        start, total = stop, ends[stop - 1]
