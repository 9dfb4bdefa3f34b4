"""
What both clients say to the server: paths, bodies and the meaning of answers; no I/O.

`Cursor` is the memory of a subscription: where to continue after a cut, and how long to wait before.
"""

from __future__ import annotations

import errno
import logging
import random
import re
import ssl
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus, urlencode, urlsplit

import msgspec

from virta.client.frames import Frame, Received
from virta.errors import ClientError
from virta.event import BATCH_TYPE, STRUCTURED_TYPE, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


logger = logging.getLogger("virta.client")

PORT_DEFAULT = 8232
URL_DEFAULT = f"http://127.0.0.1:{PORT_DEFAULT}"
TIMEOUT_S = 30.0
# How long a connection is kept for the next request: far below the server's own idle timeout (180 s), so the
# server rarely closes one while it is being reused.
IDLE_S = 20.0
# Waits between attempts to reconnect: doubling, with jitter, up to this.
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
# A stream that is silent for longer than this is dead: the server pings every 30 s.
SILENCE_S = 75.0
# A query is given as it stands in a URL; what no URL can hold (blanks, umlauts, `#`) is escaped.
QUERY_SAFE = "%!\"$&'()*+,-./:;<=>?@[\\]^_`{|}~"
# Answers of a server, or of a proxy before it, that will be well again.
PASSING = frozenset({408, 425, 429, 502, 503, 504})
# Requests exact positions as the ids of all frames (docs/server.md, Resume).
POSITIONS = {"Virta-Positions": "1"}
POSITION = re.compile(r"[0-9a-f]{12}\.(0|[1-9][0-9]{0,18})")
# Events that are made of a plain mapping get these attributes.
TYPE_DEFAULT = "virta.client"
SOURCE_DEFAULT = "/virta/client"
# Methods whose repetition changes nothing (RFC 9110 §9.2.2).
IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})

JSON = {"Content-Type": "application/json"}

Start = str | int | datetime


class Published(str):
    """
    The result of a publication: the durability that was met, as a string.

    `offset` is that of its first event in the log (None if the server did not send it). `duplicate` is True
    if the server already had the event; `offset` is then the original's.
    """

    __slots__ = ("duplicate", "offset")

    offset: int | None
    duplicate: bool

    def __new__(
        cls, durability: str, offset: int | None = None, *, duplicate: bool = False
    ) -> Published:
        made = super().__new__(cls, durability)
        made.offset, made.duplicate = offset, duplicate
        return made

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Published:
        """Read the headers of the answer to a publication."""
        offset = headers.get("virta-offset", "")
        return cls(
            headers.get("virta-durability", "none"),
            int(offset) if offset.isascii() and offset.isdigit() else None,
            duplicate=headers.get("virta-duplicate", "").lower() == "true",
        )

    @property
    def durability(self) -> str:
        """Return the durability that was met: none, interval, group or fsync."""
        return str(self)

    def __repr__(self) -> str:
        return f"Published({str(self)!r}, offset={self.offset}, duplicate={self.duplicate})"


class Address:
    """Where the server is and what every request carries."""

    def __init__(self, url: str, token: str | None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ClientError(f"{url!r} is no address: {error}", code="bad-address") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ClientError(f"{url!r} is no address: write http://HOST:PORT", code="bad-address")
        self.tls = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.authority = f"{host}:{self.port}"
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def websocket(self, path: str) -> str:
        return f"{'wss' if self.tls else 'ws'}://{self.authority}{self.prefix}{path}"


def publication(
    channel: str, events: Iterable[Event | Mapping[str, Any]]
) -> tuple[str, str, bytes]:
    """
    Return path, content type and body of a publication.

    Raises:
        ClientError: something is neither an event nor a mapping, or cannot be written as JSON.
    """
    bodies = [_encoded(event) for event in events]
    path = channel_path(channel)
    if len(bodies) == 1:
        return path, STRUCTURED_TYPE, bodies[0]
    return path, BATCH_TYPE, b"[%b]" % b",".join(bodies)


def _encoded(event: Event | Mapping[str, Any]) -> bytes:
    if isinstance(event, Event):
        return event.to_line()
    if not isinstance(event, Mapping):
        raise ClientError(
            f"cannot publish {type(event).__name__}: give an Event or a mapping, several events "
            "as publish(channel, *events)",
            code="bad-event",
        )
    try:
        if "specversion" in event or ("source" in event and ("id" in event or "type" in event)):
            return msgspec.json.encode(event)
        return Event.new(TYPE_DEFAULT, SOURCE_DEFAULT, dict(event)).to_line()
    except (TypeError, ValueError, RecursionError) as error:
        raise ClientError(f"cannot write the event as JSON: {error}", code="bad-event") from None


def channel_path(channel: str, start: Start | None = None, query: str = "") -> str:
    path = f"/channels/{quote_plus(channel)}"
    if start is not None:
        text = start.isoformat() if isinstance(start, datetime) else str(start)
        path += f"/from/{quote(text, safe='')}"
    return f"{path}?{quote(query, safe=QUERY_SAFE)}" if query else path


def collection_path(index: str, collection: str) -> str:
    return f"/filters/{quote(index, safe='')}/{quote(collection, safe='')}"


def filter_path(ids: Iterable[str]) -> Callable[[Start | None], str]:
    """Return the path of filters' events, by where to start."""
    joined = ",".join(ids)

    def path(start: Start | None) -> str:
        tail = channel_path("x", start).removeprefix("/channels/x/from/")
        return f"/filters/{joined}/events" + ("" if start is None else f"?from={tail}")

    return path


def streams_query(streams: Iterable[str], max_queued: int) -> str:
    pairs = [("streams", stream) for stream in streams] + [("max_queued", str(max_queued))]
    return f"/subscribe?{urlencode(pairs)}"


def streams_cursor(
    streams: Iterable[str],
    max_queued: int,
    last_event_id: str | None,
    on_gap: Callable[[dict[str, Any]], None] | None,
) -> Cursor:
    """Return the cursor of a subscription to streams."""
    path = streams_query(streams, max_queued)
    return Cursor(lambda _: path, None, last_event_id, on_gap)


def messages_body(messages: Iterable[tuple[str, str]]) -> bytes:
    return msgspec.json.encode([{"publish_to": to, "payload": text} for to, text in messages])


def check(status: int, body: bytes) -> Any:
    """
    The JSON of a good answer.

    Raises:
        ClientError: the server refused, with its status, code and sentence.
    """
    if status < 300:
        return msgspec.json.decode(body) if body.startswith((b"{", b"[")) else None
    code, message = "refused", body.decode("utf-8", "replace")[:500]
    if body.startswith(b"{"):
        refusal = msgspec.json.decode(body)
        code = refusal.get("code", code)
        message = refusal.get("message") or code
    raise ClientError(f"the server answered {status}: {message}", code=code, status=status)


def check_stream(kind: str | None) -> None:
    """
    Insist on a stream of events.

    Raises:
        ClientError: whoever answered speaks of something else, now and the next time.
    """
    if kind is not None and not kind.lower().startswith("text/event-stream"):
        raise ClientError(
            f"the answer is {kind}, not a stream of events", code="not-a-stream", status=200
        )


def is_repeatable(method: str, path: str) -> bool:
    """
    Return whether a request may arrive twice without harm.

    Publications to channels may: the server drops repeats by source and id. Messages to streams have
    no id, and a POST to the journal may push or take a job.
    """
    return method in IDEMPOTENT or (method == "POST" and path.startswith("/channels/"))


def unreachable(address: Address, error: Exception) -> ClientError:
    """Return the error of a server that could not be reached, with what to do about it."""
    why = str(error) or type(error).__name__
    refused = isinstance(error, OSError) and (
        # asyncio joins the errors of several addresses into one without a number.
        error.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in why
    )
    if refused:
        port = "" if address.port == PORT_DEFAULT else f" --port {address.port}"
        why = f"connection refused; is `virta serve` running? Start it with `virta serve{port}`"
        why += ", or give the address where it runs"
    return ClientError(f"no answer from {address.authority}: {why}", code="unreachable")


def is_final(error: ClientError) -> bool:
    """Tell whether asking again would be of no use."""
    if isinstance(error.__cause__, ssl.SSLCertVerificationError):
        return True
    return error.status is not None and error.status not in PASSING


class Cursor:
    """How a subscription goes on after it was cut."""

    def __init__(
        self,
        path: Callable[[Start | None], str],
        start: Start | None,
        last_event_id: str | None,
        on_gap: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._path = path
        self._start = start
        self.last_event_id = last_event_id
        self._on_gap = on_gap
        self._attempts = 0
        self._retry_s: float | None = None
        self._told = False

    def request(self) -> tuple[str, dict[str, str]]:
        """Path and headers of the next attempt."""
        headers = {"Accept": "text/event-stream"} | POSITIONS
        if self.last_event_id is not None:
            headers["Last-Event-ID"] = self.last_event_id
        return self._path(self._start), headers

    def connected(self, position: str | None) -> None:
        """Record that the stream is open; until its first frame, `position` is where to resume."""
        self._attempts = 0
        self._told = False
        if self._start is None and self.last_event_id is None and position is not None:
            self._start = int(position)

    def take(self, frame: Frame) -> Received | None:
        """Process a frame; return the event that it delivers, if any."""
        if frame.retry_ms is not None:
            self._retry_s = frame.retry_ms / 1000
        if frame.id:
            # Frames without an event too: events that did not match need not be read again.
            self.last_event_id = frame.id
        if frame.event == "data" and frame.id is not None:
            event = Event.from_json(frame.data, lenient=True)
            return Received(event, frame.id, _offset(frame))
        if frame.event == "gap" and self._on_gap is not None:
            self._on_gap(frame.json())
        return None

    def take_message(self, text: str | bytes) -> tuple[str, str] | None:
        """Process a message of a stream's socket; return (stream id, text) if it delivers one."""
        message = msgspec.json.decode(text)
        position = message.get("position")
        if position is not None:
            self.last_event_id = position
        if "publish_to" in message:
            return message["publish_to"], message["payload"]
        if "gap" in message and self._on_gap is not None:
            self._on_gap(message["gap"])
        return None

    def unanswered(self, error: Exception) -> None:
        """Say once that the server is away: who waits should know for what."""
        if not self._told:
            self._told = True
            logger.warning("%s; trying again until it answers", error)

    def wait_s(self) -> float:
        """How long to wait before the next attempt."""
        if self._retry_s is not None:
            wait, self._retry_s = self._retry_s, None
            return wait
        backoff = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * float(1 << self._attempts))
        self._attempts = min(self._attempts + 1, 16)
        return backoff * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret


def _offset(frame: Frame) -> int | None:
    """Return the offset of a `data` frame's record: its id is the position after it."""
    assert frame.id is not None
    found = POSITION.fullmatch(frame.id)
    if found is not None:
        return int(found[1]) - 1
    try:  # a server without positions may still send the offset in the frame's comment
        return int(msgspec.json.decode(frame.comment)["offset"])
    except (TypeError, KeyError, ValueError, msgspec.DecodeError):
        return None
