"""
Aggregates over the rows of a view: count, sum, min and max, by group.

    count,sum(/data/total),min(/data/total)      with group /data/country

A fold gets the frames of a view as any consumer does and remembers group and values of every row, to take them back
when the row changes or leaves. A sum is an exact fraction, since a running double drifts; min and max are counted
multisets with heaps that are cleaned when they are read. What is no number counts in `count` only.
"""

from __future__ import annotations

import heapq
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from virta.errors import ViewError
from virta.event.row_changes import parse_pointer, raw_at
from virta.views.frames import ROW, SNAPSHOT
from virta.views.tables.index import ENTER, LEAVE, UPDATE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.views.frames import ViewFrame

TERMS_MAX: Final = 16
# Longer decimals, and those with an exponent, are read as doubles: an exact fraction of 1e999999 fills the memory.
NUMBER_CHARS_MAX: Final = 400

_TERM = re.compile(r"(count)|(sum|min|max)\(([^()]*)\)")
_DECIMAL = re.compile(rb"-?[0-9]+(\.[0-9]+)?")


class Term(NamedTuple):
    """One aggregate; `name` is its member in a group."""

    function: str
    steps: tuple[str, ...]
    text: str
    name: str


class Selection:
    """What `$select` and `$group` ask for."""

    def __init__(self, select: str, group: str = "") -> None:
        self.text = f"{select}|{group}"
        self.group = parse_pointer(group, "$group") if group else ()
        found: list[tuple[str, tuple[str, ...], str]] = []
        for part in _split(select):
            match = _TERM.fullmatch(part)
            if match is None or len(found) >= TERMS_MAX:
                raise ViewError(
                    f"$select has {part[:80]!r}: write up to {TERMS_MAX} of count, sum(POINTER), min(POINTER) "
                    "and max(POINTER), separated by commas",
                    code="invalid-select",
                )
            if match[1]:
                found.append(("count", (), part))
            else:
                found.append((match[2], parse_pointer(match[3], match[2]), part))
        functions = [function for function, _, _ in found]
        self.terms = tuple(
            Term(f, steps, text, f if functions.count(f) == 1 else text) for f, steps, text in found
        )


def _split(select: str) -> list[str]:
    """Split at the commas between terms: a pointer may contain commas."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", select)]


class _Extremes:
    """A counted multiset with its smallest and largest value."""

    __slots__ = ("_counts", "_high", "_low")

    def __init__(self) -> None:
        self._counts: dict[Fraction, int] = {}
        self._low: list[Fraction] = []
        self._high: list[Fraction] = []

    def add(self, value: Fraction) -> None:
        count = self._counts.get(value, 0)
        self._counts[value] = count + 1
        if not count:
            heapq.heappush(self._low, value)
            heapq.heappush(self._high, -value)

    def remove(self, value: Fraction) -> None:
        count = self._counts[value] - 1
        if count:
            self._counts[value] = count
            return
        del self._counts[value]
        if len(self._low) > 2 * len(self._counts) + 64:
            self._low = sorted(self._counts)
            self._high = [-v for v in reversed(self._low)]

    def low(self) -> Fraction | None:
        while self._low and self._low[0] not in self._counts:
            heapq.heappop(self._low)
        return self._low[0] if self._low else None

    def high(self) -> Fraction | None:
        while self._high and -self._high[0] not in self._counts:
            heapq.heappop(self._high)
        return -self._high[0] if self._high else None


class _Group:
    __slots__ = ("count", "extremes", "numbers", "sums")

    def __init__(self, terms: int) -> None:
        self.count = 0
        self.sums = [Fraction(0)] * terms
        self.numbers = [0] * terms  # rows that have a number there
        self.extremes: dict[int, _Extremes] = {}


Values = tuple[bytes, tuple[Fraction | None, ...]]


class AggregateFold:
    """The groups of one view; a sink of its frames."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._rows: dict[str, Values] = {}
        self._groups: dict[bytes, _Group] = {}
        self._changed: dict[bytes, None] = {}
        self.not_numbers: dict[str, int] = {}  # term -> rows with something else there

    def fold(self, frames: Sequence[ViewFrame]) -> None:
        """Take the frames of a view."""
        for frame in frames:
            if frame.name == SNAPSHOT:
                self._changed.update(dict.fromkeys(self._groups))
                self._rows.clear()
                self._groups.clear()
            elif frame.name in {ROW, ENTER, UPDATE}:
                assert frame.event is not None
                self._remove(frame.key)
                self._add_row(frame.key, frame.event)
            elif frame.name == LEAVE:
                self._remove(frame.key)

    @property
    def changed(self) -> bool:
        return bool(self._changed)

    def take_changes(self) -> dict[str, Any]:
        """Return the groups that changed since the last call, and those that are empty now."""
        changed, self._changed = self._changed, {}
        return {
            "groups": [self._describe(raw) for raw in changed if raw in self._groups],
            "gone": [msgspec.Raw(raw) for raw in changed if raw not in self._groups],
        }

    def all_groups(self) -> dict[str, Any]:
        """Return every group."""
        self._changed = {}
        return {"groups": [self._describe(raw) for raw in self._groups], "gone": []}

    def check_numbers(self) -> None:
        """
        Refuse an aggregate over something that is never a number.

        Raises:
            ViewError: aggregate-not-a-number.
        """
        for at, term in enumerate(self._selection.terms):
            wrong = self.not_numbers.get(term.text, 0)
            if wrong and not any(group.numbers[at] for group in self._groups.values()):
                raise ViewError(
                    f"{term.text} needs numbers: {wrong} rows have something else at that pointer and none has "
                    "a number; name a pointer to numbers, or use count",
                    code="aggregate-not-a-number",
                )

    def _add_row(self, key: str, event: bytes) -> None:
        group = raw_at(event, self._selection.group) if self._selection.group else None
        if group is None or group[:1] in b"{[":
            group = b"null"
        values = tuple(self._number_at(term, event) for term in self._selection.terms)
        self._rows[key] = (group, values)
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = _Group(len(self._selection.terms))
        found.count += 1
        for at, value in enumerate(values):
            if value is not None:
                found.numbers[at] += 1
                found.sums[at] += value
                if self._selection.terms[at].function in {"min", "max"}:
                    found.extremes.setdefault(at, _Extremes()).add(value)
        self._changed[group] = None

    def _remove(self, key: str) -> None:
        row = self._rows.pop(key, None)
        if row is None:
            return
        group, values = row
        found = self._groups[group]
        found.count -= 1
        self._changed[group] = None
        if not found.count:
            del self._groups[group]
            return
        for at, value in enumerate(values):
            if value is not None:
                found.numbers[at] -= 1
                found.sums[at] -= value
                if at in found.extremes:
                    found.extremes[at].remove(value)

    def _number_at(self, term: Term, event: bytes) -> Fraction | None:
        if not term.steps:
            return None
        raw = raw_at(event, term.steps)
        if raw is None or raw == b"null":
            return None
        value = exact_number(raw)
        if value is None:
            self.not_numbers[term.text] = self.not_numbers.get(term.text, 0) + 1
        return value

    def _describe(self, raw: bytes) -> dict[str, Any]:
        group = self._groups[raw]
        shown: dict[str, Any] = {"group": msgspec.Raw(raw)}
        for at, term in enumerate(self._selection.terms):
            value: Fraction | int | None
            if term.function == "count":
                value = group.count
            elif term.function == "sum":
                value = group.sums[at]
            else:
                extremes = group.extremes.get(at)
                value = None
                if extremes is not None:
                    value = extremes.low() if term.function == "min" else extremes.high()
            shown[term.name] = _json_number(value)
        return shown


def exact_number(raw: bytes) -> Fraction | None:
    """Return a JSON number as a fraction; None for anything else, and for numbers beyond a double."""
    if raw[:1] not in b"-0123456789" or not raw:
        return None
    if len(raw) <= NUMBER_CHARS_MAX and _DECIMAL.fullmatch(raw):
        return Fraction(raw.decode())
    try:
        return Fraction(float(raw))
    except (ValueError, OverflowError):
        return None


def _json_number(value: Fraction | int | None) -> Any:
    if value is None or isinstance(value, int):
        return value
    if value.denominator == 1 and abs(value.numerator) < 2**53:
        return value.numerator
    try:
        return float(value)
    except OverflowError:
        return None
