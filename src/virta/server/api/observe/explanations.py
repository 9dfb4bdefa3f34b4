"""
Why a filter matches: `/filters/explain`, `/filters/standing`, `/filters/count`.

`explain` gives the tree of an event's conditions, `standing` the filters of a channel that an event satisfies,
`count` how often a filter would have matched in the past. A count reads every record of the time asked for if there
are few, else evenly spaced windows of the log, so that it takes about a second on any log.
"""

from __future__ import annotations

import asyncio
import math
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.routing import Route

from virta.errors import RequestError
from virta.event import document_of
from virta.event.document import one_line_event
from virta.filters import parse
from virta.hub.delivery import Delivery
from virta.hub.event_matcher import (
    DOCUMENT,
    EVENT,
    matches_everything,
    restrict,
    root_of,
    single_matcher,
)
from virta.jsontext import check_depth, decode
from virta.server.access.rules import principal_of, refused, require, require_whole
from virta.server.api.handler import ApiHandler, ErrorsAsRefusals, read_body
from virta.server.api.observe.schemas import (
    CountBody,
    CountView,
    ExplainBody,
    ExplainView,
    StandingBody,
    StandingFilter,
    StandingView,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from virta.filters import Filter
    from virta.log import Log, Record

T = TypeVar("T")

BODY_BYTES_MAX = 8 * 1024 * 1024
STANDING_MAX = 100  # listed
TEXT_CHARS_MAX = 500  # of a filter's text in a list
# A count with at most this many records in its time reads all of them.
SCAN_RECORDS_MAX = 50_000
# Otherwise this many windows of so many records each, as long as there is time.
WINDOWS = 96
WINDOW_RECORDS = 512
COUNT_S_MAX = 1.5
# Fewer windows say nothing about the rest of the log.
WINDOWS_MIN = 8
# Of Student's distribution for 95 % with that few windows; 2.0 with all of them.
QUANTILE = 2.4
# Records that are matched in one call.
BLOCK_RECORDS = 512


class ExplanationsApi(ApiHandler):
    """Handlers of explanations."""

    def routes(self) -> list[Route]:
        return [
            Route("/filters/explain", self.explain, methods=["POST"]),
            Route("/filters/standing", self.standing, methods=["POST"]),
            Route("/filters/count", self.count, methods=["POST"]),
        ]

    async def explain(self, request: Request) -> Response:
        body = await read_typed(request, ExplainBody)
        if (body.event is msgspec.UNSET) == (body.events is msgspec.UNSET):
            raise RequestError(400, "invalid-test", "send either `event` or `events`")
        events = [body.event] if isinstance(body.event, dict) else body.events
        assert isinstance(events, list)
        with ErrorsAsRefusals():
            view = await asyncio.to_thread(explained, body.filter, _dialect(body.dialect), events)
        return self._json(view)

    async def standing(self, request: Request) -> Response:
        body = await read_typed(request, StandingBody)
        require_whole(self._service, principal_of(request), "admin", body.channel)
        event = body.event
        value = msgspec.json.encode(event)
        delivery = Delivery(
            body.channel, str(event.get("source", "")), str(event.get("id", "")), value
        )
        roots = {EVENT: event, DOCUMENT: decode(document_of(value, delivery.id))}
        hub, webhooks = self._service.hub, self._service.webhooks
        groups = hub.matching(body.channel, delivery)
        found = [
            StandingFilter("query", g.filter.id, _text_of(g), g.filter.dialect, g.size)
            for g in groups
        ]
        total = len(hub.groups(body.channel))
        index, _, collection = body.channel.partition("/")
        if collection and "/" not in collection:
            registry = self._service.registry
            with ErrorsAsRefusals():
                ids = await asyncio.to_thread(registry.test_event, index, collection, event)
            total += len(registry.ids(index, collection))
            for id_ in ids:
                registered = registry.get(id_)
                if registered is not None:
                    text = msgspec.json.encode(registered.source).decode()[:TEXT_CHARS_MAX]
                    streams = len(self._service.filter_streams.get(id_, ()))
                    found.append(StandingFilter("filter", id_, text, registered.dialect, streams))
        for hook in webhooks.hooks.values():
            if hook.channel != body.channel:
                continue
            total += 1
            if all(one.matches(roots[root_of(one)]) for one in hook.filters):
                text = hook.conditions[:TEXT_CHARS_MAX]
                found.append(StandingFilter("webhook", hook.id, text, "cloudevents", 1))
        return self._json(StandingView(total, len(found), found[:STANDING_MAX]))

    async def count(self, request: Request) -> Response:
        body = await read_typed(request, CountBody)
        service, principal = self._service, principal_of(request)
        row_filter = require(service, principal, "read", body.channel)
        with ErrorsAsRefusals():
            filter_ = await asyncio.to_thread(parse, body.filter, _dialect(body.dialect))
            filter_, rest = restrict(filter_, row_filter)
            if rest is not None:  # a filter over documents and one over events
                raise refused(service, principal, "read", body.channel)
            view = await asyncio.get_running_loop().run_in_executor(
                service.executor,
                counted,
                service.log,
                body.channel,
                filter_,
                body.seconds,
                body.bins,
            )
        return self._json(view)


async def read_typed(request: Request, kind: type[T]) -> T:
    """Return the body as this type; raise RequestError 400 that says what is wrong with it."""
    body = await read_body(request, BODY_BYTES_MAX)
    try:
        check_depth(body)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, "invalid-body", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "invalid-json-body", str(error)) from None


def _dialect(given: Any) -> str:
    return given if isinstance(given, str) else "koncorde"


def _text_of(group: Any) -> str:
    """Return the query of a group as its first subscriber wrote it."""
    for subscriptions in group.subscriptions.values():
        for subscription in subscriptions:
            return str(subscription.query)[:TEXT_CHARS_MAX]
    return ""


def explained(source: Any, dialect: str, events: Sequence[dict[str, Any]]) -> ExplainView:
    """Explain each event; raises FilterError for an invalid filter."""
    filter_ = parse(source, dialect)
    root = root_of(filter_)
    found = []
    for event in events:
        target: Any = event
        if root == DOCUMENT:
            value = msgspec.json.encode(event)
            target = msgspec.json.decode(document_of(value, str(event.get("id", ""))))
        explanation = filter_.explain(target)
        found.append(explanation.to_json() | {"reasons": explanation.reasons[:20]})
    return ExplainView(filter_.id, "document" if root == DOCUMENT else "event", found)


class _Tally:
    """Events and matches of one count."""

    def __init__(self, filter_: Filter, since_us: float, bin_us: float, bins: int) -> None:
        self._filter = filter_
        self._since_us = since_us
        self._bin_us = bin_us
        self.events = self.matched = 0
        self.bins = [0.0] * bins

    def add(self, records: Sequence[Record], weight: float = 1.0) -> None:
        for at in range(0, len(records), BLOCK_RECORDS):
            block = records[at : at + BLOCK_RECORDS]
            self.events += len(block)
            if matches_everything(self._filter):
                hits = list(block)
            else:
                events = [one_line_event(record) for record in block]
                matcher = single_matcher(self._filter, root_of(self._filter))
                found = zip(block, matcher.match(events), strict=True)
                hits = [record for record, ids in found if ids]
            self.matched += len(hits)
            for record in hits:
                index = int((record.timestamp - self._since_us) / self._bin_us)
                self.bins[min(max(index, 0), len(self.bins) - 1)] += weight


def counted(log: Log, channel: str, filter_: Filter, seconds: int, bins: int) -> CountView:
    """Count the events of a channel that a filter would have matched in the last `seconds`; blocks."""
    began = time.monotonic()
    now = datetime.now(UTC)
    since = now - timedelta(seconds=seconds)
    end = log.next_offset
    with log.read(start=since, end=end, on_gap="skip", on_corruption="skip") as found_at:
        first = found_at.position
    total = end - first
    tally = _Tally(filter_, since.timestamp() * 1e6, seconds * 1e6 / bins, bins)
    if total <= SCAN_RECORDS_MAX:
        with log.read(
            topics=[channel], start=first, end=end, on_gap="skip", on_corruption="skip"
        ) as reader:
            for records in reader.batches():
                tally.add(records)
        whole = [round(one) for one in tally.bins]
        return CountView(seconds, True, tally.events, tally.matched, 0, tally.events, whole)
    read = 0
    windows: list[tuple[int, int]] = []  # events and matches
    for window in range(WINDOWS):
        if windows and time.monotonic() - began > COUNT_S_MAX:
            break
        # Windows in an order that covers the whole time early, in case there is no time for all.
        at = first + int(total * ((window * 0.618034) % 1.0))
        stop = min(at + WINDOW_RECORDS, end)
        with log.read(
            topics=[channel], start=at, end=stop, on_gap="skip", on_corruption="skip"
        ) as reader:
            before = tally.events, tally.matched
            for records in reader.batches():
                tally.add(records)
        windows.append((tally.events - before[0], tally.matched - before[1]))
        read += stop - at
    scale = total / read
    events = tally.events * scale
    error = share_error(windows) * events
    return CountView(
        seconds, False, round(events), round(tally.matched * scale), math.ceil(error), tally.events,
        [round(one * scale) for one in tally.bins],
    )  # fmt: skip


def share_error(windows: Sequence[tuple[int, int]]) -> float:
    """
    Return the half-width of the 95 % interval of the share of events that match, at most 1.

    Neighbouring events resemble each other, so the windows are the sample, not their events: the width comes from how
    much the (events, matches) of the windows differ.
    """
    count = len(windows)
    events = sum(seen for seen, _ in windows)
    if count < WINDOWS_MIN or not events:
        return 1.0
    share = sum(matched for _, matched in windows) / events
    squares = sum((matched - share * seen) ** 2 for seen, matched in windows)
    width = QUANTILE * math.sqrt(squares * count / (count - 1)) / events
    return min(1.0, max(width, 3 / events))  # 3 / n: none of n matched, the rule of three
