"""The journal's TCP port and its HTTP routes with tokens."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess

import pytest
from access_support import bearer, token
from server_harness import Server

from virta.access import TokenStore
from virta.errors import JournalError
from virta.journal import AsyncClient, Client
from virta.journal.protocol import commands
from virta.journal.protocol.codec import encode_request
from virta.journal.protocol.messages import Function, Request
from waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("journal") / "data"
    tokens = {
        "all": token(data_dir, (["jobs"], "**")),
        "mail": token(data_dir, (["jobs"], "mail**")),
        "row": token(data_dir, (["jobs"], "**", "tenant=1")),
        "read": token(data_dir, (["read"], "**")),
    }
    with Server(data_dir, "--require-token", "--durability", "none") as running:
        running.tokens = tokens
        yield running


def client(server, name=None, text=None):
    chosen = server.tokens[name] if name else text
    return Client("127.0.0.1", server.journal_port, token=chosen)


def code(call, *arguments, **named):
    with pytest.raises(JournalError) as refused:
        call(*arguments, **named)
    return refused.value.code


def test_the_first_request_is_a_token(server):
    """Anything else is refused and ends the connection; nothing after it is carried out."""
    with socket.create_connection(("127.0.0.1", server.journal_port), timeout=20) as raw:
        first = Request(Function.SET, 1, key=b"stolen", value=commands.to_value("x"))
        second = Request(Function.SET, 2, key=b"stolen", value=commands.to_value("x"))
        raw.sendall(encode_request(first) + encode_request(second))
        answer = b""
        while data := raw.recv(65536):
            answer += data

    assert b"unauthorized" in answer
    with client(server, "all") as allowed:
        assert allowed.get("stolen") is None


@pytest.mark.parametrize("text", ["", "x" * 20, "virta_aaaaaaaa_" + "y" * 43])
def test_unknown_tokens(server, text):
    """They are refused with the reason, before anything else."""
    assert code(client, server, text=text) == "unauthorized"


def test_all_names_allow_everything(server):
    """Keys, jobs and administration."""
    with client(server, "all") as journal:
        journal.set("key", "value")
        journal.push("http://mail.example/1")
        (job,) = journal.next("mail.example").jobs
        journal.done(job.key)

        assert journal.get("key") == "value"


def test_a_pattern_allows_its_domains(server):
    """Pushing, reserving, extending, finishing and failing jobs of these domains, and nothing else."""
    with client(server, "all") as journal:
        journal.set("other", 1)
        journal.push("http://shop.example/1")
    with client(server, "mail") as journal:
        journal.push("http://mail.example/2")
        journal.push("http://x/3", domain="mailbox")
        (job,) = journal.next("mail.example").jobs
        journal.extend(job.key, 30)
        journal.fail(job.key, "not now", delay=0)
        (job,) = journal.next("mail.example").jobs
        journal.done(job.key)
        refused = [
            code(journal.push, "http://shop.example/2"),
            code(journal.push, "http://mail.example/4", domain="shop.example"),
            code(journal.next, "shop.example"),
            code(journal.next, ""),
            code(journal.get, "other"),
            code(journal.set, "mail.key", 1),
            code(journal.delete, "http://shop.example/1"),
            code(journal.call, commands.scan()),
            code(journal.call, commands.admin("stats")),
            code(journal.call, commands.lock("mail")),
            code(journal.call, commands.rename("other", "mail")),
        ]

    assert refused == ["forbidden"] * len(refused)


@pytest.mark.parametrize("name", ["row", "read"])
def test_tokens_without_a_right_to_jobs(server, name):
    """A row filter cannot be applied to jobs, so such a grant gives no right to them."""
    with client(server, name) as journal:
        assert code(journal.push, "http://mail.example/9") == "forbidden"
        assert code(journal.get, "key") == "forbidden"


def test_a_revoked_token_ends_its_connection(server):
    """With its next request after the server has noticed."""
    text = token(server.data_dir, (["jobs"], "**"))
    with client(server, text=text) as journal:
        journal.set("a", 1)
        TokenStore(server.data_dir).revoke(text)

        def refused():
            try:
                journal.get("a")
            except JournalError as error:
                return error.code
            return None

        assert wait_until(refused, pause=0.05) == "unauthorized"


def test_the_asyncio_client(server):
    """It sends the token as well."""

    async def scenario():
        where = ("127.0.0.1", server.journal_port)
        async with await AsyncClient.connect(*where, token=server.tokens["all"]) as journal:
            await journal.set("b", 2)
            found = await journal.get("b")
        with pytest.raises(JournalError) as refused:
            await AsyncClient.connect(*where, token="wrong-token-of-ours")
        return found, refused.value.code

    assert asyncio.run(scenario()) == (2, "unauthorized")


def test_the_same_rights_over_http(server):
    """`/journal/…` asks the same questions."""

    def ask(name, method, path, body=None):
        text = None if body is None else json.dumps(body)
        return server.request(method, f"/journal{path}", text, bearer(server.tokens[name])).status

    push = {"uri": "http://mail.example/h1"}
    assert ask("mail", "POST", "/jobs", push) == 201
    assert ask("mail", "POST", "/jobs", {"uri": "http://shop.example/h1"}) == 403
    assert ask("mail", "POST", "/jobs/next", {"domain": "mail.example"}) == 200
    assert ask("mail", "POST", "/jobs/next", {"domain": "shop.example"}) == 403
    assert ask("mail", "POST", "/jobs/next", {}) == 403
    assert ask("mail", "PUT", "/keys/k", {"value": 1}) == 403
    assert ask("mail", "GET", "/stats") == 403
    assert ask("mail", "GET", "/jobs?domain=mail.example") == 200
    assert ask("all", "PUT", "/keys/k", {"value": 1}) == 200
    assert ask("all", "GET", "/stats") == 200
    assert ask("row", "GET", "/stats") == 403
    assert ask("read", "GET", "/stats") == 403


def test_the_port_has_the_certificate_of_the_server(tmp_path):
    """Beyond loopback: TLS with the same certificate, the same tokens inside it, and nothing in clear."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=virta"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    text = token(tmp_path / "data", (["jobs"], "**"))
    flags = ["--host", "0.0.0.0", "--tls-cert", certificate, "--tls-key", key]
    trusted = ssl.create_default_context(cafile=certificate)
    with Server(tmp_path / "data", *flags) as server:
        place = ("127.0.0.1", server.journal_port)
        with Client(*place, token=text, tls=trusted) as journal:
            journal.set("key", "value")
            assert journal.get("key") == "value"
        with pytest.raises(JournalError) as refused:
            Client(*place, token="x" * 20, tls=trusted)
        with pytest.raises((JournalError, OSError)), Client(*place, token=text, timeout=5) as bare:
            bare.get("key")

    assert refused.value.code == "unauthorized"
