from __future__ import annotations

import io
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.running import request
from zfabric.batchfile import BadLine, Discovery, Request, read_requests
from zfabric.batchplan import POLICIES, plan_of
from zfabric.batchsource import ANSWERS_MIN, Lengths, Source
from zfabric.packing import pack_tight
from zfabric.shapes import Contract, Shape

CONTRACT = Contract(8, 2_048, 1_024)


def rows_of(lengths, shapes=1):
    return [
        Request(k + 1, f"q-{k}", "POST", "/v1/completions", b"", Shape.of("m", str(k % shapes)), n)
        for k, n in enumerate(lengths)
    ]


def packed_at_once(lengths):
    """The same packing with all of the queue in hand: the plain way."""
    padded, queue = 0, list(lengths)
    while queue:
        taken = pack_tight(queue, CONTRACT)
        padded += taken.count * taken.pad_to
        queue = queue[taken.count :]
    return padded


@given(st.lists(st.integers(1, 1_024), max_size=200))
@settings(max_examples=100, deadline=None)
def test_packing_as_it_grows_is_packing_at_once(lengths):
    plan = plan_of(rows_of(lengths), CONTRACT)
    assert {each.real_tokens for each in plan.paddings} == {sum(lengths)}
    fifo = next(each for each in plan.paddings if each.policy == "fifo")
    assert fifo.padded_tokens == packed_at_once(lengths)


def test_lanes_pad_less_than_arrival_order():
    draw = random.Random(1)
    plan = plan_of(rows_of([draw.randint(1, 1_000) for _ in range(5_000)], shapes=4), CONTRACT)
    waste = {each.policy: each.waste_ratio for each in plan.paddings}
    assert tuple(waste) == POLICIES
    assert waste["lanes"] < 0.1 < waste["fifo"]
    assert len(plan.shapes) == 4


def test_neighbours_fill_batches_that_lanes_alone_do_not():
    draw = random.Random(2)
    lengths = [draw.randint(1, 1_000) for _ in range(600)]
    alone, together = (
        next(p for p in plan_of(rows_of(lengths), CONTRACT, grouped=grouped).paddings[::-1])
        for grouped in (False, True)
    )
    assert alone.policy == together.policy == "lanes"
    assert alone.real_tokens == together.real_tokens == sum(lengths)
    assert together.batches < alone.batches
    assert together.fill_ratio > alone.fill_ratio
    assert together.waste_ratio >= alone.waste_ratio


def test_what_cannot_run_is_counted_and_not_packed():
    rows = [*rows_of([5_000, 10]), BadLine(3, None, "bad_json", "no")]
    plan = plan_of(rows, CONTRACT)
    assert (plan.lines, plan.items, plan.too_long, plan.bad) == (3, 2, 1, {"bad_json": 1})
    assert plan.paddings[0].real_tokens == 10
    assert plan.small_items == 2


def test_an_empty_file_has_an_empty_plan():
    plan = plan_of([], CONTRACT)
    assert [each.waste_ratio for each in plan.paddings] == [0, 0, 0]
    assert [each.fill_ratio for each in plan.paddings] == [0, 0, 0]


# -- lengths -----------------------------------------------------------------------------------


def test_estimates_are_corrected_by_what_the_engine_reports():
    lengths = Lengths(counted=False)
    for _ in range(ANSWERS_MIN):
        assert lengths.of(100) == 100
        lengths.learn(100, 150)
    assert lengths.of(100) == 150
    assert lengths.ratio == 1.5


def test_a_small_change_moves_no_lengths():
    lengths = Lengths(counted=False)
    for _ in range(2 * ANSWERS_MIN):
        lengths.learn(100, 101)
    assert lengths.of(1_000) == 1_000


def test_counted_lengths_and_silent_engines_change_nothing():
    counted, silent = Lengths(counted=True), Lengths(counted=False)
    for _ in range(2 * ANSWERS_MIN):
        counted.learn(100, 150)
        silent.learn(100, None)
        silent.learn(0, 7)
    assert counted.of(100) == silent.of(100) == 100
    assert (counted.ratio, silent.ratio) == (None, 1.0)


def test_an_engine_that_counts_something_else_is_believed_within_bounds():
    lengths = Lengths(counted=False)
    for _ in range(ANSWERS_MIN):
        lengths.learn(1, 10**9)
    assert lengths.of(100) == 1_000


def test_the_total_is_judged_from_what_was_read_and_exact_at_the_end(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(request(f"q-{k}")) + "\n" for k in range(300)))
    with path.open("rb") as stream:
        source = Source(stream, count=len)
        rows = source.rows()
        first = next(rows)
        assert source.total_lines() == 300
        assert first.length_tokens == len("You are terse.") + len("hello") + 8
        assert sum(1 for _ in rows) == 299


# -- tokenizers --------------------------------------------------------------------------------


class TestTokenizers:
    @pytest.fixture(autouse=True)
    def _packages(self):
        for name in ("tokenizers", "sentencepiece", "mistral_common", "tiktoken"):
            pytest.importorskip(name, reason="the extra zfabric[tokenizers] is not installed")

    @pytest.mark.parametrize("name", ["mistral:v1", "mistral:v3", "mistral:tekken"])
    def test_mistral_files_are_there(self, name):
        from zfabric_workers.tokenizing import load_tokenizer

        count = load_tokenizer(name)
        text = "Evaluate the result of a random Boolean expression. " * 3
        assert 20 < count(text) < 60
        assert count(text) == count(text)
        assert count("") == 0
        assert count("half a pair: \ud800") > 0

    def test_a_tokenizer_json_counts_as_its_library_does(self, tmp_path):
        from tokenizers import Tokenizer, models, pre_tokenizers

        from zfabric_workers.tokenizing import load_tokenizer

        tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.enable_truncation(4)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            assert load_tokenizer(str(path))("a b c d e f") == 6

    def test_counts_are_remembered_within_bounds(self, monkeypatch):
        from zfabric_workers import tokenizing

        monkeypatch.setattr(tokenizing, "CACHE_ENTRIES_MAX", 2)
        asked = []
        remembering = tokenizing.Remembering(lambda text: asked.append(text) or len(text))
        texts = [letter * 100 for letter in "aabacdab"]
        assert [remembering.count(text) for text in texts] == [100] * 8
        assert "".join(text[0] for text in asked) == "abcdab"

    def test_a_name_that_is_none_says_what_there_is(self, tmp_path):
        from zfabric.errors import ConfigError
        from zfabric_workers.tokenizing import load_tokenizer

        with pytest.raises(ConfigError, match="mistral:v1"):
            load_tokenizer("llama-9")
        bad = tmp_path / "tokenizer.json"
        bad.write_text("{}")
        with pytest.raises(ConfigError, match="is not a tokenizer"):
            load_tokenizer(str(bad))
        (tmp_path / "x.model").write_text("no")
        with pytest.raises(ConfigError, match="is not a sentencepiece model"):
            load_tokenizer(str(tmp_path / "x.model"))

    def test_lengths_of_requests_are_the_tokenizers(self):
        from zfabric_workers.tokenizing import load_tokenizer

        count = load_tokenizer("mistral:v1")
        text = "The parcel arrived late, but the courier was polite. " * 40
        line = json.dumps(request("q", text, url="/v1/completions")).encode()
        (row,) = Discovery().assign(read_requests(io.BytesIO(line), count=count))
        # blocks are counted one by one: a token or two more at each seam
        assert count(text) <= row.length_tokens <= 1.02 * count(text)
