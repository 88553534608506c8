"""The names of events, which logs, metrics and alert rules are keyed by: stable, never reused.

A worker has events of its own, for its own log.

Decides the level of each, `info` or `warning`, and says what it means. Every warning has a counter,
`zfabric_events_total{event="..."}`. A name that is not in the table is a warning, so that nothing
new is overlooked; a test holds the table complete.
"""

from __future__ import annotations

from typing import NamedTuple

INFO, WARNING = "info", "warning"


class Known(NamedTuple):
    """What is known of an event: its level, and what it means."""

    level: str
    meaning: str


EVENTS = {
    "access_refused": Known(WARNING, "somebody's key, or what it asked for, was refused"),
    "broker_late": Known(WARNING, "the machine or a signal stopped the broker; deadlines moved"),
    "dead_dropped": Known(INFO, "an operator forgot dead items, or they made room for others"),
    "dead_requeued": Known(INFO, "an operator sent dead items round once more"),
    "draining": Known(INFO, "the broker ends: nothing new is taken or handed out"),
    "engine_error": Known(WARNING, "an engine failed on a batch; what it started is charged"),
    "engine_exit": Known(WARNING, "an engine's process ended; what it started is charged"),
    "item_dead": Known(WARNING, "an item used up its attempts; see `zfabric dead ls`"),
    "item_quarantined": Known(WARNING, "an item was damaged on disk and is set aside"),
    "keys_reloaded": Known(INFO, "the list of keys has changed and counts"),
    "keys_unreadable": Known(WARNING, "the list of keys cannot be read: the former one counts"),
    "lease_expired": Known(WARNING, "a worker was silent with work in hand; it is retried"),
    "model_forgotten": Known(INFO, "an operator forgot a model that nobody uses"),
    "model_paused": Known(INFO, "an operator stopped the batches of a model"),
    "model_resumed": Known(INFO, "an operator let the batches of a model go on"),
    "out_of_memory": Known(WARNING, "an engine lacked memory for a batch; its items are charged"),
    "peer_error": Known(WARNING, "a peer sent what is not the protocol, or may not be"),
    "producer_cancelled": Known(INFO, "an operator ended what waits of a producer"),
    "producer_forgotten": Known(INFO, "an operator forgot a producer and its results"),
    "producer_joined": Known(INFO, "a producer connected"),
    "producer_lost": Known(INFO, "a producer went away; its items and results are kept"),
    "storage_available": Known(INFO, "there is room on the disk again"),
    "storage_full": Known(WARNING, "no room on the disk: submits wait, completions go on"),
    "waste_verdict": Known(INFO, "what most of the padding comes from has changed"),
    "worker_forgotten": Known(INFO, "an operator forgot a worker that is gone"),
    "worker_joined": Known(INFO, "a worker registered, or came back"),
    "worker_left": Known(INFO, "a worker said goodbye and ended its connection"),
    "worker_lost": Known(WARNING, "a worker's connection ended without a goodbye"),
}


# What the log of a worker calls a record without a name: a library's, of its engine or ours.
OTHER = "other"
# Events of a worker's own log. A broker counts what it is told of them under its own names.
WORKER_EVENTS = {
    "batch_failed": Known(WARNING, "the engine failed on a batch, which was given back"),
    "broker_connected": Known(INFO, "the broker let the worker in"),
    "broker_lost": Known(WARNING, "the connection to the broker ended; it is looked for"),
    "broker_refused": Known(WARNING, "the broker refused something, most of all the name"),
    "engine_exited": Known(WARNING, "the engine's process ended; it is started again"),
    "engine_loaded": Known(INFO, "the engine is ready"),
    "message_dropped": Known(WARNING, "a message of the broker was not the protocol"),
    OTHER: Known(WARNING, "a library had something to say"),
    "worker_ended": Known(INFO, "the worker ends"),
    "worker_started": Known(INFO, "the worker starts"),
}


def level_of(name: str) -> str:
    """`info` or `warning`."""
    known = EVENTS.get(name) or WORKER_EVENTS.get(name)
    return known.level if known is not None else WARNING
