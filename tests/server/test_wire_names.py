"""Names on the wire: Virta's own by default, Thorium's with `--thorium-compatible`; one shape of errors."""

from __future__ import annotations

import json
from http import HTTPStatus

import pytest
from server_harness import STRUCTURED, event

from virta.server.http.responses import MESSAGES

REFUSALS = [
    ("POST", "/channels/a", {}, b"{}", 400),
    ("POST", "/channels/a", {"Content-Type": "text/plain"}, b"{}", 400),
    ("POST", "/channels/a", {"Content-Type": STRUCTURED}, b"{}", 400),
    ("POST", "/channels/a", {"Content-Type": STRUCTURED}, b"{", 400),
    ("POST", "/channels/meta", {"Content-Type": STRUCTURED}, b"{}", 403),
    ("DELETE", "/channels/a", {}, None, 405),
    ("GET", "/channels/a?x=~5", {}, None, 400),
    ("GET", "/nothing", {}, None, 404),
    ("GET", "/filters/" + "0" * 64, {}, None, 404),
    ("POST", "/filters/a/b", {}, b"[", 400),
    ("GET", "/channels?limit=x", {}, None, 400),
    ("POST", "/subscriptions", {}, b"{}", 400),
    ("GET", "/channels/a", {"Host": "evil.example"}, None, 421),
    ("GET", "/channels/a", {"Origin": "https://evil.example"}, None, 403),
    ("GET", "/journal/keys/none", {}, None, 404),
    ("GET", "/journal/nothing", {}, None, 404),
    ("GET", "/journal/jobs/fly", {}, None, 404),
    ("POST", "/journal/jobs", {}, b"{}", 400),
    ("DELETE", "/journal/stats", {}, None, 405),
]
MEMBERS = {"type", "title", "status", "detail", "code", "message"}


@pytest.mark.parametrize(("method", "path", "headers", "body", "status"), REFUSALS)
def test_every_error_has_one_shape(server, method, path, headers, body, status):
    """RFC 9457 members, `code` and `message`; the sentence is not empty, the title that of the status."""
    answer = server.request(method, path, body, headers)
    found = answer.json

    assert answer.status == found["status"] == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(found) >= MEMBERS
    assert found["title"] == HTTPStatus(status).phrase
    assert found["type"]
    assert found["code"]
    assert len(found["message"]) > 10
    assert found["message"] == found["detail"]


def test_messages_are_for_codes():
    """Each default message says what would be right, and names no private thing."""
    assert all(code == code.lower() and len(text) > 20 for code, text in MESSAGES.items())


def test_names_by_default(server):
    """No name of an ancestor is on the wire."""
    accepted = server.publish("names", event("1"))
    refused = server.request("DELETE", "/channels/names")
    metrics = server.request("GET", "/metrics").body.decode()

    for answer in (accepted, refused):
        assert answer.headers["ce-source"] == "//virta"
        assert answer.headers["ce-type"] == "virta.response"
        assert not [name for name in answer.headers if name.startswith("thorium")]
    assert "thorium" not in metrics
    assert "virta_outstanding_events" in metrics


def test_names_of_thorium(start):
    """With the flag its clients find everything where it was."""
    with start("--thorium-compatible", "--durability", "none") as server:
        accepted = server.publish("names", event("1"))
        refused = server.request("DELETE", "/channels/names")
        metrics = server.request("GET", "/metrics").body.decode()

    assert accepted.headers["ce-source"] == "//name.djsweet.thorium"
    assert accepted.headers["ce-type"] == "name.djsweet.thorium.channel.send.response"
    assert "thorium-body-read-time" in accepted.headers
    assert accepted.headers["access-control-allow-origin"] == "*"
    assert json.loads(refused.body) == {"code": "invalid-method", "method": "DELETE"}
    assert 'thorium_active_queries{router="0"}' in metrics
    assert "virta_active_queries" not in metrics
