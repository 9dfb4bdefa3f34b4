"""
Capture the changes of a SQLite database.

One round is one read transaction: the changes since the last position, in order, then the rows of tables that were
not read yet. A read transaction sees whole transactions only, so a batch has whole transactions (unless it is over
the batch limit) and the rows of a table are exactly those after the changes before them. Changes of a table up to
the point where its rows were read are left out: the rows have them.

Exactly once: the sequence number of the last change is in the same batch as the change. A change is removed from the
database after the log has it on disk.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from virta import clock
from virta.cdc import sqlite_schema, status_file
from virta.cdc.change_log import ChangeLog
from virta.cdc.events import CapturedTable, ChangeEvents, Origin, Row
from virta.cdc.outbox_rows import OUTBOX_TABLE
from virta.cdc.recorder import ChangeRecorder
from virta.cdc.state import TableState
from virta.errors import CaptureError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Sequence

    from virta.cdc.sqlite_schema import SqliteTable

KIND: Final = "sqlite"
SCHEMA: Final = "main"
# Between two checks of PRAGMA data_version, which reads one page of shared memory.
POLL_S: Final = 0.02
# How long a statement waits for another writer.
BUSY_S: Final = 30.0
FETCH_ROWS: Final = 1000
# Rows removed from virta_cdc_changes in one transaction: other writers wait for it.
REMOVE_ROWS: Final = 20_000
# Changes that the log has stay until there are this many, or nothing else happens.
REMOVE_MIN: Final = 1000
# Between two writes of the state file, which costs a sync.
SAVE_S: Final = 2.0

logger = logging.getLogger("virta.cdc")


class SqliteCapture:
    """Copies the changes of one database file into a log."""

    def __init__(
        self,
        file: str | Path,
        data_dir: str | Path,
        *,
        name: str | None = None,
        tables: Iterable[str] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self.path = Path(file)
        self.name = name if name is not None else default_name(self.path)
        if not self.path.is_file():
            raise CaptureError(f"there is no database file {file}", code="capture_no_database")
        self._wanted = None if tables is None else frozenset(tables)
        self._poll_s = poll_s
        self._data_dir = data_dir
        self._db = connect(self.path)
        try:
            self._changes = ChangeLog(data_dir, self.name, KIND)
        except BaseException:
            self._db.close()
            raise
        self._recorder = ChangeRecorder(
            self._changes, ChangeEvents(KIND, self.name, self.path.name)
        )
        self._tables: dict[int, tuple[SqliteTable, CapturedTable]] = {}
        self._schema_version = -1
        self._removed = 0
        self._warned: set[str] = set()
        self._save_at = 0.0
        self._outbox_read = True  # rows may be left from before a crash

    @property
    def changes(self) -> int:
        """Records appended by this run."""
        return self._changes.changes

    def run(self, stopping: threading.Event, *, until_caught_up: bool = False) -> None:
        """
        Capture until `stopping` is set, or until everything committed is in the log.

        Raises:
            CaptureError: the database cannot be captured.
        """
        seen = None
        try:
            while not stopping.is_set():
                version = self._version()
                if version == seen:
                    self._save_sometimes()
                    stopping.wait(self._poll_s)
                    continue
                if not self._round():
                    continue  # the tables changed meanwhile
                seen = version
                if until_caught_up and self._version() == version:
                    break
            self._changes.save()
            self._remove_captured(1)
        except sqlite3.Error as error:
            raise CaptureError(
                f"{self.path}: {error}", code="capture_database_failed", retry=is_passing(error)
            ) from error

    def close(self) -> None:
        self._changes.close()
        self._db.close()

    def _version(self) -> int:
        """Return a number that changes with each commit of another connection."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # One round.

    def _round(self) -> bool:
        """Copy everything that is committed; False if tables have changed since the triggers were updated."""
        self._update_schema()
        db = self._db
        db.execute("BEGIN")
        try:
            # The largest number ever given, also of rows that were removed.
            end = db.execute(
                "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'virta_cdc_changes'"
            ).fetchone()[0]
            if db.execute("PRAGMA schema_version").fetchone()[0] != self._schema_version:
                return False
            self._check_position(end)
            self._copy_changes(end)
            self._read_tables(end)
            sent = self._outbox_ids()
        finally:
            db.execute("ROLLBACK")
        self._changes.sync()
        for id_ in sent:
            db.execute(f"DELETE FROM {OUTBOX_TABLE} WHERE id = ?", (id_,))
        self._remove_captured(REMOVE_MIN)
        return True

    def _save_sometimes(self) -> None:
        """Save the state when nothing else happens: it only makes the next start quicker."""
        if self._changes.position != self._changes.state.position:
            now = time.monotonic()
            if now >= self._save_at:
                self._save_at = now + SAVE_S
                self._changes.save()
                self._remove_captured(1)
                waiting = self._db.execute("SELECT count(*) FROM virta_cdc_changes").fetchone()[0]
                status_file.write(
                    self._data_dir, self.name, records=self._changes.changes, recorded=waiting
                )

    def _outbox_ids(self) -> list[Any]:
        """Return the rows of the outbox: every one that this transaction sees was forwarded."""
        known = self._changes.state.tables.get(OUTBOX_TABLE)
        if known is None or not known.complete or not self._outbox_read:
            return []
        self._outbox_read = False
        return [id_ for (id_,) in self._db.execute(f"SELECT id FROM {OUTBOX_TABLE}")]

    def _position(self) -> int:
        return int(self._changes.position.get("seq", 0))

    def _check_position(self, end: int) -> None:
        if self._position() > end:
            raise CaptureError(
                f"{self.path} is older than the log: its last change is {end}, the log has {self._position()}. It was "
                f"probably restored from a copy: `virta cdc sqlite {self.path} drop`, and every table is read again",
                code="capture_database_older",
            )

    def _update_schema(self) -> None:
        """Follow changes of tables: new triggers, schema events, and another read of the rows."""
        version = self._db.execute("PRAGMA schema_version").fetchone()[0]
        if version == self._schema_version:
            return
        identity, notes = sqlite_schema.install(self._db, self._changes.log.id, self._wanted)
        self._recorder.require_database(identity, str(self.path))
        self._schema_version = self._db.execute("PRAGMA schema_version").fetchone()[0]
        self._warn(notes)
        self._tables = {
            number: (table, CapturedTable(self.name, SCHEMA, table.name, table.columns, table.key))
            for number, table in sqlite_schema.load_tables(self._db).items()
        }

    def _warn(self, notes: Sequence[str]) -> None:
        for note in notes:
            if note not in self._warned:
                self._warned.add(note)
                logger.warning("cdc_table %s: %s", self.path, note)

    def _copy_changes(self, end: int) -> None:
        start = self._position()
        cursor = self._db.execute(
            "SELECT * FROM virta_cdc_changes WHERE seq > ? AND seq <= ? ORDER BY seq", (start, end)
        )
        names = [column[0] for column in cursor.description]
        old_at, new_at = _value_columns(names)
        seq = start
        while rows := cursor.fetchmany(FETCH_ROWS):
            for row in rows:
                seq = row[0]
                table, captured = self._tables[row[1]]
                known = self._changes.state.tables.get(table.name)
                if known is None or seq <= int(known.read_at or 0) or not known.complete:
                    continue  # the rows of the table, which are read later, have it
                old = [row[at] for at in old_at[: len(table.names)]]
                new = [row[at] for at in new_at[: len(table.names)]]
                self._add_change(table, captured, (seq, row[2], row[3]), old, new)
                if self._changes.full:
                    self._changes.append({"seq": seq})
        if end > start:
            self._changes.append({"seq": end})

    def _add_change(
        self,
        table: SqliteTable,
        captured: CapturedTable,
        change: tuple[int, str, int],
        old: list[Any],
        new: list[Any],
    ) -> None:
        seq, op, ts = change
        if op == "?":
            if self._exists(table, old):
                return
            op = "d"
        binary: list[str] = []
        before = None if op == "c" else _json_row(table.names, old, binary)
        after = None if op == "d" else _json_row(table.names, new, binary)
        # With the database's own id: after `drop` and `create` the numbers start again.
        origin = Origin(id=f"db:{self._changes.state.database[:8]};seq:{seq}", ts_ms=ts)
        self._add_row(captured, op, before, after, origin, binary)

    def _add_row(
        self,
        table: CapturedTable,
        op: str,
        before: Row | None,
        after: Row | None,
        origin: Origin,
        binary: list[str],
    ) -> None:
        more = {"base64": sorted(set(binary))} if binary else {}
        if self._recorder.add_row(table, op, before, after, origin, more):
            self._outbox_read = True

    def _exists(self, table: SqliteTable, old: list[Any]) -> bool:
        """Return whether a row that REPLACE may have removed is still there."""
        values = dict(zip(table.names, old, strict=True))
        where = " AND ".join(f"{sqlite_schema.quote(name)} IS ?" for name in table.key)
        try:
            found = self._db.execute(
                f"SELECT 1 FROM {sqlite_schema.quote(table.name)} WHERE {where}",
                [values[name] for name in table.key],
            ).fetchone()
        except sqlite3.OperationalError:
            return True  # the table is gone, or has other columns: it is read again
        return found is not None

    # Rows of whole tables.

    def _read_tables(self, end: int) -> None:
        state = self._changes.state
        active = sqlite_schema.active_tables(self._db)
        for name in sorted(state.tables.keys() - active.keys()):
            self._drop_table(name, end)
        for name, table in active.items():
            known = state.tables.get(name)
            if known is None or not known.complete or known.number != table.number:
                self._read_table(table, end)

    def _drop_table(self, name: str, end: int) -> None:
        known = self._changes.state.tables.pop(name)
        gone = CapturedTable(self.name, SCHEMA, name, known.columns, known.key)
        self._recorder.begin_pass()
        self._recorder.drop(gone, self._read_origin(name, 0, "true"), {"seq": end})

    def _read_table(self, table: SqliteTable, end: int) -> None:
        """Append all rows of a table; a table that was read before is emptied first."""
        state = self._changes.state
        captured = self._tables[table.number][1]
        self._recorder.begin_pass()
        incomplete = TableState(table.columns, table.key, number=table.number)
        origin = self._read_origin(table.name, 0, "first")
        self._recorder.begin_read(table.name, captured, origin, incomplete, {"seq": end})
        selected = ", ".join(sqlite_schema.quote(name) for name in table.names)
        order = ", ".join(sqlite_schema.quote(name) for name in table.key)
        rows = self._db.execute(
            f"SELECT {selected} FROM {sqlite_schema.quote(table.name)} ORDER BY {order}"
        )
        number = 0
        while chunk := rows.fetchmany(FETCH_ROWS):
            for row in chunk:
                number += 1
                binary: list[str] = []
                after = _json_row(table.names, row, binary)
                origin = self._read_origin(table.name, number, "true")
                self._add_row(captured, "r", None, after, origin, binary)
            if self._changes.full:
                self._changes.append({"seq": end})
        self._changes.append({"seq": end})
        state.tables[table.name] = TableState(
            table.columns, table.key, read_at=str(end), complete=True, number=table.number
        )
        self._changes.save()
        logger.info("cdc_table_read %s: %s rows", captured.topic, number)

    def _read_origin(self, table: str, number: int, snapshot: str) -> Origin:
        id_ = self._recorder.read_id(table, number)
        return Origin(id=id_, ts_ms=clock.now_ms(), snapshot=snapshot)

    # Changes that the log has.

    def _remove_captured(self, least: int) -> None:
        """Remove the changes that the log has on disk, and the rows of the outbox that were forwarded."""
        position = self._position()
        if position - self._removed < max(1, least):
            return
        self._changes.sync()
        first = self._db.execute("SELECT min(seq) FROM virta_cdc_changes").fetchone()[0]
        while first is not None and first <= position:
            upto = min(position, first + REMOVE_ROWS - 1)
            self._db.execute("DELETE FROM virta_cdc_changes WHERE seq <= ?", (upto,))
            first = upto + 1
        self._removed = position


def default_name(path: str | Path) -> str:
    """Return the name of the server in channels: the file's name, without what a name cannot have."""
    return (
        "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in Path(path).stem)
        or "db"
    )


def connect(path: Path) -> sqlite3.Connection:
    """Open a database; texts that are no UTF-8 are read as bytes."""
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    db.text_factory = _text_or_bytes
    return db


def is_passing(error: sqlite3.Error) -> bool:
    """Return whether an error may pass by itself: a lock that another process has."""
    return getattr(error, "sqlite_errorname", "") in {"SQLITE_BUSY", "SQLITE_LOCKED"}


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _value_columns(names: list[str]) -> tuple[list[int], list[int]]:
    """Return where the old and the new values are in a row of virta_cdc_changes, by number of column."""
    at = {name: index for index, name in enumerate(names)}
    count = sum(1 for name in names if name[0] == "o" and name[1:].isdigit())
    return [at[f"o{i}"] for i in range(count)], [at[f"n{i}"] for i in range(count)]


def _json_row(names: Sequence[str], values: Sequence[Any], binary: list[str]) -> Row:
    """Return a row as JSON values; adds the names of columns with bytes to `binary`."""
    row: Row = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, bytes):
            row[name] = b64encode(value).decode()
            binary.append(name)
        elif isinstance(value, float) and not math.isfinite(value):
            row[name] = "Infinity" if value > 0 else "-Infinity"
        else:
            row[name] = value
    return row
