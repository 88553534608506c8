"""A recording: what a broker published, in one SQLite file, compressed, of bounded size.

    meta(key, value)                          schema version, release
    frames(seq, time, kind, about, base, data)

`time` is the broker's own, seconds since the epoch; `data` is the message as it was published
(msgpack), through zlib. A snapshot is compressed against the last key snapshot (`base`), of which
it repeats most. `about` is the signature of lanes. When the file reaches its limit the oldest
frames go, and their room is used again. A file of a later schema is refused, never changed.
"""

from __future__ import annotations

import sqlite3
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack

from zfabric.errors import ConfigError

SCHEMA = 1
SNAPSHOT, EVENT, LANES, LENGTHS = range(4)
# Snapshots from one key snapshot to the next: seeking decodes two, and one in 64 is stored whole.
KEY_EVERY = 64
# Longer than this between two snapshots, and nothing is known of the time between them.
GAP_S = 3.0
# What goes at once when the file is full, of all frames.
DROP_SHARE = 10
CREATE = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE frames (
  seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind INTEGER NOT NULL, about TEXT, base INTEGER,
  data BLOB NOT NULL
);
CREATE INDEX frames_kind_time ON frames (kind, time);
"""


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Raises ConfigError where this is no recording, or one of a later schema."""
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    except sqlite3.DatabaseError:
        found = None
    if found is None:
        raise ConfigError(f"{path} is not a recording of zfabric; name another file")
    if int(found[0]) > SCHEMA:
        raise ConfigError(
            f"{path} has schema {found[0]} and this release knows {SCHEMA}: use the release that "
            "made it"
        )


class Writer:
    """Appends to a recording, making it if need be; several lives of a broker go into one file."""

    def __init__(self, path: Path, *, release: str, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        fresh = not path.exists() or path.stat().st_size == 0
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            if fresh:
                self._db.executescript(CREATE)
                rows = [("schema", str(SCHEMA)), ("release", release)]
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
            _check(self._db, path)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error as error:
            raise ConfigError(f"cannot record into {path}: {error}") from None
        self._open = False
        self._key: tuple[int, bytes] | None = None
        self._since_key = 0

    def add(self, kind: int, time_s: float, raw: bytes, about: str | None = None) -> None:
        """Keep one message as it was published. Raises ConfigError where the file takes nothing."""
        try:
            if not self._open:
                self._db.execute("BEGIN")
                self._open = True
            base = None
            if kind == SNAPSHOT:
                base = self._base()
            data = pack(raw, None if base is None else base[1])
            row = (time_s, kind, about, None if base is None else base[0], data)
            done = self._db.execute(
                "INSERT INTO frames (time, kind, about, base, data) VALUES (?, ?, ?, ?, ?)", row
            )
        except sqlite3.Error as error:
            raise ConfigError(f"the recording takes nothing more: {error}") from None
        if kind == SNAPSHOT and base is None and done.lastrowid is not None:
            self._key = (done.lastrowid, raw)

    def _base(self) -> tuple[int, bytes] | None:
        """The key snapshot to compress against; None: the next is to be one."""
        self._since_key += 1
        if self._key is None or self._since_key >= KEY_EVERY:
            self._since_key = 0
            self._drop_oldest()
            return None
        return self._key

    def _drop_oldest(self) -> None:
        db = self._db
        pages, free, size = (
            db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        if (pages - free) * size <= self._limit_bytes:
            return
        first, last = db.execute("SELECT min(seq), max(seq) FROM frames").fetchone()
        # A snapshot needs its base, so that frames go up to a key snapshot.
        upto = db.execute(
            "SELECT max(seq) FROM frames WHERE kind = ? AND base IS NULL AND seq <= ?",
            (SNAPSHOT, first + max(1, (last - first) // DROP_SHARE)),
        ).fetchone()[0]
        if upto == first:
            upto = db.execute(
                "SELECT min(seq) FROM frames WHERE kind = ? AND base IS NULL AND seq > ?",
                (SNAPSHOT, first),
            ).fetchone()[0]
        if upto is not None:
            db.execute("DELETE FROM frames WHERE seq < ?", (upto,))

    def commit(self) -> None:
        """Everything so far is in the file."""
        if self._open:
            self._open = False
            try:
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise ConfigError(f"the recording takes nothing more: {error}") from None

    def close(self) -> None:
        """Commit and close."""
        try:
            self.commit()
        finally:
            self._db.close()


def pack(raw: bytes, base: bytes | None) -> bytes:
    """`raw` through zlib, against `base` where there is one."""
    if base is None:
        return zlib.compress(raw)
    maker = zlib.compressobj(zdict=base)
    return maker.compress(raw) + maker.flush()


def unpack(data: bytes, base: bytes | None) -> bytes:
    """The reverse."""
    if base is None:
        return zlib.decompress(data)
    return zlib.decompressobj(zdict=base).decompress(data)


def _value(data: bytes, base: bytes | None) -> dict[str, Any]:
    try:
        value: dict[str, Any] = msgpack.unpackb(unpack(data, base))
    except (zlib.error, ValueError, msgpack.UnpackException) as error:
        raise ConfigError(f"the recording is damaged: {error}") from None
    return value


def _completed(snapshot: dict[str, Any]) -> dict[str, Any]:
    """A snapshot with the fields that releases before this one did not publish."""
    snapshot.setdefault("lane_pressure_ratio_run", snapshot.get("lane_pressure_ratio"))
    if isinstance(storage := snapshot.get("storage"), dict):
        storage.setdefault("disk_reserve_bytes", None)
    return snapshot


class Reader:
    """Reads a recording; a broker may still be adding to it. Raises ConfigError when made."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"there is no recording {path}")
        try:
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
            _check(self._db, path)
        except sqlite3.Error as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        self._bases: tuple[int, bytes] | None = None
        self.times = [
            row[0]
            for row in self._db.execute(
                "SELECT time FROM frames WHERE kind = ? ORDER BY time", (SNAPSHOT,)
            )
        ]
        if not self.times:
            self._db.close()
            raise ConfigError(f"{path} holds no snapshot yet")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @property
    def span(self) -> tuple[float, float]:
        """Times of the first and the last snapshot."""
        return self.times[0], self.times[-1]

    def gaps(self) -> list[tuple[float, float]]:
        """Stretches of which nothing is known: between two snapshots further apart than `GAP_S`."""
        return [
            (before, after)
            for before, after in zip(self.times, self.times[1:], strict=False)
            if after - before > GAP_S
        ]

    def before(self, time_s: float) -> float | None:
        """The time of the last snapshot up to `time_s`."""
        at = bisect_right(self.times, time_s)
        return self.times[at - 1] if at else None

    def after(self, time_s: float) -> float | None:
        """The time of the first snapshot after `time_s`."""
        at = bisect_right(self.times, time_s)
        return self.times[at] if at < len(self.times) else None

    def snapshots(self, after_s: float, upto_s: float, most: int) -> list[dict[str, Any]]:
        """The last `most` snapshots in a stretch of time, oldest first."""
        rows = self._db.execute(
            "SELECT base, data FROM frames WHERE kind = ? AND time > ? AND time <= ? "
            "ORDER BY time DESC LIMIT ?",
            (SNAPSHOT, after_s, upto_s, most),
        ).fetchall()
        return [_completed(_value(data, self._base(base))) for base, data in reversed(rows)]

    def _base(self, seq: int | None) -> bytes | None:
        if seq is None:
            return None
        if self._bases is None or self._bases[0] != seq:
            row = self._db.execute("SELECT data FROM frames WHERE seq = ?", (seq,)).fetchone()
            self._bases = (seq, unpack(row[0], None))
        return self._bases[1]

    def events(self, after_s: float, upto_s: float, most: int) -> list[dict[str, Any]]:
        """The last `most` events in a stretch of time, oldest first."""
        rows = self._db.execute(
            "SELECT data FROM frames WHERE kind = ? AND time > ? AND time <= ? "
            "ORDER BY time DESC, seq DESC LIMIT ?",
            (EVENT, after_s, upto_s, most),
        ).fetchall()
        return [_value(data, None) for (data,) in reversed(rows)]

    def event_time(self, time_s: float, *, forward: bool) -> float | None:
        """When the next event after `time_s`, or the last one before it, happened."""
        asked = (
            "SELECT min(time) FROM frames WHERE kind = ? AND time > ?"
            if forward
            else "SELECT max(time) FROM frames WHERE kind = ? AND time < ?"
        )
        row = self._db.execute(asked, (EVENT, time_s)).fetchone()
        return None if row[0] is None else float(row[0])

    def event_times(self) -> list[float]:
        """When each event happened."""
        asked = "SELECT time FROM frames WHERE kind = ? ORDER BY time"
        return [row[0] for row in self._db.execute(asked, (EVENT,))]

    def lanes(self, signature: str | None, upto_s: float) -> dict[str, Any] | None:
        """The lanes of a shape (None: of any) as they were last known at a time."""
        asked, about = ("AND about = ?", (signature,)) if signature is not None else ("", ())
        row = self._db.execute(
            f"SELECT data FROM frames WHERE kind = ? AND time <= ? {asked} "
            "ORDER BY time DESC LIMIT 1",
            (LANES, upto_s, *about),
        ).fetchone()
        return None if row is None else _value(row[0], None)

    def lengths(self, upto_s: float) -> Iterator[dict[str, Any]]:
        """What was said of accepted lengths up to a time, newest first."""
        rows = self._db.execute(
            "SELECT data FROM frames WHERE kind = ? AND time <= ? ORDER BY time DESC",
            (LENGTHS, upto_s),
        )
        for (data,) in rows:
            yield _value(data, None)
