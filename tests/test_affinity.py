"""Affinity against a comparison with every key, and the drain order that it makes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zfabric.affinity import Affinity
from zfabric.draining import Draining, DrainLimits

CHAINS = st.lists(st.integers(0, 2), max_size=4).map(tuple)


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), CHAINS), max_size=40), CHAINS)
def test_nearest_is_what_comparing_with_every_key_finds(
    steps: list[tuple[bool, int, tuple[int, ...]]], asked: tuple[int, ...]
) -> None:
    affinity: Affinity[int] = Affinity()
    plain: dict[int, tuple[int, ...]] = {}
    for add, key, chain in steps:
        if add:
            affinity.add(key, plain.get(key, chain))
            plain.setdefault(key, chain)
        else:
            affinity.discard(key, plain.pop(key, chain))
        # max takes the first of equals, and a dict remembers who came first
        best = max(plain, key=lambda k: shared(plain[k], asked), default=None)
        assert affinity.nearest(asked) == best
        assert len(affinity) == len(plain)


def test_nothing_is_kept_of_what_was_discarded() -> None:
    affinity: Affinity[int] = Affinity()
    affinity.add(1, (1, 2, 3))
    affinity.add(2, (1, 5))
    affinity.discard(1, (1, 2, 3))
    affinity.discard(2, (1, 5))
    assert not affinity._root.children and not affinity._root.keys


CHAIN_OF = {"a": (1, 2), "b": (1, 3), "c": (4,), "d": (1, 2, 9)}
AT_ONCE = DrainLimits(hold_s=0.0, linger_s=0.0)


def serve(draining: Draining[str], now: float) -> str | None:
    key = draining.choose(now, pending_items=0, intake_full=False).key
    if key is not None:
        draining.removed(key, *draining.ready(key), now, served=True)
    return key


def test_next_shape_shares_most_with_the_last_one_and_not_the_most_tokens() -> None:
    draining: Draining[str] = Draining(AT_ONCE, CHAIN_OF.__getitem__)
    for key, tokens in (("b", 50), ("c", 40), ("a", 60), ("d", 1)):
        draining.added(key, 1, tokens, 0.0)
    # The start is the fullest; then two components, one, none.
    assert [serve(draining, 0.0) for _ in range(5)] == ["a", "d", "b", "c", None]


def test_equal_sharing_goes_to_the_one_that_is_ready_longest() -> None:
    draining: Draining[str] = Draining(AT_ONCE, CHAIN_OF.__getitem__)
    draining.added("c", 1, 100, 0.0)
    draining.added("b", 1, 1, 1.0)
    draining.added("a", 1, 50, 2.0)
    assert [serve(draining, 2.0) for _ in range(3)] == ["c", "b", "a"]


def test_max_wait_forces_a_shape_that_shares_nothing() -> None:
    draining: Draining[str] = Draining(
        DrainLimits(hold_s=0.0, linger_s=0.0, max_wait_s=10.0), CHAIN_OF.__getitem__
    )
    draining.added("a", 1, 100, 0.0)
    draining.added("c", 1, 1, 0.0)
    assert draining.choose(0.0, pending_items=0, intake_full=False) == ("a", 10.0)
    assert draining.choose(10.0, pending_items=0, intake_full=False).key == "c"
    assert draining.forced_switches_total == 1
