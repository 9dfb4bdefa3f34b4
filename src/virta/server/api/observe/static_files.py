"""
The console: static files of the package `virta.console`, at `/` and under `/console/`.

They are read once and served from memory, with a strict Content-Security-Policy. They contain no data, so they need
no token: the page asks for one when the API refuses it.
"""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import Response
from starlette.routing import Route

from virta.errors import RequestError
from virta.server.api.handler import ApiHandler

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from starlette.requests import Request

    from virta.server.service import Service

PACKAGE = "virta.console"
INDEX = "index.html"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Always asked for again, and answered with 304 while it is the same: an update shows at once.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


class ConsoleFile(NamedTuple):
    content: bytes
    headers: dict[str, str]
    compressed: bytes  # by gzip


class ConsoleApi(ApiHandler):
    """Serves the files of the console."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._files = dict(_read_folder(files(PACKAGE), ""))

    def routes(self) -> list[Route]:
        return [
            Route("/", self.console_page, methods=["GET"]),
            Route("/console/{path:path}", self.file, methods=["GET"]),
        ]

    async def console_page(self, request: Request) -> Response:
        return self._file_response(request, INDEX)

    async def file(self, request: Request) -> Response:
        return self._file_response(request, request.path_params["path"])

    def _file_response(self, request: Request, path: str) -> Response:
        found = self._files.get(path)
        if found is None:
            raise RequestError(404, "not-found")
        if request.headers.get("if-none-match") == found.headers["ETag"]:
            return Response(None, 304, found.headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(found.compressed, 200, found.headers | {"Content-Encoding": "gzip"})
        return Response(found.content, 200, found.headers)


def _read_folder(folder: Traversable, prefix: str) -> list[tuple[str, ConsoleFile]]:
    """Return all files of the console by their path."""
    found: list[tuple[str, ConsoleFile]] = []
    for one in folder.iterdir():
        path = f"{prefix}{one.name}"
        if one.is_dir() and not one.name.startswith("__"):
            found += _read_folder(one, f"{path}/")
            continue
        kind = TYPES.get(path.rpartition(".")[2])
        if kind is not None:
            content = one.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            headers = HEADERS | {"Content-Type": kind, "ETag": etag}
            found.append((path, ConsoleFile(content, headers, gzip.compress(content, mtime=0))))
    return found
