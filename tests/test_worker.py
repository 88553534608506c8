"""The worker's runtime, as it is run: real sockets, a real broker, engines in real processes."""

from __future__ import annotations

import contextlib
import errno
import functools
import http.server
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from tests.engines import EchoEngine, ObeyingEngine, UnloadableEngine, UnsuitableEngine
from zfabric import worker as runtime
from zfabric.broker import Broker
from zfabric.client import Client
from zfabric.config import BrokerConfig
from zfabric.engine import CacheStats, EngineUnreachable
from zfabric.errors import (
    ConfigError,
    ConnectError,
    FabricError,
    InvariantError,
    ItemFailed,
    NameInUse,
    VersionMismatch,
)
from zfabric.results import Item
from zfabric.shapes import Contract, Shape
from zfabric.worker import Backoff, CacheCount, Worker
from zfabric_workers.sim import SimEngine, answer

pytestmark = pytest.mark.e2e

SHAPE = Shape.of("m", "system", tokens=[4])
CONTRACT = Contract(4, 4_096, 512)
PATIENCE_S = 30.0
FAST = functools.partial(SimEngine, speed=0)
# Long enough for a test to act while it runs, short enough to be waited for.
SLOW = functools.partial(SimEngine, speed=0, slow_on=b"slow", slow_s=1.0)


class FlakyEngine(EchoEngine):
    """Cannot be reached the first time, whichever process asks."""

    def __init__(self, path):
        self.path = Path(path)

    def run(self, batch):
        if not self.path.exists():
            self.path.touch()
            raise EngineUnreachable("connection refused")
        return super().run(batch)


@contextlib.contextmanager
def broker(**config):
    """A broker in a thread; gives the producers' address."""
    values = {"port": 0, "hold_s": 0, "linger_ms": 0, **config}
    served = Broker(BrokerConfig(memory=True, **values))
    address = served.bind().producers
    thread = threading.Thread(target=served.run, name="broker")
    thread.start()
    try:
        yield address
    finally:
        served.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def begin(factory, address, **options):
    """A worker that runs in a thread, and the outcome of its run()."""
    options = {"model": "m", "contract": CONTRACT, "name": "w", **options}
    worker = Worker(factory, broker=address, **options)
    outcome = Future()

    def run():
        try:
            outcome.set_result(worker.run())
        except BaseException as error:  # noqa: BLE001 - it belongs to the test
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"worker-{worker.name}", daemon=True).start()
    return worker, outcome


@contextlib.contextmanager
def serving(factory, address, **options):
    """A worker that serves meanwhile, and that ends well."""
    worker, outcome = begin(factory, address, **options)
    try:
        until(lambda: worker.connected or outcome.done())
        yield worker
    finally:
        worker.stop(drain=False)
        outcome.result(PATIENCE_S)


def until(holds, patience_s=PATIENCE_S):
    pause = threading.Event()
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        pause.wait(0.01)


def descriptors():
    """How many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def items(*payloads, length=8):
    return [Item(SHAPE, payload, length) for payload in payloads]


def balanced(client):
    """The figures of a broker that has nothing left, and whose books are even."""
    until(lambda: client.stats()["pending_items"] == 0)
    stats = client.stats()
    assert (stats["residual_items"], stats["residual_tokens"]) == (0, 0)
    assert stats["ready_items"] == 0
    return stats


def payloads_of(results):
    return sorted(result.payload for result in results.within(PATIENCE_S))


# -- the ordinary way -----------------------------------------------------------------------------


def test_items_come_back_with_the_engine_s_answers():
    with broker() as address, Client(address) as client:
        with serving(FAST, address, engine="sim", simulated=True) as worker:
            prompts = [b"prompt %d" % k for k in range(200)]
            results = client.submit_many(items(*prompts))
            wanted = sorted(answer(prompt, "sim").payload for prompt in prompts)
            assert payloads_of(results) == wanted
            stats = balanced(client)
            assert stats["completed_items"] == 200
            assert (stats["redeliveries_total"], stats["duplicates_total"]) == (0, 0)
            until(lambda: client.stats()["workers"][0]["cache_queries_tokens"] == 200 * 8)
            (row,) = client.stats()["workers"]
            assert (row["name"], row["engine"], row["simulated"]) == ("w", "sim", True)
            assert (row["state"], row["padding"], row["window"]) == ("idle", "padded", 2)
            assert row["cache_hits_tokens"] == 199 * 4
            assert row["measured_by"] == "simulated"
            assert worker.state == "idle"
        until(lambda: not client.stats()["workers"][0]["live"])


def test_over_long_item_is_answered_without_the_engine():
    with broker() as address, Client(address) as client, serving(FAST, address):
        long = client.submit(Item(SHAPE, b"kill", 513))
        assert long.result(PATIENCE_S).status == "too_long"
        assert long.result().payload == b""


def test_first_results_of_a_batch_do_not_wait_for_the_last():
    factory = functools.partial(SLOW, partial=True)
    with broker() as address, Client(address) as client, serving(factory, address) as worker:
        until(lambda: worker.state == "idle")
        results = client.submit_many(items(b"a", b"b", b"slow"))
        until(lambda: results.done == 2)
        assert worker.state == "running"
        assert len(payloads_of(results)) == 3
        balanced(client)


def test_run_leaves_no_descriptor_and_no_thread_behind():
    with broker() as address, Client(address) as client:
        with serving(FAST, address):
            client.submit(*items(b"warm")).result(PATIENCE_S)
        before = descriptors(), threading.active_count()
        with serving(FAST, address):
            client.submit(*items(b"again")).result(PATIENCE_S)
        until(lambda: threading.active_count() <= before[1])
        until(lambda: descriptors() <= before[0])


# -- engines that fail ----------------------------------------------------------------------------


def test_engine_killed_in_a_batch_is_started_anew_and_the_batch_runs_again():
    with broker() as address, Client(address) as client, serving(SLOW, address) as worker:
        results = client.submit_many(items(b"slow", b"b", b"c"))
        until(lambda: worker.state == "running")
        os.kill(worker.engine_pid, signal.SIGKILL)
        assert len(payloads_of(results)) == 3
        stats = balanced(client)
        assert (stats["completed_items"], stats["dead_items"]) == (3, 0)
        assert stats["redeliveries_total"] == 3
        assert stats["counters"]["returned_engine_exit"] == 3
        events = client.request("events")
        assert any("killed by SIGKILL" in event["text"] for event in events)
        assert stats["workers"][0]["disconnects"] == 0


def test_engine_that_cannot_be_started_now_is_started_later(monkeypatch):
    real, lacking = SpawnProcess.start, [OSError(errno.EMFILE, "none left")]

    def start(process):
        if lacking:
            raise lacking.pop()
        real(process)

    with broker() as address, serving(FAST, address) as worker, Client(address) as client:
        assert list(client.map(items(b"a")))
        monkeypatch.setattr(SpawnProcess, "start", start)
        os.kill(worker.engine_pid, signal.SIGKILL)
        assert list(client.map(items(b"b")))
        assert not lacking


def test_poison_is_dead_after_three_attempts_and_its_neighbours_finish():
    factory = functools.partial(FAST, kill_on=b"poison")
    with broker() as address, Client(address) as client, serving(factory, address):
        futures = [client.submit(item) for item in items(b"a", b"b", b"poison", b"d", b"e", b"f")]
        assert not wait(futures, PATIENCE_S).not_done
        with pytest.raises(ItemFailed, match="killed by SIGKILL") as failed:
            futures[2].result()
        assert failed.value.code == "dead"
        assert all(futures[k].result().ok for k in (0, 1, 3, 4, 5))
        stats = balanced(client)
        assert (stats["completed_items"], stats["dead_items"]) == (5, 1)
        assert client.request("dead.ls")[0]["attempts"] == 3


def test_engine_blocked_for_longer_than_the_lease_is_not_dead():
    factory = functools.partial(FAST, hang_on=b"hang", hang_s=3.0)
    with (
        broker(lease_s=1.0, heartbeat_s=0.2) as address,
        Client(address) as client,
        serving(factory, address),
    ):
        results = client.submit_many(items(b"hang", b"b"))
        assert len(payloads_of(results)) == 2
        stats = balanced(client)
        assert (stats["redeliveries_total"], stats["duplicates_total"]) == (0, 0)
        assert stats["workers"][0]["disconnects"] == 0


@pytest.mark.parametrize(
    ("command", "kind"), [(b"oom", "out_of_memory"), (b"raise", "engine_error")]
)
def test_batch_that_raises_is_charged_by_its_kind_and_the_engine_goes_on(command, kind):
    with broker() as address, Client(address) as client, serving(ObeyingEngine, address) as worker:
        until(lambda: worker.state == "idle")
        pid = worker.engine_pid
        bad, good = (client.submit(item) for item in items(command + b" boom", b"good"))
        assert good.result(PATIENCE_S).payload == b"GOOD"
        with pytest.raises(ItemFailed, match=f"{kind}.*boom"):
            bad.result(PATIENCE_S)
        assert balanced(client)["counters"][f"returned_{kind}"] >= 3
        assert worker.engine_pid == pid


def test_engine_that_cannot_be_reached_pauses_and_charges_nobody(tmp_path):
    factory = functools.partial(FlakyEngine, str(tmp_path / "reached"))
    with broker() as address, Client(address) as client, serving(factory, address) as worker:
        results = client.submit_many(items(*[b"x"] * 9))
        until(lambda: worker.state == "unreachable")
        until(lambda: client.stats()["workers"][0]["state"] == "unreachable")
        assert client.stats()["workers"][0]["granted"] == 0
        assert payloads_of(results) == [b"X"] * 9
        stats = balanced(client)
        assert stats["counters"]["returned_unreachable"] >= 4
        assert (stats["dead_items"], stats["workers"][0]["disconnects"]) == (0, 0)


def test_engine_that_never_loads_ends_the_worker_with_its_reason(monkeypatch):
    monkeypatch.setattr(runtime, "FAILED_LOADS_MAX", 2)
    with broker() as address:
        _, outcome = begin(UnloadableEngine, address)
        with pytest.raises(FabricError, match=r"2 times in a row.*no such model"):
            outcome.result(PATIENCE_S)


def test_engine_that_finds_a_wrong_option_at_its_load_ends_the_worker_at_once():
    with broker() as address:
        worker, outcome = begin(UnsuitableEngine, address)
        with pytest.raises(ConfigError, match=r"cannot be loaded: there is no CUDA.*device=cpu$"):
            outcome.result(PATIENCE_S)
        assert worker._failed_loads == 0


def test_engine_that_cannot_be_sent_to_a_process_is_refused():
    with broker() as address:
        _, outcome = begin(lambda: EchoEngine(), address)
        with pytest.raises(ConfigError, match="process of its own"):
            outcome.result(PATIENCE_S)


# -- leaving --------------------------------------------------------------------------------------


def test_worker_told_to_stop_finishes_what_runs_and_another_does_the_rest():
    with broker() as address, Client(address) as client:
        worker, outcome = begin(SLOW, address)
        results = client.submit_many(items(b"slow 1", *[b"x %d" % k for k in range(15)]))
        until(lambda: worker.state == "running")
        worker.stop()
        assert outcome.result(PATIENCE_S) is None
        until(lambda: client.stats()["pending_items"] == 0)
        assert client.stats()["completed_items"] == 4
        assert client.stats()["ready_items"] == 12
        with serving(FAST, address, name="other"):
            assert len(payloads_of(results)) == 16
        assert balanced(client)["counters"]["returned_leaving"] >= 4


def test_worker_told_twice_leaves_at_once_and_gives_back_what_runs():
    factory = functools.partial(FAST, hang_on=b"hang", hang_s=60.0)
    with broker() as address, Client(address) as client:
        worker, outcome = begin(factory, address)
        results = client.submit_many(items(b"hang", b"b"))
        until(lambda: worker.state == "running")
        pid = worker.engine_pid
        began = time.monotonic()
        worker.stop()
        worker.stop()
        outcome.result(PATIENCE_S)
        assert time.monotonic() - began < 5.0
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        until(lambda: client.stats()["pending_items"] == 0)
        with serving(FAST, address):
            assert len(payloads_of(results)) == 2
        assert balanced(client)["dead_items"] == 0


def test_worker_stopped_before_it_runs_ends_at_once():
    worker = Worker(FAST, broker="tcp://127.0.0.1:1", model="m", contract=CONTRACT)
    worker.stop(drain=False)
    worker.run()
    with pytest.raises(InvariantError, match="once"):
        worker.run()


# -- brokers that come, go and refuse -------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_worker_finds_a_broker_that_came_back_with_other_ports():
    ports = {"port": free_port(), "consumer_port": 0, "stats_port": 0}
    with broker(**ports) as address:
        worker, outcome = begin(FAST, address)
        with Client(address) as client:
            client.submit(*items(b"one")).result(PATIENCE_S)
    with broker(**ports) as address, Client(address) as client:
        assert client.submit(*items(b"two")).result(PATIENCE_S).ok
        assert [row["name"] for row in client.stats()["workers"]] == ["w"]
        balanced(client)
        worker.stop()
        outcome.result(PATIENCE_S)


def test_batch_that_ran_while_the_broker_was_away_is_reported_to_the_new_one():
    ports = {"port": free_port(), "consumer_port": 0, "stats_port": 0}
    with broker(**ports) as address:
        worker, outcome = begin(SLOW, address)
        client = Client(address)
        client.submit(*items(b"slow"))
        until(lambda: worker.state == "running")
        client.close()
    with broker(**ports) as address, Client(address) as client:
        until(lambda: client.stats()["duplicates_total"] == 1)
        assert client.submit(*items(b"two")).result(PATIENCE_S).ok
        balanced(client)
        worker.stop()
        outcome.result(PATIENCE_S)


def test_second_worker_of_a_name_is_refused_and_the_first_goes_on(caplog):
    with broker() as address, Client(address) as client, serving(FAST, address):
        _, outcome = begin(FAST, address, timeout_s=1.7)
        with pytest.raises(NameInUse, match="another live worker is called 'w'"):
            outcome.result(PATIENCE_S)
        said = [r.message for r in caplog.records if "name_in_use" in r.message]
        assert len(said) == 1, "once, however often it is tried"
        assert client.submit(*items(b"x")).result(PATIENCE_S).ok


class Nonsense:
    """A contract that the class of that name would not let through."""

    batch_items_max, batch_tokens_max, input_tokens_max, ragged = 0, -5, 2**40, False


@pytest.mark.parametrize(
    ("contract", "text"),
    [
        (Nonsense, "batch_items_max must be between 1 and 65536, not 0"),
        (Contract(4, 4_096, 511), "must register the same"),
    ],
)
def test_contract_that_the_broker_refuses_ends_the_worker_with_its_text(contract, text):
    with broker() as address, serving(FAST, address):
        _, outcome = begin(FAST, address, name="second", contract=contract)
        with pytest.raises(ConfigError, match=text):
            outcome.result(PATIENCE_S)


def test_no_broker_is_said_with_the_address():
    _, outcome = begin(FAST, "tcp://127.0.0.1:1", timeout_s=0.3)
    with pytest.raises(ConnectError, match=r"tcp://127\.0\.0\.1:1 within 0\.3 s.*zfabric broker"):
        outcome.result(PATIENCE_S)


@contextlib.contextmanager
def web_server():
    """Something else that listens; gives its address as a broker's."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()


def test_a_port_that_is_no_broker_ends_the_command_in_time(tmp_path, capfd):
    with web_server() as address:
        words = ("--engine", "sim", "--model", "m", "--broker", address, "--timeout", "1")
        limits = ("--max-batch", "8", "--max-tokens", "8192", "--max-input", "1024")
        began = time.monotonic()
        command = [sys.executable, "-m", "zfabric", "worker", *words, *limits]
        assert subprocess.run(command, timeout=PATIENCE_S, cwd=tmp_path).returncode == 3
        assert time.monotonic() - began < 6
    assert f"no broker answered at {address} within 1 s" in capfd.readouterr().err


def test_a_port_for_workers_that_is_not_reached_is_named(monkeypatch):
    with broker() as address:
        monkeypatch.setattr("zfabric.worker.Session", pointing_at(free_port()))
        _, outcome = begin(FAST, address, timeout_s=0.5)
        with pytest.raises(ConnectError, match=r"answered, its port for workers tcp://.* did not"):
            outcome.result(PATIENCE_S)


def pointing_at(port):
    class Misled(runtime.Session):
        def receive(self, frames, now):
            news = super().receive(frames, now)
            self.welcome["worker_port"] = port
            return news

    return Misled


def test_broker_of_another_version_is_refused_with_both_named(monkeypatch):
    with broker() as address:
        monkeypatch.setattr("zfabric.protocol.VERSION", 9)
        # One process is both sides here: the broker's frames say 9, this reader wants 10.
        monkeypatch.setattr(runtime.Session, "receive", wants_version(10, runtime.Session.receive))
        _, outcome = begin(FAST, address)
        with pytest.raises(VersionMismatch, match="version 10, the other 9"):
            outcome.result(PATIENCE_S)


def wants_version(version, receive):
    def patched(self, frames, now):
        from zfabric import protocol

        spoken, protocol.VERSION = protocol.VERSION, version
        try:
            return receive(self, frames, now)
        finally:
            protocol.VERSION = spoken

    return patched


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"window": 65}, {"name": "a\nb"}, {"model": ""}, {"engine": ""}]
)
def test_arguments_out_of_range_are_refused_when_made(options):
    with pytest.raises(ConfigError):
        Worker(FAST, **{"model": "m", "contract": CONTRACT, **options})


# -- supervisors that stop and die ----------------------------------------------------------------


@contextlib.contextmanager
def supervisor(address, **options):
    """A worker whose supervisor is a process of its own."""
    script = f"""
        import functools
        from zfabric.shapes import Contract
        from zfabric.worker import Worker
        from zfabric_workers.sim import SimEngine

        if __name__ == "__main__":
            factory = functools.partial(SimEngine, speed=0, **{options!r})
            Worker(factory, broker={address!r}, model="m", name="w",
                   contract=Contract(4, 4_096, 512)).run()
    """
    path = Path(os.environ["PYTEST_SCRATCH"]) / "supervisor.py"
    path.write_text(textwrap.dedent(script))
    process = subprocess.Popen([sys.executable, str(path)])
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(PATIENCE_S)


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_SCRATCH", str(tmp_path))


def row_of(client):
    rows = client.stats()["workers"]
    return rows[0] if rows else {"in_flight": 0, "live": False, "state": None}


def test_supervisor_stopped_beyond_its_lease_is_dead_and_then_served_again():
    slow = {"slow_on": b"slow", "slow_s": 1.0}
    with (
        broker(lease_s=1.0, heartbeat_s=0.2) as address,
        Client(address) as client,
        supervisor(address, **slow) as process,
    ):
        future = client.submit(*items(b"slow"))
        until(lambda: row_of(client)["state"] == "running")
        process.send_signal(signal.SIGSTOP)
        until(lambda: not row_of(client)["live"])
        until(lambda: client.stats()["ready_items"] == 1)
        assert not future.done()
        process.send_signal(signal.SIGCONT)
        assert future.result(PATIENCE_S).ok
        assert client.submit(*items(b"next")).result(PATIENCE_S).ok
        stats = balanced(client)
        assert (stats["completed_items"], stats["dead_items"]) == (2, 0)


def test_supervisor_killed_in_a_batch_gives_way_to_its_successor():
    slow = {"slow_on": b"slow", "slow_s": 1.0}
    with broker(heartbeat_s=0.2) as address, Client(address) as client:
        with supervisor(address, **slow) as process:
            results = client.submit_many(items(b"slow", b"b"))
            until(lambda: row_of(client)["state"] == "running")
            process.kill()
            process.wait(PATIENCE_S)
        with serving(FAST, address):
            assert len(payloads_of(results)) == 2
            stats = balanced(client)
        assert (stats["completed_items"], stats["dead_items"]) == (2, 0)


# -- small parts ----------------------------------------------------------------------------------


def test_waits_double_up_to_a_bound_and_begin_again_after_a_success():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.take() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.take() == 0.5


def test_cache_counters_never_fall_when_an_engine_begins_again():
    count = CacheCount()
    assert count.fields() == {}
    count.note(CacheStats(100, 60, "engine"))
    count.begin()
    assert count.fields() == {}
    count.note(CacheStats(10, 0, "engine"))
    assert count.fields() == {"queries_tokens": 110, "hits_tokens": 60, "measured_by": "engine"}
    count.note(None)
    assert count.fields() == {}
