"""The heat map of one shape's lanes, as a grid of levels: which lane is where, and how hot it is.

Pure. A level is 0 (cold) to 7 on a scale that never moves, or None where there is nothing to say:
a scale that follows its data makes a cliff of every wiggle. Two lanes share a cell, one above the
other: half blocks in colour, and without colour the worse of the two as one character.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WASTE, DEPTH, AGE = METRICS = ("waste", "depth", "age")
BY_ID, BY_TARGET = ORDERS = ("id", "target")
# Lower bounds of levels 1 to 7: padding over padded tokens, ready items, seconds.
BOUNDS: dict[str, tuple[float, ...]] = {
    WASTE: (0.005, 0.01, 0.02, 0.05, 0.10, 0.20, 0.50),
    DEPTH: (1, 4, 16, 64, 256, 1_024, 4_096),
    AGE: (1, 5, 15, 60, 300, 900, 3_600),
}
NAMES: dict[str, tuple[str, ...]] = {
    WASTE: ("<0.5%", "0.5", "1", "2", "5", "10", "20", "50%+"),
    DEPTH: ("0", "1", "4", "16", "64", "256", "1k", "4k+"),
    AGE: ("<1s", "1s", "5s", "15s", "1m", "5m", "15m", "1h+"),
}
MEANINGS = {
    WASTE: "padding of the batches that left it since it opened",
    DEPTH: "items that wait in the lane",
    AGE: "how long its oldest item has waited",
}
# One character a level, for terminals without colour: more ink is hotter.
SHADES = "·▁▂▃▄▅▆█"
SHADES_ASCII = ".:-=+*%@"
EMPTY = " "
LEVELS = 8
# Rows of lanes that a page key moves over.
PAGE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Heat:
    """Lanes in the order of the map. `places` are indices into the columns of `lanes`; None: free.

    By id every lane that the shape may have is in its place; by target only those in use are there.
    """

    lanes: dict[str, Any]
    metric: str
    order: str
    places: tuple[int | None, ...]
    levels: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.places)


def waste_ratio(lanes: dict[str, Any], place: int) -> float | None:
    """What padding took of the lane's batches; None before it had one."""
    padded = lanes["padded_tokens"][place]
    return (padded - lanes["real_tokens"][place]) / padded if padded else None


def value(lanes: dict[str, Any], metric: str, place: int) -> float | None:
    """The figure behind a level; None where there is none."""
    if metric == WASTE:
        return waste_ratio(lanes, place)
    if metric == DEPTH:
        return float(lanes["ready_items"][place])
    age: float | None = lanes["oldest_age_s"][place]
    return age


def level(metric: str, figure: float | None) -> int | None:
    """0 to 7 on the fixed scale of a metric."""
    return None if figure is None else bisect_right(BOUNDS[metric], figure)


def heat(lanes: dict[str, Any], metric: str, order: str) -> Heat:
    """The lanes of a shape, in order, with their levels."""
    ids, targets = lanes["id"], lanes["target_tokens"]
    places: list[int | None]
    if order == BY_TARGET:
        places = [*sorted(range(len(ids)), key=lambda k: (targets[k], ids[k]))]
    else:
        places = [None] * max(lanes["lanes_limit"], max(ids, default=-1) + 1)
        for k, lane in enumerate(ids):
            places[lane] = k
    levels = tuple(
        None if place is None else level(metric, value(lanes, metric, place)) for place in places
    )
    return Heat(lanes, metric, order, tuple(places), levels)


def pairs(levels: Sequence[int | None], width: int) -> list[list[tuple[int | None, int | None]]]:
    """Rows of cells, each (upper level, lower level): two rows of lanes to a row of cells."""
    rows = []
    for start in range(0, len(levels), 2 * width):
        upper = list(levels[start : start + width])
        lower = list(levels[start + width : start + 2 * width])
        lower += [None] * (len(upper) - len(lower))
        rows.append(list(zip(upper, lower, strict=True)))
    return rows


def shade(pair: tuple[int | None, int | None], *, ascii_only: bool) -> str:
    """One character for a cell without colour: the hotter of its two lanes."""
    known = [each for each in pair if each is not None]
    if not known:
        return EMPTY
    return (SHADES_ASCII if ascii_only else SHADES)[max(known)]


def width_for(count: int, columns: int, rows: int) -> int:
    """Cells in a row so that `count` lanes fit into `rows`, if they can; at most `columns`."""
    least = -(-count // (2 * max(1, rows)))
    return max(1, min(columns, max(least, min(64, columns))))


def moved(cursor: int, key: str, width: int, count: int) -> int:
    """Where the cursor is after a key; it stays where there is no lane."""
    page = PAGE_ROWS * width
    steps = {
        "left": -1, "right": 1, "up": -width, "down": width, "pageup": -page, "pagedown": page,
        "home": -cursor, "end": count - 1 - cursor,
    }  # fmt: skip
    wanted = cursor + steps[key]
    return wanted if 0 <= wanted < count else cursor


def legend(metric: str, *, ascii_only: bool) -> list[tuple[int, str, str]]:
    """(level, its character without colour, its lower bound in words), coldest first."""
    shades = SHADES_ASCII if ascii_only else SHADES
    return [(k, shades[k], name) for k, name in enumerate(NAMES[metric])]
