"""
The application behind the hot routes: health, metrics, filters and documents.

Everything here is conventional Starlette; errors have the same JSON and headers as on the hot routes.
`/livez` says that the process runs (it fails only when it should be restarted), `/readyz` that
requests are served right now (it fails at once when draining or when the log cannot be written).
"""

from __future__ import annotations

import asyncio
import os
import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Match, Route

from virta.errors import RequestError
from virta.filters.tree import conditions
from virta.journal.protocol import problems
from virta.journal.serving.http import BODY_BYTES_MAX, Handler
from virta.journal.serving.http import STATUS as JOURNAL_STATUS
from virta.server.api.asyncapi import asyncapi
from virta.server.api.channels import ChannelsApi
from virta.server.api.filters import FiltersApi
from virta.server.api.openapi import openapi
from virta.server.api.pipelines import PipelinesApi
from virta.server.api.subscriptions import SubscriptionsApi
from virta.server.consumers.handshake import check_subscribe
from virta.server.http import responses
from virta.server.http.response_queue import CORS, GONE
from virta.server.http.routes import check_escapes, check_text, form_decode
from virta.server.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from virta.journal.serving.commit_loop import Node
    from virta.server.service import Service

SUBSCRIBE_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
JOURNAL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
# The AsyncAPI document contains the host of the request; a server has few names.
ASYNCAPI_HOSTS_MAX = 8
JOURNAL = "/journal/"
KEYCOUNTS = "/metrics/keycounts/"
OPEN_PATHS = frozenset({"/livez", "/readyz"})
# With less on the disk the next publications will fail: others should serve them.
FREE_BYTES_MIN = 1024 * 1024
# A client that waits for a job is told to come back within this when the server drains.
DRAIN_LOOK_S = 0.25
# A webhook's callback: it has no token, and its address holds a key.
CALLBACK = re.compile(r"/subscriptions/[^/]+/confirm")


class AnythingConvertor(PathConvertor):
    """A path whose escapes may stand for any character, the end of a line too."""

    regex = "(?s:.*)"


register_url_convertor("anything", AnythingConvertor())


def build_app(service: Service) -> ASGIApp:
    """Put the routes together."""
    endpoints = Endpoints(service)
    routes: list[BaseRoute] = [
        Route("/livez", endpoints.livez, methods=["GET"]),
        Route("/readyz", endpoints.readyz, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route("/metrics/", endpoints.metrics, methods=["GET"]),
        Route("/metrics/keycounts/{name:path}", endpoints.keycounts, methods=["GET"]),
        Route("/subscribe", endpoints.subscribe, methods=SUBSCRIBE_METHODS),
        Route("/openapi.json", endpoints.openapi, methods=["GET"]),
        Route("/asyncapi.json", endpoints.asyncapi, methods=["GET"]),
        Route(f"{problems.PATH}{{code}}", endpoints.problem, methods=["GET"]),
        *ChannelsApi(service).routes(),
        *FiltersApi(service).routes(),
        *SubscriptionsApi(service).routes(),
        *PipelinesApi(service).routes(),
    ]
    if service.journal is not None:
        routes.append(
            Route(
                "/journal/{rest:anything}",
                JournalApi(service, service.journal.node).handle,
                methods=JOURNAL_METHODS,
            )
        )
    app = Starlette(
        routes=routes,
        exception_handlers={
            RequestError: endpoints.refused,
            HTTPException: endpoints.http_error,
            Exception: endpoints.failed,
        },
    )
    app.router.redirect_slashes = False
    return Doorkeeper(app, service)


class Doorkeeper:
    """
    Checks the token and answers preflights, before any route.

    The connection has checked the Host and the Origin (`Door.check_head`); here the responses get the
    CORS headers that result from it.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _with_cors(send, scope[CORS])
            response = self._stop(scope)
            if response is not None:
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _stop(self, scope: Scope) -> Response | None:
        preflight = scope["method"] == "OPTIONS"
        path = scope["path"]
        if not preflight and (path in OPEN_PATHS or CALLBACK.fullmatch(path)):
            return None
        headers, door = scope["headers"], self._service.door
        try:
            check_escapes(scope["raw_path"], code="malformed-percent-escape")
            if not path.startswith(JOURNAL):  # its keys are any bytes
                check_text(scope["raw_path"], code=_name_code(path))
            if preflight:
                wanted = dict(headers).get(b"access-control-request-headers", b"")
                return _preflight(wanted.decode("latin-1"))
            scope["query_string"] = door.admit(headers, scope["query_string"])
        except RequestError as error:
            return refusal(self._service, error)
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


def _name_code(path: str) -> str:
    """Return the error code for a path whose names are not UTF-8."""
    return "invalid-channel" if path.startswith(KEYCOUNTS) else "invalid-name"


def refusal(
    service: Service, error: RequestError, more: Mapping[str, str] | None = None
) -> Response:
    """An error as a response of the framework."""
    service.count_refusal(error)
    headers = service.responder.event_headers() | dict(more or {})
    if error.status in responses.RETRY_LATER:
        headers["Retry-After"] = str(responses.RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="virta"'
    return Response(responses.refusal_body(error), error.status, headers)


def json_response(service: Service, body: bytes, status: int = 200) -> Response:
    return Response(body, status, service.responder.event_headers())


class JournalApi:
    """The journal's own handler, behind our door."""

    def __init__(self, service: Service, node: Node) -> None:
        self._service = service
        self._handler = Handler(node)

    async def handle(self, request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES_MAX:
                raise RequestError(413, "body-too-large", maxBytes=BODY_BYTES_MAX)
        gone = request.scope[GONE]
        path = request.scope["raw_path"].decode("latin-1")
        waits = path.endswith("/jobs/next")
        watching = asyncio.create_task(self._watch(request, gone)) if waits else None
        try:
            answer = await self._handler.handle(
                request.method,
                path,
                request.scope["query_string"].decode("latin-1"),
                bytes(body),
                request.headers.get("content-type", "application/json"),
                gone=gone,
            )
        finally:
            if watching is not None:
                watching.cancel()
        headers = {"Content-Type": answer.content_type, "Cache-Control": "no-store"}
        if answer.allow:
            headers["Allow"] = answer.allow
        return Response(answer.body, answer.status, headers)

    async def _watch(self, request: Request, gone: asyncio.Event) -> None:
        """Whoever waits for a job may leave, or be sent away by a server that drains."""
        leaving = asyncio.create_task(_left(request))
        try:
            while not (self._service.draining or leaving.done()):
                await asyncio.wait({leaving}, timeout=DRAIN_LOOK_S)
            gone.set()
        finally:
            leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Endpoints:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._metrics = Metrics(service)

    async def livez(self, request: Request) -> Response:  # noqa: ARG002
        headers = {"Cache-Control": "no-store"}
        if self._service.follower.poisoned is not None:
            text = f"restart me: {self._service.follower.poisoned.message}\n"
            return PlainTextResponse(text, 503, headers=headers)
        return PlainTextResponse("ok\n", headers=headers)

    async def readyz(self, request: Request) -> Response:  # noqa: ARG002
        service = self._service
        why = None
        if service.draining:
            why = "draining"
        elif not service.ready:
            why = "starting"
        else:
            trouble = service.follower.trouble
            why = f"log: {trouble}" if trouble is not None else _full(service)
        headers = {"Cache-Control": "no-store"}
        if why is None:
            return PlainTextResponse("ok\n", headers=headers)
        return PlainTextResponse(f"not ready: {why}\n", 503, headers=headers)

    async def metrics(self, request: Request) -> Response:
        if "content-length" in request.headers or "transfer-encoding" in request.headers:
            raise RequestError(400, "unexpected-body")
        headers = {"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"}
        overviews = await asyncio.to_thread(self._service.pipelines.overviews)
        return Response(self._metrics.text(overviews), headers=headers)

    async def keycounts(self, request: Request) -> Response:
        """How many terms of standing queries name each path of a channel."""
        raw = request.scope["raw_path"].removeprefix(b"/metrics/keycounts/")
        channel = form_decode(raw.removesuffix(b"/"), code="malformed-percent-escape")
        counts: dict[str, Any] = {}
        for filter_ in self._service.hub.filters(channel):
            for condition in conditions(filter_.tree):
                _count(counts, [str(step) for step in condition.path])
        if not counts:
            raise RequestError(404, "not-found")
        return json_response(self._service, _encode(counts))

    async def openapi(self, request: Request) -> Response:  # noqa: ARG002
        return json_response(self._service, _openapi_text())

    async def asyncapi(self, request: Request) -> Response:
        host = request.headers.get("host", "")
        secure = self._service.config.tls_cert is not None
        return json_response(self._service, _asyncapi_text(host, secure=secure))

    async def problem(self, request: Request) -> Response:
        """Return the page that a problem document's `type` links to."""
        code = request.path_params["code"]
        text = problems.page(code, JOURNAL_STATUS.get(code, 400))
        if text is None:
            raise RequestError(404, "not-found")
        return PlainTextResponse(text, headers={"Cache-Control": "no-store"})

    async def subscribe(self, request: Request) -> Response:
        """What a request without an upgrade hears at Subtub's socket; other methods find nothing."""
        if request.method != "GET":
            return PlainTextResponse("Not found", 404)
        try:
            check_subscribe(request.scope["query_string"])
        except RequestError as error:
            self._service.count_refusal(error)
            return PlainTextResponse(error.message, error.status)
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
            return refusal(self._service, refused, {"Allow": _allowed(request, error)})
        if error.status_code == 404:
            refused = RequestError(404, "not-found")
        else:
            refused = RequestError(error.status_code, "invalid-request", str(error.detail))
        return refusal(self._service, refused, error.headers)

    async def failed(self, request: Request, error: Exception) -> Response:
        self._service.logger.error("request_failed", path=request.url.path, exc_info=error)
        return refusal(self._service, RequestError(500, "internal-failure"))


def _allowed(request: Request, error: HTTPException) -> str:
    """Every method that some route takes at this path (RFC 9110 §10.2.1)."""
    methods: set[str] = set()
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match is Match.FULL:  # the handler itself refused, and knows what it would take
            return str((error.headers or {}).get("Allow", "OPTIONS"))
        if match is Match.PARTIAL:
            methods |= route.methods
    return ", ".join([*sorted(methods or {"GET", "HEAD"}), "OPTIONS"])


def _full(service: Service) -> str | None:
    """Say so when publications are about to fail for want of space."""
    disk = os.statvfs(service.config.data_dir)
    free = disk.f_bavail * disk.f_frsize
    if free >= FREE_BYTES_MIN:
        return None
    return f"{service.config.data_dir} has {free} bytes left: free some space"


def _preflight(wanted: str) -> Response:
    headers = {
        "Cache-Control": "no-store",
        "Access-Control-Allow-Methods": responses.PREFLIGHT_METHODS.decode(),
        "Access-Control-Allow-Headers": responses.header_safe(wanted) or "*",
        "Access-Control-Max-Age": str(responses.PREFLIGHT_MAX_AGE_S),
    }
    return Response(None, 204, headers)


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


def _encode(value: object) -> bytes:

    return msgspec.json.encode(value)


# Built once: the schemas take milliseconds and leave thousands of objects to the garbage collector.
@cache
def _openapi_text() -> bytes:
    return _encode(openapi())


@lru_cache(ASYNCAPI_HOSTS_MAX)
def _asyncapi_text(host: str, *, secure: bool) -> bytes:
    return _encode(asyncapi(host, secure=secure))
