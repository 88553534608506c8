"""The engine `transformers`: padding, masks, positions, and kept prefixes against none at all."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytest.importorskip("transformers", reason="transformers is not installed: make test-torch")

import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.running import COMPLETIONS, request
from zfabric.engine import Batch, OutOfMemory, Result
from zfabric.errors import ConfigError
from zfabric.shapes import Shape
from zfabric_workers import engine_factory
from zfabric_workers.causal import CausalEngine
from zfabric_workers.prefixkv import Prefix, PrefixStore, shared_tokens
from zfabric_workers.tinymodel import write_tiny_model

pytestmark = [
    # of torch's own making, when it loads a model
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SYSTEM = "Name the team that should answer this ticket. " * 6
SHAPES = [Shape.of("m", str(k)) for k in range(3)]
# Float32 on a processor: sums in another order.
TOLERANCE = 1e-3


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("causal"))


def load(model, **options):
    engine = CausalEngine(model_path=str(model), device="cpu", threads=1, **options)
    engine.load()
    return engine


@pytest.fixture(scope="session")
def engine(model):
    return load(model)


@pytest.fixture(scope="session")
def plain(model):
    return load(model, prefix_tokens=0)


def batch(*rows, shape=SHAPES[0]):
    lines = tuple(json.dumps(row).encode() for row in rows)
    return Batch("m", 1_024, (10,) * len(lines), lines, (shape,), (0,) * len(lines))


def questions(count, system=SYSTEM, **body):
    options = {"temperature": 0, "max_tokens": 6, **body}
    return [
        request(f"q-{k}", "word " * (1 + 3 * k), system=system, **options) for k in range(count)
    ]


def texts(results):
    return [json.loads(r.payload)["choices"][0]["message"]["content"] for r in results]


def usage(result):
    return json.loads(result.payload)["usage"]


def logits_of(engine, prompts, key):
    with torch.inference_mode():
        prefix, reused, _ = engine._prefix_of(prompts, key)
        return engine._prefill(prompts, prefix, reused)[0], reused


def test_reuse_equals_no_reuse(engine, plain, capsys):
    """The same best token for every prompt, and logits that differ by rounding alone."""
    ids = [tuple(engine._encode(SYSTEM + "word " * (1 + 3 * k))) for k in range(8)]
    expected, none = logits_of(plain, ids, "key")
    assert none == 0
    for _ in ("computed now", "kept"):
        found, reused = logits_of(engine, ids, "key")
        assert reused >= len(engine._encode(SYSTEM)) - 1
        difference = (found - expected).abs().max().item()
        with capsys.disabled():
            sys.stdout.write(f"\nreuse against none: largest logit difference {difference:.2e}\n")
        assert difference < TOLERANCE
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_an_answer_does_not_depend_on_its_neighbours(plain):
    rows = questions(6)
    together = plain.run(batch(*rows))
    alone = [plain.run(batch(row))[0] for row in rows]
    assert texts(together) == texts(alone)
    assert len(set(texts(together))) > 1


def test_an_answer_is_as_long_as_it_would_be_alone(plain):
    long = [5] * (plain._input_tokens_max - 2)
    rows = [request("q", ids, url=COMPLETIONS, max_tokens=9) for ids in ([5, 6], long)]
    results = plain.run(batch(*rows))
    assert [usage(result)["completion_tokens"] for result in results] == [9, 2]


def test_whole_answers_are_the_same_with_reuse(engine, plain):
    rows = questions(6)
    for _ in range(2):
        assert texts(engine.run(batch(*rows, shape=SHAPES[1]))) == texts(plain.run(batch(*rows)))


def test_hits_are_counted_and_the_first_of_a_shape_pays(model):
    fresh = load(model)
    first = fresh.run(batch(*questions(4)))
    cached = [usage(result)["prompt_tokens_details"]["cached_tokens"] for result in first]
    assert cached[0] == 0
    assert cached[1] == cached[2] == cached[3] > 50
    second = fresh.run(batch(*questions(4)))
    assert usage(second[0])["prompt_tokens_details"]["cached_tokens"] >= cached[1]
    stats = fresh.cache_stats()
    assert stats.queries_tokens == sum(usage(r)["prompt_tokens"] for r in [*first, *second])
    assert 0.5 * stats.queries_tokens < stats.hits_tokens < stats.queries_tokens
    assert stats.measured_by == "worker"


def test_a_batch_that_shares_less_than_what_is_kept_uses_less_of_it(engine, plain):
    engine.run(
        batch(*questions(3, system=SYSTEM + "Be brief and to the point, please."), shape=SHAPES[2])
    )
    rows = questions(3, system=SYSTEM + "Take all the time that you need.")
    assert texts(engine.run(batch(*rows, shape=SHAPES[2]))) == texts(plain.run(batch(*rows)))


def test_mixed_shapes_are_one_batch_without_reuse(model):
    fresh = load(model)
    lines = tuple(json.dumps(row).encode() for row in questions(4))
    fresh.run(Batch("m", 1_024, (10,) * 4, lines, tuple(SHAPES[:2]), (0, 1, 0, 1)))
    assert fresh.cache_stats().hits_tokens == 0


def test_what_is_kept_is_bounded(model):
    fresh = load(model, prefix_tokens=400)
    for k in range(6):
        fresh.run(batch(*questions(2, system=f"{k} {SYSTEM}"), shape=Shape.of("m", f"s{k}")))
        assert fresh._prefixes.used_tokens <= 400
    assert 1 <= len(fresh._prefixes) < 6


def test_each_answer_is_openais(engine):
    rows = [
        *questions(1),
        request("p", "one two three", url=COMPLETIONS, max_tokens=3, temperature=0),
        request("ids", [5, 6, 7], url=COMPLETIONS, max_tokens=2),
    ]
    chat, plain, ids = engine.run(batch(*rows))
    assert ChatCompletion.model_validate_json(chat.payload).usage.completion_tokens == 6
    assert Completion.model_validate_json(plain.payload).usage.completion_tokens == 3
    assert usage(ids)["prompt_tokens"] == 3


def test_drawn_answers_are_the_same_again_and_differ_by_seed(plain):
    def drawn(seed):
        row = request("q", "word", temperature=1.0, top_p=0.9, max_tokens=12, seed=seed)
        return texts(plain.run(batch(row)))[0]

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(8)}) > 1
    unseeded = request("q", "word", max_tokens=12)
    assert texts(plain.run(batch(unseeded))) == texts(plain.run(batch(unseeded)))


def test_text_ends_at_a_stop(plain):
    row = request("q", "word", temperature=0, max_tokens=12)
    whole = texts(plain.run(batch(row)))[0]
    stop = whole[len(whole) // 2 :][:2]
    row["body"]["stop"] = [stop]
    result = plain.run(batch(row))
    assert texts(result)[0] == whole[: whole.find(stop)]
    assert json.loads(result[0].payload)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "body",
    [{"n": 2}, {"tools": [{}]}, {"logprobs": True}, {"temperature": "hot"}, {"max_tokens": 0}],
)
def test_what_it_cannot_serve_is_refused_alone(plain, body):
    good, bad = plain.run(batch(*questions(1), request("bad", "x", **body)))
    assert good.status == "ok"
    assert json.loads(bad.payload)["code"] == "bad_request"


@pytest.mark.parametrize("ids", [[5, 10**6], [5, -1], [5, 10**30], [5, True], [[]]])
def test_token_ids_that_the_model_has_not_are_refused_alone(plain, ids):
    """The look-up of such a one fails for its batch, and on a GPU for every batch after it."""
    good, bad = plain.run(batch(*questions(1), request("bad", ids, url=COMPLETIONS)))
    assert good.status == "ok"
    assert json.loads(bad.payload)["code"] == "bad_request"


def test_one_token_is_a_prompt(plain):
    (result,) = plain.run(batch(request("one", [5], url=COMPLETIONS, max_tokens=1)))
    assert usage(result)["prompt_tokens"] == 1


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", " {#- -#} "])
def test_what_the_chat_template_refuses_is_refused_alone(model, template):
    fresh = load(model)
    fresh._tokenizer.chat_template = template
    good, bad = fresh.run(batch(request("p", "word", url=COMPLETIONS), *questions(1)))
    assert good.status == "ok"
    assert json.loads(bad.payload)["code"] == "bad_request"


def test_a_temperature_of_next_to_nothing_is_none(plain):
    rows = [request("q", "word", temperature=each, max_tokens=6) for each in (0, 1e-40)]
    first, second = plain.run(batch(*rows))
    assert texts([first]) == texts([second])


def test_a_prompt_over_the_models_context_is_too_long(plain):
    good, long = plain.run(batch(*questions(1), request("long", "ab " * 9_000)))
    assert good.status == "ok"
    assert long == Result.too_long()


def test_out_of_memory_lets_go_of_what_is_kept(model, monkeypatch):
    fresh = load(model)
    fresh.run(batch(*questions(2)))
    assert len(fresh._prefixes) == 1

    def exhausted(*args, **options):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(fresh, "_prefill", exhausted)
    with pytest.raises(OutOfMemory, match="no room"):
        fresh.run(batch(*questions(2)))
    assert len(fresh._prefixes) == 0


def test_options_that_cannot_be_used_are_refused(model, tmp_path):
    for options, text in (
        ({}, "--model-path"),
        ({"model_path": str(tmp_path)}, "not a directory with a model"),
        ({"model_path": str(model), "device": "tpu"}, "auto, cpu, cuda"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine_factory("transformers", options)


# -- what is kept, without tensors -------------------------------------------------------------


def test_the_longest_unused_prefix_goes_first():
    store = PrefixStore(10)
    for name in "abc":
        store.put(name, Prefix((1, 2, 3), ()))
    store.get("a")
    store.put("d", Prefix((1, 2, 3), ()))
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]
    store.put("a", Prefix((1,), ()))
    assert store.used_tokens == 7
    store.put("huge", Prefix(tuple(range(11)), ()))
    assert store.get("huge") is None
    assert store.used_tokens == 7


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([], 0),
        ([(1, 2, 3)], 2),
        ([(1, 2, 3), (1, 2, 4)], 2),
        ([(1, 2, 3), (1, 2, 3)], 2),
        ([(1, 2), (1, 2, 3)], 1),
        ([(1, 2, 3), (2, 2, 3), (1, 2, 3)], 0),
        ([(1, 2, 3, 4), (1, 2, 9, 4), (1, 2, 5, 4)], 2),
    ],
)
def test_shared_tokens(prompts, shared):
    assert shared_tokens(prompts) == shared
