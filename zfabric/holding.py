"""What a worker holds: one batch from its arrival until the broker needs no more of it.

    ready --start--> running --final results--> finished --DONE_ACK of all--> (gone)
      |                 +--give_back--> returned --REVOKE--> (gone)
      +--REVOKE, another broker--> (gone), or give_back

Decides how a BATCH is taken apart (over-long items never reach an engine) and how results are cut
into DONE messages. When anything is said or forgotten is for `worker_session`. Lengths are
tokens, sizes bytes. No socket, no clock.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from zfabric.engine import Batch, Result
from zfabric.engine import Status as StatusWord
from zfabric.errors import ConfigError, PeerError, ProtocolError
from zfabric.protocol import Message, Status, Type, encode, packed, split
from zfabric.shapes import Shape
from zfabric.spans import spans

# One DONE: the broker's limit is per frame, and a column of 4,096 references is 32 KiB.
DONE_ITEMS_MAX = 4_096
DONE_BYTES_MAX = 1024 * 1024
# Most batches have the shapes of one shortly before; a fifo batch may have 65,536 of them.
SHAPES_KEPT = 1_024

READY, RUNNING, FINISHED, RETURNED = "ready", "running", "finished", "returned"

_STATUS_CODES = {"ok": Status.OK, "too_long": Status.TOO_LONG, "failed": Status.FAILED}


@dataclass(slots=True)
class Ended:
    """How items ended, as columns: their places in the broker's batch, status words, payloads."""

    places: list[int]
    statuses: list[StatusWord]
    payloads: list[bytes]

    def __len__(self) -> int:
        return len(self.places)

    def part(self, start: int, stop: int) -> Ended:
        """A copy of the columns from `start` to `stop`."""
        return Ended(self.places[start:stop], self.statuses[start:stop], self.payloads[start:stop])

    def extend(
        self, places: Sequence[int], statuses: Sequence[StatusWord], payloads: Sequence[bytes]
    ) -> None:
        """These ended too."""
        self.places += places
        self.statuses += statuses
        self.payloads += payloads


@dataclass(slots=True)
class Held:
    """One batch of the broker's; `places` says where each item of `batch` stands in it.

    `serial` names it in this process; `id` is (epoch, number), which only the broker of that
    `boot` understands.
    """

    serial: int
    boot: int
    id: tuple[int, int]
    nonces: array[int]
    entries: array[int]
    batch: Batch
    places: list[int]
    # results that are in no DONE on its way
    fresh: Ended
    # places that have a result while others have none yet
    answered: set[int]
    phase: str = READY
    started: bool = False
    # the broker has taken it back while it ran: its results go out all the same
    revoked: bool = False
    # DONE messages sent on this connection and not acknowledged
    unacked: int = 0
    # of a returned batch: why
    kind: str = ""
    text: str = ""

    @property
    def id_fields(self) -> dict[str, Any]:
        """The batch id as message fields."""
        return {"epoch": self.id[0], "n": self.id[1]}

    @property
    def spent(self) -> bool:
        """Finished, and the broker has every result."""
        return self.phase == FINISHED and not self.fresh and not self.unacked

    def started_frames(self) -> list[bytes]:
        """STARTED for the items that the engine gets."""
        whole = len(self.places) == len(self.nonces)
        indices = packed("I", () if whole else self.places)
        return encode(Type.STARTED, self.id_fields, [indices])

    def returned_frames(self) -> list[bytes]:
        """RETURNED for everything that has no result."""
        fields = {**self.id_fields, "kind": self.kind, "text": self.text}
        return encode(Type.RETURNED, fields, [b""])

    def done_frames(self, ended: Ended, stats: Mapping[str, Any] | None) -> list[bytes]:
        """DONE for these results."""
        fields = self.id_fields if stats is None else {**self.id_fields, "stats": stats}
        nonces: Iterable[int] = self.nonces
        entries: Iterable[int] = self.entries
        if ended.places != list(range(len(self.nonces))):
            nonces = [self.nonces[place] for place in ended.places]
            entries = [self.entries[place] for place in ended.places]
        columns = [
            packed("Q", nonces),
            packed("I", entries),
            bytes([_STATUS_CODES[status] for status in ended.statuses]),
            packed("I", list(map(len, ended.payloads))),
        ]
        return encode(Type.DONE, fields, columns, b"".join(ended.payloads))

    def drop_items(self, places: set[int]) -> None:
        """These items of a ready batch are not to be run."""
        stay = [k for k, place in enumerate(self.places) if place not in places]
        old = self.batch
        self.batch = Batch(
            old.model,
            old.pad_to,
            tuple(old.lengths[k] for k in stay),
            tuple(old.payloads[k] for k in stay),
            old.shapes,
            tuple(old.shape_index[k] for k in stay),
        )
        self.places = [self.places[k] for k in stay]


def take(message: Message, serial: int, boot: int, input_tokens_max: int) -> Held:
    """A BATCH as it is held. Items over `input_tokens_max` have their result already.

    The broker's pad-to stays, also where an over-long item was the cause of it. Raises PeerError
    where the message contradicts itself.
    """
    fields, columns = message.fields, message.columns
    lengths: Sequence[int] = columns["lengths"]
    index: Sequence[int] = columns["shape_index"] or bytes(len(lengths))
    payloads = split(message.body, columns["sizes"])
    fits, over = list(range(len(lengths))), []
    if max(lengths, default=0) > input_tokens_max:
        over = [k for k in fits if lengths[k] > input_tokens_max]
        fits = [k for k in fits if lengths[k] <= input_tokens_max]
        lengths, index = [lengths[k] for k in fits], [index[k] for k in fits]
        payloads = [payloads[k] for k in fits]
    try:
        batch = Batch(
            fields["model"],
            fields.get("pad_to"),
            tuple(lengths),
            tuple(payloads),
            _shapes(fields["model"], fields["shapes"]),
            tuple(index),
        )
    except (ProtocolError, ConfigError) as error:
        raise PeerError("malformed", f"a batch cannot be used: {error}") from None
    return Held(
        serial,
        boot,
        (fields["epoch"], fields["n"]),
        columns["nonces"],
        columns["entries"],
        batch,
        fits,
        Ended(over, ["too_long"] * len(over), [b""] * len(over)),
        set(),
    )


def _shapes(model: str, told: Any) -> tuple[Shape, ...]:
    try:
        return tuple([_shape(model, each["components"], tuple(each["tokens"])) for each in told])
    except (TypeError, KeyError, struct.error) as error:
        raise PeerError("malformed", f"shapes of a batch cannot be read: {error!r}") from None


@lru_cache(SHAPES_KEPT)
def _shape(model: str, words: bytes, tokens: tuple[int | None, ...]) -> Shape:
    return Shape(model, struct.unpack(f"<{len(words) // 8}Q", words), tokens)


def cut(ended: Ended, frame_bytes_max: int) -> Iterator[Ended]:
    """`ended` in parts that one DONE each can carry; at least one part unless there are none.

    A payload over `frame_bytes_max` would cost the connection, again and again: such a result is
    replaced, in `ended` too, by a failure that says so.
    """
    sizes = list(map(len, ended.payloads))
    if max(sizes, default=0) > frame_bytes_max:
        for k, size in enumerate(sizes):
            if size > frame_bytes_max:
                text = f"a result of {size} bytes; at most {frame_bytes_max} are taken"
                failed = Result.failed("result_too_large", text)
                ended.statuses[k], ended.payloads[k] = failed.status, failed.payload
                sizes[k] = len(failed.payload)
    for start, stop in spans(sizes, DONE_ITEMS_MAX, min(DONE_BYTES_MAX, frame_bytes_max)):
        yield ended.part(start, stop)
