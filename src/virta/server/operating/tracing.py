"""
OpenTelemetry: spans of events that carry a `traceparent`, sent to an OTLP receiver over HTTP. Off by default.

An event continues the trace in its `traceparent` attribute (CloudEvents' distributed tracing extension):

    publish   from the arrival of the event until it is durable and delivered
    deliver   one request to a webhook's sink, which gets the span as its `traceparent` header

The attribute itself is stored and delivered as it came. Events without it, and traces that their first part did not
sample, make no span. Spans wait in a bounded queue of the SDK, which drops what a slow receiver does not take.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from virta.errors import ConfigError
from virta.hub.event_batch import EventBatch

if TYPE_CHECKING:
    from virta.hub.delivery import Delivery
    from virta.hub.publisher import Part

MARK = b'"traceparent"'
PATH = "/v1/traces"
EXPORT_S = 5.0  # of one request to the receiver
FLUSH_MS = 2000  # at the end of the server


class _TracedEvent(msgspec.Struct):
    traceparent: str = ""
    tracestate: str = ""
    type: str = ""


def make_tracing(endpoint: str | None, service_name: str) -> Tracing | None:
    """
    Return what makes spans, or None without a receiver.

    Raises:
        ConfigError: the address is invalid, or OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(
            f"{endpoint!r} is no address of an OTLP receiver: http://HOST:4318",
            setting="otel_endpoint",
        )
    try:
        return Tracing(endpoint, service_name)
    except ImportError as error:
        raise ConfigError(
            f"--otel-endpoint needs OpenTelemetry ({error.name} is missing): pip install 'virta[otel]'",
            setting="otel_endpoint",
        ) from error


class Tracing:
    """Makes spans and sends them. The packages are imported on use: they are an extra."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace import SpanKind  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        url = endpoint if urlsplit(endpoint).path not in {"", "/"} else endpoint.rstrip("/") + PATH
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "virta", "service.instance.id": service_name})
        )
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("virta")
        self._propagator = TraceContextTextMapPropagator()
        self._kinds = SpanKind

    def published(self, part: Part, since: float) -> None:
        """Make the spans of published events; `since` is when they arrived, by `time.perf_counter`."""
        if isinstance(part, EventBatch):
            if MARK not in part.lines:
                return
            part = part.deliveries()
        end = time.time_ns()
        start = end - int((time.perf_counter() - since) * 1e9)
        for delivery in part:
            span = self._start("publish", self._kinds.SERVER, delivery, start)
            if span is not None:
                span.end(end)

    def deliver(self, delivery: Delivery, subscription: str) -> DeliverySpan | None:
        """Return the span of a request to a sink, or None for an event without a trace."""
        span = self._start("deliver", self._kinds.CLIENT, delivery, None)
        if span is None:
            return None
        span.set_attribute("virta.subscription", subscription)
        return DeliverySpan(span)

    def close(self) -> None:
        """Send what is left; blocks for some seconds at most."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _start(self, name: str, kind: Any, delivery: Delivery, start: int | None) -> Any:
        if MARK not in delivery.value:
            return None
        try:
            event = msgspec.json.decode(delivery.value, type=_TracedEvent)
        except msgspec.DecodeError:
            return None  # an attribute of another type: no trace
        if not event.traceparent:
            return None
        carrier = {"traceparent": event.traceparent, "tracestate": event.tracestate}
        context = self._propagator.extract(carrier)
        if not context:
            return None  # not a traceparent
        attributes: dict[str, Any] = {
            "messaging.system": "virta",
            "messaging.destination.name": delivery.channel,
            "cloudevents.event_id": delivery.id,
            "cloudevents.event_source": delivery.source,
            "cloudevents.event_type": event.type,
            "virta.offset": delivery.offset,
        }
        return self._tracer.start_span(
            f"{name} {delivery.channel}", context, kind, attributes, start_time=start
        )


class DeliverySpan:
    """The span of one request to a sink."""

    def __init__(self, span: Any) -> None:
        self._span = span

    @property
    def headers(self) -> dict[str, str]:
        """The span as the header that continues it (W3C Trace Context)."""
        context = self._span.get_span_context()
        flags = int(context.trace_flags)
        return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"}

    def end(self, problem: str | None) -> None:
        """End it; `problem` says why the sink did not accept the event."""
        if problem:
            from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

            self._span.set_status(Status(StatusCode.ERROR, problem))
        self._span.end()
