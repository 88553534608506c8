"""The broker on real sockets: hostile bytes, a large fill, drains, and what it tells of itself."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import zmq

from tests.harness import Bench
from tests.running import until
from zfabric.broker import Broker, Endpoints
from zfabric.client import Client
from zfabric.config import BrokerConfig
from zfabric.errors import ConfigError, ConnectError, NameInUse, VersionMismatch
from zfabric.protocol import FROM_BROKER, Message, Type, decode, encode, packed
from zfabric.results import Item
from zfabric.shapes import Shape

pytestmark = pytest.mark.e2e
Connected = Callable[..., zmq.Socket[bytes]]
SHAPE = Shape.of("m", "system prompt", tokens=[4])


@contextlib.contextmanager
def running(**config: Any) -> Iterator[tuple[Broker, Endpoints]]:
    broker = Broker(BrokerConfig(port=0, memory=True, **config))
    endpoints = broker.bind()
    thread = threading.Thread(target=broker.run, daemon=True)
    thread.start()
    try:
        yield broker, endpoints
    finally:
        broker.stop()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def connected() -> Iterator[Connected]:
    """Sockets of a test's own, all of which are closed however the test ends."""
    context = zmq.Context[zmq.Socket[bytes]]()
    kept: list[zmq.Socket[bytes]] = []

    def connect(kind: int, address: str, topic: bytes | None = None) -> zmq.Socket[bytes]:
        kept.append(context.socket(kind))
        if topic is not None:
            kept[-1].setsockopt(zmq.SUBSCRIBE, topic)
        kept[-1].connect(address)
        return kept[-1]

    yield connect
    context.destroy(linger=0)


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        yield socket


@pytest.fixture
def raw_peer(connected: Connected) -> Callable[[str], RawPeer]:
    return lambda address: RawPeer(connected(zmq.DEALER, address))


@dataclass
class RawPeer:
    """A DEALER that says whatever it is told."""

    socket: zmq.Socket[bytes]

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def receive(self, kind: Type, seconds: float = 10.0) -> Message:
        until = time.monotonic() + seconds
        while self.socket.poll(max(0, int((until - time.monotonic()) * 1000))):
            message = decode(self.socket.recv_multipart(), FROM_BROKER)
            if message.kind is kind:
                return message
        raise AssertionError(f"no {kind.name} within {seconds} s")


def worker_hello(name: str, **more: Any) -> list[bytes]:
    fields = {"role": "worker", "name": name, "instance": 1, "model": "m"}
    contract = {"batch_items_max": 1, "batch_tokens_max": 64, "input_tokens_max": 64}
    return encode(Type.HELLO, {**fields, **contract, **more})


def done(message: Message) -> list[bytes]:
    count = len(message)
    columns = [
        packed("Q", message.columns["nonces"]),
        packed("I", message.columns["entries"]),
        packed("B", [0] * count),
        packed("I", [2] * count),
    ]
    fields = {"epoch": message.fields["epoch"], "n": message.fields["n"]}
    return encode(Type.DONE, fields, columns, b"ok" * count)


def items(count: int, length: int = 40) -> list[Item]:
    return [Item(SHAPE, b"payload", length, custom_id=str(k)) for k in range(count)]


def test_random_bytes_and_half_messages_leave_the_broker_serving(
    raw_peer: Callable[[str], RawPeer],
) -> None:
    chance = random.Random(7)
    with running() as (broker, endpoints):
        for address in (endpoints.producers, endpoints.workers):
            peer = raw_peer(address)
            hello = encode(Type.HELLO, {"role": "operator", "name": "x", "instance": 1})
            for _ in range(2_000):
                frames = [
                    chance.randbytes(chance.randrange(60)) for _ in range(chance.randrange(1, 8))
                ]
                if chance.random() < 0.5:
                    frames[0] = b"ZF\x01" + bytes([chance.randrange(26)]) + frames[0]
                peer.send(frames)
            peer.send(hello)
            peer.socket.close(linger=0)
        host, port = endpoints.producers.removeprefix("tcp://").split(":")
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5_000, b"\xff" * 100, b""):
            with socket.create_connection((host, int(port)), 5) as raw:
                raw.sendall(junk)
        with Client(endpoints.producers, name="healthy") as client:
            assert client.submit(items(1)[0], timeout=10).done() is False
            counters = client.stats()["counters"]
            client.request("producers.cancel", name="healthy")
        assert counters["peer_errors_malformed"] > 100
        assert broker.dispatcher.fabric.flow.accepted_items == 1


def test_frame_over_the_limit_costs_its_sender_the_connection_and_nobody_else(
    raw_peer: Callable[[str], RawPeer],
) -> None:
    with running(payload_bytes_max=1_000, max_bytes=10_000) as (_, endpoints):
        raw_peer(endpoints.producers).send([encode(Type.HEARTBEAT)[0], b"x" * 1_000_000])
        with Client(endpoints.producers, name="healthy") as client:
            client.stats()


def test_registration_of_nonsense_is_answered(raw_peer: Callable[[str], RawPeer]) -> None:
    with running() as (_, endpoints):
        for name, value in (("batch_items_max", 0), ("batch_tokens_max", -1), ("window", 2.5)):
            peer = raw_peer(endpoints.workers)
            peer.send(worker_hello("w", **{name: value}))
            error = peer.receive(Type.ERROR)
            assert error.fields["code"] in ("bad_contract", "malformed")


def test_slice_ends_with_the_first_offer_that_is_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(slice_ms=100)
    for k in range(2):
        bench.worker(f"gpu{k}", batch=1, window=32).heartbeat(window=32)
    bench.producer().submit([40] * 50)
    bench.settle()
    sent_s: list[float] = []

    def send(socket: object, frames: list[bytes]) -> None:
        bench.now += 0.007
        sent_s.append(bench.now)

    broker = Broker(bench.config)
    broker.close()
    broker.dispatcher = bench.dispatcher
    broker._sockets["workers"] = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr("zfabric.broker.send", send)
    monkeypatch.setattr("zfabric.broker.time", SimpleNamespace(monotonic=lambda: bench.now))
    slices = []
    while sum(slices) < 50:
        broker._hand_out()
        slices.append(len(sent_s) - sum(slices))
        assert broker._more_offers is (sum(slices) < 50)
    assert slices == [15, 15, 15, 5]
    status = {**bench.dispatcher.meta(bench.now), **bench.status()}
    assert status["dispatch_yields_total"] == 3
    assert status["dispatch_slice_max_s"] == pytest.approx(0.105)


def test_fill_of_3099_batches_yields_and_kills_no_consumer(
    raw_peer: Callable[[str], RawPeer],
) -> None:
    consumers, batches = 100, 3_099
    # Slices so short that a fill has many, on any machine.
    with running(slice_ms=10, lease_s=3.0, heartbeat_s=0.5) as (broker, endpoints):
        peers = [raw_peer(endpoints.workers) for _ in range(consumers)]
        for k, peer in enumerate(peers):
            peer.send(worker_hello(f"gpu{k}", window=32))
            peer.receive(Type.WELCOME)
        with Client(endpoints.producers, name="filler") as client:
            client.request("pause", model="m")
            results = client.submit_many(items(batches))
            for peer in peers:
                beat = {"received": 0, "holding": [], "window": 32}
                peer.send(encode(Type.HEARTBEAT, beat))
            until(lambda: sum(w["granted"] for w in client.request("workers")) == 32 * consumers)
            client.request("resume", model="m")
            received = [0] * consumers
            held: list[list[list[int]]] = [[] for _ in peers]
            deadline = time.monotonic() + 60
            beat_at = 0.0
            while results.done < batches and time.monotonic() < deadline:
                for k, peer in enumerate(peers):
                    while peer.socket.poll(0):
                        message = decode(peer.socket.recv_multipart(), FROM_BROKER)
                        if message.kind is Type.BATCH:
                            received[k] = message.fields["n"]
                            peer.send(done(message))
                if time.monotonic() > beat_at:
                    beat_at = time.monotonic() + 0.5
                    for k, peer in enumerate(peers):
                        beat = {"received": received[k], "holding": held[k], "window": 32}
                        peer.send(encode(Type.HEARTBEAT, beat))
            status = client.stats()
            assert results.done == batches
        assert status["counters"].get("worker_disconnects", 0) == 0
        assert status["redeliveries_total"] == 0
        assert status["batches"] == batches
        assert (status["residual_items"], status["residual_tokens"]) == (0, 0)
        assert status["dispatch_yields_total"] >= 1
        # By the wall, so the machine's other work counts too; the rule itself is tested above.
        assert status["dispatch_slice_max_s"] < 1.0
        assert broker.dispatcher.fabric.flow.completed_items == batches


def test_ports_that_are_taken_are_named_with_a_way_out() -> None:
    with running() as (_, endpoints):
        port = int(endpoints.producers.rsplit(":", 1)[1])
        other = Broker(BrokerConfig(port=port, consumer_port=0, stats_port=0, memory=True))
        with pytest.raises(ConfigError, match="--port 0"):
            other.bind()


def test_second_client_of_a_name_is_refused_and_a_dead_ones_name_is_free() -> None:
    with running() as (_, endpoints):
        first = Client(endpoints.producers, name="twin")
        with pytest.raises(NameInUse, match="twin"):
            Client(endpoints.producers, name="twin", timeout_s=1.5)
        first.close()
        Client(endpoints.producers, name="twin").close()


def test_no_broker_is_a_connect_error_that_names_the_fix() -> None:
    with pytest.raises(ConnectError, match="zfabric broker"):
        Client("tcp://127.0.0.1:9", timeout_s=0.3)


def test_broker_of_another_version_is_named(router: zmq.Socket[bytes]) -> None:
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        routing_id, *_ = router.recv_multipart()
        frames = encode(Type.ERROR, {"code": "version_mismatch", "text": "speaks 2"})
        router.send_multipart([routing_id, frames[0][:2] + b"\x02" + frames[0][3:]])

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with pytest.raises(VersionMismatch, match=r"version 1.*2"):
        Client(f"tcp://127.0.0.1:{port}", timeout_s=5)
    thread.join(5)


def test_snapshot_on_the_feed_is_what_status_says(connected: Connected) -> None:
    with running(hz=20) as (_, endpoints):
        feed = connected(zmq.SUB, endpoints.stats, b"snapshot")
        with Client(endpoints.producers, name="fed") as client:
            client.submit_many(items(3))
            assert feed.poll(10_000)
            snapshot: dict[str, Any] = {}
            deadline = time.monotonic() + 10
            while snapshot.get("accepted_items") != 3 and time.monotonic() < deadline:
                snapshot = msgpack.unpackb(feed.recv_multipart()[1])
            status = client.stats()
            client.request("producers.cancel", name="fed")
        assert {k for k in status if k not in snapshot} == set()
        assert snapshot["ready_items"] == status["ready_items"] == 3
        assert snapshot["shapes"][0]["ready_items"] == 3


def test_first_event_has_the_time_of_day() -> None:
    with running() as (_, endpoints), Client(endpoints.producers, name="early") as client:
        (first, *_) = client.request("events", 10.0)
    assert abs(first["time"] - time.time()) < 60


def test_lanes_of_a_shape_are_fed_to_who_asks_for_that_shape(connected: Connected) -> None:
    with running(hz=20) as (_, endpoints):
        feed = connected(zmq.SUB, endpoints.stats, b"lanes:%016x" % SHAPE.signature)
        with Client(endpoints.producers, name="fed") as client:
            client.submit_many([*items(3, 40), *items(2, 400)])
            assert feed.poll(10_000)
            lanes = msgpack.unpackb(feed.recv_multipart()[1])
            client.request("producers.cancel", name="fed")
        ready = dict(zip(lanes["target_tokens"], lanes["ready_items"], strict=True))
        assert ready == {40: 3, 400: 2}


def test_drain_ends_the_broker_in_order() -> None:
    broker = Broker(BrokerConfig(port=0, memory=True))
    endpoints = broker.bind()
    thread = threading.Thread(target=broker.run, daemon=True)
    thread.start()
    client = Client(endpoints.producers, name="last")
    client.request("drain")
    thread.join(10)
    assert not thread.is_alive()
    client.close()


def test_bind_beyond_loopback_needs_to_be_said() -> None:
    with pytest.raises(ConfigError, match="insecure"):
        BrokerConfig(bind="0.0.0.0", memory=True)
