from __future__ import annotations

import dataclasses
import json

import pytest

from zfabric.engine import Batch, CacheStats, EngineUnreachable, OutOfMemory, Result
from zfabric.errors import FabricError, ProtocolError
from zfabric.shapes import Shape

SHAPES = (Shape.of("m", "a"), Shape.of("m", "b"))


def batch(**changed):
    fields = {
        "model": "m",
        "pad_to": 16,
        "lengths": (9, 12, 3),
        "payloads": (b"a", b"b", b"c"),
        "shapes": SHAPES,
        "shape_index": (0, 1, 0),
    }
    return Batch(**(fields | changed))


def test_length_is_the_number_of_items():
    assert len(batch()) == 3
    empty = Batch("m", None, (), (), (), ())
    assert (len(empty), empty.padded_tokens) == (0, 0)


def test_padded_tokens_of_padded_and_ragged_batches():
    assert batch().padded_tokens == 48
    assert batch(pad_to=None).padded_tokens == 24


@pytest.mark.parametrize(
    "changed",
    [
        {"lengths": (9, 12)},
        {"payloads": (b"a",)},
        {"shape_index": (0, 1)},
        {"shape_index": (0, 2, 0)},
        {"shape_index": (0, -1, 0)},
        {"shapes": ()},
        {"pad_to": 11},
    ],
)
def test_columns_that_contradict_each_other_are_refused(changed):
    with pytest.raises(ProtocolError):
        batch(**changed)


def test_batch_and_result_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch().model = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Result.too_long().payload = b"x"


def test_result_constructors():
    assert Result.ok(b"x") == Result("ok", b"x")
    assert Result.too_long() == Result("too_long", b"")
    failed = Result.failed("bad_request", 'no "messages": é \ud800')
    assert failed.status == "failed"
    assert json.loads(failed.payload.decode("utf-8")) == {
        "code": "bad_request",
        "message": 'no "messages": é \ud800',
    }


def test_engine_errors_are_of_the_one_tree():
    assert issubclass(OutOfMemory, FabricError)
    assert issubclass(EngineUnreachable, FabricError)


def test_cache_stats_say_who_measured():
    assert CacheStats(10, 4, "engine").measured_by == "engine"
