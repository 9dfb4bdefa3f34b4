"""JSON that is nested too deeply is a 400 on every route, and never keeps the server from going on."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from server_harness import BATCH, DEADLINE_S, STRUCTURED, Consumer, Server, event
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

JSON = "application/json"
# Some are readable in some places only: the readable depth depends on the depth of the call stack.
DEPTHS = (930, 950, 960, 970, 980, 985, 990, 995, 1000, 1005, 1100, 20_000)
# From Python 3.12 on, native readers of JSON have a limit of their own, some thousands deep.
TOO_DEEP = 1100 if sys.version_info < (3, 12) else 20_000


def arrays(depth):
    return "[" * depth + "]" * depth


def objects(depth):
    return '{"a":' * depth + "1" + "}" * depth


def deep_event(id_, value):
    return f'{{"specversion":"1.0","type":"t","source":"/s","id":"{id_}","data":{value}}}'


def filters(name, depth):
    return f'{{"{name}":[' * depth + '{"exact":{"type":"t"}}' + "]}" * depth


def requests(depth, value):
    """(method, path, content type, body) of everything that takes JSON."""
    binary = f"b{depth}{value[0]}"
    cron = f'{{"schedule":"* * * * *","uri":{value}}}'
    place = f'"sink":"http://127.0.0.1:9/","config":{{"channel":"c"}},"filters":[{value}]'
    return [
        ("POST", "/channels/deep", STRUCTURED, deep_event(f"s{binary}", value)),
        ("POST", "/channels/deep", BATCH, f"[{deep_event(binary, value)}]"),
        ("POST", "/channels/deep", JSON, value),
        ("POST", "/publish", JSON, value),
        ("POST", "/publish", JSON, f'[{{"publish_to":"a","payload":"x","more":{value}}}]'),
        ("POST", "/filters/i/c", JSON, f'{{"filter":{{"equals":{{"a":{value}}}}}}}'),
        ("POST", "/filters/i/c", JSON, filters("and", depth)),
        ("POST", "/filters/validate", JSON, f'{{"dialect":"cloudevents","filter":{value}}}'),
        ("POST", "/filters/i/c/test", JSON, f'{{"document":{value}}}'),
        ("POST", "/filters/i/c/test", JSON, f'{{"event":{deep_event("t", value)}}}'),
        ("POST", "/subscriptions", JSON, f"{{{place}}}"),
        ("PUT", "/journal/keys/k", JSON, f'{{"value":{value}}}'),
        ("POST", "/journal/jobs", JSON, f'{{"uri":"http://e.example/","payload":{value}}}'),
        ("POST", "/journal/jobs/next", JSON, f'{{"domain":{value}}}'),
        ("PUT", "/journal/jobs/domains/e.example", JSON, f'{{"limit":{value}}}'),
        ("PATCH", "/journal/jobs/domains/e.example", JSON, f'{{"limit":{value}}}'),
        ("PUT", "/journal/jobs/recurring/c", JSON, cron),
    ]


@pytest.fixture(scope="module", params=["native", "plain"])
def either(request, tmp_path_factory):
    """A server of each kind; a place of registered filters exists."""
    environ = {"VIRTA_PLAIN": "1"} if request.param == "plain" else {}
    data = tmp_path_factory.mktemp("data")
    with Server(data, "--durability", "none", environ=environ) as server:
        body = json.dumps({"filter": {"exists": "a"}})
        assert server.request("POST", "/filters/i/c", body, {"Content-Type": JSON}).status == 201
        answer = server.request("POST", "/filters/i/near", body, {"Content-Type": JSON})
        server.filter_id = answer.json["id"]
        yield server


@pytest.mark.parametrize("value", [arrays, objects], ids=["arrays", "objects"])
def test_every_route_refuses(either, value):
    """Whatever the depth, no route fails; unreadable JSON is 400 with the reason."""
    for depth in DEPTHS:
        for method, path, kind, body in requests(depth, value(depth)):
            headers = {"Content-Type": kind}
            if kind == JSON and path == "/channels/deep":
                headers |= {"ce-id": f"b{depth}", "ce-source": "/s", "ce-type": "t"}
                headers["ce-specversion"] = "1.0"
            answer = either.request(method, path, body, headers)
            assert answer.status < 500, (method, path, depth, answer)
            if depth >= TOO_DEEP:
                assert answer.status == 400, (method, path, depth, answer)


def test_what_was_taken_is_delivered(either):
    """Events near the limit do not block later events, live or from history."""

    async def scenario():
        paths = [
            "/channels/i%2Fnear?a=1",
            "/channels/i%2Fnear",
            f"/filters/{either.filter_id}/events",
        ]
        live = [await Consumer.open(either.port, path) for path in paths]
        for consumer in live:
            await consumer.connected()
        for depth in range(900, 1010, 2):
            body = deep_event(f"d{depth}", objects(depth))
            either.request("POST", "/channels/i%2Fnear", body, {"Content-Type": STRUCTURED})
        either.publish("i%2Fnear", event("last", {"a": 1}))
        live.append(await Consumer.open(either.port, "/channels/i%2Fnear/from/earliest"))
        for consumer in live:
            while b'"id": "last"' not in (await consumer.frame()).raw:
                pass
            await consumer.close()

    asyncio.run(scenario())


def test_a_socket_is_closed_with_the_code(either):
    """A WebSocket that sends too deep JSON is closed with the reason."""

    async def scenario():
        url = f"ws://127.0.0.1:{either.port}/channels/deep"
        async with connect(url, subprotocols=["cloudevents.json"]) as socket:
            await socket.send(deep_event("w", arrays(TOO_DEEP)))
            with pytest.raises(ConnectionClosed) as closed:
                await asyncio.wait_for(socket.recv(), 10)
            return closed.value.rcvd

    told = asyncio.run(scenario())

    assert (told.code, told.reason) == (1007, "invalid-json-body")


def test_positions_over_sockets_are_no_obstacle(either):
    """An event that has a member of the position's name, and is nested near the limit, reaches everyone."""

    async def scenario():
        url = f"ws://127.0.0.1:{either.port}/channels/named?$positions=1"
        other = await Consumer.open(either.port, "/channels/named")
        await other.connected()
        async with connect(url, subprotocols=["cloudevents.json"]) as made:
            taken = []
            for depth in range(900, 1010, 2):
                value = f'{{"virtaposition":"x","a":{objects(depth)}}}'
                body = deep_event(f"n{depth}", value)
                kind = {"Content-Type": STRUCTURED}
                if either.request("POST", "/channels/named", body, kind).status == 202:
                    taken.append(f"n{depth}")
            assert taken
            assert "virta.connect" in await asyncio.wait_for(made.recv(), DEADLINE_S)
            for id_ in taken:
                assert f'"id":"{id_}"'.encode() in (await other.frame()).raw
                text = await asyncio.wait_for(made.recv(), DEADLINE_S)
                assert f'"id":"{id_}"' in text
                assert text.count('"virtaposition"') == 2
        await other.close()

    asyncio.run(scenario())
