"""
A row table: the newest event of every key of one channel, and which views have each row.

    keys     number -> key, and back
    offsets  number -> offset of the row; ~offset of its deletion while the ring refers to it
    members  number -> V: the views that have the row, as an interned set

The table is a function of all records of its topic in log order. `apply` is one live step: it matches every event
once for all views and compares the hits M with V: enter = M - V, update = M & V, leave = V - M. `exact_from` is the
lowest position from which a consumer can resume exactly; it only grows. View numbers are never used again, so a
number of a view that was removed may stay in V; row numbers are used again when nothing refers to them.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from virta import native
from virta.errors import ViewError
from virta.event.row_changes import DELETE, NONE, SET, TRUNCATE, KeyRule, RowChange
from virta.views.frames import ViewFrame
from virta.views.limits import DEFAULT_LIMITS
from virta.views.tables.index import ViewIndex
from virta.views.tables.key_numbers import KeyNumbers
from virta.views.tables.ring import TouchRing
from virta.views.tables.values import ValueCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from virta.views.limits import ViewLimits
    from virta.views.tables.ring import Members
    from virta.views.view import View

_native = native.load("virta.views._native")

EMPTY: Final[frozenset[int]] = frozenset()
CHANGED, DELETED, EXPIRED = "changed", "deleted", "expired"
FREE: Final = -(1 << 62)  # the offset of a number without a key
# Interned sets that no row uses any more are dropped when there are this many, and twice as many as in use.
INTERNED_MIN: Final = 4096


class RowTable:
    """The rows of one channel under one key rule."""

    def __init__(
        self, channel: str, rule: KeyRule, *, position: int = 0, limits: ViewLimits = DEFAULT_LIMITS
    ) -> None:
        self.channel = channel
        self.rule = rule
        self.limits = limits
        self.position = position  # everything below is applied
        self.first_offset = 0  # of the log, as far as it was noticed
        self.exact_from = 0
        self.rows = 0
        self.keyed = 0  # records with a key
        self.unkeyed = 0
        self.keys: list[str | None] = []
        self.numbers = KeyNumbers(self.keys)
        self.offsets = array("q")
        self.members: list[Members] = []
        self.ring = TouchRing(limits.view_ring)
        self.values = ValueCache(limits.view_cache_bytes_max)
        self.index = ViewIndex(self.intern)
        self._free: list[int] = []
        self._interned: dict[Members, Members] = {EMPTY: EMPTY}
        self._intern_at = INTERNED_MIN

    # Reading.

    def row_offset(self, key: str) -> int:
        """Return the offset of a row; negative if there is none."""
        number = self.numbers.get(key)
        return -1 if number is None else self.offsets[number]

    def row_at(self, number: int) -> int:
        """Return the offset of the row with a number; negative if there is none."""
        return self.offsets[number] if 0 <= number < len(self.offsets) else -1

    def has(self, view: View, key: str) -> bool:
        """Return whether a view has the row of this key."""
        number = self.numbers.get(key)
        return (
            number is not None and self.offsets[number] >= 0 and view.number in self.members[number]
        )

    # The live step.

    def apply(self, changes: Sequence[tuple[int, RowChange]], position: int) -> list[View]:
        """
        Apply what records do, in log order; return the views with hits.

        Raises:
            ViewError: too-many-rows.
        """
        sets = [change for _, change in changes if change.kind == SET]
        found = self.index.match(sets) if self.index.views else [EMPTY] * len(sets)
        touched: dict[View, None] = {}
        if len(sets) == len(changes):
            self._set_all(changes, found, touched)
        else:
            self._apply_mixed(changes, found, touched)
        self.position = max(self.position, position)
        return list(touched)

    def _apply_mixed(
        self,
        changes: Sequence[tuple[int, RowChange]],
        found: list[Members],
        touched: dict[View, None],
    ) -> None:
        """Apply changes of every kind: neighbours that set rows together, the others one by one."""
        run: list[tuple[int, RowChange]] = []
        done = 0  # of `found`
        for offset, change in changes:
            if change.kind == SET:
                run.append((offset, change))
                continue
            self._set_all(run, found[done : done + len(run)], touched)
            done += len(run)
            run = []
            if change.kind == DELETE:
                self._delete(offset, change, touched)
            elif change.kind == TRUNCATE:
                self._truncate(offset, touched)
            else:
                assert change.kind == NONE
                self.unkeyed += 1
        self._set_all(run, found[done:], touched)

    def _set_all(
        self,
        changes: Sequence[tuple[int, RowChange]],
        found: list[Members],
        touched: dict[View, None],
    ) -> None:
        """Set rows; each gets the views in `found`. The ring and the values follow for all of them at once."""
        numbers, replaced, before = self.set_rows(changes, found, touched)
        self.keyed += len(numbers)
        self.values.put_all(numbers, [change.event for _, change in changes])
        self._touch([offset for offset, _ in changes], numbers, replaced, before)

    def set_rows_native(
        self,
        changes: Sequence[tuple[int, RowChange]],
        found: list[Members],
        touched: dict[View, None],
    ) -> tuple[list[int], list[int], list[Members]]:
        assert _native is not None
        made: tuple[list[int], list[int], list[Members]] = _native.set_rows(
            self, changes, found, touched, ViewFrame
        )
        return made

    def set_rows_plain(
        self,
        changes: Sequence[tuple[int, RowChange]],
        found: list[Members],
        touched: dict[View, None],
    ) -> tuple[list[int], list[int], list[Members]]:
        """Return each row's number, the offset of the row that it replaces or -1, and the views that had it."""
        find, offsets, members, index = self.numbers.get, self.offsets, self.members, self.index
        numbers: list[int] = []
        before: list[Members] = []
        replaced: list[int] = []
        for (offset, change), now in zip(changes, found, strict=True):
            key = change.key
            assert key is not None
            number = find(key)
            if number is None:
                number = self._new_number(key)
            previous, had = offsets[number], members[number]
            if previous < 0:
                previous = -1
                self.rows += 1
                self._check_rows()
            offsets[number] = offset
            numbers.append(number)
            replaced.append(previous)
            before.append(had)
            if now is had:
                if now:
                    index.update(number, now, offset, change, touched)
            else:
                members[number] = self.intern(now)
                index.compare(number, had, now, offset, change, touched)
        return numbers, replaced, before

    set_rows = set_rows_plain if _native is None else set_rows_native

    def _touch(
        self, offsets: list[int], numbers: list[int], replaced: list[int], before: list[Members]
    ) -> None:
        """Add touches to the ring; release the numbers that only those it drops refer to."""
        lost_offsets, lost_numbers = self.ring.extend(offsets, numbers, replaced, before)
        if not lost_offsets:
            return
        self.exact_from = max(self.exact_from, lost_offsets[-1] + 1)
        if len(self.numbers) > self.rows:  # some keys are deleted
            for offset, number in zip(lost_offsets, lost_numbers, strict=True):
                if self.offsets[number] == ~offset:
                    self._release(number)

    def _delete(self, offset: int, change: RowChange, touched: dict[View, None]) -> None:
        assert change.key is not None
        self.keyed += 1
        number = self.numbers.get(change.key)
        if number is None or self.offsets[number] < 0:
            return  # a delete of an absent row is nothing
        previous, before = self.offsets[number], self.members[number]
        self.rows -= 1
        self.values.drop(number)
        self.offsets[number] = ~offset
        self.members[number] = EMPTY
        self._touch([offset], [number], [previous], [before])
        self.index.leave(number, before, change.key, offset, DELETED, touched)

    def _truncate(self, offset: int, touched: dict[View, None]) -> None:
        self.rows = 0
        self.numbers.clear()
        self.keys.clear()
        self.members.clear()
        self.offsets = array("q")
        self._free.clear()
        self.values.clear()
        self.ring.clear()
        self.exact_from = max(self.exact_from, offset + 1)
        self.index.truncate(offset, touched)

    def expire(self, first_offset: int) -> list[View]:
        """Remove the rows below the log's first offset; return the views with hits."""
        if first_offset <= self.first_offset:
            return []
        self.first_offset = first_offset
        return self._lose(
            [n for n, offset in enumerate(self.offsets) if 0 <= offset < first_offset]
        )

    def lose(self, offsets: set[int]) -> list[View]:
        """Remove rows that are no longer in the log; return the views with hits."""
        return self._lose([n for n, offset in enumerate(self.offsets) if offset in offsets])

    def _lose(self, numbers: list[int]) -> list[View]:
        touched: dict[View, None] = {}
        for number in numbers:
            key, offset = self.keys[number], self.offsets[number]
            assert key is not None
            before = self.members[number]
            self.rows -= 1
            self.values.drop(number)
            self.offsets[number] = ~offset
            self.members[number] = EMPTY
            self.index.leave(number, before, key, self.position - 1, EXPIRED, touched)
        if numbers:
            # A consumer at this very position may still have the rows: only later positions are exact.
            self.forget(self.position + 1)
        return list(touched)

    def forget(self, exact_from: int) -> None:
        """Drop all touches: no position below `exact_from` can be resumed."""
        self.ring.clear()
        self.exact_from = max(self.exact_from, exact_from)
        for number, offset in enumerate(self.offsets):
            if FREE < offset < 0:
                self._release(number)

    # Numbers and sets.

    def restore(self, keys: list[str], offsets: array[int]) -> None:
        """Fill an empty table with the rows of a file."""
        assert not self.keys
        self.keys += keys
        self.offsets = offsets
        self.members = [EMPTY] * len(keys)
        for number, key in enumerate(keys):
            self.numbers[key] = number
        self.rows = sum(1 for offset in offsets if offset >= 0)
        self._check_rows()

    def _new_number(self, key: str) -> int:
        if self._free:
            number = self._free.pop()
            self.keys[number] = key
            self.offsets[number] = -1
        else:
            number = len(self.keys)
            self.keys.append(key)
            self.offsets.append(-1)
            self.members.append(EMPTY)
        self.numbers[key] = number
        return number

    def _release(self, number: int) -> None:
        key = self.keys[number]
        assert key is not None
        del self.numbers[key]
        self.keys[number] = None
        self.offsets[number] = FREE
        self.members[number] = EMPTY
        self._free.append(number)

    def _check_rows(self) -> None:
        if self.rows > self.limits.view_rows_max:
            raise ViewError(
                f"channel {self.channel!r} has more than {self.limits.view_rows_max} rows: "
                "raise view_rows_max, or publish to several channels",
                code="too-many-rows",
            )

    def intern(self, members: Members) -> Members:
        """Return the one copy of a set of views."""
        found = self._interned.get(members)
        if found is not None:
            return found
        if len(self._interned) >= self._intern_at:
            self._interned = {EMPTY: EMPTY}
            for used in self.members:
                self._interned[used] = used
            self.ring.intern(self._interned)
            self._intern_at = max(INTERNED_MIN, 2 * len(self._interned))
        self._interned[members] = members
        return members

    def add_members(self, number: int, found: Members, views: Mapping[int, View]) -> None:
        """Add views to a row, as a pass found them: by number, of `views`."""
        before = self.members[number]
        new = found - before if before else found
        if new:
            self.members[number] = self.intern(before | new if before else new)
            for one in new:
                views[one].joined(number)
