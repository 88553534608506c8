"""No text of a peer reaches an operator's terminal raw: every surface, with hostile texts.

A peer can put control sequences where the protocol takes free text (reasons, remarks, labels, the
word for its state, payloads, file names), and a hostile broker can put them anywhere in an answer.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
import logging
import re
from typing import Any

import pytest

from tests.dashboards import ADDRESS, Clock, FakeDesk, FakeFeed, a_day, screen_of
from tests.harness import Bench
from tests.running import COMPLETIONS, request, zfabric
from zfabric import cli, logs
from zfabric.cli import common, progress
from zfabric.errors import FabricError
from zfabric.protocol import Type
from zfabric.shapes import Shape
from zfabric_tui.app import TopApp
from zfabric_tui.commands import EVERYWHERE

# CSI, OSC, BEL, a C1 CSI, an 8-bit OSC, bidi overrides, a line separator, BEL and DEL.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\x9dx\x07\u202egnp\u2066\u2028\x7f\r"
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def poisoned(value: Any) -> Any:
    """Every text of an answer with a hostile tail, as a hostile broker would send it."""
    if isinstance(value, dict):
        return {name: poisoned(v) for name, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v) for v in value]
    return value + HOSTILE if isinstance(value, str) else value


@pytest.fixture(scope="module")
def bench() -> Bench:
    """A fabric in which everything that a peer may say freely is hostile."""
    bench = Bench(attempts_max=1)
    producer, worker = bench.producer(), bench.worker()
    producer.submit([10, 20, 30], Shape("m", (1,), (), HOSTILE + "example"))
    bench.settle()
    bench.dispatch(1)
    key = next(iter(worker.batches))
    worker.start(key)
    worker.heartbeat(stats={"state": HOSTILE, "measured_by": HOSTILE, "hits_tokens": 1,
                            "queries_tokens": 2, HOSTILE: HOSTILE})  # fmt: skip
    fields = {"epoch": key[0], "n": key[1], "kind": "engine_error", "text": f"bad {HOSTILE}"}
    worker.send(Type.RETURNED, fields, [b""])
    worker.send(Type.BYE, {"reason": f"gone {HOSTILE}"})
    producer.send(Type.REQUEST, {"id": 99, "op": HOSTILE, "args": {}})
    producer.send(Type.SHAPE, {"id": 5, "model": HOSTILE, "components": b""})
    bench.settle()
    bench.tick(1.0)
    assert bench.fabric.dead
    return bench


class Hostile:
    """A client whose broker answers with hostile texts."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.welcome = {"boot": 1}
        self.connected = True

    def request(self, op: str, timeout: float | None = None, **args: Any) -> Any:
        answer = self.answers.get(op)
        if answer is None:
            raise FabricError(f"failed: {op}: {HOSTILE}")
        return answer

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def hostile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers to every request: real ones, with a hostile tail at every text."""
    asked = bench.dispatcher._operations.request
    answers = {
        op: poisoned(asked(op, {}, bench.now))
        for op in ("status", "shapes", "lanes", "workers", "events", "dead.ls", "producers.ls")
    }
    answers["status"] |= poisoned(bench.dispatcher.meta(bench.now))
    monkeypatch.setattr(common, "connect", lambda settings: Hostile(answers))
    return answers


COMMANDS = [
    ["status"], ["top", "--once"], ["shapes"], ["lanes"], ["workers"], ["events"], ["dead", "ls"],
    ["producers", "ls"],
]  # fmt: skip
REFUSED = [["drain"], ["pause", "m"], ["resume", HOSTILE], ["dead", "requeue", "1"],
           ["dead", "drop", "--all"], ["producers", "cancel", HOSTILE],
           ["producers", "forget", HOSTILE]]  # fmt: skip


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_that_look(
    hostile: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    form: list[str],
) -> None:
    assert cli.main([*command, *form]) == 0
    out, err = capsys.readouterr()
    assert out
    assert RAW.search(out + err) is None
    if form and command != ["events"]:
        op = {"top --once": "status", "dead ls": "dead.ls", "producers ls": "producers.ls"}
        name = op.get(" ".join(command), command[0])
        assert json.loads(out) == hostile[name], "escaped, and the same data"


@pytest.mark.parametrize("extra", [[], ["--traceback"]], ids=["line", "traceback"])
@pytest.mark.parametrize("command", REFUSED, ids=lambda words: words[0])
def test_what_is_refused_and_why(
    hostile: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    extra: list[str],
) -> None:
    assert cli.main([*command, *extra]) == 1
    out, err = capsys.readouterr()
    assert "failed" in err
    assert RAW.search(out + err) is None


def test_arguments_that_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([HOSTILE], ["status", HOSTILE], ["broker", "--bind", HOSTILE],
                  ["status", "--broker", HOSTILE], ["segments", "ls", f"/none/{HOSTILE}"],
                  ["keys", "make", HOSTILE, "--role", "worker"], ["status", "--key", HOSTILE],
                  ["run-batch", "-i", f"/none{HOSTILE}", "-o", "x", "--memory"]):  # fmt: skip
        assert cli.main(words) == 2
        out, err = capsys.readouterr()
        assert err
        assert RAW.search(out + err) is None


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_of_the_broker(bench: Bench, form: str) -> None:
    stream = io.StringIO()
    log = logs.EventLog(form, stream)
    for event in bench.fabric.events:
        log.write(event)
        log.write(poisoned(event))
    log.close()
    assert stream.getvalue().count("\n") == 2 * len(bench.fabric.events)
    assert RAW.search(stream.getvalue()) is None


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_of_a_worker(capsys: pytest.CaptureFixture[str], form: str) -> None:
    from zfabric.cli.worklog import to_standard_error

    with to_standard_error(form):
        logging.getLogger("zfabric.worker").warning("said: %s", HOSTILE)
    out, err = capsys.readouterr()
    assert "said: " in err
    assert RAW.search(out + err) is None


@pytest.mark.parametrize("kind", [progress.Quiet, progress.Plain])
def test_notices_of_a_batch_run(capsys: pytest.CaptureFixture[str], kind: type) -> None:
    kind().notice(f"the model {HOSTILE} has no worker")
    out, err = capsys.readouterr()
    assert RAW.search(out + err) is None


def test_batch_file_of_hostile_lines(tmp_path: Any) -> None:
    """Names, prompts and bad lines of a file: none of it on the terminal, all of it in the rows."""
    source = tmp_path / "in.jsonl"
    rows = [request(f"q{HOSTILE}", HOSTILE, url=COMPLETIONS, model="m"), request("q2", "plain")]
    bad = [json.dumps({"custom_id": HOSTILE}), f"no json {HOSTILE}"]
    text = "\n".join([*map(json.dumps, rows), *bad])
    source.write_text(text + "\n", encoding="utf-8")
    ran = zfabric(
        "run-batch", "-i", source, "-o", "out.jsonl", "--engine", "sim", "--opt", "speed=0",
        cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    assert RAW.search(ran.stdout + ran.stderr) is None
    # Not by splitlines, which takes U+2028 for the end of a line.
    results = (tmp_path / "out.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert {json.loads(row)["custom_id"] for row in results} == {f"q{HOSTILE}", "q2"}
    looked = zfabric("run-batch", "-i", source, "--dry-run", cwd=tmp_path)
    assert RAW.search(looked.stdout + looked.stderr) is None


@pytest.mark.parametrize("page", EVERYWHERE)
def test_dashboard(page: str) -> None:
    """Every page on a snapshot with a hostile tail at every free text."""
    day = _hostile_day()
    feed = FakeFeed(day["views"], day["events"], day["lanes"], first=len(day["views"]))
    app = TopApp(feed, ADDRESS, desk=FakeDesk(), hz=0.001, clock=Clock())

    async def run() -> list[str]:
        async with app.run_test(size=(200, 60)) as pilot:
            await pilot.press("w" if page == "waste" else str(EVERYWHERE.index(page) + 1))
            app.refresh_picture()
            await pilot.pause()
            return screen_of(app)

    lines = asyncio.run(run())
    assert any(line.strip() for line in lines)
    assert RAW.search("".join(lines)) is None


FREE = frozenset({
    "name", "model", "engine", "measured_by", "last_disconnect", "example", "text", "release",
    "worker", "producer", "full",
})  # fmt: skip
_kept: dict[str, Any] = {}


def _hostile_day() -> dict[str, Any]:
    if not _kept:
        day = a_day()
        _kept.update(
            views=[_free(v) for v in copy.deepcopy(day.views[-20:])],
            events=[_free(e) for e in day.events],
            lanes=_free(day.lanes_by_signature),
        )
    return _kept


def _free(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: v + HOSTILE if name in FREE and isinstance(v, str) else _free(v)
            for name, v in value.items()
        }
    return [_free(v) for v in value] if isinstance(value, list) else value


def test_names_that_peers_give_themselves_are_refused() -> None:
    for name, hello in ((HOSTILE, {}), ("w", {"model": HOSTILE}), ("w", {"engine": HOSTILE})):
        bench = Bench()
        bench.worker(name, **hello)
        assert not bench.dispatcher.peers
        assert bench.fabric.counters["peer_errors_malformed"] == 1
