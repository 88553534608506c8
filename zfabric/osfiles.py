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
import re
import resource
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zfabric.errors import NoSpace, StorageError

# Descriptors asked for, those without which nothing works, and those that segments use at most.
DESCRIPTORS_WANTED, DESCRIPTORS_MIN, OPEN_FILES_MAX = 65_536, 64, 4_096
# Linux before this loses write errors in syncfs(2).
SYNCFS_REPORTS_SINCE = (5, 8)
# Of <linux/falloc.h>.
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
# Pieces of one pwritev: the kernel's limit is 1,024.
IOV_MAX = 1_024


class NoDescriptors(StorageError):
    """The process or the machine has no more descriptors; close some, or raise the limit."""


_KINDS: dict[int, type[StorageError]] = {
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EMFILE: NoDescriptors,
    errno.ENFILE: NoDescriptors,
}


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Make every error of the system inside a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise told(path, error) from error


def told(path: Path, error: OSError) -> StorageError:
    """The StorageError for what the system says of `path`."""
    kind = _KINDS.get(error.errno or 0, StorageError)
    return kind(f"{path}: {error.strerror or error}")


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

    # What closes the last descriptor of a file that has no name any more, `close` where it is None:
    # the system gives its blocks back then and waits for writes under way; 8 ms a file were seen.
    let_go: Callable[[int], object] | None = None

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root_fd: int | None = None

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents; mostly it is there."""
        with named(path):
            if not path.is_dir():
                path.mkdir(parents=True, exist_ok=True)

    def open(self, path: Path, *, create: bool = False) -> int:
        """A descriptor for reading and writing."""
        with named(path):
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            return os.open(path, flags, 0o600)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def exists(self, path: Path) -> bool:
        """Whether there is anything of this name."""
        return path.exists()

    def check_directory(self, path: Path) -> None:
        """Raises StorageError where there is something of this name that is no directory."""
        if os.path.lexists(path) and not path.is_dir():
            raise StorageError(
                f"{path} is no directory, and the broker keeps files there: move it away, or give "
                "the broker another directory"
            )

    def file_bytes(self, path: Path) -> int | None:
        """Bytes of a file, None where it is no plain file."""
        with named(path):
            found = path.lstat()
            return found.st_size if stat.S_ISREG(found.st_mode) else None

    def find(self, directory: Path, suffix: str) -> list[Path]:
        """Everything below `directory` whose name ends in `suffix`, sorted; none if it is missing.

        A directory that cannot be read is an error, not an empty one.
        """

        def fail(error: OSError) -> None:
            # A broker at work removes directories that have become empty.
            if not isinstance(error, FileNotFoundError):
                raise error

        found: list[Path] = []
        with named(directory):
            if directory.is_dir():
                for parent, folders, names in os.walk(directory, onerror=fail):
                    chosen = [name for name in (*folders, *names) if name.endswith(suffix)]
                    found += [Path(parent) / name for name in chosen]
        return sorted(found)

    def find_empty(self, directory: Path) -> list[Path]:
        """Every directory below `directory` that nothing is in."""
        return [
            Path(parent)
            for parent, folders, names in os.walk(directory)
            if not folders and not names and Path(parent) != directory
        ]

    def read(self, path: Path, descriptor: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        data = b""
        # Not `named`: this and `write` are all that is called for each run of items.
        try:
            while size > len(data):
                part = os.pread(descriptor, size - len(data), offset + len(data))
                if not part:
                    break
                data = data + part if data else part
        except OSError as error:
            raise told(path, error) from error
        return data

    def write(self, path: Path, descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        """Write all pieces, one behind the other; returns the offset behind them."""
        try:
            for start in range(0, len(pieces), IOV_MAX):
                part = pieces[start : start + IOV_MAX]
                end = offset + sum(map(len, part))
                offset += self._write_some(descriptor, part, offset)
                while offset < end:
                    rest = memoryview(b"".join(part))[offset - end :]
                    offset += self._write_some(descriptor, [rest], offset)
        except OSError as error:
            raise told(path, error) from error
        return offset

    def _write_some(
        self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int
    ) -> int:
        """One system call; it may write less. Returns how much it did."""
        return os.pwritev(descriptor, pieces, offset)

    def truncate(self, path: Path, descriptor: int, size: int) -> None:
        """Cut the file to `size` bytes."""
        with named(path):
            os.ftruncate(descriptor, size)

    def punch(self, path: Path, descriptor: int, offset: int, size: int) -> None:
        """Make a hole: the bytes read as zeros and take no room, where the system knows how."""
        with named(path):
            if _fallocate is None or not size:
                return
            mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
            if _fallocate(descriptor, mode, offset, size):
                code = ctypes.get_errno()
                if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise OSError(code, os.strerror(code))

    def rename(self, old: Path, new: Path) -> None:
        """Move a file within the tree."""
        with named(old):
            old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone is fine."""
        with named(path), contextlib.suppress(FileNotFoundError):
            path.unlink()

    def remove_empty(self, directory: Path) -> None:
        """Remove a directory if nothing is in it."""
        with contextlib.suppress(OSError):
            directory.rmdir()

    def sync_all(self) -> None:
        """Bring everything written so far to the device: one sync of the file system.

        syncfs(2) reports write errors since Linux 5.8. Elsewhere every file is synced by itself.
        """
        with named(self.root):
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
        with named(self.root):
            found = os.statvfs(self.root)
            return found.f_bavail * found.f_frsize

    def release(self) -> None:
        """Close what is kept open for `sync_all`."""
        if self._root_fd is not None:
            os.close(self._root_fd)
            self._root_fd = None

    def lock(self, path: Path) -> int:
        """Take the directory's lock; keep the descriptor. Raises StorageError naming the holder."""
        with named(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StorageError(
                f"{path.parent} is in use by another broker (pid {holder}); stop it first"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise StorageError(f"{path} cannot be locked: {error.strerror}") from error
        # Only for people to read: a full disk must not keep a broker from starting.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        return descriptor


def _sync_path(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return  # unlinked since the directory was read
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load_syncfs() -> Any:
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < SYNCFS_REPORTS_SINCE:
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int]
    return function


def _load_fallocate() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


_syncfs = _load_syncfs()
_fallocate = _load_fallocate()
