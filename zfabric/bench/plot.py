"""Plots of ratios over the course of a run: text for a terminal, SVG for a page.

A series is one ratio (0 to 1) per equal part of the run; None leaves its place empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "  ..::##@"
TERMINAL_ROWS = 10
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 360, 56, 40, 20, 44
# Told apart by colour-blind readers too (the first of the Okabe-Ito palette), and by the dashes.
STROKES = (("#d55e00", "none"), ("#0072b2", "6 4"), ("#009e73", "2 3"))


def terminal(values: Sequence[float | None], *, plain: bool = False) -> str:
    """Columns of blocks under a scale that ends at the next tenth above the largest value."""
    blocks = PLAIN_BLOCKS if plain else BLOCKS
    top = _scale(values)
    lines = []
    for row in range(TERMINAL_ROWS, 0, -1):
        label = f"{100 * top * row / TERMINAL_ROWS:4.0f}%" if row % 2 == 0 else " " * 5
        lines.append(f"{label} |{''.join(_cell(v, row, top, blocks) for v in values)}".rstrip())
    lines.append(f"{'0%':>5} +{'-' * len(values)}")
    return "\n".join(lines)


def _cell(value: float | None, row: int, top: float, blocks: str) -> str:
    steps = len(blocks) - 1
    filled = (value or 0.0) / top * TERMINAL_ROWS - (row - 1)
    return blocks[max(0, min(steps, round(filled * steps)))]


def _scale(values: Sequence[float | None]) -> float:
    largest = max((v for v in values if v is not None), default=0.0)
    return min(1.0, max(1, -int(-largest * 10 // 1)) / 10)


def svg(series: Mapping[str, Sequence[float | None]], title: str, caption: str) -> str:
    """A line for each series, from 0 to 100%, over the run from left to right."""
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for percent in range(0, 101, 20):
        y = TOP + down * (1 - percent / 100)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>'
        )
    for k, (label, values) in enumerate(series.items()):
        colour, dashes = STROKES[k % len(STROKES)]
        points = " ".join(
            f"{LEFT + across * (n + 0.5) / len(values):.1f},{TOP + down * (1 - value):.1f}"
            for n, value in enumerate(values)
            if value is not None
        )
        x, y = LEFT + 90 * k, HEIGHT - 10
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/>'
            f'<line x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="2" stroke-dasharray="{dashes}"/>'
            f'<text x="{x + 30}" y="{y}">{escape(label)}</text>'
        )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{escape(caption)}</text>'
    )
    return "\n".join([*parts, "</svg>", ""])
