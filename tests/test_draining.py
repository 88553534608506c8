"""Draining against an oracle that keeps everything, sorts everything and forgets nothing."""

from __future__ import annotations

import copy
import itertools
import tracemalloc
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zfabric.draining import HEAP_SLACK, Choice, Draining, DrainLimits, Fullest, LaneDraining
from zfabric.errors import ConfigError, InvariantError

KEYS = ("a", "b", "c")
LIMITS = DrainLimits(hold_items=10, hold_s=5.0, linger_s=0.25, max_wait_s=8.0)
# No max_wait: what must hold of sticky draining alone.
PATIENT = DrainLimits(hold_items=10, hold_s=5.0, linger_s=0.25, max_wait_s=0.0)


@dataclass
class NaiveKey:
    order: int
    since: float
    items: int = 0
    tokens: int = 0


@dataclass
class NaiveReady:
    max_wait_s: float
    keys: dict[str, NaiveKey] = field(default_factory=dict)
    orders: itertools.count[int] = field(default_factory=itertools.count)
    moves: itertools.count[int] = field(default_factory=itertools.count)
    moved: dict[str, int] = field(default_factory=dict)
    forced: list[float] = field(default_factory=list)

    def added(self, key: str, items: int, tokens: int, now: float) -> None:
        if key not in self.keys:
            self.keys[key] = NaiveKey(next(self.orders), now)
            self.moved[key] = next(self.moves)
        self.keys[key].items += items
        self.keys[key].tokens += tokens

    def removed(self, key: str, items: int, tokens: int, now: float, served: bool) -> None:
        self.keys[key].items -= items
        self.keys[key].tokens -= tokens
        if served:
            self.keys[key].since = now
            self.moved[key] = next(self.moves)
        if not self.keys[key].items:
            del self.keys[key]

    def fullest(self) -> str:
        return min(self.keys, key=lambda k: (-self.keys[k].tokens, self.keys[k].order))

    def overdue(self, now: float, besides: str | None) -> str | None:
        if not self.max_wait_s or any(now < at + self.max_wait_s for at in self.forced):
            return None
        late = [
            k for k, row in self.keys.items() if k != besides and now >= row.since + self.max_wait_s
        ]
        return min(late, key=lambda k: (self.keys[k].since, self.moved[k]), default=None)


class NaiveDraining:
    def __init__(self, limits: DrainLimits) -> None:
        self.limits = limits
        self.ready = NaiveReady(limits.max_wait_s)
        self.more: set[str] = set()
        self.current: str | None = None
        self.first_waiting = 0.0
        # When the current shape ran empty, and whether items still trickled into it then.
        self.ran_empty: list[tuple[float, bool]] = []
        self.arrived: dict[str, float] = {}
        self.switches = 0
        self.entered, self.served = 0.0, 0

    def added(self, key: str, items: int, tokens: int, now: float) -> None:
        if not self.ready.keys:
            self.first_waiting = now
        self.arrived[key] = now
        self.ready.added(key, items, tokens, now)

    def removed(self, key: str, items: int, tokens: int, now: float, served: bool) -> None:
        self.ready.removed(key, items, tokens, now, served)
        self.served += items * (served and key == self.current)
        if key == self.current and key not in self.ready.keys:
            trickled = now < self.arrived[key] + self.limits.linger_s
            self.ran_empty.append((now, trickled))

    def visit(self, key: str | None, now: float) -> None:
        self.switches += self.current is not None and key is not None
        self.current = key
        self.ran_empty = []
        self.entered, self.served = now, 0

    def is_dear(self, left_s: float, pending: int, items: int, now: float) -> bool:
        took, done = now - self.entered, max(0, self.served - pending)
        if not took:
            return done > 0 and items > 100
        return min(done * Fraction(left_s) / Fraction(took), items) > 100

    def choose(self, now: float, pending: int, intake_full: bool) -> str | None:
        first, trickled = self.ran_empty[0] if self.ran_empty else (now, False)
        lingering = trickled and now < first + self.limits.linger_s
        items = sum(row.items for row in self.ready.keys.values())
        if not items:
            if self.current is not None and not pending and not lingering:
                self.visit(None, now)
            return None
        if self.current is None:
            young = now < self.first_waiting + self.limits.hold_s
            if self.more and young and items < self.limits.hold_items and not intake_full:
                return None
            self.visit(self.ready.fullest(), now)
        forced = self.ready.overdue(now, self.current)
        if forced is not None:
            self.ready.forced.append(now)
            self.visit(forced, now)
        elif self.current not in self.ready.keys:
            left_s = first + self.limits.linger_s - now
            if lingering and not self.is_dear(left_s, pending, items, now):
                return None
            self.visit(self.ready.fullest(), now)
        return self.current


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.sampled_from(KEYS),
            st.sampled_from([1, 2, 3, 4, 5, 6, 90, 200, 1_000]),
            st.sampled_from([0, 1, 7, 50]),
        ),
        st.tuples(st.just("serve"), st.booleans(), st.booleans(), st.booleans()),
        st.tuples(st.just("cancel"), st.sampled_from(KEYS), st.booleans(), st.none()),
        st.tuples(
            st.just("wait"),
            st.sampled_from([0.0, 0.125, 0.25, 1.0, 4.0, 8.0]),
            st.none(),
            st.none(),
        ),
        st.tuples(st.just("more"), st.sampled_from("pq"), st.booleans(), st.none()),
        st.tuples(st.just("drop"), st.sampled_from("pq"), st.none(), st.none()),
    ),
    max_size=40,
)


def part_of(ready: tuple[int, int], all_of_it: bool) -> tuple[int, int]:
    """What a step takes: everything, or one item with a share of the tokens."""
    items, tokens = ready
    return (items, tokens) if all_of_it or items <= 1 else (1, tokens // items)


def check_wake_at(draining: Draining[str], choice: Choice[str], now: float, pending: int) -> None:
    """Until `wake_at`, and for ever without one, the answer stays what it is."""
    assert choice.wake_at is None or choice.wake_at > now, "a loop would spin"
    until = now + 1_000.0 if choice.wake_at is None else choice.wake_at - 0.0625
    later = copy.deepcopy(draining)
    again = later.choose(max(now, until), pending_items=pending, intake_full=False)
    assert again == choice
    assert later.current == draining.current


@settings(max_examples=400)
@given(limits=st.sampled_from([LIMITS, PATIENT]), steps=STEPS)
def test_every_choice_matches_the_oracle(
    limits: DrainLimits, steps: list[tuple[str, object, object, object]]
) -> None:
    draining: Draining[str] = Draining(limits)
    naive = NaiveDraining(limits)
    now = 0.0
    for step, first, second, third in steps:
        match step, first, second, third:
            case "add", str(key), int(items), int(tokens):
                draining.added(key, items, tokens, now)
                naive.added(key, items, tokens, now)
            case "serve", bool(all_of_it), bool(is_pending), bool(intake_full):
                before, forced = draining.current, draining.forced_switches_total
                had = draining.ready(before) if before is not None else (0, 0)
                pending = int(is_pending)
                choice = draining.choose(now, pending_items=pending, intake_full=intake_full)
                assert choice.key == naive.choose(now, pending, intake_full)
                if had[0] and choice.key != before:
                    assert draining.forced_switches_total == forced + 1, "left with items ready"
                if not intake_full:
                    check_wake_at(draining, choice, now, pending)
                if choice.key is not None:
                    items, tokens = part_of(draining.ready(choice.key), all_of_it)
                    assert items > 0
                    draining.removed(choice.key, items, tokens, now, served=True)
                    naive.removed(choice.key, items, tokens, now, served=True)
            case "cancel", str(key), bool(all_of_it), _:
                items, tokens = part_of(draining.ready(key), all_of_it)
                if items:
                    draining.removed(key, items, tokens, now, served=False)
                    naive.removed(key, items, tokens, now, served=False)
            case "wait", float(seconds), _, _:
                now += seconds
            case "more", str(producer), bool(more), _:
                draining.set_more(producer, more)
                (naive.more.add if more else naive.more.discard)(producer)
            case "drop", str(producer), _, _:
                draining.drop_producer(producer)
                naive.more.discard(producer)
        assert draining.current == naive.current
        assert draining.switches_total == naive.switches
        assert draining.forced_switches_total == len(naive.ready.forced)
        for key in KEYS:
            row = naive.ready.keys.get(key)
            assert draining.ready(key) == ((row.items, row.tokens) if row else (0, 0))
            assert draining.passed_over_s(key, now) == (now - row.since if row else 0.0)
        assert draining.ready_items == sum(row.items for row in naive.ready.keys.values())
        assert draining.ready_tokens == sum(row.tokens for row in naive.ready.keys.values())


def ask(draining: Draining[str], now: float, pending: int = 0) -> Choice[str]:
    return draining.choose(now, pending_items=pending, intake_full=False)


def test_defaults_are_those_of_the_design() -> None:
    assert DrainLimits() == DrainLimits(20_000, 5.0, 0.2, 300.0)


def test_start_without_more_is_not_held() -> None:
    draining: Draining[str] = Draining(PATIENT)
    draining.added("a", 1, 10, 0.0)
    assert ask(draining, 0.0) == ("a", None)


def test_start_with_more_is_held_for_five_seconds_from_the_first_item() -> None:
    draining: Draining[str] = Draining(PATIENT)
    draining.set_more("p", True)
    draining.added("a", 1, 10, 1.0)
    draining.added("b", 1, 99, 3.0)
    assert ask(draining, 1.0) == (None, 6.0)
    assert ask(draining, 5.99) == (None, 6.0)
    assert ask(draining, 6.0).key == "b"


@pytest.mark.parametrize("by", ["items", "intake", "last submit", "producer gone"])
def test_hold_ends_early(by: str) -> None:
    draining: Draining[str] = Draining(PATIENT)
    draining.set_more("p", True)
    draining.added("a", 9, 10, 0.0)
    assert ask(draining, 0.0).key is None
    if by == "items":
        draining.added("b", 1, 5, 0.0)
    elif by == "last submit":
        draining.set_more("p", False)
    elif by == "producer gone":
        draining.drop_producer("p")
    assert draining.choose(0.0, pending_items=0, intake_full=by == "intake").key == "a"


def test_hold_counts_from_the_first_item_that_still_waits() -> None:
    draining: Draining[str] = Draining(PATIENT)
    draining.set_more("p", True)
    draining.added("a", 1, 10, 0.0)
    draining.removed("a", 1, 10, 1.0, served=False)
    draining.added("a", 1, 10, 2.0)
    assert ask(draining, 5.0) == (None, 7.0)


def drained(limits: DrainLimits = PATIENT) -> Draining[str]:
    """A model whose current shape `a`, which items trickle into, ran empty at 1.0."""
    draining: Draining[str] = Draining(limits)
    draining.added("a", 1, 5, 0.0)
    assert ask(draining, 0.0).key == "a"
    draining.added("a", 1, 5, 0.9)
    draining.removed("a", 2, 10, 1.0, served=True)
    return draining


def test_full_batch_elsewhere_does_not_cut_the_linger_short() -> None:
    draining = drained()
    draining.added("b", 5_000, 10**9, 1.0)
    assert ask(draining, 1.0) == (None, 1.25)
    assert ask(draining, 1.24) == (None, 1.25)
    assert ask(draining, 1.25).key == "b"


def fast_visit(others: int) -> Draining[str]:
    """1,000 items of a shape were handed out in 50 ms, and `others` of another wait."""
    draining: Draining[str] = Draining(PATIENT)
    draining.added("a", 1_000, 9_000, 0.0)
    assert ask(draining, 0.0).key == "a"
    draining.added("b", others, 5, 0.0)
    draining.removed("a", 1_000, 9_000, 0.05, served=True)
    return draining


def test_wait_that_would_leave_much_undone_is_cut_short() -> None:
    draining = fast_visit(others=500)
    assert ask(draining, 0.05, pending=1_000) == (None, 0.3), "nothing is known of its pace"
    assert ask(draining, 0.06, pending=980) == (None, 0.3), "20 in 60 ms make 80 in what is left"
    assert ask(draining, 0.06, pending=900).key == "b"


def test_wait_for_the_sake_of_few_is_no_loss_at_any_pace() -> None:
    assert ask(fast_visit(others=100), 0.06) == (None, 0.3)
    assert ask(fast_visit(others=101), 0.06).key == "b"


def test_linger_counts_from_running_empty_even_if_nobody_waits_then() -> None:
    draining = drained()
    assert ask(draining, 1.5, pending=1) == (None, None)
    draining.added("b", 1, 5, 1.5)
    assert ask(draining, 1.5, pending=1).key == "b"


def test_trickle_into_the_current_shape_is_served_but_does_not_restart_the_linger() -> None:
    draining = drained()
    draining.added("b", 1, 10, 1.0)
    draining.added("a", 1, 1, 1.2)
    assert ask(draining, 1.2).key == "a"
    draining.removed("a", 1, 1, 1.2, served=True)
    assert ask(draining, 1.2) == (None, 1.25)
    assert ask(draining, 1.25).key == "b"


def test_next_visit_has_its_own_linger() -> None:
    draining = drained()
    draining.added("b", 1, 10, 1.0)
    assert ask(draining, 2.0).key == "b"
    draining.added("a", 1, 10, 2.0)
    draining.added("b", 1, 10, 2.9)
    draining.removed("b", 2, 20, 3.0, served=True)
    assert ask(draining, 3.0) == (None, 3.25)


def test_shape_that_gets_nothing_any_more_is_left_without_a_linger() -> None:
    draining: Draining[int] = Draining(PATIENT)
    for prompt in range(50):
        draining.added(prompt, 1, 10, 0.0)
    for prompt in range(50):
        now = 1.0 + prompt / 1_000
        assert ask(draining, now).key == prompt
        draining.removed(prompt, 1, 10, now, served=True)


def test_job_is_over_only_when_nothing_is_pending_and_the_linger_is_over() -> None:
    draining = drained()
    assert ask(draining, 1.1) == (None, 1.25)
    assert ask(draining, 9.0, pending=3) == (None, None)
    assert draining.current == "a"
    assert ask(draining, 9.0) == (None, None)
    assert draining.current is None


def test_start_serves_what_has_waited_too_long_before_the_fullest() -> None:
    draining: Draining[str] = Draining(LIMITS)
    draining.added("old", 1, 5, 0.0)
    draining.added("full", 1, 50, 9.0)
    choice = ask(draining, 9.0)
    assert choice.key == "old"
    assert choice.wake_at == 17.0


def test_next_job_is_a_start_with_its_own_hold() -> None:
    draining = drained()
    ask(draining, 1.25)
    draining.set_more("p", True)
    draining.added("b", 1, 10, 50.0)
    assert ask(draining, 50.0) == (None, 55.0)
    assert ask(draining, 55.0).key == "b"
    assert draining.switches_total == 0, "a start is no switch"


def test_passed_over_shape_is_forced_and_cuts_through_a_linger() -> None:
    draining = drained(DrainLimits(linger_s=5.0, max_wait_s=8.0))
    draining.added("c", 1, 90, 1.0)
    draining.added("a", 9, 90, 1.0)
    draining.removed("a", 9, 90, 5.0, served=True)
    draining.added("a", 1, 1, 5.0)
    assert ask(draining, 8.99) == ("a", 9.0)
    assert ask(draining, 9.0).key == "c"
    assert (draining.switches_total, draining.forced_switches_total) == (1, 1)


def test_overload_forces_one_switch_per_max_wait() -> None:
    draining: Draining[str] = Draining(LIMITS)
    for key in KEYS:
        draining.added(key, 1_000, 1_000, 0.0)
    served = []
    for tick in range(36):
        choice = ask(draining, float(tick))
        assert choice.key is not None
        draining.removed(choice.key, 1, 1, float(tick), served=True)
        served.append(choice.key)
    assert "".join(served) == "a" * 8 + "b" * 8 + "c" * 8 + "a" * 8 + "b" * 4
    assert draining.forced_switches_total == 4


@given(
    rates=st.lists(st.integers(0, 40), min_size=2, max_size=6),
    capacity=st.integers(1, 10),
)
def test_no_shape_starves_beyond_max_wait_times_shapes(rates: list[int], capacity: int) -> None:
    draining: Draining[int] = Draining(LIMITS)
    for key in range(len(rates)):
        draining.added(key, 3, 3, 0.0)
    forced_at = [-LIMITS.max_wait_s]
    for tick in range(200):
        now = tick / 2
        for key, rate in enumerate(rates):
            if rate:
                draining.added(key, rate, rate * (key + 1), now)
        forced = draining.forced_switches_total
        choice = draining.choose(now, pending_items=0, intake_full=False)
        if draining.forced_switches_total > forced:
            assert now - forced_at[-1] >= LIMITS.max_wait_s
            forced_at.append(now)
        if choice.key is not None:
            items, tokens = draining.ready(choice.key)
            count = min(items, capacity)
            take = tokens if count == items else tokens * count // items
            draining.removed(choice.key, count, take, now, served=True)
        for key in range(len(rates)):
            assert draining.passed_over_s(key, now) <= LIMITS.max_wait_s * len(rates)


def test_max_wait_zero_never_forces() -> None:
    draining: Draining[str] = Draining(PATIENT)
    draining.added("a", 2, 2, 0.0)
    draining.added("b", 1, 1, 0.0)
    assert ask(draining, 0.0) == ("a", None)
    assert ask(draining, 10.0**6) == ("a", None)


def test_zero_token_items_are_ready_and_keep_their_shape_current() -> None:
    draining: Draining[str] = Draining(PATIENT)
    draining.added("a", 2, 0, 0.0)
    assert ask(draining, 0.0).key == "a"
    draining.added("b", 1, 500, 0.0)
    draining.removed("a", 1, 0, 0.0, served=True)
    assert ask(draining, 9.0).key == "a"


@pytest.mark.parametrize(
    ("key", "items", "tokens"),
    [("a", 3, 10), ("a", 1, 11), ("a", 2, 9), ("b", 1, 0), ("a", 0, 0), ("a", 1, -1)],
)
def test_removing_what_is_not_ready_changes_nothing(key: str, items: int, tokens: int) -> None:
    draining: Draining[str] = Draining()
    draining.added("a", 2, 10, 0.0)
    with pytest.raises(InvariantError):
        draining.removed(key, items, tokens, 1.0, served=True)
    assert draining.ready("a") == (2, 10)
    assert (draining.ready_items, draining.ready_tokens) == (2, 10)
    assert draining.passed_over_s("a", 1.0) == 1.0


@pytest.mark.parametrize(("items", "tokens"), [(0, 0), (-1, 0), (1, -1)])
def test_adding_nothing_is_refused(items: int, tokens: int) -> None:
    draining: Draining[str] = Draining()
    with pytest.raises(InvariantError):
        draining.added("a", items, tokens, 0.0)
    assert ask(draining, 0.0) == (None, None)


@pytest.mark.parametrize("field", ["hold_items", "hold_s", "linger_s", "max_wait_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_limit_that_cannot_be_waited_for_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        DrainLimits(**{field: value})  # type: ignore[arg-type]


def test_keys_that_ran_empty_leave_no_memory_behind() -> None:
    draining: Draining[str] = Draining()

    def serve(first: int, last: int) -> None:
        for n in range(first, last):
            key = f"shape {n}"
            draining.added(key, 1, n, float(n))
            assert ask(draining, float(n)).key == key
            draining.removed(key, 1, n, float(n), served=True)

    serve(0, 1_000)
    tracemalloc.start()
    try:
        serve(1_000, 2_000)
        before, _ = tracemalloc.get_traced_memory()
        serve(2_000, 12_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000, "under a byte per key"


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 5))),
        max_size=400,
    )
)
def test_fullest_gives_most_tokens_first_added_of_equals(
    changes: list[tuple[int, int | None]],
) -> None:
    fullest: Fullest[int] = Fullest()
    plain: dict[int, int] = {}
    for key, tokens in changes:
        if tokens is None:
            fullest.discard(key)
            plain.pop(key, None)
        else:
            fullest.set(key, tokens)
            plain[key] = tokens
        assert len(fullest._heap) + len(fullest._sorted) <= 2 * len(plain) + HEAP_SLACK
        # max keeps the first of equals, and a dict keeps the order of first adding.
        assert fullest.first() == max(plain, key=plain.__getitem__, default=None)
        assert [fullest.tokens(k) for k in range(10)] == [plain.get(k, 0) for k in range(10)]


def test_fullest_of_few_changes_among_many_keys() -> None:
    fullest: Fullest[int] = Fullest()
    plain = {key: 1_000 - key // 2 for key in range(200)}
    for key, tokens in plain.items():
        fullest.set(key, tokens)
    for n in range(2_000):
        best = max(plain, key=plain.__getitem__)
        assert fullest.first() == best
        assert len(fullest._heap) + len(fullest._sorted) <= 2 * len(plain) + HEAP_SLACK
        plain[best] = plain[best] * (7 + n % 5) // 12
        fullest.set(best, plain[best])
        # Of equals the first added: one that leaves and comes back is the last of them.
        gone = (7 * n) % 200
        again = plain.pop(gone)
        fullest.discard(gone)
        plain[gone] = again + n % 3
        fullest.set(gone, plain[gone])


def test_fullest_heap_stays_bounded_when_nobody_asks() -> None:
    fullest: Fullest[int] = Fullest()
    for n in range(5_000):
        fullest.set(n % 10, n)
        assert len(fullest._heap) <= 2 * 10 + HEAP_SLACK
    assert fullest.first() == 9


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "serve", "cancel", "wait", "quiesce"]),
            st.integers(0, 3),
            st.integers(1, 5),
        ),
        max_size=50,
    )
)
def test_every_lane_choice_matches_the_oracle(steps: list[tuple[str, int, int]]) -> None:
    lanes = LaneDraining(LIMITS)
    naive = NaiveReady(LIMITS.max_wait_s)
    quiescing: list[str] = []
    now = 0.0
    for step, lane, amount in steps:
        if step == "add":
            lanes.added(lane, amount, amount * lane, now)
            naive.added(str(lane), amount, amount * lane, now)
        elif step == "wait":
            now += amount * 2.0
        elif step == "quiesce":
            lanes.quiesce(lane)
            if str(lane) in naive.keys and str(lane) not in quiescing:
                quiescing.append(str(lane))
        else:
            forced = naive.overdue(now, None)
            wanted = next(iter(quiescing), forced) or (naive.fullest() if naive.keys else None)
            chosen = lanes.choose(now)
            assert chosen == (None if wanted is None else int(wanted))
            assert lanes.choose(now) == chosen, "choosing changes nothing"
            if step == "cancel":
                chosen = lane if str(lane) in naive.keys else None
            if chosen is None:
                continue
            key = str(chosen)
            row = naive.keys[key]
            items = min(amount, row.items)
            served = step == "serve"
            if served and key == forced and key not in quiescing:
                naive.forced.append(now)
            lanes.removed(chosen, items, items * chosen, now, served)
            naive.removed(key, items, items * chosen, now, served)
            if key not in naive.keys and key in quiescing:
                quiescing.remove(key)
        assert lanes.forced_total == len(naive.forced)
        assert lanes.ready_items == sum(row.items for row in naive.keys.values())
        assert lanes.ready_tokens == sum(row.tokens for row in naive.keys.values())


def test_quiescing_lane_goes_first_and_its_id_starts_afresh() -> None:
    lanes = LaneDraining()
    lanes.added(1, 9, 900, 0.0)
    lanes.added(2, 1, 5, 0.0)
    lanes.quiesce(2)
    assert lanes.choose(0.0) == 2
    lanes.removed(2, 1, 5, 0.0, served=True)
    lanes.added(2, 1, 5, 0.0)
    assert lanes.choose(0.0) == 1


def test_forced_lane_that_was_not_taken_does_not_use_up_its_turn() -> None:
    lanes = LaneDraining(LIMITS)
    lanes.added(1, 9, 5, 0.0)
    lanes.added(2, 9, 900, 0.0)
    lanes.removed(2, 1, 100, 8.0, served=True)
    assert lanes.choose(8.0) == 1
    assert lanes.choose(9.0) == 1
    lanes.removed(1, 1, 1, 9.0, served=True)
    assert lanes.choose(16.9) == 2
    assert lanes.forced_total == 1


ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(0, 900)), max_size=6)


@given(st.lists(st.tuples(ROWS, st.booleans()), max_size=8))
def test_rows_at_once_are_the_same_as_one_by_one(
    steps: list[tuple[list[tuple[int, int, int]], bool]],
) -> None:
    at_once, one_by_one = LaneDraining(), LaneDraining()
    now = 0.0
    for rows, serve in steps:
        now += 1.0
        at_once.added_rows(rows, now)
        for row in rows:
            one_by_one.added(*row, now)
        lane = at_once.choose(now)
        assert lane == one_by_one.choose(now)
        if serve and lane is not None:
            items, tokens = at_once.ready(lane)
            for order in (at_once, one_by_one):
                order.removed(lane, items, tokens, now, served=True)
        assert at_once.ready_items == one_by_one.ready_items
        assert at_once.ready_tokens == one_by_one.ready_tokens


@pytest.mark.parametrize("bad", [(1, 0, 5), (1, -1, 5), (1, 1, -1)])
def test_rows_without_an_item_change_nothing(bad: tuple[int, int, int]) -> None:
    order = LaneDraining()
    with pytest.raises(InvariantError):
        order.added_rows([(0, 1, 5), bad], 0.0)
    assert (order.ready_items, order.choose(0.0)) == (0, None)
