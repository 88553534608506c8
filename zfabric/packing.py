"""Packing: decides how many items of a queue make one batch, and the length they are padded to.

Lengths, pad-to and budgets are whole tokens. Items of a lane are taken in arrival order and never
skipped: what does not fit stays at the front for whoever comes next. This module must never
reorder, look past what was peeked, filter by input length (the runtime answers `too_long`) or
return an empty batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from zfabric.errors import InvariantError
from zfabric.shapes import PAD_MULTIPLE_TOKENS, Contract, round_up_tokens

# Lanes in a row that give a ragged batch nothing. Their targets fall by a percent or more each, so
# that eight of them tell that the room left is too small to be worth a scan of 2,048.
RAGGED_MISSES_MAX = 8


# Tokens that a batch costs besides its own: launch and turnaround, as in the measured cost tables.
BATCH_COST_TOKENS = 2_000
# Tokens of padding that lanes may add up to in one batch: with more, two batches would cost less.
GROUP_PADDING_MAX_TOKENS = BATCH_COST_TOKENS


class Packed(NamedTuple):
    """A padded batch: the first `count` items, and their length in tokens once padded."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of a batch
    pad_to: int
    # Tokens: the longest item concerned, before rounding.
    base: int


def pad_to_tokens(longest: int) -> int:
    """`longest` rounded up to the pad multiple, and at least one multiple.

    An engine has no tensor of width 0, so a batch of empty prompts still pays for one multiple.
    """
    return -(-longest // PAD_MULTIPLE_TOKENS) * PAD_MULTIPLE_TOKENS or PAD_MULTIPLE_TOKENS


def pack_strict(
    lengths: Sequence[int], queue_items: int, longest_queued: int, contract: Contract
) -> Packed:
    """Pad to the longest of the whole queue, as the original system did: a closed form.

    `lengths` are the items peeked from the front. Raises InvariantError if there are none.
    """
    if not lengths:
        raise InvariantError("a batch needs at least one item")
    pad_to = pad_to_tokens(longest_queued)
    fits = contract.batch_tokens_max // pad_to
    count = min(queue_items, len(lengths), contract.batch_items_max, fits)
    return Packed(max(1, count), pad_to, longest_queued)


def pack_tight(lengths: Sequence[int], contract: Contract) -> Packed:
    """Pad to the longest item really taken; stop at the first that does not fit.

    `lengths` are the items peeked from the front. Raises InvariantError if there are none.
    """
    if not lengths:
        raise InvariantError("a batch needs at least one item")
    budget, count = contract.batch_tokens_max, len(lengths)
    if count > contract.batch_items_max:
        count = contract.batch_items_max
        lengths = lengths[:count]
    longest = max(lengths)
    pad_to = pad_to_tokens(longest)
    if count * pad_to <= budget:
        return Packed(count, pad_to, longest)
    # So many fit even if the longest of all is among them; from there on one by one.
    count = max(1, budget // pad_to)
    longest = max(lengths[:count])
    pad_to = pad_to_tokens(longest)
    for length in lengths[count:]:
        wider = pad_to if length <= pad_to else round_up_tokens(length)
        if (count + 1) * wider > budget:
            break
        count += 1
        pad_to = wider
        if length > longest:
            longest = length
    return Packed(count, pad_to, longest)


def pack_group(
    lanes: Iterable[tuple[int, Sequence[int]]], contract: Contract
) -> tuple[list[tuple[int, int]], Packed]:
    """Fill a batch from adjacent lanes: (lane id, items from its front) of each, and the batch.

    `lanes` gives (lane id, lengths peeked) by descending target and is read only as far as needed.
    The first is packed tight. While places and tokens are left, the next one joins, unless the
    whole batch would then hold over `GROUP_PADDING_MAX_TOKENS` of padding.
    Raises InvariantError if the first lane is empty or there is none.
    """
    source = iter(lanes)
    lane_id, lengths = next(source, (0, ()))
    packed = pack_tight(lengths, contract)
    count, pad_to, longest = packed
    taken = [(lane_id, count)]
    places, budget = contract.batch_items_max, contract.batch_tokens_max
    if count >= places or count < len(lengths) or (count + 1) * pad_to > budget:
        return taken, packed
    real = sum(lengths)
    for lane_id, lengths in source:
        chosen = lengths[: places - count]
        top, joined = max(chosen), len(chosen)
        wider = pad_to if top <= pad_to else pad_to_tokens(top)
        if (count + joined) * wider > budget:
            chosen = chosen[: max(0, budget // wider - count)]
            top, joined = max(chosen, default=0), len(chosen)
            wider = pad_to if top <= pad_to else pad_to_tokens(top)
        real += sum(chosen)
        if not joined or (count + joined) * wider - real > GROUP_PADDING_MAX_TOKENS:
            break
        count, pad_to, longest = count + joined, wider, max(longest, top)
        taken.append((lane_id, joined))
        if count >= places or joined < len(lengths) or (count + 1) * pad_to > budget:
            break
    return taken, Packed(count, pad_to, longest)


def fills_batch(items: int, tokens: int, target: int, contract: Contract) -> bool:
    """Whether a lane of so many items and tokens leaves no room for another item of its class."""
    return items >= contract.batch_items_max or tokens + target > contract.batch_tokens_max


def pack_ragged(
    lanes: Iterable[tuple[int, Sequence[int]]], contract: Contract
) -> list[tuple[int, int]]:
    """Fill a batch for an engine that does not pad: (lane id, items from its front) per lane.

    `lanes` gives (lane id, lengths peeked) by descending target and is read only as far as needed.
    The budget counts the plain sum. The first item found is taken even over the budget, so that
    it reaches the runtime; the list is empty only if every lane was.
    """
    taken: list[tuple[int, int]] = []
    places, tokens_left, misses = contract.batch_items_max, contract.batch_tokens_max, 0
    for lane_id, lengths in lanes:
        sums = list(accumulate(lengths[:places]))
        count = bisect_right(sums, tokens_left)
        if sums and not taken:
            count = max(1, count)
        if count:
            taken.append((lane_id, count))
            places -= count
            tokens_left -= sums[count - 1]
            misses = 0
        elif taken:
            misses += 1
        if places <= 0 or tokens_left <= 0 or misses >= RAGGED_MISSES_MAX:
            break
    return taken


def batch_fill(items: int, padded_tokens: int, contract: Contract) -> float:
    """How full a batch is, at most 1: the larger of its share of places and its share of tokens.

    An item over the contract is in a batch all the same, and would otherwise drown every mean.
    """
    share = max(items / contract.batch_items_max, padded_tokens / contract.batch_tokens_max)
    return min(1.0, share)
