"""
Match events against filters: the one matcher of live delivery, replay and webhooks.

Filters of most dialects apply to the event, Koncorde's to the document made of its data (`virta.event.document`).
An event that the matcher cannot read satisfies no filter.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from virta.errors import EventError
from virta.event.document import DOCUMENT_DIALECT, document_of
from virta.filters import Filter
from virta.filters.tree import Everything, all_of
from virta.hub.event_batch import EventBatch
from virta.match import Matcher

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger("virta.hub")

# A set of filters by their numbers; a set of one is that number, which takes no object of its own.
FilterSet = int | tuple[int, ...]

EVENT, DOCUMENT = "event", "document"
NO_FILTER: tuple[int, ...] = ()
# Not JSON and not blank: satisfies no filter.
UNREADABLE = b"-"
# Matchers of single filters, for history: each takes 50 KiB, and 200 µs to make.
SINGLE_MATCHERS_MAX = 64


class Matchable(Protocol):
    """An event: its JSON on one line, and its id."""

    @property
    def id(self) -> str: ...
    @property
    def value(self) -> bytes: ...


def matches_everything(filter_: Filter) -> bool:
    """Return whether a filter holds for every event, so that it needs no matcher."""
    return isinstance(filter_.tree, Everything)


def root_of(filter_: Filter) -> str:
    """Return which object a filter applies to: EVENT or DOCUMENT."""
    if matches_everything(filter_):
        return EVENT
    return DOCUMENT if filter_.dialect == DOCUMENT_DIALECT else EVENT


def restrict(own: Filter, row_filter: Filter | None) -> tuple[Filter, Filter | None]:
    """
    Return a filter that holds for what satisfies both, and a second one to check after it, if any.

    Both become one tree, which the index matches. That is not possible if one applies to events and the other to
    documents: then the row filter is checked on what the first one matched.
    """
    if row_filter is None or matches_everything(row_filter):
        return own, None
    if matches_everything(own):
        return row_filter, None
    if root_of(own) != root_of(row_filter):
        return own, row_filter
    return Filter(all_of([row_filter.tree, own.tree]), dialect=own.dialect), None


def all_satisfy(row_filter: Filter, part: Sequence[Matchable] | EventBatch) -> bool:
    """Return whether every event satisfies a filter."""
    if matches_everything(row_filter):
        return True
    return single_matcher(row_filter, root_of(row_filter)).count(part) == len(part)


class EventMatcher:
    """An index over filters that apply to one root."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._matcher = Matcher()

    def add(self, filter_: Filter) -> str:
        """Add a filter and return its id."""
        added = self._matcher.add(filter_)
        # There may be very many: keep one copy of the text.
        return filter_.id if added == filter_.id else added

    def remove(self, id_: str) -> None:
        self._matcher.remove(id_)

    def match(self, events: Sequence[Matchable]) -> list[list[str]]:
        """Return the ids of the filters that hold for each event."""
        if self._root == DOCUMENT:
            values = [_document(event.value, event.id) for event in events]
        else:
            values = [event.value for event in events]
        if len(values) == 1:  # half the time of a buffer with one line
            return [self._match_one(values[0])]
        try:
            # One buffer with an event a line: no value contains a line end.
            return self._matcher.match_many(b"\n".join(values))
        except EventError:
            return [self._match_one(value) for value in values]

    def count(self, events: Sequence[Matchable] | EventBatch) -> int:
        """Return how many pairs of an event and a filter hold, without naming them."""
        if isinstance(events, EventBatch):
            if self._root == EVENT:  # as in `match_batch`: no event has to be decoded
                return len(self._matcher.match_many(events.lines, "uint32")[0])
            events = events.deliveries()
        if self._root == DOCUMENT or len(events) == 1:
            return sum(map(len, self.match(events)))
        values = [event.value for event in events]
        try:
            return len(self._matcher.match_many(b"\n".join(values), "uint32")[0])
        except EventError:
            return sum(len(self._match_one(value)) for value in values)

    def match_sets(self, values: Sequence[bytes], ids: Sequence[str] = ()) -> list[FilterSet]:
        """
        Return for each event what identifies the set of filters that hold, for `ids_of`.

        Equal results stand for equal sets as long as no filter is added or removed; equal sets may differ in order.

        Args:
            values: the JSON of each event, on one line.
            ids: the id of each event, which only documents contain.
        """
        if self._root == DOCUMENT:
            values = [_document(value, id_) for value, id_ in zip(values, ids, strict=True)]
        try:
            found, places = self._matcher.match_many(b"\n".join(values), "uint32")
        except EventError:
            return [self._set_of(self._match_one(value)) for value in values]
        if not found:
            return [NO_FILTER] * len(values)
        numbers, ends = found.tolist(), places.tolist()
        return [
            numbers[start] if end - start == 1 else tuple(numbers[start:end])
            for start, end in pairwise(ends)
        ]

    def ids_of(self, found: FilterSet) -> list[str]:
        """Return the ids of the filters of a set."""
        numbers = (found,) if isinstance(found, int) else found
        ids = [self._matcher.id_of(number) for number in numbers]
        return [id_ for id_ in ids if id_ is not None]

    def _set_of(self, ids: list[str]) -> FilterSet:
        numbers = [self._matcher.number_of(id_) or 0 for id_ in ids]
        return numbers[0] if len(numbers) == 1 else tuple(numbers)

    def match_batch(self, batch: EventBatch) -> list[tuple[int, str]]:
        """Return the index in the batch and the id of each hit; the events of a batch are always readable."""
        assert self._root == EVENT
        numbers, ends = self._matcher.match_many(batch.lines, "uint32")
        if not numbers:
            return []
        hits = []
        for index in range(len(batch)):
            for number in numbers[ends[index] : ends[index + 1]]:
                id_ = self._matcher.id_of(number)
                assert id_ is not None, "filters are removed in this thread only"
                hits.append((index, id_))
        return hits

    def _match_one(self, value: bytes) -> list[str]:
        try:
            return self._matcher.match(value)
        except EventError as error:
            logger.warning("event_unreadable: %s", error.message)
            return []


@lru_cache(SINGLE_MATCHERS_MAX)
def single_matcher(filter_: Filter, root: str) -> EventMatcher:
    """Return a matcher with one filter, shared by all threads: nothing may be added to it."""
    matcher = EventMatcher(root)
    matcher.add(filter_)
    return matcher


def _document(value: bytes, id_: str) -> bytes:
    try:
        return document_of(value, id_)
    except RecursionError:
        # It was parsed when it was accepted, with a shallower call stack.
        return UNREADABLE
