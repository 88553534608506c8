"""The heat map as grids of levels: where every lane is, how hot, and the same without colour."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboards import a_day
from zfabric_tui import heat
from zfabric_tui.paint import COLORS, UNKNOWN, Palette

LIMIT = 2_048


def lanes(**columns: list[Any]) -> dict[str, Any]:
    """Lanes as a broker says them; what is not given is 0."""
    count = len(next(iter(columns.values())))
    known: dict[str, Any] = {
        "id": list(range(count)),
        "target_tokens": [100] * count,
        "outstanding_items": [0] * count,
        "quiescing": [False] * count,
        "ready_items": [0] * count,
        "ready_tokens": [0] * count,
        "oldest_age_s": [None] * count,
        "real_tokens": [0] * count,
        "padded_tokens": [0] * count,
    }
    return {**known, **columns, "lanes_limit": LIMIT, "signature": "00", "model": "m",
            "threshold_ratio": 0.01}  # fmt: skip


def test_levels_of_depth_are_powers_of_four() -> None:
    found = heat.heat(lanes(ready_items=[0, 1, 3, 4, 16, 64, 256, 1_024, 4_096]), "depth", "id")
    assert found.levels[:10] == (0, 1, 1, 2, 3, 4, 5, 6, 7, None)


def test_levels_of_waste_are_of_what_left_the_lane() -> None:
    padded = [0, 1_000, 1_000, 1_000, 1_000, 1_000]
    real = [0, 1_000, 995, 980, 900, 400]
    found = heat.heat(lanes(padded_tokens=padded, real_tokens=real), "waste", "id")
    assert found.levels[:7] == (None, 0, 1, 3, 5, 7, None)


def test_levels_of_age_are_unknown_where_nothing_waits() -> None:
    found = heat.heat(lanes(oldest_age_s=[None, 0.5, 1.0, 70.0, 9_999.0]), "age", "id")
    assert found.levels[:5] == (None, 0, 1, 4, 7)


@pytest.mark.parametrize("metric", heat.METRICS)
def test_every_scale_has_a_name_a_shade_and_a_colour_for_each_level(metric: str) -> None:
    assert len(heat.BOUNDS[metric]) == heat.LEVELS - 1
    assert sorted(heat.BOUNDS[metric]) == list(heat.BOUNDS[metric])
    assert len(heat.NAMES[metric]) == len(COLORS) == heat.LEVELS
    for shades in (heat.SHADES, heat.SHADES_ASCII):
        assert len(set(shades)) == heat.LEVELS
        assert heat.EMPTY not in shades
    assert heat.SHADES_ASCII.isascii()


def test_by_id_every_lane_is_where_its_id_says_and_free_ones_are_empty() -> None:
    found = heat.heat(lanes(id=[2, 5], ready_items=[1, 4_096]), "depth", "id")
    assert len(found) == LIMIT
    assert [k for k, level in enumerate(found.levels) if level is not None] == [2, 5]
    assert (found.levels[2], found.levels[5]) == (1, 7)


def test_by_target_only_lanes_in_use_are_there_shortest_first() -> None:
    given_lanes = lanes(id=[4, 7, 9], target_tokens=[300, 100, 200], ready_items=[1, 4, 16])
    found = heat.heat(given_lanes, "depth", "target")
    assert found.places == (1, 2, 0)
    assert found.levels == (2, 3, 1)


def test_two_lanes_share_a_cell_one_row_above_the_other() -> None:
    assert heat.pairs([0, 1, 2, 3, 4, 5], 2) == [[(0, 2), (1, 3)], [(4, None), (5, None)]]


@given(st.lists(st.one_of(st.none(), st.integers(0, 7)), max_size=300), st.integers(1, 80))
def test_every_level_is_in_the_grid_exactly_once(levels: list[int | None], width: int) -> None:
    unfolded: list[int | None] = []
    for row in heat.pairs(levels, width):
        unfolded += [upper for upper, _ in row] + [lower for _, lower in row]
    assert unfolded[: len(levels)] == levels
    assert all(level is None for level in unfolded[len(levels) :])


def test_all_lanes_fit_at_eighty_by_twenty_four() -> None:
    rows = 21 - 6
    width = heat.width_for(LIMIT, 80, rows)
    assert width <= 80
    grid = heat.pairs([0] * LIMIT, width)
    assert len(grid) <= rows
    assert sum(level == 0 for row in grid for pair in row for level in pair) == LIMIT


def test_without_colour_a_cell_shows_the_hotter_of_its_two() -> None:
    pairs = ((None, None), (0, None), (2, 6), (7, 7))
    shown = [heat.shade(pair, ascii_only=True) for pair in pairs]
    assert shown == [" ", ".", "%", "@"]


def test_plain_map_is_the_coloured_one_level_for_level() -> None:
    row: list[tuple[int | None, int | None]] = [(0, 7), (3, None), (None, None)]
    coloured = Palette(color=True, ascii_only=False).cells(row, 4, cursor=None, faint=False)
    plain = Palette(color=False, ascii_only=True).cells(row, 4, cursor=None, faint=False)
    cells = [(s.style.color.name, s.style.bgcolor.name) for s in list(coloured)[:3]]
    assert cells == [(COLORS[0], COLORS[7]), (COLORS[3], UNKNOWN), (UNKNOWN, UNKNOWN)]
    assert coloured.text == "▀▀▀ "
    assert plain.text == "@=  "
    assert all(s.style is not None and s.style.color is None for s in plain)


def test_cursor_is_seen_without_colour_on_an_empty_place_too() -> None:
    row: list[tuple[int | None, int | None]] = [(None, None), (1, 1)]
    shown = Palette(color=False, ascii_only=True).cells(row, 2, cursor=0, faint=False)
    assert shown.text == "+:"
    assert [bool(s.style and s.style.reverse) for s in shown] == [True, False]


def test_cursor_stays_on_the_map() -> None:
    steps = ("left", "up", "right", "down", "down", "right")
    cursor, seen = 0, []
    for key in steps:
        cursor = heat.moved(cursor, key, 3, 8)
        seen.append(cursor)
    assert seen == [0, 0, 1, 4, 7, 7]


def test_map_of_a_real_fabric_agrees_with_its_lanes() -> None:
    day = a_day()
    known = day.lanes[0]
    found = heat.heat(known, "waste", "id")
    for place, lane in enumerate(known["id"]):
        padded, real = known["padded_tokens"][place], known["real_tokens"][place]
        wanted = None if not padded else heat.level("waste", 1 - real / padded)
        assert found.levels[lane] == wanted
    assert sum(known["padded_tokens"]) > 0
