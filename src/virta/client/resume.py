"""How a subscription continues after its connection was cut: where, and after which wait; no I/O."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec

from virta.backoff import Backoff
from virta.client.calls import Start, is_final
from virta.client.frames import Frame, Received
from virta.event import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.errors import ClientError

logger = logging.getLogger("virta.client")

# Waits between attempts to reconnect: doubling, halved at random, up to this.
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
# A stream that is silent for longer than this is dead: the server pings every 30 s.
SILENCE_S = 75.0
# Requests exact positions as the ids of all frames (docs/server.md, Resume).
POSITIONS = {"Virta-Positions": "1"}
POSITION = re.compile(r"[0-9a-f]{12}\.(0|[1-9][0-9]{0,18})")


class ResumeState:
    """
    The state of a subscription that outlives its connections.

    Args:
        path: returns the path of the next attempt, by where to start.
        start: where to start; None is with new events only.
        last_event_id: continue after what had this id.
        reconnect: whether to connect again after a cut.
        on_gap: called with the server's report when events could not be resumed.
    """

    def __init__(
        self,
        path: Callable[[Start | None], str],
        start: Start | None,
        last_event_id: str | None,
        *,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.last_event_id = last_event_id
        self.reconnect = reconnect
        self._path = path
        self._start = start
        self._on_gap = on_gap
        self._backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S, jitter=0.5)
        self._retry_s: float | None = None
        self._warned = False

    def request(self) -> tuple[str, dict[str, str]]:
        """Return path and headers of the next attempt."""
        headers = {"Accept": "text/event-stream"} | POSITIONS
        if self.last_event_id is not None:
            headers["Last-Event-ID"] = self.last_event_id
        return self._path(self._start), headers

    def connected(self, position: str | None = None) -> None:
        """Record that the stream is open; until its first frame, `position` is where to resume."""
        self._backoff.reset()
        self._warned = False
        if self._start is None and self.last_event_id is None and position is not None:
            self._start = int(position)

    def failed(self, error: ClientError) -> bool:
        """Record that connecting failed; return whether to try again. Warns once per outage."""
        if not self.reconnect or is_final(error):
            return False
        if not self._warned:
            self._warned = True
            logger.warning("%s; trying again until it answers", error)
        return True

    def wait_s(self) -> float:
        """Return how long to wait before the next attempt: what the server asked for, else a backoff."""
        if self._retry_s is not None:
            wait, self._retry_s = self._retry_s, None
            return wait
        return self._backoff.next()

    def read_frame(self, frame: Frame) -> Received | None:
        """Process a frame; return the event that it delivers, if any."""
        if frame.retry_ms is not None:
            self._retry_s = frame.retry_ms / 1000
        if frame.id:
            # Frames without an event, too: events that did not match need not be read again.
            self.last_event_id = frame.id
        if frame.event == "data" and frame.id is not None:
            return Received(
                Event.from_json(frame.data, lenient=True), frame.id, _frame_offset(frame)
            )
        if frame.event == "gap" and self._on_gap is not None:
            self._on_gap(frame.json())
        return None

    def read_message(self, text: str | bytes) -> tuple[str, str] | None:
        """Process a message of a stream's WebSocket; return (stream id, text) if it delivers one."""
        message = msgspec.json.decode(text)
        position = message.get("position")
        if position is not None:
            self.last_event_id = position
        if "publish_to" in message:
            return message["publish_to"], message["payload"]
        if "gap" in message and self._on_gap is not None:
            self._on_gap(message["gap"])
        return None


def _frame_offset(frame: Frame) -> int | None:
    """Return the offset of a `data` frame's record: its id is the position after it."""
    assert frame.id is not None
    found = POSITION.fullmatch(frame.id)
    if found is not None:
        return int(found[1]) - 1
    try:  # a server without positions may still send the offset in the frame's comment
        return int(msgspec.json.decode(frame.comment)["offset"])
    except (TypeError, KeyError, ValueError):
        return None
