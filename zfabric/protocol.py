"""The wire: how a message is laid out, what each one must hold, and who may send it when.

    item:      submitted -> accepted -> ready <-> pending -> completed | dead -> result acknowledged
    producer:  (new) --HELLO--> live --BYE/silence--> gone
    worker:    (new) --HELLO--> live --BYE/silence--> gone
    operator:  (new) --HELLO--> live --BYE/silence--> gone

A message is a list of frames: one header (`ZF`, version u8, type u8, a msgpack map of fields), the
columns that its type names (packed little-endian integers, one entry an item) and, where the type
has one, a single body frame that holds all payloads back to back, `sizes` bytes each. A message
carries many items, never one at a time, and an item's bytes are never re-encoded on their way.

This module is pure: no socket, no clock. `decode` raises PeerError and nothing else, whatever the
bytes are; a message that raises has changed nothing.
"""

from __future__ import annotations

import enum
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NoReturn

import msgpack

from zfabric.errors import PeerError
from zfabric.shapes import LABEL_BYTES_MAX

VERSION = 1
MAGIC = b"ZF"
_PREFIX = struct.Struct("<2sBB")

# A header holds names, a shape's components or a worker's held batches: kilobytes at most. The
# exception is a fifo batch of many shapes, which the broker sends and bounds itself.
HEADER_BYTES_MAX = 64 * 1024
HEADER_BYTES_FROM_BROKER_MAX = 16 * 1024 * 1024
# The deepest field of the protocol is a map in a map of lists; printing or walking a value that is
# nested a thousand deep would end in a RecursionError wherever it happens.
NESTING_MAX = 8
# More items than this in one message would make one message a slice of the loop by itself.
MESSAGE_ITEMS_MAX = 65_536
# zmq's MAXMSGSIZE is per frame; columns and headers stay under this on top of one payload.
FRAME_SLACK_BYTES = 64 * 1024
# A worker that asks for more batches at once than this is not double buffering, it is hoarding.
WINDOW_MAX = 64
# Numbers at or above this are the broker's own (requeued dead letters), never a producer's.
BROKER_NUMBERS_FROM = 2**63
NUMBER_MAX = BROKER_NUMBERS_FROM - 1

# Topics of the statistics endpoint: the whole fabric, what happened, one shape's lanes (the topic
# ends with its signature, 16 hex digits). Values are msgpack.
TOPIC_SNAPSHOT, TOPIC_EVENT, TOPIC_LANES = b"snapshot", b"event", b"lanes:"
TOPIC_LENGTHS = b"lengths"


class Type(enum.IntEnum):
    """Message types. Codes are part of the wire and never reused."""

    HELLO = 1
    SHAPE = 2
    SUBMIT = 3
    RESULT_ACK = 4
    REQUEST = 5
    HEARTBEAT = 6
    BYE = 7
    STARTED = 8
    DONE = 9
    RETURNED = 10
    WELCOME = 16
    ACCEPTED = 17
    RESULT = 18
    REPLY = 19
    ERROR = 20
    WHO_ARE_YOU = 21
    BATCH = 22
    DONE_ACK = 23
    REVOKE = 24


class Status(enum.IntEnum):
    """How an item ended; one byte an item in DONE and RESULT."""

    OK = 0
    TOO_LONG = 1
    FAILED = 2
    DEAD = 3
    CANCELLED = 4
    REFUSED = 5
    QUARANTINED = 6


# What a worker may report; the others are the broker's own verdicts.
WORKER_STATUSES = frozenset({Status.OK, Status.TOO_LONG, Status.FAILED})
# Why a worker gives a batch back. Only `engine_exit`, `engine_error` and `out_of_memory` charge.
RETURN_KINDS = frozenset({"engine_exit", "engine_error", "out_of_memory", "unreachable", "leaving"})
CHARGING_KINDS = frozenset({"engine_exit", "engine_error", "out_of_memory"})
ROLES = frozenset({"producer", "worker", "operator"})


# -- field checks: each returns nothing and raises PeerError ------------------------------------

Check = Callable[[str, Any], None]


def shown(value: object) -> str:
    """A peer's value for an error text: scalars as they are, cut; anything else by its type."""
    if isinstance(value, str | bytes | int | float | None):
        return repr(value[:60] if isinstance(value, str | bytes) else value)[:80]
    return f"a {type(value).__name__}"


def _fail(name: str, want: str, value: object) -> None:
    raise PeerError("malformed", f"field {name!r} must be {want}, not {shown(value)}")


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            _fail(name, f"an integer from {low} to {high}", value)

    return check


def _text(bytes_max: int, *, empty: bool = False, plain: bool = False) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not str or (not value and not empty) or len(value.encode()) > bytes_max:
            _fail(name, f"text of at most {bytes_max} bytes", value)
        if plain and not value.isprintable():
            _fail(name, "text without control characters", value)

    return check


def _one_of(words: frozenset[str]) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not str or value not in words:
            _fail(name, f"one of {', '.join(sorted(words))}", value)

    return check


def _boolean(name: str, value: Any) -> None:
    if type(value) is not bool:
        _fail(name, "true or false", value)


def _mapping(name: str, value: Any) -> None:
    if type(value) is not dict:
        _fail(name, "a map", value)


def _anything(name: str, value: Any) -> None:
    """Fields that the receiver checks itself (contracts, arguments of a request)."""


def _packed_u64(count_max: int) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not bytes or len(value) % 8 or len(value) > 8 * count_max:
            _fail(name, f"at most {count_max} packed 64-bit integers", value)

    return check


def _token_counts(name: str, value: Any) -> None:
    if type(value) is not list or len(value) > 64:
        _fail(name, "a list of at most 64 token counts", value)
    for count in value:
        if count is not None and (type(count) is not int or not 0 <= count < 2**31):
            _fail(name, "token counts or nil", count)


def _batch_ids(name: str, value: Any) -> None:
    if type(value) is not list or len(value) > 4 * WINDOW_MAX:
        _fail(name, f"a list of at most {4 * WINDOW_MAX} batch ids", value)
    for batch_id in value:
        if (
            type(batch_id) is not list
            or len(batch_id) != 2
            or any(type(part) is not int or not 0 <= part < 2**63 for part in batch_id)
        ):
            _fail(name, "[epoch, number] pairs", batch_id)


_u31 = _integer(0, 2**31 - 1)
_u63 = _integer(0, 2**63 - 1)
_u64 = _integer(0, 2**64 - 1)
_name = _text(255, plain=True)
_remark = _text(8192, empty=True)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a message type holds: required and optional fields, columns, a body or none.

    `columns` are (name, array typecode) in frame order. A column whose name ends in `?` may be
    empty; all others have one entry an item. With `body`, the column `sizes` splits it.
    """

    required: Mapping[str, Check] = field(default_factory=dict)
    optional: Mapping[str, Check] = field(default_factory=dict)
    columns: tuple[tuple[str, str], ...] = ()
    body: bool = False


_REFS = (("nonces", "Q"), ("entries", "I"))
_BATCH_ID = {"epoch": _u63, "n": _u63}

TO_BROKER: dict[Type, Spec] = {
    Type.HELLO: Spec(
        {"role": _one_of(ROLES), "name": _name, "instance": _u64},
        {
            "model": _name,
            "batch_items_max": _anything,
            "batch_tokens_max": _anything,
            "input_tokens_max": _anything,
            "ragged": _boolean,
            "window": _integer(1, WINDOW_MAX),
            "held": _batch_ids,
            "boot": _u64,
            "engine": _name,
            "simulated": _boolean,
        },
    ),
    Type.SHAPE: Spec(
        {"id": _u31, "model": _name, "components": _packed_u64(64)},
        {"tokens": _token_counts, "label": _text(LABEL_BYTES_MAX)},
    ),
    Type.SUBMIT: Spec(
        {"after": _integer(0, NUMBER_MAX), "more": _boolean},
        {},
        (("numbers", "Q"), ("lengths", "I"), ("sizes", "I"), ("shapes", "I"), ("order?", "I")),
        body=True,
    ),
    Type.RESULT_ACK: Spec({"upto": _u63}),
    Type.REQUEST: Spec({"id": _u63, "op": _text(64)}, {"args": _mapping}),
    Type.HEARTBEAT: Spec(
        {},
        {
            "received": _u63,
            "holding": _batch_ids,
            "started": _batch_ids,
            "window": _integer(0, WINDOW_MAX),
            "stats": _mapping,
        },
    ),
    Type.BYE: Spec({}, {"reason": _remark}),
    Type.STARTED: Spec(dict(_BATCH_ID), {}, (("indices?", "I"),)),
    Type.DONE: Spec(
        dict(_BATCH_ID),
        {"stats": _mapping},
        (*_REFS, ("statuses", "B"), ("sizes", "I")),
        body=True,
    ),
    Type.RETURNED: Spec(
        {**_BATCH_ID, "kind": _one_of(RETURN_KINDS)}, {"text": _remark}, (("indices?", "I"),)
    ),
}

FROM_BROKER: dict[Type, Spec] = {
    Type.WELCOME: Spec(
        {"boot": _u64, "epoch": _u63, "store": _u64},
        {
            "durability": _text(16),
            "upto": _u63,
            "acked": _u63,
            "worker_port": _integer(1, 65_535),
            "stats_port": _integer(1, 65_535),
            "payload_bytes_max": _u31,
            "heartbeat_s": _anything,
            "lease_s": _anything,
            "release": _text(64),
            "role": _text(16),
        },
    ),
    Type.ACCEPTED: Spec({"upto": _u63}, {"code": _text(64), "text": _remark, "from": _u63}),
    Type.RESULT: Spec(
        {"seq": _u63},
        {"retry_of": _mapping},
        (("numbers", "Q"), ("statuses", "B"), ("sizes", "I")),
        body=True,
    ),
    Type.REPLY: Spec({"id": _u63, "ok": _boolean}, {"value": _anything, "text": _remark}),
    Type.ERROR: Spec({"code": _text(64), "text": _remark}, {"version": _u31, "shape": _u31}),
    Type.WHO_ARE_YOU: Spec(),
    Type.HEARTBEAT: Spec({}, {"boot": _u64}),
    Type.BYE: Spec({}, {"reason": _remark}),
    Type.BATCH: Spec(
        {**_BATCH_ID, "model": _name, "shapes": _anything},
        {"pad_to": _u31},
        (*_REFS, ("lengths", "I"), ("sizes", "I"), ("shape_index?", "I")),
        body=True,
    ),
    Type.DONE_ACK: Spec(dict(_BATCH_ID), {"duplicates": _u31}),
    Type.REVOKE: Spec(dict(_BATCH_ID), {}, (("indices?", "I"),)),
}

# -- who may send what, in which state ----------------------------------------------------------

NEW, LIVE, GONE = "new", "live", "gone"

# state -> type -> next state; what is not listed is out of state and changes nothing.
TRANSITIONS: dict[str, dict[str, dict[Type, str]]] = {
    "producer": {
        NEW: {Type.HELLO: LIVE},
        LIVE: {
            Type.HELLO: LIVE,
            Type.SHAPE: LIVE,
            Type.SUBMIT: LIVE,
            Type.RESULT_ACK: LIVE,
            Type.REQUEST: LIVE,
            Type.HEARTBEAT: LIVE,
            Type.BYE: GONE,
        },
        GONE: {},
    },
    "operator": {
        NEW: {Type.HELLO: LIVE},
        LIVE: {Type.HELLO: LIVE, Type.REQUEST: LIVE, Type.HEARTBEAT: LIVE, Type.BYE: GONE},
        GONE: {},
    },
    "worker": {
        NEW: {Type.HELLO: LIVE},
        LIVE: {
            Type.HELLO: LIVE,
            Type.HEARTBEAT: LIVE,
            Type.STARTED: LIVE,
            Type.DONE: LIVE,
            Type.RETURNED: LIVE,
            Type.BYE: GONE,
        },
        GONE: {},
    },
}


def next_state(role: str, state: str, kind: Type) -> str:
    """The state after `kind` arrives. Raises PeerError("out_of_state") where it may not."""
    following = TRANSITIONS[role][state].get(kind)
    if following is None:
        raise PeerError("out_of_state", f"a {role} that is {state} may not send {kind.name}")
    return following


# -- codec --------------------------------------------------------------------------------------

Frame = bytes | memoryview
# What the header of each type begins with.
_KINDS = {_PREFIX.pack(MAGIC, VERSION, kind): kind for kind in Type}


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded message: its type, fields, columns by name (without `?`) and body bytes."""

    kind: Type
    fields: dict[str, Any]
    columns: dict[str, array[int]]
    body: bytes = b""

    def __len__(self) -> int:
        """Items in the message: entries of its first column."""
        return len(next(iter(self.columns.values()), ()))


def packed(typecode: str, values: Iterable[int]) -> bytes:
    """`values` as a little-endian column of `typecode`."""
    column = values if isinstance(values, array) else array(typecode, values)
    if sys.byteorder == "big":
        column = array(typecode, column)
        column.byteswap()
    return column.tobytes()


def encode(
    kind: Type,
    fields: Mapping[str, Any] | None = None,
    columns: Sequence[bytes] = (),
    body: bytes | None = None,
) -> list[bytes]:
    """The frames of a message; `columns` are already packed (see `packed`), in the type's order."""
    header = _PREFIX.pack(MAGIC, VERSION, kind) + msgpack.packb(fields or {}, use_bin_type=True)
    frames = [header, *columns]
    if body is not None:
        frames.append(body)
    return frames


def decode(frames: Sequence[Frame], specs: Mapping[Type, Spec]) -> Message:
    """Check `frames` against `specs` and return the message.

    Raises PeerError: `malformed`, `unknown_type`, `too_large` or `version_mismatch`.
    """
    if not frames:
        raise PeerError("malformed", "a message without frames")
    limit = HEADER_BYTES_MAX if specs is TO_BROKER else HEADER_BYTES_FROM_BROKER_MAX
    if len(frames[0]) > limit:
        raise PeerError("too_large", f"a header has at most {limit} bytes")
    header = bytes(frames[0])
    kind = _KINDS.get(header[: _PREFIX.size]) or _misread(header)
    spec = specs.get(kind)
    if spec is None:
        raise PeerError("unknown_type", f"{kind.name} is not a message for this side")
    fields = _decode_fields(header[_PREFIX.size :], spec)
    wanted = 1 + len(spec.columns) + spec.body
    if len(frames) != wanted:
        raise PeerError("malformed", f"{kind.name} has {wanted} frames, not {len(frames)}")
    columns = _decode_columns(frames, spec)
    body = bytes(frames[-1]) if spec.body else b""
    if spec.body and sum(columns["sizes"]) != len(body):
        raise PeerError(
            "malformed", f"sizes add up to {sum(columns['sizes'])}, the body has {len(body)} bytes"
        )
    return Message(kind, fields, columns, body)


def _misread(header: bytes) -> NoReturn:
    """Say what is wrong with the first bytes of a header that no type begins with."""
    if len(header) < _PREFIX.size or header[:2] != MAGIC:
        raise PeerError("malformed", "not a zfabric message")
    _, version, code = _PREFIX.unpack_from(header)
    if version != VERSION:
        raise PeerError(
            "version_mismatch",
            f"this side speaks protocol version {VERSION}, the other {version}; "
            "install the same zfabric release on both",
        )
    raise PeerError("unknown_type", f"no message type {code}")


def _decode_fields(raw: bytes, spec: Spec) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(raw, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise PeerError("malformed", f"header fields cannot be read: {error!s:.80}") from None
    if type(fields) is not dict:
        raise PeerError("malformed", "header fields must be a map")
    if not fields.keys() >= spec.required.keys():
        name = next(name for name in spec.required if name not in fields)
        raise PeerError("malformed", f"field {name!r} is missing")
    for name, value in fields.items():
        if _is_deep(value, NESTING_MAX):
            raise PeerError("malformed", f"header fields are nested more than {NESTING_MAX} deep")
        check = spec.required.get(name) or spec.optional.get(name)
        if check is None:
            raise PeerError("malformed", f"unknown field {shown(name)}")
        try:
            check(name, value)
        except UnicodeEncodeError:
            raise PeerError("malformed", f"field {name!r} is not valid UTF-8") from None
    return fields


def _is_deep(value: object, levels: int) -> bool:
    """Whether `value` is `levels` maps and lists in one another. Bounded, whatever it is."""
    if type(value) is dict:
        inner: Iterable[object] = value.values()
    elif type(value) is list:
        inner = value
    else:
        return False
    return levels == 1 or any(
        _is_deep(v, levels - 1) for v in inner if type(v) is dict or type(v) is list
    )


def _decode_columns(frames: Sequence[Frame], spec: Spec) -> dict[str, array[int]]:
    columns: dict[str, array[int]] = {}
    items: int | None = None
    for (name, typecode), frame in zip(spec.columns, frames[1:], strict=False):
        column = array(typecode)
        if len(frame) % column.itemsize:
            raise PeerError("malformed", f"column {name!r} is cut short")
        if len(frame) > column.itemsize * MESSAGE_ITEMS_MAX:
            raise PeerError("too_large", f"a message has at most {MESSAGE_ITEMS_MAX} items")
        column.frombytes(frame)
        if sys.byteorder == "big":
            column.byteswap()
        if name[-1] == "?":
            name, wanted = name[:-1], items if column else 0
        else:
            wanted = items = len(column) if items is None else items
        if wanted is not None and len(column) != wanted:
            raise PeerError(
                "malformed", f"column {name!r} has {len(column)} entries for {wanted} items"
            )
        columns[name] = column
    return columns


def split(body: bytes, sizes: Sequence[int]) -> list[bytes]:
    """`body` cut into `len(sizes)` payloads; `sizes` add up to its length (checked by `decode`)."""
    stops = list(accumulate(sizes))
    return [body[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
