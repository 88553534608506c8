"""Prefix-cache hits of a server: summed from its answers, compared with its own counters.

Decides what a missing `cached_tokens` means: nothing is known until the server has given the field
once; from then on a missing one is 0, for the answers before too (servers leave out a zero). Counts
are tokens. Pure, but for nothing: texts and numbers in, numbers out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zfabric.engine import CacheStats
from zfabric_workers.verdicts import Usage

# Counters may run apart by requests in flight, and by other clients of the server.
DIFFERENCE_RATIO_MAX = 0.01
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)
# (asked, cached, computed) by the names that each server gives them.
_ASKED = ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total")
_CACHED = (
    "vllm:prefix_cache_hits_total",
    "sglang:cached_tokens_total",
    "llamacpp:prompt_tokens_cached_total",
)
_COMPUTED = ("llamacpp:prompt_tokens_total",)


@dataclass(frozen=True, slots=True)
class Counters:
    """(prompt tokens asked for, tokens of them cached) as a server's /metrics count them."""

    asked_tokens: int
    cached_tokens: int

    def since(self, earlier: Counters) -> Counters:
        """What was counted after `earlier`."""
        return Counters(
            self.asked_tokens - earlier.asked_tokens, self.cached_tokens - earlier.cached_tokens
        )


class CacheCounts:
    """Sums over the answers of one server since load."""

    def __init__(self, *, reported: bool | None = None) -> None:
        self._reported = reported
        self._asked_tokens = self._cached_tokens = 0

    def add(self, usage: Usage) -> None:
        """One answer. Without prompt tokens it counts for nothing."""
        if usage.prompt_tokens is None:
            return
        if usage.cached_tokens is not None and self._reported is None:
            self._reported = True
        self._asked_tokens += usage.prompt_tokens
        self._cached_tokens += min(usage.cached_tokens or 0, usage.prompt_tokens)

    def stats(self) -> CacheStats | None:
        """None where the server does not tell what it found in its cache."""
        if not self._reported:
            return None
        return CacheStats(self._asked_tokens, self._cached_tokens, "engine")


def read_metrics(text: str) -> Counters | None:
    """The counters in a Prometheus text; None where the server has none that are known."""
    values: dict[str, int] = {}
    for name, number in _LINE.findall(text):
        try:
            values[name] = values.get(name, 0) + int(float(number))
        except (ValueError, OverflowError):
            continue
    cached = next((values[name] for name in _CACHED if name in values), None)
    if cached is None:
        return None
    asked = next((values[name] for name in _ASKED if name in values), None)
    if asked is None:
        computed = next((values[name] for name in _COMPUTED if name in values), None)
        if computed is None:
            return None
        asked = computed + cached
    return Counters(asked, cached)


def disagreement(stats: CacheStats, server: Counters) -> str | None:
    """How the sums and the server's counters differ, in words; None if they agree."""
    if not server.asked_tokens or not stats.queries_tokens:
        return None
    told = stats.hits_tokens / stats.queries_tokens
    counted = server.cached_tokens / server.asked_tokens
    if abs(told - counted) <= DIFFERENCE_RATIO_MAX:
        return None
    return (
        f"answers say {stats.hits_tokens:,} of {stats.queries_tokens:,} prompt tokens were cached "
        f"({told:.1%}), the server's counters {server.cached_tokens:,} of "
        f"{server.asked_tokens:,} ({counted:.1%}); another client of it, or a field that it "
        "leaves out"
    )
