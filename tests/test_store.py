"""The store's surface: peek changes nothing, commit verifies, a tombstone is for ever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zfabric.entries import Fresh
from zfabric.errors import InvariantError, NoSpace
from zfabric.queues import LaneQueue, items_within
from zfabric.segments import (
    LIVE,
    MEMORY_SEGMENT_ITEMS_MAX,
    TOMBSTONE,
    Append,
    MemorySegment,
    live_runs,
)
from zfabric.shapes import Shape
from zfabric.store import Store


def make(*lengths: int) -> tuple[Store, LaneQueue]:
    counter = itertools.count(1)
    store = Store(random_u64=lambda: next(counter))
    queue = store.open_queue(Shape("m"), 1, 1, 0)
    if lengths:
        append(store, queue, list(lengths))
        store.publish()
    return store, queue


def append(store: Store, queue: LaneQueue, lengths: list[int], first: int = 1) -> None:
    numbers = list(range(first, first + len(lengths)))
    payloads = [b"p%d" % n for n in numbers]
    items = Append(lengths, lengths, bytes(len(lengths)), 0, numbers, payloads)
    store.append([(queue, len(lengths))], items, 1.0)


def test_nothing_is_seen_past_the_boundary() -> None:
    store, queue = make()
    append(store, queue, [10, 20])
    assert store.peek(queue, 10).refs == []
    assert store.publish() == [(queue, 2, 30)]
    assert store.peek(queue, 10).lengths == [10, 20]


def test_peek_changes_nothing() -> None:
    store, queue = make(10, 20, 30)
    assert store.peek(queue, 2) == store.peek(queue, 2)
    assert (queue.ready_items, queue.ready_tokens) == (3, 60)


def test_returned_items_go_first_and_in_their_order() -> None:
    store, queue = make(*range(1, 11))
    take = store.peek(queue, 6)
    store.commit(take)
    for ref in reversed(take.refs[1:4]):
        store.release(ref)
    assert store.peek(queue, 5).lengths == [2, 3, 4, 7, 8]


def test_solo_item_is_alone_and_does_not_hide_behind_others() -> None:
    store, queue = make(*range(1, 6))
    take = store.peek(queue, 4)
    store.commit(take)
    store.release(take.refs[0])
    store.release(take.refs[1], solo=True)
    store.release(take.refs[2])
    first = store.peek(queue, 5)
    assert (first.lengths, first.solo) == ([1], False)
    store.commit(first)
    second = store.peek(queue, 5)
    assert (second.lengths, second.solo) == ([2], True)
    store.commit(second)
    assert store.peek(queue, 5).lengths == [3, 5]


def test_commit_of_a_stale_peek_moves_nothing() -> None:
    store, queue = make(10, 20, 30)
    stale = store.peek(queue, 2)
    store.commit(store.peek(queue, 1))
    with pytest.raises(InvariantError):
        store.commit(stale)
    assert (queue.ready_items, queue.ready_tokens) == (2, 50)


def test_commit_verifies_returned_items_too() -> None:
    store, queue = make(10, 20, 30)
    take = store.peek(queue, 3)
    store.commit(take)
    store.release(take.refs[2])
    stale = store.peek(queue, 3)
    store.release(take.refs[0])
    with pytest.raises(InvariantError):
        store.commit(stale)
    assert queue.ready_items == 2


def test_completed_twice_is_an_invariant_error() -> None:
    store, queue = make(10, 20)
    store.complete(store.peek(queue, 1).refs[0])
    ref = store.peek(queue, 1).refs[0]
    store.complete(ref)
    with pytest.raises(InvariantError):
        store.complete(ref)


def test_item_completed_while_it_waits_is_never_read() -> None:
    store, queue = make(10, 20, 30, 40)
    refs = store.peek(queue, 4).refs
    store.complete(refs[1])
    assert store.peek(queue, 4).lengths == [10, 30, 40]
    store.commit(store.peek(queue, 2))
    assert store.peek(queue, 4).lengths == [40]
    assert (queue.ready_items, queue.ready_tokens) == (1, 40)


def test_wire_refs_find_live_items_only() -> None:
    store, queue = make(10, 20)
    ref = store.peek(queue, 1).refs[0]
    nonce = store.columns(store.runs([ref])).nonces[0]
    assert store.locate([nonce, nonce, nonce, 999], [0, 1, 2, 0]) == [ref, ref + 1, None, None]
    store.complete(ref)
    assert store.locate([nonce], [0]) == [None]


def test_segment_is_dropped_whole_when_its_last_item_ends() -> None:
    store, queue = make(*[5] * 100)
    refs = store.peek(queue, 100).refs
    store.commit(store.peek(queue, 100))
    for ref in refs:
        store.complete(ref)
    assert (store.items, store.payload_bytes) == (0, 0)
    assert not queue.segments
    assert not store._slots


def test_full_segment_is_followed_by_another_in_order() -> None:
    store, queue = make()
    for k in range(3):
        append(store, queue, [k + 1] * (MEMORY_SEGMENT_ITEMS_MAX // 2 + 1), first=1 + k * 10_000)
    store.publish()
    assert [len(segment.states) for segment in queue.segments] == [16_384, 8_195]
    lengths = store.peek(queue, 2 * MEMORY_SEGMENT_ITEMS_MAX).lengths
    assert lengths == sorted(lengths)


def test_segment_that_is_about_to_grow_is_kept_when_its_last_item_ends() -> None:
    store, queue = make(1, 2)
    take = store.peek(queue, 2)
    store.commit(take)
    append(store, queue, [3], first=3)
    for ref in take.refs:
        store.complete(ref)
    (kept,) = queue.segments
    store.publish()
    assert queue.segments == [kept]
    take = store.peek(queue, 2)
    store.commit(take)
    store.complete_dispatched(take.refs)
    assert not queue.segments
    assert not store._slots


def test_disk_that_fills_between_two_segments_shows_what_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, queue = make()
    store.backing.segment_items_max = 2
    append(store, queue, [1, 2, 3])
    whole = MemorySegment.extend

    def extend(segment: MemorySegment, lengths: list[int], rows: list[Fresh]) -> tuple[int, int]:
        if 3 in lengths:
            raise NoSpace("full")
        return whole(segment, lengths, rows)

    with monkeypatch.context() as full:
        full.setattr(MemorySegment, "extend", extend)
        assert store.publish() == [(queue, 2, 3)]
        assert (store.unwritten, store.no_space, store.arriving) == (True, True, False)
    assert store.peek(queue, 9).lengths == [1, 2]
    assert store.publish() == [(queue, 1, 3)]
    assert (store.unwritten, store.no_space, store.items) == (False, False, 3)
    assert store.peek(queue, 9).lengths == [1, 2, 3]


@given(st.lists(st.sampled_from([LIVE, TOMBSTONE])), st.integers(0, 40), st.integers(0, 40))
def test_live_runs_are_the_live_entries_from_the_cursor_on(
    states: list[int], cursor: int, items_max: int
) -> None:
    segment = MemorySegment(0, 0, make()[1])
    segment.states, segment.cursor = bytearray(states), min(cursor, len(states))
    runs = list(live_runs(segment, items_max))
    live = [k for k in range(segment.cursor, len(states)) if states[k] == LIVE][:items_max]
    assert [k for run in runs for k in range(*run)] == live
    assert all(before[1] < after[0] for before, after in itertools.pairwise(runs))


STEPS = st.sampled_from(["append", "gather", "commit", "release", "complete", "drop"])


@settings(max_examples=200, deadline=None)
@given(script=st.lists(st.tuples(STEPS, st.integers(0, 30)), max_size=60))
def test_store_equals_a_plain_model(script: list[tuple[str, int]]) -> None:
    store, queue = make()
    fresh: list[int] = []
    gathered: list[int] = []
    returned: list[int] = []
    out: list[int] = []
    lengths: dict[int, int] = {}
    for step, k in script:
        if step in ("append", "gather"):
            append(store, queue, [k + 1, 2 * k])
            gathered += (k + 1, 2 * k)
        if step == "append":
            store.publish()
            added = store.peek_all(queue)[-len(gathered) :]
            fresh += added
            lengths |= dict(zip(added, gathered, strict=True))
            gathered.clear()
        elif step == "commit":
            take = store.peek(queue, k)
            assert take.refs == (sorted(returned) + fresh)[:k]
            store.commit(take)
            returned = [r for r in returned if r not in take.refs]
            fresh = [r for r in fresh if r not in take.refs]
            out += take.refs
        elif step == "release" and out:
            ref = out.pop(k % len(out))
            store.release(ref)
            returned.append(ref)
        elif step == "complete" and out:
            store.complete(out.pop(k % len(out)))
        elif step == "drop" and (returned or fresh):
            ref = (returned + fresh)[k % (len(returned) + len(fresh))]
            store.complete(ref)
            returned, fresh = [r for r in returned if r != ref], [r for r in fresh if r != ref]
        waiting = sorted(returned) + fresh
        assert store.peek_all(queue) == waiting
        assert queue.ready_tokens == sum(lengths[r] for r in waiting)
        assert store.longest(queue) == max((lengths[r] for r in waiting), default=0)
        assert store.items == len(gathered) + len(waiting) + len(out)
        assert all(store.is_waiting(r) for r in waiting)
        assert not any(store.is_waiting(r) for r in out)


def test_items_within_so_many_bytes_are_counted_over_runs() -> None:
    store, queue = make(*range(1, 13))
    # Payloads of 2 bytes, and of 3 from the tenth on.
    runs = store.runs(store.peek(queue, 12).refs)
    assert [items_within(runs, size) for size in (0, 1, 2, 4, 19, 21, 27, 99)] == [
        1, 1, 1, 2, 9, 10, 12, 12,
    ]  # fmt: skip
    (segment, _, _), *_ = runs
    apart = [(segment, 5, 7), (segment, 0, 3)]
    assert [items_within(apart, size) for size in (3, 5, 7, 9, 10)] == [1, 2, 3, 4, 5]
