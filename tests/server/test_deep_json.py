"""JSON nested deeper than the limit is a 400 on every route; the limit is the same on every Python and engine."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_harness import BATCH, DEADLINE_S, STRUCTURED, Consumer, Server, event
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from virta.jsontext import DEPTH_MAX

JSON = "application/json"
DEPTHS = (850, DEPTH_MAX - 1, DEPTH_MAX, DEPTH_MAX + 1, 950, 990, 1000, 1100, 20_000)
TOO_DEEP = DEPTH_MAX + 1


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


@pytest.mark.parametrize("value", [arrays, objects], ids=["arrays", "objects"])
def test_events_up_to_the_limit_are_accepted(either, value):
    """The event itself is one level, in each content mode; a batch around it does not count."""
    binary = {"ce-source": "/s", "ce-type": "t", "ce-specversion": "1.0"}
    for depth, status in ((DEPTH_MAX - 1, 202), (DEPTH_MAX, 400)):
        data, id_ = value(depth), f"{value.__name__}{depth}"
        answers = [
            either.request("POST", "/channels/limit", body, {"Content-Type": kind} | headers)
            for kind, body, headers in (
                (STRUCTURED, deep_event(f"s{id_}", data), {}),
                (BATCH, f"[{deep_event(f'b{id_}', data)}]", {}),
                (BATCH, f"[{deep_event(f'e{id_}', data)},\n{deep_event(f'f{id_}', data)}]", {}),
                (JSON, data, binary | {"ce-id": f"h{id_}"}),
            )
        ]

        assert [answer.status for answer in answers] == [status] * 4
        if status == 400:
            assert {answer.code for answer in answers} == {"invalid-json-body"}


def test_accepted_events_are_delivered(either):
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
        for depth in range(870, 910, 2):
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

    closed = asyncio.run(scenario())

    assert (closed.code, closed.reason) == (1007, "invalid-json-body")


def test_positions_over_sockets_are_no_obstacle(either):
    """An event that has a member of the position's name, and is nested near the limit, reaches everyone."""

    async def scenario():
        url = f"ws://127.0.0.1:{either.port}/channels/named?$positions=1"
        other = await Consumer.open(either.port, "/channels/named")
        await other.connected()
        async with connect(url, subprotocols=["cloudevents.json"]) as made:
            taken = []
            for depth in range(870, 910, 2):
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
