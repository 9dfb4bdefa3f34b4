"""Tokens, JWT, tickets and sessions against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import time

import jwt
import pytest
from access_support import ALL, bearer, token
from server_harness import STRUCTURED, Consumer, Server, event
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from virta.access import TokenStore
from waiting import wait_until

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


def publish(server, channel, id_, data, text=None):
    headers = {"Content-Type": STRUCTURED} | (bearer(text) if text else {})
    return server.request("POST", f"/channels/{channel}", json.dumps(event(id_, data)), headers)


def test_a_token_works_at_once_and_not_after_it_is_revoked(start, data_dir):
    """A running server accepts a new token, and refuses a revoked one, also on a kept connection."""
    token(data_dir, (["read"], "**"))
    with start("--require-token", "--durability", "none", data_dir=data_dir) as server:
        text = token(data_dir, (["publish"], "a"))
        for n in range(3):  # the second and third use the cached head
            assert publish(server, "a", str(n), {}, text).status == 202
        assert publish(server, "b", "1", {}, text).status == 403
        TokenStore(data_dir).revoke(text)

        wait_until(lambda: publish(server, "a", "9", {}, text).status == 401, pause=0.05)


def test_a_stream_ends_when_its_token_is_revoked(start, data_dir):
    """Within a second or two, with the reason; a WebSocket gets a close frame."""
    reader = token(data_dir, (["read"], "**"))
    other = token(data_dir, (["read"], "**"))

    async def scenario(server):
        consumer = await Consumer.open(server.port, "/channels/a", bearer(reader))
        await consumer.connected()
        view = await Consumer.open(server.port, "/channels/a/live", bearer(reader))
        while (await view.frame()).event != "live":
            pass
        stays = await Consumer.open(server.port, "/channels/a", bearer(other))
        await stays.connected()
        url = f"ws://127.0.0.1:{server.port}/channels/a"
        options = {"subprotocols": ["cloudevents.json"], "additional_headers": bearer(reader)}
        async with connect(url, **options) as socket:
            TokenStore(data_dir).revoke(reader)
            frame, of_view = await consumer.frame(), await view.frame()
            with pytest.raises(ConnectionClosed) as closed:
                await asyncio.wait_for(socket.recv(), 20)
        await asyncio.to_thread(publish, server, "a", "1", {}, writer)
        kept = await stays.frame()
        await stays.close()
        await consumer.close()
        await view.close()
        return (frame, of_view), closed.value.rcvd, kept

    writer = token(data_dir, (["publish"], "**"))
    with start("--require-token", "--durability", "none", data_dir=data_dir) as server:
        frames, close, kept = asyncio.run(scenario(server))

    for frame in frames:
        assert (frame.event, frame.json["reason"]) == ("disconnect", "access-ended")
    assert (close.code, close.reason) == (1008, "access-ended")
    assert kept.json["id"] == "1"


def test_a_head_with_an_expired_token_is_refused(start, data_dir):
    """Also when its head is cached: expiry is checked for every publication."""
    token(data_dir, (["read"], "**"))
    with start("--require-token", "--durability", "none", data_dir=data_dir) as server:
        text = token(data_dir, (["publish"], "**"), expires=time.time() + 3)
        assert [publish(server, "a", str(n), {}, text).status for n in range(3)] == [202] * 3
        refused = wait_until(
            lambda: (a := publish(server, "a", "9", {}, text)).status == 401 and a, pause=0.05
        )

    assert refused.json["reason"] == "token-expired"


def test_tickets(start, data_dir):
    """A ticket opens one stream; the second use is refused, and so is a token in the address."""
    text = token(data_dir, (["read"], "a"))

    async def scenario(server):
        made = server.request("POST", "/tickets", headers=bearer(text))
        ticket = made.json["ticket"]
        consumer = await Consumer.open(server.port, f"/channels/a?x=1&ticket={ticket}")
        await consumer.connected()
        again = await Consumer.open(server.port, f"/channels/a?ticket={ticket}", expect=401)
        reason = json.loads(await again.body())["reason"]
        in_url = await Consumer.open(server.port, f"/channels/a?access_token={text}", expect=401)
        other = json.loads(await in_url.body())["reason"]
        for one in (consumer, again, in_url):
            await one.close()
        ticket = server.request("POST", "/tickets", headers=bearer(text)).json["ticket"]
        url = f"ws://127.0.0.1:{server.port}/channels/a?ticket={ticket}"
        async with connect(url, subprotocols=["cloudevents.json"]):
            pass
        with pytest.raises(InvalidStatus):
            await connect(url, subprotocols=["cloudevents.json"])
        return made.status, reason, other

    with start("--require-token", data_dir=data_dir) as server:
        assert asyncio.run(scenario(server)) == (201, "ticket-unknown", "token-in-url")


def test_a_query_term_named_ticket_stays_one(start, data_dir):
    """Only a value of the server's own form is a ticket."""
    text = token(data_dir, (["read", "publish"], "**"))

    async def scenario(server):
        consumer = await Consumer.open(server.port, "/channels/a?ticket=5", bearer(text))
        await consumer.connected()
        for n in (4, 5):
            await asyncio.to_thread(publish, server, "a", str(n), {"ticket": n}, text)
        frame = await consumer.frame()
        await consumer.close()
        return frame.json["id"]

    with start("--require-token", "--durability", "none", data_dir=data_dir) as server:
        assert asyncio.run(scenario(server)) == "5"


def test_sessions(start, data_dir):
    """The cookie is for pages of this server alone; ending the session makes it useless."""
    text = token(data_dir, (["read"], "a"))
    with start("--require-token", data_dir=data_dir) as server:
        made = server.request("POST", "/session", headers=bearer(text))
        cookie = made.headers["set-cookie"]
        given = {"Cookie": f"other=1; {cookie.split(';')[0]}"}
        known = server.request("GET", "/session", headers=given)
        foreign = server.request(
            "GET", "/session", headers=given | {"Origin": "https://evil.example"}
        )
        ended = server.request("DELETE", "/session", headers=given)
        after = server.request("GET", "/session", headers=given)

    assert made.status == 204
    assert {"HttpOnly", "Secure", "SameSite=Strict"} <= set(cookie.split("; "))
    assert known.json["principal"] == "_".join(text.split("_")[:2])
    assert foreign.status == 403
    assert (ended.status, after.status) == (204, 401)


def test_an_open_server_needs_no_ticket(start):
    """It says so, instead of giving one that means nothing."""
    with start() as server:
        answer = server.request("POST", "/tickets")
        who = server.request("GET", "/session").json

    assert (answer.status, answer.code) == (409, "no-credentials")
    assert (who["kind"], who["required"]) == ("open", False)


def test_jwt(start, tmp_path, data_dir):
    """A JWT has the rights of its claim; wrong ones are refused with the reason."""
    keys = tmp_path / "secret"
    keys.write_text(SECRET)
    claims = {"sub": "shop", "exp": time.time() + 600, "aud": "virta"}
    claims["grants"] = [{"verbs": ["publish"], "pattern": "a", "filter": "tenant=42"}]
    flags = ["--jwt-keys", keys, "--jwt-audience", "virta", "--jwt-claim", "grants"]

    def signed(**changes):
        return jwt.encode(claims | changes, SECRET, "HS256")

    with start(*flags, "--durability", "none", data_dir=data_dir) as server:
        assert publish(server, "a", "1", {"tenant": 42}, signed()).status == 202
        assert publish(server, "a", "2", {"tenant": 42}, signed()).status == 202
        excluded = publish(server, "a", "3", {"tenant": 7}, signed())
        other = publish(server, "b", "1", {"tenant": 42}, signed())
        audience = publish(server, "a", "4", {}, signed(aud="other"))
        expired = publish(server, "a", "5", {}, signed(exp=1))
        unsigned = publish(server, "a", "6", {}, jwt.encode(claims, None, "none"))

    assert (excluded.status, excluded.code) == (403, "row-filter")
    assert (other.status, other.code) == (403, "forbidden")
    assert [a.json["reason"] for a in (audience, expired, unsigned)] == [
        "jwt-claims",
        "token-expired",
        "jwt-signature",
    ]


def test_rate_limits(start, data_dir):
    """Beyond its rate a principal gets 429 with Retry-After, on the fast path as well; others do not."""
    fast = token(data_dir, (["publish"], "**"))
    other = token(data_dir, (["publish"], "**"))
    flags = ["--require-token", "--max-requests-per-principal", 5, "--durability", "none"]
    with start(*flags, data_dir=data_dir) as server:
        answers = [publish(server, "a", str(n), {}, fast) for n in range(30)]
        calm = publish(server, "a", "x", {}, other)
    refused = [answer for answer in answers if answer.status == 429]

    assert refused
    assert refused[0].code == "rate-limit"
    assert int(refused[0].headers["retry-after"]) >= 1
    assert calm.status == 202


def test_rates_by_address(start, data_dir):
    """All principals of one address share its rate; without tokens it holds as well."""
    tokens = [token(data_dir, (["publish"], "**")) for _ in range(3)]
    limit = ["--max-requests-per-address", 5, "--durability", "none"]
    with start("--require-token", *limit, data_dir=data_dir) as server:
        answers = [publish(server, "a", str(n), {}, tokens[n % 3]) for n in range(30)]
    with start(*limit) as server:
        unknown = [publish(server, "a", str(n), {}, "") for n in range(30)]

    for given in (answers, unknown):
        refused = [answer for answer in given if answer.status == 429]
        assert refused
        assert len(refused) < 30
        assert int(refused[0].headers["retry-after"]) >= 1


def test_refused_credentials_count_for_their_address(start, data_dir):
    """Who guesses tokens, tickets or sessions is slowed down as well, and so is its right token then."""
    right = token(data_dir, (ALL, "**"))
    ways = [
        ("/session", bearer("virta_aaaaaaaa_" + "x" * 43)),
        ("/session", {"Cookie": "virta_session=guess"}),
        ("/channels/a?ticket=vt_guess", {}),
        ("/session", {}),
    ]
    flags = ["--require-token", "--max-requests-per-address", 5]
    with start(*flags, data_dir=data_dir) as server:
        answers = [server.request("GET", path, headers=how) for path, how in ways * 10]
        late = server.request("GET", "/session", headers=bearer(right))
        statuses = [answer.status for answer in answers]
        wait_until(
            lambda: server.request("GET", "/session", headers=bearer(right)).status == 200,
            pause=0.3,
        )

    assert statuses[:4] == [401] * 4
    assert statuses.count(429) >= 20
    assert set(statuses) == {401, 429}
    assert (late.status, late.code) == (429, "rate-limit")
    assert int(late.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("flags", "tokens", "said"),
    [
        (["--host", "0.0.0.0"], 0, "virta token create"),
        (["--require-token"], 0, "there is no token"),
        (["--host", "0.0.0.0"], 1, None),
        (["--host", "0.0.0.0", "--insecure"], 0, None),
        (["--jwt-keys", "/nonexistent"], 0, "cannot read keys"),
    ],
)
def test_a_server_does_not_start_without_credentials(start, data_dir, flags, tokens, said):
    """Beyond loopback it needs tokens, JWT or --insecure; the message says how to get one."""
    for _ in range(tokens):
        token(data_dir, (ALL, "**"))
    server = start(*flags, "--journal-port", "none", data_dir=data_dir)

    if said is None:
        assert server.port
        return
    assert not server.port
    assert said in "".join(server.said)


def test_audit_lines(start, data_dir):
    """Refusals and credentials that were given are in the log; no line has a secret."""
    text = token(data_dir, (["read"], "a"), name="shop")
    server = start("--require-token", data_dir=data_dir)
    server.request("GET", "/session", headers=bearer("virta_aaaaaaaa_wrong"))
    server.request("GET", "/pipelines", headers=bearer(text))
    ticket = server.request("POST", "/tickets", headers=bearer(text)).json["ticket"]
    server.stop()
    said = "".join(server.said)
    lines = [json.loads(line) for line in said.splitlines() if '"audit"' in line]
    short = "_".join(text.split("_")[:2])

    assert [line.get("code") or line.get("action") for line in lines] == [
        "token-unknown",
        "forbidden",
        "ticket_issued",
    ]
    assert {line.get("principal") for line in lines[1:]} == {short}
    assert text not in said
    assert ticket not in said


def test_administration_is_in_the_audit(start, data_dir):
    """Disconnecting, and changes to jobs of others and to domains; pushing, reading and what failed are not."""
    text = token(data_dir, (ALL, "**"), name="operator")
    mine = bearer(text) | {"Content-Type": "application/json"}

    async def disconnect(server):
        consumer = await Consumer.open(server.port, "/channels/a", bearer(text))
        client = (await consumer.connected()).json["clientID"]
        gone = await asyncio.to_thread(
            server.request, "DELETE", f"/subscribers/{client}", None, mine
        )
        await consumer.close()
        return gone.status

    def post(path, body, method="POST"):
        return server.request(method, path, json.dumps(body), mine)

    server = start("--require-token", data_dir=data_dir)
    assert asyncio.run(disconnect(server)) == 204
    post("/journal/jobs", {"uri": "mail://shop/1", "delay": 3600})
    assert post("/journal/jobs/kick", {"uri": "mail://shop/1"}).status == 200
    assert post("/journal/jobs/kick", {"uri": "mail://shop/none"}).status == 404
    assert post("/journal/jobs/domains/shop", {"paused": True}, "PATCH").status == 200
    server.request("GET", "/journal/jobs/domains/shop", None, mine)
    server.stop()
    lines = [json.loads(line) for line in "".join(server.said).splitlines() if '"audit"' in line]
    short = "_".join(text.split("_")[:2])
    acts = [(line["action"], line.get("name", "")) for line in lines if "action" in line]

    assert {line.get("principal") for line in lines} == {short}
    assert ("subscriber_disconnected", "") in acts
    assert [one for one in acts if one[0].startswith("jobs_")] == [
        ("jobs_kick", ""),
        ("jobs_domains", "shop"),
    ]


def test_streams_need_rights_to_all_below(start, data_dir):
    """Subtub's socket: a pattern has to cover what a stream delivers, and a row filter does not count."""
    room = token(data_dir, (["read", "publish"], "room:**"))
    row = token(data_dir, (["read", "publish"], "**", "tenant=1"))

    async def status(server, text, stream):
        url = f"ws://127.0.0.1:{server.port}/subscribe?max_queued=5&streams={stream}"
        try:
            async with connect(url, additional_headers=bearer(text)):
                return 101
        except InvalidStatus as error:
            return error.response.status_code

    with start("--require-token", "--durability", "none", data_dir=data_dir) as server:
        found = [
            asyncio.run(status(server, room, s)) for s in ("room:", "room:1", "hall:", "roomy:")
        ]
        limited = asyncio.run(status(server, row, "room:"))
        sent = []
        for text, stream in ((room, "room:1"), (room, "hall:1"), (row, "room:1")):
            body = json.dumps([{"publish_to": stream, "payload": "x"}])
            sent.append(server.request("POST", "/publish", body, bearer(text)).status)

    assert found == [101, 101, 403, 403]
    assert limited == 403
    assert sent == [200, 403, 403]


def test_health_says_whether_credentials_are_asked_for(tmp_path):
    """Tokens of the store count as much as a token file, on the health page and in the figures."""
    mine = bearer(token(tmp_path, (["admin"], "**")))
    with Server(tmp_path, "--require-token", "--journal-port", "none") as server:
        checks = server.request("GET", "/health", headers=mine).json["checks"]
        stats = server.request("GET", "/stats", headers=mine).json

    assert [c["text"] for c in checks if c["name"] == "tokens"] == ["Every request needs a token, a JWT or a session"]  # fmt: skip
    assert stats["server"]["tokens"] is True


@pytest.mark.parametrize(
    ("flags", "tokens", "tls"),
    [
        ([], ("ok", "Every request needs"), ("warning", "No TLS: tokens and events cross the network")),
        (["--insecure"], ("wrong", "Everyone who reaches 0.0.0.0"), ("warning", "No TLS")),
    ],
    ids=["tokens", "insecure"],
)  # fmt: skip
def test_health_warns_of_what_a_network_can_see(tmp_path, flags, tokens, tls):
    """Beyond loopback without TLS, or without credentials, the health page says so."""
    mine = bearer(token(tmp_path, (["admin"], "**")))
    flags = ["--host", "0.0.0.0", "--journal-port", "none", *flags]
    with Server(tmp_path, *flags) as server:
        checks = server.request("GET", "/health", headers=mine).json["checks"]
    found = {check["name"]: (check["state"], check["text"]) for check in checks}

    for name, (state, text) in (("tokens", tokens), ("tls", tls)):
        assert found[name][0] == state
        assert found[name][1].startswith(text)


def test_keys_of_jwt_are_read_again_while_the_server_runs(start, tmp_path, data_dir):
    """A JWT of the new key is accepted soon after, one of the old key refused; a missing file changes nothing."""
    keys, old, new = tmp_path / "keys", SECRET, SECRET[::-1]
    keys.write_text(old)
    claims = {"sub": "a", "exp": time.time() + 600, "virta": [{"verbs": ["read"], "pattern": "a"}]}

    def status(secret):
        text = jwt.encode(claims, secret, "HS256")
        return server.request("GET", "/session", headers=bearer(text)).status

    with start("--jwt-keys", keys, "--journal-port", "none", data_dir=data_dir) as server:
        assert (status(old), status(new)) == (200, 401)
        keys.write_text(new)
        wait_until(lambda: status(new) == 200, pause=0.05)
        assert status(old) == 401
        keys.unlink()
        wait_until(lambda: "access_unreadable" in said(server), pause=0.05)
        assert status(new) == 200


def said(server):
    """Return what a running server has written so far."""
    os.set_blocking(server.process.stdout.fileno(), False)
    while line := server.process.stdout.readline():
        server.said.append(line.decode())
    return "".join(server.said)
