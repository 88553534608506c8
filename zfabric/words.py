"""Words: a number with its noun, for texts that people read. Never for data, nor for names of keys.

Pure; knows only the plurals of the nouns that are counted here.
"""

from __future__ import annotations

# "y" after one of these only takes an s: keys, but entries.
_VOWELS = "aeiou"


def counted(number: int, noun: str) -> str:
    """1 item, 2,000 batches, 0 entries; of several words the last is the noun: 1 bad line."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in _VOWELS:
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"
