"""Requests for text, and the answers to them, for engines that generate in this process.

Decides what of a request such an engine serves: messages or one prompt, max_tokens, temperature,
top_p, seed and stop; one choice. Anything that it would have to ignore and that changes the answer
is refused. Without a seed, one is made from the request, so that an item that is run twice says the
same. Lengths are tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from zfabric.engine import Result
from zfabric_workers.requestlines import CHAT, COMPLETIONS, bad_request, read_call

# What OpenAI's completions default to; a chat has no such limit, but a batch needs one.
COMPLETION_TOKENS_DEFAULT, CHAT_TOKENS_DEFAULT = 16, 256
NOT_SERVED = ("tools", "functions", "response_format", "logprobs", "logit_bias", "echo", "suffix")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request, ready to be run."""

    url: str
    model: str
    ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]


def read_wanted(
    payload: bytes,
    model: str,
    encode: Callable[[str], Sequence[int]],
    encode_chat: Callable[[list[dict[str, Any]]], Sequence[int]],
) -> Wanted | Result:
    """The request in `payload`, or why it cannot be served."""
    call = read_call(payload)
    if isinstance(call, Result):
        return call
    body = call.body
    if call.url not in (CHAT, COMPLETIONS):
        return bad_request("this engine generates text; the engine embed serves /v1/embeddings")
    if call.answers != 1:
        return bad_request("this engine gives one choice to one prompt: use n = 1")
    given = [name for name in NOT_SERVED if body.get(name)]
    if given:
        return bad_request(f"this engine does not serve {', '.join(given)}: remove it")
    try:
        ids = _ids(call.url, body, encode, encode_chat)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a tokenizer or a chat template raises what it likes
        return bad_request(str(error))
    try:
        stop = body.get("stop") or ()
        return Wanted(
            url=call.url,
            model=str(body.get("model") or model),
            ids=tuple(ids),
            max_tokens=_max_tokens(call.url, body),
            temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
            top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
            seed=_seed(body, payload),
            stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        )
    except (TypeError, ValueError) as error:
        return bad_request(str(error))


def _ids(url: str, body: dict[str, Any], encode: Any, encode_chat: Any) -> Sequence[int]:
    if url == COMPLETIONS:
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and type(prompt[0]) is not int:
            prompt = prompt[0]
        ids = encode(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(prompt, str | list) or not all(type(token) is int for token in ids):
            raise ValueError("the prompt must be text or token ids")
        return _filled(ids)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a non-empty list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError("each message must have a role and a text as its content")
        if not isinstance(message.get("role"), str):
            raise ValueError("each message must have a role")
    return _filled(encode_chat(messages))


def _filled(ids: Sequence[int]) -> list[int]:
    if not ids:
        raise ValueError("the prompt is empty")
    return list(ids)


def _max_tokens(url: str, body: dict[str, Any]) -> int:
    default = CHAT_TOKENS_DEFAULT if url == CHAT else COMPLETION_TOKENS_DEFAULT
    value = body.get("max_completion_tokens")
    if value is None:
        value = body.get("max_tokens")
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise ValueError("max_tokens must be a whole number of at least 1")
    return value


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}")
    return float(value)


def _seed(body: dict[str, Any], payload: bytes) -> int:
    seed = body.get("seed")
    if seed is None:
        return xxhash.xxh3_64_intdigest(payload) >> 1
    if type(seed) is not int:
        raise ValueError("seed must be a whole number")
    return seed & (2**63 - 1)


def answer(wanted: Wanted, text: str, tokens: int, cached_tokens: int, *, ended: bool) -> Result:
    """The response body of a request; `ended`: the model itself came to an end."""
    cuts = [place for stop in wanted.stop if stop and (place := text.find(stop)) >= 0]
    if cuts:
        text, ended = text[: min(cuts)], True
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop" if ended else "length",
    }
    digest = xxhash.xxh3_64_hexdigest(f"{wanted.ids}{wanted.seed}".encode())
    if wanted.url == CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        head = {"id": f"chatcmpl-{digest}", "object": "chat.completion"}
    else:
        choice["text"] = text
        head = {"id": f"cmpl-{digest}", "object": "text_completion"}
    usage = {
        "prompt_tokens": len(wanted.ids),
        "completion_tokens": tokens,
        "total_tokens": len(wanted.ids) + tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    body = {
        **head,
        "created": int(time.time()),
        "model": wanted.model,
        "choices": [choice],
        "usage": usage,
    }
    return Result.ok(json.dumps(body, separators=(",", ":")).encode())
