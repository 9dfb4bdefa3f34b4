"""
Match events against filters: the one matcher of live delivery, replay and webhooks.

Filters of most dialects apply to the event, Koncorde's to the document made of its data (`virta.event.document`).
An event that the matcher cannot read satisfies no filter.
"""

from __future__ import annotations

import logging
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, cast

from virta.errors import EventError
from virta.event.document import DOCUMENT_DIALECT, EventHead, document_of
from virta.filters import Filter
from virta.filters.tree import Everything, all_of
from virta.hub.event_batch import EventBatch
from virta.match import Matcher

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger("virta.hub")

# How many filters an event satisfies, and its members that `EventHead` names: None if absent or no text.
Head = tuple[int, str | None, str | None, str | None]
HEAD_MEMBERS = EventHead.__struct_fields__

EVENT, DOCUMENT = "event", "document"
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


def read_heads(row_filter: Filter | None, values: list[bytes]) -> list[Head | None]:
    """
    Return the head of each event and whether it satisfies a filter, both from one parse.

    None for an event that has line ends, or that only Python can parse: `virta.event.document.read_published` reads
    it. Without a filter no event is said to satisfy it.
    """
    if row_filter is None or matches_everything(row_filter):
        if len(values) == 1:  # a call of the matcher takes longer than msgspec
            return [None]
        return _empty_matcher().read_heads(values)
    return single_matcher(row_filter, root_of(row_filter)).read_heads(values)


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

    def read_heads(self, values: list[bytes]) -> list[Head | None]:
        """Return the head of each event, and how many filters hold; None for those that are not read here."""
        try:
            if self._root == EVENT:
                return cast("list[Head | None]", self._matcher.match_members(values, HEAD_MEMBERS))
            heads = _empty_matcher().read_heads(values)
            documents = [
                b"" if head is None or head[2] is None else _document(value, head[2])
                for value, head in zip(values, heads, strict=True)
            ]
            found = self._matcher.match_members(documents, ())
            return [
                head if head is None or hits is None else (hits[0], *head[1:])
                for head, hits in zip(heads, found, strict=True)
            ]
        except EventError:
            return [None] * len(values)

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

    def match_numbers(
        self, values: Sequence[bytes], ids: Sequence[str] = ()
    ) -> tuple[memoryview[int], memoryview[int]]:
        """
        Return the numbers of the filters that hold, for `ids_of`, and offsets: event i has
        numbers[offsets[i]:offsets[i+1]]. Without any hit there may be no offsets.

        A number stands for the same filter as long as none is added or removed.

        Args:
            values: the JSON of each event, on one line.
            ids: the id of each event, which only documents contain.
        """
        if self._root == DOCUMENT:
            values = [_document(value, id_) for value, id_ in zip(values, ids, strict=True)]
        try:
            return self._matcher.match_many(b"\n".join(values), "uint32")
        except EventError:
            numbers, ends = array("I"), array("I", [0])
            for value in values:
                found = [self._matcher.number_of(id_) for id_ in self._match_one(value)]
                numbers.extend([number for number in found if number is not None])
                ends.append(len(numbers))
            return memoryview(numbers), memoryview(ends)

    def ids_of(self, numbers: int | tuple[int, ...]) -> list[str]:
        """Return the ids of the filters with these numbers, or with this one."""
        some = (numbers,) if isinstance(numbers, int) else numbers
        ids = [self._matcher.id_of(number) for number in some]
        return [id_ for id_ in ids if id_ is not None]

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


@lru_cache(1)
def _empty_matcher() -> EventMatcher:
    return EventMatcher(EVENT)


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
