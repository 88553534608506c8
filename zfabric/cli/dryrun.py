"""`zfabric run-batch --dry-run`: the shapes that were found, by example, and padding by policy."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfabric import words
from zfabric.cli import common, fabric
from zfabric.cli.common import percent
from zfabric.config import Config
from zfabric.errors import ConfigError

if TYPE_CHECKING:
    from zfabric.batchplan import Plan

# The largest shapes are shown to people; --json has all of them.
SHAPES_SHOWN = 40


def run_dry(args: argparse.Namespace, config: Config) -> int:
    """Read the file and print; 1 if a line of it cannot be run."""
    from zfabric.batchplan import plan_of
    from zfabric.batchsource import Source
    from zfabric.cli.batch import load_count

    # Padding is what is compared, so it is counted for an engine that would not pad, too.
    contract = dataclasses.replace(
        fabric.contract_of(config.worker.engine, config.worker), ragged=False
    )
    path = Path(args.input)
    try:
        with path.open("rb") as stream:
            source = Source(stream, model=args.model, count=load_count(args.tokenizer))
            grouped = config.broker.packing == "group"
            plan = plan_of(source.rows(), contract, grouped=grouped)
    except OSError as error:
        raise ConfigError(f"cannot read input {path}: {error.strerror}") from None
    if args.json:
        common.show_json(_data(plan, counted=args.tokenizer is not None))
    else:
        common.show(_text(plan, counted=args.tokenizer is not None))
    return 1 if plan.bad else 0


def _data(plan: Plan, *, counted: bool) -> dict[str, Any]:
    return {
        "lines": plan.lines,
        "items": plan.items,
        "bad": plan.bad,
        "tokens": plan.tokens,
        "tokens_counted": counted,
        "too_long": plan.too_long,
        "shared_tokens": plan.shared_tokens,
        "small_items": plan.small_items,
        "shapes": [
            {
                "model": each.shape.model,
                "signature": f"{each.shape.signature:016x}",
                "components": len(each.shape.components),
                "prefix_tokens": each.shape.prefix_tokens,
                "items": each.items,
                "tokens": each.tokens,
                "example": each.shape.label or None,
            }
            for each in plan.shapes
        ],
        "policies": {
            each.policy: {
                "batches": each.batches,
                "real_tokens": each.real_tokens,
                "padded_tokens": each.padded_tokens,
                "waste_ratio": each.waste_ratio,
                "batch_fill_ratio": each.fill_ratio,
            }
            for each in plan.paddings
        },
    }


def _text(plan: Plan, *, counted: bool) -> str:
    bad = sum(plan.bad.values())
    reasons = ", ".join(f"{count:,} {code}" for code, count in sorted(plan.bad.items()))
    contract = plan.contract
    rows = [
        ("lines", f"{plan.lines:,}"),
        (
            "items",
            f"{plan.items:,}, and {words.counted(bad, 'bad line')}"
            + (f" ({reasons})" if bad else ""),
        ),
        ("tokens", f"{plan.tokens:,}, {'counted' if counted else 'estimated; see --tokenizer'}"),
        (
            "too long",
            f"{words.counted(plan.too_long, 'item')} over {contract.input_tokens_max:,} tokens",
        ),
        ("shapes", f"{len(plan.shapes):,}"),
        (
            "shared",
            f"{words.counted(plan.shared_tokens, 'token')} in prefixes that were found, "
            + percent(plan.shared_tokens / plan.tokens if plan.tokens else None),
        ),
        (
            "small shapes",
            f"{words.counted(plan.small_items, 'item')} in shapes of under "
            f"{words.counted(contract.batch_items_max, 'item')}",
        ),
    ]
    shapes = [
        (
            each.shape.model,
            f"{each.shape.signature:016x}",
            each.items,
            each.shape.prefix_tokens,
            each.tokens // each.items,
            each.shape.label or "(no shared beginning)",
        )
        for each in plan.shapes[:SHAPES_SHOWN]
    ]
    headers = ("model", "shape", "items", "prefix tok", "mean tok", "example")
    found = common.table(headers, shapes, spare=("shape", "model"))
    if len(plan.shapes) > SHAPES_SHOWN:
        found += f"\nand {len(plan.shapes) - SHAPES_SHOWN:,} smaller ones (--json has all)"
    policies = [
        (p.policy, p.batches, p.padded_tokens, percent(p.waste_ratio), percent(p.fill_ratio))
        for p in plan.paddings
    ]
    padding = common.table(("policy", "batches", "padded tok", "waste", "fill"), policies)
    return f"{common.pairs(rows)}\n\n{found}\n\n{padding}"
