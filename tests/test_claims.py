"""Claims: a name is its first user's, until it is given up."""

from __future__ import annotations

from typing import Any

import pytest

from zfabric import catalog, claims
from zfabric.claims import Claims
from zfabric.errors import PeerError


def kept() -> tuple[Claims, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    return Claims(lambda **record: records.append(record)), records


def test_name_is_of_the_user_who_used_it_first() -> None:
    names, records = kept()
    names.check("producer", "job", "alice")
    names.claim("producer", "job", "alice")
    names.claim("producer", "job", "alice")
    names.check("producer", "job", "alice")
    names.check("worker", "job", "bob")
    with pytest.raises(PeerError) as caught:
        names.check("producer", "job", "bob")
    assert caught.value.code == "name_of_another"
    assert records == [{"t": "claim", "kind": "producer", "name": "job", "user": "alice"}]
    names.drop("producer", "job")
    names.drop("producer", "job")
    names.check("producer", "job", "bob")
    assert len(records) == 2


def test_operators_have_no_names() -> None:
    names, records = kept()
    names.claim("operator", "x", "alice")
    names.check("operator", "x", "bob")
    assert not records


def test_claims_outlive_a_restart() -> None:
    names, records = kept()
    for name in ("a", "b", "c"):
        names.claim("worker", name, "alice")
    names.drop("worker", "b")
    log = b"".join(catalog.pack(record) for record in records)
    known, _ = catalog.read(log)
    rewritten, _ = catalog.read(b"".join(catalog.pack(r) for r in known.records(())))
    again, _ = kept()
    again.restore(rewritten.claims)
    assert [again.user_of("worker", name) for name in "abc"] == ["alice", None, "alice"]


def test_oldest_name_of_a_worker_that_is_away_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "WORKER_CLAIMS_MAX", 3)
    names, _ = kept()
    for name in ("a", "b", "c"):
        names.claim("worker", name, "alice")
    names.claim("worker", "d", "alice", in_use=["a"])
    assert [names.user_of("worker", name) for name in "abcd"] == ["alice", None, "alice", "alice"]
    names.claim("worker", "e", "alice", in_use=["a", "c", "d"])
    assert names.user_of("worker", "a") == names.user_of("worker", "e") == "alice"
