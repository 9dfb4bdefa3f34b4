"""
The methods of both clients that open subscriptions; no I/O.

Opening one only records what to follow and where to start: the connection is made by the first iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from virta.client import calls
from virta.client.live import LiveState
from virta.client.resume import ResumeState

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.client.calls import Start

S = TypeVar("S")  # a subscription of events
L = TypeVar("L")  # the rows of a live view
M = TypeVar("M")  # a subscription of messages


class SubscribingClient(Generic[S, L, M]):
    """What `Client` and `AsyncClient` subscribe to; each says what its subscriptions are."""

    def subscribe(
        self,
        channel: str,
        query: str = "",
        *,
        start: Start | None = None,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> S:
        """
        Subscribe to the events of a channel that satisfy a query.

        Args:
            query: terms as in a URL, e.g. `status=paid&/total=>100`.
            start: "earliest", "latest", an offset, a position or a datetime; without it only new events.
            last_event_id: continue after this: the `id` of what was received.
            reconnect: come back after a cut; without it iteration ends there.
            on_gap: called with the server's report when events could not be resumed.
        """

        def path(start: Start | None) -> str:
            return calls.channel_path(channel, start, query)

        return self._subscription(
            ResumeState(path, start, last_event_id, reconnect=reconnect, on_gap=on_gap)
        )

    def live(
        self,
        channel: str,
        query: str = "",
        *,
        filter: str = "",  # noqa: A002 - as in virta.views.open
        dialect: str = "",
        key: str = "",
        row: str = "",
        fields: str = "",
        select: str = "",
        group: str = "",
        since: str | None = None,
        reconnect: bool = True,
    ) -> L:
        """
        Follow the rows of a channel that satisfy a query: `rows` stays current while changes are iterated.

        Args:
            query: terms as in a URL, e.g. `status=paid&/total=>100`.
            filter, dialect: a filter in another dialect instead, as text.
            key: JSON pointer to the key of a row, from the event's root.
            row: "event" shows Debezium's events as they are.
            fields: JSON pointers, separated by commas, to what is sent.
            select, group: aggregates, as in `count,sum(/data/total)` and `/data/country`; see `groups`.
            since: a position to continue from; then `rows` has only what changed since.
            reconnect: come back after a cut; without it iteration ends there.
        """
        options = {
            "filter": filter,
            "dialect": dialect,
            "key": key,
            "row": row,
            "fields": fields,
            "select": select,
            "group": group,
        }
        return self._live_rows(LiveState(channel, query, options, since, reconnect=reconnect))

    def subscribe_streams(
        self,
        *streams: str,
        max_queued: int = 250,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> M:
        """
        Subscribe to messages as (stream id, text); needs the `websockets` package. `close` ends it.

        When the connection is cut it reconnects and continues after the last message it returned.
        """
        path = calls.streams_path(streams, max_queued)
        return self._stream_subscription(
            ResumeState(lambda _: path, None, last_event_id, reconnect=reconnect, on_gap=on_gap)
        )

    def _subscription(self, state: ResumeState) -> S:
        raise NotImplementedError

    def _live_rows(self, state: LiveState) -> L:
        raise NotImplementedError

    def _stream_subscription(self, state: ResumeState) -> M:
        raise NotImplementedError


class SubscribingFilters(Generic[S]):
    """What `Filters` and `AsyncFilters` subscribe to."""

    def events(
        self,
        *ids: str,
        start: Start | None = None,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> S:
        """Subscribe to the events that registered filters let through."""

        def path(start: Start | None) -> str:
            return calls.filter_events_path(ids, start)

        return self._subscription(
            ResumeState(path, start, last_event_id, reconnect=reconnect, on_gap=on_gap)
        )

    def _subscription(self, state: ResumeState) -> S:
        raise NotImplementedError
