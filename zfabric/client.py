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
import socket as sockets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import zmq

from zfabric.addresses import format_address, parse_address
from zfabric.errors import (
    Backpressure,
    ConnectError,
    FabricError,
    Lost,
    NameInUse,
    PeerError,
    ProtocolError,
    Refused,
    TimeoutExpired,
    VersionMismatch,
)
from zfabric.results import Item, Result, Results, status_name
from zfabric.session import Arrival, News, Session
from zfabric.shapes import check_name

if TYPE_CHECKING:
    from zfabric.batchrun import Summary

DEFAULT_BROKER = "tcp://127.0.0.1:7410"
# Items of one chunk in map and submit_many, or what came in within the time: whichever is first.
CHUNK_ITEMS = 1_024
CHUNK_S = 0.002
# Results that nobody in this process asked for (their producer died and came back) that are kept.
UNCLAIMED_MAX = 10_000
LATE_S = 1.0

Sink = Future[Result] | Results


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
        self._room: deque[Future[None]] = deque()
        self._replies: dict[int, Future[Any]] = {}
        self._unclaimed: OrderedDict[int, Result] = OrderedDict()
        self._last_seq = 0
        self._streams = 0
        self._failure: FabricError | None = None
        self._closing = False
        self.reconnects = 0
        self._wake_r, self._wake_w = sockets.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"zfabric-{self.name}", daemon=True)
        self._thread.start()
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
        with self._stream():
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
        with self._stream():
            exhausted = False
            while not exhausted:
                room = buffersize - (results.total - taken)
                if room > 0:
                    chunk = _chunk(source, min(room, CHUNK_ITEMS))
                    exhausted = not chunk
                    if chunk:
                        self._enqueue_waiting(chunk, results, None, order)
                fresh = results.take(timeout if room <= 0 else 0)
                if room <= 0 and not fresh:
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
    def _stream(self) -> Iterator[None]:
        """While this is open, submits say that more is to come."""
        with self._lock:
            self._streams += 1
            self._session.more = True
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1
                self._session.more = self._streams > 0
                self._session.pump()
            self._wake()

    def _enqueue_waiting(
        self, items: Sequence[Item], sink: Sink, until: float | None, order: Reorder | None = None
    ) -> Future[None]:
        while True:
            outcome = self.enqueue(items, sink, order)
            if outcome is not None:
                return outcome
            room: Future[None] = Future()
            with self._lock:
                self._room.append(room)
            try:
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
            self._awaiting.append((numbers[-1], accepted))
            self._session.pump()
        self._wake()
        return accepted

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
        self._wake()
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
        self._wake()
        return taken

    def acknowledge(self, seq: int) -> None:
        """With `on_results`: results up to `seq` are safe with the caller."""
        with self._lock:
            self._session.acknowledge(seq)
        self._wake()

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
            already = self._closing
            self._closing = True
        self._wake()
        if not already and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + 2.0)

    # -- the thread ---------------------------------------------------------------------------

    def _wake(self) -> None:
        # A full pipe or a closed one means that the thread has enough reasons to look.
        with contextlib.suppress(OSError):
            self._wake_w.send(b"\0")

    def _run(self) -> None:
        context = zmq.Context()
        link = _connect(context, self.address)
        with self._lock:
            self._session.open(time.monotonic())
        try:
            while not self._closing:
                link = self._step(context, link)
            self._say_goodbye(link)
        finally:
            link.close(0)
            context.term()
            self._fail_all(self._failure or ConnectError("this client is closed"))
            self._wake_r.close()
            self._wake_w.close()

    def _step(self, context: zmq.Context[Any], link: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        started = time.monotonic()
        with self._lock:
            due = self._session.wake_at()
            writing = bool(self._session.outbound)
        wait_s = 0.5 if due is None else min(0.5, max(0.0, due - started))
        poller = zmq.Poller()
        poller.register(link, zmq.POLLIN | zmq.POLLOUT if writing else zmq.POLLIN)
        poller.register(self._wake_r.fileno(), zmq.POLLIN)
        poller.poll(int(wait_s * 1000) + 1)
        self._drain_wakes()
        now = time.monotonic()
        with self._lock:
            if now - started > wait_s + LATE_S:
                self._session.shift(now - started - wait_s)
            self._receive(link, now)
            reconnect = self._act(self._session.tick(now))
            if not reconnect:
                self._send(link)
        if reconnect:
            link.close(0)
            link = _connect(context, self.address)
            with self._lock:
                self.reconnects += 1
                self._session.open(time.monotonic())
        return link

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_r.recv(4096):
                pass

    def _receive(self, link: zmq.Socket[bytes], now: float) -> None:
        for _ in range(256):
            try:
                frames = link.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._act(self._session.receive(frames, now))
            except PeerError as error:
                if error.code == "version_mismatch":
                    self._fail(VersionMismatch(f"{self.address}: {error.text}"))
                    return

    def _send(self, link: zmq.Socket[bytes]) -> None:
        outbound = self._session.outbound
        while outbound:
            try:
                link.send_multipart(outbound[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            outbound.popleft()

    def _say_goodbye(self, link: zmq.Socket[bytes]) -> None:
        with self._lock:
            self._session.leave()
            self._send(link)
        link.close(500)

    # -- what happened ------------------------------------------------------------------------

    def _act(self, news: News) -> bool:
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
        return news.reconnect

    def _accepted(self) -> None:
        while self._awaiting and self._awaiting[0][0] <= self._session.upto:
            self._awaiting.popleft()[1].set_result(None)
        self._changed.notify_all()

    def _deliver(self, news: News) -> None:
        if self._on_results is not None:
            self._on_results(news.arrivals, news.seq)
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
        while self._room and len(self._open) < self.buffer_items:
            self._room.popleft().set_result(None)

    def _lose(self) -> None:
        """The broker's store is another one: what it had accepted and not answered is gone."""
        kept = self._session.unaccepted_numbers()
        lost = Lost(f"the broker at {self.address} came back with another store")
        for number in [n for n in self._open if n not in kept]:
            sink, _ = self._open.pop(number)
            _end(sink, lost)
        self._unclaimed.clear()
        self._make_room()

    def _fail(self, failure: FabricError) -> None:
        self._failure = self._failure or failure
        self._closing = True
        self._changed.notify_all()

    def _fail_all(self, failure: FabricError) -> None:
        with self._lock:
            self._failure = self._failure or failure
            for sink, _ in self._open.values():
                _end(sink, failure)
            self._open.clear()
            waiting = [f for _, f in self._awaiting] + list(self._room)
            for future in (*waiting, *self._replies.values()):
                if not future.done():
                    future.set_exception(failure)
            self._changed.notify_all()


class Reorder:
    """Puts results back into the order in which their items were taken."""

    def __init__(self) -> None:
        self._wanted: deque[int] = deque()
        self._early: dict[int, Result] = {}

    def expect(self, numbers: Iterable[int]) -> None:
        """These numbers come next."""
        self._wanted.extend(numbers)

    def push(self, results: Iterable[Result]) -> Iterator[Result]:
        """Everything that can be handed on, now that `results` are there too."""
        for result in results:
            self._early[result.number] = result
        while self._wanted and self._wanted[0] in self._early:
            yield self._early.pop(self._wanted.popleft())


def _chunk(source: Iterator[Item], items_max: int) -> list[Item]:
    """Up to `items_max` items, or what a slow source gave within CHUNK_S; empty at its end."""
    until = time.monotonic() + CHUNK_S
    chunk: list[Item] = []
    for item in source:
        chunk.append(item)
        if len(chunk) >= items_max or (len(chunk) % 64 == 1 and time.monotonic() > until):
            break
    return chunk


def _end(sink: Sink, failure: BaseException) -> None:
    if isinstance(sink, Results):
        sink.fail(failure)
    elif not sink.done():
        sink.set_exception(failure)


def _connect(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    link: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.IMMEDIATE, 1),
        (zmq.LINGER, 2_000),
        (zmq.SNDHWM, 64),
        (zmq.RCVHWM, 64),
        (zmq.SNDBUF, 256 * 1024),
        (zmq.RCVBUF, 256 * 1024),
        (zmq.HEARTBEAT_IVL, 5_000),
        (zmq.HEARTBEAT_TIMEOUT, 15_000),
        (zmq.HEARTBEAT_TTL, 15_000),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 5_000),
        (zmq.TCP_KEEPALIVE, 1),
    ):
        link.setsockopt(option, value)
    if "[" in address:
        link.setsockopt(zmq.IPV6, 1)
    link.connect(address)
    return link
