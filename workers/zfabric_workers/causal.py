"""The engine `transformers`: a causal model from a local directory, in padded batches.

Decides how a batch is computed: prompts are padded on the left to one width; where all of a batch
are of one shape, the tokens that they share are computed once, kept for that shape, and not
computed again for its next batches (see `prefixkv`). Attention masks hide the padding and position
ids count real tokens only, so a prompt's answer does not depend on its neighbours. Lengths are
tokens; hits are counted here. Prompts longer than the model end as too_long.

Never downloads: `model_path` is a directory, and code that comes with a model is not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zfabric.engine import Batch, CacheStats, OutOfMemory, Result
from zfabric.errors import ConfigError
from zfabric_workers import check_options, need_packages, option, parse_options
from zfabric_workers.prefixkv import PREFIX_TOKENS_MIN, Prefix, PrefixStore, shared_tokens
from zfabric_workers.requestlines import bad_request
from zfabric_workers.textgen import Wanted, answer, read_wanted
from zfabric_workers.torchdevice import check_device, choose_device, packages

# A lower temperature only ever draws the best token, or divides beyond what a float holds.
TEMPERATURE_MIN = 1e-6
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(kw_only=True, eq=False)
class CausalEngine:
    """A causal model. Raises ConfigError for options that cannot be used."""

    model_path: str = option("", "directory of the model and its tokenizer (needed)")
    device: str = option("auto", "where it runs: auto, cpu or cuda")
    dtype: str = option("auto", "precision: auto, float32, bfloat16 or float16")
    threads: int = option(0, "processor threads; 0 leaves it to torch", minimum=0)
    prefix_tokens: int = option(
        65_536, "tokens of prefixes whose keys and values are kept; 0 keeps none", minimum=0
    )

    _torch: Any = field(init=False, repr=False, default=None)
    _model: Any = field(init=False, repr=False, default=None)
    _tokenizer: Any = field(init=False, repr=False, default=None)
    _prefixes: PrefixStore = field(init=False, repr=False)
    _cache_name: str = field(init=False, repr=False, default="past_key_values")
    _cache_class: Any = field(init=False, repr=False, default=None)
    _input_tokens_max: int = field(init=False, repr=False, default=0)
    _vocabulary: int = field(init=False, repr=False, default=0)
    _end_ids: frozenset[int] = field(init=False, repr=False, default=frozenset())
    _queries_tokens: int = field(init=False, repr=False, default=0)
    _hits_tokens: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.model_path:
            raise ConfigError("the engine transformers needs a model: --model-path DIRECTORY")
        if not Path(self.model_path, "config.json").is_file():
            raise ConfigError(f"{self.model_path} is not a directory with a model (config.json)")
        check_device(self.device)
        if self.dtype not in DTYPES:
            raise ConfigError(f"engine option dtype must be one of {', '.join(DTYPES)}")
        need_packages("transformers", ("torch", "transformers"), "transformers")

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> CausalEngine:
        """An engine from a command line's texts. Raises ConfigError."""
        return cls(**parse_options(cls, options))

    def load(self) -> None:
        """Load the model. Raises ConfigError without the packages or the device."""
        torch, transformers = packages("transformers", ["transformers"])
        device = choose_device(torch, self.device, self.threads)
        local = {"local_files_only": True}
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(self.model_path, **local)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.model_path, dtype=self.dtype, **local
        )
        self._model = model.to(device).eval()
        self._torch, self._cache_class = torch, transformers.DynamicCache
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._input_tokens_max = int(self._model.config.max_position_embeddings)
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        ends = self._model.generation_config.eos_token_id
        self._end_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._prefixes = PrefixStore(self.prefix_tokens)
        self._queries_tokens = self._hits_tokens = 0

    def run(self, batch: Batch) -> Sequence[Result]:
        """Run the batch as the broker packed it. Raises OutOfMemory."""
        read = [
            read_wanted(payload, batch.model, self._encode, self._encode_chat)
            for payload in batch.payloads
        ]
        results: list[Result | None] = [each if isinstance(each, Result) else None for each in read]
        wanted: dict[int, Wanted] = {}
        for index, each in enumerate(read):
            if isinstance(each, Wanted):
                if len(each.ids) >= self._input_tokens_max:
                    results[index] = Result.too_long()
                elif not 0 <= min(each.ids) <= max(each.ids) < self._vocabulary:
                    # Its look-up would fail for the whole batch, on a GPU for all that come after.
                    text = f"token ids must be from 0 to {self._vocabulary - 1}"
                    results[index] = bad_request(text)
                else:
                    wanted[index] = each
        if wanted:
            shape = batch.shapes[0] if len(batch.shapes) == 1 else None
            key = (shape.model, shape.components) if shape and shape.components else None
            try:
                answers = self._generate(list(wanted.values()), key)
            except self._torch.OutOfMemoryError as error:
                self._prefixes.clear()
                if self._torch.cuda.is_available():
                    self._torch.cuda.empty_cache()
                raise OutOfMemory(str(error)) from error
            for index, result in zip(wanted, answers, strict=True):
                results[index] = result
        return [result for result in results if result is not None]

    def cache_stats(self) -> CacheStats:
        """Prompt tokens asked for, and those that were not computed again."""
        return CacheStats(self._queries_tokens, self._hits_tokens, "worker")

    def _encode(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer(text).input_ids
        return ids

    def _encode_chat(self, messages: list[dict[str, Any]]) -> Sequence[int]:
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template: send /v1/completions")
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids: Sequence[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    # -- computing -----------------------------------------------------------------------------

    def _generate(self, wanted: list[Wanted], key: object | None) -> list[Result]:
        with self._torch.inference_mode():
            prompts = [each.ids for each in wanted]
            prefix, reused, hits = self._prefix_of(prompts, key)
            self._queries_tokens += sum(map(len, prompts))
            self._hits_tokens += sum(hits)
            logits, cache, mask = self._prefill(prompts, prefix, reused)
            texts = self._decode(wanted, logits, cache, mask)
        return [
            answer(
                each,
                self._tokenizer.decode(ids, skip_special_tokens=True),
                len(ids),
                cached,
                ended=ended,
            )
            for each, (ids, ended), cached in zip(wanted, texts, hits, strict=True)
        ]

    def _prefix_of(
        self, prompts: list[tuple[int, ...]], key: object | None
    ) -> tuple[Prefix | None, int, list[int]]:
        """(prefix, tokens of it to use, hit tokens of each prompt); computed if it is new."""
        none = (None, 0, [0] * len(prompts))
        if key is None or not self.prefix_tokens:
            return none
        kept = self._prefixes.get(key)
        if kept is not None:
            reused = min(shared_tokens([kept.ids + (0,), each]) for each in prompts)
            if reused >= PREFIX_TOKENS_MIN:
                return kept, reused, [reused] * len(prompts)
        shared = shared_tokens(prompts)
        if shared < PREFIX_TOKENS_MIN:
            return none
        ids = prompts[0][:shared]
        cache = self._cache_class()
        self._forward([list(ids)], None, None, cache)
        layers = tuple((layer.keys, layer.values) for layer in cache.layers)
        prefix = Prefix(ids, layers)
        self._prefixes.put(key, prefix)
        # The first prompt paid for it.
        return prefix, shared, [0] + [shared] * (len(prompts) - 1)

    def _prefill(
        self, prompts: list[tuple[int, ...]], prefix: Prefix | None, reused: int
    ) -> tuple[Any, Any, Any]:
        """(logits of the next token, keys and values, attention mask) of every prompt."""
        torch = self._torch
        width = max(len(each) for each in prompts) - reused
        pad = self._tokenizer.pad_token_id or 0
        rows, masks = [], []
        for each in prompts:
            own = list(each[reused:])
            padding = width - len(own)
            rows.append([pad] * padding + own)
            masks.append([1] * reused + [0] * padding + [1] * len(own))
        cache = self._cache_class()
        if prefix is not None:
            for number, (keys, values) in enumerate(prefix.layers):
                shape = (len(prompts), -1, -1, -1)
                cache.update(
                    keys[:, :, :reused].expand(*shape), values[:, :, :reused].expand(*shape), number
                )
        mask = torch.tensor(masks, device=self._model.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, reused:]
        logits = self._forward(rows, mask, positions, cache)
        return logits, cache, mask

    def _forward(self, rows: list[list[int]], mask: Any, positions: Any, cache: Any) -> Any:
        """Logits of the last place of each row; `cache` grows by the rows."""
        ids = self._torch.tensor(rows, device=self._model.device)
        given = {} if mask is None else {"attention_mask": mask, "position_ids": positions}
        given[self._cache_name] = cache
        return self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits[:, -1]

    def _decode(
        self, wanted: list[Wanted], logits: Any, cache: Any, mask: Any
    ) -> list[tuple[list[int], bool]]:
        """(token ids, whether the model ended) of each; a row that has ended computes padding."""
        torch = self._torch
        chosen: list[list[int]] = [[] for _ in wanted]
        ended = [False] * len(wanted)
        draws = [self._drawing(each) for each in wanted]
        # Padding takes no positions, so it leaves a prompt as much room as it has alone.
        limits = [min(each.max_tokens, self._input_tokens_max - len(each.ids)) for each in wanted]
        while True:
            tokens = self._choose(wanted, draws, logits)
            for row, token in enumerate(tokens):
                if ended[row] or len(chosen[row]) >= limits[row]:
                    continue
                if token in self._end_ids:
                    ended[row] = True
                else:
                    chosen[row].append(token)
            going = [
                not ended[row] and len(chosen[row]) < limits[row] for row in range(len(wanted))
            ]
            if not any(going):
                return list(zip(chosen, ended, strict=True))
            mask = torch.cat([mask, mask.new_ones((len(wanted), 1))], dim=1)
            positions = mask.sum(-1, keepdim=True) - 1
            logits = self._forward([[token] for token in tokens], mask, positions, cache)

    def _drawing(self, each: Wanted) -> Any:
        if each.temperature < TEMPERATURE_MIN:
            return None
        return self._torch.Generator().manual_seed(each.seed)

    def _choose(self, wanted: list[Wanted], draws: list[Any], logits: Any) -> list[int]:
        """The next token of each row: the best, or drawn as its request says."""
        best: list[int] = logits.argmax(-1).tolist()
        if any(draw is not None for draw in draws):
            scores = logits.float().cpu()
            for row, (each, draw) in enumerate(zip(wanted, draws, strict=True)):
                if draw is not None:
                    best[row] = self._draw(scores[row] / each.temperature, each.top_p, draw)
        return best

    def _draw(self, scores: Any, top_p: float, draw: Any) -> int:
        shares = scores.softmax(-1)
        if top_p < 1:
            ordered, places = shares.sort(descending=True)
            shares = shares.clone()
            # The first token that reaches top_p is kept, and all before it.
            shares[places[ordered.cumsum(-1) - ordered > top_p]] = 0
        return int(self._torch.multinomial(shares, 1, generator=draw))


def cuda_name() -> str | None:
    """The CUDA device that a model would run on; None where there is none, or no torch."""
    try:
        import torch
    except ImportError:
        return None
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
