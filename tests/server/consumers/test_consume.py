"""Consuming over server-sent events: frames, queries, meta, repeats, through real sockets."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from server_harness import Consumer, event, ids, shut

import virta

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z"


def test_frames_byte_for_byte(server):
    """Connect, then an event with its comment, name, id and data, exactly as documented."""

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/frames")
        connect = await consumer.frame()
        body = '{"source":"//some where","id":"some-id","data":{"x":1}}'
        server.request(
            "POST", "/channels/frames", body, {"Content-Type": "application/cloudevents+json"}
        )
        data = await consumer.frame()
        await consumer.close()
        return consumer, connect, data

    consumer, connect, data = asyncio.run(scenario())

    assert consumer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert consumer.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in consumer.headers
    assert "ce-id" not in consumer.headers
    assert re.fullmatch(
        rb'event: connect\nid: [0-9a-f]{12}\.\d+\ndata: {"timestamp":"'
        + STAMP.encode()
        + rb'","clientID":"\d+-\d+"}\n\n',
        connect.raw,
    )
    assert re.fullmatch(
        rb': {"timestamp":"'
        + STAMP.encode()
        + rb'","offset":\d+}\nevent: data\nid: %2F%2Fsome%20where\+some-id\n'
        rb'data: {"source":"//some where","id":"some-id","data":{"x":1}}\n\n',
        data.raw,
    )


@pytest.mark.parametrize(
    ("id_", "line"),
    [("a+b", "a%2Bb"), ("ü~", "%C3%BC%7E"), ("a.b-c*d_e", "a.b-c*d_e"), ("a/b c", "a%2Fb%20c")],
)
def test_id_is_form_encoded(server, id_, line):
    """The id line is source, `+` and id, form-encoded as Java does it, but for blanks."""

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/ids")
        await consumer.connected()
        server.publish("ids", event(id_, source="s"))
        made = await consumer.frame()
        await consumer.close()
        return made

    assert asyncio.run(scenario()).id == f"s+{line}"


def test_payloads(server):
    """Structured events arrive as sent on one line; binary ones as their headers say; numbers as ids become text."""

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/payloads")
        await consumer.connected()
        pretty = json.dumps(event("pretty", {"big": 12345678901234567890123, "f": 1.10}), indent=2)
        structured = {"Content-Type": "application/cloudevents+json"}
        server.request("POST", "/channels/payloads", pretty, structured)
        server.request("POST", "/channels/payloads", '{"id":17,"source":"s","n":1e2}', structured)
        binary = {
            "Content-Type": "application/json; charset=utf-8",
            "ce-specversion": "1.0",
            "CE-Source": "//b",
            "ce-id": "b%20c",
            "ce-n": "5",
        }
        server.request("POST", "/channels/payloads", '{\n"x": 1\n}', binary)
        found = await consumer.frames(3)
        await consumer.close()
        return found

    pretty, number, binary = asyncio.run(scenario())

    assert pretty.json == event("pretty", {"big": 12345678901234567890123, "f": 1.10})
    assert "12345678901234567890123" in pretty.data
    assert number.data == '{"id":"17","source":"s","n":1e2}'
    assert number.id == "s+17"
    assert list(binary.json.items()) == [
        ("specversion", "1.0"),
        ("source", "//b"),
        ("id", "b c"),
        ("n", "5"),
        ("datacontenttype", "application/json; charset=utf-8"),
        ("data", {"x": 1}),
    ]


def test_only_what_matches_and_each_once(server):
    """A query lets through what it says; parts joined by `;` do not double an event."""

    async def scenario():
        some = await Consumer.open(server.port, "/channels/q?x=%3E1;x=2")
        every = await Consumer.open(server.port, "/channels/q")
        for consumer in (some, every):
            await consumer.connected()
        server.publish("q", *[event(str(n), {"x": n}) for n in range(4)])
        found = ids(await some.frames(2)), ids(await every.frames(4))
        await some.close()
        await every.close()
        return found

    assert asyncio.run(scenario()) == (["2", "3"], ["0", "1", "2", "3"])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("x=%zz", {"code": "malformed-percent-escape"}),
        ("x=1&x=2", {"code": "equality-operator-already-used", "key": "x"}),
        ("x=~5", {"code": "non-string-for-starts-with", "value": "5"}),
        ("x=<1&y=<1", {"code": "inequality-operator-already-used", "operator": "<"}),
        ("x=<1&x=>a", {"code": "incompatible-types-in-between", "key": "x"}),
        ("/~2=1", {"code": "invalid-json-pointer"}),
        ("&".join(f"a{n}=1" for n in range(33)), {"code": "too-many-terms", "allowedTerms": 32}),
        ("a>5", {"code": "invalid-key", "key": "a>5", "suggestion": "a=>5"}),
        ("status%20==%20'paid'", {"code": "invalid-key", "suggestion": "status=paid"}),
        ('{"equals":{"a":1}}', {"code": "invalid-key", "likelyDialect": "koncorde"}),
    ],
)
def test_query_errors(server, query, expected):
    """A query that cannot be is 400 with its code and members; no stream is opened."""
    answer = server.request("GET", f"/channels/q?{query}")

    assert answer.status == 400
    assert answer.json | expected == answer.json
    assert answer.json["message"]


def test_body_on_get_is_refused(server):
    """A GET that announces a body, even an empty one, gets an error that says so."""
    answer = server.request("GET", "/channels/q", headers={"Content-Length": "0"})

    assert (answer.status, answer.code) == (400, "unexpected-body")
    assert answer.headers["connection"] == "close"


def test_repeats_are_delivered_once(server):
    """The same (channel, source, id) is accepted again and delivered to nobody, also within a batch."""

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/rep")
        await consumer.connected()
        server.publish("rep", event("1"), event("1"), event("2"))
        server.publish("rep", event("1", {"other": True}))
        server.publish("rep2", event("1"))
        server.publish("rep", event("3"))
        found = ids(await consumer.frames(3))
        await consumer.close()
        return found

    assert asyncio.run(scenario()) == ["1", "2", "3"]


def test_meta_tells_of_registrations_and_removals(server):
    """Consumers of `meta` see who comes, with the raw query, and who goes; themselves included."""

    async def scenario():
        meta = await Consumer.open(server.port, "/channels/meta?channel=!nobody")
        connect = await meta.connected()
        own = await meta.frame()
        other = await Consumer.open(server.port, "/channels/seen%20by?x=%2A")
        client = (await other.connected()).json["clientID"]
        came = await meta.frame()
        await other.close()
        went = await meta.frame()
        await meta.close()
        return connect, own, client, came, went

    connect, own, client, came, went = asyncio.run(scenario())

    assert own.json["data"]["clientID"] == connect.json["clientID"]
    instance = came.json["data"]["instanceID"]
    assert list(came.json) == ["source", "id", "specversion", "type", "time", "data"]
    assert came.json["id"] == f"{instance} +{client} {client}"
    assert came.json["type"] == "virta.query.registration"
    assert came.json["source"] == "//virta"
    assert came.json["data"] == {
        "instanceID": instance,
        "channel": "seen by",
        "clientID": client,
        "queryID": client,
        "query": "x=%2A",
    }
    assert went.json["id"] == f"{instance} -{client} {client}"
    assert went.json["type"] == "virta.query.removal"
    assert "query" not in went.json["data"]


def test_pings_fill_silence(start):
    """A consumer that hears nothing gets pings."""

    async def scenario(port):
        consumer = await Consumer.open(port, "/channels/quiet")
        await consumer.connected()
        found = await consumer.frames(2)
        await consumer.close()
        return found

    with start("--ping-interval-ms", 100, "--durability", "none") as server:
        first, second = asyncio.run(scenario(server.port))

    assert (first.event, second.event) == ("ping", "ping")
    assert re.fullmatch(STAMP, first.json["timestamp"])


def test_http_1_0_gets_a_plain_body(server):
    """A client of HTTP/1.0 cannot read chunks; its stream has none."""

    async def scenario():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /channels/old HTTP/1.0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        connect = await reader.readuntil(b"\n\n")
        server.publish("old", event("1"))
        data = await reader.readuntil(b"\n\n")
        await shut(writer)
        return head, connect, data

    head, connect, data = asyncio.run(scenario())

    assert b"chunked" not in head
    assert connect.startswith(b"event: connect\n")
    assert data.startswith(b": {")


def test_events_of_other_processes_are_delivered(server):
    """What an embedded log appends to the same directory reaches consumers, in order, events or not."""

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/foreign")
        await consumer.connected()
        with virta.open(server.data_dir / "log") as log:
            log.append("foreign", b"", json.dumps(event("f1")).encode())
            log.append("foreign", b"k", b"no json")
            log.append("elsewhere", b"", b"{}")
        server.publish("foreign", event("f2"))
        server.publish("foreign", event("f1"))
        found = await consumer.frames(3)
        await consumer.close()
        return found

    first, second, third = asyncio.run(scenario())

    assert [first.json["id"], third.json["id"]] == ["f1", "f2"]
    assert second.json["type"] == "virta.record"
    assert second.json["data_base64"] == "bm8ganNvbg=="
    assert second.json["partitionkey"] == "k"


def test_keycounts(server):
    """`/metrics/keycounts/NAME` counts the terms that name each path while they stand."""

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/kc?x=1&/a/b=2")
        await consumer.connected()
        found = server.request("GET", "/metrics/keycounts/kc").json
        await consumer.close()
        return found

    assert asyncio.run(scenario()) == {"data": {"x": 1, "a": {"b": 1}}}
    assert server.request("GET", "/metrics/keycounts/none").status == 404


def test_metrics(server):
    """The metrics of publishing and matching are there, as Prometheus text."""
    answer = server.request("GET", "/metrics")

    assert answer.headers["content-type"] == "text/plain; version=0.0.4"
    for name in (
        "virta_data_byte_budget ",
        "virta_outstanding_events ",
        'virta_active_queries{router="0"}',
        'virta_idempotency_key_cache_size{router="0"}',
        'virta_event_routing_seconds_count{router="0"}',
        'virta_json_translation_seconds_sum{translator="0"}',
    ):
        assert name in answer.body.decode()
    assert (
        server.request("GET", "/metrics", headers={"Content-Length": "0"}).code == "unexpected-body"
    )
    assert server.request("POST", "/metrics").code == "invalid-method"
