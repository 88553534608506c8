"""The catalog: what no segment can say of itself. One append-only log, rewritten at each start.

    record:  size u32 · CRC-32 u32 · `size` bytes of msgpack, a map whose `t` is its type

    store     id, format, ...     the first record; `records` is how many were written with it
    producer  i, name             the name behind an owner number
    floor     i, upto, seq        numbers up to `upto` were accepted; results up to `seq` existed;
                                  `above`: numbers that a crash left behind a hole
    forget    i                   the producer is forgotten
    claim     kind, name, user    the name belongs to the user whose key used it first
    unclaim   kind, name          it is anybody's again
    pause     model, paused       an operator stopped the batches of a model, or let them go on
    retired   nonce, items, tokens, ...   a segment is over: completed, dead, quarantined
    dead      id, ...             an item that was given up, with its payload
    undead    id                  that record was dropped, or its item requeued and stored
    retry     number, of          a requeued item's number, and the one it retries
    hole      nonce, hole, ended   entries of a segment that are over, whose bytes are given back
    window    n                   the rest of this write belongs to commit window n; all that was
                                  written before it is on the device

A write that a crash tore has no window behind it: it was never promised, and is cut off. Damage
with a window behind it, or within the records that were written at the start, means that the
catalog cannot be trusted, and the store refuses to start. The store says what is recorded when.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from zfabric.errors import StorageError
from zfabric.segment import FORMAT, NewerFormat

_PREFIX = struct.Struct("<II")
# Others are of a later release, and mean nothing here.
CLAIM_KINDS = frozenset({"producer", "worker"})
# How the body of a window record begins; damage is searched for the next one.
_WINDOW_MARK = b"\x82\xa1t\xa6window\xa1n"
# Every record's first field, behind one byte that says how many there are.
_TYPE_KEY = b"\xa1t"


@dataclass(slots=True)
class Floor:
    """What is known of a producer without looking at segments."""

    name: str
    upto: int = 0
    seq: int = 0
    above: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Catalog:
    """The sum of all records."""

    store_id: int = 0
    producers: dict[int, Floor] = field(default_factory=dict)
    next_producer: int = 0
    retired: set[int] = field(default_factory=set)
    # of each segment: records of the holes in it
    holes: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    ended_items: int = 0
    ended_tokens: int = 0
    dead_items: int = 0
    dead_tokens: int = 0
    quarantined_items: int = 0
    quarantined_tokens: int = 0
    dead: dict[int, dict[str, Any]] = field(default_factory=dict)
    next_dead: int = 1
    retries: dict[int, int] = field(default_factory=dict)
    # (kind, name) -> user, oldest first
    claims: dict[tuple[str, str], str] = field(default_factory=dict)
    # models whose batches an operator stopped
    paused: set[str] = field(default_factory=set)
    # made of what could still be read: a number that is missing is no loss, it was not looked for
    salvaged: bool = False
    # the next commit window; all before the last one begun are on the device
    window: int = 1

    def take(self, record: Mapping[str, Any]) -> None:
        """Enter one record. Raises NewerFormat for a store of a later release."""
        kind = record["t"]
        if kind == "store":
            self._take_store(record)
        elif kind == "producer":
            self.producers[record["i"]] = Floor(record["name"])
            self.next_producer = max(self.next_producer, record["i"] + 1)
        elif kind == "floor" and record["i"] in self.producers:
            floor = self.producers[record["i"]]
            floor.upto = max(floor.upto, record["upto"])
            floor.seq = max(floor.seq, record["seq"])
            above = record.get("above", ())
            if above or floor.above:
                floor.above = {n for n in (*floor.above, *above) if n > floor.upto}
        elif kind == "forget":
            self.producers.pop(record["i"], None)
        elif kind == "retired":
            self._take_retired(record)
        elif kind == "hole":
            self.holes.setdefault(record["nonce"], []).append(dict(record))
        elif kind == "dead":
            self.dead[record["id"]] = dict(record)
            self.next_dead = max(self.next_dead, record["id"] + 1)
        elif kind == "undead":
            self.dead.pop(record["id"], None)
        elif kind == "retry":
            self.retries[record["number"]] = record["of"]
        elif kind == "claim" and record["kind"] in CLAIM_KINDS:
            # As text they are what they were, and nothing else is ever recorded.
            self.claims[record["kind"], f"{record['name']}"] = f"{record['user']}"
        elif kind == "unclaim":
            self.claims.pop((record["kind"], f"{record['name']}"), None)
        elif kind == "pause":
            (self.paused.add if record["paused"] else self.paused.discard)(f"{record['model']}")
        elif kind == "window":
            self.window = max(self.window, record["n"])

    def _take_store(self, record: Mapping[str, Any]) -> None:
        if record["format"] > FORMAT:
            raise NewerFormat(
                f"the store has format {record['format']}; this release reads up to {FORMAT}"
            )
        self.store_id = record["id"]
        self.next_producer = max(self.next_producer, record.get("next_producer", 0))
        self.next_dead = max(self.next_dead, record.get("next_dead", 1))
        self.window = max(self.window, record.get("window", 1))

    def _take_retired(self, record: Mapping[str, Any]) -> None:
        if record["nonce"] in self.retired:
            return
        self.retired.add(record["nonce"])
        self.holes.pop(record["nonce"], None)
        self.ended_items += record["items"]
        self.ended_tokens += record["tokens"]
        self.dead_items += record["dead_items"]
        self.dead_tokens += record["dead_tokens"]
        self.quarantined_items += record.get("quarantined_items", 0)
        self.quarantined_tokens += record.get("quarantined_tokens", 0)

    def records(self, still_there: Iterable[int]) -> list[dict[str, Any]]:
        """The same in as few records as possible; what is of files only while they exist."""
        files = set(still_there)
        out: list[dict[str, Any]] = []
        for number, floor in self.producers.items():
            out.append({"t": "producer", "i": number, "name": floor.name})
            known = {"t": "floor", "i": number, "upto": floor.upto, "seq": floor.seq}
            out.append({**known, "above": sorted(floor.above)} if floor.above else known)
        ended = {
            "t": "retired",
            "nonce": 0,
            "items": self.ended_items,
            "tokens": self.ended_tokens,
            "dead_items": self.dead_items,
            "dead_tokens": self.dead_tokens,
            "quarantined_items": self.quarantined_items,
            "quarantined_tokens": self.quarantined_tokens,
        }
        out.append(ended)
        nothing = {"items": 0, "tokens": 0, "dead_items": 0, "dead_tokens": 0}
        out += [
            {"t": "retired", "nonce": nonce, **nothing}
            for nonce in self.retired.intersection(files)
            if nonce
        ]
        out += [hole for nonce, holes in self.holes.items() if nonce in files for hole in holes]
        out += self.dead.values()
        out += [{"t": "retry", "number": n, "of": of} for n, of in self.retries.items()]
        out += [
            {"t": "claim", "kind": k, "name": n, "user": u} for (k, n), u in self.claims.items()
        ]
        out += [{"t": "pause", "model": name, "paused": True} for name in sorted(self.paused)]
        store = {
            "t": "store",
            "id": self.store_id,
            "format": FORMAT,
            "next_producer": self.next_producer,
            "next_dead": self.next_dead,
            "window": self.window,
            "records": len(out) + 1,
        }
        return [store, *out]


def pack(record: Mapping[str, Any]) -> bytes:
    """One record as it lies in the log."""
    body: bytes = msgpack.packb(record)
    return _PREFIX.pack(len(body), zlib.crc32(body)) + body


def pack_window(number: int) -> bytes:
    """The record that a window's write begins with."""
    return pack({"t": "window", "n": number})


def read(data: bytes) -> tuple[Catalog, int]:
    """(the catalog, how many bytes of `data` are whole records).

    What is behind them is a torn end. Raises StorageError where that cannot be, NewerFormat for a
    later release's.
    """
    catalog = Catalog()
    position, count, wanted = enter(catalog, data)
    if count < wanted:
        raise StorageError(f"damaged at byte {position}, in record {count + 1} of {wanted}")
    if _window_behind(data, position):
        raise StorageError(f"damaged at byte {position}, with whole records behind")
    return catalog, position


def enter(catalog: Catalog, data: bytes) -> tuple[int, int, int]:
    """Enter the whole records that `data` begins with: (their bytes, how many, how many at least).

    The last is what the store's record says, among them. Raises StorageError where one makes no
    sense, NewerFormat for a later release's.
    """
    position = count = 0
    wanted = 1
    while (body := _body(data, position)) is not None:
        try:
            record = msgpack.unpackb(body, strict_map_key=False)
            catalog.take(record)
            wanted = max(wanted, record.get("records", 1))
        except (KeyError, TypeError, ValueError, AttributeError, msgpack.UnpackException) as error:
            raise StorageError(f"the record at byte {position} makes no sense: {error!r}") from None
        position += _PREFIX.size + len(body)
        count += 1
    return position, count, wanted


def salvage(data: bytes) -> Catalog:
    """A catalog of all records of a damaged log that are whole. Raises NewerFormat as `read`.

    Its store is another one: who was promised something asks again, and is told what is so.
    """
    catalog = Catalog(salvaged=True)
    position = 0
    while position < len(data):
        body = _body(data, position)
        if body is not None:
            # What is whole and makes no sense was written by nobody.
            with contextlib.suppress(
                KeyError, TypeError, ValueError, AttributeError, msgpack.UnpackException
            ):
                catalog.take(msgpack.unpackb(body, strict_map_key=False))
            position += _PREFIX.size + len(body)
            continue
        # Not every place of a payload is tried: what is read as a size may be most of the log.
        begin = data.find(_TYPE_KEY, position + _PREFIX.size + 2)
        position = begin - _PREFIX.size - 1 if begin >= 0 else len(data)
    catalog.store_id = secrets.randbits(64)
    return catalog


def _body(data: bytes, position: int) -> bytes | None:
    if len(data) - position < _PREFIX.size:
        return None
    size, crc = _PREFIX.unpack_from(data, position)
    if not 0 < size <= len(data) - position - _PREFIX.size:
        return None
    body = data[position + _PREFIX.size : position + _PREFIX.size + size]
    if zlib.crc32(body) != crc:
        return None
    return body


def _window_behind(data: bytes, position: int) -> bool:
    """Whether a later write began when the one at `position` was on the device already."""
    found = data.find(_WINDOW_MARK, position + 1)
    while found >= 0:
        begin = found - _PREFIX.size
        # The write at `position` may have lost the record before its own window, not behind it.
        if begin > position and _body(data, begin) is not None:
            return True
        found = data.find(_WINDOW_MARK, found + 1)
    return False
