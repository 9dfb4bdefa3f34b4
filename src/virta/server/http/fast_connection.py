"""
The part of a connection that the quick way needs (`virta.server.http.fast_publish`).

Between two requests (`between`) a publication with a head that is known goes past the parser, whole
or in small pieces. `quick` says that one is under way: True while it is alone on its connection, its
place in line once something came behind it. Everything else is for `parse`, the long way.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from virta.server.http.deadlines import NEVER, OFF_WHEEL
from virta.server.http.fast_publish import END_OF_HEAD
from virta.server.http.response_queue import Exchange, ExchangeQueue

if TYPE_CHECKING:
    from virta.errors import RequestError
    from virta.server.http.fast_publish import QuickWay
    from virta.server.service import Service

# A publication of at most this many bytes is kept until it is whole; larger ones are parsed as they come.
HELD_BYTES_MAX = 64 * 1024


class QuickLane(HttpToolsProtocol):
    """A connection's way past the parser."""

    __slots__ = (
        "_arriving_head",
        "_held",
        "_held_since",
        "between",
        "body_bytes",
        "cors",
        "deadline",
        "exchanges",
        "head_bytes",
        "quick",
        "slot",
    )

    service: ClassVar[Service]
    way: ClassVar[QuickWay]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.deadline = NEVER
        self.slot = OFF_WHEEL
        self.cors = b""  # CORS headers of the response to the request whose head was read last
        self.exchanges = ExchangeQueue(self.write, self.end)
        # The parser stands between two requests and this is still a connection for requests.
        self.between = True
        self.quick: Exchange | bool | None = None
        # The bytes of the head that arrives, and then of the one that is checked, if all are at hand.
        self._arriving_head = self.head_bytes = b""
        # A publication with a known head whose body is not all there, and since when.
        self._held = b""
        self._held_since = 0.0
        # State of the body that is arriving.
        self.body_bytes = 0

    def parse(self, data: bytes) -> None:
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def expired(self, now: float) -> None:
        raise NotImplementedError

    def refuse_body(self) -> None:
        raise NotImplementedError

    def refuse(
        self, exchange: Exchange, error: RequestError, *, close: bool, more: bytes = b""
    ) -> None:
        raise NotImplementedError

    def refuse_last(self, error: RequestError) -> None:
        raise NotImplementedError

    def enter(self, cors: bytes | None = None) -> Exchange:
        """Queue a request in order of arrival; on the fast path it comes from a program."""
        exchange = Exchange(cors=self.service.door.cors if cors is None else cors)
        self.exchanges.add(exchange)
        return exchange

    def data_received(self, data: bytes) -> None:
        held = bool(self._held)
        if self.between:
            if held:
                data, self._held = self._held + data, b""
            way = self.way
            at = data.find(END_OF_HEAD)
            head = data[:at]
            known = way.heads.get(head)
            if known is None and way.outlines and at > 0:
                known = way.recognise(head)
            if known is None:
                self._arriving_head = head if at > 0 else b""
            elif self.quick is None and not self.exchanges:
                if len(data) == known.size:
                    if held:
                        self.service.unfinished.drop(self)
                    self.quick = True
                    self.deadline = self.service.wheel.now + self.service.idle_s
                    if not way.arrived:
                        self.loop.call_soon(way.run)
                    way.arrived.append((self, known, data, self._held_since))
                    self._held_since = 0.0
                    return
                if len(data) < known.size <= HELD_BYTES_MAX:
                    self._hold(data)
                    return
        if held:
            self.service.unfinished.drop(self)
        self._held_since = 0.0
        self.parse(data)

    def _hold(self, data: bytes) -> None:
        """Keep the first piece of a publication with a known head; many clients send two."""
        self._held = data
        self.service.unfinished.set(self, len(data))  # as old as its first byte
        if not self._held_since:
            self._held_since = perf_counter()
            deadline = self.service.wheel.now + self.service.body_s
            if self.deadline > deadline:
                self.service.wheel.set(self, deadline)

    def drop_first_piece(self) -> None:
        """Forget the first piece of a publication, which will not be read."""
        self._held, self._held_since = b"", 0.0

    def settle_quick(self) -> None:
        """Something comes behind a publication on the quick way: from now on it has a place in line."""
        if self._held:
            held, self._held, self._held_since = self._held, b"", 0.0
            self.service.unfinished.drop(self)
            self.parse(held)
        if self.quick is True:
            self.way.run()  # before whatever came later is published
        if self.quick is True:
            self.quick = self.enter()

    def arrive_in_time(self, now: float) -> None:
        """Limit the time of an arriving request, from its first byte, and its share of memory."""
        if self.body_bytes:
            self.service.unfinished.set(self, self.body_bytes)
        if self.deadline > now + self.service.body_s:
            self.service.wheel.set(self, now + self.service.body_s)

    def forget_body(self) -> None:
        """End the limits of a body that is complete, refused or lost."""
        if self.body_bytes:
            self.body_bytes = 0
            self.service.unfinished.drop(self)

    def release(self) -> None:
        """
        Drop every reference back to this connection, which is lost.

        Otherwise it would stay in memory until a full garbage collection, which is rare.
        """
        self.service.wheel.remove(self)
        self.service.unfinished.drop(self)
        self.exchanges.close()
        # Its publication is still written to the log; the response is dropped.
        self.quick = None
        self._held = self._arriving_head = self.head_bytes = b""
        self.between = False

    def on_headers_complete(self) -> None:
        self.head_bytes, self._arriving_head = self._arriving_head, b""
