"""The budget for scanned filters, against a real server: who is refused, for what, and when it is free again."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from access_support import bearer, token
from server_harness import Consumer, event
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from virta.filters import parse
from virta.match import Matcher
from virta.match.engine import PYTHON_CALLS
from virta.server.access.scan_budget import STREAM, VIEW, FilterPlace, ScanBudget
from waiting import wait_until

CODE = "scanned-filter-budget"
TWO = ["--max-scanned-filters-per-principal", 2, "--durability", "none", "--view-linger-s", 0]
RIGHTS = (["read", "publish", "filters", "webhooks", "admin"], "**")


def scanned(server, headers=None):
    """Return the metric by place."""
    text = server.request("GET", "/metrics", headers=headers).body.decode()
    found = re.findall(r'^virta_scanned_filters{place="(\w+)"} ([0-9.]+)$', text, re.MULTILINE)
    return {place: int(float(count)) for place, count in found}


def register(server, source, headers=None, collection="orders"):
    body = json.dumps({"filter": source, "dialect": "query-string"})
    return server.request("POST", f"/filters/shop/{collection}", body, headers)


def metric(server, name, label="place"):
    """Return the value of a metric, a dictionary by its label if it has one."""
    text = server.request("GET", "/metrics").body.decode()
    found = re.findall(rf'^{name}(?:{{{label}="(\w+)"}})? ([0-9.]+)$', text, re.MULTILINE)
    values = {place: int(float(count)) for place, count in found}
    return values.get("", values)


async def refused(port, path, headers=None):
    consumer = await Consumer.open(port, path, headers, expect=403)
    answer = json.loads(await consumer.body())
    await consumer.close()
    return answer


async def refused_socket(port, path, protocols=("cloudevents.json",)):
    with pytest.raises(InvalidStatus) as error:
        async with connect(f"ws://127.0.0.1:{port}{path}", subprotocols=list(protocols)):
            pass
    response = error.value.response
    return response.status_code, json.loads(response.body)


def test_streams_are_refused_beyond_the_budget_and_free_it_when_they_end(start):
    """Two filters are allowed, equal ones count once, indexed ones never; a stream that ends makes room."""

    async def scenario(server):
        first = await Consumer.open(server.port, "/channels/a?status=!paid")
        again = await Consumer.open(server.port, "/channels/a?status=!paid")
        second = await Consumer.open(server.port, "/channels/a/from/earliest?status=!open")
        problem = await refused(server.port, "/channels/a?status=!new")
        socket = await refused_socket(server.port, "/channels/a?status=!new")
        indexed = await Consumer.open(server.port, "/channels/a?status=!new&type=order")
        everything = await Consumer.open(server.port, "/channels/a")
        counted = await asyncio.to_thread(scanned, server)
        await again.close()
        await second.close()
        await asyncio.to_thread(wait_until, lambda: scanned(server)["stream"] == 1)
        third = await Consumer.open(server.port, "/channels/a?status=!new")
        await third.connected()
        for one in (first, indexed, everything, third):
            await one.close()
        await asyncio.to_thread(wait_until, lambda: scanned(server)["stream"] == 0)
        return problem, socket, counted

    with start(*TWO) as server:
        problem, socket, counted = asyncio.run(scenario(server))

    assert problem["code"] == CODE
    assert (problem["used"], problem["limit"], problem["counts"]) == (2, 2, 1)
    sentence = problem["message"]
    for part in ("anyone", "2 of 2", "--max-scanned-filters-per-principal", "type=order&status=!"):
        assert part in sentence
    assert (socket[0], socket[1]["code"]) == (403, CODE)
    assert counted == {"stream": 2, "view": 0, "registered": 0, "webhook": 0}


def test_sockets_and_views_count_too(start):
    """A WebSocket and a live view use the budget, `rows` needs it, and all give it back."""

    async def scenario(server):
        url = f"ws://127.0.0.1:{server.port}/channels/a?status=!paid"
        async with connect(url, subprotocols=["cloudevents.json"]):
            view = await Consumer.open(server.port, "/channels/a/live?$key=/data/id&status=!open")
            counted = await asyncio.to_thread(scanned, server)
            live = await refused(server.port, "/channels/a/live?$key=/data/id&status=!new")
            socket = await refused_socket(
                server.port, "/channels/a/live?$key=/data/id&status=!new", ()
            )
            rows = await asyncio.to_thread(
                server.request, "GET", "/channels/a/rows?$key=/data/id&status=!new"
            )
            same = await asyncio.to_thread(
                server.request, "GET", "/channels/a/rows?$key=/data/id&status=!open"
            )
        await view.close()
        await asyncio.to_thread(wait_until, lambda: set(scanned(server).values()) == {0})
        later = await asyncio.to_thread(
            server.request, "GET", "/channels/a/rows?$key=/data/id&status=!new"
        )
        return counted, live, socket, rows, same, later

    with start(*TWO) as server:
        server.publish("a", event("1", {"id": "k", "status": "open"}))
        counted, live, socket, rows, same, later = asyncio.run(scenario(server))

    assert counted == {"stream": 1, "view": 1, "registered": 0, "webhook": 0}
    assert live["code"] == CODE
    assert (socket[0], socket[1]["code"]) == (403, CODE)
    assert (rows.status, rows.code) == (403, CODE)
    assert (same.status, later.status) == (200, 200)


def test_registered_filters_count_until_they_are_removed(start):
    """Over a restart too; registering an equal one again is no second one."""
    with start(*TWO) as server:
        ids = [register(server, f"status=!{name}").json["id"] for name in ("a", "b")]
        full = register(server, "status=!c")
        assert (full.status, full.code) == (403, CODE)
        assert register(server, "status=!a").status == 200
        assert register(server, "status=c").status == 201
    with start(*TWO) as server:
        assert scanned(server)["registered"] == 2
        assert register(server, "status=!c").status == 403
        server.request("DELETE", f"/filters/{ids[0]}")
        assert register(server, "status=!c").status == 201
        assert register(server, "x=!1", collection="bad/name").status == 404
        assert scanned(server)["registered"] == 2


def test_each_principal_has_its_own_budget(start, tmp_path):
    """What one token uses, another does not pay; a row filter that finds the events makes a query cheap."""
    data = tmp_path / "data"
    one, two = token(data, RIGHTS), token(data, RIGHTS)
    narrow = token(data, (["read"], "**", "tenant=7"))

    async def scenario(server):
        streams = [
            await Consumer.open(server.port, f"/channels/a?status=!{name}", bearer(who))
            for who in (one, two)
            for name in "ab"
        ]
        problem = await refused(server.port, "/channels/a?status=!c", bearer(one))
        for name in "abc":
            path = f"/channels/a?status=!{name}"
            streams.append(await Consumer.open(server.port, path, bearer(narrow)))
        for stream in streams:
            await stream.close()
        return problem

    with start("--require-token", *TWO, data_dir=data) as server:
        problem = asyncio.run(scenario(server))

        assert problem["code"] == CODE
        assert "anyone" not in problem["message"]


def test_webhooks_count_for_their_owner(start):
    """A refused sink gives the budget back; without room the sink is not even asked."""
    body = {
        "sink": "http://127.0.0.1:9/hook",
        "protocol": "HTTP",
        "config": {"channel": "a"},
        "filters": [{"not": {"exact": {"type": "x"}}}],
    }
    with start(*TWO, "--webhook-allow", "127.0.0.1/32") as server:
        for _ in range(3):  # nothing listens there
            answer = server.request("POST", "/subscriptions", json.dumps(body))
            assert answer.code == "sink-refused"
        for name in "ab":
            register(server, f"status=!{name}")
        answer = server.request("POST", "/subscriptions", json.dumps(body))

    assert (answer.status, answer.code) == (403, CODE)


def large_tree(size):
    """Return a filter that every event tests whole."""
    terms = [
        {"or": [{"not": {"equals": {f"a{n}": 1}}}, {"not": {"equals": {f"b{n}": 2}}}]}
        for n in range(size)
    ]
    return {"and": terms}


@pytest.mark.parametrize(("flags", "status"), [([], 403), ([TWO[0], "none"], 201)])
def test_none_is_no_limit(start, flags, status):
    """One filter may cost more than the default budget; `none` switches it off, and still counts."""
    with start(*flags, "--durability", "none") as server:
        answer = server.request("POST", "/filters/shop/orders", json.dumps(large_tree(2040)))

        assert answer.status == status
        assert scanned(server)["registered"] == (status == 201)


def test_dear_filters_count_more():
    """A large tree uses as much of the budget as it costs."""
    budget = ScanBudget(1000)
    lease = budget.reserve("me", FilterPlace(STREAM, "a"), [parse(large_tree(200), "koncorde")])

    assert 50 < budget.used("me") <= 200
    lease.release()
    lease.release()
    assert budget.used("me") == 0
    assert budget.filters[STREAM] == 0


def test_places_are_counted_apart():
    """The same filter in two places is in two indexes."""
    budget = ScanBudget(2)
    filter_ = parse("status=!paid", "query-string")
    leases = [
        budget.reserve("me", FilterPlace(kind, name), [filter_])
        for kind, name in ((STREAM, "a"), (VIEW, "a"), (STREAM, "a"))
    ]

    assert budget.used("me") == 2
    leases[0].release()
    assert budget.used("me") == 2
    leases[2].release()
    assert budget.used("me") == 1


def test_conditions_in_python_and_refusals_are_counted(start):
    """The metrics have the conditions that run in Python, by place, and how often the budget refused a filter."""
    odd = {"match": {"value": [{"x": 1}, {"y": 2}]}}
    source = {"select": {"field": "items", "index": 0, "query": odd}}
    with start(*TWO) as server:
        before = metric(server, "virta_python_conditions")
        answer = server.request("POST", "/filters/shop/orders", json.dumps(source))
        counted = metric(server, "virta_python_conditions")
        statuses = [register(server, f"status=!{name}").status for name in "abcd"]
        refusals = metric(server, "virta_scanned_filters_refused_total")
        server.request("DELETE", f"/filters/{answer.json['id']}")
        after = metric(server, "virta_python_conditions")

    nothing = {"stream": 0, "view": 0, "registered": 0, "webhook": 0}
    assert answer.status == 201
    assert (before, counted, after) == (nothing, nothing | {"registered": 1}, nothing)
    assert statuses == [201, 201, 403, 403]
    assert refusals == 2


def test_questions_to_python_are_counted(start):
    """The metrics have how often matching needed Python, by what for."""
    source = {"regexp": {"status": "^p[a-z]+d$"}}
    with start(*TWO) as server:
        before = metric(server, "virta_python_evaluations_total", "what")
        server.request("POST", "/filters/shop/orders", json.dumps(source))
        body = json.dumps({"document": {"status": "paid"}})
        found = server.request("POST", "/filters/shop/orders/test", body)
        after = metric(server, "virta_python_evaluations_total", "what")

    assert len(found.json["ids"]) == 1
    assert before == dict.fromkeys(PYTHON_CALLS, 0)
    assert after == before | {"regexp": int(Matcher().engine == "native")}


def test_a_filter_is_priced_before_it_is_registered(start):
    """`POST /filters/validate` has the cost that registering takes out of the budget."""
    with start(*TWO) as server:
        for source, kind in (("status=!paid", "scanned"), ("status=paid", "indexed")):
            body = json.dumps({"filter": source, "dialect": "query-string"})
            answer = server.request("POST", "/filters/validate", body)

            assert answer.status == 200
            assert answer.json["cost"]["kind"] == kind
            used = scanned(server)["registered"]
            assert register(server, source).status == 201
            assert scanned(server)["registered"] - used == answer.json["cost"]["scans"]
