"""
The ASGI application: every route that is not hot.

Errors have the same JSON and headers as on the hot routes. `/livez` fails only when the process should be
restarted, `/readyz` as soon as requests are not served: when draining, or when the log cannot be written.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Match, Route

from virta.errors import RequestError
from virta.filters.tree import conditions
from virta.journal.protocol import problems
from virta.journal.serving.http import STATUS as JOURNAL_STATUS
from virta.server.access.rules import guard_routes
from virta.server.api.captures import CapturesApi
from virta.server.api.channels import ChannelsApi
from virta.server.api.description.asyncapi import asyncapi
from virta.server.api.description.openapi import openapi
from virta.server.api.filters import FiltersApi
from virta.server.api.handler import ApiHandler
from virta.server.api.journal import JournalApi
from virta.server.api.observe.explanations import ExplanationsApi
from virta.server.api.observe.health import HealthApi
from virta.server.api.observe.pipelines import PipelineDetailsApi
from virta.server.api.observe.static_files import ConsoleApi
from virta.server.api.observe.stats import StatsApi
from virta.server.api.observe.subscribers import SubscribersApi
from virta.server.api.observe.webhooks import WebhooksApi
from virta.server.api.pipelines import PipelinesApi
from virta.server.api.rows import RowsApi
from virta.server.api.sessions import SessionsApi
from virta.server.api.subscriptions import SubscriptionsApi
from virta.server.consumers.handshake import check_subscribe
from virta.server.http.asgi_bridge import CORS
from virta.server.http.responses import NO_STORE, HttpResponse, preflight
from virta.server.http.routes import check_escapes, check_text, form_decode
from virta.server.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from virta.server.service import Service

SUBSCRIBE_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
# The AsyncAPI document contains the host of the request; a server has few names.
ASYNCAPI_HOSTS_MAX = 8
JOURNAL = "/journal/"
KEYCOUNTS = "/metrics/keycounts/"
# Free bytes on the disk below which the server is not ready: the next publications would fail.
FREE_BYTES_MIN = 1024 * 1024


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI application."""
    endpoints = Endpoints(service)
    routes: list[BaseRoute] = [
        Route("/livez", endpoints.livez, methods=["GET"]),
        Route("/readyz", endpoints.readyz, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route("/metrics/", endpoints.metrics, methods=["GET"]),
        Route("/metrics/keycounts/{name:anything}", endpoints.keycounts, methods=["GET"]),
        Route("/subscribe", endpoints.subscribe, methods=SUBSCRIBE_METHODS),
        Route("/openapi.json", endpoints.openapi, methods=["GET"]),
        Route("/asyncapi.json", endpoints.asyncapi, methods=["GET"]),
        Route(f"{problems.PATH}{{code}}", endpoints.problem, methods=["GET"]),
        *ConsoleApi(service).routes(),
        *StatsApi(service).routes(),
        *SubscribersApi(service).routes(),
        *HealthApi(service).routes(),
        *ExplanationsApi(service).routes(),
        *SessionsApi(service).routes(),
        *ChannelsApi(service).routes(),
        *RowsApi(service).routes(),
        *FiltersApi(service).routes(),
        *WebhooksApi(service).routes(),
        *SubscriptionsApi(service).routes(),
        *PipelineDetailsApi(service).routes(),
        *PipelinesApi(service).routes(),
        *CapturesApi(service).routes(),
    ]
    if service.journal is not None:
        routes += JournalApi(service, service.journal.node).routes()
    app = Starlette(
        routes=guard_routes(routes, service),
        exception_handlers={
            RequestError: endpoints.refused,
            HTTPException: endpoints.http_error,
            Exception: endpoints.failed,
        },
    )
    app.router.redirect_slashes = False
    return CheckedApp(app, service)


class CheckedApp:
    """
    Checks paths and answers preflights before any route.

    The connection has checked who sends the request (`virta.server.access.auth`); here the responses get the CORS
    headers that result from it.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _with_cors(send, scope[CORS])
            response = self._early_response(scope)
            if response is not None:
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _early_response(self, scope: Scope) -> Response | None:
        path = scope["path"]
        try:
            check_escapes(scope["raw_path"], code="malformed-percent-escape")
            if not path.startswith(JOURNAL):  # its keys are any bytes
                code = "invalid-channel" if path.startswith(KEYCOUNTS) else "invalid-name"
                check_text(scope["raw_path"], code=code)
        except RequestError as error:
            return refusal(self._service, error)
        if scope["method"] == "OPTIONS":
            requested = dict(scope["headers"]).get(b"access-control-request-headers", b"")
            return to_asgi(preflight(requested))
        return None


def _with_cors(send: Send, lines: bytes) -> Send:
    """Add the CORS headers of a request to its response."""
    if not lines:
        return send
    split = [line.partition(b": ") for line in lines.split(b"\r\n") if line]
    pairs = [(name.lower(), value) for name, _, value in split]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *pairs]
        await send(message)

    return sending


def to_asgi(response: HttpResponse) -> Response:
    return Response(response.body, response.status, response.headers)


def refusal(
    service: Service, error: RequestError, more: Mapping[str, str] | None = None
) -> Response:
    """Render an error as a response of the application."""
    return to_asgi(service.responder.refusal(error, more))


class Endpoints(ApiHandler):
    """Health, metrics, descriptions, and what no route answers."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._metrics = Metrics(service)

    async def livez(self, request: Request) -> Response:  # noqa: ARG002
        if self._service.follower.poisoned is not None:
            text = f"restart me: {self._service.follower.poisoned.message}\n"
            return PlainTextResponse(text, 503, headers=NO_STORE)
        return PlainTextResponse("ok\n", headers=NO_STORE)

    async def readyz(self, request: Request) -> Response:  # noqa: ARG002
        why = _why_not_ready(self._service)
        if why is None:
            return PlainTextResponse("ok\n", headers=NO_STORE)
        return PlainTextResponse(f"not ready: {why}\n", 503, headers=NO_STORE)

    async def metrics(self, request: Request) -> Response:
        if "content-length" in request.headers or "transfer-encoding" in request.headers:
            raise RequestError(400, "unexpected-body")
        headers = NO_STORE | {"Content-Type": CONTENT_TYPE}
        overviews = await asyncio.to_thread(self._service.pipelines.overviews)
        return Response(self._metrics.text(overviews), headers=headers)

    async def keycounts(self, request: Request) -> Response:
        """Count the terms of queries by the path they name, for a channel."""
        raw = request.scope["raw_path"].removeprefix(b"/metrics/keycounts/")
        channel = form_decode(raw.removesuffix(b"/"), code="malformed-percent-escape")
        counts: dict[str, Any] = {}
        for filter_ in self._service.hub.filters(channel):
            for condition in conditions(filter_.tree):
                _count(counts, [str(step) for step in condition.path])
        if not counts:
            raise RequestError(404, "not-found")
        return self._json(counts)

    async def openapi(self, request: Request) -> Response:  # noqa: ARG002
        return self._json(_openapi())

    async def asyncapi(self, request: Request) -> Response:
        host = request.headers.get("host", "")
        secure = self._service.config.tls_cert is not None
        return self._json(_asyncapi(host, secure=secure))

    async def problem(self, request: Request) -> Response:
        """Return the page that a problem document's `type` links to."""
        code = request.path_params["code"]
        text = problems.page(code, JOURNAL_STATUS.get(code, 400))
        if text is None:
            raise RequestError(404, "not-found")
        return PlainTextResponse(text, headers=NO_STORE)

    async def subscribe(self, request: Request) -> Response:
        """Refuse a request for Subtub's socket without an upgrade."""
        if request.method != "GET":
            return PlainTextResponse("Not found", 404)
        try:
            check_subscribe(request.scope["query_string"])
        except RequestError as error:
            return to_asgi(self._service.responder.refusal(error, text=True))
        text = "Upgrade required for WebSocket communication."
        headers = {"Upgrade": "websocket", "Connection": "upgrade"}
        return PlainTextResponse(text, 426, headers=headers)

    async def refused(self, request: Request, error: Exception) -> Response:  # noqa: ARG002
        assert isinstance(error, RequestError)
        return refusal(self._service, error)

    async def http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        strange = request.method != "GET" and request.url.path.startswith("/metrics")
        if error.status_code == 405 or strange:
            refused = RequestError(405, "invalid-method", method=request.method)
            return refusal(self._service, refused, {"Allow": _allowed_methods(request, error)})
        if error.status_code == 404:
            refused = RequestError(404, "not-found")
        else:
            refused = RequestError(error.status_code, "invalid-request", str(error.detail))
        return refusal(self._service, refused, error.headers)

    async def failed(self, request: Request, error: Exception) -> Response:
        self._service.logger.error("request_failed", path=request.url.path, exc_info=error)
        return refusal(self._service, RequestError(500, "internal-failure"))


def _allowed_methods(request: Request, error: HTTPException) -> str:
    """Return the methods that some route accepts at this path (RFC 9110 §10.2.1)."""
    methods: set[str] = set()
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match is Match.FULL:  # the handler itself refused, and names what it accepts
            return str((error.headers or {}).get("Allow", "OPTIONS"))
        if match is Match.PARTIAL:
            methods |= route.methods
    return ", ".join([*sorted(methods or {"GET", "HEAD"}), "OPTIONS"])


def _why_not_ready(service: Service) -> str | None:
    if service.draining:
        return "draining"
    if not service.ready:
        return "starting"
    if (trouble := service.follower.trouble) is not None:
        return f"log: {trouble}"
    disk = os.statvfs(service.config.data_dir)
    free = disk.f_bavail * disk.f_frsize
    if free >= FREE_BYTES_MIN:
        return None
    return f"{service.config.data_dir} has {free} bytes left: free some space"


def _count(counts: dict[str, Any], path: list[str]) -> None:
    """Count one path in the nested object; a node with children shows only the children."""
    node = counts
    for step in path[:-1]:
        child = node.get(step)
        if not isinstance(child, dict):
            child = node[step] = {}
        node = child
    leaf = path[-1] if path else ""
    if not isinstance(node.get(leaf), dict):
        node[leaf] = node.get(leaf, 0) + 1


# Built once: the schemas take milliseconds and leave thousands of objects to the garbage collector.
@cache
def _openapi() -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(openapi()))


@lru_cache(ASYNCAPI_HOSTS_MAX)
def _asyncapi(host: str, *, secure: bool) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(asyncapi(host, secure=secure)))
