"""The producer's SDK: `Client` submits items and gets results; one background thread does the I/O.

The thread owns the socket and moves frames between it and a `Session`, which holds every rule of
the conversation. Callers touch the session under one lock and are woken through futures. Times are
seconds, lengths tokens, sizes bytes. A lost connection is repaired without the caller: accepted
items are safe with the broker, and what was not accepted is sent again.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from zfabric.connection import Connection, Key
from zfabric.errors import Backpressure, ConnectError, Lost, Refused, TimeoutExpired
from zfabric.outgoing import sending_order
from zfabric.results import (
    Item,
    Reorder,
    Result,
    Results,
    Sink,
    end_sink,
    status_name,
    window_items,
    windows,
)
from zfabric.session import Arrival, News
from zfabric.waiting import drain_aloud, mapped
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.batchoptions import Summary

# Items that go together wait this long for room for all of them.
ROOM_S = 1.0
# Results that nobody in this process asked for (their producer died and came back) that are kept.
UNCLAIMED_MAX = 10_000


class Client(Connection):
    """A connection to a broker, as one named producer. Usable from several threads.

    Raises, when made: ConnectError if no broker answers within `timeout_s`, NameInUse if another
    live client holds the name, VersionMismatch if the broker speaks another protocol version.
    `key` is the file of the key to connect with (ZFABRIC_KEY); NotAllowed says that it is refused.
    Without `patient` a broker that is not there yet is not waited for.
    `buffer_items` bounds the items that are open (submitted, no result yet) at any time.

    Leaving `with Client(...)` waits until every submitted item has its result, however long that
    takes, as executors do; after 5 s the logger "zfabric" is told why. Leaving by an exception, or
    by `close`, does not wait. A client belongs to the process that made it: after a fork the child
    needs one of its own. Callbacks of futures run in the client's thread, where nothing can wait:
    what submits, asks or drains raises FabricError there.
    """

    def __init__(
        self,
        broker: str | None = None,
        *,
        name: str | None = None,
        timeout_s: float = 10.0,
        buffer_items: int = 1_000_000,
        role: str = "producer",
        key: Key = None,
        patient: bool = True,
        on_results: Callable[[list[Arrival], int], None] | None = None,
    ) -> None:
        self.buffer_items = buffer_items
        self._on_results = on_results
        # sink, custom_id and model of each item that has no result yet
        self._open: dict[int, tuple[Sink, str | None, str]] = {}
        self._awaiting: deque[tuple[int, Future[None]]] = deque()
        self._room: deque[tuple[int, Future[None]]] = deque()
        self._unclaimed: OrderedDict[int, Result] = OrderedDict()
        self._last_seq = 0
        self._streams = 0
        super().__init__(
            broker, name=name, timeout_s=timeout_s, role=role, key=key, patient=patient
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                drain_aloud(self)
        finally:
            self.close()

    # -- submitting ---------------------------------------------------------------------------

    def submit(self, item: Item, timeout: float | None = None) -> Future[Result]:
        """Submit one item; returns once the broker has it, so that nothing is lost from then on.

        The future gives a Result, or raises ItemFailed where there is no completion and Lost
        where the broker came back with another store. Raises Backpressure when there was no room
        for `timeout` seconds, TimeoutExpired when the item was sent but not yet accepted by then
        (it may still be), Refused when it is too large.
        """
        until = None if timeout is None else time.monotonic() + timeout
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        accepted = self.enqueue_waiting([item], future, until)
        try:
            accepted.result(None if until is None else max(0.0, until - time.monotonic()))
        except TimeoutError:
            if accepted.done():
                raise
            why = self._session.last_refusal
            if why is not None:
                raise Backpressure(
                    f"the broker takes nothing for now: {why[0]}: {why[1]}"
                ) from None
            raise TimeoutExpired(f"not accepted within {timeout} s; it may still be") from None
        return future

    def submit_many(self, items: Iterable[Item], timeout: float | None = None) -> Results:
        """Submit many items, pipelined; returns their results-to-be once all are accepted.

        `timeout` bounds, in seconds, each wait for room and for acceptance.
        """
        results = Results()
        accepted: Future[None] | None = None
        with self.stream():
            for window in windows(items, window_items(self.buffer_items)):
                until = None if timeout is None else time.monotonic() + timeout
                accepted = self.enqueue_waiting(window, results, until)
        if accepted is not None:
            try:
                accepted.result(timeout)
            except TimeoutError:
                raise TimeoutExpired(f"not all items were accepted within {timeout} s") from None
        return results

    def map(
        self,
        items: Iterable[Item],
        *,
        buffersize: int = 10_000,
        ordered: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Result]:
        """Results of `items`, submitted as they are taken, at most `buffersize` open at a time.

        In the order in which they end, or of `items` where `ordered`. Raises TimeoutExpired when
        nothing comes for `timeout` seconds. An item that fails is a Result that says so.
        """
        if buffersize < 1:
            raise ValueError("buffersize must be at least 1")
        return mapped(self, iter(items), buffersize, ordered, timeout)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """While this is open, submits say that more is to come."""
        self._check_process()
        with self._lock:
            self._streams += 1
            self._session.more = True
        try:
            yield
        finally:
            self._stream_changed(-1)

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """While a stream waits for results or room it cannot submit: nothing more comes of it."""
        self._stream_changed(-1)
        try:
            yield
        finally:
            with self._lock:
                self._streams += 1
                self._session.more = True

    def _stream_changed(self, by: int) -> None:
        with self._lock:
            self._streams += by
            self._session.more = self._streams > 0
            self._session.pump()
        self._link.wake()

    def enqueue_waiting(
        self, items: Sequence[Item], sink: Sink, until: float | None, order: Reorder | None = None
    ) -> Future[None]:
        """Queue items as soon as there is room; see `enqueue`. Raises Backpressure at `until`.

        Where there is none for all of them for ROOM_S, what fits goes first: others may take each
        place that is free, or never give back what they have. The time then begins anew.
        """
        self._check_caller()
        allowed_s = math.inf if until is None else until - time.monotonic()
        while (accepted := self.enqueue(items, sink, order)) is None:
            left_s = math.inf if until is None else until - time.monotonic()
            room = self.room(len(items))
            waiting = self.blocked() if self._streams else contextlib.nullcontext()
            try:
                with waiting:
                    room.result(max(0.0, min(left_s, ROOM_S)))
            except TimeoutError:
                self.leave(room)
                rest = self.enqueue_part(items, sink, order, last=left_s <= ROOM_S)
                if len(rest) < len(items) and until is not None:
                    until = time.monotonic() + allowed_s
                items = rest
        return accepted

    def enqueue_part(
        self, items: Sequence[Item], sink: Sink, order: Reorder | None, *, last: bool
    ) -> Sequence[Item]:
        """Queue as many of `items` as there is room for; returns the others, one at least.

        Raises Backpressure where there is no room and this was the `last` try.
        """
        fits = min(self.buffer_items - len(self._open), len(items) - 1)
        if fits > 0 and self.enqueue(items[:fits], sink, order) is not None:
            return items[fits:]
        if last and self.buffer_items - len(self._open) < len(items):
            raise Backpressure(
                f"{counted(len(self._open), 'open item')}, and the buffer's limit is "
                f"{self.buffer_items}"
            )
        return items

    def enqueue(
        self, items: Sequence[Item], sink: Sink, order: Reorder | None = None
    ) -> Future[None] | None:
        """Queue items without waiting; the future is done when all are accepted, None is no room.

        The building block of everything that submits; most callers want `submit` or `map`. Items
        without numbers of their own are numbered and sent by shape, the longest first.
        """
        self._check_process()
        with self._lock:
            if self._failure is not None or self._closing:
                raise self._failure or ConnectError("this client is closed")
            if max([len(item.payload) for item in items], default=0) > self.payload_bytes_max:
                raise _too_large(items, self.payload_bytes_max)
            if self._open and len(self._open) + len(items) > self.buffer_items:
                return None
            self._add(items, sink, order)
            if isinstance(sink, Results):
                sink.total += len(items)
            accepted: Future[None] = Future()
            accepted.set_running_or_notify_cancel()
            self._awaiting.append((self._session.next_number - 1, accepted))
            self._session.pump()
        self._link.wake()
        return accepted

    def room(self, items: int) -> Future[None]:
        """Done once `enqueue` may find room for `items`."""
        self._check_process()
        room: Future[None] = Future()
        room.set_running_or_notify_cancel()
        with self._lock:
            self._room.append((items, room))
            self._make_room()
        return room

    def leave(self, room: Future[None]) -> None:
        """Nobody waits for this `room` any more: those behind it may have it."""
        with self._lock:
            self._room = deque(waiting for waiting in self._room if waiting[1] is not room)
            self._make_room()

    def _add(self, items: Sequence[Item], sink: Sink, order: Reorder | None) -> None:
        """Have the session send `items`. Raises ValueError for bad numbers."""
        explicit = [item.number for item in items if item.number is not None]
        if explicit and len(explicit) < len(items):
            raise ValueError("give every item of one call a number, or none")
        places: Sequence[int] = range(len(items))
        if not explicit:
            places = sending_order([item.shape for item in items], [item.length for item in items])
        sent = [items[place] for place in places]
        shapes = [item.shape for item in sent]
        numbers = self._session.add(
            shapes,
            [item.length for item in sent],
            [item.payload for item in sent],
            explicit or None,
        )
        # One for all that have no name: a million more objects would be the collector's to look at.
        nameless = {model: (sink, None, model) for model in {shape.model for shape in shapes}}
        entries = [
            nameless[item.shape.model]
            if item.custom_id is None
            else (sink, item.custom_id, item.shape.model)
            for item in sent
        ]
        self._open.update(zip(numbers, entries, strict=True))
        if order is not None:
            number_at = dict(zip(places, numbers, strict=True))
            order.expect(number_at[place] for place in range(len(items)))

    # -- asking -------------------------------------------------------------------------------

    def open_models(self) -> Counter[str]:
        """How many items without a result there are of each model."""
        with self._lock:
            return Counter(model for _, _, model in self._open.values())

    def unclaimed(self) -> list[Result]:
        """Results of this name's earlier life, which nobody in this process submitted.

        Taking them acknowledges them. Untaken ones are kept with the broker, but for the oldest
        when there are more than 10,000.
        """
        self._check_process()
        with self._lock:
            taken = list(self._unclaimed.values())
            self._unclaimed.clear()
            self._session.acknowledge(self._last_seq)
        self._link.wake()
        return taken

    def acknowledge(self, seq: int) -> None:
        """With `on_results`: results up to `seq` are safe with the caller."""
        self._check_process()
        with self._lock:
            # A broker with another store counts anew; what it has not sent cannot be acknowledged.
            self._session.acknowledge(min(seq, self._session._seen_seq))
        self._link.wake()

    def run_batch(
        self, source: str | os.PathLike[str], output: str | os.PathLike[str], **options: Any
    ) -> Summary:
        """Run an OpenAI Batch file through the broker; see `zfabric.batchrun.run_batch`."""
        from zfabric.batchrun import run_batch

        return run_batch(source, output, broker=self.address, key=self.key, **options)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until every submitted item has its result. Raises TimeoutExpired."""
        self._check_caller()
        with self._changed:
            done = self._changed.wait_for(
                lambda: not self._open or self._failure is not None, timeout
            )
            if not done:
                raise TimeoutExpired(f"{counted(len(self._open), 'open item')} after {timeout} s")

    # -- what happened ------------------------------------------------------------------------

    def _act(self, news: News) -> None:
        self._heed(news)
        if news.refused:
            self._refuse(news.refused)
        if news.lost:
            self._lose()
        if news.welcomed or news.accepted:
            self._accepted()
        if news.arrivals or news.seq:
            self._deliver(news)
        self._reply(news)

    def _accepted(self) -> None:
        while self._awaiting and self._awaiting[0][0] <= self._session.settled_upto:
            self._awaiting.popleft()[1].set_result(None)
        self._changed.notify_all()

    def _deliver(self, news: News) -> None:
        if self._on_results is not None:
            for arrival in news.arrivals:
                self._open.pop(arrival.number, None)
            self._on_results(news.arrivals, news.seq)
            self._make_room()
            self._changed.notify_all()
            return
        together: dict[Results, list[Result]] = {}
        first = news.seq - len(news.arrivals) + 1
        for seq, (number, status, payload, retry_of) in enumerate(news.arrivals, first):
            sink, custom_id, _ = self._open.pop(number, (None, None, ""))
            result = Result(number, custom_id, status_name(status), payload, retry_of)
            if sink is None:
                self._unclaimed[seq] = result
            elif isinstance(sink, Results):
                together.setdefault(sink, []).append(result)
            elif (error := result.error) is not None:
                sink.set_exception(error)
            else:
                sink.set_result(result)
        for each, results in together.items():
            each.put(*results)
        self._last_seq = max(self._last_seq, news.seq)
        while len(self._unclaimed) > UNCLAIMED_MAX:
            self._unclaimed.popitem(last=False)
        safe = next(iter(self._unclaimed)) - 1 if self._unclaimed else self._last_seq
        self._session.acknowledge(safe)
        self._make_room()
        self._changed.notify_all()

    def _refuse(self, refused: list[Arrival]) -> None:
        """Items that a broker with a smaller limit than its forerunner's will never take."""
        if self._on_results is not None:
            # They have no sequence number, so there is nothing to acknowledge.
            self._on_results(refused, 0)
        for arrival in refused:
            sink, custom_id, _ = self._open.pop(arrival.number, (None, None, ""))
            name, payload = status_name(arrival.status), arrival.payload
            result = Result(arrival.number, custom_id, name, payload)
            if isinstance(sink, Results):
                if self._on_results is None:
                    sink.put(result)
            elif sink is not None:
                sink.set_exception(Refused(str(result.error)))
        self._make_room()

    def _make_room(self) -> None:
        limit, waiting = self.buffer_items, self._room
        while waiting and (not self._open or len(self._open) + waiting[0][0] <= limit):
            waiting.popleft()[1].set_result(None)

    def _lose(self) -> None:
        """The broker's store is another one: what it had accepted and not answered is gone."""
        kept = self._session.unaccepted_numbers()
        lost = Lost(f"the broker at {self.address} came back with another store")
        for number in [n for n in self._open if n not in kept]:
            sink, _, _ = self._open.pop(number)
            end_sink(sink, lost)
        self._unclaimed.clear()
        self._last_seq = 0
        self._make_room()

    def _ended(self) -> None:
        """The link's thread is over: nothing that is open can still come."""
        with self._lock:
            failure = self._failure = self._failure or ConnectError("this client is closed")
            for sink, _, _ in self._open.values():
                end_sink(sink, failure)
            self._open.clear()
            waiting = [f for _, f in self._awaiting] + [f for _, f in self._room]
            for future in (*waiting, *self._replies.values()):
                if not future.done():
                    future.set_exception(failure)
            self._changed.notify_all()


def _too_large(items: Sequence[Item], bytes_max: int) -> Refused:
    """Which of `items` the broker would not take."""
    item = next(item for item in items if len(item.payload) > bytes_max)
    whose = "" if item.custom_id is None else f" (custom_id {item.custom_id!r})"
    return Refused(f"a payload of {len(item.payload)} bytes{whose}; at most {bytes_max} are taken")
