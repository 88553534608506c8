"""The gate: whom the broker lets in, what it lets them do, and how refusals are counted and told.

Without keys (`replace` was never called) everybody may do everything, and only counts are kept.
With keys every message is checked, since a connection may outlive its key. What is refused raises
PeerError and changes nothing. A user may have so many connections (counted from HELLO to their end:
libzmq tells of no other) and make them at a pace; all keys that are of no use have one pace
together, so that they take nothing from those that are. A refusal is always counted, and told as
`telling` does. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zfabric import access
from zfabric.access import Grant, Table
from zfabric.errors import PeerError
from zfabric.fabric import Fabric
from zfabric.pace import Pace
from zfabric.peers import Peer
from zfabric.protocol import Frame, Type
from zfabric.telling import Telling
from zfabric.words import counted

# All that a user may have can come back at once, as after a restart, and again after this long.
RETURN_S = 10.0
# What a user may open at once where few connections are allowed: a command needs two.
BURST_MIN = 100
# Handshakes of useless keys that are answered: a fleet with a wrong key is told so at once, and who
# goes on and waits for answers costs the loop some 3% of its time (130 us each).
STRANGERS_PER_S, STRANGERS_BURST = 200, 1_000
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
        self._telling = Telling(fabric.event)
        # addresses of live connections, and the pace of new ones, by user
        self._connections: dict[str, set[tuple[str, bytes]]] = {}
        self._paces: dict[str, Pace] = {}
        self._strangers = Pace(STRANGERS_PER_S, STRANGERS_BURST)

    @property
    def keyed(self) -> bool:
        """Whether keys are asked for."""
        return self._table is not None

    def replace(self, table: Table) -> set[str]:
        """From now on these keys count; returns those that counted before and do not any more."""
        before = self._table or {}
        self._table = {**table, **self._own}
        users = {grant.user for grant in self._table.values()}
        self._paces = {user: pace for user, pace in self._paces.items() if user in users}
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

    def opens(self, endpoint: str, public: str, now: float) -> Grant:
        """A handshake. Raises PeerError where this key may not open this endpoint, or not yet."""
        grant = (self._table or {}).get(public)
        if grant is None or grant.revoked:
            if not self._strangers.take(now):
                text = f"more than {STRANGERS_PER_S:,} useless keys a second"
                raise PeerError(access.TOO_MANY_STRANGERS, text)
        elif not self._pace_of(grant.user).take(now):
            raise PeerError(access.TOO_MANY_HANDSHAKES, f"the keys of {grant.user} knock too often")
        grant = access.check_key(self._table or {}, public)
        access.check_endpoint(grant, endpoint)
        return grant

    def _pace_of(self, user: str) -> Pace:
        pace = self._paces.get(user)
        if pace is None:
            burst = max(BURST_MIN, self._fabric.config.user_connections_max)
            pace = self._paces[user] = Pace(burst / RETURN_S, burst)
        return pace

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

    def makes_room(self, peer: Peer, former: Peer | None) -> None:
        """A HELLO in the place of `former`. Raises PeerError where its user has too many."""
        if self._table is None:
            return
        user = access.check_key(self._table, peer.key).user
        most = self._fabric.config.user_connections_max
        held = self._connections.get(user, set())
        replaces = peer.address in held or (former is not None and former.address in held)
        if len(held) >= most and not replaces:
            raise PeerError(
                access.TOO_MANY_CONNECTIONS,
                f"{user} has {len(held):,} connections, and one user may have {most:,}: end some, "
                "use another user's key, or start the broker with a higher --user-connections-max",
            )

    def greeted(self, peer: Peer, now: float) -> None:
        """Whoever said HELLO is let in: the name is its user's."""
        if self._table is None or peer.key is None:
            return
        grant = access.check_key(self._table, peer.key)
        peer.user = grant.user
        self._connections.setdefault(grant.user, set()).add(peer.address)
        self._fabric.claims.claim(peer.role, peer.name, grant.user, self._fabric.workers)

    def left(self, peer: Peer) -> None:
        """A connection that was greeted is over."""
        if peer.user is None:
            return
        held = self._connections.get(peer.user, set())
        held.discard(peer.address)
        if not held:
            self._connections.pop(peer.user, None)

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
        if error.code in access.REASONS:
            self.turned_away(error.code, f"{who}: {error.text}", now)
            return
        self._fabric.count(f"peer_errors_{error.code}")
        if told:
            text = f"{who}: {error.code}: {error.text}"
            self._telling.say("peer_error", error.code, text[:TEXT_MAX], now)

    def turned_away(self, reason: str, text: str, now: float, times: int = 1) -> None:
        """Count `times` times one of `access.REASONS`, and tell of it."""
        self._fabric.count(f"access_refused_{reason}", times)
        text = f"{reason}: {text}"[:TEXT_MAX]
        self._telling.say("access_refused", reason, text, now, times, reason=reason)

    def turn(self, now: float) -> None:
        """Tell what was refused again and again."""
        self._telling.turn(now)

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
