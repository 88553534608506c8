"""The overview: what the model says, and that the screen draws it at every size."""

from __future__ import annotations

import asyncio
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Bench
from zfabric.shapes import Shape
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


def snapshots_of_a_day() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two cards, a job that has ended and one of thousands of items under way; for the picture."""
    chance, bench = random.Random(3), Bench()
    shapes = [Shape.of("llama-3-8b", f"task {k}", tokens=[600 + 40 * k]) for k in range(4)]
    contract = {"model": "llama-3-8b", "batch": 32, "tokens": 65_536, "longest": 8_192}
    cards = [bench.worker(name, **contract) for name in ("gpu0", "gpu1")]
    seen = []
    for name, count, stops_at in (("bbh-few-shot", 4_761, 4_761), ("nightly-eval", 24_000, 21_000)):
        producer = bench.producer(name)
        producer.ask("expect", items=count)
        lengths = [640 + int(chance.lognormvariate(5.2, 0.7)) for _ in range(count)]
        producer.submit(lengths, [chance.choice(shapes) for _ in range(count)])
        bench.settle()
        while bench.status()["completed_items"] < stops_at:
            bench.dispatch()
            for card in cards:
                if card.batches:
                    card.done(min(card.batches))
                queries = bench.fabric.workers[card.name].real_tokens
                stats = {"hits_tokens": int(queries * 0.884), "queries_tokens": queries}
                card.heartbeat(stats={**stats, "measured_by": "simulated", "state": "running"})
            bench.tick(0.2)
            seen.append({**bench.dispatcher.meta(bench.now), **bench.status()})
    return seen[-6], seen[-1]


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
    assert lines["padding"][0].endswith(f"padding: {after['waste_verdict']}")


def test_card_is_in_the_state_that_it_tells() -> None:
    _, after = snapshots()
    card = after["workers"][0]
    wanted = (("loading", True, "loading"), (None, True, "live"), ("running", False, "gone"))
    for told, live, shown in wanted:
        line = overview({**after, "workers": [{**card, "state": told, "live": live}]}, None)
        assert line["cards"][1].split()[1] == shown


def test_job_that_ended_early_is_no_longer_on_its_way() -> None:
    _, after = snapshots()
    ends = {"accepted_items": 1_803, "completed_items": 1_800, "failed_items": 2, "dead_items": 3}
    job = {**after["jobs"][0], **ends, "refused_items": 4, "expected_items": 2_996}

    def row(**changed: Any) -> list[str]:
        lines = overview({**after, "jobs": [{**job, **changed}]}, None)["jobs"]
        return lines[1].split()[1:]

    assert row(live=False) == ["1,807", "-", "9", "ended"]
    assert row(live=True) == ["1,807", "2,996", "9", "-"]
    assert row(live=False, accepted_items=1_900) == ["1,807", "2,996", "9", "-"]
    assert row(live=True, expected_items=1_807) == ["1,807", "1,807", "9", "ended"]


def test_alarms_name_what_is_wrong_and_only_that() -> None:
    _, after = snapshots()
    assert alarms(after) == []
    assert "do not balance" in alarms({**after, "residual_items": 1})[0]
    assert "2 dead items" in alarms({**after, "dead_records": 2})[0]
    assert "1 dead item:" in alarms({**after, "dead_records": 1})[0]
    gone = {**after["workers"][0], "live": False, "in_flight": 1}
    assert alarms({**after, "workers": [gone]})[0].endswith("gone with 1 batch")


def test_text_from_peers_cannot_command_a_terminal() -> None:
    assert plain("a\x1b[31mb\x07c", 20) == "a·[31mb·c"
    assert plain("two\nlines", 20) == "two lines"


def test_names_that_are_too_long_are_cut_where_they_do_not_differ() -> None:
    names = [f"evaluations/of/the/week/part-{k}.jsonl" for k in (10, 11)]
    shown = [plain(name, 24) for name in names]
    assert shown == ["evaluations/…rt-10.jsonl", "evaluations/…rt-11.jsonl"]
    assert plain("x" * 10, 10) == "x" * 10


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


def test_what_the_words_mean_is_a_key_away_and_the_picture_goes_on() -> None:
    before, after = snapshots()

    async def draw() -> tuple[str, str]:
        app = TopApp(FakeFeed([before, after]), "tcp://127.0.0.1:7410")
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("question_mark")
            app.refresh_picture()
            shown = picture_of(app)
            await pilot.press("q")
            await pilot.pause()
            assert app.is_running
            return shown, picture_of(app)

    helped, back = asyncio.run(draw())
    assert "accepted = completed" in helped and "the fabric goes on" in helped
    assert "accepted = completed" not in back and "nightly-eval" in back


def test_footer_names_scrolling_only_where_there_is_something_to_scroll() -> None:
    before, after = snapshots()
    cards = [{**after["workers"][0], "name": f"gpu{k}"} for k in range(30)]

    async def draw(snapshot: dict[str, Any]) -> tuple[str, str]:
        app = TopApp(FakeFeed([before, snapshot]), "tcp://127.0.0.1:7410")
        async with app.run_test(size=(80, 24)) as pilot:
            app.refresh_picture()
            await pilot.pause()
            top = picture_of(app)
            await pilot.press("end")
            await pilot.pause()
            return top, picture_of(app)

    top, _ = asyncio.run(draw(after))
    assert "scroll" not in top
    top, end = asyncio.run(draw({**after, "workers": cards}))
    assert "scroll" in top and "nightly-eval" not in top and "nightly-eval" in end


def test_silent_feed_is_disconnected_and_keeps_running() -> None:
    async def draw() -> str:
        app = TopApp(FakeFeed([]), "tcp://127.0.0.1:7410")
        async with app.run_test() as pilot:
            await pilot.pause()
            return app.export_screenshot()

    assert "DISCONNECTED" in asyncio.run(draw())


def test_picture_of_the_readme_is_what_the_screen_draws(tmp_path: Path) -> None:
    """The picture in docs/ is made here: PICTURES=docs pytest tests/test_tui.py."""
    before, after = snapshots_of_a_day()

    async def draw() -> str:
        app = TopApp(FakeFeed([before, after]), "tcp://127.0.0.1:7410")
        async with app.run_test(size=(80, 24)) as pilot:
            app.refresh_picture()
            await pilot.pause()
            return app.export_screenshot(title="zfabric top")

    # Whoever looks at the picture is to load no font from a third party.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", asyncio.run(draw()), flags=re.DOTALL)
    assert "url(" not in re.sub(r"url\(#", "", picture)
    kept = Path(os.environ.get("PICTURES", tmp_path)) / "overview.svg"
    kept.write_text(picture, encoding="utf-8")
    shipped = (Path(__file__).parents[1] / "docs" / "overview.svg").read_text(encoding="utf-8")
    assert words_of(shipped) == words_of(picture)


def picture_of(app: TopApp) -> str:
    return app.export_screenshot().replace("&#160;", " ")


def words_of(svg: str) -> list[str]:
    """The words that a picture shows, without what differs from run to run (ids, ages)."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    return [re.sub(r"\d+\.\d s old", "age", text.replace("&#160;", " ")) for text in texts]
