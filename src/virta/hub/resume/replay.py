"""
Replay, then live: a consumer that was away hears what it missed, then everything new, each once.

A replay reads the log from its start up to the hub's position, in a thread and in bounded pieces,
waiting for the consumer between them (the slow-consumer limits are for live delivery, not for
history). When it has reached the hub's position *in the event loop*, it attaches the subscription in
the same breath: nothing can be delivered between the comparison and the attachment, hence no gap and
no duplicate.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from virta.errors import EventError, LogError, LogGapError
from virta.filters.tree import Everything
from virta.hub.channel import DOCUMENT, root_of
from virta.hub.delivery import ENCODERS, Delivery, from_record
from virta.hub.idempotency import key_of
from virta.hub.publisher import read_delivery
from virta.hub.resume.id_index import IdIndex, IdSearchResult
from virta.hub.resume.positions import NOWHERE, EventId, Place, ResumePosition
from virta.hub.stream_consumer import StreamConsumer
from virta.hub.topics import META, STREAMS
from virta.match.events import parse_event
from virta.streams import streams_match

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from concurrent.futures import Executor

    from virta.filters import Filter
    from virta.hub.hub import Hub
    from virta.hub.idempotency import Idempotency
    from virta.hub.subscription import ChannelSubscription
    from virta.log import Log, Reader, Record
    from virta.log.format.damage import Problem
    from virta.streams import Segments

logger = logging.getLogger("virta.hub")

# One piece of a replay: small enough that a thousand replays at once stay small.
PIECE_EVENTS_MAX = 256
PIECE_BYTES_MAX = 256 * 1024
# Records looked at for one piece, so that a filter that matches nothing still shares the threads.
PIECE_RECORDS_MAX = 8192
# A reader of the log has a buffer of a mebibyte: so many read at once, the others wait their turn.
REPLAYS_MAX = 32
# Searches for a source and id that wait or run (one runs at a time); beyond that a consumer gets a gap.
# Each costs a task of a few KiB, and many browsers reconnect at once after a restart.
SEARCHES_MAX = 16_384


@dataclass(frozen=True)
class Start:
    """
    Where to begin: an offset, and the gap to report first if something is missing.

    `again` is the position that leads to the same gap: a consumer that is cut off before it received the gap
    resumes with it.
    """

    offset: int
    gap: dict[str, object] | None = None
    again: str = NOWHERE


class HistoryPiece:
    """What one read of the log found."""

    __slots__ = ("bytes", "deliveries", "finished", "gap", "next")

    def __init__(self) -> None:
        self.next = 0  # the offset after the last record that was looked at
        self.deliveries: list[Delivery] = []
        self.bytes = 0
        self.finished = False
        self.gap: LogGapError | None = None


class Replayer:
    """Starts subscriptions in the past."""

    def __init__(self, hub: Hub, log: Log, idempotency: Idempotency, executor: Executor) -> None:
        self._hub = hub
        self._log = log
        self._idempotency = idempotency
        self._executor = executor
        self._turn = asyncio.Semaphore(REPLAYS_MAX)
        self._index = IdIndex(log)
        self._search_turn = asyncio.Semaphore(1)
        self._searches: set[asyncio.Task[IdSearchResult]] = set()
        self.running = 0

    @property
    def searched_bytes(self) -> int:
        """Return the bytes of the log that were read to find events by source and id."""
        return self._index.bytes_read

    async def find(self, channel: str, place: Place) -> Start:
        """
        Return where a consumer of the channel has to continue.

        Raises:
            LogError: the log cannot be read.
        """
        if channel == META and isinstance(place, ResumePosition | EventId):
            return self._lost({"reason": "no-history"})
        if isinstance(place, EventId):
            return await self._behind(channel, place)
        if not isinstance(place, datetime):
            return self.at(place)
        # Events that arrive during the search for a time are new, also if that time is in the future.
        position = self._hub.position
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, self.at, place)
        return Start(min(found.offset, position), found.gap)

    async def _behind(self, channel: str, seen: EventId) -> Start:
        """Return the place after an event, after the oldest one if the id occurs several times."""
        position = self._hub.position  # what comes during the search is not missed with the rest
        named: dict[str, object] = {"lastEventID": seen.text}
        pairs = seen.pairs()
        if not pairs:
            return self._lost({"reason": "unknown-id"} | named)
        if len(self._searches) >= SEARCHES_MAX:
            return self._lost({"reason": "search-limit", "searchedFrom": position} | named)
        search = asyncio.ensure_future(self._search(channel, pairs, position))
        self._searches.add(search)
        search.add_done_callback(self._searched)
        try:
            # A consumer that disconnects does not end its search: the thread could not be interrupted.
            found = await asyncio.shield(search)
        except LogError as error:
            logger.warning("search_failed code=%s: %s", error.code, error.message)
            return self._lost({"reason": "search-failed"} | named, position)
        cut = found.searched_from > self._log.first_offset
        if found.offset is None:
            reason = "search-limit" if cut else "unknown-id"
            more = {"searchedFrom": found.searched_from} if cut else {}
            return self._lost({"reason": reason} | named | more, position)
        if cut:
            # An older event with the same id may be in the part that was not searched.
            gap = {"reason": "search-limit"} | named | {"searchedFrom": found.searched_from}
            return Start(found.offset + 1, gap | {"resumedAt": found.offset + 1})
        return Start(found.offset + 1)

    def _searched(self, search: asyncio.Task[IdSearchResult]) -> None:
        """Forget a search that has ended; retrieve its error, which may have no reader left."""
        self._searches.discard(search)
        if not search.cancelled():
            search.exception()

    async def _search(self, channel: str, pairs: list[tuple[str, str]], end: int) -> IdSearchResult:
        loop = asyncio.get_running_loop()
        async with self._search_turn:
            return await loop.run_in_executor(self._executor, self._index.find, channel, pairs, end)

    def _lost(self, gap: dict[str, object], position: int | None = None) -> Start:
        """Return the current end of the log, for a consumer whose place is not known."""
        if position is None:
            position = self._hub.position
        gap |= {"earliest": self._log.first_offset, "resumedAt": position}
        return Start(position, gap)

    def at(self, place: Place) -> Start:
        """Resolve a place that needs no search; blocks only if it is a time."""
        assert not isinstance(place, EventId)
        if place == "latest":
            return Start(self._hub.position)
        if place == "earliest":
            return Start(self._log.first_offset)
        if isinstance(place, ResumePosition):
            return self._at_position(place)
        if isinstance(place, int):
            # Whoever knows an offset that this log has not reached knows another log.
            return self._at_offset(place, {"reason": "unknown-offset", "from": place})
        assert not isinstance(place, str)
        with self._log.read(start=place) as reader:
            return Start(reader.position)

    def _at_position(self, place: ResumePosition) -> Start:
        unknown: dict[str, object] = {"reason": "unknown-position", "lastEventID": place.text}
        if place.tag != self._hub.tag:
            return self._lost(unknown)
        return self._at_offset(place.offset, unknown)

    def _at_offset(self, offset: int, unknown: dict[str, object]) -> Start:
        first, position = self._log.first_offset, self._hub.position
        if offset < first:
            return Start(first, _trimmed(offset, first), self._hub.position_text(offset))
        if offset <= max(position, self._log.next_offset):
            return Start(min(offset, position))
        return self._lost(unknown)

    async def run(
        self,
        consumer: ChannelSubscription | StreamConsumer,
        start: Start,
        *,
        drained: Callable[[], asyncio.Future[None] | None],
        tell_gap: Callable[[dict[str, object], int], None],
    ) -> None:
        """
        Send history from `start`, then attach the consumer.

        Args:
            drained: gives what to wait for before more may be written, or None.
            tell_gap: called with the missing offsets, and the offset up to which everything else was sent.
        """
        way: _StreamWay | _ChannelWay
        if isinstance(consumer, StreamConsumer):
            way = _StreamWay(self._hub, consumer)
        else:
            way = _ChannelWay(self._hub, consumer, self._first)
        position = consumer.reached = start.offset
        self.running += 1
        try:
            while not consumer.closed:
                end = self._hub.position
                if position >= end:
                    way.attach()
                    consumer.reached = None
                    return
                async with self._turn:
                    position, wait = await self._round(way, position, end, drained, tell_gap)
                if wait is not None:
                    await wait  # without a turn: who does not read keeps nobody from reading
        finally:
            self.running -= 1

    async def _round(
        self,
        way: _ChannelWay | _StreamWay,
        position: int,
        end: int,
        drained: Callable[[], asyncio.Future[None] | None],
        tell_gap: Callable[[dict[str, object], int], None],
    ) -> tuple[int, asyncio.Future[None] | None]:
        """
        Send what stands between two offsets, until the consumer is full.

        Gives the offset to go on from, and what to wait for before.
        """
        consumer = way.consumer
        reader = self._log.read(topics=[way.topic], start=position, end=end, on_corruption="skip")
        damage = 0
        try:
            async for piece in self._pieces(reader, way):
                for problem in reader.problems[damage:]:
                    # The gap is somewhere in this piece: report it before the piece, and again on resume.
                    tell_gap(_damaged(problem, end), position)
                damage = len(reader.problems)
                if piece.deliveries:
                    way.send(piece.deliveries)
                if piece.gap is not None:
                    consumer.reached = position = piece.gap.next
                    tell_gap(_trimmed(piece.gap.first, position), position)
                    return position, drained()
                consumer.reached = position = end if piece.finished else piece.next
                if consumer.closed:
                    break
                wait = drained()
                if wait is not None:
                    return position, wait
            return end, drained()
        finally:
            reader.close()

    async def _pieces(
        self, reader: Reader, way: _ChannelWay | _StreamWay
    ) -> AsyncIterator[HistoryPiece]:
        loop = asyncio.get_running_loop()
        finished = False
        while not finished:
            piece = await loop.run_in_executor(self._executor, way.read, reader)
            finished = piece.finished or piece.gap is not None
            yield piece

    def _first(self, delivery: Delivery) -> bool:
        """Not a repeat that live consumers did not hear either (as far as that is remembered)."""
        key = key_of(delivery.channel, delivery.source, delivery.id)
        known = self._idempotency.offset(key)
        return known is None or known >= delivery.offset


class _ChannelWay:
    """Sends history to a subscription on a channel."""

    def __init__(
        self, hub: Hub, subscription: ChannelSubscription, is_first: Callable[[Delivery], bool]
    ) -> None:
        self.consumer = subscription
        self.topic = subscription.channel
        self._hub = hub
        self._tag = hub.tag.encode()
        self._is_first = is_first

    def read(self, reader: Reader) -> HistoryPiece:
        """Read a piece; runs in a thread."""
        return read_piece(reader, self.consumer.filter)

    def send(self, deliveries: list[Delivery]) -> None:
        """Send the events of a piece, except those that live consumers did not get either."""
        chosen = [delivery for delivery in deliveries if self._is_first(delivery)]
        if chosen:
            payload = ENCODERS[self.consumer.encoding](chosen, self._tag)
            self.consumer.send(payload, len(chosen))

    def attach(self) -> None:
        self._hub.attach(self.consumer)


class _StreamWay:
    """Sends history to a consumer of streams."""

    topic = STREAMS

    def __init__(self, hub: Hub, consumer: StreamConsumer) -> None:
        self.consumer = consumer
        self._hub = hub
        self._tag = hub.tag.encode()

    def read(self, reader: Reader) -> HistoryPiece:
        """Read a piece; runs in a thread."""
        return _read_messages(reader, self.consumer.streams)

    def send(self, deliveries: list[Delivery]) -> None:
        self.consumer.offer([self.consumer.frame(d, self._tag) for d in deliveries])

    def attach(self) -> None:
        self._hub.attach_streams(self.consumer)


def _damaged(problem: Problem, end: int) -> dict[str, object]:
    resumed = end if problem.offset_to is None else problem.offset_to
    return {"reason": "damaged", "from": problem.offset_from, "resumedAt": resumed}


def _trimmed(first: int, next_: int) -> dict[str, object]:
    return {"reason": "trimmed", "from": first, "resumedAt": next_}


def read_piece(reader: Iterator[Record], filter_: Filter) -> HistoryPiece:
    """Read events until the piece is full; runs in a thread."""
    everything = isinstance(filter_.tree, Everything)
    by_document = root_of(filter_) == DOCUMENT

    def copies(record: Record) -> list[Delivery]:
        delivery = from_record(record)
        subject = delivery.document() if by_document else delivery.value
        return [delivery] if everything or _matches(filter_, subject) else []

    return _read_piece(reader, copies)


def _read_messages(reader: Iterator[Record], streams: list[Segments]) -> HistoryPiece:
    """Read stream messages until the piece is full, each once for every stream it matches."""

    def copies(record: Record) -> list[Delivery]:
        message = read_delivery(record)
        if message is None:
            return []
        segments = tuple(message.id.split(":"))
        return [message for stream in streams if streams_match(segments, stream)]

    return _read_piece(reader, copies)


def _read_piece(
    reader: Iterator[Record], copies: Callable[[Record], list[Delivery]]
) -> HistoryPiece:
    piece = HistoryPiece()
    for _ in range(PIECE_RECORDS_MAX):
        try:
            record = next(reader)
        except StopIteration:
            piece.finished = True
            break
        except LogGapError as gap:
            piece.gap = gap
            break
        piece.next = record.offset + 1
        found = copies(record)
        if found:
            piece.deliveries += found
            piece.bytes += len(found[0].value) * len(found)
            if len(piece.deliveries) >= PIECE_EVENTS_MAX or piece.bytes >= PIECE_BYTES_MAX:
                break
    return piece


def _matches(filter_: Filter, value: bytes) -> bool:
    """As the matcher judges live events: what cannot be read satisfies no filter."""
    try:
        return filter_.matches(msgspec.json.decode(value))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # a number beyond a double, for one: the matcher's own reader takes it
    try:
        return filter_.matches(parse_event(value))
    except EventError as error:
        logger.warning("event_unreadable: %s", error.message)
        return False
