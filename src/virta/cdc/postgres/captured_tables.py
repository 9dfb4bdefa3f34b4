"""
CapturedTables: which tables are captured, their columns, and the reading of their rows.

A table is read (`t`, then its rows as `r`) when it is new, when its read was interrupted, when its key changed, and
when its columns changed in a way that is not replicated. Changes of transactions that the read has seen are skipped
for that table.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import psycopg2
import psycopg2.errors

from virta.cdc.events import CapturedTable, Origin
from virta.cdc.postgres import catalog, connections, slot
from virta.cdc.postgres.decoding import DecodedTable, needs_reading, relation_columns
from virta.cdc.postgres.table_read import Visibility, read_rows, state_of
from virta.cdc.postgres.values import TypeTable
from virta.cdc.state import TableState

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.cdc.change_log import ChangeLog
    from virta.cdc.events import Row
    from virta.cdc.postgres import pgoutput
    from virta.cdc.postgres.catalog import CatalogTable
    from virta.cdc.recorder import ChangeRecorder

    AddChange = Callable[
        [CapturedTable, str, Row | None, Row | None, Origin, dict[str, list[str]]], None
    ]

logger = logging.getLogger("virta.cdc")


class CapturedTables:
    """The tables of one capture."""

    def __init__(
        self,
        dsn: str,
        connection: Any,
        name: str,
        wanted: frozenset[str] | None,
        changes: ChangeLog,
        add: AddChange,
        keep_alive: Callable[[], None],
    ) -> None:
        self._dsn = dsn
        self._sql = connection
        self.name = name
        self.slot = slot.slot_name(name)
        self._wanted = wanted
        self._changes = changes
        self._add = add
        self._keep_alive = keep_alive
        self._recorder: ChangeRecorder
        self.types = TypeTable()
        self.chosen: dict[str, CatalogTable] = {}
        self.relations: dict[int, DecodedTable | None] = {}
        self.to_read: dict[str, bool] = {}
        self._visible: dict[str, Visibility] = {}
        self._warned: set[str] = set()

    def prepare(self, recorder: ChangeRecorder) -> None:
        """Load types and tables; the publication lists them afterwards."""
        self._recorder = recorder
        catalog.load_types(self._sql, self.types)
        for title, known in self._changes.state.tables.items():
            if known.read_at:
                self._visible[title] = Visibility(known.read_at)
        self.sync()

    def sync(self) -> None:
        """Let the publication list every table that should be captured, and note which have to be read."""
        chosen, notes = slot.choose_tables(catalog.tables(self._sql), self._wanted)
        for note in notes:
            if note not in self._warned:
                self._warned.add(note)
                logger.warning("cdc_table %s", note)
        try:
            slot.sync_publication(self._sql, self.slot, chosen)
        except psycopg2.errors.LockNotAvailable:
            logger.warning("cdc_table a new table is in use by writers: it is added later")
            present = catalog.published(self._sql, self.slot) or set()
            chosen = {title: table for title, table in chosen.items() if title in present}
        self.chosen = chosen
        known = self._changes.state.tables
        columns = catalog.columns(self._sql, [table.oid for table in chosen.values()])
        for title, table in chosen.items():
            was = known.get(title)
            if (
                was is None
                or not was.complete
                or was.key != table.key
                or needs_reading(was.columns, columns.get(table.oid, []))
            ):
                self.to_read[title] = True
        for title in sorted(known.keys() - chosen.keys()):
            self._drop(title)

    def _drop(self, title: str) -> None:
        known = self._changes.state.tables.pop(title)
        self._visible.pop(title, None)
        for oid, decoded in self.relations.items():
            if decoded is not None and decoded.table.title == title:
                self.relations[oid] = None
        schema, _, name = title.partition(".")
        gone = CapturedTable(self.name, schema, name, known.columns, known.key)
        origin = self._origin(title, 0, "true", 0, self._recorder.begin_pass())
        self._recorder.drop(gone, origin, self._changes.position)

    def announce(self) -> None:
        """
        Append schema events of columns that were added or dropped, and that no change of a row has shown yet.

        Call it when the stream has nothing waiting: the catalog is ahead of a stream that lags.
        """
        columns = catalog.columns(self._sql, [table.oid for table in self.chosen.values()])
        state = self._changes.state
        for title, table in self.chosen.items():
            known = state.tables.get(title)
            now = columns.get(table.oid, [])
            if known is None or not known.complete or needs_reading(known.columns, now):
                continue
            if [c["name"] for c in known.columns] == [c["name"] for c in now]:
                continue
            known.columns = now
            origin = self._origin(title, 0, "false", 0, self._recorder.begin_pass())
            changed = CapturedTable(self.name, table.schema, table.name, now, known.key)
            self._changes.add([self._recorder.events.schema_change(changed, "ALTER", origin)])
            self._changes.append(self._changes.position)
            self._changes.save()

    def read_all(self, snapshot: str | None) -> None:
        """Read the rows of the tables that need it, all at one state of the database."""
        titles = [title for title in self.to_read if title in self.chosen]
        self.to_read.clear()
        if not titles:
            return
        connection = connections.connect_reading(self._dsn, snapshot)
        try:
            state = state_of(connection)
            for title in titles:
                self._read_table(connection, title, state)
        finally:
            connection.close()

    def _read_table(self, connection: Any, title: str, at: tuple[str, int, int]) -> None:
        found = self.chosen[title]
        columns = catalog.columns(connection, [found.oid]).get(found.oid, [])
        key = found.key or []
        if any(column["typeOid"] not in self.types for column in columns):
            catalog.load_types(self._sql, self.types)
        if not columns:
            return  # dropped meanwhile
        decoded = DecodedTable(self.name, found.schema, found.name, columns, key, self.types)
        table = decoded.table
        snapshot, lsn, ms = at
        self._recorder.begin_pass()
        origin = self._origin(title, 0, "first", lsn, ms)
        incomplete = TableState(columns, key)
        self._recorder.begin_read(title, table, origin, incomplete, self._changes.position)
        number = 0

        def on_row(values: list[str | None]) -> None:
            nonlocal number
            number += 1
            row, _ = decoded.row(values)  # type: ignore[arg-type]
            self._add(table, "r", None, row, self._origin(title, number, "true", lsn, ms), {})
            if self._changes.full:
                self._changes.append(self._changes.position)
                self._keep_alive()

        read_rows(connection, table, on_row)
        self._changes.append(self._changes.position)
        self._changes.state.tables[title] = TableState(columns, key, snapshot, lsn, complete=True)
        self._visible[title] = Visibility(snapshot)
        self.relations = {
            oid: one for oid, one in self.relations.items() if one and one.table.title != title
        }
        self.relations[found.oid] = decoded
        self._changes.save()
        logger.info("cdc_table_read %s: %s rows", table.topic, number)

    def _origin(self, title: str, number: int, snapshot: str, lsn: int, ms: int) -> Origin:
        id_ = self._recorder.read_id(title, number)
        return Origin(id=id_, ts_ms=ms, snapshot=snapshot, lsn=lsn)

    def was_read(self, title: str, begin: pgoutput.Begin) -> bool:
        """Return whether the rows of the table were read after the transaction: then they have its changes."""
        visible = self._visible.get(title)
        if visible is None:
            return False
        if begin.commit_lsn > self._changes.state.tables[title].read_lsn:
            del self._visible[title]
            return False
        return visible.has(begin.xid)

    def on_relation(
        self, relation: pgoutput.Relation, begin: pgoutput.Begin, origin: Origin | None
    ) -> None:
        """
        Follow the columns that the next changes of a table have.

        Args:
            origin: of a schema event; None while changes are skipped.
        """
        title = f"{relation.schema}.{relation.name}"
        if any(column.type_oid not in self.types for column in relation.columns):
            catalog.load_types(self._sql, self.types)
        known = self._changes.state.tables.get(title)
        if known is None:
            # Renamed, or added to the publication just now: its rows are read after this transaction.
            self.relations[relation.oid] = None
            self.to_read[title] = True
            return
        columns = relation_columns(
            relation, catalog.columns(self._sql, [relation.oid]).get(relation.oid, [])
        )
        decoded = DecodedTable(
            self.name, relation.schema, relation.name, columns, known.key, self.types
        )
        self.relations[relation.oid] = decoded
        if self.was_read(title, begin):
            return  # the table as it was before its rows were read
        if self._key_changed(relation, known.key):
            logger.warning("cdc_table the primary key of %s has changed: it is read again", title)
            self.relations[relation.oid] = None
            self.to_read[title] = True
            known.complete = False
            return
        if needs_reading(known.columns, columns):
            self.to_read[title] = True
            known.complete = False
        if [c["name"] for c in known.columns] != [c["name"] for c in columns]:
            known.columns = columns
            if origin is not None:
                altered = self._recorder.events.schema_change(decoded.table, "ALTER", origin)
                self._changes.add([altered])

    @staticmethod
    def _key_changed(relation: pgoutput.Relation, key: list[str]) -> bool:
        if relation.identity == "f":
            return not set(key) <= {column.name for column in relation.columns}
        return {column.name for column in relation.columns if column.in_key} != set(key)
