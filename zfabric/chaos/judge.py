"""The judge: what was expected of a run against what was seen. Pure: no socket, no file, no clock.

Every accepted item has one visible result, its bytes are those of a run without faults, the books
balance, and the broker uses no more descriptors and threads than before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from zfabric.processes import Use
from zfabric.words import counted

# Descriptors and threads that may come and go by themselves: files of lanes, a reconnecting peer.
DESCRIPTORS_SLACK, THREADS_SLACK = 24, 4


@dataclass
class Seen:
    """What a load has submitted and got: (status, payload) of every result of each number."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    results: dict[int, list[tuple[str, bytes]]] = field(default_factory=dict)
    # numbers whose item may end without a completion, and how
    excused: dict[int, frozenset[str]] = field(default_factory=dict)

    @property
    def lost(self) -> list[int]:
        """Numbers that were submitted and have no result."""
        return [number for number in self.payloads if number not in self.results]

    @property
    def twice(self) -> list[int]:
        """Numbers with more than one result."""
        return [number for number, results in self.results.items() if len(results) > 1]


def expected(payload: bytes) -> bytes:
    """What the simulated engine answers to a payload that is no request line."""
    return b"sim:" + xxhash.xxh3_128_hexdigest(payload).encode()


def broken(seen: Seen, status: Mapping[str, Any] | None) -> list[str]:
    """What is not as it must be; `status` is the broker's at the end, None where there is none."""
    found = []
    if seen.lost:
        found.append(
            f"no result for {counted(len(seen.lost), 'item')} (the first is {seen.lost[0]})"
        )
    if seen.twice:
        found.append(
            f"two results for {counted(len(seen.twice), 'item')} (the first is {seen.twice[0]})"
        )
    for number, results in seen.results.items():
        status_word, payload = results[0]
        if number not in seen.payloads:
            found.append(f"a result for item {number}, which nobody submitted")
        elif status_word in seen.excused.get(number, ()):
            continue
        elif status_word != "ok" or payload != expected(seen.payloads[number]):
            found.append(f"item {number} ended as {status_word}: {payload[:120]!r}")
            break
    if status is not None:
        found += books(status)
    return found


def books(status: Mapping[str, Any]) -> list[str]:
    """Where accepted = completed + dead + quarantined + ready + pending does not hold."""
    found = []
    for unit in ("items", "tokens"):
        residual = status[f"residual_{unit}"]
        if residual:
            found.append(f"residual of {residual} {unit}")
    return found


def leaks(before: Use, after: Use) -> list[str]:
    """What the broker keeps that it did not have before."""
    found = []
    if after.descriptors > before.descriptors + DESCRIPTORS_SLACK:
        found.append(f"{after.descriptors} descriptors, {before.descriptors} before")
    if after.threads > before.threads + THREADS_SLACK:
        found.append(f"{after.threads} threads, {before.threads} before")
    return found


def summary(recovered_s: Sequence[float]) -> tuple[float | None, float | None]:
    """(median, worst) of the times to recover; None where nothing had to."""
    if not recovered_s:
        return None, None
    ordered = sorted(recovered_s)
    return ordered[len(ordered) // 2], ordered[-1]
