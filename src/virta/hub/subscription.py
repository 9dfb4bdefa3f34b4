"""
A subscription: a filter on a channel with somewhere to deliver, and what happens when that is slow.

    LIVE      payloads go straight to the sink
    BLOCKED   the sink is full: payloads wait, at most `bytes_max` of them, then the policy speaks
    CLOSED    nothing is taken any more

`disconnect` ends the subscription when it is over its bytes or has taken nothing for too long;
`drop-oldest` forgets the oldest waiting payloads, counts them and tells the consumer. Either way the
memory of one slow consumer is bounded and nobody else waits for it. The sink is a transport's
affair; here it is three methods.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

from virta.hub.delivery import CHUNKED, SOCKETS, SSE_CHUNKED
from virta.hub.frames import chunk, named_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.filters import Filter

DISCONNECT = "disconnect"
DROP_OLDEST = "drop-oldest"


class SubscriberSink(Protocol):
    """Where a subscription's bytes go."""

    def write(self, payload: bytes) -> None:
        """Take bytes; never blocks."""

    def end(self, reason: str) -> None:
        """Close the way out: the subscription is over."""


class Nowhere:
    """
    The sink of a closed consumer.

    A consumer and its sink refer to each other: with this in the sink's place neither keeps the other in memory.
    """

    def write(self, payload: bytes) -> None:
        """Drop bytes."""

    def end(self, reason: str) -> None:
        """Do nothing."""


NOWHERE = Nowhere()


@dataclass(frozen=True)
class SlowPolicy:
    """What a consumer may cost when it does not keep up."""

    action: str = DISCONNECT
    bytes_max: int = 8 * 1024 * 1024
    seconds_max: float = 30.0


class ChannelSubscription:
    """One hearer of one channel."""

    __slots__ = (
        "_backlog",
        "backlog_bytes",
        "blocked_since",
        "channel",
        "closed",
        "dropped",
        "dropped_told",
        "encoding",
        "filter",
        "id",
        "policy",
        "put",
        "query",
        "reached",
        "sink",
        "tell_overflow",
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
    ) -> None:
        self.id = id_
        self.channel = channel
        self.filter = filter_
        self.query = query
        self.sink = sink
        # Where payloads go while nothing is in the way; a sink may name something quicker.
        self.put: Callable[[bytes], object] = sink.write
        self.written_at = 0.0  # seconds of the monotonic clock
        self.encoding = encoding
        self.policy = policy or SlowPolicy()
        self.closed = False
        self.dropped = 0
        self.dropped_told = 0
        # While history is sent: everything below this offset was sent. None: use the hub's position.
        self.reached: int | None = None
        # How a transport reports dropped events, if not by an `overflow` frame.
        self.tell_overflow: Callable[[dict[str, object]], None] | None = None
        self.backlog_bytes = 0
        self.blocked_since: float | None = None
        # Made when first needed: an empty queue costs more than everything else here.
        self._backlog: deque[tuple[bytes, int]] | None = None

    # What the hub calls.

    def send(self, payload: bytes, count: int) -> None:
        """Deliver a payload of `count` events, or let it wait."""
        if self.blocked_since is None:
            self.sink.write(payload)
        elif not self.closed:
            self._wait(payload, count)

    # What the transport calls.

    def block(self, now: float) -> None:
        """The sink is full: from now on payloads wait."""
        if self.blocked_since is None:
            self.blocked_since = now

    def unblock(self, now: float) -> None:
        """The sink has room again: hand over what waited, until it is full once more."""
        self.blocked_since = None
        if self.dropped > self.dropped_told:
            self._tell_dropped()
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
        """Drop pending events and the sink; later events are ignored."""
        self.closed = True
        self._backlog = None
        self.backlog_bytes = 0
        self.sink = NOWHERE
        self.put = NOWHERE.write

    def _wait(self, payload: bytes, count: int) -> None:
        if self._backlog is None:
            self._backlog = deque()
        backlog = self._backlog
        backlog.append((payload, count))
        self.backlog_bytes += len(payload)
        if self.backlog_bytes <= self.policy.bytes_max:
            return
        if self.policy.action == DISCONNECT:
            waiting, sink = self.backlog_bytes, self.sink
            self.close()
            sink.end(f"{waiting} bytes were waiting, {self.policy.bytes_max} are allowed")
            return
        while self.backlog_bytes > self.policy.bytes_max:
            oldest, lost = backlog.popleft()
            self.backlog_bytes -= len(oldest)
            self.dropped += lost

    def _tell_dropped(self) -> None:
        lost = self.dropped - self.dropped_told
        self.dropped_told = self.dropped
        data: dict[str, object] = {"dropped": lost, "total": self.dropped}
        if self.tell_overflow is not None:
            self.tell_overflow(data)
            return
        if self.encoding in SOCKETS:
            return  # a CloudEvents socket carries events only; /metrics has the count
        # No id: a consumer that resumes from its last id gets the events dropped here.
        frame = named_frame("overflow", data)
        self.sink.write(chunk(frame) if self.encoding in CHUNKED else frame)
