"""The gate: whom the broker lets in, what it lets them do, and how refusals are counted and told.

Without keys (`replace` was never called) everybody may do everything, and only counts are kept.
With keys every message is checked, since a connection may outlive its key. What is refused raises
PeerError and changes nothing. A refusal is always counted; of one kind at most `SPOKEN_MAX` become
events in `WINDOW_S`, and the next one says how many were held back, so that a flood of them pushes
nothing else out of sight. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zfabric import access
from zfabric.access import Grant, Table
from zfabric.errors import PeerError
from zfabric.fabric import Fabric
from zfabric.peers import Peer
from zfabric.protocol import Frame, Type
from zfabric.words import counted

WINDOW_S, SPOKEN_MAX = 10.0, 20
# Characters of a text that came with a refusal.
TEXT_MAX = 200
# The broker's own recorder, for as long as its process lives.
OWN_USER = "(this broker)"


class Gate:
    """The rules of `access`, applied to one broker."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._table: Table | None = None
        self._own: dict[str, Grant] = {}
        # (event, reason) -> [start of its window, events in it, refusals held back]
        self._spoken: dict[tuple[str, str], list[float]] = {}

    @property
    def keyed(self) -> bool:
        """Whether keys are asked for."""
        return self._table is not None

    def replace(self, table: Table) -> set[str]:
        """From now on these keys count; returns those that counted before and do not any more."""
        before = self._table or {}
        self._table = {**table, **self._own}
        return {
            public
            for public, grant in before.items()
            if not grant.revoked and grant != self._table.get(public)
        }

    def add_own(self, public: str) -> None:
        """A key that this process made for itself: it may look."""
        self._own[public] = Grant(OWN_USER, "monitor")
        self.replace(self._table or {})

    def reloaded(self, keys: int, now: float) -> None:
        """The list of keys has changed and counts."""
        self._fabric.event("keys_reloaded", f"{counted(keys, 'key')} listed", now)

    def unreadable(self, text: str, now: float) -> None:
        """The list of keys has changed and is of no use: what was known before still counts."""
        self._fabric.event("keys_unreadable", text[:TEXT_MAX], now)

    # -- asking -------------------------------------------------------------------------------

    def opens(self, endpoint: str, public: str) -> Grant:
        """A handshake. Raises PeerError where this key may not open this endpoint."""
        grant = access.check_key(self._table or {}, public)
        access.check_endpoint(grant, endpoint)
        return grant

    def speaks(self, peer: Peer | None, endpoint: str, public: str | None) -> None:
        """A message of a connection; `public` is what its frames carry. Raises PeerError."""
        if self._table is None:
            return
        access.check_endpoint(access.check_key(self._table, public), endpoint)
        if peer is not None and peer.key != public:
            raise PeerError(access.NOT_ALLOWED, "this connection was greeted with another key")

    def greets(self, role: str, name: str, public: str | None) -> None:
        """A HELLO. Raises PeerError where the key may not be this role, or have this name."""
        if self._table is None:
            return
        grant = access.check_key(self._table, public)
        access.check_greeting(grant, role)
        self._fabric.claims.check(role, name, grant.user)

    def greeted(self, peer: Peer, now: float) -> None:
        """Whoever said HELLO is let in: the name is its user's."""
        if self._table is None or peer.key is None:
            return
        grant = access.check_key(self._table, peer.key)
        self._fabric.claims.claim(peer.role, peer.name, grant.user, self._fabric.workers)

    def role_of(self, peer: Peer) -> Mapping[str, str]:
        """For WELCOME: the role of the key, where there are keys."""
        if self._table is None:
            return {}
        return {"role": access.check_key(self._table, peer.key).role}

    def asks(self, peer: Peer, op: str, args: Mapping[str, Any], now: float) -> None:
        """A request. Counts it and raises PeerError where the key's role does not allow it."""
        if self._table is None:
            return
        grant = access.check_key(self._table, peer.key)
        name = args.get("name")
        owner = self._fabric.claims.user_of("producer", name) if isinstance(name, str) else None
        try:
            access.check_request(grant, op, owner)
        except PeerError as error:
            self.refused(error, peer.name, now)
            raise

    def holder(self, role: str, name: str) -> Peer | None:
        """Who has a name now; operators have none."""
        if role == "worker":
            worker = self._fabric.workers.get(name)
            return worker.peer if worker is not None else None
        if role == "producer":
            index = self._fabric.producer_index.get(name)
            producer = self._fabric.producers[index] if index is not None else None
            return producer.peer if producer is not None else None
        return None

    # -- telling ------------------------------------------------------------------------------

    def refused(self, error: PeerError, who: str, now: float, *, told: bool = True) -> None:
        """Count a refusal of a message, and make it an event where somebody was told of it."""
        if error.code in access.REFUSAL_CODES:
            self.turned_away(error.code, f"{who}: {error.text}", now)
            return
        self._fabric.count(f"peer_errors_{error.code}")
        if told:
            self._speak("peer_error", error.code, f"{who}: {error.code}: {error.text}", now)

    def turned_away(self, reason: str, text: str, now: float) -> None:
        """Count one of `access.REASONS`, and make it an event."""
        self._fabric.count(f"access_refused_{reason}")
        self._speak("access_refused", reason, f"{reason}: {text}", now, reason=reason)

    def _speak(self, event: str, kind: str, text: str, now: float, **fields: Any) -> None:
        window = self._spoken.setdefault((event, kind), [now, 0, 0])
        if now - window[0] >= WINDOW_S:
            window[0], window[1] = now, 0
        if window[1] >= SPOKEN_MAX:
            window[2] += 1
            return
        window[1] += 1
        held, window[2] = int(window[2]), 0
        more = f" (and {held:,} more before it)" if held else ""
        self._fabric.event(event, text[:TEXT_MAX] + more, now, **fields)

    def view(self) -> dict[str, Any]:
        """For status: whether there are keys, of how many users, and refusals by reason."""
        counters = self._fabric.counters
        live = [g for g in (self._table or {}).values() if not g.revoked and g.user != OWN_USER]
        return {
            "keys": self.keyed,
            "users": len({grant.user for grant in live}),
            "refusals": {
                reason: counters.get(f"access_refused_{reason}", 0) for reason in access.REASONS
            },
        }


def is_hello(frames: Sequence[Frame]) -> bool:
    """Whether a message that may be of no use looks like a HELLO: its sender waits for a word."""
    return bool(frames) and len(frames[0]) > 3 and frames[0][3] == Type.HELLO
