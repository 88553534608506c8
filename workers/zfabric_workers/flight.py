"""Which item of a batch is sent next, and in which place of the server. Pure.

Decides three things. Items go in the batch's order. The first item of a shape that the server has
not just worked on goes alone, when another of its shape follows: or every place would compute the
same prefix. Where each place (slot) has a cache of its own, an item is pinned to its place, and
nobody waits for a first one. Batches that overlap share one `Places`.
"""

from __future__ import annotations

from zfabric.engine import Batch
from zfabric.shapes import Shape


class Places:
    """What a server has: the shape it last worked on, and the free ones of its slots, if any."""

    def __init__(self, warm: Shape | None = None, slots: int | None = None) -> None:
        self.warm = warm
        self.slots = None if slots is None else list(range(slots))


class Flight:
    """The items of one batch, sent and not sent; `wanted` are the indices to send, in order."""

    def __init__(self, batch: Batch, wanted: list[int], places: Places) -> None:
        self._shapes = {k: batch.shapes[batch.shape_index[k]] for k in wanted}
        self._waiting = wanted[::-1]
        self._places = places
        self._slot_of: dict[int, int] = {}
        self._alone: int | None = None
        self.stopped = False

    @property
    def begun(self) -> bool:
        """Whether nothing of it will be sent any more."""
        return self.stopped or not self._waiting

    def take(self, sent: int, limit: int) -> int | None:
        """The next item to send, or None: nothing is left, or it has to wait."""
        if self.stopped or not self._waiting or self._alone is not None or sent >= limit:
            return None
        places = self._places
        if places.slots is not None and not places.slots:
            return None
        index = self._waiting.pop()
        shape = self._shapes[index]
        if places.slots is not None:
            self._slot_of[index] = places.slots.pop()
        elif shape != places.warm and shape.components and self._follows(shape):
            self._alone = index
        places.warm = shape
        return index

    def slot_of(self, index: int) -> int | None:
        """Where the item that was taken goes; None where places are all alike."""
        return self._slot_of.get(index)

    def release(self, index: int) -> None:
        """The item is no longer at the server."""
        if self._places.slots is not None:
            self._places.slots.append(self._slot_of.pop(index))
        if self._alone == index:
            self._alone = None

    def _follows(self, shape: Shape) -> bool:
        return bool(self._waiting) and self._shapes[self._waiting[-1]] == shape
