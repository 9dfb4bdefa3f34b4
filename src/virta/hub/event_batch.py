"""
An event batch: the events of one batch to one channel, in the forms that the log and the matcher read.

Most events of a batch match nothing, so they are not decoded one by one: a batch is written, checked for repeats
and matched as a whole, and an event becomes a `Delivery` when it matches. Invariant: the records, lines and digests
of a batch are those of its deliveries, in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta import native
from virta.event.document import decode_head
from virta.hub.delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable

_native = native.load("virta.hub._native")

# Smaller batches are faster event by event: they are delivered together with what arrived beside them.
BATCH_EVENTS_MIN = 16


class EventBatch:
    """Events of one channel that are written and matched together."""

    __slots__ = ("channel", "count", "digests", "lines", "offset", "records", "repeated")

    def __init__(
        self, channel: str, count: int, records: bytes, lines: bytes, digests: bytes
    ) -> None:
        self.channel = channel
        self.count = count
        self.records = records  # as the log stores them
        self.lines = lines  # one event a line
        self.digests = digests  # of the idempotency keys, end to end
        self.offset = -1  # of the first event; known once the whole batch is in the log
        # The events one by one, if some of them were published before.
        self.repeated: list[Delivery] | None = None

    def __len__(self) -> int:
        return self.count

    @property
    def size(self) -> int:
        """The bytes of all events."""
        return len(self.lines) - self.count + 1

    def values(self) -> list[bytes]:
        """Return the bytes of each event."""
        return self.lines.split(b"\n")

    def deliveries(self, timestamp: int = 0) -> list[Delivery]:
        """Return the events one by one."""
        return self.pick(range(self.count), timestamp)

    def pick(self, indexes: Iterable[int], timestamp: int) -> list[Delivery]:
        """Return the events at these indexes of the batch."""
        values, first = self.values(), self.offset
        picked = []
        for index in indexes:
            value = values[index]
            head = decode_head(value)
            offset = first + index if first >= 0 else -1
            picked.append(Delivery(self.channel, head.source, head.id, value, offset, timestamp))
        return picked


def split_batch(
    channel: str, data: bytes, start: int, *, events_max: int, event_bytes_max: int
) -> EventBatch | None:
    """
    Split the JSON array in `data` from `start` on into an event batch.

    Returns None if it is short, or anything but the common form: then it has to be read event by event, which
    gives the same events or says what is wrong. Without the native module that is every batch.
    """
    if _native is None:
        return None
    found = _native.split(channel, data, start, events_max, event_bytes_max)
    if found is None or found[0] < BATCH_EVENTS_MIN:
        return None
    return EventBatch(channel, *found)
