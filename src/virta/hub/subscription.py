"""
A subscription to a channel: a filter, a sink, and a policy for a sink that is slow.

    LIVE      payloads go straight to the sink
    BLOCKED   the sink is full: payloads are queued, at most `bytes_max` of them, then the policy applies
    CLOSED    payloads are dropped

`disconnect` ends the subscription when its queue is over the limit or the sink was full for too long. `drop-oldest`
drops the oldest queued payloads, counts them and reports the count to the consumer. Either way the memory of one
slow consumer is bounded and no other consumer waits for it. A transport implements the sink.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

from virta.hub.delivery import CHUNKED, SOCKETS, SSE_CHUNKED
from virta.hub.event_matcher import restrict
from virta.hub.frames import chunk, named_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.filters import Filter

DISCONNECT = "disconnect"
DROP_OLDEST = "drop-oldest"


class SubscriberSink(Protocol):
    """Where a subscription's bytes go."""

    def write(self, payload: bytes) -> None:
        """Send bytes; never blocks."""

    def end(self, reason: str) -> None:
        """Close the connection: the subscription has ended."""


class ClosedSink:
    """
    The sink of a closed consumer.

    A consumer and its sink refer to each other: this one replaces the sink, so that neither stays in memory.
    """

    def write(self, payload: bytes) -> None:
        """Drop bytes."""

    def end(self, reason: str) -> None:
        """Do nothing."""


CLOSED_SINK = ClosedSink()


@dataclass(frozen=True)
class SlowPolicy:
    """Limits of a consumer that does not keep up, and what happens beyond them."""

    action: str = DISCONNECT
    bytes_max: int = 8 * 1024 * 1024
    seconds_max: float = 30.0


class ChannelSubscription:
    """One subscriber of one channel."""

    __slots__ = (
        "_backlog",
        "backlog_bytes",
        "blocked_since",
        "channel",
        "closed",
        "dropped",
        "dropped_reported",
        "encoding",
        "filter",
        "id",
        "policy",
        "put",
        "query",
        "reached",
        "report_overflow",
        "row_filter",
        "sent_before",
        "since",
        "sink",
        "written_at",
    )

    def __init__(
        self,
        id_: str,
        channel: str,
        filter_: Filter,
        sink: SubscriberSink,
        *,
        query: str = "",
        encoding: int = SSE_CHUNKED,
        policy: SlowPolicy | None = None,
        row_filter: Filter | None = None,
    ) -> None:
        self.id = id_
        self.channel = channel
        # The query and the subscriber's row filter as one; what cannot be joined is checked after it.
        self.filter, self.row_filter = restrict(filter_, row_filter)
        self.query = query
        self.sink = sink
        # Called with payloads while not blocked; a transport may set something faster.
        self.put: Callable[[bytes], object] = sink.write
        self.written_at = 0.0  # seconds of the monotonic clock
        self.since = 0.0  # when it was attached, seconds since 1970
        self.sent_before = 0  # events that its group had sent when it was attached
        self.encoding = encoding
        self.policy = policy or SlowPolicy()
        self.closed = False
        self.dropped = 0
        self.dropped_reported = 0
        # While history is sent: everything below this offset was sent. None: use the hub's position.
        self.reached: int | None = None
        # Reports dropped events, if the transport does not do it by an `overflow` frame.
        self.report_overflow: Callable[[dict[str, object]], None] | None = None
        self.backlog_bytes = 0
        self.blocked_since: float | None = None
        # Created on demand: an empty deque takes more memory than everything else here.
        self._backlog: deque[tuple[bytes, int]] | None = None

    # Called by the hub.

    def send(self, payload: bytes, count: int) -> None:
        """Write a payload of `count` events, or queue it while blocked."""
        if self.blocked_since is None:
            self.sink.write(payload)
        elif not self.closed:
            self._queue(payload, count)

    # Called by the transport.

    def block(self, now: float) -> None:
        """Queue payloads from now on: the sink is full."""
        if self.blocked_since is None:
            self.blocked_since = now

    def unblock(self, now: float) -> None:
        """Write queued payloads until the sink is full again."""
        self.blocked_since = None
        if self.dropped > self.dropped_reported:
            self._report_dropped()
        backlog = self._backlog
        while backlog and self.blocked_since is None and not self.closed:
            payload, _ = backlog.popleft()
            self.backlog_bytes -= len(payload)
            self.sink.write(payload)
        if backlog and self.blocked_since is None:
            self.blocked_since = now

    @property
    def blocked(self) -> bool:
        """Whether the sink is full and payloads are queued."""
        return self.blocked_since is not None

    @property
    def overdue_at(self) -> float:
        """When the policy disconnects a consumer that reads nothing; infinity if it need not read."""
        if self.blocked_since is None or self.policy.action != DISCONNECT:
            return inf
        return self.blocked_since + self.policy.seconds_max

    def close(self) -> None:
        """Drop queued events and the sink; later events are ignored."""
        self.closed = True
        self._backlog = None
        self.backlog_bytes = 0
        self.sink = CLOSED_SINK
        self.put = CLOSED_SINK.write

    def _queue(self, payload: bytes, count: int) -> None:
        if self._backlog is None:
            self._backlog = deque()
        backlog = self._backlog
        backlog.append((payload, count))
        self.backlog_bytes += len(payload)
        if self.backlog_bytes <= self.policy.bytes_max:
            return
        if self.policy.action == DISCONNECT:
            queued, sink = self.backlog_bytes, self.sink
            self.close()
            sink.end(f"{queued} bytes were waiting, {self.policy.bytes_max} are allowed")
            return
        while self.backlog_bytes > self.policy.bytes_max:
            oldest, lost = backlog.popleft()
            self.backlog_bytes -= len(oldest)
            self.dropped += lost

    def _report_dropped(self) -> None:
        lost = self.dropped - self.dropped_reported
        self.dropped_reported = self.dropped
        data: dict[str, object] = {"dropped": lost, "total": self.dropped}
        if self.report_overflow is not None:
            self.report_overflow(data)
            return
        if self.encoding in SOCKETS:
            return  # a CloudEvents socket carries events only; /metrics has the count
        # No id: a consumer that resumes from its last id gets the events dropped here.
        frame = named_frame("overflow", data)
        self.sink.write(chunk(frame) if self.encoding in CHUNKED else frame)
