"""
The publication and the replication slot: create, check, drop.

Both are named `virta_<name>`. The publication lists tables one by one: a publication of all tables would make every
update of a table without a primary key fail in the application.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg2
import psycopg2.errors

from virta.cdc.postgres import catalog
from virta.cdc.postgres.connections import address, connect_replication, quote_ident
from virta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.cdc.postgres.catalog import CatalogTable, SlotStatus

VERSION_MIN: Final = 13_00_00  # of the server: partitions are published as their root
# How long a new table may keep writers waiting while it is added; it is tried again later.
LOCK_MS: Final = 3000
# How long `drop` waits for a slot to be released.
RELEASE_S: Final = 5.0

logger = logging.getLogger("virta.cdc")


def slot_name(name: str) -> str:
    """Return the name of slot and publication."""
    return "virta_" + name.lower().replace("-", "_")


def check_server(connection: Any, dsn: str) -> None:
    """Refuse a server that cannot replicate logically."""
    if connection.server_version < VERSION_MIN:
        raise CaptureError(
            f"{address(dsn)} is PostgreSQL {connection.server_version // 10000}: at least 13 is needed",
            code="capture_server_too_old",
        )
    level = catalog.setting(connection, "wal_level")
    if level != "logical":
        raise CaptureError(
            f"{address(dsn)}: wal_level is {level}, it must be logical: ALTER SYSTEM SET wal_level = logical, and "
            "restart PostgreSQL",
            code="capture_wal_level",
        )


def choose_tables(
    found: Iterable[CatalogTable], wanted: frozenset[str] | None
) -> tuple[dict[str, CatalogTable], list[str]]:
    """Return the tables to capture by title, and a sentence for each that is left out."""
    chosen: dict[str, CatalogTable] = {}
    notes: list[str] = []
    known = set()
    for table in found:
        names = {table.title} | ({table.name} if table.schema == "public" else set())
        if wanted is not None and not names & wanted:
            continue
        known |= names
        if table.problem:
            notes.append(table.problem)
        else:
            chosen[table.title] = table
    notes += [f"there is no table {name!r}" for name in sorted((wanted or frozenset()) - known)]
    return chosen, notes


def sync_publication(
    connection: Any, publication: str, tables: dict[str, CatalogTable]
) -> list[str]:
    """Make the publication list exactly these tables; return those that were added."""
    present = catalog.published(connection, publication)
    quoted = quote_ident(publication, connection)
    if present is None:
        listed = ", ".join(_quoted(table, connection) for table in tables.values())
        target = f"FOR TABLE {listed} " if listed else ""
        _execute(
            connection,
            f"CREATE PUBLICATION {quoted} {target}WITH (publish_via_partition_root = true)",
        )
        return sorted(tables)
    added = sorted(tables.keys() - present)
    for title in added:
        where = _quoted(tables[title], connection)
        # The lock waits for transactions that have written to the table: they are not published.
        _execute(
            connection,
            f"BEGIN; SET LOCAL lock_timeout = {LOCK_MS}; LOCK TABLE {where} IN SHARE MODE; "
            f"ALTER PUBLICATION {quoted} ADD TABLE {where}; COMMIT",
        )
    for title in sorted(present - tables.keys()):
        schema, _, name = title.partition(".")
        where = f"{quote_ident(schema, connection)}.{quote_ident(name, connection)}"
        _execute(connection, f"ALTER PUBLICATION {quoted} DROP TABLE {where}")
    return added


def create_slot(dsn: str, name: str) -> tuple[Any, str]:
    """
    Create the slot; return its connection and the snapshot of the state at which its changes begin.

    The snapshot is valid as long as the connection is open and unused.
    """
    connection = connect_replication(dsn)
    try:
        cursor = connection.cursor()
        cursor.create_replication_slot(name, output_plugin="pgoutput")
        _, _, snapshot, _ = cursor.fetchone()
    except BaseException:
        connection.close()
        raise
    return connection, str(snapshot)


def check_slot(status: SlotStatus | None, name: str, dsn: str, database: str) -> None:
    """Refuse a slot from which changes cannot be read, or not without a gap."""
    if status is None:
        raise CaptureError(
            f"{address(dsn)}: the replication slot {name} does not exist any more, so changes since the last run are "
            "lost: `virta cdc postgres DSN drop`, and the next run reads every table again",
            code="capture_slot_missing",
        )
    if status.wal_status == "lost":
        raise CaptureError(
            f"{address(dsn)}: the replication slot {name} was invalidated, {_why_invalid(status)}: changes are lost. "
            "`virta cdc postgres DSN drop`, and the next run reads every table again",
            code="capture_slot_invalid",
        )
    if status.plugin != "pgoutput" or status.database != database:
        raise CaptureError(
            f"{address(dsn)}: the replication slot {name} is for {status.plugin} in database {status.database}, not for "
            f"pgoutput in {database}: choose another --name",
            code="capture_slot_foreign",
        )


def _why_invalid(status: SlotStatus) -> str:
    if status.reason == "idle_timeout":
        return "because it was not used for idle_replication_slot_timeout"
    if status.reason in {None, "wal_removed"}:
        return "because the WAL it needs is over max_slot_wal_keep_size"
    return f"as PostgreSQL says by {status.reason}"


def drop(connection: Any, name: str, dsn: str) -> None:
    """Drop slot and publication where they exist."""
    status = catalog.slot(connection, name)
    deadline = time.monotonic() + RELEASE_S
    while status is not None and status.active and time.monotonic() < deadline:
        time.sleep(RELEASE_S / 50)  # a capture that has just ended: its server process ends soon
        status = catalog.slot(connection, name)
    if status is not None and status.active:
        raise CaptureError(
            f"{address(dsn)}: the replication slot {name} is in use by process {status.pid}: stop that capture first",
            code="capture_running",
        )
    with connection.cursor() as cursor:
        if status is not None:
            cursor.execute("SELECT pg_drop_replication_slot(%s)", (name,))
        cursor.execute(f"DROP PUBLICATION IF EXISTS {quote_ident(name, connection)}")


def _quoted(table: CatalogTable, connection: Any) -> str:
    return f"{quote_ident(table.schema, connection)}.{quote_ident(table.name, connection)}"


def _execute(connection: Any, statement: str) -> None:
    with connection.cursor() as cursor:
        try:
            cursor.execute(statement)
        except psycopg2.errors.LockNotAvailable:
            cursor.execute("ROLLBACK")
            raise
