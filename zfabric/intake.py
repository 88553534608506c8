"""Intake: what producers submit, what is accepted of it, and how results go back to them.

A producer numbers its items in ascending order, with gaps where it likes. Acceptance is
cumulative: `upto` says that every number up to it is accepted, refused for good, or skipped. A
message names the number that went before it (`after`); where that is beyond `upto` something in
between was refused or lost, and nothing of the message is taken until it has been sent again.
Lengths are tokens, times seconds on the caller's monotonic clock. Nothing here touches a socket.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

from zfabric.errors import ConfigError, PeerError
from zfabric.fabric import Fabric
from zfabric.outbox import Stored, error_payload
from zfabric.peers import Peer, Producer
from zfabric.protocol import NUMBER_MAX, Message, Status, Type, packed, split
from zfabric.shapes import TOKENS_MAX, Shape
from zfabric.words import counted

Send = Callable[..., None]
T = TypeVar("T")

# One RESULT message: large enough to pay for itself, small enough for one turn of the loop.
RESULT_ITEMS_MAX = 4_096
RESULT_BYTES_MAX = 1024 * 1024
# Shapes that one connection may have declared at a time; a producer of more uses its ids again.
SHAPES_PER_PEER_MAX = 16_384


class Refusal(NamedTuple):
    """Why the items from number `first` on were not taken; send them again later."""

    first: int
    code: str
    text: str


class Intake:
    """The producers' side of the broker's rules."""

    def __init__(self, fabric: Fabric, send: Send) -> None:
        self._fabric = fabric
        self._send = send
        self.draining = False
        # the last submit of somebody found no room
        self.full = False
        # producers that are owed an ACCEPTED, with the refusal it carries
        self._owed: dict[int, Refusal | None] = {}
        # peers that are owed a REPLY about items that were taken in
        self._owed_replies: list[tuple[Peer, dict[str, Any]]] = []

    # -- coming and going ---------------------------------------------------------------------

    def hello(self, peer: Peer, now: float) -> Producer:
        """A producer registers, or comes back: its unacknowledged results go out again.

        Raises PeerError while something is taken in that a full disk did not let be stored: what
        a producer is told to be accepted must be, or it would never send it again.
        """
        if not self._fabric.store.no_space:
            # Else the end of a turn tries again, and lets a cancel end it before it is handed out.
            self._fabric.publish(now)
        if self._fabric.store.unwritten:
            raise PeerError("storage_full", "the disk is full; this is tried again by itself")
        producer = self._fabric.producer(peer.name, now)
        producer.peer = peer
        producer.last_seen_s = now
        producer.more = False
        producer.outbox.rewind()
        self._fabric.unsent.add(producer.index)
        self._fabric.event("producer_joined", peer.name, now, producer=peer.name)
        return producer

    def lost(self, producer: Producer, reason: str, now: float) -> None:
        """The connection is gone; what was accepted stays, and so do its results."""
        if producer.peer is None:
            return
        producer.peer = None
        producer.more = False
        producer.last_seen_s = now
        for model in self._fabric.models.values():
            model.draining.drop_producer(producer.name)
        self._fabric.event(
            "producer_lost", f"{producer.name}: {reason}", now, producer=producer.name
        )

    def expect(self, producer: Producer, args: dict[str, Any]) -> int:
        """How many items it means to submit altogether, for those who watch. Raises PeerError."""
        items = args.get("items")
        if type(items) is not int or not 0 <= items < 2**53:
            raise PeerError("malformed", "items must be a whole number")
        producer.expected_items = items
        return items

    # -- submitting ---------------------------------------------------------------------------

    def shape(self, peer: Peer, fields: dict[str, Any]) -> None:
        """A shape's id on this connection. Raises PeerError where it contradicts a known one."""
        number = fields["id"]
        if len(peer.shapes) >= SHAPES_PER_PEER_MAX and number not in peer.shapes:
            raise PeerError("too_many_shapes", f"at most {SHAPES_PER_PEER_MAX} a connection")
        raw = fields["components"]
        components = struct.unpack(f"<{len(raw) // 8}Q", raw)
        try:
            tokens, label = tuple(fields.get("tokens", ())), fields.get("label", "")
            shape = Shape(fields["model"], components, tokens, label)
            self._fabric.check_shape(shape)
        except ConfigError as error:
            peer.shapes[number] = "malformed"
            raise PeerError("malformed", str(error)) from None
        except PeerError as error:
            peer.shapes[number] = error.code
            raise
        peer.shapes[number] = shape

    def submit(self, producer: Producer, message: Message, now: float) -> None:
        """Take what is new, in order, as far as there is room. Raises PeerError if malformed."""
        numbers = message.columns["numbers"]
        _check_numbers(numbers)
        order = message.columns["order"]
        if len(order) and sorted(order) != list(range(len(numbers))):
            raise PeerError("malformed", "column 'order' is not a permutation of the items")
        self._note_more(producer, message.fields["more"])
        self._owed.setdefault(producer.index, None)
        if message.fields["after"] > producer.upto:
            first = producer.upto + 1
            text = f"numbers after {producer.upto} are missing"
            # The refusal that made the gap says more than the gap; it is the one to answer with.
            if self._owed[producer.index] is None:
                self._owed[producer.index] = Refusal(first, "gap", text)
            return
        start = bisect_right(numbers, producer.upto)
        if start == len(numbers):
            self._fabric.count("resent_items", start)
            return
        room = self._room(producer, message.columns["sizes"], start, now)
        stop = start + room.items
        if stop < len(numbers):
            self._owed[producer.index] = Refusal(numbers[stop], room.code, room.text)
            self._fabric.count(f"refused_{room.code}", len(numbers) - stop)
            self.full = True
        else:
            self.full = False
        if stop > start:
            self._take(producer, message, start, stop, now)

    def _note_more(self, producer: Producer, more: bool) -> None:
        producer.more = more
        if not more:
            for model in self._fabric.models.values():
                model.draining.set_more(producer.name, False)

    class _Room(NamedTuple):
        items: int
        code: str
        text: str

    def _room(self, producer: Producer, sizes: array[int], start: int, now: float) -> _Room:
        config, wanted = self._fabric.config, len(sizes) - start
        if self.draining:
            return self._Room(0, "draining", "the broker is draining and takes nothing new")
        no_space = self._fabric.full(now)
        if no_space is not None:
            return self._Room(0, "storage_full", no_space)
        # The least of all limits counts: one that is met must not hide another that is tighter.
        rooms = [self._Room(wanted, "", "")]
        own = config.producer_items_max - producer.outstanding
        if own < wanted:
            text = (
                f"{counted(producer.outstanding, 'item')} of {producer.name} without an "
                "acknowledged result"
            )
            rooms.append(self._Room(max(0, own), "outbox_full", text))
        places = config.max_items - self._fabric.store.items
        if places < wanted:
            text = f"the broker holds {config.max_items} items"
            rooms.append(self._Room(max(0, places), "busy", text))
        if producer.outbox.payload_bytes > config.max_bytes // 4:
            text = f"{producer.outbox.payload_bytes} bytes of results of {producer.name} are unread"
            rooms.append(self._Room(0, "outbox_full", text))
        free = self._fabric.room_bytes()
        if free < sum(sizes[start:]):
            fits = bisect_right(list(accumulate(sizes[start:])), free)
            rooms.append(self._Room(fits, "busy", f"the broker holds {config.max_bytes} bytes"))
        return min(rooms, key=lambda room: room.items)

    def _take(
        self, producer: Producer, message: Message, start: int, stop: int, now: float
    ) -> None:
        columns = message.columns
        numbers, lengths = columns["numbers"].tolist(), columns["lengths"].tolist()
        sizes, shape_of = columns["sizes"], columns["shapes"]
        payloads = split(message.body, sizes)
        shapes = producer.peer.shapes if producer.peer else {}
        whole = start == 0 and stop == len(numbers)
        by_arrival = self._fabric.config.policy == "fifo"
        gaps = _gaps(producer.upto, columns["numbers"], start, stop)
        order = columns["order"] if whole and not by_arrival else ()
        places = list(order or range(start, stop))
        if producer.above:
            known = producer.above.intersection(numbers[start:stop])
            self._fabric.count("resent_items", len(known))
            places = [k for k in places if numbers[k] not in known]
        fits = max(sizes) <= self._fabric.config.payload_bytes_max and max(lengths) <= TOKENS_MAX
        producer.upto = numbers[stop - 1]
        if producer.above:
            producer.above = {number for number in producer.above if number > producer.upto}
        self._fabric.touched.add(producer.index)
        for number, chosen in _by_shape(shape_of, places, by_arrival=by_arrival):
            shape = self._admitted(shapes.get(number, "unknown_shape"))
            good = chosen
            if not fits or not isinstance(shape, Shape):
                good = self._refuse_bad(producer, shape, chosen, columns, gaps)
            if not good or not isinstance(shape, Shape):
                continue
            self._fabric.accept(
                shape,
                producer,
                _at(good, numbers),
                _at(good, lengths),
                _at(good, payloads),
                now,
                _at(good, gaps),
            )
            self._fabric.models[shape.model].draining.set_more(producer.name, producer.more)

    def _admitted(self, shape: Shape | str) -> Shape | str:
        """The shape, or the code of why nothing of it can be taken."""
        if isinstance(shape, Shape):
            try:
                self._fabric.model(shape.model)
                self._fabric.check_shape(shape)
            except PeerError as error:
                return error.code
        return shape

    def _refuse_bad(
        self,
        producer: Producer,
        shape: Shape | str,
        chosen: list[int],
        columns: dict[str, array[int]],
        gaps: Sequence[int],
    ) -> list[int]:
        """Post an error result for each item that can never be taken; return the others."""
        bytes_max = self._fabric.config.payload_bytes_max
        good = []
        for k in chosen:
            if isinstance(shape, str):
                code, text = shape, "its shape was not accepted"
            elif columns["sizes"][k] > bytes_max:
                code, text = "too_large", f"a payload has at most {bytes_max} bytes"
            elif columns["lengths"][k] > TOKENS_MAX:
                code, text = "malformed", f"a length is at most {TOKENS_MAX} tokens"
            else:
                good.append(k)
                continue
            payload = error_payload(code, text)
            producer.outstanding += 1
            producer.refused_items += 1
            self._fabric.count("refused_items")
            number = columns["numbers"][k]
            refused = Stored(number, Status.REFUSED, payload, None, gaps[k])
            self._fabric.post(producer, (refused,))
        return good

    # -- answering ----------------------------------------------------------------------------

    def owe_reply(self, peer: Peer, fields: dict[str, Any]) -> None:
        """Answer a request that took in items, when they are published."""
        self._owed_replies.append((peer, fields))

    def acknowledge(self) -> None:
        """Send what is owed. Call after all that was taken in has been published."""
        for index, refusal in self._owed.items():
            producer = self._fabric.producers[index]
            if producer is None or producer.peer is None:
                continue
            fields: dict[str, Any] = {"upto": producer.upto}
            if refusal is not None:
                fields |= {"from": refusal.first, "code": refusal.code, "text": refusal.text}
            self._send(producer.peer, Type.ACCEPTED, fields)
        self._owed.clear()
        for peer, answer in self._owed_replies:
            self._send(peer, Type.REPLY, answer, promise=True)
        self._owed_replies.clear()

    def result_ack(self, producer: Producer, upto: int) -> None:
        """The producer has its results up to sequence number `upto`. Raises PeerError past last."""
        outbox = producer.outbox
        if upto > outbox.last:
            raise PeerError("malformed", f"acknowledged {upto} of {outbox.last} results")
        before = outbox.payload_bytes
        freed = outbox.ack(upto)
        self._fabric.outbox_bytes -= before - outbox.payload_bytes
        if freed:
            self._fabric.store.backing.free_results(producer.index, outbox.acked, outbox.last)
        producer.outstanding -= freed
        producer.acked_items += freed
        if outbox.sent < outbox.last:
            self._fabric.unsent.add(producer.index)

    def send_results(self) -> None:
        """Send what may be sent: unacknowledged bytes on their way to one producer are bounded."""
        limit = self._fabric.config.result_bytes_inflight
        for index in list(self._fabric.unsent):
            producer = self._fabric.producers[index]
            self._fabric.unsent.discard(index)
            if producer is None or producer.peer is None:
                continue
            outbox = producer.outbox
            while outbox.sent < outbox.last and outbox.bytes_in_flight < limit:
                if outbox.sent - outbox.acked >= 64 * RESULT_ITEMS_MAX:
                    break
                first, results = outbox.take(RESULT_ITEMS_MAX, RESULT_BYTES_MAX)
                self._send_result(producer.peer, first, results)

    def _send_result(self, peer: Peer, first: int, results: list[Stored]) -> None:
        fields: dict[str, Any] = {"seq": first}
        numbers, statuses, payloads, firsts, _ = zip(*results, strict=True)
        if firsts.count(None) < len(firsts):
            fields["retry_of"] = {
                str(r.number): r.retry_of for r in results if r.retry_of is not None
            }
        columns = [packed("Q", numbers), packed("B", statuses), packed("I", map(len, payloads))]
        self._send(peer, Type.RESULT, fields, columns, b"".join(payloads))


def _check_numbers(numbers: array[int]) -> None:
    if not numbers:
        return
    first, last = numbers[0], numbers[-1]
    if first >= 1 and last <= NUMBER_MAX and _are_neighbours(numbers):
        return
    if first < 1 or last > NUMBER_MAX or any(b <= a for a, b in pairwise(numbers)):
        raise PeerError("malformed", "item numbers must ascend from 1")


def _are_neighbours(numbers: array[int]) -> bool:
    """Whether each number is the one before it and 1, as mostly."""
    first, last = numbers[0], numbers[-1]
    return last - first == len(numbers) - 1 and numbers == array("Q", range(first, last + 1))


def _by_shape(
    shape_of: array[int], places: list[int], *, by_arrival: bool
) -> Iterable[tuple[int, list[int]]]:
    """(shape, the places of its items, in order); `by_arrival` each item by itself."""
    if not places or shape_of.count(shape_of[places[0]]) == len(shape_of):
        return [(shape_of[places[0]], places)] if places else ()
    if by_arrival:
        return [(shape_of[k], [k]) for k in places]
    members: dict[int, list[int]] = {}
    for k in places:
        members.setdefault(shape_of[k], []).append(k)
    return members.items()


def _at(places: list[int], column: Sequence[T]) -> Sequence[T]:
    """The entries of a column at `places`, one at least; mostly they are neighbours."""
    first, stop = places[0], places[-1] + 1
    if stop - first == len(places) and places == list(range(first, stop)):
        return column[first:stop]
    return [column[k] for k in places]


def _gaps(upto: int, numbers: array[int], start: int, stop: int) -> Sequence[int]:
    """Of each place from `start` on: its number - the one that goes before it."""
    if numbers[start] == upto + 1 and _are_neighbours(numbers):
        return array("Q", (1,)) * len(numbers)
    before = [upto, *numbers[start : stop - 1]]
    return [0] * start + [n - b for n, b in zip(numbers[start:stop], before, strict=True)]
