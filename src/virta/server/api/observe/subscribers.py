"""`/subscribers`: the standing queries, who waits behind each, and disconnecting one."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from starlette.routing import Route

from virta.clock import time_text
from virta.server.access.rules import principal_of
from virta.server.api.handler import ApiHandler, not_found
from virta.server.api.observe.schemas import ClientView, QueryView, SubscriberPage
from virta.server.consumers.base import HttpConsumer
from virta.server.consumers.websocket import WebSocket

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from virta.hub.channel import FilterGroup
    from virta.hub.subscription import ChannelSubscription

QUERIES_MAX = 500
CLIENTS_MAX = 100  # listed for one query
DISCONNECTED = "disconnected"


class SubscribersApi(ApiHandler):
    """Handlers under `/subscribers`."""

    def routes(self) -> list[Route]:
        return [
            Route("/subscribers", self.list, methods=["GET"]),
            Route("/subscribers/{id}", self.disconnect, methods=["DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        hub, rights = self._service.hub, principal_of(request).rights
        found = hub.groups(request.query_params.get("channel"))
        views = [self._query(c, group) for c, group in found if rights.allows_whole("admin", c)]
        views.sort(key=lambda view: (-view.waiting_bytes, -view.subscribers, view.channel))
        streams = hub.stream_consumer_count if rights.has_all("admin") else 0
        return self._json(SubscriberPage(len(views), views[:QUERIES_MAX], streams))

    async def disconnect(self, request: Request) -> Response:
        subscription = self._service.hub.subscription(request.path_params["id"])
        sink = None if subscription is None else subscription.sink
        rights = principal_of(request).rights
        if (
            subscription is None
            or not isinstance(sink, HttpConsumer)
            or not rights.allows_whole("admin", subscription.channel)
        ):
            raise not_found("no subscriber has this id")
        sink.disconnect(DISCONNECTED)
        acted = self._service.audit.acted
        acted("subscriber_disconnected", principal_of(request).id, id=request.path_params["id"])
        return self._no_content()

    def _query(self, channel: str, group: FilterGroup) -> QueryView:
        everyone = list(chain.from_iterable(group.subscriptions.values()))
        return QueryView(
            channel=channel,
            filter_id=group.filter.id,
            dialect=group.filter.dialect,
            query=everyone[0].query if everyone else "",
            subscribers=len(everyone),
            matched=group.sent,
            waiting_bytes=sum(one.backlog_bytes for one in everyone),
            clients=[self._client(one, group) for one in islice(everyone, CLIENTS_MAX)],
        )

    def _client(self, one: ChannelSubscription, group: FilterGroup) -> ClientView:
        now = self._service.timers.now
        sink = one.sink
        position = self._service.hub.position
        return ClientView(
            id=one.id,
            transport="websocket" if isinstance(sink, WebSocket) else "sse",
            address=sink.address if isinstance(sink, HttpConsumer) else None,
            since=time_text(int(one.since * 1e6)),
            sent=group.sent - one.sent_before,
            dropped=one.dropped,
            waiting_bytes=one.backlog_bytes,
            waiting_seconds=0.0 if one.blocked_since is None else max(0.0, now - one.blocked_since),
            lag=0 if one.reached is None else max(0, position - one.reached),
        )
