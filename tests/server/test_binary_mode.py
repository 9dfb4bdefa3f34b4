"""CloudEvents binary mode as the HTTP binding has it: any content type, encoded headers, both SDKs."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode

import pytest
from cloudevents.core.bindings import http as new_http
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent as NewEvent
from cloudevents.v1.conversion import to_binary as old_to_binary
from cloudevents.v1.http import CloudEvent as OldEvent
from server_harness import Consumer

import virta
from virta.event import Event

ATTRIBUTES = {"ce-specversion": "1.0", "ce-type": "t", "ce-source": "/s"}
# Data and content type as a publisher has them, and the members that everyone else is to see.
CASES = [
    (None, b'{"a": 1}', {"data": {"a": 1}}),
    (None, b"plain words", {"data": "plain words"}),
    (None, b"\x00\xff", {"data_base64": b64encode(b"\x00\xff").decode()}),
    (None, b"", {}),
    ("text/plain", b"two\nlines", {"data": "two\nlines"}),
    ("text/plain; charset=utf-8", "ü".encode(), {"data": "ü"}),
    ("text/plain; charset=iso-8859-1", b"\xfc", {"data_base64": "/A=="}),
    ("text/html", b"", {}),
    ("application/xml", b"<a>1</a>", {"data": "<a>1</a>"}),
    ("application/json; charset=utf-8", b"[1,\n 2]", {"data": [1, 2]}),
    ("Application/Problem+JSON", b'"x"', {"data": "x"}),
    ("application/octet-stream", b"abc", {"data_base64": "YWJj"}),
    ("image/png", b"\x89PNG\r\n", {"data_base64": b64encode(b"\x89PNG\r\n").decode()}),
]


def heard(server, channel, count):
    """The events of a channel, as a consumer of server-sent events gets them."""

    async def scenario():
        consumer = await Consumer.open(server.port, f"/channels/{channel}/from/earliest")
        await consumer.connected()
        frames = await consumer.frames(count)
        await consumer.close()
        return [frame.json for frame in frames]

    return asyncio.run(scenario())


def test_bodies_of_any_content_type(server):
    """The content type becomes `datacontenttype`, the body what it says; none of both is there without."""
    for number, (kind, body, _) in enumerate(CASES):
        headers = ATTRIBUTES | {"ce-id": str(number), "Content-Length": str(len(body))}
        headers |= {} if kind is None else {"Content-Type": kind}
        answer = server.request("POST", "/channels/bodies", body, headers)
        assert answer.status == 202, (kind, body, answer)

    found = heard(server, "bodies", len(CASES))

    for number, ((kind, _, members), event) in enumerate(zip(CASES, found, strict=True)):
        wanted = {"specversion": "1.0", "type": "t", "source": "/s", "id": str(number), **members}
        assert event == (wanted if kind is None else wanted | {"datacontenttype": kind})


def test_the_library_reads_the_same(server):
    """`virta.event` makes of a message what the server makes of it."""
    for number, (kind, body, _) in enumerate(CASES):
        headers = ATTRIBUTES | {"ce-id": f"l{number}", "ce-subject": "a%20%C3%BC%22"}
        headers |= {} if kind is None else {"Content-Type": kind}
        length = {"Content-Length": str(len(body))}
        assert server.request("POST", "/channels/lib", body, headers | length).status == 202
        event = Event.from_binary(headers, body)
        assert event.subject == 'a ü"'
        found = heard(server, "lib", number + 1)[-1]
        assert Event.from_json(json.dumps(found)) == event


@pytest.mark.parametrize("text", ["Euro € 😀", 'a "quoted" % ü', "100%", "%41", "plain"])
def test_attributes_survive_both_sdks_and_ours(server, text):
    """Headers that are encoded as the binding requires give the original text."""
    channel = f"att{abs(hash(text))}"
    attributes = {"type": "t", "source": "/s", "subject": text, "specversion": "1.0"}
    message = new_http.to_binary(NewEvent(attributes | {"id": "new"}, {"a": 1}), JSONFormat())
    ours = Event(id="ours", source="/s", type="t", subject=text, data={"a": 1}).to_binary()
    for headers, body in ((message.headers, message.body), (dict(ours[0]), ours[1])):
        assert server.request("POST", f"/channels/{channel}", body, headers).status == 202

    assert [event["subject"] for event in heard(server, channel, 2)] == [text, text]


@pytest.mark.parametrize("data", [{"a": [1, None]}, "text", b"\x00\xff", None])
@pytest.mark.parametrize("kind", [None, "application/json", "text/plain", "image/png"])
def test_what_the_sdks_send_by_default(server, data, kind):
    """Events of both generations of the SDK come out as the SDK itself would read its own message."""
    if kind == "application/json" and not isinstance(data, dict):
        return  # the SDKs send a body that is not JSON; or none, which is no JSON either
    channel = f"sdk{kind}{type(data).__name__}".replace("/", "-")
    attributes = {"type": "t", "source": "/s", "id": "1", "specversion": "1.0"}
    attributes |= {} if kind is None else {"datacontenttype": kind}
    new = new_http.to_binary(NewEvent(dict(attributes), data), JSONFormat())
    old = old_to_binary(OldEvent(attributes | {"id": "2"}, data))
    for headers, body in ((new.headers, new.body), old):
        length = {"Content-Length": str(len(body or b""))}
        answer = server.request("POST", f"/channels/{channel}", body or b"", headers | length)
        assert answer.status == 202, (headers, body, answer)

    with (
        virta.Client(f"http://127.0.0.1:{server.port}") as client,
        client.subscribe(channel, start="earliest") as events,
    ):
        first, second = next(events).event, next(events).event
    read = new_http.from_binary(new, JSONFormat())
    wanted = read.get_data()
    if kind == "image/png" and isinstance(wanted, str):
        wanted = new.body  # the SDK decodes what it can; a picture stays bytes
    assert (first.data if first.has_data else None) == wanted
    assert first.datacontenttype == second.datacontenttype == kind
    if kind is None:
        assert (second.data if second.has_data else None) == data


def test_headers_that_were_not_encoded(server):
    """The older SDK sends text as it is, and clients send Latin-1: taken, as is a percent sign alone."""
    raw = old_to_binary(
        OldEvent({"type": "t", "source": "/s", "id": "raw", "subject": "é 100%"}, {"a": 1})
    )
    assert server.request("POST", "/channels/raw", raw[1], raw[0]).status == 202

    assert heard(server, "raw", 1)[0]["subject"] == "é 100%"


@pytest.mark.parametrize("value", ["%C0%A0", "%ff", "%ED%A0%80"])
def test_bytes_that_are_not_utf8_are_refused(server, value):
    """Overlong forms, stray bytes and surrogates in an encoded header are 400 (§3.1.3.2)."""
    headers = ATTRIBUTES | {"ce-id": "1", "ce-subject": value}
    answer = server.request("POST", "/channels/refused", b"{}", headers)

    assert (answer.status, answer.code) == (400, "invalid-header")
    assert "ce-subject" in answer.json["message"]


def test_filters_see_the_data(server):
    """A JSON body without a content type is matched as JSON."""

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/seen?a=1")
        await consumer.connected()
        for number, body in enumerate((b'{"a": 2}', b'{"a": 1}')):
            headers = ATTRIBUTES | {"ce-id": str(number)}
            assert server.request("POST", "/channels/seen", body, headers).status == 202
        frame = await consumer.frame()
        await consumer.close()
        return frame.json["id"]

    assert asyncio.run(scenario()) == "1"
