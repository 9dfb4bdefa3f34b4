"""
A consumer of streams: all stream subscriptions of one connection, with Subtub's one bounded queue.

Messages go straight to the sink. While the sink is full they are queued, at most `max_queued` copies; beyond that the
oldest is dropped and counted. Publishers never wait.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from virta.hub.frames import websocket_text, with_member
from virta.hub.subscription import CLOSED_SINK

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.hub.delivery import Delivery
    from virta.hub.subscription import SubscriberSink
    from virta.streams import Segments

QUEUED_MIN, QUEUED_MAX = 1, 250


class StreamConsumer:
    """One connection's subscriptions and its queue."""

    overdue_at = inf  # its queue is bounded: it may read as slowly as it likes

    __slots__ = (
        "_queue",
        "blocked",
        "closed",
        "dropped",
        "dropped_reported",
        "positions",
        "put",
        "reached",
        "report_drops",
        "sink",
        "streams",
    )

    def __init__(
        self,
        sink: SubscriberSink,
        streams: list[Segments],
        max_queued: int,
        *,
        report_drops: bool = False,
        positions: bool = False,
    ) -> None:
        assert QUEUED_MIN <= max_queued <= QUEUED_MAX
        # Equal in canonical form counts once.
        self.streams = list(dict.fromkeys(streams))
        self.sink = sink
        # Called with frames while not blocked; a transport may set something faster.
        self.put: Callable[[bytes], object] = sink.write
        self.blocked = False
        self.closed = False
        self.positions = positions
        # While history is sent: everything below this offset was sent. None: use the hub's position.
        self.reached: int | None = None
        self.dropped = 0
        self.dropped_reported = 0
        self.report_drops = report_drops
        self._queue: deque[bytes] = deque(maxlen=max_queued)

    def frame(self, message: Delivery, tag: bytes) -> bytes:
        """Return a message as this consumer gets it: with its position if that was requested."""
        if not self.positions:
            if message.made is None:
                message.made = websocket_text(message.value)
            return message.made
        if message.made_positioned is None:
            position = f"{tag.decode()}.{message.offset + 1}"
            message.made_positioned = websocket_text(
                with_member(message.value, "position", position)
            )
        return message.made_positioned

    def offer(self, frames: list[bytes]) -> None:
        """Write frames of messages in order, or queue them while blocked."""
        if not self.blocked:
            self.sink.write(frames[0] if len(frames) == 1 else b"".join(frames))
            return
        free = (self._queue.maxlen or 0) - len(self._queue)
        self.dropped += max(0, len(frames) - free)
        self._queue.extend(frames)

    def block(self, now: float) -> None:  # noqa: ARG002 - as of a ChannelSubscription
        """Queue messages from now on: the sink is full."""
        self.blocked = True

    def unblock(self, now: float) -> None:  # noqa: ARG002 - as above
        """Write queued messages until the sink is full again."""
        self.blocked = False
        if self.report_drops and self.dropped > self.dropped_reported:
            lost = self.dropped - self.dropped_reported
            self.dropped_reported = self.dropped
            self.sink.write(websocket_text(b'{"dropped":%d}' % lost))
        while self._queue and not self.blocked:
            self.sink.write(self._queue.popleft())

    def close(self) -> None:
        """Drop queued messages and the sink; later messages are ignored."""
        self.closed = True
        self._queue.clear()
        self.sink = CLOSED_SINK
        self.put = CLOSED_SINK.write
