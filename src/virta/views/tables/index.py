"""
The views of one table: which of them an event satisfies, and what that changes.

Views stand in an index of their own, beside that of plain subscriptions; the matcher is the hub's. A view has one
filter, or two that see different things (a row filter over the event and Koncorde's own over the document): then both
have to hold. Equal filters share one entry.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from virta.event.document import decode_head
from virta.hub.event_matcher import EventMatcher
from virta.views.tables.changes import ROOT_AUTO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.views.tables.changes import RowChange
    from virta.views.tables.ring import Members
    from virta.views.view import View

ENTER, UPDATE, LEAVE, TRUNCATED = "enter", "update", "leave", "truncated"


class Hit(NamedTuple):
    """What one record does to one view."""

    kind: str
    key: str
    number: int  # of the row
    offset: int
    change: RowChange | None = None
    reason: str = ""


class MatchedEvent(NamedTuple):
    """What the matcher reads."""

    id: str
    value: bytes


class ViewFilters:
    """Matchers over the filters of some views, by what they see."""

    def __init__(self) -> None:
        self._matchers: dict[tuple[str, str], EventMatcher] = {}
        # (what it sees, id of the filter) -> numbers of views
        self._users: dict[tuple[str, str], dict[str, set[int]]] = {}
        self._everything: set[int] = set()
        self._double: set[int] = set()  # views with two filters

    def add(self, view: View) -> None:
        if not view.parts:
            self._everything.add(view.number)
        if len(view.parts) > 1:
            self._double.add(view.number)
        for root, filter_ in view.parts:
            place = (view.root, root)
            if place not in self._matchers:
                self._matchers[place] = EventMatcher(root)
                self._users[place] = {}
            id_ = self._matchers[place].add(filter_)
            self._users[place].setdefault(id_, set()).add(view.number)

    def remove(self, view: View) -> None:
        self._everything.discard(view.number)
        self._double.discard(view.number)
        for root, filter_ in view.parts:
            place = (view.root, root)
            users = self._users[place]
            self._matchers[place].remove(filter_.id)
            users[filter_.id].discard(view.number)
            if not users[filter_.id]:
                del users[filter_.id]

    def match(self, rows: Sequence[tuple[bytes, bytes]]) -> list[frozenset[int]]:
        """Return the numbers of the views that (event, row) pairs satisfy."""
        found: list[list[int]] = [list(self._everything) for _ in rows]
        for (root, sees), matcher in self._matchers.items():
            users = self._users[root, sees]
            if not users or not rows:
                continue
            which = 1 if root == ROOT_AUTO else 0
            events = [MatchedEvent(event_id(pair[0], sees), pair[which]) for pair in rows]
            for at, ids in enumerate(matcher.match(events)):
                for id_ in ids:
                    # A thread matches with a set of its own, so no filter is removed meanwhile.
                    found[at] += users[id_]
        if not self._double:
            return [frozenset(numbers) for numbers in found]
        return [self._both(numbers) for numbers in found]

    def _both(self, numbers: list[int]) -> frozenset[int]:
        """Keep a view with two filters only if both hold."""
        return frozenset(n for n in numbers if n not in self._double or numbers.count(n) == 2)


class ViewIndex:
    """The standing views of a table."""

    def __init__(self) -> None:
        self.views: dict[int, View] = {}
        self._filters = ViewFilters()
        self._numbers = count(1)

    def new_number(self) -> int:
        """Return a number for a view; it is never used again."""
        return next(self._numbers)

    def add(self, view: View) -> None:
        self._filters.add(view)
        self.views[view.number] = view

    def remove(self, view: View) -> None:
        del self.views[view.number]
        self._filters.remove(view)

    def match(self, changes: Sequence[RowChange]) -> list[frozenset[int]]:
        """Return the views that each event satisfies, as numbers."""
        return self._filters.match([(change.event, change.row) for change in changes])

    def compare(
        self,
        number: int,
        before: Members,
        now: Members,
        offset: int,
        change: RowChange,
        touched: dict[View, None],
    ) -> None:
        """Give every view that had the row or has it now its hit."""
        views = self.views
        key = change.key
        assert key is not None
        for one in now:
            view = views[one]
            if one in before:
                view.hits.append(Hit(UPDATE, key, number, offset, change))
            else:
                view.joined(number)
                view.hits.append(Hit(ENTER, key, number, offset, change))
            touched[view] = None
        if before is now:
            return
        for one in before:
            if one not in now and one in views:
                view = views[one]
                view.count -= 1
                view.hits.append(Hit(LEAVE, key, number, offset, change, "changed"))
                touched[view] = None

    def leave(
        self,
        number: int,
        before: Members,
        key: str,
        offset: int,
        reason: str,
        touched: dict[View, None],
    ) -> None:
        """Give every view that had a row a leave."""
        for one in before:
            view = self.views.get(one)
            if view is not None:
                view.count -= 1
                view.hits.append(Hit(LEAVE, key, number, offset, None, reason))
                touched[view] = None

    def truncate(self, offset: int, touched: dict[View, None]) -> None:
        """Tell every view that all rows are removed."""
        for view in self.views.values():
            view.emptied()
            view.hits.append(Hit(TRUNCATED, "", -1, offset))
            touched[view] = None


def event_id(event: bytes, sees: str) -> str:
    """Return the id of an event, which only documents contain."""
    return "" if sees == "event" else str(decode_head(event).id)
