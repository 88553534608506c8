"""The policies alone: how many items a second one core assigns, enqueues and packs.

Messages come as clients send them, sorted from the longest down, into one shape: a window of items
at a time as the SDK does it, or each message by itself, as where items have numbers of their own
and must keep their order. Timed, for people; and counted in bytecode instructions, which are the
same on every machine with the same Python, for a check that fails when the hot path grows. What
runs inside C functions is not counted.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import zfabric
from zfabric.bench.lengths import synthetic
from zfabric.bench.replay import Replay
from zfabric.outgoing import MESSAGE_ITEMS
from zfabric.results import WINDOW_ITEMS

BACKLOG = 10_000
# Virtual arrivals per second.
RATE = 2_225
# Items that are counted, after as many that only fill the lanes: whole windows.
COUNTED_ITEMS = 3 * WINDOW_ITEMS
# Runs of which the fastest is printed: others only add what else the machine did.
RUNS = 7
# Growth that fails the check.
GROWTH_MAX = 1.2
# Instructions for each item on the synthetic trace, by version of Python and case.
RECORDED = {
    "3.11": {
        "group 60 1024": 49.1,
        "tight 60 1024": 28.9,
        "group 2048 1024": 78.1,
        "tight 2048 1024": 74.1,
        "group 60 8192": 29.6,
        "tight 60 8192": 24.5,
        "group 2048 8192": 34.4,
        "tight 2048 8192": 30.2,
    },
}


class Case(NamedTuple):
    """What is measured."""

    lanes: int
    packing: str
    # items that are sorted together
    window: int

    @property
    def name(self) -> str:
        return f"{self.packing} {self.lanes} {self.window}"


CASES = tuple(
    Case(lanes, packing, window)
    for window in (MESSAGE_ITEMS, WINDOW_ITEMS)
    for lanes in (60, 2_048)
    for packing in ("group", "tight")
)


def messages(lengths: Sequence[int], items: int, window: int, seed: int) -> list[list[int]]:
    """`items` drawn lengths in messages, each window from the longest down."""
    rng = random.Random(seed)
    drawn = rng.choices(lengths, k=items)
    for start in range(0, items, window):
        drawn[start : start + window] = sorted(drawn[start : start + window], reverse=True)
    return [drawn[start : start + MESSAGE_ITEMS] for start in range(0, items, MESSAGE_ITEMS)]


def feed(replay: Replay, drawn: Sequence[Sequence[int]], now: float) -> float:
    """Send the messages through; returns the virtual time after them."""
    for message in drawn:
        now += len(message) / RATE
        replay.maintain(now)
        replay.submit(message, now)
        replay.drain(BACKLOG, now)
    return now


def timed(case: Case, lengths: Sequence[int], items: int, seed: int) -> float:
    """Items per second of CPU, when the lanes have settled; the fastest of RUNS."""
    drawn = messages(lengths, items, case.window, seed)
    best = 0.0
    for _ in range(RUNS):
        replay = Replay(case.lanes, case.packing)
        now = feed(replay, drawn[: len(drawn) // 4], 0.0)
        started = time.process_time()
        feed(replay, drawn[len(drawn) // 4 :], now)
        seconds = time.process_time() - started
        best = max(best, sum(map(len, drawn[len(drawn) // 4 :])) / max(seconds, 1e-9))
    return best


def counted(case: Case, lengths: Sequence[int], seed: int) -> float:
    """Bytecode instructions of this package for each item."""
    drawn = messages(lengths, 2 * COUNTED_ITEMS, case.window, seed)
    replay = Replay(case.lanes, case.packing)
    half = len(drawn) // 2
    now = feed(replay, drawn[:half], 0.0)
    instructions = 0
    package = str(Path(zfabric.__file__).parent)

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(package):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal instructions
        if event == "opcode":
            instructions += 1
        return count

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        feed(replay, drawn[half:], now)
    finally:
        sys.settrace(before)
    return instructions / COUNTED_ITEMS


def run(lengths: Sequence[int], items: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    for case in CASES:
        yield {
            "lanes": case.lanes,
            "packing": case.packing,
            "window": case.window,
            "items_per_s": timed(case, lengths, items, seed),
            "instructions_per_item": counted(case, lengths, seed),
        }


def check() -> Iterator[dict[str, Any]]:
    """A row for each case: the count beside what was recorded for this version of Python."""
    known = RECORDED.get(f"{sys.version_info.major}.{sys.version_info.minor}", {})
    for case in CASES:
        count, before = counted(case, synthetic(), seed=1), known.get(case.name)
        growth = count / before - 1 if before else None
        yield {
            "case": case.name,
            "instructions_per_item": count,
            "recorded": before,
            "growth": growth,
        }
