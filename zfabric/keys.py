"""Keys on disk: the broker's own, those that may connect, and the file that each of them gets.

    DIR/server.key     the broker's secret half; whoever has it can pretend to be the broker
    DIR/clients.toml   public halves of all keys ever made here: user, role, when made, when revoked
    DIR/USER.key       one client's secret half, with the broker's public half in it; carried to
                       where it is used, and best removed here

All are TOML with mode 0600, in a directory of mode 0700, and are replaced whole, never written in
place. A secret file that others may read is refused. Keys are CURVE25519, written as 40 characters
of Z85. No secret is ever part of an error's text.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from zfabric.access import KEY_ROLES, Grant
from zfabric.config_keys import NO_KEY
from zfabric.errors import ConfigError

SERVER_FILE, CLIENTS_FILE, LOCK_FILE = "server.key", "clients.toml", ".lock"
# A user becomes part of a file name, of events and of metrics.
USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY_CHARS = 40
Z85_ALPHABET = frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
# Far more than anybody makes; some 200 bytes each, read again at every change.
CLIENTS_MAX = 10_000
FILE_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One side's key. `secret` is kept out of every text that is made of it."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def fresh(cls) -> KeyPair:
        """A new one. Raises ConfigError where libzmq was built without CURVE."""
        try:
            public, secret = zmq.curve_keypair()
        except zmq.ZMQError:
            raise ConfigError(
                "this libzmq has no CURVE; install pyzmq from its wheel: pip install pyzmq"
            ) from None
        return cls(public.decode("ascii"), secret.decode("ascii"))


@dataclass(frozen=True, slots=True)
class ClientKey:
    """What a client needs to connect: its own pair, and which broker it means (`server`)."""

    user: str
    role: str
    pair: KeyPair
    server: str


class CannotRead(ConfigError):
    """The system did not let a file be read; it may do so later, and nothing of the file tells."""


class Row(NamedTuple):
    """A key that was made here; times are UTC as RFC 3339, None is not revoked."""

    user: str
    role: str
    public: str
    made: str
    revoked: str | None = None


class Keyring:
    """The keys of one broker, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clients_path = directory / CLIENTS_FILE

    def server(self) -> KeyPair:
        """The broker's pair. Raises ConfigError where there is none, or others may read it."""
        path = self.directory / SERVER_FILE
        known = _read(path, "the broker's key", hint="`zfabric keys make` makes it")
        return KeyPair(_key_of(known, "public", path), _key_of(known, "secret", path))

    def rows(self) -> list[Row]:
        """Every key that was made here, oldest first. Raises ConfigError for a file of no use."""
        if not self.clients_path.exists():
            return []
        known = _read(self.clients_path, "the list of keys", hint="")
        entries = known.get("key", [])
        if not isinstance(entries, list) or len(entries) > CLIENTS_MAX or known.keys() - {"key"}:
            raise ConfigError(f"{self.clients_path} must hold [[key]] tables, and nothing else")
        return [_row_of(entry, self.clients_path) for entry in entries]

    def table(self) -> dict[str, Grant]:
        """Who may do what, for the broker; see `rows`."""
        return {
            row.public: Grant(row.user, row.role, row.revoked is not None) for row in self.rows()
        }

    def make(self, user: str, role: str, *, replace: bool = False) -> Path:
        """Make a key and, before the first, the broker's; returns the client's file.

        Raises ConfigError where the user has one, unless that is to be replaced (and so revoked).
        """
        if USER.fullmatch(user) is None or user == "server":
            raise ConfigError(
                f"user {user!r} must be 1 to 64 letters, digits, '.', '_' or '-', not 'server'"
            )
        if role not in KEY_ROLES:
            raise ConfigError(f"role {role!r} must be one of {', '.join(KEY_ROLES)}")
        with self._locked():
            rows = self.rows()
            if any(row.user == user and row.revoked is None for row in rows):
                if not replace:
                    raise ConfigError(
                        f"{user} has a key; --replace makes a new one and revokes that, "
                        f"`zfabric keys revoke {user}` only revokes it"
                    )
                rows = _revoked(rows, user)
            if len(rows) >= CLIENTS_MAX:
                raise ConfigError(f"{self.clients_path} holds {CLIENTS_MAX} keys, the most")
            server = self._server_made()
            pair = KeyPair.fresh()
            path = self.directory / f"{user}.key"
            key = ClientKey(user, role, pair, server.public)
            # The client's file first: a key that is listed and lost would be good for nothing.
            _write(path, _client_text(key))
            self._save([*rows, Row(user, role, pair.public, _now())])
        return path

    def revoke(self, user: str) -> int:
        """Revoke every key of a user; returns how many. Raises ConfigError where there is none."""
        with self._locked():
            rows = self.rows()
            live = sum(1 for row in rows if row.user == user and row.revoked is None)
            if not live:
                known = sorted({row.user for row in rows if row.revoked is None})
                names = ", ".join(known[:20]) or "nobody"
                raise ConfigError(f"{user!r} has no key here that could be revoked; {names} has")
            self._save(_revoked(rows, user))
        return live

    def stamp(self) -> tuple[int, ...] | None:
        """Changes when the list of keys does, or its mode; None while there is no such file."""
        try:
            found = self.clients_path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _server_made(self) -> KeyPair:
        if (self.directory / SERVER_FILE).exists():
            return self.server()
        pair = KeyPair.fresh()
        text = f'public = "{pair.public}"\nsecret = "{pair.secret}"\n'
        _write(self.directory / SERVER_FILE, f"# The broker's key. Keep it secret.\n{text}")
        return pair

    def _save(self, rows: list[Row]) -> None:
        lines = ["# Who may connect. `zfabric keys` writes it, the broker reads it."]
        for row in rows:
            lines += ["", "[[key]]"]
            lines += [f'{k} = "{v}"' for k, v in row._asdict().items() if v is not None]
        _write(self.clients_path, "\n".join(lines) + "\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One command at a time. Raises ConfigError where nothing can be written."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write {self.directory}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def load_client_key(path: str | os.PathLike[str], server: str | None = None) -> ClientKey:
    """A client's file; `server` stands for the broker's public half in it.

    Raises ConfigError: no such file, one that others may read, or one that is not a client's.
    """
    where = Path(path)
    known = _read(where, "the key", hint="`zfabric keys make USER --role ROLE` makes one")
    if "user" not in known or "server" not in known:
        raise ConfigError(f"{where} is not the key file of a client; `zfabric keys make` makes one")
    user, role = known["user"], known.get("role")
    if not isinstance(user, str) or role not in KEY_ROLES:
        raise ConfigError(f"{where}: user or role is not one that `zfabric keys make` writes")
    meant = check_key_text(server, "server_key") if server else _key_of(known, "server", where)
    pair = KeyPair(_key_of(known, "public", where), _key_of(known, "secret", where))
    return ClientKey(user, str(role), pair, meant)


def client_key(
    key: ClientKey | str | os.PathLike[str] | None, server: str | None = None
) -> ClientKey | None:
    """The key that a constructor or a setting means; None is none. Raises ConfigError."""
    if key is None or isinstance(key, ClientKey):
        return key
    return None if os.fspath(key) == NO_KEY else load_client_key(key, server)


def default_directory() -> Path:
    """Where keys are, unless told otherwise."""
    import platformdirs

    return Path(platformdirs.user_config_dir("zfabric", appauthor=False)) / "keys"


def check_key_text(text: object, what: str) -> str:
    """40 characters of Z85. Raises ConfigError, which never holds what was given."""
    if not isinstance(text, str) or len(text) != KEY_CHARS or not set(text) <= Z85_ALPHABET:
        raise ConfigError(f"{what} must be {KEY_CHARS} characters of Z85, as `zfabric keys` writes")
    return text


def _key_of(known: Mapping[str, Any], name: str, path: Path) -> str:
    return check_key_text(known.get(name), f"{path}: {name}")


def _row_of(entry: object, path: Path) -> Row:
    known = entry if isinstance(entry, dict) else {}
    if known.keys() - set(Row._fields) or {"user", "role", "public", "made"} - known.keys():
        raise ConfigError(f"{path}: a [[key]] has user, role, public, made and perhaps revoked")
    texts = {name: value for name, value in known.items() if isinstance(value, str)}
    if len(texts) < len(known) or texts["role"] not in KEY_ROLES:
        raise ConfigError(f"{path}: a [[key]] holds what is not text, or an unknown role")
    if USER.fullmatch(texts["user"]) is None:
        raise ConfigError(f"{path}: a [[key]] has a user that cannot be one")
    _key_of(texts, "public", path)
    return Row(**texts)


def _revoked(rows: list[Row], user: str) -> list[Row]:
    now = _now()
    return [
        row._replace(revoked=now) if row.user == user and row.revoked is None else row
        for row in rows
    ]


def _client_text(key: ClientKey) -> str:
    return (
        f"# A key of zfabric for {key.user}. Keep it secret: whoever has it is {key.user}.\n"
        f'user = "{key.user}"\nrole = "{key.role}"\npublic = "{key.pair.public}"\n'
        f'secret = "{key.pair.secret}"\n# the broker that it is for\nserver = "{key.server}"\n'
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _read(path: Path, what: str, *, hint: str) -> dict[str, Any]:
    """A TOML file that only its owner may read. Raises ConfigError."""
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            raw = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        more = f"; {hint}" if hint and isinstance(error, FileNotFoundError) else ""
        raise CannotRead(f"cannot read {what} {path}: {error.strerror}{more}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"others may read {what} {path}; chmod 600 {path}")
    try:
        if len(raw) > FILE_BYTES_MAX:
            raise ValueError("it is too large")
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError):
        # What the parser says may quote the file, and with it a secret.
        raise ConfigError(f"{what} {path} is not the TOML that `zfabric keys` writes") from None


def _write(path: Path, text: str) -> None:
    """Replace a file whole, readable by its owner alone from the first byte on."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
