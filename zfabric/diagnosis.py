"""Diagnosis: which verdict on the padding holds, and since when; and whether the disk has room.

Fed with the ledger now and then, it remembers only when the answer last changed. Times are
seconds on the caller's monotonic clock. It decides nothing about work.
"""

from __future__ import annotations

from dataclasses import dataclass

# Padded tokens before which a verdict is an accident of the first batches.
TOKENS_MIN = 100_000


@dataclass(slots=True)
class Diagnosis:
    """The verdict as it was last seen, when it became true, and the same of a full disk."""

    verdict: str | None = None
    since_s: float | None = None
    # why the store takes nothing, and since when
    no_space: str | None = None
    no_space_s: float | None = None

    def judge(self, verdict: str, padded_tokens: int, now: float) -> bool:
        """Take note of a verdict; whether it is another one than before."""
        if padded_tokens < TOKENS_MIN or verdict == self.verdict:
            return False
        self.verdict, self.since_s = verdict, now
        return True

    def found_room(self, no_space: str | None, now: float) -> bool:
        """Take note of why there is no room (None: there is); whether that has changed."""
        if (no_space is None) == (self.no_space is None):
            return False
        self.no_space, self.no_space_s = no_space, None if no_space is None else now
        return True

    def since(self, verdict: str) -> float | None:
        """When `verdict` became true; None where it has only just, or on too few tokens to say."""
        return self.since_s if verdict == self.verdict else None
