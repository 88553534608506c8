"""What a batch run is asked to do and what it says it did: plain values, no behaviour.

Times are seconds, counts are lines of the input unless their name says otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from zfabric.batchfile.chains import Count
from zfabric.batchwatch import Progress
from zfabric.connection import Key

# Items open at once: far beyond what any number of cards holds, and 50 MB of numbers and ids.
OPEN_ITEMS_MAX = 200_000

log = logging.getLogger("zfabric.batchrun")


@dataclass(slots=True)
class Summary:
    """What a run did. `done`, `failed` and `bad` count all rows, those of earlier runs too."""

    job: str
    output: str
    errors: str
    lines: int = 0
    resumed: int = 0
    submitted: int = 0
    adopted: int = 0
    resubmitted: int = 0
    done: int = 0
    failed: int = 0
    bad: int = 0
    too_long: int = 0
    duplicates: int = 0
    output_tokens: int | None = None
    # what estimated lengths were multiplied with, by the engine's usage; None: they were counted
    length_ratio: float | None = None
    seconds: float = 0.0
    complete: bool = False

    @property
    def ok(self) -> bool:
        """Whether every line of the input has a result."""
        return self.complete and not self.failed and not self.bad


@dataclass(slots=True, kw_only=True)
class Options:
    """How a run behaves; see `run_batch`."""

    broker: str | None = None
    # see `Client`
    key: Key = None
    model: str | None = None
    count: Count | None = None
    progress: Callable[[Progress], None] | None = None
    notice: Callable[[str], None] = log.warning
    # why nothing was run in the last so many seconds, where somebody sees into the workers
    why: Callable[[float], str | None] | None = None
    timeout_s: float = 10.0
    stall_timeout_s: float | None = None
    wait_for_workers: bool = True
    open_items_max: int = OPEN_ITEMS_MAX
    stop: threading.Event = field(default_factory=threading.Event)
