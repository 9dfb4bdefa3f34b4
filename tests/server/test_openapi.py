"""The served documents against the real routes."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import (
    positive_data_acceptance,
    unsupported_method,
)
from server_harness import BATCH, STRUCTURED, event

from virta.server.asyncapi import asyncapi
from virta.server.openapi import openapi

# Streams do not end, and /subscribe is a socket: their routes are tested by their own modules.
STREAMS = {"consume", "consumeFrom", "filterEvents", "subscribe"}

# No schema can say what a filter is, or that a sink answers: what is valid by schema may be refused.
BEYOND_SCHEMA = {"createSubscription", "replaceSubscription", "registerFilter", "validateFilter"}
# Nor what a journal holds, which schedules and patterns there are, or which times fit a message; but these are never refused.
NEVER_REFUSED = {"getKey", "deleteKey", "unlinkKey", "journalStats"}
NEVER_REFUSED |= {"getDomain", "resetDomain", "getRecurring", "deleteRecurring"}
BEYOND_SCHEMA |= {
    operation["operationId"]
    for path, operations in openapi()["paths"].items()
    if path.startswith("/journal/")
    for operation in operations.values()
} - NEVER_REFUSED
# Subtub knows one method, and nothing else is found.
OTHER_METHODS = {"publishMessages"}
# A key may hold slashes, so what looks like an action of one key may be another key.
OTHER_METHODS |= {
    f"{action}Key" for action in ("add", "not", "truncate", "rename", "link", "unlink")
}

WAIT_S_MAX = 0.02

schema = schemathesis.openapi.from_dict(openapi()).exclude(operation_id=list(STREAMS))


@schema.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_as_described(server, case):
    """Whatever is thrown at a route, its answer has a status and a body that the document describes."""
    base = f"http://127.0.0.1:{server.port}"
    operation = case.operation.definition.raw["operationId"]
    excluded = [positive_data_acceptance] if operation in BEYOND_SCHEMA else []
    excluded += [unsupported_method] if operation in OTHER_METHODS else []
    if operation == "nextJobs" and isinstance(case.body, dict):
        wait = case.body.get("wait")
        if isinstance(wait, int | float) and wait > WAIT_S_MAX:
            case.body["wait"] = WAIT_S_MAX  # nobody will push a job meanwhile
    case.call_and_validate(base_url=base, timeout=20, excluded_checks=excluded)


def test_documents_are_served(server):
    """Both documents are served as they are tested."""
    assert server.request("GET", "/openapi.json").json == openapi()
    assert server.request("GET", "/asyncapi.json").json == asyncapi()


def test_every_reference_of_asyncapi_leads_somewhere():
    """No dangling references."""

    def references(value):
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)

    document = asyncapi()
    for reference in references(document):
        found = document
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]


@pytest.mark.parametrize("path", sorted(openapi()["paths"]))
def test_every_path_is_there(server, path):
    """A path of the document is a route of the server: an odd method is 405 there, not 404."""
    real = (
        path.replace("{id}", "0" * 64)
        .replace("{start}", "latest")
        .replace("{", "")
        .replace("}", "")
    )

    answer = server.request("PATCH" if "patch" not in openapi()["paths"][path] else "POST", real)

    assert answer.status == (404 if real in {"/publish", "/subscribe"} else 405)


def test_publishing_as_described(server):
    """The document's two content types are accepted."""
    paths = openapi()["paths"]["/channels/{name}"]["post"]["requestBody"]["content"]

    assert set(paths) == {STRUCTURED, BATCH}
    assert server.publish("doc", event("1")).status == 202
