"""Keys on real sockets: who is refused, that it is counted and told, and what a dead door does."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from tests.running import CONTRACT, FAST, PATIENCE_S, RunningBroker, serving, until
from zfabric import access
from zfabric.client import Client
from zfabric.errors import ConfigError, ConnectError, NotAllowed
from zfabric.keys import KeyPair, Keyring, load_client_key
from zfabric.results import Item
from zfabric.shapes import Shape
from zfabric.telling import PERIOD_S
from zfabric.worker import Worker
from zfabric.zap import Authenticator
from zfabric_tui.feed import LiveFeed

pytestmark = pytest.mark.e2e
SHAPE = Shape.of("m", "system")
ROLES = {
    "alice": "producer",
    "bob": "producer",
    "gpu": "worker",
    "op": "operator",
    "mon": "monitor",
}


class Secured(RunningBroker):
    """A broker with keys of every role."""

    def __init__(self, directory, **config):
        self.ring = Keyring(directory / "keys")
        for user, role in ROLES.items():
            self.ring.make(user, role)
        super().__init__(keys=str(self.ring.directory), **config)

    def key(self, user):
        return self.ring.directory / f"{user}.key"

    def client(self, user, **options):
        options = {"timeout_s": 5.0, "key": self.key(user), **options}
        return Client(self.address, **options)

    def ports(self):
        return self.config["consumer_port"], self.config["stats_port"]

    def refusals(self):
        """Refusals by reason, once they are counted and told alike."""

        def same():
            told = {e["reason"] for e in self.events() if e["event"] == "access_refused"}
            status = self.broker.ask(PATIENCE_S)
            counts = {r: n for r, n in status["security"]["refusals"].items() if n}
            return (counts,) if counts.keys() == told else None

        return until(same)[0]

    def events(self):
        with contextlib.closing(self.client("mon", role="operator")) as client:
            return client.request("events")


@pytest.fixture
def secured(tmp_path):
    running = Secured(tmp_path)
    try:
        yield running
    finally:
        running.stop()


def stranger(secured, **changes):
    """A key that was made by nobody here, for this broker."""
    known = load_client_key(secured.key("alice"))
    return type(known)(
        changes.get("user", "eve"), changes.get("role", "producer"), KeyPair.fresh(),
        changes.get("server", known.server),
    )  # fmt: skip


@contextlib.contextmanager
def raw(secured, port, key, kind=zmq.DEALER):
    """A plain socket with this key at one of the broker's ports."""
    context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.pair.secret.encode())
    socket.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def test_each_role_does_what_it_is_for(secured):
    with serving(FAST, secured.address, key=secured.key("gpu"),
                 broker_port=secured.config["consumer_port"]):  # fmt: skip
        with secured.client("alice", name="job") as alice:
            result = alice.submit(Item(SHAPE, b"x", 10)).result(PATIENCE_S)
            assert result.ok
        with contextlib.closing(secured.client("op", role="operator")) as operator:
            assert operator.welcome["role"] == "operator"
            assert operator.request("pause", model="m") == {"model": "m", "paused": True}
        with contextlib.closing(secured.client("mon", role="operator")) as monitor:
            assert monitor.welcome["role"] == "monitor"
            assert monitor.request("status")["security"]["users"] == len(ROLES)
    assert secured.refusals() == {}


def test_wrong_key_is_refused(secured):
    """Design 7, fault 16: a wrong key."""
    with pytest.raises(NotAllowed, match="refuses the key of eve"):
        secured.client("alice", key=stranger(secured))
    assert secured.refusals() == {access.KEY_UNKNOWN: 1}


def test_missing_key_is_refused(secured):
    with pytest.raises(NotAllowed, match="asks for a key") as caught:
        Client(secured.address, key="none", timeout_s=PATIENCE_S)
    assert "--key" in str(caught.value)
    counts = until(secured.refusals)
    assert counts.keys() <= {access.KEY_MISSING, access.HANDSHAKE}


def test_key_of_another_broker_is_refused(secured):
    other = stranger(secured, server=KeyPair.fresh().public)
    with pytest.raises(ConnectError, match="another key than"):
        secured.client("alice", key=other, timeout_s=1.0)
    assert until(secured.refusals).keys() == {access.SERVER_KEY_WRONG}


def test_broker_without_keys_is_not_taken_for_the_one_that_was_meant(secured):
    plain = RunningBroker()
    try:
        with pytest.raises(NotAllowed, match="not the broker that this key is for"):
            Client(plain.address, key=secured.key("alice"), timeout_s=PATIENCE_S)
    finally:
        plain.stop()


def test_revoked_key_is_refused_and_loses_its_connection(secured):
    with secured.client("alice", name="job") as alice:
        future = alice.submit(Item(SHAPE, b"x", 10))
        secured.ring.revoke("alice")
        with pytest.raises(NotAllowed, match="revoked"):
            future.result(PATIENCE_S)
    with pytest.raises(NotAllowed, match="refuses the key of alice"):
        secured.client("alice")
    assert secured.refusals()[access.KEY_REVOKED] >= 1
    names = [event["event"] for event in secured.events()]
    assert {"keys_reloaded", "producer_lost"} <= set(names)


def test_revoked_worker_gets_no_more_batches_and_ends(secured):
    worker = Worker(
        FAST, broker=secured.address, model="m", contract=CONTRACT, name="w",
        key=secured.key("gpu"), broker_port=secured.config["consumer_port"],
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(worker.run)
        until(lambda: worker.connected)
        secured.ring.revoke("gpu")
        with pytest.raises(NotAllowed, match="revoked"):
            running.result(PATIENCE_S)
    status = secured.broker.ask(PATIENCE_S)
    assert [row["live"] for row in status["workers"]] == [False]


def test_revoked_monitor_sees_no_more_snapshots(secured):
    stats = f"tcp://127.0.0.1:{secured.config['stats_port']}"
    feed = LiveFeed(stats, key=load_client_key(secured.key("mon")))
    other = LiveFeed(stats, key=load_client_key(secured.key("op")))
    try:
        until(lambda: feed.poll(0.2).snapshots)
        secured.ring.revoke("mon")
        until(lambda: secured.broker.ask(PATIENCE_S)["events_total"].get("keys_reloaded"))
        while feed.poll(1.0).snapshots:
            pass
        # The operator's feed comes back by itself, the monitor's does not.
        until(lambda: other.poll(0.2).snapshots)
        assert not feed.poll(0.5).snapshots
    finally:
        feed.close()
        other.close()


@pytest.mark.parametrize(
    ("user", "port"),
    [("gpu", "port"), ("alice", "consumer_port"), ("op", "consumer_port"), ("mon", "consumer_port"),
     ("alice", "stats_port"), ("gpu", "stats_port")],
)  # fmt: skip
def test_role_opens_its_own_ports_only(secured, user, port):
    key = load_client_key(secured.key(user))
    kind = zmq.SUB if port == "stats_port" else zmq.DEALER
    with raw(secured, secured.config[port], key, kind):
        counts = until(secured.refusals)
    assert counts.keys() == {access.NOT_ALLOWED}


def test_worker_s_key_on_the_producers_socket(secured):
    with pytest.raises(NotAllowed, match="its role may not use this port"):
        secured.client("gpu")
    assert secured.refusals() == {access.NOT_ALLOWED: 1}


def test_monitor_may_look_and_never_act(secured):
    with contextlib.closing(secured.client("mon", role="operator")) as monitor:
        for op in sorted(access.LOOKS - {"lanes"}):
            monitor.request(op)
        orders = {"drain": {}, "pause": {"model": "m"}, "resume": {"model": "m"},
                  "dead.drop": {"all": True}, "dead.requeue": {"all": True},
                  "producers.cancel": {"name": "x"}, "producers.forget": {"name": "x"},
                  "workers.forget": {"name": "x"}, "models.forget": {"model": "m"}}  # fmt: skip
        for op, args in orders.items():
            with pytest.raises(NotAllowed, match=r"^not_allowed: a monitor's key"):
                monitor.request(op, **args)
    assert secured.refusals() == {access.NOT_ALLOWED: len(orders)}
    with pytest.raises(NotAllowed, match="may not be a producer"):
        secured.client("mon", role="producer")


def test_producer_ends_its_own_work_and_sees_no_other_s_prompts(secured):
    with secured.client("alice", name="hers") as alice, secured.client("bob", name="his") as bob:
        assert alice.request("producers.cancel", name="hers")["name"] == "hers"
        for op, args in (("producers.cancel", {"name": "hers"}), ("shapes", {}), ("drain", {})):
            with pytest.raises(NotAllowed):
                bob.request(op, **args)


@pytest.mark.parametrize("durable", [False, True])
def test_name_of_another_user_is_refused(tmp_path, durable):
    """Design 7, fault 11: a different key claims a known name."""
    secured = Secured(
        tmp_path, **({"memory": False, "data": str(tmp_path / "d")} if durable else {})
    )
    try:
        with secured.client("alice", name="nightly") as alice:
            alice.submit(Item(SHAPE, b"x", 10))
            alice.close()
        if durable:
            secured.restart()
        with pytest.raises(NotAllowed, match="belongs to another user"):
            secured.client("bob", name="nightly")
        assert secured.refusals() == {access.NAME_OF_ANOTHER: 1}
        # A new key of the same user is the same owner.
        secured.ring.make("alice", "producer", replace=True)
        until(lambda: secured.broker.ask(PATIENCE_S)["events_total"].get("keys_reloaded"))
        with contextlib.closing(secured.client("alice", name="nightly")) as again:
            assert again.accepted_upto == 1
            # Forgotten by its owner, the name is anybody's.
            again.close()
        with contextlib.closing(secured.client("op", role="operator")) as operator:
            until(lambda: not _live(operator, "nightly"))
            operator.request("producers.forget", name="nightly", force=True)
        secured.client("bob", name="nightly").close()
    finally:
        secured.stop()


def test_worker_s_name_of_another_user_is_refused(secured):
    secured.ring.make("gpu2", "worker")
    port = secured.config["consumer_port"]
    with serving(FAST, secured.address, key=secured.key("gpu"), broker_port=port) as worker:
        until(lambda: worker.connected)
    until(lambda: secured.broker.ask(PATIENCE_S)["events_total"].get("keys_reloaded"))
    other = Worker(
        FAST, broker=secured.address, model="m", contract=CONTRACT, name="w",
        key=secured.key("gpu2"), broker_port=port,
    )  # fmt: skip
    with pytest.raises(NotAllowed, match="belongs to another user"):
        other.run()
    assert secured.refusals() == {access.NAME_OF_ANOTHER: 1}


def test_operator_who_is_not_patient_at_first_is_so_later(secured):
    """`zfabric events --follow` goes on when the broker comes back."""
    with pytest.raises(ConnectError, match="no broker answered"):
        Client("tcp://127.0.0.1:9", key=secured.key("op"), role="operator", patient=False)
    with contextlib.closing(secured.client("op", role="operator", patient=False)) as client:
        secured.restart()
        assert until(lambda: client.connected and client.request("status"))["peers"] == 1


def _live(operator, name):
    return next(row["live"] for row in operator.request("producers.ls") if row["name"] == name)


def test_message_of_another_key_under_a_known_routing_id_is_refused(secured):
    """A peer chooses its routing id; who it is, its key alone says."""
    from zfabric.protocol import FROM_BROKER, Type, decode, encode

    port = secured.config["port"]
    hello = encode(Type.HELLO, {"role": "producer", "name": "n", "instance": 1})
    with raw(secured, port, load_client_key(secured.key("alice"))) as alice:
        alice.setsockopt(zmq.ROUTING_ID, b"chosen")
        alice.disconnect(f"tcp://127.0.0.1:{port}")
        alice.connect(f"tcp://127.0.0.1:{port}")
        alice.send_multipart(hello)
        kinds = [Type.HEARTBEAT]
        while kinds[-1] is Type.HEARTBEAT:
            assert alice.poll(5_000)
            kinds.append(decode(alice.recv_multipart(), FROM_BROKER).kind)
        assert kinds[-1] is Type.WELCOME
    with raw(secured, port, load_client_key(secured.key("bob"))) as bob:
        bob.setsockopt(zmq.ROUTING_ID, b"chosen")
        bob.disconnect(f"tcp://127.0.0.1:{port}")
        bob.connect(f"tcp://127.0.0.1:{port}")

        def refused():
            bob.send_multipart(encode(Type.REQUEST, {"id": 1, "op": "status"}))
            if not bob.poll(500):
                return None
            message = decode(bob.recv_multipart(), FROM_BROKER)
            assert message.kind in (Type.ERROR, Type.WHO_ARE_YOU, Type.HEARTBEAT)
            return message.kind in (Type.ERROR, Type.WHO_ARE_YOU)

        until(refused)


# -- the authenticator is dead ----------------------------------------------------------------


def tries_every_port(secured):
    """Whether anybody with a good key is heard at any port within a second."""
    from zfabric.protocol import Type, encode

    heard = []
    for user, port, role in (("alice", "port", "producer"), ("op", "port", "operator"),
                             ("gpu", "consumer_port", "worker")):  # fmt: skip
        fields = {"role": role, "name": f"{user}-late", "instance": 1}
        if role == "worker":
            contract = ("batch_items_max", "batch_tokens_max", "input_tokens_max")
            fields |= {"model": "m", **dict.fromkeys(contract, 64)}
        with raw(secured, secured.config[port], load_client_key(secured.key(user))) as socket:
            socket.setsockopt(zmq.SNDTIMEO, 1_000)
            with contextlib.suppress(zmq.Again):
                socket.send_multipart(encode(Type.HELLO, fields))
            heard.append(bool(socket.poll(1_000)))
    with raw(
        secured, secured.config["stats_port"], load_client_key(secured.key("op")), zmq.SUB
    ) as feed:
        feed.setsockopt(zmq.SUBSCRIBE, b"")
        heard.append(bool(feed.poll(1_000)))
    return heard


def kill_door(secured):
    """The authenticator's socket is closed in the loop's own thread, as if its code were gone."""
    door = secured.broker.door
    done = threading.Event()

    def die(now):
        door._questions.close(0)
        door.turn = lambda now: None
        done.set()

    door.turn = die
    assert done.wait(PATIENCE_S)


def test_with_the_authenticator_alive_everybody_is_heard(secured):
    assert tries_every_port(secured) == [True] * 4


def test_with_the_authenticator_dead_nothing_gets_in(secured):
    """Design 7, fault 16: the authenticator dies."""
    before = secured.client("op", role="operator")
    try:
        kill_door(secured)
        peers = len(secured.broker.dispatcher.peers)
        assert tries_every_port(secured) == [False] * 4
        assert len(secured.broker.dispatcher.peers) == peers
        # Who was let in before is served on.
        assert before.request("status")["state"] == "running"
    finally:
        before.close()


def test_without_enforcement_a_dead_authenticator_lets_in_and_the_gate_does_not(
    tmp_path, monkeypatch
):
    """What ZAP_ENFORCE_DOMAIN is for, and that even without it no message is believed."""
    real = Authenticator.secure

    def lax(self, socket, endpoint):
        real(self, socket, endpoint)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)

    monkeypatch.setattr(Authenticator, "secure", lax)
    secured = Secured(tmp_path)
    try:
        kill_door(secured)
        heard = tries_every_port(secured)
        assert heard[3], "libzmq fails open without it: the feed is public"
        assert len(secured.broker.dispatcher.peers) == 0
        counters = secured.broker.dispatcher.fabric.counters
        assert counters["access_refused_key_unknown"] >= 3
    finally:
        secured.stop()


def test_broker_that_stands_still_lets_nobody_in(secured):
    """The authenticator is in the loop: while that is stopped, handshakes wait."""
    stopped, go = threading.Event(), threading.Event()
    turn = secured.broker.turn

    def stand():
        stopped.set()
        assert go.wait(PATIENCE_S)
        secured.broker.turn = turn
        turn()

    secured.broker.turn = stand
    assert stopped.wait(PATIENCE_S)
    with raw(secured, secured.config["port"], load_client_key(secured.key("op"))) as socket:
        socket.setsockopt(zmq.IMMEDIATE, 1)
        assert not socket.poll(500, zmq.POLLIN)
    go.set()
    secured.client("op", role="operator").close()


# -- the list of keys -------------------------------------------------------------------------


def test_unreadable_list_of_keys_changes_nothing_and_is_told_once(secured):
    path = secured.ring.clients_path
    good = path.read_text()
    path.write_text("[[key]]\nuser = 1\n")
    until(lambda: secured.broker.ask(PATIENCE_S)["events_total"].get("keys_unreadable"))
    secured.client("op", role="operator").close()
    path.write_text(good)
    until(lambda: secured.broker.ask(PATIENCE_S)["events_total"].get("keys_reloaded"))
    assert secured.broker.ask(PATIENCE_S)["events_total"]["keys_unreadable"] == 1


def test_list_that_only_lacked_its_mode_is_read_as_soon_as_it_has_it(secured):
    secured.ring.clients_path.chmod(0o644)
    until(lambda: secured.broker.ask(PATIENCE_S)["events_total"].get("keys_unreadable"))
    secured.ring.clients_path.chmod(0o600)
    until(lambda: secured.broker.ask(PATIENCE_S)["events_total"].get("keys_reloaded"))


def test_revocation_that_could_not_be_read_is_read_later(secured, monkeypatch):
    """The broker had no file descriptor left when the list changed; it does not change again."""
    opened, lacking = Path.open, threading.Event()

    def open_or_not(self, *args, **kwargs):
        if lacking.is_set() and threading.current_thread() is secured.thread:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_or_not)
    lacking.set()
    secured.ring.revoke("alice")
    until(lambda: secured.broker.ask(PATIENCE_S)["events_total"].get("keys_unreadable"))
    lacking.clear()
    until(lambda: secured.broker.ask(PATIENCE_S)["events_total"].get("keys_reloaded"))
    assert secured.broker.ask(PATIENCE_S)["events_total"]["keys_unreadable"] == 1
    with pytest.raises(NotAllowed):
        secured.client("alice")


def test_key_that_is_made_while_the_broker_runs_is_good(secured):
    secured.ring.make("carol", "producer")

    def let_in():
        try:
            secured.client("carol", timeout_s=2.0).close()
        except NotAllowed:
            return False
        return True

    until(let_in)


def test_flood_of_refusals_is_counted_and_told_in_part(secured):
    key, began_s = stranger(secured), time.monotonic()
    for _ in range(40):
        with raw(secured, secured.config["port"], key) as socket:
            assert not socket.poll(30)
    counts = until(lambda: _counted(secured, access.KEY_UNKNOWN, 40))
    assert counts >= 40
    told = [e for e in secured.events() if e["event"] == "access_refused"]
    assert len(told) <= 1 + (time.monotonic() - began_s) // PERIOD_S


def _counted(secured, reason, least):
    found = secured.broker.ask(PATIENCE_S)["security"]["refusals"][reason]
    return found if found >= least else None


def test_broker_without_its_key_does_not_start(tmp_path):
    with pytest.raises(ConfigError, match="zfabric keys make"):
        RunningBroker(keys=str(tmp_path / "nowhere"))


def test_port_that_is_taken_is_said_with_keys_too(secured):
    with pytest.raises(ConfigError, match="another broker"):
        RunningBroker(keys=str(secured.ring.directory), port=secured.config["port"])


def test_bind_beyond_loopback_with_keys_is_allowed(tmp_path):
    secured = Secured(tmp_path, bind="0.0.0.0")
    try:
        assert secured.broker.config.metrics_at == "127.0.0.1"
    finally:
        secured.stop()
