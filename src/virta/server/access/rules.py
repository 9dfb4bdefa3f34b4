"""
What each route requires: the one table of rights.

    PUBLIC     no credential: probes, the callback of a webhook, the console's files
    ANY        any credential the server accepts
    a verb     a right to it; `name` says on which name, by the parameters of the path, or `**` for the whole server

`admin` and `pipelines` are about more than single events, so a grant with a row filter gives no right to them.
Where the name is not in the path (a body, an id, a list), the table asks for the verb on some name, and the
handler calls `require` for the name itself. A route that is not in the table is not served: `guard_routes` refuses
to build the application, and a test compares the table with the hot routes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from starlette.routing import BaseRoute, Mount, Route

from virta.access.patterns import EVERYTHING
from virta.errors import RequestError
from virta.server.http.asgi_bridge import PRINCIPAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from virta.access.principal import Principal
    from virta.filters import Filter
    from virta.server.service import Service

    Endpoint = Callable[[Request], Awaitable[Response]]

PUBLIC, ANY = "public", "any"
# A row filter cannot be applied to what these show and do.
WHOLE_VERBS: Final = frozenset({"admin", "pipelines"})


class RouteRule(NamedTuple):
    """The right that a route requires."""

    verb: str  # or PUBLIC, or ANY
    name: str = ""  # the parameters of the path that name it; empty: the handler asks


_SERVER: Final = RouteRule("admin", EVERYTHING)
_COLLECTION: Final = "{index}/{collection}"
_FILTERS: Final = "/filters/{index}/{collection}"

RULES: Final[dict[str, RouteRule]] = {
    # Hot routes.
    "POST /channels/{name}": RouteRule("publish", "{name}"),
    "PUT /channels/{name}": RouteRule("publish", "{name}"),
    "GET /channels/{name}": RouteRule("read", "{name}"),
    "GET /channels/{name}/from/{start}": RouteRule("read", "{name}"),
    "GET /channels/{name}/live": RouteRule("read", "{name}"),
    "GET /filters/{id}/events": RouteRule("read"),
    "POST /publish": RouteRule("publish"),
    # The console's files, and what it shows of the whole server.
    "GET /": RouteRule(PUBLIC),
    "GET /console/{path:path}": RouteRule(PUBLIC),
    "GET /stats": _SERVER,
    "GET /stats/history": _SERVER,
    "GET /stats/stream": _SERVER,
    "GET /subscribers": RouteRule("admin"),
    "DELETE /subscribers/{id}": RouteRule("admin"),
    "GET /health": _SERVER,
    "POST /health/verify": _SERVER,
    # Health and descriptions.
    "GET /livez": RouteRule(PUBLIC),
    "GET /readyz": RouteRule(PUBLIC),
    "GET /metrics": _SERVER,
    "GET /metrics/": _SERVER,
    "GET /metrics/keycounts/{name:anything}": RouteRule("admin", "{name}"),
    "GET /openapi.json": RouteRule(ANY),
    "GET /asyncapi.json": RouteRule(ANY),
    "GET /problems/{code}": RouteRule(PUBLIC),
    # A WebSocket; without an upgrade it is refused.
    **{f"{m} /subscribe": RouteRule(ANY) for m in ("GET", "POST", "PUT", "PATCH", "DELETE")},
    # Credentials.
    "POST /tickets": RouteRule(ANY),
    "GET /session": RouteRule(ANY),
    "POST /session": RouteRule(ANY),
    "DELETE /session": RouteRule(ANY),
    # Channels and filters.
    "GET /channels": RouteRule("read"),
    "GET /channels/{name:anything}/rows": RouteRule("read"),
    "GET /channels/{name:anything}/rows/{key:anything}": RouteRule("read"),
    "POST /filters/validate": RouteRule(ANY),
    "POST /filters/explain": RouteRule(ANY),
    "POST /filters/standing": RouteRule("admin"),
    "POST /filters/count": RouteRule("read"),
    "GET /filters/{id}": RouteRule("filters"),
    "DELETE /filters/{id}": RouteRule("filters"),
    f"POST {_FILTERS}": RouteRule("filters", _COLLECTION),
    f"HEAD {_FILTERS}": RouteRule("filters", _COLLECTION),
    f"GET {_FILTERS}": RouteRule("filters", _COLLECTION),
    f"POST {_FILTERS}/test": RouteRule("filters", _COLLECTION),
    # Webhooks.
    "POST /subscriptions": RouteRule("webhooks"),
    "GET /subscriptions": RouteRule("webhooks"),
    "GET /subscriptions/{id}": RouteRule("webhooks"),
    "PUT /subscriptions/{id}": RouteRule("webhooks"),
    "DELETE /subscriptions/{id}": RouteRule("webhooks"),
    "GET /subscriptions/{id}/confirm": RouteRule(PUBLIC),
    "POST /subscriptions/{id}/confirm": RouteRule(PUBLIC),
    "GET /subscriptions/{id}/dead-letters": RouteRule("webhooks"),
    "POST /subscriptions/{id}/redeliver": RouteRule("webhooks"),
    "POST /subscriptions/{id}/test": RouteRule("webhooks"),
    # Pipelines and the journal.
    "GET /pipelines/{name}/graph": RouteRule("pipelines", "{name}"),
    "GET /pipelines/{name}/log": RouteRule("pipelines", "{name}"),
    "GET /captures": RouteRule("pipelines"),
    "GET /captures/{name}": RouteRule("pipelines", "{name}"),
    "GET /pipelines": RouteRule("pipelines"),
    "GET /pipelines/{name}": RouteRule("pipelines", "{name}"),
    **{f"POST /pipelines/{{name}}/{o}": RouteRule("pipelines", "{name}") for o in ("start", "stop", "restart")},
    **{
        f"{m} /journal/{{rest:anything}}": RouteRule("jobs")
        for m in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
    },
}  # fmt: skip


def rule_of(method: str, path: str) -> RouteRule | None:
    """Return the rule of a route; HEAD has that of GET unless it has its own."""
    found = RULES.get(f"{method} {path}")
    return RULES.get(f"GET {path}") if found is None and method == "HEAD" else found


def _public_paths() -> re.Pattern[bytes]:
    paths = {key.partition(" ")[2] for key, rule in RULES.items() if rule.verb == PUBLIC}
    patterns = [re.sub(r"\\\{[^}]*:path\\\}", ".*", re.escape(path)) for path in paths]
    return re.compile("|".join(re.sub(r"\\\{[^}]*\\\}", "[^/%]+", p) for p in patterns).encode())


PUBLIC_PATHS: Final = _public_paths()


def require(service: Service, principal: Principal, verb: str, name: str) -> Filter | None:
    """
    Return the row filter of a principal for a verb and a name; None if it has none.

    Raises:
        RequestError: 403, the principal has no such right.
    """
    permission = principal.rights.permission(verb, name)
    if permission is None:
        raise refused(service, principal, verb, name)
    return permission.row_filter


def require_whole(service: Service, principal: Principal, verb: str, name: str) -> None:
    """Like `require`, for what a row filter cannot be applied to: a grant with one does not count."""
    if require(service, principal, verb, name) is not None:
        raise refused(service, principal, verb, name)


def refused(service: Service, principal: Principal, verb: str, name: str) -> RequestError:
    """Return the 403 for a missing right, and write the audit line."""
    service.audit.refused("forbidden", principal=principal.id, verb=verb, name=name)
    on = f" on {name[:200]!r}" if name else ""
    return RequestError(403, "forbidden", f"{principal.id} has no right to `{verb}`{on}")


def principal_of(request: Request) -> Principal:
    """Return who sent a request to the application."""
    principal: Principal = request.scope[PRINCIPAL]
    return principal


def guard_routes(routes: Iterable[BaseRoute], service: Service) -> list[BaseRoute]:
    """
    Return the routes of the application, each behind its rule.

    Raises:
        AssertionError: a route has no rule.
    """
    guarded: list[BaseRoute] = []
    for route in routes:
        if isinstance(route, Mount):
            rule = rule_of("GET", route.path)
            assert rule == RouteRule(PUBLIC), f"only public files are mounted: {route.path}"
            guarded.append(route)
            continue
        assert isinstance(route, Route), f"{route} is no route"
        methods = sorted(route.methods or ())
        rules = {method: rule_of(method, route.path) for method in methods}
        missing = [method for method, rule in rules.items() if rule is None]
        assert not missing, f"{missing} {route.path} has no rule in virta.server.access.rules"
        endpoint = _guarded(route.endpoint, service, {m: r for m, r in rules.items() if r})
        guarded.append(Route(route.path, endpoint, methods=methods, name=route.name))
    return guarded


def _check(
    service: Service, principal: Principal, rule: RouteRule, parameters: dict[str, str]
) -> None:
    rights, verb = principal.rights, rule.verb
    if not rights.has(verb):
        raise refused(service, principal, verb, "")
    if rule.name == EVERYTHING:
        if not rights.has_all(verb):
            raise refused(service, principal, verb, EVERYTHING)
    elif rule.name:
        ask = require_whole if verb in WHOLE_VERBS else require
        ask(service, principal, verb, rule.name.format_map(parameters))


def _guarded(endpoint: Endpoint, service: Service, rules: dict[str, RouteRule]) -> Endpoint:
    async def guarded(request: Request) -> Response:
        rule = rules[request.method]
        if rule.verb not in {PUBLIC, ANY}:
            _check(service, principal_of(request), rule, request.path_params)
        return await endpoint(request)

    return guarded
