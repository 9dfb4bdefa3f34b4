"""
Capture the changes of a PostgreSQL database by logical replication.

    slot and publication ──► rows of each table at one state ──► changes, transaction by transaction

A transaction is one batch of the log, with its commit LSN in the batch; one that is over the batch limit takes
several, and an event on `<name>.transaction` ends it. After any crash the slot sends again what was not confirmed,
and transactions up to the LSN in the log are skipped: each change is in the log exactly once.

PostgreSQL may forget WAL up to the confirmed LSN. It is confirmed after the log was synced, and also for traffic of
other tables and databases: an idle table retains no WAL.

Which tables are captured, and when their rows are read: `captured_tables.py`.
"""

from __future__ import annotations

import logging
import select
import time
from typing import TYPE_CHECKING, Any, Final

from virta.cdc import status_file
from virta.cdc.change_log import ChangeLog
from virta.cdc.events import CapturedTable, ChangeEvents, Origin, Row
from virta.cdc.outbox_rows import OUTBOX_TABLE
from virta.cdc.postgres import catalog, connections, pgoutput, slot
from virta.cdc.postgres.captured_tables import CapturedTables
from virta.cdc.recorder import ChangeRecorder

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable
    from pathlib import Path

KIND: Final = "postgresql"
# How long the loop waits for a message before it does anything else.
WAIT_S: Final = 0.5
# At most this long between the append of a transaction and its sync, while more arrive.
SYNC_S: Final = 0.1
# Between two confirmations while changes arrive; PostgreSQL's own limit of silence is 60 s.
FEEDBACK_S: Final = 1.0
# Between two checks of tables, slot and confirmed position.
HEARTBEAT_S: Final = 10.0
SAVE_S: Final = 5.0
# Rows of the outbox from before a crash that are removed by one run.
LEFT_MAX: Final = 10_000

logger = logging.getLogger("virta.cdc")


class PostgresCapture:
    """Copies the changes of one database into a log."""

    def __init__(
        self,
        dsn: str,
        data_dir: str | Path,
        *,
        name: str | None = None,
        tables: Iterable[str] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._dsn = dsn
        self.name = name if name is not None else connections.database_name(dsn)
        self.slot = slot.slot_name(self.name)
        self._heartbeat_s = heartbeat_s
        self._data_dir = data_dir
        self._sent: list[tuple[str, str]] = []  # rows of the outbox: schema, id
        self._left: list[
            tuple[str, str]
        ] = []  # the same from before a crash: forwarded by `_left_lsn`
        self._left_lsn = 0
        self._begun: pgoutput.Begin | None = None
        self._count = 0  # changes of the present transaction
        self._skip = 0  # of these, how many the log has
        self._split = False  # the present transaction takes several batches
        self._confirmable = 0  # everything up to this LSN is in the log, perhaps not synced
        self._confirmed = 0
        self._stream: Any = None
        self._changes = ChangeLog(data_dir, self.name, KIND)
        try:
            self._sql = connections.connect(dsn)
        except BaseException:
            self._changes.close()
            raise
        self._recorder: ChangeRecorder
        self._tables = CapturedTables(
            dsn, self._sql, self.name, None if tables is None else frozenset(tables),
            self._changes, self._add_row, self._keep_alive,
        )  # fmt: skip

    @property
    def changes(self) -> int:
        """Records appended by this run."""
        return self._changes.changes

    def run(self, stopping: threading.Event, *, until_caught_up: bool = False) -> None:
        """
        Capture until `stopping` is set, or until everything committed at the start is in the log.

        Raises:
            CaptureError: the database cannot be captured; `retry` if waiting may help.
        """
        with connections.translate_errors(self._dsn):
            self._prepare()
            self._start_stream()
            self._follow(stopping, self._target() if until_caught_up else None)

    def close(self) -> None:
        self._changes.close()
        for connection in (self._stream and self._stream.connection, self._sql):
            if connection is not None:
                connection.close()

    # Slot, publication, first read.

    def _prepare(self) -> None:
        slot.check_server(self._sql, self._dsn)
        identity, database = catalog.identity(self._sql)
        first = not self._changes.state.database
        self._recorder = ChangeRecorder(self._changes, ChangeEvents(KIND, self.name, database))
        self._recorder.require_database(identity, connections.address(self._dsn))
        self._tables.prepare(self._recorder)
        status = catalog.slot(self._sql, self.slot)
        holder = None
        snapshot = None
        if status is None and first:
            holder, snapshot = slot.create_slot(self._dsn, self.slot)
        else:
            slot.check_slot(status, self.slot, self._dsn, database)
        self._changes.save()
        try:
            self._tables.read_all(snapshot)
        finally:
            if holder is not None:
                holder.close()

    # The stream.

    def _start_stream(self) -> None:
        connection = connections.connect_replication(self._dsn)
        self._stream = connection.cursor()
        self._stream.start_replication(
            slot_name=self.slot,
            decode=False,
            start_lsn=int(self._changes.position.get("lsn", 0)),
            options={"proto_version": "1", "publication_names": f'"{self.slot}"'},
        )
        self._find_left()
        logger.info("cdc_streaming %s from slot %s", connections.address(self._dsn), self.slot)

    def _target(self) -> int:
        """Return the present end of the WAL, made visible to the stream by a message of its own."""
        with self._sql.cursor() as cursor:
            cursor.execute("SELECT (pg_logical_emit_message(true, 'virta', '') - '0/0')::bigint")
            return int(cursor.fetchone()[0])

    def _follow(self, stopping: threading.Event, target: int | None) -> None:
        read = self._stream.read_message
        synced = beat = saved = time.monotonic()
        self._confirm(reply=True)
        while not stopping.is_set():
            message = read()
            if message is not None:
                self._on_message(message.payload, message.data_start)
                now = time.monotonic()
                if now < synced + SYNC_S:
                    continue
                self._sync()
                synced = now
            else:
                self._on_idle()
                synced = time.monotonic()
                if target is not None:
                    if self._confirmed >= target:
                        self._tables.announce()
                        break
                    self._confirm(reply=True)
                select.select([self._stream], [], [], min(WAIT_S, self._heartbeat_s))
            now = time.monotonic()
            if now >= beat + self._heartbeat_s and self._begun is None:
                if message is None:
                    self._tables.announce()
                self._heartbeat()
                beat = now
            if now >= saved + SAVE_S:
                self._changes.save()
                saved = now
        if self._begun is not None:
            self._changes.discard()  # the slot sends the open transaction again
        self._sync()
        self._changes.save()

    def _on_idle(self) -> None:
        """Nothing waits: what the server has sent so far, also of other tables, is in the log."""
        if self._begun is None:
            self._confirmable = max(self._confirmable, self._stream.wal_end)
        self._sync()

    def _sync(self) -> None:
        """Sync the log, then confirm; remove rows of the outbox that were forwarded."""
        self._changes.sync()
        if self._sent and self._begun is None:
            self._remove_sent()
        if self._confirmable > self._confirmed:
            self._confirm()
        if self._left and self._confirmed >= self._left_lsn:
            self._sent, self._left = self._left, []
            self._remove_sent()

    def _confirm(self, *, reply: bool = False) -> None:
        self._confirmed = max(self._confirmed, self._confirmable)
        self._stream.send_feedback(
            write_lsn=self._confirmed, flush_lsn=self._confirmed, apply_lsn=self._confirmed,
            reply=reply, force=True,
        )  # fmt: skip

    def _keep_alive(self) -> None:
        """Tell the server that we are here, in the middle of a long read."""
        if self._stream is not None:
            self._stream.send_feedback(force=True)

    def _heartbeat(self) -> None:
        """Ask how far the server is, follow new and dropped tables, write the status."""
        self._confirm(reply=True)
        self._tables.sync()
        self._tables.read_all(None)
        status = catalog.slot(self._sql, self.slot)
        slot.check_slot(status, self.slot, self._dsn, self._recorder.events.database)
        if status is not None:
            status_file.write(
                self._data_dir,
                self.name,
                slot=status.wal_status,
                lag_bytes=status.lag_bytes,
                retained_bytes=status.retained_bytes,
                records=self._changes.changes,
            )

    def _find_left(self) -> None:
        """Note the rows of the outbox: every one is forwarded when the present end of the WAL is confirmed."""
        with self._sql.cursor() as cursor:
            for table in self._tables.chosen.values():
                if table.name == OUTBOX_TABLE:
                    schema = connections.quote_ident(table.schema, self._sql)
                    cursor.execute(f"SELECT id FROM {schema}.{OUTBOX_TABLE} LIMIT {LEFT_MAX}")
                    self._left += [(table.schema, id_) for (id_,) in cursor.fetchall()]
            cursor.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")
            self._left_lsn = int(cursor.fetchone()[0])

    def _remove_sent(self) -> None:
        by_schema: dict[str, list[str]] = {}
        for schema, id_ in self._sent:
            by_schema.setdefault(schema, []).append(id_)
        self._sent = []
        with self._sql.cursor() as cursor:
            for schema, ids in by_schema.items():
                where = f"{connections.quote_ident(schema, self._sql)}.{OUTBOX_TABLE}"
                cursor.execute(f"DELETE FROM {where} WHERE id = ANY(%s)", (ids,))

    # Messages.

    def _on_message(self, payload: bytes, lsn: int) -> None:
        message = pgoutput.decode(payload)
        match message:
            case pgoutput.Insert(oid, new):
                self._on_change(oid, "c", None, new, lsn)
            case pgoutput.Update(oid, old, old_is_key, new):
                self._on_change(oid, "u", old, new, lsn, old_is_key=old_is_key)
            case pgoutput.Delete(oid, old, old_is_key):
                self._on_change(oid, "d", old, None, lsn, old_is_key=old_is_key)
            case pgoutput.Begin():
                self._on_begin(message)
            case pgoutput.Commit():
                self._on_commit(message)
            case pgoutput.Relation():
                assert self._begun is not None
                origin = self._origin(0) if self._skip == 0 else None
                self._tables.on_relation(message, self._begun, origin)
            case pgoutput.Truncate(oids):
                for oid in oids:
                    self._on_change(oid, "t", None, None, lsn)

    def _on_begin(self, begin: pgoutput.Begin) -> None:
        self._begun = begin
        self._count = 0
        self._split = False
        done = self._changes.position
        self._skip = 0
        if begin.commit_lsn < done.get("lsn", 0) or (
            begin.commit_lsn == done.get("lsn", 0) and done.get("end")
        ):
            self._skip = -1
        elif begin.commit_lsn == done.get("lsn", 0):
            self._skip = done["n"]
            self._split = True

    def _on_commit(self, commit: pgoutput.Commit) -> None:
        begin = self._begun
        assert begin is not None, "a commit without a begin"
        if self._skip >= 0 and (self._changes.pending or self._split):
            if self._split:
                end = self._recorder.events.transaction_end(self._origin(0), self._count)
                self._changes.add([end])
            self._changes.append({"lsn": commit.commit_lsn, "n": self._count, "end": True})
        self._begun = None
        self._confirmable = max(self._confirmable, commit.end_lsn)
        if self._tables.to_read:
            self._tables.sync()
            self._tables.read_all(None)

    def _on_change(
        self,
        oid: int,
        op: str,
        old: pgoutput.TupleData | None,
        new: pgoutput.TupleData | None,
        lsn: int,
        *,
        old_is_key: bool = False,
    ) -> None:
        begin = self._begun
        assert begin is not None, "a change outside of a transaction"
        self._count += 1
        decoded = self._tables.relations.get(oid)
        if decoded is None or self._skip < 0 or self._count <= self._skip:
            return
        if self._tables.was_read(decoded.table.title, begin):
            return
        before = None if old is None else decoded.old_row(old, is_key=old_is_key)
        more: dict[str, list[str]] = {}
        after = None
        if new is not None:
            after, unchanged = decoded.row(new, before)
            if unchanged:
                more["unchanged"] = unchanged
                if not decoded.table.key_is_sent(unchanged):
                    raise decoded.table.unsent_key()
        self._add_row(decoded.table, op, before, after, self._origin(lsn), more)
        if self._changes.full:
            self._changes.append({"lsn": begin.commit_lsn, "n": self._count, "end": False})
            self._split = True
            self._changes.sync()
            self._keep_alive()

    def _origin(self, lsn: int) -> Origin:
        begin = self._begun
        assert begin is not None
        return Origin(
            id=f"lsn:{lsn or begin.commit_lsn};txId:{begin.xid};n:{self._count}",
            ts_ms=begin.commit_us // 1000,
            tx_id=begin.xid,
            lsn=lsn or begin.commit_lsn,
            transaction=f"{begin.xid}:{begin.commit_lsn}",
            order=self._count,
        )

    def _add_row(
        self,
        table: CapturedTable,
        op: str,
        before: Row | None,
        after: Row | None,
        origin: Origin,
        more: dict[str, list[str]],
    ) -> None:
        if self._recorder.add_row(table, op, before, after, origin, more) and after is not None:
            self._sent.append((table.schema, after["id"]))
