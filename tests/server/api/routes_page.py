"""
Write docs/routes.md from the server's code: `make reference`.

Routes, parameters and answers are those of the OpenAPI document, rights those of the table of rights.
"""

from __future__ import annotations

import re
from pathlib import Path

from virta.access.patterns import EVERYTHING
from virta.server.access.rules import ANY, PUBLIC, RULES, WHOLE_VERBS
from virta.server.api.description.openapi import openapi

PAGE = Path(__file__).parents[3] / "docs" / "routes.md"
HEAD = """# Routes

Every HTTP route of `virta serve` with the right that it needs, its parameters and its answers. `make reference` writes this page from the code; a test compares them.
What the routes do is described in [server.md](server.md), rights in [access.md](access.md). Bodies are described by `GET /openapi.json`, WebSockets and streams also by `GET /asyncapi.json`.
Every error has the same [shape](server.md#publish-post-or-put-channelsname). 401 and 403 are possible wherever a right is needed, 421 for a wrong `Host`, 429 beyond a rate limit.

| route | right | parameters | answers |
| --- | --- | --- | --- |
"""
# Of most routes; see the head of the page.
COMMON = {"401", "403", "421", "429"}
JOURNAL = "/journal/"


def rules():
    """Return the rights by route, parameters without their types."""
    return {re.sub(r":(?:path|anything)\}", "}", route): rule for route, rule in RULES.items()}


def right(method, path, known):
    found = known.get(f"{method} {path}") or known.get(f"GET {path}")
    if found is None:
        assert path.startswith(JOURNAL), path
        found = known[f"{method} {JOURNAL}{{rest}}"]
    if found.verb == PUBLIC:
        return "none"
    if found.verb == ANY:
        return "any credential"
    if found.name == EVERYTHING:
        return f"`{found.verb}` on `**`"
    whole = ", without a row filter" if found.verb in WHOLE_VERBS or found.verb == "jobs" else ""
    name = re.sub(r"[{}]", "", found.name).upper()
    return f"`{found.verb}`{f' on {name}' if name else ''}{whole}"


def shown(parameter):
    name, place = parameter["name"], parameter["in"]
    text = f"`{name}`" if place != "header" else f"header `{name}`"
    return f"{text} (required)" if parameter.get("required") and place != "path" else text


def row(method, path, operation, known):
    answers = operation["responses"]
    good = [f"{code} {one['description']}" for code, one in answers.items() if code < "400"]
    bad = [code for code in answers if code >= "400" and code not in COMMON]
    given = ", ".join(shown(one) for one in operation.get("parameters", []) if one["in"] != "path")
    said = " ".join([*good, *([f"Errors: {', '.join(sorted(bad))}."] if bad else [])])
    cells = (f"`{method} {path}`", right(method, path, known), given, said)
    return f"| {' | '.join(cell or '–' for cell in cells)} |"  # noqa: RUF001


def page():
    """Return the whole page."""
    known = rules()
    rows = [
        row(method.upper(), path, operation, known)
        for path, methods in openapi()["paths"].items()
        for method, operation in methods.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
