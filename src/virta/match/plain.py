"""
The index in plain Python: the native engine's twin, its oracle, and what runs where nothing can be compiled.

Each conjunction has one *access*: the condition by which an event finds it. An event visits only the paths
it has, looks its values up, and verifies the rest of each conjunction it finds; a value is looked up
once an event, and so is the result of a condition that more than one conjunction holds.

    equal     path -> scalar -> rows      eq, and in under each of its values
    contains  path -> scalar -> rows      elements of arrays
    ranges    path -> rows by lower bound numbers only
    present   path -> rows                any other condition: its path must be there
    absent    path -> rows                not exists
    scan      rows                        the rest: negations, opaque conditions
"""

from __future__ import annotations

import math
import sys
import threading
from bisect import bisect_right, insort
from typing import TYPE_CHECKING, Any

from virta.filters.evaluate import MISSING, TESTS, holds, resolve
from virta.filters.tree import And, Condition, Flat, Node, Not, Or
from virta.filters.values import number, scalar_key
from virta.match.events import lines, parse_event

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from virta.filters.canonical import Conjunction
    from virta.filters.tree import Path
    from virta.match.compile import Compiled

_RANKS = {"eq": 0, "in": 1, "contains": 2, "range": 3}
_PRESENT, _ABSENT, _SCAN = 4, 5, 6


class _Row:
    """One conjunction: the filter's number, and what is verified once it was found."""

    __slots__ = ("access", "number", "rest", "tree")

    def __init__(
        self, number: int, access: Condition | Not | None, rest: Conjunction, tree: Node | None
    ) -> None:
        self.number = number
        self.access = access
        self.rest = rest
        self.tree = tree


class _Entry:
    __slots__ = ("count", "id", "rows")

    def __init__(self, id_: str, rows: list[_Row]) -> None:
        self.id = id_
        self.rows = rows
        self.count = 1


# A row under its bounds. The row's identity breaks ties: rows have no order.
_Interval = tuple[float, int, float, _Row]
_Rows = dict[_Row, None]


class PlainEngine:
    """See `virta.match.engine.Engine` for the methods."""

    name = "plain"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._free: list[int] = []
        self._equal: dict[Path, dict[Any, _Rows]] = {}
        self._contains: dict[Path, dict[Any, _Rows]] = {}
        self._ranges: dict[Path, list[_Interval]] = {}
        self._present: dict[Path, _Rows] = {}
        self._absent: dict[Path, _Rows] = {}
        self._scan: _Rows = {}
        self._heads: dict[str, dict[Path, int]] = {}

    # Changes.

    def add(self, compiled: Compiled) -> int:
        with self._lock:
            number_ = self._numbers.get(compiled.id)
            if number_ is not None:
                self._entries[number_].count += 1
                return number_
            number_ = self._free.pop() if self._free else len(self._entries) + 1
            rows = _rows(number_, compiled)
            self._numbers[compiled.id] = number_
            self._entries[number_] = _Entry(compiled.id, rows)
            for row in rows:
                self._place(row)
            return number_

    def remove(self, id_: str) -> int:
        with self._lock:
            number_ = self._numbers.get(id_)
            if number_ is None:
                return -1
            entry = self._entries[number_]
            entry.count -= 1
            if entry.count:
                return entry.count
            del self._numbers[id_], self._entries[number_]
            self._free.append(number_)
            for row in entry.rows:
                self._unplace(row)
            return 0

    def _place(self, row: _Row) -> None:
        access = row.access
        if access is None:
            self._scan[row] = None
        elif isinstance(access, Not):
            assert isinstance(access.child, Condition)
            self._absent.setdefault(access.child.path, {})[row] = None
        else:
            heads = self._heads.setdefault(_head(access.path), {})
            heads[access.path] = heads.get(access.path, 0) + 1
            if access.op in ("eq", "in", "contains"):
                table = self._contains if access.op == "contains" else self._equal
                values = table.setdefault(access.path, {})
                for key in _keys(access):
                    values.setdefault(key, {})[row] = None
            elif _is_interval(access):
                insort(self._ranges.setdefault(access.path, []), _interval(access, row))
            else:
                self._present.setdefault(access.path, {})[row] = None

    def _unplace(self, row: _Row) -> None:
        access = row.access
        if access is None:
            del self._scan[row]
        elif isinstance(access, Not):
            assert isinstance(access.child, Condition)
            _discard(self._absent, access.child.path, row)
        else:
            path = access.path
            heads = self._heads[_head(path)]
            heads[path] -= 1
            if not heads[path]:
                del heads[path]
            if access.op in ("eq", "in", "contains"):
                table = self._contains if access.op == "contains" else self._equal
                for key in _keys(access):
                    _discard(table[path], key, row)
                if not table[path]:
                    del table[path]
            elif _is_interval(access):
                intervals = self._ranges[path]
                del intervals[bisect_right(intervals, _interval(access, row)) - 1]
                if not intervals:
                    del self._ranges[path]
            else:
                _discard(self._present, path, row)

    # Questions.

    def find(self, id_: str) -> int:
        return self._numbers.get(id_, 0)

    def id(self, number_: int) -> str | None:
        entry = self._entries.get(number_)
        return entry.id if entry else None

    def ids(self) -> list[str]:
        return list(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def match(self, event: Any) -> list[str]:
        if isinstance(event, bytes):
            event = parse_event(event)
        with self._lock:
            return [self._entries[n].id for n in self._match(event)]

    def match_many(self, events: Any, *, numbers: bool) -> Any:
        """As the native index: lists of ids, or the bytes of uint32 numbers and offsets."""
        if isinstance(events, bytes | bytearray | memoryview):
            events = lines(bytes(events))
        found: list[list[int]] = []
        ids: list[list[str]] = []
        for position, event in enumerate(events):
            parsed = parse_event(event, position) if isinstance(event, bytes) else event
            with self._lock:
                matched = self._match(parsed)
                found.append(matched)
                if not numbers:
                    ids.append([self._entries[n].id for n in matched])
        if not numbers:
            return ids
        offsets = [0]
        for matched in found:
            offsets.append(offsets[-1] + len(matched))
        flat = (n for matched in found for n in matched)
        return _uint32(flat), _uint32(offsets)

    def stats(self) -> dict[str, int]:
        with self._lock:
            rows = [row for entry in self._entries.values() for row in entry.rows]
            size = sum(
                sys.getsizeof(row) + sys.getsizeof(row.rest) + 8 * len(row.rest) for row in rows
            )
            buckets = sum(
                len(values) for table in (self._equal, self._contains) for values in table.values()
            )
            return {
                "filters": len(self._entries),
                "conjunctions": len(rows),
                "paths": len({path for heads in self._heads.values() for path in heads}),
                "buckets": buckets + len(self._ranges) + len(self._present) + len(self._absent),
                "unindexed": len(self._scan),
                "bytes_records": size + sys.getsizeof(self._entries) + sys.getsizeof(self._numbers),
            }

    # Matching.

    def _match(self, event: Any) -> list[int]:
        view = _View(event)
        found: dict[int, None] = {}
        for row in self._candidates(view):
            if row.number not in found and view.satisfies(row):
                found[row.number] = None
        return list(found)

    def _candidates(self, view: _View) -> Iterator[_Row]:
        for path in self._paths(view.event):
            value = view.value(path)
            if value is not MISSING:
                yield from self._by_value(path, value)
                yield from self._present.get(path, ())
        for path, rows in self._absent.items():
            if view.value(path) is MISSING:
                yield from rows
        yield from self._scan

    def _by_value(self, path: Path, value: Any) -> Iterator[_Row]:
        key = _key(value)
        if key is not None and path in self._equal:
            yield from self._equal[path].get(key, ())
        elif isinstance(value, list | tuple) and path in self._contains:
            elements = self._contains[path]
            for item in {_key(item) for item in value}:
                yield from elements.get(item, ())
        if key is not None and key[0] == "number" and path in self._ranges:
            intervals = self._ranges[path]
            at = key[1]
            for _, _, upper, row in intervals[: bisect_right(intervals, (at, math.inf))]:
                if at <= upper:
                    yield row

    def _paths(self, event: Any) -> Iterable[Path]:
        """Paths that may be there: those whose first name is a member of the event."""
        if not isinstance(event, dict) or "" in event:
            return [path for heads in self._heads.values() for path in heads]
        names = {str(key).partition(".")[0] for key in event} | {""}
        return [path for name in names for path in self._heads.get(name, ())]


class _View:
    """One event, with the values and conditions that were looked up already."""

    __slots__ = ("event", "known", "values")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.values: dict[Path, Any] = {}
        self.known: dict[Condition, bool] = {}

    def value(self, path: Path) -> Any:
        if path not in self.values:
            self.values[path] = resolve(self.event, path)
        return self.values[path]

    def satisfies(self, row: _Row) -> bool:
        if row.tree is not None:
            return holds(row.tree, self.event)
        for literal in row.rest:
            positive = isinstance(literal, Condition)
            condition = literal if isinstance(literal, Condition) else literal.child
            assert isinstance(condition, Condition)
            if self._holds(condition) is not positive:
                return False
        return True

    def _holds(self, condition: Condition) -> bool:
        if condition.op in ("eq", "range", "exists"):
            value = self.value(condition.path)
            return value is not MISSING and TESTS[condition.op](condition.value, value)
        if condition not in self.known:
            value = self.value(condition.path)
            self.known[condition] = value is not MISSING and TESTS[condition.op](
                condition.value, value
            )
        return self.known[condition]


# Access.


def _rows(number_: int, compiled: Compiled) -> list[_Row]:
    if compiled.tree is not None:
        return [
            _Row(number_, access, (), compiled.tree)
            for access in _cover(compiled.tree)[1] or [None]
        ]
    rows = []
    for term in compiled.conjunctions:
        access = min(term, key=_rank, default=None)
        if access is None or _rank(access) == _SCAN:
            rows.append(_Row(number_, None, term, None))
            continue
        exact = isinstance(access, Not) or access.op in _RANKS or access.op == "exists"
        rest = tuple(literal for literal in term if not (exact and literal is access))
        if isinstance(access, Condition) and access.op == "range" and not _is_interval(access):
            rest = term
        rows.append(_Row(number_, access, rest, None))
    return rows


def _rank(literal: Condition | Not) -> int:
    """How well a literal finds its conjunction: less is better."""
    if isinstance(literal, Not):
        condition = literal.child
        return _ABSENT if isinstance(condition, Condition) and condition.op == "exists" else _SCAN
    if literal.op == "range":
        return _RANKS["range"] if _is_interval(literal) else _PRESENT
    return _SCAN if literal.op == "opaque" else _RANKS.get(literal.op, _PRESENT)


def _cover(node: Node) -> tuple[int, list[Condition | Not | None]]:
    """Literals one of which holds whenever the tree does, and the rank of the worst."""
    if isinstance(node, And):
        return min((_cover(child) for child in node.children), key=lambda found: found[0])
    if isinstance(node, Or):
        parts = [_cover(child) for child in node.children]
        worst = max(rank for rank, _ in parts)
        return worst, [] if worst == _SCAN else [literal for _, part in parts for literal in part]
    assert isinstance(node, Condition | Not)
    rank = _rank(node)
    return rank, [] if rank == _SCAN else [node]


def _head(path: Path) -> str:
    step = path[0] if path else ""
    return step.name.partition(".")[0] if isinstance(step, Flat) else str(step).partition(".")[0]


def _keys(access: Condition) -> list[Any]:
    values = access.value if access.op == "in" else (access.value,)
    return [scalar_key(value) for value in values]


def _key(value: Any) -> Any:
    """The key of a scalar as it is in an event; None when it is none."""
    if value is None or isinstance(value, bool | str):
        return scalar_key(value)
    if isinstance(value, int | float):
        return ("number", number(value))
    return None


def _is_interval(condition: Condition) -> bool:
    return condition.op == "range" and condition.value.kind == "number"


def _interval(condition: Condition, row: _Row) -> _Interval:
    """The bounds as a closed interval of doubles."""
    bounds = condition.value
    lower = -math.inf if bounds.lower is None else float(bounds.lower)
    upper = math.inf if bounds.upper is None else float(bounds.upper)
    if bounds.lower_open:
        lower = math.nextafter(lower, math.inf)
    if bounds.upper_open:
        upper = math.nextafter(upper, -math.inf)
    return lower, id(row), upper, row


def _discard(table: dict[Any, _Rows], key: Any, row: _Row) -> None:
    rows = table[key]
    rows.pop(row, None)
    if not rows:
        del table[key]


def _uint32(numbers: Iterable[int]) -> bytes:
    return b"".join(n.to_bytes(4, sys.byteorder) for n in numbers)
