"""The overview: what the model says, and that the screen draws it at every size."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Bench
from zfabric_tui.app import TopApp
from zfabric_tui.feed import Arrived
from zfabric_tui.model import alarms, amount, duration, eta_s, overview, percent, plain, rates


def snapshots() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two snapshots of a real dispatcher, one second apart, with work done in between."""
    bench = Bench()
    producer, worker = bench.producer("nightly-eval"), bench.worker("gpu0")
    producer.ask("expect", items=60)
    producer.submit([100, 200, 300] * 20)
    bench.settle()
    bench.tick(1.0)
    before = {**bench.dispatcher.meta(bench.now), **bench.status()}
    bench.dispatch()
    for key in list(worker.batches):
        worker.done(key)
    bench.settle()
    worker.heartbeat(stats={"hits_tokens": 90, "queries_tokens": 100, "measured_by": "simulated"})
    bench.tick(1.0)
    return before, {**bench.dispatcher.meta(bench.now), **bench.status()}


class FakeFeed:
    """Snapshots from a list, one a poll; made up, for tests."""

    def __init__(self, given: list[dict[str, Any]]) -> None:
        self.given = given
        self.closed = False

    def poll(self, timeout_s: float) -> Arrived:
        return Arrived(snapshot=self.given.pop(0) if self.given else None)

    def close(self) -> None:
        self.closed = True


def test_rates_are_per_second_of_the_brokers_time_and_none_across_a_restart() -> None:
    before, after = snapshots()
    assert rates(before, after).items == pytest.approx(16)
    assert rates(None, after).items is None
    assert rates({**before, "boot_id": "other"}, after).items is None


def test_overview_shows_the_figures_of_the_snapshot() -> None:
    before, after = snapshots()
    lines = overview(after, before)
    assert "waste" in lines["padding"][0]
    assert any("accepted" in line and "60" in line for line in lines["flow"])
    assert any(
        "gpu0" in line and "90.0%" in line and "simulated" in line for line in lines["cards"]
    )
    assert any("nightly-eval" in line and "16" in line for line in lines["jobs"])


def test_alarms_name_what_is_wrong_and_only_that() -> None:
    _, after = snapshots()
    assert alarms(after) == []
    assert "do not balance" in alarms({**after, "residual_items": 1})[0]
    assert "dead" in alarms({**after, "dead_records": 2})[0]
    gone = {**after["workers"][0], "live": False, "in_flight": 1}
    assert "gone with 1 batches" in alarms({**after, "workers": [gone]})[0]


def test_text_from_peers_cannot_command_a_terminal() -> None:
    assert plain("a\x1b[31mb\x07c", 20) == "a·[31mb·c"
    assert plain("x" * 50, 10) == "x" * 9 + "…"


def test_numbers_read_well_and_what_is_unknown_says_so() -> None:
    assert [amount(v) for v in (None, 999, 12_345, 1.5e6, 2e9)] == [
        "n/a",
        "999",
        "12.35 k",
        "1.50 M",
        "2.00 G",
    ]
    assert (percent(None), percent(0.5)) == ("n/a", "50.0%")
    assert [duration(v) for v in (None, 5, 61, 3_700)] == ["-", "5 s", "1 min", "1 h 01 min"]
    job = {"expected_items": None, "completed_items": 0, "dead_items": 0, "refused_items": 0}
    assert eta_s(job, 10.0) is None
    assert eta_s({**job, "expected_items": 50}, 10.0) == 5.0


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_screen_draws_the_overview_at_every_size(size: tuple[int, int], tmp_path: Path) -> None:
    before, after = snapshots()

    async def draw() -> str:
        feed = FakeFeed([before, after])
        app = TopApp(feed, "tcp://127.0.0.1:7410")
        async with app.run_test(size=size) as pilot:
            app.refresh_picture()
            await pilot.pause()
            await pilot.press("space")
            picture = app.export_screenshot()
            await pilot.press("q")
        assert feed.closed
        return picture

    picture = asyncio.run(draw()).replace("&#160;", " ")
    for word in ("healthy", "waste", "accepted", "gpu0", "nightly-eval", "quit"):
        assert word in picture


def test_screen_leaves_when_what_it_watched_has_ended() -> None:
    async def draw() -> None:
        over: list[int] = []
        app = TopApp(FakeFeed([]), "tcp://127.0.0.1:7410", ends=lambda: bool(over))
        async with app.run_test():
            app.refresh_picture()
            assert app.is_running
            over.append(1)
            app.refresh_picture()
        assert not app.is_running

    asyncio.run(draw())


def test_silent_feed_is_disconnected_and_keeps_running() -> None:
    async def draw() -> str:
        app = TopApp(FakeFeed([]), "tcp://127.0.0.1:7410")
        async with app.run_test() as pilot:
            await pilot.pause()
            return app.export_screenshot()

    assert "DISCONNECTED" in asyncio.run(draw())


def test_picture_of_the_readme_is_what_the_screen_draws(tmp_path: Path) -> None:
    """The picture in docs/ is made here: PICTURES=docs pytest tests/test_tui.py."""
    before, after = snapshots()

    async def draw() -> str:
        app = TopApp(FakeFeed([before, after]), "tcp://127.0.0.1:7410")
        async with app.run_test(size=(80, 24)) as pilot:
            app.refresh_picture()
            await pilot.pause()
            return app.export_screenshot(title="zfabric top")

    picture = asyncio.run(draw())
    kept = Path(os.environ.get("PICTURES", tmp_path)) / "overview.svg"
    kept.write_text(picture, encoding="utf-8")
    shipped = (Path(__file__).parents[1] / "docs" / "overview.svg").read_text(encoding="utf-8")
    assert words_of(shipped) == words_of(picture)


def words_of(svg: str) -> list[str]:
    """The words that a picture shows, without what differs from run to run (ids, ages)."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    return [re.sub(r"\d+\.\d s old", "age", text.replace("&#160;", " ")) for text in texts]
