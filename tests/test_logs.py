"""Logs: one event a line, text or JSON, and a reader that sleeps holds up nobody."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.running import brokering, start_zfabric, until
from zfabric import logs
from zfabric.cli.worklog import to_standard_error
from zfabric.logs import EventLog, LogFile, json_line, text_line

EVENT: dict[str, Any] = {
    "seq": 4, "time": 1_700_000_000.25, "event": "worker_lost", "text": "gpu0: silent\x1b[31m\n",
    "worker": "gpu0",
}  # fmt: skip


def test_text_line_has_time_level_name_and_a_safe_text() -> None:
    assert text_line(EVENT) == (
        "2023-11-14T22:13:20.250Z warning worker_lost        gpu0: silent?[31m "
    )


def test_json_line_is_one_object_with_the_fields_of_the_event() -> None:
    line = json_line(EVENT)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z", "level": "warning", "event": "worker_lost",
        "text": "gpu0: silent\x1b[31m\n", "worker": "gpu0",
    }  # fmt: skip


@pytest.mark.parametrize("form", ["text", "json"])
def test_events_are_written_in_their_order(form: str) -> None:
    stream = io.StringIO()
    log = EventLog(form, stream)
    for k in range(100):
        log.write({**EVENT, "text": f"number {k}"})
    log.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 100
    assert all(f"number {k}" in line for k, line in enumerate(lines))


class Stuck(io.StringIO):
    """A stream whose reader sleeps until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self, text: str) -> int:
        self.free.wait(60)
        return super().write(text)


@pytest.mark.parametrize(("form", "said"), [("text", "dropped before it"), ("json", "dropped_bef")])
def test_reader_that_sleeps_costs_lines_and_no_time(
    monkeypatch: pytest.MonkeyPatch, form: str, said: str
) -> None:
    monkeypatch.setattr(logs, "LINES_MAX", 10)
    stream = Stuck()
    log = EventLog(form, stream)
    for _ in range(50):
        log.write(EVENT)
    assert log.dropped >= 39
    stream.free.set()
    until(lambda: stream.getvalue().count("\n") >= 10)
    log.write({**EVENT, "text": "after"})
    log.close()
    last = stream.getvalue().splitlines()[-1]
    assert "after" in last and said in last


def test_end_does_not_wait_for_a_reader_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LINES_MAX", 4)
    monkeypatch.setattr(logs, "CLOSE_S", 0.05)
    stream = Stuck()
    log = EventLog("text", stream)
    for _ in range(9):
        log.write(EVENT)
    log.close()
    stream.free.set()


def test_reader_that_is_gone_ends_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    log = EventLog("text", stream)
    for _ in range(3):
        log.write(EVENT)
    log.close()


class Full(io.StringIO):
    """A stream that takes some lines, then none, then some again: a disk that was full."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.refused = refused
        self.asked = 0

    def write(self, text: str) -> int:
        self.asked += 1
        if self.asked in self.refused:
            raise OSError(errno.ENOSPC, "full")
        return super().write(text)


def test_stream_that_takes_nothing_for_a_while_is_written_to_again() -> None:
    stream = Full(2, 3, 4)
    log = EventLog("text", stream)
    for k, dropped in enumerate((0, 1, 2, 3, 0, 0), 1):
        log.write({**EVENT, "text": f"number {k}"})
        until(lambda k=k, dropped=dropped: (stream.asked, log.dropped) == (k, dropped))
    log.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("number ")[1] for line in lines] == [
        "1", "5 (3 lines dropped before it)", "6"
    ]  # fmt: skip


def test_log_that_is_moved_away_while_its_disk_is_full_goes_on_in_the_new_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    stream = LogFile(path)
    stream.write("lost\n")
    with pytest.raises(OSError):
        stream.flush()
    stream.write("lost too\n")
    path.unlink()
    for text in ("one\n", "two\n"):
        stream.write(text)
        stream.flush()
    stream.close()
    assert path.read_text() == "one\ntwo\n"


@pytest.mark.e2e
def test_running_broker_gives_its_events_to_the_log_once_each() -> None:
    from zfabric.client import Client

    with brokering() as running:
        seen: list[dict[str, Any]] = []
        running.broker.on_event = seen.append
        client = Client(running.address, name="job")
        until(lambda: any(event["event"] == "producer_joined" for event in seen))
        client.close()
        until(lambda: any(event["event"] == "producer_lost" for event in seen))
    assert [event["seq"] for event in seen] == sorted({event["seq"] for event in seen})


@pytest.mark.e2e
@pytest.mark.parametrize("form", ["json", "text", "off"])
def test_worker_logs_as_the_broker_does(form: str, tmp_path: Path) -> None:
    """Its whole life: let in, broken by a broker that ends, told to end."""
    with brokering() as running:
        worker = start_zfabric(
            "worker", "--engine", "sim", "--model", "m", "--name", "gpu0", "--max-batch", 8,
            "--max-tokens", 8_192, "--max-input", 1_024, "--broker", running.address,
            "--log", form, cwd=tmp_path,
        )  # fmt: skip
        try:
            until(lambda: [w for w in running.broker.ask(9)["workers"] if w["granted"]])
            running.broker.drain()
            running.thread.join(60)
            running.start()
            until(lambda: [w for w in running.broker.ask(9)["workers"] if w["granted"]])
        finally:
            worker.terminate()
            _, wrote = worker.communicate(timeout=60)
    assert worker.returncode == 0
    lines = wrote.splitlines()
    if form == "off":
        assert lines == []
        return
    if form == "text":
        events = [(line.split()[1], line.split()[2]) for line in lines]
        assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in lines)
    else:
        rows = [json.loads(line) for line in lines]
        events = [(row["level"], row["event"]) for row in rows]
        assert {row["worker"] for row in rows} == {"gpu0"}
    assert events[0] == ("info", "worker_started") and events[-1] == ("info", "worker_ended")
    assert {("info", "engine_loaded"), ("warning", "broker_lost")} <= set(events)
    assert events.count(("info", "broker_connected")) == 2


def test_records_of_libraries_are_told_too_from_warnings_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = logging.getLogger("some.library")
    with to_standard_error("json"):
        library.info("chatter")
        library.warning("%s is \x1b[31mdeprecated", "it")
    library.warning("after the end")
    (row,) = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]
    assert (row["level"], row["event"], row["logger"]) == ("warning", "other", "some.library")
    assert row["text"] == "it is \x1b[31mdeprecated"


def test_record_that_a_library_made_wrong_ends_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with to_standard_error("json"):
        logging.getLogger("some.library").warning("%d", "no number")
        logging.getLogger("some.library").warning("next")
    lines = [line for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]
    assert [json.loads(line)["text"] for line in lines] == ["next"]
