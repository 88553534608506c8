"""Shapes: what a producer declares about a prompt, and the four integers a consumer registers.

A component is a cacheable part of a prompt (system prompt, few-shot block, tool schema), known to
the fabric only by its 64-bit hash and, where the producer knows it, its length in tokens. The
signature reduces the ordered components to one number; (model, signature) is the key of
everything in the broker. Nothing here, or behind it, reads a prompt.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from zfabric.errors import ConfigError

# A chain deeper than this is no prefix that a cache could share; it also bounds SHAPE frames.
COMPONENTS_MAX = 64
# Names become metric labels, event fields and (encoded) directory names.
NAME_BYTES_MAX = 255
# Enough of an example to tell one shape from another; it travels once a shape and connection.
LABEL_BYTES_MAX = 160
# A pad-to is a multiple of this: tensor cores want it, and so did the original system.
PAD_MULTIPLE_TOKENS = 8
# Lengths travel and rest as unsigned 32-bit integers; a pad-to, which is a multiple of 8, must too.
TOKENS_MAX = 2**31 - PAD_MULTIPLE_TOKENS
BATCH_ITEMS_MAX = 65_536


def round_up_tokens(length_tokens: int) -> int:
    """The least multiple of `PAD_MULTIPLE_TOKENS` that is at least `length_tokens`."""
    return -(-length_tokens // PAD_MULTIPLE_TOKENS) * PAD_MULTIPLE_TOKENS


def component_hash(part: str | bytes) -> int:
    """xxh3_64 of a component's bytes (UTF-8 for text), as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(part.encode() if isinstance(part, str) else part)


def signature_of(hashes: Iterable[int]) -> int:
    """xxh3_64 of the component hashes as little-endian unsigned 64-bit words, in order."""
    words = tuple(hashes)
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(words)}Q", *words))


def check_name(name: str, what: str) -> str:
    """Return `name` if it is 1 to 255 bytes of UTF-8 without control characters.

    Raises ConfigError, naming `what`, otherwise.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} must be a non-empty string")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not valid UTF-8") from None
    if size > NAME_BYTES_MAX:
        raise ConfigError(f"{what} is {size} bytes long; at most {NAME_BYTES_MAX} are allowed")
    if not name.isprintable():
        raise ConfigError(f"{what} holds control characters")
    return name


def _shown(label: str) -> str:
    """`label` as it may travel and be shown: one line, printable, of bounded length."""
    line = "".join(c if c.isprintable() else " " for c in label)
    return line.encode("utf-8", "replace")[:LABEL_BYTES_MAX].decode("utf-8", "ignore")


@dataclass(frozen=True, slots=True)
class Shape:
    """(model, ordered component hashes): what a cache can share between items.

    `tokens` gives each component's length in tokens where it is known, else None; it never
    takes part in the signature. `label` shows the shape to people by an example of it; it is cut
    to `LABEL_BYTES_MAX` and takes part in nothing.
    """

    model: str
    components: tuple[int, ...] = ()
    tokens: tuple[int | None, ...] = ()
    label: str = field(default="", compare=False)
    # The 64-bit routing signature (see `signature_of`).
    signature: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.model, "model name")
        for name in ("components", "tokens"):
            # A list would do, but for the day when the shape is looked up.
            if type(value := getattr(self, name)) is not tuple:
                object.__setattr__(self, name, tuple(value))
        if len(self.components) > COMPONENTS_MAX:
            raise ConfigError(
                f"a shape has at most {COMPONENTS_MAX} components, not {len(self.components)}"
            )
        if self.tokens and len(self.tokens) != len(self.components):
            raise ConfigError("a shape needs one token count for each component, or none at all")
        if not all(t is None or (type(t) is int and 0 <= t < 2**31) for t in self.tokens):
            raise ConfigError("a token count of a shape is 0 to 2**31 - 1, or None")
        if self.label:
            object.__setattr__(self, "label", _shown(self.label))
        try:
            signature = signature_of(self.components)
        except struct.error:
            raise ConfigError("a component hash is an unsigned 64-bit integer") from None
        object.__setattr__(self, "signature", signature)

    @classmethod
    def of(
        cls, model: str, *parts: str | bytes, tokens: Iterable[int | None] | None = None
    ) -> Shape:
        """The shape of `parts`, in order. `tokens` gives their lengths in tokens, if known."""
        return cls(model, tuple(map(component_hash, parts)), tuple(tokens or ()))

    @property
    def prefix_tokens(self) -> int | None:
        """Tokens of all components together, or None if any is unknown."""
        if len(self.tokens) != len(self.components):
            return None
        known = [t for t in self.tokens if t is not None]
        return sum(known) if len(known) == len(self.tokens) else None


@dataclass(frozen=True, slots=True)
class Contract:
    """What a consumer can take: (batch items, batch tokens, input tokens), and whether it pads."""

    batch_items_max: int
    batch_tokens_max: int
    input_tokens_max: int
    ragged: bool = False

    def __post_init__(self) -> None:
        for name, ceiling in (
            ("batch_items_max", BATCH_ITEMS_MAX),
            ("batch_tokens_max", TOKENS_MAX),
            ("input_tokens_max", TOKENS_MAX),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} must be an integer, not {type(value).__name__}")
            if not 1 <= value <= ceiling:
                raise ConfigError(f"{name} must be between 1 and {ceiling}, not {value}")
        if not isinstance(self.ragged, bool):
            raise ConfigError("ragged must be true or false")
        if self.batch_tokens_max < round_up_tokens(self.input_tokens_max):
            raise ConfigError(
                f"batch_tokens_max {self.batch_tokens_max} cannot hold one item of "
                f"input_tokens_max {self.input_tokens_max} (padded to "
                f"{round_up_tokens(self.input_tokens_max)})"
            )
