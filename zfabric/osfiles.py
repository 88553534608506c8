"""The operating system's files, as the store uses them: the seam where tests put their faults.

Offsets and sizes are bytes. Every failure is a StorageError that names the path; short writes are
finished here. Nothing decides here what is written where.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zfabric.errors import NoSpace, StorageError

# Descriptors asked for, those without which nothing works, and those that segments use at most.
DESCRIPTORS_WANTED, DESCRIPTORS_MIN, OPEN_FILES_MAX = 65_536, 64, 4_096
# Pieces of one pwritev: the kernel's limit is 1,024.
IOV_MAX = 1_024


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        raise kind(f"{path}: {error.strerror}") from error


def descriptor_limit() -> int:
    """Descriptors that the store may keep open; raises the soft limit as far as it may.

    Half of what the process may have: sockets and everything else need theirs. Raises
    StorageError where that is not enough to run at all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft < DESCRIPTORS_MIN:
        raise StorageError(
            f"this process may open {soft} files; a broker needs {DESCRIPTORS_MIN}: "
            "raise the limit with ulimit -n"
        )
    return max(16, min(soft // 2, OPEN_FILES_MAX))


class OsFiles:
    """Files of one directory tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root_fd: int | None = None

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents."""
        with _named(path):
            path.mkdir(parents=True, exist_ok=True)

    def open(self, path: Path, *, create: bool = False) -> int:
        """A descriptor for reading and writing."""
        with _named(path):
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            return os.open(path, flags, 0o600)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def read(self, path: Path, descriptor: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        with _named(path):
            parts = []
            while size:
                part = os.pread(descriptor, size, offset)
                if not part:
                    break
                parts.append(part)
                size -= len(part)
                offset += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, path: Path, descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        """Write all pieces, one behind the other; returns the offset behind them."""
        with _named(path):
            for start in range(0, len(pieces), IOV_MAX):
                part = pieces[start : start + IOV_MAX]
                wanted = sum(map(len, part))
                written = os.pwritev(descriptor, part, offset)
                if written < wanted:
                    rest = memoryview(b"".join(part))[written:]
                    while rest:
                        more = os.pwrite(descriptor, rest, offset + wanted - len(rest))
                        rest = rest[more:]
                offset += wanted
            return offset

    def truncate(self, path: Path, descriptor: int, size: int) -> None:
        """Cut the file to `size` bytes."""
        with _named(path):
            os.ftruncate(descriptor, size)

    def rename(self, old: Path, new: Path) -> None:
        """Move a file within the tree."""
        with _named(old):
            old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone is fine."""
        with _named(path), contextlib.suppress(FileNotFoundError):
            path.unlink()

    def remove_empty(self, directory: Path) -> None:
        """Remove a directory if nothing is in it."""
        with contextlib.suppress(OSError):
            directory.rmdir()

    def sync_all(self) -> None:
        """Bring everything written so far to the device: one sync of the file system.

        syncfs(2) reports write errors since Linux 5.8. Elsewhere every file is synced by itself.
        """
        with _named(self.root):
            if self._root_fd is None:
                self._root_fd = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
            if _syncfs is not None:
                if _syncfs(self._root_fd):
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code))
                return
            for directory, _, names in os.walk(self.root):
                for name in (*names, "."):
                    _sync_path(Path(directory) / name)

    def reserve(self, path: Path, size: int) -> None:
        """Hold `size` bytes of the disk in a file; no matter if there are not so many."""
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)

    def free_bytes(self) -> int:
        """What the file system still has for us."""
        with _named(self.root):
            stat = os.statvfs(self.root)
            return stat.f_bavail * stat.f_frsize

    def lock(self, path: Path) -> int:
        """Take the directory's lock; keep the descriptor. Raises StorageError naming the holder."""
        with _named(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StorageError(
                f"{path.parent} is in use by another broker (pid {holder}); stop it first"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        return descriptor


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load_syncfs() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int]
    return function


_syncfs = _load_syncfs()
