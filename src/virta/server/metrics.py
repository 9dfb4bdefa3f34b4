"""
`/metrics`: Prometheus text, with Thorium's names and ours.

Values are read from the service at each scrape. Labels are bounded: a router, a translator, an HTTP
status, a listed pipeline, never a channel or a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from virta.event.rules import IDENTITY_BYTES_MAX
from virta.journal.jobs.domain import STATE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.journal.serving.tcp import JournalServer
    from virta.server.service import Service

# In the order of virta.journal.jobs.table.TOTAL_NAMES.
JOURNAL_TOTALS = (
    ("pushes", "Commands that were accepted"),
    ("handouts", "Attempts that were handed out"),
    ("acks", "Jobs that were done"),
    ("failures", "Attempts that failed"),
    ("lapses", "Attempts whose deadline passed"),
    ("deaths", "Jobs that became dead"),
)
CONTENT_TYPE = "text/plain; version=0.0.4"


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
        yield from self._thorium()
        yield from self._gauges()
        yield from self._counters()
        if self._service.journal is not None:
            yield from self._of_journal(self._service.journal)
        if self._pipelines:
            yield from self._of_pipelines()

    def _thorium(self) -> Iterator[Metric]:
        service = self._service
        yield GaugeMetricFamily(
            "thorium_data_byte_budget", "Bytes of channel, source and id", value=IDENTITY_BYTES_MAX
        )
        yield GaugeMetricFamily(
            "thorium_outstanding_events",
            "Events accepted, not yet durable and matched",
            value=service.publisher.outstanding,
        )
        for name, text, value in (
            ("thorium_active_queries", "Parts of standing queries", service.hub.conjunctions),
            (
                "thorium_idempotency_key_cache_size",
                "Events that are remembered",
                len(service.idempotency),
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["router"])
            gauge.add_metric(["0"], value)
            yield gauge
        routing = SummaryMetricFamily(
            "thorium_event_routing_seconds", "Matching and fan-out", labels=["router"]
        )
        routing.add_metric(["0"], service.hub.routed, service.hub.routing_seconds)
        yield routing
        translation = SummaryMetricFamily(
            "thorium_json_translation_seconds", "Reading bodies", labels=["translator"]
        )
        translation.add_metric(["0"], service.translations, service.translation_seconds)
        yield translation

    def _gauges(self) -> Iterator[Metric]:
        service = self._service
        log = service.log
        for name, text, value in (
            ("virta_consumers", "Subscriptions on channels", service.hub.subscription_count),
            (
                "virta_stream_consumers",
                "Open /subscribe sockets",
                service.hub.stream_consumer_count,
            ),
            ("virta_webhooks", "Subscriptions with a sink", len(service.webhooks.hooks)),
            (
                "virta_unfinished_body_bytes",
                "Bytes of bodies that are still arriving",
                service.unfinished.bytes,
            ),
            ("virta_filters", "Registered filters", len(service.registry)),
            ("virta_replays", "Consumers still in history", service.replayer.running),
            ("virta_log_first_offset", "Oldest offset kept", log.first_offset),
            ("virta_log_next_offset", "Offset of the next record", log.next_offset),
            ("virta_log_bytes", "Size of the log", log.bytes),
            ("virta_ready", "1 when requests are served", int(service.ready)),
        ):
            yield GaugeMetricFamily(name, text, value=value)

    def _counters(self) -> Iterator[Metric]:
        service = self._service
        hub, publisher = service.hub, service.publisher
        for name, text, value in (
            ("virta_requests", "Requests", service.requests),
            ("virta_connections", "Connections opened", service.connections_opened),
            ("virta_events_published", "Events written by this server", publisher.published),
            ("virta_events_duplicate", "Repeats that were dropped", publisher.duplicates),
            ("virta_commits", "Writes to the log", publisher.commits),
            ("virta_deliveries", "Copies handed to consumers", hub.delivered),
            ("virta_deliveries_dropped", "Copies slow consumers lost", hub.dropped_total),
            ("virta_slow_disconnects", "Consumers ended for slowness", hub.slow_disconnects),
            (
                "virta_searched_bytes",
                "Bytes of the log read to find events by source and id",
                service.replayer.searched_bytes,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)
        refusals = CounterMetricFamily("virta_refusals", "Refused requests", labels=["status"])
        for status, number in sorted(service.responder.refusals.items()):
            refusals.add_metric([str(status)], number)
        yield refusals

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
            ("domains", "Domains with jobs or settings", len(jobs.schedule.domains)),
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
            gauge = GaugeMetricFamily(
                f"virta_pipeline_{state}", f"1 while it is {state}", labels=["pipeline"]
            )
            for pipeline in self._pipelines:
                gauge.add_metric([pipeline["pipeline"]], int(pipeline["state"] == state))
            yield gauge
        for name, text in (
            ("restarts", "Starts after failures"),
            ("rows", "Rows its run has read"),
            ("rows_per_second", "Rows read per second of work"),
            ("lag", "Records it has not read yet"),
            ("late", "Rows that came too late"),
            ("dead", "Rows among the dead letters"),
        ):
            gauge = GaugeMetricFamily(f"virta_pipeline_{name}", text, labels=["pipeline"])
            for pipeline in self._pipelines:
                gauge.add_metric([pipeline["pipeline"]], pipeline.get(name) or 0)
            yield gauge
