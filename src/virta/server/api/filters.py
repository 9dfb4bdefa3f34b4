"""
The filters API: Koncorde's register, test, remove and validate over HTTP, in any dialect.

A body with a member `filter` names its `dialect` beside it; any other body is a Koncorde filter, as
Koncorde's own API accepts it. Everything that can block (parsing large filters, syncing the registration)
runs in a thread. The stream of a filter's events is served by `virta.server.http.requests`.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from virta.errors import RequestError
from virta.filters import DIALECTS, parse
from virta.filters.tree import conditions
from virta.match import filter_cost
from virta.server.access.rules import principal_of, require
from virta.server.access.scan_budget import REGISTERED, FilterPlace
from virta.server.api.description.schemas import FilterIds, FilterPrice, FilterValidation
from virta.server.api.handler import ApiHandler, ErrorsAsRefusals, not_found, read_json

if TYPE_CHECKING:
    from starlette.requests import Request

DIALECT_DEFAULT = "koncorde"
NAME_CHARS_MAX = 256  # of an index or a collection
# Routes below /filters that are no ids.
ACTIONS = frozenset({"validate", "explain", "standing", "count"})
EVENTS = "events"
EVENT_STREAM = "text/event-stream"
FILTER_ID = re.compile(r"[0-9a-f]{64}")


class FiltersApi(ApiHandler):
    """Handlers under `/filters`."""

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
        source, dialect = _source_and_dialect(await read_json(request))
        index, collection = _place(request)
        service, owner = self._service, principal_of(request).id
        filter_ = await _in_thread(parse, source, dialect)
        known = service.registry.find(index, collection, filter_)
        place = FilterPlace(REGISTERED, f"{index}/{collection}")
        lease = service.scans.reserve(owner, place, [filter_] if known is None else [])
        try:
            register = partial(service.registry.register, owner=owner, filter_=filter_)
            answer = await _in_thread(register, index, collection, source, dialect)
        except BaseException:
            lease.release()
            raise
        if answer["diff"] is False:
            lease.release()
            return self._json(answer)
        service.filter_leases[answer["id"]] = lease
        if service.registry.get(answer["id"]) is None:  # removed meanwhile
            service.filter_removed(answer["id"])
        return self._json(answer, 201)

    async def ids(self, request: Request) -> Response:
        """Return the ids of a collection; a request for a stream of `events` names no filter."""
        if (
            request.path_params["collection"] == EVENTS
            and EVENT_STREAM in request.headers.get("accept", "").lower()
        ):
            raise not_found(f"no filter has the id {request.path_params['index']}")
        return self._json(FilterIds(self._service.registry.ids(*_place(request))))

    async def exists(self, request: Request) -> Response:
        there = self._service.registry.exists(*_place(request))
        return Response(None, 200 if there else 404, self._service.responder.event_headers())

    async def show(self, request: Request) -> Response:
        registered = self._service.registry.get(_filter_id(request))
        if registered is None:
            raise not_found("no filter has this id")
        require(self._service, principal_of(request), "filters", registered.channel)
        return self._json(registered.describe())

    async def remove(self, request: Request) -> Response:
        """Remove a filter; as in Koncorde, it is no error if there is none."""
        id_ = _filter_id(request)
        registered = self._service.registry.get(id_)
        if registered is not None:
            principal = principal_of(request)
            require(self._service, principal, "filters", registered.channel)
            channel = registered.channel
            self._service.audit.acted("filter_removed", principal.id, id=id_, channel=channel)
        if await _in_thread(self._service.registry.remove, id_):
            self._service.filter_removed(id_)
        return self._no_content()

    async def validate(self, request: Request) -> Response:
        source, dialect = _source_and_dialect(await read_json(request))
        filter_ = await _in_thread(parse, source, dialect)
        cost = await _in_thread(filter_cost, filter_)
        standing = [
            group.size for _, group in self._service.hub.groups() if group.filter.id == filter_.id
        ]
        view = FilterValidation(
            valid=True,
            id=filter_.id,
            canonical=msgspec.Raw(filter_.canonical().encode()),
            conditions=sum(1 for _ in conditions(filter_.tree)),
            subscribers=sum(standing),
            cost=FilterPrice(
                cost.kind,
                cost.scans,
                list(cost.found_by),
                list(cost.python),
                list(cost.python_at_times),
            ),
        )
        return self._json(view)

    async def test(self, request: Request) -> Response:
        """Return which filters match `{"event": {…}}` or `{"document": {…}, "documentId": …}`."""
        body = await read_json(request, self._service.config.max_body_size_bytes)
        index, collection = _place(request)
        if not isinstance(body, dict):
            raise _invalid_test()
        if not all(isinstance(body.get(name, {}), dict) for name in ("event", "document")):
            raise _invalid_test()
        document_id = body.get("documentId")
        if document_id is not None and not isinstance(document_id, str):
            raise RequestError(400, "invalid-document-id", "documentId is a text")
        registry = self._service.registry
        if "event" in body:
            found = await _in_thread(registry.test_event, index, collection, body["event"])
        elif "document" in body:
            found = await _in_thread(
                registry.test_document, index, collection, body["document"], document_id
            )
        else:
            raise _invalid_test()
        return self._json(FilterIds(found))


async def _in_thread(function: Any, *arguments: Any) -> Any:
    with ErrorsAsRefusals():
        return await asyncio.to_thread(function, *arguments)


def _invalid_test() -> RequestError:
    return RequestError(
        400, "invalid-test", 'send {"document": {…}, "documentId": …} or {"event": {…}}'
    )


def _source_and_dialect(body: Any) -> tuple[Any, str]:
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
    """Return the index and the collection of the path."""
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
    """Return the id of the path; anything else is the name of another route, or of nothing."""
    id_ = str(request.path_params["id"])
    if id_ in ACTIONS:
        raise HTTPException(405, headers={"Allow": "POST"})
    if not FILTER_ID.fullmatch(id_):
        raise not_found("no filter has this id")
    return id_
