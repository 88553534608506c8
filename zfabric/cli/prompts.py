"""Batch files to try things with: real few-shot prompts where they are at hand, or made-up ones.

The made-up ones have what matters of real ones: several few-shot prefixes that many questions
share, mixed in arrival order, and questions of very different lengths. The same seed gives the same
bytes.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

# Where a checkout of the project's shared data has real prompts, from the working directory.
BBH = Path("../shared/data/bbh")
ITEMS_DEFAULT = 2_000
SEED = 7
MAX_TOKENS = 16

TOPICS = {
    "sentiment": ("Say whether the review is positive or negative.", "positive", "negative"),
    "routing": ("Name the team that should answer this ticket.", "billing", "hardware"),
    "dates": ("Give the date in the text as YYYY-MM-DD.", "2021-03-04", "1999-12-31"),
    "entailment": ("Does the second sentence follow from the first?", "yes", "no"),
    "units": ("Convert the quantity to SI units.", "12.7 m", "3.2 kg"),
    "toxicity": ("Is this comment acceptable in a public forum?", "acceptable", "not acceptable"),
    "language": ("Name the language of the text.", "Danish", "Portuguese"),
    "summary": ("Give the passage a title of at most six words.", "A Late Train", "Two Rivers"),
}
STORY = (
    "the parcel arrived late but the courier was polite and the box had only a small dent so we "
    "kept it while our neighbour sent hers back because a hinge was missing from the left door and "
    "nobody at the counter could say when another one would be made or what it might cost with "
    "postage to an island in winter"
)
WORDS = STORY.split()


def write_batch_file(
    path: Path, items: int | None, model: str, *, max_tokens: int = MAX_TOKENS
) -> tuple[int, str]:
    """Write `items` requests to `path`; (how many, what they are). None is a sensible number."""
    real = sorted(BBH.glob("*.json"))
    prompts = _real(real) if real else _made_up()
    what = "BIG-Bench Hard, few-shot" if real else "made-up few-shot prompts"
    if items is None and not real:
        items = ITEMS_DEFAULT
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for custom_id, prefix, question in _wanted(prompts, items):
            messages = [
                {"role": "system", "content": prefix},
                {"role": "user", "content": question},
            ]
            body = {"model": model, "messages": messages, "max_tokens": max_tokens}
            line = {
                "custom_id": custom_id,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count, what


Prompt = tuple[str, str, str]


def _wanted(prompts: Iterator[Prompt], items: int | None) -> Iterator[Prompt]:
    """The first `items` prompts, going round again where there are fewer; None is one round."""
    if items is None:
        yield from prompts
        return
    known: list[Prompt] = []
    for prompt in itertools.islice(prompts, items):
        known.append(prompt)
        yield prompt
    for k in range(len(known), items):
        custom_id, prefix, question = known[k % len(known)]
        yield f"{custom_id}-{k // len(known)}", prefix, question


def _real(paths: list[Path]) -> Iterator[Prompt]:
    """Questions of every task in turn, so that prefixes arrive mixed."""
    tasks = []
    for path in paths:
        task = json.loads(path.read_text(encoding="utf-8"))
        questions = enumerate(task["questions"])
        tasks.append([(f"{task['task']}-{k}", task["prefix"], text) for k, text in questions])
    for row in itertools.zip_longest(*tasks):
        yield from (prompt for prompt in row if prompt is not None)


def _made_up() -> Iterator[Prompt]:
    """Endless; lengths spread over two orders of magnitude, as in logs of real use."""
    draw = random.Random(SEED)
    prefixes = {topic: _prefix(topic, draw) for topic in TOPICS}
    for k in itertools.count():
        topic = draw.choice(list(TOPICS))
        words = min(900, max(4, round(draw.lognormvariate(3.6, 0.9))))
        yield f"{topic}-{k}", prefixes[topic], _text(words, draw)


def _prefix(topic: str, draw: random.Random) -> str:
    task, *answers = TOPICS[topic]
    shots = [
        f"Text: {_text(draw.randint(20, 60), draw)}\nAnswer: {draw.choice(answers)}"
        for _ in range(draw.randint(4, 8))
    ]
    return "\n\n".join([task, *shots])


def _text(words: int, draw: random.Random) -> str:
    start = draw.randrange(len(WORDS))
    chosen = [WORDS[(start + k + draw.randrange(3)) % len(WORDS)] for k in range(words)]
    return " ".join(chosen).capitalize() + "."
