"""The command as users and scripts see it: what it prints where, and the code it ends with."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zfabric
from tests.engines import EchoEngine
from tests.running import (
    FAST,
    PATIENCE_S,
    SLOW,
    brokering,
    ids_of,
    lines_in,
    operating,
    request,
    serving,
    start_zfabric,
    until,
    write_batch,
)
from tests.running import (
    zfabric as run_zfabric,
)
from zfabric.batchfile.discovery import COUNT_MIN
from zfabric.batchwatch import Progress
from zfabric.cli import build_parser, common, doctor, exit_code, main, progress
from zfabric.cli.demo import prefixes_in_words, shared_prefixes
from zfabric.cli.prompts import write_batch_file
from zfabric.client import Client
from zfabric.errors import ConfigError, InvariantError, ItemFailed, VersionMismatch
from zfabric.results import Item
from zfabric.shapes import Contract, Shape

pytestmark = pytest.mark.e2e

NOWHERE = ("--broker", "tcp://127.0.0.1:9", "--timeout", "0.2")
WORKER = ("worker", "--engine", "sim", "--model", "m")
FULL_CONTRACT = ("--max-batch", "8", "--max-tokens", "8192", "--max-input", "1024")
HEAVY = ("zmq", "textual", "msgpack", "asyncio", "zfabric_workers", "zfabric.client", "shtab")


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch, tmp_path):
    """No settings but those that a test makes."""
    for name in [name for name in os.environ if name.startswith("ZFABRIC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    monkeypatch.chdir(tmp_path)


def commands(parser=None, path=()):
    """Every command of the command line: (words, parser)."""
    parser = parser or build_parser()
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found += commands(child, (*path, name))
    return found or [(path, parser)]


def words_of(value):
    return " ".join(value) if isinstance(value, tuple) else ""


def out_of(capsys, *words):
    """(exit code, standard output, standard error) of a command in this process."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# -- help, usage, errors --------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "parser"), commands(), ids=words_of)
def test_every_command_says_what_it_does_and_gives_an_example(words, parser, capsys):
    code, out, err = out_of(capsys, *words, "--help")
    assert code == 0 and err == ""
    assert len(parser.description or "") > 20
    assert f"example:\n  zfabric {words[0]}" in out or "zfabric " + " ".join(words) in out
    assert "--traceback" in out


def test_help_imports_nothing_that_is_slow():
    lines = [f"main({[*words, '--help']!r})" for words, _ in commands()]
    script = ["import sys", "from zfabric.cli import main", "main(['--help'])", *lines]
    script += [f"heavy = [m for m in {HEAVY!r} if m in sys.modules]", "sys.exit(repr(heavy))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.strip() == "[]"


def test_importing_the_package_is_cheap_and_gives_every_public_name():
    script = f"import sys, zfabric; sys.exit(repr([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.strip() == "[]"
    for name in zfabric.__all__:
        assert getattr(zfabric, name) is not None
    assert set(zfabric.__all__) <= set(dir(zfabric))
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        _ = zfabric.Clint


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "COMMAND"),
        (("statsu",), "statsu"),
        (("status", "--jsn"), "--jsn"),
        (("run-batch", "-i", "x"), "-o/--output"),
        (("run-batch", "-i", "x", "-o", "y", "--stall-timeout", "-1"), "--stall-timeout"),
        (("run-batch", "-i", "x", "-o", "y", "--resume", "--overwrite"), "exclude each other"),
        (("status", "--broker", "udp://x"), "tcp://"),
        (("broker", "--port", "99999"), "65535"),
        (("broker", "--data", "somewhere", "--policy", "fifo"), "memory only"),
        (("broker", "--bind", "0.0.0.0"), "--insecure"),
        (("worker",), "--engine"),
        (("worker", "--engine", "smi", "--model", "m", *FULL_CONTRACT), "known are"),
        ((*WORKER,), "--max-batch, --max-tokens, --max-input"),
        ((*WORKER, "--max-batch", "8", "--max-tokens", "8"), "--max-input"),
        (("worker", "--engine", "sim", *FULL_CONTRACT), "--model"),
        ((*WORKER, *FULL_CONTRACT, "--opt", "cache"), "NAME=VALUE"),
        ((*WORKER, *FULL_CONTRACT, "--opt", "speed=1", "--opt", "speed=2"), "twice"),
        ((*WORKER, *FULL_CONTRACT, "--opt", "cash_tokens=1"), "cache_tokens"),
        (("dead", "drop", *NOWHERE), "--all"),
        (("dead", "drop", "3", "--all", *NOWHERE), "--all"),
        (("shapes", "--top", "0"), "--top"),
        (("demo", "--workers", "0"), "--workers"),
        (("demo", "--engine", "smi"), "known are"),
        (("completion", "fish"), "fish"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, tuple) else "",
)
def test_what_cannot_be_meant_is_one_line_and_code_2(words, text, capsys):
    code, out, err = out_of(capsys, *words)
    assert code == 2 and out == ""
    assert err.startswith("zfabric: error: ") and err.count("\n") == 1
    assert text in err


@pytest.mark.parametrize(
    "words",
    [("status",), ("shapes",), ("lanes",), ("workers",), ("events",), ("drain",), ("pause", "m")]
    + [("resume", "m"), ("dead", "ls"), ("producers", "ls"), ("producers", "cancel", "p")],
    ids=" ".join,
)
def test_a_broker_that_is_not_there_is_code_3(words, capsys):
    code, out, err = out_of(capsys, *words, *NOWHERE)
    assert code == 3 and out == ""
    assert err.startswith("zfabric: error: no broker answered") and err.count("\n") == 1


def test_errors_have_their_codes():
    assert exit_code(ConfigError("x")) == 2
    assert exit_code(VersionMismatch("x")) == 3
    assert exit_code(TimeoutError("x")) == 1
    assert exit_code(zfabric.TimeoutExpired("x")) == 4
    assert exit_code(InvariantError("x")) == 5
    assert exit_code(ItemFailed("dead", "x")) == 1


def test_a_traceback_is_shown_only_on_demand(capsys):
    code, _, err = out_of(capsys, "status", *NOWHERE, "--traceback")
    assert code == 3
    assert "Traceback" in err and err.rstrip().splitlines()[-1].startswith("zfabric: error: ")
    code, _, again = out_of(capsys, "--traceback", "status", *NOWHERE)
    assert code == 3 and "Traceback" in again


def test_what_a_peer_calls_itself_cannot_move_the_cursor(capsys):
    assert common.clean("a\x1b[2Jb\nc\r\nd") == "a?[2Jb c d"
    shown = common.table(("name", "n"), [["evil\x1b[1A", 1_234], ["x" * 99, None]])
    assert "\x1b" not in shown and "1,234" in shown and "…" in shown


def test_tables_are_aligned():
    shown = common.table(("name", "items", "state"), [["a", 1, "live"], ["bcd", 12_345, None]])
    assert shown.splitlines() == [
        "name   items  state",
        "a          1  live",
        "bcd   12,345  -",
    ]
    assert common.short(12_345) == "12.3 k" and common.short(999) == "999"
    assert common.duration(185) == "3 min 05 s" and common.duration(None) == "-"
    assert common.percent(None) == "n/a" and common.percent(0.5) == "50.00%"


def progress_of(**values):
    known = {
        "done": 30,
        "failed": 1,
        "open": 5,
        "total": 120,
        "total_exact": False,
        "items_per_s": 12.5,
        "output_tokens": 900,
        "output_tokens_per_s": 1_234.0,
        "eta_s": 75.0,
        "seconds": 6.0,
    }
    return Progress(**{**known, **values})


def test_progress_is_one_line_that_is_written_over_on_a_terminal(capsys):
    screen = io.StringIO()
    bar = progress.Bar(screen)
    bar.end()
    assert screen.getvalue() == ""
    bar.progress(progress_of())
    bar.end()
    shown = screen.getvalue()
    assert shown.startswith("\r") and shown.count("\n") == 1
    for text in ("[###", "30/~120", "12.5 items/s", "1.23 k tok/s out", "1 min 15 s left"):
        assert text in shown
    bar.notice("a\x1b[1Anotice")
    assert capsys.readouterr().err == "zfabric: a?[1Anotice\n"


def test_progress_elsewhere_is_a_plain_line_every_five_seconds(capsys):
    plain = progress.reporter()
    assert isinstance(plain, progress.Plain)
    for tenth in range(120):
        plain.progress(progress_of(seconds=tenth / 10, eta_s=None, total=None, failed=0))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "zfabric: 30/?  12.5 items/s  1.23 k tok/s out  ETA unknown"


# -- processes ------------------------------------------------------------------------------------


@pytest.fixture
def broker_process(tmp_path):
    """A broker as a process; (process, its ready line)."""
    process = start_zfabric("broker", "--port", "0", "--json", cwd=tmp_path)
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_broker_says_where_it_is_and_ends_in_good_order(broker_process, number, code, tmp_path):
    process, ready = broker_process
    assert ready["pid"] == process.pid
    done = run_zfabric("status", "--json", "--broker", ready["producers"], cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    status = json.loads(done.stdout)
    assert status["residual_items"] == 0 and status["workers"] == []
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (code, "")
    assert "kept in memory" in err


def test_a_volley_of_signals_ends_a_broker(tmp_path):
    """Any may come in the midst of another: none of them may wait for what the other holds."""
    for _ in range(5):
        process = start_zfabric("broker", "--port", "0", "--json", "--memory", cwd=tmp_path)
        assert process.stdout.readline()
        with contextlib.suppress(ProcessLookupError):
            for k in range(400):
                os.kill(process.pid, signal.SIGTERM if k % 2 else signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (0, 130)


def test_a_port_that_is_taken_is_code_2(broker_process, capsys):
    _, ready = broker_process
    port = ready["producers"].rsplit(":", 1)[1]
    code, out, err = out_of(capsys, "broker", "--port", port, "--memory")
    assert code == 2 and out == ""
    assert "--port 0" in err and err.count("\n") == 1


def test_a_whole_run_from_a_shell(broker_process, tmp_path):
    _, ready = broker_process
    write_batch(tmp_path / "in.jsonl", [request(f"q-{k}", f"text {k}") for k in range(200)])
    where = ("--broker", ready["producers"])
    words = ("--name", "w0", "--opt", "speed=0", *FULL_CONTRACT, *where)
    worker = start_zfabric(*WORKER, *words, cwd=tmp_path)
    try:
        files = ("-i", "in.jsonl", "-o", "out.jsonl")
        first = run_zfabric("run-batch", *files, *where, cwd=tmp_path)
        assert (first.returncode, first.stdout) == (0, "")
        assert "200 results" in first.stderr and "\r" not in first.stderr
        assert len(ids_of(tmp_path / "out.jsonl")) == 200
        again = run_zfabric("run-batch", *files, *where, cwd=tmp_path)
        assert again.returncode == 2 and "--resume" in again.stderr
        words = ("run-batch", *files, *where, "--resume", "--json", "--quiet")
        resumed = run_zfabric(*words, cwd=tmp_path)
        assert (resumed.returncode, resumed.stderr) == (0, "")
        summary = json.loads(resumed.stdout)
        assert summary["ok"] and summary["resumed"] == 200 and summary["submitted"] == 0
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=PATIENCE_S)
        assert worker.returncode == 0
    finally:
        worker.kill()
        worker.communicate(timeout=PATIENCE_S)


def test_interrupting_a_run_says_how_to_go_on(tmp_path):
    write_batch(tmp_path / "in.jsonl", [request(f"q-{k}", f"text {k}") for k in range(300)])
    out = tmp_path / "out.jsonl"
    with brokering() as broker, serving(SLOW, broker.address):
        words = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--broker", broker.address)
        process = start_zfabric(*words, cwd=tmp_path)
        until(lambda: lines_in(out) >= 10)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, stdout) == (130, "")
        assert "--resume" in stderr and "Traceback" not in stderr
        before = lines_in(out)
        done = run_zfabric(*words, "--resume", cwd=tmp_path)
    assert done.returncode == 0
    assert before < 300 and len(set(ids_of(out))) == 300


def test_a_run_with_failures_is_code_1_and_one_that_stalls_is_code_4(tmp_path, capsys):
    write_batch(tmp_path / "in.jsonl", [request("a", "x"), "{broken"])
    with brokering() as broker:
        where = ("--broker", broker.address)
        files = ("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *where)
        code, out, err = out_of(capsys, *files, "--stall-timeout", "1")
        assert code == 4 and out == ""
        assert "no result for 1 s" in err
        with serving(FAST, broker.address):
            code, out, err = out_of(capsys, *files, "--resume")
            assert code == 1 and out == ""
            assert "1 result, 1 bad line, " in err.replace(";", ",") and "out.errors.jsonl" in err


def test_a_reader_that_goes_away_is_no_error(broker_process, tmp_path):
    _, ready = broker_process
    process = start_zfabric("status", "--json", "--broker", ready["producers"], cwd=tmp_path)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in err and "Exception" not in err


def test_an_output_that_takes_nothing_is_one_line_and_code_2(broker_process, tmp_path):
    _, ready = broker_process
    words = ("status", "--json", "--broker", ready["producers"])
    for buffered in ("", "1"):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "zfabric", *words],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "PYTHONUNBUFFERED": buffered},
                timeout=PATIENCE_S,
            )
        text = "zfabric: error: cannot write to standard output: No space left on device\n"
        assert (done.returncode, done.stderr) == (2, text)


def test_an_output_that_is_closed_is_said(tmp_path):
    words = "-m zfabric version >&-"
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} {words}"],
        capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "standard output: it is closed" in done.stderr and done.stderr.count("\n") == 1


# -- looking and ordering -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy():
    """A broker that has run something and has something left; its address."""
    with (
        brokering(attempts_max=1) as broker,
        serving(FAST, broker.address, name="w-1"),
        Client(broker.address, name="job-1") as client,
    ):
        shape = Shape.of("m", "system", tokens=[4])
        results = client.submit_many(Item(shape, b"x", 8 + k % 90) for k in range(300))
        assert results.wait(PATIENCE_S)
        waiting = Client(broker.address, name="job-2")
        waiting.submit_many(Item(Shape.of("lonely", "other"), b"y", 5 + k) for k in range(30))
        yield broker.address
        waiting.close()


def test_status_for_people_and_for_programs(busy, capsys):
    code, out, err = out_of(capsys, "status", "--broker", busy)
    assert code == 0 and err == ""
    for text in ("padding", "residual", "w-1", "simulated", "job-1", "lonely"):
        assert text in out
    code, out, _ = out_of(capsys, "status", "--json", "--broker", busy)
    with operating(busy) as client:
        assert json.loads(out).keys() == client.stats().keys()


def test_status_fits_a_terminal_of_80_columns(busy, capsys, monkeypatch):
    wide = out_of(capsys, "status", "--broker", busy)[1]
    assert "8x8192x1024" in wide and max(map(len, wide.splitlines())) > 80
    assert "0 cancelled" in wide and "0 B of" in wide
    monkeypatch.setattr(common, "columns", lambda: 80)
    for words in (("status",), ("workers",), ("shapes",), ("producers", "ls")):
        _, out, _ = out_of(capsys, *words, "--broker", busy)
        assert max(map(len, out.splitlines())) <= 80
        if words[0] in ("status", "workers"):
            assert "simulated" in out and "8x8192x1024" not in out


def test_shapes_lanes_and_workers(busy, capsys):
    code, out, _ = out_of(capsys, "shapes", "--top", "1", "--broker", busy)
    assert code == 0 and len(out.splitlines()) == 2
    code, out, _ = out_of(capsys, "shapes", "--json", "--broker", busy)
    shapes = {row["model"]: row for row in json.loads(out)}
    prefix = shapes["lonely"]["signature"][:6]
    code, out, _ = out_of(capsys, "lanes", "--model", "lonely", "--shape", prefix, "--broker", busy)
    assert code == 0 and "lonely" in out and "target" in out
    code, out, _ = out_of(capsys, "lanes", "--model", "lonely", "--json", "--broker", busy)
    assert sum(json.loads(out)["ready_items"]) == 30
    code, out, err = out_of(capsys, "lanes", "--model", "none", "--broker", busy)
    assert code == 2 and "zfabric shapes" in err
    code, out, _ = out_of(capsys, "workers", "--broker", busy)
    assert code == 0 and "w-1" in out and "8x8192x1024" in out
    code, out, _ = out_of(capsys, "workers", "--json", "--broker", busy)
    assert json.loads(out)[0]["name"] == "w-1"


def test_events_and_following_them(busy, tmp_path, capsys):
    assert "print JSON, one object a line" in out_of(capsys, "events", "--help")[1]
    code, out, _ = out_of(capsys, "events", "--broker", busy)
    assert code == 0 and "producer_joined" in out
    words = ("events", "--follow", "--json", "--broker", busy)
    process = start_zfabric(*words, cwd=tmp_path)
    assert json.loads(process.stdout.readline())["seq"] == 1
    assert out_of(capsys, "pause", "lonely", "--broker", busy)[0] == 0
    for line in process.stdout:
        if json.loads(line)["event"] == "model_paused":
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and err == ""
    code, out, err = out_of(capsys, "resume", "lonely", "--json", "--broker", busy)
    assert code == 0 and json.loads(out) == {"model": "lonely", "paused": False}


def test_pausing_what_is_not_there_is_code_2(busy, capsys):
    code, _, err = out_of(capsys, "pause", "nosuch", "--broker", busy)
    assert code == 2 and "models here" in err


class Poisoned(EchoEngine):
    """Ends its process for some payloads."""

    def run(self, batch):
        if any(b"poison" in payload for payload in batch.payloads):
            os._exit(1)
        return super().run(batch)


def test_dead_items_are_listed_run_again_and_dropped(capsys):
    one = Contract(1, 512, 64)
    with brokering(attempts_max=1) as broker:
        where = ("--broker", broker.address)
        with serving(Poisoned, broker.address, contract=one, window=1):
            client = Client(broker.address, name="grim")
            client.submit_many([Item(Shape.of("m"), b"poison", 3)])
            with operating(broker.address) as operator:
                until(lambda: operator.stats()["dead_records"] == 1)
            code, out, _ = out_of(capsys, "dead", "ls", *where)
            assert code == 0 and "grim" in out
            record = json.loads(out_of(capsys, "dead", "ls", "--json", *where)[1])[0]
            code, out, err = out_of(capsys, "dead", "requeue", record["id"], *where)
            assert code == 0 and out == "" and "1 item\n" in err
            with operating(broker.address) as operator:
                until(lambda: operator.stats()["dead_records"] == 1)
            code, out, _ = out_of(capsys, "dead", "drop", "--all", "--json", *where)
            assert json.loads(out) == {"dropped": 1}
            code, out, err = out_of(capsys, "dead", "ls", *where)
            assert (code, out) == (0, "") and "nothing is dead" in err
            code, _, err = out_of(capsys, "dead", "drop", "99", *where)
            assert code == 2
            client.close()


def test_producers_are_cancelled_and_forgotten(capsys):
    with brokering() as broker:
        where = ("--broker", broker.address)
        client = Client(broker.address, name="job-x")
        client.submit_many(Item(Shape.of("m"), b"y", 5) for _ in range(30))
        code, out, _ = out_of(capsys, "producers", "ls", *where)
        assert code == 0 and "job-x" in out
        code, _, err = out_of(capsys, "producers", "forget", "job-x", *where)
        assert code == 2 and "connected" in err
        code, _, err = out_of(capsys, "producers", "cancel", "job-x", *where)
        assert code == 0 and "cancelled" in err
        client.drain(PATIENCE_S)
        client.close()
        with operating(broker.address) as operator:
            until(lambda: not operator.request("producers.ls")[0]["live"])
        assert "left 0." in out_of(capsys, "producers", "ls", *where)[1]
        code, out, _ = out_of(capsys, "producers", "forget", "job-x", "--json", *where)
        assert code == 0 and json.loads(out)["name"] == "job-x"
        code, out, _ = out_of(capsys, "producers", "ls", "--json", *where)
        assert json.loads(out) == []
        code, _, err = out_of(capsys, "producers", "cancel", "job-x", *where)
        assert code == 2


def test_drain_ends_the_broker(broker_process, capsys):
    process, ready = broker_process
    code, out, err = out_of(capsys, "drain", "--broker", ready["producers"])
    assert code == 0 and out == "" and "draining" in err
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


# -- the machine ----------------------------------------------------------------------------------


def test_config_shows_where_a_value_came_from(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZFABRIC_BROKER_LANES", "128")
    code, _, err = out_of(capsys, "config", "init")
    assert code == 0 and "zfabric.toml" in err
    assert out_of(capsys, "config", "init")[0] == 2
    code, out, _ = out_of(capsys, "config", "show", "--origin")
    assert code == 0
    lanes = next(line for line in out.splitlines() if line.startswith("broker.lanes"))
    assert "128" in lanes and "env ZFABRIC_BROKER_LANES" in lanes
    code, out, _ = out_of(capsys, "config", "show", "--json")
    assert json.loads(out)["broker.lanes"] == {"value": 128, "origin": "env ZFABRIC_BROKER_LANES"}
    code, out, _ = out_of(capsys, "config", "init", "--stdout")
    assert out == (tmp_path / "zfabric.toml").read_text()


def test_doctor_names_what_is_wrong_and_what_to_do(busy, capsys):
    code, out, err = out_of(capsys, "doctor", "--broker", busy)
    assert code == 0 and err == ""
    assert all(line[:4].strip() in ("ok", "warn") for line in out.splitlines())
    assert any("answers, release" in line for line in out.splitlines())
    code, out, _ = out_of(capsys, "doctor", "--json", *NOWHERE)
    findings = {row["check"]: row for row in json.loads(out)}
    assert findings["broker"]["state"] == "warn" and "zfabric broker" in findings["broker"]["fix"]
    assert findings["loopback"]["state"] == "ok"


def test_doctor_fails_for_a_port_that_another_program_holds(capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        code, out, _ = out_of(capsys, "doctor", "--broker", address, "--timeout", "0.3")
    assert code == 1
    assert any(line.startswith("fail  broker") for line in out.splitlines())


def test_doctor_knows_the_versions_that_the_package_asks_for():
    import tomllib

    root = Path(zfabric.__file__).parent.parent
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    known = [f"{name}>={'.'.join(map(str, v))}" for name, v in doctor.PACKAGES.items()]
    assert sorted(known) == sorted(wanted)


def test_versions_and_completion(capsys):
    assert out_of(capsys, "version") == (0, f"zfabric {zfabric.__version__}\n", "")
    assert out_of(capsys, "--version")[1] == f"zfabric {zfabric.__version__}\n"
    told = json.loads(out_of(capsys, "version", "--json")[1])
    assert told["zfabric"] == zfabric.__version__ and told["packages"]["pyzmq"]
    for shell in ("bash", "zsh"):
        code, out, _ = out_of(capsys, "completion", shell)
        assert code == 0 and "run-batch" in out


def test_completion_without_its_package_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, err = out_of(capsys, "completion", "bash")
    assert code == 2 and "pip install" in err


def test_the_options_of_an_engine_are_listed(capsys):
    code, out, err = out_of(capsys, "worker", "--engine", "sim", "--list-options")
    assert code == 0 and err == ""
    assert "cache_tokens" in out and "(default: 65536)" in out


# -- demo -----------------------------------------------------------------------------------------


def test_made_up_prompts_are_the_same_every_time(tmp_path):
    one, _ = write_batch_file(tmp_path / "1.jsonl", 300, "m")
    two, what = write_batch_file(tmp_path / "2.jsonl", 300, "m")
    assert one == two == 300 and "made-up" in what
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()
    assert len(set(ids_of(tmp_path / "1.jsonl"))) == 300


def test_real_prompts_are_used_where_they_are(tmp_path, monkeypatch):
    data = tmp_path / "shared" / "data" / "bbh"
    data.mkdir(parents=True)
    for name in ("a", "b"):
        task = {"task": name, "prefix": f"prefix {name}", "questions": ["one", "two"]}
        (data / f"{name}.json").write_text(json.dumps(task))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    count, what = write_batch_file(tmp_path / "in.jsonl", None, "m")
    assert count == 4 and "BIG-Bench" in what
    count, _ = write_batch_file(tmp_path / "in.jsonl", 9, "m")
    assert count == 9 and len(set(ids_of(tmp_path / "in.jsonl"))) == 9


def processes_of(directory):
    """Live processes that were started in `directory`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").resolve() == directory.resolve():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("words", "processes"),
    [(("pipeline", "--backlogs", "2000"), 5), (("wall", "--lanes", "128"), 3)],
)
def test_a_benchmark_that_is_ended_leaves_no_process_and_no_file(
    tmp_path, words, processes, number
):
    place, files = tmp_path / "place", tmp_path / "files"
    place.mkdir()
    files.mkdir()
    where = ("--dir", str(files), "--seconds", "60") if words[0] == "pipeline" else ()
    process = start_zfabric("bench", *words, *where, cwd=place)
    until(lambda: len(processes_of(place)) >= processes)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    until(lambda: not processes_of(place))
    assert not list(files.iterdir())


def test_the_demo_runs_everything_and_leaves_no_process_behind(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    words = ("demo", "--items", "150", "--json", "--headless", "--opt", "speed=0")
    done = run_zfabric(*words, cwd=place)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is True and told["summary"]["done"] == 150
    assert told["status"]["residual_items"] == told["status"]["residual_tokens"] == 0
    assert {row["measured_by"] for row in told["status"]["workers"]} == {"simulated"}
    assert len(set(ids_of(place / "demo-out" / "out.jsonl"))) == 150
    assert processes_of(place) == []


def test_the_demo_says_why_nothing_can_be_hit(tmp_path):
    """Few items: 0% of hits and 0% as the ideal look like a fault where nobody says why."""
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    write_batch_file(few, COUNT_MIN - 1, "m")
    write_batch_file(many, 16 * COUNT_MIN, "m")
    assert shared_prefixes(few) == []
    assert len(shared_prefixes(many)) > 1 and min(shared_prefixes(many)) > 0
    assert "nothing to hit" not in prefixes_in_words(shared_prefixes(many))
    done = run_zfabric("demo", "--items", "1", "--headless", "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    why = next(line for line in done.stdout.splitlines() if line.startswith("shared prefixes"))
    assert f"none, so there is nothing to hit: a prefix counts once {COUNT_MIN} requests" in why
    assert "1 request (" in done.stderr and "1 worker ready" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_behind(number, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    words = ("demo", "--items", "2000", "--headless", "--opt", "speed=0.05")
    process = start_zfabric(*words, cwd=place)
    until(lambda: lines_in(place / "demo-out" / "out.jsonl") > 5)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    until(lambda: not processes_of(place))


def test_a_killed_demo_leaves_no_process_behind(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    process = start_zfabric("demo", "--headless", "--opt", "speed=0.05", cwd=place)
    until(lambda: lines_in(place / "demo-out" / "out.jsonl") > 5)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    until(lambda: not processes_of(place))


def test_command_hears_of_its_processes_where_a_parent_left_sigchld_ignored(capsys):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        out_of(capsys, "version")
        assert subprocess.run(["false"], check=False).returncode == 1
    finally:
        signal.signal(signal.SIGCHLD, before)
