"""
The CloudEvents core's rules for attributes (names, types, characters, URIs), and the limits of events.

Every rule raises EventError with a stable code. The forms of an event (JSON, HTTP) are in other modules.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET

from virta.errors import EventError
from virta.event.times import format_time, parse_time, show

if TYPE_CHECKING:
    from collections.abc import Mapping

# The limits of events, for the server, the library and Spark.
# The largest record value of the log: an event that parses can be stored.
EVENT_BYTES_MAX: Final = 10 * 1024 * 1024
BATCH_BYTES_MAX: Final = 64 * 1024 * 1024
# As objects, 100,000 small events take 70 MB and two thirds of a second to parse; five times as many take
# 300 MB and four seconds, during which a server that reads them one by one would serve no other request.
BATCH_EVENTS_MAX: Final = 100_000
# Channel, source and id together, in UTF-8. Thorium measures its budget at start; this is its maximum.
IDENTITY_BYTES_MAX: Final = 65_536
EXTENSIONS_MAX: Final = 256
# The core suggests 20; real extensions are longer, megabytes are an attack.
ATTRIBUTE_NAME_CHARS_MAX: Final = 128
ATTRIBUTE_CHARS_MAX: Final = 65_536
INTEGER_MIN: Final = -(2**31)
INTEGER_MAX: Final = 2**31 - 1

SPECVERSION: Final = "1.0"
JSON_TYPE: Final = "application/json"
STRUCTURED_TYPE: Final = "application/cloudevents+json"
BATCH_TYPE: Final = "application/cloudevents-batch+json"

REQUIRED: Final = ("specversion", "id", "source", "type")
OPTIONAL: Final = ("datacontenttype", "dataschema", "subject", "time")
CONTEXT: Final = frozenset((*REQUIRED, *OPTIONAL))
DATA_MEMBERS: Final = frozenset(("data", "data_base64"))

_NAME = re.compile(r"[a-z0-9]+")
# Core, "Type System", String: controls, surrogates and noncharacters are not allowed.
_NONCHARACTERS = "".join(f"{chr(p << 16 | 0xFFFE)}{chr(p << 16 | 0xFFFF)}" for p in range(17))
_FORBIDDEN = re.compile(f"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef{_NONCHARACTERS}]")
# RFC 3986, appendix A, flattened. `/` is in no inner class, so matching is linear.
_PCT = "%[0-9A-Fa-f]{2}"
_PCHAR = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|{_PCT})"
_HOST = rf"(?:\[[0-9A-Za-z:.]+\]|(?:[A-Za-z0-9\-._~!$&'()*+,;=]|{_PCT})*)"
_AUTHORITY = rf"//(?:(?:[A-Za-z0-9\-._~!$&'()*+,;=:]|{_PCT})*@)?{_HOST}(?::[0-9]*)?(?:/{_PCHAR}*)*"
_ROOTED = rf"/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = re.compile(
    rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{_AUTHORITY}|{_ROOTED}|(?:{_PCHAR}+(?:/{_PCHAR}*)*)?){_TAIL}"
)
_RELATIVE = re.compile(rf"(?:{_AUTHORITY}|{_ROOTED}|(?:(?!:){_PCHAR})+(?:/{_PCHAR}*)*|){_TAIL}")
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105  (a token of RFC 7230)
_MEDIA_TYPE = re.compile(
    rf'{_TOKEN}/{_TOKEN}(?:[ \t]*;[ \t]*{_TOKEN}=(?:{_TOKEN}|"(?:[ !#-\[\]-~]|\\[ -~])*"))*[ \t]*;?[ \t]*'
)


@lru_cache(maxsize=256)
def is_json_type(content_type: str | None) -> bool:
    """Return whether a content type declares JSON (`*/json`, `*/*+json`); None does (§3.1.1)."""
    if content_type is None:
        return True
    _, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return subtype == "json" or subtype.endswith("+json")


def check_attributes(members: Mapping[str, Any]) -> None:
    """Check a complete set of attributes. Raises EventError."""
    for name in REQUIRED:
        if name not in members:
            raise missing_error(name, None)
    if len(members) > EXTENSIONS_MAX + len(CONTEXT):
        raise EventError(
            f"{len(members)} attributes are over the limit of {EXTENSIONS_MAX} extensions",
            code="too-many-attributes",
        )
    for name, value in members.items():
        if name in CONTEXT:
            _check_text(name, value)
            if value == "":
                raise missing_error(name, value) if name in REQUIRED else _value_error(name, value)
        else:
            _check_extension(name, value)
    _check_meanings(members)


def _check_meanings(members: Mapping[str, Any]) -> None:
    """Check the attributes whose text has a form of its own."""
    if members["specversion"] != SPECVERSION:
        raise EventError(
            f"specversion {show(members['specversion'])} is not supported: use {SPECVERSION!r}",
            code="unsupported-specversion",
            attribute="specversion",
        )
    source = members["source"]
    if not (_URI.fullmatch(source) or _RELATIVE.fullmatch(source)):
        raise _uri_error("source", source, "a URI reference (RFC 3986)")
    if "time" in members:
        parse_time(members["time"])
    if "datacontenttype" in members:
        check_media_type(members["datacontenttype"])
    if "dataschema" in members and not _URI.fullmatch(members["dataschema"]):
        raise _uri_error("dataschema", members["dataschema"], "an absolute URI (RFC 3986)")


def check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise name_error(name, "may have only the letters a to z and digits")
    if name in DATA_MEMBERS:
        raise name_error(name, "is reserved")
    if len(name) > ATTRIBUTE_NAME_CHARS_MAX:
        raise name_error(name, f"is longer than {ATTRIBUTE_NAME_CHARS_MAX} characters")


def _check_extension(name: str, value: Any) -> None:
    check_name(name)
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        if not INTEGER_MIN <= value <= INTEGER_MAX:
            raise EventError(
                f"extension {name} {value} does not fit a signed 32-bit Integer: send it as a string",
                code="invalid-attribute",
                attribute=name,
            )
        return
    _check_text(name, value)


def escape_text(text: str) -> str:
    """Return a text as an attribute may have it: forbidden characters become JSON's escapes, such as \\u007f."""
    if text.isascii() and text.isprintable():
        return text
    return _FORBIDDEN.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _value_error(name, value)
    if len(value) > ATTRIBUTE_CHARS_MAX:
        raise EventError(
            f"{name} has {len(value)} characters, over the limit of {ATTRIBUTE_CHARS_MAX}",
            code="attribute-too-long",
            attribute=name,
        )
    if value.isascii() and value.isprintable():
        return  # nearly all values, several times as fast as the search
    bad = _FORBIDDEN.search(value)
    if bad:
        raise EventError(
            f"{name} {show(value)} has the forbidden character U+{ord(bad[0]):04X}",
            code="invalid-attribute",
            attribute=name,
        )


def check_media_type(value: str) -> None:
    if not _MEDIA_TYPE.fullmatch(value):
        raise EventError(
            f"datacontenttype {show(value)} is not a media type such as application/json",
            code="invalid-content-type",
            attribute="datacontenttype",
        )


def check_data(data: Any, content_type: str | None) -> None:
    if data is UNSET or isinstance(data, bytes | str) or is_json_type(content_type):
        return
    raise data_error(
        f"data of content type {content_type} is a string or bytes, not {kind_of(data)}"
    )


def plain_value(name: str, value: Any) -> Any:
    """Return an extension's value as one of the JSON types that carry it (§2.2)."""
    if isinstance(value, datetime):
        return format_time(value, name)
    return b64encode(value).decode() if isinstance(value, bytes) else value


def canonical_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


# Errors.


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
    }
    return names.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)


def missing_error(name: str, value: Any) -> EventError:
    found = "is missing" if value is None else f"is {show(value)}"
    return EventError(
        f"required attribute {name} {found}: it must be a non-empty string",
        code=f"missing-event-{name}",
        attribute=name,
    )


def _value_error(name: str, value: Any) -> EventError:
    allowed = "a non-empty string" if name in CONTEXT else "a string, an integer or a boolean"
    return EventError(
        f"attribute {name} is {show(value)}: it must be {allowed}",
        code="invalid-attribute",
        attribute=name,
    )


def name_error(name: str, why: str) -> EventError:
    return EventError(
        f"attribute name {show(name)} {why}", code="invalid-attribute-name", attribute=name
    )


def _uri_error(name: str, value: str, wanted: str) -> EventError:
    return EventError(f"{name} {show(value)} is not {wanted}", code="invalid-uri", attribute=name)


def data_error(message: str) -> EventError:
    return EventError(message, code="invalid-data-field", attribute="data")


def too_large_error(size: int) -> EventError:
    return EventError(
        f"an event of {size} bytes is over the limit of {EVENT_BYTES_MAX}", code="event-too-large"
    )
