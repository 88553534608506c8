"""Snapshots: what an operator sees, as plain maps of numbers and text.

Read-only views of the fabric, made for `zfabric status` and the statistics feed alike, so that a
dashboard and a script can never disagree. Tokens, seconds and ratios (0 to 1) as their names say;
null means "not known" or "not measured", never zero. Nothing here may change the fabric.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zfabric
from zfabric.fabric import Fabric
from zfabric.groups import Group
from zfabric.lanes import THRESHOLD_BASE, THRESHOLD_SPAN
from zfabric.ledger import verdict
from zfabric.peers import Producer, Worker
from zfabric.protocol import packed

if TYPE_CHECKING:
    from zfabric.recovery import Recovered

# Rows of shapes and jobs in a snapshot; a dashboard shows the top of a list, not all of it.
TOP_ROWS_MAX = 50
# Shapes whose lanes a recording keeps at once; a broker serves a model or two.
CURRENT_SHAPES_MAX = 4


def status(fabric: Fabric, now: float, found: Survey | None = None) -> dict[str, Any]:
    """The whole fabric in one map; the ledger's identity is recomputed, not assumed.

    `found` is a survey that is fresh enough; without it one is made.
    """
    # The store's own count, the pending map's and the ledger's: three sources, one identity.
    ready = (fabric.store.ready_items, fabric.store.ready_tokens)
    pending = (fabric.pending.items, fabric.pending.tokens)
    balance = fabric.flow.balance(ready, pending)
    flow = fabric.flow
    found = found or survey(fabric)
    return {
        "accepted_items": flow.accepted_items,
        "accepted_tokens": flow.accepted_tokens,
        "completed_items": flow.completed_items,
        "completed_tokens": flow.completed_tokens,
        "dead_items": flow.dead_items,
        "dead_tokens": flow.dead_tokens,
        "quarantined_items": flow.quarantined_items,
        "quarantined_tokens": flow.quarantined_tokens,
        "ready_items": ready[0],
        "ready_tokens": ready[1],
        "pending_items": pending[0],
        "pending_tokens": pending[1],
        "residual_items": balance.residual_items,
        "residual_tokens": balance.residual_tokens,
        "failed_items": flow.failed_items,
        "cancelled_items": flow.cancelled_items,
        "refused_items": fabric.counters.get("refused_items", 0),
        **_padding(fabric, found),
        "shapes_active": found.shapes_active,
        "shape_switches_total": fabric.counters.get("shape_switches_gone", 0)
        + sum(m.draining.switches_total for m in fabric.models.values()),
        "forced_switches_total": fabric.counters.get("forced_switches_gone", 0)
        + sum(m.draining.forced_switches_total for m in fabric.models.values()),
        "dispatch_yields_total": fabric.counters.get("dispatch_yields", 0),
        "redeliveries_total": flow.redeliveries,
        "duplicates_total": flow.duplicates,
        "oldest_item_age_s": _age(min(found.oldest_s.values(), default=None), now),
        "held_bytes": held_bytes(fabric),
        "held_bytes_limit": fabric.config.max_bytes,
        "storage": storage(fabric, now),
        "outbox_items": sum(len(p.outbox) for p in fabric.producers if p is not None),
        "dead_records": len(fabric.dead),
        "models": [_model(fabric, name, found, now) for name in fabric.models],
        "workers": [worker(fabric, w, now) for w in fabric.workers.values()],
        "jobs": [job(p, now) for p in _recent(fabric)],
        "counters": dict(sorted(fabric.counters.items())),
        "events_total": dict(sorted(fabric.event_counts.items())),
        "config": {
            "policy": fabric.config.policy,
            "packing": fabric.config.packing,
            "durability": fabric.store.durability,
            "linger_ms": fabric.config.linger_ms,
            "max_wait_s": fabric.config.max_wait_s,
            "lease_s": fabric.config.lease_s,
        },
        "durability": fabric.store.durability,
        "release": zfabric.__version__,
    }


def held_bytes(fabric: Fabric) -> int:
    """Payload bytes in memory: items of a memory store, results, dead records."""
    return fabric.store.memory_bytes + fabric.outbox_bytes + fabric.dead.held_bytes


def recovery(found: Recovered) -> dict[str, Any]:
    """What a broker found in its directory when it started."""
    seconds = found.seconds or 1e-9
    return {
        "seconds": found.seconds,
        "entries": found.entries,
        "entries_per_s": found.entries / seconds,
        "bytes_read": found.bytes_read,
        "bytes_per_s": found.bytes_read / seconds,
        "segments": len(found.segments),
        "completed_by_result": found.completed_by_result,
        "torn_bytes": found.torn_bytes,
        "healed": found.healed,
        "damaged_records": len(found.damaged),
        "quarantined_items": len(found.quarantined),
        "quarantined_files": len(found.quarantined_files),
    }


@dataclass(slots=True)
class Survey:
    """What one pass over all shapes finds: there may be thousands, so it is made once."""

    shapes_active: int = 0
    lanes_active: int = 0
    # of the shapes that have lanes in use
    pressures: float = 0.0
    shapes_laned: int = 0
    # items, of shapes that are forgotten too
    opened: int = 0
    reused: int = 0
    forced: int = 0
    # see `Lanes.crowded_total`
    crowded: int = 0
    # when the oldest ready item of each model was enqueued
    oldest_s: dict[str, float] = field(default_factory=dict)
    # the shape that lost most to padding
    noisiest: Group | None = None


def survey(fabric: Fabric) -> Survey:
    """One pass over all shapes."""
    gone, limit = fabric.retired_lanes, fabric.config.lanes
    found = Survey(opened=gone["opened"], reused=gone["reused"], forced=gone["forced"])
    found.crowded = gone["crowded"]
    wasted = 0
    for group in fabric.groups.values():
        if group.outstanding:
            found.shapes_active += 1
        if group.wasted_tokens > wasted:
            found.noisiest, wasted = group, group.wasted_tokens
        if group.ready_items and group.oldest_s:
            name = group.model.name
            found.oldest_s[name] = min(group.oldest_s, found.oldest_s.get(name, group.oldest_s))
        lanes = group.lanes
        if lanes is None:
            continue
        found.opened += lanes.opened_total
        found.reused += lanes.reused_total
        found.forced += lanes.forced_total
        found.crowded += lanes.crowded_total
        if active := lanes.lanes_active:
            found.lanes_active += active
            found.pressures += min(1.0, active / limit)
            found.shapes_laned += 1
    return found


def diagnose(fabric: Fabric) -> str:
    """The verdict on the padding, now."""
    return _verdict(fabric, survey(fabric))


def _verdict(fabric: Fabric, found: Survey) -> str:
    noisy = [] if found.noisiest is None else [found.noisiest]
    return verdict(fabric.waste, _of_run(fabric, found), noisy)


def _mean(found: Survey) -> float:
    return found.pressures / found.shapes_laned if found.shapes_laned else 0.0


def _of_run(fabric: Fabric, found: Survey) -> float:
    """The mean pressure that items met as they came: a run that has ended had one too."""
    items = found.opened + found.reused + found.forced
    return found.crowded / (items * fabric.config.lanes) if items else 0.0


def _age(since_s: float | None, now: float) -> float | None:
    return None if since_s is None else max(0.0, now - since_s)


def storage(fabric: Fabric, now: float) -> dict[str, Any]:
    """What the store uses and may use, and why it takes nothing, where it does not.

    What is of a disk is null for a store in memory.
    """
    return {
        "disk_bytes": None,
        "disk_bytes_limit": None,
        "disk_reserve_bytes": None,
        "disk_min_free_bytes": None,
        "segment_files": None,
        "segment_bytes": None,
        **(fabric.store.backing.usage() or {}),
        "full": fabric.diagnosis.no_space,
        "full_for_s": _age(fabric.diagnosis.no_space_s, now),
    }


def _padding(fabric: Fabric, found: Survey) -> dict[str, Any]:
    waste = fabric.waste
    said = _verdict(fabric, found)
    since_s = fabric.diagnosis.since(said)
    return {
        "real_tokens": waste.real_tokens,
        "padded_tokens": waste.padded_tokens,
        "waste_ratio": waste.waste_ratio,
        "waste_tokens": waste.parts._asdict(),
        "waste_verdict": said,
        "waste_verdict_since": None if since_s is None else since_s + fabric.wall_offset_s,
        "noisiest_shape": _noisiest(found.noisiest),
        "batches": waste.batches,
        "batch_fill_ratio": waste.batch_fill_ratio,
        "cost_ratio": waste.cost_ratio,
        **_lanes_total(fabric, found),
    }


def _noisiest(group: Group | None) -> dict[str, Any] | None:
    """The shape that lost most to padding."""
    if group is None:
        return None
    return {
        "model": group.model.name,
        "signature": f"{group.signature:016x}",
        "padded_tokens": group.padded_tokens,
        "wasted_tokens": group.wasted_tokens,
    }


def _lanes_total(fabric: Fabric, found: Survey) -> dict[str, Any]:
    pressure = _mean(found)
    return {
        "lanes_active": found.lanes_active,
        "lanes_limit": fabric.config.lanes,
        "lane_pressure_ratio": pressure,
        "lane_pressure_ratio_run": _of_run(fabric, found),
        # The threshold is linear in the pressure, so the mean of one is that of the other.
        "waste_threshold_ratio": (
            THRESHOLD_BASE + THRESHOLD_SPAN * pressure if found.shapes_laned else None
        ),
        "lanes_opened_total": found.opened,
        "lanes_reused_total": found.reused,
        "lanes_forced_total": found.forced,
    }


def _model(fabric: Fabric, name: str, found: Survey, now: float) -> dict[str, Any]:
    model = fabric.models[name]
    current = model.draining.current
    group = fabric.groups.get(current) if current is not None else None
    return {
        "model": name,
        "paused": model.paused,
        "workers": sum(
            1 for w in fabric.workers.values() if w.model == name and w.peer is not None
        ),
        "ready_items": model.draining.ready_items,
        "ready_tokens": model.draining.ready_tokens,
        "pending_items": model.pending_items,
        "oldest_item_age_s": _age(found.oldest_s.get(name), now),
        "current_signature": f"{group.signature:016x}" if group is not None else None,
        "shape_switches": model.draining.switches_total,
        "input_tokens_max": model.input_tokens_max,
    }


def worker(fabric: Fabric, w: Worker, now: float) -> dict[str, Any]:
    """One worker; cache figures are null where its engine does not measure them."""
    hits, queries = w.stats.get("hits_tokens"), w.stats.get("queries_tokens")
    measured = isinstance(hits, int) and isinstance(queries, int)
    asked = w.predicted_queries_tokens if w.predicted_known else 0
    said = w.stats.get("state")
    return {
        "name": w.name,
        "model": w.model,
        "engine": w.engine,
        "simulated": w.simulated,
        "contract": {
            "batch_items_max": w.contract.batch_items_max,
            "batch_tokens_max": w.contract.batch_tokens_max,
            "input_tokens_max": w.contract.input_tokens_max,
        },
        "padding": "ragged" if w.contract.ragged else "padded",
        "live": w.peer is not None,
        "window": w.window,
        "granted": w.granted,
        "in_flight": len(w.held),
        "in_flight_items": sum(len(b.outstanding) for b in w.held.values()),
        "heartbeat_age_s": max(0.0, now - w.heard_s),
        "lease_s": fabric.config.lease_s,
        "batches": w.batches,
        "items_done": w.items_done,
        "real_tokens": w.real_tokens,
        "padded_tokens": w.padded_tokens,
        "batch_fill_ratio": w.fill_sum / w.batches if w.batches else None,
        "cache_hits_tokens": hits if measured else None,
        "cache_queries_tokens": queries if measured else None,
        "cache_hit_ratio": hits / queries if measured and queries else None,
        "cache_hit_ratio_10s": _recent_ratio(w, now),
        "cache_hit_ratio_predicted": w.predicted_hits_tokens / asked if asked else None,
        "cache_hit_ratio_ideal": w.ideal_hits_tokens / asked if asked else None,
        "measured_by": w.stats.get("measured_by") if measured else None,
        # What it said in its last heartbeat, which may have been between two batches.
        "state": "running" if w.held and said == "idle" else said,
        "disconnects": w.disconnects,
        "last_disconnect": w.last_disconnect or None,
        "last_disconnect_age_s": None if w.last_disconnect_s is None else now - w.last_disconnect_s,
    }


def _recent_ratio(w: Worker, now: float) -> float | None:
    points = [p for p in w.cache_points if now - p[0] <= 11.0]
    if len(points) < 2:
        return None
    hits, queries = points[-1][1] - points[0][1], points[-1][2] - points[0][2]
    return hits / queries if queries > 0 and hits >= 0 else None


def job(p: Producer, now: float) -> dict[str, Any]:
    """One producer: what it submitted and what came of it."""
    return {
        "name": p.name,
        "live": p.peer is not None,
        "more": p.more,
        "expected_items": p.expected_items,
        "accepted_items": p.accepted_items,
        "accepted_tokens": p.accepted_tokens,
        "completed_items": p.completed_items,
        "failed_items": p.failed_items,
        "cancelled_items": p.cancelled_items,
        "dead_items": p.dead_items,
        "refused_items": p.refused_items,
        "acked_items": p.acked_items,
        "outbox_items": len(p.outbox),
        "age_s": now - p.first_seen_s,
        "seen_age_s": 0.0 if p.peer is not None else now - p.last_seen_s,
    }


def _recent(fabric: Fabric) -> list[Producer]:
    known = [p for p in fabric.producers if p is not None]
    return heapq.nlargest(
        TOP_ROWS_MAX, known, key=lambda p: (p.peer is not None, p.last_seen_s, p.index)
    )


def shape(group: Group, now: float) -> dict[str, Any]:
    """One shape: what waits of it and what its padding has cost."""
    padded = group.padded_tokens
    return {
        "model": group.model.name,
        "signature": f"{group.signature:016x}",
        "components": len(group.shape.components),
        "prefix_tokens": group.shape.prefix_tokens,
        "example": group.shape.label or None,
        "current": group.model.draining.current == group.id,
        "ready_items": group.ready_items,
        "ready_tokens": group.ready_tokens,
        "pending_items": group.pending_items,
        "accepted_items": group.accepted_items,
        "accepted_tokens": group.accepted_tokens,
        "completed_items": group.completed_items,
        "batches": group.batches,
        "padded_tokens": padded,
        "waste_ratio": (padded - group.real_tokens) / padded if padded else 0.0,
        "lanes_active": group.lanes.lanes_active if group.lanes is not None else None,
        "lane_pressure_ratio": group.lanes.pressure if group.lanes is not None else None,
        "oldest_item_age_s": (
            max(0.0, now - group.oldest_s) if group.ready_items and group.oldest_s else None
        ),
    }


def shapes(
    fabric: Fabric, now: float, top: int = TOP_ROWS_MAX, chosen: Iterable[Group] | None = None
) -> list[dict[str, Any]]:
    """The `top` shapes, see `top_groups`; or those that were `chosen` a moment ago."""
    return [shape(group, now) for group in chosen or top_groups(fabric, top)]


def top_groups(fabric: Fabric, top: int = TOP_ROWS_MAX) -> list[Group]:
    """The `top` shapes: current first, then by ready tokens, then by accepted tokens."""
    return heapq.nlargest(
        top,
        fabric.groups.values(),
        key=lambda g: (
            g.model.draining.current == g.id,
            g.ready_tokens,
            g.accepted_tokens,
            -g.id,
        ),
    )


def lanes(fabric: Fabric, group: Group, now: float) -> dict[str, Any]:
    """Every lane of one shape, as columns in order of lane id.

    `real_tokens` and `padded_tokens` are of the batches handed out of the lane since it opened.
    """
    view: dict[str, Any] = {
        "model": group.model.name,
        "signature": f"{group.signature:016x}",
        "time": now + fabric.wall_offset_s,
        "lanes_limit": fabric.config.lanes,
        "threshold_ratio": group.lanes.threshold if group.lanes is not None else None,
    }
    rows = group.lanes.rows() if group.lanes is not None else []
    ids = [row[0] for row in rows]
    queues = list(map(group.queues.get, ids))
    oldest_s = fabric.store.oldest_s
    ages = [
        max(0.0, now - t)
        if q is not None and q.ready_items and (t := oldest_s(q)) is not None
        else None
        for q in queues
    ]
    padding = group.lane_padding
    return {
        **view,
        "id": ids,
        "target_tokens": [row[1] for row in rows],
        "outstanding_items": [row[2] for row in rows],
        "quiescing": [row[3] for row in rows],
        "ready_items": [q.ready_items if q is not None else 0 for q in queues],
        "ready_tokens": [q.ready_tokens if q is not None else 0 for q in queues],
        "oldest_age_s": ages,
        "real_tokens": [padding.real_tokens(lane) for lane in ids],
        "padded_tokens": [padding.padded_tokens(lane) for lane in ids],
    }


def current_lanes(fabric: Fabric, now: float) -> list[dict[str, Any]]:
    """The lanes of each model's current shape, of the first few models."""
    current: Iterable[int | None] = (m.draining.current for m in fabric.models.values())
    groups = [fabric.groups[number] for number in current if number is not None]
    return [lanes(fabric, group, now) for group in groups[:CURRENT_SHAPES_MAX]]


def lengths(fabric: Fabric, taken: int, now: float) -> dict[str, Any]:
    """Lengths of what was accepted since `taken` (see `recent`), with what to pack them to.

    A row is (model, signature, age in seconds, lengths in tokens as little-endian u32).
    """
    return {
        "taken": fabric.recent.taken,
        "time": now + fabric.wall_offset_s,
        "runs": [
            [run.model, f"{run.signature:016x}", now - run.at_s, packed("I", run.lengths)]
            for run in fabric.recent.since(taken)
        ],
    }
