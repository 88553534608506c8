"""Batch runs against a real broker: every line once, whatever dies on the way."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from pathlib import Path

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from tests.engines import EchoEngine
from tests.running import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    FAST,
    PATIENCE_S,
    SLOW,
    brokering,
    ids_of,
    lines_in,
    operating,
    read_rows,
    request,
    serving,
    start_zfabric,
    until,
    write_batch,
)
from zfabric import batchrun, batchwatch
from zfabric.batchfile import BatchOutput
from zfabric.batchrows import too_long_body, usage_of
from zfabric.batchrun import run_batch
from zfabric.batchwatch import Gone, Meter, Watch
from zfabric.engine import Result as EngineResult
from zfabric.errors import ConfigError, ConnectError, TimeoutExpired
from zfabric.shapes import Contract
from zfabric_workers.sim import SimEngine

pytestmark = pytest.mark.e2e

MODEL_OF = {CHAT: ChatCompletion, COMPLETIONS: Completion, EMBEDDINGS: CreateEmbeddingResponse}


class Wide(EchoEngine):
    """Answers JSON with so much room behind it that few answers fill a message."""

    def run(self, batch):
        from zfabric_workers.sim import answer

        answers = [answer(payload, "m") for payload in batch.payloads]
        return [EngineResult.ok(each.payload + b" " * 20_000) for each in answers]


class DiesOnce(EchoEngine):
    """Ends its process the first time that it sees `poison`; answers JSON otherwise."""

    def __init__(self, path):
        self.path = path

    def run(self, batch):
        from zfabric_workers.sim import answer

        if any(b"poison" in payload for payload in batch.payloads) and not Path(self.path).exists():
            Path(self.path).touch()
            os._exit(1)
        return [answer(payload, "m") for payload in batch.payloads]


def balanced(address):
    with operating(address) as client:
        status = client.stats()
    assert status["residual_items"] == status["residual_tokens"] == 0
    assert status["ready_items"] == status["pending_items"] == 0
    return status


def assert_valid(path, rows):
    """Every row is a valid OpenAI Batch output line for its request."""
    urls = {row["custom_id"]: row["url"] for row in rows}
    for row in read_rows(path):
        assert set(row) == {"id", "custom_id", "response", "error"}
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        MODEL_OF[urls[row["custom_id"]]].model_validate(row["response"]["body"], strict=True)


def test_every_line_of_every_endpoint_has_one_valid_row(tmp_path):
    rows = [
        request(f"q-{k}", f"question {k} " * (k % 7), url=(CHAT, COMPLETIONS, EMBEDDINGS)[k % 3])
        for k in range(300)
    ]
    source = write_batch(tmp_path / "in.jsonl", rows)
    seen = []
    with brokering() as broker, serving(FAST, broker.address):
        summary = run_batch(
            source, tmp_path / "out.jsonl", broker=broker.address, progress=seen.append
        )
        balanced(broker.address)
    assert summary.ok
    assert (summary.lines, summary.submitted, summary.done) == (300, 300, 300)
    assert ids_of(tmp_path / "out.jsonl") == sorted(row["custom_id"] for row in rows)
    assert_valid(tmp_path / "out.jsonl", rows)
    assert (tmp_path / "out.errors.jsonl").read_bytes() == b""
    assert summary.output_tokens and summary.output_tokens > 300
    last = seen[-1]
    assert (last.done, last.total, last.total_exact, last.open) == (300, 300, True, 0)


def test_bad_lines_and_failures_go_to_the_errors_file_and_the_rest_goes_on(tmp_path):
    rows = [request(f"q-{k}", f"text {k}") for k in range(20)]
    lines = [*rows[:5], "{not json", *rows[5:], request("q-3", "again"), ""]
    source = write_batch(tmp_path / "in.jsonl", lines)
    engine = functools.partial(SimEngine, speed=0, fail_on=b"text 7")
    with brokering() as broker, serving(engine, broker.address):
        summary = run_batch(source, tmp_path / "out.jsonl", broker=broker.address)
        assert (summary.done, summary.failed, summary.bad) == (19, 1, 2)
        assert summary.complete and not summary.ok
        errors = {row["error"]["code"]: row for row in read_rows(tmp_path / "out.errors.jsonl")}
        assert set(errors) == {"simulated_failure", "bad_json", "duplicate_custom_id"}
        assert errors["simulated_failure"]["custom_id"] == "q-7"
        assert errors["bad_json"]["line"] == 6
    # The failure is run again and the bad lines are not written twice.
    with brokering() as broker, serving(FAST, broker.address):
        again = run_batch(source, tmp_path / "out.jsonl", broker=broker.address, retry_failed=True)
    assert (again.done, again.failed, again.bad, again.submitted) == (20, 0, 2, 1)
    assert len(ids_of(tmp_path / "out.jsonl")) == 20


def test_a_line_over_the_contract_is_an_empty_completion_marked_too_long(tmp_path):
    long = "word " * 4_000
    rows = [
        request("chat", long),
        request("text", long, url=COMPLETIONS),
        request("vector", long, url=EMBEDDINGS),
        request("short"),
    ]
    source = write_batch(tmp_path / "in.jsonl", rows)
    with brokering() as broker, serving(FAST, broker.address):
        summary = run_batch(source, tmp_path / "out.jsonl", broker=broker.address)
        balanced(broker.address)
    assert (summary.done, summary.too_long) == (4, 3)
    assert_valid(tmp_path / "out.jsonl", rows)
    bodies = {r["custom_id"]: r["response"]["body"] for r in read_rows(tmp_path / "out.jsonl")}
    assert bodies["chat"]["choices"][0]["finish_reason"] == "length"
    assert bodies["chat"]["choices"][0]["message"]["content"] == ""
    for custom_id in ("chat", "text", "vector"):
        assert bodies[custom_id]["zfabric"] == {"too_long": True}
    assert "zfabric" not in bodies["short"]


@pytest.mark.parametrize("answer", [b"\xff not json", b'"text"', b'{"custom_id": "a", "body": {}}'])
def test_a_result_that_is_no_response_body_is_a_failure(tmp_path, answer):
    source = write_batch(tmp_path / "in.jsonl", [request("a")])

    with brokering() as broker, serving(functools.partial(Answering, answer), broker.address):
        summary = run_batch(source, tmp_path / "out.jsonl", broker=broker.address)
    assert (summary.done, summary.failed) == (0, 1)
    assert read_rows(tmp_path / "out.errors.jsonl")[0]["error"]["code"] == "bad_result"


class Answering(EchoEngine):
    def __init__(self, answer):
        self.answer = answer

    def run(self, batch):
        from zfabric.engine import Result

        return [Result.ok(self.answer) for _ in batch.payloads]


def test_few_open_items_are_enough_for_any_file(tmp_path):
    rows = [request(f"q-{k}") for k in range(3_000)]
    source = write_batch(tmp_path / "in.jsonl", rows)
    most = []
    with brokering() as broker, serving(FAST, broker.address, contract=Contract(512, 99_999, 99)):
        summary = run_batch(
            source,
            tmp_path / "out.jsonl",
            broker=broker.address,
            open_items_max=1_500,
            progress=lambda now: most.append(now.open),
        )
        balanced(broker.address)
    assert summary.ok and summary.done == 3_000
    assert max(most) <= 1_500


def test_a_stopped_run_leaves_its_work_at_the_broker_and_adopts_it(tmp_path):
    rows = [request(f"q-{k}", f"text {k}") for k in range(400)]
    source = write_batch(tmp_path / "in.jsonl", rows)
    stop = threading.Event()

    def stopping(now):
        if now.total_exact:
            stop.set()

    with brokering() as broker:
        # No worker yet: everything is taken, nothing is done.
        first = run_batch(
            source, tmp_path / "out.jsonl", broker=broker.address, stop=stop, progress=stopping
        )
        assert not first.complete and not first.ok
        assert first.submitted == 400
        with serving(FAST, broker.address):
            # All results wait for the job before it comes back to read a single line.
            until(lambda: balanced_outbox(broker.address) == 400)
            second = run_batch(source, tmp_path / "out.jsonl", broker=broker.address, resume=True)
        status = balanced(broker.address)
    assert (second.adopted, second.submitted, second.done) == (400, 0, 400)
    assert second.job == first.job
    assert status["accepted_items"] == 400
    assert len(set(ids_of(tmp_path / "out.jsonl"))) == 400


def answered_before_the_resume(tmp_path, broker, rows):
    """A run that was stopped when all was taken; then all was answered, the last lines first."""
    source, stop = write_batch(tmp_path / "in.jsonl", rows), threading.Event()
    arguments = (source, tmp_path / "out.jsonl")
    options = {"broker": broker.address, "stop": stop}
    thread = threading.Thread(target=run_batch, args=arguments, kwargs=options)
    thread.start()
    with operating(broker.address) as client:
        until(lambda: client.stats()["ready_items"] == len(rows))
    stop.set()
    thread.join(PATIENCE_S)
    late = sum(row["body"]["model"] == "n" for row in rows)
    with serving(Wide, broker.address, model="n"):
        until(lambda: balanced_outbox(broker.address) == late)
    with serving(Wide, broker.address, name="w2"):
        until(lambda: balanced_outbox(broker.address) == len(rows))
    return arguments


@pytest.fixture
def slow_reading(monkeypatch):
    """Progress is told every few lines, which takes its time; waiting is in vain soon."""
    monkeypatch.setattr(batchrun, "CHUNK_ITEMS", 8)
    monkeypatch.setattr(batchrun, "REPORT_S", 0)
    monkeypatch.setattr(batchwatch, "CHECK_S", 0.03)
    monkeypatch.setattr(batchwatch, "QUIET_S", 0.1)
    monkeypatch.setattr(batchwatch, "STUCK_CHECKS", 5)
    pause = threading.Event()
    return lambda now: pause.wait(0.03)


def test_answers_that_fill_the_link_before_their_lines_are_read_are_not_asked_for_again(
    tmp_path, slow_reading
):
    rows = [request(f"a{k}") for k in range(130)] + [request(f"b{k}", model="n") for k in range(60)]
    with brokering(result_bytes_inflight=1_024) as broker:
        files = answered_before_the_resume(tmp_path, broker, rows)
        summary = run_batch(
            *files, broker=broker.address, resume=True, progress=slow_reading, stall_timeout_s=0.5
        )
    assert (summary.adopted, summary.submitted, summary.done) == (190, 0, 190)


def test_the_answer_of_a_line_that_has_become_a_bad_one_holds_nothing_up(tmp_path, slow_reading):
    rows = [request(f"a{k}") for k in range(100)] + [request(f"b{k}", model="n") for k in range(60)]
    rows[110] = request("long", "long " * 1_000, model="n")
    with brokering(memory=False, data=str(tmp_path / "data")) as broker:
        files = answered_before_the_resume(tmp_path, broker, rows)
        broker.config |= {"payload_bytes_max": 4_000, "result_bytes_inflight": 1_024}
        broker.restart()
        summary = run_batch(
            *files, broker=broker.address, resume=True, progress=slow_reading, stall_timeout_s=5
        )
        assert balanced_outbox(broker.address) == 0
    assert (summary.adopted, summary.submitted) == (159, 0)
    assert (summary.done, summary.bad, summary.duplicates) == (159, 1, 1)


def test_what_a_run_superseded_is_cancelled_although_it_was_killed_before_it_did(tmp_path):
    source = write_batch(tmp_path / "in.jsonl", [request(f"q-{k}") for k in range(10)])
    files = (source, tmp_path / "out.jsonl")
    stop = threading.Event()

    def stopping(now):
        if now.total_exact:
            stop.set()

    with brokering() as broker:
        options = {"broker": broker.address, "stop": stop, "progress": stopping}
        first = run_batch(*files, **options)
        # A run with another model took the files, and was killed before it reached the broker.
        BatchOutput.open(files[1], input_path=source, resume=True, model="n").close()
        stop.clear()
        second = run_batch(*files, resume=True, model="n", **options)
        assert (second.job != first.job, second.submitted) == (True, 10)
        with operating(broker.address) as client:
            until(lambda: client.stats()["ready_items"] == 10)
            assert [row["name"] for row in client.request("producers.ls")] == [second.job]


def balanced_outbox(address):
    with operating(address) as client:
        return client.stats()["outbox_items"]


def test_sigkill_in_the_middle_and_resume_gives_every_line_once(tmp_path):
    rows = [request(f"q-{k}", f"text {k}") for k in range(200)]
    write_batch(tmp_path / "in.jsonl", rows)
    out = tmp_path / "out.jsonl"
    words = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--resume")
    with brokering() as broker, serving(SLOW, broker.address):
        for wanted in (10, 60):
            process = start_zfabric(*words, "--broker", broker.address, cwd=tmp_path)
            until(lambda wanted=wanted: lines_in(out) >= wanted)
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=PATIENCE_S)
            # As a torn write would leave it.
            with out.open("ab") as stream:
                stream.write(b'{"id": "batch_req_')
        summary = run_batch(tmp_path / "in.jsonl", out, broker=broker.address, resume=True)
        status = balanced(broker.address)
    assert summary.ok and summary.done == 200
    assert ids_of(out) == sorted(row["custom_id"] for row in rows)
    assert summary.resumed >= 60
    assert summary.adopted > 0
    assert status["accepted_items"] == 200, "nothing was sent twice"


def test_a_broker_that_comes_back_empty_gets_everything_again(tmp_path):
    rows = [request(f"q-{k}", f"text {k}") for k in range(120)]
    source = write_batch(tmp_path / "in.jsonl", rows)
    notices, summaries = [], []

    def run():
        summaries.append(
            run_batch(source, tmp_path / "out.jsonl", broker=broker.address, notice=notices.append)
        )

    with brokering() as broker, serving(SLOW, broker.address):
        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: lines_in(tmp_path / "out.jsonl") >= 20)
        broker.restart()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        balanced(broker.address)
    (summary,) = summaries
    assert summary.ok and summary.done == 120
    assert summary.resubmitted > 0
    assert ids_of(tmp_path / "out.jsonl") == sorted(row["custom_id"] for row in rows)
    assert any("another store" in text for text in notices)
    sidecar = json.loads((tmp_path / "out.jsonl.zfabric.json").read_text())
    assert sidecar["name"] == summary.job


def test_a_job_that_was_forgotten_is_sent_again(tmp_path):
    rows = [request(f"q-{k}") for k in range(50)]
    source = write_batch(tmp_path / "in.jsonl", rows)
    stop = threading.Event()
    with brokering() as broker:
        first = run_batch(
            source,
            tmp_path / "out.jsonl",
            broker=broker.address,
            stop=stop,
            progress=lambda now: now.total_exact and stop.set(),
        )
        with operating(broker.address) as client:
            client.request("producers.forget", name=first.job, force=True)
        with serving(FAST, broker.address):
            second = run_batch(source, tmp_path / "out.jsonl", broker=broker.address, resume=True)
    assert second.ok and second.done == 50


def test_a_retried_dead_item_replaces_its_failure(tmp_path):
    rows = [
        # The shape with the most tokens goes first, so that the others keep the run alive.
        request("poison", "poison", system="Long. " * 300),
        *(request(f"q-{k}", f"text {k}", system="Other.") for k in range(3)),
    ]
    source = write_batch(tmp_path / "in.jsonl", rows)
    engine = functools.partial(DiesOnce, str(tmp_path / "died"))
    summaries = []

    def run():
        summaries.append(run_batch(source, tmp_path / "out.jsonl", broker=broker.address))

    errors = tmp_path / "out.errors.jsonl"
    with brokering(attempts_max=1) as broker:
        with operating(broker.address) as client:
            thread = threading.Thread(target=run)
            thread.start()
            until(lambda: client.stats()["accepted_items"] == 4)
            one = Contract(1, 8_192, 1_024)
            with serving(engine, broker.address, contract=one, window=1):
                until(lambda: client.stats()["dead_records"])
                client.request("pause", model="m")
                until(lambda: lines_in(errors) == 1)
                client.request("dead.requeue", all=True)
                client.request("resume", model="m")
                thread.join(PATIENCE_S)
        assert not thread.is_alive()
    (summary,) = summaries
    assert summary.ok
    assert (summary.done, summary.failed) == (4, 0)
    assert errors.read_bytes() == b""
    assert ids_of(tmp_path / "out.jsonl") == ["poison", "q-0", "q-1", "q-2"]


def test_no_broker_leaves_the_files_alone(tmp_path):
    source = write_batch(tmp_path / "in.jsonl", [request("a")])
    out = write_batch(tmp_path / "out.jsonl", ["precious"])
    with pytest.raises(ConnectError):
        run_batch(source, out, broker="tcp://127.0.0.1:9", overwrite=True, timeout_s=0.3)
    assert out.read_text() == "precious\n"


def test_a_missing_input_is_told_before_any_waiting(tmp_path):
    with pytest.raises(ConfigError, match="cannot read input"):
        run_batch(tmp_path / "none.jsonl", tmp_path / "out.jsonl", broker="tcp://127.0.0.1:9")


def test_a_model_without_workers_is_named_and_can_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("zfabric.batchwatch.NO_WORKER_S", 0.5)
    source = write_batch(tmp_path / "in.jsonl", [request("a", model="gone"), request("b")])
    notices = []
    with brokering() as broker, serving(FAST, broker.address):
        with pytest.raises(TimeoutExpired, match="no worker serves 'gone'"):
            run_batch(
                source,
                tmp_path / "out.jsonl",
                broker=broker.address,
                notice=notices.append,
                wait_for_workers=False,
            )
        assert ids_of(tmp_path / "out.jsonl") == ["b"]
        assert len(notices) == 1 and "workers serve m" in notices[0]
        # --model sends it to a worker that there is.
        summary = run_batch(
            source, tmp_path / "out.jsonl", broker=broker.address, overwrite=True, model="m"
        )
        assert summary.ok and summary.done == 2
        until(lambda: balanced_outbox(broker.address) == 0)
        with operating(broker.address) as client:
            status = client.stats()
    assert status["ready_items"] == 0, "what the former job left is cancelled"


def test_another_model_sends_again_what_waited_for_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr("zfabric.batchwatch.NO_WORKER_S", 0.5)
    lines = [request("a", model="gone"), request("b"), request("c", model="gone"), request("d")]
    del lines[3]["body"]["model"]
    source = write_batch(tmp_path / "in.jsonl", lines)
    out, notices = tmp_path / "out.jsonl", []
    with brokering() as broker, serving(FAST, broker.address):
        with pytest.raises(TimeoutExpired, match="no worker serves 'gone'"):
            run_batch(source, out, broker=broker.address, wait_for_workers=False)
        assert ids_of(out) == ["b"]
        options = {"resume": True, "model": "m", "notice": notices.append}
        second = run_batch(source, out, broker=broker.address, **options)
        assert (second.adopted, second.submitted, second.done, second.bad) == (0, 3, 4, 0)
        assert second.ok and ids_of(out) == ["a", "b", "c", "d"]
        assert len(notices) == 1 and "with --model m" in notices[0]
        assert (tmp_path / "out.errors.jsonl").read_bytes() == b""
        status = balanced(broker.address)
        assert status["cancelled_items"] == 2
        with operating(broker.address) as client:
            assert [row["name"] for row in client.request("producers.ls")] == [second.job]
        # The same model once more is the same job.
        third = run_batch(source, out, broker=broker.address, **options)
        assert third.job == second.job and third.resumed == 4 and len(notices) == 1


def test_a_bad_model_name_changes_nothing(tmp_path):
    source = write_batch(tmp_path / "in.jsonl", [request("a")])
    with pytest.raises(ConfigError, match="model name"):
        run_batch(source, tmp_path / "out.jsonl", broker="tcp://127.0.0.1:9", model="a\nb")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_small_payload_limit_is_kept_and_larger_lines_are_failures(tmp_path):
    rows = [request(f"q-{k}", f"text {k}") for k in range(3_000)]
    rows.append(request("large", "x" * 99_900, model="m" * 30))
    rows.append(request("huge", "x" * 200_000))
    source = write_batch(tmp_path / "in.jsonl", rows)
    with (
        brokering(payload_bytes_max=100_200) as broker,
        serving(FAST, broker.address, model="n" * 200),
    ):
        summary = run_batch(source, tmp_path / "out.jsonl", broker=broker.address, model="n" * 200)
    assert (summary.done, summary.failed, summary.bad) == (3_000, 1, 1)
    errors = {row["error"]["code"]: row for row in read_rows(tmp_path / "out.errors.jsonl")}
    assert errors["too_large"]["custom_id"] == "large"
    assert errors["line_too_long"]["line"] == 3_002


def test_a_small_buffer_at_the_broker_is_not_slow(tmp_path):
    source = write_batch(tmp_path / "in.jsonl", [request(f"q-{k}") for k in range(1_000)])
    with (
        brokering(producer_items_max=10, hold_s=0) as broker,
        serving(FAST, broker.address),
    ):
        summary = run_batch(source, tmp_path / "out.jsonl", broker=broker.address)
    assert summary.ok
    assert summary.seconds < 10, "syncs are not waited for where the broker waits for them"


def test_a_broker_that_comes_back_with_a_smaller_limit_refuses_only_what_it_must(tmp_path):
    rows = [request(f"q-{k}", f"text {k}") for k in range(60)]
    rows.append(request("large", "x" * 5_000))
    source = write_batch(tmp_path / "in.jsonl", rows)
    with brokering(max_items=40) as broker:
        summaries = []
        thread = threading.Thread(
            target=lambda: summaries.append(
                run_batch(source, tmp_path / "out.jsonl", broker=broker.address)
            )
        )
        thread.start()
        with operating(broker.address) as client:
            until(lambda: client.stats()["ready_items"] == 40)
        broker.stop()
        broker.config |= {"payload_bytes_max": 1_000}
        broker.start()
        with serving(FAST, broker.address):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    (summary,) = summaries
    assert (summary.done, summary.failed + summary.bad) == (60, 1)
    assert ids_of(tmp_path / "out.jsonl") == sorted(row["custom_id"] for row in rows[:60])


@pytest.mark.parametrize("when", ["while away", "after its return"])
def test_a_dead_item_of_an_earlier_run_is_replaced_by_its_retry(tmp_path, when):
    rows = [request("poison", "poison"), *(request(f"q-{k}", f"text {k}") for k in range(3))]
    source, out = write_batch(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    errors = tmp_path / "out.errors.jsonl"
    engine = functools.partial(DiesOnce, str(tmp_path / "died"))
    one = Contract(1, 8_192, 1_024)
    with (
        brokering(attempts_max=1) as broker,
        operating(broker.address) as client,
        serving(engine, broker.address, contract=one, window=1),
    ):
        first = run_batch(source, out, broker=broker.address)
        assert (first.done, first.failed) == (3, 1)
        client.request("pause", model="m")
        client.request("dead.requeue", all=True)
        if when == "while away":
            client.request("resume", model="m")
            until(lambda: client.stats()["outbox_items"] == 1)
        else:
            threading.Timer(1.0, lambda: client.request("resume", model="m")).start()
        second = run_batch(source, out, broker=broker.address, resume=True)
        assert second.ok and (second.done, second.failed) == (4, 0)
        assert second.job == first.job
        assert errors.read_bytes() == b""
        assert ids_of(out) == ["poison", "q-0", "q-1", "q-2"]
        third = run_batch(source, out, broker=broker.address, resume=True)
    assert third.ok and third.resumed == 4


# -- the watch, without a broker ----------------------------------------------------------------


class FakeClient:
    """What a Watch sees of a client."""

    address = "tcp://127.0.0.1:7410"
    name = "job"

    def __init__(self):
        self.welcome = {"store": 1}
        self.accepted_upto = 10
        self.connected = True
        self.job = {
            "name": "job",
            "accepted_items": 10,
            "refused_items": 0,
            "acked_items": 0,
            "outbox_items": 0,
        }
        self.models, self.workers, self.full = [], [], False

    def request(self, op, timeout=None):
        if op == "producers.ls":
            return [self.job]
        storage = {"full": self.full}
        return {"models": self.models, "workers": self.workers, "storage": storage}


def watching(client, notices=None, **options):
    options = {"stall_timeout_s": None, "wait_for_workers": True, **options}
    return Watch(client, 0.0, (notices if notices is not None else []).append, **options)


def test_another_store_or_fewer_numbers_mean_that_the_work_is_gone():
    client = FakeClient()
    watch = watching(client)
    watch.check(1.0, 1.0, {"m": 3}, settled=False)
    client.accepted_upto = 4
    with pytest.raises(Gone, match="forgotten"):
        watch.check(2.0, 2.0, {"m": 3}, settled=False)
    client.accepted_upto, client.welcome = 12, {"store": 2}
    with pytest.raises(Gone, match="another store"):
        watch.check(3.0, 3.0, {"m": 3}, settled=False)


def test_what_keeps_everything_from_going_on_is_said_after_five_seconds():
    client, notices = FakeClient(), []
    client.models = [{"model": "m", "workers": 1, "paused": False}]
    client.workers = [{"name": "w", "live": True, "state": "unreachable"}]
    watch = watching(client, notices)
    watch.check(4.0, 0.0, {"m": 3}, settled=False)
    assert not notices
    watch.check(5.0, 0.0, {"m": 3}, settled=False)
    assert len(notices) == 1 and "w: see what the log" in notices[0]
    client.workers[0]["state"], client.full = "running", True
    watch.check(10.0, 9.0, {"m": 3}, settled=False)
    assert len(notices) == 2 and "the disk of the broker is full" in notices[1]


def test_the_reason_is_asked_of_whoever_sees_into_the_workers():
    client, notices, asked = FakeClient(), [], []
    client.models = [{"model": "m", "workers": 1, "paused": False}]

    def why(quiet_s):
        asked.append(quiet_s)
        return "openai-0: HTTP 401"

    watch = watching(client, notices, why=why)
    watch.check(6.0, 3.0, {"m": 3}, settled=False)
    watch.check(11.0, 3.0, {"m": 3}, settled=False)
    assert asked == [8.0]
    assert len(notices) == 1 and "openai-0: HTTP 401" in notices[0]


def test_work_that_the_broker_does_not_have_is_gone_after_a_few_checks():
    client = FakeClient()
    client.job["acked_items"] = 10
    watch = watching(client)
    watch.check(3.0, 0.0, {"m": 3}, settled=True)
    watch.check(4.0, 0.0, {"m": 3}, settled=True)
    with pytest.raises(Gone, match="nothing left"):
        watch.check(5.0, 0.0, {"m": 3}, settled=True)


def test_work_that_the_broker_has_is_waited_for():
    client = FakeClient()
    watch = watching(client)
    for second in range(1, 100):
        watch.check(float(second), 0.0, {"m": 3}, settled=True)


def test_results_that_are_not_sent_are_given_up_in_the_end():
    client = FakeClient()
    client.job["outbox_items"] = 10
    watch = watching(client)
    with pytest.raises(Gone):
        for second in range(3, 100):
            watch.check(float(second), 0.0, {"m": 3}, settled=True)


def test_what_is_not_settled_is_not_judged():
    client = FakeClient()
    client.job["acked_items"] = 10
    watch = watching(client)
    for second in range(1, 100):
        watch.check(float(second), 0.0, {"m": 3}, settled=False)


def test_a_stall_ends_the_run_where_the_caller_says_so():
    watch = watching(FakeClient(), stall_timeout_s=30.0)
    watch.check(29.0, 0.0, {"m": 1}, settled=True)
    with pytest.raises(TimeoutExpired, match="no result for 30 s"):
        watch.check(31.0, 0.0, {"m": 1}, settled=True)


def test_notices_are_not_repeated_every_second():
    client, notices = FakeClient(), []
    client.models = [{"model": "served", "workers": 2, "paused": True}]
    watch = watching(client, notices)
    for second in range(1, 40):
        watch.check(float(second), second - 1.0, {"lonely": 1, "served": 2}, settled=False)
    assert len(notices) == 2
    assert "no worker serves model 'lonely'; workers serve served" in notices[0]
    assert "paused" in notices[1]
    for second in range(40, 80):
        watch.check(float(second), second - 1.0, {"lonely": 1}, settled=False)
    assert len(notices) == 3


def test_a_broker_that_does_not_answer_is_mentioned():
    client, notices = FakeClient(), []
    client.connected = False
    watch = watching(client, notices)
    for second in range(1, 10):
        watch.check(float(second), 0.0, {"m": 1}, settled=True)
    assert len(notices) == 1 and "does not answer" in notices[0]


def test_rates_are_those_of_the_last_ten_seconds():
    meter = Meter(0.0)
    fixed = {"done": 0, "failed": 0, "open": 0, "total": 1_000, "total_exact": True}
    for second in range(31):
        rows = 10 * second if second <= 20 else 200 + 50 * (second - 20)
        now = meter.progress(float(second), rows, None, **{**fixed, "done": rows})
    assert now.items_per_s == pytest.approx(50)
    assert now.eta_s == pytest.approx((1_000 - 700) / 50)
    assert now.output_tokens_per_s is None


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, EMBEDDINGS])
def test_an_empty_completion_is_valid_for_its_endpoint(url):
    body = json.loads(too_long_body(url, "m", "x-1"))
    MODEL_OF[url].model_validate(body, strict=True)


def test_tokens_are_read_from_usage_and_not_from_text():
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 17}}
    text = {"choices": [{"text": '"completion_tokens": 99'}]}
    assert usage_of(json.dumps(usage | text).encode()) == (3, 17)
    assert usage_of(json.dumps(text).encode()) == (None, None)
    assert usage_of(b'{"usage":{"completion_tokens":5}}') == (None, 5)
