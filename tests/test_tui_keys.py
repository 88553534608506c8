"""Every key does what it says, everywhere it is offered, and nothing where it is not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot

from tests.dashboards import ADDRESS, Clock, Day, FakeDesk, FakeFeed, a_day, recorded, screen_of
from tests.harness import Bench
from zfabric.errors import FabricError
from zfabric.publishing import Publishing
from zfabric_tui import commands
from zfabric_tui.app import LOOK_S, TopApp
from zfabric_tui.commands import COMMANDS, EVERYWHERE, LIVE, PALETTE_KEY, REPLAY
from zfabric_tui.dialogs import Ask, Choose, When
from zfabric_tui.recording import Reader
from zfabric_tui.replay import ReplayFeed
from zfabric_tui.text import text_of
from zfabric_tui.widgets import LanesView, PageView

SEEN = 30
Seen = Callable[[TopApp], Any]


@pytest.fixture(scope="module")
def day() -> Day:
    return a_day()


@pytest.fixture(scope="module")
def recording(day: Day, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(day, tmp_path_factory.mktemp("recordings") / "day.db")


def live(day: Day, desk: FakeDesk | None = None, **changed: Any) -> TopApp:
    views = [{**view, **changed} for view in day.views[-SEEN:]]
    lanes = {lanes["signature"]: lanes for lanes in day.all_lanes}
    feed = FakeFeed(views, day.events, lanes, first=SEEN)
    return TopApp(feed, ADDRESS, desk=desk or FakeDesk(), hz=0.001, clock=Clock())


def replaying(path: Path, clock: Clock | None = None) -> TopApp:
    feed = ReplayFeed(Reader(path), clock or Clock())
    return TopApp(feed, path.name, hz=0.001, clock=clock or Clock())


def pressed(app: TopApp, *keys: str, size: tuple[int, int] = (80, 24), look: Seen) -> Any:
    """What `look` sees after each key, the first before any."""

    async def run() -> list[Any]:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            seen = [look(app)]
            for key in keys:
                await press(pilot, app, key)
                seen.append(look(app))
            return seen

    return asyncio.run(run())


async def press(pilot: Pilot[None], app: TopApp, key: str) -> None:
    await pilot.press(key)
    await app.workers.wait_for_complete()
    app.refresh_picture()
    await pilot.pause()


def page(app: TopApp) -> str:
    return app.page


def chosen(app: TopApp) -> str | None:
    return app.query_one(PageView).chosen


def lane(app: TopApp) -> int:
    return app.query_one(LanesView)._cursor


def dialog(app: TopApp) -> type[Any]:
    return type(app.screen)


# -- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "wanted"),
    [*((str(k + 1), name) for k, name in enumerate(commands.PAGES)), ("w", "waste"),
     ("question_mark", "help")],
)  # fmt: skip
def test_key_opens_its_page(day: Day, key: str, wanted: str) -> None:
    start = "4" if wanted == "overview" else "1"
    assert pressed(live(day), start, key, look=page)[-1] == wanted


@pytest.mark.parametrize("key", ["w", "question_mark"])
def test_escape_goes_back_to_where_one_was(day: Day, key: str) -> None:
    assert pressed(live(day), "4", key, "escape", look=page)[1:] == [
        "cards", {"w": "waste"}.get(key, "help"), "cards",
    ]  # fmt: skip
    assert pressed(live(day), "4", "w", "question_mark", "escape", look=page)[-1] == "cards"


def test_escape_leaves_a_page_by_number_where_it_is(day: Day) -> None:
    assert pressed(live(day), "5", "escape", look=page)[-1] == "flow"


def test_enter_shows_the_lanes_of_the_chosen_shape_and_escape_goes_back(day: Day) -> None:
    def look(app: TopApp) -> Any:
        return app.page, app._shape

    wanted = day.views[-1]["shapes"][1]["signature"]
    seen = pressed(live(day), "3", "down", "enter", "escape", look=look)
    assert seen[-2:] == [("lanes", wanted), ("shapes", wanted)]


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_quit_ends_it(day: Day, key: str) -> None:
    app = live(day)

    async def run() -> None:
        async with app.run_test() as pilot:
            app.refresh_picture()
            await pilot.press(key)
        assert not app.is_running

    asyncio.run(run())
    assert app._feed.closed


def test_space_holds_the_picture_and_goes_on(day: Day) -> None:
    app = live(day)
    extra = [{**day.views[-1], "time": day.views[-1]["time"] + k} for k in (1, 2)]
    app._feed.views += extra

    async def run() -> list[float]:
        times = []
        async with app.run_test() as pilot:
            for key in ("space", "space"):
                await pilot.press(key)
                app.refresh_picture()
                times.append(app.snapshot["time"])
                assert ("HELD" in screen_of(app)[0]) == (len(times) == 1)
        return times

    held, after = asyncio.run(run())
    assert (held, after) == (day.views[-1]["time"], extra[1]["time"])


def test_dashboard_of_something_that_ends_stays_until_nobody_is_there(day: Day) -> None:
    """`zfabric demo`: whoever watched it wants to look round in the end."""
    over, seen = [], []
    app = live(day)
    app._ends = lambda: bool(over)

    async def run() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            await press(pilot, app, "1")
            seen.append(screen_of(app)[-1])
            over.append(True)
            await press(pilot, app, "4")
            seen.append(screen_of(app)[-1])
            app._clock.now += LOOK_S - 10.0
            await press(pilot, app, "1")
            app._clock.now += LOOK_S - 10.0
            app.refresh_picture()
            seen.append(screen_of(app)[-1])
            assert app.is_running and app.page == "overview"
            app._clock.now += 11.0
            app.refresh_picture()
            await pilot.pause()

    asyncio.run(run())
    assert "ENDED" not in seen[0]
    assert seen[1].startswith(f"ENDED: q goes on ({LOOK_S:.0f} s)  ") and "^p all" in seen[1]
    assert "ENDED: q goes on (10 s)" in seen[2]
    assert not app.is_running


@pytest.mark.parametrize("moved", [False, True])
def test_list_stays_at_its_top_until_a_row_is_chosen(day: Day, *, moved: bool) -> None:
    """The first of the shapes is the current one, and the last of them once it is drained."""
    last = day.views[-1]
    row = last["shapes"][0]
    many = [{**row, "signature": f"{k:016x}", "current": k == 0} for k in range(40)]
    app = TopApp(FakeFeed([{**last, "shapes": many}]), ADDRESS, hz=0.001, clock=Clock())

    async def run() -> tuple[str | None, str]:
        async with app.run_test(size=(80, 24)) as pilot:
            for key in ("3", *["down"] * moved):
                await press(pilot, app, key)
            later = {**last, "time": last["time"] + 1.0, "shapes": [*many[2:], *many[:2]]}
            app._feed.views.append(later)
            app.refresh_picture()
            await pilot.pause()
            return chosen(app), screen_of(app)[1].split()[-3]

    if moved:
        assert asyncio.run(run()) == (f"{1:016x}", "25-40")
    else:
        assert asyncio.run(run()) == (f"{2:016x}", "1-16")


def test_key_that_has_nothing_to_work_on_says_so() -> None:
    bench = Bench()
    view = Publishing(bench.dispatcher, 4.0).view(bench.now)
    for start, key, said in (
        ("3", "enter", "no shape"), ("2", "c", "no lanes"), ("2", "o", "no lanes"),
        ("2", "right_square_bracket", "no shape"), ("2", "left_square_bracket", "no shape"),
    ):  # fmt: skip
        app = TopApp(FakeFeed([view]), ADDRESS, desk=FakeDesk(), hz=0.001, clock=Clock())
        assert said in pressed(app, start, key, look=screen_of)[-1][-1], key


# -- moving ---------------------------------------------------------------------------------------


def test_up_and_down_choose_a_row_and_stop_at_the_ends(day: Day) -> None:
    signatures = [row["signature"] for row in day.views[-1]["shapes"]]
    seen = pressed(live(day), "3", "down", "down", "up", "end", "down", "home", "up", look=chosen)
    assert seen[1:] == [signatures[k] for k in (0, 1, 2, 1, -1, -1, 0, 0)]


def test_chosen_row_stays_chosen_when_the_order_changes(day: Day) -> None:
    app = live(day)
    view = day.views[-1]
    turned = {**view, "time": view["time"] + 1, "shapes": list(reversed(view["shapes"]))}
    app._feed.views.append(turned)

    async def run() -> tuple[str | None, str | None]:
        async with app.run_test() as pilot:
            await pilot.press("3", "down")
            before = chosen(app)
            app.refresh_picture()
            await pilot.pause()
            return before, chosen(app)

    before, after = asyncio.run(run())
    assert before == after == view["shapes"][1]["signature"]


@pytest.mark.parametrize("keys", [("pagedown", "pageup"), ("end", "home"), ("down", "up")])
def test_text_longer_than_the_screen_scrolls_and_comes_back(day: Day, keys: Any) -> None:
    first, far, back = pressed(live(day), "question_mark", *keys, look=screen_of)[1:]
    assert far[2:-1] != first[2:-1] == back[2:-1]
    assert far[1] != first[1]


@pytest.mark.parametrize(
    ("key", "columns", "rows"), [("right", 1, 0), ("down", 0, 1), ("pagedown", 0, 8)]
)
def test_keys_move_the_cursor_of_the_map(day: Day, key: str, columns: int, rows: int) -> None:
    def look(app: TopApp) -> tuple[int, int]:
        view = app.query_one(LanesView)
        return view._cursor, view._width

    start, after = pressed(live(day), "2", key, look=look)[1:]
    assert start[0] == 0
    assert after[0] == columns + rows * after[1]


def test_cursor_comes_back(day: Day) -> None:
    seen = pressed(live(day), "2", "right", "down", "left", "up", "up", "left", look=lane)
    assert seen[-1] == 0 and len(set(seen)) > 3
    assert pressed(live(day), "2", "end", "home", look=lane)[-2:] == [2_047, 0]
    assert pressed(live(day), "2", "pagedown", "pageup", look=lane)[-1] == 0


def test_detail_is_of_the_lane_under_the_cursor(day: Day) -> None:
    known = day.all_lanes[-1]
    shortest = sorted(zip(known["target_tokens"], known["id"], strict=True))
    seen = pressed(live(day), "2", "o", "right", look=screen_of)
    for lines, (target, lane_id) in zip(seen[2:], shortest, strict=False):
        wanted = f"lane {lane_id}  "
        assert any(line.startswith(wanted) and f"{target:,} tokens" in line for line in lines)
    seen = pressed(live(day), "2", "end", look=screen_of)
    assert any(line == "lane 2047: free" for line in seen[-1])


def test_c_goes_through_what_a_colour_says_and_o_through_the_orders(day: Day) -> None:
    def look(app: TopApp) -> Any:
        view = app.query_one(LanesView)
        return view.metric, view.order

    seen = pressed(live(day), "2", "c", "c", "c", "o", "o", look=look)
    assert seen[1:] == [
        ("waste", "id"), ("depth", "id"), ("age", "id"), ("waste", "id"),
        ("waste", "target"), ("waste", "id"),
    ]  # fmt: skip


def test_brackets_go_through_the_shapes_and_round(day: Day) -> None:
    signatures = [row["signature"] for row in day.views[-1]["shapes"]]
    keys = ("2", "right_square_bracket", "left_square_bracket", "left_square_bracket")
    seen = pressed(live(day), *keys, look=lambda app: app._shape)
    assert seen[2:] == [signatures[1], signatures[0], signatures[-1]]


# -- the palette ----------------------------------------------------------------------------------


def test_palette_has_every_command_of_the_page(day: Day) -> None:
    app = live(day)

    def look(_: TopApp) -> Any:
        return type(app.screen), [c.title for c in app.get_system_commands(app.screen)]

    (_, before), (screen, _) = pressed(app, PALETTE_KEY[0], look=look)
    assert screen is CommandPalette
    wanted = {c.name for c in commands.offered(LIVE, "overview", orders=True)}
    assert set(before) == {name for name in wanted if "in the list" not in name}


def test_palette_runs_what_is_typed_into_it(day: Day) -> None:
    keys = (PALETTE_KEY[0], *"explain", "enter", "enter")
    app = live(day)

    async def run() -> str:
        async with app.run_test(size=(80, 24)) as pilot:
            app.refresh_picture()
            for key in keys:
                await pilot.press(key)
                await app.workers.wait_for_complete()
                await pilot.pause()
            return app.page

    assert asyncio.run(run()) == "waste"


def test_palette_without_unicode(day: Day) -> None:
    app = live(day)
    app._palette.ascii_only = True
    lines = pressed(app, PALETTE_KEY[0], look=screen_of)[-1]
    assert any("explain waste" in line for line in lines)
    assert all(line.isascii() for line in lines)


def test_dialogs_without_unicode(day: Day) -> None:
    model = day.views[-1]["models"][0]
    app = live(day, models=[model, {**model, "model": "other"}])
    app._palette.ascii_only = True
    for lines in pressed(app, "p", "1", look=screen_of):
        assert all(line.isascii() for line in lines)


# -- orders ---------------------------------------------------------------------------------------

ORDERS = [
    ("p", {}, ("pause", {"model": "llama-3-8b"}), "is paused"),
    ("d", {}, ("drain", {}), "the broker drains"),
    ("r", {"dead_records": 2}, ("dead.requeue", {"all": True}), "2 dead items to run once more"),
    ("f", {"workers": "gone"}, ("workers.forget", {"name": "gpu0"}), "gpu0 is forgotten"),
]


def with_gone(day: Day, changed: dict[str, Any]) -> dict[str, Any]:
    """`workers: gone` stands for a card that is away and one that is not."""
    if changed.get("workers") != "gone":
        return changed
    first, second = day.views[-1]["workers"]
    return {**changed, "workers": [{**first, "live": False}, second]}


@pytest.mark.parametrize(("key", "changed", "wanted", "said"), ORDERS)
def test_order_is_sent_after_yes_and_only_then(
    day: Day, key: str, changed: dict[str, Any], wanted: Any, said: str
) -> None:
    for answer, sent in (("y", [wanted]), ("n", []), ("escape", []), ("enter", [])):
        desk = FakeDesk()
        app = live(day, desk, **with_gone(day, changed))
        seen = pressed(app, key, answer, look=lambda app: (dialog(app), screen_of(app)[-1]))
        assert seen[1][0] is Ask
        assert desk.asked == sent
        assert seen[2][0] is not Ask
        assert (said if sent else "nothing was ordered") in seen[2][1]


def test_paused_model_is_resumed(day: Day) -> None:
    desk = FakeDesk()
    models = [{**day.views[-1]["models"][0], "paused": True}]
    pressed(live(day, desk, models=models), "p", "y", look=page)
    assert desk.asked == [("resume", {"model": "llama-3-8b"})]


def test_several_models_are_asked_about_by_number(day: Day) -> None:
    desk = FakeDesk()
    model = day.views[-1]["models"][0]
    app = live(day, desk, models=[model, {**model, "model": "other"}])
    seen = pressed(app, "p", "2", "y", look=dialog)
    assert seen[1:3] == [Choose, Ask]
    assert desk.asked == [("pause", {"model": "other"})]
    pressed(live(day, desk, models=[model, {**model, "model": "x"}]), "p", "9", "n", look=page)
    assert len(desk.asked) == 1


def test_chosen_row_says_which_model_is_meant(day: Day) -> None:
    desk = FakeDesk()
    view = day.views[-1]
    models = [{**view["models"][0], "model": "other"}, view["models"][0]]
    seen = pressed(live(day, desk, models=models), "3", "p", "y", look=dialog)
    assert Choose not in seen
    assert desk.asked == [("pause", {"model": "llama-3-8b"})]


@pytest.mark.parametrize(("key", "said"), [("r", "nothing is dead"), ("f", "no worker is gone")])
def test_order_that_makes_no_sense_says_so(day: Day, key: str, said: str) -> None:
    desk = FakeDesk()
    assert said in pressed(live(day, desk), key, look=screen_of)[-1][-1]
    assert desk.asked == []


def test_refusal_of_the_broker_is_shown(day: Day) -> None:
    desk = FakeDesk({"pause": FabricError("not_found: no model 'x'")})
    lines = pressed(live(day, desk), "p", "y", look=screen_of)[-1]
    assert "refused: not_found: no model 'x'" in lines[-1]


@pytest.mark.parametrize("key", ["p", "d", "r", "f"])
@pytest.mark.parametrize(
    ("role", "said"),
    [(None, "--readonly"), ("monitor", "the role of this key is monitor, which may only look")],
)
def test_nothing_is_ordered_with_readonly_or_a_key_that_may_only_look(
    day: Day, key: str, role: str | None, said: str
) -> None:
    desk = FakeDesk()
    desk.role = role
    app = live(day, desk)
    app._readonly = role is None

    def look(app: TopApp) -> Any:
        titles = [c.title for c in app.get_system_commands(app.screen)]
        return dialog(app), screen_of(app)[-1], titles

    seen = pressed(app, key, look=look)
    assert seen[1][0] is not Ask and said in seen[1][1]
    assert not any(word in seen[0][1] for word in ("pause", "drain", "requeue", "forget"))
    assert not any("pause" in title for title in seen[0][2])
    assert desk.asked == []


def test_role_that_may_order_does(day: Day) -> None:
    desk = FakeDesk()
    desk.role = "operator"
    assert pressed(live(day, desk), "d", "y", look=dialog)[1] is Ask
    assert desk.asked == [("drain", {})]


def test_order_that_is_not_allowed_is_offered_no_more_until_another_broker_comes(day: Day) -> None:
    desk = FakeDesk({"drain": FabricError("not_allowed: a monitor may not drain")})
    app = live(day, desk)
    seen = pressed(app, "d", "y", "p", look=lambda app: (dialog(app), screen_of(app)[-1]))
    assert seen[1][0] is Ask and "drain" in seen[0][1]
    assert seen[2][1] == "refused: not_allowed: a monitor may not drain"
    assert seen[3][0] is not Ask and seen[3][1] == "not allowed: a monitor may not drain"
    assert desk.asked == [("drain", {})]
    app = live(day, desk)

    async def restart() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            for key in ("d", "y"):
                await press(pilot, app, key)
            assert app._may_order is not None
            app._feed.views.append({**day.views[-1], "boot_id": "another"})
            await press(pilot, app, "1")
            assert app._may_order is None

    asyncio.run(restart())


def test_nothing_is_ordered_of_a_broker_that_is_lost(day: Day) -> None:
    desk = FakeDesk()
    app = live(day, desk)

    def lose(app: TopApp) -> str:
        app._clock.now += 10.0
        return screen_of(app)[-1]

    assert "the broker is lost" in pressed(app, "p", look=lose)[-1]
    assert desk.asked == []


# -- replay ---------------------------------------------------------------------------------------


def at(app: TopApp) -> float:
    assert app._replay is not None
    return app._replay.position_s - app._replay.reader.span[0]


def shown(app: TopApp) -> float:
    assert app._replay is not None and app.snapshot is not None
    return app.snapshot["time"] - app._replay.reader.span[0]


def test_replay_keys_step_and_seek(recording: Path) -> None:
    keys = ("full_stop", "full_stop", "comma", "greater_than_sign", "less_than_sign")
    seen = pressed(replaying(recording), *keys, look=at)
    end = seen[4]
    assert seen[1:4] == pytest.approx([0.25, 0.5, 0.25])
    assert end == pytest.approx(41.75)
    assert seen[5] == 0.0


def test_replay_shows_the_snapshot_of_its_position(recording: Path) -> None:
    seen = pressed(replaying(recording), *["full_stop"] * 3, "comma", look=shown)
    assert seen == pytest.approx([0.0, 0.25, 0.5, 0.75, 0.5])


def test_replay_goes_to_events_and_says_when_there_is_none(day: Day, recording: Path) -> None:
    first = day.views[0]["time"]
    times = sorted({e["time"] - first for e in day.events if e["time"] > first})
    seen = pressed(replaying(recording), *["e"] * len(times), "E", look=at)
    assert seen[1:-1] == pytest.approx(times)
    assert seen[-1] == pytest.approx(times[-2] if len(times) > 1 else 0.0)
    app = replaying(recording)
    assert "no event that way" in pressed(app, *["e"] * 20, look=screen_of)[-1][-1]


def test_replay_plays_stops_and_changes_its_speed(recording: Path) -> None:
    clock = Clock()
    app = replaying(recording, clock)

    def on(app: TopApp) -> float:
        clock.now += 1.0
        app.refresh_picture()
        return at(app)

    seen = pressed(app, "plus", "plus", "minus", "space", "space", look=on)
    # Speeds 1, 2, 5, 2, stopped, 2; the position moves on between the keys as well.
    steps = [b - a for a, b in itertools.pairwise(seen)]
    assert seen[0] == pytest.approx(1.0)
    assert steps == pytest.approx([2.0, 5.0, 2.0, 0.0, 2.0])


def test_replay_goes_to_a_time(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    app = replaying(recording)
    import time

    time.tzset()
    start = app._replay.reader.span[0] if app._replay is not None else 0.0
    wanted = time.strftime("%H:%M:%S", time.gmtime(start + 20))
    seen = pressed(app, "g", *wanted.replace(":", " ").split(), look=dialog)
    assert seen[1] is When
    app = replaying(recording)

    async def run() -> float:
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("g", *("colon" if c == ":" else c for c in wanted), "enter")
            await pilot.pause()
            return at(app)

    assert asyncio.run(run()) == pytest.approx(20.0, abs=1.0)


def test_time_that_is_none_is_refused_in_words(recording: Path) -> None:
    lines = pressed(replaying(recording), "g", "x", "enter", look=screen_of)[-1]
    assert "'x' is not a time: HH:MM or HH:MM:SS" in lines[-1]
    assert pressed(replaying(recording), "g", "escape", look=at)[-1] == 0.0


def test_nothing_is_ordered_in_a_replay(recording: Path) -> None:
    seen = pressed(replaying(recording), "d", look=lambda a: (dialog(a), screen_of(a)[-1]))
    assert seen[-1][0] is not Ask and "replay" in seen[-1][1]


@pytest.mark.parametrize("key", ["1", "2", "3", "4", "5", "6", "w"])
def test_every_page_replays(recording: Path, key: str) -> None:
    lines = pressed(replaying(recording), *["greater_than_sign"], key, look=screen_of)[-1]
    assert not any("nothing heard" in line or "waiting for" in line for line in lines)
    assert sum(bool(line) for line in lines) > 8


# -- the table ------------------------------------------------------------------------------------


def test_every_key_is_pressed_by_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for command in COMMANDS:
        for key in command.keys.split(","):
            assert f'"{key}"' in text, f"no test presses {key}"


@pytest.mark.parametrize("mode", [LIVE, REPLAY])
@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("width", [80, 120, 200])
def test_line_of_keys_names_only_what_works_here_and_is_never_cut(
    mode: str, name: str, width: int
) -> None:
    shown_line = text_of(commands.key_line(mode, name, width, orders=mode == LIVE))
    assert len(shown_line.rstrip()) <= width
    known = {f"{c.shown} {c.short}" for c in commands.offered(mode, name, orders=mode == LIVE)}
    named = [part.strip() for part in shown_line.split("  ") if part.strip()]
    assert set(named) <= known | {"? help", "^p all"}
    assert "? help" in named and "^p all" in named


@pytest.mark.parametrize("name", (*commands.PAGES, "waste"))
def test_line_of_pages_fits_and_says_where_one_is(name: str) -> None:
    said = text_of(commands.page_line(name, None, 80))
    assert len(said) <= 80
    assert f"[{name}]" in said
