"""
JSON text to values of any Spark type, by the rules of Spark's own `from_json`.

A value that does not fit its type is MISFIT, never silently null: the caller counts it and keeps the text. A struct
loses only the fields that do not fit; a list or map with an element that does not fit is a misfit as a whole.

Unlike Spark: integers and times never wrap, numbers as STRING keep their spelling, a text of RFC 3339 is a TIMESTAMP
also with small letters or a leap second, a repeated key of a map keeps its last value, and a time without a date is a
misfit. Conversions work on the JSON text, so that decimals are exact.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from calendar import monthrange
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from math import inf, nan
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
    VariantType,
)

from virta.errors import EventError
from virta.event import parse_time
from virta.event.document import UNREADABLE, decode_any
from virta.jsontext import valid_text
from virta.spark.source.variant import variant_pair
from virta.spark.versions import TIME_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable

    Convert = Callable[[bytes], Any]


class Misfit:
    """The type of MISFIT."""


MISFIT: Final = Misfit()

INTEGER_BITS = {LongType: 63, IntegerType: 31, ShortType: 15, ByteType: 7}
SECONDS_MAX = (1 << 63) // 1_000_000 - 1  # microseconds beyond do not fit in 64 bits
INTEGER_DIGITS_MAX = 20  # longer ones fit in no integer type
SPECIAL_NUMBERS = {
    **dict.fromkeys((b'"+INF"', b'"+Infinity"', b'"Infinity"'), inf),
    **dict.fromkeys((b'"-INF"', b'"-Infinity"'), -inf),
    b'"NaN"': nan,
}
DECIMALS = Context(prec=200, Emax=999_999, Emin=-999_999)
DECIMAL_TEXT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)
DATE_TEXT = re.compile(
    r"([+-]?)(\d{4,7})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T].*)?)?)?", re.ASCII | re.DOTALL
)
DAYS_TEXT = re.compile(r"[+-]?\d{1,3}", re.ASCII)  # Spark reads short numbers in text as days
TIME_TEXT = re.compile(
    r"([+-]?)(\d{4,6})(?:-(\d{1,2})(?:-(\d{1,2})"
    r"(?:[ T](\d{1,2})(?::(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?(.*))?)?)?)?)?",
    re.ASCII | re.DOTALL,
)
CLOCK_TEXT = re.compile(
    r"(T?)(\d{1,2})(?::(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?)?)?[\x00-\x20]*([AaPp][Mm])?", re.ASCII
)
OFFSET_TEXT = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{2}))?(?::?(\d{2}))?", re.ASCII)
BLANKS = "".join(map(chr, range(33)))  # what Spark trims around times
DAYS_TO_1970 = 719_468

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode


class DataFitter:
    """Converts the JSON text of an event's data to one type; `misfits` grows when something did not fit."""

    def __init__(self, kind: DataType) -> None:
        self.misfits = 0
        self._convert = self.converter(kind)

    def fit(self, raw: bytes) -> Any:
        """Return the value for Arrow: dates as days, times as microseconds, maps as pairs."""
        return self.or_null(self._convert(raw))

    def or_null(self, value: Any) -> Any:
        if value is MISFIT:
            self.misfits += 1
            return None
        return value

    def converter(self, kind: DataType) -> Convert:
        """Return the conversion of a type."""
        if isinstance(kind, VariantType):
            return variant_value
        convert = self.nested(kind) or scalar(kind)
        return lambda raw: None if raw == b"null" else convert(raw)

    def nested(self, kind: DataType) -> Convert | None:
        if isinstance(kind, ArrayType):
            return self.list_of(self.converter(kind.elementType))
        if isinstance(kind, MapType):
            return self.map_of(self.converter(kind.valueType))
        if isinstance(kind, StructType):
            return self.struct_of({f.name: self.converter(f.dataType) for f in kind.fields})
        return None

    def list_of(self, convert: Convert) -> Convert:
        def convert_list(raw: bytes) -> Any:
            if raw[:1] != b"[":
                return MISFIT
            items = [convert(bytes(item)) for item in _elements(raw)]
            return MISFIT if MISFIT in items else items

        return convert_list

    def map_of(self, convert: Convert) -> Convert:
        def convert_map(raw: bytes) -> Any:
            if raw[:1] != b"{":
                return MISFIT
            pairs = [(valid_text(n), convert(bytes(item))) for n, item in _members(raw).items()]
            return MISFIT if any(item is MISFIT for _, item in pairs) else pairs

        return convert_map

    def struct_of(self, fields: dict[str, Convert]) -> Convert:
        def convert_struct(raw: bytes) -> Any:
            if raw[:1] != b"{":
                return MISFIT
            members = _members(raw)
            return {
                name: self.or_null(convert(bytes(members[name]))) if name in members else None
                for name, convert in fields.items()
            }

        return convert_struct


def refused_type(kind: DataType) -> DataType | None:
    """Return the part of a type that data cannot have, None if all of it can."""
    if isinstance(kind, ArrayType):
        return refused_type(kind.elementType)
    if isinstance(kind, MapType):
        return refused_type(kind.valueType) if isinstance(kind.keyType, StringType) else kind
    if isinstance(kind, StructType):
        return next(filter(None, (refused_type(f.dataType) for f in kind.fields)), None)
    known: tuple[type, ...] = (*SCALARS, *INTEGER_BITS, DecimalType, VariantType)
    return None if isinstance(kind, known) else kind


def scalar(kind: DataType) -> Convert:
    if isinstance(kind, DecimalType):
        return decimal_converter(kind.precision, kind.scale)
    for integer, bits in INTEGER_BITS.items():
        if isinstance(kind, integer):
            return integer_converter(bits)
    return next(convert for known, convert in SCALARS.items() if isinstance(kind, known))


def variant_value(raw: bytes) -> dict[str, bytes]:
    value, metadata = variant_pair(decode_any(raw))
    return {"value": value, "metadata": metadata}


def string_value(raw: bytes) -> str:
    """Return text unescaped, everything else as it is spelled."""
    return valid_text(_text(raw)) if raw[:1] == b'"' else raw.decode()


def boolean_value(raw: bytes) -> Any:
    return raw == b"true" if raw in {b"true", b"false"} else MISFIT


def integer_converter(bits: int) -> Convert:
    def convert(raw: bytes) -> Any:
        if len(raw) > INTEGER_DIGITS_MAX or not is_integer(raw):
            return MISFIT
        value = int(raw)
        return value if -(1 << bits) <= value < 1 << bits else MISFIT

    return convert


def is_integer(raw: bytes) -> bool:
    return raw.removeprefix(b"-").isdigit()


def is_number(raw: bytes) -> bool:
    return raw[:1] in b"-0123456789"


def double_value(raw: bytes) -> Any:
    if is_number(raw):
        return 0.0 if raw == b"-0" else float(raw)  # Spark reads -0 as an integer
    return SPECIAL_NUMBERS.get(raw, MISFIT)


def decimal_converter(precision: int, scale: int) -> Convert:
    """Return the conversion to DECIMAL: numbers, and numbers in text, rounded half up to the scale."""
    unit = Decimal(1).scaleb(-scale)

    def convert(raw: bytes) -> Any:
        text = raw.decode() if is_number(raw) else _text(raw) if raw[:1] == b'"' else ""
        if not DECIMAL_TEXT.fullmatch(text):
            return MISFIT
        try:
            value = Decimal(text)
            if value.adjusted() >= precision and value:
                return MISFIT
            rounded = value.quantize(unit, ROUND_HALF_UP, DECIMALS)
        except InvalidOperation:
            return MISFIT
        digits = rounded.as_tuple().digits
        return rounded if len(digits) <= precision or not rounded else MISFIT

    return convert


def binary_value(raw: bytes) -> Any:
    if raw[:1] != b'"':
        return MISFIT
    try:
        return b64decode(_text(raw), validate=True)
    except (binascii.Error, ValueError):
        return MISFIT


# Dates and times.


def days_of(sign: str, year: str, month: str | None, day: str | None) -> int | None:
    """Return days since 1970 of a date in the proleptic Gregorian calendar, None if there is no such day."""
    y, m, d = int(sign + year), int(month or 1), int(day or 1)
    if not 1 <= m <= 12 or not 1 <= d <= monthrange(2000 + y % 400, m)[1]:
        return None
    y -= m <= 2
    era, year_of_era = divmod(y, 400)
    day_of_year = (153 * (m + (-3 if m > 2 else 9)) + 2) // 5 + d - 1
    return (
        era * 146_097
        + year_of_era * 365
        + year_of_era // 4
        - year_of_era // 100
        + (day_of_year - DAYS_TO_1970)
    )


def date_value(raw: bytes) -> Any:
    if raw[:1] != b'"':
        return MISFIT
    text = _text(raw)
    found = DATE_TEXT.fullmatch(text.strip(BLANKS))
    if found is None:
        return int(text) if DAYS_TEXT.fullmatch(text) else MISFIT
    days = days_of(*found.groups())
    return MISFIT if days is None or not -(1 << 31) <= days < 1 << 31 else days


def timestamp_value(raw: bytes) -> Any:
    """Return microseconds since 1970 in UTC; whole numbers are seconds."""
    if is_integer(raw):
        seconds = int(raw) if len(raw) <= INTEGER_DIGITS_MAX else SECONDS_MAX + 1
        return seconds * 1_000_000 if abs(seconds) <= SECONDS_MAX else MISFIT
    if raw[:1] != b'"':
        return MISFIT
    text = _text(raw)
    local, zone = local_time(text)
    if local is not None:
        shift = 0 if not zone else zone_seconds(zone, local)
        return MISFIT if shift is None else in_range(local - shift * 1_000_000)
    try:
        return micros_of(parse_time(text))
    except EventError:
        return MISFIT


def timestamp_ntz_value(raw: bytes) -> Any:
    """Return microseconds since 1970 of a text without a zone."""
    if raw[:1] != b'"':
        return MISFIT
    local, zone = local_time(_text(raw))
    return MISFIT if local is None or zone else in_range(local)


def time_value(raw: bytes) -> Any:
    """Return nanoseconds since midnight, of a clock of 24 or of 12 hours."""
    found = CLOCK_TEXT.fullmatch(_text(raw).strip(BLANKS)) if raw[:1] == b'"' else None
    if found is None or not (found[1] or found[3]):
        return MISFIT
    _, *parts, fraction, half = found.groups()
    h, m, s = (int(part or 0) for part in parts)
    if half and not 1 <= h <= 12:
        return MISFIT
    if half:
        h = h % 12 + (12 if half.upper() == "PM" else 0)
    if h > 23 or m > 59 or s > 59:
        return MISFIT
    return (h * 3600 + m * 60 + s) * 10**9 + int(f"{(fraction or '')[:TIME_DIGITS]:0<9}")


def in_range(micros: int) -> Any:
    return micros if -(1 << 63) <= micros < 1 << 63 else MISFIT


def micros_of(time: datetime) -> int:
    return round(time.replace(microsecond=0).timestamp()) * 1_000_000 + time.microsecond


def local_time(text: str) -> tuple[int | None, str]:
    """Return the microseconds of a text as if it were UTC (None: it is no time), and its zone."""
    found = TIME_TEXT.fullmatch(text.strip(BLANKS))
    if found is None:
        return None, ""
    *day, hour, minute, second, fraction, zone = found.groups()
    days = days_of(*day)
    h, m, s = (int(part or 0) for part in (hour, minute, second))
    if days is None or h > 23 or m > 59 or s > 59:
        return None, ""
    micros = int(f"{fraction or '':0<6.6}")
    return (days * 86_400 + h * 3600 + m * 60 + s) * 1_000_000 + micros, (zone or "").strip()


def zone_seconds(zone: str, local: int) -> int | None:
    """Return how far a zone is ahead of UTC at a local time, None if there is no such zone."""
    if zone in {"Z", "UTC", "GMT", "UT"}:
        return 0
    found = OFFSET_TEXT.fullmatch(zone)
    if found:
        h, m, s = (int(part or 0) for part in found.groups()[1:])
        if h > 18 or m > 59 or s > 59 or (h == 18 and (m or s)):
            return None
        return (h * 3600 + m * 60 + s) * (-1 if found[1] == "-" else 1)
    try:
        at = datetime.fromtimestamp(local // 1_000_000, UTC).replace(tzinfo=ZoneInfo(zone))
    except (KeyError, ValueError, OverflowError, OSError):  # ZoneInfoNotFoundError is a KeyError
        return None
    shift = at.utcoffset()
    return None if shift is None else round(shift.total_seconds())


SCALARS: dict[type[DataType], Convert] = {
    StringType: string_value,
    BooleanType: boolean_value,
    DoubleType: double_value,
    FloatType: double_value,
    BinaryType: binary_value,
    DateType: date_value,
    TimestampType: timestamp_value,
    TimestampNTZType: timestamp_ntz_value,
    TimeType: time_value,
}


def data_text(raw: bytes, data: Any) -> bytes:
    """Return the JSON text of an event's data: of the event's own bytes, or of the decoded value."""
    try:
        found = _members(raw)["data"]
    except (*UNREADABLE, KeyError):
        return msgspec.json.encode(data)
    return bytes(found)
