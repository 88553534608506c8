"""Access: what a key's role lets it do. A table of who may open, be and ask what; nothing else.

    role       opens                 greets as            asks
    producer   producers             producer, operator   status, workers; cancels what is its own
    worker     workers               worker               nothing
    operator   producers, stats      operator             everything
    monitor    producers, stats      operator             what only looks

A key is named by its public half (40 characters of Z85), its owner by the user that it was made
for: two keys of one user are one owner. Nothing here reads a file, a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zfabric.errors import PeerError

PRODUCERS, WORKERS, STATS = "producers", "workers", "stats"
ENDPOINTS_OF_ROLE: Mapping[str, frozenset[str]] = {
    "producer": frozenset({PRODUCERS}),
    "worker": frozenset({WORKERS}),
    "operator": frozenset({PRODUCERS, STATS}),
    "monitor": frozenset({PRODUCERS, STATS}),
}
KEY_ROLES = tuple(ENDPOINTS_OF_ROLE)
# Roles of HELLO. A producer greets as an operator to see whether there is a broker at all.
_GREETS: Mapping[str, frozenset[str]] = {
    "producer": frozenset({"producer", "operator"}),
    "worker": frozenset({"worker"}),
    "operator": frozenset({"operator"}),
    "monitor": frozenset({"operator"}),
}
LOOKS = frozenset(
    {"status", "shapes", "lanes", "workers", "events", "lengths", "dead.ls", "producers.ls"}
)
# Neither shows what others have sent: shapes carry examples of prompts.
_PRODUCER_LOOKS = frozenset({"status", "workers", "expect"})
_PRODUCER_OWN = frozenset({"producers.cancel", "producers.forget"})

# Why somebody or something was refused: counted by these names, which are never reused.
KEY_MISSING, KEY_UNKNOWN, KEY_REVOKED = "key_missing", "key_unknown", "key_revoked"
NOT_ALLOWED, NAME_OF_ANOTHER = "not_allowed", "name_of_another"
SERVER_KEY_WRONG, HANDSHAKE = "server_key_wrong", "handshake"
TOO_MANY_CONNECTIONS = "too_many_connections"
TOO_MANY_HANDSHAKES, TOO_MANY_STRANGERS = "too_many_handshakes", "too_many_strangers"
REASONS: Mapping[str, str] = {
    KEY_MISSING: "the peer came without a key",
    KEY_UNKNOWN: "the key is not one that was made here",
    KEY_REVOKED: "the key was revoked",
    NOT_ALLOWED: "the role of the key does not let it do this",
    NAME_OF_ANOTHER: "another user claimed the name first",
    SERVER_KEY_WRONG: "the peer takes this broker for another one",
    HANDSHAKE: "what connected went away, or spoke otherwise, before it said who it is",
    TOO_MANY_CONNECTIONS: "the user has as many connections as one user may have",
    TOO_MANY_HANDSHAKES: "the keys of the user connect too often",
    TOO_MANY_STRANGERS: "keys that are of no use come too often; not even answered",
}
# The same as codes of ERROR, where it is told to the peer; another attempt cures none of them.
REFUSAL_CODES = frozenset({KEY_UNKNOWN, KEY_REVOKED, NOT_ALLOWED, NAME_OF_ANOTHER})
# Refusals of HELLO that another attempt may cure.
PASSING_CODES = frozenset({"name_in_use", "too_many_peers", TOO_MANY_CONNECTIONS})


class Grant(NamedTuple):
    """What is known of a key: whose it is, its role, and whether it was revoked."""

    user: str
    role: str
    revoked: bool = False


Table = Mapping[str, Grant]


def check_key(table: Table, public: str | None) -> Grant:
    """The grant of a key. Raises PeerError where it is none that may be used."""
    grant = table.get(public) if public is not None else None
    if grant is None:
        raise PeerError(KEY_UNKNOWN, "this key is not known here; `zfabric keys list` shows those")
    if grant.revoked:
        raise PeerError(KEY_REVOKED, f"this key of {grant.user} was revoked")
    return grant


def check_endpoint(grant: Grant, endpoint: str) -> None:
    """Raises PeerError where the role may not open this endpoint."""
    if endpoint not in ENDPOINTS_OF_ROLE[grant.role]:
        raise PeerError(NOT_ALLOWED, f"{_key(grant)} may not open the port of {endpoint}")


def check_greeting(grant: Grant, role: str) -> None:
    """Raises PeerError where the role of the key may not be the role of a HELLO."""
    if role not in _GREETS[grant.role]:
        raise PeerError(NOT_ALLOWED, f"{_key(grant)} may not be {a(role)}")


def check_request(grant: Grant, op: str, owner: str | None) -> None:
    """Raises PeerError where this may not be asked; `owner` is the user that a name belongs to."""
    if grant.role == "operator" or (grant.role == "monitor" and op in LOOKS):
        return
    if grant.role == "producer" and op in _PRODUCER_LOOKS:
        return
    if grant.role == "producer" and op in _PRODUCER_OWN and owner in (None, grant.user):
        return
    raise PeerError(NOT_ALLOWED, f"{_key(grant)} may not ask for {op!r:.80}")


def a(role: str) -> str:
    """A role with its article."""
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


def _key(grant: Grant) -> str:
    return f"{a(grant.role)}'s key ({grant.user})"
