"""Packing against loops that add one item at a time and stop at the first that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zfabric.errors import InvariantError
from zfabric.packing import (
    GROUP_PADDING_MAX_TOKENS,
    RAGGED_MISSES_MAX,
    Packed,
    batch_fill,
    fills_batch,
    pack_group,
    pack_ragged,
    pack_strict,
    pack_tight,
)
from zfabric.shapes import Contract


@st.composite
def contracts(draw: st.DrawFn, ragged: bool = False) -> Contract:
    longest = draw(st.integers(1, 300))
    budget = draw(st.integers(-(-longest // 8) * 8, 2_000))
    return Contract(draw(st.integers(1, 40)), budget, longest, ragged)


# Zero, ordinary, and over any contract above.
LENGTHS = st.lists(st.one_of(st.integers(0, 60), st.integers(0, 300), st.just(5_000)), max_size=50)
QUEUES = LENGTHS.filter(bool)


def padded(longest: int) -> int:
    width = 8
    while width < longest:
        width += 8
    return width


def take_one_by_one(lengths: Sequence[int], contract: Contract, base: int | None) -> Packed:
    """`base` fixes the pad-to (strict); None pads to the longest taken so far (tight)."""
    taken: list[int] = []
    for length in lengths:
        wider = [*taken, length]
        pad_to = padded(max(wider) if base is None else base)
        if taken and (
            len(wider) > contract.batch_items_max or len(wider) * pad_to > contract.batch_tokens_max
        ):
            break
        taken = wider
    longest = max(taken) if base is None else base
    return Packed(len(taken), padded(longest), longest)


@given(queue=QUEUES, contract=contracts())
def test_tight_takes_what_a_loop_takes(queue: list[int], contract: Contract) -> None:
    peeked = queue[: contract.batch_items_max]
    assert pack_tight(peeked, contract) == take_one_by_one(queue, contract, None)


@given(queue=QUEUES, contract=contracts())
def test_strict_closed_form_equals_a_loop(queue: list[int], contract: Contract) -> None:
    peeked = queue[: contract.batch_items_max]
    packed = pack_strict(peeked, len(queue), max(queue), contract)
    assert packed == take_one_by_one(queue, contract, max(queue))


@given(queue=QUEUES, contract=contracts())
def test_padded_tokens_stay_within_budget_unless_it_is_one_item(
    queue: list[int], contract: Contract
) -> None:
    for packed in (
        pack_tight(queue, contract),
        pack_strict(queue, len(queue), max(queue), contract),
    ):
        assert 1 <= packed.count <= min(len(queue), contract.batch_items_max)
        assert packed.pad_to % 8 == 0 and packed.pad_to >= max(queue[: packed.count])
        if packed.count > 1:
            assert packed.count * packed.pad_to <= contract.batch_tokens_max


def test_tight_stops_at_the_first_item_that_does_not_fit_and_skips_none() -> None:
    # 8 + 8 fit; the 40 would widen all three to 120 tokens; the 8 behind it must not overtake.
    assert pack_tight([8, 8, 40, 8], Contract(10, 100, 40)) == (2, 8, 8)


def test_strict_pads_to_an_item_that_it_does_not_take() -> None:
    assert pack_strict([8, 8, 8, 8], 5, 50, Contract(4, 120, 50)) == (2, 56, 50)


def test_strict_takes_no_more_than_was_peeked() -> None:
    assert pack_strict([8, 8], 900, 8, Contract(64, 65_536, 100)).count == 2


def test_item_over_the_contract_goes_alone() -> None:
    contract = Contract(4, 64, 64)
    assert pack_tight([500, 1], contract) == (1, 504, 500)
    assert pack_strict([1, 500], 2, 500, contract) == (1, 504, 500)


def test_empty_prompts_pad_to_one_multiple_and_still_count_against_the_budget() -> None:
    assert pack_tight([0, 0, 0], Contract(9, 16, 16)) == (2, 8, 0)
    assert pack_strict([0, 0, 0], 3, 0, Contract(9, 16, 16)) == (2, 8, 0)


def test_empty_queue_is_refused() -> None:
    with pytest.raises(InvariantError):
        pack_tight([], Contract(4, 64, 64))
    with pytest.raises(InvariantError):
        pack_strict([], 0, 0, Contract(4, 64, 64))


def ragged_one_by_one(lanes: list[tuple[int, list[int]]], contract: Contract) -> list[int]:
    """Items taken of each lane, without the bound on misses."""
    total, items = 0, 0
    counts = []
    for _, lengths in lanes:
        count = 0
        for length in lengths:
            fits = total + length <= contract.batch_tokens_max and items < contract.batch_items_max
            if items and not fits:
                break
            total, items, count = total + length, items + 1, count + 1
        counts.append(count)
    return counts


@given(
    queues=st.lists(LENGTHS, max_size=RAGGED_MISSES_MAX),
    contract=contracts(ragged=True),
)
def test_ragged_takes_each_prefix_that_a_loop_takes(
    queues: list[list[int]], contract: Contract
) -> None:
    lanes = list(enumerate(queues))
    taken = dict(pack_ragged(lanes, contract))
    sums = sum(sum(queues[lane][:count]) for lane, count in taken.items())
    assert sum(taken.values()) <= contract.batch_items_max
    assert sums <= contract.batch_tokens_max or sum(taken.values()) == 1
    assert bool(taken) == any(queues)
    assert 0 not in taken.values()
    wanted = ragged_one_by_one(lanes, contract)
    if sums < contract.batch_tokens_max:
        assert [taken.get(lane, 0) for lane, _ in lanes] == wanted
    else:
        # A full batch looks no further, not even for empty prompts.
        assert all(count <= wanted[lane] for lane, count in taken.items())


def test_ragged_reads_no_lane_after_the_batch_is_full() -> None:
    def lanes() -> Iterator[tuple[int, list[int]]]:
        yield 7, [60, 50]
        yield 3, [40, 30]
        raise AssertionError("read a lane for nothing")

    assert pack_ragged(lanes(), Contract(9, 100, 64, ragged=True)) == [(7, 1), (3, 1)]


def test_ragged_skips_a_lane_that_does_not_fit_and_goes_on_to_shorter_ones() -> None:
    lanes = [(1, [90]), (2, [20]), (3, [10, 5])]
    assert pack_ragged(lanes, Contract(9, 100, 96, ragged=True)) == [(1, 1), (3, 1)]


def test_ragged_gives_up_after_misses_in_a_row() -> None:
    contract = Contract(99, 100, 96, ragged=True)
    misses: list[tuple[int, list[int]]] = [(n, [20]) for n in range(1, RAGGED_MISSES_MAX)]
    assert pack_ragged([(0, [90]), *misses, (98, [5])], contract) == [(0, 1), (98, 1)]
    assert pack_ragged([(0, [90]), *misses, (97, [20]), (98, [5])], contract) == [(0, 1)]
    hit_between: list[tuple[int, list[int]]] = [(0, [90]), *misses, (96, [1]), *misses, (98, [5])]
    assert pack_ragged(hit_between, contract) == [(0, 1), (96, 1), (98, 1)]


def test_ragged_empty_lanes_before_the_first_item_are_no_misses() -> None:
    empty: list[tuple[int, list[int]]] = [(n, []) for n in range(3 * RAGGED_MISSES_MAX)]
    assert pack_ragged([*empty, (99, [500])], Contract(9, 96, 96, ragged=True)) == [(99, 1)]


def test_fill_is_the_larger_of_places_and_tokens() -> None:
    contract = Contract(10, 1_000, 100)
    assert batch_fill(5, 100, contract) == 0.5
    assert batch_fill(5, 900, contract) == 0.9


def group_by_loop(lanes: list[list[int]], contract: Contract) -> list[int]:
    """Items of each lane, one lane and one item at a time, with nothing remembered."""
    counts: list[int] = []
    batch: list[int] = []
    for lane in lanes:
        chosen = list(lane[: contract.batch_items_max - len(batch)])
        # A lane's items are cut to what fits beside the longest that could come of it.
        widest = padded(max([*batch, *chosen], default=0))
        chosen = chosen[: max(0, contract.batch_tokens_max // widest - len(batch))]
        if not batch:
            chosen = naive_tight(lane, contract)
        elif not chosen:
            break
        wide = padded(max(batch + chosen))
        padding = wide * len(batch + chosen) - sum(batch + chosen)
        if batch and padding > GROUP_PADDING_MAX_TOKENS:
            break
        batch += chosen
        counts.append(len(chosen))
        full = len(batch) >= contract.batch_items_max
        full = full or (len(batch) + 1) * wide > contract.batch_tokens_max
        if full or len(chosen) < len(lane):
            break
    return counts


def naive_tight(queue: list[int], contract: Contract) -> list[int]:
    batch = queue[:1]
    for length in queue[1:]:
        wide = padded(max([*batch, length])) * (len(batch) + 1)
        if wide > contract.batch_tokens_max or len(batch) == contract.batch_items_max:
            break
        batch.append(length)
    return batch


@given(lanes=st.lists(QUEUES, min_size=1, max_size=8), contract=contracts())
def test_group_takes_what_a_loop_takes(lanes: list[list[int]], contract: Contract) -> None:
    lanes.sort(key=max, reverse=True)
    taken, packed = pack_group(enumerate(lanes), contract)
    assert [count for _, count in taken] == group_by_loop(lanes, contract)
    assert [lane for lane, _ in taken] == list(range(len(taken))), "adjacent, none skipped"
    batch = [n for lane, count in taken for n in lanes[lane][:count]]
    assert packed == Packed(len(batch), padded(max(batch)), max(batch))
    tokens = packed.count * packed.pad_to
    assert packed.count <= contract.batch_items_max
    assert tokens <= contract.batch_tokens_max or packed.count == 1
    assert len(taken) == 1 or tokens - sum(batch) <= GROUP_PADDING_MAX_TOKENS


def test_group_cuts_where_padding_would_cost_more_than_another_batch() -> None:
    contract = Contract(32, 65_536, 65_536)
    assert pack_group([(0, [2_000]), (1, [1_000]), (2, [992])], contract)[0] == [(0, 1), (1, 1)]
    assert pack_group([(0, [4_000]), (1, [1_000])], contract)[0] == [(0, 1)]


def test_group_reads_no_lane_after_the_batch_is_full() -> None:
    def lanes() -> Iterator[tuple[int, list[int]]]:
        yield 0, [8]
        yield 1, [8, 8]
        raise AssertionError("read too far")

    assert pack_group(lanes(), Contract(3, 64, 8)) == ([(0, 1), (1, 2)], Packed(3, 8, 8))


def test_group_of_nothing_is_refused() -> None:
    with pytest.raises(InvariantError):
        pack_group([], Contract(3, 64, 8))


@pytest.mark.parametrize(
    ("items", "tokens", "fills"), [(3, 24, True), (2, 24, False), (2, 57, True), (2, 56, False)]
)
def test_a_lane_fills_a_batch_by_places_or_tokens(items: int, tokens: int, fills: bool) -> None:
    assert fills_batch(items, tokens, 8, Contract(3, 64, 8)) == fills
