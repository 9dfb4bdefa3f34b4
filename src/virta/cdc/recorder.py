"""
ChangeRecorder: adds rows and tables to the log of a capture, by the rules that are the same for every database.

A row of the outbox is forwarded as the event that it is. The read of a table begins with a schema event and, if the
log may have rows of it, with one that removes them; a table that is dropped ends in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from virta import clock
from virta.cdc.outbox_rows import OUTBOX_TABLE, forwarded, is_outbox
from virta.errors import CaptureError

if TYPE_CHECKING:
    from virta.cdc.change_log import ChangeLog
    from virta.cdc.events import CapturedTable, ChangeEvents, Origin, Row
    from virta.cdc.state import TableState


class ChangeRecorder:
    """What one capture appends."""

    def __init__(self, changes: ChangeLog, events: ChangeEvents) -> None:
        self.changes = changes
        self.events = events

    def require_database(self, identity: str, place: str) -> None:
        """Refuse another database than the one that was captured under this name."""
        state = self.changes.state
        if state.database and state.database != identity:
            raise CaptureError(
                f"{self.changes.file.path} belongs to another database ({state.database}) than {place} ({identity}): "
                "choose another --name, or remove it",
                code="capture_other_database",
            )
        state.database = identity

    def add_row(
        self,
        table: CapturedTable,
        op: str,
        before: Row | None,
        after: Row | None,
        origin: Origin,
        more: dict[str, list[str]],
    ) -> bool:
        """Add the change of a row; return whether it is a row of the outbox that is done when the log is synced."""
        if is_outbox(table):
            records = forwarded(self.events, table, op, after, origin)
            self.changes.add(records)
            return bool(records)
        self.changes.add(self.events.change(table, op, before, after, origin, **more))
        return False

    # Tables.

    def begin_pass(self) -> int:
        """Return the time in ms, after giving the ids of what is read next a number of its own."""
        now = clock.now_ms()
        state = self.changes.state
        state.reads = max(state.reads + 1, now)
        return now

    def read_id(self, table: str, number: int) -> str:
        """Return the id of a row that was read, not changed: the first is 1, and the table itself 0."""
        return f"read:{self.changes.state.reads};table:{table};n:{number}"

    def begin_read(
        self,
        title: str,
        table: CapturedTable,
        origin: Origin,
        state: TableState,
        position: dict[str, Any],
    ) -> None:
        """Append the events before the rows of a table; one that was read before is emptied."""
        known = self.changes.state.tables.get(title)
        kind = "CREATE" if known is None else "ALTER"
        self.changes.add([self.events.schema_change(table, kind, origin)])
        if not (known is None and self.changes.fresh) and not is_outbox(table):
            self.changes.add(self.events.change(table, "t", None, None, origin))
        self.changes.state.tables[title] = state
        # Saved before the first row: after a crash the table is known to be incomplete, and is emptied first.
        self.changes.append(position)
        self.changes.save()

    def drop(self, table: CapturedTable, origin: Origin, position: dict[str, Any]) -> None:
        """Append the events of a table that was dropped or is left out."""
        self.changes.add([self.events.schema_change(table, "DROP", origin)])
        if table.name != OUTBOX_TABLE:
            self.changes.add(self.events.change(table, "t", None, None, origin))
        self.changes.append(position)
        self.changes.save()
