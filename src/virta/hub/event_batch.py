"""
A batch: the events of one batch to one channel, as the log and the matcher take them.

Most events of a batch are heard by nobody or only pass through an index, so they are not taken apart:
a batch is written, claimed and matched as a whole, and an event of it becomes a `Delivery` when
somebody hears it. Invariant: a batch's records, lines and digests are those of its deliveries, in
one order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.hub.delivery import Delivery, decode_head
from virta.hub.kernel import split

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Fewer events are better off one by one: what came together with them is then sent together.
BATCH_EVENTS_MIN = 16


class EventBatch:
    """Events that go one way together."""

    __slots__ = ("channel", "count", "digests", "lines", "offset", "records", "repeated")

    def __init__(
        self, channel: str, count: int, records: bytes, lines: bytes, digests: bytes
    ) -> None:
        self.channel = channel
        self.count = count
        self.records = records
        self.lines = lines
        self.digests = digests
        self.offset = -1  # of its first event, known once it is in the log as a whole
        # Its events one by one, when some of them were taken before.
        self.repeated: list[Delivery] | None = None

    def __len__(self) -> int:
        return self.count

    @property
    def size(self) -> int:
        """The bytes of all events."""
        return len(self.lines) - self.count + 1

    def values(self) -> list[bytes]:
        """The events' bytes."""
        return self.lines.split(b"\n")

    def deliveries(self, timestamp: int = 0) -> list[Delivery]:
        """The events, one by one."""
        return list(self.pick(self.values(), range(self.count), timestamp))

    def pick(
        self, values: Sequence[bytes], places: Iterable[int], timestamp: int
    ) -> Iterable[Delivery]:
        """Yield the events at these places, given the bytes of all."""
        first = self.offset
        for place in places:
            value = values[place]
            head = decode_head(value)
            offset = first + place if first >= 0 else -1
            yield Delivery(self.channel, head.source, head.id, value, offset, timestamp)


def pack(
    channel: str, data: bytes, start: int, *, events_max: int, event_bytes_max: int
) -> EventBatch | None:
    """The batch of a batch that is as most are: `data` from `start` on; None when it is not."""
    found = split(channel, data, start, events_max, event_bytes_max) if split is not None else None
    if found is None or found[0] < BATCH_EVENTS_MIN:
        return None
    return EventBatch(channel, *found)
