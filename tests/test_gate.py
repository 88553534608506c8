"""The gate: what it counts, what it tells, and that without keys it lets everything pass."""

from __future__ import annotations

from tests.harness import Bench
from zfabric import access
from zfabric.access import Grant
from zfabric.errors import PeerError
from zfabric.gate import SPOKEN_MAX, WINDOW_S


def told(bench: Bench, name: str) -> list[str]:
    return [event["text"] for event in bench.fabric.events if event["event"] == name]


def test_without_keys_everybody_may_do_everything() -> None:
    bench = Bench()
    producer = bench.producer()
    assert producer.ask("pause", model="x").startswith("not_found")
    assert bench.dispatcher.gate.view() == {
        "keys": False, "users": 0, "refusals": dict.fromkeys(access.REASONS, 0),
    }  # fmt: skip


def test_flood_is_counted_whole_and_told_in_part() -> None:
    bench = Bench()
    gate, error = bench.dispatcher.gate, PeerError("malformed", "x" * 500)
    for _ in range(1_000):
        gate.refused(error, "eve", bench.now)
    assert bench.fabric.counters["peer_errors_malformed"] == 1_000
    assert len(told(bench, "peer_error")) == SPOKEN_MAX
    # Another reason has room of its own; nothing can crowd it out.
    gate.turned_away(access.KEY_UNKNOWN, "somebody", bench.now)
    assert len(told(bench, "access_refused")) == 1
    gate.refused(error, "eve", bench.now + WINDOW_S)
    assert told(bench, "peer_error")[-1].endswith("(and 980 more before it)")
    assert all(len(text) < 250 for text in told(bench, "peer_error"))


def test_keys_that_end_are_named_once() -> None:
    bench = Bench()
    gate = bench.dispatcher.gate
    table = {"a": Grant("alice", "producer"), "b": Grant("bob", "worker")}
    assert gate.replace(table) == set()
    assert gate.replace({**table, "b": Grant("bob", "worker", revoked=True)}) == {"b"}
    assert gate.replace({**table, "b": Grant("bob", "worker", revoked=True)}) == set()
    assert gate.replace({"b": Grant("bob", "worker", revoked=True)}) == {"a"}
    assert gate.replace({"a": Grant("alice", "operator")}) == set()
    assert gate.replace({"a": Grant("alice", "monitor")}) == {"a"}


def test_own_key_outlives_every_list() -> None:
    bench = Bench()
    gate = bench.dispatcher.gate
    gate.replace({})
    gate.add_own("mine")
    gate.replace({"a": Grant("alice", "producer")})
    assert gate.opens(access.STATS, "mine").role == "monitor"
    assert gate.view()["users"] == 1
