"""
What a record does to a row table: which key it has, and whether it sets the row, deletes it or deletes all rows.

    record ──► key ──► set     the newest event of the key is its row
                  ├──► delete  an empty value, `"data": null`, a type `deleted` or `….deleted`, Debezium's `d`
                  └──► none    no key: no row
           ──► truncate        Debezium's `t`

Debezium's shape is an object as `data` with `op`, `source`, and `before` or `after`. Its row is `after`: filters and
consumers get the event with `data` replaced by it, unless the view asks for the event itself (`ROOT_EVENT`).

All functions are pure: a row table is a function of the records of its topic, in log order.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from virta.errors import ViewError
from virta.event.document import RecordEvent, RecordLike, one_line_event, record_event

KEY_BYTES_MAX: Final = 1024
POINTER_BYTES_MAX: Final = 1024
# What a filter sees: Debezium's row, or always the event.
ROOT_AUTO, ROOT_EVENT = "auto", "event"
ROOTS: Final = (ROOT_AUTO, ROOT_EVENT)

NONE, SET, DELETE, TRUNCATE = range(4)

_UNREADABLE: Final = (ValueError, RecursionError)
_ABSENT: Final = msgspec.Raw(b"")


class _Envelope(msgspec.Struct, gc=False):
    op: Any = None
    source: msgspec.Raw = _ABSENT
    before: msgspec.Raw = _ABSENT
    after: msgspec.Raw = _ABSENT


class _Head(msgspec.Struct, gc=False):
    """What decides the key and the kind; an object as data is read as if it were an envelope."""

    type: Any = None
    subject: Any = None
    data: _Envelope | list[msgspec.Raw] | str | float | bool | msgspec.UnsetType | None = (
        msgspec.UNSET
    )


class _LooseHead(msgspec.Struct):
    """The same for data with numbers beyond a double."""

    type: Any = None
    subject: Any = None
    data: msgspec.Raw = _ABSENT


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_loose_head = msgspec.json.Decoder(_LooseHead).decode
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class RowChange(msgspec.Struct, frozen=True, gc=False):
    """What one record does; `event` is the stored event, `row` the one that filters see."""

    kind: int
    key: str | None = None
    event: bytes = b""
    row: bytes = b""


NOTHING: Final = RowChange(NONE)


class KeyRule:
    """Where the key of a record is: its own key or else `subject`, or the value at a JSON pointer."""

    __slots__ = ("steps", "text")

    def __init__(self, pointer: str = "") -> None:
        self.text = pointer
        self.steps = parse_pointer(pointer, "$key") if pointer else ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyRule) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"<KeyRule {self.text or 'record key or subject'}>"


def parse_pointer(text: str, option: str) -> tuple[str, ...]:
    """
    Parse a JSON pointer (RFC 6901) that names something in an event.

    Raises:
        ViewError: invalid-pointer.
    """
    if not text.startswith("/") or text == "/" or len(text.encode()) > POINTER_BYTES_MAX:
        raise ViewError(
            f"{option} is {text[:80]!r}: write a JSON pointer from the event's root, such as /data/id, "
            f"of at most {POINTER_BYTES_MAX} bytes",
            code="invalid-pointer",
        )
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in text[1:].split("/"))


def read_change(record: RecordLike, rule: KeyRule) -> RowChange:
    """Return the row change of a record of the log."""
    if not record.value:
        key = None if rule.steps else _record_key(bytes(record.key))
        return NOTHING if key is None else RowChange(DELETE, key)
    event = one_line_event(record)
    return read_event_change(bytes(record.key), event.value, rule)


def read_event_change(record_key: bytes, value: bytes, rule: KeyRule) -> RowChange:
    """Return what an event does that is stored with this record key."""
    head = _read_head(value)
    if head is None:
        return NOTHING
    kind, data = head.type, head.data
    deleted = data is None or (
        type(kind) is str and (kind == "deleted" or kind.endswith(".deleted"))
    )
    row = keyed = value  # `keyed` is where a pointer looks
    if type(data) is _Envelope and data.op is not None and _is_envelope(data):
        if data.op == "t":
            return RowChange(TRUNCATE, event=value)
        keyed = _with_data(value, data.before if data.op == "d" else data.after)
        if data.op == "d":
            deleted = True
        else:
            row = keyed
    if rule.steps:
        key = _pointer_key(keyed, rule.steps)
    else:
        key = _record_key(record_key) if record_key else _text_key(head.subject)
    if key is None:
        return NOTHING
    return RowChange(DELETE, key) if deleted else RowChange(SET, key, value, row)


def _read_head(value: bytes) -> _Head | None:
    """Return the head of an event; None if it has no row that a filter could see."""
    try:
        return _decode_head(value)
    except _UNREADABLE:
        pass
    try:
        loose = _decode_loose_head(value)
    except _UNREADABLE:
        return None
    data = bytes(loose.data).strip()
    return _Head(loose.type, loose.subject, _envelope(data) or msgspec.UNSET)


def row_of(value: bytes) -> bytes:
    """Return what filters see of an event that sets a row."""
    if b'"op"' not in value:  # not Debezium's; looking is faster than decoding
        return value
    head = _read_head(value)
    data = None if head is None else head.data
    if type(data) is not _Envelope or data.op in {None, "d", "t"} or not _is_envelope(data):
        return value
    return _with_data(value, data.after)


def event_of(record: RecordLike) -> RecordEvent:
    """Return the event that a record is or is wrapped in, on one line."""
    return one_line_event(record) if record.value else record_event(record)


def raw_at(value: bytes, steps: tuple[str, ...]) -> bytes | None:
    """Return the JSON text at a pointer, or None."""
    raw: Any = value
    try:
        for step in steps:
            text = bytes(raw).strip()
            if text.startswith(b"{"):
                raw = _decode_members(text).get(step)
            elif text.startswith(b"[") and step.isascii() and step.isdigit():
                items = _decode_items(text)
                # RFC 6901: no leading zeros.
                index = int(step) if len(step) < 10 and str(int(step)) == step else len(items)
                raw = items[index] if index < len(items) else None
            else:
                return None
            if raw is None:
                return None
    except _UNREADABLE:
        return None
    return bytes(raw).strip()


def _envelope(data: bytes) -> _Envelope | None:
    """Return Debezium's envelope, or None for any other data."""
    if not data.startswith(b"{") or b'"op"' not in data or b'"source"' not in data:
        return None
    try:
        found = _decode_envelope(data)
    except _UNREADABLE:
        return None
    return found if _is_envelope(found) else None


def _is_envelope(found: _Envelope) -> bool:
    if found.source is _ABSENT or (found.before is _ABSENT and found.after is _ABSENT):
        return False
    if found.op in {"d", "t"}:
        return True
    # A row is an object.
    return found.op in {"c", "r", "u"} and _is_object(found.after)


def _is_object(raw: msgspec.Raw) -> bool:
    return bytes(raw).lstrip().startswith(b"{")


def _with_data(value: bytes, data: msgspec.Raw) -> bytes:
    raw = data if data is not _ABSENT else msgspec.Raw(b"null")
    return _encode(_decode_members(value) | {"data": raw})


def _record_key(raw: bytes) -> str | None:
    if not raw or len(raw) > KEY_BYTES_MAX:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _text_key(text: Any) -> str | None:
    if type(text) is not str or not text:
        return None
    # A character takes four bytes at most.
    if len(text) > KEY_BYTES_MAX // 4 and len(text.encode("utf-8", "replace")) > KEY_BYTES_MAX:
        return None
    return text


def _pointer_key(value: bytes, steps: tuple[str, ...]) -> str | None:
    raw = raw_at(value, steps)
    if raw is None or raw[:1] in b"{[n" or not raw:
        return None
    if raw[:1] == b'"':
        return _text_key(msgspec.json.decode(raw))
    return raw.decode() if len(raw) <= KEY_BYTES_MAX else None
