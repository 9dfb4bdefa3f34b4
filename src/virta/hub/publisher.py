"""
Publish events of many requests: write them together, then deliver them and answer.

Everything that arrives during a write becomes the next write (`virta.log.group_commit`), so one sync serves all
requests of a tick. An event is answered and delivered once the log has met its durability. A repeat of an event is
answered like the first and not delivered, unless the write of the first failed: then a later repeat is written in
its place. The number and the bytes of events that are accepted but not written are limited; beyond that publishing
is refused (`overloaded`), never queued.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING, cast

from virta.hub.delivery import STREAMS, Delivery, read_delivery
from virta.hub.event_batch import EventBatch
from virta.hub.idempotency import key_of
from virta.log.format.codec import Encoded
from virta.log.group_commit import INLINE_S_MAX, GroupCommit

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from virta.errors import LogError
    from virta.hub.hub import Hub
    from virta.hub.idempotency import Idempotency
    from virta.hub.log_follower import LogFollower
    from virta.log import Appended, Record

    Answer = Callable[[LogError | None], None]
    Part = Sequence[Delivery] | EventBatch
    Records = Sequence[tuple[str, bytes, bytes]] | Encoded

# Whatever the limit of events is, those that wait to be written take no more memory than this.
OUTSTANDING_BYTES_MAX = 256 * 1024 * 1024

DUPLICATE = ""  # no key is empty

# Upper ends, in seconds, of the classes in which times from publish to deliver are counted: 0.1 ms to about 17 s.
DELAY_BOUNDS = tuple(0.0001 * 1.25**step for step in range(55))
# Channels whose events are counted; those of further channels are in the total only.
COUNTED_CHANNELS_MAX = 10_000


class PublishFigures:
    """What was published since the start: events by channel, and how long publications took."""

    __slots__ = ("by_channel", "delays", "seconds")

    def __init__(self) -> None:
        self.by_channel: dict[str, int] = {}
        # Publications by the time from their arrival until they are durable and delivered; the last class has no end.
        self.delays = [0] * (len(DELAY_BOUNDS) + 1)
        self.seconds = 0.0

    def count(self, channel: str, events: int) -> None:
        known = self.by_channel.get(channel)
        if known is not None:
            self.by_channel[channel] = known + events
        elif len(self.by_channel) < COUNTED_CHANNELS_MAX:
            self.by_channel[channel] = events

    def observe(self, seconds: float) -> None:
        self.delays[bisect_left(DELAY_BOUNDS, seconds)] += 1
        self.seconds += seconds


class _Run:
    """Consecutive events with their idempotency keys; stream messages have none."""

    __slots__ = ("drafts", "keys")

    def __init__(self, drafts: list[Delivery], keys: list[str | None]) -> None:
        self.drafts = drafts
        self.keys = keys

    def __len__(self) -> int:
        return len(self.drafts)


class _Submission:
    """The events of one request, or of several that arrived in one tick, and their answer."""

    __slots__ = ("answer", "arrived_at", "parts", "repeats", "size")

    def __init__(self, answer: Answer, size: int, arrived_at: float) -> None:
        self.answer = answer
        self.size = size
        self.arrived_at = arrived_at
        self.parts: list[_Run | EventBatch] = []  # with claimed keys, in the order of the log
        self.repeats: list[Delivery] = []  # of events that are not in the log yet


class Publisher:
    """Accepts events and writes them."""

    def __init__(
        self,
        hub: Hub,
        follower: LogFollower,
        idempotency: Idempotency,
        loop: asyncio.AbstractEventLoop,
        *,
        outstanding_max: int,
        inline_s_max: float = INLINE_S_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.published = 0
        self.figures = PublishFigures()
        self.duplicates = 0
        self.commits = 0
        self._hub = hub
        self._follower = follower
        self._idempotency = idempotency
        self._outstanding_max = outstanding_max
        self._clock = clock
        self._writing: list[_Run | EventBatch] = []
        self._commits: GroupCommit[_Submission, Records, Appended] = GroupCommit(
            follower.append,
            loop=loop,
            collect=self._collect,
            answer=_answer_submission,
            on_committed=self._committed,
            synced=follower.durability != "none",
            inline_s_max=inline_s_max,
        )

    # Limits.

    @property
    def outstanding(self) -> int:
        """Events that are accepted and not answered."""
        return self._commits.pending

    @property
    def append_figures(self) -> tuple[int, float]:
        """How many appends there were, and the seconds they took, syncs included."""
        return self._commits.commits, self._commits.commit_seconds

    @property
    def outstanding_bytes(self) -> int:
        return self._commits.pending_bytes

    @property
    def capacity(self) -> int:
        """How many more events are accepted before publishing is refused; the last may be a batch."""
        if self._commits.pending_bytes >= OUTSTANDING_BYTES_MAX:
            return 0
        return max(0, self._outstanding_max - self._commits.pending)

    @property
    def overloaded(self) -> bool:
        """Whether publications have to be refused."""
        return not self.capacity

    # Publishing.

    def submit(self, part: Part, answer: Answer) -> None:
        """
        Publish events in the next turn of the loop; check `overloaded` first.

        Args:
            answer: called in the loop once the events are durable (None) or lost (the error).
        """
        self.add((part,), answer)
        self._commits.schedule()

    def add(self, parts: Iterable[Part], answer: Answer) -> None:
        """Queue events for `write`; check `capacity` first."""
        now = self._clock()
        self._idempotency.expire(now)
        number = size = 0
        for part in parts:
            number += len(part)
            size += part.size if isinstance(part, EventBatch) else sum([len(d.value) for d in part])
        submission = _Submission(answer, size, now)
        for part in parts:
            if not isinstance(part, EventBatch):
                self._claim(submission, part)
            elif self._idempotency.claim_all(part.digests):
                submission.parts.append(part)
            else:  # it has repeats: claim its events one by one
                part.repeated = part.deliveries()
                self._claim(submission, part.repeated)
        self._commits.add(submission, number, size)

    def write(self) -> None:
        """Write what was added, unless a write is in flight: the end of that one starts the next."""
        self._commits.write()

    async def close(self) -> None:
        """Write and answer what was accepted."""
        await self._commits.close()

    async def finished(self) -> None:
        """Wait until everything that was accepted is answered."""
        await self._commits.drained()

    def place(self, part: Part) -> tuple[int | None, bool]:
        """
        Return the offset of a publication that was written, and whether it is a repeat.

        That is the offset of the first event that it wrote. If it wrote none, it is that of the event that its
        first one repeats, None if that is no longer known.
        """
        if isinstance(part, EventBatch):
            if part.offset >= 0:
                return part.offset, False
            part = part.repeated or ()
        for event in part:
            if event.offset >= 0:
                return event.offset, False
        if not part:  # an empty batch
            return None, False
        return self._idempotency.offset(_idempotency_key(part[0])), True

    def arrived(self, records: list[Record]) -> None:
        """Deliver what other processes appended, without repeats; called by the follower in the loop."""
        written: list[tuple[str, int]] = []
        deliveries: list[Delivery] = []
        for record in records:
            delivery = read_delivery(record)
            if delivery is None:
                continue
            if delivery.channel != STREAMS:
                key = _idempotency_key(delivery)
                if not self._idempotency.claim(key):
                    self.duplicates += 1
                    continue
                written.append((key, delivery.offset))
            deliveries.append(delivery)
        for delivery in deliveries:
            self.figures.count(delivery.channel, 1)
        self._idempotency.commit(written, self._clock())
        self._feed_records(records)
        self._hub.advance(records[-1].offset + 1)
        self._hub.deliver(deliveries)

    # Before the write.

    def _claim(self, submission: _Submission, drafts: Sequence[Delivery]) -> None:
        """Add events one by one, without repeats."""
        keys = self._claimed_keys(drafts)
        if DUPLICATE in keys:
            pairs = list(zip(drafts, keys, strict=True))
            submission.repeats += [
                d
                for d, k in pairs
                if k is DUPLICATE and self._idempotency.offset(_idempotency_key(d)) is None
            ]
            fresh = [(d, k) for d, k in pairs if k is not DUPLICATE]
            self.duplicates += len(drafts) - len(fresh)
            drafts, keys = [d for d, _ in fresh], [k for _, k in fresh]
        if drafts:
            submission.parts.append(_Run(list(drafts), list(keys)))

    def _claimed_keys(self, drafts: Sequence[Delivery]) -> Sequence[str | None]:
        """Claim and return the key of each event: DUPLICATE for repeats, None for stream messages."""
        if drafts and drafts[0].channel == STREAMS:
            return [None] * len(drafts)
        if len(drafts) == 1:
            key = _idempotency_key(drafts[0])
            return [key if self._idempotency.claim(key) else DUPLICATE]
        keys = [_idempotency_key(draft) for draft in drafts]
        if self._idempotency.claim_all(keys):
            return keys
        return [key if self._idempotency.claim(key) else DUPLICATE for key in keys]

    def _collect(self, submissions: Sequence[_Submission]) -> Records | None:
        """Return the records of one append; None if it has repeats only, which are in the log by now."""
        self.commits += 1
        parts: list[_Run | EventBatch] = []
        for submission in submissions:
            if submission.repeats:
                self._replace_lost(submission)
            for part in submission.parts:
                last = parts[-1] if parts else None
                if not isinstance(part, _Run):
                    parts.append(part)
                elif isinstance(last, _Run):  # neighbours are matched and delivered together
                    last.drafts += part.drafts
                    last.keys += part.keys
                else:
                    parts.append(_Run([*part.drafts], [*part.keys]))
        self._writing = parts
        return _records_of_parts(parts) if parts else None

    def _replace_lost(self, submission: _Submission) -> None:
        """Write the repeats of events whose own write failed."""
        for draft in submission.repeats:
            key = _idempotency_key(draft)
            if self._idempotency.claim(key):
                submission.parts.append(_Run([draft], [key]))
                self.duplicates -= 1

    # After the write.

    def _committed(
        self, submissions: Sequence[_Submission], appended: Appended | None, error: LogError | None
    ) -> None:
        parts, self._writing = self._writing, []
        if appended is not None:
            self._follower.append_ended(None, 0)
            self._follower.pass_own()
            self._deliver(parts, appended.offset, appended.timestamp)
            self._follower.deliver()
            now, observe = self._clock(), self.figures.observe
            for submission in submissions:
                observe(now - submission.arrived_at)
        elif error is not None:
            size = sum([submission.size for submission in submissions])
            self._follower.append_ended(error, size)
            self._release(submissions)

    def _release(self, submissions: Sequence[_Submission]) -> None:
        """Remove the keys of events that are not in the log: the next to send one is the first."""
        for submission in submissions:
            for part in submission.parts:
                if isinstance(part, EventBatch):
                    self._idempotency.release(part.digests)
                else:
                    self._idempotency.release([key for key in part.keys if key is not None])

    def _deliver(self, parts: list[_Run | EventBatch], first: int, timestamp: int) -> None:
        offset = first
        count = self.figures.count
        for part in parts:
            self._commit_keys(part, offset)
            if isinstance(part, EventBatch):
                part.offset = offset
                count(part.channel, len(part))
            else:
                for at, draft in enumerate(part.drafts, offset):
                    draft.offset = at
                    count(draft.channel, 1)
            offset += len(part)
        self.published += offset - first
        self._feed_parts(parts, offset)
        self._hub.advance(offset)
        for part in parts:
            if isinstance(part, EventBatch):
                self._hub.deliver_batch(part, timestamp)
            else:
                self._deliver_run(part.drafts, timestamp)

    def _deliver_run(self, drafts: list[Delivery], timestamp: int) -> None:
        hub = self._hub
        followed = {name for name in {d.channel for d in drafts} if hub.has_subscribers(name)}
        runs: dict[str, list[Delivery]] = {}
        for draft in drafts if followed else ():
            if draft.channel in followed:
                draft.timestamp = timestamp
                runs.setdefault(draft.channel, []).append(draft)
        if runs:
            hub.deliver_runs(runs)

    def _feed_records(self, records: list[Record]) -> None:
        """Give live views what other processes appended, repeats included."""
        rows = self._hub.rows
        if rows is None:
            return
        if rows.channels:
            for record in records:
                if str(record.topic) in rows.channels:
                    rows.append_record(record)
        rows.advance(records[-1].offset + 1)

    def _feed_parts(self, parts: list[_Run | EventBatch], position: int) -> None:
        """Give live views what this process appended."""
        rows = self._hub.rows
        if rows is None:
            return
        channels = rows.channels
        for part in parts if channels else ():
            if not isinstance(part, EventBatch):
                for draft in part.drafts:
                    if draft.channel in channels:
                        rows.append(draft.channel, draft.offset, draft.key, draft.value)
            elif part.channel in channels:
                rows.append_batch(part.channel, part.offset, part.values())
        rows.advance(position)

    def _commit_keys(self, part: _Run | EventBatch, first: int) -> None:
        """Store where events are, so that repeats are recognised; stream messages have no key."""
        now = self._clock()
        if isinstance(part, EventBatch):
            self._idempotency.commit_run(part.digests, first, now)
        elif None not in part.keys:
            self._idempotency.commit_run(cast("list[str]", part.keys), first, now)
        else:
            written = [(k, o) for o, k in enumerate(part.keys, first) if k is not None]
            self._idempotency.commit(written, now)


def _idempotency_key(delivery: Delivery) -> str:
    return key_of(delivery.channel, delivery.source, delivery.id)


def _answer_submission(submission: _Submission, error: LogError | None) -> None:
    submission.answer(error)


def _records_of_parts(parts: Sequence[_Run | EventBatch]) -> Records:
    """Return the records to append; event batches alone are encoded already."""
    encoded = [part.records for part in parts if isinstance(part, EventBatch)]
    if len(encoded) == len(parts):
        return Encoded.of(encoded, sum([len(part) for part in parts]))
    records: list[tuple[str, bytes, bytes]] = []
    for part in parts:
        if isinstance(part, EventBatch):
            records += [(part.channel, b"", value) for value in part.values()]
        else:
            records += [(d.channel, d.key, d.value) for d in part.drafts]
    return records
