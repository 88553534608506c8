"""The simulation: a sample of seeds holds every promise, and planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.sim.planted import PLANTED, planted
from tests.sim.shrink import shrink
from tests.sim.world import Plan, run

SEEDS = int(os.environ.get("SIM_SEEDS", "80"))
BUG_SEEDS_MAX = 1_000

pytestmark = pytest.mark.timeout(60 + SEEDS)


def test_no_seed_breaks_a_promise() -> None:
    failures = [outcome for k in range(SEEDS) if (outcome := run(Plan.of(k))).failure]
    assert not failures, [(o.plan.seed, o.failure) for o in failures[:3]]


# What each has found, so that it stays fixed; run as `make sim` does, for a seed to mean the same.
NAMED = {
    39: "charged items lost their separation at a restart",
    828: "a new file whose header was torn in its second copy: set aside, and nothing is lost",
    1411: "the same, in another order",
    2496: "a lane retired while a full disk held up its items: they were ready of no open lane",
    7027: "a number behind a hole, of which only the result was left, was taken to fill the hole",
    2781: "two blows and a poisoned neighbour are three charges",
}


@pytest.mark.parametrize("seed", NAMED, ids=NAMED.get)
def test_seed_that_found_a_bug_holds(seed: int) -> None:
    words = [sys.executable, "-m", "tests.sim", "--from", str(seed), "--seeds", "1", "--jobs", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_a_seed_says_everything() -> None:
    plan = Plan.of(3)
    logs = []
    for _ in range(2):
        outcome = run(replace(plan, items=plan.items + 5))
        assert outcome.failure is None
        logs.append(outcome.trace)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 100


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(bug: Callable[[], list[object]]) -> None:
    with planted(bug):
        for seed in range(BUG_SEEDS_MAX):
            outcome = run(Plan.of(seed))
            if outcome.failure is not None:
                break
    assert outcome.failure is not None, f"{bug.__name__} went unseen"
    assert run(outcome.plan).failure is None


def test_failing_plan_shrinks_and_fails_all_the_same() -> None:
    with planted(PLANTED[2]):
        outcome = next(o for k in range(BUG_SEEDS_MAX) if (o := run(Plan.of(k))).failure)
        small = shrink(outcome)
        assert small.failure is not None
        assert len(small.plan.faults) <= len(outcome.plan.faults)
        assert small.plan.items <= outcome.plan.items
        again = run(small.plan)
    assert again.failure == small.failure
