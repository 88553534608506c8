"""Words: a count of one has a singular, and every noun that is counted has its plural."""

from __future__ import annotations

import pytest

from zfabric.words import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "bad line", "1 bad line"), (0, "item", "0 items"), (2_000, "batch", "2,000 batches"),
        (3, "entry", "3 entries"), (2, "key", "2 keys"), (2, "prefix", "2 prefixes"),
        (1, "batch", "1 batch"), (1, "entry", "1 entry"), (4, "switch", "4 switches"),
    ],
)  # fmt: skip
def test_a_number_with_its_noun(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text
