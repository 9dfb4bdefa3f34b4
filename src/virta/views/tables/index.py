"""
The views of one table: which of them an event satisfies, and what that changes.

Views stand in an index of their own, beside that of plain subscriptions; the matcher is the hub's. A view has one
filter, or two that see different things (a row filter over the event and Koncorde's own over the document): then both
have to hold. Equal filters share one entry.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

from virta.event.document import decode_head
from virta.event.row_changes import ROOT_AUTO
from virta.hub.event_matcher import EVENT, EventMatcher
from virta.views.frames import ViewFrame
from virta.views.tables.member_sets import MemberSets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virta.event.row_changes import RowChange
    from virta.filters import Filter
    from virta.views.tables.ring import Members
    from virta.views.view import View

    Intern = Callable[[Members], Members]

NO_VIEWS: Final[frozenset[int]] = frozenset()
ENTER, UPDATE, LEAVE, TRUNCATED = "enter", "update", "leave", "truncated"


class _Part:
    """The filters of one root that see the same; equal ones share one entry."""

    def __init__(self, sees: str, intern: Intern) -> None:
        self._sees = sees
        self._intern = intern
        self._matcher = EventMatcher(sees)
        self._users: dict[str, set[int]] = {}  # id of the filter -> numbers of views
        self._known = MemberSets()  # numbers of views by numbers of the matcher

    def add(self, filter_: Filter, number: int) -> None:
        self._users.setdefault(self._matcher.add(filter_), set()).add(number)
        self._known.clear()

    def remove(self, filter_: Filter, number: int) -> None:
        users = self._users[filter_.id]
        self._matcher.remove(filter_.id)
        users.discard(number)
        if not users:
            del self._users[filter_.id]
        self._known.clear()

    def match(self, events: Sequence[bytes], rows: Sequence[bytes], root: str) -> list[Members]:
        """Return the numbers of the views that events satisfy; `rows` is what filters see of them."""
        if not self._users or not events:
            return [NO_VIEWS] * len(events)
        values = rows if root == ROOT_AUTO else events
        ids = [] if self._sees == EVENT else [event_id(event) for event in events]
        numbers, ends = self._matcher.match_numbers(values, ids)
        if not numbers:
            return [NO_VIEWS] * len(events)
        found: list[Members] = self._known.find(numbers, ends, NO_VIEWS, self._members)
        return found

    def _members(self, numbers: int | tuple[int, ...]) -> Members:
        users = [self._users[id_] for id_ in self._matcher.ids_of(numbers)]
        return self._intern(frozenset().union(*users))


class ViewFilters:
    """The filters of some views, by their root and what they see."""

    def __init__(self, intern: Intern = frozenset) -> None:
        """
        Make an empty set of filters.

        Args:
            intern: returns the one copy of a set of views, so that equal results are the same object.
        """
        self._intern = intern
        self._parts: dict[tuple[str, str], _Part] = {}
        self._everything: frozenset[int] = NO_VIEWS
        self._double: set[int] = set()  # views with two filters

    def add(self, view: View) -> None:
        if not view.parts:
            self._everything |= {view.number}
        if len(view.parts) > 1:
            self._double.add(view.number)
        for sees, filter_ in view.parts:
            place = (view.root, sees)
            if place not in self._parts:
                self._parts[place] = _Part(sees, self._intern)
            self._parts[place].add(filter_, view.number)

    def remove(self, view: View) -> None:
        self._everything -= {view.number}
        self._double.discard(view.number)
        for sees, filter_ in view.parts:
            self._parts[view.root, sees].remove(filter_, view.number)

    def match(self, events: Sequence[bytes], rows: Sequence[bytes]) -> list[Members]:
        """Return the numbers of the views that events satisfy; `rows` is what filters see of them."""
        # A thread matches with filters of its own, so none is removed meanwhile.
        found = [part.match(events, rows, root) for (root, _), part in self._parts.items()]
        if not self._everything and len(found) == 1:
            return found[0]
        everything = self._everything
        return [self._union(everything, sets) for sets in zip(*found, strict=True)] or (
            [everything] * len(events)
        )

    def _union(self, everything: Members, sets: tuple[Members, ...]) -> Members:
        """Unite what the parts found; a view with two filters counts only if both hold."""
        members = everything.union(*sets)
        half = {n for n in self._double & members if sum(n in one for one in sets) < 2}
        return members - half if half else members


class ViewIndex:
    """The standing views of a table."""

    def __init__(self, intern: Intern) -> None:
        self.views: dict[int, View] = {}
        self._filters = ViewFilters(intern)
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
        events = [change.event for change in changes]
        return self._filters.match(events, [change.row for change in changes])

    def update(
        self, number: int, now: Members, offset: int, change: RowChange, touched: dict[View, None]
    ) -> None:
        """Add a hit to every view of a row that stays in all of them, if the view has consumers."""
        views = self.views
        for one in now:
            view = views[one]
            if view.consumers:
                view.hit(UPDATE, number, offset, change)
                touched[view] = None

    def compare(
        self,
        number: int,
        before: Members,
        now: Members,
        offset: int,
        change: RowChange,
        touched: dict[View, None],
    ) -> None:
        """Add a hit to every view that had the row or has it now, if the view has consumers."""
        views = self.views
        self.update(number, now & before, offset, change, touched)
        for one in now - before:
            view = views[one]
            view.joined(number)
            if view.consumers:
                view.hit(ENTER, number, offset, change)
                touched[view] = None
        for one in before - now:
            if one in views:
                view = views[one]
                view.count -= 1
                if view.consumers:
                    view.hit(LEAVE, number, offset, change)
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
        """Add a leave to every view that had a row."""
        for one in before:
            view = self.views.get(one)
            if view is not None:
                view.count -= 1
                if view.consumers:
                    view.hits.append(
                        ViewFrame(LEAVE, offset + 1, key, offset, None, reason, None, number)
                    )
                    touched[view] = None

    def truncate(self, offset: int, touched: dict[View, None]) -> None:
        """Empty every view: all rows are removed."""
        for view in self.views.values():
            view.emptied()
            view.truncated = True
            view.hits.append(ViewFrame(TRUNCATED, offset=offset))
            touched[view] = None


def event_id(event: bytes) -> str:
    """Return the id of an event."""
    return str(decode_head(event).id)
