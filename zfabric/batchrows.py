"""Rows of a batch output that are not simply what an engine said.

What an item becomes that was too long to run, how many tokens a response says it made, and how the
row of a failure gives way to the result of a retry. Bodies are those of the OpenAI API.
"""

from __future__ import annotations

import re
import time
from collections.abc import Set
from typing import Any, NamedTuple

from zfabric.batchfile import BatchOutput
from zfabric.batchfile.chains import CHAT, EMBEDDINGS
from zfabric.batchfile.lines import compact_json

# An unescaped quote on both sides: text that a model wrote cannot look like this.
_COUNTS = {
    name: re.compile(rb'"%s"\s*:\s*(\d{1,12})' % name)
    for name in (b"prompt_tokens", b"completion_tokens")
}


class OpenLine(NamedTuple):
    """A line without a row: what its row will need, and its length before any correction."""

    custom_id: str
    url: str
    model: str
    length_tokens: int


def usage_of(body: bytes) -> tuple[int | None, int | None]:
    """(prompt tokens, generated tokens) as a response tells them; None where it says nothing."""
    return _count(body, b"prompt_tokens"), _count(body, b"completion_tokens")


def _count(body: bytes, name: bytes) -> int | None:
    start = body.rfind(b'"%s"' % name)
    found = _COUNTS[name].match(body, start) if start >= 0 else None
    return int(found[1]) if found else None


def too_long_body(url: str, model: str, name: str) -> bytes:
    """The empty completion of an item over the contract: it did not run, so it used no tokens."""
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    marked: dict[str, Any] = {"model": model, "zfabric": {"too_long": True}}
    if url == EMBEDDINGS:
        return compact_json({"object": "list", "data": [], "usage": usage, **marked})
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    if url == CHAT:
        kind, prefix = "chat.completion", "chatcmpl"
        choice["message"] = {"role": "assistant", "content": "", "refusal": None}
    else:
        kind, prefix = "text_completion", "cmpl"
        choice["text"] = ""
    return compact_json(
        {
            "id": f"{prefix}-{name}",
            "object": kind,
            "created": int(time.time()),
            "choices": [choice],
            "usage": {**usage, "completion_tokens": 0},
            **marked,
        }
    )


def drop_failures(output: BatchOutput, custom_ids: Set[str]) -> None:
    """Remove the failures of `custom_ids`, which have results by now, from the errors file."""
    output.sync()
    output._errors.rewrite(lambda row: "line" in row or row["custom_id"] not in custom_ids)
