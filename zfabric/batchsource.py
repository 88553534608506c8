"""The input of a batch run: its rows with their shapes, and lengths that usage corrects.

Decides how a length is made where no tokenizer counts it: the estimate of `chains`, times what the
engine's own usage has shown the estimates to be worth. Lengths are tokens. Memory is the window of
`discovery`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from zfabric.batchfile import LINE_BYTES_MAX, BadLine, Discovery, Request, read_requests
from zfabric.batchfile.chains import Count, estimate_tokens
from zfabric.shapes import TOKENS_MAX

# Answers before their usage is believed, and the change that is worth making: each moves lengths,
# and so items to other lanes.
ANSWERS_MIN = 32
CHANGE_MIN = 0.02
# An engine whose usage is further off counts something else.
RATIO_MIN, RATIO_MAX = 0.1, 10.0


class Source:
    """The rows of one input from its beginning; `directory` takes what is too much for memory."""

    def __init__(
        self,
        stream: BinaryIO,
        *,
        model: str | None = None,
        line_bytes_max: int = LINE_BYTES_MAX,
        count: Count | None = None,
        directory: Path | None = None,
    ) -> None:
        self._stream = stream
        self._size_bytes = os.fstat(stream.fileno()).st_size
        self._discovery = Discovery()
        self._rows = read_requests(
            stream,
            model=model,
            line_bytes_max=min(line_bytes_max, LINE_BYTES_MAX),
            count=count or estimate_tokens,
            directory=directory,
        )

    def rows(self) -> Iterator[Request | BadLine]:
        """Every row, in order. Once."""
        return self._discovery.assign(self._rows)

    def total_lines(self) -> int | None:
        """Lines of the whole input, judged by those read so far; exact once all are read."""
        read_bytes, lines = self._stream.tell(), self._discovery.read_upto
        return max(lines, round(lines * self._size_bytes / read_bytes)) if read_bytes else None


class Lengths:
    """Lengths as they are submitted; `counted` ones are right as they are."""

    def __init__(self, *, counted: bool) -> None:
        self._counted = counted
        self._ratio = 1.0
        self._answers = self._estimated_tokens = self._reported_tokens = 0

    @property
    def ratio(self) -> float | None:
        """What estimates are multiplied with; None where lengths are counted."""
        return None if self._counted else self._ratio

    def of(self, length_tokens: int) -> int:
        """The length to submit for an item of `length_tokens`."""
        if self._counted or self._ratio == 1.0:
            return length_tokens
        return min(TOKENS_MAX, max(1, round(length_tokens * self._ratio)))

    def learn(self, length_tokens: int, reported_tokens: int | None) -> None:
        """An engine says that the item of `length_tokens`, as estimated, has so many."""
        if self._counted or not reported_tokens or length_tokens <= 0:
            return
        self._answers += 1
        self._estimated_tokens += length_tokens
        self._reported_tokens += reported_tokens
        if self._answers < ANSWERS_MIN:
            return
        seen = self._reported_tokens / self._estimated_tokens
        seen = min(RATIO_MAX, max(RATIO_MIN, seen))
        if abs(seen - self._ratio) > CHANGE_MIN * self._ratio:
            self._ratio = seen
