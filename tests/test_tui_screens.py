"""Every screen at every size, as text, against what was kept of it in tests/screens.

`SCREENS=update pytest tests/test_tui_screens.py` keeps what is drawn now; look at the difference
before you commit it. PICTURES=docs does the same for the pictures of the documents.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards import (
    ADDRESS,
    SIZES,
    Clock,
    Day,
    FakeDesk,
    FakeFeed,
    a_day,
    golden,
    recorded,
    screen_of,
)
from tests.harness import Bench
from zfabric.publishing import Publishing
from zfabric_tui.app import TopApp
from zfabric_tui.commands import EVERYWHERE, HELP, LANES
from zfabric_tui.recording import Reader
from zfabric_tui.replay import ReplayFeed

DOCS = Path(__file__).parents[1] / "docs"
SEEN = 120
PICTURES = {
    "overview": (("1",), (80, 24)),
    "dashboard-lanes": (("2", "down", "right", "right"), (80, 24)),
    "dashboard-shapes": (("3",), (80, 24)),
    "dashboard-cards": (("4",), (80, 24)),
    "dashboard-flow": (("5",), (80, 24)),
    "dashboard-events": (("6",), (80, 24)),
    "dashboard-waste": (("w",), (80, 24)),
}


@pytest.fixture(scope="module")
def day() -> Day:
    return a_day()


@pytest.fixture(autouse=True)
def here_is_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def live(day: Day, **options: Any) -> TopApp:
    feed = FakeFeed(day.views[-SEEN:], day.events, day.lanes_by_signature, first=SEEN)
    return TopApp(feed, ADDRESS, desk=FakeDesk(), hz=0.001, **{"clock": Clock(), **options})


def drawn(
    app: TopApp,
    size: tuple[int, int],
    keys: tuple[str, ...],
    then: Callable[[TopApp], None] | None = None,
    look: Callable[[TopApp], Any] = screen_of,
) -> Any:
    """What `look` sees once the feed has been read and the keys pressed."""

    async def run() -> Any:
        async with app.run_test(size=size) as pilot:
            for key in keys:
                await pilot.press(key)
                app.refresh_picture()
            if then is not None:
                then(app)
            await pilot.pause()
            return look(app)

    return asyncio.run(run())


def compare(name: str, size: tuple[int, int], lines: list[str]) -> None:
    """The screen is what was kept of it."""
    kept = golden(f"{name}-{size[0]}x{size[1]}")
    if os.environ.get("SCREENS") == "update":
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert kept.read_text(encoding="utf-8").splitlines() == lines


def key_of(page: str) -> str:
    return {"waste": "w", "help": "question_mark"}.get(page) or str(EVERYWHERE.index(page) + 1)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("page", EVERYWHERE)
def test_page_is_drawn_as_it_was_kept(day: Day, page: str, size: tuple[int, int]) -> None:
    lines = drawn(live(day), size, (key_of(page),))
    compare(page, size, lines)
    assert all(len(line) <= size[0] for line in lines)


@pytest.mark.parametrize("page", EVERYWHERE)
def test_fabric_that_has_done_nothing_is_drawn_too(page: str) -> None:
    bench = Bench()
    view = Publishing(bench.dispatcher, 4.0).view(bench.now)
    app = TopApp(FakeFeed([view]), ADDRESS, desk=FakeDesk(), hz=0.001, clock=Clock())
    lines = drawn(app, (80, 24), (key_of(page),))
    assert "HEALTHY" in lines[0]
    assert sum(bool(line) for line in lines) >= 4


@pytest.mark.parametrize("page", EVERYWHERE)
def test_before_anything_is_heard_there_is_nothing_to_draw(page: str) -> None:
    app = TopApp(FakeFeed([]), ADDRESS, desk=FakeDesk(), hz=0.001, clock=Clock())
    lines = drawn(app, (80, 24), (key_of(page),))
    assert "DISCONNECTED" in lines[0] and "nothing heard yet" in lines[0]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("page", EVERYWHERE)
def test_page_without_unicode(day: Day, page: str, size: tuple[int, int]) -> None:
    lines = drawn(live(day, ascii_only=True), size, (key_of(page),))
    assert all(line.isascii() for line in lines)
    compare(f"{page}-ascii", size, lines)


def colours_of(app: TopApp) -> set[Any]:
    strips = app.screen._compositor.render_strips()
    styles = [segment.style for strip in strips for segment in strip]
    assert all(style is not None for style in styles)
    return {c for style in styles for c in (style.color, style.bgcolor) if c is not None}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("page", EVERYWHERE)
def test_page_without_colour_says_the_same(
    day: Day, page: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    coloured = drawn(live(day), size, (key_of(page),))
    monkeypatch.setenv("NO_COLOR", "1")
    lines, colours = drawn(
        live(day), size, (key_of(page),), look=lambda app: (screen_of(app), colours_of(app))
    )
    assert {colour.name for colour in colours} <= {"default"}
    if page == LANES:
        compare(f"{page}-plain", size, lines)
    else:
        assert lines == coloured


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_lost_broker_is_disconnected_over_its_last_values_dimmed(
    day: Day, size: tuple[int, int]
) -> None:
    clock = Clock()

    def lose(app: TopApp) -> None:
        clock.now += 12.0
        app.refresh_picture()

    def look(app: TopApp) -> tuple[list[str], list[Any]]:
        strips = app.screen._compositor.render_strips()
        return screen_of(app), [s.style for strip in strips[2:-1] for s in strip if s.text.strip()]

    # The flow page says nothing of whether it is well: all of it stays.
    well, inks = drawn(live(day, clock=clock), size, ("5",), look=look)
    lines, faint_inks = drawn(live(day, clock=clock), size, ("5",), lose, look)
    assert sum(not style.dim for style in inks) > 10
    for style, faint in zip(inks, faint_inks, strict=True):
        # Colours are dimmed by mixing them with the background, the rest by the terminal.
        darker = style.color is not None and faint.color != style.color
        assert faint.dim or darker
    assert lines[2:-1] == well[2:-1]
    lines, _ = drawn(live(day, clock=clock), size, (), lose, look)
    compare("disconnected", size, lines)
    assert lines[0].startswith("DISCONNECTED") and "last heard 12 s ago" in lines[0]
    assert lines[2] == "! the broker does not answer: these are its last values"


def test_well_fabric_is_not_called_so_when_its_broker_is_silent() -> None:
    bench, clock, seen = Bench(), Clock(), []
    view = Publishing(bench.dispatcher, 4.0).view(bench.now)

    def wait(app: TopApp) -> None:
        for _ in range(7):
            clock.now += 0.5
            app.refresh_picture()
            lines = screen_of(app)
            seen.append((lines[0].split()[0], any("HEALTHY" in line for line in lines)))
            assert seen[-1][1] == (clock.now <= 1_001.0)
            if 1_001.0 < clock.now <= 1_003.0:
                assert "! LATE: no word from the broker" in lines[0]
                assert lines[2] == "! no word from the broker: these are its last values"

    drawn(TopApp(FakeFeed([view]), ADDRESS, hz=0.001, clock=clock), (80, 24), (), wait)
    assert [word for word, _ in seen] == [ADDRESS] * 6 + ["DISCONNECTED"]


def test_connection_that_ended_is_known_at_once(day: Day) -> None:
    app = live(day)

    def cut(app: TopApp) -> None:
        app._feed.cuts = [True]
        app.refresh_picture()
        assert screen_of(app)[0].startswith("DISCONNECTED")
        assert "last heard 0 s ago, trying again in 5 s" in screen_of(app)[0]
        app._feed.cuts, app._feed.views = [False], [day.views[-1]]
        app.refresh_picture()

    lines = drawn(app, (80, 24), (), cut)
    assert lines[0].startswith(f"{ADDRESS} 0.0 s old")


def test_broker_that_publishes_seldom_is_not_late(day: Day) -> None:
    """As with `zfabric broker --hz 0.2`."""
    clock = Clock()
    views = [{**day.views[-1], "time": day.views[-1]["time"] + 5 * k} for k in range(2)]

    def wait(app: TopApp) -> None:
        clock.now += 12.0
        app.refresh_picture()
        assert "12.0 s old" in screen_of(app)[0] and "LATE" not in screen_of(app)[0]
        clock.now += 1.0
        app.refresh_picture()

    feed = FakeFeed(views, first=2)
    lines = drawn(TopApp(feed, ADDRESS, hz=0.001, clock=clock), (80, 24), (), wait)
    assert lines[0].startswith("DISCONNECTED")


def test_lost_broker_counts_down_to_the_next_try(day: Day) -> None:
    clock, seen = Clock(), []

    def lose(app: TopApp) -> None:
        for _ in range(4):
            clock.now += 3.5
            app.refresh_picture()
            seen.append(screen_of(app)[0].rpartition(", ")[2])

    drawn(live(day, clock=clock), (80, 24), (), lose)
    assert seen == [
        "trying again in 5 s", "trying again in 2 s", "trying again in 5 s", "trying again in 2 s",
    ]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_replay_is_drawn_as_it_was_kept(day: Day, size: tuple[int, int], tmp_path: Path) -> None:
    clock = Clock()
    feed = ReplayFeed(Reader(recorded(day, tmp_path / "day.db")), clock)

    def play(app: TopApp) -> None:
        clock.now += 20.0
        app.refresh_picture()

    lines = drawn(TopApp(feed, "day.db", hz=0.001, clock=clock), size, (), play)
    compare("replay", size, lines)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gap_of_a_recording_is_drawn_as_a_gap(
    day: Day, size: tuple[int, int], tmp_path: Path
) -> None:
    clock = Clock()
    path = recorded(day, tmp_path / "day.db", leave_out=slice(60, 120))
    feed = ReplayFeed(Reader(path), clock)

    def play(app: TopApp) -> None:
        clock.now += 20.0
        app.refresh_picture()

    lines = drawn(TopApp(feed, "day.db", hz=0.001, clock=clock), size, (), play)
    compare("replay-gap", size, lines)
    assert "GAP: nothing recorded, last 5 s before" in lines[0] and len(lines[0]) < size[0]
    assert "HEALTHY" not in "\n".join(lines) and "nothing was recorded now" in lines[2]
    assert re.search(r"\[.*- +#? +-.*\]", lines[-2])


def test_nothing_is_cut_at_eighty_by_twenty_four(day: Day) -> None:
    """Whatever is longer than the screen says so, and can be reached."""
    for page in EVERYWHERE:
        lines = drawn(live(day), (80, 24), (key_of(page),))
        end = drawn(live(day), (80, 24), (key_of(page), "end"))
        wide = drawn(live(day), (80, 200), (key_of(page),))
        if page == LANES:
            assert wide[2:4] == lines[2:4]
            continue
        wanted = [line for line in wide[2:-1] if line]
        missing = [line for line in wanted if line not in lines and line not in end]
        assert not missing or page == HELP, f"{page}: {missing}"
        if any(line not in lines for line in wanted):
            assert re.search(r"\d+-\d+ of \d+$", lines[1]), f"{page} does not say that it scrolls"


@pytest.mark.parametrize("name", PICTURES)
def test_picture_of_the_documents_is_what_the_screen_draws(
    day: Day, name: str, tmp_path: Path
) -> None:
    keys, size = PICTURES[name]
    svg = drawn(
        live(day), size, keys, look=lambda app: app.export_screenshot(title=f"zfabric top: {name}")
    )
    # Whoever looks at the picture is to load no font from a third party.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    assert "url(" not in re.sub(r"url\(#", "", picture)
    kept = Path(os.environ.get("PICTURES", tmp_path)) / f"{name}.svg"
    kept.write_text(picture, encoding="utf-8")
    shipped = (DOCS / f"{name}.svg").read_text(encoding="utf-8")
    assert words_of(shipped) == words_of(picture)


def words_of(svg: str) -> list[str]:
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    return [text.replace("&#160;", " ") for text in texts]
