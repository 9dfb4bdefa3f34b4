"""Spans of events, received by a real OTLP receiver."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from server_harness import Server, event

from waiting import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def receiver():
    """An OTLP receiver and a webhook's sink on one port; `spans` and `requests` have what came."""
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

    class Handler(BaseHTTPRequestHandler):
        def do_OPTIONS(self):
            self.answer({"WebHook-Allowed-Origin": "*"})

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                sent = messages.ExportTraceServiceRequest.FromString(body)
                server.spans += [
                    span
                    for resource in sent.resource_spans
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
            else:
                server.requests.append((dict(self.headers), body))
            self.answer({})

        def answer(self, headers):
            self.send_response(200)
            for name, value in ({"Content-Length": "0"} | headers).items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.spans, server.requests = [], []
    Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def attributes(span):
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def test_an_event_continues_its_trace(tmp_path, receiver):
    """Publishing and the request to a sink are spans of the event's trace; the event itself is not changed."""
    flags = ["--otel-endpoint", receiver.url, "--webhook-allow", "127.0.0.1", "--journal-port", "none"]  # fmt: skip
    with Server(tmp_path, *flags) as server:
        made = server.request(
            "POST",
            "/subscriptions",
            json.dumps({"sink": f"{receiver.url}/sink", "protocol": "HTTP", "config": {"channel": "orders"}}),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        assert made.status == 201, made
        server.publish("orders", event("1", {"n": 1}, type="order", traceparent=SAMPLED))
        server.publish("orders", event("2", {"n": 2}), event("3", traceparent=SAMPLED))
        binary = {"Content-Type": "application/json", "ce-id": "4", "ce-source": "//test", "ce-type": "t", "ce-specversion": "1.0", "ce-traceparent": SAMPLED}  # fmt: skip
        assert server.request("POST", "/channels/orders", "{}", binary).status == 202
        for number, odd in enumerate([NOT_SAMPLED, "nonsense", ""]):
            server.publish("orders", event(f"odd{number}", traceparent=odd))
        wait_until(lambda: len(receiver.requests) == 7, "deliveries")
    spans = {(span.name, attributes(span)["cloudevents.event_id"]): span for span in receiver.spans}
    sent = {json.loads(body)["id"]: (headers, json.loads(body)) for headers, body in receiver.requests}  # fmt: skip

    assert set(spans) == {(f"{what} orders", id_) for what in ("publish", "deliver") for id_ in "134"}  # fmt: skip
    for span in spans.values():
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        assert attributes(span)["messaging.destination.name"] == "orders"
    assert attributes(spans["publish orders", "1"])["virta.offset"] == 0
    span_id = spans["deliver orders", "1"].span_id.hex()
    assert sent["1"][0]["traceparent"] == f"00-{TRACE}-{span_id}-01"
    assert sent["1"][1]["traceparent"] == SAMPLED
    assert "traceparent" not in sent["2"][0]


def test_a_receiver_that_is_not_there_stops_nothing(tmp_path, receiver):
    """Publishing goes on, and the server ends in time."""
    receiver.shutdown()
    receiver.server_close()
    with Server(tmp_path, "--otel-endpoint", receiver.url, "--journal-port", "none") as server:
        assert server.publish("orders", event("1", traceparent=SAMPLED)).status == 202
        assert server.request("GET", "/readyz").status == 200

    assert server.process.returncode == 0


@pytest.mark.parametrize("address", ["localhost:4318", "ftp://x", "http://"])
def test_an_address_that_is_none(tmp_path, address):
    server = Server(tmp_path, "--otel-endpoint", address)

    server.stop()
    assert server.process.returncode != 0
    assert "is no address of an OTLP receiver: http://HOST:4318" in "".join(server.said)
