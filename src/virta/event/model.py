"""
CloudEvents 1.0.2: the value, and its JSON (structured), batch and HTTP-header (binary) forms.

    bytes ──from_json / from_binary / decode_batch──► Event ──to_json / to_binary / encode_batch──► bytes

Invariants:
- An Event made in code or parsed strictly obeys the specification; anything else raises EventError
  whose `code` is stable, whose `attribute` names the culprit and whose `index` its place in a batch.
- A parsed event keeps its bytes in `raw`, and `to_json` returns them unchanged (number spellings, member
  order, white space).
- `data` has one of three runtime kinds: a JSON value (JSON content types, or none declared), `str`
  (other content types), `bytes` (Binary: `data_base64`); UNSET when there is no data at all, which
  is not the same as an explicit null.

Lenient parsing (`lenient=True`) asks only for `source` and `id`, as Thorium does: any member names
and JSON types are kept. A JSON number as `id` becomes the text it is written as in both modes.

Section numbers refer to the CloudEvents core, JSON format and HTTP binding documents, version 1.0.2.
"""

from __future__ import annotations

import uuid
from base64 import b64decode, b64encode
from contextlib import suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from virta.errors import EventError
from virta.event.bodies import BodyKind, body_kind, body_text
from virta.event.document import (
    decode_any,
    not_json,
    number_text,
    one_line,
    respelled,
    too_deep,
)
from virta.event.headers import Headers, header_pairs, header_value, read_headers
from virta.event.rules import (
    BATCH_BYTES_MAX,
    BATCH_EVENTS_MAX,
    BATCH_TYPE,
    CONTEXT,
    EVENT_BYTES_MAX,
    JSON_TYPE,
    OPTIONAL,
    REQUIRED,
    SPECVERSION,
    STRUCTURED_TYPE,
    canonical_text,
    check_attributes,
    check_data,
    check_media_type,
    check_name,
    data_error,
    is_json_type,
    kind_of,
    missing_error,
    name_error,
    plain_value,
    too_large_error,
)
from virta.event.times import parse_time, show
from virta.jsontext import DEPTH_MAX, JsonDepthError, check_depth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Event(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """
    One CloudEvent. Equal when attributes and data are equal, however they were spelled.

    `time` may be a text of RFC 3339 or an aware datetime; an extension may also be a datetime or
    bytes and is stored as its canonical text.
    """

    id: str
    source: str
    type: str
    specversion: str = SPECVERSION
    datacontenttype: str | None = None
    dataschema: str | None = None
    subject: str | None = None
    time: str | None = None
    extensions: Mapping[str, Any] = {}
    data: Any = UNSET
    raw: bytes | None = None
    """The JSON text this event was parsed from; only the parsers set it."""

    def __post_init__(self) -> None:
        if self.raw is not None:
            return  # the parser has checked it
        force = msgspec.structs.force_setattr
        force(self, "time", plain_value("time", self.time))
        plain = {name: plain_value(name, value) for name, value in self.extensions.items()}
        force(self, "extensions", MappingProxyType(plain))
        for name in plain:
            if name in CONTEXT:
                raise name_error(name, "is a field of the event, not an extension")
        check_attributes(self.attributes())
        check_data(self.data, self.datacontenttype)

    @classmethod
    def new(cls, type: str, source: str, data: Any = UNSET, **attributes: Any) -> Event:  # noqa: A002
        """Make an event that happens now: a random `id` and the present `time` unless given."""
        fields = {name: attributes.pop(name) for name in CONTEXT & attributes.keys()}
        fields.setdefault("id", str(uuid.uuid4()))
        fields.setdefault("time", datetime.now(UTC))
        return cls(type=type, source=source, data=data, extensions=attributes, **fields)

    @classmethod
    def from_json(
        cls, raw: bytes | bytearray | memoryview | str, *, lenient: bool = False
    ) -> Event:
        """Parse the structured JSON form (JSON format §3) and keep its bytes."""
        raw = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)
        if len(raw) > EVENT_BYTES_MAX:
            raise too_large_error(len(raw))
        members = _parse(raw, decode_any if lenient else _decode)
        if not isinstance(members, dict):
            raise not_json(f"an event is a JSON object, not {kind_of(members)}")
        event_id = members.get("id")
        if isinstance(event_id, int | float) and not isinstance(event_id, bool):
            written = _decode_members(raw)
            members["id"] = number_text(written["id"])
            raw = respelled(written, members["id"])
        return _from_members(members, raw, lenient=lenient)

    @classmethod
    def from_binary(
        cls, headers: Headers, body: bytes, *, lenient: bool = False, percent: bool = True
    ) -> Event:
        """
        Parse the binary HTTP form (HTTP binding §3.1): attributes in `ce-` headers, data as body.

        What the content type makes of the body: `virta.event.bodies`.
        `percent=False` leaves header values undecoded, as Thorium does.
        """
        if len(body) > EVENT_BYTES_MAX:
            raise too_large_error(len(body))
        members, content_type = read_headers(headers, lenient=lenient, percent=percent)
        if content_type is not None:
            if members.get("datacontenttype", content_type) != content_type:
                raise EventError(
                    f"ce-datacontenttype {members['datacontenttype']!r} contradicts Content-Type"
                    f" {content_type!r}: leave the ce- header out",
                    code="conflicting-data-type-headers",
                    attribute="datacontenttype",
                )
            members.pop("datacontenttype", None)
            members["datacontenttype"] = content_type
        encoded: dict[str, Any] = dict(members)
        if body:
            decode = decode_any if lenient else _decode
            declared = members.get("datacontenttype")
            members["data"], encoded["data"] = _read_body(bytes(body), declared, decode)
        if isinstance(members.get("data"), bytes):
            encoded["data_base64"] = encoded.pop("data")
        return _from_members(members, _encode(encoded), lenient=lenient)

    def to_json(self) -> bytes:
        """Return the structured JSON form: the bytes it was parsed from, if it was parsed."""
        return _encode(self.to_dict()) if self.raw is None else self.raw

    def to_line(self) -> bytes:
        """Return `to_json` on one line, for NDJSON and SSE: without white space between tokens."""
        return one_line(self.to_json())

    def to_binary(self) -> tuple[list[tuple[str, str]], bytes]:
        """Return the binary HTTP form: headers in the order specversion, id, source, type, …, and the body."""
        for name in self.extensions:
            check_name(name)  # a lenient event may have names that would break a header
        headers = [
            (f"ce-{name}", header_value(value))
            for name, value in self.attributes().items()
            if name != "datacontenttype" and value != ""
        ]
        content_type = self.datacontenttype
        body = b""
        if isinstance(self.data, bytes):
            body = self.data
        elif self.data is not UNSET:
            is_json = is_json_type(content_type)
            # §3.1.2 of the JSON format: the implied type is made explicit when the form changes.
            content_type = content_type or JSON_TYPE
            body = _encode(self.data) if is_json else canonical_text(self.data).encode()
        if content_type is not None:
            check_media_type(content_type)
            headers.append(("content-type", content_type))
        return headers, body

    def attributes(self) -> dict[str, Any]:
        """Return every context attribute that is set, required ones first, extensions last."""
        found: dict[str, Any] = {}
        for name in (*REQUIRED, *OPTIONAL):
            value = getattr(self, name)
            if value is not None and not (value == "" and self.raw is not None):
                found[name] = value
        found.update(self.extensions)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object as Python values: what filters are evaluated on."""
        members = self.attributes()
        if isinstance(self.data, bytes):
            members["data_base64"] = b64encode(self.data).decode()
        elif self.data is not UNSET:
            members["data"] = self.data
        return members

    def replace(self, **changes: Any) -> Event:
        """Return a copy with some fields changed, checked again; its JSON is written again."""
        return msgspec.structs.replace(self, **changes, raw=None)

    @property
    def has_data(self) -> bool:
        return self.data is not UNSET

    @property
    def moment(self) -> datetime | None:
        """Return `time` as an aware datetime; digits past the microsecond are cut."""
        return None if self.time is None else parse_time(self.time)

    @property
    def partition_key(self) -> str:
        """Return the `partitionkey` extension, or "": the key of the event's record in the log."""
        return str(self.extensions.get("partitionkey", ""))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return NotImplemented
        return self.attributes() == other.attributes() and (
            (self.data is UNSET) == (other.data is UNSET)
            and isinstance(self.data, bytes) == isinstance(other.data, bytes)
            and self.data == other.data
        )

    def __hash__(self) -> int:
        return hash((self.source, self.id))


def decode_batch(raw: bytes, *, lenient: bool = False) -> list[Event]:
    """Parse the batch form (JSON format §4). The first bad element refuses all; `index` names it."""
    if len(raw) > BATCH_BYTES_MAX:
        raise EventError(
            f"a batch of {len(raw)} bytes is over the limit of {BATCH_BYTES_MAX}",
            code="batch-too-large",
        )
    elements = _parse(raw, _decode_elements, DEPTH_MAX + 1)
    if len(elements) > BATCH_EVENTS_MAX:
        raise EventError(
            f"a batch of {len(elements)} events is over the limit of {BATCH_EVENTS_MAX}",
            code="batch-too-large",
        )
    events = []
    for index, element in enumerate(elements):
        try:
            events.append(Event.from_json(bytes(element), lenient=lenient))
        except EventError as error:
            raise EventError(
                f"event {index} of the batch: {error.message}",
                code=error.code,
                attribute=error.attribute,
                index=index,
            ) from error
    return events


def encode_batch(events: Sequence[Event]) -> bytes:
    """Return the batch form; parsed events keep their bytes."""
    return b"[" + b",".join([event.to_json() for event in events]) + b"]"


def from_http(headers: Headers, body: bytes, *, lenient: bool = False) -> list[Event]:
    """Parse a message in any of the three content modes, which its Content-Type selects (§3)."""
    pairs = list(header_pairs(headers))
    content_type = next((value for name, value in pairs if name == "content-type"), "")
    essence = content_type.partition(";")[0].strip().lower()
    if essence == BATCH_TYPE:
        return decode_batch(body, lenient=lenient)
    if essence == STRUCTURED_TYPE:
        return [Event.from_json(body, lenient=lenient)]
    if essence.startswith("application/cloudevents"):
        raise EventError(
            f"content type {content_type!r} is not supported: use {STRUCTURED_TYPE} or {BATCH_TYPE}",
            code="invalid-content-type",
        )
    return [Event.from_binary(pairs, body, lenient=lenient)]


# Parsing.


def _parse(raw: bytes, decode: Any, depth_max: int = DEPTH_MAX) -> Any:
    try:
        check_depth(raw, depth_max)
        return decode(raw)
    except (JsonDepthError, RecursionError):
        raise too_deep() from None
    except ValueError as error:
        raise not_json(f"the body is not valid JSON: {error}") from error


def _from_members(members: dict[str, Any], raw: bytes, *, lenient: bool) -> Event:
    data = _pop_data(members, lenient=lenient)
    present = members
    if None in members.values():  # §2.2: null is the same as not there
        present = {name: value for name, value in members.items() if value is not None}
    for name in ("source", "id"):
        if not isinstance(present.get(name), str):
            raise missing_error(name, present.get(name))
    if lenient:
        fields = {n: present.pop(n) for n in CONTEXT if isinstance(present.get(n), str)}
        fields.setdefault("type", "")
        fields.setdefault("specversion", "")
    else:
        check_attributes(present)
        fields = {n: present.pop(n) for n in CONTEXT if n in present}
        check_data(data, fields.get("datacontenttype"))
    return Event(**fields, extensions=MappingProxyType(present), data=data, raw=raw)


def _pop_data(members: dict[str, Any], *, lenient: bool) -> Any:
    """Remove the data from the members and return it; leniently, an invalid `data_base64` stays a member."""
    data = members.pop("data", UNSET)
    encoded = members.pop("data_base64", None)
    if encoded is None:
        return data
    try:
        if data is not UNSET:
            raise data_error("data and data_base64 are both present: send one of them")
        return _from_base64(encoded)
    except EventError:
        if not lenient:
            raise
        members["data_base64"] = encoded
        return data


def _from_base64(encoded: Any) -> bytes:
    if not isinstance(encoded, str):
        raise data_error(f"data_base64 is a Base64 string, not {kind_of(encoded)}")
    try:
        return b64decode(encoded, validate=True)
    except ValueError as error:
        raise data_error(f"data_base64 {show(encoded)} is not Base64: {error}") from error


def _read_body(body: bytes, content_type: str | None, decode: Any) -> tuple[Any, Any]:
    """Return the runtime value of a body, and its value in the JSON form."""
    kind = body_kind(content_type)
    if kind is BodyKind.JSON:
        return _parse(body, decode, DEPTH_MAX - 1), msgspec.Raw(body)
    if kind is BodyKind.UNKNOWN:
        with suppress(EventError):
            return _parse(body, decode, DEPTH_MAX - 1), msgspec.Raw(body)
    text = None if kind is BodyKind.BYTES else body_text(body, content_type)
    return (body, b64encode(body).decode()) if text is None else (text, text)
