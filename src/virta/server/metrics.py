"""
`/metrics`: Prometheus text; with `--thorium-compatible` the metrics that Thorium has get its names.

Values are read from the service at each scrape. Labels are bounded: a router, a translator, an HTTP
status, a listed pipeline, never a channel or a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from virta.event.rules import IDENTITY_BYTES_MAX
from virta.hub.publisher import DELAY_BOUNDS
from virta.journal.jobs.job import STATE_NAMES
from virta.match import python_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virta.journal.serving.tcp import JournalServer
    from virta.server.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4"
# Of the classes in which delays are counted, one in so many is a bucket.
DELAY_BUCKET_EVERY = 4

# Metrics that Thorium has under the same name with its own prefix.
OF_THORIUM = frozenset(
    {
        "virta_active_queries",
        "virta_data_byte_budget",
        "virta_event_routing_seconds",
        "virta_idempotency_key_cache_size",
        "virta_json_translation_seconds",
        "virta_outstanding_events",
    }
)

# fmt: off
GAUGES: tuple[tuple[str, str, Callable[[Service], float]], ...] = (
    ("virta_data_byte_budget", "Bytes of channel, source and id", lambda _: IDENTITY_BYTES_MAX),
    ("virta_outstanding_events", "Events accepted, not yet durable and matched",
     lambda s: s.publisher.outstanding),
    ("virta_consumers", "Subscriptions on channels", lambda s: s.hub.subscription_count),
    ("virta_stream_consumers", "Open /subscribe sockets", lambda s: s.hub.stream_consumer_count),
    ("virta_webhooks", "Subscriptions with a sink", lambda s: len(s.webhooks.hooks)),
    ("virta_unfinished_body_bytes", "Bytes of bodies that are still arriving",
     lambda s: s.unfinished.bytes),
    ("virta_filters", "Registered filters", lambda s: len(s.registry)),
    ("virta_replays", "Consumers still in history", lambda s: s.replayer.running),
    ("virta_log_first_offset", "Oldest offset kept", lambda s: s.log.first_offset),
    ("virta_log_next_offset", "Offset of the next record", lambda s: s.log.next_offset),
    ("virta_log_bytes", "Size of the log", lambda s: s.log.bytes),
    ("virta_ready", "1 when requests are served", lambda s: s.ready),
    ("virta_disk_free_bytes", "Free bytes where the data is", lambda s: s.figures.last.disk_free_bytes),
    ("virta_disk_bytes", "Size of the disk where the data is", lambda s: s.figures.last.disk_bytes),
    ("virta_distinct_filters", "Distinct filters of subscribers", lambda s: s.figures.last.filters),
    ("virta_webhooks_failing", "Webhooks whose last attempt failed", lambda s: s.figures.last.webhooks_failing),
)
COUNTERS: tuple[tuple[str, str, Callable[[Service], float]], ...] = (
    ("virta_retention_bytes", "Bytes that retention removed", lambda s: s.retention.removed_bytes),
    ("virta_retention_records", "Records that retention removed", lambda s: s.retention.removed_records),
    ("virta_requests", "Requests", lambda s: s.requests),
    ("virta_connections", "Connections opened", lambda s: s.connections_opened),
    ("virta_events_published", "Events written by this server", lambda s: s.publisher.published),
    ("virta_events_duplicate", "Repeats that were dropped", lambda s: s.publisher.duplicates),
    ("virta_commits", "Writes to the log", lambda s: s.publisher.commits),
    ("virta_deliveries", "Copies sent to consumers", lambda s: s.hub.delivered),
    ("virta_deliveries_dropped", "Copies slow consumers lost", lambda s: s.hub.dropped_total),
    ("virta_slow_disconnects", "Consumers ended for slowness", lambda s: s.hub.slow_disconnects),
    ("virta_view_unkeyed", "Records without a key in channels with live views",
     lambda s: s.views.statistics()["unkeyed"]),
    ("virta_scanned_filters_refused", "Filters refused by the budget for scanned ones",
     lambda s: s.scans.refused),
    ("virta_searched_bytes", "Bytes of the log read to find events by source and id",
     lambda s: s.replayer.searched_bytes),
)
# Of the journal, by virta.journal.jobs.table.TOTAL_NAMES in that order.
JOURNAL_TOTALS = (
    ("pushes", "Commands that were accepted"),
    ("handouts", "Attempts that were handed out"),
    ("acks", "Jobs that were done"),
    ("failures", "Attempts that failed"),
    ("lapses", "Attempts whose deadline passed"),
    ("deaths", "Jobs that became dead"),
)
PIPELINE_FIGURES = (
    ("restarts", "Starts after failures"),
    ("rows", "Rows its run has read"),
    ("rows_per_second", "Rows read per second of work"),
    ("lag", "Records it has not read yet"),
    ("late", "Rows that came too late"),
    ("dead", "Rows among the dead letters"),
)
CAPTURE_FIGURES = (
    ("restarts", "Starts after failures"),
    ("records", "Records its run has appended"),
    ("lag_bytes", "Bytes of WAL that are not confirmed"),
    ("retained_bytes", "Bytes of WAL that the database keeps for it"),
    ("recorded", "Changes in the database that are not captured"),
)
# fmt: on


class Metrics:
    """Collects the metrics of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._pipelines: list[dict[str, Any]] = []

    def text(self, pipelines: list[dict[str, Any]]) -> bytes:
        """Return all metrics; `pipelines` are the overviews of the listed pipelines."""
        self._pipelines = pipelines
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing: otherwise registration would collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, under Thorium's name where that is asked for."""
        thorium = self._service.config.thorium_compatible
        for metric in self._collect():
            if thorium and metric.name in OF_THORIUM:
                theirs = metric.name.replace("virta_", "thorium_", 1)
                samples = [
                    s._replace(name=s.name.replace("virta_", "thorium_", 1)) for s in metric.samples
                ]
                metric.name, metric.samples = theirs, samples
            yield metric

    def _collect(self) -> Iterator[Metric]:
        service = self._service
        for name, text, read in GAUGES:
            yield GaugeMetricFamily(name, text, value=read(service))
        for name, text, read in COUNTERS:
            yield CounterMetricFamily(name, text, value=read(service))
        yield from self._of_publishing()
        refusals = CounterMetricFamily("virta_refusals", "Refused requests", labels=["status"])
        for status, number in sorted(service.responder.refusals.items()):
            refusals.add_metric([str(status)], number)
        yield refusals
        yield from self._of_filters()
        yield from self._labelled_like_thorium()
        if service.shipper is not None:
            shipping = service.shipper.status()
            for name, text, value in (
                (
                    "shipped_offset",
                    "Offset after the last record in object storage",
                    shipping.next_offset,
                ),
                ("lag_records", "Records that are not in object storage yet", shipping.lag),
                ("failing", "1 while shipping fails", int(shipping.problem is not None)),
            ):
                yield GaugeMetricFamily(f"virta_tier_{name}", text, value=value)
        if service.journal is not None:
            yield from self._of_journal(service.journal)
        if self._pipelines:
            yield from self._of_pipelines()
        if captures := self._service.captures.overviews():
            yield from _of_captures(captures)

    def _of_filters(self) -> Iterator[Metric]:
        scans = self._service.scans
        for name, text, counts in (
            ("virta_scanned_filters", "Filters that every event tests", scans.filters),
            (
                "virta_python_conditions",
                "Conditions of filters that Python evaluates",
                scans.python_conditions,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["place"])
            for place, count in counts.items():
                gauge.add_metric([place], count)
            yield gauge
        calls = CounterMetricFamily(
            "virta_python_evaluations", "Questions of the filter index to Python", labels=["what"]
        )
        for what, count in python_calls().items():
            calls.add_metric([what], count)
        yield calls

    def _of_publishing(self) -> Iterator[Metric]:
        figures, total = self._service.publisher.figures, 0
        buckets: list[tuple[str, float]] = []
        for index, count in enumerate(figures.delays):
            total += count
            if index == len(DELAY_BOUNDS):
                buckets.append(("+Inf", total))
            elif index % DELAY_BUCKET_EVERY == 0:
                buckets.append((f"{DELAY_BOUNDS[index]:.6g}", total))
        yield HistogramMetricFamily(
            "virta_publish_to_deliver_seconds",
            "Time from the arrival of a publication until it is durable and delivered",
            buckets=buckets,
            sum_value=figures.seconds,
        )
        appends, seconds = self._service.publisher.append_figures
        summary = SummaryMetricFamily("virta_log_append_seconds", "Appends to the log, with syncs")
        summary.add_metric([], appends, seconds)
        yield summary

    def _labelled_like_thorium(self) -> Iterator[Metric]:
        hub, service = self._service.hub, self._service
        for name, text, value in (
            ("virta_active_queries", "Parts of active queries", hub.conjunctions),
            ("virta_idempotency_key_cache_size", "Events in memory", len(service.idempotency)),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["router"])
            gauge.add_metric(["0"], value)
            yield gauge
        for name, text, label, count, seconds in (
            (
                "virta_event_routing_seconds",
                "Matching and fan-out",
                "router",
                hub.routed,
                hub.routing_seconds,
            ),
            (
                "virta_json_translation_seconds",
                "Reading bodies",
                "translator",
                service.translations,
                service.translation_seconds,
            ),
        ):
            summary = SummaryMetricFamily(name, text, labels=[label])
            summary.add_metric(["0"], count, seconds)
            yield summary

    def _of_journal(self, server: JournalServer) -> Iterator[Metric]:
        # The only label is a job's state: the number of domains is not bounded.
        node = server.node
        jobs, store, now = node.engine.jobs, node.engine.store, node.engine.clock()
        jobs.tick(now)
        states = GaugeMetricFamily("virta_journal_jobs", "Jobs by state", labels=["state"])
        for name, count in zip(STATE_NAMES, jobs.counts(), strict=False):
            states.add_metric([name], count)
        yield states
        for name, text, value in (
            (
                "oldest_ready_seconds",
                "Time since the oldest ready job became ready",
                jobs.oldest_ready(now) / 1e6,
            ),
            ("domains", "Domains with jobs or settings", len(jobs.domains)),
            ("keys", "Keys of values", len(store)),
            ("memory_bytes", "Memory of values", store.memory_bytes),
            ("disk_bytes", "Size of the snapshot and the log since", node.engine.disk_bytes()),
            ("connections", "Open connections", server.connections),
            ("failed", "1 when nothing persistent is accepted", int(node.failure is not None)),
        ):
            yield GaugeMetricFamily(f"virta_journal_{name}", text, value=value)
        for number, (name, text) in enumerate(JOURNAL_TOTALS):
            value = jobs.totals[number]
            yield CounterMetricFamily(f"virta_journal_{name}", text, value=value)
        yield CounterMetricFamily("virta_journal_requests", "Requests", value=node.engine.handled)
        commits = SummaryMetricFamily(
            "virta_journal_commit_seconds", "Writing to the log and waiting for the disk"
        )
        commits.add_metric([], node.commits, node.commit_seconds)
        yield commits

    def _of_pipelines(self) -> Iterator[Metric]:
        # Gauges only: a run that restarts counts from zero.
        for state in ("running", "failed"):
            yield self._by_pipeline(state, f"1 while it is {state}", lambda p: p["state"] == state)  # noqa: B023
        for name, text in PIPELINE_FIGURES:
            yield self._by_pipeline(name, text, lambda p: p.get(name) or 0)  # noqa: B023

    def _by_pipeline(self, name: str, text: str, read: Callable[[dict[str, Any]], float]) -> Metric:
        gauge = GaugeMetricFamily(f"virta_pipeline_{name}", text, labels=["pipeline"])
        for pipeline in self._pipelines:
            gauge.add_metric([pipeline["pipeline"]], read(pipeline))
        return gauge


def _of_captures(captures: list[dict[str, Any]]) -> Iterator[Metric]:
    running = GaugeMetricFamily("virta_cdc_running", "1 while a capture runs", labels=["source"])
    for capture in captures:
        running.add_metric([capture["name"]], capture["state"] == "running")
    yield running
    for name, text in CAPTURE_FIGURES:
        gauge = GaugeMetricFamily(f"virta_cdc_{name}", text, labels=["source"])
        for capture in captures:
            gauge.add_metric([capture["name"]], capture.get(name) or 0)
        yield gauge
