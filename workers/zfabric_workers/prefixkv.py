"""The keys and values of prefixes that a causal model has computed, one entry a shape.

Decides what of a batch's prompts is not computed again: the tokens that every prompt of the batch
shares with the prefix kept for its shape; and what is kept: the beginning that all prompts of a
batch share, the first time that its shape comes, at most `capacity_tokens` in all, the longest
unused out first. Lengths are tokens. Holds tensors, but knows nothing of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# A shorter prefix costs more to look up than to compute.
PREFIX_TOKENS_MIN = 16


@dataclass(frozen=True, slots=True)
class Prefix:
    """Token ids, and for each layer their (keys, values)."""

    ids: tuple[int, ...]
    layers: tuple[tuple[Any, Any], ...]


class PrefixStore:
    """Prefixes by shape, at most `capacity_tokens` together."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._kept: OrderedDict[object, Prefix] = OrderedDict()
        self.used_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: object) -> Prefix | None:
        """What is kept for `key`, which is now the last to be forgotten."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: object, prefix: Prefix) -> None:
        """Keep `prefix` in place of what was kept for `key`; the longest unused go."""
        self.drop(key)
        if len(prefix.ids) > self._capacity_tokens:
            return
        self._kept[key] = prefix
        self.used_tokens += len(prefix.ids)
        while self.used_tokens > self._capacity_tokens:
            self.drop(next(iter(self._kept)))

    def drop(self, key: object) -> None:
        """Forget what is kept for `key`, if anything is."""
        former = self._kept.pop(key, None)
        if former is not None:
            self.used_tokens -= len(former.ids)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.used_tokens = 0


def shared_tokens(prompts: Sequence[tuple[int, ...]], limit: int | None = None) -> int:
    """Tokens that all `prompts` begin with; each keeps one at least of its own to compute."""
    if not prompts:
        return 0
    shortest, longest = min(prompts), max(prompts)
    # What the least and the greatest share, all between them share.
    ceiling = min(map(len, prompts)) - 1
    if limit is not None:
        ceiling = min(ceiling, limit)
    for k in range(max(0, ceiling)):
        if shortest[k] != longest[k]:
            return k
    return max(0, ceiling)
