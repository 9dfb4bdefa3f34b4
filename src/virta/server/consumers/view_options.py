"""
What a request for a live view asks for: its channel, key, filter, fields and aggregates.

Options begin with `$`; every other parameter is a term of the query:

    /channels/orders/live?status=paid&$key=/data/id&$fields=/data/total
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from virta.errors import FilterError, RequestError, ViewError
from virta.event.row_changes import ROOT_AUTO, ROOTS, KeyRule
from virta.filters import parse as parse_filter
from virta.filters.query_string import parse as parse_query_string
from virta.hub.resume.positions import parse_position
from virta.server.access.rules import require
from virta.server.access.scan_budget import VIEW, FilterPlace
from virta.server.http.routes import CHANNELS, form_decode, parse_channel_path
from virta.server.http.stream_options import split_options
from virta.views.aggregates import Selection
from virta.views.frames import Projection
from virta.views.view import ViewFilter, view_tag

if TYPE_CHECKING:
    from virta.access.principal import Principal
    from virta.filters import Filter
    from virta.hub.resume.positions import ResumePosition
    from virta.server.access.scan_budget import ScanLease
    from virta.server.service import Service

LIVE = re.compile(rb"/channels/[^/?]+/live/?(?:$|\?)")
ROWS = re.compile(rb"/channels/[^/?]+/rows(?:/[^/?]*)?/?(?:$|\?)")
OPTIONS = ("$filter", "$dialect", "$key", "$row", "$fields", "$select", "$group", "$since")
# Statuses of errors that are not the request's own fault, or concern what is in the log.
STATUS = {
    "too-many-rows": 503,
    "too-many-views": 503,
    "view-pass-failed": 503,
    "internal-failure": 500,
    "view-unkeyed": 409,
    "view-key-compacted": 409,
    "aggregate-not-a-number": 409,
}


class ViewRequest(NamedTuple):
    """A request for a view or its rows."""

    channel: str
    rule: KeyRule
    filter: ViewFilter
    fields: Projection | None
    selection: Selection | None
    since: str
    principal: str

    def tag(self, service: Service) -> str:
        """Return the tag of this view's positions."""
        return view_tag(
            service.log.id,
            service.views.epoch,
            self.channel,
            self.rule,
            self.filter,
            self.fields.text if self.fields else "",
            self.selection.text if self.selection else "",
        )

    def position(self, tag: str) -> tuple[int | None, str]:
        """Return the offset to resume from, or None and why it cannot be used."""
        if not self.since:
            return None, ""
        place: ResumePosition | None = parse_position(self.since)
        if place is None or place.tag != tag:
            return None, "unknown-position"
        return place.offset, ""


def read_view_request(
    service: Service,
    path: bytes,
    query: bytes,
    headers: dict[bytes, bytes],
    principal: Principal,
) -> ViewRequest:
    """
    Read `/channels/NAME/live` or `/channels/NAME/rows` and its query.

    The row filter of the principal is joined to the request's own filter.

    Raises:
        RequestError: 400 with the reason, or 403.
    """
    name = path[len(CHANNELS) :].split(b"/", 1)[0]
    channel = parse_channel_path(CHANNELS + name).channel
    row_filter = require(service, principal, "read", channel)
    raw, rest = split_options(query, OPTIONS)
    given = {name: form_decode(raw[name].encode(), code="invalid-option") for name in raw}
    if given.get("$group") and not given.get("$select"):
        raise RequestError(400, "invalid-select", "$group needs $select, such as $select=count")
    with_key = given.get("$key") or service.view_keys.get(channel, "")
    row = given.get("$row", ROOT_AUTO)
    if row not in ROOTS:
        raise RequestError(400, "invalid-option", f"$row is {row[:40]!r}: write auto or event")
    own = _filter(given, rest, service.config.max_query_terms)
    try:
        rule = KeyRule(with_key)
        fields = Projection(given["$fields"]) if given.get("$fields") else None
        selection = (
            Selection(given["$select"], given.get("$group", "")) if given.get("$select") else None
        )
    except ViewError as error:
        raise refusal_of(error) from None
    since = headers.get(b"last-event-id", b"").decode("latin-1") or given.get("$since", "")
    filter_ = ViewFilter(own, row_filter, row)
    return ViewRequest(channel, rule, filter_, fields, selection, since, principal.id)


def reserve_view(service: Service, request: ViewRequest) -> ScanLease:
    """Count the filter of a view; raise RequestError beyond the principal's budget."""
    # A channel may have a table for each key rule; each has an index of its own.
    place = FilterPlace(VIEW, f"{request.channel} {request.rule.text}")
    return service.scans.reserve(
        request.principal, place, [part for _, part in request.filter.parts]
    )


def release_view(service: Service, lease: ScanLease) -> None:
    """Release the filter of a view when it need not stand any longer: some time after its consumer has left."""
    asyncio.get_running_loop().call_later(service.views.limits.view_linger_s, lease.release)


def refusal_of(error: ViewError) -> RequestError:
    """Return a view's error as a refusal."""
    return RequestError(STATUS.get(error.code, 400), error.code, error.message)


def _filter(given: dict[str, str], query: bytes, terms_max: int) -> Filter:
    text = query.decode("latin-1")
    try:
        if "$filter" not in given:
            if "$dialect" in given:
                raise RequestError(400, "invalid-option", "$dialect needs $filter")

            return parse_query_string(text, terms_max=terms_max)
        if text:
            raise RequestError(400, "invalid-option", "write $filter or a query, not both")
        dialect = given.get("$dialect", "query-string")
        source: object = given["$filter"]
        if dialect in {"koncorde", "cloudevents"}:
            source = msgspec.json.decode(given["$filter"])
        return parse_filter(source, dialect)
    except FilterError as error:
        raise RequestError(400, error.code, error.message, **error.members) from error
    except msgspec.DecodeError as error:
        raise RequestError(400, "invalid-option", f"$filter is no JSON: {error}") from None
