"""What padding costs a real engine: arrival order, buckets of 64 tokens, and lanes.

The same items go through a real broker and one real worker three times: in arrival order (`fifo`),
sorted by their producer into buckets of 64 tokens and then in that order (`buckets`), and in lanes.
Lengths are counted with the engine's own tokenizer. The engine's load and its first batch are not
measured. Times are seconds, lengths tokens.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from zfabric.broker import Broker
from zfabric.client import Client
from zfabric.config import BrokerConfig
from zfabric.engine import EngineFactory
from zfabric.errors import FabricError
from zfabric.results import Item
from zfabric.shapes import Contract, Shape
from zfabric.worker import Worker

MODEL = "bench"
BUCKET_TOKENS = 64
SEED = 7
READY_S = 120.0
# A result that does not come for so long will not come.
RESULT_S = 300.0
POLICIES = (("fifo", "fifo", False), ("buckets", "fifo", True), ("lanes", "lanes", False))
STORY = (
    "the parcel arrived late but courier was polite and box had only a small dent so we kept it "
    "while our neighbour sent hers back because hinge missing from left door nobody at counter "
    "could say when another one would be made or what might cost with postage to island in winter"
)
WORDS = STORY.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is run: texts of lognormal lengths in words, as logs of real use have them."""

    items: int
    median_words: int
    spread: float
    words_max: int
    url: str
    field: str
    body: dict[str, Any]
    contract: Contract
    # texts begin with one of so many prefixes, each a shape of its own; 0: all share one shape
    prefixes: int = 0
    prefix_words: int = 400


EMBED = Load(
    items=5_000,
    median_words=14,
    spread=0.9,
    words_max=180,
    url="/v1/embeddings",
    field="input",
    body={},
    contract=Contract(32, 8_192, 256),
)
CAUSAL = Load(
    items=512,
    median_words=90,
    spread=0.9,
    words_max=800,
    url="/v1/completions",
    field="prompt",
    body={"max_tokens": 1, "temperature": 0},
    contract=Contract(16, 32_768, 2_048),
)


# Some 400,000 prompt tokens: a minute of a card of today, less than five of an old one.
GPU = Load(
    items=1_000,
    median_words=60,
    spread=1.0,
    words_max=900,
    url="/v1/completions",
    field="prompt",
    body={"max_tokens": 4, "temperature": 0},
    contract=Contract(32, 65_536, 4_096),
    prefixes=10,
)


def texts_of(load: Load) -> list[str]:
    """The texts of a load; the same each time."""
    draw = random.Random(SEED)
    lengths = [
        min(load.words_max, max(1, round(load.median_words * draw.lognormvariate(0, load.spread))))
        for _ in range(load.items)
    ]
    texts = [" ".join(draw.choices(WORDS, k=words)) for words in lengths]
    prefixes = prefixes_of(load)
    return [f"{prefixes[k % len(prefixes)]} {text}".lstrip() for k, text in enumerate(texts)]


def prefixes_of(load: Load) -> list[str]:
    """What the texts begin with, in turn."""
    draw = random.Random(SEED + 1)
    made = [" ".join(draw.choices(WORDS, k=load.prefix_words)) for _ in range(load.prefixes)]
    return made or [""]


def compare(load: Load, factory: EngineFactory, count: Callable[[str], int]) -> dict[str, Any]:
    """Figures of every policy on `load`."""
    shapes = [
        Shape.of(MODEL, text, tokens=[count(text)]) if text else Shape(MODEL)
        for text in prefixes_of(load)
    ]
    items = [
        Item(shapes[k % len(shapes)], _line(load, k, text), count(text))
        for k, text in enumerate(texts_of(load))
    ]
    figures = {
        name: _measure(load, factory, _in_buckets(items) if buckets else items, policy)
        for name, policy, buckets in POLICIES
    }
    base = figures["fifo"]["us_per_real_token"]
    for each in figures.values():
        each["times_fifo"] = round(base / each["us_per_real_token"], 2)
    lengths = sorted(item.length for item in items)
    return {
        "items": len(items),
        "tokens": sum(lengths),
        "length_median": lengths[len(lengths) // 2],
        "length_max": lengths[-1],
        "contract": f"{load.contract.batch_items_max} x {load.contract.batch_tokens_max}",
        **figures,
    }


def _line(load: Load, number: int, text: str) -> bytes:
    body = {"model": MODEL, load.field: text, **load.body}
    line = {"custom_id": str(number), "method": "POST", "url": load.url, "body": body}
    return json.dumps(line).encode()


def _in_buckets(items: list[Item]) -> list[Item]:
    """By 64-token range, in arrival order within each, as a producer would who sorts roughly."""
    return sorted(items, key=lambda item: item.length // BUCKET_TOKENS)


def _measure(load: Load, factory: EngineFactory, items: list[Item], policy: str) -> dict[str, Any]:
    with _fabric(load.contract, factory, policy) as client:
        _run(client, items[: load.contract.batch_items_max])
        before = client.stats()
        started = time.perf_counter()
        _run(client, items)
        seconds = time.perf_counter() - started
        after = client.stats()
    real = after["real_tokens"] - before["real_tokens"]
    padded = after["padded_tokens"] - before["padded_tokens"]
    return {
        "seconds": round(seconds, 2),
        "items_per_s": round(len(items) / seconds, 1),
        "us_per_real_token": round(1e6 * seconds / real, 2),
        "padded_tokens_per_s": round(padded / seconds),
        "waste_ratio": round(1 - real / padded, 4),
        "cache_hit_ratio": after["workers"][0]["cache_hit_ratio"],
        "batches": after["batches"] - before["batches"],
    }


def _run(client: Client, items: list[Item]) -> None:
    for result in client.map(items, buffersize=len(items), timeout=RESULT_S):
        if result.status != "ok":
            raise FabricError(f"an item of the benchmark failed: {result.payload[:200]!r}")


@contextmanager
def _fabric(contract: Contract, factory: EngineFactory, policy: str) -> Iterator[Client]:
    """A broker in memory and one worker, and a client of theirs."""
    broker = Broker(BrokerConfig(port=0, memory=True, policy=policy))
    address = broker.bind().producers
    serving = threading.Thread(target=broker.run, name="broker", daemon=True)
    serving.start()
    worker = Worker(factory, broker=address, model=MODEL, contract=contract, name="bench")
    working = threading.Thread(target=worker.run, name="worker", daemon=True)
    working.start()
    client = Client(address, name="bench", timeout_s=READY_S)
    try:
        until = time.monotonic() + READY_S
        while worker.state == "loading":
            if time.monotonic() > until or not working.is_alive():
                raise FabricError("the engine did not load")
            time.sleep(0.05)
        yield client
    finally:
        client.close()
        worker.stop(drain=False)
        working.join()
        broker.stop()
        serving.join()
