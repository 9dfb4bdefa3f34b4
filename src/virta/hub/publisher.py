"""
The publisher: takes events from many requests, writes them together, then delivers and answers.

Everything that arrives while a write is under way becomes the next write, so one sync serves all
requests of a tick. An event is answered only after the log met its durability, and delivered at the
same moment; repeats of an event are answered like the first and delivered to nobody, unless the first
did not get into the log: then a later repeat takes its place. The number and the bytes of events that
are accepted but not yet written are bounded: past that, publishing is refused (`full`), never queued.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec

from virta.errors import LogLockTimeoutError
from virta.hub.delivery import Delivery, from_record
from virta.hub.event_batch import EventBatch
from virta.hub.idempotency import key_of
from virta.hub.log_follower import Commit
from virta.hub.topics import DEAD_LETTERS, RESERVED_PREFIX, STREAMS
from virta.log.format.codec import Encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from virta.errors import LogError
    from virta.hub.hub import Hub
    from virta.hub.idempotency import Idempotency
    from virta.hub.log_follower import LogFollower
    from virta.log import Record

    Answer = Callable[[LogError | None], None]
    Part = Sequence[Delivery] | EventBatch

logger = logging.getLogger("virta.hub")

# Whatever the count limit says, events that wait to be written hold no more memory than this.
OUTSTANDING_BYTES_MAX = 256 * 1024 * 1024
# One append holds no more than this (or a single request); the rest goes into the next one. Even with
# the longest channels and keys that is a batch the log takes, so no request fails for its neighbours.
APPEND_RECORDS_MAX = 16_000
APPEND_BYTES_MAX = 32 * 1024 * 1024

DUPLICATE = ""  # no key is empty
STREAMS_TOPIC = STREAMS.encode()
DEAD_LETTERS_TOPIC = DEAD_LETTERS.encode()


class _Run:
    """Events one by one that follow each other, and their idempotency keys; messages have none."""

    __slots__ = ("drafts", "marks")

    def __init__(self) -> None:
        self.drafts: list[Delivery] = []
        self.marks: list[str | None] = []

    def __len__(self) -> int:
        return len(self.drafts)


class _Gathering:
    """What will be written together, and whom to tell."""

    __slots__ = ("answers", "bytes", "count", "parts", "repeats")

    def __init__(self) -> None:
        self.parts: list[_Run | EventBatch] = []  # in the order of the log
        self.count = 0  # of their events
        self.repeats: list[Delivery] = []  # of events that are not in the log yet
        self.answers: list[tuple[Answer, int]] = []
        self.bytes = 0

    def has_room(self, number: int, size: int) -> bool:
        """Tell whether so many events of so many bytes may come along."""
        records = self.count + len(self.repeats) + number
        return records <= APPEND_RECORDS_MAX and self.bytes + size <= APPEND_BYTES_MAX

    def add(self, drafts: Sequence[Delivery], marks: Sequence[str | None]) -> None:
        """Take events one by one; neighbours are delivered together."""
        last = self.parts[-1] if self.parts else None
        if not isinstance(last, _Run):
            last = _Run()
            self.parts.append(last)
        last.drafts += drafts
        last.marks += marks
        self.count += len(drafts)

    def add_batch(self, batch: EventBatch) -> None:
        self.parts.append(batch)
        self.count += len(batch)

    def records(self) -> Sequence[tuple[str, bytes, bytes]] | Encoded:
        """What the log is to append; batches among themselves bring it with them."""
        pieces = [part.records for part in self.parts if isinstance(part, EventBatch)]
        if len(pieces) == len(self.parts):
            return Encoded.of(pieces, self.count)
        records: list[tuple[str, bytes, bytes]] = []
        for part in self.parts:
            if isinstance(part, EventBatch):
                records += [(part.channel, b"", value) for value in part.values()]
            else:
                records += [(d.channel, d.key, d.value) for d in part.drafts]
        return records


class Publisher:
    """Between the requests and the log."""

    def __init__(
        self,
        hub: Hub,
        follower: LogFollower,
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
        self._follower = follower
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
            if self._idle is None or self._idle.done():
                self._idle = self._loop.create_future()
            await asyncio.shield(
                self._idle
            )  # all who wait share it: one who gives up does so alone

    @property
    def room(self) -> int:
        """How many more events are taken before publishing is refused; the last may be a batch."""
        if self.outstanding_bytes >= OUTSTANDING_BYTES_MAX:
            return 0
        return max(0, self._outstanding_max - self.outstanding)

    def submit(self, part: Part, answer: Answer) -> None:
        """
        Take events; `answer` is called in the loop once they are durable (None) or lost (the error).

        The caller asked `full` first.
        """
        self.take((part,), answer)
        if self._writing is None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._write_soon)

    def take(self, parts: Iterable[Part], answer: Answer) -> None:
        """Take events for the next write, which `write` begins; the caller asked for `room`."""
        self._idempotency.expire(self._clock())
        number = size = 0
        for part in parts:
            number += len(part)
            size += part.size if isinstance(part, EventBatch) else sum([len(d.value) for d in part])
        gathering = self._gathering(number, size)
        for part in parts:
            if not isinstance(part, EventBatch):
                self._gather(gathering, part)
            elif self._idempotency.claim_all(part.digests):
                gathering.add_batch(part)
            else:  # repeats, which are taken out one by one
                part.repeated = part.deliveries()
                self._gather(gathering, part.repeated)
        gathering.bytes += size
        gathering.answers.append((answer, number))
        self.outstanding += number
        self.outstanding_bytes += size

    def _gather(self, gathering: _Gathering, drafts: Sequence[Delivery]) -> None:
        """Take events one by one, without those that were taken before."""
        marks = self._claim(drafts)
        if DUPLICATE in marks:
            paired = list(zip(drafts, marks, strict=True))
            gathering.repeats += [
                d for d, m in paired if m is DUPLICATE and not self._is_written(d)
            ]
            kept = [(d, m) for d, m in paired if m is not DUPLICATE]
            self.duplicates += len(drafts) - len(kept)
            drafts, marks = [d for d, _ in kept], [m for _, m in kept]
        if drafts:
            gathering.add(drafts, marks)

    def place(self, part: Delivery | Part) -> tuple[int | None, bool]:
        """
        Return the offset of a publication that was written, and whether it is a repeat.

        That is the offset of the first event that it wrote. When it wrote none, it is that of the
        event that its first one repeats, None if that is no longer known.
        """
        if isinstance(part, EventBatch):
            if part.offset >= 0:
                return part.offset, False
            part = part.repeated or ()
        events = (part,) if isinstance(part, Delivery) else part
        for event in events:
            if event.offset >= 0:
                return event.offset, False
        if not events:  # an empty batch
            return None, False
        first = events[0]
        return self._idempotency.offset(key_of(first.channel, first.source, first.id)), True

    def write(self) -> None:
        """Write what was taken, unless a write is under way: that one's end begins the next."""
        if self._writing is None and self._waiting:
            self._write()

    def _write_soon(self) -> None:
        self._scheduled = False
        self.write()

    def _claim(self, drafts: Sequence[Delivery]) -> Sequence[str | None]:
        """The idempotency key of each draft, DUPLICATE for repeats, None for stream messages."""
        if drafts and drafts[0].channel == STREAMS:
            return [None] * len(drafts)
        if len(drafts) == 1:
            draft = drafts[0]
            key = f"{draft.channel}\0{draft.source}\0{draft.id}"
            return [key if self._idempotency.claim(key) else DUPLICATE]
        keys = [f"{d.channel}\0{d.source}\0{d.id}" for d in drafts]
        if self._idempotency.claim_all(keys):
            return keys
        return [key if self._idempotency.claim(key) else DUPLICATE for key in keys]

    def arrived(self, records: list[Record]) -> None:
        """Deliver what other processes appended (the follower calls this in the loop)."""
        now = self._clock()
        written: list[tuple[str, int]] = []
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
                written.append((mark, delivery.offset))
            deliveries.append(delivery)
        self._idempotency.settle(written, now)
        self._hub.advance(records[-1].offset + 1)
        self._hub.deliver(deliveries)

    def _is_written(self, draft: Delivery) -> bool:
        return self._idempotency.offset(key_of(draft.channel, draft.source, draft.id)) is not None

    def _gathering(self, number: int, size: int) -> _Gathering:
        """Where events go: the next write, unless they would make it too large."""
        waiting = self._waiting
        if not waiting or not waiting[-1].has_room(number, size):
            waiting.append(_Gathering())
        return waiting[-1]

    def _write(self) -> None:
        gathering = self._writing = self._waiting.popleft()
        self.commits += 1
        if gathering.repeats:
            self._take_places(gathering)
        if not gathering.parts:
            # Repeats only: what they repeat is written already, since writes are in order.
            self._loop.call_soon(self._finish, gathering, None)
            return
        self._follower.commit(Commit(gathering.records(), self._written))

    def _take_places(self, gathering: _Gathering) -> None:
        """Write repeats whose first did not get into the log: they will be told that they are there."""
        for draft in gathering.repeats:
            mark = key_of(draft.channel, draft.source, draft.id)
            if self._idempotency.claim(mark):
                gathering.add((draft,), (mark,))
                self.duplicates -= 1

    def _written(self, commit: Commit) -> None:
        gathering = self._writing
        assert gathering is not None
        try:
            if commit.foreign:
                self.arrived(commit.foreign)
            if commit.error is not None:
                self._release(gathering)
                if isinstance(commit.error, LogLockTimeoutError):
                    self._refuse_waiting(commit.error)
            else:
                self._deliver(gathering, commit.appended.offset, commit.appended.timestamp)
        finally:  # what goes wrong in a delivery must not keep others from publishing
            self._finish(gathering, commit.error)

    def _refuse_waiting(self, error: LogError) -> None:
        """Refuse publications queued behind a write that could not get the lock: they would only wait longer."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for gathering in waiting:
            self._release(gathering)
        for gathering in waiting:
            self._finish(gathering, error)

    def _release(self, gathering: _Gathering) -> None:
        """The events are not in the log: whoever sends them again is the first."""
        for part in gathering.parts:
            if isinstance(part, EventBatch):
                self._idempotency.release(part.digests)
            else:
                self._idempotency.release([mark for mark in part.marks if mark is not None])

    def _deliver(self, gathering: _Gathering, first: int, timestamp: int) -> None:
        offset = first
        for part in gathering.parts:
            self._settle(part, offset)
            if isinstance(part, EventBatch):
                part.offset = offset
            else:
                for at, draft in enumerate(part.drafts, offset):
                    draft.offset = at
            offset += len(part)
        self.published += gathering.count
        self._hub.advance(offset)
        for part in gathering.parts:
            if isinstance(part, EventBatch):
                self._hub.deliver_batch(part, timestamp)
            else:
                self._deliver_run(part.drafts, timestamp)

    def _deliver_run(self, drafts: list[Delivery], timestamp: int) -> None:
        hub = self._hub
        heard = {name for name in {draft.channel for draft in drafts} if hub.has_subscribers(name)}
        runs: dict[str, list[Delivery]] = {}
        for draft in drafts if heard else ():
            if draft.channel in heard:
                draft.timestamp = timestamp
                runs.setdefault(draft.channel, []).append(draft)
        if runs:
            hub.deliver_runs(runs)

    def _settle(self, part: _Run | EventBatch, first: int) -> None:
        """Note where events stand, so that repeats are known; messages to streams have no mark."""
        if isinstance(part, EventBatch):
            self._idempotency.settle_run(part.digests, first, self._clock())
        elif None not in part.marks:
            self._idempotency.settle_run(cast("list[str]", part.marks), first, self._clock())
        else:
            written = [(m, o) for o, m in enumerate(part.marks, first) if m is not None]
            self._idempotency.settle(written, self._clock())

    def _finish(self, gathering: _Gathering, error: LogError | None) -> None:
        self._writing = None
        self.outstanding_bytes -= gathering.bytes
        for answer, number in gathering.answers:
            self.outstanding -= number
            try:
                answer(error)
            except Exception:  # its own affair: the others are waiting for theirs
                logger.exception("answer_failed")
        if self._waiting:
            # What is answered at once must not pile up calls: the next write has a tick of its own.
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._write_soon)
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
