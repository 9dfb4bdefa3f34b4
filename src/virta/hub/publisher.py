"""
The publisher: takes events from many requests, writes them together, then delivers and answers.

Everything that arrives while a write is under way becomes the next write, so one sync serves all
requests of a tick. An event is answered only after the log met its durability, and delivered at the
same moment; repeats of an event are answered like the first and delivered to nobody. The number and
the bytes of events that are accepted but not yet written are bounded: past that, publishing is
refused (`full`), never queued.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from virta.hub.delivery import Delivery, from_record
from virta.hub.idempotency import key_of
from virta.hub.keeper import Commit
from virta.hub.topics import DEAD_LETTERS, RESERVED_PREFIX, STREAMS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from virta.errors import LogError
    from virta.hub.hub import Hub
    from virta.hub.idempotency import Idempotency
    from virta.hub.keeper import Keeper
    from virta.log import Record

# Whatever the count limit says, events that wait to be written hold no more memory than this.
OUTSTANDING_BYTES_MAX = 256 * 1024 * 1024
# One append holds no more than this; the rest goes into the next one.
APPEND_RECORDS_MAX = 65536
APPEND_BYTES_MAX = 32 * 1024 * 1024

STREAMS_TOPIC = STREAMS.encode()
DEAD_LETTERS_TOPIC = DEAD_LETTERS.encode()


class Draft:
    """An event (or stream message) to be written; `mark` is its idempotency key, if it has one."""

    __slots__ = ("channel", "id", "key", "mark", "source", "value")

    def __init__(self, channel: str, source: str, id_: str, value: bytes, key: bytes = b"") -> None:
        self.channel = channel
        self.source = source
        self.id = id_
        self.value = value
        self.key = key
        self.mark: str | None = None


class _Gathering:
    """What will be written together, and whom to tell."""

    __slots__ = ("answers", "bytes", "drafts")

    def __init__(self) -> None:
        self.drafts: list[Draft] = []
        self.answers: list[tuple[Callable[[LogError | None], None], int]] = []
        self.bytes = 0

    @property
    def full(self) -> bool:
        return self.bytes >= APPEND_BYTES_MAX or len(self.drafts) >= APPEND_RECORDS_MAX


class Publisher:
    """Between the requests and the log."""

    def __init__(
        self,
        hub: Hub,
        keeper: Keeper,
        idempotency: Idempotency,
        loop: asyncio.AbstractEventLoop,
        *,
        outstanding_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outstanding = 0
        self.outstanding_bytes = 0
        self.published = 0
        self.duplicates = 0
        self.commits = 0
        self._hub = hub
        self._keeper = keeper
        self._idempotency = idempotency
        self._loop = loop
        self._outstanding_max = outstanding_max
        self._clock = clock
        self._waiting: deque[_Gathering] = deque()
        self._writing: _Gathering | None = None
        self._scheduled = False
        self._idle: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """Refuse publications while this holds."""
        return (
            self.outstanding >= self._outstanding_max
            or self.outstanding_bytes >= OUTSTANDING_BYTES_MAX
        )

    async def finished(self) -> None:
        """Wait until everything that was taken is answered."""
        while self._writing is not None or self._waiting:
            self._idle = self._loop.create_future()
            await self._idle

    def submit(self, drafts: Sequence[Draft], answer: Callable[[LogError | None], None]) -> None:
        """
        Take events; `answer` is called in the loop once they are durable (None) or lost (the error).

        The caller asked `full` first.
        """
        idempotency = self._idempotency
        idempotency.expire(self._clock())
        gathering = self._gathering(sum([len(draft.value) for draft in drafts]))
        size = 0
        for draft in drafts:
            if draft.channel != STREAMS:
                mark = f"{draft.channel}\0{draft.source}\0{draft.id}"  # key_of, without the call
                if not idempotency.claim(mark):
                    self.duplicates += 1
                    continue
                draft.mark = mark
            size += len(draft.value)
            gathering.drafts.append(draft)
        gathering.bytes += size
        gathering.answers.append((answer, len(drafts)))
        self.outstanding += len(drafts)
        self.outstanding_bytes += size
        if self._writing is None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._write)

    def arrived(self, records: list[Record]) -> None:
        """Deliver what other processes appended (the keeper calls this in the loop)."""
        now = self._clock()
        marks: list[str] = []
        offsets: list[int] = []
        deliveries: list[Delivery] = []
        for record in records:
            delivery = read_delivery(record)
            if delivery is None:
                continue
            if delivery.channel != STREAMS:
                mark = key_of(delivery.channel, delivery.source, delivery.id)
                if not self._idempotency.claim(mark):
                    self.duplicates += 1
                    continue
                marks.append(mark)
                offsets.append(delivery.offset)
            deliveries.append(delivery)
        self._idempotency.settle(marks, offsets, now)
        self._hub.advance(records[-1].offset + 1)
        self._hub.deliver(deliveries)

    def _gathering(self, size: int) -> _Gathering:
        """Where events of so many bytes go: the next write, unless they would make it too large."""
        waiting = self._waiting
        if not waiting or waiting[-1].full or waiting[-1].bytes + size > APPEND_BYTES_MAX:
            waiting.append(_Gathering())
        return waiting[-1]

    def _write(self) -> None:
        self._scheduled = False
        gathering = self._writing = self._waiting.popleft()
        self.commits += 1
        if not gathering.drafts:
            # Repeats only: what they repeat is written already, since writes are in order.
            self._loop.call_soon(self._finish, gathering, None)
            return
        records = [(d.channel.encode(), d.key, d.value) for d in gathering.drafts]
        self._keeper.commit(Commit(records, self._written))

    def _written(self, commit: Commit) -> None:
        gathering = self._writing
        assert gathering is not None
        if commit.foreign:
            self.arrived(commit.foreign)
        if commit.error is not None:
            self._idempotency.release([d.mark for d in gathering.drafts if d.mark is not None])
        else:
            self._deliver(gathering.drafts, commit.appended.offset, commit.appended.timestamp)
        self._finish(gathering, commit.error)

    def _deliver(self, drafts: list[Draft], first: int, timestamp: int) -> None:
        marks: list[str] = []
        offsets: list[int] = []
        deliveries: list[Delivery] = []
        heard: dict[str, bool] = {}
        for offset, draft in enumerate(drafts, first):
            channel = draft.channel
            if draft.mark is not None:
                marks.append(draft.mark)
                offsets.append(offset)
            hearers = heard.get(channel)
            if hearers is None:
                hearers = heard[channel] = self._hub.has_hearers(channel)
            if hearers:
                deliveries.append(
                    Delivery(channel, draft.source, draft.id, draft.value, offset, timestamp)
                )
        self._idempotency.settle(marks, offsets, self._clock())
        self.published += len(drafts)
        self._hub.advance(first + len(drafts))
        if deliveries:
            self._hub.deliver(deliveries)

    def _finish(self, gathering: _Gathering, error: LogError | None) -> None:
        self._writing = None
        self.outstanding_bytes -= gathering.bytes
        for answer, number in gathering.answers:
            self.outstanding -= number
            answer(error)
        if self._waiting and not self._scheduled:
            self._write()
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


def read_delivery(record: Record) -> Delivery | None:
    """What a record means to hearers: an event, a stream message, or (None) our own bookkeeping."""
    topic = bytes(record.topic)
    if topic == STREAMS_TOPIC:
        stream = _stream_of(record)
        if stream is None:
            return None
        return Delivery(STREAMS, "", stream, record.value, record.offset, record.timestamp)
    if topic.startswith(RESERVED_PREFIX.encode()) and topic != DEAD_LETTERS_TOPIC:
        return None
    return from_record(record)


class _Message(msgspec.Struct):
    publish_to: str


_decode_message = msgspec.json.Decoder(_Message).decode


def _stream_of(record: Record) -> str | None:
    """The stream a message was sent to; ids too long for a key are only in the value."""
    try:
        return bytes(record.key).decode() or _decode_message(record.value).publish_to
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
