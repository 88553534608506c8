"""The desk: where a dashboard asks and orders. One short connection a request.

Short, so that a broker that comes back is found by whoever asks next. Its methods block for up to
the time-out: call them from a thread.
"""

from __future__ import annotations

from typing import Any, Protocol

from zfabric.addresses import format_address, parse_address
from zfabric.client import Client
from zfabric.connection import Key

# Roles of keys that may look and not order, and the code of a refusal for want of a right.
LOOKING_ROLES = ("monitor",)
NOT_ALLOWED = "not_allowed"


class Desk(Protocol):
    """Asks a broker. Every method raises FabricError where it does not answer or says no."""

    @property
    def role(self) -> str | None:
        """The role that the broker gave to our key at the last connection; None: it named none."""
        ...

    def ask(self, op: str, **args: Any) -> Any:
        """One request."""
        ...

    def stats_address(self) -> str:
        """Where the broker publishes now."""
        ...


class BrokerDesk:
    """A desk at a broker's address."""

    def __init__(self, broker: str, timeout_s: float, key: Key = None) -> None:
        self._broker = broker
        self._key = key
        self._timeout_s = timeout_s
        self.role: str | None = None

    def ask(self, op: str, **args: Any) -> Any:
        """See Desk."""
        client = Client(self._broker, role="operator", timeout_s=self._timeout_s, key=self._key)
        try:
            self.role = client.welcome.get("role")
            return client.request(op, self._timeout_s, **args)
        finally:
            client.close()

    def stats_address(self) -> str:
        """See Desk."""
        client = Client(self._broker, role="operator", timeout_s=self._timeout_s, key=self._key)
        try:
            self.role = client.welcome.get("role")
            host, _ = parse_address(client.address)
            return format_address(host, client.welcome["stats_port"])
        finally:
            client.close()
