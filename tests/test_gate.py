"""The gate: what it counts, what it tells, and that without keys it lets everything pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.harness import Bench
from zfabric import access
from zfabric.access import Grant
from zfabric.errors import PeerError
from zfabric.gate import RETURN_S, STRANGERS_BURST, STRANGERS_PER_S
from zfabric.peers import Peer
from zfabric.telling import PERIOD_S, TEXTS_MAX


def told(bench: Bench, name: str) -> list[str]:
    return [event["text"] for event in bench.fabric.events if event["event"] == name]


def test_without_keys_everybody_may_do_everything() -> None:
    bench = Bench()
    producer = bench.producer()
    assert producer.ask("pause", model="x").startswith("not_found")
    assert bench.dispatcher.gate.view() == {
        "keys": False, "users": 0, "refusals": dict.fromkeys(access.REASONS, 0),
    }  # fmt: skip


def test_flood_is_counted_whole_and_told_once_a_period() -> None:
    bench = Bench()
    gate, error = bench.dispatcher.gate, PeerError("malformed", "x" * 500)
    for _ in range(1_000):
        gate.refused(error, "eve", bench.now)
    assert bench.fabric.counters["peer_errors_malformed"] == 1_000
    assert len(told(bench, "peer_error")) == 1
    # Somebody else, and another reason, are news of their own; nothing can crowd them out.
    gate.refused(error, "mallory", bench.now)
    gate.turned_away(access.KEY_UNKNOWN, "somebody", bench.now)
    assert len(told(bench, "peer_error")) == 2
    assert len(told(bench, "access_refused")) == 1
    gate.turn(bench.now + PERIOD_S - 1)
    assert len(told(bench, "peer_error")) == 2
    gate.turn(bench.now + PERIOD_S)
    assert [text for text in told(bench, "peer_error") if "more since" in text] == [
        told(bench, "peer_error")[0] + " (999 more since)"
    ]
    assert all(len(text) < 250 for text in told(bench, "peer_error"))
    # It has stopped for a period, and is news again.
    gate.turn(bench.now + 3 * PERIOD_S)
    gate.refused(error, "eve", bench.now + 3 * PERIOD_S)
    assert told(bench, "peer_error")[-1] == told(bench, "peer_error")[0]


def test_made_up_names_are_told_together() -> None:
    bench = Bench()
    gate = bench.dispatcher.gate
    for k in range(1_000):
        gate.refused(PeerError("malformed", "x"), f"eve-{k}", bench.now)
    assert len(told(bench, "peer_error")) == TEXTS_MAX + 1
    gate.turn(bench.now + PERIOD_S)
    assert told(bench, "peer_error")[TEXTS_MAX + 1 :] == [
        f"malformed: of more peers, told together ({1_000 - TEXTS_MAX - 1:,} more since)"
    ]


def test_the_loop_tells_what_was_held_back() -> None:
    bench = Bench()
    for _ in range(3):
        bench.dispatcher.gate.turned_away(access.KEY_MISSING, "x", bench.now)
    bench.tick(PERIOD_S + 2.0)
    assert told(bench, "access_refused") == ["key_missing: x", "key_missing: x (2 more since)"]


def peer(name: str, key: str) -> Peer:
    return Peer("workers", name.encode(), "worker", name, 1, 1, 0.0, key)


def keyed(**config: int) -> Bench:
    bench = Bench(**config)
    bench.dispatcher.gate.replace(
        {
            "a1": Grant("alice", "worker"),
            "a2": Grant("alice", "worker"),
            "b": Grant("bob", "worker"),
        }
    )
    return bench


def refusal(act: Callable[[], object]) -> str | None:
    try:
        act()
    except PeerError as error:
        return error.code
    return None


def test_connections_of_a_user_whatever_the_key() -> None:
    gate = keyed(user_connections_max=2).dispatcher.gate
    held = [peer("w1", "a1"), peer("w2", "a2")]
    for one in held:
        gate.makes_room(one, None)
        gate.greeted(one, 0.0)
    more = peer("w3", "a1")
    assert refusal(lambda: gate.makes_room(more, None)) == access.TOO_MANY_CONNECTIONS
    gate.makes_room(peer("w9", "b"), None)
    # The same connection again, or one in the place of another, is not one more.
    gate.makes_room(held[0], None)
    gate.makes_room(more, held[0])
    gate.left(held[0])
    gate.left(held[0])
    gate.makes_room(more, None)
    gate.greeted(more, 0.0)
    assert refusal(lambda: gate.makes_room(peer("w4", "a1"), None)) == access.TOO_MANY_CONNECTIONS
    # A user whose keys are gone from the list leaves nothing behind.
    gate.replace({"b": Grant("bob", "worker")})
    for one in (held[1], more):
        gate.left(one)
    assert not gate._connections


def test_pace_of_a_user_is_not_that_of_others_nor_of_strangers() -> None:
    gate = keyed(user_connections_max=500).dispatcher.gate

    def knocks(key: str, now: float, times: int) -> list[str | None]:
        return [refusal(lambda: gate.opens("workers", key, now)) for _ in range(times)]

    assert set(knocks("a1", 0.0, 300) + knocks("a2", 0.0, 200)) == {None}
    assert knocks("a1", 0.0, 1) == [access.TOO_MANY_HANDSHAKES]
    strangers = Counter(knocks("eve", 0.0, STRANGERS_BURST + 7))
    assert strangers == {access.KEY_UNKNOWN: STRANGERS_BURST, access.TOO_MANY_STRANGERS: 7}
    assert set(knocks("b", 0.0, 500)) == {None}
    assert Counter(knocks("a1", 1.0, 60)) == {None: 50, access.TOO_MANY_HANDSHAKES: 10}
    assert set(knocks("a1", 1.0 + RETURN_S, 500)) == {None}
    assert Counter(knocks("eve", 1.0, STRANGERS_PER_S + 1))[access.TOO_MANY_STRANGERS] == 1


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
    assert gate.opens(access.STATS, "mine", bench.now).role == "monitor"
    assert gate.view()["users"] == 1
