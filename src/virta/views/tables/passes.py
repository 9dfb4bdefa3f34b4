"""
Passes over rows: which rows a new view has, and what a resuming consumer had.

A pass is a list of pieces. `Piece.match` reads values and matches them; it blocks and may run in a thread, since it
touches nothing but its own piece. `finish` puts the findings into the table, in the thread of the table. A finding
counts only if the row still has the offset that was matched: a row that changed meanwhile was matched by the live
step, because the view is in the index from the beginning.

Resuming from P needs, for every key touched since P, whether it was in the result at P and after each touch since.
The ring knows that for a view that has stood since P. For any other one the rows before each touch are read again and
matched (`HistoryPass`); if one of them is no longer in the log, the consumer gets a `reset`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from virta.views.tables.changes import ROOT_AUTO, row_of
from virta.views.tables.index import ViewFilters
from virta.views.tables.values import read_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from virta.log import Log
    from virta.views.tables.table import RowTable
    from virta.views.view import View

PIECE_ROWS: Final = 4096


class Piece:
    """Rows that are read and matched together."""

    __slots__ = ("_filters", "_known", "_with_rows", "found", "lost", "rows")

    def __init__(
        self,
        rows: list[tuple[int, int]],
        known: dict[int, bytes],
        filters: ViewFilters,
        *,
        with_rows: bool,
    ) -> None:
        self.rows = rows  # (offset, number)
        self._known = known
        self._filters = filters
        self._with_rows = with_rows
        self.found: list[frozenset[int]] = []  # of views, for each row
        self.lost: set[int] = set()  # offsets that are not in the log

    def match(self, read: Callable[[list[int]], dict[int, bytes]]) -> None:
        """Read and match the rows; blocks."""
        missing = [offset for offset, _ in self.rows if offset not in self._known]
        values = self._known | read(missing) if missing else self._known
        present = [row for row in self.rows if row[0] in values]
        self.lost = {offset for offset, _ in self.rows if offset not in values}
        self.rows = present
        events = [values[offset] for offset, _ in present]
        pairs = [(event, row_of(event) if self._with_rows else event) for event in events]
        self.found = self._filters.match(pairs)


class _Pass:
    def __init__(self, table: RowTable, views: Sequence[View]) -> None:
        self.table = table
        self.views = list(views)
        self._filters = ViewFilters()
        for view in views:
            self._filters.add(view)
        self._with_rows = any(view.root == ROOT_AUTO for view in views)

    def _pieces(self, rows: list[tuple[int, int]]) -> Iterator[Piece]:
        cached = self.table.values.get
        for start in range(0, len(rows), PIECE_ROWS):
            part = rows[start : start + PIECE_ROWS]
            known = {o: value for o, _ in part if (value := cached(o)) is not None}
            yield Piece(part, known, self._filters, with_rows=self._with_rows)


class MembershipPass(_Pass):
    """Finds the rows of new views, which are in the index already."""

    def __init__(self, table: RowTable, views: Sequence[View]) -> None:
        super().__init__(table, views)
        self._by_number = {view.number: view for view in views}
        self._offsets = table.offsets[:]
        self._rows: list[tuple[int, int]] | None = None

    def prepare(self) -> None:
        """Put the rows into offset order; may run in a thread, since it takes a second for some million rows."""
        self._rows = sorted((o, number) for number, o in enumerate(self._offsets) if o >= 0)

    def pieces(self) -> Iterator[Piece]:
        if self._rows is None:
            self.prepare()
        return self._pieces(self._rows or [])

    def finish(self, piece: Piece) -> None:
        """Put the findings of a piece into the table."""
        table = self.table
        for (offset, number), found in zip(piece.rows, piece.found, strict=True):
            if number >= len(table.offsets) or table.offsets[number] != offset:
                continue
            for one in found:
                table.add_member(number, self._by_number[one])

    def end(self) -> None:
        """The memberships of the views are right from here on."""
        for view in self.views:
            view.exact_since = self.table.position


class HistoryPass(_Pass):
    """Finds whether rows that were replaced since some positions were in views."""

    def __init__(self, table: RowTable, views: Sequence[View], position: int) -> None:
        super().__init__(table, views)
        self._previous = {
            touch.previous for touch in table.ring.since(position) if touch.previous >= 0
        }
        self._hits: dict[int, set[int]] = {view.number: set() for view in views}
        self.lost: set[int] = set()

    def pieces(self) -> Iterator[Piece]:
        return self._pieces([(offset, -1) for offset in sorted(self._previous)])

    def finish(self, piece: Piece) -> None:
        self.lost |= piece.lost
        for (offset, _), found in zip(piece.rows, piece.found, strict=True):
            for one in found:
                self._hits[one].add(offset)

    def had(self, view: View, offset: int) -> bool | None:
        """Return whether a replaced row was in a view; None if that is not known."""
        if offset in self.lost or offset not in self._previous:
            return None
        return offset in self._hits[view.number]


def touched_since(
    view: View, position: int, history: HistoryPass | None = None
) -> dict[str, bool] | None:
    """
    Return the keys that a consumer at `position` has to get: key -> whether it was in the result then.

    These are the keys that were in the result at the position or after any touch since. Returns None if that is
    not known exactly.
    """
    table, mine = view.table, view.number
    if position < table.exact_from or view.exact_since is None:
        return None
    was: dict[int, bool] = {}
    ever: set[int] = set()
    for touch in table.ring.since(position):
        if touch.offset >= view.exact_since:
            had = mine in touch.before
        elif touch.previous < 0:
            had = False
        else:
            known = None if history is None else history.had(view, touch.previous)
            if known is None:
                return None
            had = known
        was.setdefault(touch.number, had)
        if had or mine in table.members[touch.number]:
            ever.add(touch.number)
    keys: dict[str, bool] = {}
    for number, had in was.items():
        if number in ever:
            key = table.keys[number]
            assert key is not None
            keys[key] = had
    return keys


def needs_history(view: View, position: int) -> bool:
    """Return whether the ring alone does not know what a consumer at `position` had."""
    return view.exact_since is None or position < view.exact_since


def reader_of(log: Log, channel: str) -> Callable[[list[int]], dict[int, bytes]]:
    """Return a function that reads events of a channel by offset."""
    return lambda offsets: read_values(log, channel, offsets)
