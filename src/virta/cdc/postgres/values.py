"""
Values of PostgreSQL's text format as JSON values, by type.

| type | JSON |
|---|---|
| bool | true, false |
| int2, int4, int8, oid | number |
| float4, float8 | number; NaN and infinities as text |
| numeric, money | text, with every digit |
| timestamp | text 2026-01-31T12:30:00.5 |
| timestamptz | text 2026-01-31T12:30:00.5Z, in UTC |
| date, time, timetz, interval | text; intervals as ISO 8601 (P1DT2H) |
| bytea | Base64 |
| json, jsonb | the JSON itself |
| arrays | array of the element's JSON |
| domains | as their base type |
| anything else (text, uuid, enums, ranges, inet, geometry, composite types …) | text, as PostgreSQL writes it |

Sessions use `SESSION`, so that the text does not depend on settings of the server. No I/O here.
"""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from virta.errors import CaptureError
from virta.jsontext import JsonDepthError, check_depth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Converter = Callable[[str], Any]

SESSION: Final = (
    "-c client_encoding=UTF8 -c timezone=UTC -c datestyle=ISO,YMD -c intervalstyle=iso_8601 "
    "-c extra_float_digits=1 -c bytea_output=hex"
)
# A JSON value deeper than this stays a text: the event around it adds levels of its own.
JSON_DEPTH_MAX: Final = 500
# PostgreSQL's own limit of array dimensions is 6.
ARRAY_DEPTH_MAX: Final = 6
DOMAIN_DEPTH_MAX: Final = 32

_BOOL, _BYTEA, _FLOAT4, _FLOAT8, _JSON, _JSONB = 16, 17, 700, 701, 114, 3802
_TIMESTAMP, _TIMESTAMPTZ = 1114, 1184
_INTEGERS: Final = frozenset({20, 21, 23, 26})


class TypeInfo(msgspec.Struct, frozen=True):
    """What the catalog says of a type."""

    name: str
    kind: str  # typtype: b, c, d, e, p, r, m
    base: int  # of a domain
    element: int  # of an array, else 0
    delimiter: str


class TypeTable:
    """Converters by type number; types that appear later are added with `load`."""

    def __init__(self) -> None:
        self._types: dict[int, TypeInfo] = {}
        self._converters: dict[int, Converter] = {}

    def load(self, rows: Iterable[tuple[int, str, str, int, int, str]]) -> None:
        """Replace what is known: (oid, name, typtype, base type, element type of an array, delimiter)."""
        self._types = {row[0]: TypeInfo(*row[1:]) for row in rows}
        self._converters = {}

    def __contains__(self, oid: int) -> bool:
        return oid in self._types

    def name(self, oid: int) -> str:
        info = self._types.get(oid)
        return info.name if info is not None else str(oid)

    def converter(self, oid: int) -> Converter:
        """Return the function that makes a JSON value of a text."""
        found = self._converters.get(oid)
        if found is None:
            found = self._converters[oid] = self._make_converter(oid)
        return found

    def _make_converter(self, oid: int) -> Converter:
        info = self._types.get(oid)
        for _ in range(DOMAIN_DEPTH_MAX):
            if info is None or info.kind != "d":
                break
            oid, info = info.base, self._types.get(info.base)
        if info is not None and info.element:
            element = self._types.get(info.element)
            delimiter = element.delimiter if element is not None else ","
            return partial(_array, self.converter(info.element), delimiter)
        if oid in _INTEGERS:
            return int
        return _CONVERTERS.get(oid, str)


def _bool(text: str) -> bool:
    return text == "t"


def _float(text: str) -> float | str:
    return text if text[-1:] in {"N", "y"} else float(text)  # NaN, Infinity, -Infinity


def _timestamp(text: str) -> str:
    return text.replace(" ", "T", 1)  # `infinity` has no space


def _timestamptz(text: str) -> str:
    return text.removesuffix("+00").replace(" ", "T", 1) + "Z" if text[-3:] == "+00" else _utc(text)


def _utc(text: str) -> str:
    """Return a time that does not end with +00: infinity, or one before Christ."""
    return text.replace("+00 BC", "Z BC").replace(" ", "T", 1) if "+00 BC" in text else text


def _bytea(text: str) -> str:
    return b64encode(bytes.fromhex(text[2:])).decode()


def _json(text: str) -> Any:
    raw = text.encode()
    try:
        check_depth(raw, JSON_DEPTH_MAX)
        msgspec.json.decode(raw)
        return msgspec.Raw(msgspec.json.format(raw, indent=-1))
    except (JsonDepthError, ValueError, RecursionError):
        return text  # such as an escaped lone surrogate, or a number beyond a double: kept as it is written


_CONVERTERS: Final[dict[int, Converter]] = {
    _BOOL: _bool,
    _FLOAT4: _float,
    _FLOAT8: _float,
    _TIMESTAMP: _timestamp,
    _TIMESTAMPTZ: _timestamptz,
    _BYTEA: _bytea,
    _JSON: _json,
    _JSONB: _json,
}


# Arrays: {1,2,NULL}, {{a,b},{"c d","e\"f"}}, [0:1]={x,y}


def _array(convert: Converter, delimiter: str, text: str) -> list[Any]:
    start = 0
    if text[:1] == "[":  # other lower bounds than 1
        start = text.index("=") + 1
    value, end = _parse_array(text, start, convert, delimiter, 0)
    if end != len(text):
        raise _array_error(text)
    return value


def _parse_array(
    text: str, at: int, convert: Converter, delimiter: str, depth: int
) -> tuple[list[Any], int]:
    if text[at : at + 1] != "{" or depth > ARRAY_DEPTH_MAX:
        raise _array_error(text)
    at += 1
    items: list[Any] = []
    if text[at : at + 1] == "}":
        return items, at + 1
    while True:
        item: Any
        if text[at : at + 1] == "{":
            item, at = _parse_array(text, at, convert, delimiter, depth + 1)
        elif text[at : at + 1] == '"':
            quoted, at = _parse_quoted(text, at + 1)
            item = convert(quoted)
        else:
            end = at
            while end < len(text) and text[end] not in {delimiter, "}"}:
                end += 1
            word = text[at:end]
            item = None if word.upper() == "NULL" else convert(word)
            at = end
        items.append(item)
        mark = text[at : at + 1]
        at += 1
        if mark == "}":
            return items, at
        if mark != delimiter:
            raise _array_error(text)


def _parse_quoted(text: str, at: int) -> tuple[str, int]:
    parts: list[str] = []
    start = at
    while True:
        mark = text[at : at + 1]
        if mark == '"':
            parts.append(text[start:at])
            return "".join(parts), at + 1
        if mark == "\\":
            parts.append(text[start:at])
            start = at + 1
            at += 2
        elif mark:
            at += 1
        else:
            raise _array_error(text)


def _array_error(text: str) -> CaptureError:
    return CaptureError(
        f"an array of PostgreSQL cannot be decoded: {text[:80]}", code="capture_protocol"
    )
