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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zfabric.engine import Batch, Result
from zfabric.errors import ConfigError, PeerError, ProtocolError
from zfabric.protocol import Message, Status, Type, encode, packed, split
from zfabric.shapes import Shape

# One DONE: the broker's limit is per frame, and a column of 4,096 references is 32 KiB.
DONE_ITEMS_MAX = 4_096
DONE_BYTES_MAX = 1024 * 1024

READY, RUNNING, FINISHED, RETURNED = "ready", "running", "finished", "returned"

_STATUS_CODES = {"ok": Status.OK, "too_long": Status.TOO_LONG, "failed": Status.FAILED}

# (place in the broker's batch, result)
Placed = tuple[int, Result]


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
    # places that have no result yet
    open: set[int]
    # results that are in no DONE on its way
    fresh: list[Placed]
    phase: str = READY
    started: bool = False
    # the broker has taken it back while it ran: its results go out all the same
    revoked: bool = False
    # DONE messages sent on this connection and not acknowledged
    unacked: int = 0
    # of a returned batch: why, and whether this connection was told
    kind: str = ""
    text: str = ""
    told: bool = False

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

    def done_frames(
        self, results: Sequence[Placed], stats: Mapping[str, Any] | None
    ) -> list[bytes]:
        """DONE for these results."""
        fields = self.id_fields if stats is None else {**self.id_fields, "stats": stats}
        columns = [
            packed("Q", [self.nonces[place] for place, _ in results]),
            packed("I", [self.entries[place] for place, _ in results]),
            packed("B", [_STATUS_CODES[result.status] for _, result in results]),
            packed("I", [len(result.payload) for _, result in results]),
        ]
        body = b"".join([result.payload for _, result in results])
        return encode(Type.DONE, fields, columns, body)

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
        self.open.intersection_update(self.places)


def take(message: Message, serial: int, boot: int, input_tokens_max: int) -> Held:
    """A BATCH as it is held. Items over `input_tokens_max` have their result already.

    The broker's pad-to stays, also where an over-long item was the cause of it. Raises PeerError
    where the message contradicts itself.
    """
    fields, columns = message.fields, message.columns
    lengths = columns["lengths"]
    index = columns["shape_index"] or array("I", bytes(4 * len(lengths)))
    payloads = split(message.body, columns["sizes"])
    fits = [k for k, length in enumerate(lengths) if length <= input_tokens_max]
    try:
        batch = Batch(
            fields["model"],
            fields.get("pad_to"),
            tuple(lengths[k] for k in fits),
            tuple(payloads[k] for k in fits),
            _shapes(fields["model"], fields["shapes"]),
            tuple(index[k] for k in fits),
        )
    except (ProtocolError, ConfigError) as error:
        raise PeerError("malformed", f"a batch cannot be used: {error}") from None
    over = [k for k, length in enumerate(lengths) if length > input_tokens_max]
    return Held(
        serial,
        boot,
        (fields["epoch"], fields["n"]),
        columns["nonces"],
        columns["entries"],
        batch,
        fits,
        set(fits),
        [(place, Result.too_long()) for place in over],
    )


def _shapes(model: str, told: Any) -> tuple[Shape, ...]:
    shapes = []
    try:
        for entry in told:
            words = entry["components"]
            components = struct.unpack(f"<{len(words) // 8}Q", words)
            shapes.append(Shape(model, components, tuple(entry["tokens"])))
    except (TypeError, KeyError, struct.error) as error:
        raise PeerError("malformed", f"shapes of a batch cannot be read: {error!r}") from None
    return tuple(shapes)


def cut(results: Sequence[Placed], frame_bytes_max: int) -> Iterator[list[Placed]]:
    """`results` in parts that one DONE each can carry; at least one part unless there are none.

    A payload over `frame_bytes_max` would cost the connection, again and again: such a result is
    replaced by a failure that says so.
    """
    bytes_max = min(DONE_BYTES_MAX, frame_bytes_max)
    part: list[Placed] = []
    size = 0
    for place, result in results:
        if len(result.payload) > frame_bytes_max:
            text = f"a result of {len(result.payload)} bytes; at most {frame_bytes_max} are taken"
            result = Result.failed("result_too_large", text)
        if part and (size + len(result.payload) > bytes_max or len(part) >= DONE_ITEMS_MAX):
            yield part
            part, size = [], 0
        part.append((place, result))
        size += len(result.payload)
    if part:
        yield part
