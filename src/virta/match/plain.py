"""
The index in plain Python: the native engine's twin, its oracle, and what runs where nothing can be compiled.

Each conjunction has one *access*: the condition by which an event finds it. An event visits only the paths
it has, looks its values up, and verifies the rest of each conjunction it finds. Paths and conditions are
kept once, as *spots* and *tests* (see virta.match.path_index), and remember what they were in the present event;
one lock makes the present event the only one. What no spot finds (negations, opaque conditions) is verified
for every event.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_right, insort
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from virta.errors import EventError
from virta.filters.evaluate import MISSING, holds
from virta.filters.tree import Condition, Flat, Not
from virta.filters.values import scalar_key
from virta.match.events import lines, parse_event
from virta.match.path_index import Row, Rows, Spot, Test
from virta.match.selectivity import (
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
    """See `virta.match.engine.Engine` for the methods."""

    name = "plain"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._numbers: dict[str, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._free: list[int] = []
        self._spots: dict[Path, Spot] = {}
        self._tests: dict[Condition, Test] = {}
        self._heads: dict[str, dict[Spot, None]] = {}
        self._absent: dict[Spot, None] = {}
        self._scan: Rows = {}

    # Changes.

    def add(self, compiled: Compiled) -> int:
        with self._lock:
            number_ = self._numbers.get(compiled.id)
            if number_ is not None:
                self._entries[number_].count += 1
                return number_
            number_ = self._free.pop() if self._free else len(self._entries) + 1
            rows = self._rows(number_, compiled)
            self._numbers[compiled.id] = number_
            self._entries[number_] = _Entry(compiled.id, rows)
            for row in rows:
                self._change(row, present=True)
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
                self._change(row, present=False)
                for test, _ in row.rest:
                    self._drop_test(test)
            return 0

    def _rows(self, number_: int, compiled: Compiled) -> list[Row]:
        if compiled.tree is not None:
            covers = cover(compiled.tree)[1] or [None]
            return [Row(number_, access, (), compiled.tree) for access in covers]
        rows = []
        for term in compiled.conjunctions:
            access = min((*term, *map(implied, term)), key=rank, default=None)
            if access is not None and rank(access) == SCAN:
                access = None
            # A row that a presence or a latitude finds has still to be tested for what the condition says.
            decided = access is not None and (
                rank(access) not in (SHAPED, PRESENT) or is_exists(access)
            )
            rest = tuple(
                (self._test(literal), isinstance(literal, Condition))
                for literal in sorted(term, key=cost)
                if not (decided and literal is access)
            )
            rows.append(Row(number_, access, rest, None))
        return rows

    def _test(self, literal: Condition | Not) -> Test:
        condition = literal if isinstance(literal, Condition) else literal.child
        assert isinstance(condition, Condition)
        test = self._tests.get(condition)
        if test is None:
            test = self._tests[condition] = Test(condition, self._spot(condition.path))
        test.users += 1
        return test

    def _drop_test(self, test: Test) -> None:
        test.users -= 1
        if not test.users:
            del self._tests[test.condition]
            if test.pattern:
                test.spot.patterns.remove(test.pattern)
            self._drop_spot(test.spot)

    def _spot(self, path: Path) -> Spot:
        spot = self._spots.get(path)
        if spot is None:
            spot = self._spots[path] = Spot(path)
            self._heads.setdefault(_head(path), {})[spot] = None
        spot.users += 1
        return spot

    def _drop_spot(self, spot: Spot) -> None:
        spot.users -= 1
        if not spot.users:
            del self._spots[spot.path]
            heads = self._heads[_head(spot.path)]
            del heads[spot]
            if not heads:
                del self._heads[_head(spot.path)]

    def _change(self, row: Row, *, present: bool) -> None:
        """Enter a row where its access finds it, or take it from there."""
        access = row.access
        if access is None:
            _change_rows(self._scan, row, present=present)
            return
        condition = access if isinstance(access, Condition) else access.child
        assert isinstance(condition, Condition)
        spot = self._spot(condition.path) if present else self._spots[condition.path]
        spot.forget()
        if isinstance(access, Not):
            _change_rows(spot.absent, row, present=present)
            if spot.absent:
                self._absent[spot] = None
            else:
                del self._absent[spot]
        elif access.op in ("eq", "in", "contains"):
            table = spot.contains if access.op == "contains" else spot.equal
            for value in access.value if access.op == "in" else (access.value,):
                _change_table(table, scalar_key(value), row, present=present)
        elif rank(access) == PATTERN:
            test = self._test(access) if present else self._tests[access]
            _change_table(spot.patterned, test.pattern, row, present=present)
            if not present:
                self._drop_test(test)
        elif rank(access) == PRESENT:
            _change_rows(spot.present, row, present=present)
        else:
            intervals = spot.intervals if access.op == "range" else spot.latitudes
            bounds = interval(access) if access.op == "range" else latitudes(access.value)
            entry = (bounds[0], id(row), bounds[1], row)
            if present:
                insort(intervals, entry)
            else:
                del intervals[bisect_right(intervals, entry) - 1]
        if not present:
            self._drop_spot(spot)

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

    def match_flat(self, ends: Any, texts: Any) -> tuple[bytes, bytes]:
        """As the native index: rows as int32, numbers as uint32."""
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

    def stats(self) -> dict[str, int]:
        with self._lock:
            rows = [row for entry in self._entries.values() for row in entry.rows]
            spots = self._spots.values()
            size = sum(sys.getsizeof(row) + sys.getsizeof(row.rest) for row in rows)
            size += sum(map(sys.getsizeof, self._tests.values())) + sys.getsizeof(self._tests)
            size += sys.getsizeof(self._entries) + sys.getsizeof(self._numbers)
            return {
                "filters": len(self._entries),
                "conjunctions": len(rows),
                "conditions": len(self._tests),
                "paths": len(self._spots),
                "buckets": sum(len(spot.equal) + len(spot.contains) for spot in spots),
                "unindexed": len(self._scan),
                "bytes_records": size,
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
            for spot in self._spots.values():
                if spot.look(event, epoch) is not MISSING:
                    spot.find(rows)
        for spot in self._absent:
            if spot.look(event, epoch) is MISSING:
                rows += spot.absent
        rows += self._scan
        return rows

    def _find_by_member(self, event: dict[Any, Any], epoch: int, rows: list[Row]) -> None:
        """Look at the spots that may have a value: those whose first name is a member of the event."""
        heads = self._heads
        dotted = {""}
        for name, value in event.items():
            if not isinstance(name, str) or "." in name:
                dotted.add(str(name).partition(".")[0])
                continue
            for spot in heads.get(name, ()):
                if spot.member == name:
                    spot.hold(value, epoch)
                    spot.find(rows)
                elif spot.look(event, epoch) is not MISSING:
                    spot.find(rows)
        for head in dotted:
            if head not in event:
                for spot in heads.get(head, ()):
                    if spot.look(event, epoch) is not MISSING:
                        spot.find(rows)


def _head(path: Path) -> str:
    step = path[0] if path else ""
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
