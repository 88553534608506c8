"""A producer's session joined to a real dispatcher by lists of frames: cuts, refusals, restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import Bench
from zfabric.config import BrokerConfig
from zfabric.outgoing import MESSAGE_ITEMS
from zfabric.protocol import FRAME_SLACK_BYTES, TO_BROKER, Status, Type, decode, encode
from zfabric.session import MESSAGES_IN_FLIGHT_MAX, SILENT_S, Arrival, Session
from zfabric.shapes import Shape

SHAPE = Shape.of("m", "a")


class Joined:
    """A session and a bench, and the wire between them, which can be cut."""

    def __init__(self, **config: Any) -> None:
        self.bench = Bench(**config)
        self.session = Session("job", instance=42)
        self.results: Counter[int] = Counter()
        self.refused: list[Arrival] = []
        # how often each number was sent
        self.sent: Counter[int] = Counter()
        self.lost = 0
        self.routing_id = b""
        self.connect()

    def connect(self) -> None:
        self.routing_id = self.bench.new_id()
        self.bench.ends["producers", self.routing_id] = self
        self.session.open(self.bench.now)
        self.exchange()

    def exchange(self, *, to_broker: bool = True, to_client: bool = True) -> None:
        """Carry everything both ways until there is nothing left; what is not carried is lost."""
        for _ in range(200):
            moved = False
            while self.session.outbound:
                frames = self.session.outbound.popleft()
                moved = True
                if frames[0][3] == Type.SUBMIT:
                    self.sent.update(decode(frames, TO_BROKER).columns["numbers"])
                if to_broker:
                    self.bench.to_broker("producers", self.routing_id, frames)
            self.bench.dispatcher.flush(self.bench.now)
            while self.bench.dispatcher.outgoing:
                parcel = self.bench.dispatcher.outgoing.popleft()
                moved = True
                end = self.bench.ends.get((parcel.endpoint, parcel.routing_id))
                if end is None:
                    self.bench.dispatcher.unreachable(*parcel[:2], "cut", self.bench.now)
                elif end is not self or to_client:
                    end.hear(parcel.frames)
            if not moved:
                return

    def hear(self, frames: list[bytes]) -> None:
        news = self.session.receive(frames, self.bench.now)
        self.lost += news.lost
        self.refused += news.refused
        self.results.update(arrival.number for arrival in news.arrivals)
        if news.seq:
            self.session.acknowledge(news.seq)

    def wait(self, seconds: float) -> None:
        self.bench.now += seconds
        news = self.session.tick(self.bench.now)
        if news.reconnect:
            self.connect()
        self.exchange()
        self.bench.dispatcher.tick(self.bench.now, 0.0, drained=True)
        self.exchange()

    def add(self, count: int, length: int = 10) -> Sequence[int]:
        numbers = self.session.add([SHAPE] * count, [length] * count, [b"p"] * count)
        self.session.pump()
        return numbers

    def run_all(self) -> None:
        worker = self.bench.worker(f"w{self.bench.now}", batch=64, tokens=64_000)
        for _ in range(400):
            self.wait(0.3)
            worker.heartbeat()
            self.bench.dispatch()
            for key in list(worker.batches):
                worker.done(key)
            self.exchange()
        worker.cut()
        self.bench.tick(60.0)


def test_items_are_accepted_and_their_results_come_once() -> None:
    joined = Joined()
    joined.add(3_000)
    joined.exchange()
    assert joined.session.unaccepted_items == 0
    joined.run_all()
    assert joined.results == Counter(range(1, 3_001))
    assert len(joined.bench.fabric.producers[0].outbox) == 0


def test_what_is_lost_on_the_way_is_sent_again_after_who_are_you() -> None:
    joined = Joined()
    joined.add(10)
    joined.exchange()
    joined.add(10)
    joined.exchange(to_broker=False)
    joined.bench.ends.pop(("producers", joined.routing_id))
    joined.routing_id = joined.bench.new_id()
    joined.bench.ends["producers", joined.routing_id] = joined
    joined.wait(1.1)
    assert joined.session.state == "live"
    assert joined.session.upto == 20
    assert joined.bench.status()["accepted_items"] == 20


def test_silent_broker_is_left_and_found_again() -> None:
    joined = Joined()
    joined.bench.now += SILENT_S + 0.1
    assert joined.session.tick(joined.bench.now).reconnect
    joined.connect()
    assert joined.session.state == "live"


def test_own_lateness_is_not_the_brokers_silence() -> None:
    joined = Joined()
    joined.bench.now += 30.0
    joined.session.shift(30.0)
    assert not joined.session.tick(joined.bench.now).reconnect


def test_refused_items_are_sent_again_in_order_when_there_is_room() -> None:
    joined = Joined(producer_items_max=50)
    joined.add(120)
    joined.exchange()
    assert joined.session.upto == 50
    assert joined.session.last_refusal is not None
    assert joined.session.last_refusal[0] == "outbox_full"
    joined.run_all()
    assert joined.results == Counter(range(1, 121))


def test_retries_of_a_refusal_back_off() -> None:
    joined = Joined(producer_items_max=1)
    joined.add(2)
    joined.exchange()
    submits = 0
    for _ in range(100):
        joined.bench.now += 0.05
        joined.session.tick(joined.bench.now)
        submits += sum(f[0][3] == Type.SUBMIT for f in joined.session.outbound)
        joined.exchange()
    assert 3 <= submits <= 12


def test_memory_broker_that_came_back_empty_is_told_as_lost() -> None:
    joined = Joined()
    joined.add(10)
    joined.exchange()
    joined.bench.start_broker(boot=8)
    joined.add(5)
    joined.wait(1.1)
    assert joined.lost == 1
    assert joined.bench.status()["accepted_items"] == 5
    joined.run_all()
    assert joined.results == Counter(range(11, 16))


def test_process_that_died_adopts_its_results() -> None:
    joined = Joined()
    joined.add(10)
    joined.exchange()
    heir = Joined.__new__(Joined)
    heir.bench, heir.session = joined.bench, Session("job", instance=43)
    heir.results, heir.lost = Counter(), 0
    heir.refused, heir.sent = [], Counter()
    joined.bench.ends.pop(("producers", joined.routing_id))
    heir.connect()
    heir.wait(0.6)
    assert heir.session.next_number == 11
    heir.run_all()
    assert heir.results == Counter(range(1, 11))


def test_messages_ahead_of_the_brokers_answer_are_bounded() -> None:
    joined = Joined()
    for _ in range(3 * MESSAGES_IN_FLIGHT_MAX):
        joined.add(1)
    assert len([f for f in joined.session.outbound if f[0][3] == Type.SUBMIT]) == (
        MESSAGES_IN_FLIGHT_MAX
    )


def test_more_is_withdrawn_when_nothing_more_comes() -> None:
    joined = Joined()
    joined.session.more = True
    joined.add(5)
    joined.exchange()
    assert joined.bench.fabric.producers[0].more
    joined.session.more = False
    joined.session.pump()
    joined.exchange()
    assert not joined.bench.fabric.producers[0].more


def test_numbers_must_ascend() -> None:
    session = Session("job", 1)
    session.add([SHAPE] * 2, [1, 1], [b"", b""], [5, 9])
    for numbers in ([9, 10], [12, 11], [2**63, 2**63 + 1]):
        with pytest.raises(ValueError, match="ascend"):
            session.add([SHAPE] * 2, [1, 1], [b"", b""], numbers)


def test_equal_shapes_have_one_id_whichever_object_says_so() -> None:
    session = Session("job", 1)
    session.open(0.0)
    session.receive(encode(Type.WELCOME, {"boot": 1, "epoch": 1, "store": 1}), 0.0)
    session.outbound.clear()
    shapes = [Shape.of("m", "a"), Shape.of("m", "b"), Shape.of("m", "a"), Shape.of("n", "a")]
    for _ in range(2):
        session.add(shapes, [1] * 4, [b""] * 4)
    session.pump()
    said = [decode(frames, TO_BROKER) for frames in session.outbound]
    assert [message.kind for message in said] == [*[Type.SHAPE] * 3, Type.SUBMIT, Type.SUBMIT]
    assert [list(message.columns["shapes"]) for message in said[3:]] == [[0, 1, 0, 2]] * 2


STEPS = st.sampled_from(["add", "wait", "cut", "lose", "deaf", "run", "silence"])


@settings(max_examples=60, deadline=None)
@given(script=st.lists(st.tuples(STEPS, st.integers(1, 40)), min_size=3, max_size=30))
def test_whatever_the_link_does_each_item_has_one_result(script: list[tuple[str, int]]) -> None:
    joined = Joined(producer_items_max=60)
    wanted: list[int] = []
    for step, size in script:
        if step == "add":
            wanted += joined.add(size)
        elif step == "wait":
            joined.wait(size / 10)
        elif step == "cut":
            joined.bench.ends.pop(("producers", joined.routing_id), None)
            joined.connect()
        elif step == "lose":
            joined.exchange(to_broker=False)
            joined.bench.ends.pop(("producers", joined.routing_id), None)
            joined.routing_id = joined.bench.new_id()
            joined.bench.ends["producers", joined.routing_id] = joined
        elif step == "deaf":
            joined.exchange(to_client=False)
        elif step == "silence":
            joined.bench.now += 7.0
            joined.session.tick(joined.bench.now)
            joined.connect()
        else:
            worker = joined.bench.worker(f"x{len(wanted)}-{joined.bench.now}", batch=16)
            joined.bench.dispatch(2)
            for key in list(worker.batches):
                worker.done(key)
            joined.exchange()
            worker.cut()
    joined.wait(20.0)
    joined.connect()
    joined.run_all()
    assert joined.results == Counter(wanted)
    assert joined.bench.status()["residual_items"] == 0
    assert set(Status) >= {Status.OK}


# -- limits of a broker ---------------------------------------------------------------------------


def frame_sizes(joined: Joined) -> list[int]:
    return [len(frame) for frames in joined.session.outbound for frame in frames]


def test_messages_are_cut_to_what_the_broker_takes() -> None:
    joined = Joined(payload_bytes_max=100_000)
    payloads = [b"x" * 1_000] * 2_000 + [b"y" * 100_000] * 3
    joined.session.add([SHAPE] * len(payloads), [10] * len(payloads), payloads)
    joined.session.pump()
    assert max(frame_sizes(joined)) <= 100_000 + FRAME_SLACK_BYTES
    joined.exchange()
    assert joined.session.upto == len(payloads)
    assert 8 * MESSAGE_ITEMS <= FRAME_SLACK_BYTES, "columns fit whatever the limit is"


def test_what_is_queued_is_cut_anew_for_a_broker_of_a_smaller_limit() -> None:
    joined = Joined()
    sizes = [30_000, 900_000, 70_000, 2_000_000, 70_000, 5]
    shapes = [Shape.of("m", str(k)) for k in range(len(sizes))]
    joined.session.add(shapes, [10] * len(sizes), [b"x" * size for size in sizes])
    joined.session.add([SHAPE] * 2, [10, 10], [b"x", b"z" * 500_000])
    joined.bench.config = BrokerConfig(memory=True, payload_bytes_max=80_000)
    joined.bench.start_broker(boot=8)
    joined.session.open(joined.bench.now)
    joined.refused.clear()
    joined.exchange()
    assert [arrival.number for arrival in joined.refused] == [2, 4, 8]
    assert {arrival.status for arrival in joined.refused} == {Status.REFUSED}
    assert b"at most 80000" in joined.refused[0].payload
    assert (joined.session.upto, joined.session.settled_upto) == (7, 8)
    assert joined.session.unaccepted_items == 0
    joined.add(1)
    joined.exchange()
    joined.run_all()
    assert joined.results == Counter([1, 3, 5, 6, 7, 9])


def test_a_small_buffer_is_as_fast_as_its_results_and_sends_little_twice() -> None:
    joined = Joined(producer_items_max=10)
    sent = joined.sent
    joined.add(3_000)
    joined.exchange()
    first = sent.total()
    worker = joined.bench.worker("w", batch=8)
    for _ in range(1_500):
        joined.bench.dispatch()
        for key in list(worker.batches):
            worker.done(key)
        joined.exchange()
        if joined.session.upto == 3_000:
            break
    assert joined.session.upto == 3_000, "without the clock going on"
    assert sent.total() - first <= 3_000, "only what the refusal named, and only as there was room"


def test_a_refusal_that_was_made_good_since_is_not_a_refusal() -> None:
    session = Session("job", 1)
    session.open(0.0)
    session.receive(encode(Type.WELCOME, {"boot": 1, "epoch": 1, "store": 1}), 0.0)
    session.add([SHAPE] * 5, [1] * 5, [b""] * 5)
    session.pump()
    late = {"upto": 5, "from": 3, "code": "gap", "text": ""}
    session.receive(encode(Type.ACCEPTED, late), 0.0)
    session.outbound.clear()
    session.add([SHAPE], [1], [b""])
    session.pump()
    assert [frames[0][3] for frames in session.outbound] == [Type.SUBMIT]


def test_a_draining_broker_is_not_asked_again_with_every_result() -> None:
    joined = Joined()
    joined.add(20)
    joined.exchange()
    joined.bench.dispatcher.drain(joined.bench.now)
    joined.add(5)
    joined.exchange()
    before = joined.sent.total()
    worker = joined.bench.worker("w", batch=1)
    joined.bench.dispatch()
    for key in list(worker.batches):
        worker.done(key)
    joined.exchange()
    assert joined.sent.total() == before


def test_hello_refused_by_a_full_disk_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    full = [True]
    monkeypatch.setattr("zfabric.store.Store.unwritten", property(lambda store: full[0]))
    joined = Joined()
    assert joined.session.state == "greeting"
    joined.wait(1.1)
    assert joined.session.state == "greeting"
    full.clear()
    full.append(False)
    joined.wait(1.1)
    assert joined.session.state == "live"
