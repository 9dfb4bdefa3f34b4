"""Web pages: which origins may open sockets and ask for things, and what the setting changes."""

from __future__ import annotations

import socket

import pytest
from click.testing import CliRunner

from virta.cli import main
from virta.errors import ConfigError, RequestError
from virta.server.config import load
from virta.server.origins import Origins

TOKEN = "a-token-of-sixteen"
UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: cloudevents.json\r\n"
)
SOCKETS = ["/subscribe?streams=a:&max_queued=1", "/channels/a"]


def handshake(port, path, origin, host="127.0.0.1"):
    """Status, and what follows the head, of an upgrade as a browser would ask for it."""
    line = "" if origin is None else f"Origin: {origin}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{line}{UPGRADE}\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(65536)
        while b"\r\n\r\n" not in answer or b" 403 " in answer[:20]:
            more = connection.recv(65536)
            answer += more
            if not more:
                break
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode("utf-8", "replace")


@pytest.mark.parametrize("path", SOCKETS)
def test_sockets_of_foreign_pages_are_refused(server, path):
    """On loopback a page of another site, of a file or of a rebound name opens no socket and is told why."""
    for origin in ("https://evil.example", "null", "chrome-extension://abc", "nonsense", ""):
        status, text = handshake(server.port, path, origin)
        assert status == 403, origin
        assert "--allow-origin" in text
    rebound = f"http://evil.example:{server.port}"
    assert handshake(server.port, path, rebound, host="evil.example")[0] == 403


@pytest.mark.parametrize("path", SOCKETS)
def test_sockets_of_own_pages_and_programs(server, path):
    """Programs send no origin; pages of this machine are as near as any program on it."""
    port = server.port
    for origin in (None, f"http://127.0.0.1:{port}", "http://localhost:3000", "http://[::1]:5173"):
        assert handshake(port, path, origin)[0] == 101, origin


def test_other_requests_are_thoriums_by_default(server):
    """Without the setting any page may ask, as Thorium's `*` says, and preflights are answered."""
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "PUT"}
    for path in ("/channels/a", "/publish", "/filters/a/b"):
        answer = server.request("OPTIONS", path, headers=headers)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, "*")
    assert server.request("GET", "/metrics", headers=headers).status == 200


def test_a_list_holds_for_everything(start):
    """With the setting, other pages are refused on every route, preflights included; programs are not."""
    flags = ["--allow-origin", "https://app.example:443/", "--allow-origin", "null"]
    with start(*flags) as server:
        for path in SOCKETS:
            assert handshake(server.port, path, "https://app.example")[0] == 101
            assert handshake(server.port, path, "null")[0] == 101
            assert handshake(server.port, path, "https://evil.example")[0] == 403
        for method, path in [
            ("OPTIONS", "/channels/a"),
            ("OPTIONS", "/publish"),
            ("OPTIONS", "/metrics"),
            ("GET", "/channels/a"),
            ("POST", "/publish"),
            ("GET", "/metrics"),
        ]:
            answer = server.request(method, path, headers={"Origin": "https://evil.example"})
            assert (answer.status, answer.code) == (403, "origin-not-allowed"), path
        for origin in ({"Origin": "https://app.example"}, {"Origin": "http://localhost:1"}, {}):
            assert server.request("GET", "/metrics", headers=origin).status == 200
            assert server.request("POST", "/publish", "[]", headers=origin).status == 200
        assert server.request("GET", "/livez", headers={"Origin": "http://e.example"}).status == 200


def test_a_token_speaks_for_a_page(start, tmp_path):
    """Where tokens are asked for, a page that has one was given it; a list still holds."""
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    file.chmod(0o600)
    path = f"{SOCKETS[0]}&access_token={TOKEN}"
    with start("--token-file", file) as server:
        assert handshake(server.port, path, "https://app.example")[0] == 101
        assert handshake(server.port, SOCKETS[0], "https://app.example")[0] == 401
        server.stop()
    with start("--token-file", file, "--allow-origin", "self") as server:
        assert handshake(server.port, path, "https://app.example")[0] == 403


def test_beyond_loopback_own_pages_are_those_of_the_same_host():
    """A server that others reach knows its own pages by the Host they were asked from."""
    origins = Origins(host="0.0.0.0", tokens=False)

    def ask(origin, host):
        origins.check([(b"host", host), (b"origin", origin)], socket=True)

    ask(b"http://box.lan:8232", b"box.lan:8232")
    ask(b"https://box.lan", b"BOX.lan:443")
    for origin, host in [
        (b"http://box.lan:8233", b"box.lan:8232"),
        (b"http://localhost:8232", b"box.lan:8232"),
        (b"http://box.lan:99999", b"box.lan:99999"),
        (b"http://", b""),
    ]:
        with pytest.raises(RequestError):
            ask(origin, host)


def test_the_setting_from_every_place(tmp_path):
    """Flags repeat, variables have commas, files have arrays; each is normalised."""
    file = tmp_path / "virta.toml"
    file.write_text('[server]\nallow_origin = ["https://A.example:443", "self"]\n')

    assert load().allow_origin is None
    assert load(file=file).allow_origin == ("https://a.example", "self")
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
    """A value that could never match anything is a mistake, and is said to be one."""
    with pytest.raises(ConfigError, match="origins such as https"):
        load({"allow_origin": (text,)})
