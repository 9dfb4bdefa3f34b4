"""
Programs: filters as bytes for the native index.

native/match_program.cpp reads the format and documents it. Conditions that the core cannot evaluate are *opaque*:
they are numbered here and evaluated by `virta.filters.evaluate` for each candidate. Where such a condition
implies one that the core can evaluate, that one is added, so that candidates are few.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from virta.filters.tree import And, Condition, Flat, Not, Or
from virta.filters.values import Annulus, Box, Circle, scalar_key
from virta.match.regex import plain_condition

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.filters.tree import Node, Path
    from virta.filters.values import Regexp, Scalar, ValueRange
    from virta.match.compile import Compiled

EXISTS, TYPE, EQUALS, CONTAINS, IN, RANGE, TEXT_RANGE, PREFIX, SUFFIX = range(1, 10)
REGEXP, POINT, JUNK_POINT, NEGATIVE_ZERO, TEXT_REGEXP, OPAQUE, TREE, AND, OR = range(10, 19)
NEGATED = 128

# The core refuses longer paths; such conditions are opaque. A dotted name of n parts has n² / 2 edges.
PATH_STEPS_MAX = 1024
FLAT_PARTS_MAX = 24
INDEX_MAX = 2**32 - 1

TYPES = {"null": 1, "boolean": 3, "number": 4, "string": 5, "array": 6, "object": 7}

_NUMBER = struct.Struct("<Bd")
_RANGE = struct.Struct("<Bdd")
_LENGTH = struct.Struct("<I")


def encode(compiled: Compiled) -> tuple[bytes, tuple[Condition, ...]]:
    """Return the program of a compiled filter, and its opaque conditions in the order of their numbers."""
    writer = _Writer()
    if compiled.tree is not None:
        terms = [writer.tree(compiled.tree)]
    else:
        terms = [writer.conjunction(term) for term in compiled.conjunctions]
    return b"".join([_LENGTH.pack(len(terms)), *terms]), tuple(writer.opaques)


class _Writer:
    def __init__(self) -> None:
        self.opaques: dict[Condition, int] = {}

    def conjunction(self, term: tuple[Condition | Not, ...]) -> bytes:
        literals = [part for node in term for part in self.literals(node)]
        return b"".join([_LENGTH.pack(len(literals)), *literals])

    def tree(self, node: Node) -> bytes:
        """Return a conjunction of one literal: the tree in postfix."""
        items: list[bytes] = []
        self._postfix(node, items)
        return b"".join([_LENGTH.pack(1), bytes([TREE]), _LENGTH.pack(len(items)), *items])

    def _postfix(self, node: Node, items: list[bytes]) -> None:
        if isinstance(node, And | Or):
            for child in node.children:
                self._postfix(child, items)
            self._operator(AND if isinstance(node, And) else OR, len(node.children), items)
        elif isinstance(node, Not) and isinstance(node.child, Condition):
            # Not of several parts: one of them fails.
            parts = self._parts(node.child)
            items += [_negated(part) for part in parts]
            self._operator(OR, len(parts), items)
        else:
            assert isinstance(node, Condition), "canonical trees negate conditions only"
            parts = self._parts(node)
            items += parts
            self._operator(AND, len(parts), items)

    @staticmethod
    def _operator(operator: int, count: int, items: list[bytes]) -> None:
        if count > 1:
            items.append(bytes([operator]) + _LENGTH.pack(count))

    def literals(self, node: Condition | Not) -> list[bytes]:
        """Return the literals whose conjunction is a condition or its negation."""
        if isinstance(node, Condition):
            return self._parts(node)
        assert isinstance(node.child, Condition), "canonical trees negate conditions only"
        parts = self._parts(node.child)
        if len(parts) == 1:
            return [_negated(parts[0])]
        items = [_negated(part) for part in parts]
        self._operator(OR, len(parts), items)
        return [b"".join([bytes([TREE]), _LENGTH.pack(len(items)), *items])]

    def _parts(self, condition: Condition) -> list[bytes]:
        """Return the literals whose conjunction is the condition."""
        path = encode_path(condition.path)
        if path is None or condition.op == "opaque":
            return [self._opaque(condition)]
        if condition.op == "match":
            parts: dict[bytes, None] = {}
            if not _pattern_parts(path, condition.value.value, parts):
                parts[self._opaque(condition)] = None
            return list(parts)
        if condition.op == "select":
            return [_typed(path, "array"), self._opaque(condition)]
        if condition.op == "regexp_text":
            number = _LENGTH.pack(self._number(condition))
            return [_literal(TEXT_REGEXP, path, _regexp(condition.value) + number)]
        op, value = condition.op, condition.value
        if op == "regexp":
            op, value = plain_condition(value) or (op, value)
        operation, operand = _OPERANDS[op]
        return [_literal(operation, path, operand(value))] if operation else operand(path, value)

    def _opaque(self, condition: Condition) -> bytes:
        return bytes([OPAQUE]) + _LENGTH.pack(self._number(condition))

    def _number(self, condition: Condition) -> int:
        return self.opaques.setdefault(condition, len(self.opaques))


@lru_cache(maxsize=4096)
def encode_path(path: Path) -> bytes | None:
    """Return a path for the core, None if it is too long."""
    if len(path) > PATH_STEPS_MAX:
        return None
    out = b"E"
    for step in path:
        if isinstance(step, Flat):
            if step.name.count(".") >= FLAT_PARTS_MAX:
                return None
            out = b"F" + _text(step.name)
        elif isinstance(step, str):
            out += b"N" + _text(step)
        elif 0 <= step <= INDEX_MAX:
            out += b"I" + _LENGTH.pack(step)
        else:
            return None
    return out


def _literal(operation: int, path: bytes, operand: bytes) -> bytes:
    return b"".join([bytes([operation]), _LENGTH.pack(len(path)), path, operand])


def _negated(literal: bytes) -> bytes:
    return bytes([literal[0] ^ NEGATED]) + literal[1:]


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(data)) + data


def _scalar(value: Scalar) -> bytes:
    if isinstance(value, str):
        return b"\x05" + _text(value)
    if value is None:
        return b"\x01"
    if isinstance(value, bool):
        return b"\x03" if value else b"\x02"
    return _NUMBER.pack(4, value)


def _typed(path: bytes, name: str) -> bytes:
    return _literal(TYPE, path, bytes([TYPES[name]]))


def _in(values: tuple[Scalar, ...]) -> bytes:
    return _LENGTH.pack(len(values)) + b"".join(map(_scalar, values))


def _range_flags(bounds: ValueRange) -> int:
    return (
        (bounds.lower is not None)
        | (bounds.upper is not None) << 1
        | bounds.lower_open << 2
        | bounds.upper_open << 3
    )


def _range(path: bytes, bounds: ValueRange) -> list[bytes]:
    flags = _range_flags(bounds)
    lower: Any = bounds.lower
    upper: Any = bounds.upper
    if bounds.kind == "number":
        return [_literal(RANGE, path, _RANGE.pack(flags, lower or 0, upper or 0))]
    if bounds.kind == "string":
        operand = bytes([flags]) + _text(lower or "") + _text(upper or "")
        return [_literal(TEXT_RANGE, path, operand)]
    inside = tuple(
        value
        for value in (False, True)
        if (lower is None or value > lower or (value == lower and not bounds.lower_open))
        and (upper is None or value < upper or (value == upper and not bounds.upper_open))
    )
    # No boolean lies inside: encode an empty range.
    return [
        _literal(IN, path, _in(inside)) if inside else _literal(RANGE, path, _RANGE.pack(3, 1, 0))
    ]


def _regexp(regexp: Regexp) -> bytes:
    return _text(f"{regexp.flags}\0{regexp.pattern}")


def _shape(shape: Any) -> bytes:
    if isinstance(shape, Circle):
        kind, numbers = 1, [shape.lat, shape.lon, shape.radius]
    elif isinstance(shape, Annulus):
        kind, numbers = 2, [shape.lat, shape.lon, shape.inner, shape.outer]
    elif isinstance(shape, Box):
        kind, numbers = 3, [shape.top, shape.left, shape.bottom, shape.right]
    else:
        kind, numbers = 4, [degree for point in shape.points for degree in point]
    return struct.pack(f"<BI{len(numbers)}d", kind, len(numbers), *numbers)


def _pattern_parts(path: bytes, pattern: Any, parts: dict[bytes, None]) -> bool:
    """Add conditions that a value containing the pattern satisfies; return True if they are also sufficient."""
    if isinstance(pattern, dict):
        if not pattern:
            parts[_typed(path, "object")] = None
        exact = [
            _pattern_parts(path + b"N" + _text(key), part, parts) for key, part in pattern.items()
        ]
        return all(exact)
    if isinstance(pattern, list):
        scalars = [part for part in pattern if not isinstance(part, dict | list)]
        for part in scalars:
            parts[_literal(CONTAINS, path, _scalar(part))] = None
        if not scalars:
            parts[_typed(path, "array")] = None
        # Different scalars cannot take each other's element, so that each is contained is enough.
        return len({scalar_key(part) for part in scalars}) == len(pattern)
    parts[_literal(EQUALS, path, _scalar(pattern))] = None
    return True


# Operation and encoder of the value; for operation 0 the encoder makes whole literals.
_OPERANDS: dict[str, tuple[int, Callable[..., Any]]] = {
    "exists": (EXISTS, lambda _: b""),
    "type": (TYPE, lambda name: bytes([TYPES[name]])),
    "eq": (EQUALS, _scalar),
    "contains": (CONTAINS, _scalar),
    "in": (IN, _in),
    "range": (0, _range),
    "prefix": (PREFIX, _text),
    "suffix": (SUFFIX, _text),
    "regexp": (REGEXP, _regexp),
    "geo_distance": (POINT, _shape),
    "geo_distance_range": (POINT, _shape),
    "geo_box": (POINT, _shape),
    "geo_polygon": (POINT, _shape),
    "geo_junk": (JUNK_POINT, lambda _: b""),
    "negative_zero": (NEGATIVE_ZERO, lambda _: b""),
}
