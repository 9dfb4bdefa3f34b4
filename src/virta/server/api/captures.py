"""`/captures`: the databases that are captured beside the server (`--cdc`), with the lag of each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.routing import Route

from virta.server.access.rules import principal_of
from virta.server.api.handler import ApiHandler, not_found

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class CapturesApi(ApiHandler):
    """Handlers under `/captures`; status files are read in a thread."""

    def routes(self) -> list[Route]:
        return [
            Route("/captures", self.list, methods=["GET"]),
            Route("/captures/{name}", self.show, methods=["GET"]),
        ]

    async def list(self, request: Request) -> Response:
        rights = principal_of(request).rights
        found = await asyncio.to_thread(self._service.captures.overviews)
        return self._json([one for one in found if rights.allows_whole("pipelines", one["name"])])

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = await asyncio.to_thread(self._service.captures.overview, name)
        if found is None:
            raise not_found(f"no capture has the name {name!r}: see GET /captures")
        return self._json(found)
