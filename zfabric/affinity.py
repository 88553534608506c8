"""Affinity: decides which ready shape shares most with another, by their chains of components.

A chain is what a cache can keep of a prompt, in order; two chains share what they have in common
from the start. Keys are whatever the caller calls its shapes. This module knows nothing of tokens
or time, and must never keep anything of a key that was discarded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Node(Generic[K]):
    """One prefix of some chain: the keys that begin with it, in the order in which they came."""

    __slots__ = ("children", "keys")

    def __init__(self) -> None:
        self.children: dict[int, _Node[K]] = {}
        # Not a dict, which takes longer to find its first key the more were removed before it.
        self.keys: OrderedDict[K, None] = OrderedDict()


class Affinity(Generic[K]):
    """Ready shapes by their chains: a step for each component, however many shapes there are."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: _Node[K] = _Node()

    def __len__(self) -> int:
        return len(self._root.keys)

    def add(self, key: K, chain: Iterable[int]) -> None:
        """A shape became ready. A key that is here already stays as it is."""
        if key in self._root.keys:
            return
        node = self._root
        node.keys[key] = None
        for component in chain:
            child = node.children.get(component)
            if child is None:
                child = node.children[component] = _Node()
            node = child
            node.keys[key] = None

    def discard(self, key: K, chain: Iterable[int]) -> None:
        """Nothing of the shape is ready any more; `chain` is what it was added with."""
        node = self._root
        if key not in node.keys:
            return
        del node.keys[key]
        for component in chain:
            child = node.children[component]
            del child.keys[key]
            if not child.keys:
                # Nothing begins with this prefix, nor with a longer one.
                del node.children[component]
                return
            node = child

    def nearest(self, chain: Iterable[int]) -> K | None:
        """The key that shares the longest start with `chain`, of equals the one added first.

        None if there is no key.
        """
        node = self._root
        for component in chain:
            child = node.children.get(component)
            if child is None:
                break
            node = child
        return next(iter(node.keys), None)
