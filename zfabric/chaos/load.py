"""The load: a producer that submits, collects every result, and remembers both for the judge."""

from __future__ import annotations

import random
import threading
import time

from zfabric.chaos.judge import Seen
from zfabric.client import Client
from zfabric.config_keys import NO_KEY
from zfabric.errors import TimeoutExpired
from zfabric.results import Item, Results, status_name
from zfabric.session import Arrival
from zfabric.shapes import Shape
from zfabric.words import counted

MODEL = "chaos"
SHAPES = 5
SUBMIT_TIMEOUT_S = 60.0


class Load:
    """One producer of this process. Its numbers go on where an earlier run of its name ended."""

    def __init__(
        self,
        address: str,
        name: str,
        chance: random.Random,
        *,
        model: str = MODEL,
        key: str = NO_KEY,
    ) -> None:
        self.seen = Seen()
        self.name = name
        self._chance = chance
        self._changed = threading.Condition()
        self._shapes = [Shape.of(model, f"prefix {k}") for k in range(SHAPES)]
        # While it is not reading, results pile up unacknowledged; they may come before `client` is.
        self.reading = False
        self._unread = 0
        self.client = Client(
            address, name=name, timeout_s=30.0, on_results=self._on_results, key=key
        )
        self._next = self.client.accepted_upto + 1
        self.read_on()

    def close(self) -> None:
        """Leave."""
        self.client.close()

    def _on_results(self, arrivals: list[Arrival], seq: int) -> None:
        with self._changed:
            for arrival in arrivals:
                number = arrival.number if arrival.retry_of is None else arrival.retry_of
                word = status_name(arrival.status)
                self.seen.results.setdefault(number, []).append((word, arrival.payload))
            self._changed.notify_all()
        self._unread = max(self._unread, seq)
        if self.reading and seq:
            self.client.acknowledge(self._unread)

    def read_on(self) -> None:
        """Read again; what has piled up is acknowledged."""
        self.reading = True
        if self._unread:
            self.client.acknowledge(self._unread)

    def submit(
        self,
        items: int,
        *,
        text: bytes = b"",
        length: int | None = None,
        payload: bytes | None = None,
        excuse: frozenset[str] = frozenset(),
    ) -> list[int]:
        """Submit new items and wait until they are accepted; returns their numbers.

        `text` is in each payload (the simulated engine reacts to words in it), `excuse` are the
        ends that are as good as a completion. Raises TimeoutExpired.
        """
        chance = self._chance
        numbers = list(range(self._next, self._next + items))
        self._next += items
        fresh = [
            Item(
                chance.choice(self._shapes),
                payload if payload is not None else _payload(chance, text),
                chance.randrange(1, 900) if length is None else length,
                number=number,
            )
            for number in numbers
        ]
        until = time.monotonic() + SUBMIT_TIMEOUT_S
        with self._changed:
            for number, item in zip(numbers, fresh, strict=True):
                self.seen.payloads[number] = bytes(item.payload)
                if excuse:
                    self.seen.excused[number] = excuse
        accepted = self.client.enqueue_waiting(fresh, Results(), until)
        try:
            accepted.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise TimeoutExpired(f"{counted(items, 'item')} not accepted") from None
        return numbers

    @property
    def results(self) -> int:
        """How many numbers have a result."""
        return len(self.seen.results)

    def await_results(self, count: int, timeout_s: float) -> None:
        """Wait until so many numbers have results. Raises TimeoutExpired."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.results >= count, timeout_s):
                missing = count - self.results
                raise TimeoutExpired(
                    f"{missing} missing of {counted(count, 'result')} after {timeout_s:g} s"
                )

    def await_end(self, timeout_s: float) -> None:
        """Wait until every submitted item has a result. Raises TimeoutExpired."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self.seen.lost, timeout_s):
                raise TimeoutExpired(
                    f"no result for {counted(len(self.seen.lost), 'item')} after {timeout_s:g} s"
                )


def _payload(chance: random.Random, text: bytes) -> bytes:
    return text + b" item %016x " % chance.getrandbits(64) + b"." * chance.randrange(200)
