"""The directory of a run that has a broker of its own: whose it is, and who may touch it now.

Decides that nothing is ever deleted in a directory that zfabric did not make. One file, MARK, says
both: that zfabric made the directory, and, by a lock on it, which run works there. The lock is
taken before anything is touched and ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zfabric.errors import ConfigError

MARK = "made-by-zfabric"


@contextmanager
def owning(directory: Path) -> Iterator[None]:
    """Make the directory, or take one that was made here; nobody else has it in this block.

    Raises ConfigError where it is another's, or is in use.
    """
    descriptor = _taken(directory)
    try:
        yield
    finally:
        # Unused, as after a refusal, it leaves no trace; it is still locked here.
        with contextlib.suppress(OSError):
            if [each.name for each in directory.iterdir()] == [MARK]:
                (directory / MARK).unlink()
                directory.rmdir()
        os.close(descriptor)


def empty(directory: Path) -> None:
    """Delete all that is in a directory that this process owns."""
    for each in list(directory.iterdir()):
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != MARK:
            each.unlink()


def _taken(directory: Path) -> int:
    """The descriptor that holds the lock."""
    while True:
        try:
            descriptor = _opened(directory)
        except OSError as error:
            raise ConfigError(f"cannot make {directory}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"{directory} is in use by another run (pid {holder}): wait until it has ended, "
                "or write to another output"
            ) from None
        if _is_at(descriptor, directory / MARK):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            return descriptor
        # The run before has just deleted it.
        os.close(descriptor)


def _opened(directory: Path) -> int:
    """The mark of the directory, opened; both are made where there is nothing."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise _another(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        return os.open(directory / MARK, flags)
    # Empty: just made, here or by a run that ended before it could say so.
    if any(each.name != MARK for each in directory.iterdir()):
        raise _another(directory)
    return os.open(directory / MARK, flags | os.O_CREAT, 0o644)


def _another(directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory} is where this run would keep its broker, and zfabric did not make it "
        f"(it holds no file {MARK}): move it away, or write to another output"
    )


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
