"""Engines that misbehave on purpose; importable by name, so that a spawned child finds them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from zfabric.engine import ROOM, Batch, CacheStats, EngineUnreachable, OutOfMemory, Result
from zfabric.errors import ConfigError
from zfabric.shapes import Shape


def batch_of(*payloads, pad_to=None, length=8):
    """A shape-pure batch of `payloads`."""
    count = len(payloads)
    return Batch(
        model="m",
        pad_to=pad_to,
        lengths=(length,) * count,
        payloads=payloads,
        shapes=(Shape.of("m", "system", tokens=[4]),),
        shape_index=(0,) * count,
    )


def hold_interpreter(hold_s):
    """Block in C without giving up the interpreter lock."""
    ctypes.PyDLL(None).poll(None, 0, int(hold_s * 1000))


class EchoEngine:
    """Answers with the payload in upper case."""

    def load(self):
        pass

    def run(self, batch):
        return [Result.ok(payload.upper()) for payload in batch.payloads]

    def cache_stats(self):
        return None


class DescribingEngine(EchoEngine):
    """Answers with the whole batch as the child saw it."""

    def run(self, batch):
        return [Result.ok(repr(batch).encode())]


class CountingEngine(EchoEngine):
    """Counts its items as cache queries."""

    def __init__(self, start=0):
        self.count = start

    def run(self, batch):
        self.count += len(batch)
        return super().run(batch)

    def cache_stats(self):
        return CacheStats(self.count, 0, "worker")


class ObeyingEngine(EchoEngine):
    """Does what the first payload says."""

    def run(self, batch):
        command, _, argument = batch.payloads[0].decode().partition(" ")
        obeyed = getattr(self, f"do_{command}", None)
        return super().run(batch) if obeyed is None else obeyed(batch, argument)

    def do_raise(self, batch, text):
        raise RuntimeError(text)

    def do_oom(self, batch, text):
        raise OutOfMemory(text)

    def do_unreachable(self, batch, text):
        raise EngineUnreachable(text)

    def do_exit(self, batch, status):
        sys.exit(int(status))

    def do_die(self, batch, name):
        os.kill(os.getpid(), signal.Signals[name])

    def do_segfault(self, batch, _):
        ctypes.string_at(0)

    def do_hold(self, batch, hold_s):
        hold_interpreter(float(hold_s))
        return super().run(batch)

    def do_inflate(self, batch, size_bytes):
        return [Result.ok(b"x" * int(size_bytes)) for _ in batch.payloads]

    def do_print(self, batch, text):
        print(text, flush=True)  # noqa: T201
        return super().run(batch)

    def do_fork(self, batch, _):
        """Leave a process behind that holds every descriptor of this one."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return [Result.ok(str(pid).encode()) for _ in batch.payloads]

    def do_reverse(self, batch, _):
        """Partial results, last item first."""
        for index in reversed(range(len(batch))):
            yield index, Result.ok(batch.payloads[index].upper())

    def do_reverse_and_raise(self, batch, text):
        """One partial result, then an error."""
        yield len(batch) - 1, Result.ok(b"early")
        raise OutOfMemory(text)

    def do_reverse_and_hold(self, batch, hold_s):
        """One partial result, then a hang."""
        yield len(batch) - 1, Result.ok(b"early")
        hold_interpreter(float(hold_s))


class OverlappingEngine(EchoEngine):
    """Leaves room for another batch at once; `wait` ends when `go` has come in a later one."""

    def __init__(self):
        self.gone = threading.Event()

    def run(self, batch):
        if batch.payloads[0] == b"go":
            self.gone.set()
        elif batch.payloads[0] == b"wait":
            yield ROOM
            assert self.gone.wait(30)
        elif batch.payloads[0] == b"exit":
            yield ROOM
            sys.exit(3)
        elif batch.payloads[0] == b"rooms":
            yield ROOM
            yield ROOM
        for index, payload in enumerate(batch.payloads):
            yield index, Result.ok(payload.upper())


class UnloadableEngine(EchoEngine):
    """Its load() raises."""

    def load(self):
        raise FileNotFoundError("no such model")


class UnsuitableEngine(EchoEngine):
    """Finds out in load() that it cannot work as it was told to."""

    def load(self):
        raise ConfigError("there is no CUDA device here; use --opt device=cpu")


class UnsayableEngine(EchoEngine):
    """Its load() names a file whose name is no UTF-8."""

    def load(self):
        raise ConfigError("cannot read " + os.fsdecode(b"/models/\xff.gguf"))


class StubbornEngine(EchoEngine):
    """Ignores SIGTERM, and hangs when it is closed."""

    def load(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def close(self):
        hold_interpreter(600)


class ClosingEngine(EchoEngine):
    """Writes a file when it is closed."""

    def __init__(self, path):
        self.path = path

    def close(self):
        with open(self.path, "w") as file:  # noqa: PTH123
            file.write("closed")
