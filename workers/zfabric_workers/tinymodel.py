"""A causal model with random weights in a directory, as transformers loads it.

    python -m zfabric_workers.tinymodel DIRECTORY [--hidden 64 --layers 2 ...]

Decides the sizes of a Llama and trains a byte-level tokenizer on the texts that it is given. The
same seed gives the same weights. It is for tests and checks. Never downloads anything; what such a
model writes means nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from zfabric.errors import ConfigError

VOCABULARY = 2_048
CONTEXT_TOKENS = 8_192
SEED = 7
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# What the tokenizer learns from where nobody gives it texts.
SAMPLE = (
    "the parcel arrived late but the courier was polite and the box had only a small dent so we "
    "kept it while our neighbour sent hers back because a hinge was missing from the left door",
)


def write_tiny_model(
    directory: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    feed_forward: int = 128,
    texts: Iterable[str] = SAMPLE,
    dtype: str = "float32",
) -> Path:
    """Write model and tokenizer to `directory`. Raises ConfigError without the packages."""
    try:
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            f"writing a model needs {error.name}: pip install 'zfabric[transformers]'"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
    )
    wrapped.save_pretrained(directory)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        # Wide enough that the best of all tokens is far from the second best.
        initializer_range=0.2 if hidden < 1_024 else 0.02,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return directory


def main() -> int:
    """Write the directory that the command line names."""
    parser = argparse.ArgumentParser(description="write a small random-weight causal model")
    parser.add_argument("directory", type=Path)
    for name, default in (("hidden", 64), ("layers", 2), ("heads", 4), ("feed-forward", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    try:
        directory = write_tiny_model(**given)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stderr.write(f"{directory}: random weights\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
