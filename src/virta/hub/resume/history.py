"""
Read a consumer's history out of the log, a bounded piece at a time.

A piece has whole blocks of records, each filtered by the matcher that live delivery uses (`virta.hub.event_matcher`), so
a consumer gets the same events from history as it would have got live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.errors import LogGapError
from virta.event.document import one_line_event
from virta.hub.delivery import Delivery, from_event, from_record, read_message
from virta.hub.event_matcher import matches_everything, root_of, single_matcher
from virta.streams import streams_match

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virta.filters import Filter
    from virta.log import Reader, Record
    from virta.streams import Segments

    Select = Callable[[Sequence[Record]], list[Delivery]]

# A piece ends after the block that reaches one of these: small enough for a thousand replays at once.
PIECE_EVENTS_MAX = 256
PIECE_BYTES_MAX = 256 * 1024
# Records read for one piece, so that a filter that matches nothing shares the reading threads.
PIECE_RECORDS_MAX = 8192
# Records that are matched in one call.
BLOCK_RECORDS = 256


class HistoryPiece:
    """The events that one read of the log found."""

    __slots__ = ("bytes", "deliveries", "finished", "gap", "next")

    def __init__(self) -> None:
        self.next = 0  # the offset after the last record that was read
        self.deliveries: list[Delivery] = []
        self.bytes = 0
        self.finished = False
        self.gap: LogGapError | None = None

    @property
    def complete(self) -> bool:
        """Whether the piece has reached a limit."""
        return len(self.deliveries) >= PIECE_EVENTS_MAX or self.bytes >= PIECE_BYTES_MAX


class HistoryReader:
    """Reads pieces; `read` blocks and is called in a thread, one call at a time."""

    def __init__(self, reader: Reader, select: Select) -> None:
        self._batches = reader.batches()
        self._select = select
        self._records: list[Record] = []  # read but not in a piece yet
        self._index = 0

    def read(self) -> HistoryPiece:
        """Return the next piece."""
        piece = HistoryPiece()
        count = 0
        while count < PIECE_RECORDS_MAX and not piece.complete:
            block = self._records[self._index : self._index + BLOCK_RECORDS]
            if block:
                self._index += len(block)
                count += len(block)
                piece.next = block[-1].offset + 1
                selected = self._select(block)
                piece.deliveries += selected
                piece.bytes += sum([len(delivery.value) for delivery in selected])
                continue
            try:
                self._records, self._index = next(self._batches), 0
            except StopIteration:
                piece.finished = True
                break
            except LogGapError as gap:
                piece.gap = gap
                break
        return piece


def select_events(filter_: Filter, row_filter: Filter | None = None) -> Select:
    """
    Return a function that returns the events among records that a filter matches.

    Args:
        row_filter: what `virta.hub.event_matcher.restrict` left to check after it.
    """
    if row_filter is not None:
        return _with_row_filter(select_events(filter_), row_filter)
    if matches_everything(filter_):
        return _all_events
    root = root_of(filter_)

    def select(records: Sequence[Record]) -> list[Delivery]:
        events = [one_line_event(record) for record in records]
        matched = single_matcher(filter_, root).match(events)
        hits = zip(records, events, matched, strict=True)
        return [from_event(record, event) for record, event, ids in hits if ids]

    return select


def _with_row_filter(select: Select, row_filter: Filter) -> Select:
    root = root_of(row_filter)

    def select_both(records: Sequence[Record]) -> list[Delivery]:
        found = select(records)
        matched = single_matcher(row_filter, root).match(found)
        return [delivery for delivery, ids in zip(found, matched, strict=True) if ids]

    return select_both


def _all_events(records: Sequence[Record]) -> list[Delivery]:
    return [from_record(record) for record in records]


def select_messages(streams: Sequence[Segments]) -> Select:
    """Return a function that returns stream messages among records, once for each stream that a message matches."""

    def select(records: Sequence[Record]) -> list[Delivery]:
        found: list[Delivery] = []
        for record in records:
            message = read_message(record)
            if message is not None:
                segments = tuple(message.id.split(":"))
                found += [message for stream in streams if streams_match(segments, stream)]
        return found

    return select
