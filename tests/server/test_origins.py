"""Access to the server: web pages by their origin, requests by their host."""

from __future__ import annotations

import json
import logging
import re
import socket
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from server_harness import STRUCTURED, event, read

from virta.cli import main
from virta.errors import ConfigError, RequestError
from virta.server.access.audit import Audit
from virta.server.access.auth import Authenticator
from virta.server.access.hosts import Hosts, read_host
from virta.server.access.origins import Origins
from virta.server.api.app import build_app
from virta.server.config_loader import load

TOKEN = "a-token-of-sixteen"
UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: cloudevents.json\r\n"
)
SOCKETS = ["/subscribe?streams=a:&max_queued=1", "/channels/a"]
FOREIGN = ["https://evil.example", "null", "chrome-extension://abc", "nonsense", ""]
AUDIT = Audit(logging.getLogger(__name__))
EVIL = {"Origin": "https://evil.example"}
CROSS_SITE = {
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "no-cors",
    "Sec-Fetch-Dest": "image",
}
# The protocol's own routes; every other one is in the application's table.
HOT = [
    *[
        ("/channels/table", method)
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
    ],
    ("/channels/table/from/earliest", "GET"),
    *[("/publish", method) for method in ("GET", "POST", "OPTIONS")],
    (f"/filters/{'0' * 64}/events", "GET"),
]


def route_table():
    """Every path and method that is served, and some that are not."""
    stub = SimpleNamespace(journal=SimpleNamespace(node=None))
    application = build_app(stub).app
    found = [*HOT, ("/nowhere", "GET"), ("/nowhere", "POST"), ("/", "GET")]
    for route in application.routes:
        path = re.sub(r"\{[^}]*\}", "0", route.path)
        found += [(path, method) for method in sorted({*route.methods, "OPTIONS"})]
    return found


TABLE = route_table()


def ask(port, path, method="GET", headers=None, host="localhost"):
    """Return the response to one request with the given Host."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n{lines}"
        connection.sendall(f"{head}Connection: close\r\n\r\n[]".encode())
        answer = read(connection, until=b"\r\n\r\n")
        if b"text/event-stream" in answer:
            return answer  # it does not end
        return answer + read(connection)


def handshake(port, path, origin, host="127.0.0.1"):
    """Return the status of an upgrade as browsers request it, and what follows the head."""
    line = "" if origin is None else f"Origin: {origin}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{line}{UPGRADE}\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(65536)
        while b"\r\n\r\n" not in answer or b" 101 " not in answer[:20]:
            more = connection.recv(65536)
            answer += more
            if not more:
                break
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode("utf-8", "replace")


def status_of(answer):
    return int(answer.split()[1])


@pytest.mark.parametrize(("path", "method"), TABLE)
def test_every_route_checks_host_and_origin(server, path, method):
    """On each route and method other pages, other sites and other hosts are refused, and only those."""
    port = server.port
    for headers, host, status, code in [
        (EVIL, "localhost", 403, b"origin-not-allowed"),
        ({"Origin": "null"}, "localhost", 403, b"origin-not-allowed"),
        (EVIL | {"Content-Type": "text/plain"}, "localhost", 403, b"origin-not-allowed"),
        (CROSS_SITE, "localhost", 403, b"origin-not-allowed"),
        ({}, "evil.example", 421, b"misdirected-host"),
        ({"Origin": "http://evil.example"}, "evil.example", 421, b"misdirected-host"),
    ]:
        answer = ask(port, path, method, headers, host)
        assert status_of(answer) == status, (headers, answer)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"access-control" not in head.lower()
        if method == "HEAD":
            assert body == b""
        else:
            assert json.loads(body)["code"].encode() == code
            assert json.loads(body)["message"]
    for headers in ({}, {"Origin": "http://localhost:3000"}):
        answer = ask(port, path, method, headers)
        assert status_of(answer) not in {403, 421}, answer
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert (b"access-control-allow-origin: http://localhost:3000" in head) == bool(headers)
        assert (b"vary: origin" in head) == bool(headers)


@pytest.mark.parametrize("path", SOCKETS)
def test_sockets_of_foreign_pages_are_refused(server, path):
    """On loopback a page of another site, of a file or of a rebound name opens no socket."""
    for origin in FOREIGN:
        status, text = handshake(server.port, path, origin)
        assert status == 403, origin
        assert "--allow-origin" in text
    rebound = f"http://evil.example:{server.port}"
    status, text = handshake(server.port, path, rebound, host="evil.example")
    assert status == 421
    assert "--allow-host" in text
    assert handshake(server.port, path, None, host="evil.example")[0] == 421


@pytest.mark.parametrize("path", SOCKETS)
def test_sockets_of_own_pages_and_programs(server, path):
    """Programs send no origin; pages of this machine are as near as any program on it."""
    port = server.port
    for origin in (None, f"http://127.0.0.1:{port}", "http://localhost:3000", "http://[::1]:5173"):
        assert handshake(port, path, origin)[0] == 101, origin


def test_a_simple_post_of_a_page_has_no_effect(server):
    """What a browser sends without a preflight is refused before it has an effect."""
    subscription = json.dumps({"sink": "http://127.0.0.1:1/", "config": {"channel": "simple"}})
    headers = EVIL | {"Content-Type": "text/plain"}
    for path, body in [
        ("/subscriptions", subscription),
        ("/publish", json.dumps([{"publish_to": "a:b", "payload": "x"}])),
        ("/filters/simple/one", "{}"),
        ("/journal/jobs/next", "{}"),
    ]:
        answer = server.request("POST", path, body, headers)
        assert (answer.status, answer.code) == (403, "origin-not-allowed")
    assert server.request("GET", "/subscriptions").json == []


def test_a_known_head_is_still_checked(server):
    """A head that is cached on the fast path for one host or page does not allow another one."""
    body = json.dumps(event("1")).encode()

    def post(connection, host, more=""):
        head = (
            f"POST /channels/quick HTTP/1.1\r\nHost: {host}\r\n{more}Content-Type: {STRUCTURED}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        return connection.recv(65536)

    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=10) as connection:
        for _ in range(3):
            assert b" 202 " in post(connection, "localhost")[:20]
        page = post(connection, "localhost", "Origin: http://localhost:1\r\n")
        again = post(connection, "localhost", "Origin: http://localhost:1\r\n")
        assert b"Access-Control-Allow-Origin: http://localhost:1\r\n" in page
        assert b"Access-Control-Allow-Origin: http://localhost:1\r\n" in again
        assert b"Access-Control" not in post(connection, "localhost")
    for host, more, status in [
        ("evil.example", "", b" 421 "),
        ("localhost", "Origin: https://evil.example\r\n", b" 403 "),
        ("localhost", "Sec-Fetch-Site: cross-site\r\n", b" 403 "),
    ]:
        for _ in range(2):
            with socket.create_connection(address, timeout=10) as connection:
                assert status in post(connection, host, more)[:20]


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/livez", "localhost", 200),
        ("HTTP://127.0.0.1:80/livez", "localhost", 200),
        ("http://evil.example/livez", "localhost", 421),
        ("http://localhost@evil.example/livez", "localhost", 421),
        ("http:///livez", "localhost", 421),
        ("http://localhost/livez", "evil.example", 421),
        ("/livez", "127.8.9.1:99", 200),
        ("/livez", "[::1]", 200),
        ("/livez", "[::ffff:127.0.0.1]:8232", 200),
        ("/livez", "LOCALHOST.:8232", 200),
        ("/livez", "app.localhost", 200),
        ("/livez", "", 421),
        ("/livez", ":8232", 421),
        ("/livez", "10.0.0.1", 421),
        ("/livez", "localhost.evil.example", 421),
        ("/livez", "localhost:80:80", 421),
        ("/livez", "[::1", 421),
    ],
)
def test_hosts_of_a_server_on_loopback(server, target, host, status):
    """The target's host counts as well as the header; loopback is spelled in many ways."""
    assert status_of(ask(server.port, target, host=host)) == status


def test_programs_without_a_host(server):
    """HTTP/1.0 has no Host, and no browser speaks it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert b" 200 " in read(connection)[:20]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /livez HTTP/1.0\r\nHost: evil.example\r\n\r\n")
        assert b" 421 " in read(connection)[:20]


def test_links_lead_to_pages_for_people_only(server):
    """A link on another site opens the console and a webhook's callback, in a window, and nothing else."""
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    window, frame = {"Sec-Fetch-Dest": "document"}, {"Sec-Fetch-Dest": "iframe"}
    for path, status in (("/", 200), ("/subscriptions/a/confirm?key=b", 404)):
        assert status_of(ask(server.port, path, headers=link | window)) == status
        assert status_of(ask(server.port, path, headers=link | frame)) == 403
        assert status_of(ask(server.port, path, "POST", headers=link | window)) == 403
    for path in ("/metrics", "/channels/a", "/subscriptions", "/subscriptions/a/confirm/b"):
        assert status_of(ask(server.port, path, headers=link | window)) == 403
    for site in ("same-origin", "same-site", "none"):
        assert status_of(ask(server.port, "/openapi.json", headers={"Sec-Fetch-Site": site})) == 200


def test_preflights_answer_allowed_pages(start):
    """An allowed page gets its preflight and can read every response; others get neither."""
    flags = ["--allow-origin", "https://app.example:443/", "--allow-origin", "null"]
    with start(*flags) as server:
        for path in SOCKETS:
            assert handshake(server.port, path, "https://app.example")[0] == 101
            assert handshake(server.port, path, "null")[0] == 101
            assert handshake(server.port, path, "https://evil.example")[0] == 403
        asked = {"Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "x-a"}
        for path in ("/channels/a", "/publish", "/filters/a/b", "/metrics", "/journal/keys/a"):
            answer = server.request(
                "OPTIONS", path, headers={"Origin": "https://app.example"} | asked
            )
            assert answer.status == 204
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
            assert answer.headers["vary"] == "Origin"
            assert "PUT" in answer.headers["access-control-allow-methods"]
            refused = server.request("OPTIONS", path, headers=EVIL | asked)
            assert (refused.status, refused.code) == (403, "origin-not-allowed")
        for origin in ({"Origin": "https://app.example"}, {"Origin": "http://localhost:1"}, {}):
            for method, path, status in [
                ("GET", "/metrics", 200),
                ("GET", "/livez", 200),
                ("POST", "/publish", 200),
                ("GET", "/journal/keys/none", 404),
                ("DELETE", "/channels/a", 405),
            ]:
                body = "[]" if method == "POST" else None
                answer = server.request(method, path, body, headers=origin)
                assert answer.status == status
                shown = answer.headers.get("access-control-allow-origin")
                assert shown == origin.get("Origin")


@pytest.mark.parametrize(
    ("request_line", "more", "status"),
    [
        ("POST /channels/a HTTP/1.1", "Content-Encoding: gzip\r\nContent-Length: 2\r\n", 415),
        ("POST /filters/a/b HTTP/1.1", "Content-Encoding: gzip\r\nContent-Length: 2\r\n", 415),
        ("POST /publish HTTP/1.1", "Transfer-Encoding: gzip\r\n", 501),
        ("GET x://h HTTP/1.1", "", 400),
        ("HEAD x://h HTTP/1.1", "", 400),
        ("HEAD /channels/a HTTP/1.1", "Content-Encoding: br\r\n", 415),
        ("CONNECT localhost:80 HTTP/1.1", "", 405),
    ],
)
def test_a_page_can_read_refusals_of_heads(server, request_line, more, status):
    """An allowed page learns what was wrong, also when no route saw the request; HEAD gets no body."""
    origin = "Origin: http://localhost:1\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        request = f"{request_line}\r\nHost: localhost\r\n{origin}{more}\r\n"
        connection.sendall(request.encode())
        answer = read(connection)
    head, _, body = answer.partition(b"\r\n\r\n")

    assert status_of(answer) == status
    assert head.count(b"Access-Control-Allow-Origin: http://localhost:1\r\n") == 1
    assert bool(body) == (not request_line.startswith("HEAD"))


def test_the_lines_of_one_page_are_not_those_of_the_next(server):
    """On one connection a program's refusal has no CORS lines, though a page asked before."""
    refused = "Host: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n[]"
    page = "GET /livez HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost:1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(f"{page}POST /channels/a HTTP/1.1\r\n{refused}".encode())
        answer = read(connection).lower()

    assert (answer.count(b"http/1.1 200"), answer.count(b"http/1.1 415")) == (1, 1)
    assert answer.count(b"access-control-allow-origin") == 1


def test_every_page_is_allowed_by_a_wildcard(start):
    """`*` allows any page, also one without an origin; the host is still checked."""
    with start("--allow-origin", "*") as server:
        answer = server.request("GET", "/metrics", headers=EVIL)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (
            200,
            EVIL["Origin"],
        )
        assert server.request("GET", "/metrics", headers=CROSS_SITE).status == 200
        assert status_of(ask(server.port, "/metrics", host="evil.example")) == 421


def test_thoriums_headers(start):
    """`--thorium-compatible` sends `*` with every response, also on the fast path, and allows no further page."""
    with start("--thorium-compatible", "--durability", "none") as server:
        for _ in range(3):
            assert server.publish("a", event("1")).headers["access-control-allow-origin"] == "*"
        for path in ("/metrics", "/journal/keys/none", "/nowhere", "/subscriptions"):
            assert server.request("GET", path).headers["access-control-allow-origin"] == "*"
        refused = server.request("GET", "/metrics", headers=EVIL)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (403, "*")
        body = json.dumps(event("2")).encode()
        request = b"POST /channels/a HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
        request %= (STRUCTURED.encode(), len(body), body)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            for _ in range(3):
                connection.sendall(request)
                answer = connection.recv(65536)
                assert answer.count(b"Access-Control-Allow-Origin: *\r\n") == 1


def test_a_token_does_not_allow_a_page(start, tmp_path):
    """Where tokens are asked for, a page needs both: its origin allowed, and a token."""
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    file.chmod(0o600)
    path = f"{SOCKETS[0]}&access_token={TOKEN}"
    with start("--token-file", file, "--token-in-url") as server:
        assert handshake(server.port, path, "https://app.example")[0] == 403
        assert handshake(server.port, path, "http://localhost:1")[0] == 101
        assert handshake(server.port, SOCKETS[0], None)[0] == 401
        server.stop()
    with start(
        "--token-file", file, "--token-in-url", "--allow-origin", "https://app.example"
    ) as server:
        assert handshake(server.port, path, "https://app.example")[0] == 101
        assert handshake(server.port, SOCKETS[0], "https://app.example")[0] == 401


def test_a_server_for_everyone(start):
    """On a wildcard address the address of the connection is a right host; names have to be listed."""
    flags = ["--host", "0.0.0.0", "--insecure", "--allow-host", "box.lan,Other.LAN"]
    with start(*flags) as server:
        for host, status in [
            ("127.0.0.1", 200),
            ("box.lan", 200),
            ("BOX.lan:99", 200),
            ("other.lan", 200),
            ("evil.example", 421),
            ("10.1.2.3", 421),
        ]:
            assert status_of(ask(server.port, "/livez", host=host)) == status, host


def checker(host, allowed=None, names=None):
    auth = Authenticator(Hosts(host, names), Origins(allowed, host=host), AUDIT)

    def check(origin, named, local="10.0.0.5"):
        headers = [(b"host", named)]
        if origin is not None:
            headers.append((b"origin", origin))
        return auth.check("1.1", b"GET", b"/", headers, local)

    return check


def test_the_address_of_the_connection_is_right_on_a_wildcard():
    """Any address of this machine may be used, and no other."""
    check = checker("::")
    check(None, b"10.0.0.5")
    check(None, b"10.0.0.5:8232")
    check(None, b"10.0.0.5", local="::ffff:10.0.0.5")
    check(None, b"[fe80::1]", local="fe80::1%eth0")
    for named, local in [(b"10.0.0.6", "10.0.0.5"), (b"box.lan", "10.0.0.5"), (b"10.0.0.5", None)]:
        with pytest.raises(RequestError):
            check(None, named, local=local)
    narrow = checker("10.0.0.5")
    narrow(None, b"10.0.0.5:1", local="10.0.0.5")
    narrow(None, b"localhost", local="10.0.0.5")
    with pytest.raises(RequestError):
        narrow(None, b"10.0.0.6", local="10.0.0.6")


def test_beyond_loopback_own_pages_are_those_of_the_same_host():
    """A server that others reach knows its own pages by the Host they were asked from."""
    check = checker("0.0.0.0", names=("box.lan",))
    check(b"http://box.lan:8232", b"box.lan:8232")
    check(b"https://box.lan", b"BOX.lan:443")
    check(b"http://localhost:3000", b"localhost:8232")
    for origin, host in [
        (b"http://box.lan:8233", b"box.lan:8232"),
        (b"http://localhost:8232", b"box.lan:8232"),
        (b"http://box.lan:99999", b"box.lan:99999"),
        (b"http://", b"box.lan"),
    ]:
        with pytest.raises(RequestError):
            check(origin, host)


def test_one_of_two_origins_is_not_enough():
    """No browser sends two; both have to be allowed."""
    auth = Authenticator(Hosts("127.0.0.1"), Origins(), AUDIT)
    headers = [(b"host", b"localhost"), (b"origin", b"http://localhost")]
    auth.check("1.1", b"GET", b"/", headers, None)
    with pytest.raises(RequestError):
        auth.check("1.1", b"GET", b"/", [*headers, (b"origin", b"http://e.example")], None)


def test_the_setting_from_every_place(tmp_path):
    """Flags repeat, variables have commas, files have arrays; each is normalised."""
    file = tmp_path / "virta.toml"
    file.write_text(
        '[server]\nallow_origin = ["https://A.example:443", "self"]\nallow_host = ["A.example", "[::1]"]\n'
    )

    assert load().allow_origin is None
    assert load(file=file).allow_origin == ("https://a.example", "self")
    assert load(file=file).allow_host == ("a.example", "::1")
    assert load(
        environ={"VIRTA_ALLOW_ORIGIN": "http://a:80, http://[::1]:3000,*"}
    ).allow_origin == (
        "http://a",
        "http://[::1]:3000",
        "*",
    )
    shown = CliRunner().invoke(
        main, ["config", "--allow-origin", "http://a", "--allow-origin", "http://b"]
    )
    assert "http://a,http://b" in shown.output
    assert "flag --allow-origin" in shown.output


@pytest.mark.parametrize(
    "text", ["", "a.example", "https://a/b", "http://a:x", "https://ä", "a,,b"]
)
def test_what_is_no_origin_is_refused(text):
    """A value that can never match is refused."""
    with pytest.raises(ConfigError, match="origins such as https"):
        load({"allow_origin": (text,)})


@pytest.mark.parametrize("text", ["", "a.example:80", "http://a.example", "a b", "ä.example", "-a"])
def test_what_is_no_host_is_refused(text):
    """Names and addresses alone."""
    assert read_host(text) is None
    with pytest.raises(ConfigError, match="host names or addresses"):
        load({"allow_host": (text,)})
