"""Metrics: a status as Prometheus families, and the endpoint that serves them.

The names are an interface: dashboards and alert rules are written to them. Never a label per
signature, lane or item. What a status does not know (null) has no sample. A scrape runs in a thread
of the server; it asks the broker's loop for a status and touches nothing else.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from zfabric.errors import ConfigError
from zfabric.eventnames import EVENTS, level_of

Status = Mapping[str, Any]
# (name, key of the status, help); seconds, bytes, tokens, ratios as the names say.
COUNTERS = (
    ("tokens_received", "accepted_tokens", "Tokens of accepted items."),
    ("tokens_routed", "real_tokens", "Tokens of items handed out, each time they were."),
    ("items_accepted", "accepted_items", "Items accepted."),
    ("items_completed", "completed_items", "Items ended with a result."),
    ("items_failed", "failed_items", "Completed items whose engine failed on them."),
    ("items_refused", "refused_items", "Items refused for good."),
    ("batches", "batches", "Batches handed out."),
    ("shape_switches", "shape_switches_total", "Times that a model went on to another shape."),
    ("dispatch_yields", "dispatch_yields_total", "Slices of handing out that used up their time."),
    ("redeliveries", "redeliveries_total", "Items made ready again after they were handed out."),
    ("duplicates", "duplicates_total", "Results for items that had one."),
    ("syncs", "syncs_total", "Syncs of the store."),
    ("messages", "messages_total", "Messages that came from producers, operators and workers."),
)
GAUGES = (
    ("items_ready", "ready_items", "Items that wait."),
    ("items_pending", "pending_items", "Items that workers hold."),
    ("residual_items", "residual_items", "Accepted items that are nowhere; not 0 is a fault."),
    ("residual_tokens", "residual_tokens", "Tokens of them."),
    ("waste_ratio", "waste_ratio", "Padding over padded tokens, since the start."),
    ("batch_fill_ratio", "batch_fill_ratio", "Mean fill of batches, since the start."),
    ("cost_ratio", "cost_ratio", "(Padded tokens + 2,000 a batch) / real tokens."),
    ("lanes_active", "lanes_active", "Lanes in use, of all shapes."),
    ("lanes_limit", "lanes_limit", "Lanes that one shape may use."),
    ("lane_pressure_ratio", "lane_pressure_ratio", "Lanes in use over the limit, mean of shapes."),
    ("waste_threshold_ratio", "waste_threshold_ratio", "Waste above which a lane opens, mean."),
    ("dead_items", "dead_records", "Items that were given up and wait for an operator."),
    ("outbox_items", "outbox_items", "Results that their producers have not acknowledged."),
    ("held_bytes", "held_bytes", "Payload bytes in the broker."),
    ("held_bytes_limit", "held_bytes_limit", "Payload bytes that it may hold."),
    ("shapes_active", "shapes_active", "Shapes that have work."),
    ("uptime_seconds", "uptime_s", "Time since the broker started."),
    ("sync_seconds", "sync_s", "How long the last sync took."),
    ("sync_max_seconds", "sync_max_s", "How long the longest sync took."),
)
RECOVERY = (
    ("recovery_items_quarantined", "quarantined_items", "Items set aside at the last start."),
    ("recovery_files_quarantined", "quarantined_files", "Files set aside at the last start."),
    ("recovery_records_damaged", "damaged_records", "Damaged records met at the last start."),
    ("recovery_torn_bytes", "torn_bytes", "Bytes cut off as torn at the last start."),
    ("recovery_healed_words", "healed", "Words written anew at the last start."),
    ("recovery_seconds", "seconds", "How long the last start took to recover."),
)
OUTCOMES = ("opened", "reused", "forced")
LEFT = ("left", "unreachable", "silent", "connected_again", "revoked")
# The library would answer a scrape whatever the path.
PATHS = ("/metrics", "/")


def families(status: Status) -> Iterator[Metric]:
    """Every family of one status."""
    for name, key, text in COUNTERS:
        if status.get(key) is not None:
            yield CounterMetricFamily(f"zfabric_{name}", text, value=status[key])
    for name, key, text in GAUGES:
        if status.get(key) is not None:
            yield GaugeMetricFamily(f"zfabric_{name}", text, value=status[key])
    yield from _by_cause(status)
    yield from _by_model(status)
    yield from _by_worker(status)
    yield from _of_the_store(status)
    if "dispatch_slice_buckets" in status:
        yield _slices(status)
    users = status["security"]["users"]
    yield GaugeMetricFamily("zfabric_key_users", "Users with a key; 0 is without.", value=users)
    yield InfoMetricFamily("zfabric_build", "The release.", value={"version": status["release"]})


def _by_cause(status: Status) -> Iterator[Metric]:
    padding = CounterMetricFamily(
        "zfabric_padding_tokens", "Padding by cause; the causes add up.", labels=["reason"]
    )
    for reason, tokens in status["waste_tokens"].items():
        padding.add_metric([reason], tokens)
    lanes = CounterMetricFamily(
        "zfabric_lane_assignments", "Items by what their lane was.", labels=["outcome"]
    )
    for outcome in OUTCOMES:
        lanes.add_metric([outcome], status[f"lanes_{outcome}_total"])
    left = CounterMetricFamily(
        "zfabric_worker_disconnects", "Workers whose connection ended.", labels=["reason"]
    )
    for reason in LEFT:
        left.add_metric([reason], status["counters"].get(f"worker_disconnects_{reason}", 0))
    events = CounterMetricFamily(
        "zfabric_events", "Events by name, as the log has them.", labels=["event", "level"]
    )
    # A counter that appears with its first event has no rate for it.
    for name in sorted({*EVENTS, *status["events_total"]}):
        events.add_metric([name, level_of(name)], status["events_total"].get(name, 0))
    refused = CounterMetricFamily(
        "zfabric_access_refused", "Keys, names and requests that were refused.", labels=["reason"]
    )
    for reason, number in status["security"]["refusals"].items():
        refused.add_metric([reason], number)
    yield from (padding, lanes, left, events, refused)


def _by_model(status: Status) -> Iterator[Metric]:
    ready = GaugeMetricFamily("zfabric_model_items_ready", "Items that wait.", labels=["model"])
    workers = GaugeMetricFamily("zfabric_workers", "Workers that are live.", labels=["model"])
    paused = GaugeMetricFamily("zfabric_model_paused", "1 while paused.", labels=["model"])
    oldest = GaugeMetricFamily(
        "zfabric_oldest_item_age_seconds", "Age of the oldest waiting item.", labels=["model"]
    )
    for row in status["models"]:
        name = [row["model"]]
        ready.add_metric(name, row["ready_items"])
        workers.add_metric(name, row["workers"])
        paused.add_metric(name, row["paused"])
        oldest.add_metric(name, row["oldest_item_age_s"] or 0.0)
    yield from (ready, workers, paused, oldest)


def _by_worker(status: Status) -> Iterator[Metric]:
    """Of workers that are live: names come and go."""
    queries = CounterMetricFamily(
        "zfabric_prefix_cache_queries_tokens",
        "Prompt tokens that the worker's engine looked up.",
        labels=["worker"],
    )
    hits = CounterMetricFamily(
        "zfabric_prefix_cache_hits_tokens", "Those that its cache had.", labels=["worker"]
    )
    items = CounterMetricFamily("zfabric_worker_items", "Items it finished.", labels=["worker"])
    real = CounterMetricFamily("zfabric_worker_tokens", "Real tokens it got.", labels=["worker"])
    padded = CounterMetricFamily(
        "zfabric_worker_padded_tokens", "Tokens it got, padded.", labels=["worker"]
    )
    beat = GaugeMetricFamily(
        "zfabric_worker_heartbeat_age_seconds", "Since it was last heard.", labels=["worker"]
    )
    for row in (row for row in status["workers"] if row["live"]):
        name = [row["name"]]
        if row["cache_queries_tokens"] is not None:
            queries.add_metric(name, row["cache_queries_tokens"])
            hits.add_metric(name, row["cache_hits_tokens"])
        items.add_metric(name, row["items_done"])
        real.add_metric(name, row["real_tokens"])
        padded.add_metric(name, row["padded_tokens"])
        beat.add_metric(name, row["heartbeat_age_s"])
    yield from (queries, hits, items, real, padded, beat)


def _of_the_store(status: Status) -> Iterator[Metric]:
    storage, recovery = status["storage"], status["recovery"]
    full = 0 if storage["full"] is None else 1
    yield GaugeMetricFamily("zfabric_storage_full", "1 while nothing is taken.", value=full)
    for name, key in (("disk_bytes", "disk_bytes"), ("disk_limit_bytes", "disk_bytes_limit")):
        if storage[key] is not None:
            yield GaugeMetricFamily(f"zfabric_{name}", "Bytes of the store.", value=storage[key])
    quarantined = status["quarantined_items"]
    yield GaugeMetricFamily("zfabric_items_quarantined", "Items set aside.", value=quarantined)
    for name, key, text in RECOVERY:
        if recovery is not None:
            yield GaugeMetricFamily(f"zfabric_{name}", text, value=recovery[key])


def _slices(status: Status) -> Metric:
    """How long handing out took at a time: `dispatch_slice_buckets` is (upper bound, count)."""
    total, buckets = 0, []
    for bound, count in status["dispatch_slice_buckets"]:
        total += count
        buckets.append(("+Inf" if bound is None else f"{bound:g}", total))
    return HistogramMetricFamily(
        "zfabric_dispatch_slice_seconds",
        "Time of handing out batches before anything else got its turn.",
        buckets=buckets,
        sum_value=status["dispatch_slices_s"],
    )


class _FromStatus(Collector):
    """Families of a status that is asked for at each scrape."""

    def __init__(self, ask: Callable[[], Status]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        """Every family, as of now; none where the broker has ended."""
        try:
            status = self._ask()
        except TimeoutError:
            return
        yield from families(status)

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering asks nothing."""
        return iter(())


def registry(ask: Callable[[], Status]) -> CollectorRegistry:
    """A registry that has what `ask` answers."""
    made = CollectorRegistry(auto_describe=False)
    made.register(_FromStatus(ask))
    return made


def only_at(paths: Iterable[str], app: Callable[..., Any]) -> Callable[..., Any]:
    """The WSGI application at these paths; everything else is not found."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] in paths:
            return app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"there is nothing here but /metrics\n"]

    return answer


class Handler(WSGIRequestHandler):
    """One connection: it holds a thread and a descriptor of the broker, so it has to speak."""

    # seconds
    timeout = 10.0

    def log_message(self, *args: object) -> None:
        """Scrapes are no news."""


def _said_unless_gone(request: object, client_address: object) -> None:
    if not isinstance(sys.exception(), OSError):
        traceback.print_exc()


def serve(bind: str, port: int, ask: Callable[[], Status]) -> tuple[int, Callable[[], None]]:
    """Serve `http://bind:port/metrics` from a thread; the port it got, and how to end it.

    Raises ConfigError where the port cannot be had.
    """
    try:
        known = registry(ask)
        server, thread = start_http_server(port, bind, known)
        server.set_app(only_at(PATHS, make_wsgi_app(known)))
        # Who goes away is no news, and who says nothing must not stay.
        server.RequestHandlerClass = Handler
        server.handle_error = _said_unless_gone  # type: ignore[method-assign]
    except OSError as error:
        ports = error.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "another --metrics-port may be free" if ports else "see --metrics-bind"
        text = f"cannot serve metrics on {bind} port {port}: {error.strerror}; {hint}"
        raise ConfigError(text) from None

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, end
