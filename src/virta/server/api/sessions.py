"""
`/tickets` and `/session`: credentials for browsers, whose EventSource and WebSocket cannot send headers.

A ticket stands once, for 30 seconds, for the principal that asked for it: `?ticket=vt_…`. A session is a cookie that
scripts cannot read and browsers send to this server only from its own pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from virta.access.principal import OPEN
from virta.clock import time_text
from virta.errors import RequestError
from virta.server.access.auth import COOKIE, read_session
from virta.server.access.rules import principal_of
from virta.server.api.description.schemas import SessionInfo, StreamTicket
from virta.server.api.handler import ApiHandler

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from virta.access.credentials import Credentials

ATTRIBUTES = "Path=/; HttpOnly; Secure; SameSite=Strict"


class SessionsApi(ApiHandler):
    """Handlers of tickets and sessions."""

    def routes(self) -> list[Route]:
        return [
            Route("/tickets", self.create_ticket, methods=["POST"]),
            Route("/session", self.show, methods=["GET"]),
            Route("/session", self.create, methods=["POST"]),
            Route("/session", self.delete, methods=["DELETE"]),
        ]

    async def create_ticket(self, request: Request) -> Response:
        """Return a ticket; on a server without credentials there is nothing it would stand for."""
        principal = principal_of(request)
        ticket, expires = self._credentials().tickets.issue(principal)
        self._service.audit.acted("ticket_issued", principal.id)
        return self._json(StreamTicket(ticket, time_text(int(expires * 1_000_000))), 201)

    async def show(self, request: Request) -> Response:
        """Return who the request comes from and what it may do."""
        principal = principal_of(request)
        expires = None
        if principal.expires != float("inf"):
            expires = time_text(int(principal.expires * 1_000_000))
        required = self._service.auth.credentials is not None
        grants = principal.rights.describe()
        return self._json(SessionInfo(principal.id, principal.kind, required, grants, expires))

    async def create(self, request: Request) -> Response:
        """Start a session for the credential of this request."""
        principal = principal_of(request)
        secret, expires = self._credentials().sessions.issue(principal)
        self._service.audit.acted("session_started", principal.id)
        response = self._no_content()
        age = max(0, int(expires - self._service.now))
        response.headers["Set-Cookie"] = f"{COOKIE}={secret}; Max-Age={age}; {ATTRIBUTES}"
        return response

    async def delete(self, request: Request) -> Response:
        """End the session of this request's cookie."""
        secret = read_session(request.scope["headers"])
        if secret is not None and self._service.auth.credentials is not None:
            self._service.auth.credentials.sessions.drop(secret)
            self._service.audit.acted("session_ended", principal_of(request).id)
        response = self._no_content()
        response.headers["Set-Cookie"] = f"{COOKIE}=; Max-Age=0; {ATTRIBUTES}"
        return response

    def _credentials(self) -> Credentials:
        credentials = self._service.auth.credentials
        if credentials is None:
            raise RequestError(
                409,
                "no-credentials",
                f"this server asks for no credential ({OPEN}): none is needed",
            )
        return credentials
