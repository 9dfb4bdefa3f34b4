"""
A path in the plain index: its value in the present event, what that value finds, and what is tested of it.

    equal      scalar -> rows      eq, and in under each of its values
    contains   scalar -> rows      elements of arrays
    intervals  rows by lower bound ranges of numbers
    latitudes  rows by lower bound circles, rings and boxes: only the latitude is looked at
    patterned  number -> rows      patterns, all of a path searched for at once
    present    rows                any other condition: its path must be there
    absent     rows                not exists

Invariant: whatever is derived from the value (its key, its elements, its point) is derived once an event, and
only when asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import count
from typing import TYPE_CHECKING, Any

from virta.filters.evaluate import MISSING, TESTS, resolve
from virta.filters.geo import in_annulus, in_box, in_circle, in_polygon, read_point
from virta.filters.tree import Condition, Flat, Node, Not
from virta.filters.values import number, scalar_key
from virta.match.regex import TEXT_CHARS_MAX, PathPatterns, plain_condition
from virta.match.selectivity import PATTERN, interval, rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.filters.tree import Path

# Rows, and values that found them, which a spot remembers: half a megabyte.
KNOWN_ROWS_MAX = 1 << 16


class Spot:
    """A path, what is found by its value, and that value in the present event."""

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
        "latitudes",
        "member",
        "numbers",
        "path",
        "patterned",
        "patterns",
        "present",
        "room",
        "users",
        "value",
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self.member = _member(path)
        self.users = 0
        self.hold(MISSING, 0)
        self.equal: dict[Any, Rows] = {}
        self.contains: dict[Any, Rows] = {}
        self.intervals: list[Interval] = []
        self.latitudes: list[Interval] = []
        self.patterns = PathPatterns()
        self.numbers = count(1)  # of patterns, none used twice
        self.patterned: dict[int, Rows] = {}
        self.present: Rows = {}
        self.absent: Rows = {}
        self.forget()

    # The value in the present event.

    def hold(self, value: Any, epoch: int) -> None:
        self.value, self.epoch = value, epoch
        self._key: Any = MISSING
        self._items: Any = MISSING
        self._point: Any = MISSING

    def look(self, event: Any, epoch: int) -> Any:
        if self.epoch != epoch:
            self.hold(resolve(event, self.path), epoch)
        return self.value

    def key(self) -> Any:
        """The key of a scalar, None for anything else."""
        if self._key is MISSING:
            self._key = _key(self.value)
        return self._key

    def items(self) -> Any:
        """The keys of an array's elements."""
        if self._items is MISSING:
            value = self.value
            self._items = {_key(item) for item in value} if isinstance(value, list | tuple) else ()
        return self._items

    def point(self) -> Any:
        if self._point is MISSING:
            self._point = read_point(self.value)
        return self._point

    # What it finds.

    def find(self, rows: list[Row]) -> None:
        """Add the rows that the present value finds; it is not missing."""
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
            self.room -= len(rows) + 1
            if self.room < 0:
                self.forget()
            self.known[key] = rows
        return rows

    def forget(self) -> None:
        """What scalars find is remembered until there is too much of it, or it changes."""
        self.known: dict[Any, list[Row]] = {}
        self.room = KNOWN_ROWS_MAX


class Test:
    """A condition, and whether it holds for the present event."""

    __slots__ = ("condition", "epoch", "function", "pattern", "spot", "truth", "users", "value")

    def __init__(self, condition: Condition, spot: Spot) -> None:
        self.condition = condition
        self.spot = spot
        self.users = 0
        self.epoch = 0
        self.truth = False
        self.pattern = next(spot.numbers) if rank(condition) == PATTERN else 0
        if self.pattern:
            spot.patterns.add(self.pattern, condition.value)
        self.function, self.value = _function(condition, self.pattern)

    def run(self, event: Any, epoch: int) -> None:
        """Set `truth` for the present event."""
        self.epoch = epoch
        spot = self.spot
        value = spot.value if spot.epoch == epoch else spot.look(event, epoch)
        self.truth = value is not MISSING and self.function(self.value, spot)


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

# What tests ask of a spot that has a value.

_SHAPES: dict[str, Any] = {
    "geo_distance": in_circle,
    "geo_distance_range": in_annulus,
    "geo_box": in_box,
    "geo_polygon": in_polygon,
}


def _function(condition: Condition, pattern: int) -> tuple[Callable[[Any, Spot], bool], Any]:
    """A function of an operand and a spot, and the operand."""
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


def _is_there(_: None, spot: Spot) -> bool:  # noqa: ARG001 - as the others
    return True


def _equals(key: Any, spot: Spot) -> bool:
    return bool(spot.key() == key)


def _contains(key: Any, spot: Spot) -> bool:
    return key in spot.items()


def _lies_between(bounds: tuple[float, float], spot: Spot) -> bool:
    key = spot.key()
    return key is not None and key[0] == "number" and bool(bounds[0] <= key[1] <= bounds[1])


def _finds_pattern(pattern: int, spot: Spot) -> bool:
    return isinstance(spot.value, str) and pattern in spot.patterns.found(spot.value)


def _lies_in(shape: tuple[Any, Any], spot: Spot) -> bool:
    point = spot.point()
    return point is not None and bool(shape[0](shape[1], *point))


def _holds(test: tuple[Any, Any], spot: Spot) -> bool:
    return bool(test[0](test[1], spot.value))


def _member(path: Path) -> str | None:
    """The name of the event's member that the path is, if it is no more than that."""
    if len(path) != 1:
        return None
    name = path[0].name if isinstance(path[0], Flat) else path[0]
    return name if isinstance(name, str) and name and "." not in name else None


def _key(value: Any) -> Any:
    """The key of a scalar as it is in an event; None when it is none."""
    if isinstance(value, str):
        return ("string", value)
    if value is None or isinstance(value, bool):
        return scalar_key(value)
    if isinstance(value, int | float):
        return ("number", number(value))
    return None


def _stab(intervals: list[Interval], at: float, rows: list[Row]) -> None:
    """Add the rows whose interval holds the number."""
    upto = bisect_right(intervals, (at, math.inf))
    rows += [row for _, _, upper, row in intervals[:upto] if at <= upper]
