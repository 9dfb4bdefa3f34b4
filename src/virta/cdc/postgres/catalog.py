"""
What PostgreSQL's catalog says: tables with their keys and columns, types, settings, the slot.

Every function has an open connection as its first argument and runs one statement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from virta.cdc.postgres.values import TypeTable

TABLES_MAX: Final = 5000
# From this version on a published table must not have unpublished columns in its replica identity.
GENERATED_REFUSED: Final = 18_00_00

_TABLES: Final = """
SELECT c.oid::bigint, n.nspname, c.relname, c.relreplident::text,
  (SELECT array_agg(a.attname::text ORDER BY k.place)
     FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(number, place)
     JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
    WHERE i.indrelid = c.oid AND k.place <= i.indnkeyatts
      AND CASE WHEN c.relreplident = 'i' THEN i.indisreplident ELSE i.indisprimary END),
  EXISTS (SELECT 1 FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped),
  current_setting('server_version_num')::int
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
   AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_%%'
 ORDER BY n.nspname, c.relname LIMIT %s
"""
# Generated columns are not replicated.
_COLUMNS: Final = """
SELECT a.attrelid::bigint, a.attname, a.atttypid::bigint, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attnum,
       coalesce(pg_get_expr(d.adbin, d.adrelid), nullif(a.attidentity::text, ''))
  FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
 WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
 ORDER BY a.attrelid, a.attnum
"""
_TYPES: Final = """
SELECT oid::bigint, typname::text, typtype::text, typbasetype::bigint,
       CASE WHEN typcategory = 'A' AND typlen = -1 THEN typelem::bigint ELSE 0 END, typdelim::text
  FROM pg_type
"""
_SLOT: Final = """
SELECT s.plugin, s.database, s.active, s.active_pid, s.wal_status,
       (s.confirmed_flush_lsn - '0/0')::bigint, (s.restart_lsn - '0/0')::bigint,
       CASE WHEN pg_is_in_recovery() THEN NULL ELSE (pg_current_wal_lsn() - '0/0')::bigint END,
       to_jsonb(s) ->> 'invalidation_reason'  -- from PostgreSQL 17 on
  FROM pg_replication_slots s WHERE s.slot_name = %s
"""


class CatalogTable(msgspec.Struct):
    """A table, or the root of partitions."""

    oid: int
    schema: str
    name: str
    identity: str
    key: list[str] | None
    generated: bool  # whether it has generated columns, which are not published
    version: int  # of the server

    @property
    def title(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def problem(self) -> str:
        """Why it cannot be captured; empty if it can."""
        if self.identity == "n":
            return f"table {self.title} has REPLICA IDENTITY NOTHING: its updates and deletes are not in the WAL"
        if not self.key:
            return f"table {self.title} has no primary key: it is not captured until it has one"
        if self.identity == "f" and self.generated and self.version >= GENERATED_REFUSED:
            return (
                f"table {self.title} has REPLICA IDENTITY FULL and a generated column: PostgreSQL 18 refuses updates "
                f"of such a table in a publication, so it is not captured; ALTER TABLE {self.title} REPLICA IDENTITY "
                "DEFAULT"
            )
        return ""


class SlotStatus(msgspec.Struct):
    """The replication slot."""

    plugin: str
    database: str
    active: bool
    pid: int | None
    wal_status: str | None
    confirmed_lsn: int | None
    restart_lsn: int | None
    current_lsn: int | None
    reason: str | None = None  # why it was invalidated, as PostgreSQL says it

    @property
    def retained_bytes(self) -> int:
        """Bytes of WAL that the server keeps for the slot."""
        return max(0, (self.current_lsn or 0) - (self.restart_lsn or self.current_lsn or 0))

    @property
    def lag_bytes(self) -> int:
        """Bytes of WAL that are not confirmed yet."""
        return max(0, (self.current_lsn or 0) - (self.confirmed_lsn or self.current_lsn or 0))


def tables(connection: Any) -> list[CatalogTable]:
    """Return all tables that could be captured, in order of their names."""
    return [CatalogTable(*row) for row in _fetch_rows(connection, _TABLES, (TABLES_MAX,))]


def columns(connection: Any, oids: list[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the columns of tables as schema events describe them."""
    found: dict[int, list[dict[str, Any]]] = {}
    for oid, name, type_oid, type_name, required, number, default in _fetch_rows(
        connection, _COLUMNS, (oids,)
    ):
        column = {
            "name": name,
            "typeName": type_name,
            "typeOid": type_oid,
            "optional": not required,
            "attnum": number,
            "defaultValueExpression": default,
        }
        found.setdefault(oid, []).append(column)
    return found


def load_types(connection: Any, types: TypeTable) -> None:
    types.load(_fetch_rows(connection, _TYPES))


def slot(connection: Any, name: str) -> SlotStatus | None:
    """Return the status of a slot, None if there is none."""
    found = _fetch_rows(connection, _SLOT, (name,))
    return SlotStatus(*found[0]) if found else None


def published(connection: Any, publication: str) -> set[str] | None:
    """Return the titles of a publication's tables; None if there is no such publication."""
    if not _fetch_rows(
        connection, "SELECT 1 FROM pg_publication WHERE pubname = %s", (publication,)
    ):
        return None
    found = _fetch_rows(
        connection,
        "SELECT n.nspname, c.relname FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
        " JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE p.pubname = %s",
        (publication,),
    )
    return {f"{schema}.{name}" for schema, name in found}


def identity(connection: Any) -> tuple[str, str]:
    """Return the identity of the database (system identifier and name), and its name."""
    (row,) = _fetch_rows(
        connection,
        "SELECT system_identifier::text, current_database() FROM pg_control_system()",
    )
    return f"{row[0]}/{row[1]}", row[1]


def setting(connection: Any, name: str) -> str:
    return str(_fetch_rows(connection, "SELECT current_setting(%s)", (name,))[0][0])


def _fetch_rows(connection: Any, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)
        return list(cursor.fetchall())
