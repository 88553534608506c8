"""Results as callers of the SDK see them: one item's end, and many of them as they come in.

No socket and no wire here: `client` fills what callers read. Sizes are bytes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from zfabric.errors import ItemFailed, TimeoutExpired
from zfabric.protocol import Status
from zfabric.shapes import TOKENS_MAX, Shape

# What is sorted and sent together at most. Items of a source slower than FAST_ITEMS_PER_S wait
# CHUNK_S for company.
WINDOW_ITEMS, WINDOW_BYTES, WINDOW_S = 8_192, 16 * 1024 * 1024, 0.025
CHUNK_S, FAST_ITEMS_PER_S = 0.002, 50_000

_STATUS_NAMES = {int(status): status.name.lower() for status in Status}


@dataclass(frozen=True, slots=True)
class Item:
    """One unit of work: an opaque payload, its shape, and its length in tokens.

    A payload that is no `bytes` is copied now: its buffer may be used again. `custom_id` comes back
    with the result and never leaves this process. `number` is for producers that continue after a
    restart: item numbers ascend, and one that was accepted before is not taken twice. Raises
    ValueError for a length that is negative or beyond 2**31 - 1, TypeError for what is no bytes.
    """

    shape: Shape
    payload: bytes
    length: int
    custom_id: str | None = None
    number: int | None = None

    def __post_init__(self) -> None:
        if type(self.length) is not int or not 0 <= self.length <= TOKENS_MAX:
            raise ValueError(f"length must be 0 to {TOKENS_MAX} tokens, not {self.length!r}")
        if type(self.payload) is not bytes:
            if not isinstance(self.payload, bytes | bytearray | memoryview):
                raise TypeError(f"payload must be bytes, not {type(self.payload).__name__}")
            object.__setattr__(self, "payload", bytes(self.payload))


@dataclass(frozen=True, slots=True)
class Result:
    """How one item ended.

    `status` is "ok" or "too_long" (an empty completion: the item was over the contract and did not
    run) for completions; "failed", "dead", "cancelled", "refused" or "quarantined" otherwise, and
    then `payload` is UTF-8 JSON {"code", "message"} (see `error`). `retry_of` is the number of the
    item that an operator requeued, or None.
    """

    number: int
    custom_id: str | None
    status: str
    payload: bytes
    retry_of: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the item ended with a completion."""
        return self.status in ("ok", "too_long")

    @property
    def error(self) -> ItemFailed | None:
        """Why the item has no completion, or None if it has one."""
        if self.ok:
            return None
        try:
            told = json.loads(self.payload)
            return ItemFailed(str(told["code"]), str(told["message"]), self.payload)
        except (ValueError, KeyError, TypeError, RecursionError):
            text = self.payload[:200].decode("utf-8", "replace")
            return ItemFailed(self.status, text, self.payload)


def status_name(code: int) -> str:
    """The word for a status byte."""
    return _STATUS_NAMES.get(code) or f"status_{code}"


class Results:
    """Results of many items in the order in which they end; iterate once, from one thread.

    `len()` is how many items there are altogether, `done` how many of them have ended.
    """

    def __init__(self) -> None:
        self._ready: deque[Result] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.total = 0
        self.done = 0
        # called from the client's thread whenever something changed
        self.on_change: Callable[[], None] | None = None

    def __len__(self) -> int:
        return self.total

    def put(self, *results: Result) -> None:
        """The client has these results."""
        with self._changed:
            self._ready.extend(results)
            self.done += len(results)
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def fail(self, failure: BaseException) -> None:
        """No more results will come."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def take(self, timeout: float | None = None) -> list[Result]:
        """What has come since the last take, waiting up to `timeout` s for at least one.

        Empty when time is up. Raises what ended the client, once everything before it is taken.
        """
        with self._changed:
            if not self._ready and self._failure is None and timeout != 0:
                self._changed.wait_for(lambda: self._ready or self._failure, timeout)
            if not self._ready and self._failure is not None:
                raise self._failure
            taken = list(self._ready)
            self._ready.clear()
            return taken

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every item has ended; whether that happened in time. Takes no result."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.done >= self.total or self._failure is not None, timeout
            )
            if self._failure is not None and self.done < self.total:
                raise self._failure
            return done

    def __iter__(self) -> Iterator[Result]:
        yielded = 0
        while yielded < self.total:
            for result in self.take():
                yielded += 1
                yield result

    def within(self, timeout: float) -> Iterator[Result]:
        """Like iterating, but raises TimeoutExpired when nothing comes for `timeout` seconds."""
        yielded = 0
        while yielded < self.total:
            taken = self.take(timeout)
            if not taken:
                raise TimeoutExpired(f"no result for {timeout} s; {self.total - yielded} are open")
            for result in taken:
                yielded += 1
                yield result


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


def not_an_item(given: object) -> TypeError:
    """The error for what is no Item."""
    return TypeError(f"items must be Item, not {type(given).__name__}")


class Window:
    """Items on their way to be sent together, until there are enough of them.

    The more are sorted together, the longer are the broker's runs of one shape and lane, and the
    better its lanes fit. A window ends with `items_max` items or WINDOW_BYTES, after CHUNK_S where
    the source is slow, after WINDOW_S in any case; an item that took longer to come goes at once.
    """

    def __init__(self, items_max: int) -> None:
        self.items: list[Item] = []
        self._items_max = items_max
        self._bytes = 0
        self._began_s = time.monotonic()

    def add(self, item: Item) -> bool:
        """One more; whether the window is over. Raises TypeError for what is no Item."""
        if not isinstance(item, Item):
            raise not_an_item(item)
        self.items.append(item)
        self._bytes += len(item.payload)
        return (
            len(self.items) >= self._items_max
            or self._bytes >= WINDOW_BYTES
            or (waited_s := time.monotonic() - self._began_s) > WINDOW_S
            or (waited_s > CHUNK_S and len(self.items) < FAST_ITEMS_PER_S * waited_s)
        )


def window_items(open_items_max: int) -> int:
    """Items of a window where so many may be open: most of them stay open while it is gathered."""
    return min(WINDOW_ITEMS, max(1, open_items_max // 4))


def windows(source: Iterable[Item], items_max: int) -> Iterator[list[Item]]:
    """`source` in parts to be sent together (see Window).

    Where it raises, what it gave before comes first. One that blocks holds back what it has given
    since the last window.
    """
    window = Window(items_max)
    try:
        for item in source:
            if window.add(item):
                yield window.items
                window = Window(items_max)
    except Exception:
        if window.items:
            yield window.items
        raise
    if window.items:
        yield window.items


Sink = Future[Result] | Results


def end_sink(sink: Sink, failure: BaseException) -> None:
    """Nothing will come for `sink` any more."""
    if isinstance(sink, Results):
        sink.fail(failure)
    elif not sink.done():
        sink.set_exception(failure)
