"""A fabric that somebody else has started, and how any fabric is asked: its keys, and leaving none.

It may be asked and used, not harmed. What a run makes there has the run's mark in front of its
name, and nothing else is ever forgotten. Times are seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zfabric.addresses import format_address, parse_address
from zfabric.chaos.peers import admitted
from zfabric.client import Client
from zfabric.config_keys import NO_KEY
from zfabric.errors import FabricError, TimeoutExpired

ANSWER_S = 30.0
# Longer than most leases: what a peer that vanished holds is not free before.
TIDY_S = 30.0


@dataclass(frozen=True, slots=True)
class Keys:
    """Files of keys, one for each role that a run plays: a key has one role, which is never all."""

    producer: str = NO_KEY
    worker: str = NO_KEY
    operator: str = NO_KEY


@contextlib.contextmanager
def operator(address: str, key: str = NO_KEY, *, patient: bool = True) -> Iterator[Client]:
    """A connection that asks."""
    client = Client(address, role="operator", timeout_s=ANSWER_S, key=key, patient=patient)
    try:
        yield client
    finally:
        client.close()


def ask(address: str, key: str, op: str, **args: Any) -> Any:
    """One question to the broker there. Raises FabricError."""
    with operator(address, key) as client:
        return client.request(op, ANSWER_S, **args)


class Remote:
    """Raises FabricError where there is no such fabric, or where it refuses one of the keys."""

    def __init__(self, address: str, keys: Keys) -> None:
        host, port = parse_address(address)
        self.address = format_address(host, port)
        self.keys = keys
        with operator(self.address, keys.operator, patient=False) as client:
            ports = client.welcome
        self.host = host
        self.ports = (port, int(ports["worker_port"]), int(ports["stats_port"]))
        self.workers_address = format_address(host, self.ports[1])
        if keys.producer != NO_KEY:
            with operator(self.address, keys.producer):
                pass
        if keys.worker != NO_KEY:
            admitted(self.workers_address, keys.worker)

    def forget(self, mark: str) -> list[str]:
        """Forget what is gone and has this mark; returns what is still there in the end.

        Within TIDY_S, and ANSWER_S for each of a connection and an answer that do not come.
        """
        until = time.monotonic() + TIDY_S
        try:
            with operator(self.address, self.keys.operator, patient=False) as client:
                while (left := _forget(client, mark)) and time.monotonic() < until:
                    threading.Event().wait(0.1)
                return left
        except (FabricError, OSError) as error:
            return [f"all of {mark}: {error}"]


class Tidying:
    """Takes what a run has made off the lists of somebody else's fabric: to the end, and once.

    A signal may end one attempt; the next one then does all that is left.
    """

    def __init__(self, mark: str) -> None:
        self.remote: Remote | None = None
        # what is still there in the end
        self.left: list[str] = []
        self._mark = mark
        self._is_done = False

    def finish(self) -> None:
        """Do it, where there is something to do; see `Remote.forget` for how long it may take."""
        if self.remote is not None and not self._is_done:
            self.left = self.remote.forget(self._mark)
            self._is_done = True


def _forget(client: Client, mark: str) -> list[str]:
    """Forget what can be by now; returns what could not."""
    found = [
        (op, "name", row["name"])
        for op, listing in (("producers.forget", "producers.ls"), ("workers.forget", "workers"))
        for row in client.request(listing, ANSWER_S)
    ]
    models = client.stats(ANSWER_S)["models"]
    found += [("models.forget", "model", row["model"]) for row in models]
    return [
        name
        for op, field, name in found
        if name.startswith(mark) and not _forgotten(client, op, {field: name})
    ]


def _forgotten(client: Client, op: str, what: dict[str, Any]) -> bool:
    """Whether the broker did it; it does not while somebody is connected or work is left."""
    force = {"force": True} if op == "producers.forget" else {}
    try:
        client.request(op, ANSWER_S, **what, **force)
    except FabricError as error:
        if isinstance(error, TimeoutExpired) or not client.connected:
            raise
        return False
    return True
