"""The commands that look on: explain, the broker's log, metrics and recording, what they refuse."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Bench
from tests.running import (
    FAST,
    PATIENCE_S,
    brokering,
    operating,
    serving,
    start_zfabric,
    until,
    zfabric,
)
from tests.test_cli import out_of, plain_surroundings
from zfabric.client import Client
from zfabric.protocol import Type
from zfabric.results import Item
from zfabric.shapes import Shape

__all__ = ["plain_surroundings"]
ITEMS = 600


@pytest.fixture(scope="module")
def worked():
    """A broker whose worker has done some work."""
    with brokering() as running, serving(FAST, running.address, name="gpu0"):
        with Client(running.address, name="job") as client:
            shape = Shape.of("m", "system prompt")
            items = [Item(shape, b"x", length=20 + k % 400) for k in range(ITEMS)]
            assert len(list(client.map(items))) == ITEMS
        yield running


def test_explain_prints_a_verdict_whose_parts_add_up(worked, capsys) -> None:
    code, out, _ = out_of(capsys, "explain", "waste", "--json", "--broker", worked.address)
    said = json.loads(out)
    with operating(worked.address) as client:
        status = client.stats()
    assert code == 0
    assert said["verdict"] == status["waste_verdict"]
    padding = status["padded_tokens"] - status["real_tokens"]
    assert sum(part["tokens"] for part in said["parts"]) == padding > 0
    assert said["command"].startswith("zfabric ")
    code, out, _ = out_of(capsys, "explain", "waste", "--broker", worked.address)
    assert code == 0
    for word in ("verdict", "since", "rule", "fill", "cost", "run", f"{padding:,}"):
        assert word in out


def test_what_if_compares_what_there_is_with_what_was_asked_for(worked, capsys) -> None:
    words = ("explain", "waste", "--what-if", "lanes=4", "--json", "--broker", worked.address)
    code, out, _ = out_of(capsys, *words)
    few = json.loads(out)["what_if"]
    assert code == 0
    assert [row["lanes"] for row in few] == [2_048, 4]
    assert few[1]["waste_ratio"] > few[0]["waste_ratio"]
    code, out, _ = out_of(capsys, *(word for word in words if word != "--json"))
    assert f"Simulated: the lengths of the last {ITEMS} items" in out
    cells = [line.split()[:2] for line in out.splitlines()]
    rows = [row for row in cells if row[:1] in (["measured"], ["simulated"])]
    assert rows == [["measured", "2,048"], ["simulated", "2,048"], ["simulated", "4"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", "waste", "--what-if", "workers=3"), "--what-if takes lanes=N"),
        (("explain", "waste", "--what-if", "lanes=0"), "from 1 to 2048"),
        (("explain", "waste", "--replay", "gone.db"), "there is no recording gone.db"),
        (("top", "--replay", "x.db", "--record", "y.db"), "leave out --record"),
        (("broker", "--log", "xml"), "(one of text, json, off)"),
        (("broker", "--record-mib", "0"), "record_mib"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words, said, capsys) -> None:
    code, out, err = out_of(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_what_if_without_a_worker_or_with_too_little_says_what_is_missing(capsys) -> None:
    with brokering() as running:
        words = ("explain", "waste", "--what-if", "lanes=4", "--broker", running.address)
        code, _, err = out_of(capsys, *words)
        assert code == 2 and "no worker that pads is known" in err
        with serving(FAST, running.address):
            code, _, err = out_of(capsys, *words)
            assert code == 2 and "only 0 lengths known" in err


@pytest.mark.e2e
def test_broker_logs_records_and_serves_metrics_as_told(tmp_path: Path) -> None:
    words = ("broker", "--port", "0", "--json", "--log", "json", "--metrics-port", "0")
    broker = start_zfabric(*words, "--record", "run.db", cwd=tmp_path)
    try:
        assert broker.stdout is not None and broker.stderr is not None
        bound = json.loads(broker.stdout.readline())
        with serving(FAST, bound["producers"], name="gpu0"):
            with Client(bound["producers"], name="job") as client:
                items = [Item(Shape.of("m", "a"), b"x", length=50 + k) for k in range(64)]
                assert len(list(client.map(items))) == 64
            with urllib.request.urlopen(bound["metrics"], timeout=PATIENCE_S) as answer:
                scraped = answer.read().decode()
            assert "zfabric_items_completed_total 64.0" in scraped
            with operating(bound["producers"]) as client:
                status = client.stats()
            until(lambda: (tmp_path / "run.db-wal").stat().st_size > 0)
        broker.send_signal(signal.SIGTERM)
        talk = broker.stderr.read()
        assert broker.wait(PATIENCE_S) == 0
    finally:
        broker.kill()
        broker.wait()
        for stream in (broker.stdout, broker.stderr):
            if stream is not None:
                stream.close()
    events = [json.loads(line) for line in talk.splitlines() if line.startswith("{")]
    names = [event["event"] for event in events]
    assert {"worker_joined", "producer_joined", "producer_lost", "draining"} <= set(names)
    assert all(event["level"] in ("info", "warning") for event in events)
    told = zfabric("explain", "waste", "--replay", "run.db", "--json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["padded_tokens"] == status["padded_tokens"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--record", "missing/run.db"), "cannot record into missing/run.db"),
        (("--record", "text.db"), "text.db is not a recording"),
    ],
)
def test_broker_that_cannot_record_does_not_start(flags, said, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("hello " * 100)
    done = zfabric("broker", "--port", "0", *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.e2e
def test_log_can_be_text_or_off(tmp_path: Path) -> None:
    for form, shown in (("text", True), ("off", False)):
        broker = start_zfabric("broker", "--port", "0", "--json", "--log", form, cwd=tmp_path)
        try:
            assert broker.stdout is not None and broker.stderr is not None
            address = json.loads(broker.stdout.readline())["producers"]
            Client(address, name="job").close()
            broker.send_signal(signal.SIGTERM)
            talk = broker.stderr.read()
            assert broker.wait(PATIENCE_S) == 0
        finally:
            broker.kill()
            broker.wait()
            for stream in (broker.stdout, broker.stderr):
                if stream is not None:
                    stream.close()
        found = re.search(r"^\S+Z info    producer_joined +job$", talk, re.MULTILINE)
        assert bool(found) == shown


# -- the requests behind it -----------------------------------------------------------------------


def test_worker_that_is_gone_can_be_forgotten_and_no_other() -> None:
    bench = Bench(lease_s=2.0, linger_ms=0)
    bench.tick()
    operator, card = bench.producer("operator"), bench.worker("gpu0")
    assert "no worker 'gpu9'" in operator.ask("workers.forget", name="gpu9")
    assert "is connected" in operator.ask("workers.forget", name="gpu0")
    operator.submit([100] * 8)
    bench.settle()
    bench.dispatch()
    card.start(next(iter(card.batches)))
    card.cut()
    bench.tick(1.1)
    assert "1 started batch" in operator.ask("workers.forget", name="gpu0")
    for _ in range(4):
        operator.send(Type.HEARTBEAT, {})
        bench.tick(1.0)
    assert operator.ask("workers.forget", name="gpu0") == {"name": "gpu0"}
    assert bench.status()["workers"] == []
    assert bench.fabric.event_counts["worker_forgotten"] == 1
    # Whoever comes back is served again.
    again = bench.worker("gpu0", instance=2)
    bench.dispatch()
    assert again.batches
    bench.check()


def test_model_that_an_operator_paused_is_not_forgotten_before_it_is_resumed() -> None:
    bench = Bench()
    operator, card = bench.producer("operator"), bench.worker("gpu0")
    operator.ask("pause", model="m")
    card.send(Type.BYE, {"reason": "done"})
    bench.tick(1.1)
    operator.ask("workers.forget", name="gpu0")
    told = operator.ask("models.forget", model="m")
    assert "m is paused" in told and "zfabric resume m" in told
    again = bench.worker("gpu1")
    operator.submit([100] * 8)
    bench.tick(1.0)
    bench.dispatch()
    assert not again.batches
    operator.ask("resume", model="m")
    bench.dispatch()
    assert again.batches
    bench.check()


def test_model_that_nobody_uses_can_be_forgotten_and_the_totals_stay() -> None:
    bench = Bench(linger_ms=0)
    bench.tick()
    operator, card = bench.producer("operator"), bench.worker("gpu0")
    assert "no model 'x'" in operator.ask("models.forget", model="x")
    assert "has work, or workers" in operator.ask("models.forget", model="m")
    for name in ("a", "b"):
        operator.submit([100] * 8, Shape.of("m", name))
        bench.tick(1.0)
        bench.dispatch()
        for key in list(card.batches):
            card.done(key)
        card.heartbeat()
        bench.settle()
    card.cut()
    bench.tick(1.1)
    assert "has work, or workers" in operator.ask("models.forget", model="m")
    operator.ask("workers.forget", name="gpu0")
    before = bench.status()
    assert operator.ask("models.forget", model="m") == {"model": "m"}
    after = bench.status()
    assert (after["models"], len(before["models"])) == ([], 1)
    assert before["shape_switches_total"] == after["shape_switches_total"] > 0
    assert before["lanes_opened_total"] == after["lanes_opened_total"] > 0
    bench.check()


def test_lengths_are_of_what_was_accepted_last() -> None:
    bench = Bench()
    producer = bench.producer()
    producer.submit([10, 20, 30])
    said: dict[str, Any] = producer.ask("lengths")
    assert said["taken"] == 1
    ((model, signature, _, column),) = said["runs"]
    assert (model, len(signature)) == ("m", 16)
    assert column == b"".join(n.to_bytes(4, "little") for n in (10, 20, 30))
