"""`GET /channels/NAME/rows` and `/rows/KEY`: the rows of a view as they are now."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.routing import Route

from virta.errors import LogError, RequestError, ViewError
from virta.event.row_changes import ROOT_AUTO, row_of
from virta.hub.resume.positions import ResumePosition
from virta.server.access.rules import principal_of
from virta.server.api.handler import ApiHandler, not_found
from virta.server.consumers.view_options import (
    read_view_request,
    refusal_of,
    release_view,
    reserve_view,
)
from virta.server.http.responses import log_refusal

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from virta.server.consumers.view_options import ViewRequest
    from virta.views.live_table import LiveTable
    from virta.views.view import View

# Rows of one response; a larger result is read as a live view, in pieces.
ROWS_MAX = 100_000
# Values that are read from the log at once.
READ_ROWS = 4096


class RowsApi(ApiHandler):
    """Snapshots of views."""

    def routes(self) -> list[Route]:
        return [
            Route("/channels/{name:anything}/rows", self.answer, methods=["GET"]),
            Route("/channels/{name:anything}/rows/{key:anything}", self.answer, methods=["GET"]),
        ]

    async def answer(self, request: Request) -> Response:
        """Return all rows, or one: names and keys may contain slashes, so the raw path decides."""
        parts = request.scope["raw_path"].strip(b"/").split(b"/")
        return await (self.rows(request) if len(parts) == 3 else self.row(request))

    async def rows(self, request: Request) -> Response:
        """Return all rows of a view, and the position from which it can be followed."""
        asked, live, view = await self._open(request)
        numbers = view.row_numbers()
        if len(numbers) > ROWS_MAX:
            raise RequestError(
                503,
                "too-many-rows",
                f"the view has {len(numbers)} rows, and one response at most {ROWS_MAX}: read "
                f"/channels/{asked.channel}/live, or narrow the filter",
                limit="ROWS_MAX",
            )
        table = live.table
        position = table.position
        found = [(table.keys[n], table.offsets[n]) for n in numbers]
        events = await self._events(asked, live, numbers)
        rows = [
            {"key": key, "offset": offset, "event": msgspec.Raw(event)}
            for (key, offset), event in zip(found, events, strict=True)
            if event is not None
        ]
        place = ResumePosition(asked.tag(self._service), position).text
        return self._json({"position": place, "rows": rows})

    async def row(self, request: Request) -> Response:
        """Return one row, if the view has it."""
        raw = request.scope["raw_path"].removesuffix(b"/").rsplit(b"/", 1)[1]
        key = unquote_to_bytes(raw).decode()
        asked, live, view = await self._open(request)
        if not live.table.has(view, key):
            raise not_found(f"no row of channel {asked.channel!r} has the key {key!r}")
        offset = live.table.row_offset(key)
        event = (await self._events(asked, live, [live.table.numbers[key]]))[0]
        if event is None:
            raise not_found(f"the row {key!r} is no longer in the log")
        return self._json({"key": key, "offset": offset, "event": msgspec.Raw(event)})

    async def _open(self, request: Request) -> tuple[ViewRequest, LiveTable, View]:
        scope = request.scope
        asked = read_view_request(
            self._service, scope["raw_path"], scope["query_string"], {}, principal_of(request)
        )
        if asked.selection is not None or asked.since:
            raise RequestError(
                400, "invalid-option", "rows have no $select, $group and $since: use /live"
            )
        lease = reserve_view(self._service, asked)
        try:
            live, view = await self._service.views.open(asked.channel, asked.rule, asked.filter)
        except ViewError as error:
            raise refusal_of(error) from error
        except LogError as error:
            raise log_refusal(error) from error
        finally:
            release_view(self._service, lease)
        return asked, live, view

    async def _events(
        self, asked: ViewRequest, live: LiveTable, numbers: list[int]
    ) -> list[bytes | None]:
        """Return what is shown of these rows as they are now; None for one that is no longer in the log."""
        table = live.table
        offsets = [table.offsets[n] for n in numbers]
        cached = [(table.offsets[n], table.values.get(n)) for n in numbers]
        values = {offset: value for offset, value in cached if value is not None}
        missing = [o for o in offsets if o not in values]
        for start in range(0, len(missing), READ_ROWS):
            values |= await live.read_values(missing[start : start + READ_ROWS])
        shown: list[bytes | None] = []
        for offset in offsets:
            event = values.get(offset)
            if event is not None and asked.filter.root == ROOT_AUTO:
                event = row_of(event)
            if event is not None and asked.fields is not None:
                event = asked.fields(event)
            shown.append(event)
        return shown
