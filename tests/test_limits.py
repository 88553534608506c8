"""Limits of who may connect how often, on real sockets: a user's own, and those of a flood."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import pytest

from tests.running import CONTRACT, FAST, PATIENCE_S, serving, until
from tests.test_security import SHAPE, Secured, raw
from zfabric import access, gate
from zfabric.chaos.peers import Crowd
from zfabric.errors import PeerError, TooManyConnections, TooManyHandshakes
from zfabric.keys import load_client_key
from zfabric.results import Item
from zfabric.worker import Worker

pytestmark = pytest.mark.e2e
# The promise: so many workers of one key on one machine, registered in this time.
WORKERS, REGISTERED_S = 500, 10.0
# How long strangers knock, and who is known waits to be let in at most.
FLOOD_S, CONNECTED_S = 6.0, 10.0


@contextlib.contextmanager
def secure(tmp_path, **config):
    secured = Secured(tmp_path, **config)
    try:
        yield secured
    finally:
        secured.stop()


def status(secured):
    return secured.broker.ask(PATIENCE_S)


def told(secured, reason):
    events = secured.broker.dispatcher.fabric.events
    return [e["text"] for e in list(events) if e.get("reason") == reason]


def test_connections_of_a_user_end_where_they_are_told_to(tmp_path):
    with secure(tmp_path, user_connections_max=2) as secured, contextlib.ExitStack() as held:
        first = held.enter_context(secured.client("alice", name="one"))
        held.enter_context(secured.client("alice", name="two"))
        with pytest.raises(
            TooManyConnections, match=r"too_many_connections.*--user-connections-max"
        ) as why:
            secured.client("alice", name="three", timeout_s=2.5)
        assert "alice has 2 connections, and one user may have 2" in str(why.value)
        # It said HELLO again and again: counted each time, told once. Nobody else is concerned.
        assert status(secured)["security"]["refusals"][access.TOO_MANY_CONNECTIONS] >= 2
        assert len(told(secured, access.TOO_MANY_CONNECTIONS)) == 1
        secured.client("bob", name="his").close()
        first.close()
        secured.client("alice", name="three").close()


def test_worker_beyond_the_limit_of_its_user_says_so(tmp_path):
    with secure(tmp_path, user_connections_max=1) as secured:
        at = {"broker": secured.address, "key": secured.key("gpu"),
              "broker_port": secured.config["consumer_port"]}  # fmt: skip
        with serving(FAST, secured.address, key=at["key"], broker_port=at["broker_port"]) as worker:
            until(lambda: worker.connected)
            other = Worker(FAST, model="m", contract=CONTRACT, name="w2", timeout_s=1.0, **at)
            with pytest.raises(TooManyConnections, match="too_many_connections: gpu has 1"):
                other.run()


def test_user_who_knocks_too_often_waits_and_nobody_else_does(tmp_path, monkeypatch):
    """Later, not never: the connection comes to be by itself when its time has come."""
    monkeypatch.setattr(gate, "BURST_MIN", 5)
    with secure(tmp_path, user_connections_max=5) as secured:
        for _ in range(5):
            secured.client("op", role="operator").close()
        with pytest.raises(TooManyHandshakes, match="the keys of op connect too often"):
            secured.client("op", role="operator", timeout_s=0.5)
        with contextlib.closing(secured.client("op", role="operator", timeout_s=PATIENCE_S)):
            refused = status(secured)["security"]["refusals"][access.TOO_MANY_HANDSHAKES]
            assert refused >= 1
        assert len(told(secured, access.TOO_MANY_HANDSHAKES)) == 1
        secured.client("mon", role="operator", timeout_s=5.0).close()


@pytest.fixture
def kept_out(monkeypatch):
    """While it holds an endpoint, whoever knocks there is told to come later."""
    endpoints = set()
    opens = gate.Gate.opens

    def later(self, endpoint, public, now):
        if endpoint in endpoints:
            raise PeerError(access.TOO_MANY_HANDSHAKES, "the keys knock too often")
        return opens(self, endpoint, public, now)

    monkeypatch.setattr(gate.Gate, "opens", later)
    return endpoints


def test_worker_that_is_told_later_says_so_though_it_dials_in_that_moment(
    tmp_path, monkeypatch, kept_out
):
    """Its time-out is twice the silence after which it dials again, as by default."""
    monkeypatch.setattr("zfabric.worker_session.SILENT_S", 0.5)
    monkeypatch.setattr("zfabric.worker_session.SILENT_HEARTBEATS", 0)
    kept_out.add(access.WORKERS)
    with secure(tmp_path) as secured:
        port = secured.config["consumer_port"]
        worker = Worker(FAST, broker=secured.address, model="m", contract=CONTRACT, name="w",
                        timeout_s=1.0, key=secured.key("gpu"), broker_port=port)  # fmt: skip
        with pytest.raises(TooManyHandshakes, match=r"gpu connect too often.*more later") as why:
            worker.run()
        assert str(port) in str(why.value)
        assert status(secured)["security"]["refusals"][access.TOO_MANY_HANDSHAKES] >= 2


def test_worker_that_was_known_goes_on_for_as_long_as_it_is_told_later(
    tmp_path, monkeypatch, caplog, kept_out
):
    monkeypatch.setattr("zfabric.worker_session.SILENT_S", 0.2)
    with (
        secure(tmp_path, heartbeat_s=0.1) as secured,
        serving(FAST, secured.address, key=secured.key("gpu"), timeout_s=0.5,
                broker_port=secured.config["consumer_port"]) as worker,
    ):  # fmt: skip
        until(lambda: worker.connected)
        kept_out.add(access.WORKERS)
        secured.restart()
        until(lambda: status(secured)["security"]["refusals"][access.TOO_MANY_HANDSHAKES] >= 4)
        said = [r for r in caplog.records if getattr(r, "event", "") == "broker_refused"]
        assert [r.fields["code"] for r in said] == [access.TOO_MANY_HANDSHAKES]
        assert "the keys of gpu connect too often" in said[0].getMessage()
        kept_out.clear()
        until(lambda: worker.connected)


@pytest.mark.parametrize("manner", [["--open", "100"], ["--hasty"]], ids=["patient", "hasty"])
def test_flood_of_unknown_keys_beside_a_healthy_client(tmp_path, monkeypatch, manner):
    """Strangers are answered at their pace; who is known comes in, and its items complete."""
    rate, burst = 20, 40
    monkeypatch.setattr(gate, "STRANGERS_PER_S", rate)
    monkeypatch.setattr(gate, "STRANGERS_BURST", burst)
    with secure(tmp_path) as secured:
        server = load_client_key(secured.key("op")).server
        words = [sys.executable, "-m", "tests.knocking", secured.address, server, str(FLOOD_S)]
        began_s = time.monotonic()
        with (
            subprocess.Popen([*words, *manner], stdout=subprocess.PIPE) as flood,
            serving(FAST, secured.address, key=secured.key("gpu"),
                    broker_port=secured.config["consumer_port"]),
        ):  # fmt: skip
            until(lambda: status(secured)["security"]["refusals"][access.TOO_MANY_STRANGERS])
            done, took = 0, []
            while flood.poll() is None:
                asked_s = time.monotonic()
                with secured.client("alice", name=f"job-{done}", timeout_s=CONNECTED_S) as alice:
                    took.append(time.monotonic() - asked_s)
                    futures = [alice.submit(Item(SHAPE, b"x", 10)) for _ in range(50)]
                    done += sum(future.result(PATIENCE_S).ok for future in futures)
            opened = int(flood.stdout.read())
        lasted_s = time.monotonic() - began_s
        sys.stdout.write(f"\n{len(took)} clients connected in {max(took):.2f} s at most; ")
        sys.stdout.write(f"{done:,} items beside {opened:,} strangers in {lasted_s:.0f} s\n")
        assert done >= 50
        counts = status(secured)["security"]["refusals"]
        assert opened > burst
        assert burst <= counts[access.KEY_UNKNOWN] <= burst + rate * lasted_s + 1
        for reason in (access.KEY_UNKNOWN, access.TOO_MANY_STRANGERS, access.HANDSHAKE):
            assert len(told(secured, reason)) <= 2


def test_clients_without_a_key_that_try_again_are_told_once(secured_for_keyless):
    """Each is counted; the list of events has one for each port."""
    secured = secured_for_keyless
    reasons = (access.KEY_MISSING, access.HANDSHAKE)

    def counted():
        counts = status(secured)["security"]["refusals"]
        return sum(counts[reason] for reason in reasons)

    def knocked():
        with raw(secured, secured.config["port"], None) as socket:
            socket.poll(20)
        return counted() >= 60

    until(knocked)
    for reason in reasons:
        assert len(told(secured, reason)) <= 1


@pytest.fixture
def secured_for_keyless(tmp_path):
    with secure(tmp_path) as secured:
        yield secured


def test_500_workers_of_one_key_come_and_come_back(tmp_path):
    with secure(tmp_path) as secured:
        key = str(secured.key("gpu"))

        def registered():
            rows = status(secured)["workers"]
            return sum(row["live"] for row in rows) == WORKERS

        took = []
        began_s = time.monotonic()
        with Crowd(f"tcp://127.0.0.1:{secured.config['consumer_port']}", WORKERS, "m", key):
            until(registered)
            took.append(time.monotonic() - began_s)
            secured.stop()
            began_s = time.monotonic()
            secured.start()
            until(registered)
            took.append(time.monotonic() - began_s)
        sys.stdout.write(f"\n{WORKERS} workers: {took[0]:.1f} s, after a restart {took[1]:.1f} s\n")
        assert max(took) < REGISTERED_S
        refusals = status(secured)["security"]["refusals"]
        assert not refusals[access.TOO_MANY_HANDSHAKES]
        assert not refusals[access.TOO_MANY_CONNECTIONS]
