"""Metrics: names that dashboards are written to, figures of the status, few labels."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.dashboards import Day, a_day
from tests.running import brokering, until
from zfabric import metrics
from zfabric.config import BrokerConfig
from zfabric.errors import ConfigError
from zfabric.eventnames import EVENTS

EXAMPLES = Path(__file__).parents[1] / "examples"
# As design and documents have them, in full.
NAMES = (
    "zfabric_tokens_received_total",
    "zfabric_tokens_routed_total",
    "zfabric_padding_tokens_total",
    "zfabric_lane_assignments_total",
    "zfabric_lanes_active",
    "zfabric_lanes_limit",
    "zfabric_lane_pressure_ratio",
    "zfabric_waste_threshold_ratio",
    "zfabric_prefix_cache_queries_tokens_total",
    "zfabric_prefix_cache_hits_tokens_total",
    "zfabric_shape_switches_total",
    "zfabric_dispatch_yields_total",
    "zfabric_dispatch_slice_seconds_bucket",
    "zfabric_worker_disconnects_total",
    "zfabric_redeliveries_total",
    "zfabric_dead_items",
    "zfabric_oldest_item_age_seconds",
    "zfabric_build_info",
    "zfabric_storage_full",
    "zfabric_disk_bytes",
    "zfabric_sync_seconds",
    "zfabric_recovery_items_quarantined",
    "zfabric_recovery_files_quarantined",
    "zfabric_recovery_torn_bytes",
    "zfabric_recovery_healed_words",
    "zfabric_items_quarantined",
    "zfabric_events_total",
    "zfabric_access_refused_total",
    "zfabric_key_users",
)
LABELS = {"reason", "outcome", "worker", "model", "event", "level", "le", "version"}
Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def day() -> Day:
    return a_day()


def full(view: dict[str, Any]) -> dict[str, Any]:
    """A status with what only a broker with a disk and a loop has."""
    recovery = {
        "quarantined_items": 3, "quarantined_files": 1, "damaged_records": 4, "torn_bytes": 77,
        "healed": 5, "seconds": 0.5,
    }  # fmt: skip
    storage = {"disk_bytes": 9_000, "disk_bytes_limit": None, "full": "no room", "full_for_s": 1.0}
    return {
        **view, "recovery": recovery, "storage": storage, "sync_s": 0.004, "sync_max_s": 0.1,
        "syncs_total": 12, "dispatch_slice_buckets": [(0.001, 7), (0.005, 2), (None, 1)],
        "dispatch_slices_s": 0.25,
    }  # fmt: skip


def samples_of(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def scraped(view: dict[str, Any]) -> Samples:
    return samples_of(generate_latest(metrics.registry(lambda: view)).decode())


def test_every_name_of_the_design_is_there(day: Day) -> None:
    found = scraped(full(day.views[-1]))
    assert [name for name in NAMES if name not in found] == []


def test_figures_are_those_of_the_status(day: Day) -> None:
    view = full(day.views[-1])
    found = scraped(view)
    assert found["zfabric_tokens_received_total"] == [({}, view["accepted_tokens"])]
    assert found["zfabric_tokens_routed_total"] == [({}, view["real_tokens"])]
    padding = {labels["reason"]: v for labels, v in found["zfabric_padding_tokens_total"]}
    assert padding == view["waste_tokens"]
    assert sum(padding.values()) == view["padded_tokens"] - view["real_tokens"]
    hits = {labels["worker"]: v for labels, v in found["zfabric_prefix_cache_hits_tokens_total"]}
    assert hits == {w["name"]: w["cache_hits_tokens"] for w in view["workers"]}
    assert found["zfabric_storage_full"] == [({}, 1.0)]
    assert found["zfabric_recovery_torn_bytes"] == [({}, 77.0)]
    assert "zfabric_disk_limit_bytes" not in found
    buckets = [(labels["le"], v) for labels, v in found["zfabric_dispatch_slice_seconds_bucket"]]
    assert buckets == [("0.001", 7.0), ("0.005", 9.0), ("+Inf", 10.0)]
    assert found["zfabric_dispatch_slice_seconds_count"] == [({}, 10.0)]


def test_labels_are_few_and_never_a_signature_a_lane_or_an_item(day: Day) -> None:
    view = full(day.views[-1])
    signatures = {shape["signature"] for shape in view["shapes"]}
    for rows in scraped(view).values():
        for labels, _ in rows:
            assert set(labels) <= LABELS
            assert not signatures & set(labels.values())


def test_what_is_not_measured_has_no_sample(day: Day) -> None:
    view = dict(day.views[-1])
    view["workers"] = [
        {**w, "cache_hits_tokens": None, "cache_queries_tokens": None} for w in view["workers"]
    ]
    found = scraped(view)
    assert "zfabric_prefix_cache_hits_tokens_total" not in found
    assert "zfabric_sync_seconds" not in found
    assert "zfabric_recovery_torn_bytes" not in found


def test_every_event_has_a_counter_before_it_happens(day: Day) -> None:
    rows = scraped(day.views[-1])["zfabric_events_total"]
    assert {labels["event"] for labels, _ in rows} == set(EVENTS)
    counted = {labels["event"]: value for labels, value in rows}
    assert counted["worker_joined"] == 2.0
    assert counted["worker_lost"] == 0.0


def test_worker_that_is_gone_is_counted_and_no_longer_listed() -> None:
    day = Day()
    day.submit("job", 64, 64)
    day.work(1.0)
    day.cards[0].cut()
    day.bench.tick(1.1)
    day.work(0.25)
    day.publish()
    found = scraped(day.views[-1])
    left = {labels["reason"]: v for labels, v in found["zfabric_worker_disconnects_total"]}
    assert left.pop("unreachable") == 1.0
    assert left == dict.fromkeys(("left", "silent", "connected_again", "revoked"), 0.0)
    assert [labels for labels, _ in found["zfabric_worker_items_total"]] == [{"worker": "gpu1"}]


@pytest.mark.e2e
def test_running_broker_is_scraped_over_http() -> None:
    with brokering() as running:
        port, end = metrics.serve("127.0.0.1", 0, lambda: running.broker.ask(5.0))
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                found = samples_of(answer.read().decode())
            assert found["zfabric_residual_items"] == [({}, 0.0)]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
                assert samples_of(answer.read().decode()).keys() == found.keys()
            for path in ("foo", "metrics/foo", "favicon.ico"):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10)
                assert refused.value.code == 404
                refused.value.close()
            with pytest.raises(ConfigError, match="another --metrics-port"):
                metrics.serve("127.0.0.1", port, dict)
        finally:
            end()


def test_peers_that_say_nothing_or_go_away_cost_nothing_for_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics.Handler, "timeout", 0.2)
    before = threading.active_count()
    port, end = metrics.serve("127.0.0.1", 0, dict)
    try:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        until(lambda: threading.active_count() >= before + 2)
        reset = socket.create_connection(("127.0.0.1", port))
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        for each in silent:
            each.settimeout(10)
            assert each.recv(1) == b""
            each.close()
        until(lambda: threading.active_count() == before + 1)
    finally:
        end()
    assert capfd.readouterr().err == ""


def test_address_of_the_metrics_may_be_in_brackets_and_is_named_where_it_is_wrong() -> None:
    assert BrokerConfig(bind="[::1]").metrics_at == "::1"
    assert BrokerConfig(metrics_bind="[::]").metrics_at == "::"
    with pytest.raises(ConfigError, match="see --metrics-bind"):
        metrics.serve("192.0.2.1", 0, dict)


def test_broker_that_does_not_answer_gives_an_empty_scrape() -> None:
    def ask() -> dict[str, Any]:
        raise TimeoutError

    assert generate_latest(metrics.registry(ask)) == b""


# -- what ships -----------------------------------------------------------------------------------


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bzfabric_[a-z_]+\b", text))


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "prometheus-alerts.yml"])
def test_examples_name_only_metrics_that_there_are(day: Day, name: str) -> None:
    known = set(scraped(full(day.views[-1])))
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    named = names_in(text)
    assert len(named) >= 8
    assert named <= known


def test_alerts_name_only_events_that_there_are() -> None:
    text = (EXAMPLES / "prometheus-alerts.yml").read_text(encoding="utf-8")
    named = set(re.findall(r'event="([a-z_]+)"', text))
    assert named and named <= set(EVENTS)


def test_grafana_dashboard_is_one() -> None:
    board = json.loads((EXAMPLES / "grafana-dashboard.json").read_text(encoding="utf-8"))
    assert board["title"] == "zfabric"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) >= 8
    for panel in board["panels"]:
        assert panel["title"] and all(target["expr"] for target in panel["targets"])
