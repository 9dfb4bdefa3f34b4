"""CloudEvents Subscriptions: the handshake, deliveries, retries, dead letters, restarts."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from server_harness import Consumer, event

FAST = ["--webhook-backoff-ms", 5, "--webhook-attempts", 3]


class Hook:
    """A webhook that answers deliveries with the statuses it is told, 204 after that."""

    def __init__(self, allowed="*"):
        self.received = queue.Queue()
        self.statuses = queue.Queue()
        self.options = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_OPTIONS(self):
                hook.options.append(dict(self.headers))
                self.send_response(200)
                if allowed:
                    self.send_header("WebHook-Allowed-Origin", allowed)
                self.send_header("WebHook-Allowed-Rate", "*")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    status = hook.statuses.get_nowait()
                except queue.Empty:
                    status = 204
                if status == 204:
                    hook.received.put((json.loads(body), dict(self.headers)))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?x=1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def ids(self, count):
        return [self.received.get(timeout=15)[0]["id"] for _ in range(count)]

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def hooks():
    made = []

    def make(*arguments):
        made.append(Hook(*arguments))
        return made[-1]

    yield make
    for hook in made:
        hook.close()


def subscribe(server, hook, channel, **more):
    body = {"sink": hook.url, "config": {"channel": channel}} | more
    return server.request("POST", "/subscriptions", json.dumps(body))


def test_handshake_and_delivery(server, hooks):
    """The sink is asked first; then matching events arrive in order, with the headers it wants."""
    hook = hooks()
    more = {
        "filters": [{"prefix": {"type": "com."}}],
        "types": ["com.a", "org.b"],
        "protocolsettings": {"headers": {"X-Key": "secret"}},
    }

    answer = subscribe(server, hook, "w1", **more)
    events = [
        event(str(n), {"n": n}, type=t) for n, t in enumerate(["com.a", "org.b", "com.c", "com.a"])
    ]
    server.publish("w1", *events)

    assert answer.status == 201
    assert answer.headers["location"] == f"/subscriptions/{answer.json['id']}"
    assert hook.options[0]["WebHook-Request-Origin"] == "virta"
    body, headers = hook.received.get(timeout=15)
    assert body == events[0]
    assert headers["Content-Type"].startswith("application/cloudevents+json")
    assert headers["X-Key"] == "secret"
    assert hook.ids(1) == ["3"]


def test_sinks_that_do_not_agree(server, hooks):
    """Without the handshake's consent there is no subscription."""
    for allowed in ("", "somebody.else"):
        answer = subscribe(server, hooks(allowed), "w2")
        assert (answer.status, answer.code) == (400, "sink-refused")
    gone = hooks()
    gone.close()
    gone.close = lambda: None
    assert subscribe(server, gone, "w2").code == "sink-unreachable"


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"sink": "http://127.0.0.1:1/"},
        {"sink": 5, "config": {"channel": "a"}},
        {"sink": "ftp://x/", "config": {"channel": "a"}},
        {"sink": "http://127.0.0.1:99999/", "config": {"channel": "a"}},
        {"sink": "http://x/", "config": {"channel": "a"}, "protocol": "MQTT"},
        {"sink": "http://x/", "config": {"channel": "a"}, "filters": [{"nonsense": {}}]},
        {"sink": "http://x/", "config": {"channel": "a", "from": "never"}},
        {"sink": "http://x/", "config": {"channel": "a"}, "types": [1]},
        {"sink": "http://x/", "config": {"channel": "a"}, "more": 1},
        {
            "sink": "http://x/",
            "config": {"channel": "a"},
            "protocolsettings": {"headers": {"A": "b\n"}},
        },
    ],
)
def test_bad_subscriptions(server, body):
    """What cannot be a subscription is 400 with a sentence."""
    answer = server.request("POST", "/subscriptions", json.dumps(body))

    assert answer.status == 400
    assert answer.json["message"]


def test_retries_and_dead_letters(start, hooks):
    """A sick sink is tried again, a refused or hopeless event goes to the dead letters, the next one follows."""
    hook = hooks()

    async def letters(port, count):
        consumer = await Consumer.open(port, "/channels/%24virta%2Fdead-letters/from/earliest")
        await consumer.connected()
        found = [made.json for made in await consumer.frames(count)]
        await consumer.close()
        return found

    with start(*FAST) as server:
        subscription = subscribe(server, hook, "r").json["id"]
        for status in (503, 429):
            hook.statuses.put(status)
        server.publish("r", event("sick"))
        assert hook.ids(1) == ["sick"]
        for status in (400, 500, 500, 500):
            hook.statuses.put(status)
        server.publish("r", event("refused"), event("hopeless"), event("fine"))
        assert hook.ids(1) == ["fine"]
        found = asyncio.run(letters(server.port, 2))
        status = server.request("GET", f"/subscriptions/{subscription}").json["status"]

    assert [letter["data"]["event"]["id"] for letter in found] == ["refused", "hopeless"]
    assert [letter["data"]["attempts"] for letter in found] == [1, 3]
    assert found[0]["data"]["reason"] == "status 400"
    assert (status["delivered"], status["deadLetters"]) == (2, 2)


def test_gone_sinks_get_nothing_more(start, hooks):
    """A sink that answers 410 is not asked again."""
    hook = hooks()
    with start(*FAST) as server:
        id_ = subscribe(server, hook, "g").json["id"]
        hook.statuses.put(410)
        server.publish("g", event("1"))
        while server.request("GET", f"/subscriptions/{id_}").json["status"]["state"] == "active":
            pass
        assert server.request("GET", "/subscriptions").json[0]["status"]["state"] == "gone"
        assert server.request("DELETE", f"/subscriptions/{id_}").status == 204
        assert server.request("DELETE", f"/subscriptions/{id_}").status == 404
        assert server.request("GET", "/subscriptions").json == []


def test_subscriptions_survive_restarts(start, hooks):
    """After a restart delivery goes on where it was, and what was published meanwhile arrives."""
    hook = hooks()
    server = start(*FAST)
    server.publish("s", event("before"))
    subscribe(server, hook, "s", config={"channel": "s", "from": "earliest"})
    assert hook.ids(1) == ["before"]
    server.stop()
    server = start(*FAST)
    server.publish("s", event("after"))

    assert hook.ids(1) == ["after"]
