"""
The fast path: publications whose head is cached, all that arrived in one turn of the loop together.

A small request with a cached head (`virta.server.http.head_cache`), whole or in two pieces, needs no
parser, no request object and no queue:

    data ──► head cached? ──► arrived ─┬─► bodies read ──► one append ──► matched ──► responses
                 └─ no: the parser     └─ (one turn of the loop)

Everything else (pipelined requests, large bodies in pieces, other routes and modes) goes through the
parser (`virta.server.http.connection`), which gives the same responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from virta.errors import LogError, RequestError
from virta.hub.event_batch import EventBatch
from virta.hub.event_matcher import read_heads
from virta.server.event_input import STRUCTURED, read_events, read_small
from virta.server.http import responses
from virta.server.http.head_cache import END_OF_HEAD, HeadCache, KnownHead
from virta.server.http.requests import check_row_filter
from virta.server.http.response_queue import PendingResponse

if TYPE_CHECKING:
    from virta.filters import Filter
    from virta.hub.delivery import Delivery
    from virta.hub.event_matcher import Head
    from virta.hub.publisher import Part
    from virta.server.http.connection import HttpConnection
    from virta.server.service import Service

# The first piece of a larger publication is not kept: the parser reads it as it arrives.
PIECE_BYTES_MAX = 64 * 1024
# Parsing a smaller request takes less than a millisecond, the unit in which the time is reported.
TIMED_BYTES = 16 * 1024
# Publications up to these limits are written together: more would make a turn of the loop long, and they
# are accepted or refused together.
RUN_EVENTS_MAX = 8192
RUN_BYTES_MAX = 8 * 1024 * 1024

# Milliseconds in which a body arrived and was parsed.
Times = tuple[int, int]

# The state of a publication whose connection has nothing else in progress: it needs no queue.
UNQUEUED = PendingResponse()


class FastInput:
    """The fast path of one connection."""

    __slots__ = ("_piece", "_publisher", "_since", "connection", "pending", "unknown_head")

    def __init__(self, connection: HttpConnection, publisher: FastPublisher) -> None:
        self.connection: HttpConnection | None = connection
        self._publisher = publisher
        # The publication that waits for its response: UNQUEUED until a request follows it.
        self.pending: PendingResponse | None = None
        # The bytes of a head that the parser gets, so that the request can cache it.
        self.unknown_head = b""
        # A publication with a cached head whose body is not complete, and since when.
        self._piece = b""
        self._since = 0.0

    def feed(self, data: bytes) -> bytes:
        """Accept a publication; return what the parser has to read instead, if anything."""
        connection = self.connection
        assert connection is not None, "a lost connection receives nothing"
        since = 0.0
        if self._piece:
            data, since = self._piece + data, self._since
            self._piece = b""
        publisher = self._publisher
        at = data.find(END_OF_HEAD)
        head = data[:at] if at > 0 else b""
        known: KnownHead | None = publisher.heads[head]
        if known is None:
            self.unknown_head = head
        elif self.pending is None and not connection.responses:
            if len(data) == known.size:
                service = connection.service
                self.pending = UNQUEUED
                connection.deadline = service.timers.now + service.idle_s
                if since:
                    service.unfinished.drop(connection)
                    connection.forget_arrival()
                    connection.restart_deadline()
                if not publisher.arrived:
                    connection.loop.call_soon(publisher.run)
                publisher.arrived.append((self, known, data, since))
                return b""
            if len(data) < known.size <= PIECE_BYTES_MAX:
                self._keep_piece(connection, data, since)
                return b""
        if since:
            connection.service.unfinished.drop(connection)
        return data

    def _keep_piece(self, connection: HttpConnection, data: bytes, since: float) -> None:
        """Keep the first piece of a publication with a cached head; many clients send two."""
        self._piece = data
        self._since = since or perf_counter()
        connection.service.unfinished.set(connection, len(data))  # as old as its first byte
        connection.limit_arrival()

    def drop_piece(self) -> None:
        """Forget the first piece of a publication, which will not be read."""
        self._piece = b""

    def flush(self) -> None:
        """Pass a first piece to the parser; queue a pending publication, so that others come after it."""
        connection = self.connection
        if connection is None:
            return
        if self._piece:
            piece, self._piece = self._piece, b""
            connection.service.unfinished.drop(connection)
            connection.parse(piece)
        if self.pending is UNQUEUED:
            self._publisher.run()  # before what follows it is published
        if self.pending is UNQUEUED:
            self.pending = connection.responses.enqueue(connection.service.auth.cors)

    def respond(self, response: bytes) -> None:
        """Send the 202 of a publication that is queued, or the last on its connection."""
        self.flush()
        pending, self.pending = self.pending, None
        if pending is not None and self.connection is not None:
            close = self.connection.service.draining
            if close:
                response = response.replace(responses.KEEP, responses.CLOSE, 1)
            self.connection.responses.complete(pending, response, close=close)

    def refuse(self, error: RequestError, timings: bytes = b"") -> None:
        """Refuse a publication; the connection stays open, unless the server drains."""
        if self.pending is not None and self.connection is not None:
            refusal = self.connection.service.responder.refusal(error)
            self.respond(refusal.to_bytes(close=False, more=timings))

    def close(self) -> None:
        """Release a lost connection; its publication is still written, the response is dropped."""
        self.pending = self.connection = None
        self._piece = self.unknown_head = b""


# A connection, its head, the bytes of its request, and since when they arrived if not at once.
Arrived = tuple[FastInput, KnownHead, bytes, float]
# The connection that waits for a response, its times, what it publishes, and its head.
Waiting = tuple[FastInput, Times, "Part", KnownHead]
# Bodies of one turn with one event each, and what was read of them together.
SmallBodies = Iterator[tuple[bytes, "Head | None"]]


class FastPublisher:
    """Reads, publishes and answers what arrived on the fast path, for all connections."""

    def __init__(self, service: Service, heads: HeadCache) -> None:
        self.heads = heads
        self.arrived: list[Arrived] = []
        self._service = service

    def run(self) -> None:
        """Publish what has arrived."""
        arrived = self.arrived
        if not arrived:
            return
        self.arrived = []
        service = self._service
        service.requests += len(arrived)
        service.translations += len(arrived)
        began = perf_counter()
        waiting = self._read_arrived(arrived, began)
        service.translation_seconds += perf_counter() - began
        self._publish(waiting)
        service.publisher.write()

    def _read_arrived(self, arrived: list[Arrived], began: float) -> list[Waiting]:
        """Read and check what has arrived, refuse what is invalid or excluded by a row filter; return the rest."""
        waiting: list[Waiting] = []
        read = _read_small_bodies(arrived)
        now, rates_limited = self._service.now, self._service.auth.is_rate_limited
        head: KnownHead | None = None
        for input_, known, data, since in arrived:
            if known is not head:  # almost always all have the same head
                head = known
                channel, access = known.channel, known.access
                checked = access is not None and (rates_limited or access.principal.expires <= now)
                row_filter = None if access is None else access.row_filter
                small = read.get(id(row_filter)) if _is_small(known) else None
            read_ms = _elapsed_ms(since, began) if since else 0
            parse_ms = 0
            try:
                satisfied = False
                if small is not None:
                    body, found = next(small)
                    event = read_small(channel, body, found)
                    part: Part = [event]
                    # The filter was evaluated on the body, which counts if exactly that is stored.
                    satisfied = found is not None and found[0] > 0 and event.value is body
                else:
                    part, parse_ms = self._read_part(known, data)
                if checked:
                    self._check_access(known, input_)
                if row_filter is not None and not satisfied:
                    check_row_filter(row_filter, part)
            except Exception as error:  # noqa: BLE001
                self._refuse(input_, error, read_ms)
                continue
            waiting.append((input_, (read_ms, parse_ms), part, known))
        return waiting

    def _publish(self, read: list[Waiting]) -> None:
        """Give publications to the publisher, in runs up to the limits; refuse what is beyond its capacity."""
        service = self._service
        publisher = service.publisher
        capacity = publisher.capacity
        size = number = 0
        drafts: list[Delivery] = []
        parts: list[Part] = [drafts]
        waiting: list[Waiting] = []
        for one in read:
            input_, times, part, known = one
            size += known.size
            if waiting and (
                capacity <= 0  # the refusal reports how much is in progress
                or size > RUN_BYTES_MAX
                or number + len(part) > RUN_EVENTS_MAX
            ):
                publisher.add(parts, _Answers(service, waiting))
                drafts, waiting, size, number = [], [], known.size, 0
                parts = [drafts]
            if capacity <= 0:
                input_.refuse(service.overloaded(len(part)), service.responder.timings(*times))
                continue
            capacity -= len(part)
            number += len(part)
            if isinstance(part, EventBatch):
                drafts = []  # for the events after it
                parts += [part, drafts]
            else:
                drafts += part
            waiting.append(one)
        if waiting:
            publisher.add(parts, _Answers(service, waiting))

    def _read_part(self, known: KnownHead, data: bytes) -> tuple[Part, int]:
        """Return the events of a body and the milliseconds that parsing took."""
        began = perf_counter()
        percent = self._service.percent_decode
        _, start, channel, content_type, mode, attributes, _ = known
        part = read_events(channel, attributes, content_type, mode, data, start, percent=percent)
        return part, int((perf_counter() - began) * 1000)

    def _check_access(self, known: KnownHead, input_: FastInput) -> None:
        """Refuse a publication whose principal has expired or sends too much."""
        service, connection, access = self._service, input_.connection, known.access
        assert access is not None
        if access.principal.expires <= service.now:
            raise RequestError(401, "unauthorized", "the token has expired", reason="token-expired")
        if service.auth.is_rate_limited and connection is not None:
            refusal = service.auth.check_rates(access.principal, connection.transport)
            if refusal is not None:
                raise refusal

    def _refuse(self, input_: FastInput, error: Exception, read_ms: int) -> None:
        if not isinstance(error, RequestError):
            # Unexpected; the other publications of this turn are not affected.
            self._service.logger.error("request_failed", exc_info=error)
            error = RequestError(500, "internal-failure")
        input_.refuse(error, self._service.responder.timings(read_ms))


def _is_small(known: KnownHead) -> bool:
    """Return whether a publication is one event that is read with the others of its turn."""
    return known.mode is STRUCTURED and known.size < TIMED_BYTES


def _read_small_bodies(arrived: list[Arrived]) -> dict[int, SmallBodies]:
    """
    Read the heads of small bodies, all under one row filter in one call, which also says whether they satisfy it.

    They are keyed by `id()` of the filter, as filters of different dialects may compare equal.
    """
    by_filter: dict[int, tuple[Filter | None, list[bytes]]] = {}
    head: KnownHead | None = None
    bodies: list[bytes] | None = None
    for _, known, data, _ in arrived:
        if known is not head:
            head, start, access, bodies = known, known.start, known.access, None
            if _is_small(known):
                row_filter = None if access is None else access.row_filter
                bodies = by_filter.setdefault(id(row_filter), (row_filter, []))[1]
        if bodies is not None:
            bodies.append(data[start:])
    return {
        key: zip(bodies, read_heads(row_filter, bodies), strict=True)
        for key, (row_filter, bodies) in by_filter.items()
    }


def _elapsed_ms(since: float, now: float) -> int:
    return max(0, int((now - since) * 1000))


class _Answers:
    """Answers publications that were written together, when the log has their events."""

    __slots__ = ("_service", "_since", "_waiting")

    def __init__(self, service: Service, waiting: list[Waiting]) -> None:
        self._service = service
        self._waiting = waiting
        self._since = perf_counter()

    def __call__(self, error: LogError | None) -> None:
        if error is not None:
            refusal = responses.log_refusal(error)
            for input_, times, _, _ in self._waiting:
                input_.refuse(refusal, self._service.responder.timings(*times))
            return
        service = self._service
        if service.tracing is not None:
            for _, _, part, _ in self._waiting:
                service.tracing.published(part, self._since)
        responder = service.responder
        encode_ms = int((perf_counter() - self._since) * 1000)
        head = responder.accepted_head()
        tails: dict[Times, bytes] = {}
        first = responder.reserve_ids(len(self._waiting))
        for number, (input_, times, part, _) in enumerate(self._waiting, first):
            tail = tails.get(times)
            if tail is None:
                tail = tails[times] = responder.accepted_tail(*times, encode_ms)
            offset = part.offset if isinstance(part, EventBatch) else part[0].offset if part else -1
            if offset >= 0:  # almost all
                place = b"\r\nVirta-Offset: %d" % offset
            else:
                place = responses.offset_headers(*service.publisher.place(part))
            response = b"%b%08x%b%b" % (head, number & 0xFFFFFFFF, place, tail)
            if input_.pending is UNQUEUED and not service.draining:
                input_.pending = None
                transport = input_.connection.transport  # type: ignore[union-attr]  # it is pending
                if not transport.is_closing():
                    transport.write(response)
            else:
                input_.respond(response)
