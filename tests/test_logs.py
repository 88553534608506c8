"""Logs: one event a line, text or JSON, and a reader that sleeps holds up nobody."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import pytest

from tests.running import brokering, until
from zfabric import logs
from zfabric.logs import EventLog, json_line, text_line

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


@pytest.mark.parametrize(("form", "said"), [("text", "lines before it"), ("json", "dropped_bef")])
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
