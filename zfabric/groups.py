"""Groups: what is drained as one, and the model that it belongs to. Records without rules.

A group is a shape with its lanes and queues; under `--policy fifo` everything of a model is one
group. Lengths are tokens, times seconds on the caller's monotonic clock. Only `fabric` changes
what is in here.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from zfabric.draining import Draining, DrainLimits, LaneDraining
from zfabric.lanes import Lanes
from zfabric.queues import LaneQueue
from zfabric.shapes import Shape


class LanePadding:
    """Tokens of the batches that left each lane since it opened, by lane id: 16 bytes a lane."""

    __slots__ = ("_padded", "_real")

    def __init__(self) -> None:
        self._real = array("Q")
        self._padded = array("Q")

    def opened(self, lane: int) -> None:
        """The lane begins anew; its id may have been another's."""
        while len(self._real) <= lane:
            self._real.append(0)
            self._padded.append(0)
        self._real[lane] = self._padded[lane] = 0

    def add(self, lane: int, real_tokens: int, padded_tokens: int) -> None:
        """A batch took so much from the lane."""
        self._real[lane] += real_tokens
        self._padded[lane] += padded_tokens

    def real_tokens(self, lane: int) -> int:
        """Tokens of the items that were handed out of it."""
        return self._real[lane] if lane < len(self._real) else 0

    def padded_tokens(self, lane: int) -> int:
        """Tokens of the same, padded as their batches were."""
        return self._padded[lane] if lane < len(self._padded) else 0


class Group:
    """What is drained as one: a shape, or for `--policy fifo` everything of a model."""

    __slots__ = (
        "accepted_items", "accepted_tokens", "batches", "completed_items", "id", "lane_padding",
        "lanes", "model", "oldest_s", "order", "outstanding", "padded_tokens", "pending_items",
        "queues", "ready_items", "ready_tokens", "real_tokens", "shape", "shape_numbers", "shapes",
        "signature", "sweep_below",
    )  # fmt: skip

    def __init__(
        self, number: int, model: Model, shape: Shape, lanes: Lanes | None, limits: DrainLimits
    ) -> None:
        self.id = number
        self.model = model
        self.shape = shape
        self.signature = shape.signature
        self.lanes = lanes
        self.order = LaneDraining(limits)
        self.queues: dict[int, LaneQueue] = {}
        # tokens: group packing goes on with the lanes below this target; None is with all
        self.sweep_below: int | None = None
        self.outstanding = 0
        self.ready_items = 0
        self.ready_tokens = 0
        self.pending_items = 0
        self.accepted_items = 0
        self.accepted_tokens = 0
        self.completed_items = 0
        self.batches = 0
        self.real_tokens = 0
        self.padded_tokens = 0
        self.lane_padding = LanePadding()
        # when its oldest ready item was enqueued, as of the last maintenance
        self.oldest_s: float | None = None
        # only where shapes are mixed: the shapes of the items, numbered
        self.shapes: list[Shape] = []
        self.shape_numbers: dict[Shape, int] = {}

    @property
    def wasted_tokens(self) -> int:
        """What its padding has cost."""
        return self.padded_tokens - self.real_tokens

    def number_of(self, shape: Shape) -> int:
        """The number of `shape` in a group that mixes shapes."""
        number = self.shape_numbers.get(shape)
        if number is None:
            number = self.shape_numbers[shape] = len(self.shapes)
            self.shapes.append(shape)
        return number


@dataclass(slots=True)
class Model:
    """Everything of one model: its shapes, the order they drain in, and who serves it."""

    name: str
    draining: Draining[int]
    groups: dict[int, Group] = field(default_factory=dict)
    # names of workers that may have room for a batch, next to be served first
    hungry: dict[str, None] = field(default_factory=dict)
    input_tokens_max: int | None = None
    paused: bool = False
    pending_items: int = 0

    @property
    def in_use(self) -> bool:
        """Whether it has items, or a pause, which an operator set and only an operator ends."""
        return self.paused or any(group.outstanding for group in self.groups.values())
