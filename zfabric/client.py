"""The producer's SDK: `Client` submits items and gets results; one background thread does the I/O.

The thread owns the socket and moves frames between it and a `Session`, which holds every rule of
the conversation. Callers touch the session under one lock and are woken through futures. Times are
seconds, lengths tokens, sizes bytes. A lost connection is repaired without the caller: accepted
items are safe with the broker, and what was not accepted is sent again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from zfabric.addresses import format_address, parse_address
from zfabric.errors import (
    Backpressure,
    ConnectError,
    FabricError,
    Lost,
    NameInUse,
    ProtocolError,
    Refused,
    TimeoutExpired,
    VersionMismatch,
)
from zfabric.link import Link
from zfabric.results import (
    CHUNK_ITEMS,
    Item,
    Reorder,
    Result,
    Results,
    Sink,
    end_sink,
    status_name,
    take_chunk,
)
from zfabric.session import Arrival, News, Session
from zfabric.shapes import check_name

if TYPE_CHECKING:
    from zfabric.batchrun import Summary

DEFAULT_BROKER = "tcp://127.0.0.1:7410"
# Results that nobody in this process asked for (their producer died and came back) that are kept.
UNCLAIMED_MAX = 10_000


class Client:
    """A connection to a broker, as one named producer. Usable from several threads.

    Raises, when made: ConnectError if no broker answers within `timeout_s`, NameInUse if another
    live client holds the name, VersionMismatch if the broker speaks another protocol version.
    `buffer_items` bounds the items that are open (submitted, no result yet) at any time.
    """

    def __init__(
        self,
        broker: str | None = None,
        *,
        name: str | None = None,
        timeout_s: float = 10.0,
        buffer_items: int = 1_000_000,
        role: str = "producer",
        on_results: Callable[[list[Arrival], int], None] | None = None,
    ) -> None:
        host, port = parse_address(broker or os.environ.get("ZFABRIC_BROKER") or DEFAULT_BROKER)
        self.address = format_address(host, port)
        self.name = check_name(name or f"client-{os.getpid()}-{secrets.token_hex(4)}", "name")
        self.buffer_items = buffer_items
        self._session = Session(self.name, secrets.randbits(64), role)
        self._on_results = on_results
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._open: dict[int, tuple[Sink, str | None]] = {}
        self._awaiting: deque[tuple[int, Future[None]]] = deque()
        self._room: deque[tuple[int, Future[None]]] = deque()
        self._replies: dict[int, Future[Any]] = {}
        self._unclaimed: OrderedDict[int, Result] = OrderedDict()
        self._last_seq = 0
        self._streams = 0
        self._failure: FabricError | None = None
        self._closing = False
        self._link = Link(self.address, self._session, self._lock, self._act, self._ended)
        self._link.start()
        self._await_welcome(timeout_s)

    def _await_welcome(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._session.state == "live" or self._failure is not None, timeout_s
            )
            if self._session.state == "live" and self._failure is None:
                return
            failure = self._failure
            taken = self._session.last_refusal
        self.close(timeout_s=1.0)
        if failure is not None:
            raise failure
        if taken is not None and taken[0] == "name_in_use":
            raise NameInUse(f"{taken[1]} at {self.address}; choose another name")
        raise ConnectError(
            f"no broker answered at {self.address} within {timeout_s:g} s; start one with "
            "`zfabric broker`, or name another with --broker or ZFABRIC_BROKER"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.drain()
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
        accepted = self._enqueue_waiting([item], future, until)
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
            source = iter(items)
            while chunk := list(islice(source, CHUNK_ITEMS)):
                until = None if timeout is None else time.monotonic() + timeout
                accepted = self._enqueue_waiting(chunk, results, until)
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
        return self._map(iter(items), buffersize, ordered, timeout)

    def _map(
        self, source: Iterator[Item], buffersize: int, ordered: bool, timeout: float | None
    ) -> Iterator[Result]:
        results = Results()
        order = Reorder() if ordered else None
        taken = 0
        with self.stream():
            exhausted = False
            while not exhausted:
                room = buffersize - (results.total - taken)
                if room > 0:
                    chunk = take_chunk(source, min(room, CHUNK_ITEMS))
                    exhausted = not chunk
                    if chunk:
                        self._enqueue_waiting(chunk, results, None, order)
                if room > 0:
                    fresh = results.take(0)
                else:
                    with self.blocked():
                        fresh = results.take(timeout)
                    if not fresh:
                        raise TimeoutExpired(f"no result for {timeout} s")
                taken += len(fresh)
                yield from order.push(fresh) if order is not None else fresh
        while taken < results.total:
            fresh = results.take(timeout)
            if not fresh:
                raise TimeoutExpired(f"no result for {timeout} s; {results.total - taken} are open")
            taken += len(fresh)
            yield from order.push(fresh) if order is not None else fresh

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """While this is open, submits say that more is to come."""
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

    def _enqueue_waiting(
        self, items: Sequence[Item], sink: Sink, until: float | None, order: Reorder | None = None
    ) -> Future[None]:
        while True:
            outcome = self.enqueue(items, sink, order)
            if outcome is not None:
                return outcome
            room = self.room(len(items))
            waiting = self.blocked() if self._streams else contextlib.nullcontext()
            try:
                with waiting:
                    room.result(None if until is None else max(0.0, until - time.monotonic()))
            except TimeoutError:
                raise Backpressure(
                    f"{len(self._open)} items are open, the buffer's limit is {self.buffer_items}"
                ) from None

    def enqueue(
        self, items: Sequence[Item], sink: Sink, order: Reorder | None = None
    ) -> Future[None] | None:
        """Queue items without waiting; the future is done when all are accepted, None is no room.

        The building block of everything that submits; most callers want `submit` or `map`.
        """
        limit = self._session.welcome.get("payload_bytes_max", 0)
        for item in items:
            if len(item.payload) > limit:
                raise Refused(f"a payload of {len(item.payload)} bytes; at most {limit} are taken")
        with self._lock:
            if self._failure is not None or self._closing:
                raise self._failure or ConnectError("this client is closed")
            if self._open and len(self._open) + len(items) > self.buffer_items:
                return None
            numbers = self._add(items)
            if isinstance(sink, Results):
                sink.total += len(items)
            if order is not None:
                order.expect(numbers)
            for number, item in zip(numbers, items, strict=True):
                self._open[number] = (sink, item.custom_id)
            accepted: Future[None] = Future()
            accepted.set_running_or_notify_cancel()
            self._awaiting.append((numbers[-1], accepted))
            self._session.pump()
        self._link.wake()
        return accepted

    def room(self, items: int) -> Future[None]:
        """Done once `enqueue` may find room for `items`."""
        room: Future[None] = Future()
        room.set_running_or_notify_cancel()
        with self._lock:
            self._room.append((items, room))
            self._make_room()
        return room

    def _add(self, items: Sequence[Item]) -> list[int]:
        explicit = [item.number for item in items if item.number is not None]
        if explicit and len(explicit) < len(items):
            raise ValueError("give every item of one call a number, or none")
        return self._session.add(
            [item.shape for item in items],
            [item.length for item in items],
            [bytes(item.payload) for item in items],
            explicit or None,
        )

    # -- asking -------------------------------------------------------------------------------

    @property
    def welcome(self) -> dict[str, Any]:
        """What the broker said when it last greeted this client: ports, durability, limits."""
        return dict(self._session.welcome)

    @property
    def accepted_upto(self) -> int:
        """Every item number up to this one has been taken (or skipped)."""
        return self._session.upto

    @property
    def connected(self) -> bool:
        """Whether the broker has greeted this client on its present connection."""
        return self._session.state == "live"

    def request(self, op: str, timeout: float | None = 10.0, **args: Any) -> Any:
        """Ask the broker something; see `zfabric.operate`. Raises FabricError where it says no."""
        reply: Future[Any] = Future()
        with self._lock:
            if self._failure is not None or self._closing:
                raise self._failure or ConnectError("this client is closed")
            number = self._session.request(op, args)
            self._replies[number] = reply
        self._link.wake()
        try:
            return reply.result(timeout)
        except TimeoutError:
            if reply.done():
                raise
            with self._lock:
                self._session.forget_request(number)
                self._replies.pop(number, None)
            raise TimeoutExpired(f"the broker did not answer {op!r} within {timeout} s") from None

    def stats(self, timeout: float | None = 10.0) -> dict[str, Any]:
        """What `zfabric status --json` prints."""
        answer: dict[str, Any] = self.request("status", timeout)
        return answer

    def unclaimed(self) -> list[Result]:
        """Results of this name's earlier life, which nobody in this process submitted.

        Taking them acknowledges them. Untaken ones are kept with the broker, but for the oldest
        when there are more than 10,000.
        """
        with self._lock:
            taken = list(self._unclaimed.values())
            self._unclaimed.clear()
            self._session.acknowledge(self._last_seq)
        self._link.wake()
        return taken

    def acknowledge(self, seq: int) -> None:
        """With `on_results`: results up to `seq` are safe with the caller."""
        with self._lock:
            # A broker with another store counts anew; what it has not sent cannot be acknowledged.
            self._session.acknowledge(min(seq, self._session._seen_seq))
        self._link.wake()

    def run_batch(
        self, source: str | os.PathLike[str], output: str | os.PathLike[str], **options: Any
    ) -> Summary:
        """Run an OpenAI Batch file through the broker; see `zfabric.batchrun.run_batch`."""
        from zfabric.batchrun import run_batch

        return run_batch(source, output, broker=self.address, **options)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until every submitted item has its result. Raises TimeoutExpired."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: not self._open or self._failure is not None, timeout
            )
            if not done:
                raise TimeoutExpired(f"{len(self._open)} items are open after {timeout} s")

    def close(self, timeout_s: float = 2.0) -> None:
        """Leave. Accepted items stay with the broker; futures that are open raise ConnectError."""
        with self._lock:
            self._closing = True
        self._link.close()
        self._link.join(timeout_s + 2.0)

    # -- what happened ------------------------------------------------------------------------

    def _act(self, news: News) -> None:
        if news.fatal is not None:
            code, text = news.fatal
            kind = VersionMismatch if code == "version_mismatch" else ProtocolError
            self._fail(kind(f"{self.address}: {code}: {text}"))
        for code, text in news.errors:
            if code == "name_in_use":
                self._session.last_refusal = (code, text)
        if news.lost:
            self._lose()
        if news.welcomed or news.accepted:
            self._accepted()
        if news.arrivals or news.seq:
            self._deliver(news)
        for number, ok, value in news.replies:
            reply = self._replies.pop(number, None)
            if reply is not None:
                if ok:
                    reply.set_result(value)
                else:
                    reply.set_exception(FabricError(str(value)))

    def _accepted(self) -> None:
        while self._awaiting and self._awaiting[0][0] <= self._session.upto:
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
        first = news.seq - len(news.arrivals) + 1
        for k, arrival in enumerate(news.arrivals):
            sink, custom_id = self._open.pop(arrival.number, (None, None))
            result = Result(
                arrival.number,
                custom_id,
                status_name(arrival.status),
                arrival.payload,
                arrival.retry_of,
            )
            if sink is None:
                self._unclaimed[first + k] = result
            elif isinstance(sink, Results):
                sink.put(result)
            elif (error := result.error) is not None:
                sink.set_exception(error)
            else:
                sink.set_result(result)
        self._last_seq = max(self._last_seq, news.seq)
        while len(self._unclaimed) > UNCLAIMED_MAX:
            self._unclaimed.popitem(last=False)
        safe = next(iter(self._unclaimed)) - 1 if self._unclaimed else self._last_seq
        self._session.acknowledge(safe)
        self._make_room()
        self._changed.notify_all()

    def _make_room(self) -> None:
        limit, waiting = self.buffer_items, self._room
        while waiting and (not self._open or len(self._open) + waiting[0][0] <= limit):
            waiting.popleft()[1].set_result(None)

    def _lose(self) -> None:
        """The broker's store is another one: what it had accepted and not answered is gone."""
        kept = self._session.unaccepted_numbers()
        lost = Lost(f"the broker at {self.address} came back with another store")
        for number in [n for n in self._open if n not in kept]:
            sink, _ = self._open.pop(number)
            end_sink(sink, lost)
        self._unclaimed.clear()
        self._last_seq = 0
        self._make_room()

    def _fail(self, failure: FabricError) -> None:
        self._failure = self._failure or failure
        self._closing = True
        self._link.close()
        self._changed.notify_all()

    def _ended(self) -> None:
        """The link's thread is over: nothing that is open can still come."""
        with self._lock:
            failure = self._failure = self._failure or ConnectError("this client is closed")
            for sink, _ in self._open.values():
                end_sink(sink, failure)
            self._open.clear()
            waiting = [f for _, f in self._awaiting] + [f for _, f in self._room]
            for future in (*waiting, *self._replies.values()):
                if not future.done():
                    future.set_exception(failure)
            self._changed.notify_all()
