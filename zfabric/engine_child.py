"""An engine in a process of its own, so that nothing it does can silence its supervisor.

Decides how a batch reaches the engine's process and how results, failures and its death come
back; what runs in there, and that it ends with its supervisor, is `engine_host`. Times are
seconds, sizes are bytes.

The supervisor's side (`EngineChild`) never blocks, except in stop(), which is bounded:
- reads are non-blocking, bounded per call, and decode incrementally, so a child that is stopped
  in the middle of a message costs nothing;
- writes are done by one thread per child, which sits in sendall() for as long as the child does
  not read; a batch is handed to it and forgotten. A thread is preferred to buffered non-blocking
  writes because the supervisor then has one readiness to poll for, not two.

The channel is a stream socket pair carrying msgpack, which delimits itself; data is never
pickled (the factory is, by the start of the process). The child is spawned, never forked: a
forked copy of a zmq Context or of a CUDA context is broken.

Never: a wait without a bound on the supervisor's side, or zmq in either process.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias

import msgpack

from zfabric.engine import Batch, CacheStats, EngineFactory, Status
from zfabric.engine_host import READ_BYTES, FailureKind, host, run_message, unpacker
from zfabric.errors import ConfigError, InvariantError

# One receive(): 4-9 ms measured (2 cores, results of 64 KiB), so that no heartbeat is delayed.
RECEIVE_BYTES_MAX = 2**22
# After SIGTERM and after SIGKILL: a GPU's memory takes a while to be torn down.
TERMINATE_WAIT_S = 2.0
KILL_WAIT_S = 5.0
# A writer whose channel was shut down ends at once; the bound is for the promise, not the case.
WRITER_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is ready for its first batch."""


@dataclass(frozen=True, slots=True)
class Results:
    """Results of some items of a batch; `final` once the batch is complete (then maybe empty)."""

    batch_id: int
    indices: tuple[int, ...]
    statuses: tuple[Status, ...]
    payloads: tuple[bytes, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine raised or broke its contract: the batch's items without a result have none.

    `batch_id` is None if it happened while loading; the child then exits.
    """

    batch_id: int | None
    kind: FailureKind
    text: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Cache counters since load; follows Loaded and each final Results. None: not measured."""

    stats: CacheStats | None


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone; always the last event of a run. `batch_ids` are what it had in hand."""

    exitcode: int
    text: str
    batch_ids: tuple[int, ...]


Event: TypeAlias = Loaded | Results | Failed | Stats | Exited


class EngineChild:
    """One engine process at a time; owned by one thread.

    Poll `waitables()` for reading, then call receive(). After Exited, start() begins anew; how
    long to wait before that is the caller's to decide.
    """

    def __init__(self, factory: EngineFactory, name: str = "engine") -> None:
        # Fixed.
        self._factory = factory
        self._name = name
        # One run of the process.
        self._process: SpawnProcess | None = None
        self._channel: socket.socket | None = None
        self._lifeline: Connection | None = None
        self._pidfd: int | None = None
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._decoder = unpacker()
        self._readable = False
        self._loaded = False
        # in hand, in order; whether the last of them has room beside it
        self._batch_ids: list[int] = []
        self._roomy = False
        self._fault = ""
        # Read while stopping, not yet asked for.
        self._backlog: list[Event] = []

    @property
    def running(self) -> bool:
        """From start() until Exited was received."""
        return self._process is not None

    @property
    def idle(self) -> bool:
        """Loaded, and no batch in hand that leaves no room for another: send() is allowed."""
        return self.running and self._loaded and (self._roomy or not self._batch_ids)

    @property
    def busy(self) -> bool:
        """Whether a batch is in the child's hands."""
        return bool(self._batch_ids)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def connection(self) -> socket.socket | None:
        """Readable when messages wait; None once the stream has ended."""
        return self._channel if self._readable else None

    @property
    def sentinel(self) -> int | None:
        """Readable when the process has ended; None while there is none."""
        if self._process is None:
            return None
        return self._pidfd if self._pidfd is not None else self._process.sentinel

    def waitables(self) -> list[int]:
        """What to poll for reading now: the descriptors of `connection` and `sentinel`."""
        fds = [self.connection.fileno()] if self.connection is not None else []
        return fds if self.sentinel is None else [*fds, self.sentinel]

    def start(self) -> None:
        """Spawn the process; Loaded or Failed and Exited follow.

        Raises ConfigError if the factory cannot be sent to another process, OSError if the system
        gives none now, InvariantError if a process is running.
        """
        if self._process is not None:
            raise InvariantError("the engine process is already running")
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # A parent may have left it so. Nobody would ever hear that the engine has ended.
            with contextlib.suppress(ValueError):  # only a main thread may
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ours, theirs = socket.socketpair()
        lifeline_end, lifeline = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=host, args=(self._factory, theirs, lifeline_end), name=self._name, daemon=True
        )
        try:
            process.start()
        except OSError:
            ours.close()
            lifeline.close()
            raise
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            ours.close()
            lifeline.close()
            raise ConfigError(
                f"the engine cannot be sent to a process of its own ({error}); give a class or "
                "function of a module, or a functools.partial of one"
            ) from error
        finally:
            theirs.close()
            lifeline_end.close()
        # Should the supervisor end without stop(): multiprocessing waits for what SIGTERM leaves.
        atexit.register(process.kill)
        self._process, self._channel, self._lifeline = process, ours, lifeline
        self._pidfd = _pidfd_of(process)
        self._decoder, self._readable = unpacker(), True
        self._loaded, self._batch_ids, self._fault = False, [], ""
        self._outgoing = queue.SimpleQueue()
        self._writer = threading.Thread(
            target=_write, args=(ours, self._outgoing), name=f"{self._name}-writer", daemon=True
        )
        self._writer.start()

    def send(self, batch_id: int, batch: Batch) -> None:
        """Give an idle child a batch; never blocks. Raises InvariantError if it is not idle.

        If the child dies before it has read the batch, Exited says so and names the batch.
        """
        if not self.idle:
            raise InvariantError(f"batch {batch_id} sent to an engine process that is not idle")
        self._batch_ids.append(batch_id)
        self._roomy = False
        self._outgoing.put(msgpack.packb(run_message(batch_id, batch)))

    def receive(self) -> list[Event]:
        """What the child said since the last call, in order; never blocks.

        At most about `RECEIVE_BYTES_MAX` are read; if more waits, `waitables()` stay readable.
        """
        backlog, self._backlog = self._backlog, []
        return backlog + self._pump()

    def kill(self) -> None:
        """SIGKILL, now; Exited follows."""
        if self._process is not None:
            self._process.kill()

    def stop(self, timeout_s: float) -> bool:
        """End the process: ask, and after `timeout_s` SIGTERM, then SIGKILL. True once it is gone.

        Blocks for at most `timeout_s` + `TERMINATE_WAIT_S` + `KILL_WAIT_S`. What the child said
        in the meantime, and Exited, come with the next receive().
        """
        if self._process is None:
            return True
        self._outgoing.put(msgpack.packb(("close",)))
        if self._gone_within(timeout_s):
            return True
        self._process.terminate()
        if self._gone_within(TERMINATE_WAIT_S):
            return True
        self._process.kill()
        return self._gone_within(KILL_WAIT_S)

    def _gone_within(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while True:
            self._backlog += self._pump()
            remaining_s = deadline - time.monotonic()
            if self._process is None or remaining_s <= 0:
                return self._process is None
            wait(self.waitables(), remaining_s)

    def _pump(self) -> list[Event]:
        if self._process is None:
            return []
        # Asked before reading: all that an ended process wrote can then be read.
        exitcode = self._process.exitcode
        events: list[Event] = []
        drained = self._read(events)
        if exitcode is not None and drained:
            events.append(self._closed(exitcode))
        return events

    def _read(self, events: list[Event]) -> bool:
        """Append what can be read; False if the bound was reached first."""
        room_bytes = RECEIVE_BYTES_MAX
        while self._readable and self._channel is not None:
            if room_bytes <= 0:
                return False
            try:
                chunk = self._channel.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                chunk = b""
            if not chunk:
                self._readable = False
                break
            room_bytes -= len(chunk)
            try:
                self._decoder.feed(chunk)
                for message in self._decoder:
                    events += self._events_of(message)
            except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
                # The stream is only ours to write; an engine that wrote into it ends here.
                self._fault = f"unreadable message from the engine process: {error!r:.200}"
                self._readable = False
                self.kill()
        return True

    def _events_of(self, message: tuple[Any, ...]) -> list[Event]:
        kind = message[0]
        if kind == "loaded":
            self._loaded = True
            return [Loaded(), _stats_event(message[1])]
        if kind == "failed":
            _, batch_id, failure, text = message
            self._over(batch_id)
            return [Failed(batch_id, failure, text)]
        if kind == "room":
            self._roomy = self._batch_ids[-1:] == [message[1]]
            return []
        if kind != "results":
            raise ValueError(f"unknown message {kind!r:.100}")
        batch_id, indices, statuses, payloads, final = message[1:6]
        event = Results(batch_id, tuple(indices), tuple(statuses), tuple(payloads), final)
        if not final:
            return [event]
        self._over(batch_id)
        return [event, _stats_event(message[6])]

    def _over(self, batch_id: int | None) -> None:
        """A batch is no longer in hand; those that go on beside it had room already."""
        self._roomy |= self._batch_ids[-1:] == [batch_id]
        self._batch_ids = [each for each in self._batch_ids if each != batch_id]

    def _closed(self, exitcode: int) -> Exited:
        """Let go of everything that belonged to the ended process."""
        process, channel, lifeline = self._process, self._channel, self._lifeline
        if process is None or channel is None or lifeline is None or self._writer is None:
            raise InvariantError("an engine process ended that was not running")
        event = Exited(exitcode, self._fault or _exit_text(exitcode), tuple(self._batch_ids))
        self._outgoing.put(None)
        with contextlib.suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)  # ends a writer that is still in sendall()
        self._writer.join(WRITER_WAIT_S)
        channel.close()
        lifeline.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        atexit.unregister(process.kill)
        process.close()
        self._process = self._channel = self._lifeline = self._pidfd = self._writer = None
        self._readable, self._loaded, self._batch_ids = False, False, []
        return event


def _write(channel: socket.socket, outgoing: queue.SimpleQueue[bytes | None]) -> None:
    while (message := outgoing.get()) is not None:
        try:
            channel.sendall(message)
        except OSError:
            return  # the child is gone: its sentinel says so


def _pidfd_of(process: SpawnProcess) -> int | None:
    """A descriptor that is readable exactly when the process has ended, where there is one.

    multiprocessing's own sentinel is a pipe: it becomes readable before the exit status is there
    (seconds before, while a GPU is torn down), and not at all while a process that the engine
    forked still has it open.
    """
    if not hasattr(os, "pidfd_open") or process.pid is None:
        return None
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        return None


def _stats_event(fields: tuple[int, int, Any] | None) -> Stats:
    return Stats(None if fields is None else CacheStats(*fields))


def _exit_text(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"
