"""Ledger: decides where every item and every padded token is booked, so that both can be checked.

`Flow` books items and their real tokens from acceptance to their end; `Waste` books the padding of
each batch by cause, in tokens. Both only add up. This module must never estimate, round, sample or
forget: the parts of the waste add up to padded - real, and a residual of the flow is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from zfabric.errors import InvariantError
from zfabric.lanes import TAG_FLOOR, TAG_FORCED, TAG_THRESHOLD
from zfabric.packing import BATCH_COST_TOKENS

# Waste ratio up to which nothing needs a name: 1.3% was measured at a backlog of 20,000.
HEALTHY_WASTE_MAX = 0.02
# Lane pressure from which the moving threshold (5.5% and more) is a cause of its own.
HIGH_PRESSURE_MIN = 0.5
# A shape with more than this share of the padded tokens is the workload, not a noisy neighbour.
NOISY_SHARE_MAX = 0.5


class Balance(NamedTuple):
    """What was accepted and is nowhere; anything but (0, 0) is lost or counted twice."""

    residual_items: int
    residual_tokens: int


@dataclass(slots=True)
class Flow:
    """Items and tokens of one scope, each counted once when accepted and once when it ends."""

    accepted_items: int = 0
    accepted_tokens: int = 0
    completed_items: int = 0
    completed_tokens: int = 0
    dead_items: int = 0
    dead_tokens: int = 0
    quarantined_items: int = 0
    quarantined_tokens: int = 0
    # Of the completed: those that ended as a failure, and those that their producer cancelled.
    failed_items: int = 0
    cancelled_items: int = 0
    # Events, not items: sent out again after a consumer was lost; refused as already known.
    redeliveries: int = 0
    duplicates: int = 0

    def accept(self, items: int, tokens: int) -> None:
        """Items were taken in, durably."""
        self.accepted_items += items
        self.accepted_tokens += tokens

    def complete(self, items: int, tokens: int, *, failed: int = 0, cancelled: int = 0) -> None:
        """Items ended; `failed` and `cancelled` say how many of them without a completion."""
        self.completed_items += items
        self.completed_tokens += tokens
        self.failed_items += failed
        self.cancelled_items += cancelled

    def bury(self, items: int, tokens: int) -> None:
        """Items are dead: they used up their attempts."""
        self.dead_items += items
        self.dead_tokens += tokens

    def quarantine(self, items: int, tokens: int) -> None:
        """Items lie in a segment that cannot be read."""
        self.quarantined_items += items
        self.quarantined_tokens += tokens

    def balance(self, ready: tuple[int, int], pending: tuple[int, int]) -> Balance:
        """The residual, given (items, tokens) that are ready and that are pending."""
        ended_items = self.completed_items + self.dead_items + self.quarantined_items
        ended_tokens = self.completed_tokens + self.dead_tokens + self.quarantined_tokens
        return Balance(
            self.accepted_items - ended_items - ready[0] - pending[0],
            self.accepted_tokens - ended_tokens - ready[1] - pending[1],
        )


class Parts(NamedTuple):
    """Padding by cause, in tokens."""

    # pad-to - base.
    rounding: int = 0
    # base - longest taken: the queue holds a longer item (strict packing).
    strict: int = 0
    # The lane's target has grown since the item was assigned to it.
    grown: int = 0
    # Group packing put a longer lane beside it: the longest of the batch - the longest of its lane.
    neighbour: int = 0
    # The lane budget was reached.
    forced: int = 0
    # Within the moving threshold when it was assigned.
    threshold: int = 0
    # Over the threshold, but by fewer than 16 tokens.
    floor: int = 0
    # No lanes took part (policies fifo and shape): the order in which items came.
    arrival: int = 0


class Padded(Protocol):
    """Whatever was padded: a ledger, or a shape."""

    @property
    def padded_tokens(self) -> int:
        """Tokens that the batches had, padding included."""

    @property
    def wasted_tokens(self) -> int:
        """Those of them that were padding."""


class Waste:
    """The padding of the batches of one scope, by cause."""

    __slots__ = (
        "_arrival", "_by_tag", "_fill_sum", "_grown", "_neighbour", "_rounding", "_strict",
        "batches", "padded_tokens", "real_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self._rounding = self._strict = self._grown = self._neighbour = self._arrival = 0
        # by TAG_THRESHOLD, TAG_FLOOR, TAG_FORCED
        self._by_tag = [0, 0, 0]
        self.real_tokens = 0
        self.padded_tokens = 0
        self.batches = 0
        self._fill_sum = 0.0

    @property
    def parts(self) -> Parts:
        """The padding by cause, in tokens."""
        return Parts(
            rounding=self._rounding,
            strict=self._strict,
            grown=self._grown,
            neighbour=self._neighbour,
            forced=self._by_tag[TAG_FORCED],
            threshold=self._by_tag[TAG_THRESHOLD],
            floor=self._by_tag[TAG_FLOOR],
            arrival=self._arrival,
        )

    @property
    def waste_ratio(self) -> float:
        """Padding over padded tokens, 0 to 1; 0 if nothing was sent."""
        return self.wasted_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def wasted_tokens(self) -> int:
        """padded - real."""
        return self.padded_tokens - self.real_tokens

    @property
    def batch_fill_ratio(self) -> float | None:
        """Mean of `packing.batch_fill` over batches; None without batches."""
        return self._fill_sum / self.batches if self.batches else None

    @property
    def cost_ratio(self) -> float | None:
        """(padded tokens + 2,000 per batch) / real tokens; waste alone can be gamed."""
        cost = self.padded_tokens + BATCH_COST_TOKENS * self.batches
        return cost / self.real_tokens if self.real_tokens else None

    def record(
        self,
        lengths: Sequence[int],
        targets: Sequence[int] | None,
        tags: Sequence[int] | None,
        base: int,
        pad_to: int,
        *,
        fill: float,
        runs: Sequence[int] = (),
    ) -> None:
        """Book one padded batch; `targets` and `tags` are None where no lanes took part.

        The columns are those of `lanes.Assigned`, for the items of this batch. `runs` says how many
        items of each lane it holds, in order, where they are of more than one. Per item, base =
        the longest of the queue (strict) or of the batch, rounding = pad_to - base, strict = base
        - longest, neighbour = longest - the longest of its lane here, grown = min(that - length,
        max(0, that - target)), the rest by tag.
        Raises InvariantError, changing nothing, if the columns or lengths contradict each other.
        """
        items = len(lengths)
        longest = max(lengths, default=0)
        if not (items and 0 <= longest <= base <= pad_to):
            raise InvariantError(
                f"a batch of {items} up to {longest}, base {base}, pad-to {pad_to}"
            )
        if runs and (sum(runs) != items or min(runs) < 1):
            raise InvariantError(f"runs of {list(runs)} items in a batch of {items}")
        real = sum(lengths)
        if targets is None and tags is None:
            self._arrival += items * longest - real
        elif targets is not None and tags is not None and len(targets) == items == len(tags):
            start = 0
            for run in runs or (items,):
                part = slice(start, start + run)
                top = max(lengths[part])
                self._neighbour += run * (longest - top)
                self._grown += _split(lengths[part], targets[part], tags[part], top, self._by_tag)
                start += run
        else:
            raise InvariantError(f"targets and tags do not match a batch of {items}")
        self._rounding += items * (pad_to - base)
        self._strict += items * (base - longest)
        self.real_tokens += real
        self.padded_tokens += items * pad_to
        self.batches += 1
        self._fill_sum += fill

    def record_ragged(self, lengths: Sequence[int], *, fill: float) -> None:
        """Book one batch for an engine that does not pad."""
        real = sum(lengths)
        self.real_tokens += real
        self.padded_tokens += real
        self.batches += 1
        self._fill_sum += fill


def _split(
    lengths: Sequence[int],
    targets: Sequence[int],
    tags: Sequence[int],
    longest: int,
    by_tag: list[int],
) -> int:
    """Share out the gaps up to `longest` of items of one lane; returns the tokens grown."""
    grown = 0
    for length, target, tag in zip(lengths, targets, tags, strict=True):
        gap = longest - length
        if longest > target:
            grew = longest - target if target > length else gap
            grown += grew
            gap -= grew
        by_tag[tag] += gap
    return grown


def verdict(waste: Waste, pressure: float, shapes: Sequence[Padded] = ()) -> str:
    """One phrase that names what to look at; `shapes` are the rows that `waste` is the total of.

    `pressure` is the mean that the items met as they came, 0 to 1: once a run has ended there is
    none. healthy, one noisy shape, capacity (forced leads, with what grew while lanes were short),
    tolerance (threshold leads, pressure high), growth, short prompts (floor and rounding lead), or,
    where lanes are not the cause at all, strict packing or arrival order.
    """
    # A neighbour joins a batch only where a batch of its own would have cost more: no ill.
    if waste.wasted_tokens - waste.parts.neighbour <= HEALTHY_WASTE_MAX * waste.padded_tokens:
        return "healthy"
    if any(_explains_all(shape, waste) for shape in shapes):
        return "one noisy shape"
    parts = waste.parts
    short = pressure >= HIGH_PRESSURE_MIN
    leads = {
        # An item raises a lane that is not its own where none opened for it: the budget is used up,
        # or the threshold has risen, as it does to keep the budget from being used up.
        "capacity": parts.forced + (parts.grown if short else 0),
        "tolerance": parts.threshold,
        "growth": 0 if short else parts.grown,
        "short prompts": parts.floor + parts.rounding,
        "strict packing": parts.strict,
        "neighbours": parts.neighbour,
        "arrival order": parts.arrival,
    }
    lead = max(leads, key=leads.__getitem__)
    # With room for more lanes, waste within the threshold is what the rules were asked for.
    if lead == "neighbours" or (lead == "tolerance" and not short):
        return "healthy"
    return lead


def _explains_all(shape: Padded, total: Waste) -> bool:
    """Whether a minor shape wastes so much that all the others together are healthy."""
    rest_padded = total.padded_tokens - shape.padded_tokens
    rest_wasted = total.wasted_tokens - shape.wasted_tokens
    return (
        shape.padded_tokens <= NOISY_SHARE_MAX * total.padded_tokens
        and rest_wasted <= HEALTHY_WASTE_MAX * rest_padded
    )
