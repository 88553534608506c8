"""Counting tokens: a tokenizer by its name, as a function from text to a number.

Decides what a name stands for: a tokenizer.json, or a directory that has one; a sentencepiece
model; `mistral:v1` to `mistral:tekken`, whose files mistral-common ships; or a tiktoken encoding,
which tiktoken may have to download once. Special tokens are not counted. Texts that come again,
as prefixes do, are counted once: `CACHE_ENTRIES_MAX` counts are kept, by a hash of the text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import xxhash

from zfabric.errors import ConfigError

CACHE_ENTRIES_MAX = 16_384
# A shorter text is counted faster than it is looked up.
CACHE_CHARS_MIN = 64
MISTRAL_FILES = {
    "mistral:v1": "tokenizer.model.v1",
    "mistral:v2": "mistral_instruct_tokenizer_240216.model.v2",
    "mistral:v3": "mistral_instruct_tokenizer_240323.model.v3",
    "mistral:v7": "mistral_instruct_tokenizer_241114.model.v7",
    "mistral:tekken": "tekken_240911.json",
}
EXTRA = "pip install 'zfabric[tokenizers]'"


def load_tokenizer(name: str) -> Callable[[str], int]:
    """A function that counts the tokens of a text. Raises ConfigError, naming what there is."""
    try:
        return Remembering(_load(name)).count
    except ImportError as error:
        raise ConfigError(f"tokenizer {name!r} needs {error.name}: {EXTRA}") from None


class Remembering:
    """Counts of texts, the ones that come again from memory."""

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._known: OrderedDict[int, int] = OrderedDict()

    def count(self, text: str) -> int:
        """Tokens of `text`. Half of a surrogate pair counts as a question mark."""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()
        if len(text) < CACHE_CHARS_MIN:
            return self._count(text)
        key = xxhash.xxh3_64_intdigest(text.encode())
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        tokens = self._known[key] = self._count(text)
        if len(self._known) > CACHE_ENTRIES_MAX:
            self._known.popitem(last=False)
        return tokens


def _load(name: str) -> Callable[[str], int]:
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        return _from_json(path) if path.suffix == ".json" else _from_sentencepiece(path)
    if name in MISTRAL_FILES:
        return _from_mistral(name)
    return _from_tiktoken(name)


def _from_json(path: Path) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        raise ConfigError(f"{path} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _from_sentencepiece(path: Path) -> Callable[[str], int]:
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path} is not a sentencepiece model: {error}") from None
    return lambda text: len(processor.encode(text))


def _from_mistral(name: str) -> Callable[[str], int]:
    path = Path(str(resources.files("mistral_common").joinpath("data", MISTRAL_FILES[name])))
    if path.suffix != ".json":
        return _from_sentencepiece(path)
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = Tekkenizer.from_file(path)
    return lambda text: len(tokenizer.encode(text, bos=False, eos=False))


def _from_tiktoken(name: str) -> Callable[[str], int]:
    try:
        import tiktoken

        known = tiktoken.list_encoding_names()
    except ImportError:
        known = []
    if name not in known:
        raise ConfigError(
            f"no tokenizer {name!r}: give a tokenizer.json, a sentencepiece model, or one of "
            f"{', '.join([*MISTRAL_FILES, *known])}"
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # noqa: BLE001 - whatever the download raises
        raise ConfigError(
            f"tiktoken could not get {name} ({type(error).__name__}); download it once where there "
            "is a network, and set TIKTOKEN_CACHE_DIR"
        ) from None
    return lambda text: len(encoding.encode_ordinary(text))
