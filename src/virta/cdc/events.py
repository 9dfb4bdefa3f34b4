"""
Changes as CloudEvents in Debezium's shape, ready to be appended.

    {"specversion": "1.0", "id": …, "source": "/debezium/<connector>/<server>",
     "type": "io.debezium.<connector>.datachangeevent", "iodebeziumop": "u", …,
     "data": {"before": …, "after": …, "op": "c|u|d|r|t", "source": {…}, "ts_ms": …}}

A record's topic is `<server>.<schema>.<table>`, its key the primary key as compact JSON: {"id":7}. A change of the
primary key is two records, `d` of the old key and `c` of the new one.

Two further members of `data` appear when they are needed: `unchanged` lists columns whose value the database did not
send because it did not change (their value in `after` is "__unchanged"), `base64` lists columns of SQLite whose
value is bytes.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from virta import __version__, clock
from virta.errors import CaptureError
from virta.event.rules import escape_text
from virta.log.limits import KEY_BYTES_MAX, TOPIC_BYTES_MAX, VALUE_BYTES_MAX

UNCHANGED: Final = "__unchanged"
SCHEMA_CHANGES: Final = "schema-changes"
TRANSACTIONS: Final = "transaction"

Row = dict[str, Any]
ChangeRecord = tuple[str, bytes, bytes]

encode = msgspec.json.Encoder().encode


class CapturedTable:
    """A table as events name it: its channel, its columns and the columns of its key."""

    def __init__(
        self, server: str, schema: str, name: str, columns: list[dict[str, Any]], key: list[str]
    ) -> None:
        self.schema = schema
        self.name = name
        self.columns = columns
        self.key = key
        self.topic = f"{server}.{schema}.{name}"
        if len(self.topic.encode()) > TOPIC_BYTES_MAX or "\0" in self.topic:
            raise CaptureError(
                f"table {schema}.{name} cannot be captured: its channel's name would be longer than "
                f"{TOPIC_BYTES_MAX} bytes",
                code="capture_table_invalid",
            )

    @property
    def title(self) -> str:
        return f"{self.schema}.{self.name}"

    def key_is_sent(self, unchanged: list[str]) -> bool:
        return not set(unchanged) & set(self.key)

    def unsent_key(self) -> CaptureError:
        return CaptureError(
            f"the primary key of a row of {self.title} was not sent, because it is stored out of line (TOAST): "
            f"ALTER TABLE {self.title} REPLICA IDENTITY FULL, or leave the table out",
            code="capture_key_unsent",
        )

    def key_of(self, row: Row) -> bytes:
        """Return the record key of a row."""
        key = encode({name: row[name] for name in self.key})
        if not key.isascii() or b"\x7f" in key:
            # The key is an attribute, too; an escape is the same text in JSON.
            key = escape_text(key.decode()).encode()
        if len(key) > KEY_BYTES_MAX:
            raise CaptureError(
                f"a primary key of {self.title} takes {len(key)} bytes as JSON, the limit is {KEY_BYTES_MAX}: "
                f"{key[:80].decode('utf-8', 'replace')}…; leave the table out, or give it a shorter key",
                code="capture_key_too_large",
            )
        return key


class Origin(msgspec.Struct):
    """Where a change comes from: the part of its `id` after the server's name, and its `source` members."""

    id: str
    ts_ms: int
    snapshot: str = "false"
    tx_id: int | None = None
    lsn: int | None = None
    transaction: str | None = None
    order: int = 0  # number of the change in its transaction


class ChangeEvents:
    """Builds the records of one database."""

    def __init__(self, connector: str, server: str, database: str) -> None:
        self.connector = connector
        self.server = server
        self.database = database
        self._source = f"/debezium/{connector}/{server}"
        self._type = f"io.debezium.{connector}."

    def change(
        self,
        table: CapturedTable,
        op: str,
        before: Row | None,
        after: Row | None,
        origin: Origin,
        **more: list[str],
    ) -> list[ChangeRecord]:
        """Return the records of one change: two if it changes the primary key."""
        if op == "u" and before is not None and after is not None:
            old, new = table.key_of(before), table.key_of(after)
            if old != new:
                deleted = self._record(table, "d", old, before, None, origin, "d", {})
                return [deleted, self._record(table, "c", new, None, after, origin, "c", more)]
        row = before if op == "d" else after
        key = table.key_of(row) if row is not None else b""
        return [self._record(table, op, key, before, after, origin, "", more)]

    def _record(
        self,
        table: CapturedTable,
        op: str,
        key: bytes,
        before: Row | None,
        after: Row | None,
        origin: Origin,
        part: str,
        more: dict[str, list[str]],
    ) -> ChangeRecord:
        now = clock.now_ms()
        attributes = self._attributes("datachangeevent", origin, part, table, now)
        attributes["iodebeziumop"] = op
        if key:
            attributes["partitionkey"] = key.decode()
        data: dict[str, Any] = {
            "before": before,
            "after": after,
            "op": op,
            "source": self._source_of(table, origin),
            "ts_ms": now,
        }
        if origin.transaction is not None:
            data["transaction"] = {"id": origin.transaction, "total_order": origin.order}
        data.update(more)
        attributes["data"] = data
        return self._record_within_limit(table, key, encode(attributes))

    def schema_change(
        self, table: CapturedTable, kind: str, origin: Origin, *, optional: bool = True
    ) -> ChangeRecord:
        """Return the event of a table that appeared (CREATE), changed (ALTER) or was dropped (DROP)."""
        now = clock.now_ms()
        attributes = self._attributes("schemachangeevent", origin, "schema", table, now)
        described = {
            "primaryKeyColumnNames": table.key,
            "columns": [{"position": at, **column} for at, column in enumerate(table.columns, 1)],
        }
        key = escape_text(encode({"schema": table.schema, "table": table.name}).decode())
        attributes["partitionkey"] = key
        attributes["data"] = {
            "source": self._source_of(table, origin),
            "ts_ms": now,
            "databaseName": self.database,
            "schemaName": table.schema,
            "ddl": None,
            "tableChanges": [
                {
                    "type": kind,
                    "id": f'"{table.schema}"."{table.name}"',
                    "table": None if kind == "DROP" and optional else described,
                }
            ],
        }
        return f"{self.server}.{SCHEMA_CHANGES}", key.encode(), encode(attributes)

    def transaction_end(self, origin: Origin, count: int) -> ChangeRecord:
        """Return the event after the last batch of a transaction that took several."""
        now = clock.now_ms()
        attributes = self._attributes("transactionmetadataevent", origin, "end", None, now)
        attributes["data"] = {
            "status": "END",
            "id": origin.transaction,
            "event_count": count,
            "ts_ms": now,
        }
        return f"{self.server}.{TRANSACTIONS}", b"", encode(attributes)

    def _attributes(
        self, kind: str, origin: Origin, part: str, table: CapturedTable | None, now: int
    ) -> dict[str, Any]:
        tail = f"{origin.id};{part}" if part else origin.id
        attributes: dict[str, Any] = {
            "specversion": "1.0",
            "id": escape_text(f"name:{self.server};{tail}"),
            "source": self._source,
            "type": self._type + kind,
            "datacontenttype": "application/json",
            "time": clock.time_text((origin.ts_ms or now) * 1000),
            "iodebeziumconnector": self.connector,
            "iodebeziumname": self.server,
            "iodebeziumtsms": str(origin.ts_ms),
            "iodebeziumsnapshot": origin.snapshot,
            "iodebeziumdb": escape_text(self.database),
        }
        if table is not None:
            attributes["iodebeziumschema"] = escape_text(table.schema)
            attributes["iodebeziumtable"] = escape_text(table.name)
        if origin.tx_id is not None:
            attributes["iodebeziumtxid"] = str(origin.tx_id)
        if origin.lsn is not None:
            attributes["iodebeziumlsn"] = str(origin.lsn)
        return attributes

    def _source_of(self, table: CapturedTable, origin: Origin) -> dict[str, Any]:
        source: dict[str, Any] = {
            "version": __version__,
            "connector": self.connector,
            "name": self.server,
            "ts_ms": origin.ts_ms,
            "snapshot": origin.snapshot,
            "db": self.database,
            "schema": table.schema,
            "table": table.name,
        }
        if origin.tx_id is not None:
            source["txId"] = origin.tx_id
        if origin.lsn is not None:
            source["lsn"] = origin.lsn
        return source

    def _record_within_limit(self, table: CapturedTable, key: bytes, value: bytes) -> ChangeRecord:
        if len(value) > VALUE_BYTES_MAX:
            raise CaptureError(
                f"a row of {table.title} with key {key.decode('utf-8', 'replace')} makes an event of {len(value)} "
                f"bytes, the limit is {VALUE_BYTES_MAX}: leave the table out, or store such values elsewhere",
                code="capture_row_too_large",
            )
        return table.topic, key, value
