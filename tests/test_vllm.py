"""A real vLLM server behind the engine `openai`: run by `make vllm-check`, skipped elsewhere."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

from tests.running import brokering, operating, read_rows, serving, until, write_batch
from tests.test_llamacpp import common, free_port
from zfabric.batchrun import run_batch
from zfabric.cli.prompts import write_batch_file
from zfabric.shapes import Contract
from zfabric_workers.openai_server import OpenAIEngine

PYTHON = os.environ.get("ZFABRIC_VLLM_PYTHON")
ROOT = Path(__file__).resolve().parents[1]
# Smaller than the sum of the prefixes, and room for the longest prompt.
BLOCK_TOKENS, BLOCKS = 32, 192
ITEMS = 360
START_S = 300.0
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed: make vllm-check"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    with contextlib.chdir(ROOT):
        write_batch_file(path, ITEMS, "tiny", max_tokens=1)
    return read_rows(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory, prompts):
    from zfabric_workers.tinymodel import write_tiny_model

    prefixes = {row["body"]["messages"][0]["content"] for row in prompts}
    return write_tiny_model(
        tmp_path_factory.mktemp("model"), hidden=128, heads=2, feed_forward=256, texts=prefixes
    )


def vllm(*words):
    return [PYTHON, "-m", *words]


@contextlib.contextmanager
def server(model, directory):
    """A fresh server, whose cache is empty; its address."""
    port = free_port()
    words = vllm(
        "vllm.entrypoints.openai.api_server", "--model", str(model), "--load-format", "dummy",
        "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager",
        "--enable-prefix-caching", "--enable-prompt-tokens-details", "--max-model-len", "4096",
        "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS),
        "--host", "127.0.0.1", "--port", str(port),
    )  # fmt: skip
    with (directory / "vllm.log").open("w") as log:
        process = subprocess.Popen(words, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def up():
        assert process.poll() is None, (directory / "vllm.log").read_text()[-3_000:]
        with contextlib.suppress(OSError, urllib.error.URLError):
            return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200

    try:
        until(up, START_S)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def counters(url):
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    found = dict(re.findall(r"^vllm:prefix_cache_(hits|queries)_total\{[^}]*\} (\S+)$", text, re.M))
    return float(found["hits"]), float(found["queries"])


def ideal_cached_ratio(rows, model):
    """Every prompt but the first of a prefix finds the whole blocks that its group shares."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    groups, total = {}, 0
    for row in rows:
        messages = row["body"]["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        total += len(ids)
        groups.setdefault(messages[0]["content"], []).append(ids)
    shared = sum(
        (len(group) - 1)
        * (min(common(group[0], ids) for ids in group[1:]) // BLOCK_TOKENS * BLOCK_TOKENS)
        for group in groups.values()
        if len(group) > 1
    )
    return shared / total


def hit_rates(rows, policy, model, directory):
    directory.mkdir()
    source = write_batch(directory / "in.jsonl", rows)
    contract = Contract(32, 65_536, 4_096, ragged=True)
    with server(model, directory) as url, brokering(policy=policy) as broker:
        factory = functools.partial(OpenAIEngine, url=url, cached_tokens="yes", concurrency=2)
        with serving(factory, broker.address, model="tiny", contract=contract):
            summary = run_batch(source, directory / "out.jsonl", broker=broker.address)
            assert summary.ok
            hits, queries = counters(url)
            with operating(broker.address) as client:
                (worker,) = client.stats(10)["workers"]
    return hits / queries, worker["cache_hit_ratio"]


def test_lanes_reach_the_ideal_of_its_cache_and_arrival_order_does_not(
    prompts, model, tmp_path, capsys
):
    ideal = ideal_cached_ratio(prompts, model)
    counted, shown = hit_rates(prompts, "lanes", model, tmp_path / "lanes")
    unordered, also_shown = hit_rates(prompts, "fifo", model, tmp_path / "fifo")
    figures = f"ideal {ideal:.4f}, lanes {counted:.4f} ({shown:.4f} shown), fifo {unordered:.4f}"
    with capsys.disabled():
        sys.stdout.write(f"\ncached of prompt tokens: {figures}\n")
    assert counted >= 0.97 * ideal, figures
    assert shown == pytest.approx(counted, rel=0.01), figures
    assert unordered < 0.5 * ideal, figures
    assert also_shown == pytest.approx(unordered, rel=0.01, abs=0.001), figures


def schema(value):
    """What a row is made of: names and kinds, whatever the values are."""
    if isinstance(value, dict):
        return {name: schema(each) for name, each in sorted(value.items())}
    if isinstance(value, list):
        return [schema(value[0])] if value else []
    return type(value).__name__


def test_rows_have_the_schema_of_vllms_own_run_batch(prompts, model, tmp_path):
    source = write_batch(tmp_path / "in.jsonl", prompts[:8])
    theirs = tmp_path / "theirs.jsonl"
    subprocess.run(
        vllm(
            "vllm.entrypoints.openai.run_batch", "-i", str(source), "-o", str(theirs),
            "--model", str(model), "--served-model-name", "tiny", "--load-format", "dummy",
            "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
            "--enable-prompt-tokens-details",
        ),
        env={**os.environ, **ENVIRONMENT}, check=True, timeout=START_S, capture_output=True,
    )  # fmt: skip
    with server(model, tmp_path) as url, brokering() as broker:
        factory = functools.partial(OpenAIEngine, url=url)
        contract = Contract(8, 65_536, 4_096, ragged=True)
        with serving(factory, broker.address, model="tiny", contract=contract):
            run_batch(source, tmp_path / "ours.jsonl", broker=broker.address)
    rows = {row["custom_id"]: row for row in read_rows(tmp_path / "ours.jsonl")}
    for row in read_rows(theirs):
        ours = rows.pop(row["custom_id"])
        assert sorted(ours) == sorted(row)
        assert sorted(ours["response"]) == sorted(row["response"])
        assert ours["response"]["status_code"] == row["response"]["status_code"]
        body = ChatCompletion.model_validate(ours["response"]["body"])
        assert body.choices[0].message.content is not None
        assert schema(ours["response"]["body"]["choices"]) == schema(
            row["response"]["body"]["choices"]
        ), json.dumps([ours, row])
        missing = set(row["response"]["body"]) - set(ours["response"]["body"])
        assert not missing, missing
    assert not rows
