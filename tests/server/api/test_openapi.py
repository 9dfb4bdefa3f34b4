"""The served documents against the real routes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    positive_data_acceptance,
    unsupported_method,
)
from server_harness import BATCH, STRUCTURED, event

from virta.journal.protocol.messages import RETRY_CODES
from virta.journal.protocol.problems import link
from virta.journal.serving.http import STATUS
from virta.server.api.app import build_app
from virta.server.api.description.asyncapi import asyncapi
from virta.server.api.description.openapi import openapi
from virta.server.config_loader import load
from virta.server.http.requests import HttpRequest
from virta.server.service import Service

# Streams do not end, and /subscribe is a socket: their routes are tested by their own modules.
STREAMS = {"consume", "consumeFrom", "filterEvents", "liveView", "statsStream", "subscribe"}

# No schema can say what a filter is, or that a sink answers: what is valid by schema may be refused.
BEYOND_SCHEMA = {"createSubscription", "replaceSubscription", "registerFilter", "validateFilter"}
BEYOND_SCHEMA |= {"explainFilter", "countMatches", "rows", "row"}
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
    # A term of a query that is a number, against the schema, is the same text in a URL.
    excluded += [negative_data_rejection] if operation in {"rows", "row"} else []
    excluded += [unsupported_method] if operation in OTHER_METHODS else []
    if operation == "nextJobs" and isinstance(case.body, dict):
        wait = case.body.get("wait")
        if isinstance(wait, int | float) and not isinstance(wait, bool) and wait > WAIT_S_MAX:
            case.body["wait"] = WAIT_S_MAX  # nobody will push a job meanwhile
    case.call_and_validate(base_url=base, timeout=20, excluded_checks=excluded)


def test_documents_are_served(server):
    """Both documents are served as they are tested."""
    assert server.request("GET", "/openapi.json").json == openapi()
    # The harness's HTTP client names the host and port that it has reached.
    assert server.request("GET", "/asyncapi.json").json == asyncapi(f"127.0.0.1:{server.port}")


def test_addresses_of_the_documents_are_right(server):
    """A program that reads them on any port reaches the server that they describe."""
    where = f"http://127.0.0.1:{server.port}/openapi.json"
    (described,) = server.request("GET", "/openapi.json").json["servers"]
    base = urlsplit(urljoin(where, described["url"]))
    assert (base.hostname, base.port, base.path) == ("127.0.0.1", server.port, "/")

    hosts = {s["host"] for s in asyncapi(f"127.0.0.1:{server.port}")["servers"].values()}
    assert hosts == {f"127.0.0.1:{server.port}"}
    secure = asyncapi("x", secure=True)["servers"].values()
    assert {s["protocol"] for s in secure} == {"https", "wss"}


def test_every_reference_of_asyncapi_leads_somewhere():
    """No dangling references."""

    def references(value):
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)

    document = asyncapi("127.0.0.1")
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


def shape(path):
    """A path without the names of its parameters, which differ between the two."""
    return re.sub(r"\{[^}]*\}", "{}", path).rstrip("/") or "/"


async def routes_of(data_dir):
    """Every (method, path) that a server has: of the application, and of the hot routes."""
    service = Service(load({"data_dir": str(data_dir), "journal_port": "0"}, environ={}))
    await service.start()
    try:
        app = build_app(service).app
        routes = {(m, r.path) for r in app.routes for m in r.methods}
    finally:
        await service.stop()
    for kind in HttpRequest.__subclasses__():
        routes |= set(kind.ROUTES)
    return routes


def test_every_route_is_described(tmp_path):
    """What is served is in the document, hot routes included; nothing else is."""
    routes = asyncio.run(routes_of(tmp_path))
    served = {(m, shape(p)) for m, p in routes if not p.startswith("/journal/")}
    # Subtub's socket answers 404 to all methods but one; HEAD comes with GET.
    served -= {(m, "/subscribe") for m in ("POST", "PUT", "PATCH", "DELETE")}
    described = {
        (method.upper(), shape(path))
        for path, operations in openapi()["paths"].items()
        for method in operations
    }
    plain = {one for one in described if not one[1].startswith("/journal/")}

    assert {("GET", "/channels/{}"), ("POST", "/publish"), ("GET", "/filters/{}/events")} <= served
    assert {one for one in served if one[0] != "HEAD"} - plain == set()
    assert plain - served == set()


def test_every_route_of_the_journal_is_described():
    """The journal's page and the document name the same routes."""
    page = (Path(__file__).parents[3] / "docs" / "journal.md").read_text()
    documented = set()
    for cell in re.findall(r"^\| (`[^|]*/journal/[^|]*) \|", page, re.MULTILINE):
        for methods, path in re.findall(r"`([A-Z, ]+?) (/journal/[^`? ]*)", cell):
            shown = re.sub(r"\b[A-Z]+\b", "{}", path)
            documented |= {(method, shown) for method in methods.split(", ")}
    described = {
        (method.upper(), shape(path))
        for path, operations in openapi()["paths"].items()
        if path.startswith("/journal/")
        for method in operations
    }

    assert len(documented) > 12
    assert documented - described == set()


PROBLEMS = [
    ("GET", "/journal/keys/none", None, 404),
    ("GET", "/journal/nothing/here", None, 404),
    ("PATCH", "/journal/stats", None, 405),
    ("POST", "/journal/jobs", "{", 400),
    ("POST", "/journal/jobs", '{"uri":"no-host"}', 400),
    ("POST", "/journal/jobs", '{"uri":"http://a/","priority":256}', 400),
    ("GET", "/journal/keys?regex=(", None, 400),
    ("GET", "/journal/keys?cursor=x", None, 400),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), PROBLEMS)
def test_links_of_problems_lead_somewhere(server, method, path, body, status):
    """`type` is a page about the code, on the same server."""
    kind = {"Content-Type": "application/json"}
    problem = server.request(method, path, body, kind if body else None)
    assert problem.status == status, problem
    assert problem.headers["content-type"] == "application/problem+json"

    page = server.request("GET", problem.json["type"])

    assert (page.status, page.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert page.body.decode().startswith(f"{problem.code} (HTTP status {status})\n")


def test_every_code_of_the_journal_has_a_page(server):
    """All that its sources can answer with, and all that have a status."""
    sources = (Path(__file__).parents[3] / "src" / "virta" / "journal").rglob("*.py")
    pattern = re.compile(r'RefusedError\(\s*"([a-z-]+)"')
    codes = {code for source in sources for code in pattern.findall(source.read_text())}
    codes |= set(STATUS) | RETRY_CODES

    assert len(codes) > 20
    for code in codes:
        assert server.request("GET", link(code)).status == 200, code
    assert server.request("GET", "/problems/nothing").status == 404
    assert link("nothing") == "about:blank"


def test_publishing_as_described(server):
    """The document's two content types are accepted."""
    paths = openapi()["paths"]["/channels/{name}"]["post"]["requestBody"]["content"]

    assert set(paths) == {STRUCTURED, BATCH}
    assert server.publish("doc", event("1")).status == 202
