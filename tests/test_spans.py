"""Where rows of payloads are cut: in order, each once, and no part over its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zfabric.spans import spans


@given(st.lists(st.integers(0, 12), max_size=40), st.integers(1, 7), st.integers(0, 30))
def test_parts_are_as_full_as_their_bounds_allow(
    sizes: list[int], items_max: int, bytes_max: int
) -> None:
    parts = list(spans(sizes, items_max, bytes_max))
    assert [k for start, stop in parts for k in range(start, stop)] == list(range(len(sizes)))
    for start, stop in parts:
        assert stop - start == 1 or (
            stop - start <= items_max and sum(sizes[start:stop]) <= bytes_max
        )
        if stop < len(sizes):
            assert stop - start == items_max or sum(sizes[start : stop + 1]) > bytes_max
