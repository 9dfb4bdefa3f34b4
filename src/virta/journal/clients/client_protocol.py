"""
The client's side of a connection, without I/O: requests out, replies and notifications in.

`Client` and `AsyncClient` drive the same `ClientProtocol`. Invariant: an identifier is never reused while its
reply is outstanding; 0 is reserved for messages that the daemon sends unasked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from virta.errors import JournalError
from virta.journal.protocol.codec import ReplyParser, encode_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.protocol.codec import WireError
    from virta.journal.protocol.messages import Reply, Request

IDENTIFIER_MAX = 65_535
# Notifications that were not read yet; the oldest are dropped.
NOTIFICATIONS_MAX = 10_000
T = TypeVar("T")


class ClientProtocol(Generic[T]):
    """
    Matches replies with requests; `notify` gets the messages that answer none.

    Each request is sent with a token, which `receive` returns together with the reply.
    """

    def __init__(self, notify: Callable[[Reply], None]) -> None:
        self.outstanding: dict[int, T] = {}
        self._notify = notify
        self._parser = ReplyParser()
        self._identifier = 0

    @property
    def error(self) -> WireError | None:
        """Return what was wrong with the received bytes; after that nothing is read any more."""
        return self._parser.error

    @property
    def partial(self) -> bool:
        """Return whether the beginning of a reply was received."""
        return self._parser.buffered > 0

    def number(self, request: Request) -> int:
        """Set and return the identifier of the next request."""
        outstanding = self.outstanding
        if len(outstanding) >= IDENTIFIER_MAX:
            raise JournalError(f"{IDENTIFIER_MAX} commands are unanswered", code="too-large")
        identifier = self._identifier % IDENTIFIER_MAX + 1
        while identifier in outstanding:
            identifier = identifier % IDENTIFIER_MAX + 1
        request.identifier = self._identifier = identifier
        return identifier

    def send(self, request: Request, token: T) -> bytes:
        """Return the bytes of a request; one that is refused here leaves nothing outstanding."""
        identifier = self.number(request)
        encoded = encode_request(request)
        self.outstanding[identifier] = token
        return encoded

    def receive(self, data: bytes) -> list[tuple[T, Reply]]:
        """Return the tokens and replies that some bytes complete; replies to calls that timed out are dropped."""
        answered = []
        for reply in self._parser.feed(data):
            if not reply.identifier:
                self._notify(reply)
            elif reply.identifier in self.outstanding:
                answered.append((self.outstanding.pop(reply.identifier), reply))
        return answered


def connection_lost(reason: object) -> JournalError:
    """Return the error of a call whose connection ended."""
    return JournalError(
        f"the connection to the journal was lost ({reason}); unanswered commands may or may not have been executed",
        code="disconnected",
    )


def unreachable(host: str, port: int, error: OSError) -> JournalError:
    """Return the error of a connection that could not be made."""
    return JournalError(
        f"no journal at {host}:{port} ({error.strerror or error}); is `virta serve` or "
        f"`virta journal serve` running?",
        code="disconnected",
    )
