"""Explain: what the padding comes from, by which rule that is said, and what to do about it.

Pure: from one status (a map of numbers, live or recorded) to words. It adds nothing up that the
ledger has not, so that the parts are exact, and decides nothing but which words fit. Tokens and
ratios (0 to 1) as the names say; times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zfabric.lanes import LANES_MAX, THRESHOLD_BASE, THRESHOLD_SPAN
from zfabric.ledger import HEALTHY_WASTE_MAX, HIGH_PRESSURE_MIN, NOISY_SHARE_MAX
from zfabric.packing import BATCH_COST_TOKENS

Status = Mapping[str, Any]
# A batch emptier than this wastes its turn whatever its padding: low waste can be bought with it.
FILL_MIN = 0.5
CAUSES = {
    "rounding": "pad-to is a multiple of 8 tokens",
    "strict": "the longest of the queue was not in the batch",
    "grown": "the lane's target rose after the item came",
    "neighbour": "a longer lane was packed with it",
    "forced": "no lane was free: the lane budget was used up",
    "threshold": "within the waste that a lane may have before another opens",
    "floor": "under 16 tokens: too little for a lane of its own",
    "arrival": "no lanes took part: the order in which items came",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One cause of padding: its tokens, and its share of all padding."""

    cause: str
    tokens: int
    share: float
    meaning: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A verdict with all that it rests on; `as_map` is its JSON."""

    verdict: str
    rule: str
    numbers: dict[str, float | int | str | None]
    since: float | None
    advice: str
    command: str
    parts: tuple[Part, ...]
    real_tokens: int
    padded_tokens: int
    waste_ratio: float
    batch_fill_ratio: float
    # None before anything was handed out
    cost_ratio: float | None
    warning: str | None

    def as_map(self) -> dict[str, Any]:
        """Plain maps and lists."""
        return asdict(self)


def explain(status: Status) -> Explanation:
    """The explanation of a status."""
    verdict = status["waste_verdict"]
    padding = status["padded_tokens"] - status["real_tokens"]
    parts = tuple(
        Part(cause, tokens, tokens / padding if padding else 0.0, CAUSES.get(cause, ""))
        for cause, tokens in status["waste_tokens"].items()
    )
    rule, advice, command = _words(verdict, status)
    return Explanation(
        verdict=verdict,
        rule=rule,
        numbers=_numbers(status, parts),
        since=status["waste_verdict_since"],
        advice=advice,
        command=command,
        parts=parts,
        real_tokens=status["real_tokens"],
        padded_tokens=status["padded_tokens"],
        waste_ratio=status["waste_ratio"],
        batch_fill_ratio=status["batch_fill_ratio"],
        cost_ratio=status["cost_ratio"],
        warning=_warning(status),
    )


def _numbers(status: Status, parts: tuple[Part, ...]) -> dict[str, float | int | str | None]:
    lead = max(parts, key=lambda part: part.tokens, default=None)
    return {
        "waste_ratio": status["waste_ratio"],
        "healthy_waste_max": HEALTHY_WASTE_MAX,
        "largest_part": lead.cause if lead is not None and lead.tokens else None,
        "largest_part_share": lead.share if lead is not None else 0.0,
        "lane_pressure_ratio": status["lane_pressure_ratio"],
        "lane_pressure_ratio_run": status["lane_pressure_ratio_run"],
        "high_pressure_min": HIGH_PRESSURE_MIN,
        "waste_threshold_ratio_run": (
            THRESHOLD_BASE + THRESHOLD_SPAN * status["lane_pressure_ratio_run"]
        ),
        "lanes_active": status["lanes_active"],
        "lanes_limit": status["lanes_limit"],
        "batches": status["batches"],
        "policy": status["config"]["policy"],
        "packing": status["config"]["packing"],
    }


def _warning(status: Status) -> str | None:
    """Why the waste ratio alone would mislead; None where it does not."""
    fill = status["batch_fill_ratio"]
    if not status["batches"] or fill >= FILL_MIN:
        return None
    return (
        f"batches are {100 * fill:.0f}% full: with so little in them low waste is easily had. "
        f"Read the cost, which charges {BATCH_COST_TOKENS:,} tokens a batch"
    )


def _words(verdict: str, status: Status) -> tuple[str, str, str]:
    """Rule, advice and command of a verdict."""
    if not status["batches"]:
        return "nothing has been handed out yet", "submit work first", "zfabric status"
    if verdict == "healthy":
        return _healthy(status)
    if verdict == "capacity":
        return _capacity(status)
    if verdict == "one noisy shape":
        return _noisy(status)
    return _OTHERS.get(
        verdict, ("a cause that this release does not know", "update", "zfabric status --json")
    )


def _healthy(status: Status) -> tuple[str, str, str]:
    advice, command = "nothing is to be done", "zfabric top"
    neighbour = status["waste_tokens"]["neighbour"]
    own = status["padded_tokens"] - status["real_tokens"] - neighbour
    if own <= HEALTHY_WASTE_MAX * status["padded_tokens"]:
        besides = ", besides what neighbours add to fill batches" if neighbour else ""
        rule = f"waste is at most {HEALTHY_WASTE_MAX:.0%}{besides}"
    elif neighbour >= max(n for part, n in status["waste_tokens"].items() if part != "neighbour"):
        rule = "neighbours lead, and they join only where it costs less than it saves"
    else:
        rule = (
            "padding within the threshold leads, with lanes to spare (pressure under "
            f"{HIGH_PRESSURE_MIN:.0%}): it is what the rules ask for"
        )
    return rule, advice, command


def _capacity(status: Status) -> tuple[str, str, str]:
    if status["waste_tokens"]["forced"] >= status["waste_tokens"]["grown"]:
        rule = "most padding is forced: items that wanted a lane of their own found none free"
    else:
        rule = (
            "most padding is of items in lanes that others raised, because no lane opened for "
            f"those: on average over {HIGH_PRESSURE_MIN:.0%} of the lanes were in use"
        )
    if status["lanes_limit"] < LANES_MAX:
        return (
            rule,
            f"give every shape more than {status['lanes_limit']:,} lanes; ask what it would bring "
            f"with zfabric explain waste --what-if lanes={LANES_MAX}",
            f"zfabric broker --lanes {LANES_MAX}",
        )
    return (
        rule,
        "lanes are at their maximum: let less wait (more workers), or split the shape that fills "
        "them",
        "zfabric shapes",
    )


def _noisy(status: Status) -> tuple[str, str, str]:
    rule = (
        f"without one shape, which has at most {NOISY_SHARE_MAX:.0%} of the tokens, all others "
        "together are healthy"
    )
    shape = status["noisiest_shape"]
    signature = shape["signature"] if shape is not None else ""
    return rule, f"look at the lanes of {signature}", f"zfabric lanes --shape {signature}"


_OTHERS = {
    "tolerance": (
        "most padding is within the threshold, and the threshold is high because over "
        f"{HIGH_PRESSURE_MIN:.0%} of the lanes were in use as items came",
        f"more lanes lower the threshold: zfabric explain waste --what-if lanes={LANES_MAX}",
        f"zfabric broker --lanes {LANES_MAX}",
    ),
    "growth": (
        "most padding comes from items that waited while the target of their lane rose, with lanes "
        "to spare",
        "let less wait: more workers, or a smaller --max-items at the broker",
        "zfabric lanes",
    ),
    "short prompts": (
        "most padding is rounding to 8 tokens and gaps under 16: fixed costs of short prompts",
        "no lane can help; an engine that does not pad would (zfabric worker --ragged), and "
        "putting several questions into one prompt",
        "zfabric workers",
    ),
    "strict packing": (
        "most padding is up to the longest item of a queue, which the batch does not hold",
        "pad to what a batch really holds",
        "zfabric broker --packing tight",
    ),
    "neighbours": (
        "most padding is from longer lanes that were packed into the same batch",
        "this buys fill: compare cost, not waste, with --packing tight",
        "zfabric broker --packing tight",
    ),
    "arrival order": (
        "no lanes took part: items are padded to whatever came with them",
        "let lanes sort them by length",
        "zfabric broker --policy lanes",
    ),
}
