"""
Read events leniently, and what a filter sees of a log record.

    record ──► its event ──┬─► query strings, CESQL and CloudEvents filters
                           └─► document_of ──► Koncorde filters

A record is an event when its value is a JSON object in UTF-8 with a text `source` and an `id` that is a text,
or a number, which becomes the text it is written as. Anything else that an embedded process appended is
wrapped in an event of type `virta.record`: its source is `/log/` and the topic, its id the offset, its data
the value (`data_base64` when the value is no JSON).

Publishers may send a little more (`read_published`): a lone surrogate becomes a question mark, so a stored event
is always one that every reader accepts.

Live delivery, replay, Spark and users of `virta.match.Matcher` all call this module, so the same record gets the
same answer everywhere.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from virta import jsontext
from virta.clock import time_text
from virta.errors import EventError
from virta.jsontext import DEPTH_MAX, JsonDepthError, check_depth

if TYPE_CHECKING:
    Bytes = bytes | bytearray | memoryview | msgspec.Raw

RECORD_TYPE: Final = "virta.record"
RECORD_SOURCE: Final = "/log/"
# The dialect whose filters apply to an event's data; all others apply to the event.
DOCUMENT_DIALECT: Final = "koncorde"


class RecordLike(Protocol):
    """The members of a log record that are used here."""

    @property
    def topic(self) -> bytes: ...
    @property
    def key(self) -> bytes: ...
    @property
    def value(self) -> Bytes: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...


class EventHead(msgspec.Struct):
    """The attributes that identify and partition an event; everything else is skipped, not decoded."""

    source: Any = None
    id: Any = None
    partitionkey: Any = None


class _Parts(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw(b"")
    # Decoded only if it is a string: it may also be a number of any size.
    subject: msgspec.Raw = msgspec.Raw(b"")


class RecordEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as it is stored: what identifies it, its JSON, and its partition key if that is a text."""

    source: str
    id: str
    value: bytes
    partition_key: str | None = None


decode_head = msgspec.json.Decoder(EventHead).decode
_decode_parts = msgspec.json.Decoder(_Parts).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
# Raised by msgspec for what it does not read; all but RecursionError are ValueErrors.
UNREADABLE: Final = (ValueError, RecursionError)


def filter_view(record: RecordLike, dialect: str = "query-string") -> bytes:
    """Return the JSON that a filter of `dialect` sees of any record of a log."""
    event = record_event(record)
    return document_of(event.value, event.id) if dialect == DOCUMENT_DIALECT else event.value


def record_event(record: RecordLike) -> RecordEvent:
    """Return the event that a record is, or the one that wraps it."""
    value = bytes(record.value)
    return read_event(value) or _wrap_record(record, value)


def one_line_event(record: RecordLike) -> RecordEvent:
    """Return the event of a record, its JSON on one line."""
    event = record_event(record)
    value = one_line(event.value)
    return event if value is event.value else RecordEvent(event.source, event.id, value)


def read_event(value: bytes) -> RecordEvent | None:
    """Return the event that a record's value is, or None; a number as id becomes its text."""
    try:
        check_depth(value)
        if not value.isascii():
            value.decode()
        head = decode_head(value)
        source, id_ = head.source, head.id
    except msgspec.ValidationError:  # an id beyond a double, perhaps
        source = id_ = 0.0
    except UNREADABLE:
        return None
    if type(source) is str and type(id_) is str:
        return RecordEvent(source, id_, value)
    try:
        return _with_number(value, source) if type(id_) in {int, float} else None
    except UNREADABLE:
        return None


def read_published(raw: bytes) -> RecordEvent:
    """
    Return the event in a JSON text that a publisher sent, on one line, as it will be stored.

    Raises:
        EventError: invalid-json-body, missing-event-source or missing-event-id.
    """
    try:
        if len(raw) > DEPTH_MAX:
            check_depth(raw)
        head = decode_head(raw)
    except UNREADABLE as error:
        # Lone surrogates and numbers beyond a double are JSON, too.
        raw = jsontext.replace_lone_surrogates(raw.strip())
        members = decode_lenient(raw, error)
        if not isinstance(members, dict):
            raise not_json("a JSON object is expected") from None
        head = EventHead(members.get("source"), members.get("id"), members.get("partitionkey"))
    if type(head.source) is not str:
        raise EventError("source is missing", code="missing-event-source", attribute="source")
    key = head.partitionkey if type(head.partitionkey) is str else None
    if type(head.id) is str:
        if b"\n" in raw or b"\r" in raw:
            raw = one_line(raw)
        return RecordEvent(head.source, head.id, raw, key)
    found = _with_number(raw, head.source) if type(head.id) in {int, float} else None
    if found is None:
        raise EventError("id is missing", code="missing-event-id", attribute="id")
    return RecordEvent(found.source, found.id, one_line(found.value), key)


def _with_number(value: bytes, source: Any) -> RecordEvent | None:
    """Return an event whose id is a number, with that number as a text."""
    members = _decode_members(value)
    if type(source) is not str:
        source = msgspec.json.decode(members.get("source", b"null"))
    id_ = number_text(members.get("id", b""))
    if type(source) is not str or id_ is None:
        return None
    return RecordEvent(source, id_, respelled(members, id_))


def number_text(raw: Bytes) -> str | None:
    """Return a JSON number as the text it is written as, or None for any other JSON."""
    text = bytes(raw).decode("ascii", "replace").strip()
    return text if text[:1] in set("-0123456789") and text else None


def respelled(members: dict[str, msgspec.Raw], id_: str) -> bytes:
    """Return an event with its id as a string; every other member keeps its bytes."""
    return _encode(members | {"id": msgspec.Raw(_encode(id_))})


def document_of(event: bytes, id_: str) -> bytes:
    """
    Return the document that Koncorde's filters see of an event with this id: its data.

    `_id` is the event's subject if that is a text, else its id, unless the data brings its own. An event
    without an object as data is the empty document with that `_id`.
    """
    parts = _decode_parts(event)
    data = bytes(parts.data).strip()
    subject = bytes(parts.subject).strip()
    identity = subject if subject.startswith(b'"') else _encode(id_)
    if not data.startswith(b"{"):
        return b'{"_id":%b}' % identity
    inner = data[1:-1].strip()
    # Every JSON reader here uses the last of equal names, so the data's own `_id` wins.
    return b'{"_id":%b%b%b}' % (identity, b"," if inner else b"", inner)


def decode_any(raw: bytes) -> Any:
    """
    Return the value of a JSON text; numbers beyond a double are infinite. Lone surrogates are refused.

    Raises ValueError.
    """
    check_depth(raw)
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError:  # a number beyond a double
        return jsontext.decode(raw)


def decode_lenient(raw: bytes, error: Exception) -> Any:
    """
    Return the value of a JSON text that the fast decoder refused with `error`.

    Raises:
        EventError: invalid-json-body, with the fast decoder's reason.
    """
    if isinstance(error, JsonDepthError | RecursionError):
        raise too_deep() from None
    try:
        return jsontext.decode(raw)
    except JsonDepthError:
        raise too_deep() from None
    except ValueError:
        raise not_json(str(error)) from None


def one_line(value: bytes) -> bytes:
    """Return JSON without line ends; the spelling of its values stays."""
    if b"\n" in value or b"\r" in value:
        return bytes(msgspec.json.format(value, indent=-1))
    return value


def not_json(message: str) -> EventError:
    """Return the error for a text that is no JSON, or none that an event can be."""
    return EventError(message, code="invalid-json-body")


def too_deep() -> EventError:
    """Return the error for JSON that nests deeper than `virta.jsontext` allows."""
    return not_json(f"the body is nested too deeply: at most {DEPTH_MAX} levels")


def _wrap_record(record: RecordLike, value: bytes) -> RecordEvent:
    channel = bytes(record.topic).decode("utf-8", "replace")
    source, id_ = RECORD_SOURCE + channel, str(record.offset)
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": id_,
        "source": source,
        "type": RECORD_TYPE,
        "time": time_text(record.timestamp),
    }
    if record.key:
        event["partitionkey"] = bytes(record.key).decode("utf-8", "replace")
    try:
        check_depth(value, DEPTH_MAX - 1)  # the event around it is one level
        decode_any(value)
        event["data"] = msgspec.Raw(one_line(value))
    except UNREADABLE:
        event["data_base64"] = b64encode(value).decode()
    return RecordEvent(source, id_, _encode(event))
