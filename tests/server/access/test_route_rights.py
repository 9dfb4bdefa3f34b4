"""Every route with every kind of principal; a route without a rule cannot be served."""

from __future__ import annotations

import asyncio
import json
import re
from functools import cache

import pytest
from access_support import ALL, bearer, token
from server_harness import STRUCTURED, Server, event
from starlette.routing import Route

from virta.access import ALL_RIGHTS
from virta.access.patterns import EVERYTHING
from virta.server.access.rules import ANY, PUBLIC, RULES, WHOLE_VERBS, guard_routes, rule_of
from virta.server.api.app import build_app
from virta.server.config_loader import load
from virta.server.http.requests import HttpRequest
from virta.server.service import Service

# Parameters of paths: a name the right principal may use, and one that it may not.
GOOD, BAD = "good", "bad"
VALUES = {
    "id": "0" * 64,
    "index": None,
    "collection": "c",
    "start": "earliest",
    "code": "bad-request",
    "rest:anything": "stats",
    "name": None,
    "name:anything": None,
    "path:path": "index.html",
    "key:anything": "k",
}


async def served_routes(tmp_path):
    config = load({"data_dir": str(tmp_path), "journal_port": "0"}, environ={})
    service = Service(config)
    await service.start()
    try:
        routes = build_app(service).app.routes
        found = {(method, route.path) for route in routes for method in route.methods}
    finally:
        await service.stop()
    for kind in HttpRequest.__subclasses__():
        found |= set(kind.ROUTES)
    return found


@cache
def all_routes():
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        return sorted(asyncio.run(served_routes(directory)))


def test_every_route_has_a_rule():
    """The hot routes as well; `guard_routes` refuses to build an application with another one."""
    assert [route for route in all_routes() if rule_of(*route) is None] == []
    with pytest.raises(AssertionError, match="has no rule"):
        guard_routes([Route("/new", lambda request: None, methods=["GET"])], None)


def test_every_rule_has_a_route():
    """The table has no rules of routes that are gone, console files excepted."""
    served = {f"{method} {path}" for method, path in all_routes()}
    known = {rule for rule in RULES if RULES[rule].verb != PUBLIC}

    assert known - served == set()


def test_verbs_are_known():
    """A misspelled verb would be a right that nobody has."""
    assert {rule.verb for rule in RULES.values()} <= {*ALL, PUBLIC, ANY}
    assert all(ALL_RIGHTS.has(verb) for verb in ALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("access") / "data"
    tokens = {
        "all": token(data_dir, (ALL, "**")),
        "all rows": token(data_dir, (ALL, "**", "tenant=42")),
        "right": token(data_dir, (ALL, f"{GOOD}**")),
        "row": token(data_dir, (ALL, f"{GOOD}**", "tenant=42")),
        "other": token(data_dir, (ALL, "elsewhere.*")),
        "none": token(data_dir, (["read"], "elsewhere.*")),
        "expired": token(data_dir, (ALL, "**"), expires=1.0),
    }
    with Server(data_dir, "--require-token", "--durability", "none") as running:
        running.tokens = tokens
        yield running


def address(path, name):
    def value(match):
        known = VALUES[match[1]]
        return name if known is None else known

    return re.sub(r"\{([^}]*)\}", value, path)


def ask(server, method, path, text=None, headers=None, tenant=42):
    """Send a request that is valid but for its rights; return the status."""
    given = dict(headers or {})
    if text is not None:
        given |= bearer(text)
    body = None
    if method in {"POST", "PUT", "PATCH"}:
        body = b"{}"
        given |= {"Content-Type": "application/json"}
        if path.startswith("/channels/"):
            body = json.dumps(event("1", {"tenant": tenant})).encode()
            given |= {"Content-Type": STRUCTURED}
    if method == "GET" and (path.startswith("/channels/") or path.endswith(("/events", "/stream"))):
        return stream_status(server, path, given)
    return server.request(method, path, body, given).status


def stream_status(server, path, headers):
    """The status alone: a stream does not end."""
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


# A WebSocket in plain requests is refused with texts of its own; see test_streams_need_rights_to_all_below.
ROUTES = all_routes()


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[" ".join(route) for route in ROUTES])
def test_each_route_with_each_principal(server, method, path):
    """No credential, wrong, expired: 401. No right, another name, a row filter that cannot be applied: 403."""
    rule = rule_of(method, path)
    good, bad = address(path, GOOD), address(path, BAD)
    tokens = server.tokens
    if rule.verb == PUBLIC:
        assert ask(server, method, good) not in {401, 403}
        return
    assert ask(server, method, good) == 401
    assert ask(server, method, good, "virta_aaaaaaaa_" + "x" * 43) == 401
    assert ask(server, method, good, "not-a-token-of-ours") == 401
    assert ask(server, method, good, tokens["expired"]) == 401
    assert ask(server, method, good, headers={"Authorization": "Basic abc"}) == 401
    of_server = rule.name == EVERYTHING
    passed = ask(server, method, good, tokens["all" if of_server else "right"])
    assert passed != 401
    if rule.verb == ANY:
        assert passed != 403
        return
    if not path.startswith("/journal/"):  # the journal asks for the domain, or for all names
        assert passed != 403
    if of_server:
        for name in ("right", "all rows", "row", "other"):
            assert ask(server, method, good, tokens[name]) == 403, name
    elif rule.name:
        assert ask(server, method, bad, tokens["right"]) == 403
        assert ask(server, method, good, tokens["other"]) == 403
        assert (ask(server, method, good, tokens["row"]) == 403) == (rule.verb in WHOLE_VERBS)
        if rule.verb == "publish" and path.startswith("/channels/"):
            assert ask(server, method, good, tokens["row"], tenant=7) == 403
    if rule.verb != "read":
        assert ask(server, method, good, tokens["none"]) == 403


def test_refusals_say_which_check_failed(server):
    """401 and 403 have a code and a reason, and never what would have passed."""
    wrong = server.request("GET", "/session", headers=bearer("x" * 20))
    expired = server.request("GET", "/session", headers=bearer(server.tokens["expired"]))
    missing = server.request("GET", "/session")
    forbidden = server.request("GET", "/pipelines/good", headers=bearer(server.tokens["none"]))

    assert wrong.json["reason"] == "token-unknown"
    assert expired.json["reason"] == "token-expired"
    assert missing.json["reason"] == "no-credential"
    assert wrong.headers["www-authenticate"].startswith("Bearer")
    assert (forbidden.status, forbidden.code) == (403, "forbidden")
    assert "pipelines" in forbidden.json["message"]
    assert "elsewhere" not in forbidden.body.decode()


def test_lists_show_what_may_be_read(server):
    """Channels of other names are not in the list."""
    for name in (f"{GOOD}.1", "bad.1"):
        body = json.dumps(event(name))
        admin = token(server.data_dir, (["publish"], "**"))
        answer = server.request(
            "POST", f"/channels/{name}", body, {"Content-Type": STRUCTURED} | bearer(admin)
        )
        assert answer.status == 202
    listed = server.request("GET", "/channels", headers=bearer(server.tokens["right"])).json
    names = {channel["name"] for channel in listed["channels"]}

    assert f"{GOOD}.1" in names
    assert "bad.1" not in names


def test_who_am_i(server):
    """A client can ask for its own rights."""
    answer = server.request("GET", "/session", headers=bearer(server.tokens["row"])).json

    assert answer["required"] is True
    assert answer["kind"] == "token"
    assert answer["principal"] == "_".join(server.tokens["row"].split("_")[:2])
    (grant,) = answer["grants"]
    assert grant["filter"] == "tenant=42"
