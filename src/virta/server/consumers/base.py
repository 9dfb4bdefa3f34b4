"""
What consumers over server-sent events and WebSockets share: history, backpressure, deadlines.

    [history from a place in the log] ──► attached to the hub: events as they are published

A consumer is the sink of its subscriber in the hub and hands the hub's bytes to the transport. While the
transport is full the subscriber queues events, and its policy decides what happens to a consumer that
does not read (`virta.hub.subscription`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from virta.errors import FilterError, HubError, LogError, RequestError
from virta.filters.query_string import parse
from virta.hub.stream_consumer import StreamConsumer
from virta.server.access.scan_budget import STREAM, FilterPlace

if TYPE_CHECKING:
    from virta.filters import Filter
    from virta.hub.resume.positions import Place
    from virta.hub.resume.replay import Start
    from virta.hub.subscription import ChannelSubscription
    from virta.server.access.scan_budget import ScanLease
    from virta.server.http.connection import HttpConnection

# Why a stream ends whose principal has expired or was revoked.
ACCESS_ENDED = "access-ended"


class HttpConsumer:
    """One connection that receives events."""

    __slots__ = (
        "_connection",
        "_drained",
        "_principal",
        "_replay",
        "_scans",
        "_service",
        "subscriber",
    )

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._service = connection.service
        self._principal = connection.principal
        self.subscriber: ChannelSubscription | StreamConsumer | None = None
        self._replay: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None  # done when the transport accepts bytes
        self._scans: ScanLease | None = None  # its filter, if every event has to test it

    # Called by the hub.

    def write(self, payload: bytes) -> None:
        """Send bytes that the hub has framed."""
        raise NotImplementedError

    def end(self, reason: str) -> None:
        """Disconnect a consumer that reads too slowly; without a message, since it would not read it."""
        self._detach()
        self._service.hub.slow_disconnects += 1
        client = getattr(self.subscriber, "id", None)
        self._service.logger.info("consumer_dropped", client=client, reason=reason)
        self._connection.transport.abort()

    # Called by the connection.

    def data_received(self, data: bytes) -> None:
        """Ignore what a client sends that can only receive."""

    def pause_writing(self) -> None:
        """Queue events from now on: the transport's buffer is full."""
        if self.subscriber is None:
            return
        self.subscriber.block(self._connection.loop.time())
        deadline = min(self.subscriber.overdue_at, self._connection.deadline)
        self._service.timers.set(self._connection, deadline)

    def resume_writing(self) -> None:
        """Send what was queued."""
        if self.subscriber is not None:
            self.subscriber.unblock(self._connection.loop.time())
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def expired(self, now: float) -> None:
        """Disconnect a consumer that did not read in time, else ping it if that is due."""
        subscriber = self.subscriber
        if subscriber is not None and subscriber.closed:
            self._connection.transport.abort()  # the end of the stream is written: nothing may follow
            return
        if self._access_ended():
            self._end_access()
            return
        if subscriber is not None and subscriber.overdue_at <= now:
            waited = subscriber.policy.seconds_max  # type: ignore[union-attr]  # streams are never overdue
            self.end(f"nothing was taken for {waited} s")
            return
        deadline = self._ping(now)
        if deadline is None:
            return
        if subscriber is not None:
            deadline = min(deadline, subscriber.overdue_at)
        self._service.timers.set(self._connection, max(deadline, now))

    def recheck_access(self) -> None:
        """End the stream if its principal has lost its rights; called when tokens have changed."""
        closed = self.subscriber is not None and self.subscriber.closed
        if not closed and self._access_ended():
            self._end_access()

    def _end_access(self) -> None:
        self._fail(ACCESS_ENDED)
        self._connection.transport.close()

    def _access_ended(self) -> bool:
        credentials = self._service.auth.credentials
        return credentials is not None and not credentials.is_active(self._principal)

    def connection_lost(self) -> None:
        """Release everything; a task and its exception refer to the consumer, so they go first."""
        replay, self._replay, self._drained = self._replay, None, None
        if replay is not None:
            replay.cancel()
        self._detach()
        self.subscriber = None

    @property
    def address(self) -> str | None:
        """The peer's address and port; None if the transport has none."""
        peer = self._connection.transport.get_extra_info("peername")
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else None

    def disconnect(self, reason: str) -> None:
        """End the stream because an operator asked for it; the client may come back."""
        raise NotImplementedError

    # For subclasses.

    def _ping(self, now: float) -> float | None:
        """Send a ping if it is due; return when the next one is, or None if the connection is closing."""
        raise NotImplementedError

    def _send_start(self, start: Start) -> None:
        """Send where history starts, and a gap if records before it are missing."""
        raise NotImplementedError

    def _send_gap(self, gap: dict[str, object], offset: int) -> None:
        raise NotImplementedError

    def _fail(self, code: str) -> None:
        """End the stream after an error of the server."""
        raise NotImplementedError

    def _reserve(self, subscription: ChannelSubscription) -> None:
        """Count the filter of a subscription; raise RequestError beyond the principal's budget."""
        place = FilterPlace(STREAM, subscription.channel)
        scans = self._service.scans
        self._scans = scans.reserve(self._principal.id, place, [subscription.filter])

    def _attach(self) -> None:
        """Receive events from the hub's present position on."""
        hub, subscriber = self._service.hub, self.subscriber
        if isinstance(subscriber, StreamConsumer):
            hub.attach_streams(subscriber)
        elif subscriber is not None:
            hub.attach(subscriber)

    def _detach(self) -> None:
        hub, subscriber = self._service.hub, self.subscriber
        if isinstance(subscriber, StreamConsumer):
            hub.detach_streams(subscriber)
        elif subscriber is not None:
            hub.detach(subscriber)
        if self._scans is not None:
            self._scans.release()

    def _replay_from(self, channel: str, place: Place) -> None:
        """Send history from a place in the log, then attach."""
        self._replay = asyncio.ensure_future(self._catch_up(channel, place))

    async def _catch_up(self, channel: str, place: Place) -> None:
        service, subscriber = self._service, self.subscriber
        assert subscriber is not None
        try:
            start = await service.replayer.find(channel, place)
            if subscriber.closed:
                return
            self._send_start(start)
            await service.replayer.run(
                subscriber, start, drained=self._until_drained, report_gap=self._send_gap
            )
        except (LogError, HubError, FilterError) as error:
            service.logger.warning("replay_failed", code=error.code, reason=error.message)
            self._fail(error.code)
        except Exception:
            # Unexpected; without an end the consumer would wait for events that never come.
            service.logger.exception("replay_failed")
            self._fail("internal-failure")

    def _until_drained(self) -> asyncio.Future[None] | None:
        """Return what to wait for before more history is sent; None if nothing."""
        if self.subscriber is None or not self.subscriber.blocked:
            return None
        if self._drained is None:
            self._drained = self._connection.loop.create_future()
        return self._drained

    def _offset(self) -> int:
        """Return the offset below which everything was sent, if no event is queued."""
        reached = None if self.subscriber is None else self.subscriber.reached
        return self._service.hub.position if reached is None else reached


def parse_query(text: str, terms_max: int) -> Filter:
    """
    Parse the query of a channel.

    Raises:
        RequestError: 400 with the code and members of the query-string dialect.
    """
    try:
        return parse(text, terms_max=terms_max)
    except FilterError as error:
        raise RequestError(400, error.code, error.message, **error.members) from error
