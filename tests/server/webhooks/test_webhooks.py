"""CloudEvents Subscriptions: the handshake, deliveries, retries, dead letters, restarts."""

from __future__ import annotations

import asyncio
import email.utils
import json
import queue
import signal
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from server_harness import Answer, Consumer, Server, event, lasting_port

from virta.server.webhooks import client as sinks

ALLOW = ["--webhook-allow", "127.0.0.1/32"]  # where the sinks of these tests are
FAST = [*ALLOW, "--webhook-backoff-ms", 5, "--webhook-attempts", 3]


class Hook:
    """A webhook that answers deliveries with the given statuses, 204 after that."""

    def __init__(self, allowed="*", rate="*", status=200, location=None, tls=None):
        self.received = queue.Queue()
        self.bodies = queue.Queue()  # as they were sent
        self.statuses = queue.Queue()
        self.options = []
        self.methods = []
        self.when_asked = None
        self.answering = threading.Event()
        self.answering.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_OPTIONS(self):
                hook.options.append(dict(self.headers))
                if hook.when_asked is not None:
                    hook.when_asked(self.headers["WebHook-Request-Callback"])
                self.send_response(status)
                if allowed:
                    self.send_header("WebHook-Allowed-Origin", allowed)
                self.send_header("WebHook-Allowed-Rate", rate)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_PUT(self):
                self.do_POST()

            def do_POST(self):
                hook.methods.append(self.command)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    status = hook.statuses.get_nowait()
                except queue.Empty:
                    status = 204
                if status == 204:
                    hook.bodies.put(body)
                    hook.received.put((json.loads(body), dict(self.headers)))
                hook.answering.wait(15)
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*tls)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?x=1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def ids(self, count):
        return [self.received.get(timeout=15)[0]["id"] for _ in range(count)]

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests of a module, which may deliver to this machine."""
    data = tmp_path_factory.mktemp("data")
    with Server(data, "--durability", "none", "--webhook-timeout-ms", 3000, *ALLOW) as running:
        yield running


@pytest.fixture
def hooks():
    made = []

    def make(*arguments, **named):
        made.append(Hook(*arguments, **named))
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
    assert headers["WebHook-Request-Origin"] == "virta"
    assert hook.ids(1) == ["3"]


def test_sinks_that_do_not_agree(server, hooks):
    """Without the handshake's consent there is no subscription."""
    for allowed in ("", "somebody.else"):
        answer = subscribe(server, hooks(allowed), "w2")
        assert (answer.status, answer.code) == (400, "sink-refused")
    gone = hooks()
    gone.close()
    gone.close = lambda: None
    assert subscribe(server, gone, "w2").code == "sink-refused"


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
        {"sink": "http://x/", "config": {"channel": "a", "from": "000000000000.0"}},
        {"sink": "http://x/", "config": {"channel": "a", "from": "nobody+knows"}},
        {"sink": "http://x/", "config": {"channel": "a"}, "types": [1]},
        {"sink": "http://x/", "config": {"channel": ""}},
        {"sink": "http://x/", "config": {"channel": "\x1a"}},
        {"sink": "http://x/", "config": {"channel": "meta"}},
        {
            "sink": "http://x/",
            "config": {"channel": "a"},
            "protocolsettings": {"method": "GET"},
        },
        {"sink": "http://x/", "config": {"channel": "a"}, "protocolsettings": {"retries": 1}},
        {"sink": "http://x/", "config": {"channel": "a"}, "more": 1},
        {"sink": "http://[", "config": {"channel": "a"}},
        {"sink": "http://127.0.0.1/\u00e4", "config": {"channel": "a"}},
        {"sink": f"http://{'x' * 64}.example/", "config": {"channel": "a"}},
        *[
            {
                "sink": "http://x/",
                "config": {"channel": "a"},
                "protocolsettings": {"headers": headers},
            }
            for headers in ({"A": "b\n"}, {"": "b"}, {"a:b": "c"}, {"a b": "c"}, {"Host": "x"})
        ],
    ],
)
def test_bad_subscriptions(server, body):
    """What cannot be a subscription is 400 with a sentence."""
    answer = server.request("POST", "/subscriptions", json.dumps(body))

    assert answer.status == 400
    assert answer.json["message"]


def test_a_subscription_may_be_replaced(server, hooks):
    """PUT asks the new sink, goes on where the old one was, and changes nothing when it is refused."""
    old, new = hooks(), hooks()
    made = subscribe(server, old, "put").json
    server.publish("put", event("1"))
    assert old.ids(1) == ["1"]
    path = f"/subscriptions/{made['id']}"

    def put(body):
        return server.request("PUT", path, json.dumps(body))

    refused = put({"sink": hooks("somebody.else").url, "config": {"channel": "put"}})
    server.publish("put", event("2"))
    assert old.ids(1) == ["2"]
    settings = {"method": "PUT"}
    answer = put({"sink": new.url, "config": {"channel": "put"}, "protocolsettings": settings})
    server.publish("put", event("3"))
    assert new.ids(1) == ["3"]
    again = put({"sink": new.url, "config": {"channel": "put", "from": "earliest"}})
    assert new.ids(3) == ["1", "2", "3"]

    assert (refused.status, refused.code) == (400, "sink-refused")
    assert (answer.status, answer.json["id"]) == (200, made["id"])
    assert new.methods == ["PUT", "POST", "POST", "POST"]
    assert again.json["sink"] == new.url
    assert put({"id": "x", "sink": new.url, "config": {"channel": "put"}}).status == 400
    assert server.request("PUT", "/subscriptions/x", json.dumps(made | {"id": "x"})).status == 400
    made = {name: made[name] for name in ("sink", "config")}
    assert server.request("PUT", "/subscriptions/x", json.dumps(made)).status == 404


def test_what_a_sink_is_taking_is_not_sent_to_the_next(server, hooks):
    """A request on its way is heard before another sink goes on; a subscription that ends waits for nobody."""
    old, new = hooks(), hooks()
    path = f"/subscriptions/{subscribe(server, old, 'way').json['id']}"
    old.answering.clear()
    server.publish("way", event("1"))
    assert old.ids(1) == ["1"]
    new.when_asked = lambda _: old.answering.set()

    body = {"sink": new.url, "config": {"channel": "way"}}
    assert server.request("PUT", path, json.dumps(body)).status == 200
    new.answering.clear()
    server.publish("way", event("2"))
    assert new.ids(1) == ["2"]
    assert server.request("DELETE", path).status == 204
    assert not new.answering.is_set()
    new.answering.set()


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


def call(address, method="GET", headers=None):
    """Follow a callback as a sink or its owner would."""
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=15)
    try:
        connection.request(method, f"{parts.path}?{parts.query}", headers=headers or {})
        return Answer.of(connection.getresponse())
    finally:
        connection.close()


def deferring(start, *flags, port=None):
    """A server on a port that is known before it starts, which offers callbacks."""
    port = port or lasting_port()
    url = f"http://127.0.0.1:{port}/"
    return start(*FAST, "--server-port", port, "--webhook-callback-url", url, *flags)


def test_consent_by_callback(start, hooks, tmp_path):
    """A sink that withholds its consent is waited for, over a kill; its callback needs no token and starts delivery."""
    hook = hooks("", status=405)
    token = {"Authorization": "Bearer a-token-of-sixteen"}
    (tmp_path / "tokens").write_text("a-token-of-sixteen")
    (tmp_path / "tokens").chmod(0o600)
    server = deferring(start, "--token-file", tmp_path / "tokens")
    body = json.dumps({"sink": hook.url, "config": {"channel": "c"}})

    answer = server.request("POST", "/subscriptions", body, token)
    id_ = answer.json["id"]
    callback = hook.options[0]["WebHook-Request-Callback"]
    waiting = {"Content-Type": "application/cloudevents+json"} | token
    server.request("POST", "/channels/c", json.dumps(event("early")), waiting)
    server.stop(signal.SIGKILL)
    server = deferring(start, "--token-file", tmp_path / "tokens", port=server.port)
    seen = server.request("GET", f"/subscriptions/{id_}", headers=token)
    wrong = call(callback.replace("key=", "key=x"))
    looked = call(callback, "HEAD")
    right = call(callback, "GET", {"WebHook-Allowed-Rate": "6000"})
    again = call(callback, "POST")

    assert (answer.status, answer.json["status"]["state"]) == (202, "pending")
    assert (seen.json["status"]["state"], seen.json["status"]["delivered"]) == ("pending", 0)
    assert seen.json["status"]["expires"].endswith("Z")
    assert b"key" not in seen.body
    assert (wrong.status, looked.status) == (404, 405)
    assert (right.status, right.json) == (200, {"id": id_, "state": "active"})
    assert again.status == 200
    assert hook.ids(1) == ["early"]
    server.stop()
    server = deferring(start, "--token-file", tmp_path / "tokens", port=server.port)
    kept = server.request("GET", f"/subscriptions/{id_}", headers=token).json["status"]
    assert (kept["state"], kept["allowedRate"]) == ("active", 6000)
    assert "expires" not in kept


def test_consent_while_being_asked(start, hooks):
    """A sink may call back before it has answered the question."""
    hook = hooks("")
    hook.when_asked = lambda callback: answers.append(call(callback, "POST").status)
    answers = []
    with deferring(start) as server:
        answer = subscribe(server, hook, "c")
        server.publish("c", event("1"))

        assert (answer.status, answers) == (201, [200])
        assert hook.ids(1) == ["1"]


def test_consent_expires(start, hooks):
    """Who does not consent in time is forgotten, and its callback leads nowhere."""
    hook = hooks("")
    server = deferring(start, "--webhook-consent-ms", 300)
    id_ = subscribe(server, hook, "c").json["id"]
    while server.request("GET", f"/subscriptions/{id_}").status == 200:
        pass

    assert call(hook.options[0]["WebHook-Request-Callback"]).status == 404
    assert server.request("GET", "/subscriptions").json == []
    server.stop()
    assert any("webhook_consent_expired" in line for line in server.said)


def test_pending_subscriptions_are_bounded(start, hooks):
    """Only so many may wait; one taken back makes room; consent to somebody else is an answer."""
    hook = hooks("")
    with deferring(start) as server:
        assert subscribe(server, hooks("somebody.else"), "c").code == "sink-refused"
        ids = [subscribe(server, hook, "c").json["id"] for _ in range(100)]
        full = subscribe(server, hook, "c")
        server.request("DELETE", f"/subscriptions/{ids[0]}")

        assert (full.status, full.code) == (400, "too-many-subscriptions")
        assert subscribe(server, hook, "c").status == 202


def test_callback_addresses_are_checked(start):
    """An address that no sink could call stops the start."""
    server = start("--webhook-callback-url", "ftp://here")

    assert server.process.returncode == 1
    assert "webhook_callback_url is 'ftp://here'" in "".join(server.said)


def test_the_allowed_rate_is_kept(start, hooks):
    """Requests of one subscription are as far apart as the sink asked, retries and restarts included."""
    hook = hooks(rate="240")
    server = start(*FAST)
    subscribe(server, hook, "rate")
    server.stop()
    server = start(*FAST)
    hook.statuses.put(503)
    began = time.monotonic()
    server.publish("rate", event("1"), event("2"))
    assert hook.ids(2) == ["1", "2"]

    assert time.monotonic() - began > 2 * 60 / 240 - 0.05


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("7", 7, 7), ("²", 0, 0), ("soon", 0, 0), ("9" * 30, 3600, 3600), ("", 0, 0)],
)
def test_retry_after(text, low, high):
    """Seconds or a date are honoured up to an hour; nonsense is no reason to fail."""
    assert low <= sinks.retry_after_s(text) <= high
    date = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=100))
    assert 95 < sinks.retry_after_s(date) <= 100
