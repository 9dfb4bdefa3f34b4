"""
A path in the plain index: its value in the current event, the rows that value finds, and the tests on it.

    equal      scalar -> rows      eq, and in under each of its values
    contains   scalar -> rows      elements of arrays
    intervals  rows by lower bound ranges of numbers
    latitudes  rows by lower bound circles, rings and boxes: only the latitude is compared
    patterned  number -> rows      patterns, all of a path searched for at once
    present    rows                any other condition: its path must be there
    absent     rows                not exists

Invariant: the value's key, elements and point are computed at most once per event, when first needed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import count
from typing import TYPE_CHECKING, Any

from virta.filters.evaluate import MISSING, TESTS, resolve
from virta.filters.geo import in_annulus, in_box, in_circle, in_polygon, read_point
from virta.filters.text import pattern_text
from virta.filters.tree import Condition, Flat, Node, Not
from virta.filters.values import number, scalar_key
from virta.match.pattern_sets import TEXT_CHARS_MAX, PathPatterns
from virta.match.plain.selectivity import PATTERN, interval, rank
from virta.match.regex import plain_condition

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.filters.tree import Path

# Rows and keys that a node remembers: half a megabyte.
KNOWN_ROWS_MAX = 1 << 16


class PathNode:
    """A path, the rows its value finds, and that value in the current event."""

    __slots__ = (
        "_items",
        "_key",
        "_point",
        "absent",
        "contains",
        "epoch",
        "equal",
        "intervals",
        "known",
        "known_left",
        "latitudes",
        "member",
        "numbers",
        "path",
        "patterned",
        "patterns",
        "present",
        "users",
        "value",
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self.member = _member(path)
        self.users = 0
        self.set_value(MISSING, 0)
        self.equal: dict[Any, Rows] = {}
        self.contains: dict[Any, Rows] = {}
        self.intervals: list[Interval] = []
        self.latitudes: list[Interval] = []
        self.patterns = PathPatterns()
        self.numbers = count(1)  # of patterns, none used twice
        self.patterned: dict[int, Rows] = {}
        self.present: Rows = {}
        self.absent: Rows = {}
        self.clear_known()

    # The value in the current event.

    def set_value(self, value: Any, epoch: int) -> None:
        self.value, self.epoch = value, epoch
        self._key: Any = MISSING
        self._items: Any = MISSING
        self._point: Any = MISSING

    def value_in(self, event: Any, epoch: int) -> Any:
        if self.epoch != epoch:
            self.set_value(resolve(event, self.path), epoch)
        return self.value

    def key(self) -> Any:
        """Return the key of a scalar, None for anything else."""
        if self._key is MISSING:
            self._key = _event_key(self.value)
        return self._key

    def items(self) -> Any:
        """Return the keys of an array's elements."""
        if self._items is MISSING:
            value = self.value
            self._items = (
                {_event_key(item) for item in value} if isinstance(value, list | tuple) else ()
            )
        return self._items

    def point(self) -> Any:
        if self._point is MISSING:
            self._point = read_point(self.value)
        return self._point

    # Rows found by the value.

    def find(self, rows: list[Row]) -> None:
        """Add the rows that the current value finds; it must not be missing."""
        key = self.key()
        if key is not None:
            known = self.known.get(key)
            rows += self._find_scalar(key) if known is None else known
        elif self.contains:
            for item in self.items():
                rows += self.contains.get(item, ())
        if self.latitudes:
            point = self.point()
            if point is not None:
                _stab(self.latitudes, point[0], rows)
        rows += self.present

    def _find_scalar(self, key: Any) -> list[Row]:
        kind, value = key
        rows = list(self.equal.get(key, ()))
        if kind == "number":
            _stab(self.intervals, value, rows)
        elif kind == "string" and self.patterned:
            for found in self.patterns.found(value) & self.patterned.keys():
                rows += self.patterned[found]
        if kind != "string" or len(value) <= TEXT_CHARS_MAX:
            self.known_left -= len(rows) + 1
            if self.known_left < 0:
                self.clear_known()
            self.known[key] = rows
        return rows

    def clear_known(self) -> None:
        """Drop the rows remembered for scalars: there are too many, or the index changed."""
        self.known: dict[Any, list[Row]] = {}
        self.known_left = KNOWN_ROWS_MAX


class Test:
    """A condition, and whether it holds for the current event."""

    __slots__ = ("condition", "epoch", "function", "node", "pattern", "truth", "users", "value")

    def __init__(self, condition: Condition, node: PathNode) -> None:
        self.condition = condition
        self.node = node
        self.users = 0
        self.epoch = 0
        self.truth = False
        self.pattern = next(node.numbers) if rank(condition) == PATTERN else 0
        if self.pattern:
            node.patterns.add(self.pattern, pattern_text(condition.value))
        self.function, self.value = _function(condition, self.pattern)

    def run(self, event: Any, epoch: int) -> None:
        """Set `truth` for the current event."""
        self.epoch = epoch
        node = self.node
        value = node.value if node.epoch == epoch else node.value_in(event, epoch)
        self.truth = value is not MISSING and self.function(self.value, node)


class Row:
    """One conjunction: the filter's number, and what is verified once it was found."""

    __slots__ = ("access", "number", "rest", "tree")

    def __init__(
        self,
        number: int,
        access: Condition | Not | None,
        rest: tuple[tuple[Test, bool], ...],
        tree: Node | None,
    ) -> None:
        self.number = number
        self.access = access
        self.rest = rest
        self.tree = tree


# A row under its bounds. The row's identity breaks ties: rows have no order.
Interval = tuple[float, int, float, Row]
Rows = dict[Row, None]

# Tests on a node that has a value.

_SHAPES: dict[str, Any] = {
    "geo_distance": in_circle,
    "geo_distance_range": in_annulus,
    "geo_box": in_box,
    "geo_polygon": in_polygon,
}


def _function(condition: Condition, pattern: int) -> tuple[Callable[[Any, PathNode], bool], Any]:
    """Return the test of a condition, a function of operand and node, and its operand."""
    op, value = condition.op, condition.value
    if pattern:
        return _finds_pattern, pattern
    if op == "regexp":
        op, value = plain_condition(value) or (op, value)
    if op == "exists":
        return _is_there, None
    if op == "eq":
        return _equals, scalar_key(value)
    if op == "contains":
        return _contains, scalar_key(value)
    if op == "range" and value.kind == "number":
        return _lies_between, interval(condition)
    if op in _SHAPES:
        return _lies_in, (_SHAPES[op], value)
    return _holds, (TESTS[op], value)


def _is_there(_: None, node: PathNode) -> bool:  # noqa: ARG001 - as the others
    return True


def _equals(key: Any, node: PathNode) -> bool:
    return bool(node.key() == key)


def _contains(key: Any, node: PathNode) -> bool:
    return key in node.items()


def _lies_between(bounds: tuple[float, float], node: PathNode) -> bool:
    key = node.key()
    return key is not None and key[0] == "number" and bool(bounds[0] <= key[1] <= bounds[1])


def _finds_pattern(pattern: int, node: PathNode) -> bool:
    return isinstance(node.value, str) and pattern in node.patterns.found(node.value)


def _lies_in(shape: tuple[Any, Any], node: PathNode) -> bool:
    point = node.point()
    return point is not None and bool(shape[0](shape[1], *point))


def _holds(test: tuple[Any, Any], node: PathNode) -> bool:
    return bool(test[0](test[1], node.value))


def _member(path: Path) -> str | None:
    """Return the member name of a path with one plain step, else None."""
    if len(path) != 1:
        return None
    name = path[0].name if isinstance(path[0], Flat) else path[0]
    return name if isinstance(name, str) and name and "." not in name else None


def _event_key(value: Any) -> Any:
    """Return the key of an event's scalar, None for other values."""
    if isinstance(value, str):
        return ("string", value)
    if value is None or isinstance(value, bool):
        return scalar_key(value)
    if isinstance(value, int | float):
        return ("number", number(value))
    return None


def _stab(intervals: list[Interval], at: float, rows: list[Row]) -> None:
    """Add the rows whose interval contains the number."""
    upto = bisect_right(intervals, (at, math.inf))
    rows += [row for _, _, upper, row in intervals[:upto] if at <= upper]
