"""The engine `llamacpp`: real llama.cpp servers with real caches, weights at random."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="the extra zfabric[llamacpp] is not installed")

from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from tests.running import (
    COMPLETIONS,
    EMBEDDINGS,
    brokering,
    operating,
    read_rows,
    request,
    serving,
    until,
)
from zfabric.batchrun import run_batch
from zfabric.cli.prompts import write_batch_file
from zfabric.engine import ROOM, Batch, Result
from zfabric.errors import ConfigError
from zfabric.shapes import Contract, Shape
from zfabric_workers import engine_factory
from zfabric_workers.llamacpp import LlamaCppEngine
from zfabric_workers.tinygguf import tokenizer_file, write_tiny_gguf

ROOT = Path(__file__).resolve().parents[1]
PROMPTS_ITEMS = 720
CONTEXT_TOKENS = 2_048


@pytest.fixture(scope="session")
def gguf(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def batch(*lines):
    shape = Shape.of("m", "prefix")
    payloads = tuple(json.dumps(line).encode() for line in lines)
    return Batch("m", None, (10,) * len(lines), payloads, (shape,), (0,) * len(lines))


def ran(engine, given):
    """Results by index."""
    return dict(pair for pair in engine.run(given) if pair is not ROOM)


@contextlib.contextmanager
def loaded(gguf, **options):
    engine = LlamaCppEngine(model_path=str(gguf), threads=1, context_tokens=512, **options)
    engine.load()
    try:
        yield engine
    finally:
        engine.close()


def test_the_file_is_the_same_each_time_and_small(gguf, tmp_path):
    again = write_tiny_gguf(tmp_path / "again.gguf")
    assert again.read_bytes() == gguf.read_bytes()
    assert gguf.stat().st_size < 20_000_000
    assert write_tiny_gguf(tmp_path / "other.gguf", seed=8).read_bytes() != gguf.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.gguf", "other.gguf"]


def test_each_request_has_an_openai_answer_or_its_own_failure(gguf):
    lines = [
        request("chat", "one two", max_tokens=3),
        request("plain", "one two", url=COMPLETIONS, max_tokens=3),
        request("long", "word " * 2_000),
        request("wrong", "x", temperature="hot"),
        request("many", "x", n=3, max_tokens=1),
    ]
    with loaded(gguf) as engine:
        results = ran(engine, batch(*lines))
        stats = engine.cache_stats()
    chat = ChatCompletion.model_validate_json(results[0].payload)
    assert chat.usage.completion_tokens == 3
    Completion.model_validate_json(results[1].payload)
    assert results[2] == Result.too_long()
    assert [json.loads(results[k].payload)["code"] for k in (3, 4)] == ["bad_request"] * 2
    assert stats.measured_by == "engine"
    assert 0 < stats.hits_tokens < stats.queries_tokens


def test_embeddings_are_served_when_asked_for(gguf):
    with loaded(gguf, embeddings=True, pooling="mean") as engine:
        results = ran(engine, batch(request("e", ["a", "b c"], url=EMBEDDINGS)))
        assert engine.cache_stats() is None
    assert len(CreateEmbeddingResponse.model_validate_json(results[0].payload).data) == 2


def test_a_prompt_that_repeats_a_prefix_is_cached_but_for_its_end(gguf):
    system = "few shot " * 60
    with loaded(gguf) as engine:
        before = ran(engine, batch(request("a", "x", system=system, max_tokens=1)))
        first = engine.cache_stats()
        ran(engine, batch(request("b", "y", system=system, max_tokens=1)))
        second = engine.cache_stats()
    assert before
    asked = second.queries_tokens - first.queries_tokens
    assert second.hits_tokens - first.hits_tokens > 0.8 * asked


def test_options_that_cannot_be_used_are_refused(gguf, tmp_path):
    with pytest.raises(ConfigError, match="--model-path"):
        engine_factory("llamacpp", {})
    with pytest.raises(ConfigError, match="there is no file"):
        engine_factory("llamacpp", {"model_path": str(tmp_path / "none.gguf")})
    with pytest.raises(ConfigError, match="slots must be at most"):
        engine_factory("llamacpp", {"model_path": str(gguf), "slots": "65"})
    with pytest.raises(ConfigError, match="port must be at most 65535"):
        engine_factory("llamacpp", {"model_path": str(gguf), "port": "99999"})


def test_a_file_that_is_no_gguf_is_refused_before_anything_starts(tmp_path):
    bad = tmp_path / "bad.gguf"
    for content in (b"", b"GG", b"{}", b"\0" * 1_000):
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match=re.escape(f"{bad} is no GGUF file")):
            engine_factory("llamacpp", {"model_path": str(bad)})


DAMAGE = {
    "header alone": lambda whole: whole[:30],
    "a version of nobody": lambda whole: whole[:4] + b"\xff" * 4 + whole[8:],
    "nonsense in the header": lambda whole: whole[:200] + b"\xff" * 60 + whole[260:],
    "half of it": lambda whole: whole[: len(whole) // 2],
    "without its end": lambda whole: whole[:-1_000],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named_and_not_tried_again(damage, gguf, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(damage(gguf.read_bytes()))
    with pytest.raises(ConfigError, match=re.escape(f"{bad} is damaged")):
        LlamaCppEngine(model_path=str(bad)).load()


def test_a_port_that_is_taken_is_named(gguf):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be had .*in use"):
            LlamaCppEngine(model_path=str(gguf), port=port).load()


def test_an_answer_without_max_tokens_ends(gguf):
    with loaded(gguf, answer_tokens=7) as engine:
        results = ran(engine, batch(request("a", "one"), request("b", "two", max_tokens=9)))
    made = [json.loads(result.payload)["usage"]["completion_tokens"] for result in results.values()]
    assert made == [7, 9]


# -- 720 prompts, two servers ------------------------------------------------------------------


class Sentences:
    """The tokens that the model sees of a request, counted with its own tokenizer."""

    def __init__(self):
        from sentencepiece import SentencePieceProcessor

        self.processor = SentencePieceProcessor(model_file=str(tokenizer_file()))

    def of(self, row):
        text = "".join(
            f"<|{message['role']}|>\n{message['content']}\n" for message in row["body"]["messages"]
        )
        return [self.processor.bos_id(), *self.processor.encode(text + "<|assistant|>\n")]


def common(a, b):
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def ideal_cached_ratio(rows):
    """Every prompt but the first of a prefix finds all that its group shares; one server."""
    tokens_of, groups, total = Sentences(), {}, 0
    for row in rows:
        tokens = tokens_of.of(row)
        total += len(tokens)
        groups.setdefault(row["body"]["messages"][0]["content"], []).append(tokens)
    shared = sum(
        (len(group) - 1) * min(common(group[0], tokens) for tokens in group[1:])
        for group in groups.values()
        if len(group) > 1
    )
    return shared / total


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def counters(port, key):
    """(cached, computed) prompt tokens as the server itself counts them."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {key}"}
    )
    text = urllib.request.urlopen(asked, timeout=10).read().decode()
    found = dict(re.findall(r"^llamacpp:(prompt_tokens(?:_cached)?_total) (\d+)$", text, re.M))
    return int(found["prompt_tokens_cached_total"]), int(found["prompt_tokens_total"])


def told(client):
    """Rows of the workers that have told what their caches did."""
    return [row for row in client.stats(10)["workers"] if row["cache_queries_tokens"]]


def hit_rates(source, policy, gguf, directory):
    """(ratio by the servers' counters, ratio in status, residual) of one whole run."""
    directory.mkdir()
    key = directory / "key"
    key.write_text("open sesame")
    ports = [free_port(), free_port()]
    contract = Contract(16, 65_536, 8_192)
    with brokering(policy=policy) as broker, contextlib.ExitStack() as workers:
        for k, port in enumerate(ports):
            factory = functools.partial(
                LlamaCppEngine, model_path=str(gguf), context_tokens=CONTEXT_TOKENS, threads=1,
                port=port, api_key_file=str(key),
            )  # fmt: skip
            workers.enter_context(
                serving(factory, broker.address, model="tiny", name=f"llama{k}", contract=contract)
            )
        summary = run_batch(source, directory / "out.jsonl", broker=broker.address)
        assert summary.ok
        counted = [counters(port, key.read_text()) for port in ports]
        asked = sum(map(sum, counted))
        with operating(broker.address) as client:
            # a worker tells its counters with its next heartbeat
            until(lambda: sum(row["cache_queries_tokens"] for row in told(client)) == asked)
            shown = sum(row["cache_hits_tokens"] for row in told(client)) / asked
            status = client.stats(10)
    for row in read_rows(directory / "out.jsonl"):
        ChatCompletion.model_validate(row["response"]["body"])
    cached = sum(each[0] for each in counted)
    return cached / asked, shown, status["residual_items"]


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_lanes_reach_the_ideal_of_real_caches_and_arrival_order_does_not(gguf, tmp_path, capsys):
    """Two llama.cpp servers of one slot, whose cache is smaller than the sum of the prefixes."""
    source = tmp_path / "in.jsonl"
    with contextlib.chdir(ROOT):
        write_batch_file(source, PROMPTS_ITEMS, "tiny", max_tokens=2)
    rows = read_rows(source)
    assert len(rows) == PROMPTS_ITEMS
    prefixes = {row["body"]["messages"][0]["content"] for row in rows}
    assert sum(len(Sentences().processor.encode(text)) for text in prefixes) > 2 * CONTEXT_TOKENS
    ideal = ideal_cached_ratio(rows)
    grouped, grouped_shown, grouped_residual = hit_rates(source, "lanes", gguf, tmp_path / "lanes")
    mixed, mixed_shown, mixed_residual = hit_rates(source, "fifo", gguf, tmp_path / "fifo")
    with capsys.disabled():
        sys.stdout.write(
            f"\ncached of prompt tokens: ideal {ideal:.4f}, lanes {grouped:.4f} (status "
            f"{grouped_shown:.4f}), fifo {mixed:.4f} (status {mixed_shown:.4f})\n"
        )
    assert (grouped_residual, mixed_residual) == (0, 0)
    assert grouped >= 0.97 * ideal
    assert grouped_shown == pytest.approx(grouped, rel=0.01)
    assert mixed < 0.5 * ideal
    assert mixed_shown == pytest.approx(mixed, rel=0.01)
