"""Files in memory, with the difference between what was written and what a power loss leaves."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path

from tests.faultfiles import Image, Op, torn
from zfabric.errors import NoSpace, StorageError
from zfabric.osfiles import OsFiles, named

ROOT = Path("/fabric")
FREE_BYTES = 1 << 40


class MemFiles(OsFiles):
    """A directory tree that outlives the broker's process; `killed` and `unplugged` end one."""

    def __init__(self) -> None:
        super().__init__(ROOT)
        self._now = Image()
        self._durable = Image()
        # changes that no finished sync covers
        self._pending: list[Op] = []
        self._open: dict[int, int] = {}
        self._descriptors = itertools.count(3)
        self._inodes = itertools.count(1)
        self._locked = False
        self.full = False

    # -- the process that uses them ends ------------------------------------------------------

    def killed(self) -> None:
        """SIGKILL: what was written stays."""
        self._open.clear()
        self._locked = False

    def unplugged(self, draw: random.Random) -> None:
        """Power loss: of what no sync covers, anything may be there, torn or not."""
        self.killed()
        image = self._durable.copy()
        for op in self._pending:
            if op.kind == "write":
                for part in torn(op, draw):
                    part(image)
            elif draw.random() < 0.5:
                image.apply(op)
        self._now, self._durable = image, image.copy()
        self._pending.clear()

    def names(self) -> set[str]:
        """Every file."""
        return set(self._now.names)

    # -- the surface --------------------------------------------------------------------------

    def _name(self, path: Path) -> str:
        return "" if path == ROOT else path.relative_to(ROOT).as_posix()

    def _change(self, op: Op) -> None:
        self._pending.append(op)
        self._now.apply(op)

    def _inode(self, path: Path) -> int:
        inode = self._now.names.get(self._name(path))
        if inode is None:
            with named(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return inode

    def make_directory(self, path: Path) -> None:
        for folder in reversed([path, *path.parents]):
            if folder.is_relative_to(ROOT) and self._name(folder) not in self._now.folders:
                self._change(Op("mkdir", self._name(folder)))

    def open(self, path: Path, *, create: bool = False) -> int:
        if create and self._name(path) not in self._now.names:
            self._change(Op("create", self._name(path), next(self._inodes)))
        descriptor = next(self._descriptors)
        self._open[descriptor] = self._inode(path)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def exists(self, path: Path) -> bool:
        name = self._name(path)
        return name in self._now.names or name in self._now.folders

    def file_bytes(self, path: Path) -> int | None:
        return len(self._now.files.get(self._inode(path), b""))

    def find(self, directory: Path, suffix: str) -> list[Path]:
        below = self._name(directory) + "/"
        names = [n for n in self._now.names if n.startswith(below) and n.endswith(suffix)]
        return sorted(ROOT / name for name in names)

    def read(self, path: Path, descriptor: int, size: int, offset: int) -> bytes:
        data = self._now.files.get(self._open[descriptor], b"")
        return bytes(data[offset : offset + size])

    def write(self, path: Path, descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        data = b"".join(pieces)
        grows = offset + len(data) > len(self._now.files.get(self._open[descriptor], b""))
        if self.full and grows:
            raise NoSpace(f"{path}: {os.strerror(errno.ENOSPC)}")
        self._change(Op("write", "", self._open[descriptor], offset, data))
        return offset + len(data)

    def truncate(self, path: Path, descriptor: int, size: int) -> None:
        self._change(Op("truncate", "", self._open[descriptor], size))

    def punch(self, path: Path, descriptor: int, offset: int, size: int) -> None:
        self._change(Op("write", "", self._open[descriptor], offset, bytes(size)))

    def rename(self, old: Path, new: Path) -> None:
        self._inode(old)
        self._change(Op("rename", self._name(old), to=self._name(new)))

    def unlink(self, path: Path) -> None:
        if self._name(path) in self._now.names:
            self._change(Op("unlink", self._name(path)))

    def remove_empty(self, directory: Path) -> None:
        below = self._name(directory) + "/"
        if not any(n.startswith(below) for n in (*self._now.names, *self._now.folders)):
            self._change(Op("rmdir", self._name(directory)))

    def begin_sync(self) -> int:
        """What a sync that begins now will cover."""
        return len(self._pending)

    def end_sync(self, covers: int) -> None:
        """That sync is over."""
        for op in self._pending[:covers]:
            self._durable.apply(op)
        del self._pending[:covers]

    def sync_all(self) -> None:
        self.end_sync(self.begin_sync())

    def reserve(self, path: Path, size: int) -> None:
        """None: free space is a switch here."""

    def free_bytes(self) -> int:
        return 0 if self.full else FREE_BYTES

    def release(self) -> None:
        """Nothing is kept open for syncs."""

    def lock(self, path: Path) -> int:
        if self._locked:
            raise StorageError(f"{path.parent} is in use by another broker")
        self._locked = True
        return self.open(path, create=True)
