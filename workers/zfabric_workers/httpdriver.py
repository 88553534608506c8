"""Sending the items of a batch to an OpenAI-compatible server, many in flight, in order.

Decides what is tried again here, and for how long:

    fault   `tries` times, waiting twice as long each time; then the item is left without a result
    busy    until it is taken, at most `BUSY_S`; then as away
    away    for `AWAY_S`; then the batch is given back and nothing is charged
    lost    (the connection broke) once; if the server is gone then, it died with this item: `died`
    hung    (no answer in `timeout_s`) never; the item's fault if the server answers others

Items that have a result are passed on whatever happens to the others; after anything but a fault no
more of their batch are sent. A batch that has been sent but for its last answers leaves its places
to the next one. Times are seconds. Never logs a header or a body, and never says the key: a server
that echoes what it was sent is quoted without it. A result is passed on as the server wrote it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from zfabric.engine import ROOM, Batch, EngineUnreachable, OutOfMemory, Result, Room
from zfabric.errors import ConfigError, FabricError
from zfabric_workers.cachecounts import CacheCounts, Counters, read_metrics
from zfabric_workers.flight import Flight, Places
from zfabric_workers.inflight import Limit
from zfabric_workers.requestlines import Call, bad_request, read_call
from zfabric_workers.secrecy import hiding
from zfabric_workers.verdicts import TEXT_CHARS_MAX, Finished, Trouble, Verdict, judge

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 5.0
PROBE_S = 5.0
AWAY_S = 3.0
BUSY_S = 300.0
# The wait doubles between these; one that begins at 0 would never grow, and nothing would end it.
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.001, 8.0
# The largest answer that is read; a batch's results may hold no more than 1 GiB together.
ANSWER_BYTES_MAX = 256 * 1024 * 1024
READ_BYTES = 256 * 1024
METRICS_BYTES_MAX = 4 * 1024 * 1024
CAUSES_TOLD = 3
T = TypeVar("T")


class ServerFault(FabricError):
    """The server failed at some items of a batch; they are charged and retried one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How requests are made. `slots`: places of the server that each keep a cache of their own."""

    url: str
    timeout_s: float = 600.0
    tries: int = 4
    backoff_s: float = 0.25
    api_key: str | None = None
    served_model: str | None = None
    slots: int | None = None

    @property
    def base(self) -> str:
        """The server's address without /v1."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def place(self) -> str:
        """The same for people: without a user and a password."""
        scheme, _, rest = self.base.partition("://")
        authority, slash, path = rest.partition("/")
        return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


class Sending:
    """One batch on its way; `arrivals` takes what comes of it, and None when it is over."""

    def __init__(self, flight: Flight, calls: dict[int, Call]) -> None:
        self.flight = flight
        self.calls = calls
        self.running: dict[asyncio.Task[Verdict], int] = {}
        self.arrivals: queue.SimpleQueue[tuple[int, Verdict] | Room | None] = queue.SimpleQueue()
        self.left_room = False
        self.error: BaseException | None = None


class Driver:
    """One server. Requests are made in a thread of its own; its methods may be called from any."""

    def __init__(self, manner: Manner, limit: Limit, counts: CacheCounts) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError(
                "this engine speaks HTTP through aiohttp: pip install 'zfabric[openai]'"
            ) from error
        self._http = aiohttp
        self._manner = manner
        self._limit = limit
        self._counts = counts
        self._hide = hiding(manner.api_key, manner.url)
        self._session: aiohttp.ClientSession | None = None
        # The batches on their way, oldest first; all of this belongs to the loop's thread.
        self._sendings: list[Sending] = []
        self._places = Places(slots=manner.slots)
        self._running = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of the connections."""
        if self._session is not None:
            self._wait_for(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, batch: Batch) -> Iterator[tuple[int, Result] | Room]:
        """(index, result) as items finish; raises if some have none, after all that have one.

        `ROOM` when all is sent and some is still to come: the next batch may be run beside it.
        Raises ServerFault, EngineUnreachable or OutOfMemory.
        """
        calls: dict[int, Call] = {}
        for index, payload in enumerate(batch.payloads):
            call = read_call(payload)
            if isinstance(call, Call):
                calls[index] = call
            else:
                yield index, call
        sending = Sending(Flight(batch, list(calls), self._places), calls)
        troubles: list[Trouble] = []
        self._loop.call_soon_threadsafe(self._begin, sending)
        try:
            while (arrival := sending.arrivals.get()) is not None:
                if isinstance(arrival, Room):
                    yield arrival
                elif isinstance(arrival[1], Trouble):
                    troubles.append(arrival[1])
                else:
                    yield arrival[0], arrival[1].result
        finally:
            self._wait_for(self._cancel(sending))
        if sending.error is not None:
            raise sending.error
        if troubles:
            _raise(troubles)

    def get(self, path: str, bytes_max: int = METRICS_BYTES_MAX) -> bytes | None:
        """A small document of the server; None if there is none."""
        return self._wait_for(self._get(path, bytes_max))

    def counters(self) -> Counters | None:
        """The server's own cache counters; None if it has none that are known."""
        text = self.get("/metrics")
        return None if text is None else read_metrics(text.decode("utf-8", "replace"))

    def slots_total(self) -> int | None:
        """How many requests a llama.cpp server works on at once; None for other servers."""
        try:
            slots = json.loads(self.get("/props") or b"null")["total_slots"]
        except (ValueError, TypeError, KeyError):
            return None
        return slots if type(slots) is int and slots > 0 else None

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # -- in the loop's thread: what is sent when -----------------------------------------------

    def _begin(self, sending: Sending) -> None:
        self._sendings.append(sending)
        self._refill()

    def _refill(self) -> None:
        """Send what may be sent now: of a later batch only when all of the earlier is sent."""
        for sending in list(self._sendings):
            flight = sending.flight
            while (index := flight.take(self._running, self._limit.value)) is not None:
                asking = self._ask(sending.calls[index], flight.slot_of(index))
                task = self._loop.create_task(asking)
                sending.running[task] = index
                self._running += 1
                task.add_done_callback(functools.partial(self._ended, sending))
            if not flight.begun:
                return
            if not sending.running:
                self._sendings.remove(sending)
                sending.arrivals.put(None)
            elif not sending.left_room:
                sending.left_room = True
                sending.arrivals.put(ROOM)

    def _ended(self, sending: Sending, task: asyncio.Task[Verdict]) -> None:
        full = self._running >= self._limit.value
        self._running -= 1
        index = sending.running.pop(task)
        sending.flight.release(index)
        if task.cancelled():
            return
        sending.error = sending.error or task.exception()
        if sending.error is not None:
            sending.flight.stopped = True
        else:
            verdict = task.result()
            if isinstance(verdict, Trouble):
                self._places.warm = None
                sending.flight.stopped |= verdict.kind != "fault"
            else:
                self._note(verdict, full)
            sending.arrivals.put((index, verdict))
        self._refill()

    async def _cancel(self, sending: Sending) -> None:
        """Nothing more of this batch: its reader may have gone. Its places are free for others."""
        sending.flight.stopped = True
        for task in sending.running:
            task.cancel()
        if sending.running:
            await asyncio.wait(list(sending.running))
        self._refill()

    def _note(self, finished: Finished, full: bool) -> None:
        usage = finished.usage
        self._counts.add(usage)
        computed = (usage.prompt_tokens or 0) - (usage.cached_tokens or 0)
        work = max(1, computed + (usage.completion_tokens or 0))
        self._limit.note(time.monotonic(), work, full=full)

    # -- one request ---------------------------------------------------------------------------

    async def _ask(self, call: Call, slot: int | None) -> Verdict:
        """One item to its end, with what is tried again."""
        faults, waited_s, lost = 0, 0.0, False
        backoff_s = max(self._manner.backoff_s, BACKOFF_MIN_S)
        while True:
            verdict = await self._post(call, slot)
            if isinstance(verdict, Finished) or verdict.kind == "memory":
                return verdict
            if verdict.kind == "unrouted":
                # A server that is found at this address has all the paths that it will ever have.
                if await self._get("/v1/models", METRICS_BYTES_MAX) is None:
                    return Trouble("away", verdict.text)
                return Finished(bad_request(verdict.text))
            if verdict.kind == "hung":
                return Trouble("fault" if await self._answers() else "away", verdict.text)
            if lost and verdict.kind in ("lost", "away"):
                return Trouble("died", f"the server was lost with this item: {verdict.text}")
            lost = verdict.kind == "lost"
            faults += verdict.kind == "fault"
            if verdict.kind == "busy":
                self._limit.busy(time.monotonic())
            patience_s = BUSY_S if verdict.kind == "busy" else AWAY_S
            if faults >= self._manner.tries:
                return verdict
            if verdict.kind in ("busy", "away") and waited_s >= patience_s:
                return Trouble("away", verdict.text)
            # A server may ask for more patience, not for less: one that says 0 is asked for ever.
            pause_s = max(verdict.retry_after_s or 0.0, backoff_s)
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _post(self, call: Call, slot: int | None) -> Verdict:
        session, aiohttp = self._connected(), self._http
        try:
            async with session.post(
                self._manner.base + call.url, data=self._body_of(call, slot), allow_redirects=False
            ) as response:
                body = await _read(response, ANSWER_BYTES_MAX)
                if body is None:
                    return Trouble("fault", f"an answer of over {ANSWER_BYTES_MAX} bytes")
                after = response.headers.get("Retry-After")
                return judge(call, response.status, body, after, self._hide)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            text = self._hide(str(error))
            return Trouble("away", f"{self._manner.place} cannot be reached: {text}")
        except TimeoutError:
            return Trouble("hung", f"no answer within {self._manner.timeout_s:g} s")
        except aiohttp.InvalidURL:
            return Trouble("away", f"{self._manner.place} is no address; look at --url")
        except (aiohttp.ClientError, OSError) as error:
            # Its text may quote what the server sent.
            text = self._hide(f"{type(error).__name__} {error}")[:TEXT_CHARS_MAX]
            return Trouble("lost", f"the connection broke: {text}")

    def _body_of(self, call: Call, slot: int | None) -> bytes:
        body = call.body
        if self._manner.served_model is not None:
            body = body | {"model": self._manner.served_model}
        if slot is not None:
            body = body | {"id_slot": slot}
        return json.dumps(body).encode()

    async def _answers(self) -> bool:
        """Whether the server says anything at all."""
        timeout = self._http.ClientTimeout(total=PROBE_S)
        with contextlib.suppress(self._http.ClientError, OSError, TimeoutError):
            url = self._manner.base + "/v1/models"
            async with self._connected().get(url, timeout=timeout):
                return True
        return False

    async def _get(self, path: str, bytes_max: int) -> bytes | None:
        timeout = self._http.ClientTimeout(total=PROBE_S)
        with contextlib.suppress(self._http.ClientError, OSError, TimeoutError):
            url = self._manner.base + path
            async with self._connected().get(url, timeout=timeout) as response:
                if response.status == 200:
                    return await _read(response, bytes_max)
        return None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._manner.api_key is not None:
                headers["Authorization"] = f"Bearer {self._manner.api_key}"
            # Our own limit decides. A connection that is kept may have died since, and then nobody
            # can tell whether the server ever had the item: a new one costs less than the doubt.
            self._session = self._http.ClientSession(
                connector=self._http.TCPConnector(limit=0, force_close=True),
                headers=headers,
                timeout=self._http.ClientTimeout(
                    total=self._manner.timeout_s, sock_connect=CONNECT_S
                ),
            )
        return self._session


async def _read(response: Any, bytes_max: int) -> bytes | None:
    """The body; None if it is longer than `bytes_max`."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(READ_BYTES):
        body += chunk
        if len(body) > bytes_max:
            return None
    return bytes(body)


def _raise(troubles: list[Trouble]) -> None:
    """The exception that stands for what is left without a result."""
    kinds = {trouble.kind for trouble in troubles}
    causes = Counter(trouble.text for trouble in troubles).most_common(CAUSES_TOLD)
    text = "; ".join(f"{times} x {cause}" if times > 1 else cause for cause, times in causes)
    if "memory" in kinds:
        raise OutOfMemory(text)
    if kinds <= {"away", "busy"}:
        raise EngineUnreachable(text)
    raise ServerFault(text)
