"""
The views of an event, by the numbers of the filters that it satisfies.

Most events satisfy the same few sets of filters again and again: the views of a set are asked for once, and remembered
until a filter is added or removed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from virta import native

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.views.tables.ring import Members

    # One number, or several.
    MembersOf = Callable[[int | tuple[int, ...]], Members]

_native = native.load("virta.views._native")

# Different sets of filters that are remembered with their views.
KNOWN_SETS_MAX: Final = 65_536


class PlainMemberSets:
    """A dictionary from a filter's number, or a tuple of them, to the views."""

    def __init__(self) -> None:
        self._known: dict[int | tuple[int, ...], Members] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def find(
        self,
        numbers: memoryview[int],
        ends: memoryview[int],
        no_views: Members,
        members_of: MembersOf,
    ) -> list[Members]:
        """
        Return the views of each event; event i satisfies the filters numbers[ends[i]:ends[i+1]].

        Args:
            no_views: the views of an event that satisfies no filter.
            members_of: returns the views of the filters with these numbers.
        """
        flat, places = numbers.tolist(), ends.tolist()
        found = []
        for start, end in pairwise(places):
            if start == end:
                found.append(no_views)
                continue
            key = flat[start] if end - start == 1 else tuple(flat[start:end])
            members = self._known.get(key)
            if members is None:
                members = members_of(key)
                if len(self._known) >= KNOWN_SETS_MAX:
                    self._known.clear()
                self._known[key] = members
            found.append(members)
        return found


MemberSets: Final[Any] = PlainMemberSets if _native is None else _native.MemberSets
