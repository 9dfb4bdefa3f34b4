"""`/journal/…`: the journal's own HTTP handler behind the server's checks."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from virta.access.journal import JobRights
from virta.journal.serving.guard import RequestGuard
from virta.journal.serving.http import BODY_BYTES_MAX, Handler
from virta.server.access.rules import principal_of
from virta.server.api.handler import read_body
from virta.server.http.asgi_bridge import DISCONNECTED
from virta.server.http.responses import NO_STORE

if TYPE_CHECKING:
    from starlette.requests import Request

    from virta.journal.serving.commit_loop import CommitLoop
    from virta.server.service import Service

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
# How soon a client that waits for a job is answered when the server drains.
DRAIN_CHECK_S = 0.25
# Commands that change jobs of others, or the settings of a domain.
ADMINISTRATION = re.compile(r"/journal/jobs/(drop|requeue|kick|domains|recurring)(?:/(.*))?")


class JournalApi:
    """Passes requests to the journal."""

    def __init__(self, service: Service, node: CommitLoop) -> None:
        self._service = service
        self._node = node
        self._handler = Handler(node)

    def routes(self) -> list[BaseRoute]:
        return [Route("/journal/{rest:anything}", self.handle, methods=METHODS)]

    async def handle(self, request: Request) -> Response:
        body = await read_body(request, BODY_BYTES_MAX)
        disconnected = request.scope[DISCONNECTED]
        path = request.scope["raw_path"].decode("latin-1")
        waits = path.endswith("/jobs/next")
        watch = asyncio.create_task(self._watch(request, disconnected)) if waits else None
        rights = principal_of(request).rights
        handler = self._handler
        if not rights.has_all("jobs"):
            guard = RequestGuard(self._node.engine, rights=JobRights(rights))
            handler = Handler(self._node, check=guard.check)
        try:
            answer = await handler.handle(
                request.method,
                path,
                request.scope["query_string"].decode("latin-1"),
                body,
                request.headers.get("content-type", "application/json"),
                disconnected=disconnected,
            )
        finally:
            if watch is not None:
                watch.cancel()
        self._record(request, path, answer.status)
        headers = NO_STORE | {"Content-Type": answer.content_type}
        if answer.allow:
            headers["Allow"] = answer.allow
        return Response(answer.body, answer.status, headers)

    def _record(self, request: Request, path: str, status: int) -> None:
        """Write the audit line of an administrative change; other requests are everyday work."""
        found = ADMINISTRATION.fullmatch(path)
        if found is None or request.method in {"GET", "HEAD"} or status >= 300:
            return
        name = unquote(found[2] or "")[:200]
        self._service.audit.acted(f"jobs_{found[1]}", principal_of(request).id, name=name)

    async def _watch(self, request: Request, disconnected: asyncio.Event) -> None:
        """End the wait for a job when the client disconnects or the server drains."""
        leaving = asyncio.create_task(_receive_disconnect(request))
        try:
            while not (self._service.draining or leaving.done()):
                await asyncio.wait({leaving}, timeout=DRAIN_CHECK_S)
            disconnected.set()
        finally:
            leaving.cancel()


async def _receive_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
