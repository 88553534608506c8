"""A small llama with random weights as a GGUF file: an engine to test and to show with.

    python -m zfabric_workers.tinygguf tiny.gguf

Decides the sizes of the model (a few million weights) and takes its vocabulary from a sentencepiece
tokenizer that the package mistral-common ships, so that prompts have real token counts. The same
seed gives the same weights. Sizes are in tokens and in elements. What such a model writes means
nothing; what it computes and caches is real. Never downloads anything.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from zfabric.errors import ConfigError

TOKENIZER = "tokenizer.model.v1"
# Small enough for tens of thousands of prompt tokens a second on one core.
EMBEDDING = 64
FEED_FORWARD = 128
LAYERS = 2
HEADS = 4
# The longest prompts of real few-shot files, with room.
CONTEXT_TOKENS = 8_192
SEED = 7
WEIGHT_SPREAD = 0.02
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_tiny_gguf(path: Path, seed: int = SEED) -> Path:
    """Write the model to `path`, whole or not at all. Raises ConfigError without the packages."""
    try:
        import gguf
        import numpy
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ConfigError(
            f"writing a GGUF file needs {error.name}: pip install 'zfabric[llamacpp]'"
        ) from error
    vocabulary = SentencePieceProcessor(model_file=str(tokenizer_file()))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(partial, "llama")
    _describe(writer, vocabulary)
    draw = numpy.random.default_rng(seed)

    def weights(name: str, *shape: int) -> None:
        values = draw.standard_normal(shape, dtype=numpy.float32) * numpy.float32(WEIGHT_SPREAD)
        writer.add_tensor(name, values.astype(numpy.float16))

    def ones(name: str) -> None:
        writer.add_tensor(name, numpy.ones(EMBEDDING, dtype=numpy.float32))

    weights("token_embd.weight", vocabulary.vocab_size(), EMBEDDING)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm.weight")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights(f"{block}.{part}.weight", EMBEDDING, EMBEDDING)
        ones(f"{block}.ffn_norm.weight")
        weights(f"{block}.ffn_gate.weight", FEED_FORWARD, EMBEDDING)
        weights(f"{block}.ffn_up.weight", FEED_FORWARD, EMBEDDING)
        weights(f"{block}.ffn_down.weight", EMBEDDING, FEED_FORWARD)
    ones("output_norm.weight")
    weights("output.weight", vocabulary.vocab_size(), EMBEDDING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)
    return path


def tokenizer_file() -> Path:
    """The sentencepiece model that mistral-common ships. Raises ConfigError where it is missing."""
    try:
        found = Path(str(resources.files("mistral_common").joinpath("data", TOKENIZER)))
    except ModuleNotFoundError:
        found = None
    if found is None or not found.is_file():
        raise ConfigError(
            f"the package mistral-common, which holds {TOKENIZER}, is missing: "
            "pip install 'zfabric[llamacpp]'"
        )
    return found


def _describe(writer: Any, vocabulary: Any) -> None:
    from gguf import TokenType

    writer.add_name("zfabric tiny, random weights")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(EMBEDDING // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary.vocab_size())
    writer.add_tokenizer_model("llama")
    ids = range(vocabulary.vocab_size())
    writer.add_token_list([vocabulary.id_to_piece(k).encode() for k in ids])
    writer.add_token_scores([vocabulary.get_score(k) for k in ids])
    kinds = {
        TokenType.UNKNOWN: vocabulary.is_unknown,
        TokenType.CONTROL: vocabulary.is_control,
        TokenType.BYTE: vocabulary.is_byte,
    }
    writer.add_token_types(
        [next((kind for kind, holds in kinds.items() if holds(k)), TokenType.NORMAL) for k in ids]
    )
    writer.add_bos_token_id(vocabulary.bos_id())
    writer.add_eos_token_id(vocabulary.eos_id())
    writer.add_unk_token_id(vocabulary.unk_id())
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def main() -> int:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description="write a small random-weight GGUF file")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    try:
        path = write_tiny_gguf(given.path, given.seed)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stderr.write(f"{path}: {path.stat().st_size:,} bytes, random weights\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
