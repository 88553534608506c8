"""Run many seeds: `python -m tests.sim --seeds 10000`. A seed that fails is shrunk and shown.

Exit code 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from tests.sim.shrink import shrink
from tests.sim.world import Outcome, Plan, run

CHUNK = 25


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, metavar="N", help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets are walked in an order that depends on it: a seed must mean the same everywhere.
        command = [sys.executable, "-m", "tests.sim", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    started = time.monotonic()
    failures: list[Outcome] = []
    plans = map(Plan.of, range(args.first, args.first + args.seeds))
    with multiprocessing.Pool(args.jobs) as pool:
        for done, outcome in enumerate(pool.imap(run, plans, CHUNK), 1):
            if outcome.failure is not None:
                failures.append(outcome)
                print(f"seed {outcome.plan.seed}: {outcome.failure[:200]}")
            if sys.stderr.isatty() and done % CHUNK == 0:
                print(f"\r{done:,}/{args.seeds:,} seeds", end="", file=sys.stderr)
    seconds = time.monotonic() - started
    print(f"{args.seeds:,} seeds, {len(failures)} failed, {seconds:.0f} s")
    for outcome in failures[:3]:
        small = shrink(outcome)
        print(f"\nseed {outcome.plan.seed}, shrunk to {small.plan}\n{small.failure}")
        print("\n".join(small.log))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
