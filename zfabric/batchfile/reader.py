"""Requests of an OpenAI Batch file: each line becomes one `Request` or one `BadLine`.

The shape of a chat request is its leading messages (all but the last), with its tools, if any, in
front; a plain completion or an embedding has the model alone. Payloads are the line's bytes as
they are, so that a worker gets what the user wrote; only a model override makes new bytes.
Lengths are tokens, estimated without a tokenizer (`estimate_tokens`). Nothing here raises for what
a line holds, and memory is one line plus the digests of the custom_ids seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from zfabric.batchfile.digests import DigestSet
from zfabric.batchfile.lines import LINE_BYTES_MAX, bounded_lines, compact_json, parse_json
from zfabric.errors import ConfigError
from zfabric.shapes import COMPONENTS_MAX, Shape, check_name

BOM = b"\xef\xbb\xbf"
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS)
# English text runs near four UTF-8 bytes a token in current vocabularies.
BYTES_PER_TOKEN = 4
# Role and separators that a chat template puts around each message.
MESSAGE_OVERHEAD_TOKENS = 4
# An image or sound is not text: its base64 says nothing of its tokens. One low-detail tile.
OTHER_PART_TOKENS = 85


@dataclass(frozen=True, slots=True)
class Request:
    """A line that can be submitted. `length_tokens` is an estimate of the whole input."""

    line_number: int
    custom_id: str
    method: str
    url: str
    payload: bytes
    shape: Shape
    length_tokens: int

    @property
    def model(self) -> str:
        """The model that must run it: the override, or what the body names."""
        return self.shape.model


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be submitted. `code` is stable; `reason` names the fix."""

    line_number: int
    custom_id: str | None
    code: str
    reason: str


class _Reject(Exception):
    """Ends the reading of one line; becomes its `BadLine`."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


def read_requests(
    stream: BinaryIO, *, model: str | None = None, line_bytes_max: int = LINE_BYTES_MAX
) -> Iterator[Request | BadLine]:
    """One `Request` or `BadLine` for each line of `stream` that is not blank, in order.

    `model` replaces the model of every request. `line_bytes_max` bounds a line, its ending not
    counted. Duplicate custom_ids are found by digest (see `DigestSet`); the first one counts.
    Raises ConfigError if `model` is no valid name, and OSError if the stream cannot be read.
    """
    if model is not None:
        check_name(model, "model name")
    seen = DigestSet()
    for number, line, size in bounded_lines(stream, line_bytes_max):
        if line is None:
            text = f"line of {size} bytes; at most {line_bytes_max} are allowed: shorten the input"
            yield BadLine(number, None, "line_too_long", text)
            continue
        payload = line.rstrip(b"\r\n")
        if number == 1:
            payload = payload.removeprefix(BOM)
        if payload.strip():
            yield _parse(number, payload, model, seen)


def estimate_tokens(text: str) -> int:
    """An estimate of the tokens of `text`: its UTF-8 bytes / 4, rounded up. No tokenizer."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def _parse(number: int, payload: bytes, model: str | None, seen: DigestSet) -> Request | BadLine:
    custom_id: str | None = None
    try:
        row = _object(payload)
        custom_id = _custom_id(row)
        if not seen.add(custom_id):
            _reject("duplicate_custom_id", "custom_id is used by an earlier line: make it unique")
        url = _endpoint(row)
        body = row["body"]
        name = _model(body) if model is None else model
        components, tokens, length_tokens = _measure(url, body)
        if body.get("model") != name:
            payload = _with_model(row, name)
    except _Reject as wrong:
        return BadLine(number, custom_id, wrong.code, wrong.reason)
    except RecursionError:
        return BadLine(number, custom_id, "bad_json", "nested too deeply: flatten the request")
    shape = Shape.of(name, *components, tokens=tokens)
    return Request(number, custom_id, "POST", url, payload, shape, length_tokens)


def _reject(code: str, reason: str) -> NoReturn:
    raise _Reject(code, reason)


def _object(payload: bytes) -> dict[str, Any]:
    try:
        row = parse_json(payload)
    except UnicodeDecodeError as error:
        _reject("bad_utf8", f"not UTF-8 at byte {error.start}: save the file as UTF-8")
    except ValueError as error:
        _reject("bad_json", f"not JSON ({error}): write one complete object a line")
    if not isinstance(row, dict):
        _reject("not_object", f"a {type(row).__name__}, not an object: write {{...}} on each line")
    return row


def _custom_id(row: dict[str, Any]) -> str:
    custom_id = row.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        _reject("bad_custom_id", "custom_id must be a non-empty string: give each line its own")
    if not _is_text(custom_id):
        _reject("bad_custom_id", "custom_id holds half of a surrogate pair: use plain text")
    return custom_id


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _endpoint(row: dict[str, Any]) -> str:
    """The url, once method, url and body are sound."""
    if row.get("method") != "POST":
        _reject("bad_method", f'method is {_shown(row.get("method"))}: it must be "POST"')
    url = row.get("url")
    if not isinstance(url, str) or url not in URLS:
        _reject("bad_url", f"url is {_shown(url)}: use one of {', '.join(URLS)}")
    if not isinstance(row.get("body"), dict):
        _reject("bad_body", "body must be an object that holds the request")
    return url


def _shown(value: object) -> str:
    """`value` for an error text, cut to a readable length."""
    return "missing" if value is None else ascii(value)[:80]


def _model(body: dict[str, Any]) -> str:
    name = body.get("model")
    if name is None:
        _reject("missing_model", "body has no model: name one, or pass --model")
    try:
        return check_name(name, "body.model")
    except ConfigError as error:
        _reject("bad_model", f"{error}: correct it, or pass --model")


def _measure(url: str, body: dict[str, Any]) -> tuple[list[bytes], list[int], int]:
    """(components, tokens of each, tokens of the whole input)."""
    if url == CHAT:
        return _measure_chat(body)
    field, code = ("prompt", "bad_prompt") if url == COMPLETIONS else ("input", "bad_input")
    return [], [], _prompt_tokens(body.get(field), field, code)


def _measure_chat(body: dict[str, Any]) -> tuple[list[bytes], list[int], int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        _reject("bad_messages", "body.messages must be a list with at least one message")
    tokens = [_message_tokens(message) for message in messages]
    components = list(map(_canonical, messages[: min(len(messages) - 1, COMPONENTS_MAX)]))
    length_tokens = sum(tokens)
    if tools := body.get("tools"):
        components.insert(0, _canonical(tools))
        tokens.insert(0, estimate_tokens(components[0].decode()))
        length_tokens += tokens[0]
    components = components[:COMPONENTS_MAX]
    return components, tokens[: len(components)], length_tokens


def _canonical(value: object) -> bytes:
    """One spelling for equal JSON values: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _message_tokens(message: object) -> int:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        _reject("bad_messages", "each message must be an object with a role and a content")
    content = message.get("content")
    if isinstance(content, str):
        tokens = estimate_tokens(content)
    elif isinstance(content, list):
        tokens = sum(map(_part_tokens, content))
    elif content is None:
        tokens = 0
    else:
        _reject("bad_messages", "a message's content must be text, a list of parts or null")
    if calls := message.get("tool_calls"):
        tokens += estimate_tokens(_canonical(calls).decode())
    return MESSAGE_OVERHEAD_TOKENS + tokens


def _part_tokens(part: object) -> int:
    if not isinstance(part, dict):
        _reject("bad_messages", "each part of a message's content must be an object with a type")
    text = part.get("text")
    return estimate_tokens(text) if isinstance(text, str) else OTHER_PART_TOKENS


def _prompt_tokens(value: object, field: str, code: str) -> int:
    """Tokens of text, of a list of token ids, or of a list of either."""
    wrong = f"body.{field} must be text, a list of token ids, or a list of these"
    if value is None:
        _reject(code, f"body has no {field}: {wrong}")
    prompts = value if isinstance(value, list) else [value]
    if prompts and all(type(token) is int for token in prompts):
        return len(prompts)
    tokens = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens += estimate_tokens(prompt)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            tokens += len(prompt)
        else:
            _reject(code, wrong)
    return tokens if prompts else _reject(code, wrong)


def _with_model(row: dict[str, Any], model: str) -> bytes:
    """The request as new bytes with `model` in its body."""
    try:
        return compact_json(row | {"body": row["body"] | {"model": model}})
    except ValueError as error:
        _reject("bad_json", f"cannot be written with another model ({error}): correct the line")
