"""
The index in plain Python: runs where no extension is built, and is the reference for the native engine.

Each conjunction has one *access*: the condition by which an event finds it. Only the paths that an event has
are visited, its values are looked up, and the rest of each conjunction found is verified. Each path and each
condition exists once, as a *node* and a *test* (virta.match.plain.path_index), which cache their result for the current
event; one lock makes sure there is one current event. Conjunctions without an access (negations, opaque
conditions) are verified for every event.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_right, insort
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from virta.errors import EventError
from virta.filters.evaluate import MISSING, holds
from virta.filters.tree import Computed, Condition, Flat, Not
from virta.filters.values import scalar_key
from virta.match.events import lines, parse_event
from virta.match.plain.path_index import PathNode, Row, Rows, Test
from virta.match.plain.selectivity import (
    PATTERN,
    PRESENT,
    SCAN,
    SHAPED,
    cost,
    cover,
    implied,
    interval,
    is_exists,
    latitudes,
    rank,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.filters.tree import Path
    from virta.match.compile import Compiled


class _Entry:
    __slots__ = ("count", "id", "rows")

    def __init__(self, id_: str, rows: list[Row]) -> None:
        self.id = id_
        self.rows = rows
        self.count = 1


class PlainEngine:
    """The plain engine; `MatchEngine` documents the methods."""

    name = "plain"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._numbers: dict[str, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._free: list[int] = []
        self._nodes: dict[Path, PathNode] = {}
        self._tests: dict[Condition, Test] = {}
        self._heads: dict[str, dict[PathNode, None]] = {}
        self._absent: dict[PathNode, None] = {}
        self._scan: Rows = {}

    # Changes.

    def add(self, compiled: Compiled) -> int:
        with self._lock:
            number = self._numbers.get(compiled.id)
            if number is not None:
                self._entries[number].count += 1
                return number
            number = self._free.pop() if self._free else len(self._entries) + 1
            rows = self._make_rows(number, compiled)
            self._numbers[compiled.id] = number
            self._entries[number] = _Entry(compiled.id, rows)
            for row in rows:
                self._change(row, present=True)
            return number

    def remove(self, id_: str) -> int:
        with self._lock:
            number = self._numbers.get(id_)
            if number is None:
                return -1
            entry = self._entries[number]
            entry.count -= 1
            if entry.count:
                return entry.count
            del self._numbers[id_], self._entries[number]
            self._free.append(number)
            for row in entry.rows:
                self._change(row, present=False)
                for test, _ in row.rest:
                    self._drop_test(test)
            return 0

    def _make_rows(self, number: int, compiled: Compiled) -> list[Row]:
        if compiled.tree is not None:
            covers = cover(compiled.tree)[1] or [None]
            return [Row(number, access, (), compiled.tree) for access in covers]
        rows = []
        for term in compiled.conjunctions:
            access = min((*term, *map(implied, term)), key=rank, default=None)
            if access is not None and rank(access) == SCAN:
                access = None
            # A row found by presence or latitude alone must still be tested for its condition.
            decided = access is not None and (
                rank(access) not in (SHAPED, PRESENT) or is_exists(access)
            )
            rest = tuple(
                (self._shared_test(literal), isinstance(literal, Condition))
                for literal in sorted(term, key=cost)
                if not (decided and literal is access)
            )
            rows.append(Row(number, access, rest, None))
        return rows

    def _shared_test(self, literal: Condition | Not) -> Test:
        condition = literal if isinstance(literal, Condition) else literal.child
        assert isinstance(condition, Condition)
        test = self._tests.get(condition)
        if test is None:
            test = self._tests[condition] = Test(condition, self._shared_node(condition.path))
        test.users += 1
        return test

    def _drop_test(self, test: Test) -> None:
        test.users -= 1
        if not test.users:
            del self._tests[test.condition]
            if test.pattern:
                test.node.patterns.remove(test.pattern)
            self._drop_node(test.node)

    def _shared_node(self, path: Path) -> PathNode:
        node = self._nodes.get(path)
        if node is None:
            node = self._nodes[path] = PathNode(path)
            self._heads.setdefault(_head(path), {})[node] = None
        node.users += 1
        return node

    def _drop_node(self, node: PathNode) -> None:
        node.users -= 1
        if not node.users:
            del self._nodes[node.path]
            heads = self._heads[_head(node.path)]
            del heads[node]
            if not heads:
                del self._heads[_head(node.path)]

    def _change(self, row: Row, *, present: bool) -> None:
        """Add a row to the place where its access finds it, or remove it from there."""
        access = row.access
        if access is None:
            _change_rows(self._scan, row, present=present)
            return
        condition = access if isinstance(access, Condition) else access.child
        assert isinstance(condition, Condition)
        node = self._shared_node(condition.path) if present else self._nodes[condition.path]
        node.clear_known()
        if isinstance(access, Not):
            _change_rows(node.absent, row, present=present)
            if node.absent:
                self._absent[node] = None
            else:
                del self._absent[node]
        elif access.op in ("eq", "in", "contains"):
            table = node.contains if access.op == "contains" else node.equal
            for value in access.value if access.op == "in" else (access.value,):
                _change_table(table, scalar_key(value), row, present=present)
        elif rank(access) == PATTERN:
            test = self._shared_test(access) if present else self._tests[access]
            _change_table(node.patterned, test.pattern, row, present=present)
            if not present:
                self._drop_test(test)
        elif rank(access) == PRESENT:
            _change_rows(node.present, row, present=present)
        else:
            intervals = node.intervals if access.op == "range" else node.latitudes
            bounds = interval(access) if access.op == "range" else latitudes(access.value)
            entry = (bounds[0], id(row), bounds[1], row)
            if present:
                insort(intervals, entry)
            else:
                del intervals[bisect_right(intervals, entry) - 1]
        if not present:
            self._drop_node(node)

    # Lookups.

    def find(self, id_: str) -> int:
        return self._numbers.get(id_, 0)

    def count(self, id_: str) -> int:
        entry = self._entries.get(self._numbers.get(id_, 0))
        return entry.count if entry else 0

    def id(self, number: int) -> str | None:
        if not isinstance(number, int):
            raise TypeError("an integer is required")  # as the native engine
        entry = self._entries.get(number)
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
        """Return lists of ids, or the bytes of uint32 numbers and offsets."""
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

    def match_flat(self, ends: Any, texts: Any) -> tuple[bytes, bytes]:
        """Return rows as int32 and numbers as uint32, both as bytes."""
        bounds, data = memoryview(ends).cast("B").cast("i"), bytes(texts)
        rows, numbers = array("i"), array("I")
        for row, (start, end) in enumerate(pairwise(bounds)):
            try:
                event = parse_event(data[start:end], row)
                with self._lock:
                    found = self._match(event)
            except (EventError, RecursionError):
                continue
            numbers.extend(found)
            rows.extend([row] * len(found))
        return rows.tobytes(), numbers.tobytes()

    def match_members(
        self,
        texts: list[bytes],
        names: tuple[str, ...],  # noqa: ARG002
    ) -> list[tuple[Any, ...] | None]:
        """Return None for every text: the plain engine gains nothing from one parse for both."""
        return [None] * len(texts)

    def stats(self) -> dict[str, int]:
        with self._lock:
            rows = [row for entry in self._entries.values() for row in entry.rows]
            nodes = self._nodes.values()
            size = sum(sys.getsizeof(row) + sys.getsizeof(row.rest) for row in rows)
            size += sum(map(sys.getsizeof, self._tests.values())) + sys.getsizeof(self._tests)
            size += sys.getsizeof(self._entries) + sys.getsizeof(self._numbers)
            kinds = Counter(map(_kind, self._entries.values()))
            return {
                "filters": len(self._entries),
                "indexed": kinds["indexed"],
                "verified": kinds["verified"],
                "scanned": kinds["scanned"],
                "conjunctions": len(rows),
                "conditions": len(self._tests),
                "paths": len(self._nodes),
                "buckets": sum(len(node.equal) + len(node.contains) for node in nodes),
                "unindexed": len(self._scan),
                "bytes_records": size,
                "bytes_patterns": sum(node.patterns.bytes for node in nodes),
            }

    # Matching.

    def _match(self, event: Any) -> list[int]:
        self._epoch = epoch = self._epoch + 1
        found: dict[int, None] = {}
        for row in self._candidates(event, epoch):
            for test, positive in row.rest:
                if test.epoch != epoch:
                    test.run(event, epoch)
                if test.truth is not positive:
                    break
            else:
                if row.tree is None or (row.number not in found and holds(row.tree, event)):
                    found[row.number] = None
        return list(found)

    def _candidates(self, event: Any, epoch: int) -> list[Row]:
        rows: list[Row] = []
        if isinstance(event, dict) and "" not in event:
            self._find_by_member(event, epoch, rows)
        else:
            for node in self._nodes.values():
                if node.value_in(event, epoch) is not MISSING:
                    node.find(rows)
        for node in self._absent:
            if node.value_in(event, epoch) is MISSING:
                rows += node.absent
        rows += self._scan
        return rows

    def _find_by_member(self, event: dict[Any, Any], epoch: int, rows: list[Row]) -> None:
        """Visit only the nodes whose first name is a member of the event."""
        heads = self._heads
        dotted = {""}
        for name, value in event.items():
            if not isinstance(name, str) or "." in name:
                dotted.add(str(name).partition(".")[0])
                continue
            for node in heads.get(name, ()):
                if node.member == name:
                    node.set_value(value, epoch)
                    node.find(rows)
                elif node.value_in(event, epoch) is not MISSING:
                    node.find(rows)
        for head in dotted:
            if head not in event:
                for node in heads.get(head, ()):
                    if node.value_in(event, epoch) is not MISSING:
                        node.find(rows)


def _kind(entry: _Entry) -> str:
    """Return how events find a filter: see `virta.match.cost`."""
    if any(row.access is None for row in entry.rows):
        return "scanned"
    return "verified" if any(row.rest or row.tree for row in entry.rows) else "indexed"


def _head(path: Path) -> str:
    step = path[0] if path else ""
    if isinstance(step, Computed):
        return ""  # tried for every event
    return step.name.partition(".")[0] if isinstance(step, Flat) else str(step).partition(".")[0]


def _change_rows(rows: Rows, row: Row, *, present: bool) -> None:
    if present:
        rows[row] = None
    else:
        del rows[row]


def _change_table(table: dict[Any, Rows], key: Any, row: Row, *, present: bool) -> None:
    _change_rows(table.setdefault(key, {}), row, present=present)
    if not table[key]:
        del table[key]


def _uint32(numbers: Iterable[int]) -> bytes:
    return b"".join(n.to_bytes(4, sys.byteorder) for n in numbers)
