"""
The tables and triggers that record changes inside a SQLite database.

    virta_cdc_meta      database: a random id; log: id of the log that the changes go to
    virta_cdc_tables    one row per captured table and set of columns: id, name, columns and key as JSON
    virta_cdc_changes   seq, tbl (id of virta_cdc_tables), op (c, u, d, ?), ts (ms since 1970), o0 … (old), n0 … (new)

Triggers copy old and new values as they are, so types are kept and no write of the application can fail because of
them. Rows of virta_cdc_changes become visible with the transaction that wrote them, and are removed once the log has
them on disk.

Op `?`: with INSERT OR REPLACE, SQLite removes rows that conflict in a unique column without firing a delete trigger.
A trigger before the write records such rows; the reader checks whether they still exist.
"""

from __future__ import annotations

import json
import logging
import uuid
from typing import TYPE_CHECKING, Any, Final

from virta.errors import CaptureError

if TYPE_CHECKING:
    import sqlite3

PREFIX: Final = "virta_cdc_"
# Each change has the old and the new values; SQLite allows 2,000 columns a table.
COLUMNS_MAX: Final = 990
TABLES_MAX: Final = 1000
SHADOW_PARTS: Final = (
    "data", "idx", "content", "docsize", "config",  # FTS5
    "segments", "segdir", "stat",  # FTS3 and FTS4
    "node", "rowid", "parent",  # R*Tree
)  # fmt: skip
# (schema, name, type, …) of each table; empty before SQLite 3.37.
_ROWS_OF_TABLES: Final = "PRAGMA table_list"
_NOW: Final = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"

logger = logging.getLogger("virta.cdc")


class SqliteTable:
    """One table with one set of columns."""

    def __init__(
        self, number: int, name: str, columns: list[dict[str, Any]], key: list[str]
    ) -> None:
        self.number = number
        self.name = name
        self.columns = columns
        self.key = key
        self.names: list[str] = [column["name"] for column in columns]


def quote(name: str) -> str:
    """Return an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def install(
    db: sqlite3.Connection, log: str, wanted: frozenset[str] | None
) -> tuple[str, list[str]]:
    """
    Create or update tables and triggers in one transaction.

    Args:
        log: id of the log that the changes go to.
        wanted: names of the tables to capture; None for all.

    Returns:
        The id of the database, and a sentence for each table that is left out.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute("CREATE TABLE IF NOT EXISTS virta_cdc_meta (name TEXT PRIMARY KEY, value TEXT)")
        db.execute(
            "CREATE TABLE IF NOT EXISTS virta_cdc_tables"
            " (id INTEGER PRIMARY KEY, name TEXT, columns TEXT, key TEXT, active INTEGER)"
        )
        db.execute(
            "CREATE TABLE IF NOT EXISTS virta_cdc_changes"
            " (seq INTEGER PRIMARY KEY AUTOINCREMENT, tbl INTEGER, op TEXT, ts INTEGER)"
        )
        identity = _identify(db, log)
        notes = _sync_tables(db, wanted)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    return identity, notes


def remove(db: sqlite3.Connection) -> None:
    """Remove every table and trigger of the capture."""
    db.execute("BEGIN IMMEDIATE")
    try:
        for (name,) in db.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND name LIKE 'virta\\_cdc\\_%' ESCAPE '\\'"
        ).fetchall():
            db.execute(f"DROP TRIGGER {quote(name)}")
        for name in ("changes", "tables", "meta"):
            db.execute(f"DROP TABLE IF EXISTS {PREFIX}{name}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def load_tables(db: sqlite3.Connection) -> dict[int, SqliteTable]:
    """Return every captured table, also with columns of earlier times, by number."""
    return {
        number: SqliteTable(number, name, json.loads(columns), json.loads(key))
        for number, name, columns, key in db.execute(
            "SELECT id, name, columns, key FROM virta_cdc_tables"
        )
    }


def active_tables(db: sqlite3.Connection) -> dict[str, SqliteTable]:
    """Return the captured tables as they are now, by name."""
    return {
        name: SqliteTable(number, name, json.loads(columns), json.loads(key))
        for number, name, columns, key in db.execute(
            "SELECT id, name, columns, key FROM virta_cdc_tables WHERE active ORDER BY name"
        )
    }


def _identify(db: sqlite3.Connection, log: str) -> str:
    known = dict(db.execute("SELECT name, value FROM virta_cdc_meta"))
    if known.setdefault("log", log) != log:
        raise CaptureError(
            f"the changes of this database go to another log ({known['log']}): `virta cdc sqlite FILE drop` ends that "
            "capture",
            code="capture_other_log",
        )
    known.setdefault("database", str(uuid.uuid4()))
    db.executemany("INSERT OR REPLACE INTO virta_cdc_meta VALUES (?, ?)", known.items())
    return str(known["database"])


def _sync_tables(db: sqlite3.Connection, wanted: frozenset[str] | None) -> list[str]:
    found: dict[str, SqliteTable] = {}
    names = [
        name
        for (name,) in db.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
            " AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND name NOT LIKE 'virta\\_cdc\\_%' ESCAPE '\\' ORDER BY name"
        )
    ]
    shadows = _shadow_tables(db)
    names = [name for name in names if name not in shadows]
    missing = sorted((wanted or frozenset()) - set(names))
    notes = [f"there is no table {name!r}" for name in missing]
    for name in names:
        if wanted is not None and name not in wanted:
            continue
        columns, key = describe(db, name)
        if not key:
            notes.append(f"table {name!r} has no primary key: it is not captured")
        elif len(columns) > COLUMNS_MAX:
            notes.append(f"table {name!r} has {len(columns)} columns, the limit is {COLUMNS_MAX}")
        elif len(found) == TABLES_MAX:
            notes.append(f"table {name!r} is over the limit of {TABLES_MAX} tables")
        else:
            found[name] = SqliteTable(0, name, columns, key)
    old = active_tables(db)
    for name, table in old.items():
        if name not in found:
            _drop_triggers(db, table.number)
            db.execute("UPDATE virta_cdc_tables SET active = 0 WHERE id = ?", (table.number,))
    for name, table in found.items():
        before = old.get(name)
        if (
            before is not None
            and (before.columns, before.key) == (table.columns, table.key)
            and _has_triggers(db, before)
        ):
            continue
        if before is not None:
            _drop_triggers(db, before.number)
            db.execute("UPDATE virta_cdc_tables SET active = 0 WHERE id = ?", (before.number,))
        _register(db, table)
        notes += _create_triggers(db, table)
    return notes


def _shadow_tables(db: sqlite3.Connection) -> set[str]:
    """
    Return the tables in which virtual tables keep their data.

    They must have no triggers: SQLite crashes when FTS5 writes to one that has. SQLite knows them by itself where it
    has the module of the virtual table; else the names that FTS and R*Tree use tell.
    """
    virtual = [
        name
        for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE sql LIKE 'CREATE VIRTUAL%'")
    ]
    shadows = {f"{name}_{part}" for name in virtual for part in SHADOW_PARTS}
    shadows |= {row[1] for row in db.execute(_ROWS_OF_TABLES) if row[2] == "shadow"}
    return shadows


def describe(db: sqlite3.Connection, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the columns of a table and the names of its primary key."""
    columns: list[dict[str, Any]] = []
    key: list[tuple[int, str]] = []
    for _, column, kind, required, default, in_key, hidden in db.execute(
        f"PRAGMA table_xinfo({quote(name)})"
    ):
        if hidden == 1:
            continue  # of a virtual table
        columns.append(
            {
                "name": column,
                "typeName": kind,
                "optional": not required,
                "defaultValue": default,
                "generated": hidden in {2, 3},
            }
        )
        if in_key:
            key.append((in_key, column))
    return columns, [column for _, column in sorted(key)]


def _register(db: sqlite3.Connection, table: SqliteTable) -> None:
    cursor = db.execute(
        "INSERT INTO virta_cdc_tables (name, columns, key, active) VALUES (?, ?, ?, 1)",
        (table.name, json.dumps(table.columns), json.dumps(table.key)),
    )
    table.number = cursor.lastrowid or 0
    present = {row[1] for row in db.execute("PRAGMA table_info(virta_cdc_changes)")}
    for at in range(len(table.columns)):
        for side in "on":
            if f"{side}{at}" not in present:
                db.execute(f"ALTER TABLE virta_cdc_changes ADD COLUMN {side}{at}")


def _trigger(number: int, part: str) -> str:
    return f"{PREFIX}{number}_{part}"


def _has_triggers(db: sqlite3.Connection, table: SqliteTable) -> bool:
    """
    Return whether a table has its triggers, as they should be now.

    A table that was created again has none; one with a new unique index needs others, and may have lost rows to
    REPLACE meanwhile.
    """
    present = dict(
        db.execute(
            "SELECT name, sql FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = ?"
            " AND name LIKE 'virta\\_cdc\\_%' ESCAPE '\\'",
            (table.name,),
        )
    )
    return present == _triggers(db, table)[0]


def _drop_triggers(db: sqlite3.Connection, number: int) -> None:
    for part in ("c", "u", "d", "i", "r"):
        db.execute(f"DROP TRIGGER IF EXISTS {_trigger(number, part)}")


def _create_triggers(db: sqlite3.Connection, table: SqliteTable) -> list[str]:
    statements, notes = _triggers(db, table)
    for statement in statements.values():
        db.execute(statement)
    return notes


def _triggers(db: sqlite3.Connection, table: SqliteTable) -> tuple[dict[str, str], list[str]]:
    """Return the statements that create a table's triggers, by name, and a sentence for what they cannot record."""
    count = len(table.names)
    old = [f"o{at}" for at in range(count)]
    new = [f"n{at}" for at in range(count)]
    from_old = [f"OLD.{quote(name)}" for name in table.names]
    from_new = [f"NEW.{quote(name)}" for name in table.names]
    on = quote(table.name)

    def record(op: str, into: list[str], values: list[str]) -> str:
        return (
            f"INSERT INTO virta_cdc_changes (tbl, op, ts, {', '.join(into)}) "
            f"VALUES ({table.number}, '{op}', {_NOW}, {', '.join(values)});"
        )

    bodies = {
        "c": ("AFTER INSERT", record("c", new, from_new)),
        "u": ("AFTER UPDATE", record("u", old + new, from_old + from_new)),
        "d": ("AFTER DELETE", record("d", old, from_old)),
    }
    conflicts, notes = _conflicts(db, table)
    if conflicts:
        selected = ", ".join(quote(name) for name in table.names)
        body = (
            f"INSERT INTO virta_cdc_changes (tbl, op, ts, {', '.join(old)}) "
            f"SELECT {table.number}, '?', {_NOW}, {selected} FROM {on} WHERE ({conflicts})"
        )
        same = " AND ".join(f"{quote(name)} IS OLD.{quote(name)}" for name in table.key)
        bodies["i"] = ("BEFORE INSERT", body + ";")
        bodies["r"] = ("BEFORE UPDATE", f"{body} AND NOT ({same});")
    return {
        name: f"CREATE TRIGGER {name} {when} ON {on} FOR EACH ROW BEGIN {body} END"
        for part, (when, body) in bodies.items()
        for name in (_trigger(table.number, part),)
    }, notes


def _conflicts(db: sqlite3.Connection, table: SqliteTable) -> tuple[str, list[str]]:
    """Return the condition of rows that REPLACE would remove beside the one with the same key, or an empty text."""
    terms: list[str] = []
    notes: list[str] = []
    indexes = db.execute(f"PRAGMA index_list({quote(table.name)})").fetchall()
    for _, index, unique, origin, _ in indexes:
        if not unique or origin == "pk":
            continue
        members = db.execute(f"PRAGMA index_info({quote(index)})").fetchall()
        names = [name for _, _, name in members]
        if None in names:
            notes.append(
                f"index {index!r} of table {table.name!r} is on an expression: rows that INSERT OR REPLACE removes "
                "because of it are not seen; PRAGMA recursive_triggers = ON in the application helps"
            )
            continue
        terms.append(" AND ".join(f"{quote(name)} = NEW.{quote(name)}" for name in names))
    # A row with the same primary key is replaced by the new one, which has an event of its own.
    return " OR ".join(f"({term})" for term in terms), notes
