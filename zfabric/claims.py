"""Claims: which user's key first used a name; nobody else's may use it after that.

A claim outlives connections and, with a store on disk, restarts: each is handed to `record`. It
ends with the producer or worker that has the name. Workers' names are often made up anew at every
start, so those that were claimed first make room where there are too many. Pure but for `record`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from zfabric.access import NAME_OF_ANOTHER
from zfabric.errors import PeerError

# Names of workers that are remembered, more than can be there at once; some 200 bytes each.
WORKER_CLAIMS_MAX = 30_000


class Claims:
    """(kind, name) -> user, where kind is "producer" or "worker"."""

    def __init__(self, record: Callable[..., None]) -> None:
        self._record = record
        self._users: dict[str, dict[str, str]] = {"producer": {}, "worker": {}}

    def restore(self, known: Mapping[tuple[str, str], str]) -> None:
        """What an earlier broker recorded, in its order."""
        for (kind, name), user in known.items():
            self._users[kind][name] = user

    def user_of(self, kind: str, name: str) -> str | None:
        """Whose name it is; None where nobody's key has used it."""
        return self._users.get(kind, {}).get(name)

    def check(self, kind: str, name: str, user: str) -> None:
        """Raises PeerError where the name is another user's."""
        owner = self.user_of(kind, name)
        if owner is not None and owner != user:
            raise PeerError(
                NAME_OF_ANOTHER, f"the {kind} name {name!r} belongs to another user than {user}"
            )

    def claim(self, kind: str, name: str, user: str, in_use: Iterable[str] = ()) -> None:
        """From now on the name is this user's; see `check`. No name `in_use` makes room for it."""
        names = self._users.get(kind)
        if names is None or name in names:
            return
        if kind == "worker" and len(names) >= WORKER_CLAIMS_MAX:
            busy = set(in_use)
            oldest = next((old for old in names if old not in busy), None)
            if oldest is not None:
                self.drop(kind, oldest)
        names[name] = user
        self._record(t="claim", kind=kind, name=name, user=user)

    def drop(self, kind: str, name: str) -> None:
        """The name is anybody's again."""
        if self._users[kind].pop(name, None) is not None:
            self._record(t="unclaim", kind=kind, name=name)
