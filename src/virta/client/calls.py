"""
What both clients ask of the server, and what its answers mean; no I/O.

A `ServerCall` is one request and the reading of its answer. The blocking and the asyncio client send the same
calls and differ only in how they send them.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote, quote_plus, urlencode, urlsplit

import msgspec

from virta.errors import ClientError
from virta.event import BATCH_TYPE, STRUCTURED_TYPE, Event

PORT_DEFAULT = 8232
URL_DEFAULT = f"http://127.0.0.1:{PORT_DEFAULT}"
TIMEOUT_S = 30.0
# A query is given as it stands in a URL; characters that no URL can contain (blanks, umlauts, `#`) are escaped.
QUERY_SAFE = "%!\"$&'()*+,-./:;<=>?@[\\]^_`{|}~"
# Statuses of a server, or of a proxy before it, after which a later attempt may succeed.
TEMPORARY = frozenset({408, 425, 429, 502, 503, 504})
# Events that are made of a plain mapping get these attributes.
TYPE_DEFAULT = "virta.client"
SOURCE_DEFAULT = "/virta/client"
# Methods whose repetition changes nothing (RFC 9110 §9.2.2).
IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})
JSON = {"Content-Type": "application/json"}
# Errors of reading a response: the connection was cut, or the bytes are not HTTP.
UNREADABLE = (OSError, ValueError)

Start = str | int | datetime
T = TypeVar("T")


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
    """Where the server is, and the headers of every request."""

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
        """Return the URL of a WebSocket."""
        return f"{'wss' if self.tls else 'ws'}://{self.authority}{self.prefix}{path}"


class ServerCall(NamedTuple, Generic[T]):
    """One request; `read` makes the result of the answer's JSON and headers, `refused` of an error or raises it."""

    method: str
    path: str
    read: Callable[[Any, dict[str, str]], T]
    body: bytes | None = None
    headers: dict[str, str] | None = None
    refused: Callable[[ClientError], T] | None = None

    def failed(self, error: ClientError) -> T:
        """Return the result that an error means, or raise it."""
        if self.refused is None:
            raise error
        return self.refused(error)


# Calls.


def plain_request(
    method: str, path: str, body: bytes | None, headers: dict[str, str] | None
) -> ServerCall[tuple[Any, dict[str, str]]]:
    """Return the call that gives the JSON of its answer and the headers as they are."""
    return ServerCall(method, path, lambda answer, received: (answer, received), body, headers)


def stream_request(path: str, headers: dict[str, str]) -> ServerCall[None]:
    """Return the call that opens a stream of events."""
    return ServerCall("GET", path, lambda *_: None, None, headers)


def publish(channel: str, events: Iterable[Event | Mapping[str, Any]]) -> ServerCall[Published]:
    """
    Return the call that publishes events, several as one batch.

    Raises:
        ClientError: something is neither an event nor a mapping, or cannot be written as JSON.
    """
    bodies = [_encoded(event) for event in events]
    one = len(bodies) == 1
    headers = {"Content-Type": STRUCTURED_TYPE if one else BATCH_TYPE}
    body = bodies[0] if one else b"[%b]" % b",".join(bodies)
    return ServerCall(
        "POST", channel_path(channel), lambda _, received: Published.of(received), body, headers
    )


def publish_streams(messages: Iterable[tuple[str, str]]) -> ServerCall[None]:
    """Return the call that sends (stream id, text) messages."""
    body = [{"publish_to": to, "payload": text} for to, text in messages]
    return _post("/publish", body, lambda *_: None)


def ready() -> ServerCall[bool]:
    """Return the call that asks whether the server serves requests; any error means no."""
    return ServerCall("GET", "/readyz", lambda *_: True, refused=lambda _: False)


def register_filter(
    index: str, collection: str, filter_: Any, dialect: str
) -> ServerCall[dict[str, Any]]:
    """Return the call that registers a filter and gives `{id, diff}`."""
    return _post(
        collection_path(index, collection), {"filter": filter_, "dialect": dialect}, _whole_answer
    )


def filter_ids(index: str, collection: str) -> ServerCall[list[str]]:
    """Return the call that lists the filters of a collection."""
    return ServerCall("GET", collection_path(index, collection), _read_ids)


def collection_exists(index: str, collection: str) -> ServerCall[bool]:
    """Return the call that asks whether a collection has filters."""
    return ServerCall(
        "HEAD", collection_path(index, collection), lambda *_: True, refused=_false_if_missing
    )


def test_document(
    index: str, collection: str, document: Any, document_id: str | None
) -> ServerCall[list[str]]:
    """Return the call that gives the ids of the filters that a document satisfies."""
    body = {"document": document}
    if document_id is not None:
        body["documentId"] = document_id
    return _post(f"{collection_path(index, collection)}/test", body, _read_ids)


def validate_filter(filter_: Any, dialect: str) -> ServerCall[dict[str, Any]]:
    """Return the call that checks a filter without registering it."""
    return _post("/filters/validate", {"filter": filter_, "dialect": dialect}, _whole_answer)


def remove_filter(id_: str) -> ServerCall[None]:
    """Return the call that removes a registered filter."""
    return ServerCall("DELETE", f"/filters/{id_}", lambda *_: None)


def _post(path: str, body: Any, read: Callable[[Any, dict[str, str]], T]) -> ServerCall[T]:
    return ServerCall("POST", path, read, msgspec.json.encode(body), JSON)


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


# Paths.


def channel_path(channel: str, start: Start | None = None, query: str = "") -> str:
    """Return the path of a channel, of its events from `start` on, or of those that satisfy a query."""
    path = f"/channels/{quote_plus(channel)}"
    if start is not None:
        path += f"/from/{_start_text(start)}"
    return f"{path}?{quote(query, safe=QUERY_SAFE)}" if query else path


def collection_path(index: str, collection: str) -> str:
    """Return the path of a collection of registered filters."""
    return f"/filters/{quote(index, safe='')}/{quote(collection, safe='')}"


def filter_events_path(ids: Iterable[str], start: Start | None) -> str:
    """Return the path of the events that registered filters let through."""
    path = f"/filters/{','.join(ids)}/events"
    return path if start is None else f"{path}?from={_start_text(start)}"


def streams_path(streams: Iterable[str], max_queued: int) -> str:
    """Return the path of a WebSocket with the messages of streams."""
    pairs = [("streams", stream) for stream in streams] + [("max_queued", str(max_queued))]
    return f"/subscribe?{urlencode(pairs)}"


def _start_text(start: Start) -> str:
    text = start.isoformat() if isinstance(start, datetime) else str(start)
    return quote(text, safe="")


# Answers.


def check(status: int, body: bytes) -> Any:
    """
    Return the JSON of a successful answer, or None if it has none.

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


def check_stream(status: int, headers: Mapping[str, str], body: bytes) -> None:
    """
    Check that an answer is a stream of events; `body` is that of a refusal.

    Raises:
        ClientError: the server refused, or the answer is something else, which will not change.
    """
    if status != 200:
        check(status, body)
    kind = headers.get("content-type")
    if kind is not None and not kind.lower().startswith("text/event-stream"):
        raise ClientError(
            f"the answer is {kind}, not a stream of events", code="not-a-stream", status=200
        )


def is_repeatable(method: str, path: str) -> bool:
    """
    Return whether a request may arrive twice without harm.

    Publications to channels may: the server drops repeats by source and id. Messages to streams have
    no id, and a POST to the journal may push or reserve a job.
    """
    return method in IDEMPOTENT or (method == "POST" and path.startswith("/channels/"))


def unreachable(address: Address, error: Exception) -> ClientError:
    """Return the error for a server that could not be reached, with what to do about it."""
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
    """Return whether a later attempt would fail, too."""
    if isinstance(error.__cause__, ssl.SSLCertVerificationError):
        return True
    return error.status is not None and error.status not in TEMPORARY


def _whole_answer(answer: Any, _: dict[str, str]) -> Any:
    return answer


def _read_ids(answer: Any, _: dict[str, str]) -> list[str]:
    return list(answer["ids"])


def _false_if_missing(error: ClientError) -> bool:
    if error.status == 404:
        return False
    raise error
