"""Signed deliveries, checked as a sink checks them (Standard Webhooks)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json

import pytest
from server_harness import event
from test_webhooks import hooks, server, subscribe  # noqa: F401

from virta.server.webhooks.signing import new_secret, read_secret, signature_headers

# The example of the specification's reference libraries.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_the_example_of_the_specification():
    headers = signature_headers(
        [read_secret(SECRET)], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )

    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("bad", [None, 5, "abc", "whsec_", "whsec_!!!!", "whsec_c2hvcnQ="])
def test_a_bad_secret_is_none(bad):
    assert read_secret(bad) is None


def test_no_secret_no_headers():
    assert signature_headers([], "id", 1, b"") == {}


def is_signed(headers, body, secret):
    """Return whether one of the signatures fits, computed without the server's code."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    return f"v1,{expected}" in headers["webhook-signature"].split(" ")


def test_deliveries_are_signed_and_secrets_rotate(server, hooks):  # noqa: F811
    """A new secret is added, both sign, then the old one is removed."""
    hook = hooks()
    made = subscribe(server, hook, "signed", protocol="HTTP").json
    (first,) = made["protocolsettings"]["secrets"]
    second = new_secret()
    path = f"/subscriptions/{made['id']}"

    def put(*secrets):
        body = {
            "sink": hook.url,
            "protocol": "HTTP",
            "config": {"channel": "signed"},
            "protocolsettings": {"secrets": list(secrets)},
        }
        answer = server.request("PUT", path, json.dumps(body))
        assert answer.status == 200, answer.body
        return answer

    def signed_by(id_):
        server.publish("signed", event(id_, {"n": 1}))
        _, headers = hook.received.get(timeout=15)
        lowered = {name.lower(): value for name, value in headers.items()}
        body = hook.bodies.get(timeout=15)
        return [is_signed(lowered, body, secret) for secret in (first, second)]

    assert signed_by("1") == [True, False]
    assert second not in put(first, second).body.decode()
    assert signed_by("2") == [True, True]
    put(second)
    assert signed_by("3") == [False, True]
