"""The SDK on a real broker: futures, bulk calls, back-pressure, restarts."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.running import SLOW, brokering, serving, until
from tests.test_broker import SHAPE, RawPeer, done, items, running, worker_hello
from zfabric.broker import Broker
from zfabric.client import Client
from zfabric.config import BrokerConfig
from zfabric.errors import (
    Backpressure,
    ConfigError,
    ConnectError,
    FabricError,
    ItemFailed,
    Lost,
    Refused,
    TimeoutExpired,
)
from zfabric.link import Link
from zfabric.protocol import FROM_BROKER, Type, decode, encode
from zfabric.results import Item, Result, Results
from zfabric.shapes import Shape
from zfabric.waiting import still_open

pytestmark = pytest.mark.e2e


@contextlib.contextmanager
def working(address: str, **hello: Any) -> Iterator[threading.Event]:
    """A worker of the wire's bare words in a thread: answers every batch with "ok"."""
    end = threading.Event()

    def serve() -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        peer = RawPeer(socket)
        wide = {"batch_items_max": 64, "batch_tokens_max": 65_536, "input_tokens_max": 4_096}
        peer.send(worker_hello("gpu0", **{**wide, **hello}))
        peer.receive(Type.WELCOME)
        received = 0
        while not end.is_set():
            beat = {"received": received, "holding": [], "window": 2}
            peer.send(encode(Type.HEARTBEAT, beat))
            while peer.socket.poll(200):
                message = decode(peer.socket.recv_multipart(), FROM_BROKER)
                if message.kind is Type.BATCH:
                    received = message.fields["n"]
                    peer.send(done(message))
        context.destroy(linger=0)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield end
    finally:
        end.set()
        thread.join(10)


def test_submit_gives_a_future_that_ends_with_the_result() -> None:
    with running() as (_, at), working(at.workers), Client(at.producers) as client:
        futures = [client.submit(item, timeout=10) for item in items(5)]
        assert not wait(futures, timeout=20).not_done
        assert [f.result().payload for f in futures] == [b"ok"] * 5
        assert [f.result().custom_id for f in futures] == ["0", "1", "2", "3", "4"]


def test_submitted_means_the_broker_has_it_when_submit_returns() -> None:
    with running() as (broker, at):
        client = Client(at.producers)
        client.submit(items(1)[0], timeout=10)
        assert broker.dispatcher.fabric.flow.accepted_items == 1
        client.close()


def test_map_is_lazy_bounded_and_ordered_when_asked() -> None:
    with running() as (_, at), working(at.workers), Client(at.producers) as client:
        taken = itertools.count()
        source = ((next(taken), item)[1] for item in items(5_000))
        results = client.map(source, buffersize=100, ordered=True, timeout=30)
        first = next(results)
        assert first.custom_id == "0"
        assert next(taken) < 300
        assert [r.custom_id for r in results] == [str(k) for k in range(1, 5_000)]


def test_what_goes_together_is_sent_by_shape_the_longest_first() -> None:
    shapes = [Shape.of("m", name) for name in ("a", "b", "c")]
    given = [Item(shapes[k % 3], b"x", k * 37 % 101, custom_id=str(k)) for k in range(900)]
    with running() as (_, at), working(at.workers), Client(at.producers) as client:
        ended = client.submit_many(given, timeout=30).within(30)
        sent = [given[int(r.custom_id or "")] for r in sorted(ended, key=lambda r: r.number)]
        assert [i.shape for i in sent] == [shape for shape in shapes for _ in range(300)]
        for k in range(0, 900, 300):
            lengths = [i.length for i in sent[k : k + 300]]
            assert lengths == sorted(lengths, reverse=True)
        # Numbers of one's own stay as they are, and results come in the order of the source.
        own = [Item(i.shape, b"x", i.length, number=k) for k, i in enumerate(given, 1_000)]
        ordered = [r.number for r in client.map(own, ordered=True, timeout=30)]
        assert ordered == list(range(1_000, 1_900))
        mapped = client.map(given, buffersize=500, ordered=True, timeout=30)
        assert [r.custom_id for r in mapped] == [str(k) for k in range(900)]


def test_a_window_larger_than_the_room_that_is_left_goes_in_parts() -> None:
    with running() as (_, at), working(at.workers), Client(at.producers, buffer_items=40) as client:
        # Of a model that nobody serves: they are open for good.
        stuck = [client.submit(Item(Shape.of("nobody"), b"", 1), timeout=10) for _ in range(36)]
        got = client.map(items(30), buffersize=1_000, timeout=20)
        assert sorted(int(r.custom_id or "") for r in got) == list(range(30))
        stuck += [client.submit(Item(Shape.of("nobody"), b"", 1), timeout=10) for _ in range(4)]
        with pytest.raises(TimeoutExpired, match="no room for 2 s: 40 open items"):
            list(client.map(items(1), timeout=2))
        assert not client._room
        client.close()


def test_a_slow_engine_is_no_lack_of_room() -> None:
    """The time for room begins anew with what went: three at a time, in longer than is allowed."""
    shape = Shape.of("m", "a")
    given = [Item(shape, b"x", 8, custom_id=f"{k}") for k in range(20)]
    with (
        brokering() as broker,
        serving(SLOW, broker.address),
        Client(broker.address, buffer_items=4) as client,
    ):
        results = Results()
        # Open for good, so that a window never finds the buffer empty.
        client.submit(Item(Shape.of("nobody"), b"", 1), timeout=20)
        began = time.monotonic()
        client.enqueue_waiting(given, results, began + 1.5)
        assert time.monotonic() - began > 1.5
        assert len(list(results.within(20))) == 20
        assert len(list(client.map(given, buffersize=1_000, timeout=5))) == 20
        client.close()


def test_results_of_one_message_go_each_to_whoever_asked_for_them() -> None:
    with running() as (_, at), Client(at.producers) as client:
        single = client.submit(Item(SHAPE, b"x", 1), timeout=10)
        named, nameless, stuck = Results(), Results(), Results()
        for k in range(20):
            client.enqueue([Item(SHAPE, b"x", 1, custom_id=str(k)), Item(SHAPE, b"x", 1)], named)
            client.enqueue([Item(SHAPE, b"x", 1), Item(Shape.of("n"), b"x", 1)], nameless)
        client.enqueue([Item(Shape.of("n"), b"x", 1)], stuck)
        assert client.open_models() == {"m": 61, "n": 21}
        with working(at.workers):
            assert single.result(20).ok
            until(lambda: client.open_models() == {"n": 21})
        assert [r.custom_id for r in nameless.take(0)] == [None] * 20
        names = {r.custom_id for r in named.take(0)}
        assert names == {None, *map(str, range(20))}
        assert (named.done, nameless.done, stuck.done) == (40, 20, 0)
        client.close()


def test_map_without_order_gives_each_result_once() -> None:
    with running() as (_, at), working(at.workers), Client(at.producers) as client:
        got = [r.custom_id for r in client.map(items(3_000), timeout=30)]
        assert sorted(map(int, got)) == list(range(3_000))  # type: ignore[arg-type]


def test_submit_many_is_accepted_when_it_returns_and_iterates_once() -> None:
    with running() as (broker, at), working(at.workers), Client(at.producers) as client:
        results = client.submit_many(items(2_500), timeout=30)
        assert broker.dispatcher.fabric.flow.accepted_items == 2_500
        assert len(list(results.within(30))) == len(results) == 2_500


def test_full_buffer_is_backpressure_after_the_time_allowed() -> None:
    with running() as (_, at):
        client = Client(at.producers, buffer_items=2)
        for item in items(2):
            client.submit(item, timeout=10)
        with pytest.raises(Backpressure, match="2 open items"):
            client.submit(items(1)[0], timeout=0.2)
        client.close()


def test_full_broker_is_backpressure_that_says_why() -> None:
    with running(max_items=1) as (_, at):
        client = Client(at.producers)
        client.submit(items(1)[0], timeout=10)
        with pytest.raises(Backpressure, match="busy"):
            client.submit(items(1)[0], timeout=1)
        client.close()


def test_payload_over_the_limit_is_refused_here() -> None:
    with (
        running(payload_bytes_max=10, max_bytes=100) as (_, at),
        Client(at.producers) as client,
        pytest.raises(Refused, match="at most 10"),
    ):
        client.submit(Item(SHAPE, b"x" * 11, 5))


@pytest.mark.parametrize("length", [-1, 2**31, 1.5, None, True])
def test_item_checks_its_length(length: Any) -> None:
    with pytest.raises(ValueError, match="length"):
        Item(SHAPE, b"x", length)


def test_cancelled_item_raises_from_its_future_and_is_a_result_in_bulk() -> None:
    with running() as (_, at), Client(at.producers, name="job") as client:
        future = client.submit(items(1)[0], timeout=10)
        many = client.submit_many(items(3))
        client.request("producers.cancel", name="job")
        with pytest.raises(ItemFailed, match="cancelled"):
            future.result(10)
        assert [r.status for r in many.within(10)] == ["cancelled"] * 3


def test_memory_broker_that_restarts_fails_open_futures_with_lost() -> None:
    with running() as (_, at):
        port = int(at.producers.rsplit(":", 1)[1])
        client = Client(at.producers, name="survivor")
        future = client.submit(items(1)[0], timeout=10)
        many = client.submit_many(items(3), timeout=10)
    again = Broker(BrokerConfig(port=port, consumer_port=0, stats_port=0, memory=True))
    at = again.bind()
    thread = threading.Thread(target=again.run, daemon=True)
    thread.start()
    with pytest.raises(Lost, match="another store"):
        future.result(30)
    with pytest.raises(Lost):
        list(many.within(30))
    with working(at.workers):
        assert client.submit(items(1)[0], timeout=10).result(30).payload == b"ok"
        client.close()
    again.stop()
    thread.join(10)


def test_results_of_an_earlier_life_are_kept_until_they_are_claimed() -> None:
    with running() as (broker, at):
        first = Client(at.producers, name="heir")
        first.submit_many(items(10), timeout=10)
        first.close()
        with working(at.workers):
            outbox = broker.dispatcher.fabric.producers[0].outbox
            done_event = threading.Event()
            for _ in range(200):
                if len(outbox) == 10 or done_event.wait(0.05):
                    break
        second = Client(at.producers, name="heir")
        claimed: list[int] = []
        for _ in range(200):
            claimed += [r.number for r in second.unclaimed()]
            if len(claimed) == 10 or done_event.wait(0.05):
                break
        assert sorted(claimed) == list(range(1, 11))
        for _ in range(200):
            if not len(outbox) or done_event.wait(0.05):
                break
        assert len(outbox) == 0
        second.close()


def test_closed_client_says_so_and_open_futures_end() -> None:
    with running() as (_, at):
        client = Client(at.producers)
        future = client.submit(items(1)[0], timeout=10)
        client.close()
        with pytest.raises(ConnectError, match="closed"):
            future.result(5)
        with pytest.raises(ConnectError, match="closed"):
            client.submit(items(1)[0])


def test_a_signal_before_a_clients_thread_runs_is_what_its_maker_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def signalled(link: Link) -> None:
        raise SystemExit(130)

    monkeypatch.setattr(Link, "start", signalled)
    with pytest.raises(SystemExit, match="130"):
        Client("tcp://127.0.0.1:1", timeout_s=5.0)


def test_drain_waits_and_gives_up_in_time() -> None:
    with running() as (_, at):
        client = Client(at.producers)
        client.submit(items(1)[0], timeout=10)
        with pytest.raises(TimeoutExpired, match="1 open item "):
            client.drain(timeout=0.2)
        client.close()


def test_request_that_cannot_be_is_an_error_with_the_brokers_words() -> None:
    with running() as (_, at), Client(at.producers) as client:
        with pytest.raises(FabricError, match="unknown_request"):
            client.request("make.coffee")
        with pytest.raises(FabricError, match="no model 'x'"):
            client.request("pause", model="x")


def test_request_that_no_message_can_carry_ends_nothing_but_itself() -> None:
    values = ({1, 2}, object(), 2**64, "\ud800", [[[[[[[[[]]]]]]]]], "x" * 2**17)
    with brokering() as running, Client(running.address) as client:
        for value in values:
            with pytest.raises(ConfigError, match="cannot be asked so"):
                client.request("status", value=value)
        boot = client.welcome["boot"]
        running.restart()
        until(lambda: client.welcome["boot"] != boot)
        assert client.stats()["accepted_items"] == 0


def test_failure_nested_too_deeply_to_be_read_is_a_failure_all_the_same() -> None:
    error = Result(1, None, "failed", b"[" * 100_000).error
    assert error is not None
    assert (error.code, error.text) == ("failed", "[" * 200)


def test_a_callback_that_would_wait_is_told_so_and_holds_nothing_up() -> None:
    told: list[BaseException | None] = []

    def waits(client: Client) -> None:
        for call in (lambda: client.submit(items(1)[0]), client.stats, client.drain):
            try:
                call()
            except FabricError as error:
                told.append(error)

    with running() as (_, bound), working(bound.workers), Client(bound.producers) as client:
        client.submit(items(1)[0]).add_done_callback(lambda _: waits(client))
        until(lambda: len(told) == 3)
        assert client.submit(items(1)[0]).result(10).ok
    assert all("another thread" in str(error) for error in told)


def test_several_threads_share_one_client() -> None:
    with running() as (_, at), working(at.workers), Client(at.producers) as client:
        got: list[int] = []

        def use() -> None:
            got.append(len(list(client.map(items(500), timeout=30))))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == [500] * 4


def test_small_payload_limit_of_the_broker_is_kept_by_many_items() -> None:
    with (
        running(payload_bytes_max=100_000) as (_, at),
        working(at.workers),
        Client(at.producers) as client,
    ):
        results = client.submit_many((Item(SHAPE, b"x" * 200, 5) for _ in range(5_000)), timeout=20)
        assert len(list(results.within(20))) == 5_000


def test_a_smaller_limit_after_a_restart_refuses_what_it_cannot_take() -> None:
    with running(max_items=1) as (_, at):
        port = int(at.producers.rsplit(":", 1)[1])
        client = Client(at.producers)
        client.submit(items(1)[0], timeout=10)
        large: Future[Result] = Future()
        taken = client.enqueue([Item(SHAPE, b"x" * 5_000, 5)], large)
        many = Results()
        client.enqueue([Item(SHAPE, b"y", 5), Item(SHAPE, b"x" * 200_000, 5)], many)
    config = BrokerConfig(
        port=port, consumer_port=0, stats_port=0, memory=True, payload_bytes_max=1_000
    )
    again = Broker(config)
    at = again.bind()
    thread = threading.Thread(target=again.run, daemon=True)
    thread.start()
    with working(at.workers):
        with pytest.raises(Refused, match="at most 1000"):
            large.result(30)
        assert sorted(r.status for r in many.within(30)) == ["ok", "refused"]
        assert taken is not None
        taken.result(10)
        client.drain(10)
        with pytest.raises(Refused, match="at most 1000"):
            client.submit(Item(SHAPE, b"x" * 5_000, 5))
    client.close()
    again.stop()
    thread.join(10)


def test_a_small_buffer_at_the_broker_is_not_slow() -> None:
    with (
        running(producer_items_max=10, hold_s=0, linger_ms=0) as (_, at),
        working(at.workers),
        Client(at.producers) as client,
    ):
        began = time.monotonic()
        assert len(list(client.map(items(1_000), timeout=30))) == 1_000
        assert time.monotonic() - began < 20


# -- leaving ----------------------------------------------------------------------------------


def test_leaving_waits_and_says_after_a_while_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zfabric.waiting.LEAVING_S", 0.2)
    with running() as (_, at):
        client = Client(at.producers, name="job")
        client.submit_many([Item(Shape.of("lonely"), b"x", 5), *items(2)], timeout=10)
        leaving = threading.Thread(target=client.__exit__, args=(None, None, None))
        leaving.start()
        for _ in range(500):
            if caplog.records or leaving.join(0.02):
                break
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("zfabric", "WARNING")
        assert "3 open items" in record.message and "'lonely', 'm'" in record.message
        assert leaving.is_alive(), "it goes on waiting, as executors do"
        with working(at.workers):
            for _ in range(500):
                if len(client._open) == 1 or leaving.join(0.02):
                    break
            assert "1 open item " in still_open(client)
            assert "'m'" not in still_open(client)
        client.request("producers.cancel", name="job")
        leaving.join(10)
        assert not leaving.is_alive()
        assert still_open(client) == ""


def test_leaving_by_an_exception_does_not_wait() -> None:
    with running() as (_, at):
        began = time.monotonic()
        with pytest.raises(LookupError), Client(at.producers) as client:
            client.submit(items(1)[0], timeout=10)
            raise LookupError
        assert time.monotonic() - began < 4
        with pytest.raises(ConnectError, match="closed"):
            client.submit(items(1)[0])


def test_a_forked_child_is_told_to_make_its_own_client(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from zfabric import Client, ConnectError, Item, Shape

        item = Item(Shape.of("m"), b"x", 5)
        uses = {
            "submit": lambda c: c.submit(item),
            "submit_many": lambda c: c.submit_many([item]),
            "map": lambda c: next(c.map([item])),
            "stats": lambda c: c.stats(),
            "drain": lambda c: c.drain(),
            "unclaimed": lambda c: c.unclaimed(),
        }
        with Client(sys.argv[1]) as client:
            client.submit(item)
            with client._lock:
                child = os.fork()
            if child:
                os.waitpid(child, 0)
                client.request("producers.cancel", name=client.name)
            else:
                for name, use in uses.items():
                    try:
                        use(client)
                    except ConnectError as error:
                        print(name, "make another Client" in str(error))
        print("left", child == 0)
        """)
    )
    with running() as (_, at):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(script), at.producers],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    names = ("submit", "submit_many", "map", "stats", "drain", "unclaimed")
    assert told == [*(f"{name} True" for name in names), "left True", "left False"]
