"""Telling: how what repeats becomes events, so that a flood pushes nothing else out of sight.

The first of each kind and text is an event at once. While it goes on, one event a `PERIOD_S` says
how many more there were; after a period without any it is news again. A kind has `TEXTS_MAX` texts
at a time, since peers can make up texts: all further ones are told as one. Counting them whole is
the caller's. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PERIOD_S = 60.0
TEXTS_MAX = 20
# The end of a period is noticed within this; looking costs a microsecond for each text.
LOOK_S = 1.0


@dataclass(slots=True)
class _Told:
    """What was told: its fields, when its period is over, and how often it came since."""

    fields: dict[str, Any]
    due_s: float
    held: int = 0


class Telling:
    """`event(name, text, now, **fields)` makes an event."""

    def __init__(self, event: Callable[..., None]) -> None:
        self._event = event
        self._told: dict[tuple[str, str], dict[str, _Told]] = {}
        self._next_look_s = 0.0

    def say(
        self, name: str, kind: str, text: str, now: float, times: int = 1, **fields: Any
    ) -> None:
        """`times` times `text` of one `kind` of the event `name`; `kind` is never a peer's word."""
        told = self._told.setdefault((name, kind), {})
        if text not in told and len(told) >= TEXTS_MAX:
            text = f"{kind}: of more peers, told together"
        known = told.get(text)
        if known is not None:
            known.held += times
            return
        told[text] = _Told(fields, now + PERIOD_S)
        self._event(name, f"{text} ({times:,} times)" if times > 1 else text, now, **fields)

    def turn(self, now: float) -> None:
        """Tell what was held back, where its period is over."""
        if now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_S
        for (name, _), told in self._told.items():
            for text, known in list(told.items()):
                if now < known.due_s:
                    continue
                if not known.held:
                    del told[text]
                    continue
                self._event(name, f"{text} ({known.held:,} more since)", now, **known.fields)
                known.held, known.due_s = 0, now + PERIOD_S
