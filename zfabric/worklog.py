"""Worklog: what a worker says of itself, as records of `logging` with stable names.

A program that runs a worker collects them as it likes; `cli.worklog` makes lines of them. A record
has `event`, a name of `eventnames`, and `fields`. Nothing is written here.
"""

from __future__ import annotations

import logging
from typing import Any

from zfabric.eventnames import WARNING, level_of

LEVELS = {"info": logging.INFO, WARNING: logging.WARNING}


def say(logger: logging.Logger, event: str, text: str, *, worker: str, **fields: Any) -> None:
    """Log an event of a worker, at the level that its name has."""
    extra = {"event": event, "fields": {"worker": worker, **fields}}
    logger.log(LEVELS[level_of(event)], "%s: %s", worker, text, extra=extra)
