"""Keys on disk: made, listed, revoked; never readable by others, never quoted."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zfabric import cli, keys
from zfabric.access import KEY_ROLES, Grant
from zfabric.errors import ConfigError
from zfabric.keys import KeyPair, Keyring, client_key, load_client_key


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "keys")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_their_owner_s_alone_from_the_start(ring: Keyring) -> None:
    before = os.umask(0)
    try:
        path = ring.make("alice", "producer")
    finally:
        os.umask(before)
    assert mode(ring.directory) == 0o700
    made = list(ring.directory.iterdir())
    assert {file.name for file in made} == {"alice.key", "clients.toml", "server.key", ".lock"}
    assert {mode(file) for file in made} == {0o600}
    key = load_client_key(path)
    assert (key.user, key.role, key.server) == ("alice", "producer", ring.server().public)
    assert ring.table() == {key.pair.public: Grant("alice", "producer")}


def test_list_holds_no_secret(ring: Keyring) -> None:
    secrets = [load_client_key(ring.make(f"u{k}", role)).pair.secret
               for k, role in enumerate(KEY_ROLES)]  # fmt: skip
    secrets.append(ring.server().secret)
    listed = ring.clients_path.read_text()
    assert not any(secret in listed for secret in secrets)
    assert not any(secret in repr(ring.server()) for secret in secrets)
    assert not any(secret in repr(load_client_key(ring.directory / "u0.key")) for secret in secrets)


def test_user_has_one_key_until_it_is_replaced(ring: Keyring) -> None:
    first = load_client_key(ring.make("alice", "producer"))
    with pytest.raises(ConfigError, match="--replace"):
        ring.make("alice", "producer")
    second = load_client_key(ring.make("alice", "operator", replace=True))
    table = ring.table()
    assert table[first.pair.public] == Grant("alice", "producer", revoked=True)
    assert table[second.pair.public] == Grant("alice", "operator")
    assert ring.revoke("alice") == 1
    with pytest.raises(ConfigError, match="nobody has"):
        ring.revoke("alice")
    assert all(grant.revoked for grant in ring.table().values())


@pytest.mark.parametrize("user", ["", "../x", "a/b", "server", "a b", "-x", "ä", "x" * 65, "a\n"])
def test_user_that_would_be_a_strange_file_is_refused(ring: Keyring, user: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        ring.make(user, "producer")


def test_file_that_others_may_read_is_refused(ring: Keyring) -> None:
    path = ring.make("alice", "producer")
    for file, read in (
        (path, lambda: load_client_key(path)),
        (ring.directory / "server.key", ring.server),
        (ring.clients_path, ring.rows),
    ):
        file.chmod(0o640)
        with pytest.raises(ConfigError, match=f"chmod 600 .*{file.name}"):
            read()
        file.chmod(0o600)
        read()


def test_errors_quote_nothing_of_a_file(ring: Keyring) -> None:
    path = ring.make("alice", "producer")
    good = path.read_text()
    secret = load_client_key(path).pair.secret
    for spoilt in (
        good.replace(f'secret = "{secret}"', f"secret = {secret}"),
        good.replace(secret, secret + "x"),
        good.replace(secret, secret[:-1]),
        good + good,
        good.replace("producer", "king"),
    ):
        path.write_text(spoilt)
        with pytest.raises(ConfigError) as caught:
            load_client_key(path)
        assert secret[:10] not in str(caught.value)


def test_server_key_may_come_from_elsewhere(ring: Keyring) -> None:
    path = ring.make("alice", "producer")
    other = KeyPair.fresh().public
    known = client_key(path, other)
    assert known is not None and known.server == other
    assert client_key("none") is None
    with pytest.raises(ConfigError, match="40 characters"):
        client_key(path, "short")


def test_keys_made_at_the_same_time_are_all_listed(ring: Keyring) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: Keyring(ring.directory).make(f"u{k}", "worker"), range(24)))
    assert {row.user for row in ring.rows()} == {f"u{k}" for k in range(24)}
    servers = {load_client_key(ring.directory / f"u{k}.key").server for k in range(24)}
    assert servers == {ring.server().public}


def test_stamp_changes_with_every_change(ring: Keyring) -> None:
    stamps = [ring.stamp()]
    ring.make("alice", "producer")
    stamps.append(ring.stamp())
    ring.revoke("alice")
    stamps.append(ring.stamp())
    assert len(set(stamps)) == 3


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(tmp_path / "k")
    assert cli.main(["keys", "list", "--keys", directory]) == 0
    assert "no keys in" in capsys.readouterr().err
    assert cli.main(["keys", "make", "alice", "--role", "producer", "--keys", directory]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(tmp_path / "k" / "alice.key")
    assert f"--keys {directory}" in err
    words = ["keys", "make", "gpu", "--role", "worker", "--json", "--keys", directory]
    assert cli.main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["user"] == "gpu" and Path(made["file"]).exists()
    assert cli.main(["keys", "list", "--json", "--keys", directory]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["user"], row["role"], row["revoked"]) for row in rows] == [
        ("alice", "producer", None), ("gpu", "worker", None),
    ]  # fmt: skip
    assert cli.main(["keys", "revoke", "alice", "--keys", directory]) == 0
    assert cli.main(["keys", "revoke", "alice", "--keys", directory]) == 2
    assert cli.main(["keys", "make", "x", "--role", "king", "--keys", directory]) == 2
    assert cli.main(["keys", "server", "--keys", directory]) == 0
    assert capsys.readouterr().out.strip() == made["server"]
    assert cli.main(["keys", "list", "--keys", directory]) == 0
    table = capsys.readouterr().out
    secret = load_client_key(made["file"]).pair.secret
    assert "alice" in table and secret not in table


def test_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        Keyring(tmp_path / "file" / "keys").make("alice", "producer")


def test_default_directory_is_the_user_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert keys.default_directory() == tmp_path / "zfabric" / "keys"
