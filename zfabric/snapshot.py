"""Snapshots: what an operator sees, as plain maps of numbers and text.

Read-only views of the fabric, made for `zfabric status` and the statistics feed alike, so that a
dashboard and a script can never disagree. Tokens, seconds and ratios (0 to 1) as their names say;
null means "not known" or "not measured", never zero. Nothing here may change the fabric.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import zfabric
from zfabric.fabric import Fabric
from zfabric.groups import Group
from zfabric.ledger import verdict
from zfabric.peers import Producer, Worker

if TYPE_CHECKING:
    from zfabric.recovery import Recovered

# Rows of shapes and jobs in a snapshot; a dashboard shows the top of a list, not all of it.
TOP_ROWS_MAX = 50


def status(fabric: Fabric, now: float) -> dict[str, Any]:
    """The whole fabric in one map; the ledger's identity is recomputed, not assumed."""
    # The store's own count, the pending map's and the ledger's: three sources, one identity.
    ready = (fabric.store.ready_items, fabric.store.ready_tokens)
    pending = (fabric.pending.items, fabric.pending.tokens)
    balance = fabric.flow.balance(ready, pending)
    flow = fabric.flow
    oldest = [g.oldest_s for g in fabric.groups.values() if g.ready_items and g.oldest_s]
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
        **_padding(fabric),
        "shapes_active": sum(1 for g in fabric.groups.values() if g.outstanding),
        "shape_switches_total": sum(m.draining.switches_total for m in fabric.models.values()),
        "forced_switches_total": sum(
            m.draining.forced_switches_total for m in fabric.models.values()
        ),
        "dispatch_yields_total": fabric.counters.get("dispatch_yields", 0),
        "redeliveries_total": flow.redeliveries,
        "duplicates_total": flow.duplicates,
        "oldest_item_age_s": max(0.0, now - min(oldest)) if oldest else None,
        "held_bytes": fabric.held_bytes(),
        "held_bytes_limit": fabric.config.max_bytes,
        "outbox_items": sum(len(p.outbox) for p in fabric.producers if p is not None),
        "dead_records": len(fabric.dead),
        "models": [_model(fabric, name) for name in fabric.models],
        "workers": [worker(fabric, w, now) for w in fabric.workers.values()],
        "jobs": [job(p, now) for p in _recent(fabric)],
        "counters": dict(sorted(fabric.counters.items())),
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


def _padding(fabric: Fabric) -> dict[str, Any]:
    waste, lanes = fabric.waste, _lanes_total(fabric)
    return {
        "real_tokens": waste.real_tokens,
        "padded_tokens": waste.padded_tokens,
        "waste_ratio": waste.waste_ratio,
        "waste_tokens": waste.parts._asdict(),
        "waste_verdict": verdict(waste, lanes["lane_pressure_ratio"]),
        "batches": waste.batches,
        "batch_fill_ratio": waste.batch_fill_ratio,
        "cost_ratio": waste.cost_ratio,
        **lanes,
    }


def _lanes_total(fabric: Fabric) -> dict[str, Any]:
    totals = dict(fabric.retired_lanes)
    active = 0
    pressures, thresholds = [], []
    for group in fabric.groups.values():
        if group.lanes is None:
            continue
        active += group.lanes.lanes_active
        totals["opened"] += group.lanes.opened_total
        totals["reused"] += group.lanes.reused_total
        totals["forced"] += group.lanes.forced_total
        if group.lanes.lanes_active:
            pressures.append(group.lanes.pressure)
            thresholds.append(group.lanes.threshold)
    return {
        "lanes_active": active,
        "lanes_limit": fabric.config.lanes,
        "lane_pressure_ratio": sum(pressures) / len(pressures) if pressures else 0.0,
        "waste_threshold_ratio": sum(thresholds) / len(thresholds) if thresholds else None,
        "lanes_opened_total": totals["opened"],
        "lanes_reused_total": totals["reused"],
        "lanes_forced_total": totals["forced"],
    }


def _model(fabric: Fabric, name: str) -> dict[str, Any]:
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
        "current_signature": f"{group.signature:016x}" if group is not None else None,
        "shape_switches": model.draining.switches_total,
        "input_tokens_max": model.input_tokens_max,
    }


def worker(fabric: Fabric, w: Worker, now: float) -> dict[str, Any]:
    """One worker; cache figures are null where its engine does not measure them."""
    hits, queries = w.stats.get("hits_tokens"), w.stats.get("queries_tokens")
    measured = isinstance(hits, int) and isinstance(queries, int)
    asked = w.predicted_queries_tokens if w.predicted_known else 0
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
        "state": w.stats.get("state"),
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
        "waste_ratio": (padded - group.real_tokens) / padded if padded else 0.0,
        "lanes_active": group.lanes.lanes_active if group.lanes is not None else None,
        "lane_pressure_ratio": group.lanes.pressure if group.lanes is not None else None,
        "oldest_item_age_s": (
            max(0.0, now - group.oldest_s) if group.ready_items and group.oldest_s else None
        ),
    }


def shapes(fabric: Fabric, now: float, top: int = TOP_ROWS_MAX) -> list[dict[str, Any]]:
    """The `top` shapes: current first, then by ready tokens, then by accepted tokens."""
    chosen = heapq.nlargest(
        top,
        fabric.groups.values(),
        key=lambda g: (
            g.model.draining.current == g.id,
            g.ready_tokens,
            g.accepted_tokens,
            -g.id,
        ),
    )
    return [shape(group, now) for group in chosen]


def lanes(fabric: Fabric, group: Group, now: float) -> dict[str, Any]:
    """Every lane of one shape, as columns in order of lane id."""
    rows = group.lanes.rows() if group.lanes is not None else []
    queues = [group.queues.get(row.id) for row in rows]
    oldest = [fabric.store.oldest_s(q) if q is not None and q.ready_items else None for q in queues]
    return {
        "model": group.model.name,
        "signature": f"{group.signature:016x}",
        "lanes_limit": fabric.config.lanes,
        "threshold_ratio": group.lanes.threshold if group.lanes is not None else None,
        "id": [row.id for row in rows],
        "target_tokens": [row.target for row in rows],
        "outstanding_items": [row.outstanding for row in rows],
        "quiescing": [row.quiescing for row in rows],
        "ready_items": [q.ready_items if q is not None else 0 for q in queues],
        "ready_tokens": [q.ready_tokens if q is not None else 0 for q in queues],
        "oldest_age_s": [None if t is None else max(0.0, now - t) for t in oldest],
    }
