"""
Passes over rows: which rows a new view has, and what resuming consumers had.

A pass is a list of pieces. `Piece.match` reads values and matches them; it blocks and may run in a thread, since it
touches nothing but its own piece. `finish` puts the findings into the table, in the thread of the table. A finding
counts only if the row still has the offset that was matched: a row that changed meanwhile was matched by the live
step, because the view is in the index from the beginning.

Resuming from P needs, for every key touched since P, whether it was in the result at P and after each touch since.
The ring knows that for a view that has stood since P. For any other one the rows before each touch are read again and
matched; if one of them is no longer in the log, the consumer gets a `reset`. A `ResumePass` reads the ring once for
all consumers that resume together: the work is that of the touches, not of touches times consumers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import chain
from typing import TYPE_CHECKING, Final

from virta.event.row_changes import ROOT_AUTO, row_of
from virta.views.tables.index import ViewFilters
from virta.views.tables.values import read_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from virta.log import Log
    from virta.views.tables.ring import Touch, TouchCopy
    from virta.views.tables.table import RowTable
    from virta.views.view import View

    ReadValues = Callable[[list[int]], dict[int, bytes]]

PIECE_ROWS: Final = 2048
# Memberships that are added in one step: about a millisecond.
STEP_MEMBERS: Final = 1024


class Piece:
    """Rows that are read and matched together."""

    __slots__ = ("_filters", "_known", "_with_rows", "found", "lost", "rows", "values")

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
        self.values: dict[int, bytes] = {}  # what was read
        self.lost: set[int] = set()  # offsets that are not in the log

    def match(self, read: ReadValues) -> None:
        """Read and match the rows; blocks."""
        known = self._known
        missing = [offset for offset, _ in self.rows if offset not in known]
        read_now = self.values = read(missing) if missing else {}
        rows: list[tuple[int, int]] = []
        events: list[bytes] = []
        for row in self.rows:
            event = known.get(row[0]) or read_now.get(row[0])
            if event is None:
                self.lost.add(row[0])
            else:
                rows.append(row)
                events.append(event)
        self.rows = rows
        seen = [row_of(event) for event in events] if self._with_rows else events
        self.found = self._filters.match(events, seen)


class _Pass:
    def __init__(self, table: RowTable, views: Iterable[View]) -> None:
        self.table = table
        self.views: dict[int, View] = {}
        self._filters = ViewFilters()
        self._with_rows = False
        self._add_views(views)

    def _add_views(self, views: Iterable[View]) -> None:
        for view in views:
            self.views[view.number] = view
            self._filters.add(view)
            self._with_rows = self._with_rows or view.root == ROOT_AUTO

    def _cut_pieces(self, rows: Sequence[tuple[int, int]]) -> Iterator[Piece]:
        """Yield pieces of rows, (offset, number); a number is that of the row which has the offset now, or -1."""
        value_of = self.table.values.get
        for start in range(0, len(rows), PIECE_ROWS):
            part = list(rows[start : start + PIECE_ROWS])
            known = {
                offset: value
                for offset, number in part
                if number >= 0 and (value := value_of(number)) is not None
            }
            yield Piece(part, known, self._filters, with_rows=self._with_rows)


class MembershipPass(_Pass):
    """
    Finds the rows of new views, which are in the index already.

    Views that are opened while a pass runs may join it, and need only `rest` afterwards: thousands that come within
    some seconds cost little more than one pass.
    """

    def __init__(self, table: RowTable, views: Iterable[View]) -> None:
        super().__init__(table, views)
        self._offsets = table.offsets[:]
        self._first, self._end = table.first_offset, table.position
        # Numbers of rows by ranges of offsets; the last part has those without a row, which may get one.
        self._parts: list[array[int]] = []
        self._at = -1  # the part that is read
        self._late: list[View] = []
        self._missed = 0  # parts that were read, wholly or partly, before the last view joined

    def prepare(self) -> None:
        """
        Divide the rows by ranges of offsets; may run in a thread.

        Each range is sorted when its piece is made: to sort some million rows in one call would stop every other
        thread for a second.
        """
        if self._parts:
            return
        offsets, first = self._offsets, self._first
        count = len(offsets) // PIECE_ROWS + 1
        width = max(0, self._end - first) // count + 1
        self._parts = [array("I") for _ in range(count + 1)]
        append = [part.append for part in self._parts]
        for number, offset in enumerate(offsets):
            append[(offset - first) // width if first <= offset else -1](number)

    def pieces(self) -> Iterator[Piece]:
        """Yield the rows; each as it is when its piece is made."""
        self.prepare()
        planned = len(self._offsets)
        for at, part in enumerate(self._parts):
            self._at = at
            numbers: Iterable[int] = part
            if at == len(self._parts) - 1:  # and rows that are new since the pass was planned
                numbers = chain(part, range(planned, len(self.table.offsets)))
            row_at = self.table.row_at
            rows = [(offset, number) for number in numbers if (offset := row_at(number)) >= 0]
            rows.sort()
            yield from self._cut_pieces(rows)

    def join(self, views: Sequence[View]) -> None:
        """Let more views take part from the next piece on; no piece may be matched meanwhile."""
        self._add_views(views)
        self._late += views
        self._missed = self._at + 1

    def rest(self) -> MembershipPass | None:
        """Return the pass over what views that joined have missed; None if none joined."""
        if not self._late:
            return None
        rest = MembershipPass(self.table, self._late)
        rest._parts = [*self._parts[: self._missed], array("I")]
        rest._offsets = self._offsets  # rows that are new since then belong to its last part, too
        return rest

    def finish(self, piece: Piece) -> None:
        """Put the findings of a piece into the table."""
        for _ in self.steps(piece):
            pass

    def steps(self, piece: Piece) -> Iterator[None]:
        """Do the same in steps, between which the table may change."""
        table, added = self.table, 0
        numbers: list[int] = []
        values: list[bytes] = []
        for (offset, number), found in zip(piece.rows, piece.found, strict=True):
            if not found or number >= len(table.offsets) or table.offsets[number] != offset:
                continue
            table.add_members(number, found, self.views)
            if offset in piece.values:
                numbers.append(number)
                values.append(piece.values[offset])
            added += len(found)
            if added >= STEP_MEMBERS:
                # The consumers that opened the views ask for their rows next.
                table.values.offer_all(numbers, values)
                numbers, values, added = [], [], 0
                yield
        table.values.offer_all(numbers, values)

    def end(self) -> None:
        """The memberships of the views that took part from the beginning are right from here on."""
        late = set(self._late)
        for view in self.views.values():
            if view not in late:
                view.exact_since = self.table.position


class ResumePass(_Pass):
    """Finds what consumers had that resume from some positions."""

    def __init__(self, table: RowTable, resumes: Iterable[tuple[View, int]]) -> None:
        resumes = list(resumes)
        super().__init__(table, [view for view, _ in resumes])
        self._start = min(position for _, position in resumes)
        self._end = table.position  # touches below it are copied
        self._touches: Sequence[Touch] | TouchCopy = table.ring.copy(self._start)
        self._exact = {v: view.exact_since or 0 for v, view in self.views.items()}
        self._interest = frozenset(self.views)
        # Touches below this one may be of a time before a view: then the row before it is matched again.
        self._history_below = max(self._exact.values())
        self._found: dict[int, frozenset[int]] = {}  # offset of a replaced row -> views that had it
        self._lost: list[int] = []  # touches whose row before is no longer in the log
        self._last = array("q")  # row number -> offset of its last touch, or -1
        # View -> (row, offset of a touch before which the view had the row, offset of the touch before that or -1)
        self._had: dict[int, list[tuple[int, int, int]]] = {v: [] for v in self.views}

    def __len__(self) -> int:
        """How many touches were copied."""
        return len(self._touches)

    def run(self, read: ReadValues) -> None:
        """Read and match replaced rows, and collect the touches; blocks, and may run in a thread."""
        previous = {
            touch.previous
            for touch in self._touches
            if touch.previous >= 0 and touch.offset < self._history_below
        }
        for piece in self._cut_pieces([(offset, -1) for offset in sorted(previous)]):
            piece.match(read)
            for (offset, _), found in zip(piece.rows, piece.found, strict=True):
                self._found[offset] = found
        self._collect(self._touches)
        self._touches = ()

    def touched(self, view: View, position: int) -> dict[str, bool] | None:
        """
        Return the keys that a consumer at `position` has to get: key -> whether it was in the result then.

        These are the keys that were in the result at the position or after any touch since. Returns None if that is
        not known exactly. Called in the thread of the table, after `run`.
        """
        table, mine = self.table, view.number
        if position < table.exact_from or view.exact_since is None:
            return None
        lost = bisect_left(self._lost, position)
        if lost < len(self._lost) and self._lost[lost] < view.exact_since:
            return None
        if self._end < table.position:  # changes since this pass began
            self._collect(table.ring.since(self._end))
            self._end = table.position
        was: dict[int, bool] = {}
        for number, offset, before in self._had[mine]:
            if offset >= position:
                was[number] = was.get(number, False) or before < position
        for number in self._members_touched(view, position):
            was.setdefault(number, False)
        keys: dict[str, bool] = {}
        for number, had in was.items():
            key = table.keys[number]
            assert key is not None
            keys[key] = had
        return keys

    def _members_touched(self, view: View, position: int) -> Iterable[int]:
        """Return the rows that are in the view now and were touched since a position."""
        last, members, mine = self._last, self.table.members, view.number
        if view.count < len(last):
            return [n for n in view.row_numbers() if n < len(last) and last[n] >= position]
        return [n for n, offset in enumerate(last) if offset >= position and mine in members[n]]

    def _collect(self, touches: Iterable[Touch]) -> None:
        """Note the views that had each row before it was touched."""
        last, exact, interest = self._last, self._exact, self._interest
        for offset, number, previous, views in touches:
            if number >= len(last):
                last.extend([-1] * (number + 1 - len(last)))
            before, last[number] = last[number], offset
            for one in interest & views:
                if exact[one] <= offset:
                    self._had[one].append((number, offset, before))
            if previous >= 0 and offset < self._history_below:
                found = self._found.get(previous)
                if found is None:
                    self._lost.append(offset)
                    continue
                for one in found:
                    if exact[one] > offset:
                        self._had[one].append((number, offset, before))


def reader_of(log: Log, channel: str) -> ReadValues:
    """Return a function that reads events of a channel by offset."""
    return lambda offsets: read_values(log, channel, offsets)
