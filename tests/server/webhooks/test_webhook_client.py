"""Allowed addresses of webhooks, what refusals reveal, and who can read secrets."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import threading
from urllib.parse import urlsplit

import pytest
from server_harness import DEADLINE_S, event
from test_webhooks import FAST, Hook, hooks, subscribe

from virta.errors import ConfigError
from virta.hub.registry import Registry
from virta.server.config_loader import load
from virta.server.webhooks.addresses import SinkRules
from virta.server.webhooks.client import Verdict, WebhookClient
from virta.server.webhooks.outbound import OutboundLoop, Resolver

__all__ = ["hooks"]  # a fixture

NOT_PUBLIC = [
    "127.0.0.1",
    "127.9.9.9",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "169.254.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "192.0.0.192",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "192.88.99.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:8.8.8.8",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::808:808",
    "64:ff9b:1::1",
    "2002:7f00:1::1",
    "2001:0:7f00:1::1",
    "2001:db8::1",
    "3fff::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "100::1",
]
PUBLIC = [
    "8.8.8.8",
    "93.184.216.34",
    "172.32.0.1",
    "100.128.0.1",
    "2606:4700::1111",
    "2a00:1450:4001::1",
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address):
    """Loopback, private, special and wrapped addresses are refused."""
    assert not SinkRules().permits("sink.example", address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address):
    """All others may be used."""
    assert SinkRules().permits("sink.example", address)


def test_rules():
    """A network, an address or a host may be allowed, and nothing beside it."""
    rules = SinkRules(
        load({"webhook_allow": ("10.1.2.3/8", "127.0.0.1,Hooks.LAN", "fd00::/8")}).webhook_allow
    )
    assert rules.permits("x", "10.255.0.1")
    assert rules.permits("x", "::ffff:10.255.0.1")
    assert rules.permits("x", "127.0.0.1")
    assert rules.permits("hooks.lan", "192.168.0.1")
    assert rules.permits("HOOKS.lan.", "192.168.0.1")
    assert rules.permits("x", "fd00::1")
    assert not rules.permits("x", "127.0.0.2")
    assert not rules.permits("x", "64:ff9b::a01:203")
    assert not rules.permits("other.lan", "192.168.0.1")
    for wrong in ("", "*", "http://x", "10.0.0.0/33", "a b"):
        with pytest.raises(ConfigError, match="networks such as"):
            load({"webhook_allow": (wrong,)})


@pytest.fixture
def listening():
    """Return an open port and a closed one."""
    with (
        socket.create_server(("127.0.0.1", 0)) as open_,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        open_.setblocking(False)
        closed = other.getsockname()[1]
        other.close()
        yield open_, closed


def test_refusals_tell_nothing(start, hooks, listening):
    """An open port, a closed one, a private address, an unknown name and a sink that refuses: one answer."""
    open_, closed = listening
    port = open_.getsockname()[1]
    with start() as server:
        answers = [
            server.request(
                "POST", "/subscriptions", json.dumps({"sink": sink, "config": {"channel": "a"}})
            )
            for sink in [
                f"http://127.0.0.1:{port}/",
                f"http://127.0.0.1:{closed}/",
                f"http://localhost:{port}/",
                f"http://[::1]:{port}/",
                f"http://[::ffff:127.0.0.1]:{port}/",
                f"http://2130706433:{port}/",
                f"http://0x7f.1:{port}/",
                f"https://127.0.0.1:{port}/",
                "http://10.255.255.1/",
                "http://169.254.169.254/latest/meta-data/",
                "http://no-such-name.invalid/",
            ]
        ]
        with pytest.raises(BlockingIOError):
            open_.accept()
    with start("--webhook-allow", "127.0.0.0/8", "--webhook-timeout-ms", 10_000) as server:
        refusing = hooks("somebody.else")
        answers += [
            subscribe(server, refusing, "a"),
            subscribe(server, hooks("*", status=500), "a"),
            server.request(
                "POST",
                "/subscriptions",
                json.dumps({"sink": f"http://127.0.0.1:{closed}/", "config": {"channel": "a"}}),
            ),
        ]
        server.stop()
        assert any("somebody.else" in line for line in server.said)

    assert {(answer.status, answer.body) for answer in answers} == {(400, answers[0].body)}
    assert answers[0].code == "sink-refused"


def test_hosts_may_be_allowed(start, hooks):
    """A host that is listed may have any address; another name of the same address may not."""
    hook = hooks()
    port = urlsplit(hook.url).port
    with start("--webhook-allow", "localhost") as server:
        body = {"sink": f"http://localhost:{port}/", "config": {"channel": "a"}}
        assert server.request("POST", "/subscriptions", json.dumps(body)).status == 201
        assert subscribe(server, hook, "a").status == 400
        server.publish("a", event("1"))
        got, headers = hook.received.get(timeout=DEADLINE_S)

    assert (got["id"], headers["Host"]) == ("1", f"localhost:{port}")


def test_redirects_are_not_followed(start, hooks):
    """A sink cannot lead the server elsewhere; the event is a dead letter."""
    inner = hooks()
    outer = hooks(location=inner.url)
    with start(*FAST) as server:
        id_ = subscribe(server, outer, "a").json["id"]
        outer.statuses.put(307)
        server.publish("a", event("1"), event("2"))
        assert outer.ids(1) == ["2"]
        status = server.request("GET", f"/subscriptions/{id_}").json["status"]

    assert (status["deadLetters"], status["lastError"]) == (1, "status 307")
    assert inner.received.empty()
    assert inner.methods == []


@pytest.fixture
def outbound():
    made = OutboundLoop()
    yield made
    made.stop()


def test_the_address_that_was_checked_is_connected_to(monkeypatch, hooks, outbound):
    """A name that changes between two lookups (DNS rebinding) is looked up once, and checked each time."""
    hook = hooks()
    port = urlsplit(hook.url).port
    answers = iter(["127.0.0.1", "127.0.0.2", "127.0.0.2"])
    asked = []

    def rebinding(host, *arguments, **named):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    rules = SinkRules(("127.0.0.1/32",))
    sink = WebhookClient(
        f"http://sink.example:{port}/", {}, DEADLINE_S, "virta", "POST", Resolver(rules)
    )

    def deliver():
        return outbound.submit(sink.deliver(b"{}")).result(DEADLINE_S)

    assert [deliver().verdict for _ in range(3)] == [Verdict.DELIVERED] * 3
    assert asked == ["sink.example"]
    assert hook.received.get(timeout=DEADLINE_S)[1]["Host"] == f"sink.example:{port}"
    outbound.submit(sink.close()).result(DEADLINE_S)
    sink._resolved_at = 0.0  # as after a minute
    refused = deliver()
    assert (refused.verdict, len(asked)) == (Verdict.RETRY, 2)
    assert "not allowed" in refused.reason


def test_one_lookup_a_host_at_a_time(monkeypatch, outbound):
    """A name server that does not answer holds up one thread, however often its host is asked for."""
    release, asked = threading.Event(), []

    def stuck(host, *arguments, **named):
        asked.append(host)
        if host == "stuck.example":
            release.wait(DEADLINE_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    resolver = Resolver(SinkRules(("127.0.0.1/32",)))
    sinks = [
        WebhookClient("http://stuck.example:1/", {}, 0.05, "virta", "POST", resolver)
        for _ in range(5)
    ]
    answers = [outbound.submit(sink.deliver(b"")).result(DEADLINE_S) for sink in sinks]
    other = outbound.submit(resolver.addresses("other.example")).result(DEADLINE_S)
    release.set()

    assert {answer.reason for answer in answers} == {"no complete response within 0.05 s"}
    assert asked == ["stuck.example", "other.example"]
    assert other == ["127.0.0.1"]


def test_tls_is_checked_against_the_name(start, tmp_path):
    """The connection goes to the checked address, the certificate has to be that of the name."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    hook = Hook(tls=(certificate, key))
    port = urlsplit(hook.url).port
    try:
        environ = {"SSL_CERT_FILE": str(certificate)}
        flags = ["--webhook-allow", "127.0.0.1", "--webhook-allow", "localhost"]
        with start(*flags, environ=environ) as server:
            for name, status in (("localhost", 201), ("127.0.0.1", 400)):
                body = {"sink": f"https://{name}:{port}/", "config": {"channel": "a"}}
                assert server.request("POST", "/subscriptions", json.dumps(body)).status == status
            server.publish("a", event("1"), event("2"))
            assert hook.ids(2) == ["1", "2"]
    finally:
        hook.close()


SECRET = "s3cret-of-the-sink"


def secret_settings(**more):
    return {"headers": {"X-Key": SECRET, "X-Other": "o"}} | more


def test_secrets_are_never_shown(start, hooks, tmp_path):
    """Headers are sent to the sink and shown nowhere: not by a route, in the log, or to other users."""
    hook = hooks()
    data = tmp_path / "data"
    with start(*FAST, "--log-level", "trace") as server:
        made = subscribe(server, hook, "a", protocolsettings=secret_settings(method="PUT"))
        path = f"/subscriptions/{made.json['id']}"
        hook.statuses.put(400)
        server.publish("a", event("1"), event("2"))
        assert hook.received.get(timeout=DEADLINE_S)[1]["X-Key"] == SECRET
        shown = [made, server.request("GET", path), server.request("GET", "/subscriptions")]
        shown.append(server.request("GET", "/metrics"))
        names = made.json["protocolsettings"]
        server.stop()
        said = "".join(server.said)
    registry = data / "registry"

    (signing,) = names.pop("secrets")  # made by the server, and shown this once
    assert names == {"headers": {"X-Key": True, "X-Other": True}, "method": "PUT"}
    assert all(SECRET.encode() not in answer.body for answer in shown)
    assert all(signing.encode() not in answer.body for answer in shown[1:])
    assert SECRET not in said
    assert signing not in said
    assert stat.S_IMODE(registry.stat().st_mode) == 0o700
    modes = {name: stat.S_IMODE(os.stat(registry / name).st_mode) for name in os.listdir(registry)}
    assert all(mode == 0o600 for mode in modes.values()), modes
    assert any(SECRET.encode() in (registry / name).read_bytes() for name in modes)


def test_a_registry_of_older_versions_is_made_private(start, hooks, tmp_path):
    """Files that others could read cannot be read any more after a start."""
    with start(*FAST) as server:
        subscribe(server, hooks(), "a", protocolsettings=secret_settings())
    registry = tmp_path / "data" / "registry"
    registry.chmod(0o755)
    for file in registry.iterdir():
        file.chmod(0o644)
    with start(*FAST):
        modes = {stat.S_IMODE(file.stat().st_mode) for file in registry.iterdir()}

    assert (stat.S_IMODE(registry.stat().st_mode), modes) == (0o700, {0o600})


def test_secrets_can_be_kept_by_a_replacement(start, hooks):
    """A description that was shown can be put back; secrets are kept for the same server only."""
    hook, other = hooks(), hooks()
    with start(*FAST) as server:
        made = subscribe(server, hook, "a", protocolsettings=secret_settings()).json
        path = f"/subscriptions/{made['id']}"
        made.pop("status")
        answer = server.request("PUT", path, json.dumps(made | {"types": ["test"]}))
        server.publish("a", event("1"))
        assert hook.received.get(timeout=DEADLINE_S)[1]["X-Key"] == SECRET
        stolen = server.request("PUT", path, json.dumps(made | {"sink": other.url}))
        settings = {"headers": {"X-New": True}}
        unknown = server.request("PUT", path, json.dumps(made | {"protocolsettings": settings}))
        fresh = subscribe(server, hook, "a", protocolsettings=settings)
        settings = {"headers": {"X-Key": "n", "X-Other": True}}
        changed = server.request("PUT", path, json.dumps(made | {"protocolsettings": settings}))
        server.publish("a", event("2"))
        headers = hook.received.get(timeout=DEADLINE_S)[1]

    assert answer.status == 200
    assert (stolen.status, unknown.status, fresh.status) == (400, 400, 400)
    assert other.options == []
    assert changed.status == 200
    assert (headers["X-Key"], headers["X-Other"]) == ("n", "o")


def test_subscriptions_of_older_versions(start, hooks, tmp_path):
    """A sink that cannot be used any more keeps no server from starting; a password is not shown."""
    hook = hooks()
    config = {"channel": "a", "from": "earliest"}
    registry = Registry(tmp_path / "data" / "registry")
    registry.keep_subscription("broken", {"sink": "http://[", "config": config})
    old = hook.url.replace("http://", "http://user:password@")
    registry.keep_subscription("old", {"sink": old, "config": config})
    registry.close()
    with start(*FAST) as server:
        server.publish("a", event("1"))
        assert hook.ids(1) == ["1"]
        shown = server.request("GET", "/subscriptions")
        server.stop()
        said = "".join(server.said)

    assert [one["sink"] for one in shown.json] == [hook.url]
    assert "webhook_unusable" in said
    assert "password" not in said


def test_no_password_in_an_address(start, hooks):
    """Addresses are shown, so they hold no credentials."""
    hook = hooks()
    with start(*FAST) as server:
        hook.url = hook.url.replace("http://", "http://user:password@")
        answer = subscribe(server, hook, "a")

    assert (answer.status, answer.code) == (400, "invalid-subscription")
    assert "protocolsettings.headers" in answer.json["message"]
    assert b"password@" not in answer.body
