"""Chaos peers at the limits of a broker with keys: they wait, dial again, and say which it was."""

from __future__ import annotations

import json
import re

import pytest

from tests.running import until, zfabric
from tests.test_chaos import fabric_of_others, key_flags, names_in, ring
from tests.test_limits import kept_out, secure, status
from zfabric import access, gate
from zfabric.chaos import lines, peers
from zfabric.chaos.peers import CONTRACT_FIELDS, Crowd, Rogue, admitted, visitors
from zfabric.chaos.play import Report, _blame
from zfabric.errors import FabricError, TimeoutExpired, TooManyConnections, TooManyHandshakes
from zfabric.protocol import Type

pytestmark = pytest.mark.e2e
WORKER = {"role": "worker", "model": "m", **CONTRACT_FIELDS}
__all__ = ["kept_out", "ring"]


@pytest.fixture
def hasty(monkeypatch):
    """Peers that wait for less, and try on for less."""
    monkeypatch.setattr(lines, "DIAL_AGAIN_S", 0.2)
    for module in (lines, peers):
        monkeypatch.setattr(module, "TRY_S", 3.0)
    monkeypatch.setattr("zfabric.worker_session.SILENT_S", 0.3)
    monkeypatch.setattr("zfabric.worker_session.SILENT_HEARTBEATS", 0)


def workers_of(secured):
    return f"tcp://127.0.0.1:{secured.config['consumer_port']}"


def refusals(secured, reason):
    return status(secured)["security"]["refusals"][reason]


def test_visitors_beyond_the_pace_of_their_user_wait_and_come_in(tmp_path, monkeypatch, hasty):
    monkeypatch.setattr(gate, "BURST_MIN", 5)
    monkeypatch.setattr(gate, "RETURN_S", 2.0)
    with secure(tmp_path, user_connections_max=5, heartbeat_s=0.1) as secured:
        visitors(workers_of(secured), 9, WORKER, "v", str(secured.key("gpu")))
        assert refusals(secured, access.TOO_MANY_HANDSHAKES) >= 1
        assert len(status(secured)["workers"]) == 9


def test_visitors_beyond_the_cap_of_their_user_come_in_when_others_are_gone(tmp_path, hasty):
    with secure(tmp_path, user_connections_max=1, heartbeat_s=0.2) as secured:
        visitors(workers_of(secured), 4, WORKER, "v", str(secured.key("gpu")))
        assert refusals(secured, access.TOO_MANY_CONNECTIONS) >= 1
        assert len(status(secured)["workers"]) == 4


def test_peers_that_the_cap_goes_on_keeping_out_say_so(tmp_path, hasty):
    with secure(tmp_path, user_connections_max=1) as secured:
        at, key = workers_of(secured), str(secured.key("gpu"))
        with Rogue(at, key) as first:
            first.hello("first", "m")
            first.hear(Type.WELCOME)
            with Rogue(at, key) as second, pytest.raises(TooManyConnections, match="gpu has 1"):
                second.hello("second", "m", batch_items_max=0)
                second.hear(Type.ERROR)
            with pytest.raises(TooManyConnections, match="gpu has 1"):
                visitors(at, 1, WORKER, "v", key)


def test_peers_that_the_pace_goes_on_keeping_out_say_so(tmp_path, hasty, kept_out):
    kept_out.add(access.WORKERS)
    with secure(tmp_path) as secured:
        at, key = workers_of(secured), str(secured.key("gpu"))
        with pytest.raises(TooManyHandshakes, match="connect too often"):
            visitors(at, 1, WORKER, "v", key)
        with pytest.raises(TooManyHandshakes, match="connect too often"):
            admitted(at, key)


def test_crowd_that_is_told_later_dials_again(tmp_path, hasty, kept_out):
    kept_out.add(access.WORKERS)
    with secure(tmp_path) as secured:

        def live():
            return sum(row["live"] for row in status(secured)["workers"])

        with Crowd(workers_of(secured), 5, "m", str(secured.key("gpu"))) as crowd:
            until(lambda: isinstance(crowd.kept_out, TooManyHandshakes))
            kept_out.clear()
            until(lambda: live() == 5)
            assert crowd.waited
            until(lambda: crowd.kept_out is None)


def test_crowd_larger_than_the_cap_says_so_when_it_is_gone_too(tmp_path, hasty):
    with secure(tmp_path, user_connections_max=2) as secured:
        with Crowd(workers_of(secured), 3, "m", str(secured.key("gpu"))) as crowd:
            until(lambda: crowd.waited)
        assert isinstance(crowd.kept_out, TooManyConnections)


# -- the verdict ----------------------------------------------------------------------------------


class Outside:
    kept_out = TooManyConnections("gpu has 2 connections")


class Inside:
    kept_out = None


@pytest.mark.parametrize(
    ("error", "crowds", "verdict"),
    [
        (TooManyConnections("x"), [], "inconclusive"),
        (TooManyHandshakes("x"), [Inside()], "inconclusive"),
        (TimeoutExpired("no result"), [Inside(), Outside()], "inconclusive"),
        (TimeoutError("500 workers"), [Outside()], "inconclusive"),
        (TimeoutExpired("no result"), [Inside()], "BROKEN"),
        # What was seen to be wrong is wrong, whoever was kept out.
        (FabricError("a result is visible twice"), [Outside()], "BROKEN"),
        # A fabric of our own has nobody else who could have taken the places.
        (TooManyConnections("x"), None, "BROKEN"),
    ],
)
def test_limit_that_did_its_work_breaks_nothing_and_excuses_nothing(error, crowds, verdict):
    report = Report("many_workers", (18,))
    _blame(report, error, crowds)
    assert report.verdict == verdict
    assert bool(report.broken) == (verdict == "BROKEN")


@pytest.mark.timeout(120)
def test_scenario_that_the_cap_forbids_is_inconclusive_and_the_others_are_tried(tmp_path, ring):
    limit = ("--user-connections-max", 2)
    with fabric_of_others(tmp_path, ring.directory, *limit) as address:
        words = ("chaos", "nonsense_workers", "port_scan", "--against", address, *key_flags(ring))
        done = zfabric(*words, "--dir", tmp_path, cwd=tmp_path, timeout=100)
        assert done.returncode == 6, done.stderr
        verdicts = re.findall(r"^(\w+) .* (\w+)\s*$", done.stdout, re.M)
        assert verdicts[-2:] == [("nonsense_workers", "inconclusive"), ("port_scan", "held")]
        assert "could not be tried: too_many_connections: worker has 2" in done.stderr
        assert "--user-connections-max" in done.stderr
        assert "1 of 2 could not be tried" in done.stderr
        empty = {"producers": [], "workers": [], "models": []}
        assert names_in(address, ring.directory / "operator.key") == empty


@pytest.mark.timeout(120)
def test_more_visitors_than_the_pace_lets_in_take_longer_and_break_nothing(tmp_path, ring):
    limit = ("--user-connections-max", 100)
    with fabric_of_others(tmp_path, ring.directory, *limit) as address:
        words = ("chaos", "come_and_go", "--cycles", 240, "--against", address, *key_flags(ring))
        done = zfabric(*words, "--json", cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)["rows"]
        assert (row["broken"], row["inconclusive"], row["left"]) == ([], None, [])
