"""Requests of an OpenAI Batch file: each line becomes one `Request` or one `BadLine`.

The shape of a request is its whole chain here (see `chains`), a candidate that `discovery` cuts to
what others share; unless the line declares it: `"shape": ["qa-v3", "tools-2"]`, names or texts of
what is shared, in order. Payloads are the line's bytes as they are, so that a worker gets what the
user wrote; only a model override makes new bytes. Lengths are tokens. Nothing here raises for what
a line holds, and memory is one line: the custom_ids seen are digests on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from zfabric.batchfile.chains import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Count,
    Reject,
    estimate_tokens,
    measure,
    reject,
)
from zfabric.batchfile.digests import DigestSet
from zfabric.batchfile.lines import LINE_BYTES_MAX, bounded_lines, compact_json, parse_json
from zfabric.errors import ConfigError
from zfabric.shapes import COMPONENTS_MAX, Shape, check_name

BOM = b"\xef\xbb\xbf"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS)
# Characters of a prompt that stand for it where people look.
EXCERPT_CHARS = 60


@dataclass(frozen=True, slots=True)
class Request:
    """A line that can be submitted. `length_tokens` is of the whole input.

    `declared` says that the line itself names its shape. `excerpt` is how its prompt begins.
    """

    line_number: int
    custom_id: str
    method: str
    url: str
    payload: bytes
    shape: Shape
    length_tokens: int
    declared: bool = False
    excerpt: str = ""

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


def read_requests(
    stream: BinaryIO,
    *,
    model: str | None = None,
    line_bytes_max: int = LINE_BYTES_MAX,
    count: Count = estimate_tokens,
    directory: Path | None = None,
) -> Iterator[Request | BadLine]:
    """One `Request` or `BadLine` for each line of `stream` that is not blank, in order.

    `model` replaces the model of every request. `line_bytes_max` bounds a line, its ending not
    counted. `count` gives the tokens of a text. Duplicate custom_ids are found by digest, kept in a
    file in `directory` (see `DigestSet`); the first one counts. Raises ConfigError if `model` is no
    valid name, StorageError if that file cannot be written, and OSError if the stream cannot be
    read.
    """
    if model is not None:
        check_name(model, "model name")
    seen = DigestSet(directory)
    for number, line, size in bounded_lines(stream, line_bytes_max):
        if line is None:
            text = f"line of {size} bytes; at most {line_bytes_max} are allowed: shorten the input"
            yield BadLine(number, None, "line_too_long", text)
            continue
        payload = line.rstrip(b"\r\n")
        if number == 1:
            payload = payload.removeprefix(BOM)
        if payload.strip():
            yield _parse(number, payload, model, seen, count)


def _parse(
    number: int, payload: bytes, model: str | None, seen: DigestSet, count: Count
) -> Request | BadLine:
    custom_id: str | None = None
    try:
        row = _object(payload)
        custom_id = _custom_id(row)
        if not seen.add(custom_id):
            reject("duplicate_custom_id", "custom_id is used by an earlier line: make it unique")
        url = _endpoint(row)
        body = row["body"]
        name = _model(body) if model is None else model
        chain = measure(url, body, count)
        declared = _declared(row)
        if body.get("model") != name:
            payload = _with_model(row, name)
    except Reject as wrong:
        return BadLine(number, custom_id, wrong.code, wrong.reason)
    except RecursionError:
        return BadLine(number, custom_id, "bad_json", "nested too deeply: flatten the request")
    shape = Shape(name, chain.hashes, chain.tokens)
    if declared:
        shape = Shape.of(name, *declared)
    return Request(
        number,
        custom_id,
        "POST",
        url,
        payload,
        shape,
        chain.length_tokens,
        bool(declared),
        " ".join(chain.head[:EXCERPT_CHARS].split()),
    )


def _declared(row: dict[str, Any]) -> list[str]:
    """What the line says that it shares; empty where it says nothing."""
    parts = row.get("shape")
    if parts is None:
        return []
    parts = [parts] if isinstance(parts, str) else parts
    if (
        not isinstance(parts, list)
        or not 1 <= len(parts) <= COMPONENTS_MAX
        or not all(isinstance(part, str) and part and _is_text(part) for part in parts)
    ):
        reject("bad_shape", f"shape must be a text, or a list of 1 to {COMPONENTS_MAX} texts")
    return parts


def _object(payload: bytes) -> dict[str, Any]:
    try:
        row = parse_json(payload)
    except UnicodeDecodeError as error:
        reject("bad_utf8", f"not UTF-8 at byte {error.start}: save the file as UTF-8")
    except ValueError as error:
        reject("bad_json", f"not JSON ({error}): write one complete object a line")
    if not isinstance(row, dict):
        reject("not_object", f"a {type(row).__name__}, not an object: write {{...}} on each line")
    return row


def _custom_id(row: dict[str, Any]) -> str:
    custom_id = row.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        reject("bad_custom_id", "custom_id must be a non-empty string: give each line its own")
    if not _is_text(custom_id):
        reject("bad_custom_id", "custom_id holds half of a surrogate pair: use plain text")
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
        reject("bad_method", f'method is {_shown(row.get("method"))}: it must be "POST"')
    url = row.get("url")
    if not isinstance(url, str) or url not in URLS:
        reject("bad_url", f"url is {_shown(url)}: use one of {', '.join(URLS)}")
    if not isinstance(row.get("body"), dict):
        reject("bad_body", "body must be an object that holds the request")
    return url


def _shown(value: object) -> str:
    """`value` for an error text, cut to a readable length."""
    return "missing" if value is None else ascii(value)[:80]


def _model(body: dict[str, Any]) -> str:
    name = body.get("model")
    if name is None:
        reject("missing_model", "body has no model: name one, or pass --model")
    try:
        return check_name(name, "body.model")
    except ConfigError as error:
        reject("bad_model", f"{error}: correct it, or pass --model")


def _with_model(row: dict[str, Any], model: str) -> bytes:
    """The request as new bytes with `model` in its body."""
    try:
        return compact_json(row | {"body": row["body"] | {"model": model}})
    except ValueError as error:
        reject("bad_json", f"cannot be written with another model ({error}): correct the line")
