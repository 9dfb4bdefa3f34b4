"""`/pipelines`: what the listed pipelines do (the objects of `virta pipeline status --json`), and orders to them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from virta.errors import RequestError
from virta.server.pipeline_supervisor import ORDERS

if TYPE_CHECKING:
    from starlette.requests import Request

    from virta.server.service import Service


class PipelinesApi:
    """Handlers under `/pipelines`; status files are read in a thread."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("/pipelines", self.list, methods=["GET"]),
            Route("/pipelines/{name}", self.show, methods=["GET"]),
            *[Route(f"/pipelines/{{name}}/{o}", self.order, methods=["POST"]) for o in ORDERS],
        ]

    async def list(self, request: Request) -> Response:  # noqa: ARG002
        return self._json(await asyncio.to_thread(self._service.pipelines.overviews))

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = await asyncio.to_thread(self._service.pipelines.overview, name)
        if found is None:
            raise RequestError(404, "not-found", "no pipeline of this name is listed")
        return self._json(found)

    async def order(self, request: Request) -> Response:
        service, name = self._service, request.path_params["name"]
        if name in service.pipelines.invalid:
            raise RequestError(
                409, "pipeline-invalid", "its file is wrong; see GET /pipelines/NAME"
            )
        order = request.scope["path"].rpartition("/")[2]
        found = await asyncio.to_thread(service.pipelines.order, name, order)
        if found is None:
            raise RequestError(404, "not-found", "no pipeline of this name is listed")
        return self._json(found)

    def _json(self, value: Any) -> Response:
        return Response(msgspec.json.encode(value), 200, self._service.responder.event_headers())
