"""Errors: each class says whose fault it is and therefore what happens next.

A caller of the SDK sees only `FabricError` and its children. Inside the broker, `PeerError`
drops the peer, `StorageError` stops intake, and `InvariantError` ends the process.
"""

from __future__ import annotations


class FabricError(Exception):
    """Root of every error that the public API raises."""


class ConfigError(FabricError):
    """A flag, variable or file holds a value that cannot be used; the text names the fix."""


class ConnectError(FabricError, ConnectionError):
    """The broker was not reached, or stopped answering and did not come back in time."""


class TimeoutExpired(FabricError, TimeoutError):
    """An operation did not finish in the time that its caller allowed."""


class Backpressure(FabricError):
    """The broker or the client is full and the caller asked not to wait (or waited too long)."""


class NotAllowed(FabricError):
    """The broker refuses this key, one connection more, a name to its user, or what is asked."""


class TooManyConnections(NotAllowed):
    """The broker serves as many connections as it may, of this user or of all together."""


class TooManyHandshakes(ConnectError):
    """The broker asks to come later: the keys of this user connect too often."""


class ProtocolError(FabricError):
    """The other side sent something that the protocol does not allow."""


class VersionMismatch(ProtocolError):
    """The two sides speak different protocol versions; the text names both."""


class NameInUse(FabricError):
    """Another live client holds this name."""


class Refused(FabricError):
    """The broker refused an item for good: it is too large, malformed or contradicts a shape."""


class Lost(FabricError):
    """The broker came back with another store; this item was not in it."""


class ItemFailed(FabricError):
    """An item ended without a completion.

    `code` is the machine-readable reason (`dead`, `bad_request`, `cancelled`, ...) and
    `payload` holds whatever the engine or the broker said about it.
    """

    def __init__(self, code: str, text: str, payload: bytes = b"") -> None:
        super().__init__(f"{code}: {text}" if text else code)
        self.code = code
        self.text = text
        self.payload = payload


class PeerError(FabricError):
    """A peer broke the protocol. `code` goes back to it in ERROR; its message changed nothing."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class StorageError(FabricError):
    """The store cannot take or give data; intake stops, work in hand goes on."""


class NoSpace(StorageError):
    """The file system is full: intake stops until there is room again, the rest goes on."""


class Inconclusive(FabricError):
    """What was to be tried could not be: a limit that did its work kept it from being done."""


class InvariantError(FabricError):
    """The broker's own state contradicts itself: going on could poison a cache or lose work."""
