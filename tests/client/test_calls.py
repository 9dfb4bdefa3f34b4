"""What both clients ask, and how they decide to ask again; without a network."""

from __future__ import annotations

import json
import ssl
from datetime import UTC, datetime

import pytest

from virta.client import calls
from virta.client.frames import Frame
from virta.client.resume import BACKOFF_MAX_S, ResumeState
from virta.errors import ClientError

INDEX = "/filters/my%20index/c%2Fd"


@pytest.mark.parametrize(
    ("call", "method", "path", "body"),
    [
        (calls.publish_streams([("a:b", "x")]), "POST", "/publish", [{"publish_to": "a:b", "payload": "x"}]),
        (calls.ready(), "GET", "/readyz", None),
        (
            calls.register_filter("my index", "c/d", {"exists": "a"}, "koncorde"),
            *("POST", INDEX, {"filter": {"exists": "a"}, "dialect": "koncorde"}),
        ),
        (calls.filter_ids("my index", "c/d"), "GET", INDEX, None),
        (calls.collection_exists("my index", "c/d"), "HEAD", INDEX, None),
        (
            calls.test_document("my index", "c/d", {"a": 1}, "7"),
            *("POST", f"{INDEX}/test", {"document": {"a": 1}, "documentId": "7"}),
        ),
        (
            calls.test_document("my index", "c/d", [], None),
            *("POST", f"{INDEX}/test", {"document": []}),
        ),
        (
            calls.validate_filter("a=1", "query-string"),
            *("POST", "/filters/validate", {"filter": "a=1", "dialect": "query-string"}),
        ),
        (calls.remove_filter("ab12"), "DELETE", "/filters/ab12", None),
    ],
)  # fmt: skip
def test_requests(call, method, path, body):
    """Each call has its method, its path with names escaped, and its body as JSON."""
    assert (call.method, call.path) == (method, path)
    assert (None if call.body is None else json.loads(call.body)) == body
    assert call.body is None or call.headers["Content-Type"] == "application/json"


def test_answers():
    """Calls read what the server answered; some turn a refusal into False."""
    missing = ClientError("no", code="not-found", status=404)
    broken = ClientError("no", code="error", status=500)
    exists = calls.collection_exists("i", "c")

    assert calls.filter_ids("i", "c").read({"ids": ["a"]}, {}) == ["a"]
    assert calls.validate_filter("x", "cesql").read({"valid": True}, {}) == {"valid": True}
    assert calls.remove_filter("x").read(None, {}) is None
    assert calls.ready().read(None, {}) is True
    assert calls.ready().refused(broken) is False
    assert exists.read(None, {}) is True
    assert exists.refused(missing) is False
    with pytest.raises(ClientError):
        exists.refused(broken)


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (calls.channel_path("a b/c"), "/channels/a+b%2Fc"),
        (calls.channel_path("c", "earliest", "x=>1&y=ü"), "/channels/c/from/earliest?x=>1&y=%C3%BC"),
        (
            calls.channel_path("c", datetime(2026, 1, 31, tzinfo=UTC)),
            "/channels/c/from/2026-01-31T00%3A00%3A00%2B00%3A00",
        ),
        (calls.filter_events_path(["a", "b"], None), "/filters/a,b/events"),
        (calls.filter_events_path(["a"], 17), "/filters/a/events?from=17"),
        (calls.streams_path(["a:", "b c"], 9), "/subscribe?streams=a%3A&streams=b+c&max_queued=9"),
    ],
)  # fmt: skip
def test_paths(made, path):
    """Names, starts and queries are escaped; a query keeps the characters of its syntax."""
    assert made == path


@pytest.mark.parametrize("kind", [None, "text/event-stream", "Text/Event-Stream; charset=utf-8"])
def test_a_stream_of_events(kind):
    """A proxy may leave the content type out."""
    calls.check_stream(200, {} if kind is None else {"content-type": kind}, b"")


@pytest.mark.parametrize(
    ("status", "headers", "body", "code"),
    [
        (200, {"content-type": "text/html"}, b"", "not-a-stream"),
        (404, {}, b'{"code":"unknown-filter","message":"no such filter"}', "unknown-filter"),
        (502, {}, b"<html>", "refused"),
    ],
)
def test_no_stream_of_events(status, headers, body, code):
    """Anything else is an error with the server's code."""
    with pytest.raises(ClientError) as caught:
        calls.check_stream(status, headers, body)

    assert (caught.value.code, caught.value.status) == (code, status)


@pytest.mark.parametrize(
    ("status", "final"),
    [
        (None, False),
        (503, False),
        (429, False),
        (408, False),
        (400, True),
        (401, True),
        (500, True),
    ],
)
def test_which_errors_are_final(status, final):
    """A later attempt may succeed without an answer, and after a temporary status."""
    assert calls.is_final(ClientError("no", status=status)) is final


def test_a_certificate_that_is_not_trusted_is_final():
    """Trust does not change while a subscription waits."""
    error = ClientError("no answer", code="unreachable")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")

    assert calls.is_final(error)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:1", "ftp://h", "http://", "http://h:x", "http://[::1"]
)
def test_bad_addresses(url):
    """The error comes when the client is made."""
    with pytest.raises(ClientError) as caught:
        calls.Address(url, None)

    assert caught.value.code == "bad-address"


def test_addresses():
    """Scheme, port, path and token of the URL are used for HTTP and WebSockets."""
    plain = calls.Address("http://h", "secret")
    safe = calls.Address("https://[::1]:8443/virta/", None)

    assert (plain.authority, plain.prefix, plain.tls) == ("h:80", "", False)
    assert plain.headers == {"Authorization": "Bearer secret"}
    assert plain.websocket("/s") == "ws://h:80/s"
    assert (safe.authority, safe.prefix, safe.headers) == ("[::1]:8443", "/virta", {})
    assert safe.websocket("/s") == "wss://[::1]:8443/virta/s"


# Resuming.


def state(**options):
    return ResumeState(lambda start: f"/{start}", None, None, **options)


def test_waits_grow_until_the_stream_is_open():
    """Waits double up to the maximum, and start again after a success."""
    resuming = state()
    waits = [resuming.wait_s() for _ in range(12)]
    resuming.connected()

    assert 0.05 <= waits[0] <= 0.1
    assert BACKOFF_MAX_S / 2 <= waits[-1] <= BACKOFF_MAX_S
    assert resuming.wait_s() <= 0.1


def test_an_outage_is_logged_once(caplog):
    """One warning per outage; another one after the stream was open again."""
    resuming = state()
    error = ClientError("no answer")

    assert resuming.failed(error)
    assert resuming.failed(error)
    assert len(caplog.records) == 1
    resuming.connected()
    assert resuming.failed(error)
    assert len(caplog.records) == 2


def test_what_is_not_tried_again(caplog):
    """A final error, and any error of a subscription that does not reconnect."""
    assert not state().failed(ClientError("no", status=404))
    assert not state(reconnect=False).failed(ClientError("no answer"))
    assert caplog.records == []


def test_messages_of_streams():
    """Messages are returned, positions remembered and gaps reported."""
    gaps = []
    resuming = state(on_gap=gaps.append)

    assert resuming.read_message('{"publish_to":"a","payload":"x","position":"p1"}') == ("a", "x")
    assert resuming.read_message(b'{"position":"p2"}') is None
    assert resuming.read_message('{"gap":{"from":1}}') is None
    assert (resuming.last_event_id, gaps) == ("p2", [{"from": 1}])


def test_gaps_without_a_callback_are_ignored():
    """`on_gap` is optional."""
    assert state().read_frame(Frame("gap", "{}")) is None
    assert state().read_message('{"gap":{}}') is None
