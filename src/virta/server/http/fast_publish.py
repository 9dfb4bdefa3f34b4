"""
The quick way in: publications whose head was seen before, all that arrived in a tick in one pass.

A publisher sends the same head again and again; only the length differs. Once a head has passed every
check that looks at nothing but the head, its bytes are remembered with what they meant. A small request
behind such a head, at once or in pieces, needs no parser, no request object and no queue:

    data ──► known head? ──► arrived ─┬─► bodies read ──► one append ──► matched ──► answers
                 └─ no: the parser    └─ (one tick)

The head of a binary event holds its attributes, so none comes twice. What repeats is the rest of it:
such heads are known without the values of their attributes, which are read for each.

Invariant: what is known of a head is what the parser and the checks would say again, since they are
functions of its bytes and of settings that do not change. (On a wildcard address a Host may have been
right because the connection arrived there; it is an address of this server on every other connection,
too. Answers to web pages differ, so heads with an `Origin` are not remembered.)

Everything else (pipelines, large bodies in pieces, other routes and modes) takes the long way, which
gives the same answers.
"""

from __future__ import annotations

import re
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from virta.errors import LogError, LogLimitError, LogLockTimeoutError, RequestError
from virta.hub.event_batch import EventBatch
from virta.server.event_input import (
    BATCH,
    MODES,
    STRUCTURED,
    Headers,
    read_batch,
    read_events,
    read_quickly,
)
from virta.server.http import responses
from virta.server.http.response_queue import Exchange

if TYPE_CHECKING:
    from virta.hub.delivery import Delivery
    from virta.hub.publisher import Part
    from virta.server.http.fast_connection import QuickLane
    from virta.server.service import Service

END_OF_HEAD = b"\r\n\r\n"
# Heads that are remembered, and how long one may be: together a few megabytes at most.
HEADS_MAX = 4096
HEAD_BYTES_MAX = 1024
# An attribute of a binary event as most are: plain names, one space, a value without spaces around it.
ATTRIBUTE = re.compile(
    rb"\r\n([cC][eE]-[a-zA-Z0-9]+): ([!-~\x80-\xff](?:[ -~\x80-\xff]*[!-~\x80-\xff])?)(?=\r|\Z)"
)
ANY_ATTRIBUTE = re.compile(rb"\r\nce-", re.IGNORECASE)
# What a head may not hold that is known without its values: a folded line, a type beside the content's.
NO_OUTLINE = re.compile(rb"\r\n[ \t]|\r\nce-datacontenttype:", re.IGNORECASE)
# Reading a smaller body takes no millisecond, which is the unit in which it is told.
TIMED_BODY_BYTES = 16 * 1024
# So many events and bytes are handed on together; more would make a tick long, and they share one fate
# in the log.
RUN_EVENTS_MAX = 8192
RUN_BYTES_MAX = 8 * 1024 * 1024

# Milliseconds in which a body was read and its JSON parsed.
Times = tuple[int, int]
NO_TIMES = (0, 0)
# The connection that waits for a response, its times, and what it sent.
Waiting = tuple["QuickLane", Times, "Delivery | EventBatch | list[Delivery]"]


class KnownHead(NamedTuple):
    """What a head means: a publication to this channel, with a body of this length behind it."""

    size: int  # of the whole request
    start: int  # of the body
    channel: str
    content_type: bytes
    mode: bytes
    attributes: Headers  # of a binary event


class QuickWay:
    """The heads that are known and the publications of this tick."""

    def __init__(self, service: Service) -> None:
        self.heads: dict[bytes, KnownHead] = {}
        # Heads of binary events without the values of their attributes.
        self.outlines: dict[tuple[bytes, ...], KnownHead] = {}
        # Whose, what head, the bytes, and since when they arrive unless they came at once.
        self.arrived: list[tuple[QuickLane, KnownHead, bytes, float]] = []
        self._service = service
        # Whether the attributes of binary events are percent-decoded.
        self.percent = bool(service.config.percent_decode_headers)

    def learn(self, head: bytes, channel: str, content_type: bytes, mode: bytes, size: int) -> None:
        """Remember a head that passed all checks; `size` is the length it announces."""
        if len(head) > HEAD_BYTES_MAX:
            return
        # Where the head ends is only certain when every line ends as it should.
        lines = head.count(b"\r\n")
        if head.count(b"\n") != lines or head.count(b"\r") != lines:
            return
        start = len(head) + len(END_OF_HEAD)
        known = KnownHead(start + size, start, channel, content_type, mode, [])
        if mode in MODES:
            if len(self.heads) >= HEADS_MAX:
                self.heads.clear()
            self.heads[head] = known
        elif not NO_OUTLINE.search(head):
            outline, values = _outline(head)
            if len(values) == len(ANY_ATTRIBUTE.findall(head)):
                if len(self.outlines) >= HEADS_MAX:
                    self.outlines.clear()
                names = [name.lower() for name in outline[1::2]]
                attributes = list(zip(names, values, strict=True))
                self.outlines[outline] = known._replace(attributes=attributes)

    def recognise(self, head: bytes) -> KnownHead | None:
        """What the head of a binary event means, if its like was seen before."""
        if len(head) > HEAD_BYTES_MAX or len(head) > self._service.head_bytes_max:
            return None
        outline, values = _outline(head)
        known = self.outlines.get(outline)
        if known is None:
            return None
        size, start, channel, content_type, mode, attributes = known
        attributes = [(name, value) for (name, _), value in zip(attributes, values, strict=True)]
        more = len(head) + len(END_OF_HEAD) - start
        return KnownHead(size + more, start + more, channel, content_type, mode, attributes)

    def run(self) -> None:
        """Read, write and answer what has arrived."""
        arrived = self.arrived
        if not arrived:
            return
        self.arrived = []
        service = self._service
        publisher = service.publisher
        service.requests += len(arrived)
        service.translations += len(arrived)
        room = publisher.room
        size = number = 0
        drafts: list[Delivery] = []
        parts: list[Part] = [drafts]
        waiting: list[Waiting] = []
        began = perf_counter()
        for protocol, known, data, since in arrived:
            structured = known.mode is STRUCTURED
            draft = read_quickly(known.channel, data[known.start :]) if structured else None
            size += known.size
            if draft is not None and room > 0 and size <= RUN_BYTES_MAX:
                room -= 1
                number += 1
                drafts.append(draft)
                waiting.append((protocol, _since(since, began) if since else NO_TIMES, draft))
                continue
            read_ms = _since(since, began)[0] if since else 0
            part, parse_ms = self._read(protocol, known, data, draft, read_ms)
            if part is None:
                continue
            if waiting and (
                room <= 0  # what is under way is part of what the refusal tells
                or size > RUN_BYTES_MAX
                or number + len(part) > RUN_EVENTS_MAX
            ):
                publisher.take(parts, _Answers(service, waiting))
                drafts, waiting, size, number = [], [], known.size, 0
                parts = [drafts]
            if room <= 0:
                refusal = service.overloaded(len(part))
                _refuse(protocol, refusal, responses.timings(read_ms, parse_ms))
                continue
            room -= len(part)
            number += len(part)
            if isinstance(part, EventBatch):
                drafts = []  # what comes behind it
                parts += [part, drafts]
            else:
                drafts += part
            waiting.append((protocol, (read_ms, parse_ms), part))
        service.translation_seconds += perf_counter() - began
        if waiting:
            publisher.take(parts, _Answers(service, waiting))
        publisher.write()

    def _read(
        self,
        protocol: QuickLane,
        known: KnownHead,
        data: bytes,
        draft: Delivery | None,
        read_ms: int,
    ) -> tuple[EventBatch | list[Delivery] | None, int]:
        """The events of a body that wants a closer look, and how long that took; None: refused."""
        if draft is not None:
            return [draft], 0
        began = perf_counter() if known.size - known.start > TIMED_BODY_BYTES else 0.0
        channel, mode = known.channel, known.mode
        try:
            part = read_batch(channel, data, known.start) if mode is BATCH else None
            events = part or read_events(
                channel,
                known.attributes,
                known.content_type,
                mode,
                data[known.start :],
                percent=self.percent,
            )
        except RequestError as error:
            _refuse(protocol, error, responses.timings(read_ms))
            return None, 0
        except Exception:
            # Nobody foresaw this one; the others of this tick are not to suffer from it.
            self._service.logger.exception("request_failed")
            _refuse(protocol, RequestError(500, "internal-failure"), b"")
            return None, 0
        return events, int((perf_counter() - began) * 1000) if began else 0


def _outline(head: bytes) -> tuple[tuple[bytes, ...], list[bytes]]:
    """A head in pieces, each second one the name of an attribute, and the values of these."""
    pieces = ATTRIBUTE.split(head)
    values = pieces[2::3]
    del pieces[2::3]
    return tuple(pieces), values


def _since(began: float, now: float) -> Times:
    """The times of a publication that took so long to arrive and none to read."""
    return max(0, int((now - began) * 1000)), 0


class _Answers:
    """The answers of one run, given when the log has its events."""

    __slots__ = ("_service", "_since", "_waiting")

    def __init__(self, service: Service, waiting: list[Waiting]) -> None:
        self._service = service
        self._waiting = waiting
        self._since = perf_counter()

    def __call__(self, error: LogError | None) -> None:
        if error is not None:
            refusal = log_refusal(error)
            for protocol, times, _ in self._waiting:
                _refuse(protocol, refusal, responses.timings(*times))
            return
        service = self._service
        responder = service.responder
        encode_ms = int((perf_counter() - self._since) * 1000)
        head = responder.accepted_head()
        tails: dict[Times, bytes] = {}
        first = responder.numbers(len(self._waiting))
        for number, (protocol, times, part) in enumerate(self._waiting, first):
            tail = tails.get(times)
            if tail is None:
                tail = tails[times] = responder.accepted_tail(*times, encode_ms)
            if not isinstance(part, list) and part.offset >= 0:
                place = b"\r\nVirta-Offset: %d" % part.offset
            else:
                offset, repeat = service.publisher.place(part)
                place = responses.placed(offset, repeat=repeat)
            response = b"%b%08x%b%b" % (head, number & 0xFFFFFFFF, place, tail)
            quick = protocol.quick
            if quick is True and not service.draining:
                protocol.quick = None
                transport = protocol.transport
                if not transport.is_closing():
                    transport.write(response)
            else:
                _answer(protocol, response)


def _answer(protocol: QuickLane, response: bytes) -> None:
    """Answer a publication that is not alone on its connection, or the last there."""
    protocol.settle_quick()
    exchange, protocol.quick = protocol.quick, None
    if isinstance(exchange, Exchange):
        close = protocol.service.draining
        if close:
            response = response.replace(responses.KEEP, responses.CLOSE, 1)
        protocol.exchanges.answer(exchange, response, close=close)


def _refuse(protocol: QuickLane, error: RequestError, more: bytes) -> None:
    """Refuse a publication; the connection stays, unless the server drains."""
    protocol.settle_quick()
    exchange, protocol.quick = protocol.quick, None
    if isinstance(exchange, Exchange):
        protocol.refuse(exchange, error, close=protocol.service.draining, more=more)


def log_refusal(error: LogError) -> RequestError:
    """What a publisher hears when the log does not take its events."""
    if isinstance(error, LogLimitError):
        return RequestError(413, "body-too-large", error.message)
    if error.code == "log_disk_full":
        return RequestError(507, "insufficient-storage", f"nothing was kept: {error.message}")
    if isinstance(error, LogLockTimeoutError):
        return RequestError(503, "log-busy", f"nothing was kept: {error.message}")
    return RequestError(500, "internal-failure", f"the log refused the write: {error.message}")
