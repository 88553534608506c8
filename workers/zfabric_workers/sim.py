"""The simulated card: what a batch would cost, what a prefix cache would hit, and no model.

Decides the time of a batch, in microseconds: batch_us + padded tokens x token_us + missed prefix
tokens x miss_token_us, really slept; what a prefix cache of `cache_tokens` would hold; and a text
that depends on nothing but the prompt, so that runs can be compared byte by byte. Lengths and the
cache are in tokens as the batch declares them. Everything it says is labelled simulated: the
counters by `measured_by`, the bodies by `system_fingerprint`.

Never: the clock or the order of items in an answer, or a figure that could pass for a real card's.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import os
import random
import signal
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from zfabric.engine import Batch, CacheStats, OutOfMemory, Result
from zfabric.errors import ConfigError
from zfabric.shapes import Shape, check_name, signature_of
from zfabric_workers import check_options, option, parse_options

FINGERPRINT = "zfabric-sim"
# A fixed time: a clock would make two runs of one prompt differ.
CREATED_UNIX_S = 0
# The simulated tokenizer of `usage`: the common rule of thumb for English text.
BYTES_PER_TOKEN = 4
# What a request may ask for; enough to test with, and a bound on what one answer can hold.
CHOICES_MAX = 128
INPUTS_MAX = 2048
DIMENSIONS_MAX = 4096
DIMENSIONS_DEFAULT = 8
# One sleep; the rest of a longer one follows, so that any length is accepted.
HANG_SLICE_MS = 1_000_000
WORDS = (
    *("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "harbor"),
    *("inlet", "jetty", "knoll", "lagoon", "meadow", "north", "orchard", "prairie"),
    *("quarry", "ridge", "summit", "tundra", "upland", "valley", "willow", "yarrow"),
    *("apex", "brook", "coast", "dune", "east", "field", "glade", "hill"),
)


class PrefixCache:
    """Component chains, least recently used out first, never over `capacity_tokens`.

    A node is a chain up to and including one component, and its size is that component's tokens
    (one at least, so that the number of nodes is bounded too). A chain is touched from its deepest
    node to its root, so a parent is always more recent than its children: the oldest node has
    none, and removing it leaves every other node reachable. A node keeps the size that it was
    first seen with.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._tokens_of: OrderedDict[int, int] = OrderedDict()
        self._used_tokens = 0

    @property
    def used_tokens(self) -> int:
        return self._used_tokens

    def __contains__(self, node: int) -> bool:
        return node in self._tokens_of

    def take(self, chain: Sequence[tuple[int, int]]) -> int:
        """Tokens of the longest cached prefix of `chain`; then the chain is cached.

        `chain` holds (node, tokens of its component), root first. If it does not fit as a whole,
        what is cached is its longest prefix that does.
        """
        hit_tokens = kept = kept_tokens = 0
        for node, tokens in chain:
            cached = self._tokens_of.get(node)
            size_tokens = max(1, tokens) if cached is None else cached
            if kept_tokens + size_tokens > self._capacity_tokens:
                break
            kept += 1
            kept_tokens += size_tokens
            if cached is not None:
                hit_tokens += min(cached, tokens)
        for node, tokens in reversed(chain[:kept]):
            if node not in self._tokens_of:
                self._tokens_of[node] = max(1, tokens)
                self._used_tokens += max(1, tokens)
            self._tokens_of.move_to_end(node)
        # The chain is the most recent part and fits, so only what is not of it goes.
        while self._used_tokens > self._capacity_tokens:
            _, tokens = self._tokens_of.popitem(last=False)
            self._used_tokens -= tokens
        return hit_tokens


@dataclass(kw_only=True, eq=False)
class SimEngine:
    """A card that is not there. Raises ConfigError for options that cannot be used."""

    model: str = option("sim", "model named in bodies that name none themselves")
    cache_tokens: int = option(65_536, "size of the simulated prefix cache in tokens", minimum=0)
    # A guess that depended on the item would make a node's size depend on who came first.
    unknown_tokens: int = option(
        256, "size assumed for a component whose token count was not declared", minimum=0
    )
    # Ratios of design figures: a batch costs as much as 2,000 tokens, a cold prefix some times
    # a warm one; a microsecond a token runs a few thousand prompts in seconds.
    batch_us: float = option(2_000.0, "cost of any batch in microseconds", minimum=0)
    token_us: float = option(1.0, "cost of a padded token in microseconds", minimum=0)
    miss_token_us: float = option(
        4.0, "added cost of a prefix token that is not cached, in microseconds", minimum=0
    )
    speed: float = option(1.0, "times faster than the costs say; 0 does not sleep", minimum=0)
    jitter: float = option(0.0, "cost varies by up to this fraction, either way", minimum=0)
    seed: int = option(0, "seed of the jitter; texts do not depend on it")
    partial: bool = option(False, "give results one by one, the cost spread over them")
    fail_every: int = option(0, "every n-th item fails for good; 0 is never", minimum=0)
    fail_on: bytes = option(b"", "items whose payload holds this text fail for good")
    error_on: bytes = option(b"", "a batch with this text in a payload raises an error")
    oom_on: bytes = option(b"", "a batch with this text in a payload runs out of memory")
    kill_on: bytes = option(b"", "a batch with this text in a payload kills the process")
    hang_on: bytes = option(b"", "a batch with this text holds the interpreter for hang_s")
    hang_s: float = option(60.0, "seconds of a hang", minimum=0)
    slow_on: bytes = option(b"", "each item with this text takes slow_s longer")
    slow_s: float = option(1.0, "seconds added by a slow item, whatever the speed", minimum=0)

    _cache: PrefixCache = field(init=False, repr=False)
    _random: random.Random = field(init=False, repr=False)
    _items_run: int = field(init=False, repr=False, default=0)
    _queries_tokens: int = field(init=False, repr=False, default=0)
    _hits_tokens: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_name(self.model, "model name")
        if self.jitter > 1:
            raise ConfigError(f"engine option jitter must be at most 1, not {self.jitter:g}")
        self.load()

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> SimEngine:
        """An engine from a command line's texts. Raises ConfigError."""
        return cls(**parse_options(cls, options))

    def load(self) -> None:
        """Empty the cache and the counters."""
        self._cache = PrefixCache(self.cache_tokens)
        self._random = random.Random(self.seed)
        self._items_run = self._queries_tokens = self._hits_tokens = 0

    def run(self, batch: Batch) -> Sequence[Result] | Iterator[tuple[int, Result]]:
        """Answer every item after the cost of the batch has been slept.

        The switches that fail a whole batch act first, or, with `partial`, when their item's
        turn comes, so that the items before it have their results.
        """
        if not self.partial:
            self._trip(batch.payloads)
        missed_tokens = self._look_up(batch)
        cost_us = (
            self.batch_us + batch.padded_tokens * self.token_us + missed_tokens * self.miss_token_us
        )
        cost_us *= 1 + self.jitter * self._random.uniform(-1, 1)
        cost_s = cost_us / 1e6 / self.speed if self.speed else 0.0
        if self.partial:
            return self._run_one_by_one(batch.payloads, cost_s)
        time.sleep(cost_s + sum(map(self._slowness_s, batch.payloads)))
        return [self._answer(payload) for payload in batch.payloads]

    def cache_stats(self) -> CacheStats:
        """Tokens asked for and found since load, counted in the simulated cache."""
        return CacheStats(self._queries_tokens, self._hits_tokens, "simulated")

    def _run_one_by_one(
        self, payloads: Sequence[bytes], cost_s: float
    ) -> Iterator[tuple[int, Result]]:
        for index, payload in enumerate(payloads):
            self._trip((payload,))
            time.sleep(cost_s / len(payloads) + self._slowness_s(payload))
            yield index, self._answer(payload)

    def _trip(self, payloads: Sequence[bytes]) -> None:
        """The failures that take the whole batch, in the order of its items."""
        if not (self.kill_on or self.oom_on or self.error_on or self.hang_on):
            return
        for payload in payloads:
            if self.kill_on and self.kill_on in payload:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.oom_on and self.oom_on in payload:
                raise OutOfMemory("simulated: out of memory")
            if self.error_on and self.error_on in payload:
                raise RuntimeError("simulated: engine error")
            if self.hang_on and self.hang_on in payload:
                _hold_interpreter(self.hang_s)

    def _look_up(self, batch: Batch) -> int:
        """Pass the items through the cache, in order; the prefix tokens that it did not hold."""
        chains = [chain_of(shape, self.unknown_tokens) for shape in batch.shapes]
        missed_tokens = 0
        for length, index in zip(batch.lengths, batch.shape_index, strict=True):
            prefix_tokens = min(length, sum(tokens for _, tokens in chains[index]))
            # Token counts may be estimates: no more can be hit than there is.
            hit_tokens = min(length, self._cache.take(chains[index]))
            self._queries_tokens += length
            self._hits_tokens += hit_tokens
            missed_tokens += max(0, prefix_tokens - hit_tokens)
        return missed_tokens

    def _slowness_s(self, payload: bytes) -> float:
        return self.slow_s if self.slow_on and self.slow_on in payload else 0.0

    def _answer(self, payload: bytes) -> Result:
        self._items_run += 1
        if self.fail_every and self._items_run % self.fail_every == 0:
            return Result.failed("simulated_failure", f"one in {self.fail_every} items fails")
        if self.fail_on and self.fail_on in payload:
            return Result.failed("simulated_failure", "the payload holds the text of fail_on")
        return answer(payload, self.model)


def chain_of(shape: Shape, unknown_tokens: int) -> tuple[tuple[int, int], ...]:
    """(node, tokens) of each component, root first; a node is the signature up to there."""
    counts = shape.tokens or (None,) * len(shape.components)
    return tuple(
        (signature_of(shape.components[: depth + 1]), unknown_tokens if count is None else count)
        for depth, count in enumerate(counts)
    )


def _hold_interpreter(hang_s: float) -> None:
    """Wait in C without giving the interpreter lock away, as a bad extension module would."""
    libc = ctypes.PyDLL(None)
    remaining_ms = math.ceil(hang_s * 1000)
    while remaining_ms > 0:
        slice_ms = min(remaining_ms, HANG_SLICE_MS)
        libc.poll(None, 0, slice_ms)
        remaining_ms -= slice_ms


# Answers: pure functions of the payload


class _BadRequest(Exception):
    """The request line asks for something that no OpenAI-compatible server would take."""


def answer(payload: bytes, model: str) -> Result:
    """The answer to an OpenAI Batch request line, or `sim:` and a digest of any other payload.

    `model` is what a body is labelled with that names none. A payload that opens like a JSON
    object has to be one.
    """
    if payload.lstrip()[:1] != b"{":
        return _digest_of(payload)
    try:
        line = json.loads(payload)
        if not isinstance(line, dict) or "url" not in line:
            return _digest_of(payload)
        body = line.get("body")
        if not isinstance(body, dict):
            raise _BadRequest("body must be an object")
        if line.get("method", "POST") != "POST":
            raise _BadRequest("method must be POST")
        endpoint = _ENDPOINTS.get(line["url"]) if isinstance(line["url"], str) else None
        if endpoint is None:
            raise _BadRequest(f"url must be one of {', '.join(_ENDPOINTS)}")
        if body.get("stream"):
            raise _BadRequest("stream cannot be used in a batch")
        named = body.get("model", model)
        if not isinstance(named, str) or not named:
            raise _BadRequest("model must be a non-empty string")
        response = endpoint(body)
    except _BadRequest as error:
        return Result.failed("bad_request", str(error))
    except (ValueError, RecursionError) as error:
        return Result.failed("bad_request", f"request line is not JSON: {error}"[:500])
    response |= {"model": named, "system_fingerprint": FINGERPRINT}
    if "id" in response:
        response["id"] += xxhash.xxh3_128_hexdigest(payload)
    return Result.ok(json.dumps(response, separators=(",", ":")).encode())


def _digest_of(payload: bytes) -> Result:
    return Result.ok(b"sim:" + xxhash.xxh3_128_hexdigest(payload).encode())


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _BadRequest("messages must be a non-empty list")
    size_bytes = 0
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _BadRequest("each message must be an object with a role")
        size_bytes += _content_bytes(message.get("content"))
    tools = body.get("tools")
    if tools is not None:
        size_bytes += len(_canonical(tools))
    limit = _limit(body, "max_completion_tokens", _limit(body, "max_tokens", None))
    prompt = _canonical([messages, tools])
    choices = []
    completion_tokens = 0
    for index in range(_count(body, "n", 1, CHOICES_MAX)):
        text, tokens, reason = _text(prompt, index, limit)
        completion_tokens += tokens
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
        choices.append(choice)
    return {
        "id": "chatcmpl-sim-",
        "object": "chat.completion",
        "created": CREATED_UNIX_S,
        "choices": choices,
        "usage": _usage(_tokens(size_bytes), completion_tokens),
    }


def _completions(body: dict[str, Any]) -> dict[str, Any]:
    prompts = _prompts(body.get("prompt"), "prompt", CHOICES_MAX)
    each = _count(body, "n", 1, CHOICES_MAX)
    if len(prompts) * each > CHOICES_MAX:
        raise _BadRequest(f"prompt and n ask for more than {CHOICES_MAX} choices")
    limit = _limit(body, "max_tokens", None)
    choices: list[dict[str, Any]] = []
    completion_tokens = 0
    for prompt in prompts:
        for repeat in range(each):
            text, tokens, reason = _text(_canonical(prompt), repeat, limit)
            completion_tokens += tokens
            choice = {"index": len(choices), "text": " " + text if text else ""}
            choices.append(choice | {"logprobs": None, "finish_reason": reason})
    return {
        "id": "cmpl-sim-",
        "object": "text_completion",
        "created": CREATED_UNIX_S,
        "choices": choices,
        "usage": _usage(sum(map(_prompt_tokens, prompts)), completion_tokens),
    }


def _embeddings(body: dict[str, Any]) -> dict[str, Any]:
    inputs = _prompts(body.get("input"), "input", INPUTS_MAX)
    dimensions = _count(body, "dimensions", DIMENSIONS_DEFAULT, DIMENSIONS_MAX)
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise _BadRequest("encoding_format must be float or base64")
    data = []
    for index, text in enumerate(inputs):
        vector: Any = _vector(_canonical(text), dimensions)
        if encoding == "base64":
            vector = base64.b64encode(struct.pack(f"<{dimensions}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    prompt_tokens = sum(map(_prompt_tokens, inputs))
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "usage": usage}


_ENDPOINTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/embeddings": _embeddings,
}


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _text(prompt: bytes, choice: int, limit_tokens: int | None) -> tuple[str, int, str]:
    """(text, its tokens, finish reason) of a prompt; a word counts as one token."""
    digest = xxhash.xxh3_128_digest(prompt, seed=choice)
    wanted = 4 + digest[0] % 9
    count = wanted if limit_tokens is None else min(wanted, limit_tokens)
    words = [WORDS[byte % len(WORDS)] for byte in digest[1 : 1 + count]]
    return " ".join(words), count, "stop" if count == wanted else "length"


def _vector(text: bytes, dimensions: int) -> list[float]:
    """A unit vector that depends on the text alone."""
    raw = [xxhash.xxh3_64_intdigest(text, seed=k) / 2**63 - 1 for k in range(dimensions)]
    norm = math.sqrt(sum(x * x for x in raw)) or 1.0
    return [x / norm for x in raw]


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    # No prompt_tokens_details.cached_tokens: it would depend on what ran before, and a run with
    # faults has to give the same bytes as one without. Hits are in cache_stats() alone.
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _content_bytes(content: object) -> int:
    if content is None:
        return 0
    if isinstance(content, str):
        return _size_bytes(content)
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return sum(_size_bytes(str(part.get("text", ""))) for part in content)
    raise _BadRequest("content must be a string or a list of parts")


def _prompts(value: object, name: str, ceiling: int) -> list[Any]:
    """One prompt (a string or token ids) or a list of them, as a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if len(value) <= ceiling and all(isinstance(p, str) or _is_token_ids(p) for p in value):
            return value
    raise _BadRequest(f"{name} must be a string, token ids, or a list of 1 to {ceiling} of these")


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _prompt_tokens(prompt: str | list[int]) -> int:
    return _tokens(_size_bytes(prompt)) if isinstance(prompt, str) else len(prompt)


def _tokens(size_bytes: int) -> int:
    return -(-size_bytes // BYTES_PER_TOKEN)


def _size_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _limit(body: dict[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise _BadRequest(f"{name} must be an integer of 0 or more")
    return value


def _count(body: dict[str, Any], name: str, default: int, ceiling: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= ceiling:
        raise _BadRequest(f"{name} must be an integer from 1 to {ceiling}")
    return value
