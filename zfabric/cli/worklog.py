"""The log of `zfabric worker`: every record of `logging` as a line of text or JSON, see `logs`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from zfabric.eventnames import OTHER
from zfabric.logs import EventLog


class _ToLog(logging.Handler):
    """Hands every record on as an event; one of another library has the name `other`."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(logging.INFO)
        self._log = log
        self._said = 0

    def emit(self, record: logging.LogRecord) -> None:
        """One record. Records of others count from warnings up."""
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - a library's own mistake, which must not end its caller
            self.handleError(record)
            return
        event = getattr(record, "event", OTHER)
        if event == OTHER and record.levelno < logging.WARNING:
            return
        self._said += 1
        fields = getattr(record, "fields", {"logger": record.name})
        self._log.write(
            {
                "seq": self._said,
                "time": record.created,
                "event": event,
                "text": text,
                **fields,
            }
        )


@contextmanager
def to_standard_error(form: str) -> Iterator[None]:
    """Meanwhile all that is logged in this process is written there; nothing where it is off."""
    root = logging.getLogger()
    level = root.level
    log = None if form == "off" else EventLog(form)
    handler = logging.NullHandler() if log is None else _ToLog(log)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        if log is not None:
            log.close()
