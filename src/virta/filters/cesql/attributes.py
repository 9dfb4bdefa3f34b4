"""
Tests on the text of one attribute, as tree conditions.

CESQL and the CloudEvents filter dialects compare an attribute *as a String*: the number 5 and the boolean true have a
text too. A condition on the attribute itself is exact only if no number, boolean, array or object has a text that
would pass; where one could, the condition is on the computed text `STRING(name)`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from virta.filters.cesql import syntax
from virta.filters.cesql.computed import CesqlExpression
from virta.filters.cesql.values import DATA_MEMBERS, Value, cast, integer_of, text_of
from virta.filters.tree import NOTHING, Condition, Node, Path, all_of, negate

if TYPE_CHECKING:
    from collections.abc import Iterable

# The texts of values that are no strings: words, and what starts and ends like a number or JSON.
_WORDS = ("true", "false", "Infinity", "-Infinity", "NaN")
_STARTS_LIKE_OTHERS = re.compile(r"-?[0-9]|[\[{]", re.ASCII)
_ENDS_OF_OTHERS = frozenset("0123456789]}")


def present(name: str) -> Node:
    """Return the condition that an attribute is set; null is unset, and `data` is not an attribute."""
    if name in DATA_MEMBERS:
        return NOTHING
    return all_of([Condition((name,), "exists"), negate(Condition((name,), "type", "null"))])


def text_path(name: str) -> Path:
    """Return the path of an attribute's text."""
    return (CesqlExpression(syntax.Call("STRING", (syntax.Attribute(name),))),)


def integer_path(name: str) -> Path:
    """Return the path of an attribute's Integer."""
    return (CesqlExpression(syntax.Call("INT", (syntax.Attribute(name),))),)


def text_equals(name: str, text: str) -> Node:
    """Return the condition that the attribute's text equals this one."""
    if name in DATA_MEMBERS:
        return NOTHING
    values = _same_text(text)
    if values is None:
        return Condition(text_path(name), "eq", text)
    return Condition(
        (name,), "in" if len(values) > 1 else "eq", values if len(values) > 1 else text
    )


def text_prefix(name: str, text: str) -> Node:
    """Return the condition that the attribute's text starts with this one."""
    if name in DATA_MEMBERS:
        return NOTHING
    if not text:
        return present(name)
    if text[0] in "-0123456789[{" or any(word.startswith(text) for word in _WORDS):
        return Condition(text_path(name), "prefix", text)
    return Condition((name,), "prefix", text)


def text_suffix(name: str, text: str) -> Node:
    """Return the condition that the attribute's text ends with this one."""
    if name in DATA_MEMBERS:
        return NOTHING
    if not text:
        return present(name)
    if text[-1] in _ENDS_OF_OTHERS or any(word.endswith(text) for word in _WORDS):
        return Condition(text_path(name), "suffix", text)
    return Condition((name,), "suffix", text)


def one_of(name: str, literals: Iterable[Value]) -> Node:
    """Return `name IN (literals)` as a condition; each literal is cast to the attribute's type, in order."""
    if name in DATA_MEMBERS:
        return NOTHING
    literals = list(literals)
    path: Path = (name,)
    values: list[Value] = []
    for literal in literals:
        if isinstance(literal, str) and _same_text(literal) is None:
            # A number that is no Integer may have this text: compare the attribute as CESQL reads it.
            path = (CesqlExpression(syntax.Attribute(name)),)
        values.append(text_of(literal))
    for kind in (int, bool):
        values += reached(literals, kind)[0]
    return Condition(path, "in", tuple(values))


def reached(literals: Iterable[Value], kind: type[Value]) -> tuple[list[Value], bool]:
    """Return the literals of a list as one type, up to the first that cannot be cast, and whether all can."""
    values: list[Value] = []
    for literal in literals:
        value, problem = cast(literal, kind)
        if problem is not None:
            return values, False
        values.append(value)
    return values, True


def _same_text(text: str) -> tuple[Value, ...] | None:
    """Return all attribute values with this text, None if there are too many to list."""
    if text in {"true", "false"}:
        return (text, text == "true")
    number = integer_of(text)
    if number is not None and str(number) == text:
        return (text, number)
    if text in _WORDS or _STARTS_LIKE_OTHERS.match(text):
        return None
    return (text,)
