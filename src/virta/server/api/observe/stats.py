"""`/stats`: what the server does now, its last five minutes to a day, and a stream with a sample a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.responses import StreamingResponse
from starlette.routing import Route

from virta import __version__
from virta.clock import time_text
from virta.errors import RequestError
from virta.hub.frames import named_frame
from virta.server.access.auth import requires_credentials
from virta.server.api.handler import ApiHandler
from virta.server.api.observe.schemas import ConsoleServer, StatsView
from virta.server.http.responses import NO_STORE
from virta.server.operating.figures import STEPS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from virta.server.service import Service

# Open streams of figures: each open page of the console has one.
STREAMS_MAX = 200
RETRY_MS = 2000


class StatsApi(ApiHandler):
    """Handlers under `/stats`."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._streams = 0

    def routes(self) -> list[Route]:
        return [
            Route("/stats", self.show, methods=["GET"]),
            Route("/stats/history", self.history, methods=["GET"]),
            Route("/stats/stream", self.stream, methods=["GET"]),
        ]

    async def show(self, request: Request) -> Response:  # noqa: ARG002
        service = self._service
        server = ConsoleServer(
            version=__version__,
            started=time_text(int(service.started_at * 1e6)),
            durability=service.config.durability,
            data_dir=service.config.data_dir,
            journal=service.journal is not None,
            tokens=requires_credentials(service.config),
        )
        return self._json(StatsView(server, service.figures.last))

    async def history(self, request: Request) -> Response:
        text = request.query_params.get("step", "1")
        history = self._service.figures.histories.get(int(text) if text in map(str, STEPS) else 0)
        if history is None:
            known = ", ".join(map(str, STEPS))
            raise RequestError(400, "invalid-step", f"step is {text[:20]!r}: it is one of {known}")
        return self._json(history.view())

    async def stream(self, request: Request) -> Response:  # noqa: ARG002
        if self._streams >= STREAMS_MAX:
            raise RequestError(
                503, "too-many-streams", f"{STREAMS_MAX} streams of figures are open"
            )
        headers = NO_STORE | {"Content-Type": "text/event-stream"}
        return StreamingResponse(self._frames(), headers=headers)

    async def _frames(self) -> AsyncIterator[bytes]:
        figures = self._service.figures
        self._streams += 1
        try:
            yield _frame(figures.last)
            while not self._service.draining:
                yield _frame(await figures.next_sample())
            yield named_frame("disconnect", {"reason": "shutdown"}, retry_ms=RETRY_MS)
        finally:
            self._streams -= 1


def _frame(sample: object) -> bytes:
    return b"event: stats\ndata: %b\n\n" % msgspec.json.encode(sample)
