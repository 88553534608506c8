"""The engine's side of the process boundary: load the engine, run batches, say what happened.

Decides how a batch is encoded for the child, what counts as a proper answer of run(), what is
told of an exception, and how the child ends: told to close, or with its supervisor. It runs in a
process of its own (see `engine_child`), so it may block. Sizes are bytes, lengths tokens.

When the supervisor dies, so does this process: it holds the reading end of a pipe whose writing
end only the supervisor has. Where the system can (Linux), the kernel is told to send SIGKILL to
this process when that pipe closes, which needs neither a thread nor the interpreter lock. A
watching thread does the same elsewhere, and covers a supervisor that died before that was set
up. PR_SET_PDEATHSIG is not used: it fires when the creating thread ends, and any thread may
start a child. Processes that an engine starts have to end with it by the engine's own means.

Never: pickled data, zmq, or an exception of the engine that goes unreported.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeAlias

import msgpack

from zfabric.engine import (
    MEASURERS,
    STATUSES,
    Batch,
    Engine,
    EngineFactory,
    EngineUnreachable,
    OutOfMemory,
    Result,
    Room,
)
from zfabric.errors import ConfigError, FabricError
from zfabric.shapes import Shape
from zfabric.words import counted

# Payloads of all results in one message; a run that returns more is an engine error.
RESULT_BYTES_MAX = 2**30
# The decoder's limit: the payloads and, at most, some hundred bytes an item around them.
MESSAGE_BYTES_MAX = RESULT_BYTES_MAX + 2**26
# One recv(); a larger one is not faster on a socket pair.
READ_BYTES = 2**18
# What is told of an exception: enough for its text, small enough for every event log.
TEXT_BYTES_MAX = 4096
# Status of a child that found its supervisor gone; nobody is left to read it but a log.
EXIT_ORPHANED = 113
EXIT_LOAD_FAILED = EXIT_UNREPORTED = 1

FailureKind: TypeAlias = Literal["out_of_memory", "unreachable", "config", "error"]


def unpacker() -> msgpack.Unpacker:
    """The decoder of either direction: a stream of bytes in, whole messages out."""
    return msgpack.Unpacker(use_list=False, max_buffer_size=MESSAGE_BYTES_MAX)


def run_message(batch_id: int, batch: Batch) -> tuple[Any, ...]:
    """`batch` as it travels to the child."""
    shapes = [(shape.model, shape.components, shape.tokens) for shape in batch.shapes]
    columns = (batch.lengths, batch.payloads, shapes, batch.shape_index)
    return ("run", batch_id, batch.model, batch.pad_to, *columns)


def _batch_of(message: tuple[Any, ...]) -> tuple[int, Batch]:
    _, batch_id, model, pad_to, lengths, payloads, shapes, shape_index = message
    rebuilt = tuple(Shape(*fields) for fields in shapes)
    return batch_id, Batch(model, pad_to, lengths, payloads, rebuilt, shape_index)


class _EngineFault(FabricError):
    """The engine returned something that is not what run() promises."""


def host(factory: EngineFactory, channel: socket.socket, lifeline: Connection) -> None:
    """The child process: load the engine, then run batches until told to close."""
    _settle(channel, lifeline)

    sending = threading.Lock()

    def send(*message: Any) -> None:
        with sending:
            channel.sendall(msgpack.packb(message))

    try:
        engine = factory()
        engine.load()
    except ConfigError as error:
        send("failed", None, "config", _sendable(str(error)))
        sys.exit(EXIT_LOAD_FAILED)
    except Exception as error:  # noqa: BLE001 - an engine may raise anything; it is reported
        send("failed", None, _kind_of(error), _text_of(error))
        sys.exit(EXIT_LOAD_FAILED)
    send("loaded", _stats_of(engine))
    rests: list[threading.Thread] = []
    for message in _messages(channel):
        if message[0] == "close":
            break
        rests = [rest for rest in rests if rest.is_alive()]
        answers = _answers(engine, *_batch_of(message))
        for answer in answers:
            send(*answer)
            if answer[0] == "room":
                # What is left of this batch comes beside the next one.
                rest = threading.Thread(target=_send_rest, args=(answers, send), daemon=True)
                rests.append(rest)
                rest.start()
                break
    for rest in rests:
        rest.join()
    close: Callable[[], None] | None = getattr(engine, "close", None)
    if close is not None:
        close()


def _send_rest(answers: Iterator[tuple[Any, ...]], send: Callable[..., None]) -> None:
    try:
        for answer in answers:
            send(*answer)
    except BaseException:  # noqa: BLE001 - sys.exit() and CancelledError too
        # As in the main thread, what is not reported ends the process: its batch would never end.
        traceback.print_exc()
        os._exit(EXIT_UNREPORTED)


def _settle(channel: socket.socket, lifeline: Connection) -> None:
    # Ctrl-C and `kill %1` reach a whole group; the supervisor decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # stdout is data in every command: what an engine prints goes with the talk.
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    # Spawned as a daemon so that a supervisor at exit does not wait; engines may have processes.
    multiprocessing.current_process().daemon = False
    # Spawn passes descriptors as inheritable; a server that an engine starts must not keep them.
    channel.set_inheritable(False)
    os.set_inheritable(lifeline.fileno(), False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    wait([lifeline])
    os._exit(EXIT_ORPHANED)


def _messages(channel: socket.socket) -> Iterator[tuple[Any, ...]]:
    decoder = unpacker()
    while chunk := channel.recv(READ_BYTES):
        decoder.feed(chunk)
        yield from decoder


def _answers(engine: Engine, batch_id: int, batch: Batch) -> Iterator[tuple[Any, ...]]:
    """The messages that one batch leads to; the last one is final or a failure."""
    try:
        returned = engine.run(batch)
        if isinstance(returned, Iterator):
            for given in _checked_pairs(returned, len(batch)):
                if isinstance(given, Room):
                    yield "room", batch_id
                    continue
                index, result = given
                yield "results", batch_id, (index,), (result.status,), (result.payload,), False
            results: Sequence[Result] = ()
        else:
            results = _checked_whole(returned, len(batch))
        statuses = [result.status for result in results]
        payloads = [result.payload for result in results]
        indices = range(len(results))
        final = ("results", batch_id, tuple(indices), statuses, payloads, True)
        yield (*final, _stats_of(engine))
    except Exception as error:  # noqa: BLE001 - an engine may raise anything; it is reported
        yield "failed", batch_id, _kind_of(error), _text_of(error)


def _checked_whole(returned: object, items: int) -> Sequence[Result]:
    if isinstance(returned, (str, bytes)) or not isinstance(returned, Sequence):
        raise _EngineFault(f"run() returned {_type_name(returned)}, not a sequence of Result")
    if len(returned) != items:
        raise _EngineFault(
            f"run() returned {counted(len(returned), 'result')} for {counted(items, 'item')}"
        )
    size_bytes = sum(_checked(result, index) for index, result in enumerate(returned))
    if size_bytes > RESULT_BYTES_MAX:
        raise _EngineFault(f"results hold {size_bytes} bytes; at most {RESULT_BYTES_MAX} may")
    return returned


def _checked_pairs(returned: Iterable[object], items: int) -> Iterator[tuple[int, Result] | Room]:
    seen: set[int] = set()
    rooms = 0
    for pair in returned:
        if isinstance(pair, Room):
            rooms += 1
            if rooms > 1:
                raise _EngineFault("run() gave ROOM twice")
            yield pair
            continue
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise _EngineFault(f"run() gave {_type_name(pair)}, not a pair (index, Result)")
        index, result = pair
        if isinstance(index, bool) or not isinstance(index, int):
            raise _EngineFault(f"run() gave an index of type {_type_name(index)}")
        if not 0 <= index < items:
            raise _EngineFault(f"run() gave index {index} in a batch of {counted(items, 'item')}")
        if index in seen:
            raise _EngineFault(f"run() gave index {index} twice")
        if _checked(result, index) > RESULT_BYTES_MAX:
            raise _EngineFault(f"result {index} is over {RESULT_BYTES_MAX} bytes")
        seen.add(index)
        yield index, result
    if len(seen) != items:
        raise _EngineFault(
            f"run() gave {counted(len(seen), 'result')} for {counted(items, 'item')}"
        )


def _checked(result: object, index: int) -> int:
    """The payload's size, if `result` is a well-formed Result."""
    if not isinstance(result, Result):
        raise _EngineFault(f"result {index} is {_type_name(result)}, not a Result")
    if result.status not in STATUSES:
        raise _EngineFault(f"result {index} has the unknown status {result.status!r:.100}")
    if not isinstance(result.payload, bytes):
        raise _EngineFault(f"result {index} has a {_type_name(result.payload)} payload, not bytes")
    return len(result.payload)


def _type_name(value: object) -> str:
    return type(value).__qualname__


def _stats_of(engine: Engine) -> tuple[int, int, str] | None:
    """The engine's counters as they travel; None if it has none or cannot give them.

    A fault here must not cost a batch its results, so it is only written to the log.
    """
    try:
        stats = engine.cache_stats()
        if stats is None:
            return None
        counters = (stats.queries_tokens, stats.hits_tokens)
        if not all(type(count) is int and 0 <= count < 2**63 for count in counters):
            raise _EngineFault(f"cache_stats() gave {counters!r:.200}, not token counts")
        if stats.measured_by not in MEASURERS:
            raise _EngineFault(f"cache_stats() gave measured_by {stats.measured_by!r:.100}")
    except Exception:  # noqa: BLE001 - see above
        traceback.print_exc()
        return None
    return (*counters, stats.measured_by)


def _kind_of(error: Exception) -> FailureKind:
    if isinstance(error, (OutOfMemory, MemoryError)):
        return "out_of_memory"
    return "unreachable" if isinstance(error, EngineUnreachable) else "error"


def _text_of(error: Exception) -> str:
    """The exception and where it was raised, within `TEXT_BYTES_MAX`."""
    if isinstance(error, _EngineFault):
        return _sendable(str(error))
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f"\nat {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    tail = place.encode("utf-8", "backslashreplace")[-TEXT_BYTES_MAX // 4 :]
    head = text.encode("utf-8", "backslashreplace")[: TEXT_BYTES_MAX - len(tail)]
    return (head + tail).decode("utf-8", "ignore")


def _sendable(text: str) -> str:
    """`text` within `TEXT_BYTES_MAX`; a path in it may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore")
