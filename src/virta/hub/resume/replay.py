"""
Replay history to a consumer, then attach it to live delivery, without gap or duplicate.

A replay reads the log from the consumer's start up to the hub's position, in a thread and in bounded pieces, and
waits for the consumer between them (the limits on slow consumers apply to live delivery only). When it has reached
the hub's position, it attaches the consumer in the same step of the event loop, so nothing can be delivered between
the comparison and the attachment.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from virta.errors import LogError
from virta.hub.delivery import ENCODERS, META, STREAMS, Delivery
from virta.hub.idempotency import key_of
from virta.hub.resume.history import HistoryReader, select_events, select_messages
from virta.hub.resume.id_index import IdIndex, IdSearchResult
from virta.hub.resume.positions import NOWHERE, EventId, Place, ResumePosition
from virta.hub.stream_consumer import StreamConsumer

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from virta.hub.hub import Hub
    from virta.hub.idempotency import Idempotency
    from virta.hub.resume.history import Select
    from virta.hub.subscription import ChannelSubscription
    from virta.log import Log
    from virta.log.format.damage import Problem

    Drained = Callable[[], asyncio.Future[None] | None]
    ReportGap = Callable[[dict[str, object], int], None]

logger = logging.getLogger("virta.hub")

# Readers at once: each has a buffer of a mebibyte. Other replays wait.
REPLAYS_MAX = 32
# Searches for a source and id, waiting or running (one runs at a time); beyond that a consumer gets a gap.
# Each costs a task of a few KiB, and many browsers reconnect at once after a restart.
SEARCHES_MAX = 16_384


@dataclass(frozen=True)
class Start:
    """
    Where to begin: an offset, and the gap to report first if something is missing.

    `again` is the position that leads to the same gap: a consumer that disconnects before it received the gap
    resumes with it.
    """

    offset: int
    gap: dict[str, object] | None = None
    again: str = NOWHERE


class Replayer:
    """Starts consumers in the past."""

    def __init__(
        self,
        hub: Hub,
        log: Log,
        idempotency: Idempotency,
        executor: Executor,
        *,
        index: IdIndex | None = None,
    ) -> None:
        self._hub = hub
        self._log = log
        self._idempotency = idempotency
        self._executor = executor
        self._running = asyncio.Semaphore(REPLAYS_MAX)
        self._index = index or IdIndex(log)
        self._searching = asyncio.Semaphore(1)
        self.searches: set[asyncio.Task[IdSearchResult]] = (
            set()
        )  # running, and waiting for their turn
        self.running = 0

    @property
    def searched_bytes(self) -> int:
        """The bytes of the log that were read to find events by source and id."""
        return self._index.bytes_read

    # Where to start.

    async def find(self, channel: str, place: Place) -> Start:
        """
        Return where a consumer of the channel has to continue.

        Raises:
            LogError: the log cannot be read.
        """
        if channel == META and isinstance(place, ResumePosition | EventId):
            return self._unknown({"reason": "no-history"})
        if isinstance(place, EventId):
            return await self._after(channel, place)
        if not isinstance(place, datetime):
            return self.at(place)
        # Events that arrive during the search for a time are new, also if that time is in the future.
        position = self._hub.position
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, self.at, place)
        return Start(min(found.offset, position), found.gap)

    def at(self, place: Place) -> Start:
        """Return the start for a place that needs no search for an event; blocks only if it is a time."""
        assert not isinstance(place, EventId)
        if place == "latest":
            return Start(self._hub.position)
        if place == "earliest":
            return Start(self._log.first_offset)
        if isinstance(place, ResumePosition):
            unknown: dict[str, object] = {"reason": "unknown-position", "lastEventID": place.text}
            if place.tag != self._hub.tag:
                return self._unknown(unknown)
            return self._at_offset(place.offset, unknown)
        if isinstance(place, int):
            # An offset that this log has not reached comes from another log.
            return self._at_offset(place, {"reason": "unknown-offset", "from": place})
        assert not isinstance(place, str)
        with self._log.read(start=place) as reader:
            return Start(reader.position)

    def _at_offset(self, offset: int, unknown: dict[str, object]) -> Start:
        first, position = self._log.first_offset, self._hub.position
        if offset < first:
            return Start(first, _trimmed_gap(offset, first), self._hub.position_text(offset))
        if offset <= max(position, self._log.next_offset):
            return Start(min(offset, position))
        return self._unknown(unknown)

    async def _after(self, channel: str, seen: EventId) -> Start:
        """Return the place after an event, after the oldest one if the id occurs several times."""
        position = (
            self._hub.position
        )  # events that arrive during the search are sent, even if it fails
        named: dict[str, object] = {"lastEventID": seen.text}
        pairs = seen.pairs()
        if not pairs:
            return self._unknown({"reason": "unknown-id"} | named)
        if len(self.searches) >= SEARCHES_MAX:
            return self._unknown({"reason": "search-limit", "searchedFrom": position} | named)
        search = asyncio.ensure_future(self._search(channel, pairs, position))
        self.searches.add(search)
        search.add_done_callback(self._search_ended)
        try:
            # A consumer that disconnects does not end its search: the thread cannot be interrupted.
            found = await asyncio.shield(search)
        except LogError as error:
            logger.warning("search_failed code=%s: %s", error.code, error.message)
            return self._unknown({"reason": "search-failed"} | named, position)
        cut = found.searched_from > self._log.first_offset
        if found.offset is None:
            reason = "search-limit" if cut else "unknown-id"
            more = {"searchedFrom": found.searched_from} if cut else {}
            return self._unknown({"reason": reason} | named | more, position)
        if cut:
            # An older event with the same id may be in the part that was not searched.
            gap = {"reason": "search-limit"} | named | {"searchedFrom": found.searched_from}
            return Start(found.offset + 1, gap | {"resumedAt": found.offset + 1})
        return Start(found.offset + 1)

    def _search_ended(self, search: asyncio.Task[IdSearchResult]) -> None:
        """Remove a search; retrieve its error, which nothing else may read."""
        self.searches.discard(search)
        if not search.cancelled():
            search.exception()

    async def _search(self, channel: str, pairs: list[tuple[str, str]], end: int) -> IdSearchResult:
        loop = asyncio.get_running_loop()
        async with self._searching:
            return await loop.run_in_executor(self._executor, self._index.find, channel, pairs, end)

    def _unknown(self, gap: dict[str, object], position: int | None = None) -> Start:
        """Return the current end of the log, for a consumer whose place is not known."""
        if position is None:
            position = self._hub.position
        gap |= {"earliest": self._log.first_offset, "resumedAt": position}
        return Start(position, gap)

    # Sending.

    async def run(
        self,
        consumer: ChannelSubscription | StreamConsumer,
        start: Start,
        *,
        drained: Drained,
        report_gap: ReportGap,
    ) -> None:
        """
        Send history from `start`, then attach the consumer.

        Args:
            drained: returns what to wait for before more may be written, or None.
            report_gap: called with the missing offsets, and the offset up to which everything else was sent.
        """
        history: _StreamHistory | _ChannelHistory
        if isinstance(consumer, StreamConsumer):
            history = _StreamHistory(self._hub, consumer)
        else:
            history = _ChannelHistory(self._hub, consumer, self._is_first)
        position = consumer.reached = start.offset
        self.running += 1
        try:
            while not consumer.closed:
                end = self._hub.position
                if position >= end:
                    history.attach()
                    consumer.reached = None
                    return
                async with self._running:
                    position, wait = await self._send(history, position, end, drained, report_gap)
                if wait is not None:
                    await wait  # outside: a consumer that does not read blocks no other replay
        finally:
            self.running -= 1

    async def _send(
        self,
        history: _ChannelHistory | _StreamHistory,
        position: int,
        end: int,
        drained: Drained,
        report_gap: ReportGap,
    ) -> tuple[int, asyncio.Future[None] | None]:
        """Send what is between two offsets until the consumer is full; return where to continue, and after what."""
        consumer = history.consumer
        loop = asyncio.get_running_loop()
        damage = 0
        with self._log.read(
            topics=[history.topic], start=position, end=end, on_corruption="skip"
        ) as reader:
            pieces = HistoryReader(reader, history.select)
            while position < end and not consumer.closed:
                piece = await loop.run_in_executor(self._executor, pieces.read)
                for problem in reader.problems[damage:]:
                    # The gap is somewhere in this piece: report it before the piece, and again on resume.
                    report_gap(_damaged(problem, end), position)
                damage = len(reader.problems)
                if piece.deliveries:
                    history.send(piece.deliveries)
                if piece.gap is not None:
                    consumer.reached = position = piece.gap.next
                    report_gap(_trimmed_gap(piece.gap.first, position), position)
                    return position, drained()
                consumer.reached = position = end if piece.finished else piece.next
                wait = drained()
                if wait is not None:
                    return position, wait
        return position, None

    def _is_first(self, delivery: Delivery) -> bool:
        """Return False for a repeat, which live consumers did not get either (as far as keys are kept)."""
        key = key_of(delivery.channel, delivery.source, delivery.id)
        known = self._idempotency.offset(key)
        return known is None or known >= delivery.offset


class _ChannelHistory:
    """The history of a channel, for one subscription."""

    def __init__(
        self, hub: Hub, subscription: ChannelSubscription, is_first: Callable[[Delivery], bool]
    ) -> None:
        self.consumer = subscription
        self.topic = subscription.channel
        self.select: Select = select_events(subscription.filter, subscription.row_filter)
        self._hub = hub
        self._tag = hub.tag.encode()
        self._is_first = is_first

    def send(self, deliveries: list[Delivery]) -> None:
        chosen = [delivery for delivery in deliveries if self._is_first(delivery)]
        if chosen:
            payload = ENCODERS[self.consumer.encoding](chosen, self._tag)
            self.consumer.send(payload, len(chosen))

    def attach(self) -> None:
        self._hub.attach(self.consumer)


class _StreamHistory:
    """The history of all streams, for one consumer."""

    topic = STREAMS

    def __init__(self, hub: Hub, consumer: StreamConsumer) -> None:
        self.consumer = consumer
        self.select: Select = select_messages(consumer.streams)
        self._hub = hub
        self._tag = hub.tag.encode()

    def send(self, deliveries: list[Delivery]) -> None:
        self.consumer.offer([self.consumer.frame(d, self._tag) for d in deliveries])

    def attach(self) -> None:
        self._hub.attach_streams(self.consumer)


def _damaged(problem: Problem, end: int) -> dict[str, object]:
    resumed = end if problem.offset_to is None else problem.offset_to
    return {"reason": "damaged", "from": problem.offset_from, "resumedAt": resumed}


def _trimmed_gap(first: int, next_: int) -> dict[str, object]:
    return {"reason": "trimmed", "from": first, "resumedAt": next_}
