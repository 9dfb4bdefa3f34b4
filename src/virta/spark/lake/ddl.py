"""
Read a type as Spark's SQL writes it, without a JVM.

    id BIGINT, price DECIMAL(12,2), tags ARRAY<STRING>, at STRUCT<lat: DOUBLE, lon: DOUBLE>

is the struct of these fields, as is STRUCT<…>; a type alone (`DOUBLE`) is itself. Names in backquotes may have any
characters.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

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
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")

DEPTH_MAX = 64
MARKS = "<>(),:"
TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)*`)|(\w+)|([<>(),:]))", re.UNICODE)
SIMPLE: dict[str, type[DataType]] = {
    **dict.fromkeys(("boolean",), BooleanType),
    **dict.fromkeys(("tinyint", "byte"), ByteType),
    **dict.fromkeys(("smallint", "short"), ShortType),
    **dict.fromkeys(("int", "integer"), IntegerType),
    **dict.fromkeys(("bigint", "long"), LongType),
    **dict.fromkeys(("float", "real"), FloatType),
    "double": DoubleType,
    "string": StringType,
    "binary": BinaryType,
    "date": DateType,
    **dict.fromkeys(("timestamp", "timestamp_ltz"), TimestampType),
    "timestamp_ntz": TimestampNTZType,
    "variant": VariantType,
}


def parse_type(text: str) -> DataType:
    """
    Return the type that a text writes.

    Raises:
        ValueError: the text is no type; the message says where.
    """
    reader = _TypeReader(text)
    kind = reader.whole()
    reader.end()
    return kind


class _TypeReader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        at = 0
        while text[at:].strip():
            found = TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"{text!r} is no type: unexpected {text[at:].strip()[:1]!r}")
            self.tokens.append(found[0].strip())
            at = found.end()
        self.at = 0

    def whole(self) -> DataType:
        """Return a type alone, or the fields of a struct."""
        if not self.tokens:
            raise ValueError(f"{self.text!r} is no type: expected a name")
        alone = len(self.tokens) == 1 or (len(self.tokens) > 1 and self.tokens[1] in "<(")
        return self.type(0) if alone else self.fields(0, "")

    def type(self, depth: int) -> DataType:
        if depth > DEPTH_MAX:
            raise ValueError(f"{self.text!r} is no type: nested deeper than {DEPTH_MAX}")
        name = self.take().lower()
        if name in {"decimal", "dec", "numeric"}:
            return self.decimal()
        if name == "array":
            return ArrayType(self.inside(lambda: self.type(depth + 1)))
        if name == "map":
            return self.inside(lambda: self.pair(depth + 1))
        if name == "struct":
            return self.inside(lambda: self.fields(depth + 1, ">"))
        if name not in SIMPLE:
            known = ", ".join([*SIMPLE, "decimal", "array", "map", "struct"])
            raise ValueError(f"{self.text!r} is no type: {name!r} is none of {known}")
        return SIMPLE[name]()

    def decimal(self) -> DataType:
        if self.peek() != "(":
            return DecimalType()
        self.expect("(")
        numbers = [self.number()]
        if self.peek() == ",":
            self.expect(",")
            numbers.append(self.number())
        self.expect(")")
        precision, scale = [*numbers, 0][:2]
        if not 0 <= scale <= precision <= 38:
            raise ValueError(f"{self.text!r} is no type: decimal has at most 38 digits")
        return DecimalType(precision, scale)

    def pair(self, depth: int) -> DataType:
        key = self.type(depth)
        self.expect(",")
        return MapType(key, self.type(depth))

    def fields(self, depth: int, end: str) -> StructType:
        found: list[StructField] = []
        while self.peek() != end:
            if found:
                self.expect(",")
            name = self.take()
            name = name[1:-1].replace("``", "`") if name.startswith("`") else name
            if self.peek() == ":":
                self.expect(":")
            found.append(StructField(name, self.type(depth + 1)))
        return StructType(found)

    def inside(self, read: Callable[[], Found]) -> Found:
        self.expect("<")
        found = read()
        self.expect(">")
        return found

    def number(self) -> int:
        text = self.take()
        if not text.isdecimal() or len(text) > 3:
            raise ValueError(f"{self.text!r} is no type: expected a number instead of {text!r}")
        return int(text)

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        name = self.peek()
        if not name or name in MARKS:
            raise ValueError(f"{self.text!r} is no type: expected a name instead of {name!r}")
        self.at += 1
        return name

    def expect(self, mark: str) -> None:
        if self.peek() != mark:
            raise ValueError(f"{self.text!r} is no type: expected {mark!r} at {self.peek()!r}")
        self.at += 1

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise ValueError(f"{self.text!r} is no type: {self.peek()!r} follows its end")
