"""The shapes of a batch file, found without being declared: how much of its chain each line shares.

Decides the shape of each request: the longest front part of its chain (see `chains`) that at least
`COUNT_MIN` lines have, at worst the model alone. Lines are counted in a window that is read ahead,
and behind it in a table of the most frequent; both are bounded. A part that has once become a shape
stays one: what is found does not change its mind with what is forgotten.

Pure: rows in, the same rows out, in order, each with its shape. A request that declares its shape
passes as it is. Never holds more than `WINDOW_LINES` rows or `WINDOW_BYTES` of payload.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import xxhash

from zfabric.batchfile.reader import BadLine, Request
from zfabric.shapes import Shape

# Measured on real prompts: reading ahead 2,000 lines finds 97% of the shared prefix, 500 find 18%.
WINDOW_LINES = 4_096
WINDOW_BYTES = 64 * 1024 * 1024
# A shape must be worth a batch; counted from 2, a quarter of all items were in shapes of a few.
COUNT_MIN = 32
TABLE_ENTRIES_MAX = 65_536
# Beyond this, new shapes are no longer made: a broker has to hold each.
SHAPES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A row in the window; `nodes` stand for the front parts of its chain, shortest first."""

    row: Request | BadLine
    nodes: tuple[int, ...]
    size_bytes: int


class FrequentNodes:
    """Counts of the nodes seen most, at most `entries_max` of them; a count is never too high."""

    def __init__(self, entries_max: int = TABLE_ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, node: int) -> int:
        return self._counts.get(node, 0)

    def add(self, nodes: Iterable[int]) -> None:
        """One more of each; where there is no room, the rarer half is forgotten."""
        counts = self._counts
        for node in nodes:
            counts[node] = counts.get(node, 0) + 1
        if len(counts) > self._entries_max:
            floor = sorted(counts.values())[len(counts) // 2]
            kept = {node: count for node, count in counts.items() if count > floor}
            self._counts = kept if len(kept) > self._entries_max // 4 else _half(counts)


def _half(counts: dict[int, int]) -> dict[int, int]:
    """Where most counts are equal: the more frequent half, the later ones first among equals."""
    latest_first = list(counts.items())
    latest_first.reverse()
    latest_first.sort(key=lambda entry: -entry[1])
    return dict(latest_first[len(counts) // 2 - 1 :: -1])


class Discovery:
    """Finds the shapes of one stream of rows."""

    def __init__(
        self,
        *,
        window_lines: int = WINDOW_LINES,
        window_bytes: int = WINDOW_BYTES,
        count_min: int = COUNT_MIN,
        entries_max: int = TABLE_ENTRIES_MAX,
    ) -> None:
        self._window_lines, self._window_bytes = window_lines, window_bytes
        self._count_min = count_min
        self._window: deque[_Waiting] = deque()
        self._window_size_bytes = 0
        self._ahead: Counter[int] = Counter()
        self._behind = FrequentNodes(entries_max)
        self._shapes: dict[int, Shape] = {}
        # The number of the last line that was read, ahead of the last one that was given.
        self.read_upto = 0

    def assign(self, rows: Iterable[Request | BadLine]) -> Iterator[Request | BadLine]:
        """The same rows, in order, each request with its shape."""
        for row in rows:
            self._take_in(row)
            while (
                len(self._window) > self._window_lines
                or self._window_size_bytes > self._window_bytes
            ):
                yield self._give_out()
        while self._window:
            yield self._give_out()

    def _take_in(self, row: Request | BadLine) -> None:
        self.read_upto = row.line_number
        nodes: tuple[int, ...] = ()
        size_bytes = 0
        if isinstance(row, Request):
            size_bytes = len(row.payload)
            if not row.declared:
                nodes = tuple(_nodes(row.shape))
        self._ahead.update(nodes)
        self._window_size_bytes += size_bytes
        self._window.append(_Waiting(row, nodes, size_bytes))

    def _give_out(self) -> Request | BadLine:
        waiting = self._window.popleft()
        row = waiting.row
        if isinstance(row, Request) and not row.declared:
            row = replace(row, shape=self._shape_of(row, waiting.nodes))
        self._window_size_bytes -= waiting.size_bytes
        for node in waiting.nodes:
            self._ahead[node] -= 1
            if not self._ahead[node]:
                del self._ahead[node]
        self._behind.add(waiting.nodes)
        return row

    def _shape_of(self, row: Request, nodes: tuple[int, ...]) -> Shape:
        candidate = row.shape
        for depth in range(len(nodes), 0, -1):
            node = nodes[depth - 1]
            found = self._shapes.get(node)
            if found is not None:
                return found
            if (
                self._ahead[node] + self._behind[node] >= self._count_min
                and len(self._shapes) < SHAPES_MAX
            ):
                label = f"{row.custom_id}: {row.excerpt}"
                shape = Shape(
                    candidate.model, candidate.components[:depth], candidate.tokens[:depth], label
                )
                self._shapes[node] = shape
                return shape
        return Shape(candidate.model)


def _nodes(shape: Shape) -> Iterator[int]:
    """A number for each front part of the chain, the model included."""
    node = xxhash.xxh3_64_intdigest(shape.model.encode("utf-8", "surrogatepass"))
    for component in shape.components:
        node = xxhash.xxh3_64_intdigest(struct.pack("<QQ", node, component))
        yield node
