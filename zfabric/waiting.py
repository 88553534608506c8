"""Waits of a client that are longer than one answer: for a stream of results, and to leave.

`mapped` submits items as it hands results on; `drain_aloud` is how a client leaves, which may take
for ever where nobody serves what it has open, and then says so. Times are seconds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zfabric.errors import Backpressure, FabricError, TimeoutExpired
from zfabric.results import Item, Reorder, Result, Results, window_items, windows
from zfabric.words import counted

if TYPE_CHECKING:
    from zfabric.client import Client

# Leaving is worth a word when it takes this long, and again later.
LEAVING_S, REMIND_S = 5.0, 60.0
ASK_TIMEOUT_S = 2.0
MODELS_NAMED_MAX = 5

log = logging.getLogger("zfabric")


def mapped(
    client: Client, source: Iterator[Item], buffersize: int, ordered: bool, timeout: float | None
) -> Iterator[Result]:
    """See `Client.map`."""
    results = Results()
    order = Reorder() if ordered else None
    taken = 0
    with client.stream():
        # With more, this would wait for its own results and hand none of them on meanwhile.
        buffersize = min(buffersize, client.buffer_items)
        exhausted, window_max = False, window_items(buffersize)
        parts = windows(source, window_max)
        while not exhausted:
            # Not for every result that makes room for one: what goes together is sorted together.
            if buffersize - (results.total - taken) >= window_max:
                window = next(parts, None)
                exhausted = window is None
                if window is not None:
                    until = None if timeout is None else time.monotonic() + timeout
                    try:
                        client.enqueue_waiting(window, results, until, order)
                    except Backpressure as error:
                        raise TimeoutExpired(f"no room for {timeout} s: {error}") from None
                fresh = results.take(0)
            else:
                with client.blocked():
                    fresh = results.take(timeout)
                if not fresh:
                    raise TimeoutExpired(f"no result for {timeout} s")
            taken += len(fresh)
            yield from order.push(fresh) if order is not None else fresh
    while taken < results.total:
        fresh = results.take(timeout)
        if not fresh:
            raise TimeoutExpired(f"no result for {timeout} s; {results.total - taken} are open")
        taken += len(fresh)
        yield from order.push(fresh) if order is not None else fresh


def drain_aloud(client: Client) -> None:
    """Wait until every submitted item has its result, with a warning where that takes long."""
    if client.forked:
        # What is open is the parent's.
        return
    wait_s = LEAVING_S
    while True:
        try:
            client.drain(wait_s)
        except TimeoutExpired:
            text = still_open(client)
            if text:
                log.warning("%s", text)
            wait_s = REMIND_S
        else:
            return


def still_open(client: Client) -> str:
    """Why a client that would leave is still here, in words; empty if it need not wait any more."""
    open_of = client.open_models()
    if not open_of:
        return ""
    text = (
        f"client {client.name!r} waits for the results of "
        f"{counted(sum(open_of.values()), 'open item')} before it leaves"
    )
    if not client.connected:
        return f"{text}; the broker at {client.address} does not answer"
    lonely: list[str] = []
    with contextlib.suppress(FabricError):
        models = client.stats(ASK_TIMEOUT_S)["models"]
        lonely = sorted(set(open_of) - {row["model"] for row in models if row["workers"]})
    if lonely:
        names = ", ".join(map(repr, lonely[:MODELS_NAMED_MAX]))
        if len(lonely) > MODELS_NAMED_MAX:
            names += f" and {len(lonely) - MODELS_NAMED_MAX} more"
        text += f"; no worker serves model {names}: start one (zfabric worker --model)"
    return f"{text}; close() leaves without waiting"
