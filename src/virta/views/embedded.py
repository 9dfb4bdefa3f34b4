"""
Live views over a log in this process, without a server.

    view = virta.views.open(log, "orders", "status=paid")
    view.rows                      {"42": {…event…}, …}
    for change in view.changes(follow=True):
        print(change.kind, change.key, change.event)

`rows` is as of the last `refresh`; `changes` refreshes. The same table, memberships and frames as in the server are
used, so results are equal. A view is used by one thread.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from virta.errors import ViewError
from virta.event.document import decode_any
from virta.event.row_changes import ROOT_AUTO, ROOTS, KeyRule
from virta.filters import Filter, parse
from virta.hub.resume.positions import parse_position
from virta.views.aggregates import AggregateFold, Selection
from virta.views.consumer import GAP, UNKNOWN_POSITION, ViewConsumer
from virta.views.frames import RESET, ROW, SNAPSHOT
from virta.views.limits import DEFAULT_LIMITS
from virta.views.tables.index import ENTER, LEAVE, UPDATE
from virta.views.tables.passes import MembershipPass, ResumePass, reader_of
from virta.views.tables.table_file import check_keyed, open_table, read_step, save_table
from virta.views.view import View, ViewFilter, view_tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from virta.log import Log
    from virta.views.frames import ViewFrame
    from virta.views.limits import ViewLimits

# A follower looks for rows that retention removed so often.
EXPIRY_S = 1.0


class RowUpdate(NamedTuple):
    """One change of a result: kind is row, enter, update, leave or reset."""

    kind: str
    key: str
    event: Any
    offset: int
    reason: str = ""


class LiveView:
    """An open view; a context manager."""

    blocked = False  # as a sink, it accepts frames at any time

    def __init__(
        self,
        log: Log,
        channel: str,
        filter_: ViewFilter,
        rule: KeyRule,
        *,
        since: str | None,
        selection: Selection | None,
        directory: Path | None,
        limits: ViewLimits,
    ) -> None:
        self.rows: dict[str, Any] = {}
        self._log = log
        self._directory = directory
        self._updates: list[RowUpdate] = []
        self._fold = None if selection is None else AggregateFold(selection)
        self._table = open_table(log, channel, rule, directory=directory, limits=limits)
        check_keyed(channel, rule, self._table.keyed, self._table.unkeyed)
        self._read = reader_of(log, channel)
        self._view = View(self._table, filter_)
        self._table.index.add(self._view)
        select = "" if selection is None else selection.text
        self._tag = view_tag(log.id, log.epoch, channel, rule, filter_, select=select)
        self._expiry_at = 0.0
        membership = MembershipPass(self._table, [self._view])
        for piece in membership.pieces():
            piece.match(self._read)
            membership.finish(piece)
        membership.end()
        self._consumer = ViewConsumer(self._view, self)
        self._begin(since)
        self._pump()
        if self._fold is not None:
            self._fold.check_numbers()

    # For the user.

    @property
    def position(self) -> str:
        """Where to continue later: the `since` of another view of the same log, channel and filter, also of a server."""
        return f"{self._tag}.{self._table.position}"

    def aggregate(self) -> list[dict[str, Any]]:
        """Return the groups of `select` and `group`."""
        if self._fold is None:
            raise ViewError("this view has no aggregates: open it with select=…", code="no-select")
        groups: list[dict[str, Any]] = msgspec.json.decode(
            msgspec.json.encode(self._fold.all_groups()["groups"])
        )
        return groups

    def refresh(self) -> list[RowUpdate]:
        """Apply what was appended to the log; return what changed since the last call, the snapshot included."""
        self._expire()
        for views in read_step(self._log, self._table):
            for view in views:
                view.deliver()
            self._pump()
        updates, self._updates = self._updates, []
        return updates

    def changes(self, *, follow: bool = False, timeout: float | None = None) -> Iterator[RowUpdate]:
        """Yield changes; with `follow` wait for more, at most `timeout` seconds without one."""
        source = self._log.source
        quiet_until = None if timeout is None else time.monotonic() + timeout
        while True:
            seen = source.notified()
            updates = self.refresh()
            yield from updates
            if updates:
                quiet_until = None if timeout is None else time.monotonic() + timeout
                continue
            if not follow or (quiet_until is not None and time.monotonic() >= quiet_until):
                return
            left = EXPIRY_S if quiet_until is None else quiet_until - time.monotonic()
            source.wait(seen, max(0.0, min(left, EXPIRY_S)))

    def close(self) -> None:
        """End; with a table directory the table is saved."""
        if self._consumer.closed:
            return
        self._consumer.close()
        if self._directory is not None:
            save_table(self._log, self._table, self._directory)

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # As a sink.

    def write_frames(self, frames: Sequence[ViewFrame], payloads: dict[object, Any]) -> None:  # noqa: ARG002
        """Apply frames to `rows`."""
        if self._fold is not None:
            self._fold.fold(frames)
        for frame in frames:
            if frame.name == SNAPSHOT:
                self.rows.clear()
            elif frame.name in {ROW, ENTER, UPDATE, LEAVE}:
                event = None if frame.event is None else decode_any(frame.event)
                if frame.name == LEAVE:
                    self.rows.pop(frame.key, None)
                else:
                    self.rows[frame.key] = event
                self._updates.append(
                    RowUpdate(frame.name, frame.key, event, frame.offset, frame.reason)
                )
            elif frame.name == RESET and frame.data is not None:
                self._updates.append(RowUpdate(RESET, "", None, -1, frame.data["reason"]))

    def wants_pump(self, consumer: ViewConsumer) -> None:
        """Do nothing: `refresh` pumps until nothing waits."""

    def failed(self, error: ViewError) -> None:
        """Raise the error: there is no sink to report it to."""
        raise error

    # Parts.

    def _begin(self, since: str | None) -> None:
        if since is None or self._fold is not None:  # aggregates have no history
            self._consumer.begin_snapshot()
            return
        place = parse_position(since)
        if place is None or place.tag != self._tag or place.offset > self._table.position:
            self._consumer.begin_snapshot(UNKNOWN_POSITION)
            return
        resume = ResumePass(self._table, [(self._view, place.offset)])
        resume.run(self._read)
        touched = resume.touched(self._view, place.offset)
        if touched is None:
            self._consumer.begin_snapshot(GAP)
        else:
            self._consumer.begin_resume(touched, place.offset)

    def _pump(self) -> None:
        values: dict[int, bytes] = {}
        while not self._consumer.idle:
            missing = self._consumer.pump(values)
            values = self._read(missing) if missing else {}
            lost = set(missing) - values.keys()
            if lost:
                for view in self._table.lose(lost):
                    view.deliver()

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._expiry_at:
            return
        self._expiry_at = now + EXPIRY_S
        for view in self._table.expire(self._log.first_offset):
            view.deliver()
        self._pump()


def open(  # noqa: A001 - virta.views.open, as virta.open
    log: Log,
    channel: str,
    filter: Any = "",  # noqa: A002
    *,
    dialect: str = "query-string",
    key: str = "",
    row: str = ROOT_AUTO,
    row_filter: Filter | None = None,
    since: str | None = None,
    select: str = "",
    group: str = "",
    table_dir: str | Path | None = None,
    limits: ViewLimits = DEFAULT_LIMITS,
) -> LiveView:
    """
    Open a live view of a channel (a topic) of a log.

    Args:
        filter: a filter, or its text (or object) in `dialect`; empty for all rows.
        key: JSON pointer to the key, from the event's root; else the record's key, else `subject`.
        row: "auto" shows Debezium's `after` as the event's data, "event" the event as it is.
        row_filter: an additional filter; rows beyond it are never shown.
        since: a `position` to continue from.
        select, group: aggregates, as in `count,sum(/data/total)` and `/data/country`; see `LiveView.aggregate`.
        table_dir: directory of table files, which make the next opening fast.

    Raises:
        FilterError: the filter is invalid.
        ViewError: view-unkeyed, view-key-compacted, too-many-rows, invalid-pointer, invalid-select.
    """
    if row not in ROOTS:
        raise ViewError(f"row is {row!r}: write auto or event", code="invalid-row")
    own = filter if isinstance(filter, Filter) else parse(filter, dialect)
    selection = Selection(select, group) if select else None
    directory = None if table_dir is None else Path(table_dir)
    return LiveView(
        log,
        channel,
        ViewFilter(own, row_filter, row),
        KeyRule(key),
        since=since,
        selection=selection,
        directory=directory,
        limits=limits,
    )
