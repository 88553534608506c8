"""What is fuzzed: how an input is made, and what must hold of whatever comes of it.

A target is a pair: `make(rng)` gives a value that msgpack can keep, `check(value)` raises where a
rule is broken. The same values lie in `corpus/`, by target, and are checked at every run.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.forge import Forge
from tests.harness import Bench
from zfabric import catalog, config, config_text, keys
from zfabric.access import KEY_ROLES, Grant
from zfabric.batchfile import BadLine, Request, read_requests
from zfabric.entries import aligned, pack_entries
from zfabric.errors import ConfigError, PeerError, StorageError
from zfabric.protocol import FROM_BROKER, TO_BROKER, TRANSITIONS, decode, encode, packed
from zfabric.scanning import scan_file
from zfabric.segment import ITEMS, Header, pack_header
from zfabric.shapes import Shape


class Target(NamedTuple):
    """One thing that is fuzzed."""

    make: Callable[[random.Random], Any]
    check: Callable[[Any], None]


# -- the codec --------------------------------------------------------------------------------


def check_codec(frames: list[bytes]) -> None:
    """Any bytes decode or are a PeerError; what decodes comes out again as it went in."""
    for specs in (TO_BROKER, FROM_BROKER):
        try:
            message = decode(frames, specs)
        except PeerError as error:
            assert error.code in {"malformed", "unknown_type", "too_large", "version_mismatch"}
            assert error.text
            continue
        spec = specs[message.kind]
        columns = [packed(code, message.columns[name.rstrip("?")]) for name, code in spec.columns]
        again = encode(message.kind, message.fields, columns, message.body if spec.body else None)
        assert decode(again, specs).columns == message.columns
        assert again[1:] == [bytes(frame) for frame in frames[1:]]


# -- the table of peer states -------------------------------------------------------------------

PEERS = (b"p1", b"p2", b"p3")
STEP_S = (0.0, 0.1, 1.0, 20.0)
KEYS = {f"{role}{n}": Grant(f"{role}{n}", role, n == 2) for role in KEY_ROLES for n in (1, 2)}


def check_holders(bench: Bench) -> None:
    """Whoever holds a name is a peer that messages still come from."""
    holders = [w.peer for w in bench.fabric.workers.values()]
    holders += [p.peer for p in bench.fabric.producers if p is not None]
    for peer in holders:
        assert peer is None or bench.dispatcher.peers.get(peer.address) is peer


class Listener:
    """The far end of a connection that may be anybody's by now: what it hears is the protocol."""

    def hear(self, frames: list[bytes]) -> None:
        decode(frames, FROM_BROKER)


def make_peers(rng: random.Random) -> Any:
    """Messages of strangers and known peers at both routers, with time going by."""
    forge = Forge(rng)
    script = []
    for _ in range(rng.randrange(1, 24)):
        key = rng.choice((*KEYS, "nobody's", None))
        endpoint = rng.choice(("producers", "workers"))
        step = rng.randrange(len(STEP_S))
        script.append([endpoint, rng.choice(PEERS), forge.message(), key, step])
    return {"keyed": rng.random() < 0.4, "script": script}


def check_peers(value: Any) -> None:
    """No message raises, breaks the books, or leaves a peer where the table has no such state."""
    bench = Bench(max_items=500, producer_items_max=200, attempts_max=2)
    producer, worker = bench.producer(), bench.worker()
    producer.submit([10, 20, 30])
    bench.settle()
    bench.dispatch(1)
    dispatcher = bench.dispatcher
    if value["keyed"]:
        dispatcher.gate.replace(KEYS)
    known = {b"p1": producer.routing_id, b"p2": worker.routing_id}
    bench.ends = {address: Listener() for address in bench.ends}
    for endpoint, name, frames, key, step in value["script"]:
        before = dict(dispatcher.peers)
        dispatcher.receive(endpoint, known.get(name, name), frames, bench.now, key)
        for address, peer in dispatcher.peers.items():
            assert address[0] == endpoint or before.get(address) is peer
            assert peer.state in TRANSITIONS[peer.role]
            if value["keyed"] and before.get(address) is not peer:
                assert key in KEYS and not KEYS[key].revoked
        check_holders(bench)
        bench.settle()
        if dispatcher.draining_since is None:
            bench.dispatch(2)
        bench.tick(STEP_S[step])
        bench.check()


# -- segments and the catalog --------------------------------------------------------------------

SHAPE = Shape.of("m", "a")
HEADER = Header(77, ITEMS, "m", SHAPE.signature, 0, SHAPE.components, capacity=32)
PLACE = Path("/s/it.seg")


def _segment(items: int) -> tuple[bytes, list[bytes]]:
    payloads = [bytes([65 + k]) * (3 * k + 1) for k in range(items)]
    numbers = list(range(1, items + 1))
    rows = [
        (9, 3, n, 0, 1_000, 9, 0, payload) for n, payload in zip(numbers, payloads, strict=True)
    ]
    pieces, _, _ = pack_entries(HEADER, HEADER.data_offset, 0, 5, rows)
    words = bytes(HEADER.data_offset - len(pack_header(HEADER)))
    return pack_header(HEADER) + words + b"".join(pieces), payloads


def make_segment(rng: random.Random) -> bytes:
    """A whole file with bytes flipped, written over, moved, cut off and put in."""
    data = bytearray(_segment(rng.randrange(1, 12))[0])
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 4, 8, 56, 64, 200))
        how = rng.randrange(6)
        if how == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at : at + size] = bytes(size)
        elif how == 2:
            data[at : at + size] = rng.randbytes(size)
        elif how == 3:
            del data[at:]
        elif how == 4:
            source = rng.randrange(len(data) + 1)
            data[at : at + size] = data[source : source + size]
        else:
            data[at:at] = rng.randbytes(size)
        if not data:
            return rng.randbytes(size)
    return bytes(data)


def check_segment(data: bytes) -> None:
    """A file is read or is a StorageError; an entry that is taken for whole is one that was."""
    try:
        found = scan_file(PLACE, ITEMS, data, lambda header: PLACE)
    except StorageError:
        return
    assert found.end <= max(aligned(len(data)), found.header.data_offset)
    assert len(found.lengths) == len(found.numbers) == len(found.owners) == found.places
    assert found.places <= found.header.capacity
    if found.header == HEADER:
        for number, length in zip(found.numbers, found.lengths, strict=True):
            assert (number, length) == (0, 0) or (1 <= number <= 32 and length == 9)
    for damage in found.damages:
        assert damage.offset <= damage.end


def make_catalog(rng: random.Random) -> bytes:
    """A log of real records, spoiled."""
    records: list[dict[str, Any]] = [
        {"t": "store", "id": 1, "format": 1, "records": 1},
        {"t": "producer", "i": 0, "name": "job"},
        {"t": "floor", "i": 0, "upto": 4, "seq": 2, "above": [9]},
        {"t": "claim", "kind": "producer", "name": "job", "user": "alice"},
        {"t": "unclaim", "kind": "producer", "name": "job"},
        {"t": "retry", "number": 2**63, "of": 1},
        {"t": "window", "n": 3},
    ]
    rng.shuffle(records)
    for record in records:
        if rng.random() < 0.2:
            record[rng.choice(list(record))] = Forge(rng).junk(2)
    data = bytearray(b"".join(catalog.pack(record) for record in records))
    for _ in range(rng.randrange(3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data[: rng.choice((len(data), rng.randrange(len(data) + 1)))])


def check_catalog(data: bytes) -> None:
    """A log is read up to a place, or is a StorageError; what is read can be written anew."""
    try:
        known, position = catalog.read(data)
    except StorageError:
        with contextlib.suppress(StorageError):
            catalog.salvage(data)
        return
    assert 0 <= position <= len(data)
    written = b"".join(catalog.pack(record) for record in known.records(()))
    assert catalog.read(written)[0].claims == known.claims


# -- files of users -------------------------------------------------------------------------------

LINES = (
    b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":'
    b'[{"role":"system","content":"s"},{"role":"user","content":"hi"}]}}',
    b'{"custom_id":"b","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":"p"}}',
    b'{"custom_id":"c","method":"POST","url":"/v1/embeddings","body":{"model":"m","input":["x"]},'
    b'"shape":["one","two"]}',
    b"", b"   ", b"not json", b"[1]", b"null", b'{"custom_id":1}', b"\xff\xfe", b"[" * 3_000,
    b'{"custom_id":"d","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":1e999}}',
)  # fmt: skip


def make_batch(rng: random.Random) -> bytes:
    """Lines that are good, bad and spoiled."""
    lines = []
    for _ in range(rng.randrange(1, 9)):
        line = bytearray(rng.choice(LINES))
        for _ in range(rng.choice((0, 0, 1, 3))):
            if line:
                at = rng.randrange(len(line))
                line[at : at + rng.randrange(3)] = rng.choice(
                    (b"", b'"', b"{", b"\\ud800", b"\x00", b"1e999", rng.randbytes(2))
                )
        lines.append(bytes(line))
    return rng.choice((b"\n", b"\r\n")).join(lines) + rng.choice((b"", b"\n"))


def check_batch(data: bytes) -> None:
    """One Request or BadLine for each line that is not blank, in order, whatever is in it."""
    rows = list(read_requests(io.BytesIO(data), line_bytes_max=2_000))
    numbers = [row.line_number for row in rows]
    assert numbers == sorted(set(numbers))
    lines = data.split(b"\n")
    blank = [n for n, line in enumerate(lines, 1) if not line.strip()]
    assert not set(numbers) & {n for n in blank if n > 1 or lines[0] == b""}
    for row in rows:
        if isinstance(row, BadLine):
            assert row.code and row.reason
        else:
            assert isinstance(row, Request)
            assert row.payload in lines[row.line_number - 1]
            assert row.length_tokens >= 0
            row.custom_id.encode()


def make_config(rng: random.Random) -> bytes:
    """A zfabric.toml with known and unknown keys, and values of every kind."""
    values = (
        "1", "-1", "0", "1e400", "nan", "true", '"x"', '"4 GiB"', '"0.0.0.0"', "[1]", "{a = 1}",
        "1979-05-27", '"\\u001b[2J"', "99999999999999999999", "''", '"none"', "0x1F",
    )  # fmt: skip
    names = list(config.KEYS)
    lines = []
    for _ in range(rng.randrange(1, 12)):
        section, name = rng.choice(names).split(".")
        name = name if rng.random() < 0.95 else name + "x"
        lines.append((section, f"{name} = {rng.choice(values)}"))
    lines.sort(key=lambda row: row[0])
    out, last = [], ""
    for section, line in lines:
        if section != last:
            out.append(f"[{section}]")
            last = section
        out.append(line)
    data = bytearray("\n".join(out).encode())
    if rng.random() < 0.2 and data:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def check_config(data: bytes) -> None:
    """A file is a configuration or a ConfigError; what is shown of it means the same again."""
    with tempfile.TemporaryDirectory() as place:
        directory, nowhere = Path(place), Path(place) / "none"
        (directory / config.FILE_NAME).write_bytes(data)
        try:
            read = config.load(environ={}, directory=directory, user_directory=nowhere)
        except ConfigError as error:
            assert str(error)
            return
        lines = []
        for section in config.SECTIONS:
            lines.append(f"[{section}]")
            lines += [
                f"{key.name} = {key.toml(value)}"
                for key, value, _ in config_text.show(read)
                if key.section == section and value is not None
            ]
        (directory / config.FILE_NAME).write_text("\n".join(lines), encoding="utf-8")
        again = config.load(environ={}, directory=directory, user_directory=nowhere)
        sections = (read.broker, read.worker, read.client)
        assert (again.broker, again.worker, again.client) == sections


SECRET = "k1{R7nQ&EwT:4z8YvS<pB#xD0mLcJ6(gU9aXhW2f"


def make_keys(rng: random.Random) -> bytes:
    """A key file and a list of keys, spoiled; the secret is where an error could quote it."""
    good = (
        f'user = "eve"\nrole = "producer"\npublic = "{"p" * 40}"\nsecret = "{SECRET}"\n'
        f'server = "{"s" * 40}"\n'
    )
    listed = f'[[key]]\nuser = "eve"\nrole = "worker"\npublic = "{SECRET}"\nmade = "2026"\n'
    data = bytearray(rng.choice((good, listed, listed + listed, "")).encode())
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.randrange(4)] = rng.choice(
            (b"", b'"', b"\n", b"=", b"[", b"1", b"\xff", b"[[key]]", b"\\")
        )
    return bytes(data)


def check_keys(data: bytes) -> None:
    """Either file is read or is a ConfigError, and no error quotes what it holds."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / keys.CLIENTS_FILE
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as stream:
            stream.write(data)
        for read in (lambda: keys.load_client_key(path), keys.Keyring(Path(place)).table):
            try:
                found = read()
            except ConfigError as error:
                assert SECRET[:20] not in str(error)
            else:
                assert SECRET not in repr(found) or isinstance(found, dict)


TARGETS = {
    "codec": Target(lambda rng: Forge(rng).message(), check_codec),
    "peers": Target(make_peers, check_peers),
    "segment": Target(make_segment, check_segment),
    "catalog": Target(make_catalog, check_catalog),
    "batch": Target(make_batch, check_batch),
    "config": Target(make_config, check_config),
    "keys": Target(make_keys, check_keys),
}
