"""
CESQL's three types, the casts between them, and the value of an event's attribute.

A value is a Python bool, int or str, distinguished by its exact class (a bool is no Integer here). Nothing in this
module raises: an error is a `CesqlProblem` next to a value, as the specification requires ("the primary output is
always a value, the secondary output a set of errors").
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

Value: TypeAlias = bool | int | str
Result: TypeAlias = "tuple[Value, CesqlProblem | None]"

INTEGER_MIN = -(2**31)
INTEGER_MAX = 2**31 - 1

# Integers beyond this are written as a double would be: printing millions of digits takes seconds.
INTEGER_BITS_PRINTED_MAX = 4096

# Kinds of problem, in the words of the conformance suite.
PARSE = "parse"
MATH = "math"
CAST = "cast"
MISSING_ATTRIBUTE = "missingAttribute"
MISSING_FUNCTION = "missingFunction"
FUNCTION_EVALUATION = "functionEvaluation"

ZERO: dict[type[Value], Value] = {bool: False, int: 0, str: ""}
TYPE_NAMES: dict[type[Value], str] = {bool: "Boolean", int: "Integer", str: "String"}

# Attributes every valid event has (CESQL 3.4.4: EXISTS holds for them always).
REQUIRED_ATTRIBUTES = frozenset({"id", "source", "specversion", "type"})

# Members of the JSON form that are not attributes, so that CESQL does not see them.
DATA_MEMBERS = frozenset({"data", "data_base64"})

_INTEGER = re.compile(r"([+-]?)0*([0-9]{1,10})", re.ASCII)
_SHOWN_CHARS_MAX = 40


@dataclass(frozen=True, slots=True)
class CesqlProblem:
    """An error of an evaluation: `kind` is the machine-readable code."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def shown(value: Value) -> str:
    """Return a value for a message, cut to a readable length."""
    text = text_of(value) if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 1] + "…"


def text_of(value: Value) -> str:
    """Return the String a value casts to (3.7); this cast never fails."""
    if value.__class__ is bool:
        return "true" if value else "false"
    return str(value)


def integer_of(text: str) -> int | None:
    """Return the Integer a String casts to, None if it does not."""
    found = _INTEGER.fullmatch(text)
    if found is None:
        return None
    number = int(found[1] + found[2])
    return number if INTEGER_MIN <= number <= INTEGER_MAX else None


def boolean_of(text: str) -> bool | None:
    """Return the Boolean a String casts to, None if it does not."""
    lower = text.lower() if len(text) <= len("false") else ""
    return True if lower == "true" else False if lower == "false" else None


def cast(value: Value, target: type[Value]) -> Result:
    """Return the value as the target type; where that fails, the target's zero value and a problem."""
    kind = value.__class__
    if kind is target:
        return value, None
    if target is str:
        return text_of(value), None
    if kind is not str:
        return target(value), None
    converted: Value | None = (integer_of if target is int else boolean_of)(str(value))
    if converted is not None:
        return converted, None
    wanted = "a 32-bit integer" if target is int else "'true' or 'false'"
    return ZERO[target], CesqlProblem(
        CAST, f"cannot cast {shown(value)} to {TYPE_NAMES[target]}: expected {wanted}"
    )


def attribute(event: Any, name: str) -> Value | None:
    """
    Return the value of an attribute of an event in JSON form, None if it is missing.

    null is an unset attribute (JSON format 2.2). What has no CESQL type becomes a String (3.2):
    numbers that are no 32-bit integers as they are written, arrays and objects as JSON.
    """
    if not isinstance(event, dict) or name in DATA_MEMBERS:
        return None
    value = event.get(name)
    if value is None or value.__class__ is str or value.__class__ is bool:
        return value
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, int):
        return _whole_number(value)
    if isinstance(value, float):
        if value.is_integer():
            return _whole_number(int(value))
        return repr(value) if math.isfinite(value) else _infinite_text(value)
    return str(value) if isinstance(value, str) else _json_text(value)


def attribute_text(event: Any, name: str) -> str:
    """Return the String of an attribute that the event has."""
    value = attribute(event, name)
    assert value is not None, name
    return text_of(value)


def exists(event: Any, name: str) -> bool:
    """Return whether the event has the attribute; always true for the required ones (3.4.4)."""
    return name in REQUIRED_ATTRIBUTES or attribute(event, name) is not None


def _whole_number(value: int) -> Value:
    if INTEGER_MIN <= value <= INTEGER_MAX:
        return value
    if value.bit_length() <= INTEGER_BITS_PRINTED_MAX:
        return str(value)
    return _infinite_text(math.inf if value > 0 else -math.inf)


def _infinite_text(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _json_text(value: Any) -> str:
    if isinstance(
        value, datetime
    ):  # a Timestamp is a String (3.1); some readers of events parse it
        return value.isoformat()
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    except (RecursionError, TypeError, ValueError):
        # Too deep for Python to encode: a text that equals no literal.
        return "[…]"
