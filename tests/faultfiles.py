"""Files with faults: every change is an operation that can be the last one, fail, or be lost.

`FaultFiles` works on real files, which are what a killed process leaves behind; it keeps a journal
of what it did. From the journal come the images that a power loss leaves: what the last finished
sync covers is there, anything after that is kept, dropped, torn or out of order.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zfabric.osfiles import OsFiles, named

SECTOR = 512


class Crash(BaseException):
    """The process ends here; no handler of errors may see it."""


@dataclass(frozen=True)
class Op:
    """One change. `file` is an inode's number, since names come and go."""

    kind: str
    path: str = ""
    file: int = 0
    offset: int = 0
    data: bytes = b""
    # the new name of a rename; of a sync, the number of operations that it covers
    to: str = ""
    covers: int = 0


@dataclass
class Image:
    """A directory tree in memory."""

    names: dict[str, int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {""})
    files: dict[int, bytearray] = field(default_factory=dict)

    def copy(self) -> Image:
        files = {number: bytearray(data) for number, data in self.files.items()}
        return Image(dict(self.names), set(self.folders), files)

    def apply(self, op: Op) -> None:
        """Make a change, as far as what it needs is there."""
        if op.kind == "mkdir" and _parent(op.path) in self.folders:
            self.folders.add(op.path)
        elif op.kind == "create" and _parent(op.path) in self.folders:
            self.names.setdefault(op.path, op.file)
        elif op.kind == "write":
            self.write(op.file, op.offset, op.data)
        elif op.kind == "truncate":
            data = self.files.setdefault(op.file, bytearray())
            del data[op.offset :]
            data.extend(bytes(op.offset - len(data)))
        elif op.kind == "rename" and op.path in self.names and _parent(op.to) in self.folders:
            self.names[op.to] = self.names.pop(op.path)
        elif op.kind == "unlink":
            self.names.pop(op.path, None)
        elif op.kind == "rmdir" and not any(
            _parent(name) == op.path for name in (*self.names, *self.folders - {""})
        ):
            self.folders.discard(op.path)

    def write(self, file: int, offset: int, data: bytes) -> None:
        content = self.files.setdefault(file, bytearray())
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data

    def extend(self, file: int, size: int) -> None:
        """The length reached the device, the bytes did not."""
        content = self.files.setdefault(file, bytearray())
        content.extend(bytes(max(0, size - len(content))))

    def put(self, root: Path) -> None:
        """Make real files of it, in an empty directory."""
        root.mkdir(parents=True, exist_ok=True)
        for folder in sorted(self.folders - {""}):
            (root / folder).mkdir()
        for name, file in self.names.items():
            (root / name).write_bytes(self.files.get(file, b""))


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


@dataclass
class Fault:
    """Call `at` of these kinds (of any, where there are none) fails with `code`, `times` over."""

    at: int
    code: int
    times: int = 1
    kinds: frozenset[str] = frozenset()


class FaultFiles(OsFiles):
    """The files below `root`, with a journal and faults."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ops: list[Op] = []
        # stop before this operation, or with half of it if it is a write
        self.crash_at: int | None = None
        self.crash_torn = False
        self.dead = False
        self.fault: Fault | None = None
        # bytes that one system call writes at most
        self.write_max: int | None = None
        self.before: Callable[[int], None] = lambda number: None
        # calls of every kind, reads too: what `fault.at` counts
        self.calls = 0
        self._numbers: dict[str, int] = {}
        self._next = 1

    # -- the journal --------------------------------------------------------------------------

    def _name(self, path: Path) -> str:
        return "" if path == self.root else str(path.relative_to(self.root))

    def _call(self, kind: str, path: Path) -> None:
        """A call is about to be made: it may fail."""
        if self.dead:
            raise Crash
        number = self.calls
        self.calls += 1
        fault = self.fault
        if fault is None or (fault.kinds and kind not in fault.kinds):
            return
        if number >= fault.at and fault.times:
            fault.times -= 1
            with named(path):
                raise OSError(fault.code, os.strerror(fault.code))

    def _file(self, path: Path) -> int:
        name = self._name(path)
        if name not in self._numbers:
            self._numbers[name] = self._next
            self._next += 1
        return self._numbers[name]

    def _change(self, op: Op) -> None:
        """A change is about to be made: it may be the end."""
        self.before(len(self.ops))
        if self.crash_at is not None and len(self.ops) >= self.crash_at:
            self.dead = True
            if self.crash_torn and op.kind == "write":
                path = next(name for name, file in self._numbers.items() if file == op.file)
                with (self.root / path).open("r+b") as handle:
                    handle.seek(op.offset)
                    handle.write(op.data[: len(op.data) // 2])
            raise Crash
        self.ops.append(op)

    # -- the surface --------------------------------------------------------------------------

    def make_directory(self, path: Path) -> None:
        self._call("mkdir", path)
        missing = [p for p in (path, *path.parents) if not p.exists() and p != self.root]
        for folder in reversed([p for p in missing if p.is_relative_to(self.root)]):
            self._change(Op("mkdir", self._name(folder)))
            super().make_directory(folder)
        super().make_directory(path)

    def open(self, path: Path, *, create: bool = False) -> int:
        self._call("open", path)
        if create and not path.exists():
            self._numbers.pop(self._name(path), None)
            self._change(Op("create", self._name(path), self._file(path)))
        return super().open(path, create=create)

    def file_bytes(self, path: Path) -> int | None:
        self._call("stat", path)
        return super().file_bytes(path)

    def find(self, directory: Path, suffix: str) -> list[Path]:
        self._call("list", directory)
        return super().find(directory, suffix)

    def read(self, path: Path, descriptor: int, size: int, offset: int) -> bytes:
        self._call("read", path)
        return super().read(path, descriptor, size, offset)

    def write(self, path: Path, descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        self._call("write", path)
        self._change(Op("write", "", self._file(path), offset, b"".join(pieces)))
        return super().write(path, descriptor, pieces, offset)

    def _write_some(self, descriptor: int, pieces: Sequence[Any], offset: int) -> int:
        if self.write_max is not None:
            pieces = [b"".join(pieces)[: self.write_max]]
        return super()._write_some(descriptor, pieces, offset)

    def truncate(self, path: Path, descriptor: int, size: int) -> None:
        self._call("truncate", path)
        self._change(Op("truncate", "", self._file(path), size))
        super().truncate(path, descriptor, size)

    def punch(self, path: Path, descriptor: int, offset: int, size: int) -> None:
        self._call("punch", path)
        self._change(Op("write", "", self._file(path), offset, bytes(size)))
        super().punch(path, descriptor, offset, size)

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename", old)
        self._change(Op("rename", self._name(old), to=self._name(new)))
        super().rename(old, new)
        self._numbers[self._name(new)] = self._file(old)
        del self._numbers[self._name(old)]

    def unlink(self, path: Path) -> None:
        self._call("unlink", path)
        if path.exists():
            self._change(Op("unlink", self._name(path)))
        super().unlink(path)
        self._numbers.pop(self._name(path), None)

    def remove_empty(self, directory: Path) -> None:
        if self.dead:
            raise Crash
        if directory.exists() and not any(directory.iterdir()):
            self._change(Op("rmdir", self._name(directory)))
        super().remove_empty(directory)

    def sync_all(self) -> None:
        self.end_sync(self.begin_sync())

    def begin_sync(self) -> int:
        """A sync begins: it covers what was written until now. Nothing reaches a device."""
        if self.dead:
            raise Crash
        return len(self.ops)

    def end_sync(self, covers: int) -> None:
        """That sync is over."""
        self._call("sync", self.root)
        self._change(Op("sync", covers=covers))

    def reserve(self, path: Path, size: int) -> None:
        """None: a reserve is not what these tests are about."""

    # -- what is left -------------------------------------------------------------------------

    def killed(self, at: int, *, torn: bool = False) -> Image:
        """What is there when the process is killed before operation `at`, or half way through."""
        image = Image()
        for op in self.ops[:at]:
            image.apply(op)
        if torn and at < len(self.ops):
            half = self.ops[at]
            if half.kind == "write":
                image.write(half.file, half.offset, half.data[: len(half.data) // 2])
        return image

    def unplugged(self, at: int, how: str, seed: int = 0) -> Image:
        """What is there when the power fails before operation `at`.

        `how` is what becomes of all that no finished sync covers: "dropped", "kept" or "torn".
        """
        syncs = [op.covers for op in self.ops[:at] if op.kind == "sync"]
        safe = max(syncs, default=0)
        image = self.killed(safe)
        if how == "dropped":
            return image
        if how == "kept":
            return self.killed(at)
        draw = random.Random(seed * 1_000_003 + at)
        for op in self.ops[safe : at + 1]:
            if op.kind == "write":
                for part in torn(op, draw):
                    part(image)
            elif draw.random() < 0.5 and op.kind != "sync":
                image.apply(op)
        return image


def torn(op: Op, draw: random.Random) -> Iterator[Callable[[Image], None]]:
    """What becomes of one write: kept, dropped, cut, or any of its sectors."""
    fate = draw.choice(("kept", "kept", "dropped", "zeros", "cut", "sectors"))
    end = op.offset + len(op.data)
    if fate == "kept":
        yield lambda image: image.write(op.file, op.offset, op.data)
    elif fate == "zeros":
        yield lambda image: image.extend(op.file, end)
    elif fate == "cut":
        size = draw.randrange(len(op.data) + 1)
        yield lambda image: image.write(op.file, op.offset, op.data[:size])
    elif fate == "sectors":
        begin = op.offset
        while begin < end:
            stop = min(end, (begin // SECTOR + 1) * SECTOR)
            if draw.random() < 0.5:
                piece, where = op.data[begin - op.offset : stop - op.offset], begin
                yield lambda image, p=piece, w=where: image.write(op.file, w, p)
            begin = stop
