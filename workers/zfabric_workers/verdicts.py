"""What a server's answer means for an item: done, the request's fault, or the server's.

    2xx, well-formed                 the item's result
    400, 404, 413, 422 and the like  the request's fault: too_long, refused or bad_request, final
    408, 500, HTML, torn JSON,
    too few or too many choices      `fault`: the server's; tried again here, then elsewhere
    429                              `busy`: tried again when it says
    401, 402, 404 without JSON,
    502-504                          `away`: nothing is charged, the worker pauses
    404 of a web framework, which
    knows no such path               `unrouted`: the request's fault or the address's
    "out of memory"                  `memory`

Pure: bytes and numbers in, a verdict out. Counts are tokens, times seconds. A server may echo what
it was sent: what is said of its answer passes `hide` before it is cut, for half a key is one too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from zfabric.engine import Result
from zfabric_workers.requestlines import EMBEDDINGS, LIST_OF, Call

TroubleKind: TypeAlias = Literal[
    "busy", "fault", "away", "memory", "lost", "hung", "died", "unrouted"
]
TEXT_CHARS_MAX = 500
EXCERPT_CHARS = 200
# Looked through for an excerpt: much more than that, so that a key at its end is in there whole.
EXCERPT_BYTES_MAX = 64 * 1024
RETRY_AFTER_S_MAX = 120.0
_TOO_LONG_CODES = (
    "context_length_exceeded",
    "exceed_context_size_error",
    "string_above_max_length",
)
_TOO_LONG = re.compile(
    r"(maximum|max|available)\s+(model|context|sequence)\s+(length|size|len)"
    r"|context (length|window|size) (is|of|exceeded)|exceeds? the (available )?context"
    r"|longer than the maximum (model|context) length|input (is )?too long",
    re.IGNORECASE,
)
# What frameworks say of a path that they do not know: FastAPI (vLLM, SGLang), llama.cpp, OpenAI.
_NO_PATH = re.compile(r"(file )?not found|method not allowed|invalid url\b.*", re.IGNORECASE)
_REFUSED_CODES = ("content_filter", "content_policy_violation", "responsible_ai_policy_violation")
_NO_CREDIT_CODES = ("insufficient_quota", "billing_hard_limit_reached")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer as the server tells them; None is not told."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The item has its result."""

    result: Result
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class Trouble:
    """The item has no result yet, and the request is not to blame."""

    kind: TroubleKind
    text: str
    retry_after_s: float | None = None


Verdict: TypeAlias = Finished | Trouble
# A text without what nobody may read.
Hide: TypeAlias = Callable[[str], str]


def _as_it_is(text: str) -> str:
    return text


def judge(
    call: Call,
    status: int,
    body: bytes,
    retry_after: str | None = None,
    hide: Hide = _as_it_is,
) -> Verdict:
    """What `status` and `body` mean for `call`. A good answer is passed on as it is."""
    value = _json(body)
    if 200 <= status < 300:
        return _answer(call, value, body, hide)
    code, kind, message = _error(value)
    told = hide(message)
    text = f"HTTP {status}: {told[:TEXT_CHARS_MAX] or _excerpt(body, hide)}"
    if status == 429:
        if code in _NO_CREDIT_CODES:
            return Trouble("away", text)
        return Trouble("busy", text, _seconds(retry_after))
    if status >= 500 and status != 501 and "out of memory" in message.lower():
        return Trouble("memory", text)
    if status in (502, 503, 504):
        return Trouble("away", text, _seconds(retry_after))
    if 300 <= status < 400:
        return Trouble("away", f"the server points elsewhere: {text}; look at --url")
    if status == 408 or not 400 <= status <= 501 or status == 500:
        return Trouble("fault", text)
    if code in _REFUSED_CODES or kind in _REFUSED_CODES:
        return Finished(Result.failed("refused", told[:TEXT_CHARS_MAX]))
    if status == 402:
        return Trouble("away", f"the server wants to be paid: {text}")
    if status in (401, 403, 407):
        return Trouble("away", f"the server refuses the API key: {text}")
    if status in (404, 405) and not message:
        return Trouble("away", f"the server has no {call.url}: {text}; look at --url")
    if status in (404, 405) and _NO_PATH.fullmatch(message.strip(" .")):
        return Trouble("unrouted", f"the server has no {call.url}: {text}; look at --url")
    if code in _TOO_LONG_CODES or kind in _TOO_LONG_CODES or _TOO_LONG.search(message):
        return Finished(Result.too_long())
    return Finished(Result.failed("bad_request", text[:TEXT_CHARS_MAX]))


def _answer(call: Call, value: Any, body: bytes, hide: Hide) -> Verdict:
    wanted = LIST_OF[call.url]
    if not isinstance(value, dict):
        return Trouble("fault", f"the answer is not a JSON object: {_excerpt(body, hide)}")
    answers = value.get(wanted)
    if not isinstance(answers, list):
        return Trouble("fault", f"the answer has no list {wanted!r}: {_excerpt(body, hide)}")
    if len(answers) != call.answers:
        return Trouble(
            "fault", f"the answer has {len(answers)} {wanted}, and {call.answers} were asked for"
        )
    usage = _usage(value.get("usage"))
    if call.url == EMBEDDINGS:
        # Vectors come from whole prompts: no prefix is looked up for them.
        usage = Usage(usage.prompt_tokens, None, None)
    return Finished(Result.ok(body), usage)


def _usage(usage: Any) -> Usage:
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        _count(usage.get("prompt_tokens")), _count(cached), _count(usage.get("completion_tokens"))
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _error(value: Any) -> tuple[str, str, str]:
    """(code, type, message) of an error body; empty where it says nothing of the kind."""
    if not isinstance(value, dict):
        return "", "", ""
    error = value.get("error", value)
    if isinstance(error, str):
        return "", "", error
    if not isinstance(error, dict):
        return "", "", ""
    message = error.get("message") or error.get("detail") or ""
    if not isinstance(message, str):
        message = json.dumps(message)
    return str(error.get("code") or ""), str(error.get("type") or ""), message


def _excerpt(body: bytes, hide: Hide) -> str:
    text = " ".join(hide(body[:EXCERPT_BYTES_MAX].decode("utf-8", "replace")).split())
    return repr(text[:EXCERPT_CHARS]) if text else "an empty body"


def _seconds(text: str | None) -> float | None:
    """Retry-After in seconds, bounded; a date or nonsense is None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return min(value, RETRY_AFTER_S_MAX) if 0 <= value < 1e9 else None
