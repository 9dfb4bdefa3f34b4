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
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

import msgspec

from virta.errors import EventError, LogError, LogGapError
from virta.filters.tree import Everything
from virta.hub.channel import DOCUMENT, root_of
from virta.hub.delivery import ENCODERS, Delivery, from_record
from virta.hub.idempotency import key_of
from virta.hub.topics import META
from virta.match.events import parse_event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from concurrent.futures import Executor
    from datetime import datetime

    from virta.filters import Filter
    from virta.hub.hub import Hub
    from virta.hub.idempotency import Idempotency
    from virta.hub.subscription import Subscription
    from virta.log import Log, Reader, Record

logger = logging.getLogger("virta.hub")

# One piece of a replay: small enough that a thousand replays at once stay small.
PIECE_EVENTS_MAX = 256
PIECE_BYTES_MAX = 256 * 1024
# Records looked at for one piece, so that a filter that matches nothing still shares the threads.
PIECE_RECORDS_MAX = 8192
# A reader of the log has a buffer of a mebibyte: so many read at once, the others wait their turn.
REPLAYS_MAX = 32
# How far back an id that the table has forgotten is looked for.
SEARCH_BYTES_MAX = 4 * 1024 * 1024 * 1024
# An id has blanks only when its source or id has; more than this is nobody's honest id.
SPLITS_MAX = 16


@dataclass(frozen=True)
class Start:
    """Where to begin: an offset, and what has to be said first when something is missing."""

    offset: int
    gap: dict[str, object] | None = None


class Piece:
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
        self.running = 0

    async def find(self, channel: str, last_event_id: str) -> Start:
        """Where a consumer that last saw this id has to continue."""
        pairs = _split_id(last_event_id)
        position = self._hub.position  # what comes during the search is not missed with the rest
        for source, id_ in pairs:
            offset = self._idempotency.offset(key_of(channel, source, id_))
            if offset is not None:
                return Start(offset + 1)
        loop = asyncio.get_running_loop()
        found = None
        if channel != META and pairs:
            try:
                found = await loop.run_in_executor(
                    self._executor, search, self._log, channel, set(pairs)
                )
            except LogError as error:
                logger.warning("search_failed code=%s: %s", error.code, error.message)
        if found is not None:
            return Start(found + 1)
        gap: dict[str, object] = {
            "reason": "unknown-id",
            "lastEventID": last_event_id,
            "earliest": self._log.first_offset,
            "resumedAt": position,
        }
        return Start(position, gap)

    def at(self, moment: str | int | datetime) -> Start:
        """Where `earliest`, `latest`, an offset or a time is; blocking only for a time."""
        if moment == "latest":
            return Start(self._hub.position)
        first = self._log.first_offset
        if moment == "earliest":
            return Start(first)
        if isinstance(moment, int):
            if moment < first:
                return Start(first, _trimmed(moment, first))
            position = self._hub.position
            if moment <= max(position, self._log.next_offset):
                return Start(min(moment, position))
            # Whoever knows an offset that this log has not reached knows another log.
            gap: dict[str, object] = {
                "reason": "unknown-offset",
                "from": moment,
                "earliest": first,
                "resumedAt": position,
            }
            return Start(position, gap)
        assert not isinstance(moment, str)
        reader = self._log.read(start=moment)
        try:
            return Start(reader.position)
        finally:
            reader.close()

    async def run(
        self,
        subscription: Subscription,
        start: Start,
        *,
        drained: Callable[[], asyncio.Future[None] | None],
        tell_gap: Callable[[dict[str, object]], None],
    ) -> None:
        """
        Send history from `start`, then attach the subscription.

        Args:
            drained: gives what to wait for before more may be written, or None.
            tell_gap: says that offsets are missing.
        """
        position = start.offset
        self.running += 1
        try:
            while not subscription.closed:
                end = self._hub.position
                if position >= end:
                    self._hub.attach(subscription)
                    return
                async with self._turn:
                    position, wait = await self._round(
                        subscription, position, end, drained, tell_gap
                    )
                if wait is not None:
                    await wait  # without a turn: who does not read keeps nobody from reading
        finally:
            self.running -= 1

    async def _round(
        self,
        subscription: Subscription,
        position: int,
        end: int,
        drained: Callable[[], asyncio.Future[None] | None],
        tell_gap: Callable[[dict[str, object]], None],
    ) -> tuple[int, asyncio.Future[None] | None]:
        """
        Send what stands between two offsets, until the consumer is full.

        Gives the offset to go on from, and what to wait for before.
        """
        loop = asyncio.get_running_loop()
        reader = self._log.read(
            topics=[subscription.channel], start=position, end=end, on_corruption="skip"
        )
        try:
            async for piece in self._pieces(loop, reader, subscription):
                if piece.gap is not None:
                    tell_gap(_trimmed(position, piece.gap.next))
                    return piece.gap.next, None
                if piece.deliveries:
                    payload = ENCODERS[subscription.encoding](piece.deliveries)
                    subscription.send(payload, len(piece.deliveries))
                if subscription.closed:
                    break
                wait = drained()
                if wait is not None and not piece.finished:
                    return piece.next, wait
            return end, drained()
        finally:
            reader.close()

    async def _pieces(
        self, loop: asyncio.AbstractEventLoop, reader: Reader, subscription: Subscription
    ) -> AsyncIterator[Piece]:
        finished = False
        while not finished:
            piece = await loop.run_in_executor(
                self._executor, read_piece, reader, subscription.filter
            )
            piece.deliveries = [d for d in piece.deliveries if self._first(d)]
            finished = piece.finished or piece.gap is not None
            yield piece

    def _first(self, delivery: Delivery) -> bool:
        """Not a repeat that live consumers did not hear either (as far as that is remembered)."""
        key = key_of(delivery.channel, delivery.source, delivery.id)
        known = self._idempotency.offset(key)
        return known is None or known >= delivery.offset


def search(log: Log, channel: str, pairs: set[tuple[str, str]]) -> int | None:
    """Find the offset of an event by its source and id, newest segment first."""
    needles = [id_.encode() for _, id_ in pairs if id_.isascii() and id_.isalnum()]
    plain = len(needles) == len(pairs)
    searched = 0
    for segment in reversed(log.segments()):
        searched += segment.bytes
        if searched > SEARCH_BYTES_MAX and searched > segment.bytes:
            return None
        found = None
        reader = log.read(
            topics=[channel],
            start=segment.base,
            end=segment.next,
            on_gap="skip",
            on_corruption="skip",
        )
        try:
            for record in reader:
                # A plain id stands in the text as it is: most records are ruled out undecoded.
                if plain and not any(needle in record.value for needle in needles):
                    continue
                delivery = from_record(record)
                if (delivery.source, delivery.id) in pairs:
                    found = record.offset
        finally:
            reader.close()
        if found is not None:
            return found
    return None


def _split_id(last_event_id: str) -> list[tuple[str, str]]:
    """Every (source, id) that an SSE id can stand for."""
    text = unquote_plus(last_event_id)
    pairs: list[tuple[str, str]] = []
    at = text.find(" ")
    while at >= 0 and len(pairs) < SPLITS_MAX:
        pairs.append((text[:at], text[at + 1 :]))
        at = text.find(" ", at + 1)
    return pairs


def _trimmed(first: int, next_: int) -> dict[str, object]:
    return {"reason": "trimmed", "from": first, "resumedAt": next_}


def read_piece(reader: Iterator[Record], filter_: Filter) -> Piece:
    """Read until the piece is full; runs in a thread."""
    piece = Piece()
    everything = isinstance(filter_.tree, Everything)
    by_document = root_of(filter_) == DOCUMENT
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
        delivery = from_record(record)
        subject = delivery.document() if by_document else delivery.value
        if everything or _matches(filter_, subject):
            piece.deliveries.append(delivery)
            piece.bytes += len(delivery.value)
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
