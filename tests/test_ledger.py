"""The ledger against the design's formulas, item by item, and over lanes and packing together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zfabric.errors import InvariantError
from zfabric.lanes import TAG_FLOOR, TAG_FORCED, TAG_THRESHOLD, Lanes
from zfabric.ledger import Flow, Parts, Waste, verdict
from zfabric.packing import batch_fill, pack_group, pack_strict, pack_tight
from zfabric.shapes import Contract

TAG_NAMES = {TAG_THRESHOLD: "threshold", TAG_FLOOR: "floor", TAG_FORCED: "forced"}

ITEMS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 300), st.sampled_from(sorted(TAG_NAMES))),
    min_size=1,
    max_size=12,
)


@given(batches=st.lists(st.tuples(ITEMS, st.integers(0, 50), st.integers(0, 7)), max_size=4))
def test_parts_follow_the_formulas_and_add_up(
    batches: list[tuple[list[tuple[int, int, int]], int, int]],
) -> None:
    waste = Waste()
    wanted = dict.fromkeys(Parts._fields, 0)
    for items, beyond, rounding in batches:
        longest = max(length for length, _, _ in items)
        base = longest + beyond
        pad_to = base + rounding
        for length, target, tag in items:
            grown = min(longest - length, max(0, longest - target))
            wanted["rounding"] += pad_to - base
            wanted["strict"] += base - longest
            wanted["grown"] += grown
            wanted[TAG_NAMES[tag]] += pad_to - length - rounding - beyond - grown
        lengths, targets, tags = zip(*items, strict=True)
        waste.record(lengths, targets, bytearray(tags), base, pad_to, fill=0.5)
    assert waste.parts._asdict() == wanted
    assert sum(waste.parts) == waste.padded_tokens - waste.real_tokens == waste.wasted_tokens
    assert waste.batches == len(batches)
    assert waste.batch_fill_ratio == (0.5 if batches else None)


@given(
    messages=st.lists(st.lists(st.integers(0, 3_000), min_size=1, max_size=20), max_size=5),
    lanes_limit=st.integers(1, 6),
    strict=st.booleans(),
)
def test_ledger_adds_up_over_lanes_and_packing(
    messages: list[list[int]], lanes_limit: int, strict: bool
) -> None:
    contract = Contract(8, 8_000, 3_000)
    lanes = Lanes(lanes_limit)
    queues: dict[int, list[tuple[int, int, int]]] = {}
    for lengths in messages:
        for length, lane, target, tag in zip(lengths, *lanes.assign(lengths, 0.0), strict=True):
            queues.setdefault(lane, []).append((length, target, tag))
    waste, padded = Waste(), 0
    for queue in queues.values():
        while queue:
            lengths = [length for length, _, _ in queue[: contract.batch_items_max]]
            if strict:
                longest = max(length for length, _, _ in queue)
                packed = pack_strict(lengths, len(queue), longest, contract)
            else:
                packed = pack_tight(lengths, contract)
            taken, queue[:] = queue[: packed.count], queue[packed.count :]
            tokens = packed.count * packed.pad_to
            lengths, targets, tags = map(list, zip(*taken, strict=True))
            waste.record(
                lengths,
                targets,
                tags,
                packed.base,
                packed.pad_to,
                fill=batch_fill(packed.count, tokens, contract),
            )
            padded += tokens
    assert waste.real_tokens == sum(map(sum, messages))
    assert waste.padded_tokens == padded
    assert sum(waste.parts) == waste.wasted_tokens
    assert min(waste.parts) >= 0
    assert strict or waste.parts.strict == 0
    assert waste.parts.forced == 0 or lanes.forced_total > 0


@given(st.lists(ITEMS, min_size=1, max_size=4), st.integers(0, 7))
def test_neighbours_are_charged_with_what_is_over_the_longest_of_the_own_lane(
    lanes: list[list[tuple[int, int, int]]], rounding: int
) -> None:
    waste, alone = Waste(), Waste()
    items = [item for lane in lanes for item in lane]
    longest = max(length for length, _, _ in items)
    lengths, targets, tags = zip(*items, strict=True)
    runs = [len(lane) for lane in lanes]
    pad_to = longest + rounding
    waste.record(lengths, targets, bytearray(tags), longest, pad_to, fill=1.0, runs=runs)
    neighbour = 0
    for lane in lanes:
        own, own_targets, own_tags = zip(*lane, strict=True)
        neighbour += len(lane) * (longest - max(own))
        alone.record(own, own_targets, bytearray(own_tags), max(own), max(own), fill=1.0)
    wanted = alone.parts._replace(neighbour=neighbour, rounding=rounding * len(items))
    assert waste.parts == wanted
    assert sum(waste.parts) == waste.wasted_tokens


@given(
    st.lists(st.lists(st.integers(0, 3_000), min_size=1, max_size=20), max_size=5),
    st.integers(1, 30),
)
def test_ledger_adds_up_over_group_packing(messages: list[list[int]], lanes_limit: int) -> None:
    contract = Contract(8, 8_000, 3_000)
    lanes, waste = Lanes(lanes_limit), Waste()
    queues: dict[int, list[tuple[int, int, int]]] = {}
    for lengths in messages:
        for length, lane, target, tag in zip(lengths, *lanes.assign(lengths, 0.0), strict=True):
            queues.setdefault(lane, []).append((length, target, tag))
    while rows := [lane for lane, _ in lanes.below() if queues[lane]]:
        taken, packed = pack_group(((k, [n for n, _, _ in queues[k]]) for k in rows), contract)
        items = [item for lane, count in taken for item in queues[lane][:count]]
        for lane, count in taken:
            del queues[lane][:count]
        columns = [list(column) for column in zip(*items, strict=True)]
        runs = [count for _, count in taken]
        waste.record(*columns, packed.base, packed.pad_to, fill=1.0, runs=runs)
    assert waste.real_tokens == sum(map(sum, messages))
    assert sum(waste.parts) == waste.wasted_tokens
    assert min(waste.parts) >= 0


@pytest.mark.parametrize("runs", [[1], [3], [2, 0], [3, -1]])
def test_runs_that_are_not_the_batch_change_nothing(runs: list[int]) -> None:
    waste = Waste()
    with pytest.raises(InvariantError):
        waste.record([1, 2], [1, 2], [0, 0], 2, 8, fill=1.0, runs=runs)
    assert (waste.parts, waste.padded_tokens) == (Parts(), 0)


def test_one_batch_by_hand() -> None:
    waste = Waste()
    # Longest 100. The 90 joined when its lane stood at 95; the 85 when it stood at 100 already.
    waste.record(
        [90, 85, 100], [95, 100, 100], [TAG_THRESHOLD, TAG_FLOOR, TAG_FORCED], 102, 104, fill=0.75
    )
    assert waste.parts == Parts(rounding=6, strict=6, grown=5, threshold=5, floor=15)
    assert waste.waste_ratio == (312 - 275) / 312
    assert waste.cost_ratio == (312 + 2_000) / 275


def test_nothing_sent_wastes_nothing_and_has_no_fill() -> None:
    waste = Waste()
    assert (waste.waste_ratio, waste.batch_fill_ratio, waste.cost_ratio) == (0.0, None, None)


def test_batches_without_lanes_charge_the_arrival_order() -> None:
    waste = Waste()
    waste.record([10, 90], None, None, 90, 96, fill=1.0)
    assert waste.parts == Parts(rounding=12, arrival=80)


def test_ragged_batches_waste_nothing_and_count_in_the_fill() -> None:
    waste = Waste()
    waste.record_ragged([10, 90], fill=0.25)
    waste.record_ragged([50], fill=0.75)
    assert (waste.real_tokens, waste.padded_tokens, waste.parts) == (150, 150, Parts())
    assert (waste.batches, waste.batch_fill_ratio) == (2, 0.5)


@pytest.mark.parametrize(
    ("lengths", "targets", "tags", "base", "pad_to"),
    [
        ([], [], [], 8, 8),
        ([9], [9], [0], 8, 16),
        ([9], [9], [0], 17, 16),
        ([9, 9], [9], [0, 0], 9, 16),
        ([9, 9], [9, 9], [0], 9, 16),
        ([9], [9], None, 9, 16),
        ([9], None, [0], 9, 16),
    ],
)
def test_batch_that_contradicts_itself_books_nothing(
    lengths: list[int],
    targets: list[int] | None,
    tags: list[int] | None,
    base: int,
    pad_to: int,
) -> None:
    waste = Waste()
    with pytest.raises(InvariantError):
        waste.record(lengths, targets, tags, base, pad_to, fill=1.0)
    assert (waste.parts, waste.padded_tokens, waste.batches) == (Parts(), 0, 0)


COUNTS = st.tuples(st.integers(0, 50), st.integers(0, 5_000))


@given(ended=st.tuples(COUNTS, COUNTS, COUNTS), ready=COUNTS, pending=COUNTS, lost=COUNTS)
def test_residual_is_exactly_what_is_nowhere(
    ended: tuple[tuple[int, int], ...],
    ready: tuple[int, int],
    pending: tuple[int, int],
    lost: tuple[int, int],
) -> None:
    flow = Flow()
    everywhere = [*ended, ready, pending, lost]
    flow.accept(sum(items for items, _ in everywhere), sum(tokens for _, tokens in everywhere))
    flow.complete(*ended[0])
    flow.bury(*ended[1])
    flow.quarantine(*ended[2])
    assert flow.balance(ready, pending) == lost


def test_failed_and_cancelled_are_among_the_completed() -> None:
    flow = Flow()
    flow.accept(5, 50)
    flow.complete(5, 50, failed=2, cancelled=1)
    assert (flow.completed_items, flow.failed_items, flow.cancelled_items) == (5, 2, 1)
    assert flow.balance((0, 0), (0, 0)) == (0, 0)


def test_item_completed_twice_shows_as_a_negative_residual() -> None:
    flow = Flow()
    flow.accept(1, 10)
    flow.complete(1, 10)
    flow.complete(1, 10)
    assert flow.balance((0, 0), (0, 0)) == (-1, -10)


def wasting(padded: int, **parts: int) -> Waste:
    waste = Waste()
    tags = {name: tag for tag, name in TAG_NAMES.items()}
    for name, tokens in parts.items():
        if name in tags:
            waste._by_tag[tags[name]] = tokens
        else:
            setattr(waste, f"_{name}", tokens)
    assert waste.parts == Parts(**parts)
    waste.padded_tokens = padded
    waste.real_tokens = padded - sum(waste.parts)
    return waste


@pytest.mark.parametrize(
    ("parts", "pressure", "said"),
    [
        ({"forced": 2}, 1.0, "healthy"),
        ({"forced": 3}, 1.0, "capacity"),
        ({"threshold": 5, "forced": 4}, 0.9, "tolerance"),
        ({"threshold": 5}, 0.5, "tolerance"),
        ({"threshold": 5}, 0.49, "healthy"),
        ({"grown": 5, "floor": 4}, 0.49, "growth"),
        ({"grown": 5, "floor": 4}, 0.5, "capacity"),
        ({"grown": 2, "forced": 2, "threshold": 3}, 0.5, "capacity"),
        ({"grown": 2, "forced": 2, "threshold": 5}, 0.5, "tolerance"),
        ({"grown": 5, "floor": 3, "rounding": 3}, 0.1, "short prompts"),
        ({"strict": 5}, 0.1, "strict packing"),
        ({"neighbour": 5, "grown": 4}, 0.9, "healthy"),
        ({"neighbour": 5, "grown": 6}, 0.1, "growth"),
        ({"arrival": 60}, 0.0, "arrival order"),
    ],
)
def test_verdict_names_what_leads(parts: dict[str, int], pressure: float, said: str) -> None:
    assert verdict(wasting(100, **parts), pressure) == said


def test_verdict_blames_one_minor_shape_if_the_rest_is_healthy() -> None:
    quiet, noisy = wasting(500, rounding=10), wasting(500, grown=200)
    total = wasting(1_000, rounding=10, grown=200)
    assert verdict(total, 0.1, [quiet, noisy]) == "one noisy shape"


def test_verdict_blames_no_single_shape_if_the_rest_is_not_healthy() -> None:
    quiet, noisy = wasting(500, rounding=11), wasting(500, grown=200)
    total = wasting(1_000, rounding=11, grown=200)
    assert verdict(total, 0.1, [quiet, noisy]) == "growth"


def test_verdict_does_not_call_the_whole_workload_a_noisy_shape() -> None:
    quiet, busy = wasting(100, rounding=1), wasting(900, grown=200)
    total = wasting(1_000, rounding=1, grown=200)
    assert verdict(total, 0.1, [quiet, busy]) == "growth"
    assert verdict(wasting(900, grown=200), 0.1, [busy]) == "growth"


def test_verdict_names_the_cause_if_two_shapes_are_noisy() -> None:
    shapes = [wasting(400, grown=100), wasting(400, grown=100), wasting(200)]
    assert verdict(wasting(1_000, grown=200), 0.1, shapes) == "growth"
