"""The catalog: what no segment can say of itself. One append-only log, rewritten at each start.

    record:  size u32 · CRC-32 u32 · `size` bytes of msgpack, a map whose `t` is its type

    store     id, format          a new store; the first record
    producer  i, name             the name behind an owner number
    floor     i, upto, seq        numbers up to `upto` were accepted; results up to `seq` existed
    forget    i                   the producer is forgotten
    retired   nonce, items, tokens, dead_items, dead_tokens   a segment is over
    dead      id, ...             an item that was given up, with its payload
    undead    id                  that record was requeued or dropped
    retry     number, of          a requeued item's number, and the one it retries

A torn end was never synced and is cut off; damage before it means that the catalog cannot be
trusted, and the store refuses to start. Decides nothing; the store says what is recorded when.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from zfabric.errors import StorageError
from zfabric.segment import FORMAT, NewerFormat

_PREFIX = struct.Struct("<II")
# Larger than any payload with its record; a size beyond it is damage.
RECORD_BYTES_MAX = 2 * 1024 * 1024 * 1024


@dataclass(slots=True)
class Floor:
    """What is known of a producer without looking at segments."""

    name: str
    upto: int = 0
    seq: int = 0


@dataclass(slots=True)
class Catalog:
    """The sum of all records."""

    store_id: int = 0
    producers: dict[int, Floor] = field(default_factory=dict)
    next_producer: int = 0
    retired: set[int] = field(default_factory=set)
    ended_items: int = 0
    ended_tokens: int = 0
    dead_items: int = 0
    dead_tokens: int = 0
    dead: dict[int, dict[str, Any]] = field(default_factory=dict)
    next_dead: int = 1
    retries: dict[int, int] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        """Enter one record. Raises NewerFormat for a store of a later release."""
        kind = record["t"]
        if kind == "store":
            if record["format"] > FORMAT:
                raise NewerFormat(
                    f"the store has format {record['format']}; this release reads up to {FORMAT}"
                )
            self.store_id = record["id"]
            self.next_producer = max(self.next_producer, record.get("next_producer", 0))
            self.next_dead = max(self.next_dead, record.get("next_dead", 1))
        elif kind == "producer":
            self.producers[record["i"]] = Floor(record["name"])
            self.next_producer = max(self.next_producer, record["i"] + 1)
        elif kind == "floor" and record["i"] in self.producers:
            floor = self.producers[record["i"]]
            floor.upto = max(floor.upto, record["upto"])
            floor.seq = max(floor.seq, record["seq"])
        elif kind == "forget":
            self.producers.pop(record["i"], None)
        elif kind == "retired":
            self._take_retired(record)
        elif kind == "dead":
            self.dead[record["id"]] = dict(record)
            self.next_dead = max(self.next_dead, record["id"] + 1)
        elif kind == "undead":
            self.dead.pop(record["id"], None)
        elif kind == "retry":
            self.retries[record["number"]] = record["of"]

    def _take_retired(self, record: Mapping[str, Any]) -> None:
        if record["nonce"] in self.retired:
            return
        self.retired.add(record["nonce"])
        self.ended_items += record["items"]
        self.ended_tokens += record["tokens"]
        self.dead_items += record["dead_items"]
        self.dead_tokens += record["dead_tokens"]

    def records(self, still_there: Iterable[int]) -> list[dict[str, Any]]:
        """The same in as few records as possible; retired nonces only while their files exist."""
        store = {
            "t": "store",
            "id": self.store_id,
            "format": FORMAT,
            "next_producer": self.next_producer,
            "next_dead": self.next_dead,
        }
        out: list[dict[str, Any]] = [store]
        for number, floor in self.producers.items():
            out.append({"t": "producer", "i": number, "name": floor.name})
            out.append({"t": "floor", "i": number, "upto": floor.upto, "seq": floor.seq})
        ended = {
            "t": "retired",
            "nonce": 0,
            "items": self.ended_items,
            "tokens": self.ended_tokens,
            "dead_items": self.dead_items,
            "dead_tokens": self.dead_tokens,
        }
        out.append(ended)
        nothing = {"items": 0, "tokens": 0, "dead_items": 0, "dead_tokens": 0}
        out += [
            {"t": "retired", "nonce": nonce, **nothing}
            for nonce in self.retired.intersection(still_there)
            if nonce
        ]
        out += self.dead.values()
        out += [{"t": "retry", "number": n, "of": of} for n, of in self.retries.items()]
        return out


def pack(record: Mapping[str, Any]) -> bytes:
    """One record as it lies in the log."""
    body: bytes = msgpack.packb(record)
    return _PREFIX.pack(len(body), zlib.crc32(body)) + body


def read(data: bytes) -> tuple[Catalog, int]:
    """(the catalog, how many bytes of `data` are whole records).

    What is behind them is a torn end if nothing whole follows. Raises StorageError where whole
    records follow damage, NewerFormat for a later release's.
    """
    catalog = Catalog()
    position = 0
    while position < len(data):
        body = _body(data, position)
        if body is None:
            _check_torn(data, position)
            break
        catalog.take(msgpack.unpackb(body, strict_map_key=False))
        position += _PREFIX.size + len(body)
    return catalog, position


def _body(data: bytes, position: int) -> bytes | None:
    if len(data) - position < _PREFIX.size:
        return None
    size, crc = _PREFIX.unpack_from(data, position)
    body = data[position + _PREFIX.size : position + _PREFIX.size + size]
    if not size or len(body) < size or zlib.crc32(body) != crc:
        return None
    return body


def _check_torn(data: bytes, position: int) -> None:
    """Raise StorageError where a whole record follows the bad one at `position`."""
    if len(data) - position < _PREFIX.size:
        return
    size, _ = _PREFIX.unpack_from(data, position)
    following = position + _PREFIX.size + size
    if size and following < len(data) and _body(data, following) is not None:
        raise StorageError(f"catalog.log is damaged at byte {position}")
