"""What a producer has still to send: items cut into messages, in the order of their numbers.

A message is bounded in items and in bytes, and the broker's own limit on a frame comes before ours:
a frame over it costs the connection, again and again. So messages are cut anew where a broker takes
less than the last one did, and an item that no message can carry is taken out. Sizes are bytes,
lengths tokens. Nothing here knows of a connection.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from zfabric.protocol import FRAME_SLACK_BYTES
from zfabric.shapes import Shape
from zfabric.spans import spans

# A message carries this many items or bytes at most; larger ones gain nothing on the wire. Eight
# bytes an item in the widest column stay far below FRAME_SLACK_BYTES, which every frame may have.
MESSAGE_ITEMS = 1_024
MESSAGE_BYTES = 1024 * 1024
# Before a broker has said what it takes: more than any says.
PAYLOAD_UNKNOWN = 2**31


def message_bytes(payload_bytes_max: int) -> int:
    """Payload bytes that one message may carry to a broker that takes payloads of this size."""
    return min(MESSAGE_BYTES, payload_bytes_max + FRAME_SLACK_BYTES)


@dataclass(slots=True)
class Outgoing:
    """One message's worth of items that the broker has not accepted yet."""

    numbers: array[int]
    lengths: array[int]
    sizes: array[int]
    # the shapes, and which of them each item has
    shapes: list[Shape]
    shape_index: array[int]
    body: bytes
    after: int

    @property
    def last(self) -> int:
        """The number of the last item."""
        return self.numbers[-1]

    def part(self, start: int, stop: int, after: int) -> Outgoing:
        """The items from `start` to `stop`, which go after the number `after`."""
        first = sum(self.sizes[:start])
        sizes = self.sizes[start:stop]
        return Outgoing(
            self.numbers[start:stop],
            self.lengths[start:stop],
            sizes,
            self.shapes,
            self.shape_index[start:stop],
            self.body[first : first + sum(sizes)],
            after,
        )


def sending_order(shapes: Sequence[Shape], lengths: Sequence[int]) -> list[int]:
    """Places of items in the order in which they are best sent: by shape, the longest first.

    Shapes go in the order of their first items. A broker then meets long runs of one shape and
    lane, and raises the targets of lanes least.
    """
    of: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for place, shape in enumerate(shapes):
        of[shape.model, shape.signature].append(place)
    for places in of.values():
        places.sort(key=lengths.__getitem__, reverse=True)
    return list(chain.from_iterable(of.values()))


class Backlog:
    """Messages without the broker's word, oldest first; the first `sent` of them are on their way.

    `last_number` is the number that goes before the next item.
    """

    def __init__(self) -> None:
        self.messages: deque[Outgoing] = deque()
        self.sent = 0
        self.last_number = 0
        self._bytes_max = MESSAGE_BYTES
        self._payload_bytes_max = PAYLOAD_UNKNOWN

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def first(self) -> int | None:
        """The number of the oldest item, or None if there is none."""
        return self.messages[0].numbers[0] if self.messages else None

    @property
    def items(self) -> int:
        """Items in all messages."""
        return sum(len(m.numbers) for m in self.messages)

    def numbers(self) -> Iterable[int]:
        """The number of every item."""
        return (number for message in self.messages for number in message.numbers)

    def add(
        self,
        shapes: Sequence[Shape],
        lengths: Sequence[int],
        payloads: Sequence[bytes],
        numbers: Sequence[int],
    ) -> None:
        """Add items whose numbers ascend beyond those that are here."""
        sizes = array("I", list(map(len, payloads)))
        for start, stop in spans(sizes, MESSAGE_ITEMS, self._bytes_max):
            # By identity, since equal ones do no harm, and to compare shapes is dear.
            known = {id(shape): shape for shape in shapes[start:stop]}
            places = dict(zip(known, range(len(known)), strict=True))
            message = Outgoing(
                array("Q", numbers[start:stop]),
                array("I", lengths[start:stop]),
                sizes[start:stop],
                list(known.values()),
                array("I", [places[id(shape)] for shape in shapes[start:stop]]),
                b"".join(payloads[start:stop]),
                self.last_number,
            )
            self.last_number = message.last
            self.messages.append(message)

    def accepted(self, upto: int) -> None:
        """Forget the messages whose items have all been taken."""
        while self.messages and self.messages[0].last <= upto:
            self.messages.popleft()
            self.sent = max(0, self.sent - 1)

    def resume(self, upto: int) -> None:
        """Begin again after the number `upto`: what was taken of a message is not sent twice."""
        self.accepted(upto)
        self.sent = 0
        if self.messages:
            first = self.messages[0]
            start = bisect_right(first.numbers, upto)
            if start:
                self.messages[0] = first.part(start, len(first.numbers), first.numbers[start - 1])

    def rewind(self, upto: int) -> None:
        """Begin again with a broker that has taken numbers up to `upto`, perhaps fewer than once.

        Nothing of the first message is left out: another broker has none of it.
        """
        self.accepted(upto)
        self.sent = 0
        if self.messages:
            self.messages[0].after = min(self.messages[0].after, upto)
        else:
            self.last_number = upto

    def split(self, items: int) -> None:
        """Make the next message to be sent one of at most `items`."""
        message = self.messages[self.sent]
        count = len(message.numbers)
        if count > items:
            head = message.part(0, items, message.after)
            self.messages[self.sent] = head
            self.messages.insert(self.sent + 1, message.part(items, count, head.last))

    def fit(self, payload_bytes_max: int) -> list[tuple[int, int]]:
        """Cut for a broker of this limit; (number, size) of items that it would never take.

        Call it before anything is sent on a connection.
        """
        before, self._payload_bytes_max = self._payload_bytes_max, payload_bytes_max
        self._bytes_max = message_bytes(payload_bytes_max)
        if payload_bytes_max >= before:
            return []
        taken_out: list[tuple[int, int]] = []
        kept: deque[Outgoing] = deque()
        after = self.messages[0].after if self.messages else self.last_number
        for message in self.messages:
            for part in self._fitting(message, payload_bytes_max, taken_out):
                part.after = after
                after = part.last
                kept.append(part)
        self.messages = kept
        self.last_number = after
        return taken_out

    def _fitting(
        self, message: Outgoing, payload_bytes_max: int, taken_out: list[tuple[int, int]]
    ) -> Iterator[Outgoing]:
        sizes = message.sizes
        if len(message.body) <= self._bytes_max and max(sizes) <= payload_bytes_max:
            yield message
            return
        runs, start = [], 0
        for k, size in enumerate(sizes):
            if size > payload_bytes_max:
                taken_out.append((message.numbers[k], size))
                runs.append((start, k))
                start = k + 1
        runs.append((start, len(sizes)))
        for first, end in runs:
            for low, high in spans(sizes[first:end], MESSAGE_ITEMS, self._bytes_max):
                yield message.part(first + low, first + high, 0)
