"""
Read what publishers send: CloudEvents in binary, structured and batch mode, and Subtub's messages.

`virta.event` has the rules of an event's JSON. Here are the HTTP side of it (modes, headers, limits with the
channel) and the refusals: the first error refuses the whole request, with Thorium's codes. What Thorium demands and
CloudEvents does not (an object as `data`) is not demanded. A binary event's content type says what its data is
(`virta.event.bodies`).
"""

from __future__ import annotations

import json
from base64 import b64encode
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from virta.errors import EventError, RequestError, StreamIdError
from virta.event.bodies import BodyKind, body_kind, body_text
from virta.event.document import (
    UNREADABLE,
    decode_lenient,
    not_json,
    one_line,
    read_published,
)
from virta.event.headers import unescape
from virta.event.rules import BATCH_EVENTS_MAX, EVENT_BYTES_MAX, IDENTITY_BYTES_MAX
from virta.hub.delivery import META, STREAMS, Delivery, is_reserved
from virta.hub.event_batch import split_batch
from virta.jsontext import DEPTH_MAX, check_depth, replace_lone_surrogates
from virta.log.limits import KEY_BYTES_MAX
from virta.streams import canonical_stream_id, parse_stream_id

if TYPE_CHECKING:
    from virta.hub.event_batch import EventBatch
    from virta.hub.event_matcher import Head

# Also stands for binary mode, whatever the type of the body.
BINARY = b"application/json"
STRUCTURED = b"application/cloudevents+json"
BATCH = b"application/cloudevents-batch+json"
MODES = frozenset({STRUCTURED, BATCH})
CLOUDEVENTS = b"application/cloudevents"
# Any of these headers makes a publication a binary event.
BINARY_HEADERS = frozenset({b"ce-source", b"ce-id", b"ce-type", b"ce-specversion"})
_SAME = {STRUCTURED: STRUCTURED, BATCH: BATCH}
# Fewer characters than this are within the limit in any alphabet, whatever the channel.
SHORT_CHARS = (IDENTITY_BYTES_MAX - 1025) // 4
# How much of a refused body a response quotes.
QUOTED_BYTES_MAX = 4096

Headers = list[tuple[bytes, bytes]]


class _Message(msgspec.Struct):
    publish_to: str
    payload: str


_decode_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_messages = msgspec.json.Decoder(list[_Message]).decode
_encode = msgspec.json.Encoder().encode


def check_channel(channel: str) -> None:
    """Refuse channels that only the server itself writes to."""
    if channel == META:
        raise RequestError(403, "disallowed-meta-channel-send")
    if is_reserved(channel):
        raise RequestError(403, "reserved-channel", f"{channel!r} is the server's own channel")


def content_mode(head: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    """
    Return the Content-Type header (empty: there is none) and which of the three modes it selects.

    A request is binary if it has `ce-` headers, or Thorium's type for it, and no type of CloudEvents. One with
    neither is refused as Thorium refuses it (§4, 3 to 5).
    """
    content_type = head.get(b"content-type", b"")
    if content_type == STRUCTURED:
        return STRUCTURED, STRUCTURED
    if content_type == BATCH:
        return BATCH, BATCH
    essence = content_type.split(b";", 1)[0].strip().lower()
    if essence in MODES:
        # These exact objects, so that callers can compare by identity.
        return content_type, _SAME[essence]
    is_known = essence == BINARY or not BINARY_HEADERS.isdisjoint(head)
    if not is_known or essence.startswith(CLOUDEVENTS):
        if not content_type:
            raise RequestError(400, "missing-content-type")
        raise RequestError(400, "invalid-content-type", contentType=_header_text(content_type))
    if b"ce-source" not in head:
        raise RequestError(400, "missing-event-source")
    if b"ce-id" not in head:
        raise RequestError(400, "missing-event-id")
    declared = head.get(b"ce-datacontenttype", content_type)
    if content_type and declared != content_type:
        raise RequestError(400, "conflicting-data-type-headers")
    return declared, BINARY


def may_be_empty(content_type: bytes, mode: bytes) -> bool:
    """Return whether an empty body is an event without data: in binary mode, unless it must be JSON."""
    return mode is BINARY and body_kind(_header_text(content_type)) is not BodyKind.JSON


def read_events(
    channel: str,
    headers: Headers,
    content_type: bytes,
    mode: bytes,
    data: bytes,
    start: int = 0,
    *,
    percent: bool = True,
) -> list[Delivery] | EventBatch:
    """
    Return the events of a body: `data` from `start` on.

    A batch of the common form is read as a whole by native code, with the same events.

    Args:
        percent: whether the `ce-` headers of a binary event are percent-decoded; Thorium does not.

    Raises:
        RequestError: what is wrong with it (§4, 8, 9 and 11).
    """
    if mode == STRUCTURED:
        return [read_structured(channel, data[start:])]
    if mode != BATCH:
        draft = _binary(channel, headers, content_type, data[start:], percent=percent)
        _check_size(draft)
        return [draft]
    whole = split_batch(
        channel, data, start, events_max=BATCH_EVENTS_MAX, event_bytes_max=SHORT_CHARS
    )
    return _batch(channel, data[start:]) if whole is None else whole


def read_structured(channel: str, body: bytes, index: int | None = None) -> Delivery:
    """
    Return the event of a structured body, or the one at `index` of a batch.

    Raises:
        RequestError: what is wrong with it.
    """
    try:
        if index is None and not body.isascii():
            _check_utf8(body)
        event = read_published(body)
    except EventError as error:
        raise _refusal(error, {} if index is None else {"offset": index}) from None
    draft = Delivery(channel, event.source, event.id, event.value)
    if event.partition_key is not None:
        draft.key = _record_key(event.partition_key)
    if len(event.value) > EVENT_BYTES_MAX or len(event.source) + len(event.id) > SHORT_CHARS:
        _check_size(draft)
    return draft


def read_small(channel: str, body: bytes, head: Head | None) -> Delivery:
    """
    Return the event of a small structured body whose head `virta.hub.event_matcher.read_heads` has read.

    Raises:
        RequestError: what is wrong with it.
    """
    if head is None:
        return read_structured(channel, body)
    _, source, id_, key = head
    if source is None or id_ is None:
        return read_structured(channel, body)
    draft = Delivery(channel, source, id_, body)
    if key is not None:
        draft.key = _record_key(key)
    if len(source) + len(id_) > SHORT_CHARS:
        _check_size(draft)
    return draft


def _batch(channel: str, body: bytes) -> list[Delivery]:
    try:
        _check_utf8(body)
        raws = _elements(body)
    except EventError as error:
        raise _refusal(error, {}) from None
    if len(raws) > BATCH_EVENTS_MAX:
        raise RequestError(
            413,
            "batch-too-large",
            f"{len(raws)} events in one batch: at most {BATCH_EVENTS_MAX}",
            maxEvents=BATCH_EVENTS_MAX,
        )
    return [read_structured(channel, bytes(raw), index) for index, raw in enumerate(raws)]


def _elements(body: bytes) -> list[msgspec.Raw]:
    """Return the elements of a JSON array; raises EventError."""
    try:
        try:
            return _decode_raws(body)
        except msgspec.ValidationError:
            raise
        except UNREADABLE as error:
            decode_lenient(body, error)
            return _decode_raws(replace_lone_surrogates(body))
    except msgspec.ValidationError:
        raise not_json("a JSON array is expected") from None
    except UNREADABLE as error:
        raise not_json(str(error)) from None


def _check_utf8(body: bytes) -> None:
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise not_json(f"the body is not UTF-8: {error.reason}") from None


def _refusal(error: EventError, place: dict[str, Any]) -> RequestError:
    """Return the refusal for an event; only unreadable JSON has a reason beside its code."""
    if error.code == "invalid-json-body":
        return RequestError(400, error.code, error.message, **place)
    return RequestError(400, error.code, **place)


def _binary(
    channel: str, headers: Headers, content_type: bytes, body: bytes, *, percent: bool
) -> Delivery:
    members: dict[str, object] = {}
    source = id_ = None
    for name, value in headers:
        if name.startswith(b"ce-"):
            text = _header_text(value)
            if percent and ("%" in text or '"' in text):
                text = _unescaped(name, text)
            members[_header_text(name[3:])] = text
            # The first of repeated headers identifies the event, the last is what is delivered.
            if name == b"ce-source" and source is None:
                source = text
            elif name == b"ce-id" and id_ is None:
                id_ = text
    assert source is not None
    assert id_ is not None
    members.pop("data", None)
    members.pop("data_base64", None)
    kind = _header_text(content_type)
    if kind:
        members["datacontenttype"] = kind
    value = b"%b%b}" % (_encode(members)[:-1], _data(body, kind))
    key = members.get("partitionkey")
    return Delivery(
        channel, source, id_, value, key=_record_key(key) if isinstance(key, str) else b""
    )


def _unescaped(name: bytes, text: str) -> str:
    attribute = _header_text(name[3:])
    try:
        return unescape(attribute, text)
    except EventError as error:
        raise RequestError(400, "invalid-header", error.message) from error


def _data(body: bytes, content_type: str) -> bytes:
    """Return the member for a binary event's body, with the comma before it; nothing for an empty one."""
    kind = body_kind(content_type)
    if kind is BodyKind.JSON:
        return b',"data":%b' % _json_text(body)
    if not body:
        return b""
    if kind is BodyKind.UNKNOWN:
        with suppress(RequestError):
            return b',"data":%b' % _json_text(body)
    text = None if kind is BodyKind.BYTES else body_text(body, content_type)
    if text is None:
        return b',"data_base64":"%b"' % b64encode(body)
    return b',"data":%b' % _encode(text)


def _json_text(body: bytes) -> bytes:
    """Return a body as valid JSON on one line; raises RequestError if it is not JSON."""
    try:
        _check_utf8(body)
        try:
            check_depth(body, DEPTH_MAX - 1)  # the event around it is one level
            msgspec.json.decode(body, type=msgspec.Raw)
        except UNREADABLE as error:
            decode_lenient(body, error)
            body = replace_lone_surrogates(body)
    except EventError as error:
        raise _refusal(error, {}) from None
    return one_line(body.strip())


def _check_size(draft: Delivery) -> None:
    if len(draft.value) > EVENT_BYTES_MAX:
        raise RequestError(
            413,
            "body-too-large",
            f"an event of {len(draft.value)} bytes: at most {EVENT_BYTES_MAX}",
            maxBytes=EVENT_BYTES_MAX,
        )
    if len(draft.source) + len(draft.id) <= SHORT_CHARS:
        return
    joined = f"{draft.source} {draft.id}"
    size = len(joined.encode("utf-8", "replace")) + len(draft.channel.encode())
    if size > IDENTITY_BYTES_MAX:
        raise RequestError(
            413, "channel-idempotency-too-large", maxByteSize=IDENTITY_BYTES_MAX, eventID=joined
        )


def read_messages(body: bytes) -> list[Delivery]:
    """
    Return the stream messages of the body of `POST /publish`.

    Raises:
        RequestError: 400, whose message is the whole response (Subtub responds in plain text).
    """
    if not body.strip():
        raise _bad_messages("Malformed message body: Invalid JSON: empty body")
    try:
        messages = _decode_messages(body)
        # Eight quotes a message: it has no other member, so no name occurs twice.
        if body.count(b'"') != 8 * len(messages):
            body.decode()
            json.loads(body, object_pairs_hook=_unique)
    except msgspec.ValidationError:
        raise _wrong_shape(body) from None
    except (ValueError, RecursionError):
        raise _bad_messages("Malformed message body: Invalid JSON") from None
    drafts = []
    for number, message in enumerate(messages, 1):
        try:
            stream = canonical_stream_id(parse_stream_id(message.publish_to))
        except StreamIdError as error:
            place = f"message {number} of {len(messages)}"
            raise _bad_messages(f"Invalid message body: {place}: {error.message}") from None
        value = _encode_message(stream, message.payload)
        if len(value) > EVENT_BYTES_MAX:
            raise RequestError(413, "body-too-large", "Message too large")
        drafts.append(Delivery(STREAMS, "", stream, value, key=_record_key(stream)))
    return drafts


def _encode_message(stream: str, payload: str) -> bytes:
    """Return the message as receivers see it: keys in this order, control characters escaped."""
    value = _encode({"publish_to": stream, "payload": payload})
    if value.isascii() and b"\x7f" not in value:
        return value
    text = value.decode()
    return "".join(f"\\u{ord(c):04x}" if "\x7f" <= c <= "\x9f" else c for c in text).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice")
    return members


def _wrong_shape(body: bytes) -> RequestError:
    try:
        shown = json.dumps(
            json.loads(body, object_pairs_hook=_unique), indent=2, ensure_ascii=False
        )
    except (ValueError, RecursionError):
        return _bad_messages("Malformed message body: Invalid JSON")
    return _bad_messages(f"Invalid message body: Could not decode JSON: {shown[:QUOTED_BYTES_MAX]}")


def _bad_messages(text: str) -> RequestError:
    return RequestError(400, "invalid-message-body", text)


def _header_text(raw: bytes) -> str:
    """Return a header's text: UTF-8 if it is, else Latin-1."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _record_key(text: str) -> bytes:
    key = text.encode("utf-8", "replace")
    return key if len(key) <= KEY_BYTES_MAX else b""
