"""The codec: what is allowed decodes to what was encoded, everything else is a PeerError."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.harness import Bench
from zfabric.errors import PeerError
from zfabric.protocol import (
    FROM_BROKER,
    GONE,
    HEADER_BYTES_MAX,
    LIVE,
    MESSAGE_ITEMS_MAX,
    NEW,
    TO_BROKER,
    TRANSITIONS,
    VERSION,
    Type,
    decode,
    encode,
    next_state,
    packed,
    split,
)

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=9)
    | st.text(max_size=9) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)  # fmt: skip
frames_of_bytes = st.lists(st.binary(max_size=80), max_size=9)


@st.composite
def near_misses(draw: Any) -> list[bytes]:
    """Frames that look like a message: a real type, plausible fields, columns that may be cut."""
    kind = draw(st.sampled_from(list(Type)))
    spec = TO_BROKER.get(kind) or FROM_BROKER[kind]
    names = [*spec.required, *spec.optional, "surprise"]
    fields = draw(st.dictionaries(st.sampled_from(names), junk, max_size=6))
    header = encode(kind, {})[0][:4] + msgpack.packb(fields)
    columns = draw(st.lists(st.binary(max_size=40), max_size=7))
    return [header, *columns]


@settings(max_examples=600, deadline=None)
@given(frames=frames_of_bytes | near_misses())
@example(frames=[])
@example(frames=[b""])
@example(frames=[b"ZF"])
@example(frames=[b"ZF\x01\x06" + b"\x91" * 5_000])
@example(frames=[b"ZF\x01\x06\xdf\xff\xff\xff\xff"])
@example(frames=[b"ZF\x01\x06\xc1"])
def test_any_bytes_decode_or_are_a_peer_error(frames: list[bytes]) -> None:
    for specs in (TO_BROKER, FROM_BROKER):
        try:
            decode(frames, specs)
        except PeerError as error:
            assert error.code in {"malformed", "unknown_type", "too_large", "version_mismatch"}


@settings(max_examples=300, deadline=None)
@given(script=st.lists(st.tuples(st.booleans(), frames_of_bytes | near_misses()), max_size=8))
def test_any_bytes_leave_the_dispatcher_whole(script: list[tuple[bool, list[bytes]]]) -> None:
    bench = Bench()
    producer, worker = bench.producer(), bench.worker()
    producer.submit([10, 20, 30])
    bench.settle()
    bench.dispatch(1)
    for strange, frames in script:
        for endpoint, known in (("producers", producer), ("workers", worker)):
            routing_id = b"stranger" if strange else known.routing_id
            bench.to_broker(endpoint, routing_id, frames)
        bench.settle()
        bench.tick(0.1)
        bench.check()


def submit(numbers: list[int], lengths: list[int], sizes: list[int], body: bytes) -> list[bytes]:
    columns = [packed("Q", numbers), packed("I", lengths), packed("I", sizes)]
    shapes = packed("I", [0] * len(numbers))
    return encode(Type.SUBMIT, {"after": 0, "more": False}, [*columns, shapes, b""], body)


def test_submit_comes_out_as_it_went_in() -> None:
    message = decode(submit([1, 2], [10, 20], [3, 4], b"abcdefg"), TO_BROKER)
    assert message.kind is Type.SUBMIT
    assert list(message.columns["numbers"]) == [1, 2]
    assert split(message.body, message.columns["sizes"]) == [b"abc", b"defg"]
    assert len(message) == 2


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (submit([1, 2], [10], [3, 4], b"abcdefg"), "malformed"),
        (submit([1, 2], [10, 20], [3, 5], b"abcdefg"), "malformed"),
        (submit([1, 2], [10, 20], [3, 4], b"abcdefg")[:-1], "malformed"),
        ([*submit([1], [10], [1], b"a"), b"more"], "malformed"),
        ([*submit([1], [10], [1], b"a")[:1], b"1234567", b"", b"", b"", b"", b""], "malformed"),
        ([encode(Type.SUBMIT, {})[0], *[b""] * 6], "malformed"),
        ([b"ZF" + bytes([VERSION, Type.HEARTBEAT]) + b"\0" * HEADER_BYTES_MAX], "too_large"),
        ([b"ZF" + bytes([VERSION + 1, Type.HEARTBEAT, 0x80])], "version_mismatch"),
        ([b"ZF" + bytes([VERSION, 250, 0x80])], "unknown_type"),
        ([b"GET / HTTP/1.1\r\n"], "malformed"),
        (encode(Type.WELCOME, {"boot": 1, "epoch": 1, "store": 1}), "unknown_type"),
        (encode(Type.HEARTBEAT, {"received": -1}), "malformed"),
        (encode(Type.HEARTBEAT, {"received": True}), "malformed"),
        (encode(Type.HEARTBEAT, {"holding": [[1, 2, 3]]}), "malformed"),
        (encode(Type.HEARTBEAT, {"colour": "blue"}), "malformed"),
        (encode(Type.HELLO, {"role": "king", "name": "x", "instance": 1}), "malformed"),
        (encode(Type.HELLO, {"role": "worker", "name": "n" * 256, "instance": 1}), "malformed"),
    ],
)  # fmt: skip
def test_what_is_not_the_protocol_is_named(frames: list[bytes], code: str) -> None:
    with pytest.raises(PeerError) as caught:
        decode(frames, TO_BROKER)
    assert caught.value.code == code


def test_too_many_items_are_refused_before_they_are_read() -> None:
    count = MESSAGE_ITEMS_MAX + 1
    frames = encode(Type.SUBMIT, {"after": 0, "more": False})
    with pytest.raises(PeerError) as caught:
        decode([*frames, b"\0" * 8 * count, b"", b"", b"", b"", b""], TO_BROKER)
    assert caught.value.code == "too_large"


@pytest.mark.parametrize("role", sorted(TRANSITIONS))
def test_table_of_states_allows_nothing_before_hello_or_after_goodbye(role: str) -> None:
    assert set(TRANSITIONS[role][NEW]) == {Type.HELLO}
    assert TRANSITIONS[role][GONE] == {}
    assert next_state(role, LIVE, Type.BYE) == GONE
    for kind in set(Type) - set(TRANSITIONS[role][LIVE]):
        with pytest.raises(PeerError, match="may not send"):
            next_state(role, LIVE, kind)


@pytest.mark.parametrize("name", ["window", "batch_items_max", "held", "name", "surprise"])
def test_nesting_that_no_printer_survives_is_refused(name: str) -> None:
    value: Any = 1
    for _ in range(1_000):
        value = [value]
    nested = msgpack.packb(value)
    fields = {"role": "worker", "name": "w", "instance": 1, "model": "m", name: None}
    packed_fields = msgpack.packb(fields).replace(msgpack.packb(name) + b"\xc0", b"")
    header = b"ZF" + bytes([VERSION, Type.HELLO]) + packed_fields + msgpack.packb(name) + nested
    bench = Bench()
    bench.to_broker("workers", b"deep", [header])
    assert bench.fabric.counters["peer_errors_malformed"] == 1
