"""A failing plan made small: fewer faults, items and peers, as long as it still fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.world import Outcome, Plan, run

RUNS_MAX = 200


def shrink(failed: Outcome) -> Outcome:
    """The smallest failing plan that is found in a bounded number of runs."""
    runs = 0
    smaller = True
    while smaller:
        smaller = False
        for plan in _smaller(failed.plan):
            runs += 1
            if runs > RUNS_MAX:
                return failed
            outcome = run(plan)
            if outcome.failure is not None:
                failed, smaller = outcome, True
                break
    return failed


def _smaller(plan: Plan) -> Iterator[Plan]:
    half = len(plan.faults) // 2
    if half > 1:
        yield replace(plan, faults=plan.faults[:half])
        yield replace(plan, faults=plan.faults[half:])
    for k in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:k] + plan.faults[k + 1 :])
    if plan.items > 1:
        yield replace(plan, items=plan.items // 2)
        yield replace(plan, items=plan.items - 1)
    if plan.producers > 1:
        yield replace(plan, producers=1)
    if plan.workers > 1:
        yield replace(plan, workers=plan.workers - 1)
