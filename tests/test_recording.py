"""Recordings: what comes back is what was published, bounded, refused where it is not one."""

from __future__ import annotations

import copy
import sqlite3
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboards import Clock, Day, a_day, recorded
from zfabric.errors import ConfigError
from zfabric.protocol import TOPIC_EVENT, TOPIC_LANES, TOPIC_LENGTHS, TOPIC_SNAPSHOT
from zfabric_tui.feed import CURRENT, Arrived
from zfabric_tui.recorder import Recorder
from zfabric_tui.recording import (
    GAP_S,
    KEY_EVERY,
    LANES,
    SCHEMA,
    SNAPSHOT,
    Reader,
    Writer,
    pack,
    unpack,
)
from zfabric_tui.replay import ReplayFeed
from zfabric_tui.timeline import bar, parse

MIB = 1 << 20


@pytest.fixture(scope="module")
def day() -> Day:
    return a_day()


@given(st.binary(max_size=2_000), st.one_of(st.none(), st.binary(min_size=1, max_size=2_000)))
def test_what_is_packed_comes_back(raw: bytes, base: bytes | None) -> None:
    assert unpack(pack(raw, base), base) == raw


def test_every_snapshot_event_and_lane_comes_back(day: Day, tmp_path: Path) -> None:
    with Reader(recorded(day, tmp_path / "day.db")) as reader:
        first, last = reader.span
        assert len(day.views) > 2 * KEY_EVERY
        assert reader.snapshots(first - 1, last, 10_000) == day.views
        assert reader.events(0, last, 10_000) == day.events
        lanes = day.all_lanes[-1]
        assert reader.lanes(lanes["signature"], last) == lanes
        assert reader.lanes(None, last) == lanes
        assert reader.lanes(lanes["signature"], first) is None
        assert reader.gaps() == []


def test_recording_of_an_earlier_release_has_what_pages_ask_for(day: Day, tmp_path: Path) -> None:
    old = copy.deepcopy(day.views[-1])
    del old["lane_pressure_ratio_run"], old["storage"]["disk_reserve_bytes"]
    writer = Writer(tmp_path / "old.db", release="0", limit_bytes=10**6)
    writer.add(SNAPSHOT, old["time"], msgpack.packb(old))
    writer.close()
    with Reader(tmp_path / "old.db") as reader:
        (found,) = reader.snapshots(0, old["time"], 1)
    assert found["lane_pressure_ratio_run"] == old["lane_pressure_ratio"]
    assert found["storage"]["disk_reserve_bytes"] is None


def test_snapshots_repeat_each_other_and_take_little_room(day: Day, tmp_path: Path) -> None:
    path = recorded(day, tmp_path / "day.db")
    raw = sum(len(msgpack.packb(view)) for view in day.views)
    assert path.stat().st_size < raw / 5


def test_gap_is_where_nothing_was_recorded(day: Day, tmp_path: Path) -> None:
    path = recorded(day, tmp_path / "day.db", leave_out=slice(40, 80))
    with Reader(path) as reader:
        assert reader.gaps() == [(day.views[39]["time"], day.views[80]["time"])]


def test_file_stays_within_its_limit_and_keeps_the_newest(day: Day, tmp_path: Path) -> None:
    path, limit = tmp_path / "long.db", MIB // 4
    writer = Writer(path, release="test", limit_bytes=limit)
    sizes = []
    for k in range(6_000):
        view = day.views[k % len(day.views)]
        changed = {**view, "time": 1.0 * k, "noise": f"{k * 2654435761 % 2**64:x}" * 8}
        writer.add(SNAPSHOT, 1.0 * k, msgpack.packb(changed))
        if k % 500 == 499:
            writer.commit()
            sizes.append(path.stat().st_size)
    writer.close()
    assert max(sizes) < 2 * limit
    assert sizes[-1] <= sizes[4] * 1.2
    with Reader(path) as reader:
        first, last = reader.span
        assert last == 5_999.0 and first > 1_000.0
        kept = reader.snapshots(first - 1, last, 10_000)
        assert [view["time"] for view in kept] == [first + k for k in range(len(kept))]


def test_second_life_of_a_broker_goes_on_in_the_same_file(day: Day, tmp_path: Path) -> None:
    path = recorded(day, tmp_path / "day.db")
    later = day.views[-1]["time"] + 100.0
    writer = Writer(path, release="test", limit_bytes=MIB)
    writer.add(SNAPSHOT, later, msgpack.packb({**day.views[0], "time": later, "boot_id": "other"}))
    writer.close()
    with Reader(path) as reader:
        assert reader.span == (day.views[0]["time"], later)
        assert reader.gaps() == [(day.views[-1]["time"], later)]


@pytest.mark.parametrize("made", ["text", "database", "missing", "empty", "later", "directory"])
def test_what_is_no_recording_is_refused_in_words(made: str, tmp_path: Path) -> None:
    path = tmp_path / "file.db"
    if made == "text":
        path.write_text("hello " * 1_000)
    elif made == "database":
        sqlite3.connect(path).executescript("CREATE TABLE t (x)")
    elif made == "empty":
        Writer(path, release="test", limit_bytes=MIB).close()
    elif made == "later":
        Writer(path, release="test", limit_bytes=MIB).close()
        with sqlite3.connect(path) as db:
            db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(SCHEMA + 1),))
        db.close()
    elif made == "directory":
        path.mkdir()
    said = {"missing": "no recording", "empty": "no snapshot", "later": "schema 2"}.get(
        made, "not a recording|cannot"
    )
    with pytest.raises(ConfigError, match=said if made != "directory" else "no recording"):
        Reader(path)
    if made in ("text", "database", "later", "directory"):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises(ConfigError):
            Writer(path, release="test", limit_bytes=MIB)
        assert (path.read_bytes() if path.is_file() else b"") == before


def test_damaged_snapshot_is_an_error_in_words(day: Day, tmp_path: Path) -> None:
    path = recorded(day, tmp_path / "day.db")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE frames SET data = X'00' WHERE seq = 3")
    db.close()
    with Reader(path) as reader, pytest.raises(ConfigError, match="damaged"):
        reader.snapshots(0.0, 1e12, 10_000)


def test_recorder_keeps_what_a_feed_brought_and_lanes_now_and_then(
    day: Day, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path / "kept.db", 1)
    lanes = day.all_lanes[-1]
    for k, view in enumerate(day.views):
        raw = [
            (TOPIC_SNAPSHOT, msgpack.packb(view)),
            (TOPIC_LANES + CURRENT.encode(), msgpack.packb({**lanes, "time": view["time"]})),
            (b"unknown", b"\xff"),
        ]
        if k == 5:
            raw.append((TOPIC_EVENT, msgpack.packb(day.events[0])))
            lengths = {"time": view["time"], "taken": 1, "runs": []}
            raw.append((TOPIC_LENGTHS, msgpack.packb(lengths)))
        recorder.keep(Arrived(raw=raw))
    recorder.close()
    with Reader(tmp_path / "kept.db") as reader:
        first, last = reader.span
        assert len(reader.times) == len(day.views)
        assert reader.events(0, last, 10) == [day.events[0]]
        assert [value["taken"] for value in reader.lengths(last)] == [1]
    with sqlite3.connect(tmp_path / "kept.db") as db:
        (kept,) = db.execute("SELECT count(*) FROM frames WHERE kind = ?", (LANES,)).fetchone()
    db.close()
    assert kept == int((last - first) // 5.0) + 1


# -- replay ---------------------------------------------------------------------------------------


def test_replay_brings_what_a_live_feed_would_have_brought(day: Day, tmp_path: Path) -> None:
    clock = Clock()
    feed = ReplayFeed(Reader(recorded(day, tmp_path / "day.db")), clock)
    views: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    while True:
        arrived = feed.poll(0)
        views += arrived.snapshots
        events += arrived.events
        if feed.at_end:
            break
        clock.now += 0.25
    assert views == day.views
    assert events == day.events
    feed.close()


def test_jump_says_so_and_brings_what_rates_need(day: Day, tmp_path: Path) -> None:
    feed = ReplayFeed(Reader(recorded(day, tmp_path / "day.db")), Clock())
    feed.poll(0)
    feed.seek(feed.reader.span[0] + 20.0)
    arrived = feed.poll(0)
    assert arrived.restarted
    assert arrived.snapshots[-1]["time"] == pytest.approx(feed.position_s)
    assert arrived.snapshots[-1]["time"] - arrived.snapshots[0]["time"] > 10.0
    assert [e["time"] <= feed.position_s for e in arrived.events] == [True] * len(arrived.events)
    assert not feed.poll(0).restarted
    feed.seek(-1e9)
    assert feed.poll(0).snapshots[-1] == day.views[0]


def test_moment_in_a_gap_is_known_to_be_one(day: Day, tmp_path: Path) -> None:
    path = recorded(day, tmp_path / "day.db", leave_out=slice(40, 100))
    feed = ReplayFeed(Reader(path), Clock())
    seen = []
    for seconds in (5.0, 9.0, 13.0, 14.0, 20.0, 30.0):
        feed.seek(day.views[0]["time"] + seconds)
        seen.append(feed.in_gap)
    assert seen == [False, False, True, True, True, False]
    feed.seek(day.views[0]["time"] + 20.0)
    assert feed.poll(0).snapshots[-1] == day.views[39]
    assert feed.age_s is not None and feed.age_s > GAP_S


def test_lanes_follow_the_position(day: Day, tmp_path: Path) -> None:
    feed = ReplayFeed(Reader(recorded(day, tmp_path / "day.db")), Clock())
    feed.follow(CURRENT)
    for lanes in day.all_lanes:
        feed.seek(lanes["time"])
        assert list(feed.poll(0).lanes.values()) == [lanes]
    assert feed.poll(0).lanes == {}


# -- the line under it ----------------------------------------------------------------------------


def test_gaps_are_gaps_in_the_line_and_events_marks() -> None:
    assert bar((0.0, 100.0), [], [], 0.0, 10) == "#---------"
    assert bar((0.0, 100.0), [(25.0, 75.0)], [], 100.0, 10) == "---    --#"
    assert bar((0.0, 100.0), [], [55.0], 100.0, 10) == "-----+---#"
    # A gap that is not much smaller than a cell is seen as well.
    assert bar((0.0, 100.0), [(41.0, 49.0)], [], 0.0, 10) == "#--- -----"


@given(
    st.floats(0, 1e6), st.floats(0, 1e6), st.lists(st.floats(0, 1e6), max_size=5),
    st.integers(1, 200),
)  # fmt: skip
def test_line_is_as_long_as_its_room(
    first: float, more: float, events: list[float], width: int
) -> None:
    assert len(bar((first, first + more), [], events, first, width)) == width


@pytest.mark.parametrize("text", ["", "12", "25:00", "12:60", "a:b", "1:2:3:4", "1:0:99", "-1:00"])
def test_what_is_no_time_of_day_is_none(text: str) -> None:
    assert parse(text, 0.0) is None
