"""Whatever the described routes are asked, with a token or without, the server never fails."""

from __future__ import annotations

import pytest
import schemathesis
from access_support import ALL, bearer, token
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from server_harness import Server

from virta.server.api.description.openapi import openapi

# Streams do not end, and a worker that waits for jobs waits long.
STREAMS = ["consume", "consumeFrom", "filterEvents", "liveView", "statsStream", "subscribe", "nextJobs"]  # fmt: skip
PRINCIPALS = ("none", "wrong", "limited", "everything")
# The disk's limits and deadlines of sinks are 5xx by design; no example of the schema reaches them.
described = schemathesis.openapi.from_dict(openapi())
# Hundreds of cases for each route; tests/server/api/test_openapi.py sends them once.
described.config.phases.coverage.enabled = False
schema = described.exclude(operation_id=STREAMS)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    limited = token(data_dir, (["read", "publish", "filters", "webhooks"], "**", "tenant=42"))
    headers = {
        "none": {},
        "wrong": bearer("virta_aaaaaaaa_wrong"),
        "limited": bearer(limited),
        "everything": bearer(token(data_dir, (ALL, "**"))),
    }
    with Server(data_dir, "--require-token", "--durability", "none") as server:
        yield server, headers
        assert server.process.poll() is None, "the server ended"


@schema.parametrize()
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_principal_causes_a_server_error(served, case):
    """One example is sent as each principal; without a right it is 401 or 403, never a 5xx."""
    server, headers = served
    base = f"http://127.0.0.1:{server.port}"
    for principal in PRINCIPALS:
        answer = case.call(base_url=base, timeout=20, headers=headers[principal])
        case.validate_response(answer, checks=[not_a_server_error])
        if principal == "wrong" and case.method != "OPTIONS":  # a preflight has no credential
            assert answer.status_code >= 400, answer.status_code
