"""
Tests on the text of one attribute, as tree conditions where a tree is exactly equivalent.

CESQL and the CloudEvents filter dialects compare an attribute *as a String*: the number 5 and the
boolean true have a text too. A condition on strings is therefore exact only if no number, boolean,
array or object has a text that would pass; where one could, the functions here return None.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from virta.filters.cesql.values import DATA_MEMBERS, Value, cast, integer_of, text_of
from virta.filters.tree import EVERYTHING, NOTHING, Condition, Node, all_of, negate

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


def text_equals(name: str, text: str) -> Node | None:
    """Return the condition that the attribute's text equals this one, None if no tree is exact."""
    if name in DATA_MEMBERS:
        return NOTHING
    values = _same_text(text)
    if values is None:
        return None
    return Condition(
        (name,), "in" if len(values) > 1 else "eq", values if len(values) > 1 else text
    )


def text_prefix(name: str, text: str) -> Node | None:
    """Return the condition that the attribute's text starts with this one, None if no tree is exact."""
    if name in DATA_MEMBERS:
        return NOTHING
    if not text:
        return present(name)
    if text[0] in "-0123456789[{" or any(word.startswith(text) for word in _WORDS):
        return None
    return Condition((name,), "prefix", text)


def text_suffix(name: str, text: str) -> Node | None:
    """Return the condition that the attribute's text ends with this one, None if no tree is exact."""
    if name in DATA_MEMBERS:
        return NOTHING
    if not text:
        return present(name)
    if text[-1] in _ENDS_OF_OTHERS or any(word.endswith(text) for word in _WORDS):
        return None
    return Condition((name,), "suffix", text)


def one_of(name: str, literals: Iterable[Value]) -> Node | None:
    """Return `name IN (literals)` as a condition; each literal is cast to the attribute's type, in order."""
    if name in DATA_MEMBERS:
        return NOTHING
    literals = list(literals)
    values: list[Value] = []
    for literal in literals:
        if isinstance(literal, str) and _same_text(literal) is None:
            return None
        values.append(text_of(literal))
    for kind, candidates in ((int, None), (bool, (True, False))):
        reached: list[Value] = []
        for literal in literals:
            value, problem = cast(literal, kind)
            if problem is not None:
                break  # for an attribute of this type the cast's problem fails the filter here
            reached.append(value)
        values.extend(v for v in reached if candidates is None or v in candidates)
    return Condition((name,), "in", tuple(values))


def necessary(names: Iterable[str]) -> Node:
    """Return a condition implied by reading all these attributes, which an index can use."""
    wanted = sorted(set(names))
    if any(name in DATA_MEMBERS for name in wanted):
        return NOTHING
    return all_of(Condition((name,), "exists") for name in wanted) if wanted else EVERYTHING


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
