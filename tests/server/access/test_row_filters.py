"""
Row filters: whatever a principal asks for, it gets nothing outside its row filter.

Random events are published by an unlimited principal; limited ones ask with random queries, live and from history, over
server-sent events, WebSockets, registered filters and webhooks. A failing round prints its seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from access_support import ALL, bearer, token
from server_harness import BATCH, STRUCTURED, Consumer, Server, event
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from virta.errors import FilterError
from virta.filters import parse
from waiting import wait_until

EVENTS = 60
END = "end"
ROW_FILTERS = {
    "query-string": ("tenant=1", "query-string"),
    "cesql": ("tenantid = '1'", "cesql"),
    "cloudevents": ([{"exact": {"tenantid": "1"}}], "cloudevents"),
    "koncorde": ({"equals": {"tenant": 1}}, "koncorde"),
}
# Queries that a principal may try, some to get around its filter.
QUERIES = ["", "tenant=2", "tenant=!1", "n=>10", ";", "tenant=1;tenant=2", "../id=~e", "tenant=!"]
QUERIES += ["/tenant=2;n=!0", "..%2Ftenantid=2"]


TERMS = ["tenant", "n", "../id", "../tenantid", "/tenant", "missing"]
VALUES = ["1", "2", "!1", "!", ">0", "<40", "~e", "1.0", "%22", "[1", ""]


def asked(random_):
    """Return a query that nobody thought of: one to six random terms, joined by and, or."""
    terms = [
        f"{random_.choice(TERMS)}={random_.choice(VALUES)}" for _ in range(random_.randint(1, 6))
    ]
    return "".join(term + random_.choice("&;") for term in terms)[:-1]


@pytest.fixture(scope="module")
def sink():
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_OPTIONS(self):
            self.send_response(200)
            self.send_header("WebHook-Allowed-Origin", "*")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, dict(self.headers), body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    server.received = received
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("rows") / "data"
    unlimited = token(data_dir, (ALL, "**"))
    flags = ["--require-token", "--durability", "none", "--webhook-allow", "127.0.0.1"]
    with Server(data_dir, *flags) as running:
        running.unlimited = unlimited
        yield running


def made(random_, number):
    tenant = random_.choice([1, 2, 3, "1", None])
    data = (
        {"tenant": tenant, "n": number} if tenant is not None else random_.choice([{}, "text", [1]])
    )
    more = {"tenantid": str(tenant)} if tenant is not None else {}
    return event(f"e{number}", data, **more)


def is_allowed(name, one):
    data = one.get("data")
    if name in {"cesql", "cloudevents"}:
        return one.get("tenantid") == "1"
    return (
        isinstance(data, dict) and data.get("tenant") == 1 and not isinstance(data["tenant"], bool)
    )


def publish(server, channel, events, text=None):
    """Publish singly and in batches, which take different paths through the server."""
    headers = bearer(text or server.unlimited)
    half = len(events) // 2
    for one in events[:half]:
        answer = server.request(
            "POST", f"/channels/{channel}", json.dumps(one), headers | {"Content-Type": STRUCTURED}
        )
        assert answer.status == 202, answer
    rest = json.dumps(events[half:])
    answer = server.request("POST", f"/channels/{channel}", rest, headers | {"Content-Type": BATCH})
    assert answer.status == 202, answer


async def read_sse(server, path, text, go=None):
    """Read events until the one that ends a round, which every row filter lets through."""
    consumer = await Consumer.open(server.port, path, bearer(text))
    found = []
    try:
        await consumer.connected()
        if go is not None:
            await go()
        while (frame := await consumer.frame()) is not None:
            if frame.event == "data":
                if frame.json["id"] == END:
                    return found
                found.append(frame.json)
    finally:
        await consumer.close()
    return found


async def read_socket(server, path, text, go):
    url = f"ws://127.0.0.1:{server.port}{path}"
    options = {"subprotocols": ["cloudevents.json"], "additional_headers": bearer(text)}
    found = []
    async with connect(url, **options) as socket:
        await go()
        async with asyncio.timeout(20):
            async for message in socket:
                one = json.loads(message)
                if one["id"] == END:
                    return found
                found.append(one)
    return found


END_DATA = {"tenant": 1, "n": 1000}


def valid_queries(random_, number):
    """Return random queries that the server accepts, and that can be joined with another one."""
    found = []
    while len(found) < number:
        query = asked(random_)
        try:
            parse(f"{query};../id={END}", "query-string")
        except FilterError:
            continue
        found.append(query)
    return found


@pytest.mark.parametrize("name", ROW_FILTERS)
def test_nothing_outside_the_row_filter(server, name):
    """Live and from history, over SSE and WebSocket: allowed events that satisfy the query, and no others."""
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(2**32)))
    random_ = random.Random(seed)
    channel = f"rows-{name}"
    text = token(server.data_dir, (["read"], "rows-*", *ROW_FILTERS[name]))
    events = [made(random_, n) for n in range(EVENTS)]
    end = event(END, END_DATA, tenantid="1")
    allowed = [one["id"] for one in events if is_allowed(name, one)]
    waiting = 0

    async def round_(query, history):
        """One query by all transports."""
        nonlocal waiting
        readers = []
        waiting = 0
        ready = asyncio.Event()
        here = f"{channel}-{random_.randrange(2**32)}"
        joined = f"{query};../id={END}" if query else ""

        async def go():
            nonlocal waiting
            waiting += 1
            if waiting == 2:
                ready.set()

        path = f"/channels/{here}" + ("/from/earliest" if history else "")
        if history:
            await asyncio.to_thread(publish, server, here, [*events, end])
        readers.append(asyncio.create_task(read_sse(server, f"{path}?{joined}", text, go)))
        readers.append(asyncio.create_task(read_socket(server, f"{path}?{joined}", text, go)))
        if not history:
            await asyncio.wait_for(ready.wait(), 20)
            await asyncio.to_thread(publish, server, here, [*events, end])
        return await asyncio.gather(*readers)

    for query in [*random_.sample(QUERIES, 3), *valid_queries(random_, 2)]:
        for history in (False, True):
            by_sse, by_socket = asyncio.run(round_(query, history))
            found = [one["id"] for one in by_sse]
            note = f"SEED={seed} {name} {query!r} history={history}"
            assert set(found) <= set(allowed), note
            assert found == [one["id"] for one in by_socket], note
            if query == "":
                assert found == allowed, note


@pytest.mark.parametrize("name", ROW_FILTERS)
def test_registered_filters(server, name):
    """The stream of a filter that others registered, in either dialect, is limited as well."""
    text = token(server.data_dir, (["read"], "f/*", *ROW_FILTERS[name]))
    everyone = {"Content-Type": "application/json"} | bearer(server.unlimited)
    collection = f"c{name}"
    events = [made(random.Random(7), n) for n in range(EVENTS)]
    allowed = [one["id"] for one in events if is_allowed(name, one)]
    for source in ({"exists": "tenant"}, {"filter": "tenant=!x", "dialect": "query-string"}):
        body = json.dumps(source)
        id_ = server.request("POST", f"/filters/f/{collection}", body, everyone).json["id"]

        async def scenario(id_=id_):
            async def go():
                await asyncio.to_thread(publish_all)

            return await read_sse(server, f"/filters/{id_}/events", text, go)

        def publish_all(round_=id_[:4]):
            renamed = [one | {"id": f"{one['id']}-{round_}"} for one in events]
            last = event(END, END_DATA, tenantid="1", source=f"//{round_}")
            publish(server, f"f%2F{collection}", [*renamed, last])

        found = [one["id"].split("-")[0] for one in asyncio.run(scenario())]
        with_tenant = [
            one["id"]
            for one in events
            if one["id"] in allowed and isinstance(one["data"], dict) and "tenant" in one["data"]
        ]
        assert found == with_tenant


SQL_TERMS = ["tenantid = '2'", "tenantid != '1'", "NOT (tenantid = '1')", "EXISTS tenantid", "TRUE"]
SQL_TERMS += ["id LIKE 'e1%'", "LENGTH(id) > 2", "tenantid IN ('1', '3')", "FALSE"]


@pytest.mark.parametrize("name", ROW_FILTERS)
def test_webhooks_with_filters_of_their_own(server, sink, name):
    """Whatever filter a principal subscribes with, its sink gets nothing outside the row filter."""
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(2**32)))
    random_ = random.Random(seed)
    own = token(server.data_dir, (["read", "webhooks"], "asked-*", *ROW_FILTERS[name]))
    channel = f"asked-{name}-{seed}"
    filters = ["TRUE"]
    for _ in range(5):
        terms = random_.sample(SQL_TERMS, random_.randint(1, 4))
        joined = "".join(f"{one} {random_.choice(['AND', 'OR', 'XOR'])} " for one in terms)
        filters.append(f"id = '{END}' OR ({joined}FALSE)")
    for number, sql in enumerate(filters):
        to = f"http://127.0.0.1:{sink.server_port}/{channel}/{number}"
        body = {"sink": to, "config": {"channel": channel}, "filters": [{"sql": sql}]}
        headers = {"Content-Type": "application/json"} | bearer(own)
        answer = server.request("POST", "/subscriptions", json.dumps(body), headers)
        assert answer.status == 201, f"SEED={seed} {sql} {answer}"
    events = [made(random_, n) for n in range(EVENTS)]
    publish(server, channel, [*events, event(END, END_DATA, tenantid="1")])
    allowed = [*(e["id"] for e in events if is_allowed(name, e)), END]
    for number, sql in enumerate(filters):

        def delivered(path=f"/{channel}/{number}"):
            found = [json.loads(b)["id"] for at, _, b in list(sink.received) if at == path]
            return found if END in found else None

        found = wait_until(delivered)
        assert set(found) <= set(allowed), f"SEED={seed} {name} {sql}"
        if number == 0:
            assert found == allowed, f"SEED={seed} {name}"


@pytest.mark.parametrize("name", ROW_FILTERS)
def test_webhooks(server, sink, name):
    """A webhook gets what its owner may read, signed; another principal does not see the subscription."""
    own = token(server.data_dir, (["read", "webhooks"], "hooks-*", *ROW_FILTERS[name]))
    other = token(server.data_dir, (["read", "webhooks"], "hooks-*", "tenant=2"))
    channel = f"hooks-{name}"
    body = {"sink": f"http://127.0.0.1:{sink.server_port}/{name}", "config": {"channel": channel}}
    headers = {"Content-Type": "application/json"}
    answer = server.request("POST", "/subscriptions", json.dumps(body), headers | bearer(own))
    assert answer.status == 201, answer
    events = [made(random.Random(11), n) for n in range(EVENTS)]
    publish(server, channel, [*events, event(END, END_DATA, tenantid="1")])

    def delivered():
        found = [json.loads(b)["id"] for path, _, b in list(sink.received) if path == f"/{name}"]
        return found if END in found else None

    assert wait_until(delivered) == [*(e["id"] for e in events if is_allowed(name, e)), END]
    id_ = answer.json["id"]
    hidden = [
        server.request(method, f"/subscriptions/{id_}", None, bearer(other)).status
        for method in ("GET", "DELETE")
    ]
    assert hidden == [404, 404]
    assert id_ not in server.request("GET", "/subscriptions", headers=bearer(other)).body.decode()


@pytest.mark.parametrize("name", ROW_FILTERS)
def test_publishing(server, name):
    """An event outside the row filter refuses the whole request, singly, in a batch and on a socket."""
    text = token(server.data_dir, (["publish", "read"], "pub-*", *ROW_FILTERS[name]))
    good, bad = event("g", END_DATA, tenantid="1"), event("b", {"tenant": 2}, tenantid="2")
    headers = bearer(text)

    def post(events, kind):
        body = json.dumps(events)
        return server.request(
            "POST", f"/channels/pub-{name}", body, headers | {"Content-Type": kind}
        )

    assert post(good, STRUCTURED).status == 202
    refused = [post(bad, STRUCTURED), post([good, bad], BATCH), post([good] * 40 + [bad], BATCH)]
    assert [(a.status, a.code) for a in refused] == [(403, "row-filter")] * 3

    async def by_socket():
        url = f"ws://127.0.0.1:{server.port}/channels/pub-{name}"
        options = {"subprotocols": ["cloudevents.json"], "additional_headers": headers}
        async with connect(url, **options) as socket:
            await socket.send(json.dumps(bad))
            with pytest.raises(ConnectionClosed) as closed:
                await asyncio.wait_for(socket.recv(), 20)
        return closed.value.rcvd

    close = asyncio.run(by_socket())
    assert (close.code, close.reason) == (1008, "row-filter")

    async def stored():
        path = f"/channels/pub-{name}/from/earliest"
        consumer = await Consumer.open(server.port, path, bearer(server.unlimited))
        await consumer.connected()
        server.request(
            "POST",
            f"/channels/pub-{name}",
            json.dumps(event(END)),
            bearer(server.unlimited) | {"Content-Type": STRUCTURED},
        )
        found = []
        while (frame := await consumer.frame()).json["id"] != END:
            found.append(frame.json["id"])
        await consumer.close()
        return found

    assert asyncio.run(stored()) == ["g"]


def test_publishing_on_kept_connections(server):
    """Requests with a known head, one after the other and many in one turn: each is judged by itself."""
    text = token(server.data_dir, (["publish", "read"], "kept-*", "tenant=1"))
    other = token(server.data_dir, (["publish", "read"], "kept-*", "tenant=2"))

    def request(number, tenant, by):
        body = json.dumps(event(f"{number:04}", {"tenant": tenant})).encode()
        return (
            b"POST /channels/kept-1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
            b"Content-Type: application/cloudevents+json\r\nContent-Length: %d\r\n\r\n%b"
            % (by.encode(), len(body), body)
        )

    async def scenario():
        streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(12)]
        statuses, number = [], 0
        for turn in range(4):  # the first makes the heads known
            expected = []
            for index, (_, writer) in enumerate(streams):
                tenant, by = 1 + (index + turn) % 2, text if index < 8 else other
                writer.write(request(number, tenant, by))
                expected.append(202 if (tenant == 1) == (by == text) else 403)
                number += 1
            async with asyncio.timeout(20):
                for (reader, _), wanted in zip(streams, expected, strict=True):
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    await reader.readexactly(length)
                    statuses.append((int(head.split()[1]), wanted))
        for _, writer in streams:
            writer.close()
        return statuses

    statuses = asyncio.run(scenario())
    assert len(statuses) == 48
    assert [got for got, _ in statuses] == [wanted for _, wanted in statuses]


def test_publishing_is_judged_by_what_is_stored(server):
    """A number as id is stored as a text: a filter that only the number satisfies excludes the event."""
    text = token(server.data_dir, (["publish", "read"], "stored-*", '../id=!"7"'))
    bodies = [b'{"specversion":"1.0","type":"t","source":"s","id":%b}' % i for i in (b'"8"', b"7")]
    requests = [
        b"POST /channels/stored-1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
        b"Content-Type: application/cloudevents+json\r\nContent-Length: %d\r\n\r\n%b"
        % (text.encode(), len(body), body)
        for body in bodies
    ]

    async def statuses(turn):
        streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in turn]
        for (_, writer), request in zip(streams, turn, strict=True):
            writer.write(request)
        found = []
        for reader, writer in streams:
            found.append(
                int((await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).split()[1])
            )
            writer.close()
        return found

    # The first makes the head known; a turn of many is read together.
    assert asyncio.run(statuses(requests[:1])) == [202]
    for _ in range(3):
        assert asyncio.run(statuses(requests * 4)) == [202, 403] * 4


async def read_view(server, path, text, end):
    """Return every frame of a live view up to the row with the key `end`."""
    consumer = await Consumer.open(server.port, path, bearer(text))
    found = []
    try:
        async with asyncio.timeout(20):
            while (frame := await consumer.frame()) is not None:
                if frame.event in {"row", "enter", "update", "leave"}:
                    found.append((frame.event, frame.json))
                    if frame.json["key"] == end:
                        return found
    finally:
        await consumer.close()
    raise AssertionError("the view ended early")


@pytest.mark.parametrize("name", ROW_FILTERS)
def test_live_views(server, name):
    """Rows move between tenants; a view shows those of its own, and of others not even that they left for them."""
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(2**32)))
    random_ = random.Random(seed)
    channel = f"views-{name}-{random_.randrange(2**32)}"
    text = token(server.data_dir, (["read"], "views-*", *ROW_FILTERS[name]))
    steps = []
    for number in range(EVENTS):
        one = made(random_, number)
        one["subject"] = f"k{random_.randrange(8)}"
        steps.append(one)
    last = event(END, END_DATA, subject="end", tenantid="1")
    half = len(steps) // 2
    publish(server, channel, steps[:half])
    query = random_.choice(["", "tenant=1;tenant=2", *valid_queries(random_, 4)])
    ways = f"{query};../id={END}" if query else ""

    async def round_():
        reader = asyncio.create_task(
            read_view(server, f"/channels/{channel}/live?{ways}", text, "end")
        )
        await asyncio.to_thread(publish, server, channel, [*steps[half:], last])
        return await reader

    note = f"SEED={seed} {name} {query!r}"
    for kind, frame in asyncio.run(round_()):
        shown = frame.get("event")
        if kind != "leave" or shown is not None:
            assert is_allowed(name, shown), f"{note}: {kind} {frame}"
    rows = server.request("GET", f"/channels/{channel}/rows", headers=bearer(text)).json["rows"]
    newest = {one["subject"]: one for one in [*steps, last]}
    allowed = {key for key, one in newest.items() if is_allowed(name, one)}
    assert {row["key"] for row in rows} == allowed, note
    for key in newest:
        one = server.request("GET", f"/channels/{channel}/rows/{key}", headers=bearer(text))
        assert (one.status == 200) == (key in allowed), f"{note}: {key} {one}"


@pytest.mark.parametrize("name", ROW_FILTERS)
def test_counts_groups_and_resumption(server, name):
    """A count, the groups of a view and a stream that resumes at a foreign event contain no foreign rows."""
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(2**32)))
    random_ = random.Random(seed)
    note = f"SEED={seed} {name}"
    channel = f"sums-{name}-{random_.randrange(2**32)}"
    text = token(server.data_dir, (["read"], "sums-*", *ROW_FILTERS[name]))
    events = [made(random_, n) | {"subject": f"k{n}"} for n in range(EVENTS)]
    publish(server, channel, [*events, event(END, END_DATA, subject="end", tenantid="1")])
    allowed = [one["id"] for one in events if is_allowed(name, one)] + [END]

    def count(source, dialect):
        body = json.dumps({"channel": channel, "filter": source, "dialect": dialect})
        kind = {"Content-Type": "application/json"}
        return server.request("POST", "/filters/count", body, bearer(text) | kind)

    if (
        name == "koncorde"
    ):  # its row filter applies to documents, so a filter over events is refused
        found = count({"exists": "tenant"}, "koncorde").json
        assert count("EXISTS tenantid", "cesql").status == 403
    else:
        found = count("EXISTS source", "cesql").json
    assert found["matched"] == len(allowed), f"{note} {found}"

    groups = f"/channels/{channel}/live?$select=count&$group=/data/tenant"

    async def first_groups():
        consumer = await Consumer.open(server.port, groups, bearer(text))
        async with asyncio.timeout(20):
            while "groups" not in (frame := await consumer.frame()).json:
                pass
        await consumer.close()
        return frame.json["groups"]

    counted = asyncio.run(first_groups())
    assert sum(group["count"] for group in counted) == len(allowed), f"{note} {counted}"

    async def resumed(after):
        headers = bearer(text) | {"Last-Event-ID": f"%2F%2Ftest+{after}"}
        consumer = await Consumer.open(server.port, f"/channels/{channel}", headers)
        found = []
        async with asyncio.timeout(20):
            while not found or found[-1] != END:
                frame = await consumer.frame()
                if frame.event == "data":
                    found.append(frame.json["id"])
        await consumer.close()
        return found

    for after in random_.sample(range(EVENTS), 6):  # of any tenant
        later = {one["id"] for one in events[after + 1 :]} | {END}
        found = asyncio.run(resumed(f"e{after}"))
        assert found == [id_ for id_ in allowed if id_ in later], f"{note} after e{after}"


def test_equal_row_filters_are_one(server):
    """Principals with the same row filter, in any spelling, share one place in the index."""
    texts = [
        token(server.data_dir, (["read"], "one-*", source, dialect))
        for source, dialect in (("tenant=1", "query-string"), ("tenant=1;tenant=1", "query-string"))
    ]

    async def scenario():
        streams = [
            await Consumer.open(server.port, "/channels/one-1?n=>3", bearer(text)) for text in texts
        ]
        for stream in streams:
            await stream.connected()
        found = await asyncio.to_thread(
            server.request, "GET", "/subscribers?channel=one-1", None, bearer(server.unlimited)
        )
        for stream in streams:
            await stream.close()
        return found.json

    (query,) = asyncio.run(scenario())["queries"]
    assert query["subscribers"] == 2


@pytest.mark.parametrize("name", ["query-string", "koncorde"])
def test_standing_webhooks(server, sink, name):
    """A webhook stands for what it would be sent: its own conditions and the row filter of its owner."""
    channel = f"standing-{name}"
    own = token(server.data_dir, (["read", "webhooks"], channel, *ROW_FILTERS[name]))
    kind = {"Content-Type": "application/json"}
    for conditions in ({}, {"types": ["test"]}, {"types": ["none"]}):
        body = {"sink": f"http://127.0.0.1:{sink.server_port}/s", "config": {"channel": channel}}
        body = json.dumps(body | conditions)
        answer = server.request("POST", "/subscriptions", body, bearer(own) | kind)
        assert answer.status == 201, answer

    def standing(tenant):
        body = json.dumps({"channel": channel, "event": event("1", {"tenant": tenant})})
        found = server.request("POST", "/filters/standing", body, bearer(server.unlimited) | kind)
        assert found.json["total"] == 3
        return sorted(one["text"] for one in found.json["filters"])

    assert standing(1) == ["", '{"types":["test"]}']
    assert standing(2) == []
