"""
The filters API: Koncorde's register, test, remove and validate over HTTP, in any dialect.

A body with a member `filter` names its `dialect` beside it; any other body is a Koncorde filter, as
the seed's API takes it. Everything that can block (parsing large filters, syncing the registration)
happens in a thread. Streams of a filter's events are a hot route (`virta.server.http.requests`).
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from virta.errors import FilterError, HubError, LogError, RequestError
from virta.filters import DIALECTS, parse
from virta.jsontext import check_depth
from virta.server.http.responses import log_refusal

if TYPE_CHECKING:
    from starlette.requests import Request

    from virta.server.service import Service

FILTER_BODY_BYTES_MAX = 1024 * 1024
DIALECT_DEFAULT = "koncorde"
NAME_CHARS_MAX = 256  # of an index or a collection
VALIDATE = "validate"
EVENTS = "events"
EVENT_STREAM = "text/event-stream"
FILTER_ID = re.compile(r"[0-9a-f]{64}")


def refused_filter(error: FilterError) -> RequestError:
    """A filter error with everything it knows about its place."""
    members: dict[str, Any] = dict(error.members)
    if error.keyword is not None:
        members["keyword"] = error.keyword
    if error.path is not None:
        members.setdefault("path", error.path)
    return RequestError(400, error.code, error.message, **members)


async def read_json(request: Request, limit: int) -> Any:
    """The body as JSON, counted while it comes."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise RequestError(413, "body-too-large", maxBytes=limit)
    try:
        check_depth(body)
        return msgspec.json.decode(bytes(body))
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "invalid-json-body", str(error)) from None


class FiltersApi:
    """Handlers under `/filters`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        place = "/filters/{index}/{collection}"
        return [
            Route("/filters/validate", self.validate, methods=["POST"]),
            Route("/filters/{id}", self.show, methods=["GET"]),
            Route("/filters/{id}", self.remove, methods=["DELETE"]),
            Route(place, self.register, methods=["POST"]),
            Route(place, self.exists, methods=["HEAD"]),
            Route(place, self.ids, methods=["GET"]),
            Route(place + "/test", self.test, methods=["POST"]),
        ]

    async def register(self, request: Request) -> Response:
        source, dialect = _envelope(await read_json(request, FILTER_BODY_BYTES_MAX))
        index, collection = _place(request)
        answer = await self._quietly(
            self._service.registry.register, index, collection, source, dialect
        )
        return self._json(answer, 200 if answer["diff"] is False else 201)

    async def ids(self, request: Request) -> Response:
        """The ids of a collection; who wants a stream of `events` has named what is no filter."""
        if (
            request.path_params["collection"] == EVENTS
            and EVENT_STREAM in request.headers.get("accept", "").lower()
        ):
            index = request.path_params["index"]
            raise RequestError(404, "not-found", f"no filter has the id {index}")
        return self._json({"ids": self._service.registry.ids(*_place(request))})

    async def exists(self, request: Request) -> Response:
        there = self._service.registry.exists(*_place(request))
        return Response(None, 200 if there else 404, self._service.responder.event_headers())

    async def show(self, request: Request) -> Response:
        registered = self._service.registry.get(_filter_id(request))
        if registered is None:
            raise RequestError(404, "not-found", "no filter has this id")
        return self._json(registered.describe())

    async def remove(self, request: Request) -> Response:
        """Removing what is not there is no error, as in the ancestor."""
        id_ = _filter_id(request)
        if await self._quietly(self._service.registry.remove, id_):
            self._service.end_filter_streams(id_)
        headers = self._service.responder.event_headers()
        return Response(None, 204, {k: v for k, v in headers.items() if k != "Content-Type"})

    async def validate(self, request: Request) -> Response:
        source, dialect = _envelope(await read_json(request, FILTER_BODY_BYTES_MAX))
        filter_ = await self._quietly(parse, source, dialect)
        canonical = msgspec.Raw(filter_.canonical().encode())
        return self._json({"valid": True, "id": filter_.id, "canonical": canonical})

    async def test(self, request: Request) -> Response:
        """Which filters hold: for `{"event": …}`, or `{"document": …, "documentId": …}`."""
        body = await read_json(request, self._service.config.max_body_size_bytes)
        index, collection = _place(request)
        registry = self._service.registry
        if not isinstance(body, dict) or not isinstance(body.get("event", {}), dict):
            raise _invalid_test()
        document_id = body.get("documentId")
        if document_id is not None and not isinstance(document_id, str):
            raise RequestError(400, "invalid-document-id", "documentId is a text")
        if "event" in body:
            found = await self._quietly(registry.test_event, index, collection, body["event"])
        elif "document" in body:
            found = await self._quietly(
                registry.test_document, index, collection, body["document"], document_id
            )
        else:
            raise _invalid_test()
        return self._json({"ids": found})

    async def _quietly(self, function: Any, *arguments: Any) -> Any:
        """Run in a thread, with the product's errors as answers."""
        try:
            return await asyncio.to_thread(function, *arguments)
        except FilterError as error:
            raise refused_filter(error) from error
        except HubError as error:
            raise RequestError(507, error.code, error.message) from error
        except LogError as error:
            raise log_refusal(error) from error

    def _json(self, value: Any, status: int = 200) -> Response:
        headers = self._service.responder.event_headers()
        return Response(msgspec.json.encode(value), status, headers)


def _invalid_test() -> RequestError:
    return RequestError(
        400, "invalid-test", 'send {"document": …, "documentId": …} or {"event": {…}}'
    )


def _envelope(body: Any) -> tuple[Any, str]:
    if not isinstance(body, dict):
        raise RequestError(400, "invalid-filter", "the body is a JSON object")
    if "filter" not in body:
        return body, DIALECT_DEFAULT
    dialect = body.get("dialect", DIALECT_DEFAULT)
    if not isinstance(dialect, str) or dialect not in DIALECTS:
        known = ", ".join(DIALECTS)
        raise RequestError(400, "unknown-dialect", f"{dialect!r} is no dialect: one of {known}")
    unknown = set(body) - {"filter", "dialect"}
    if unknown:
        raise RequestError(400, "unknown-member", f"{min(unknown)!r} beside filter and dialect")
    return body["filter"], dialect


def _place(request: Request) -> tuple[str, str]:
    for part in ("index", "collection"):
        name = request.path_params[part]
        if len(name) > NAME_CHARS_MAX:
            raise RequestError(
                400,
                "invalid-name",
                f"the name of the {part} has {len(name)} characters: at most {NAME_CHARS_MAX}",
            )
    return request.path_params["index"], request.path_params["collection"]


def _filter_id(request: Request) -> str:
    """The id in the path; what looks like none is the name of another route, or of nothing."""
    id_ = str(request.path_params["id"])
    if id_ == VALIDATE:
        raise HTTPException(405, headers={"Allow": "POST"})
    if not FILTER_ID.fullmatch(id_):
        raise RequestError(404, "not-found", "no filter has this id")
    return id_
