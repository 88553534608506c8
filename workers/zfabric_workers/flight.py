"""Which item of a batch is sent next, and in which place of the server. Pure.

Decides three things. Items go in the batch's order. The first item of a shape that the server has
not just worked on goes alone, when another of its shape follows: or every place would compute the
same prefix. Where each place (slot) has a cache of its own, an item is pinned to its place, and
nobody waits for a first one.
"""

from __future__ import annotations

from zfabric.engine import Batch
from zfabric.shapes import Shape


class Flight:
    """The items of one batch, sent and not sent; `wanted` are the indices to send, in order."""

    def __init__(
        self, batch: Batch, wanted: list[int], warm: Shape | None, slots: int | None = None
    ) -> None:
        self._shapes = {k: batch.shapes[batch.shape_index[k]] for k in wanted}
        self._waiting = wanted[::-1]
        self._slots = None if slots is None else list(range(slots))
        self._slot_of: dict[int, int] = {}
        self._alone: int | None = None
        self.warm = warm
        self.stopped = False

    def take(self, sent: int, limit: int) -> int | None:
        """The next item to send, or None: nothing is left, or it has to wait."""
        if self.stopped or not self._waiting or self._alone is not None or sent >= limit:
            return None
        if self._slots is not None and not self._slots:
            return None
        index = self._waiting.pop()
        shape = self._shapes[index]
        if self._slots is not None:
            self._slot_of[index] = self._slots.pop()
        elif shape != self.warm and shape.components and self._follows(shape):
            self._alone = index
        self.warm = shape
        return index

    def slot_of(self, index: int) -> int | None:
        """Where the item that was taken goes; None where places are all alike."""
        return self._slot_of.get(index)

    def release(self, index: int) -> None:
        """The item is no longer at the server."""
        if self._slots is not None:
            self._slots.append(self._slot_of.pop(index))
        if self._alone == index:
            self._alone = None

    def _follows(self, shape: Shape) -> bool:
        return bool(self._waiting) and self._shapes[self._waiting[-1]] == shape
