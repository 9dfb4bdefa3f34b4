"""
What publishers send: CloudEvents in binary, structured and batch mode, and Subtub's messages.

Events are kept as they came: the bytes of a structured event are stored and delivered unchanged (on
one line), only `source` and `id` are decoded. The first thing wrong refuses the whole request, with
Thorium's codes. Members that Thorium demands and CloudEvents does not (an object as `data`) are not
demanded here. The data of a binary event is what its content type says (`virta.event.bodies`).
"""

from __future__ import annotations

import json
from base64 import b64encode
from contextlib import suppress
from typing import Any

import msgspec

from virta.errors import EventError, RequestError, StreamIdError
from virta.event.bodies import BodyKind, body_kind, body_text
from virta.event.document import (
    UNREADABLE,
    decode_head,
    decode_lenient,
    one_line,
    read_published,
)
from virta.event.headers import unescape
from virta.event.rules import (
    BATCH_EVENTS_MAX,
    EVENT_BYTES_MAX,
    IDENTITY_BYTES_MAX,
)
from virta.hub.delivery import Delivery
from virta.hub.event_batch import EventBatch, pack
from virta.hub.topics import META, STREAMS, is_reserved
from virta.jsontext import DEPTH_MAX, check_depth, replace_lone_surrogates
from virta.log.limits import KEY_BYTES_MAX
from virta.streams import canonical_stream_id, parse_stream_id

# Also represents binary mode, whatever the type of the body.
BINARY = b"application/json"
STRUCTURED = b"application/cloudevents+json"
BATCH = b"application/cloudevents-batch+json"
MODES = frozenset({STRUCTURED, BATCH})
CLOUDEVENTS = b"application/cloudevents"
# Any of these headers makes a publication a binary event.
BINARY_HEADERS = frozenset({b"ce-source", b"ce-id", b"ce-type", b"ce-specversion"})
_SAME = {STRUCTURED: STRUCTURED, BATCH: BATCH}
# Fewer characters than this are within the budget in any alphabet, whatever the channel.
SHORT_CHARS = (IDENTITY_BYTES_MAX - 1025) // 4
# How much of a refused body an answer quotes.
QUOTED_BYTES_MAX = 4096

Headers = list[tuple[bytes, bytes]]


class _PlainHead(msgspec.Struct, gc=False):
    source: str
    id: str
    partitionkey: None = None


class _Message(msgspec.Struct):
    publish_to: str
    payload: str


_decode_plain_heads = msgspec.json.Decoder(list[_PlainHead]).decode
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
        raise RequestError(400, "invalid-content-type", contentType=_text(content_type))
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
    return mode is BINARY and body_kind(_text(content_type)) is not BodyKind.JSON


def read_events(
    channel: str,
    headers: Headers,
    content_type: bytes,
    mode: bytes,
    body: bytes,
    *,
    percent: bool = True,
) -> list[Delivery]:
    """
    Turn a body into events, or refuse it (§4, 8, 9 and 11).

    `percent=False` leaves the `ce-` headers of a binary event undecoded, as Thorium does.
    """
    if mode not in MODES:
        drafts = [_binary(channel, headers, content_type, body, percent=percent)]
        _check_sizes(drafts)
        return drafts
    _check_utf8(body)
    if mode == BATCH:
        plain = _plain_batch(channel, body)
        if plain is not None:
            return plain
    if mode == STRUCTURED:
        draft = read_quickly(channel, body)
        if draft is not None:
            return [draft]
        drafts = [_structured(channel, body, None)]
    else:
        drafts = _batch(channel, body)
    _check_sizes(drafts)
    return drafts


def _check_utf8(body: bytes) -> None:
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise _not_json(f"the body is not UTF-8: {error.reason}") from None


def read_batch(channel: str, data: bytes, start: int = 0) -> EventBatch | None:
    """The events of a batch, `data` from `start` on, as a whole; None when it needs a closer look."""
    return pack(channel, data, start, events_max=BATCH_EVENTS_MAX, event_bytes_max=SHORT_CHARS)


def read_quickly(channel: str, body: bytes) -> Delivery | None:
    """The event of a structured body that is as most are; None when it needs a closer look."""
    if not body.isascii():
        return None
    try:
        check_depth(body)
        head = decode_head(body)
    except UNREADABLE:
        return None
    source, id_ = head.source, head.id
    if (
        type(source) is str
        and type(id_) is str
        and head.partitionkey is None
        and len(source) + len(id_) <= SHORT_CHARS
        and len(body) <= EVENT_BYTES_MAX
        and b"\n" not in body
        and b"\r" not in body
    ):
        return Delivery(channel, source, id_, body)
    return None


def _structured(channel: str, raw: bytes, offset: int | None) -> Delivery:
    try:
        event = read_published(raw)
    except EventError as error:
        raise _refused(error, {} if offset is None else {"offset": offset}) from None
    key = event.partition_key
    if key is None:
        return Delivery(channel, event.source, event.id, event.value)
    return Delivery(channel, event.source, event.id, event.value, key=_key(key))


def _refused(error: EventError, place: dict[str, Any]) -> RequestError:
    """Return the refusal for an event; only unreadable JSON has a reason beside its code."""
    if error.code == "invalid-json-body":
        return RequestError(400, error.code, error.message, **place)
    return RequestError(400, error.code, **place)


def _plain_batch(channel: str, body: bytes) -> list[Delivery] | None:
    """The events of a batch that is as most are; None when it needs a closer look."""
    if b"\n" in body or b"\r" in body:
        return None
    try:
        heads = _decode_plain_heads(body)
        values = list(map(bytes, _decode_raws(body)))
        for value in values:
            if len(value) > DEPTH_MAX:
                check_depth(value)
    except UNREADABLE:
        return None
    if len(values) > BATCH_EVENTS_MAX or max(map(len, values), default=0) > SHORT_CHARS:
        return None
    return [
        Delivery(channel, head.source, head.id, value)
        for head, value in zip(heads, values, strict=True)
    ]


def _batch(channel: str, body: bytes) -> list[Delivery]:
    try:
        raws = _decode_raws(body)
    except msgspec.ValidationError:
        raise _not_json("a JSON array is expected") from None
    except UNREADABLE as error:
        raws = _batch_again(body, error)
    if len(raws) > BATCH_EVENTS_MAX:
        raise RequestError(
            413,
            "batch-too-large",
            f"{len(raws)} events in one batch: at most {BATCH_EVENTS_MAX}",
            maxEvents=BATCH_EVENTS_MAX,
        )
    # One by one: the first that has something wrong tells its place.
    return [_structured(channel, bytes(raw), at) for at, raw in enumerate(raws)]


def _batch_again(body: bytes, error: Exception) -> list[msgspec.Raw]:
    """Read the elements of a batch that the fast decoder refused."""
    try:
        decode_lenient(body, error)
        return _decode_raws(replace_lone_surrogates(body))
    except EventError as refused:
        raise _refused(refused, {}) from None
    except msgspec.ValidationError:
        raise _not_json("a JSON array is expected") from None
    except UNREADABLE as again:
        raise _not_json(str(again)) from None


def _binary(
    channel: str, headers: Headers, content_type: bytes, body: bytes, *, percent: bool
) -> Delivery:
    members: dict[str, object] = {}
    source = id_ = None
    for name, value in headers:
        if name.startswith(b"ce-"):
            text = _text(value)
            if percent and ("%" in text or '"' in text):
                text = _unescaped(name, text)
            members[_text(name[3:])] = text
            # The first of repeated headers identifies the event, the last is what is delivered.
            if name == b"ce-source" and source is None:
                source = text
            elif name == b"ce-id" and id_ is None:
                id_ = text
    assert source is not None
    assert id_ is not None
    members.pop("data", None)
    members.pop("data_base64", None)
    kind = _text(content_type)
    if kind:
        members["datacontenttype"] = kind
    value = b"%b%b}" % (_encode(members)[:-1], _data(body, kind))
    key = members.get("partitionkey")
    return Delivery(channel, source, id_, value, key=_key(key) if isinstance(key, str) else b"")


def _unescaped(name: bytes, text: str) -> str:
    attribute = _text(name[3:])
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
    """Return a body as valid JSON on one line; raise RequestError if it is not JSON."""
    _check_utf8(body)
    try:
        check_depth(body, DEPTH_MAX - 1)  # the event around it is one level
        msgspec.json.decode(body, type=msgspec.Raw)
    except UNREADABLE as error:
        try:
            decode_lenient(body, error)
        except EventError as refused:
            raise _refused(refused, {}) from None
        body = replace_lone_surrogates(body)
    return one_line(body.strip())


def _check_sizes(drafts: list[Delivery]) -> None:
    for draft in drafts:
        if len(draft.value) > EVENT_BYTES_MAX or len(draft.source) + len(draft.id) > SHORT_CHARS:
            _check_size(draft)


def _check_size(draft: Delivery) -> None:
    if len(draft.value) > EVENT_BYTES_MAX:
        raise RequestError(
            413,
            "body-too-large",
            f"an event of {len(draft.value)} bytes: at most {EVENT_BYTES_MAX}",
            maxBytes=EVENT_BYTES_MAX,
        )
    joined = f"{draft.source} {draft.id}"
    size = len(joined.encode("utf-8", "replace")) + len(draft.channel.encode())
    if size > IDENTITY_BYTES_MAX:
        raise RequestError(
            413, "channel-idempotency-too-large", maxByteSize=IDENTITY_BYTES_MAX, eventID=joined
        )


def read_messages(body: bytes) -> list[Delivery]:
    """
    Turn the body of `POST /publish` into stream messages.

    Raises:
        RequestError: 400, whose message is the whole answer (Subtub answers in plain text).
    """
    if not body.strip():
        raise _bad_messages("Malformed message body: Invalid JSON: empty body")
    try:
        check_depth(body)
        messages = _decode_messages(body)
        # Eight quotes a message: no member beside the two, so no name can stand twice.
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
        drafts.append(Delivery(STREAMS, "", stream, value, key=_key(stream)))
    return drafts


def _encode_message(stream: str, payload: str) -> bytes:
    """The message as receivers see it: keys in this order, control characters escaped."""
    value = _encode({"publish_to": stream, "payload": payload})
    if value.isascii() and b"\x7f" not in value:
        return value
    text = value.decode()
    return "".join(f"\\u{ord(c):04x}" if "\x7f" <= c <= "\x9f" else c for c in text).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name stands twice")
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


def _not_json(message: str, **members: object) -> RequestError:
    return RequestError(400, "invalid-json-body", message, **members)


def _text(raw: bytes) -> str:
    """A header's text: UTF-8 when it is, else byte for byte."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _key(text: str) -> bytes:
    key = text.encode("utf-8", "replace")
    return key if len(key) <= KEY_BYTES_MAX else b""
