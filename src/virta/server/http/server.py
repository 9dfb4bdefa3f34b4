"""What the connections of one server share; uvicorn calls it for each socket that it accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from virta.server.http.connection import HttpConnection
from virta.server.http.fast_publish import FastPublisher
from virta.server.http.head_cache import HeadCache

if TYPE_CHECKING:
    import asyncio

    import uvicorn
    from uvicorn.server import ServerState

    from virta.server.service import Service


class HttpServer:
    """Makes connections."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.heads = HeadCache(service.head_bytes_max)
        self.fast = FastPublisher(service, self.heads)
        service.on_access_changed.append(self.recheck_access)
        # Of uvicorn, known at the first connection.
        self.app: Any = None
        self.connections: set[Any] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def recheck_access(self) -> None:
        """Forget what credentials meant, and end the streams of principals that have lost their rights."""
        self.heads.forget()
        for connection in list(self.connections):
            if connection.consumer is not None:
                connection.consumer.recheck_access()

    def __call__(
        self, *, config: uvicorn.Config, server_state: ServerState, **_: object
    ) -> HttpConnection:
        self.app = config.loaded_app
        self.connections = server_state.connections
        self.tasks = server_state.tasks
        return HttpConnection(self)
