"""
JSON values as Spark's VARIANT binary (the Parquet variant encoding, version 1).

A variant is a value and a metadata dictionary of the object keys in it. Objects and arrays are
`header | count | (ids) | offsets | data`, with the smallest widths that fit. Numbers with a fraction or beyond 64 bits
are doubles, as everywhere in Virta.

Spark's parse_json does not replace it: a Python data source must return VARIANT columns itself, and parse_json makes
decimals of fractions and refuses duplicate keys.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from virta.errors import EventError
from virta.jsontext import DEPTH_MAX, valid_text
from virta.native import load

if TYPE_CHECKING:
    from collections.abc import Iterator

_native = load("virta.spark._variant")
encode_native: Any = None if _native is None else _native.encode

VARIANT_BYTES_MAX = 16 * 1024 * 1024 - 1  # three-byte offsets end here, and so does Spark's limit

PRIMITIVE, SHORT_TEXT, OBJECT, ARRAY = range(4)
NULL, TRUE, FALSE = b"\x00", b"\x04", b"\x08"
INT1, INT2, INT4, INT8, DOUBLE, TEXT = (kind << 2 for kind in (3, 4, 5, 6, 7, 16))
SHORT_TEXT_BYTES_MAX = 63

_is_container = frozenset((list, dict)).__contains__

_pack_double = struct.Struct("<Bd").pack
_pack_int8 = struct.Struct("<Bq").pack
_pack_int4 = struct.Struct("<Bi").pack
_pack_int2 = struct.Struct("<Bh").pack
_pack_int1 = struct.Struct("<Bb").pack


def variant_pair(value: Any) -> tuple[bytes, bytes]:
    """
    Return the two parts of a VARIANT in Spark's Arrow exchange: the bytes of the value and of its dictionary.

    Raises:
        EventError: the variant would be over Spark's limit, or is nested too deeply.
    """
    try:
        pair: tuple[bytes, bytes] = encode_native(value) if encode_native else encode_plain(value)
    except UnicodeEncodeError:
        pair = encode_plain(value)
    except OverflowError as exc:
        raise too_large() from exc
    except RecursionError as exc:
        raise EventError("data is nested too deeply for a VARIANT", attribute="data") from exc
    return pair


def encode_plain(value: Any) -> tuple[bytes, bytes]:
    """Return the parts of a VARIANT, as native/variant.c does."""
    keys: dict[str, int] = {}
    body = encode(value, keys)
    metadata = encode_metadata(keys)
    if len(body) > VARIANT_BYTES_MAX or len(metadata) > VARIANT_BYTES_MAX:
        raise OverflowError
    return body, metadata


def encode(value: Any, keys: dict[str, int]) -> bytes:
    """Return the bytes of a value. It may nest as deep as JSON may, which is deeper than Python's calls."""
    if not _is_container(value.__class__):
        return encode_scalar(value)
    parents = [_Container(value, keys)]
    while True:
        items = parents[-1].items
        for child in parents[-1].rest:
            if _is_container(child.__class__):
                if len(parents) == DEPTH_MAX:
                    raise RecursionError
                parents.append(_Container(child, keys))
                break
            items.append(encode_scalar(child))
        else:
            body = parents.pop().encode()
            if not parents:
                return body
            parents[-1].items.append(body)


class _Container:
    """A list or an object whose values are being encoded."""

    __slots__ = ("ids", "items", "rest")

    def __init__(self, value: list[Any] | dict[str, Any], keys: dict[str, int]) -> None:
        self.ids: list[int] | None = None
        self.items: list[bytes] = []
        children = value
        if isinstance(value, dict):
            names = sorted(value)
            self.ids = [keys.setdefault(name, len(keys)) for name in names]
            children = [value[name] for name in names]
        self.rest: Iterator[Any] = iter(children)

    def encode(self) -> bytes:
        return encode_array(self.items) if self.ids is None else encode_object(self.ids, self.items)


def encode_scalar(value: Any) -> bytes:
    kind = value.__class__
    if kind is str:
        return encode_text(value)
    if kind is int:
        return encode_integer(value)
    if kind is float:
        return _pack_double(DOUBLE, value)
    if value is None:
        return NULL
    return TRUE if value else FALSE


def encode_text(value: str) -> bytes:
    raw = valid_text(value).encode()
    if len(raw) <= SHORT_TEXT_BYTES_MAX:
        return bytes((len(raw) << 2 | SHORT_TEXT,)) + raw
    return struct.pack("<BI", TEXT, len(raw)) + raw


def encode_integer(value: int) -> bytes:
    if -0x80 <= value < 0x80:
        return _pack_int1(INT1, value)
    if -0x8000 <= value < 0x8000:
        return _pack_int2(INT2, value)
    if -0x8000_0000 <= value < 0x8000_0000:
        return _pack_int4(INT4, value)
    if -(1 << 63) <= value < 1 << 63:
        return _pack_int8(INT8, value)
    try:
        return _pack_double(DOUBLE, float(value))
    except OverflowError:
        return _pack_double(DOUBLE, float("inf") if value > 0 else float("-inf"))


def encode_array(items: list[bytes]) -> bytes:
    large = len(items) > 0xFF
    offsets, width = encode_offsets(items)
    header = large << 4 | (width - 1) << 2 | ARRAY
    return b"".join((encode_count(header, len(items), large=large), offsets, *items))


def encode_object(ids: list[int], items: list[bytes]) -> bytes:
    large = len(ids) > 0xFF
    id_width = width_of(max(ids, default=0))
    offsets, width = encode_offsets(items)
    header = large << 6 | (id_width - 1) << 4 | (width - 1) << 2 | OBJECT
    id_bytes = b"".join(i.to_bytes(id_width, "little") for i in ids)
    return b"".join((encode_count(header, len(ids), large=large), id_bytes, offsets, *items))


def encode_count(header: int, count: int, *, large: bool) -> bytes:
    return struct.pack("<BI" if large else "<BB", header, count)


def encode_offsets(items: list[bytes]) -> tuple[bytes, int]:
    ends, total = [0], 0
    for item in items:
        total += len(item)
        ends.append(total)
    width = width_of(total)
    if width == 1:
        return bytes(ends), 1
    return b"".join(end.to_bytes(width, "little") for end in ends), width


def encode_metadata(keys: dict[str, int]) -> bytes:
    names = [valid_text(name).encode() for name in keys]
    offsets, width = encode_offsets(names)
    count_width = width_of(len(names))
    if count_width > width:
        # Empty keys only: one width serves both the count and the offsets.
        width = count_width
        offsets = bytes(width * (len(names) + 1))
    head = (1 | (width - 1) << 6).to_bytes(1, "little") + len(names).to_bytes(width, "little")
    return b"".join((head, offsets, *names))


def width_of(number: int) -> int:
    if number <= 0xFF:
        return 1
    if number <= 0xFFFF:
        return 2
    if number > VARIANT_BYTES_MAX:
        raise OverflowError
    return 3


def too_large() -> EventError:
    return EventError(
        f"data is over the limit of a VARIANT, {VARIANT_BYTES_MAX} bytes", attribute="data"
    )
