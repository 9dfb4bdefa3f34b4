"""
Why a filter matches an object, or does not.

The result is the tree with a verdict at each node, and the value found at each condition. `str()` draws it as
text; `reasons` lists only the conditions that decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from virta.filters.evaluate import MISSING, condition_holds, resolve
from virta.filters.geo import distance, read_point
from virta.filters.tree import (
    And,
    Computed,
    Condition,
    Everything,
    Flat,
    LikeText,
    Node,
    Not,
    Nothing,
    Path,
    Regexp,
    Select,
    ValueRange,
)
from virta.filters.values import json_text

# Characters of a document's value that a reason quotes; the rest is elided.
QUOTED_CHARS_MAX = 120


@dataclass(frozen=True, slots=True)
class Explanation:
    """
    One node's verdict. `kind` is and, or, not, everything, nothing or condition.

    For conditions: `path` as text, `op`, `expected`, `actual` (as text, elided), and `reason`, a sentence.
    """

    matches: bool
    kind: str
    children: tuple[Explanation, ...] = ()
    path: str | None = None
    op: str | None = None
    expected: str | None = None
    actual: str | None = None
    reason: str = ""

    @property
    def reasons(self) -> list[str]:
        """Return the sentences of the conditions that decided the verdict, in the filter's order."""
        return [text for text in self._deciding() if text]

    def to_json(self) -> dict[str, Any]:
        """Return the structure as JSON data."""
        found: dict[str, Any] = {"matches": self.matches, "kind": self.kind}
        if self.kind == "condition":
            found |= {"path": self.path, "op": self.op, "expected": self.expected}
            found |= {"actual": self.actual, "reason": self.reason}
        if self.children:
            found["children"] = [child.to_json() for child in self.children]
        return found

    def __str__(self) -> str:
        lines = [f"{'matches' if self.matches else 'does not match'}"]
        lines += self._drawn("  ")
        return "\n".join(lines)

    def _deciding(self) -> list[str]:
        if not self.children:
            return [self.reason]
        # A conjunction fails because of its failing members and holds because of all; a disjunction vice versa.
        deciding = [
            child for child in self.children if self.kind == "not" or child.matches is self.matches
        ]
        return [text for child in deciding for text in child._deciding()]  # noqa: SLF001 - of itself

    def _drawn(self, margin: str) -> list[str]:
        mark = "+" if self.matches else "-"
        if self.kind == "not" and not self.children[0].children:
            return [f"{margin}{mark} {self.children[0].reason}"]
        label = {"and": "all of", "or": "any of", "not": "not"}.get(self.kind, self.reason)
        lines = [f"{margin}{mark} {label}"]
        for child in self.children:
            lines += child._drawn(margin + "  ")  # noqa: SLF001 - of itself
        return lines


def explain(node: Node, obj: Any, *, negated: bool = False) -> Explanation:
    """Return the verdict on an object, node by node; `negated` only changes the words of the reasons."""
    if isinstance(node, Condition):
        return _explain_condition(node, obj, "should not" if negated else "should")
    if isinstance(node, Everything):
        return Explanation(matches=True, kind="everything", reason="everything matches")
    if isinstance(node, Nothing):
        return Explanation(matches=False, kind="nothing", reason="nothing can match")
    if isinstance(node, Not):
        child = explain(node.child, obj, negated=not negated)
        return Explanation(matches=not child.matches, kind="not", children=(child,))
    children = tuple(explain(child, obj, negated=negated) for child in node.children)
    if isinstance(node, And):
        return Explanation(matches=all(c.matches for c in children), kind="and", children=children)
    return Explanation(matches=any(c.matches for c in children), kind="or", children=children)


def path_text(path: Path) -> str:
    """Return a path as text: `data.items[0].name`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif isinstance(step, Computed):
            text += str(step)
        else:
            text += f".{step.name if isinstance(step, Flat) else step}"
    return text.removeprefix(".") or "the object"


def _explain_condition(condition: Condition, obj: Any, should: str) -> Explanation:
    holds = condition_holds(condition, obj)
    value = resolve(obj, condition.path)
    path = path_text(condition.path)
    expected = _expected(condition)
    actual = "missing" if value is MISSING else _quoted(value)
    found = f"it is {actual}{_distance(condition, value)}"
    if condition.op == "exists":
        found = "it is missing" if value is MISSING else f"it is there: {actual}"
    elif condition.op == "opaque":
        found = "it is true" if holds else "it is not"
    return Explanation(
        matches=holds,
        kind="condition",
        path=path,
        op=condition.op,
        expected=expected,
        actual=actual,
        reason=f"{path} {should} {expected}: {found}",
    )


def _distance(condition: Condition, value: Any) -> str:
    """Return how far a point is from the centre, where there is one."""
    point = None if value is MISSING else read_point(value)
    if point is None or condition.op not in ("geo_distance", "geo_distance_range"):
        return ""
    shape = condition.value
    return f", {distance(shape.lat, shape.lon, *point):,.0f} m from {shape.lat}, {shape.lon}"


def _expected(condition: Condition) -> str:
    value = condition.value
    if isinstance(value, ValueRange):
        return f"be {_range_text(value)}"
    if isinstance(value, Regexp):
        what = "match" if condition.op == "regexp" else "match, as text,"
        return f"{what} /{value.pattern}/{value.flags}"
    if isinstance(value, LikeText):
        return f"be LIKE {_quoted(value.pattern)}"
    if isinstance(value, Select):
        return f"have an element {value.index} that passes a filter"
    if condition.op in _SHAPES:
        return str(_SHAPES[condition.op](value))
    plain = _WORDS.get(condition.op)
    if plain is None:
        return f"satisfy {_quoted(value.canonical_json())}"
    return plain if value is None and condition.op in _VALUELESS else f"{plain} {_quoted(value)}"


_VALUELESS = ("exists", "geo_junk", "negative_zero")
_WORDS = {
    "exists": "be there",
    "type": "be of type",
    "eq": "equal",
    "in": "be one of",
    "contains": "be an array with",
    "prefix": "start with",
    "suffix": "end with",
    "match": "contain",
    "geo_junk": "be a value that is no geopoint",
    "negative_zero": "be -0.0",
}
_SHAPES: dict[str, Any] = {
    "geo_distance": lambda c: f"be within {c.radius:,.0f} m of {c.lat}, {c.lon}",
    "geo_distance_range": lambda a: f"be {a.inner:,.0f} to {a.outer:,.0f} m from {a.lat}, {a.lon}",
    "geo_box": lambda b: f"be between {b.bottom} and {b.top} north, {b.left} and {b.right} east",
    "geo_polygon": lambda p: f"be in a polygon of {len(p.points)} points",
}


def _range_text(bounds: ValueRange) -> str:
    parts = []
    if bounds.lower is not None:
        parts.append(f"{'>' if bounds.lower_open else '>='} {_quoted(bounds.lower)}")
    if bounds.upper is not None:
        parts.append(f"{'<' if bounds.upper_open else '<='} {_quoted(bounds.upper)}")
    return " and ".join(parts)


def _quoted(value: Any) -> str:
    """Return the JSON of any value, cut to a readable length."""
    if hasattr(value, "text"):
        value = value.value
    if isinstance(value, str) and len(value) > QUOTED_CHARS_MAX:
        value = value[:QUOTED_CHARS_MAX] + "…"
    try:
        text = json_text(value) if not isinstance(value, str) else f'"{value}"'
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= QUOTED_CHARS_MAX + 3 else text[:QUOTED_CHARS_MAX] + "…"
