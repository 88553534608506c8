"""Append-only JSONL files that survive a crash at any byte: locked, synced, repaired.

A row counts once `sync` has returned. What a crash leaves behind is rows that were never synced,
torn or not; `scan` finds the torn ones, and `truncate` or `rewrite` removes them. A row that is
JSON but not a batch result means that this is somebody else's file: nothing is changed.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from zfabric.batchfile.job import sync_directory
from zfabric.batchfile.lines import LINE_BYTES_MAX, bounded_lines, parse_json
from zfabric.errors import ConfigError, StorageError

Row = dict[str, Any]

# A result may quote its request; anything longer than this is damage, not a row.
ROW_BYTES_MAX = 4 * LINE_BYTES_MAX
# Rows gathered before a write: one system call for hundreds of rows.
BUFFER_BYTES = 1 << 20


class InUse(Exception):
    """Another process holds the lock of the file."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a file holds: whole rows, damaged lines, and where the last whole row ends (bytes)."""

    rows: int
    damaged: int
    end_bytes: int
    tail_only: bool


class RowFile:
    """One locked JSONL file, open for appending. One owner; not thread-safe."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._buffer = bytearray()
        # Rows of an earlier run may still be in the page cache alone.
        self._unsynced = True
        # How it failed, which is said again to whoever tries to use it.
        self._failed: str | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create or open `path` and lock it. Raises InUse, or ConfigError if it cannot be used."""
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            except OSError as error:
                raise ConfigError(f"cannot open {path}: {error.strerror}") from None
            try:
                if _locked(path, descriptor):
                    sync_directory(path.parent)
                    return cls(path, descriptor)
            except BaseException as error:
                os.close(descriptor)
                if isinstance(error, OSError):
                    raise ConfigError(f"cannot use {path}: {error.strerror}") from None
                raise
            os.close(descriptor)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file, without those in the buffer."""
        return os.fstat(self._descriptor).st_size

    def append(self, row: bytes) -> None:
        """Add one row, without its line end. Raises StorageError once the file has failed."""
        self._buffer += row
        self._buffer += b"\n"
        if len(self._buffer) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand buffered rows to the operating system. Raises StorageError."""
        self._check()
        if not self._buffer:
            return
        self._unsynced = True
        try:
            with memoryview(self._buffer) as view:
                written = 0
                while written < len(view):
                    written += os.write(self._descriptor, view[written:])
        except OSError as error:
            self._fail(error)
        self._buffer.clear()

    def sync(self) -> None:
        """Return once every row appended is on disk. Raises StorageError.

        A failed sync is final: the kernel may have dropped the pages and report success next time.
        """
        self.flush()
        if not self._unsynced:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._fail(error)
        self._unsynced = False

    def close(self) -> None:
        """Give up the lock. Rows still in the buffer are dropped; `sync` first."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def scan(self, take: Callable[[Row], None]) -> Scan:
        """Stream the file and give every whole row to `take`. Raises ConfigError (foreign row)."""
        rows = damaged = end_bytes = offset = damaged_before_end = 0
        with self.path.open("rb") as stream:
            for number, line, size in bounded_lines(stream, ROW_BYTES_MAX):
                offset += size
                row = self._row(number, line)
                if row is None:
                    damaged += 1
                    continue
                take(row)
                rows += 1
                end_bytes, damaged_before_end = offset, damaged
        return Scan(rows, damaged, end_bytes, damaged_before_end == 0)

    def truncate(self, size_bytes: int) -> None:
        """Cut the file to `size_bytes`, on disk when it returns. Raises StorageError."""
        self._check()
        try:
            os.ftruncate(self._descriptor, size_bytes)
            os.fsync(self._descriptor)
        except OSError as error:
            self._fail(error)

    def rewrite(self, keep: Callable[[Row], bool]) -> None:
        """Replace the file, atomically and without losing the lock, by the rows to `keep`.

        Raises StorageError; the old file is then still in place.
        """
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            temporary.unlink(missing_ok=True)
            copy = RowFile.open(temporary)
        except (OSError, InUse, ConfigError) as error:
            raise StorageError(f"cannot write {temporary}: {error}") from None
        try:
            self._copy_rows(copy, keep)
            os.fchmod(copy._descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
            temporary.replace(self.path)
            sync_directory(self.path.parent)
        except BaseException as error:
            copy.close()
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StorageError(f"cannot rewrite {self.path}: {error.strerror}") from None
            raise
        self.close()
        self._descriptor = copy._descriptor

    def _copy_rows(self, copy: RowFile, keep: Callable[[Row], bool]) -> None:
        with self.path.open("rb") as stream:
            for number, line, _ in bounded_lines(stream, ROW_BYTES_MAX):
                row = self._row(number, line)
                if line is not None and row is not None and keep(row):
                    copy.append(line.rstrip(b"\r\n"))
        copy.sync()

    def _row(self, number: int, line: bytes | None) -> Row | None:
        """The row of a line, or None for a damaged one."""
        if line is None or not line.endswith(b"\n"):
            return None
        try:
            row = parse_json(line)
        except ValueError:
            return None
        if not isinstance(row, dict) or "custom_id" not in row or "response" not in row:
            raise ConfigError(
                f"line {number} of {self.path} is not a batch result: this file belongs to "
                "something else; name another one"
            )
        return row

    def _check(self) -> None:
        if self._failed is not None:
            raise StorageError(self._failed)

    def _fail(self, error: OSError) -> NoReturn:
        self._failed = f"cannot write {self.path}: {error.strerror}; start again with --resume"
        raise StorageError(self._failed) from error


def _locked(path: Path, descriptor: int) -> bool:
    """Lock an open file; False if `path` was replaced meanwhile, so that it must be reopened."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ConfigError(f"{path} is not a regular file")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUse(str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error.strerror}") from None
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
