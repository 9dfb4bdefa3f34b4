"""
Programs: filters as bytes for the native index.

native/match_program.cpp reads the format and documents it. Conditions that the core cannot evaluate are *opaque*:
they are numbered here and evaluated by `virta.filters.evaluate` for each candidate. Where such a condition
implies one that the core can evaluate, that one is added, so that candidates are few.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from virta.filters.cesql.computed import CesqlExpression
from virta.filters.text import Segment, segments
from virta.filters.tree import And, Computed, Condition, Everything, Flat, Not, Or
from virta.filters.values import Annulus, Box, Circle, scalar_key
from virta.match.compile.expressions import encode_computed, like_code
from virta.match.regex import plain_condition

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.filters.tree import Node, Path
    from virta.filters.values import Regexp, Scalar, ValueRange
    from virta.match.compile import Compiled

EXISTS, TYPE, EQUALS, CONTAINS, IN, RANGE, TEXT_RANGE, PREFIX, SUFFIX = range(1, 10)
REGEXP, POINT, JUNK_POINT, NEGATIVE_ZERO, TEXT_REGEXP, OPAQUE, TREE, AND, OR = range(10, 19)
LIKE, MATCH, SUBSTRING = range(19, 22)
NEGATED = 128

# The core refuses longer paths; such conditions are opaque. A dotted name of n parts has n² / 2 edges.
PATH_STEPS_MAX = 1024
FLAT_PARTS_MAX = 24
INDEX_MAX = 2**32 - 1

# Bytes of a LIKE pattern by which its filter is found, if it has no literal start or end: an event's text is looked
# up at every position.
SUBSTRING_BYTES_MAX = 4

# The root and the flat name "": their elements have no paths in the core.
_NO_ELEMENTS = (b"E", b"F" + bytes(4))

# Conditions that the core evaluates itself, and in Python only for very large values.
MATCH_FALLBACK = frozenset({"match"})

# Conditions on array elements that a `match` adds to be found by.
ELEMENT_PARTS_MAX = 8

TYPES = {"null": 1, "boolean": 3, "number": 4, "string": 5, "array": 6, "object": 7}

_NUMBER = struct.Struct("<Bd")
_RANGE = struct.Struct("<Bdd")
_LENGTH = struct.Struct("<I")
_SIGNED = struct.Struct("<i")


def encode(compiled: Compiled) -> tuple[bytes, tuple[Condition, ...]]:
    """Return the program of a compiled filter, and its opaque conditions in the order of their numbers."""
    writer = _Writer()
    if compiled.tree is not None:
        written = [writer.tree(compiled.tree)]
    else:
        written = [part for term in compiled.conjunctions for part in writer.conjunction(term)]
    terms = [term for term in written if term is not None]
    return b"".join([_LENGTH.pack(len(terms)), *terms]), tuple(writer.opaques)


def encode_literal(node: Condition | Not) -> list[bytes] | None:
    """Return the literals whose conjunction a condition is, None if it is not one or needs Python."""
    writer = _Writer()
    formula = writer.formula(node)
    parts = formula[1] if isinstance(formula, tuple) and formula[0] == AND else [formula]
    literals = [part for part in parts if isinstance(part, bytes)]
    return literals if len(literals) == len(parts) and not writer.opaques else None


class _Inexact(Exception):  # noqa: N818 - never leaves this module
    """A part of a `select` that the core cannot evaluate: the whole is opaque."""


# A condition as literals: bytes of one literal, a constant, or (AND | OR, parts).
_Formula: TypeAlias = "bytes | bool | tuple[int, list[_Formula]]"


class _Writer:
    def __init__(self) -> None:
        self.opaques: dict[Condition, int] = {}

    def conjunction(self, term: tuple[Condition | Not, ...]) -> list[bytes]:
        """Return the conjunctions whose disjunction a conjunction of conditions is: none if it never holds."""
        whole = _combine(AND, [self.formula(node) for node in term])
        if whole is False:
            return []
        parts = whole[1] if isinstance(whole, tuple) and whole[0] == AND else [whole]
        return [
            b"".join([_LENGTH.pack(len(literals)), *literals])
            for one in _split([part for part in parts if part is not True])
            for literals in [[_as_literal(part) for part in one]]
        ]

    def tree(self, node: Node) -> bytes | None:
        """Return a conjunction of one literal: the tree in postfix."""
        whole = self.formula(node)
        if isinstance(whole, bool):
            return _LENGTH.pack(0) if whole else None
        return _LENGTH.pack(1) + _tree_literal(whole)

    def formula(self, node: Node, base: bytes | None = None) -> _Formula:
        """Return the literals of a tree; with `base`, of a tree on the array element at that path."""
        if isinstance(node, And | Or):
            kind = AND if isinstance(node, And) else OR
            return _combine(kind, [self.formula(child, base) for child in node.children])
        if isinstance(node, Not):
            return _negated(self.formula(node.child, base))
        if not isinstance(node, Condition):
            return isinstance(node, Everything)
        if base is None:
            return self._condition(node, encode_path(node.path))
        path = _element_path(base, node.path)
        return False if path is None else self._condition(node, path, inside=True)

    def _condition(
        self, condition: Condition, path: bytes | None, *, inside: bool = False
    ) -> _Formula:
        op, value = condition.op, condition.value
        computed = path is not None and path.startswith(b"C")
        if path is None or op == "opaque" or (computed and op not in _COMPUTED_OPS):
            if inside:
                raise _Inexact
            return self._opaque(condition)
        if op == "match":
            return self._match(condition, path, inside=inside)
        if op == "select":
            return self._select(condition, path, inside=inside)
        if op == "like":
            return _combine(AND, [*_like_parts(path, value.pattern), _like(path, value.pattern)])
        if op == "regexp":
            op, value = plain_condition(value) or (op, value)
        operation, operand = _OPERANDS[op]
        if operation:
            return _literal(operation, path, operand(value))
        literal: bytes = operand(path, value)
        return literal

    def _select(self, condition: Condition, path: bytes, *, inside: bool) -> _Formula:
        select = condition.value
        try:
            _check_select(path, select.index)
            element = path + b"S" + _SIGNED.pack(select.index)
            inner = self.formula(select.tree, element)
            if _is_positive(inner):
                return inner  # it implies that the element is there
            return _combine(AND, [_literal(EXISTS, element, b""), inner])
        except _Inexact:
            if inside:
                raise
            array = _typed(path, "array")
            return _combine(AND, [array, self._opaque(condition)])

    def _match(self, condition: Condition, path: bytes, *, inside: bool) -> _Formula:
        pattern = condition.value.value
        parts: dict[bytes, None] = {}
        if _pattern_parts(path, pattern, parts):
            return _combine(AND, list(parts))
        if inside:
            raise _Inexact
        code = _pattern_code(pattern)
        whole = _literal(MATCH, path, _LENGTH.pack(len(code)) + code)
        return _combine(AND, [*parts, whole + _LENGTH.pack(self._opaque_number(condition))])

    def _opaque(self, condition: Condition) -> bytes:
        return bytes([OPAQUE]) + _LENGTH.pack(self._opaque_number(condition))

    def _opaque_number(self, condition: Condition) -> int:
        return self.opaques.setdefault(condition, len(self.opaques))


def _check_select(path: bytes, index: int) -> None:
    if path in _NO_ELEMENTS or not -(2**31) <= index < 2**31:
        raise _Inexact


def _is_positive(formula: _Formula) -> bool:
    """Return whether a formula holds only if some value is there."""
    if isinstance(formula, bytes):
        return not formula[0] & NEGATED
    if isinstance(formula, bool):
        return not formula
    return (any if formula[0] == AND else all)(map(_is_positive, formula[1]))


def _combine(kind: int, parts: list[_Formula] | list[bytes]) -> _Formula:
    """Return a conjunction or disjunction without constants, and flat."""
    neutral = kind == AND
    kept: list[_Formula] = []
    for part in parts:
        if isinstance(part, bool):
            if part is not neutral:
                return part
        elif isinstance(part, tuple) and part[0] == kind:
            kept += part[1]
        else:
            kept.append(part)
    if not kept:
        return neutral
    return kept[0] if len(kept) == 1 else (kind, kept)


def _negated(formula: _Formula) -> _Formula:
    if isinstance(formula, bool):
        return not formula
    if isinstance(formula, bytes):
        return bytes([formula[0] ^ NEGATED]) + formula[1:]
    return (OR if formula[0] == AND else AND, [_negated(part) for part in formula[1]])


def _as_literal(formula: _Formula) -> bytes:
    return formula if isinstance(formula, bytes) else _tree_literal(formula)


def _tree_literal(formula: _Formula) -> bytes:
    items: list[bytes] = []
    _postfix(formula, items)
    return b"".join([bytes([TREE]), _LENGTH.pack(len(items)), *items])


def _postfix(formula: _Formula, items: list[bytes]) -> None:
    if isinstance(formula, bytes):
        items.append(formula)
        return
    assert isinstance(formula, tuple), "constants were removed"
    # The core reads from the end and stops early: what is cheap comes last.
    for part in sorted(formula[1], key=_cost, reverse=True):
        _postfix(part, items)
    items.append(bytes([formula[0]]) + _LENGTH.pack(len(formula[1])))


def _split(parts: list[_Formula]) -> list[list[_Formula]]:
    """
    Return a conjunction, cut in two where it would have to be tried for every event.

    `not (a and b)` is `not a`, or `a and not b`: the first is one bit to test, the second is found by `a`.
    """
    if any(map(_is_positive, parts)):
        return [parts]
    for at, part in enumerate(parts):
        if isinstance(part, tuple) and part[0] == OR:
            equalities = [
                one
                for one in part[1]
                if isinstance(one, bytes) and one[0] in (EQUALS | NEGATED, CONTAINS | NEGATED)
            ]
            if equalities:
                one = max(equalities, key=len)  # a longer value is a rarer one
                others = parts[:at] + parts[at + 1 :]
                rest = _combine(OR, [x for x in part[1] if x is not one])
                return [[*others, one], [*others, _negated(one), rest]]
    return [parts]


def _cost(formula: _Formula) -> int:
    """Return the rough cost of testing a part of a tree."""
    if not isinstance(formula, bytes):
        return 2
    operation = formula[0] & ~NEGATED
    return {OPAQUE: 4, MATCH: 3, LIKE: 1, REGEXP: 1, TEXT_REGEXP: 3, POINT: 1}.get(operation, 0)


def _element_path(base: bytes, path: Path) -> bytes | None:
    """Return the path of a `select`'s tree, whose root is {"value": element}; None if nothing is there."""
    if len(path) != 1 or not isinstance(path[0], Flat):
        raise _Inexact
    head, dot, rest = path[0].name.partition(".")
    if head != "value":
        return None
    if not dot:
        return base
    if rest.count(".") >= FLAT_PARTS_MAX:
        raise _Inexact
    return base + b"F" + _text_code(rest)


@lru_cache(maxsize=4096)
def encode_path(path: Path) -> bytes | None:
    """Return a path for the core, None if it is too long."""
    if len(path) > PATH_STEPS_MAX:
        return None
    if path and isinstance(path[0], Computed):
        return encode_computed(path[0]) if isinstance(path[0], CesqlExpression) else None
    out = b"E"
    for step in path:
        if isinstance(step, Flat):
            if step.name.count(".") >= FLAT_PARTS_MAX:
                return None
            out = b"F" + _text_code(step.name)
        elif isinstance(step, str):
            out += b"N" + _text_code(step)
        elif isinstance(step, int) and 0 <= step <= INDEX_MAX:
            out += b"I" + _LENGTH.pack(step)
        else:
            return None
    return out


def _literal(operation: int, path: bytes, operand: bytes) -> bytes:
    return b"".join([bytes([operation]), _LENGTH.pack(len(path)), path, operand])


def _text_code(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(data)) + data


def _scalar(value: Scalar) -> bytes:
    if isinstance(value, str):
        return b"\x05" + _text_code(value)
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


def _range(path: bytes, bounds: ValueRange) -> bytes:
    flags = _range_flags(bounds)
    lower: Any = bounds.lower
    upper: Any = bounds.upper
    if bounds.kind == "number":
        return _literal(RANGE, path, _RANGE.pack(flags, lower or 0, upper or 0))
    if bounds.kind == "string":
        operand = bytes([flags]) + _text_code(lower or "") + _text_code(upper or "")
        return _literal(TEXT_RANGE, path, operand)
    inside = tuple(
        value
        for value in (False, True)
        if (lower is None or value > lower or (value == lower and not bounds.lower_open))
        and (upper is None or value < upper or (value == upper and not bounds.upper_open))
    )
    # No boolean lies inside: encode an empty range.
    return (
        _literal(IN, path, _in(inside)) if inside else _literal(RANGE, path, _RANGE.pack(3, 1, 0))
    )


def _regexp(regexp: Regexp) -> bytes:
    return _text_code(f"{regexp.flags}\0{regexp.pattern}")


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
        member = path + b"N"
        exact = [_pattern_parts(member + _text_code(k), p, parts) for k, p in pattern.items()]
        return all(exact)
    if isinstance(pattern, list):
        scalars = [part for part in pattern if not isinstance(part, dict | list)]
        for part in scalars:
            parts[_literal(CONTAINS, path, _scalar(part))] = None
        if not scalars:
            parts[_typed(path, "array")] = None
        compounds = [part for part in pattern if isinstance(part, dict | list)]
        inner: dict[bytes, None] = {}
        exact_inner = [
            path not in _NO_ELEMENTS and _element_parts(path + b"A", part, inner)
            for part in compounds
        ]
        parts.update(dict.fromkeys(list(inner)[:ELEMENT_PARTS_MAX]))
        if len(compounds) == 1 and len(pattern) == 1 and len(inner) == 1:
            return exact_inner[0]
        # Different scalars cannot take each other's element, so that each is contained is enough.
        return len({scalar_key(part) for part in scalars}) == len(pattern)
    parts[_literal(EQUALS, path, _scalar(pattern))] = None
    return True


def _element_parts(path: bytes, part: Any, parts: dict[bytes, None]) -> bool:
    """Add conditions on the elements of an array, one of which contains `part`; True if one scalar is all of it."""
    if isinstance(part, list):
        scalars = [one for one in part if not isinstance(one, dict | list)]
        for one in scalars:
            parts[_literal(CONTAINS, path, _scalar(one))] = None
        return len(scalars) == len(part) == 1
    exact = bool(part)
    for key, one in part.items():
        inner = path + b"N" + _text_code(key)
        if isinstance(one, dict):
            exact = _element_parts(inner, one, parts) and exact
        elif isinstance(one, list):
            exact = False
        else:
            parts[_literal(CONTAINS, inner, _scalar(one))] = None
    return exact


def _pattern_code(pattern: Any) -> bytes:
    """Return a JSON pattern for the core; native/match_pattern.hpp documents it."""
    if isinstance(pattern, dict):
        members = (_text_code(key) + _pattern_code(part) for key, part in pattern.items())
        return b"".join([bytes([TYPES["object"]]), _LENGTH.pack(len(pattern)), *members])
    if isinstance(pattern, list):
        items = map(_pattern_code, pattern)
        return b"".join([bytes([TYPES["array"]]), _LENGTH.pack(len(pattern)), *items])
    return _scalar(pattern)


def _like(path: bytes, pattern: str) -> bytes:
    code = like_code(pattern)
    return _literal(LIKE, path, _LENGTH.pack(len(code)) + code)


def _like_parts(path: bytes, pattern: str) -> list[bytes]:
    """Return what a text that a LIKE pattern matches starts with, ends with and contains."""
    cut = segments(pattern)
    parts = []
    head = _leading(cut[0])
    if head:
        parts.append(_literal(PREFIX, path, _text_code(head)))
    tail = _leading(cut[-1][::-1])[::-1]
    if tail:
        parts.append(_literal(SUFFIX, path, _text_code(tail)))
    ends = {text.encode("utf-8", "surrogatepass") for text in (head, tail)}
    runs = [run for segment in cut for run in _runs(segment) if run not in ends]
    longest = max(runs, key=len, default=b"")
    if longest and (not parts or len(longest) >= SUBSTRING_BYTES_MAX):
        # The end of a name differs more often than its start.
        gram = longest[-SUBSTRING_BYTES_MAX:]
        parts.append(_literal(SUBSTRING, path, _LENGTH.pack(len(gram)) + gram))
    return parts


def _leading(segment: Segment) -> str:
    return "".join(takewhile(lambda char: char is not None, segment))  # type: ignore[arg-type]


def _runs(segment: Segment) -> list[bytes]:
    """Return the literal parts of a segment."""
    text = "".join("\0" if char is None else char for char in segment)
    return [run.encode("utf-8", "surrogatepass") for run in text.split("\0")]


# What conditions on a computed value may be; other trees are possible, and evaluated in Python.
_COMPUTED_OPS = frozenset(
    ("exists", "type", "eq", "in", "range", "prefix", "suffix", "like", "regexp")
)

# Operation and encoder of the value; for operation 0 the encoder makes the whole literal.
_OPERANDS: dict[str, tuple[int, Callable[..., Any]]] = {
    "exists": (EXISTS, lambda _: b""),
    "type": (TYPE, lambda name: bytes([TYPES[name]])),
    "eq": (EQUALS, _scalar),
    "contains": (CONTAINS, _scalar),
    "in": (IN, _in),
    "range": (0, _range),
    "prefix": (PREFIX, _text_code),
    "suffix": (SUFFIX, _text_code),
    "regexp": (REGEXP, _regexp),
    "regexp_text": (TEXT_REGEXP, _regexp),
    "geo_distance": (POINT, _shape),
    "geo_distance_range": (POINT, _shape),
    "geo_box": (POINT, _shape),
    "geo_polygon": (POINT, _shape),
    "geo_junk": (JUNK_POINT, lambda _: b""),
    "negative_zero": (NEGATIVE_ZERO, lambda _: b""),
}
