"""Makes what a peer could send: noise, near misses, and good messages at the wrong time.

All of it comes from one source of random numbers, so that a seed, or hypothesis, decides it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from zfabric.protocol import FROM_BROKER, TO_BROKER, VERSION, Type, encode, packed

LOOKS = ("status", "shapes", "lanes", "workers", "events", "lengths", "dead.ls", "producers.ls")
ORDERS = (
    *("drain", "pause", "resume", "dead.requeue", "dead.drop", "producers.cancel"),
    *("producers.forget", "workers.forget", "expect"),
)
NAN = float("nan")
HEADERS = (
    b"", b"ZF", b"ZF\x01", b"ZF\x01\x01", b"ZF\x02\x01\x80", b"GET / HTTP/1.1\r\n\r\n",
    b"ZF\x01\x06" + b"\x91" * 3_000, b"ZF\x01\x06\xdf\xff\xff\xff\xff", b"ZF\x01\x06\xc1",
    b"ZF\x01\x01\x81\xa4name\xdb\xff\xff\xff\xff", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)  # fmt: skip


class Forge:
    """`models` and `names` are what its peers call themselves; `ops` what they ask for."""

    def __init__(
        self,
        rng: random.Random,
        *,
        models: Sequence[str] = ("m", "n"),
        names: Sequence[str] = ("job", "gpu0", "x", "\x1b[2J", "n" * 300),
        ops: Sequence[str] = LOOKS + ORDERS,
    ) -> None:
        self.rng = rng
        self.models, self.names, self.ops = models, names, ops

    def message(self) -> list[bytes]:
        """The frames of one message, good or bad."""
        kind = self.rng.random()
        if kind < 0.08:
            return [
                self.rng.randbytes(self.rng.randrange(60)) for _ in range(self.rng.randrange(6))
            ]
        if kind < 0.14:
            return [self.rng.choice(HEADERS), *self.columns()]
        if kind < 0.34:
            return self.near_miss()
        frames = self.good()
        return frames if kind < 0.75 else self.spoiled(frames)

    def near_miss(self) -> list[bytes]:
        """A real type with fields of its own, of others, and values of any kind."""
        kind = self.rng.choice(list(Type))
        spec = TO_BROKER.get(kind) or FROM_BROKER[kind]
        known = [*spec.required, *spec.optional, "surprise"]
        fields = {self.rng.choice(known): self.junk(3) for _ in range(self.rng.randrange(6))}
        version = VERSION if self.rng.random() < 0.9 else self.rng.randrange(256)
        header = b"ZF" + bytes([version, kind]) + msgpack.packb(fields)
        return [header, *self.columns()]

    def spoiled(self, frames: list[bytes]) -> list[bytes]:
        """A good message with a byte, a frame or an end that is wrong."""
        out = list(frames)
        at = self.rng.randrange(len(out))
        how = self.rng.randrange(5)
        if how == 0 and out[at]:
            spoilt = bytearray(out[at])
            spoilt[self.rng.randrange(len(spoilt))] ^= 1 << self.rng.randrange(8)
            out[at] = bytes(spoilt)
        elif how == 1:
            out[at] = out[at][: self.rng.randrange(len(out[at]) + 1)]
        elif how == 2:
            out.insert(at, out[at])
        elif how == 3:
            del out[at]
        else:
            out[at] = out[at] + self.rng.randbytes(self.rng.randrange(1, 9))
        return out

    def good(self) -> list[bytes]:
        """A message as the protocol has it; whether it may be sent now is another question."""
        kind = self.rng.choice(list(TO_BROKER))
        makes = {
            Type.HELLO: self._hello,
            Type.SHAPE: self._shape,
            Type.SUBMIT: self._submit,
            Type.DONE: self._done,
            Type.REQUEST: self._request,
            Type.HEARTBEAT: self._heartbeat,
        }
        if kind in makes:
            return makes[kind]()
        if kind is Type.RESULT_ACK:
            return encode(kind, {"upto": self.rng.choice((0, 1, 3, 2**62))})
        if kind is Type.BYE:
            return encode(kind, {"reason": self.word()})
        indices = packed("I", [self.rng.randrange(9) for _ in range(self.rng.randrange(3))])
        if kind is Type.STARTED:
            return encode(kind, self._batch(), [indices])
        told = {"kind": self.rng.choice(("engine_exit", "out_of_memory", "leaving"))}
        return encode(kind, {**self._batch(), **told, "text": self.word()}, [indices])

    def columns(self) -> list[bytes]:
        """Frames that could be columns."""
        return [
            self.rng.randbytes(self.rng.choice((0, 1, 4, 8, 16, 40)))
            for _ in range(self.rng.randrange(7))
        ]

    def word(self) -> str:
        """Text, some of it that no terminal should be given."""
        return self.rng.choice(("", "a", "\x1b]0;x\x07", "\u202e", "gone", "x" * 200))

    def junk(self, depth: int) -> Any:
        """Any value that a header can hold."""
        kind = self.rng.randrange(9 if depth else 7)
        if kind == 7:
            return [self.junk(depth - 1) for _ in range(self.rng.randrange(4))]
        if kind == 8:
            return {self.word(): self.junk(depth - 1) for _ in range(self.rng.randrange(4))}
        return self.rng.choice(
            (
                None,
                True,
                0,
                -1,
                2**63,
                1.5,
                self.word(),
                self.rng.randbytes(8),
                7,
                "m",
                float("nan"),
            )
        )

    def _hello(self) -> list[bytes]:
        role = self.rng.choice(("producer", "worker", "operator"))
        name = self.rng.choice(self.names)
        fields: dict[str, Any] = {"role": role, "name": name, "instance": self.rng.randrange(3)}
        if role == "worker":
            sizes = (1, 8, 8, 4_096, 4_096, 0, -1, 2**40, "8", None, 1.5)
            contract = ("batch_items_max", "batch_tokens_max", "input_tokens_max")
            fields |= {"model": self.rng.choice(self.models)}
            fields |= {key: self.rng.choice(sizes) for key in contract}
            fields |= {"window": self.rng.choice((1, 2, 64, 65)), "ragged": self.rng.random() < 0.5}
            fields |= {"held": self._ids(), "boot": self.rng.choice((7, 8))}
        return encode(Type.HELLO, fields)

    def _ids(self) -> list[list[int]]:
        return [
            [self.rng.randrange(6), self.rng.randrange(4)] for _ in range(self.rng.randrange(3))
        ]

    def _batch(self) -> dict[str, int]:
        return {"epoch": self.rng.randrange(6), "n": self.rng.randrange(4)}

    def _shape(self) -> list[bytes]:
        words = [self.rng.randrange(4) for _ in range(self.rng.randrange(4))]
        fields: dict[str, Any] = {
            "id": self.rng.randrange(4),
            "model": self.rng.choice(self.models),
            "components": struct.pack(f"<{len(words)}Q", *words),
        }
        if self.rng.random() < 0.3:
            fields["tokens"] = [self.rng.choice((None, 5)) for _ in words]
        if self.rng.random() < 0.2:
            fields["label"] = self.word()[:100]
        return encode(Type.SHAPE, fields)

    def _submit(self) -> list[bytes]:
        count = self.rng.randrange(6)
        first = self.rng.choice((0, 1, 2, 5, 2**63 - 2))
        numbers = [min(first + k * self.rng.choice((1, 1, 2, 0)), 2**64 - 1) for k in range(count)]
        sizes = [self.rng.choice((0, 1, 9, 300)) for _ in range(count)]
        order = list(range(count)) if self.rng.random() < 0.5 else []
        columns = [
            packed("Q", numbers),
            packed("I", [self.rng.choice((0, 1, 50, 2**31, 2**32 - 1)) for _ in range(count)]),
            packed("I", sizes),
            packed("I", [self.rng.randrange(5) for _ in range(count)]),
            packed("I", order),
        ]
        fields = {"after": self.rng.choice((0, 0, 1, 4)), "more": self.rng.random() < 0.3}
        return encode(Type.SUBMIT, fields, columns, self.rng.randbytes(sum(sizes)))

    def _done(self) -> list[bytes]:
        count = self.rng.randrange(4)
        sizes = [self.rng.choice((0, 3, 50)) for _ in range(count)]
        columns = [
            packed("Q", [self.rng.choice((0, 1, 2**63)) for _ in range(count)]),
            packed("I", [self.rng.randrange(4) for _ in range(count)]),
            packed("B", [self.rng.randrange(8) for _ in range(count)]),
            packed("I", sizes),
        ]
        return encode(Type.DONE, self._batch(), columns, self.rng.randbytes(sum(sizes)))

    def _request(self) -> list[bytes]:
        args = {
            self.rng.choice(("name", "model", "ids", "all", "top", "since", "signature", "force")):
            self.rng.choice(("job", "m", [1], True, 0, -1, "ff", self.junk(2)))
            for _ in range(self.rng.randrange(3))
        }  # fmt: skip
        op = self.rng.choice((*self.ops, self.word()[:60]))
        return encode(Type.REQUEST, {"id": self.rng.randrange(2**40), "op": op, "args": args})

    def _heartbeat(self) -> list[bytes]:
        fields = {
            "received": self.rng.choice((0, 1, 2**62)),
            "holding": self._ids(),
            "started": self._ids(),
            "window": self.rng.choice((0, 2, 64)),
            "stats": self.rng.choice(
                ({}, {"state": self.word(), "hits_tokens": -1, "queries_tokens": "x"})
            ),
        }
        return encode(Type.HEARTBEAT, {k: v for k, v in fields.items() if self.rng.random() < 0.7})
