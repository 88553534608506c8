"""What a payload of run-batch asks for: one line of an OpenAI Batch file, read by its engine.

Decides whether a line can be sent or run at all, which endpoint it is for, and how many choices or
vectors its answer must hold. Never raises for what a payload holds: what cannot be served is a
`failed` result with the code `bad_request`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from zfabric.engine import Result

Url: TypeAlias = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
CHAT: Url = "/v1/chat/completions"
COMPLETIONS: Url = "/v1/completions"
EMBEDDINGS: Url = "/v1/embeddings"
URLS: tuple[Url, ...] = (CHAT, COMPLETIONS, EMBEDDINGS)
# Where the answers of an endpoint are in its response.
LIST_OF: dict[str, str] = {CHAT: "choices", COMPLETIONS: "choices", EMBEDDINGS: "data"}
CHOICES_MAX = 128


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its endpoint, its body, and the number of answers that it must get."""

    url: Url
    body: dict[str, Any]
    answers: int


def read_call(payload: bytes) -> Call | Result:
    """The request in `payload`, or why there is none."""
    try:
        line = json.loads(payload)
    except (ValueError, RecursionError) as error:
        return bad_request(f"the payload is not JSON: {error}")
    if not isinstance(line, dict) or not isinstance(line.get("body"), dict):
        return bad_request("the payload must be a batch request: custom_id, method, url, body")
    body: dict[str, Any] = line["body"]
    url = line.get("url")
    if url not in URLS:
        return bad_request(f"url must be one of {', '.join(URLS)}")
    if body.get("stream"):
        return bad_request("stream cannot be used in a batch: remove it")
    choices = body.get("n")
    if choices is None:
        choices = 1
    if type(choices) is not int or not 1 <= choices <= CHOICES_MAX:
        return bad_request(f"n must be a whole number from 1 to {CHOICES_MAX}")
    if url == CHAT:
        return Call(url, body, choices)
    prompts = count_of(body.get("prompt" if url == COMPLETIONS else "input"))
    if not prompts:
        return bad_request("prompt or input must be text, token ids, or a list of these")
    return Call(url, body, prompts * choices if url == COMPLETIONS else prompts)


def count_of(value: object) -> int:
    """Prompts in a prompt or input: text and token ids are one; 0 where it is none of these."""
    if isinstance(value, str):
        return 1
    if not isinstance(value, list) or not value:
        return 0
    return 1 if type(value[0]) is int else len(value)


def bad_request(text: str) -> Result:
    """The request is at fault: it is not tried again."""
    return Result.failed("bad_request", text[:1_000])
