"""Roles: the table of who may open, be and ask what, whole."""

from __future__ import annotations

import itertools

import pytest

from tests.harness import Bench
from zfabric import access
from zfabric.access import Grant, check_endpoint, check_greeting, check_key, check_request
from zfabric.errors import PeerError
from zfabric.protocol import ROLES

ALLOWED_ENDPOINTS = {
    ("producer", "producers"), ("worker", "workers"), ("operator", "producers"),
    ("operator", "stats"), ("monitor", "producers"), ("monitor", "stats"),
}  # fmt: skip
ALLOWED_GREETINGS = {
    ("producer", "producer"), ("producer", "operator"), ("worker", "worker"),
    ("operator", "operator"), ("monitor", "operator"),
}  # fmt: skip


def allowed(check: object, *args: object) -> bool:
    try:
        check(*args)  # type: ignore[operator]
    except PeerError as error:
        assert error.code == access.NOT_ALLOWED
        return False
    return True


def test_endpoints_of_roles() -> None:
    endpoints = (access.PRODUCERS, access.WORKERS, access.STATS)
    every = set(itertools.product(access.KEY_ROLES, endpoints))
    assert {(r, e) for r, e in every if allowed(check_endpoint, Grant("u", r), e)} == (
        ALLOWED_ENDPOINTS
    )


def test_greetings_of_roles() -> None:
    every = set(itertools.product(access.KEY_ROLES, ROLES))
    assert {(k, r) for k, r in every if allowed(check_greeting, Grant("u", k), r)} == (
        ALLOWED_GREETINGS
    )


def test_requests_of_roles() -> None:
    """Every request there is: an operator's key may ask all, a monitor's what changes nothing."""
    ops = set(Bench().dispatcher._operations._table)
    changing = {"drain", "pause", "resume", "workers.forget", "dead.requeue", "dead.drop",
                "producers.cancel", "producers.forget", "models.forget"}  # fmt: skip
    may = {
        role: {op for op in ops if allowed(check_request, Grant("u", role), op, "another")}
        for role in access.KEY_ROLES
    }
    assert may["operator"] == ops
    assert may["monitor"] == ops - changing == access.LOOKS
    assert may["producer"] == {"status", "workers"}
    assert may["worker"] == set()


@pytest.mark.parametrize("op", ["producers.cancel", "producers.forget"])
def test_producer_orders_what_is_its_own(op: str) -> None:
    alice = Grant("alice", "producer")
    assert allowed(check_request, alice, op, "alice")
    assert allowed(check_request, alice, op, None)
    assert not allowed(check_request, alice, op, "bob")


def test_keys_that_may_be_used() -> None:
    table = {"p1": Grant("alice", "producer"), "p2": Grant("bob", "worker", revoked=True)}
    assert check_key(table, "p1").user == "alice"
    for public, code in (("p2", "key_revoked"), ("p3", "key_unknown"), (None, "key_unknown")):
        with pytest.raises(PeerError) as caught:
            check_key(table, public)
        assert caught.value.code == code


def test_every_code_of_a_refusal_is_a_reason_with_a_meaning() -> None:
    assert set(access.REASONS) >= access.REFUSAL_CODES
    assert all(access.REASONS.values())
