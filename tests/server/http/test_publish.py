"""Publishing over HTTP: every status and code of Thorium's interface, through real sockets."""

from __future__ import annotations

import contextlib
import json
import re
import socket

import pytest
from server_harness import BATCH, STRUCTURED, Server, event

import virta

JSON = {"Content-Type": "application/json", "ce-source": "//s", "ce-id": "1"}


def raw(server, data, *, half_close=False, timeout=10):
    """Send bytes; return everything until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def problem_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nContent-Type: application/problem+json" in head
    return json.loads(body)


def test_accepted_has_the_common_headers(server):
    """A 202 is itself an event, and names the durability."""
    answer = server.publish("p", event("common"))

    assert answer.body == b'{"code":"accepted"}'
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert answer.headers["ce-datacontenttype"] == "application/json; charset=utf-8"
    assert answer.headers["ce-specversion"] == "1.0"
    assert answer.headers["ce-type"] == "virta.response"
    assert answer.headers["ce-source"] == "//virta"
    assert len(answer.headers["ce-id"]) == 20
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", answer.headers["ce-time"])
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["connection"] == "keep-alive"
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["virta-durability"] == "none"
    assert not [name for name in answer.headers if name.startswith("thorium")]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_put_is_post(server, method):
    """PUT publishes like POST."""
    body = json.dumps(event(f"m-{method}"))

    answer = server.request(method, "/channels/p", body, {"Content-Type": STRUCTURED})

    assert (answer.status, answer.code) == (202, "accepted")


@pytest.mark.parametrize(
    ("path", "headers", "body", "status", "expected"),
    [
        ("a/b", JSON, "{}", 400, {"code": "invalid-channel", "channel": "a/b"}),
        ("", JSON, "{}", 400, {"code": "invalid-channel", "channel": ""}),
        ("%1A", JSON, "{}", 400, {"code": "invalid-channel", "channel": "%1A"}),
        ("%zz", JSON, "{}", 400, {"code": "invalid-channel", "channel": "%zz"}),
        ("meta", JSON, "{}", 403, {"code": "disallowed-meta-channel-send"}),
        ("m%65ta", JSON, "{}", 403, {"code": "disallowed-meta-channel-send"}),
        ("%24virta%2Fstreams", JSON, "{}", 403, {"code": "reserved-channel"}),
        ("p", {}, "{}", 400, {"code": "missing-content-type"}),
        (
            "p",
            {"Content-Type": "text/plain"},
            "{}",
            400,
            {"code": "invalid-content-type", "contentType": "text/plain"},
        ),
        ("p", JSON | {"Content-Type": "application/cloudevents+avro"}, "{}", 400, {"code": "invalid-content-type"}),
        ("p", {"Content-Type": "text/plain", "ce-type": "t"}, "{}", 400, {"code": "missing-event-source"}),
        ("p", {"ce-source": "s"}, "{}", 400, {"code": "missing-event-id"}),
        ("p", {"Content-Type": "application/json", "ce-id": "1"}, "{}", 400, {"code": "missing-event-source"}),
        ("p", {"Content-Type": "application/json", "ce-source": "s"}, "{}", 400, {"code": "missing-event-id"}),
        ("p", JSON | {"ce-datacontenttype": "text/xml"}, "{}", 400, {"code": "conflicting-data-type-headers"}),
        ("p", JSON | {"Content-Length": "0"}, None, 400, {"code": "invalid-content-length"}),
        ("p", JSON, "{", 400, {"code": "invalid-json-body"}),
        ("p", JSON, "{} x", 400, {"code": "invalid-json-body"}),
        ("p", JSON, b"\xff", 400, {"code": "invalid-json-body"}),
        ("p", {"Content-Type": STRUCTURED}, "[]", 400, {"code": "invalid-json-body"}),
        ("p", {"Content-Type": BATCH}, "{}", 400, {"code": "invalid-json-body"}),
        ("p", {"Content-Type": STRUCTURED}, '{"id":"1"}', 400, {"code": "missing-event-source"}),
        ("p", {"Content-Type": STRUCTURED}, '{"source":1,"id":"1"}', 400, {"code": "missing-event-source"}),
        ("p", {"Content-Type": STRUCTURED}, '{"source":"s"}', 400, {"code": "missing-event-id"}),
        ("p", {"Content-Type": STRUCTURED}, '{"source":"s","id":null}', 400, {"code": "missing-event-id"}),
        ("p", {"Content-Type": STRUCTURED}, '{"source":"s","id":true}', 400, {"code": "missing-event-id"}),
        (
            "p",
            {"Content-Type": BATCH},
            '[{"source":"s","id":"b1"},{"source":"s"}]',
            400,
            {"code": "missing-event-id", "offset": 1},
        ),
        (
            "p",
            {"Content-Type": BATCH},
            '[{"source":"s","id":"b1"},7]',
            400,
            {"code": "invalid-json-body", "offset": 1},
        ),
        (
            "p",
            {"Content-Type": STRUCTURED},
            json.dumps({"source": "s" * 70000, "id": "1"}),
            413,
            {"code": "channel-idempotency-too-large", "maxByteSize": 65536},
        ),
        ("p", {"Content-Type": STRUCTURED}, "[" * 5000, 400, {"code": "invalid-json-body"}),
        ("p", {"Content-Type": STRUCTURED}, '{"source":"s","id":"x","data":NaN}', 400, {"code": "invalid-json-body"}),
    ],
)  # fmt: skip
def test_refusals(server, path, headers, body, status, expected):
    """The first failed check decides the response, which has the members of its code."""
    answer = server.request("POST", f"/channels/{path}", body, headers)

    assert answer.status == status
    assert answer.json | expected == answer.json
    assert answer.headers["ce-specversion"] == "1.0"


def test_a_bad_element_refuses_the_whole_batch(server):
    """Nothing of a refused batch is stored: its valid events can be sent again."""
    bad = [event("whole-1"), {"id": "x"}]
    refused = server.request("POST", "/channels/w", json.dumps(bad), {"Content-Type": BATCH})
    before = metric(server, "virta_events_duplicate_total")

    server.publish("w", event("whole-1"))

    assert (refused.code, refused.json["offset"]) == ("missing-event-source", 1)
    assert metric(server, "virta_events_duplicate_total") == before


def metric(server, name):
    for line in server.request("GET", "/metrics").body.decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise AssertionError(name)


@pytest.mark.parametrize("data", [[1], 5, "x", None, True])
def test_any_data_is_accepted(server, data):
    """CloudEvents allow any JSON as data, in all modes."""
    kind = type(data).__name__
    for answer in (
        server.publish("any", {"source": "s", "id": kind, "data": data}),
        server.publish("any", {"source": "s", "id": "n" + kind}, {"source": "s", "id": "b" + kind, "data_base64": "AA=="}),
        server.request("POST", "/channels/any", json.dumps(data), JSON | {"ce-id": "h" + kind}),
    ):  # fmt: skip
        assert answer.status == 202


def test_empty_batch_is_accepted(server):
    """An empty batch is a 202."""
    answer = server.request("POST", "/channels/p", "[]", {"Content-Type": BATCH})

    assert answer.status == 202


def test_methods(server):
    """Other methods are 405 with the method's name; OPTIONS is answered as a preflight."""
    refused = server.request("DELETE", "/channels/p")
    assert (refused.code, refused.json["method"]) == ("invalid-method", "DELETE")
    assert server.request("HEAD", "/channels/p").status == 405
    asked = {"Access-Control-Request-Headers": "x-y", "Access-Control-Request-Method": "POST"}
    answer = server.request("OPTIONS", "/channels/p", headers=asked)
    assert answer.status == 204
    assert answer.headers["access-control-allow-headers"] == "x-y"
    assert "POST" in answer.headers["access-control-allow-methods"]


@pytest.mark.parametrize("path", ["/nope", "/metrics/x"])
def test_unknown_paths(server, path):
    """Anything else is 404 with the members of every refusal."""
    answer = server.request("GET", path)

    assert (answer.status, answer.code) == (404, "not-found")


def test_chunked_upload(server):
    """A chunked body is accepted, in any pieces."""
    body = json.dumps(event("chunked")).encode()
    head = f"POST /channels/p HTTP/1.1\r\nHost: localhost\r\nContent-Type: {STRUCTURED}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:5], body[5:]))

    answer = raw(server, head.encode() + chunks + b"0\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 202 ")


def test_pipelined_requests_are_answered_in_order(server):
    """A refusal that is ready at once waits for the publication before it; metrics follow."""
    good = json.dumps(event("piped")).encode()
    data = b"POST /channels/p HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
    requests = data % (STRUCTURED.encode(), len(good), good)
    requests += b"DELETE /channels/p HTTP/1.1\r\nHost: localhost\r\n\r\n"
    requests += b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    requests += data % (STRUCTURED.encode(), len(good), good)
    requests += b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    answer = raw(server, requests)

    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"202", b"405", b"200", b"202", b"200"]


def test_refusal_before_the_body_closes_and_is_readable(server):
    """The response arrives although the client is still sending, and closes the connection."""
    head = b"POST /channels/meta HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"

    answer = raw(server, head + b"x" * 500_000)

    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"Connection: close" in answer


def test_short_body_is_partial_content(server):
    """A body that ends early is 400."""
    head = b"POST /channels/p HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/cloudevents+json\r\nContent-Length: 100\r\n\r\n{"

    assert b'"partial-content"' in raw(server, head, half_close=True)


@pytest.mark.parametrize("length", [b"x", b"-1", b"1.5"])
def test_lengths_that_are_no_number(server, length):
    """A length that is not a whole number is `invalid-content-length`."""
    head = b"POST /channels/p HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/cloudevents+json\r\nContent-Length: %b\r\n\r\n"

    assert b'"invalid-content-length"' in raw(server, head % length)


def test_a_length_that_overflows_is_too_large(server):
    """A length that fits no integer is 413."""
    head = f"POST /channels/c HTTP/1.1\r\nHost: localhost\r\nContent-Type: {STRUCTURED}\r\n"
    answer = raw(server, f"{head}Content-Length: 1{'0' * 30}\r\n\r\n".encode())

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body-too-large"' in answer


def test_missing_length(server):
    """Neither a length nor chunks: there is no body to publish."""
    head = b"POST /channels/p HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/cloudevents+json\r\nConnection: close\r\n\r\n"

    assert b'"missing-content-length"' in raw(server, head)


def test_limits_of_the_head(server):
    """Request lines and heads beyond their limits get 414 and 431, in the shape of every error."""
    line = raw(server, b"GET /channels/" + b"x" * 5000)
    head = raw(server, b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 4000 + b"\r\nY: " + b"z" * 5000)
    whole = raw(server, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: %b\r\n\r\n" % (b"y" * 9000))

    for answer, status, code in (
        (line, 414, "request-line-too-long"),
        (head, 431, "head-too-large"),
        (whole, 431, "head-too-large"),
    ):
        problem = problem_of(answer)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert (problem["status"], problem["code"]) == (status, code)
        assert problem["message"] == problem["detail"]
        assert str(problem["maxBytes"]) in problem["detail"]
    assert problem_of(raw(server, b"\x16\x03\x01 not http\r\n\r\n"))["code"] == "invalid-request"


def test_one_connection_too_many(tmp_path):
    """It gets a 503 in the shape of every error, and the others are served."""
    with Server(tmp_path, "--max-connections", "2", "--journal-port", "none") as server:
        with contextlib.ExitStack() as opened:
            for _ in range(2):
                one = socket.create_connection(("127.0.0.1", server.port))
                opened.enter_context(one)
                one.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert one.recv(65536).startswith(b"HTTP/1.1 200 ")
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as refused:
                answer = b""
                while piece := refused.recv(65536):
                    answer += piece
        problem = problem_of(answer)

        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in answer
        assert (problem["code"], problem["limit"]) == ("too-many-connections", 2)


def test_limits_with_the_names_of_thorium(tmp_path):
    """Thorium's HTTP library gives no body."""
    with Server(tmp_path, "--thorium-compatible", "--journal-port", "none") as server:
        head, _, body = raw(server, b"GET /channels/" + b"x" * 5000).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 414 ")
    assert body == b""


def test_expect_continue(server):
    """A client that waits for 100 gets it."""
    body = json.dumps(event("expects")).encode()
    head = b"POST /channels/p HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\nContent-Length: %d\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head % (STRUCTURED.encode(), len(body)))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)

        assert connection.recv(1000).startswith(b"HTTP/1.1 202 ")


def test_foreign_upgrades_are_ignored(server):
    """A client that offers HTTP/2 by upgrade is served over HTTP/1.1, body and all."""
    body = json.dumps(event("h2c")).encode()
    head = b"POST /channels/p HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head % (STRUCTURED.encode(), len(body), body))

        assert connection.recv(1000).startswith(b"HTTP/1.1 202 ")


def test_limits_that_were_set(start):
    """413 at the size limit by length and by counting, 408 when a body takes too long."""
    with start("--max-body-size-bytes", 128, "--body-timeout-ms", 600) as server:
        head = b"POST /channels/p HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/cloudevents+json\r\n"
        fits = json.dumps(event("f", "x" * 40)).encode()
        assert len(fits) <= 128
        # Head and body in one piece: a client that dawdled between them would be too late.
        length = b"Connection: close\r\nContent-Length: %d\r\n\r\n"
        assert raw(server, head + length % len(fits) + fits).startswith(b"HTTP/1.1 202 ")
        big = raw(server, head + length % 129 + b"x" * 129)
        assert big.startswith(b"HTTP/1.1 413 ")
        assert big.endswith(b'"maxBytes":128}')
        counted = raw(server, head + b"Transfer-Encoding: chunked\r\n\r\n81\r\n" + b"x" * 129)
        assert b'"maxBytes":128' in counted
        late = raw(server, head + b"Content-Length: 100\r\n\r\n{")
        assert late.startswith(b"HTTP/1.1 408 ")
        assert b'"body-timeout"' in late
        assert raw(server, b"POST /channels/p HTT") == b""


def test_backpressure(start):
    """While as many events are outstanding as allowed, publishing is 429 with advice."""
    with start(
        "--max-outstanding-events-per-query-thread",
        1,
        "--router-threads",
        1,
        "--durability",
        "none",
    ) as server:
        batch = json.dumps([event(f"bp-{n}") for n in range(50)]).encode()
        one = b"POST /channels/p HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
        request = one % (BATCH.encode(), len(batch), batch)
        last = request.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")

        # Both have to arrive together; the network may see it otherwise now and then.
        for _ in range(100):
            answer = raw(server, request + last)
            if b" 429 " in answer:
                break

        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"202", b"429"]
        assert b'"code":"exceeded-outstanding-event-limit"' in answer
        assert b'"count":100,"limit":1}' in answer
        assert b"Retry-After: 1\r\n" in answer


def test_timings_on_late_refusals(start):
    """With Thorium's names a refusal after the body was read has the time that reading took."""
    with start("--thorium-compatible") as server:
        answer = server.request("POST", "/channels/p", "{", {"Content-Type": STRUCTURED})

    assert re.fullmatch(r"\d+ ms", answer.headers["thorium-body-read-time"])
    assert "thorium-encode-time" not in answer.headers


def test_other_methods_on_metrics_and_sockets(server):
    """Not GET is 405 under /metrics and 404 at Subtub's socket."""
    assert server.request("POST", "/metricsfoo").code == "invalid-method"
    assert server.request("POST", "/subscribe").body == b"Not found"


def test_close_is_answered_with_close(server):
    """A request with `Connection: close` gets a response with it."""
    body = json.dumps(event("closing"))
    headers = {"Content-Type": STRUCTURED, "Connection": "close"}

    answer = server.request("POST", "/channels/p", body, headers)

    assert (answer.status, answer.headers["connection"]) == (202, "close")


@pytest.mark.parametrize(
    ("path", "method", "allowed"),
    [
        ("/filters/a/b", "DELETE", "GET, HEAD, POST, OPTIONS"),
        ("/subscriptions/x", "PATCH", "DELETE, GET, HEAD, PUT, OPTIONS"),
        ("/filters/validate", "GET", "POST"),
        ("/livez", "POST", "GET, HEAD, OPTIONS"),
    ],
)
def test_405_names_every_method(server, path, method, allowed):
    """`Allow` lists the methods of all routes that share the path."""
    answer = server.request(method, path)

    assert (answer.status, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/filters/%/c", "/filters/a/%zz", "/subscriptions/%1", "/%"])
def test_a_bad_escape_is_400_everywhere(server, path):
    """A percent sign without two hex digits is refused."""
    answer = server.request("GET", path)

    assert (answer.status, answer.code) == (400, "malformed-percent-escape")


def test_a_preflight_has_no_length(server):
    """RFC 9110 §8.6: a 204 has no Content-Length."""
    for path in ("/channels/c", "/publish", "/filters/a/b"):
        answer = server.request("OPTIONS", path)
        assert (answer.status, answer.headers.get("content-length")) == (204, None)


def test_headers_are_decoded_by_default(start, tmp_path):
    """Percent-encoded attributes are decoded by default, and left as sent with the flag."""
    kind = {"Content-Type": "application/json", "ce-source": "/s"}
    sent = {"ce-id": "a%20b", "ce-subject": "Euro%20%E2%82%AC", "ce-type": '"t\\"x"'}
    with start("--durability", "none") as server:
        assert server.request("POST", "/channels/c", "{}", kind | sent).status == 202
        server.publish("c", {"source": "/s", "id": "a b"})  # the same event
        bad = server.request("POST", "/channels/c", "{}", kind | {"ce-id": "%ff"})
        with virta.open(server.data_dir / "log", read_only=True) as log:
            (record,) = log.read("c")

    assert (bad.status, bad.code) == (400, "invalid-header")
    assert json.loads(record.value) | {"data": None} == {
        "id": "a b",
        "source": "/s",
        "subject": "Euro \u20ac",
        "type": 't"x',
        "datacontenttype": "application/json",
        "data": None,
    }
    for off in (["--no-percent-decode-headers"], []):
        environ = {} if off else {"VIRTA_PERCENT_DECODE_HEADERS": "false"}
        place = tmp_path / f"off{len(off)}"
        with start(*off, "--durability", "none", data_dir=place, environ=environ) as server:
            assert server.request("POST", "/channels/c", "{}", kind | sent).status == 202
            with virta.open(place / "log", read_only=True) as log:
                (record,) = log.read("c")
        made = json.loads(record.value)
        assert {f"ce-{name}": made[name] for name in ("id", "subject", "type")} == sent
