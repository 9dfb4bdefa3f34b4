"""Create, remove and describe the capture of a SQLite database without running it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virta.cdc import sqlite_schema
from virta.cdc.change_log import LOG_NAME, ChangeLog
from virta.cdc.sqlite_capture import KIND, connect
from virta.cdc.state import read_state
from virta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable


def create(
    file: str | Path, data_dir: str | Path, name: str, tables: Iterable[str] | None = None
) -> list[str]:
    """Create the triggers, so that changes are recorded from now on; return what is left out and why."""
    wanted = None if tables is None else frozenset(tables)
    with closing(_existing(file)) as db, closing(ChangeLog(data_dir, name, KIND)) as changes:
        return sqlite_schema.install(db, changes.log.id, wanted)[1]


def drop(file: str | Path, data_dir: str | Path, name: str) -> None:
    """Remove triggers and recorded changes; what is in the log stays, and the next run reads every table again."""
    with closing(_existing(file)) as db, closing(ChangeLog(data_dir, name, KIND)) as changes:
        changes.forget()
        sqlite_schema.remove(db)


def status(file: str | Path, data_dir: str | Path, name: str) -> dict[str, Any]:
    """Return what is captured and how many changes wait."""
    with closing(_existing(file)) as db:
        try:
            waiting = db.execute("SELECT count(*), max(seq) FROM virta_cdc_changes").fetchone()
            tables = sqlite_schema.active_tables(db)
        except sqlite3.OperationalError:
            waiting, tables = None, {}
    state = read_state(data_dir, name)
    known = state.tables if state is not None else {}
    return {
        "name": name,
        "state": "created" if waiting is not None else "not created",
        "log": str(Path(data_dir) / LOG_NAME),
        "recorded": waiting[0] if waiting is not None else 0,
        "position": state.position.get("seq", 0) if state is not None else 0,
        "tables": {
            table: "captured" if table in known and known[table].complete else "to be read"
            for table in tables
        },
    }


def _existing(file: str | Path) -> sqlite3.Connection:
    if not Path(file).is_file():
        raise CaptureError(f"there is no database file {file}", code="capture_no_database")
    return connect(Path(file))
