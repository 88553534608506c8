"""What of a request others may share, piece by piece, and how long it is.

Decides the chain of a request: its tools, each message but the last, then the last one's text in
blocks; a plain prompt is blocks alone; an embedding has none, since no engine keeps prefixes for
it. The chain is what a prefix cache sees from the front; `discovery` decides how far down it the
request's shape goes. Hashes are xxh3_64, lengths tokens as `Count` gives them for a text.

Never raises anything but `Reject` for what a request holds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from zfabric.shapes import COMPONENTS_MAX, component_hash

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
# A shared text that ends inside a block loses what is left of it, half of this on average; smaller
# blocks make chains longer, and 64 of these see 16 KiB of a prompt.
BLOCK_CHARS = 256
# The same for a prompt of token ids, at four characters a token.
BLOCK_IDS = 64
# English text runs near four UTF-8 bytes a token in current vocabularies.
BYTES_PER_TOKEN = 4
# Role and separators that a chat template puts around each message.
MESSAGE_OVERHEAD_TOKENS = 4
# An image or sound is not text: its base64 says nothing of its tokens. One low-detail tile.
OTHER_PART_TOKENS = 85

Count: TypeAlias = Callable[[str], int]


class Reject(Exception):
    """Ends the reading of one line; becomes its `BadLine`."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Chain:
    """Hash and tokens of each piece from the front, tokens of the whole, and how it begins."""

    hashes: tuple[int, ...]
    tokens: tuple[int, ...]
    length_tokens: int
    head: str


def reject(code: str, reason: str) -> NoReturn:
    """The line cannot be submitted."""
    raise Reject(code, reason)


def estimate_tokens(text: str) -> int:
    """An estimate of the tokens of `text`: its UTF-8 bytes / 4, rounded up. No tokenizer."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def measure(url: str, body: dict[str, Any], count: Count) -> Chain:
    """The chain of a request's body. Raises Reject."""
    pieces = _Pieces(count)
    if url == CHAT:
        _chat(body, pieces)
    elif url == COMPLETIONS:
        _prompt(body.get("prompt"), pieces)
    else:
        _embedding(body.get("input"), pieces)
    hashes, tokens = pieces.hashes[:COMPONENTS_MAX], pieces.tokens[:COMPONENTS_MAX]
    return Chain(tuple(hashes), tuple(tokens), pieces.length_tokens, pieces.head)


class _Pieces:
    """A chain while it grows."""

    def __init__(self, count: Count) -> None:
        self.count = count
        self.hashes: list[int] = []
        self.tokens: list[int] = []
        self.length_tokens = 0
        self.head = ""

    def add(self, text: bytes, tokens: int) -> None:
        """One piece that can be shared as a whole."""
        self.hashes.append(component_hash(text))
        self.tokens.append(tokens)
        self.length_tokens += tokens

    def text(self, text: str, role: str = "") -> None:
        """A text that can be shared up to any block of it."""
        self.head = self.head or text
        start = 0
        label = role
        while start + BLOCK_CHARS <= len(text) and len(self.hashes) < COMPONENTS_MAX:
            block = text[start : start + BLOCK_CHARS]
            self.add(f"{label}\0{block}".encode("utf-8", "surrogatepass"), self.count(block))
            start += BLOCK_CHARS
            label = ""
        if start < len(text):
            self.length_tokens += self.count(text[start:])

    def ids(self, ids: list[int]) -> None:
        """Token ids, likewise."""
        for start in range(0, len(ids) - BLOCK_IDS + 1, BLOCK_IDS):
            if len(self.hashes) == COMPONENTS_MAX:
                break
            block = [each & (2**64 - 1) for each in ids[start : start + BLOCK_IDS]]
            self.hashes.append(component_hash(struct.pack(f"<{BLOCK_IDS}Q", *block)))
            self.tokens.append(BLOCK_IDS)
        self.length_tokens += len(ids)


def _chat(body: dict[str, Any], pieces: _Pieces) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        reject("bad_messages", "body.messages must be a list with at least one message")
    if tools := body.get("tools"):
        spelled = _canonical(tools)
        pieces.add(spelled, pieces.count(spelled.decode()))
    for message in messages[:-1]:
        tokens = _message_tokens(message, pieces)
        pieces.add(_canonical(message), tokens)
    last = messages[-1]
    content, role = _content(last), str(last["role"])
    if isinstance(content, str):
        pieces.text(content, role)
        pieces.length_tokens += MESSAGE_OVERHEAD_TOKENS + _calls_tokens(last, pieces)
    else:
        pieces.length_tokens += _message_tokens(last, pieces)


def _canonical(value: object) -> bytes:
    """One spelling for equal JSON values: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _content(message: object) -> str | list[Any] | None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        reject("bad_messages", "each message must be an object with a role and a content")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        reject("bad_messages", "a message's content must be text, a list of parts or null")
    return content


def _message_tokens(message: Any, pieces: _Pieces) -> int:
    tokens = MESSAGE_OVERHEAD_TOKENS
    for text in _texts(_content(message)):
        pieces.head = pieces.head or text or ""
        tokens += OTHER_PART_TOKENS if text is None else pieces.count(text)
    return tokens + _calls_tokens(message, pieces)


def _texts(content: str | list[Any] | None) -> Iterator[str | None]:
    """The texts of a message; None for each part that is something else."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            reject("bad_messages", "each part of a message's content must be an object with a type")
        text = part.get("text")
        yield text if isinstance(text, str) else None


def _calls_tokens(message: dict[str, Any], pieces: _Pieces) -> int:
    calls = message.get("tool_calls")
    return pieces.count(_canonical(calls).decode()) if calls else 0


def _prompt(value: object, pieces: _Pieces) -> None:
    prompts = _prompts(value, "prompt", "bad_prompt")
    for prompt in prompts:
        if isinstance(prompt, str):
            pieces.text(prompt)
        else:
            pieces.ids(prompt)
    if len(prompts) > 1:
        # Several prompts in one request: they run apart, so what they share is not one prefix.
        pieces.hashes, pieces.tokens = [], []


def _embedding(value: object, pieces: _Pieces) -> None:
    for text in _prompts(value, "input", "bad_input"):
        if isinstance(text, str):
            pieces.head = pieces.head or text
            pieces.length_tokens += pieces.count(text)
        else:
            pieces.length_tokens += len(text)


def _prompts(value: object, field: str, code: str) -> list[str | list[int]]:
    """One text or list of token ids, or a list of these."""
    wrong = f"body.{field} must be text, a list of token ids, or a list of these"
    if value is None:
        reject(code, f"body has no {field}: {wrong}")
    prompts: list[Any] = value if isinstance(value, list) else [value]
    if prompts and all(type(token) is int for token in prompts):
        return [prompts]
    for prompt in prompts:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(type(token) is int for token in prompt)
        ):
            reject(code, wrong)
    return prompts if prompts else reject(code, wrong)
