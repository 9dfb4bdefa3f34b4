"""
A view: a filter over a row table, shared by all consumers with an equal one.

`hits` are the frames of one live step, until `deliver` hands them to the consumers. A consumer that keeps up gets them
as they are; for every other one they become entries of its waiting map.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Any, Final

from virta import native
from virta.event.row_changes import ROOT_AUTO, row_of
from virta.filters import Filter
from virta.filters.tree import all_of
from virta.hub.event_matcher import (
    EVENT,
    matches_everything,
    root_of,
    single_matcher,
)
from virta.hub.resume.positions import TAG_DIGITS
from virta.views.frames import ViewFrame, event_stream
from virta.views.tables.index import LEAVE, event_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.event.row_changes import KeyRule, RowChange
    from virta.views.consumer import ViewConsumer
    from virta.views.tables.table import RowTable

_native = native.load("virta.views._native")

# Numbers of rows that left are kept among those that joined until they are half of them.
CANDIDATES_MIN: Final = 64


class ViewFilter:
    """The filter of a view: its own, and the row filter of the token that opened it."""

    __slots__ = ("id", "own", "parts", "root", "row_filter")

    def __init__(
        self, own: Filter, row_filter: Filter | None = None, root: str = ROOT_AUTO
    ) -> None:
        self.own = own
        self.row_filter = row_filter
        self.root = root
        filters = [own] if row_filter is None else [row_filter, own]
        by_root: dict[str, list[Filter]] = {}
        for filter_ in filters:
            if not matches_everything(filter_):
                by_root.setdefault(root_of(filter_), []).append(filter_)
        self.parts = tuple(
            (seen, _all(same)) for seen, same in sorted(by_root.items())
        )  # of (what it sees, filter): empty for everything
        row_id = "" if row_filter is None else f"{root_of(row_filter)}:{row_filter.id}"
        whole = "&".join(f"{seen}:{part.id}" for seen, part in self.parts)
        # The row filter counts by itself, too: it decides what a `leave` shows.
        self.id = f"{root}|{whole}|{row_id}"


def _all(filters: list[Filter]) -> Filter:
    if len(filters) == 1:
        return filters[0]
    return Filter(all_of([f.tree for f in filters]), dialect=filters[0].dialect)


class View:
    """A standing filter over a table."""

    __slots__ = (
        "candidates",
        "consumers",
        "count",
        "exact_since",
        "filter",
        "hits",
        "number",
        "openers",
        "parts",
        "root",
        "table",
        "truncated",
        "unused_since",
    )

    def __init__(self, table: RowTable, filter_: ViewFilter) -> None:
        self.table = table
        self.filter = filter_
        self.number = table.index.new_number()
        self.parts = filter_.parts
        self.root = filter_.root
        self.count = 0  # rows
        self.candidates = array("I")  # numbers of the rows, and of some that have left
        # From this position on the memberships in the ring are right; None until the pass is done.
        self.exact_since: int | None = None
        self.consumers: dict[ViewConsumer, None] = {}
        self.openers = 0  # those who wait to become consumers
        self.unused_since = 0.0  # monotonic seconds, while it has neither consumers nor openers
        self.hits: list[ViewFrame] = []
        self.truncated = False  # whether one of the hits says that all rows were removed

    # Called by the table.

    def joined(self, number: int) -> None:
        """Count a row that the view has now."""
        self.count += 1
        self.candidates.append(number)
        if len(self.candidates) > 2 * self.count + CANDIDATES_MIN:
            self.candidates = array("I", self.row_numbers())

    def emptied(self) -> None:
        self.count = 0
        self.candidates = array("I")

    def row_numbers(self) -> list[int]:
        """Return the numbers of the view's rows, in order."""
        members, mine = self.table.members, self.number
        return [number for number in sorted(set(self.candidates)) if mine in members[number]]

    def hit(self, kind: str, number: int, offset: int, change: RowChange) -> None:
        """Note the frame of a record that sets a row: it enters, stays, or leaves because it changed."""
        event: bytes | None = change.row if self.root == ROOT_AUTO else change.event
        reason = ""
        if kind is LEAVE:
            reason = "changed"
            if not self.shows(change.event):
                event = None
        self.hits.append(
            ViewFrame(kind, offset + 1, change.key or "", offset, event, reason, None, number)
        )

    # Delivery.

    def deliver(self, now: float = 0.0) -> None:
        """
        Hand the hits of a step to the consumers.

        Args:
            now: monotonic seconds, for consumers with an output.
        """
        hits, self.hits = self.hits, []
        truncated, self.truncated = self.truncated, False
        payloads: dict[object, object] = {}
        for consumer in tuple(self.consumers):
            direct = consumer.direct
            if direct is not None and not truncated:
                consumer.written_at = now
                put, tag, chunked = direct
                put(_shared_stream(hits, payloads, tag, chunked=chunked))
            elif truncated or not consumer.keeps_up:
                consumer.note(hits)
            else:
                consumer.sink.write_frames(hits, payloads)

    def shows(self, event: bytes) -> bool:
        """Return whether a row that left may be shown: only if the token's row filter allows it."""
        row_filter = self.filter.row_filter
        if row_filter is None:
            return True
        if matches_everything(row_filter):
            return True
        value = row_of(event) if self.root == ROOT_AUTO else event
        seen = root_of(row_filter)
        ids = [] if seen == EVENT else [event_id(event)]
        return bool(single_matcher(row_filter, seen).match_numbers([value], ids)[0])


def _shared_stream(
    hits: list[ViewFrame], payloads: dict[object, Any], tag: bytes, *, chunked: bool
) -> bytes:
    """Return hits as an event stream, made once for all outputs that get the same bytes."""
    payload: bytes | None = payloads.get((tag, chunked))
    if payload is None:
        payload = payloads[tag, chunked] = event_stream(tag, hits, chunked=chunked)
    return payload


def deliver_all_plain(views: Sequence[View], now: float) -> None:
    """Hand the hits of a step to the consumers of views; `now` is in monotonic seconds."""
    for view in views:
        view.deliver(now)


deliver_all = deliver_all_plain if _native is None else _native.deliver_all


def view_tag(
    log_id: str,
    epoch: int,
    channel: str,
    rule: KeyRule,
    filter_: ViewFilter,
    fields: str = "",
    select: str = "",
) -> str:
    """
    Return the tag of positions of a view: everything that decides what a consumer gets.

    Args:
        fields: what is sent of each event, as text; empty for all of it.
        select: the aggregates, as text; empty for rows.
    """
    text = "\0".join([log_id, str(epoch), channel, rule.text, filter_.id, f"{fields}|{select}"])
    return hashlib.sha256(text.encode()).hexdigest()[:TAG_DIGITS]
