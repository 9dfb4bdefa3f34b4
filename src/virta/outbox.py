"""
The outbox: publish events in the same transaction as the rows they are about.

    import virta.outbox

    virta.outbox.create_table(connection)  # once
    with connection:
        connection.execute("UPDATE orders SET status = 'paid' WHERE id = 7")
        virta.outbox.add(connection, "payments", {"order": 7}, key="7")

The event is in the database if and only if the transaction commits. A capture of the database (`virta cdc`) forwards
it to the channel and then removes the row. `connection` is a DB-API connection (sqlite3, psycopg2, psycopg, …), a
SQLAlchemy connection or a SQLAlchemy session; nothing is committed here.
"""

from __future__ import annotations

import sys
import time
import uuid
from typing import Any, Final

from virta.errors import EventError
from virta.event import Event

TABLE: Final = "virta_outbox"
TYPE: Final = "virta.outbox"
SOURCE: Final = "/virta/outbox"
# The log's limits of topics and keys.
CHANNEL_BYTES_MAX: Final = 1024
KEY_BYTES_MAX: Final = 1024
_CREATE: Final = (
    f"CREATE TABLE IF NOT EXISTS {TABLE} (id VARCHAR(64) PRIMARY KEY, channel TEXT NOT NULL, "
    "key TEXT NOT NULL, event TEXT NOT NULL)"
)
# DB-API's paramstyle -> the placeholders of four values.
_PLACES: Final = {
    "qmark": "?, ?, ?, ?",
    "format": "%s, %s, %s, %s",
    "pyformat": "%s, %s, %s, %s",
    "numeric": ":1, :2, :3, :4",
    "named": ":1, :2, :3, :4",
}


def create_table(connection: Any) -> None:
    """Create the table `virta_outbox` unless it exists; the caller commits."""
    _execute(connection, _CREATE, ())


def add(
    connection: Any,
    channel: str,
    data: Any,
    *,
    key: str = "",
    type: str = TYPE,  # noqa: A002 - the attribute's name
    source: str = SOURCE,
    **attributes: Any,
) -> str:
    """
    Add an event to the outbox in the transaction of `connection`; return the event's id.

    Args:
        channel: where the event is published.
        data: an `Event`, which is published as it is, or the data of a new event.
        key: the key of the record; that of the event (`partitionkey`) by default.
        type, source, attributes: of a new event.

    Raises:
        EventError: the channel or the key is too long, or the event is not valid.
    """
    event = data if isinstance(data, Event) else Event.new(type, source, data, **attributes)
    _check_text("channel", channel, 1, CHANNEL_BYTES_MAX)
    record_key = key or event.partition_key
    _check_text("key", record_key, 0, KEY_BYTES_MAX)
    # Ordered by time: rows from before the capture are forwarded in the order of their ids.
    id_ = f"{time.time_ns():020d}-{uuid.uuid4()}"
    values = (id_, channel, record_key, event.to_line().decode())
    _execute(connection, f"INSERT INTO {TABLE} (id, channel, key, event) VALUES", values)
    return event.id


def _check_text(name: str, text: str, least: int, most: int) -> None:
    if not isinstance(text, str) or not least <= len(text.encode()) <= most or "\0" in text:
        raise EventError(
            f"{name} is {text!r:.80}: it must be a text of {least} to {most} bytes without NUL",
            code=f"outbox-{name}-invalid",
        )


def _execute(connection: Any, statement: str, values: tuple[str, ...]) -> None:
    """Execute a statement on a SQLAlchemy connection or session, or on a DB-API connection."""
    if type(connection).__module__.startswith("sqlalchemy."):
        from sqlalchemy import text  # noqa: PLC0415 - only for its users

        names = [f"v{at}" for at in range(len(values))]
        places = f" ({', '.join(':' + name for name in names)})" if values else ""
        connection.execute(text(statement + places), dict(zip(names, values, strict=True)))
        return
    cursor = connection.cursor()
    try:
        if values:
            cursor.execute(f"{statement} ({_PLACES[_paramstyle(connection)]})", values)
        else:
            cursor.execute(statement)
    finally:
        cursor.close()


def _paramstyle(connection: Any) -> str:
    """Return how the connection's driver writes parameters (PEP 249)."""
    name = type(connection).__module__
    while name:
        style = getattr(sys.modules.get(name), "paramstyle", None)
        if style in _PLACES:
            return str(style)
        name = name.rpartition(".")[0]
    return "qmark"
