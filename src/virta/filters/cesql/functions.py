"""
The built-in functions of CESQL 1.0.0 (section 3.5) and how a call finds its overload.

Each takes arguments already cast to its parameter types and returns a value of its return type, with a problem
where the specification names one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from virta.filters.cesql.values import (
    FUNCTION_EVALUATION,
    INTEGER_MAX,
    INTEGER_MIN,
    MATH,
    CesqlProblem,
    Result,
    Value,
    cast,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Characters a function may build: an expression names the same long attribute a thousand times.
STRING_CHARS_MAX = 1 << 20

# White space as Unicode has it; str.strip() would also take the separators U+001C to U+001F.
WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006"
    "\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)


@dataclass(frozen=True, slots=True)
class CesqlFunction:
    """One overload; `parameters` may hold None for "any type", `variadic` repeats a type after them."""

    returns: type[Value]
    run: Callable[..., Result]
    parameters: tuple[type[Value] | None, ...] = ()
    variadic: type[Value] | None = None

    def takes(self, count: int) -> bool:
        fixed = len(self.parameters)
        return count == fixed or (self.variadic is not None and count > fixed)

    def parameter(self, index: int) -> type[Value] | None:
        return self.parameters[index] if index < len(self.parameters) else self.variadic


def find(name: str, count: int) -> CesqlFunction | None:
    """Return the overload of an upper-case name for `count` arguments, or None."""
    return next((f for f in FUNCTIONS.get(name, ()) if f.takes(count)), None)


def _function_failed(value: Value, message: str) -> Result:
    return value, CesqlProblem(FUNCTION_EVALUATION, message)


def _bounded_text(value: str, name: str) -> Result:
    if len(value) > STRING_CHARS_MAX:
        return _function_failed("", f"{name} would build more than {STRING_CHARS_MAX} characters")
    return value, None


def _concat(*parts: str) -> Result:
    return _join_bounded("CONCAT", "", parts)


def _concat_ws(delimiter: str, *parts: str) -> Result:
    return _join_bounded("CONCAT_WS", delimiter, parts)


def _join_bounded(name: str, delimiter: str, parts: tuple[str, ...]) -> Result:
    size = sum(map(len, parts)) + len(delimiter) * max(0, len(parts) - 1)
    if size > STRING_CHARS_MAX:
        return _function_failed(
            "", f"{name} would build {size} characters, more than {STRING_CHARS_MAX}"
        )
    return delimiter.join(parts), None


def _left(text: str, count: int) -> Result:
    if count < 0:
        return _function_failed(text, f"LEFT cannot take {count} characters: expected 0 or more")
    return text[:count], None


def _right(text: str, count: int) -> Result:
    if count < 0:
        return _function_failed(text, f"RIGHT cannot take {count} characters: expected 0 or more")
    return text[max(0, len(text) - count) :], None


def _substring(text: str, position: int, length: int = INTEGER_MAX) -> Result:
    size = len(text)
    if not -size <= position <= size:
        return _function_failed(
            "", f"SUBSTRING position {position} is outside a text of {size} characters"
        )
    if length < 0:
        return _function_failed("", f"SUBSTRING length {length} is negative: expected 0 or more")
    if position == 0:
        return "", None
    start = position - 1 if position > 0 else size + position
    return text[start : start + length], None


def _abs(value: int) -> Result:
    if value == INTEGER_MIN:
        return INTEGER_MAX, CesqlProblem(MATH, f"ABS({INTEGER_MIN}) is out of the range of Integer")
    return abs(value), None


FUNCTIONS: dict[str, tuple[CesqlFunction, ...]] = {
    "ABS": (CesqlFunction(int, _abs, (int,)),),
    "BOOL": (CesqlFunction(bool, lambda x: cast(x, bool), (None,)),),
    "CONCAT": (CesqlFunction(str, _concat, variadic=str),),
    "CONCAT_WS": (CesqlFunction(str, _concat_ws, (str,), variadic=str),),
    "INT": (CesqlFunction(int, lambda x: cast(x, int), (None,)),),
    "IS_BOOL": (CesqlFunction(bool, lambda x: (cast(x, bool)[1] is None, None), (None,)),),
    "IS_INT": (CesqlFunction(bool, lambda x: (cast(x, int)[1] is None, None), (None,)),),
    "LEFT": (CesqlFunction(str, _left, (str, int)),),
    "LENGTH": (CesqlFunction(int, lambda x: (min(len(x), INTEGER_MAX), None), (str,)),),
    "LOWER": (CesqlFunction(str, lambda x: _bounded_text(x.lower(), "LOWER"), (str,)),),
    "RIGHT": (CesqlFunction(str, _right, (str, int)),),
    "STRING": (CesqlFunction(str, lambda x: cast(x, str), (None,)),),
    "SUBSTRING": (
        CesqlFunction(str, _substring, (str, int)),
        CesqlFunction(str, _substring, (str, int, int)),
    ),
    "TRIM": (CesqlFunction(str, lambda x: (x.strip(WHITE_SPACE), None), (str,)),),
    "UPPER": (CesqlFunction(str, lambda x: _bounded_text(x.upper(), "UPPER"), (str,)),),
}
