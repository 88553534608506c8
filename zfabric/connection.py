"""A client's connection: made, asked through, and closed; what comes of it is for others to act on.

The link's thread moves frames between the socket and a `Session`; callers touch the session under
one lock and are woken through futures. Times are seconds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from zfabric.access import NOT_ALLOWED, PASSING_CODES
from zfabric.addresses import format_address, parse_address
from zfabric.errors import (
    ConfigError,
    ConnectError,
    FabricError,
    NotAllowed,
    PeerError,
    TimeoutExpired,
    TooManyConnections,
    TooManyHandshakes,
)
from zfabric.keys import ClientKey, client_key
from zfabric.link import UNREACHED, Link
from zfabric.refusals import for_good, so_far
from zfabric.session import News, Session
from zfabric.shapes import check_name

DEFAULT_BROKER = "tcp://127.0.0.1:7410"
# A key, the file of one, "none" for none whatever the environment says, None for what that says.
Key = ClientKey | str | os.PathLike[str] | None


class Connection(ABC):
    """A named connection to a broker that can ask; see `Client` for what it raises when made."""

    def __init__(
        self,
        broker: str | None,
        *,
        name: str | None,
        timeout_s: float,
        role: str,
        key: Key = None,
        patient: bool = True,
    ) -> None:
        host, port = parse_address(broker or os.environ.get("ZFABRIC_BROKER") or DEFAULT_BROKER)
        self.address = format_address(host, port)
        self.name = check_name(name or f"client-{os.getpid()}-{secrets.token_hex(4)}", "name")
        self.key = client_key(key or os.environ.get("ZFABRIC_KEY") or None, server_key())
        self._session = Session(self.name, secrets.randbits(64), role)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._replies: dict[int, Future[Any]] = {}
        self._failure: FabricError | None = None
        self._closing = False
        self._link = Link(
            self.address,
            self._session,
            self._lock,
            self._act,
            self._ended,
            self.key,
            patient=patient,
        )
        with contextlib.ExitStack() as undoing:
            # Whatever ends the wait, a signal too: nobody else could close it.
            undoing.callback(self.close, 1.0)
            self._link.start()
            self._await_welcome(timeout_s)
            undoing.pop_all()

    @abstractmethod
    def _act(self, news: News) -> None:
        """In the link's thread, under the lock."""

    @abstractmethod
    def _ended(self) -> None:
        """The link's thread is over."""

    def _await_welcome(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._session.state == "live" or self._failure is not None, timeout_s
            )
            if self._session.state == "live" and self._failure is None:
                return
            failure = self._failure
            taken = self._session.last_refusal
        # The link's last look is the latest word on why.
        self.close(timeout_s=1.0)
        if failure is not None:
            raise failure
        if taken is not None and taken[0] == "name_in_use":
            raise so_far(*taken, self.address)
        if taken is not None and taken[0] in PASSING_CODES:
            raise TooManyConnections(f"{self.address}: {taken[0]}: {taken[1]}")
        trouble = self._link.trouble
        if trouble is not None:
            kind = TooManyHandshakes if trouble.later else ConnectError
            raise kind(f"no connection to {self.address} for {timeout_s:g} s: {trouble.text}")
        raise ConnectError(_unanswered(self.address, f" within {timeout_s:g} s"))

    @property
    def forked(self) -> bool:
        """Whether this is a child process's copy of its parent's client, which nothing serves."""
        return self._pid != os.getpid()

    def _check_process(self) -> None:
        """Before anything that takes the lock: whoever held it does not exist in a forked child."""
        if self.forked:
            raise ConnectError(
                f"this client was made in process {self._pid}, before a fork; make another Client "
                f"in process {os.getpid()}, or start processes with the method 'spawn'"
            )

    def _check_caller(self) -> None:
        """Before anything that waits: what it would wait for comes through the link's thread."""
        self._check_process()
        if self._link.is_here:
            raise FabricError(
                "a callback of a future cannot wait for the client that calls it: have another "
                "thread do it, or use AsyncClient"
            )

    # -- asking -------------------------------------------------------------------------------

    @property
    def welcome(self) -> dict[str, Any]:
        """What the broker said when it last greeted this client: ports, durability, limits."""
        return dict(self._session.welcome)

    @property
    def accepted_upto(self) -> int:
        """Every item number up to this one has been taken (or skipped)."""
        return self._session.upto

    @property
    def settled_upto(self) -> int:
        """No item number up to this one waits to be taken; larger where some were refused here."""
        return self._session.settled_upto

    @property
    def unaccepted_items(self) -> int:
        """How many items wait to be taken."""
        with self._lock:
            return self._session.unaccepted_items

    @property
    def payload_bytes_max(self) -> int:
        """The largest payload that the broker takes."""
        limit: int = self._session.welcome.get("payload_bytes_max", 0)
        return limit

    @property
    def connected(self) -> bool:
        """Whether the broker has greeted this client on its present connection."""
        return self._session.state == "live"

    def request(self, op: str, timeout: float | None = 10.0, **args: Any) -> Any:
        """Ask the broker something; see `zfabric.operate`. Raises FabricError where it says no.

        Raises ConfigError for arguments that no message can carry.
        """
        self._check_caller()
        reply: Future[Any] = Future()
        with self._lock:
            if self._failure is not None or self._closing:
                raise self._failure or ConnectError("this client is closed")
            try:
                number = self._session.request(op, args)
            except (TypeError, ValueError, OverflowError, PeerError) as error:
                raise ConfigError(f"{op!r} cannot be asked so: {error}") from None
            self._replies[number] = reply
        self._link.wake()
        try:
            return reply.result(timeout)
        except TimeoutError:
            if reply.done():
                raise
            with self._lock:
                self._session.forget_request(number)
                self._replies.pop(number, None)
            raise TimeoutExpired(f"the broker did not answer {op!r} within {timeout} s") from None

    def stats(self, timeout: float | None = 10.0) -> dict[str, Any]:
        """What `zfabric status --json` prints."""
        answer: dict[str, Any] = self.request("status", timeout)
        return answer

    def close(self, timeout_s: float = 2.0) -> None:
        """Leave. Accepted items stay with the broker; futures that are open raise ConnectError."""
        if self.forked:
            # The parent's connection is not a child's to end.
            return
        with self._lock:
            self._closing = True
        self._link.close()
        self._link.join(timeout_s + 2.0)

    # -- what happened ------------------------------------------------------------------------

    def _heed(self, news: News) -> None:
        """What ends the connection, or keeps it from being made."""
        if news.fatal is not None:
            code, text = news.fatal
            self._fail(_failure(code, f"{self.address}: {code}: {text}", self.address))
        for code, text in news.errors:
            if code in PASSING_CODES:
                self._session.last_refusal = (code, text)

    def _reply(self, news: News) -> None:
        for number, ok, value in news.replies:
            reply = self._replies.pop(number, None)
            if reply is not None:
                if ok:
                    reply.set_result(value)
                else:
                    refused = str(value).startswith(f"{NOT_ALLOWED}:")
                    reply.set_exception((NotAllowed if refused else FabricError)(str(value)))

    def _fail(self, failure: FabricError) -> None:
        self._failure = self._failure or failure
        self._closing = True
        self._link.close()
        self._changed.notify_all()


def server_key() -> str | None:
    """The broker's public key, where the environment says it in place of the key's file."""
    return os.environ.get("ZFABRIC_SERVER_KEY") or None


def _unanswered(address: str, when: str) -> str:
    return (
        f"no broker answered at {address}{when}; start one with `zfabric broker`, or name another "
        "with --broker or ZFABRIC_BROKER"
    )


def _failure(code: str, text: str, address: str) -> FabricError:
    """What an error that no further attempt can cure is to a caller."""
    if code == UNREACHED:
        return ConnectError(_unanswered(address, ""))
    return for_good(code, text)
