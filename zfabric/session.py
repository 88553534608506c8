"""A client's side of the conversation, without a socket: what to send, and what came of it.

    closed --open--> greeting --WELCOME--> live --WHO_ARE_YOU, silence--> greeting or closed

Items are held until the broker has accepted their numbers, and sent again, in order, after every
new connection and, from the refused number on, after every refusal. A refusal pauses the sending
until a timer ends; every result acknowledged meanwhile makes room for one item, which goes at once.
Results are handed on once each, by sequence number. The shell around this (a thread, a loop, a
simulation) moves frames, keeps the clock and owns the futures.

Times are seconds on the caller's monotonic clock, lengths tokens, sizes bytes.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any, NamedTuple

from zfabric.access import REFUSAL_CODES
from zfabric.outbox import error_payload
from zfabric.outgoing import MESSAGE_ITEMS, Backlog, Outgoing
from zfabric.protocol import (
    FROM_BROKER,
    NUMBER_MAX,
    TO_BROKER,
    Frame,
    Status,
    Type,
    decode,
    encode,
    packed,
    split,
)
from zfabric.shapes import Shape

# Messages on their way without an answer; enough to fill the link while a sync is waited for.
# After a refusal one, and twice as many with each message that is taken whole.
MESSAGES_IN_FLIGHT_MAX = 64
HEARTBEAT_S = 1.0
# HELLO is said again when there is no WELCOME after this long.
GREETING_S = 1.0
# A broker that says nothing for this long, or for three of its heartbeats, is gone: a new socket.
SILENT_S, SILENT_BEATS = 5.0, 3
# After a refusal: wait, then twice as long, up to the maximum.
RETRY_S, RETRY_MAX_S = 0.05, 1.0
# HELLO refused because the name is taken: the old holder may be dead and not yet known to be.
NAME_RETRY_S = 0.5

# Shapes that have an id on the connection at a time: more than a message has items, so that no id
# is needed twice in one message.
SHAPES_DECLARED_MAX = 8 * MESSAGE_ITEMS

# Refusals that end when results are acknowledged.
ROOM_CODES = frozenset({"busy", "outbox_full"})
# Errors that another attempt cannot cure.
FATAL_CODES = REFUSAL_CODES | {"version_mismatch", "wrong_endpoint", "malformed", "bad_contract"}


class Arrival(NamedTuple):
    """One result as it came: which number, how it ended, and what it is a retry of."""

    number: int
    status: int
    payload: bytes
    retry_of: int | None = None


@dataclass(slots=True)
class News:
    """What happened in one step, for the shell to act on."""

    arrivals: list[Arrival] = field(default_factory=list)
    # sequence number to acknowledge once `arrivals` are dealt with
    seq: int = 0
    # items that no message to this broker can carry; they are not sent, and have no sequence number
    refused: list[Arrival] = field(default_factory=list)
    replies: list[tuple[int, bool, Any]] = field(default_factory=list)
    accepted: bool = False
    welcomed: bool = False
    # the broker came back with another store: what it had accepted is gone
    lost: bool = False
    # shape number of a SHAPE that was refused, with the reason
    errors: list[tuple[str, str]] = field(default_factory=list)
    fatal: tuple[str, str] | None = None
    # the shell must close its socket and open a new one
    reconnect: bool = False


class Session:
    """A producer's or an operator's conversation with the broker."""

    def __init__(self, name: str, instance: int, role: str = "producer") -> None:
        self.name = name
        self.role = role
        self._instance = instance
        self.state = "closed"
        self.outbound: deque[list[bytes]] = deque()
        self.welcome: dict[str, Any] = {}
        self.store: int | None = None
        self.upto = 0
        self.next_number = 1
        self.more = False
        self._more_sent = False
        self._backlog = Backlog()
        self._in_flight_max = MESSAGES_IN_FLIGHT_MAX
        # Paused until then by a refusal, but for as many items as results were acknowledged since.
        self._resume_at: float | None = None
        self._credit = 0
        self._acked_seq = 0
        self._retry_s = RETRY_S
        # ids that shapes have on this connection, longest unused first
        self._declared: OrderedDict[Shape, int] = OrderedDict()
        self._seen_seq = 0
        self._requests: dict[int, list[bytes]] = {}
        self._next_request = 1
        self._heard_s = 0.0
        self._next_beat_s = 0.0
        self._greet_at: float | None = None
        self.last_refusal: tuple[str, str] | None = None

    # -- what the shell asks ------------------------------------------------------------------

    @property
    def unaccepted_items(self) -> int:
        """Items that wait for the broker's word."""
        return self._backlog.items

    def unaccepted_numbers(self) -> set[int]:
        """Numbers that wait for the broker's word."""
        return set(self._backlog.numbers())

    @property
    def settled_upto(self) -> int:
        """No item up to this number waits for the broker's word."""
        first = self._backlog.first
        return max(self.upto, (self.next_number if first is None else first) - 1)

    def add(
        self,
        shapes: Sequence[Shape],
        lengths: Sequence[int],
        payloads: Sequence[bytes],
        numbers: Sequence[int] | None = None,
    ) -> Sequence[int]:
        """Queue items; returns their numbers. `numbers` ascend beyond every earlier one, or None.

        Raises ValueError for numbers that do not ascend.
        """
        ascend = True
        if numbers is None:
            numbers = range(self.next_number, self.next_number + len(payloads))
        else:
            ascend = all(a < b for a, b in pairwise([self.next_number - 1, *numbers]))
        if not ascend or (numbers and numbers[-1] > NUMBER_MAX):
            raise ValueError(f"numbers must ascend from {self.next_number}")
        if numbers:
            self._backlog.add(shapes, lengths, payloads, numbers)
            self.next_number = numbers[-1] + 1
        return numbers

    def request(self, op: str, args: dict[str, Any] | None = None) -> int:
        """Ask something of the broker; its reply comes with the number returned here.

        Raises TypeError, ValueError, OverflowError or PeerError for what no message can say.
        """
        number = self._next_request
        frames = encode(Type.REQUEST, {"id": number, "op": op, "args": args or {}})
        # The broker would end the whole connection for it.
        decode(frames, TO_BROKER)
        self._next_request += 1
        self._requests[number] = frames
        if self.state == "live":
            self.outbound.append(frames)
        return number

    def forget_request(self, number: int) -> None:
        """Nobody waits for this reply any more."""
        self._requests.pop(number, None)

    def acknowledge(self, seq: int) -> None:
        """Results up to this sequence number are safe; the broker may forget them."""
        if self.state == "live" and seq > 0:
            self.outbound.append(encode(Type.RESULT_ACK, {"upto": seq}))
            freed, self._acked_seq = seq - self._acked_seq, max(seq, self._acked_seq)
            if freed > 0 and self.last_refusal is not None and self.last_refusal[0] in ROOM_CODES:
                self._credit += freed
                self._pump()

    def leave(self, reason: str = "closed") -> None:
        """Say goodbye; what was accepted stays with the broker."""
        if self.state == "live":
            self.outbound.append(encode(Type.BYE, {"reason": reason}))
        self.state = "closed"

    # -- connection ---------------------------------------------------------------------------

    def open(self, now: float) -> None:
        """The shell has a fresh socket."""
        self._heard_s = now
        self._greet(now)

    def _greet(self, now: float) -> None:
        self.state = "greeting"
        self.outbound.clear()
        self._greet_at = now + GREETING_S
        self._next_beat_s = now + HEARTBEAT_S
        hello = {"role": self.role, "name": self.name, "instance": self._instance}
        self.outbound.append(encode(Type.HELLO, hello))

    def tick(self, now: float) -> News:
        """Heartbeats, retries, and the judgement of a silent broker."""
        news = News()
        if self.state == "closed":
            return news
        if now - self._heard_s > self._silent_s:
            self.state = "closed"
            news.reconnect = True
            return news
        if self.state == "greeting":
            if self._greet_at is not None and now >= self._greet_at:
                self._greet(now)
            return news
        if now >= self._next_beat_s:
            self._next_beat_s = now + HEARTBEAT_S
            self.outbound.append(encode(Type.HEARTBEAT))
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._backlog.resume(self.upto)
        self._pump()
        return news

    @property
    def _silent_s(self) -> float:
        beat_s = self.welcome.get("heartbeat_s", HEARTBEAT_S)
        return max(SILENT_S, SILENT_BEATS * beat_s) if isinstance(beat_s, int | float) else SILENT_S

    def shift(self, late_s: float) -> None:
        """This side was late by so much; the broker is not to be judged for it."""
        self._heard_s += late_s

    def wake_at(self) -> float | None:
        """When `tick` has something to do next, or None."""
        due = [self._heard_s + self._silent_s]
        if self.state == "closed":
            return None
        if self.state == "greeting" and self._greet_at is not None:
            due.append(self._greet_at)
        if self.state == "live":
            due.append(self._next_beat_s)
            if self._resume_at is not None:
                due.append(self._resume_at)
        return min(due)

    # -- messages in --------------------------------------------------------------------------

    def receive(self, frames: Sequence[Frame], now: float) -> News:
        """One message from the broker. Raises PeerError for one that is not the protocol."""
        news = News()
        message = decode(frames, FROM_BROKER)
        self._heard_s = now
        kind, fields = message.kind, message.fields
        if kind is Type.WELCOME:
            self._on_welcome(fields, news)
        elif kind is Type.WHO_ARE_YOU:
            if self.state == "live":
                self._greet(now)
        elif kind is Type.ERROR:
            self._on_error(fields, news, now)
        elif self.state != "live":
            return news
        elif kind is Type.ACCEPTED:
            self._on_accepted(fields, news, now)
        elif kind is Type.RESULT:
            payloads = split(message.body, message.columns["sizes"])
            self._on_result(fields, message.columns, payloads, news)
        elif kind is Type.REPLY and fields["id"] in self._requests:
            del self._requests[fields["id"]]
            value = fields.get("value") if fields["ok"] else fields.get("text", "")
            news.replies.append((fields["id"], fields["ok"], value))
        self._pump()
        return news

    def _on_welcome(self, fields: dict[str, Any], news: News) -> None:
        self.state = "live"
        self._greet_at = None
        self.welcome = fields
        # Fewer numbers than it had accepted mean that it has forgotten this producer.
        forgotten = fields.get("upto", 0) < self.upto
        if self.store is not None and (self.store != fields["store"] or forgotten):
            news.lost = True
            self._seen_seq = 0
        if self.store is None or news.lost:
            self._seen_seq = fields.get("acked", 0)
        self.store = fields["store"]
        self.upto = fields.get("upto", 0)
        self.next_number = max(self.next_number, self.upto + 1)
        self._acked_seq = fields.get("acked", 0)
        self._backlog.rewind(self.upto)
        if (limit := fields.get("payload_bytes_max")) is not None:
            self._fit(limit, news)
        self._resume_at = None
        self._retry_s = RETRY_S
        self._in_flight_max = MESSAGES_IN_FLIGHT_MAX
        self._declared.clear()
        self._more_sent = False
        news.welcomed = news.accepted = True
        self.outbound.extend(self._requests.values())

    def _fit(self, payload_bytes_max: int, news: News) -> None:
        """Cut what is queued to the limit of this broker, which may be smaller than another's."""
        for number, size in self._backlog.fit(payload_bytes_max):
            text = f"a payload of {size} bytes; at most {payload_bytes_max} are taken"
            payload = error_payload("too_large", text)
            news.refused.append(Arrival(number, Status.REFUSED, payload))

    def _on_error(self, fields: dict[str, Any], news: News, now: float) -> None:
        code, text = fields["code"], fields["text"]
        if self.state == "greeting" and code == "name_in_use":
            self._greet_at = now + NAME_RETRY_S
        elif code in FATAL_CODES:
            news.fatal = (code, text)
        news.errors.append((code, text))

    def _on_accepted(self, fields: dict[str, Any], news: News, now: float) -> None:
        if fields["upto"] > self.upto:
            self.upto = fields["upto"]
            self._backlog.accepted(self.upto)
            news.accepted = True
        code = fields.get("code")
        # What was refused may have been taken since, sent once more: one answer speaks of both.
        if code is None or fields.get("from", NUMBER_MAX) <= self.upto:
            if self._resume_at is None:
                self._retry_s = RETRY_S
                self._in_flight_max = min(2 * self._in_flight_max, MESSAGES_IN_FLIGHT_MAX)
                self.last_refusal = None
            return
        if code != "gap":
            self.last_refusal = (code, fields.get("text", ""))
            self._credit = 0
            self._in_flight_max = 1
            self._backlog.resume(self.upto)
        if self._resume_at is None:
            self._credit = 0
            self._resume_at = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _on_result(
        self,
        fields: dict[str, Any],
        columns: dict[str, array[int]],
        payloads: list[bytes],
        news: News,
    ) -> None:
        first = fields["seq"]
        fresh = max(0, self._seen_seq + 1 - first)
        numbers, statuses = columns["numbers"], columns["statuses"]
        retries = fields.get("retry_of")
        retry_of = [retries.get(str(number)) for number in numbers] if retries else repeat(None)
        arrivals = list(map(Arrival, numbers, statuses, payloads, retry_of))
        news.arrivals += arrivals[fresh:]
        news.seq = first + len(numbers) - 1
        self._seen_seq = max(self._seen_seq, news.seq)

    # -- messages out -------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send what may be sent: in order, a bounded number ahead of the broker's answer."""
        if self.state != "live":
            return
        backlog, paused = self._backlog, self._resume_at is not None
        while backlog.sent < min(len(backlog), MESSAGES_IN_FLIGHT_MAX):
            if paused:
                if not self._credit:
                    return
                backlog.split(self._credit)
                self._credit -= len(backlog.messages[backlog.sent].numbers)
            elif backlog.sent >= self._in_flight_max:
                return
            more = self.more or backlog.sent + 1 < len(backlog)
            self._send_submit(backlog.messages[backlog.sent], more)
            backlog.sent += 1
        if self._more_sent and not self.more and not backlog and not paused:
            empty = Outgoing(array("Q"), array("I"), array("I"), [], array("I"), b"", 0)
            self._send_submit(empty, False)

    def pump(self) -> None:
        """Send what was added, as far as it may be sent now."""
        self._pump()

    def _send_submit(self, message: Outgoing, more: bool) -> None:
        lengths = message.lengths
        # From the longest down: so the broker assigns lanes in runs, and targets grow least.
        order: Sequence[int] = range(len(lengths)) if len(lengths) > 1 else ()
        order = sorted(order, key=lengths.__getitem__, reverse=True)
        # A part of a message has the shapes of the whole; only its own are declared.
        places = dict.fromkeys(message.shape_index)
        ids = {place: self._declare(message.shapes[place]) for place in places}
        columns = [
            packed("Q", message.numbers),
            packed("I", lengths),
            packed("I", message.sizes),
            packed("I", [ids[k] for k in message.shape_index]),
            packed("I", order),
        ]
        fields = {"after": message.after, "more": more}
        self.outbound.append(encode(Type.SUBMIT, fields, columns, message.body))
        self._more_sent = more

    def _declare(self, shape: Shape) -> int:
        """The shape's id on this connection, declared if need be; the longest unused id is reused.

        The broker reads in order, so an id may stand for another shape in a later message.
        """
        number = self._declared.get(shape)
        if number is not None:
            self._declared.move_to_end(shape)
            return number
        if len(self._declared) < SHAPES_DECLARED_MAX:
            number = len(self._declared)
        else:
            _, number = self._declared.popitem(last=False)
        self._declared[shape] = number
        words = struct.pack(f"<{len(shape.components)}Q", *shape.components)
        fields = {"id": number, "model": shape.model, "components": words}
        if shape.tokens:
            fields["tokens"] = list(shape.tokens)
        if shape.label:
            fields["label"] = shape.label
        self.outbound.append(encode(Type.SHAPE, fields))
        return number
