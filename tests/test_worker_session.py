"""The worker's session against a real dispatcher and store, joined by lists of frames."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zfabric import snapshot
from zfabric.config import BrokerConfig
from zfabric.dispatcher import PRODUCERS, WORKERS, Dispatcher
from zfabric.errors import PeerError
from zfabric.holding import DONE_BYTES_MAX, Ended, cut
from zfabric.protocol import (
    FROM_BROKER,
    TO_BROKER,
    VERSION,
    Status,
    Type,
    decode,
    encode,
    packed,
)
from zfabric.session import Session
from zfabric.shapes import Contract, Shape
from zfabric.store import Store
from zfabric.worker_session import CLOSED, GREETING, LIVE, SILENT_S, WorkerSession

LEASE_S, HEARTBEAT_S, STEP_S = 3.0, 0.5, 0.1
SHAPE = Shape.of("m", "system", tokens=[4])
CONTRACT = Contract(4, 4_096, 512)


class End:
    """One side of a connection: a session, and the frames on their way to it."""

    def __init__(self, net, endpoint, session):
        self.net, self.endpoint, self.session = net, endpoint, session
        self.arriving = deque()
        self.routing_id = b""
        self.frozen = False
        # frames wait, but are not lost
        self.stuck_up = self.stuck_down = False
        self.errors = []
        self.fatal = None
        self.welcomes = 0
        self.log = []
        self.open()

    def open(self):
        """A new socket, and HELLO on it."""
        self.wire()
        self.session.open(self.net.now)

    def wire(self):
        """A new connection that the session does not know of, as zmq makes it."""
        self.cut()
        self.routing_id = b"%d" % next(self.net.ids)
        self.net.ends[self.endpoint, self.routing_id] = self

    def cut(self):
        """The connection is gone with everything on its way."""
        self.net.ends.pop((self.endpoint, self.routing_id), None)
        self.arriving.clear()

    @property
    def connected(self):
        return (self.endpoint, self.routing_id) in self.net.ends

    def send(self):
        while self.session.outbound and not self.stuck_up:
            frames = self.session.outbound.popleft()
            self.log.append(decode(frames, TO_BROKER))
            if self.connected:
                self.net.broker.receive(self.endpoint, self.routing_id, frames, self.net.now)

    def take(self):
        while self.arriving and not self.stuck_down:
            self.act(self.session.receive(self.arriving.popleft(), self.net.now))

    def act(self, news):
        self.errors += news.errors
        self.fatal = self.fatal or news.fatal
        self.welcomes += news.welcomed
        if news.reconnect:
            self.open()

    def step(self):
        self.take()
        self.act(self.session.tick(self.net.now))

    def sent(self, kind):
        return [message for message in self.log if message.kind is kind]


class Producer(End):
    """Submits items numbered from 1 whose payload is their number; counts what comes back."""

    def __init__(self, net, name="p"):
        super().__init__(net, PRODUCERS, Session(name, net.random.getrandbits(64)))
        self.results = Counter()
        self.payloads = {}
        self.statuses = {}

    def submit(self, count, length=8, prefix=b"item"):
        first = self.session.next_number
        payloads = [b"%s %d" % (prefix, first + k) for k in range(count)]
        self.session.add([SHAPE] * count, [length] * count, payloads)
        self.session.pump()

    def act(self, news):
        super().act(news)
        for arrival in news.arrivals:
            self.results[arrival.number] += 1
            self.payloads[arrival.number] = arrival.payload
            self.statuses[arrival.number] = arrival.status
        if news.seq:
            self.session.acknowledge(news.seq)


class Hand(End):
    """A worker: its session, and an engine that takes `run_s` for a batch and answers in capitals.

    `partial`: an item a step once that time is over.
    """

    def __init__(self, net, name="w", *, contract=CONTRACT, run_s=0.3, serving=True, partial=False):
        session = WorkerSession(name, net.random.getrandbits(64), model="m", contract=contract)
        self.run_s = run_s
        self.partial = partial
        self.reported = 0
        self.running = None
        self.done_at = 0.0
        self.ran = []
        self.hold = False
        super().__init__(net, WORKERS, session)
        session.serve(serving, {"state": "idle"})

    def step(self):
        self.work()
        super().step()
        if self.running is None and not self.hold:
            self.running = self.session.start()
            self.done_at = self.net.now + self.run_s
            if self.running is not None:
                self.ran += self.running[1].payloads

    def work(self):
        if self.running is not None and self.net.now >= self.done_at and not self.hold:
            serial, batch = self.running
            first, last = self.reported, self.reported + 1 if self.partial else len(batch)
            answers = [payload.upper() for payload in batch.payloads[first:last]]
            final, words = last >= len(batch), ["ok"] * (last - first)
            self.session.report(serial, range(first, last), words, answers, final=final)
            self.reported = 0 if final else last
            self.running = None if final else self.running

    def die(self):
        """The engine is killed with what it runs."""
        if self.running is not None:
            self.session.give_back(self.running[0], "engine_exit", "killed by SIGKILL")
            self.running, self.reported = None, 0


class Net:
    def __init__(self, seed=0, **config):
        self.random = random.Random(seed)
        self.now = 1_000.0
        self.ids = itertools.count(1)
        self.ends = {}
        self.config = BrokerConfig(
            port=0,
            memory=True,
            hold_s=0,
            linger_ms=0,
            **{"lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S, **config},
        )
        self.boot()
        self.everyone = []

    def boot(self, seed=1):
        """A broker that knows nothing."""
        for end in list(self.ends.values()):
            end.cut()
        numbers = random.Random(seed)
        store = Store(random_u64=lambda: numbers.getrandbits(64))
        self.broker = Dispatcher(self.config, store, self.random.getrandbits(64))

    def add(self, end):
        self.everyone.append(end)
        return end

    def step(self, count=1):
        for _ in range(count):
            self.now += STEP_S
            for end in self.everyone:
                if not end.frozen:
                    end.send()
            self.broker.tick(self.now, self.now, drained=True)
            self.broker.flush(self.now)
            self.deliver()
            self.hand_out()
            for end in self.everyone:
                if not end.frozen:
                    end.step()

    def deliver(self):
        while self.broker.outgoing:
            parcel = self.broker.outgoing.popleft()
            end = self.ends.get((parcel.endpoint, parcel.routing_id))
            if end is None:
                self.broker.unreachable(parcel.endpoint, parcel.routing_id, "no route", self.now)
            else:
                end.arriving.append(parcel.frames)

    def hand_out(self):
        while (offer := self.broker.next_offer(self.now)) is not None:
            peer = offer.worker.peer
            end = self.ends.get(peer.address)
            if end is None:
                self.broker.unreachable(*peer.address, "no route", self.now)
            else:
                end.arriving.append(offer.frames)
                self.broker.commit(offer, self.now)

    def until(self, holds, limit_s=60.0):
        end = self.now + limit_s
        while not holds():
            assert self.now < end, self.status()
            self.step()

    def status(self):
        return snapshot.status(self.broker.fabric, self.now)

    def check(self, producer, count, *, dead=()):
        """Every item ended once, with the right bytes, and the books balance."""
        assert producer.results == Counter(range(1, count + 1))
        for number, payload in producer.payloads.items():
            if number in dead:
                assert producer.statuses[number] == Status.DEAD
            else:
                assert payload == b"ITEM %d" % number
        status = self.status()
        assert (status["residual_items"], status["residual_tokens"]) == (0, 0)
        assert (status["ready_items"], status["pending_items"]) == (0, 0)
        assert status["dead_items"] == len(dead)


@pytest.fixture
def net():
    return Net()


def counters(net):
    return net.broker.fabric.counters


def attempts(net):
    return sorted(net.broker.fabric.store.attempts.values())


def held(net, name="w"):
    return net.broker.fabric.workers[name].held


# -- the ordinary way -----------------------------------------------------------------------------


def test_items_go_out_and_come_back_once_each(net):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    producer.submit(50)
    net.until(lambda: len(producer.results) == 50)
    net.check(producer, 50)
    assert len(worker.ran) == 50
    net.step(20)
    assert worker.session.settled
    assert worker.session._held == {}
    status = net.status()
    assert (status["duplicates_total"], status["redeliveries_total"]) == (0, 0)
    assert not worker.errors


def test_started_is_outbound_before_the_batch_is_given(net):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    worker.hold = True
    producer.submit(4)
    net.until(lambda: worker.session.ready)
    worker.session.outbound.clear()
    _, batch = worker.session.start()
    (frames,) = worker.session.outbound
    assert decode(frames, TO_BROKER).kind is Type.STARTED
    assert batch.payloads == (b"item 1", b"item 2", b"item 3", b"item 4")
    assert batch.pad_to == 8
    assert batch.shapes == (SHAPE,)
    assert worker.session.running


def test_nothing_is_granted_until_the_engine_serves_and_then_at_once(net):
    worker, producer = net.add(Hand(net, serving=False)), net.add(Producer(net))
    producer.submit(4)
    net.step(30)
    assert not worker.ran
    beats = len(worker.sent(Type.HEARTBEAT))
    worker.session.serve(True, {"state": "idle", "queries_tokens": 8, "hits_tokens": 4})
    net.step(2)
    assert worker.ran
    extra = worker.sent(Type.HEARTBEAT)[beats]
    assert extra.fields["window"] == 2
    assert net.status()["workers"][0]["cache_hits_tokens"] == 4
    worker.session.serve(False, {"state": "unreachable"})
    net.step(2)
    assert worker.sent(Type.HEARTBEAT)[-1].fields["window"] == 0
    assert net.broker.fabric.workers["w"].granted == 0


def test_over_long_items_are_answered_and_never_run(net):
    worker, producer = net.add(Hand(net, contract=Contract(4, 4_096, 100))), net.add(Producer(net))
    producer.submit(2, length=96)
    producer.submit(1, length=101)
    producer.submit(1, length=5_000)
    net.until(lambda: len(producer.results) == 4)
    assert worker.ran == [b"item 1", b"item 2"]
    assert producer.statuses == {1: Status.OK, 2: Status.OK, 3: 1, 4: 1}
    assert producer.payloads[3] == b""
    net.step(20)
    assert worker.session._held == {}
    assert net.status()["residual_items"] == 0


def test_pad_to_of_the_broker_stays_where_an_over_long_item_made_it(net):
    session = live_session(contract=Contract(4, 4_096, 100))
    session.receive(batch_frames(1, lengths=[50, 200], pad_to=200), 1.0)
    _, batch = session.start()
    assert (batch.pad_to, batch.lengths) == (200, (50,))
    started = decode(session.outbound[-1], TO_BROKER)
    assert list(started.columns["indices"]) == [0]


def test_partial_results_are_sent_together_and_counted_one_by_one(net):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    worker.hold = True
    producer.submit(4)
    net.until(lambda: worker.session.ready)
    serial, _ = worker.session.start()
    for group in ([3], [0, 1]):
        answers = [b"ITEM %d" % (k + 1) for k in group]
        worker.session.report(serial, group, ["ok"] * len(group), answers, final=False)
    net.step(3)
    (done,) = worker.sent(Type.DONE)
    assert len(done) == 3
    assert "stats" not in done.fields
    worker.session.report(serial, [2], ["ok"], [b"ITEM 3"], final=True)
    worker.session.serve(True, {"queries_tokens": 32, "hits_tokens": 12})
    net.step(3)
    assert worker.sent(Type.DONE)[-1].fields["stats"]["hits_tokens"] == 12
    assert worker.session._held == {}
    net.check(producer, 4)


def test_empty_final_results_end_a_batch_that_was_reported_in_parts(net):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    worker.hold = True
    producer.submit(1)
    net.until(lambda: worker.session.ready)
    serial, _ = worker.session.start()
    worker.session.report(serial, [0], ["ok"], [b"ITEM 1"], final=False)
    net.step(20)
    assert worker.session.running
    worker.session.report(serial, [], [], [], final=True)
    assert worker.session._held == {}
    net.check(producer, 1)


def test_results_over_the_frame_limit_fail_and_the_others_are_cut():
    big = b"x" * (DONE_BYTES_MAX // 2 + 1)
    first, second = cut(Ended([0, 1, 2], ["ok"] * 3, [big, big, b"y" * 5_000_000]), 4_000_000)
    assert (first.places, second.places) == ([0], [1, 2])
    assert second.statuses == ["ok", "failed"]
    assert b"result_too_large" in second.payloads[1]
    many = Ended(list(range(5_000)), ["ok"] * 5_000, [b""] * 5_000)
    assert [len(part) for part in cut(many, 1_000)] == [4_096, 904]
    assert list(cut(Ended([], [], []), 1_000)) == []


def test_results_name_their_own_items_whatever_the_order_in_which_they_come():
    session = live_session()
    session.receive(batch_frames(1, payloads=[b"a", b"b", b"c", b"d"]), 1.0)
    session.receive(encode(Type.REVOKE, {"epoch": 7, "n": 1}, [packed("I", [1])]), 1.0)
    serial, batch = session.start()
    assert batch.payloads == (b"a", b"c", b"d")
    session.outbound.clear()
    session.report(serial, [2, 0, 1], ["ok", "failed", "ok"], [b"D", b"A", b"CC"], final=True)
    session.tick(1.1)
    done = decode(session.outbound[-1], TO_BROKER)
    assert list(done.columns["entries"]) == [3, 0, 2]
    assert list(done.columns["statuses"]) == [Status.OK, Status.FAILED, Status.OK]
    assert (list(done.columns["sizes"]), done.body) == ([1, 1, 2], b"DACC")
    with pytest.raises(ValueError, match="differ"):
        session.report(serial, [0, 1], ["ok"], [b"A"], final=True)


def test_parts_without_an_acknowledgement_are_sent_again_in_their_order():
    session = live_session()
    session.receive(batch_frames(1, lengths=[8, 900, 8, 8]), 1.0)
    serial, _ = session.start()
    for index in (2, 0):
        session.tick(1.1)
        session.report(serial, [index], ["ok"], [b"%d" % index], final=False)
    session.give_back(serial, "engine_error", "it broke")
    session.tick(1.2)
    for epoch in (8, 9):
        session.receive(encode(Type.WHO_ARE_YOU), 1.3)
        session.outbound.clear()
        session.receive(welcome_frames(epoch=epoch), 1.4)
        _, done, returned = (decode(frames, TO_BROKER) for frames in session.outbound)
        assert list(done.columns["entries"]) == [1, 3, 0]
        assert (returned.kind, returned.fields["kind"]) == (Type.RETURNED, "engine_error")
        session.outbound.clear()
        session.tick(1.5)
        assert not session.outbound
    session.receive(encode(Type.REVOKE, {"epoch": 7, "n": 1}, [b""]), 1.6)
    session.receive(encode(Type.DONE_ACK, {"epoch": 7, "n": 1, "duplicates": 0}), 1.7)
    assert session._held == {}


def test_batch_whose_items_all_ended_in_parts_is_not_given_back():
    session = live_session()
    session.receive(batch_frames(1, payloads=[b"a", b"b"]), 1.0)
    serial, _ = session.start()
    for index in (0, 0, 1):
        assert not session.settled
        session.report(serial, [index], ["ok"], [b"A"], final=False)
    session.give_back(serial, "engine_exit", "killed")
    session.outbound.clear()
    session.tick(1.1)
    kinds = [decode(frames, TO_BROKER).kind for frames in session.outbound]
    assert Type.DONE in kinds and Type.RETURNED not in kinds


def test_batches_start_in_their_order_whatever_became_of_those_before_them():
    session = live_session()
    for n in range(1, 6):
        session.receive(batch_frames(n, payloads=[b"%d" % n]), 1.0)
    session.receive(encode(Type.REVOKE, {"epoch": 7, "n": 2}, [b""]), 1.0)
    first, _ = session.start()
    session.give_back(first, "engine_error", "it broke")
    ran = []
    while (begun := session.start()) is not None:
        serial, batch = begun
        ran += batch.payloads
        session.report(serial, [0], ["ok"], [b"x"], final=True)
    assert ran == [b"3", b"4", b"5"]
    assert not session.ready and not session.settled


def test_a_shape_that_cannot_be_read_costs_the_message_alone():
    session = live_session()
    for components in (b"12345", ["x"], None, b"8" * 8 * 65):
        shapes = [{"components": components, "tokens": []}]
        with pytest.raises(PeerError):
            session.receive(batch_frames(1, payloads=[b"a"], shapes=shapes), 1.0)
    assert session._held == {} and not session.ready


# -- words that cross -----------------------------------------------------------------------------


def test_heartbeat_between_done_and_its_acknowledgement_costs_nothing(net):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    producer.submit(4)
    worker.stuck_down = False
    net.until(lambda: worker.running is not None)
    net.step()
    worker.stuck_down = True
    net.step(12)
    named = worker.sent(Type.HEARTBEAT)[-1].fields["holding"]
    assert len(named) == 1, "unacknowledged, so still named"
    assert not held(net)
    kinds = [decode(frames, FROM_BROKER).kind for frames in worker.arriving]
    assert Type.REVOKE in kinds
    worker.stuck_down = False
    net.step(3)
    assert worker.session._held == {}
    net.check(producer, 4)
    assert net.status()["duplicates_total"] == 0


def test_heartbeat_written_before_a_batch_arrived_does_not_take_it_back(net):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    worker.stuck_down = False
    net.step(10)
    worker.stuck_down = True
    producer.submit(8)
    net.step(15)
    assert len(held(net)) == 2
    worker.stuck_down = False
    net.until(lambda: len(producer.results) == 8)
    net.check(producer, 8)
    assert net.status()["redeliveries_total"] == 0


def test_batch_taken_back_before_it_was_started_is_never_run(net):
    session = live_session()
    session.receive(batch_frames(1, payloads=[b"a"]), 1.0)
    session.receive(encode(Type.REVOKE, {"epoch": 7, "n": 1}, [b""]), 1.0)
    assert session.start() is None
    assert not session.ready
    session.receive(batch_frames(2, payloads=[b"a", b"b", b"c"]), 1.0)
    session.receive(encode(Type.REVOKE, {"epoch": 7, "n": 2}, [packed("I", [1])]), 1.0)
    assert session.start()[1].payloads == (b"a", b"c")


def test_batch_taken_back_while_it_runs_is_reported_and_not_named(net):
    session = live_session()
    session.receive(batch_frames(1, payloads=[b"a"]), 1.0)
    serial, _ = session.start()
    session.receive(encode(Type.REVOKE, {"epoch": 7, "n": 1}, [b""]), 1.0)
    session.outbound.clear()
    session.report(serial, [0], ["ok"], [b"A"], final=True)
    session.tick(2.0)
    beat, done = (decode(frames, TO_BROKER) for frames in session.outbound)
    assert beat.fields["holding"] == []
    assert (done.kind, done.body) == (Type.DONE, b"A")
    session.receive(encode(Type.DONE_ACK, {"epoch": 7, "n": 1, "duplicates": 1}), 1.0)
    assert session.settled


def test_batch_is_named_until_the_last_of_its_results_is_acknowledged():
    session = live_session()
    session.receive(batch_frames(1, payloads=[b"a", b"b"]), 1.0)
    serial, _ = session.start()
    for index, final in ((0, False), (1, True)):
        session.report(serial, [index], ["ok"], [b"A"], final=final)
        session.tick(1.1)
    ack = encode(Type.DONE_ACK, {"epoch": 7, "n": 1, "duplicates": 0})
    session.receive(ack, 1.2)
    assert not session.settled
    session.tick(1.7)
    assert decode(session.outbound[-1], TO_BROKER).fields["holding"] == [[7, 1]]
    session.receive(ack, 1.8)
    assert session.settled


def test_nothing_is_started_while_the_link_is_down():
    session = live_session()
    session.receive(batch_frames(1, payloads=[b"a"]), 1.0)
    session.receive(encode(Type.WHO_ARE_YOU), 1.1)
    assert session.start() is None
    session.receive(welcome_frames(epoch=8), 1.2)
    assert session.start() is not None


def test_second_welcome_sends_no_result_again():
    session = live_session()
    session.receive(batch_frames(1, payloads=[b"a"]), 1.0)
    serial, _ = session.start()
    session.report(serial, [0], ["ok"], [b"A"], final=True)
    session.tick(1.1)
    session.outbound.clear()
    session.receive(welcome_frames(epoch=8), 1.2)
    kinds = [decode(frames, TO_BROKER).kind for frames in session.outbound]
    assert kinds == [Type.HEARTBEAT]


def test_batch_of_an_earlier_connection_is_not_taken():
    session = live_session()
    session.receive(welcome_frames(epoch=8), 1.2)
    session.receive(batch_frames(1, payloads=[b"a"]), 1.3)
    assert not session.ready
    session.receive(encode(Type.WHO_ARE_YOU), 1.4)
    session.receive(batch_frames(1, payloads=[b"a"], epoch=8), 1.5)
    assert session.start() is None


# -- connections that break -----------------------------------------------------------------------


@pytest.mark.parametrize("notices", [True, False], ids=["new socket", "zmq reconnects"])
def test_result_lost_on_the_way_is_sent_again(net, notices):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    producer.submit(4)
    net.until(lambda: worker.running is not None)
    net.step()
    worker.cut()
    net.until(lambda: worker.running is None)
    net.step(2)
    assert not producer.results
    worker.open() if notices else worker.wire()
    net.until(lambda: len(producer.results) == 4)
    net.check(producer, 4)
    assert worker.ran == [b"item 1", b"item 2", b"item 3", b"item 4"]
    assert not attempts(net)
    net.step(20)
    assert worker.session._held == {}


def test_acknowledgement_lost_on_the_way_makes_duplicates_only(net):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    producer.submit(4)
    net.until(lambda: worker.running is not None)
    net.step()
    worker.stuck_down = True
    net.until(lambda: len(producer.results) == 4)
    worker.stuck_down = False
    worker.open()
    net.step(20)
    net.check(producer, 4)
    assert net.status()["duplicates_total"] == 4
    assert worker.session._held == {}


def test_batch_that_was_not_started_is_dropped_by_a_reconnect_and_run_once(net):
    worker, producer = net.add(Hand(net, run_s=2.0)), net.add(Producer(net))
    producer.submit(8)
    net.until(lambda: worker.session.ready)
    worker.open()
    net.until(lambda: len(producer.results) == 8)
    net.check(producer, 8)
    assert Counter(worker.ran) == Counter(b"item %d" % k for k in range(1, 9))


@pytest.mark.parametrize("heard", [True, False], ids=["STARTED arrived", "STARTED was lost"])
def test_engine_that_dies_while_the_link_is_down_is_charged_once(net, heard):
    worker, producer = net.add(Hand(net, run_s=1.0)), net.add(Producer(net))
    producer.submit(4)
    net.until(lambda: worker.running is not None)
    net.step(2 if heard else 0)
    worker.cut()
    net.step(2)
    worker.die()
    worker.hold = True
    net.step(3)
    worker.open()
    net.step(3)
    assert attempts(net) == [1, 1, 1, 1]
    assert counters(net)["returned_engine_exit"] == 4
    net.step(10)
    assert all(h.phase != "returned" for h in worker.session._held.values()), "REVOKE confirms"
    worker.hold = False
    net.until(lambda: len(producer.results) == 4)
    net.check(producer, 4)


def test_returned_that_was_heard_is_not_charged_twice_after_a_cut(net):
    worker, producer = net.add(Hand(net, run_s=1.0)), net.add(Producer(net))
    producer.submit(4)
    net.until(lambda: worker.running is not None)
    net.step(2)
    worker.hold = True
    worker.die()
    worker.stuck_down = True
    net.step(2)
    assert attempts(net) == [1, 1, 1, 1]
    worker.stuck_down = False
    worker.open()
    net.step(10)
    assert attempts(net) == [1, 1, 1, 1]
    worker.hold = False
    net.until(lambda: len(producer.results) == 4)
    net.check(producer, 4)


def test_poison_is_dead_at_the_limit_and_its_neighbours_finish(net):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    producer.submit(8)
    while len(producer.results) < 8:
        if worker.running is not None and b"item 3" in worker.running[1].payloads:
            net.step()
            worker.die()
        net.step()
        assert net.now < 1_060
    net.check(producer, 8, dead=[3])


def test_silent_broker_is_left_and_found_again(net):
    worker, producer = net.add(Hand(net)), net.add(Producer(net))
    producer.submit(4)
    worker.hold = True
    net.step(10)
    before = worker.routing_id
    worker.stuck_down = worker.stuck_up = True
    net.step(int(SILENT_S / STEP_S) - 10)
    assert worker.routing_id == before
    net.step(20)
    assert worker.routing_id != before
    worker.stuck_down = worker.stuck_up = worker.hold = False
    net.until(lambda: len(producer.results) == 4)
    net.check(producer, 4)


def test_worker_silent_for_a_little_over_its_lease_is_served_again(net):
    worker, producer = net.add(Hand(net, run_s=10.0)), net.add(Producer(net))
    producer.submit(4)
    net.until(lambda: worker.running is not None)
    net.step(2)
    worker.frozen = True
    net.step(int(1.2 * LEASE_S / STEP_S))
    assert net.broker.fabric.workers["w"].peer is None
    worker.frozen = False
    worker.session.shift(1.2 * LEASE_S, net.now)
    net.until(lambda: len(producer.results) == 4)
    producer.submit(4)
    net.until(lambda: len(producer.results) == 8)
    net.check(producer, 8)


@pytest.mark.parametrize("rescued", [True, False])
def test_worker_stopped_for_long_comes_back_with_its_result(net, rescued):
    worker, producer = net.add(Hand(net, "slow", run_s=1.0)), net.add(Producer(net))
    producer.submit(4)
    net.until(lambda: worker.running is not None)
    net.step(2)
    worker.frozen = True
    net.step(150)
    assert attempts(net) == [1, 1, 1, 1]
    if rescued:
        net.add(Hand(net, "other"))
        net.until(lambda: len(producer.results) == 4)
    worker.frozen = False
    worker.session.shift(15.0, net.now)
    worker.wire()
    net.until(lambda: len(producer.results) == 4)
    net.step(20)
    net.check(producer, 4)
    assert worker.session._held == {}
    assert net.status()["duplicates_total"] == (4 if rescued else 0)


def test_batch_that_waited_through_a_long_stop_is_not_run_by_two(net):
    worker, producer = net.add(Hand(net, "slow", run_s=1.0)), net.add(Producer(net))
    producer.submit(8)
    net.until(lambda: worker.session.ready)
    net.step(2)
    worker.frozen = True
    net.add(Hand(net, "other"))
    net.until(lambda: len(producer.results) == 8)
    worker.frozen = False
    worker.session.shift(15.0, net.now)
    net.step(20)
    assert len(worker.ran) == 4
    net.check(producer, 8)


def test_task_of_three_leases_runs_once(net):
    worker, producer = net.add(Hand(net, run_s=3 * LEASE_S)), net.add(Producer(net))
    net.add(Hand(net, "other", serving=False))
    producer.submit(4)
    net.until(lambda: len(producer.results) == 4)
    net.check(producer, 4)
    assert len(worker.ran) == 4
    assert net.status()["redeliveries_total"] == 0


def test_process_started_anew_under_its_name_charges_what_the_old_one_had_started(net):
    worker, producer = net.add(Hand(net, run_s=5.0)), net.add(Producer(net))
    producer.submit(8)
    net.until(lambda: worker.session.ready)
    net.step(2)
    worker.cut()
    net.everyone.remove(worker)
    fresh = net.add(Hand(net))
    net.until(lambda: fresh.session.state == LIVE)
    assert attempts(net) == [1, 1, 1, 1]
    net.until(lambda: len(producer.results) == 8)
    net.check(producer, 8)


# -- another broker -------------------------------------------------------------------------------


def restarted(net):
    """A worker that runs one batch and has one ready, and a broker that knows of neither."""
    worker, producer = net.add(Hand(net, run_s=2.0)), net.add(Producer(net))
    producer.submit(8)
    net.until(lambda: worker.session.ready)
    net.step(2)
    net.everyone.remove(producer)
    net.boot()
    worker.open()
    return worker


def test_new_broker_gets_the_running_batch_by_its_references(net):
    worker = restarted(net)
    # The same random numbers make the same segment: as if the store had been on disk.
    producer = net.add(Producer(net, "q"))
    producer.submit(8)
    net.until(lambda: len(producer.results) == 8)
    net.check(producer, 8)
    assert worker.welcomes == 2
    net.step(20)
    assert worker.session._held == {}


def test_new_broker_that_uses_the_same_batch_id_is_not_confused(net):
    worker = restarted(net)
    (running,) = [h for h in worker.session._held.values() if h.phase == "running"]
    net.until(lambda: worker.session.state == LIVE)
    assert [h.phase for h in worker.session._held.values()] == ["running"]
    session = worker.session
    session.welcome = {**session.welcome, "epoch": running.id[0]}
    session.receive(batch_frames(1, payloads=[b"new"], epoch=running.id[0]), net.now)
    session.receive(encode(Type.REVOKE, {"epoch": running.id[0], "n": 1}, [b""]), net.now)
    assert [h.serial for h in session._held.values()] == [running.serial]
    assert not running.revoked
    session.outbound.clear()
    session.give_back(running.serial, "engine_exit", "killed by SIGKILL")
    session.tick(net.now)
    assert not session.outbound, "its own broker is gone: nobody to tell"
    assert session.settled


def test_goodbye_of_the_broker_leads_to_a_new_connection(net):
    worker = net.add(Hand(net))
    net.step(5)
    net.broker.farewell("the broker ends")
    net.deliver()
    worker.take()
    net.boot()
    worker.open()
    net.step(5)
    assert worker.welcomes == 2
    assert worker.session.state == LIVE


# -- refusals -------------------------------------------------------------------------------------


def test_name_in_use_is_tried_again_until_the_holder_is_gone(net):
    first = net.add(Hand(net))
    net.step(5)
    second = net.add(Hand(net))
    net.step(20)
    assert second.session.state == GREETING
    assert second.fatal is None
    assert 3 <= len(second.errors) <= 5
    assert {code for code, _ in second.errors} == {"name_in_use"}
    first.cut()
    first.frozen = True
    net.step(15)
    assert second.session.state == LIVE


class Nonsense:
    """A contract that the class of that name would not let through."""

    batch_items_max, batch_tokens_max, input_tokens_max, ragged = 0, -5, 2**40, False


@pytest.mark.parametrize(
    ("contract", "code"),
    [(Nonsense, "bad_contract"), (Contract(4, 4_096, 511), "input_max_differs")],
)
def test_contract_that_cannot_be_served_is_final(net, contract, code):
    net.add(Hand(net, "first"))
    net.step(3)
    second = net.add(Hand(net, "second", contract=contract))
    net.step(3)
    assert second.fatal[0] == code
    assert "max" in second.fatal[1]


def test_wrong_endpoint_and_wrong_version_are_final(net):
    stray = Hand(net)
    stray.cut()
    stray.endpoint = PRODUCERS
    stray.open()
    net.add(stray)
    net.step(2)
    assert stray.fatal[0] == "wrong_endpoint"
    session = live_session()
    text = f"this side speaks {VERSION + 1}"
    news = session.receive(encode(Type.ERROR, {"code": "version_mismatch", "text": text}), 2.0)
    assert news.fatal == ("version_mismatch", text)


def test_refusal_of_one_message_ends_nothing():
    session = live_session()
    news = session.receive(encode(Type.ERROR, {"code": "malformed", "text": "no"}), 2.0)
    assert (news.errors, news.fatal, session.state) == ([("malformed", "no")], None, LIVE)


@pytest.mark.parametrize(
    "change",
    [
        {"shapes": None},
        {"shapes": [{}]},
        {"shapes": [{"components": b"x", "tokens": []}]},
        {"shapes": [{"components": b"", "tokens": [1]}]},
        {"shapes": []},
        {"pad_to": 4},
    ],
)
def test_batch_that_contradicts_itself_is_refused_and_changes_nothing(change):
    session = live_session()
    with pytest.raises(PeerError):
        session.receive(batch_frames(1, lengths=[8], **change), 1.0)
    assert session._held == {}
    assert session.settled


# -- leaving --------------------------------------------------------------------------------------


def test_draining_worker_finishes_what_runs_and_returns_the_rest(net):
    worker, producer = net.add(Hand(net, run_s=2.0)), net.add(Producer(net))
    producer.submit(12)
    net.until(lambda: worker.session.ready)
    worker.session.drain()
    net.step(3)
    assert not worker.session.settled
    assert counters(net)["returned_leaving"] == 4
    net.until(lambda: worker.session.settled)
    worker.session.leave("done")
    worker.send()
    assert worker.session.state == CLOSED
    assert len(producer.results) in (0, 4)
    net.everyone.remove(worker)
    net.add(Hand(net, "other"))
    net.until(lambda: len(producer.results) == 12)
    net.check(producer, 12)
    assert len(worker.ran) == 4
    assert not attempts(net)


def test_worker_that_leaves_at_once_returns_what_runs_and_nobody_waits_for_a_lease(net):
    worker, producer = net.add(Hand(net, run_s=60.0)), net.add(Producer(net))
    producer.submit(8)
    net.until(lambda: worker.session.ready)
    net.step(2)
    worker.session.leave("stopped")
    worker.send()
    net.everyone.remove(worker)
    assert not net.broker.fabric.pending.items
    net.add(Hand(net, "other"))
    net.until(lambda: len(producer.results) == 8, limit_s=3.0)
    net.check(producer, 8)


def test_batch_that_arrives_while_leaving_goes_back(net):
    session = live_session()
    session.drain()
    session.tick(1.1)
    session.outbound.clear()
    session.receive(batch_frames(1, payloads=[b"a"]), 1.2)
    session.tick(1.3)
    (frames,) = session.outbound
    returned = decode(frames, TO_BROKER)
    assert (returned.kind, returned.fields["kind"]) == (Type.RETURNED, "leaving")
    assert session.settled


# -- everything at once ---------------------------------------------------------------------------


TROUBLES = ["step", "step", "cut", "wire", "open", "freeze", "stick", "die", "anew"]


def trouble(net, kind, workers, k):
    worker = workers[k % len(workers)]
    if kind == "cut":
        worker.cut()
    elif kind == "wire":
        worker.wire()
    elif kind == "open":
        worker.open()
    elif kind == "freeze":
        worker.frozen = not worker.frozen
    elif kind == "stick":
        worker.stuck_up, worker.stuck_down = k % 3 == 0, k % 2 == 0
    elif kind == "die":
        worker.die()
    elif kind == "anew":
        worker.cut()
        net.everyone.remove(worker)
        workers[k % len(workers)] = net.add(Hand(net, f"w{k % len(workers)}"))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    plan=st.lists(
        st.tuples(st.sampled_from(TROUBLES), st.integers(0, 100), st.integers(1, 25)), max_size=30
    ),
)
def test_whatever_breaks_every_item_ends_once(seed, plan):
    net = Net(seed, attempts_max=1_000)
    workers = [net.add(Hand(net, f"w{k}", run_s=0.3 + 0.4 * k, partial=k > 1)) for k in range(3)]
    producer = net.add(Producer(net))
    producer.submit(60)
    for kind, k, steps in plan:
        trouble(net, kind, workers, k)
        net.step(steps)
    for worker in workers:
        worker.frozen = worker.stuck_up = worker.stuck_down = False
        worker.session.shift(100.0, net.now)
        if not worker.connected:
            worker.wire()
    net.until(lambda: len(producer.results) == 60, limit_s=120.0)
    net.step(20)
    net.check(producer, 60)
    for worker in workers:
        assert worker.session._held == {}
        assert worker.fatal is None


# -- by hand --------------------------------------------------------------------------------------


def welcome_frames(epoch=7, boot=5):
    return encode(
        Type.WELCOME, {"boot": boot, "epoch": epoch, "store": 1, "heartbeat_s": HEARTBEAT_S}
    )


def live_session(contract=CONTRACT):
    session = WorkerSession("w", 1, model="m", contract=contract)
    session.serve(True, {})
    session.open(0.0)
    assert session.receive(welcome_frames(), 0.5).welcomed
    session.outbound.clear()
    return session


def batch_frames(n, *, epoch=7, payloads=None, lengths=None, pad_to=None, **change):
    payloads = payloads or [b"p"] * len(lengths)
    lengths = lengths or [8] * len(payloads)
    shape = {"components": packed("Q", SHAPE.components), "tokens": list(SHAPE.tokens)}
    fields = {"epoch": epoch, "n": n, "model": "m", "shapes": [shape]} | change
    if pad_to is not None:
        fields["pad_to"] = pad_to
    columns = [
        packed("Q", [9] * len(payloads)),
        packed("I", range(len(payloads))),
        packed("I", lengths),
        packed("I", map(len, payloads)),
        b"",
    ]
    return encode(Type.BATCH, fields, columns, b"".join(payloads))
