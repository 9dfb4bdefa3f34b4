"""Connections to PostgreSQL with fixed session settings, and its errors as CaptureError."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import psycopg2
import psycopg2.errors
from psycopg2.extensions import parse_dsn, quote_ident
from psycopg2.extras import LogicalReplicationConnection

from virta.cdc.postgres.values import SESSION
from virta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_S: Final = 15
# A peer that vanished is noticed after about a minute.
KEEPALIVES: Final = {
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}
# Waiting does not help: the DSN, the rights or the settings have to change.
_PERMANENT: Final = (
    "password authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "does not exist",
    "permission denied",
)
_PERMANENT_ERRORS: Final = (
    psycopg2.errors.InsufficientPrivilege,
    psycopg2.errors.ConfigurationLimitExceeded,
    psycopg2.errors.UndefinedObject,
)


def connect(dsn: str) -> Any:
    """Return a connection on which each statement commits by itself."""
    connection = _connect(dsn)
    connection.set_session(autocommit=True)
    return connection


def connect_replication(dsn: str) -> Any:
    """Return a connection that speaks the replication protocol."""
    return _connect(dsn, connection_factory=LogicalReplicationConnection)


def connect_reading(dsn: str, snapshot: str | None) -> Any:
    """Return a connection with one read-only transaction that sees one state of the database."""
    connection = _connect(dsn)
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if snapshot is not None:
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (snapshot,))
    return connection


def _connect(dsn: str, **more: Any) -> Any:
    with translate_errors(dsn):
        given = parse_dsn(dsn).get("options", "")
        return psycopg2.connect(
            dsn,
            connect_timeout=CONNECT_S,
            options=f"{given} {SESSION}".strip(),
            application_name="virta-cdc",
            **KEEPALIVES,
            **more,
        )


def database_name(dsn: str) -> str:
    """Return the database that a DSN names, or the user's, or a placeholder."""
    with translate_errors(dsn):
        parts = parse_dsn(dsn)
    name = parts.get("dbname") or parts.get("user") or "postgres"
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in name)


def address(dsn: str) -> str:
    """Return host, port and database of a DSN for messages, without the password."""
    try:
        parts = parse_dsn(dsn)
    except psycopg2.ProgrammingError:
        return "the database"
    return f"{parts.get('host', 'localhost')}:{parts.get('port', '5432')}/{parts.get('dbname', '')}"


@contextmanager
def translate_errors(dsn: str) -> Iterator[None]:
    """Raise CaptureError instead of the driver's errors; `retry` if waiting may help."""
    try:
        yield
    except psycopg2.errors.ObjectNotInPrerequisiteState as error:
        raise CaptureError(
            f"{address(dsn)}: {_error_text(error)}", code="capture_slot_invalid"
        ) from error
    except psycopg2.Error as error:
        text = _error_text(error)
        if isinstance(error, psycopg2.ProgrammingError) and error.pgcode is None:
            raise CaptureError(
                f"{text}: a DSN is postgresql://user@host:5432/database or host=… dbname=…",
                code="capture_dsn_invalid",
            ) from error
        permanent = isinstance(error, _PERMANENT_ERRORS) or any(w in text for w in _PERMANENT)
        raise CaptureError(
            f"{address(dsn)}: {text}", code="capture_database_failed", retry=not permanent
        ) from error


def _error_text(error: psycopg2.Error) -> str:
    return " ".join(str(error).split()) or type(error).__name__


__all__ = [
    "address",
    "connect",
    "connect_reading",
    "connect_replication",
    "database_name",
    "quote_ident",
    "translate_errors",
]
