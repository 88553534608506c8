"""Bugs to be planted: each breaks one rule of the fabric, and the simulation must see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tests.sim.world import World
from zfabric.delivery import Delivery
from zfabric.dispatcher import Dispatcher
from zfabric.files import FileBacking
from zfabric.judging import Judge
from zfabric.offers import Offers
from zfabric.store import Store


def tombstone_before_result() -> list[Any]:
    """The tombstone is written at once, and its result with the next window."""

    def owe_tombstones(self: Any, file: Any, places: Any) -> None:
        file.write_tombstones(list(places))

    return [mock.patch.object(FileBacking, "owe_tombstones", owe_tombstones)]


def outbox_freed_before_tombstone_is_synced() -> list[Any]:
    """A result is gone from the disk as soon as its producer has it."""
    free_results = FileBacking.free_results

    def free_now(self: Any, owner: int, upto: int, last: int) -> None:
        window = self._open_window
        freed, finished = window.freed, window.finished
        window.freed, window.finished = [], []
        free_results(self, owner, upto, last)
        for kept, places in window.freed:
            kept.file.write_tombstones(places)
        for kept in window.finished:
            self.descriptors.forget(kept.file.header.nonce)
            self.files.unlink(kept.file.path())
        window.freed, window.finished = freed, finished

    return [mock.patch.object(FileBacking, "free_results", free_now)]


def cursor_moved_before_the_channel_took_the_batch() -> list[Any]:
    """Reading advances; a batch that could not be sent is never read again."""
    following, commit = Offers.next, Store.commit

    def next_and_advance(self: Any, now: float) -> Any:
        offer = following(self, now)
        for take in offer.takes if offer is not None else ():
            commit(self._fabric.store, take)
        return offer

    return [
        mock.patch.object(Offers, "next", next_and_advance),
        mock.patch.object(Store, "commit", lambda self, take, cursors=None: None),
    ]


def unlisted_batch_taken_back_too_early() -> list[Any]:
    """A heartbeat that was written before a batch arrived says that its worker does not hold it."""
    heartbeat = Delivery.heartbeat

    def heartbeat_of_all(self: Any, worker: Any, fields: dict[str, Any], now: float) -> None:
        heartbeat(self, worker, {**fields, "received": worker.sent}, now)

    return [mock.patch.object(Delivery, "heartbeat", heartbeat_of_all)]


def numbers_forgotten_at_restart() -> list[Any]:
    """A broker that comes back has no idea what it had accepted."""

    def settle_numbers(self: Any, producer: Any) -> None:
        producer.upto, producer.above = 0, set()

    return [mock.patch.object(Judge, "_settle_numbers", settle_numbers)]


def returned_item_behind_the_cursor() -> list[Any]:
    """An item that is given back stays where the cursor has been already."""
    release = Store.release

    def release_behind(self: Any, ref: int, *, solo: bool = False) -> Any:
        queue = release(self, ref, solo=solo)
        queue.returned.remove(ref)
        return queue

    return [mock.patch.object(Store, "release", release_behind)]


def judged_before_drained() -> list[Any]:
    """After a pause the broker judges its workers before it reads what they have said."""
    tick, shift = Dispatcher.tick, mock.Mock()

    def receive_late(self: World, broker: Dispatcher) -> bool:
        tick(broker, self.now, 1e6 + self.now, drained=True)
        return receive(self, broker)

    receive = World.receive
    return [
        mock.patch.object(World, "receive", receive_late),
        mock.patch.object(Dispatcher, "shift", shift),
    ]


PLANTED = (
    tombstone_before_result,
    outbox_freed_before_tombstone_is_synced,
    cursor_moved_before_the_channel_took_the_batch,
    unlisted_batch_taken_back_too_early,
    numbers_forgotten_at_restart,
    returned_item_behind_the_cursor,
    judged_before_drained,
)


@contextmanager
def planted(bug: Any) -> Iterator[None]:
    """With this bug in the fabric."""
    with ExitStack() as stack:
        for patch in bug():
            stack.enter_context(patch)
        yield
