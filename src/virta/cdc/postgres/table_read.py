"""
Read all rows of a table at one state of the database, in the order of its key, without holding them in memory.

Rows come by COPY, whose text format is that of pgoutput: one converter serves both. Which transactions the state
has is a snapshot of PostgreSQL, `xmin:xmax:xip,…`; changes of those transactions are in the rows already.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from virta.cdc.postgres.connections import quote_ident

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.cdc.events import CapturedTable

_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_XID_BITS: Final = 1 << 32


class Visibility:
    """Which transactions a snapshot has."""

    def __init__(self, snapshot: str) -> None:
        low, high, running = snapshot.split(":")
        self._low = int(low)
        self._high = int(high)
        self._running = frozenset(int(xid) for xid in running.split(",") if xid)

    def has(self, xid: int) -> bool:
        """Return whether the snapshot has a committed transaction, given the lower 32 bits of its number."""
        whole = self._high - (self._high - xid) % _XID_BITS
        if self._high - whole > _XID_BITS // 2:  # nearer above than below
            whole += _XID_BITS
        return whole < self._low or (whole < self._high and whole not in self._running)


def state_of(connection: Any) -> tuple[str, int, int]:
    """Return the snapshot of a reading transaction, a WAL position after everything it sees, and the time in ms."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_current_snapshot()::text, (pg_current_wal_insert_lsn() - '0/0')::bigint,"
            " (extract(epoch FROM now()) * 1000)::bigint"
        )
        snapshot, lsn, ms = cursor.fetchone()
    return str(snapshot), int(lsn), int(ms)


def read_rows(
    connection: Any, table: CapturedTable, on_row: Callable[[list[str | None]], None]
) -> None:
    """Call `on_row` with the texts of each row, in the order of `table.columns`."""
    names = ", ".join(quote_ident(column["name"], connection) for column in table.columns)
    order = ", ".join(quote_ident(name, connection) for name in table.key)
    where = f"{quote_ident(table.schema, connection)}.{quote_ident(table.name, connection)}"
    statement = f"COPY (SELECT {names} FROM {where} ORDER BY {order}) TO STDOUT"
    with connection.cursor() as cursor:
        cursor.copy_expert(statement, _CopyRows(on_row))


class _CopyRows:
    """The file that COPY writes to: lines become rows."""

    def __init__(self, on_row: Callable[[list[str | None]], None]) -> None:
        self._on_row = on_row
        self._rest = b""

    def write(self, data: bytes) -> int:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._on_row(parse_copy_line(line.decode()))
        return len(data)


def parse_copy_line(line: str) -> list[str | None]:
    """Return the values of a line in COPY's text format."""
    return [_copy_field(field) for field in line.split("\t")]


def _copy_field(field: str) -> str | None:
    if "\\" not in field:
        return field
    if field == "\\N":
        return None
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), field)
