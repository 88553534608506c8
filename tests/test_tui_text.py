"""Words and numbers on a screen: what is shown of what peers say, and tables that fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from zfabric_tui.text import (
    BARS,
    Column,
    Span,
    amount,
    cut,
    duration,
    pad,
    percent,
    plain,
    plain_ascii,
    ratio_bar,
    round_up,
    table,
    text_of,
    trend,
)


def test_text_from_peers_cannot_command_a_terminal() -> None:
    assert plain("a\x1b[31mb\x07c", 20) == "a·[31mb·c"
    assert plain("two\nlines", 20) == "two lines"
    assert plain("\u202eright to left", 20) == "·right to left"


def test_names_that_are_too_long_are_cut_where_they_do_not_differ() -> None:
    names = [f"evaluations/of/the/week/part-{k}.jsonl" for k in (10, 11)]
    shown = [plain(name, 24) for name in names]
    assert shown == ["evaluations/…rt-10.jsonl", "evaluations/…rt-11.jsonl"]
    assert plain("x" * 10, 10) == "x" * 10


@given(st.text(max_size=60), st.integers(0, 40))
def test_no_text_is_wider_than_its_room(text: str, width: int) -> None:
    assert cell_len(plain(text, width)) <= width
    assert cell_len(text_of(cut((Span(plain(text, 60)), Span("tail")), width))) <= width


@given(st.text(max_size=60))
def test_ascii_takes_as_many_cells_and_nothing_else(text: str) -> None:
    safe = plain(text, 200)
    narrow = plain_ascii(safe)
    assert narrow.isascii()
    assert cell_len(narrow) == cell_len(safe)


def test_numbers_read_well_and_what_is_unknown_says_so() -> None:
    assert [amount(v) for v in (None, 999, 12_345, 1.5e6, 2e9)] == [
        "n/a", "999", "12.35 k", "1.50 M", "2.00 G",
    ]  # fmt: skip
    assert (percent(None), percent(0.5)) == ("n/a", "50.0%")
    assert [duration(v) for v in (None, 5, 61, 3_700, 200_000)] == [
        "-", "5 s", "1 min", "1 h 01 min", "2 d 7 h",
    ]  # fmt: skip


def test_bars_and_trends_have_scales_that_do_not_move() -> None:
    assert ratio_bar(0.5, 10) == "█████·····"
    assert (ratio_bar(-1.0, 4), ratio_bar(9.0, 4)) == ("····", "████")
    # 99.90 to 99.91 of 100 is no cliff.
    assert len(set(trend([99.90, 99.91], 100.0))) == 1
    assert trend([0.0, None, 100.0], 100.0) == f"{BARS[1]} {BARS[8]}"
    assert [round_up(v) for v in (0.0, 3.0, 11.0, 51.0, 1_000.0)] == [
        1.0,
        5.0,
        20.0,
        100.0,
        1_000.0,
    ]


COLUMNS = (
    Column("name", left=True),
    Column("n"),
    Column("extra", spare=1),
    Column("more", spare=2),
)
ROWS = [("a-rather-long-name", "1", "xxxxx", "yyyyy"), ("b", "22", "x", "y")]


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (60, "name                 n  extra   more"),
        (34, "name                 n  extra"),
        (24, "name                 n"),
        (14, "name         n"),
    ],
)
def test_table_gives_up_its_spare_columns_and_then_cuts_names(width: int, head: str) -> None:
    shown, rows = table(COLUMNS, ROWS, width)
    assert shown == head
    assert all(cell_len(row) <= width for row in rows)


def test_wide_characters_count_as_two_cells() -> None:
    assert pad("日本", 6) == "日本  "
    assert cell_len(plain("日本語のモデル名です", 9)) <= 9
