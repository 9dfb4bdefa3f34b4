"""`/pipelines`: the status of the listed pipelines (the objects of `virta pipeline status --json`), and orders."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.routing import Route

from virta.errors import RequestError
from virta.server.access.rules import principal_of
from virta.server.api.handler import ApiHandler, not_found
from virta.server.pipeline_supervisor import ORDERS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class PipelinesApi(ApiHandler):
    """Handlers under `/pipelines`; status files are read in a thread."""

    def routes(self) -> list[Route]:
        return [
            Route("/pipelines", self.list, methods=["GET"]),
            Route("/pipelines/{name}", self.show, methods=["GET"]),
            *[Route(f"/pipelines/{{name}}/{o}", self.order, methods=["POST"]) for o in ORDERS],
        ]

    async def list(self, request: Request) -> Response:
        rights = principal_of(request).rights
        found = await asyncio.to_thread(self._service.pipelines.overviews)
        return self._json(
            [one for one in found if rights.allows_whole("pipelines", one["pipeline"])]
        )

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = await asyncio.to_thread(self._service.pipelines.overview, name)
        if found is None:
            raise not_found("no pipeline of this name is listed")
        return self._json(found)

    async def order(self, request: Request) -> Response:
        pipelines, name = self._service.pipelines, request.path_params["name"]
        if name in pipelines.invalid:
            raise RequestError(
                409, "pipeline-invalid", "its file is wrong; see GET /pipelines/NAME"
            )
        order = request.scope["path"].rpartition("/")[2]
        self._service.audit.acted(f"pipeline_{order}", principal_of(request).id, name=name)
        found = await asyncio.to_thread(pipelines.order, name, order)
        if found is None:
            raise not_found("no pipeline of this name is listed")
        return self._json(found)
