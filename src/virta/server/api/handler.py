"""What the handlers of the API share: paths, reading a body, answering, and turning errors into refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import Response

from virta.errors import FilterError, HubError, LogError, RequestError
from virta.jsontext import check_depth
from virta.server.http.responses import log_refusal

if TYPE_CHECKING:
    from starlette.requests import Request

    from virta.server.service import Service

# Of a filter or a subscription.
DESCRIPTION_BYTES_MAX = 1024 * 1024
# Statuses of hub errors; all others are the request's fault.
HUB_STATUS = {"too-many-filters": 507, "too-many-handshakes": 429}


class AnythingConvertor(PathConvertor):
    """`{name:anything}` of a route: any text, also a line feed, which names may have and where Starlette's `path` ends."""

    regex = "(?s:.*)"


register_url_convertor("anything", AnythingConvertor())


class ApiHandler:
    """Handlers of some routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _json(self, value: Any, status: int = 200) -> Response:
        headers = self._service.responder.event_headers()
        return Response(msgspec.json.encode(value), status, headers)

    def _no_content(self) -> Response:
        headers = self._service.responder.event_headers()
        del headers["Content-Type"]
        return Response(None, 204, headers)


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return the body; raise RequestError as soon as it is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > bytes_max:
            raise RequestError(413, "body-too-large", maxBytes=bytes_max)
    return bytes(body)


async def read_json(request: Request, bytes_max: int = DESCRIPTION_BYTES_MAX) -> Any:
    body = await read_body(request, bytes_max)
    try:
        check_depth(body)
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "invalid-json-body", str(error)) from None


class ErrorsAsRefusals:
    """
    A context in which errors of filters, the hub and the log are raised as RequestError.

    Not a generator: its frame and the exception would refer to each other until the collector runs.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        refusal = None if error is None else _refusal_of(error)
        if refusal is not None:
            # The refusal says everything; the original would keep the frames of the request alive.
            raise refusal from None


def _refusal_of(error: BaseException) -> RequestError | None:
    if isinstance(error, FilterError):
        members: dict[str, Any] = dict(error.members)
        if error.keyword is not None:
            members["keyword"] = error.keyword
        if error.path is not None:
            members.setdefault("path", error.path)
        return RequestError(400, error.code, error.message, **members)
    if isinstance(error, HubError):
        return RequestError(HUB_STATUS.get(error.code, 400), error.code, error.message)
    return log_refusal(error) if isinstance(error, LogError) else None


def not_found(what: str) -> RequestError:
    return RequestError(404, "not-found", what)
