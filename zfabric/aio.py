"""The SDK for asyncio: the same names as `Client`, awaited instead of waited for.

A thin layer: one `Client`, with its one background thread, does the work. Results of many items
come through one wake-up of the event loop, never one an item. What blocks for a long time by its
nature (connecting, draining, running a batch file) runs in a thread of the loop's pool. An
AsyncClient belongs to the event loop in which it was opened. Times are seconds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from zfabric.client import ROOM_S, Client
from zfabric.connection import Key
from zfabric.errors import ConnectError, TimeoutExpired
from zfabric.results import (
    CHUNK_S,
    Item,
    Reorder,
    Result,
    Results,
    Sink,
    Window,
    not_an_item,
    window_items,
    windows,
)
from zfabric.waiting import drain_aloud

if TYPE_CHECKING:
    from zfabric.batchoptions import Summary

T = TypeVar("T")


class AsyncClient:
    """A connection to a broker, as one named producer. Open it with `async with`, or `connect`.

    The arguments are those of `Client`. Opening raises ConnectError, NameInUse or VersionMismatch.
    Leaving `async with` waits as `Client` does, and says so as it does; leaving by an exception or
    by cancellation does not wait.
    """

    def __init__(
        self,
        broker: str | None = None,
        *,
        name: str | None = None,
        timeout_s: float = 10.0,
        buffer_items: int = 1_000_000,
        key: Key = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "key": key,
            "name": name,
            "timeout_s": timeout_s,
            "buffer_items": buffer_items,
        }
        self._broker = broker
        self._client: Client | None = None

    async def connect(self) -> Self:
        """Reach the broker. `async with` does it by itself."""
        if self._client is None:
            self._client = await asyncio.to_thread(Client, self._broker, **self._options)
        return self

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                await asyncio.to_thread(drain_aloud, self.client)
        finally:
            await self.close()

    @property
    def client(self) -> Client:
        """The client underneath. Raises ConnectError before it is opened."""
        if self._client is None:
            raise ConnectError("this AsyncClient is not open: use `async with`, or await connect()")
        return self._client

    @property
    def name(self) -> str:
        """The producer's name at the broker."""
        return self.client.name

    # -- submitting ---------------------------------------------------------------------------

    async def submit(self, item: Item, timeout: float | None = None) -> asyncio.Future[Result]:
        """Submit one item; returns once the broker has it, so that nothing is lost from then on.

        The future gives a Result, or raises ItemFailed or Lost. Raises Backpressure when there was
        no room for `timeout` seconds, TimeoutExpired when the item was sent but not yet accepted
        by then (it may still be), Refused when it is too large.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        until = _until(timeout)
        accepted = await self._enqueue([item], future, until)
        await _accepted(accepted, until, timeout)
        return asyncio.wrap_future(future)

    async def submit_many(
        self, items: Iterable[Item] | AsyncIterable[Item], timeout: float | None = None
    ) -> AsyncResults:
        """Submit many items, pipelined; returns their results-to-be once all are accepted.

        `timeout` bounds, in seconds, each wait for room and for acceptance.
        """
        results = AsyncResults(Results())
        accepted: Future[None] | None = None
        with self.client.stream():
            async for window in _windows(items, window_items(self.client.buffer_items)):
                accepted = await self._enqueue(
                    window, results.results, _until(timeout), stream=True
                )
        if accepted is not None:
            await _accepted(accepted, _until(timeout), timeout)
        return results

    async def map(
        self,
        items: Iterable[Item] | AsyncIterable[Item],
        *,
        buffersize: int = 10_000,
        ordered: bool = False,
        timeout: float | None = None,
    ) -> AsyncIterator[Result]:
        """Results of `items`, submitted as they are taken, at most `buffersize` open at a time.

        `items` may be any iterable, or an asynchronous one. Results come in the order in which
        they end, or of `items` where `ordered`. Raises TimeoutExpired when nothing comes for
        `timeout` seconds. An item that fails is a Result that says so.
        """
        if buffersize < 1:
            raise ValueError("buffersize must be at least 1")
        results = AsyncResults(Results())
        order = Reorder() if ordered else None
        with self.client.stream():
            feeder = asyncio.create_task(self._feed(items, results, buffersize, order))
            try:
                while not feeder.done() or results.taken < len(results):
                    # A source may take its time where nothing is open.
                    fresh = await results.take(timeout if results.taken < len(results) else None)
                    if feeder.done():
                        feeder.result()
                    for result in order.push(fresh) if order is not None else fresh:
                        yield result
                feeder.result()
            finally:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)

    async def _feed(
        self,
        items: Iterable[Item] | AsyncIterable[Item],
        results: AsyncResults,
        buffersize: int,
        order: Reorder | None,
    ) -> None:
        """Submit while there is room; in a task of its own, beside the reading of results."""
        # With more, this would wait for its own results, which nobody reads meanwhile.
        buffersize = min(buffersize, self.client.buffer_items)
        window_max = window_items(buffersize)
        try:
            async for window in _windows(items, window_max):
                while len(results) - results.taken + len(window) > buffersize:
                    with self.client.blocked():
                        await results.until_taken()
                await self._enqueue(window, results.results, None, order, stream=True)
                results.wake()
        finally:
            results.wake()

    async def _enqueue(
        self,
        items: Sequence[Item],
        sink: Sink,
        until: float | None,
        order: Reorder | None = None,
        *,
        stream: bool = False,
    ) -> Future[None]:
        client = self.client
        allowed_s = None if until is None else until - time.monotonic()
        while (accepted := client.enqueue(items, sink, order)) is None:
            # As `Client.enqueue_waiting` does.
            part_at = time.monotonic() + ROOM_S
            room = client.room(len(items))
            waiting = client.blocked() if stream else nullcontext()
            try:
                with waiting:
                    await _within(room, part_at if until is None else min(part_at, until))
            except TimeoutError:
                last = until is not None and until <= part_at
                rest = client.enqueue_part(items, sink, order, last=last)
                if len(rest) < len(items):
                    until = _until(allowed_s)
                items = rest
            finally:
                client.leave(room)
        return accepted

    # -- the rest -----------------------------------------------------------------------------

    async def run_batch(
        self, source: str | os.PathLike[str], output: str | os.PathLike[str], **options: Any
    ) -> Summary:
        """Run an OpenAI Batch file through the broker; see `zfabric.batchrun.run_batch`."""
        return await asyncio.to_thread(self.client.run_batch, source, output, **options)

    async def stats(self, timeout: float | None = 10.0) -> dict[str, Any]:
        """What `zfabric status --json` prints."""
        return await asyncio.to_thread(self.client.stats, timeout)

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until every submitted item has its result. Raises TimeoutExpired."""
        await asyncio.to_thread(self.client.drain, timeout)

    async def close(self) -> None:
        """Leave. Accepted items stay with the broker; futures that are open raise ConnectError."""
        if self._client is not None:
            await asyncio.to_thread(self._client.close)


class AsyncResults:
    """Results of many items in the order in which they end; iterate once, with `async for`.

    `len()` is how many items there are altogether, `taken` how many results were handed on.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        self.taken = 0
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._scheduled = False
        results.on_change = self._on_change

    def __len__(self) -> int:
        return self.results.total

    @property
    def done(self) -> int:
        """How many items have ended."""
        return self.results.done

    async def __aiter__(self) -> AsyncIterator[Result]:
        while self.taken < len(self):
            for result in await self.take():
                yield result

    async def take(self, timeout: float | None = None) -> list[Result]:
        """What has come since the last take; waits until there is something, or until `wake`.

        Raises TimeoutExpired when nothing has come for `timeout` seconds, and what ended the
        client once everything before it is taken.
        """
        self._changed.clear()
        fresh = self.results.take(0)
        if not fresh:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                left = len(self) - self.taken
                raise TimeoutExpired(f"no result for {timeout} s; {left} are open") from None
            fresh = self.results.take(0)
        self.taken += len(fresh)
        self._room.set()
        return fresh

    async def until_taken(self) -> None:
        """Wait until somebody takes results."""
        self._room.clear()
        await self._room.wait()

    def wake(self) -> None:
        """End the present wait for results."""
        self._changed.set()

    def _on_change(self) -> None:
        """In the client's thread. One call of the loop serves everything until it runs."""
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._notify)
            except RuntimeError:
                # The loop is closed: nobody waits any more.
                self.results.on_change = None

    def _notify(self) -> None:
        self._scheduled = False
        self._changed.set()


def _until(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


async def _within(future: Future[T], until: float | None) -> T:
    """The future's value. Raises TimeoutError when it does not come in time."""
    wait_s = None if until is None else max(0.0, until - time.monotonic())
    async with asyncio.timeout(wait_s):
        return await asyncio.wrap_future(future)


async def _accepted(accepted: Future[None], until: float | None, timeout: float | None) -> None:
    try:
        await _within(accepted, until)
    except TimeoutError:
        raise TimeoutExpired(f"not accepted within {timeout} s; it may still be") from None


async def _windows(
    items: Iterable[Item] | AsyncIterable[Item], items_max: int
) -> AsyncIterator[list[Item]]:
    """What is sent together: see `results.Window`."""
    if isinstance(items, AsyncIterable):
        async for each in _async_windows(aiter(items), items_max):
            yield each
        return
    for window in windows(items, items_max):
        yield window
        # A source that never waits must not keep the loop from everybody else.
        await asyncio.sleep(0)


async def _async_windows(source: AsyncIterator[Item], items_max: int) -> AsyncIterator[list[Item]]:
    """The source runs in a task of its own, one item ahead, so that a window can go before it."""
    end = object()
    given: asyncio.Queue[Any] = asyncio.Queue()
    wanted = asyncio.Semaphore(1)

    async def read() -> None:
        async for item in source:
            await wanted.acquire()
            given.put_nowait(item)

    window, wrong = Window(items_max), None
    reader = asyncio.ensure_future(read())
    reader.add_done_callback(lambda _: given.put_nowait(end))
    try:
        while True:
            try:
                async with asyncio.timeout(CHUNK_S if window.items else None):
                    item = await given.get()
            except TimeoutError:
                yield window.items
                window = Window(items_max)
                continue
            wanted.release()
            if not isinstance(item, Item):
                wrong = None if item is end else not_an_item(item)
                break
            if not window.items:
                # Nobody was kept waiting for the first one.
                window = Window(items_max)
            if window.add(item):
                yield window.items
                window = Window(items_max)
        if window.items:
            yield window.items
        if wrong is not None:
            raise wrong
        reader.result()
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
