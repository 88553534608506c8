"""Refusals: which error it is to a caller that a broker refuses a connection, for good or so far.

Codes are those of ERROR and of `access.REASONS`. Pure: no socket, no clock. How long to try for is
the caller's affair.
"""

from __future__ import annotations

from zfabric.access import REASONS, TOO_MANY_CONNECTIONS
from zfabric.errors import (
    ConfigError,
    ConnectError,
    FabricError,
    NameInUse,
    NotAllowed,
    ProtocolError,
    TooManyConnections,
    VersionMismatch,
)

# What a worker registered, and no attempt with the same can cure.
_BAD_CONTRACTS = frozenset({"bad_contract", "input_max_differs"})


def for_good(code: str, text: str) -> FabricError:
    """The error of a refusal that no further attempt can cure."""
    if code == "version_mismatch":
        return VersionMismatch(text)
    if code in REASONS:
        return NotAllowed(text)
    return ConfigError(text) if code in _BAD_CONTRACTS else ProtocolError(text)


def so_far(code: str, text: str, address: str) -> FabricError:
    """The error of a refusal that another attempt may cure, where there is no more time for one."""
    if code == "name_in_use":
        return NameInUse(f"{text} at {address}; choose another name")
    said = f"{address}: {code}: {text}"
    if code == TOO_MANY_CONNECTIONS:
        return TooManyConnections(said)
    return NotAllowed(said) if code in REASONS else ConnectError(said)
