"""The filters API: register, test, stream and remove filters of any dialect; they survive restarts."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_harness import Consumer, event, ids

EQUALS = {"equals": {"city": "Oslo"}}


def call(server, method, path, body=None):
    return server.request(method, path, None if body is None else json.dumps(body))


def register(server, place, body):
    answer = call(server, "POST", f"/filters/{place}", body)
    assert answer.status in {200, 201}, answer
    return answer.json


def test_register_tells_what_is_new(server):
    """The first registration has a diff, an equal one (whatever the spelling) has none."""
    first = call(server, "POST", "/filters/i/new", EQUALS)
    again = call(
        server, "POST", "/filters/i/new", {"filter": {"and": [EQUALS]}, "dialect": "koncorde"}
    )

    assert first.status == 201
    assert first.json["diff"]["collection"] == "new"
    assert (again.status, again.json) == (200, {"id": first.json["id"], "diff": False})
    assert call(server, "GET", "/filters/i/new").json == {"ids": [first.json["id"]]}
    assert call(server, "HEAD", "/filters/i/new").status == 200
    assert call(server, "HEAD", "/filters/i/nothing").status == 404
    assert call(server, "GET", "/filters/i/nothing").json == {"ids": []}
    shown = call(server, "GET", f"/filters/{first.json['id']}").json
    assert (shown["dialect"], shown["filter"]) == ("koncorde", EQUALS)


def test_test_by_document_and_by_event(server):
    """Documents meet Koncorde's filters; filters over events see them as data."""
    koncorde = register(server, "i/t", EQUALS)["id"]
    by_id = register(server, "i/t", {"ids": {"values": ["d1"]}})["id"]
    query = register(server, "i/t", {"filter": "city=Oslo", "dialect": "query-string"})["id"]
    cesql = register(server, "i/t", {"filter": "subject = 'd1'", "dialect": "cesql"})["id"]
    document = {"document": {"city": "Oslo"}, "documentId": "d1"}

    found = call(server, "POST", "/filters/i/t/test", document).json["ids"]
    whole = call(server, "POST", "/filters/i/t/test", {"event": event("d1", {"city": "Oslo"})})

    assert sorted(found) == sorted([koncorde, by_id, query, cesql])
    assert sorted(whole.json["ids"]) == sorted([koncorde, by_id, query])
    assert call(server, "POST", "/filters/i/none/test", {"document": {}}).json == {"ids": []}


def test_a_filter_of_another_dialect_is_refused_with_advice(server):
    """The error of a filter in another language names it, in the message and as members."""
    comparison = call(server, "POST", "/filters/i/h", {"filter": "a>5", "dialect": "query-string"})
    sql = call(server, "POST", "/filters/validate", {"filter": "type = 'a'", "dialect": "koncorde"})

    assert (comparison.status, comparison.code) == (400, "invalid-key")
    assert comparison.json["suggestion"] == "a=>5"
    assert "`a=>5`" in comparison.json["message"]
    assert (sql.status, sql.json["likelyDialect"]) == (400, "cesql")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"equals": {}}, None),
        ({"nonsense": {"a": 1}}, None),
        ({"filter": "x=~5", "dialect": "query-string"}, "non-string-for-starts-with"),
        ({"filter": "((", "dialect": "cesql"}, None),
        ({"filter": {}, "dialect": "sql"}, "unknown-dialect"),
        ({"filter": {}, "dialects": "cesql"}, "unknown-member"),
        ([], "invalid-filter"),
    ],
)
def test_bad_filters_are_told_with_their_place(server, body, code):
    """What cannot be a filter is 400 with code and sentence, on registering and on validating."""
    for path in ("/filters/i/bad", "/filters/validate"):
        answer = call(server, "POST", path, body)
        assert answer.status == 400
        assert answer.json["message"]
        assert code is None or answer.code == code
    assert call(server, "HEAD", "/filters/i/bad").status == 404


def test_validate(server):
    """A valid filter is answered with its id and canonical form, and not registered."""
    answer = call(server, "POST", "/filters/validate", EQUALS)

    assert answer.json["valid"] is True
    assert len(answer.json["id"]) == 64
    assert answer.json["canonical"]
    assert answer.json["cost"]["kind"] == "indexed"
    scanned = call(server, "POST", "/filters/validate", {"not": EQUALS}).json["cost"]
    assert (scanned["kind"], scanned["scans"], scanned["found_by"]) == ("scanned", 1, [])


@pytest.mark.parametrize("document", [None, 5, "x", True, [1]])
def test_what_is_no_document_is_refused(server, document):
    """The same whether the collection has filters or not, and with an id."""
    register(server, "i/odd", EQUALS)
    for collection in ("odd", "none"):
        for more in ({}, {"documentId": "d"}):
            body = {"document": document, **more}
            answer = call(server, "POST", f"/filters/i/{collection}/test", body)
            assert (answer.status, answer.code) == (400, "invalid-test"), body


def test_odd_bodies(server):
    """Bodies that are too large, not JSON or not a test are refused."""
    assert server.request("POST", "/filters/validate", "{").code == "invalid-json-body"
    assert server.request("POST", "/filters/validate", b" " * 1_100_000).code == "body-too-large"
    assert call(server, "POST", "/filters/a/b/test", {"x": 1}).code == "invalid-test"
    assert call(server, "GET", "/filters/" + "0" * 64).code == "not-found"
    assert server.request("GET", f"/filters/{'0' * 64}/events").status == 404
    assert call(server, "PATCH", "/filters/a/b").status == 405


def test_streams_of_filters(server):
    """A filter's events are those of channel index/collection that it lets through; removal ends the stream."""

    async def scenario():
        oslo = register(server, "geo/places", EQUALS)["id"]
        rome = register(server, "geo/places", {"equals": {"city": "Rome"}})["id"]
        one = await Consumer.open(server.port, f"/filters/{oslo}/events")
        both = await Consumer.open(server.port, f"/filters/{oslo},{rome}/events")
        for consumer in (one, both):
            await consumer.connected()
        cities = ["Rome", "Oslo", "Bern"]
        server.publish("geo%2Fplaces", *[event(c, {"city": c}) for c in cities])
        late = await Consumer.open(server.port, f"/filters/{rome}/events?from=earliest")
        await late.connected()
        found = [ids(await one.frames(1)), ids(await both.frames(2)), ids(await late.frames(1))]
        assert call(server, "DELETE", f"/filters/{oslo}").status == 204
        assert call(server, "DELETE", f"/filters/{oslo}").status == 204
        ended = await one.rest()
        for consumer in (one, both, late):
            await consumer.close()
        return found, ended

    found, ended = asyncio.run(scenario())

    assert found == [["Oslo"], ["Rome", "Oslo"], ["Rome"]]
    assert [(made.event, made.json["reason"]) for made in ended] == [
        ("disconnect", "filter-removed")
    ]


def test_filters_of_different_kinds_do_not_share_a_stream(server):
    """Filters on one stream stand in one collection and speak one dialect."""
    first = register(server, "mix/a", EQUALS)["id"]
    second = register(server, "mix/a", {"filter": "x=1", "dialect": "query-string"})["id"]

    assert server.request("GET", f"/filters/{first},{second}/events").code == "mixed-filters"


def test_registrations_survive_restarts(start):
    """Registered filters are durable, removed ones stay removed, ids stay the same."""
    server = start()
    kept = register(server, "i/c", EQUALS)["id"]
    other = register(server, "i/c", {"filter": "a=1", "dialect": "query-string"})["id"]
    gone = register(server, "i/c", {"exists": "x"})["id"]
    call(server, "DELETE", f"/filters/{gone}")
    server.process.kill()
    server.stop()

    again = start()

    assert call(again, "GET", "/filters/i/c").json == {"ids": [kept, other]}
    assert register(again, "i/c", EQUALS) == {"id": kept, "diff": False}
