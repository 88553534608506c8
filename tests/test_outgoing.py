"""What goes together, and in which order: windows of a source, sorted by shape and length."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zfabric import results
from zfabric.outgoing import sending_order
from zfabric.results import WINDOW_BYTES, WINDOW_ITEMS, Item, window_items, windows
from zfabric.shapes import Shape

A, B = Shape.of("m", "a"), Shape.of("m", "b")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Iterator[Item]]:
    """A source that takes so many seconds for each item, on a clock of its own."""
    now = 0.0
    monkeypatch.setattr(results.time, "monotonic", lambda: now)

    def source(every_s: float) -> Iterator[Item]:
        nonlocal now
        for _ in itertools.count():
            now += every_s
            yield Item(A, b"x", 1)

    return source


def test_shapes_stay_together_and_the_longest_goes_first() -> None:
    shapes, lengths = [A, B, A, B, A], [3, 9, 7, 9, 5]
    assert sending_order(shapes, lengths) == [2, 4, 0, 1, 3]
    # of another model, with the same components
    other = Shape.of("n", "a")
    assert sending_order([A, other, A, other], [1, 2, 3, 4]) == [2, 0, 3, 1]
    assert sending_order([], []) == []


@pytest.mark.parametrize(
    ("every_s", "items"),
    [
        (0.0, WINDOW_ITEMS),
        # 250,000/s: all that came in 25 ms
        (4e-6, 6_251),
        # 10,000/s: what came in 2 ms
        (1e-4, 21),
        # slower than that: each goes at once
        (0.01, 1),
    ],
)
def test_a_window_is_as_large_as_its_source_is_fast(
    clock: Callable[[float], Iterator[Item]], every_s: float, items: int
) -> None:
    assert len(next(windows(clock(every_s), WINDOW_ITEMS))) == pytest.approx(items, abs=1)


def test_a_window_is_bounded_in_items_and_in_bytes() -> None:
    source = itertools.repeat(Item(A, bytes(WINDOW_BYTES // 4), 1))
    assert len(next(windows(source, WINDOW_ITEMS))) == 4
    assert len(next(windows(itertools.repeat(Item(A, b"", 1)), 10))) == 10
    assert list(windows([], 10)) == []


@pytest.mark.parametrize(("given", "error"), [(KeyError("x"), KeyError), ("x", TypeError)])
def test_what_a_source_gave_before_it_failed_goes_first(
    given: object, error: type[Exception]
) -> None:
    def source() -> Iterator[Any]:
        yield from [Item(A, b"", 1)] * 3
        if isinstance(given, Exception):
            raise given
        yield given

    parts = windows(source(), 10)
    assert len(next(parts)) == 3
    with pytest.raises(error):
        next(parts)


def test_an_item_keeps_the_bytes_that_it_was_made_of() -> None:
    buffer = bytearray(b"first")
    item = Item(A, buffer, 1)
    buffer[:] = b"other"
    assert item.payload == b"first"
    # of elements that are wider than a byte, too
    assert len(Item(A, memoryview(array("Q", [1, 2])), 1).payload) == 16


def test_most_of_what_may_be_open_stays_open_while_a_window_is_gathered() -> None:
    assert [window_items(n) for n in (1, 7, 400, 10**6)] == [1, 1, 100, WINDOW_ITEMS]
