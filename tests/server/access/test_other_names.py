"""
Routes whose path does not name what they are about: their handlers ask for the right.

A principal with all rights on other names, or behind a row filter that cannot be applied, learns nothing of what is
there and changes nothing; one with the right to the name does.
"""

from __future__ import annotations

import json
import sqlite3
from http.client import HTTPConnection

import pytest
from access_support import ALL, bearer, token
from server_harness import STRUCTURED, Server, event
from test_row_filters import sink  # noqa: F401

from virta.server.access.rules import ANY, PUBLIC, RULES
from waiting import wait_until

NAME = "good"
JSON = {"Content-Type": "application/json"}
COUNT = {"channel": NAME, "filter": "", "dialect": "query-string"}
STANDING = {"channel": NAME, "event": event("1", {"customer": "alice", "tenant": 42})}
BEHIND = {"filter": "customer=alice", "dialect": "query-string"}
# What a row filter can be applied to is in test_row_filters; here it makes no difference, or everything hidden.
SAME, HIDDEN = "same", "hidden"
ASKED = {
    "GET /filters/{id}/events": ("/filters/{filter}/events", None, SAME),
    "POST /publish": ("/publish", [{"publish_to": f"{NAME}:1", "payload": "x"}], HIDDEN),
    "GET /subscribers": ("/subscribers", None, HIDDEN),
    "DELETE /subscribers/{id}": ("/subscribers/{client}", None, HIDDEN),
    "GET /channels": ("/channels", None, SAME),
    "GET /channels/{name:anything}/rows": (f"/channels/{NAME}/rows", None, SAME),
    "GET /channels/{name:anything}/rows/{key:anything}": (f"/channels/{NAME}/rows/k", None, SAME),
    "POST /filters/standing": ("/filters/standing", STANDING, HIDDEN),
    "POST /filters/count": ("/filters/count", COUNT, SAME),
    "GET /filters/{id}": ("/filters/{filter}", None, SAME),
    "DELETE /filters/{id}": ("/filters/{filter}", None, SAME),
    "POST /subscriptions": ("/subscriptions", {"sink": "{sink}", "config": {"channel": NAME}}, SAME),
    "GET /subscriptions": ("/subscriptions", None, HIDDEN),
    "GET /subscriptions/{id}": ("/subscriptions/{hook}", None, HIDDEN),
    "PUT /subscriptions/{id}": ("/subscriptions/{hook}", {"sink": "{sink}", "config": {"channel": NAME}}, HIDDEN),
    "GET /subscriptions/{id}/dead-letters": ("/subscriptions/{hook}/dead-letters", None, HIDDEN),
    "POST /subscriptions/{id}/redeliver": ("/subscriptions/{hook}/redeliver", {"offsets": [0]}, HIDDEN),
    "POST /subscriptions/{id}/test": ("/subscriptions/{hook}/test", {}, HIDDEN),
    "DELETE /subscriptions/{id}": ("/subscriptions/{hook}", None, HIDDEN),
    "GET /pipelines": ("/pipelines", None, HIDDEN),
    "GET /captures": ("/captures", None, HIDDEN),
}  # fmt: skip


def test_every_route_without_a_name_is_here():
    """A new one has to say who learns what by it; the journal has tests of its own (test_journal_port)."""
    unnamed = {
        route
        for route, rule in RULES.items()
        if rule.verb not in {PUBLIC, ANY} and not rule.name and "/journal/" not in route
    }

    assert unnamed == set(ASKED)


@pytest.fixture(scope="module")
def server(tmp_path_factory, sink):  # noqa: F811
    """A channel with a subscriber, a registered filter and a webhook; a pipeline and a capture of the same name."""
    directory = tmp_path_factory.mktemp("names")
    (directory / f"{NAME}.toml").write_text("[pipeline]\nname = 7\n")
    db = sqlite3.connect(directory / f"{NAME}.db")
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    db.commit()
    db.close()
    data = directory / "data"
    tokens = {
        "right": token(data, (ALL, f"{NAME}**")),
        "other": token(data, (ALL, "elsewhere.*")),
        "row": token(data, (ALL, f"{NAME}**", "tenant=42")),
    }
    flags = ["--require-token", "--durability", "none", "--webhook-allow", "127.0.0.1"]
    flags += ["--pipelines", directory / f"{NAME}.toml", "--cdc", f"sqlite:{directory / NAME}.db"]
    with Server(data, *flags) as running:
        running.tokens = tokens
        running.sink = f"http://127.0.0.1:{sink.server_port}/"
        body = json.dumps(event("1", {"customer": "alice", "tenant": 42}, subject="k"))
        kind = bearer(tokens["right"]) | {"Content-Type": STRUCTURED}
        assert running.request("POST", f"/channels/{NAME}", body, kind).status == 202
        wait_until(lambda: running.request("GET", "/captures", headers=kind).json)
        yield running


@pytest.fixture
def placed(server):
    """A subscriber, a registered filter and a webhook, new for each test; return their ids."""
    mine = bearer(server.tokens["right"])
    stream = HTTPConnection("127.0.0.1", server.port, timeout=20)
    stream.request("GET", f"/channels/{NAME}?customer=alice", headers=mine)
    stream.getresponse()
    hook = {"sink": server.sink, "config": {"channel": NAME}}
    made = server.request("POST", "/subscriptions", json.dumps(hook), mine | JSON).json
    filter_ = server.request("POST", f"/filters/{NAME}/c", json.dumps(BEHIND), mine | JSON).json
    (query,) = wait_until(
        lambda: server.request("GET", "/subscribers", headers=mine).json["queries"]
    )
    yield {
        "client": query["clients"][0]["id"],
        "hook": made["id"],
        "filter": filter_["id"],
        "sink": server.sink,
    }
    stream.close()
    for hook in server.request("GET", "/subscriptions", headers=mine).json:
        server.request("DELETE", f"/subscriptions/{hook['id']}", headers=mine)
    wait_until(lambda: not server.request("GET", "/subscribers", headers=mine).json["queries"])


def ask(server, route, placed, name):
    """Return the status of a request as a principal, and what it said; a stream says nothing."""
    path, body, _ = ASKED[route]
    method, pattern = route.split(" ")
    headers = bearer(server.tokens[name]) | JSON
    for key, value in placed.items():
        path = path.replace(f"{{{key}}}", value)
    text = None if body is None else json.dumps(body).replace("{sink}", server.sink)
    if not pattern.endswith("/events"):
        answer = server.request(method, path, text, headers)
        return answer.status, answer.body.decode()
    stream = HTTPConnection("127.0.0.1", server.port, timeout=20)
    stream.request(method, path, headers=headers)
    status = stream.getresponse().status
    stream.close()
    return status, NAME if status == 200 else ""


@pytest.mark.parametrize("route", ASKED)
def test_what_is_of_other_names_is_hidden(server, placed, route):
    """403, 404 or an empty list without the right; with it the route does what it is for."""
    refused = ["other", *(["row"] if ASKED[route][2] == HIDDEN else [])]
    for name in refused:
        status, said = ask(server, route, placed, name)
        assert status in {200, 403, 404}, (name, said)
        if status == 200:
            assert NAME not in said, name
            assert "alice" not in said, name
    status, said = ask(server, route, placed, "right")
    assert status in {200, 201, 204}, said
    if route in {"GET /channels", "GET /subscribers", "GET /subscriptions", "GET /pipelines", "GET /captures"}:  # fmt: skip
        assert NAME in said


@pytest.mark.parametrize(
    "rights",
    [
        [(["webhooks"], "**")],
        [(["webhooks"], "**"), (["read"], "**", "tenant=7")],
        [(["webhooks"], "**"), (["read"], "elsewhere")],
    ],
)
def test_dead_letters_are_events(server, placed, rights):
    """Who may manage webhooks sees those of others, and their dead letters only if it may read the channel."""
    text = token(server.data_dir, *rights)
    path = f"/subscriptions/{placed['hook']}"

    assert server.request("GET", path, headers=bearer(text)).status == 200
    refused = server.request("GET", f"{path}/dead-letters", headers=bearer(text))
    assert (refused.status, refused.code) == (403, "forbidden")
