"""Running it for real: signals, units, containers, rotated logs, and a runbook that is complete."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.running import PATIENCE_S, SLOW, operating, serving, start_zfabric, until
from zfabric import access, cli
from zfabric.broker import FAREWELL_S
from zfabric.cli import build_parser
from zfabric.client import Client
from zfabric.config import BrokerConfig
from zfabric.errors import ConfigError
from zfabric.eventnames import EVENTS, WORKER_EVENTS
from zfabric.logs import EventLog, LogFile
from zfabric.results import Item, Results
from zfabric.shapes import Contract, Shape

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
SHAPE = Shape.of("m", "system")


@contextlib.contextmanager
def running_broker(*words, cwd, **options):
    process = start_zfabric("broker", "--port", "0", "--json", *words, cwd=cwd, **options)
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


# -- signals ----------------------------------------------------------------------------------


@pytest.mark.e2e
def test_sigterm_under_load_drains_and_ends_with_0(tmp_path):
    """Design 7, fault 3: what workers hold is finished, nothing accepted is lost."""
    with running_broker("--data", "d", "--drain", "20", cwd=tmp_path) as (process, ready):
        address = ready["producers"]
        contract = Contract(4, 8_192, 1_024)
        with serving(SLOW, address, contract=contract), Client(address, name="job") as client:
            client.enqueue([Item(SHAPE, b"x", 10)] * 400, Results())
            with operating(address) as operator:
                until(lambda: operator.stats()["completed_items"] > 8)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, err
            assert "Traceback" not in out + err
            client.close()
    with running_broker("--data", "d", cwd=tmp_path) as (process, ready):
        with operating(ready["producers"]) as operator:
            status = operator.stats()
        kept = status["ready_items"] + status["completed_items"]
        assert (kept, status["pending_items"], status["residual_items"]) == (400, 0, 0)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_second_signal_ends_at_once(tmp_path, first, code):
    """The drain would last a minute: a worker holds what it does not finish."""
    with running_broker("--memory", "--drain", "60", cwd=tmp_path) as (process, ready):
        address = ready["producers"]
        with serving(SLOW, address), Client(address, name="job") as client:
            client.enqueue([Item(SHAPE, b"x", 10)] * 400, Results())
            with operating(address) as operator:
                until(lambda: operator.stats()["pending_items"])
            os.kill(process.pid, signal.SIGSTOP)
            process.send_signal(first)
            process.send_signal(signal.SIGCONT)
            pause = threading.Event()
            pause.wait(0.3)
            began_s = time.monotonic()
            process.send_signal(first)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == code
            assert time.monotonic() - began_s < 10
            client.close()


@pytest.mark.e2e
def test_systemd_is_told(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(PATIENCE_S)
        environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        with running_broker("--memory", cwd=tmp_path, env=environ) as (process, _):
            assert told.recv(100) == b"READY=1"
            process.send_signal(signal.SIGTERM)
            assert told.recv(100) == b"STOPPING=1"
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0


# -- logs -------------------------------------------------------------------------------------

EVENT = {"seq": 1, "time": 1_700_000_000.5, "event": "draining", "text": "now"}


@pytest.fixture
def opened():
    """Closes what it was given, at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda log: stack.enter_context(contextlib.closing(log))


def test_moved_log_is_written_to_a_new_file(tmp_path, opened):
    """As logrotate does it, without a signal."""
    path = tmp_path / "events.log"
    log = opened(LogFile(path))
    log.write("one\n")
    log.flush()
    path.rename(tmp_path / "events.log.1")
    log.write("two\n")
    log.flush()
    assert (tmp_path / "events.log.1").read_text() == "one\n"
    assert path.read_text() == "two\n"
    path.unlink()
    log.write("three\n")
    log.flush()
    assert path.read_text() == "three\n"


def test_log_that_was_copied_and_truncated_has_no_hole(tmp_path, opened):
    path = tmp_path / "events.log"
    log = opened(LogFile(path))
    log.write("one\n")
    log.flush()
    os.truncate(path, 0)
    log.write("two\n")
    log.flush()
    assert path.read_bytes() == b"two\n"


def test_log_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot write the log"):
        LogFile(tmp_path / "none" / "events.log")


def test_log_file_that_takes_nothing_for_a_while_takes_the_next_line(tmp_path, monkeypatch):
    log = EventLog("text", tmp_path / "events.log")
    real, failing = log._stream.write, threading.Event()

    def write(text):
        if not failing.is_set():
            failing.set()
            raise OSError(28, "No space left on device")
        return real(text)

    monkeypatch.setattr(log._stream, "write", write)
    log.write(EVENT)
    until(failing.is_set)
    until(lambda: log.dropped)
    log.write({**EVENT, "text": "again"})
    log.close()
    lines = (tmp_path / "events.log").read_text().splitlines()
    assert len(lines) == 1 and "again (1 line dropped before it)" in lines[0]


@pytest.mark.e2e
def test_broker_logs_into_a_file_that_is_rotated(tmp_path):
    words = ("--memory", "--log", "json", "--log-file", "events.json")
    with running_broker(*words, cwd=tmp_path) as (process, ready):
        path = tmp_path / "events.json"
        Client(ready["producers"], name="first").close()
        until(lambda: path.read_text().count("\n") >= 2)
        path.rename(tmp_path / "events.json.1")
        Client(ready["producers"], name="second").close()
        until(lambda: path.exists() and "second" in path.read_text())
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert "producer_joined" not in err
    assert "first" in (tmp_path / "events.json.1").read_text()
    assert all(json.loads(line) for line in path.read_text().splitlines())


# -- units and containers ---------------------------------------------------------------------


def unit(name):
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str
    parsed.read(EXAMPLES / "systemd" / name)
    return parsed["Service"]


def container_command():
    text = (EXAMPLES / "container" / "Containerfile").read_text()
    (line,) = re.findall(r"^CMD (\[.*\])$", text, flags=re.M)
    return json.loads(line)


def compose_commands():
    text = (EXAMPLES / "container" / "compose.yml").read_text()
    return [json.loads(found) for found in re.findall(r"^    command: (\[.*\])$", text, flags=re.M)]


def unit_command(name):
    words = shlex.split(unit(name)["ExecStart"].replace("%i", "gpu0").replace("${URL}", "http://x"))
    assert words[0].endswith("/zfabric")
    return words[1:]


@pytest.mark.parametrize(
    "words",
    [unit_command("zfabric-broker.service"), unit_command("zfabric-worker@.service"),
     container_command(), *compose_commands()],
    ids=lambda words: words[0],
)  # fmt: skip
def test_command_of_an_example_is_one(words):
    args = build_parser().parse_args(words)
    assert callable(args.run)


@pytest.mark.parametrize(
    ("words", "grace_s"),
    [(unit_command("zfabric-broker.service"),
      int(unit("zfabric-broker.service")["TimeoutStopSec"])),
     (container_command(), 60)],
    ids=["unit", "container"],
)  # fmt: skip
def test_broker_is_given_longer_than_its_drain(words, grace_s):
    args = build_parser().parse_args(words)
    assert float(args.broker_drain_s or BrokerConfig().drain_s) + FAREWELL_S < grace_s
    compose = (EXAMPLES / "container" / "compose.yml").read_text()
    assert "stop_grace_period: 60s" in compose


@pytest.mark.parametrize("words", [unit_command("zfabric-broker.service"), container_command()])
def test_broker_that_leaves_loopback_asks_for_keys(words):
    args = build_parser().parse_args(words)
    assert args.broker_bind == "0.0.0.0" and args.broker_keys
    assert not args.broker_insecure


def test_unit_goes_on_after_what_passes_and_not_after_a_wrong_setting():
    for name, when in (
        ("zfabric-broker.service", "on-failure"),
        ("zfabric-worker@.service", "always"),
    ):
        service = unit(name)
        assert (service["Restart"], service["RestartPreventExitStatus"]) == (when, "2")
        assert (service["KillSignal"], service["NoNewPrivileges"]) == ("SIGTERM", "yes")


# -- the runbook --------------------------------------------------------------------------------


def entries(level="###"):
    return re.findall(rf"^{level} (.+)$", RUNBOOK, flags=re.M)


def test_every_event_has_its_entry_and_no_other():
    named = {title.strip("`") for title in entries() if title.startswith("`")}
    assert named == {*EVENTS, *WORKER_EVENTS}


def test_every_exit_code_has_its_entry_and_no_other():
    known = {0, 143} | {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    found = {int(title.removeprefix("Exit code ")) for title in entries() if "Exit code" in title}
    assert found == known


def test_every_reason_of_a_refusal_is_explained():
    for reason in access.REASONS:
        assert f"| {reason} |" in RUNBOOK


def test_every_entry_says_what_to_do():
    for text in re.split(r"^### ", RUNBOOK, flags=re.M)[1:]:
        title, body = text.split("\n", 1)
        body = re.split(r"^## ", body, flags=re.M)[0]
        assert "Do: " in body, title
