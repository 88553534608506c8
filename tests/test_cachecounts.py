from __future__ import annotations

import pytest

from zfabric.engine import Batch, CacheStats
from zfabric.shapes import Shape
from zfabric_workers.cachecounts import CacheCounts, Counters, disagreement, read_metrics
from zfabric_workers.flight import Flight, Places
from zfabric_workers.verdicts import Usage

METRICS = {
    "vllm": (
        'vllm:prefix_cache_queries_total{model="m"} 1000.0\n'
        'vllm:prefix_cache_hits_total{model="m"} 250.0\n',
        Counters(1000, 250),
    ),
    "two models of vllm": (
        'vllm:prefix_cache_queries_total{model="a"} 10\nvllm:prefix_cache_hits_total{model="a"} 1\n'
        'vllm:prefix_cache_queries_total{model="b"} 20\n'
        'vllm:prefix_cache_hits_total{model="b"} 2\n',
        Counters(30, 3),
    ),
    "sglang": (
        "sglang:prompt_tokens_total 1e3\nsglang:cached_tokens_total 250\n",
        Counters(1000, 250),
    ),
    "llama.cpp counts what it computed": (
        "# HELP x\nllamacpp:prompt_tokens_total 750\nllamacpp:prompt_tokens_cached_total 250\n",
        Counters(1000, 250),
    ),
    "an old llama.cpp": ("llamacpp:prompt_tokens_total 750\n", None),
    "something else": ("up 1\nvllm:prefix_cache_hits_total 3\n", None),
    "beyond all numbers": (
        "vllm:prefix_cache_queries_total 1e999\nvllm:prefix_cache_hits_total 1e999\n",
        None,
    ),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("text", "counters"), METRICS.values(), ids=METRICS)
def test_counters_of_each_server(text, counters):
    assert read_metrics(text) == counters


def test_a_field_that_was_never_told_is_unknown_and_later_missing_ones_are_zero():
    counts = CacheCounts()
    counts.add(Usage(100, None, 5))
    assert counts.stats() is None
    counts.add(Usage(100, 60, 5))
    counts.add(Usage(100, None, 5))
    counts.add(Usage(None, 50, 5))
    assert counts.stats() == CacheStats(300, 60, "engine")


def test_a_server_that_is_known_to_tell_is_believed_from_the_first_answer():
    counts = CacheCounts(reported=True)
    counts.add(Usage(100, None, 5))
    assert counts.stats() == CacheStats(100, 0, "engine")
    never = CacheCounts(reported=False)
    never.add(Usage(100, 60, 5))
    assert never.stats() is None


def test_no_more_is_cached_than_was_asked():
    counts = CacheCounts()
    counts.add(Usage(100, 900, 5))
    assert counts.stats().hits_tokens == 100


def test_a_difference_is_said_and_a_small_one_is_not():
    stats = CacheStats(1000, 500, "engine")
    assert disagreement(stats, Counters(1000, 505)) is None
    assert "50.0%" in disagreement(stats, Counters(1000, 700))
    assert disagreement(stats, Counters(0, 0)) is None
    assert Counters(30, 20).since(Counters(10, 5)) == Counters(20, 15)


# -- what is sent next -------------------------------------------------------------------------


def batch_of(shapes):
    known = tuple(dict.fromkeys(shapes))
    items = len(shapes)
    return Batch("m", None, (1,) * items, (b"",) * items, known, tuple(map(known.index, shapes)))


def flight(shapes, *, warm=None, slots=None):
    return Flight(batch_of(shapes), list(range(len(shapes))), Places(warm, slots))


A, B, PLAIN = Shape.of("m", "a"), Shape.of("m", "b"), Shape("m")


def sent(going, limit=9):
    return [index for _ in range(9) if (index := going.take(0, limit)) is not None]


def test_the_first_of_a_cold_shape_goes_alone():
    going = flight([A, A, A])
    assert sent(going) == [0]
    going.release(0)
    assert sent(going) == [1, 2]
    assert going._places.warm == A


def test_a_warm_shape_and_one_that_shares_nothing_wait_for_nobody():
    assert sent(flight([A, A, A], warm=A)) == [0, 1, 2]
    assert sent(flight([PLAIN, PLAIN])) == [0, 1]


def test_shapes_in_turn_have_no_first_to_wait_for():
    assert sent(flight([A, B, A, B])) == [0, 1, 2, 3]


def test_each_run_of_a_shape_has_its_own_first():
    going = flight([A, A, B, B])
    assert sent(going) == [0]
    going.release(0)
    assert sent(going) == [1, 2]
    going.release(2)
    assert sent(going) == [3]


def test_slots_are_taken_one_item_each_and_given_back():
    going = flight([A, A, A], slots=2)
    assert sent(going) == [0, 1]
    assert {going.slot_of(0), going.slot_of(1)} == {0, 1}
    going.release(1)
    assert sent(going) == [2]
    assert going.slot_of(1) is None


def test_batches_that_overlap_share_slots_and_what_is_warm():
    first = flight([A, A], slots=1)
    second = Flight(batch_of([A, B]), [0, 1], first._places)
    assert sent(first) == [0]
    assert (sent(second), first.begun) == ([], False)
    first.release(0)
    assert sent(first) == [1]
    assert first.begun
    first.release(1)
    assert sent(second) == [0]
    assert first._places.warm == A


def test_no_more_are_sent_than_allowed_or_after_a_stop():
    going = flight([PLAIN] * 4)
    assert going.take(2, 2) is None
    going.stopped = True
    assert sent(going) == []
