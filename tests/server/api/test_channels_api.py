"""`GET /channels`: channels in order and in pages, without blocking other requests."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_harness import Consumer, Server, event

import virta
from virta.server.api import channels as channels_api
from virta.server.api.description.openapi import openapi

FLAGS = ("--journal-port", "none", "--durability", "none")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("data"), *FLAGS) as running:
        yield running


def channels(server, query=""):
    answer = server.request("GET", f"/channels{query}")
    assert answer.status == 200, answer
    return answer.json


def test_channels_with_records_and_subscriptions(start):
    """Records, bytes, first and last offset and time of each channel, and its current subscriptions."""

    async def subscribed(server):
        consumers = [
            await Consumer.open(server.port, path)
            for path in ("/channels/b", "/channels/b?data.x=1", "/channels/quiet", "/channels/meta")
        ]
        for consumer in consumers:
            await consumer.connected()
        listed = await asyncio.to_thread(channels, server)
        for consumer in consumers:
            await consumer.close()
        return listed

    with start(*FLAGS) as server:
        assert channels(server) == {"channels": [], "next": None}
        server.publish("b", event("1"), event("2"))
        server.publish("a%2F%C3%A4", event("3"))
        server.publish("b", event("4"))
        server.request("POST", "/publish", json.dumps([{"publish_to": "s", "x": 1}]))
        with virta.open(server.data_dir / "log") as log:
            log.append(b"\xff\xfe", "", b"no channel has this name")
            log.append("z", "k", b"not an event")
            records = list(log.read())
        listed = asyncio.run(subscribed(server))

    assert [c["name"] for c in listed["channels"]] == ["a/ä", "b", "quiet", "z"]
    slash, b, quiet, z = listed["channels"]
    mine = [record for record in records if record.topic == "b"]
    assert (b["records"], b["bytes"]) == (3, sum(len(r.key) + len(r.value) for r in mine))
    assert (b["firstOffset"], b["lastOffset"]) == (mine[0].offset, mine[-1].offset)
    assert b["firstTime"] == mine[0].time.isoformat(timespec="microseconds").replace("+00:00", "Z")
    assert b["subscribers"] == 2
    assert (slash["records"], slash["subscribers"]) == (1, 0)
    assert (quiet["records"], quiet["firstOffset"], quiet["lastTime"]) == (0, None, None)
    assert quiet["subscribers"] == 1
    assert (z["records"], z["bytes"]) == (1, 13)
    assert listed["next"] is None


def test_pages(server):
    """With a limit, pages that together are the whole list."""
    for number in range(23):
        server.publish(f"page{number:02}", event(str(number)))
    names = [channel["name"] for channel in channels(server, "?limit=1000")["channels"]]
    found, after = [], ""
    while after is not None:
        page = channels(server, f"?limit=5&after={after}")
        assert len(page["channels"]) <= 5
        found += [channel["name"] for channel in page["channels"]]
        after = page["next"]
    assert found == names == sorted(names)
    assert len(names) == 23
    assert channels(server, "?after=page21")["channels"][0]["name"] == "page22"


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "1.0", "9" * 30, "%C2%B2"])
def test_invalid_limits_are_refused(server, limit):
    answer = server.request("GET", f"/channels?limit={limit}")
    assert (answer.status, answer.code) == (400, "invalid-limit")


def test_it_needs_a_token(start, tmp_path):
    """With tokens, a request without one does not get the names of channels."""
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-that-is-long-enough\n")
    tokens.chmod(0o600)
    with start(*FLAGS, "--token-file", tokens) as server:
        assert server.request("GET", "/channels").status == 401
        bearer = {"Authorization": "Bearer a-token-that-is-long-enough"}
        assert server.request("GET", "/channels", headers=bearer).status == 200
        assert server.request("POST", "/channels", "{}", bearer).status == 405


def test_a_count_that_takes_long(monkeypatch):
    """Concurrent requests share one scan and get 503 in time, and the scan continues."""
    import threading
    from types import SimpleNamespace

    from virta.access.principal import ANYONE
    from virta.errors import RequestError
    from virta.server.http.asgi_bridge import PRINCIPAL

    scans, done = [], threading.Event()

    class SlowLog:
        def topics(self, *, after=None, limit):
            scans.append(limit)
            assert done.wait(20)
            return []

    monkeypatch.setattr(channels_api, "COUNT_S_MAX", 0.1)
    service = SimpleNamespace(
        log=SlowLog(),
        hub=SimpleNamespace(subscribers=dict),
        responder=SimpleNamespace(event_headers=dict),
        figures=SimpleNamespace(rates={}),
        retention=SimpleNamespace(kept=lambda name: "for ever"),
    )
    request = SimpleNamespace(query_params={}, scope={PRINCIPAL: ANYONE})

    async def ask():
        api = channels_api.ChannelsApi(service)
        first = await asyncio.gather(*[api.list(request) for _ in range(5)], return_exceptions=True)
        assert {(type(e), e.status, e.code) for e in first} == {
            (RequestError, 503, "channels-not-counted")
        }
        assert scans == [1]
        done.set()
        await api._counting
        return await api.list(request)

    assert asyncio.run(ask()).body == b'{"channels":[],"next":null}'


def test_it_is_in_the_document():
    """OpenAPI has the limit that the server has."""
    (limit, _) = openapi()["paths"]["/channels"]["get"]["parameters"]
    assert limit["schema"]["maximum"] == channels_api.PAGE_MAX
