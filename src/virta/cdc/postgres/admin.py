"""Create, remove and describe the capture of a PostgreSQL database without running it."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING, Any

from virta.cdc.change_log import ChangeLog
from virta.cdc.postgres import catalog, connections, slot
from virta.cdc.postgres.capture import KIND
from virta.cdc.state import read_state

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

logger = logging.getLogger("virta.cdc")


def create(dsn: str, data_dir: str | Path, name: str, tables: Iterable[str] | None = None) -> None:
    """Create publication and slot: from now on PostgreSQL keeps changes until `run` has captured them."""
    wanted = None if tables is None else frozenset(tables)
    with (
        connections.translate_errors(dsn),
        closing(connections.connect(dsn)) as connection,
        closing(ChangeLog(data_dir, name, KIND)),
    ):
        slot.check_server(connection, dsn)
        chosen, notes = slot.choose_tables(catalog.tables(connection), wanted)
        for note in notes:
            logger.warning("cdc_table %s", note)
        slot.sync_publication(connection, slot.slot_name(name), chosen)
        if catalog.slot(connection, slot.slot_name(name)) is None:
            slot.create_slot(dsn, slot.slot_name(name))[0].close()


def drop(dsn: str, data_dir: str | Path, name: str) -> None:
    """Drop slot and publication; what is in the log stays, and the next run reads every table again."""
    with (
        connections.translate_errors(dsn),
        closing(connections.connect(dsn)) as connection,
        closing(ChangeLog(data_dir, name, KIND)) as changes,
    ):
        slot.drop(connection, slot.slot_name(name), dsn)
        changes.forget()


def status(dsn: str, data_dir: str | Path, name: str) -> dict[str, Any]:
    """Return the state of the slot and of each table."""
    own = slot.slot_name(name)
    with connections.translate_errors(dsn), closing(connections.connect(dsn)) as connection:
        found = catalog.slot(connection, own)
        published = catalog.published(connection, own) or set()
        chosen, notes = slot.choose_tables(catalog.tables(connection), None)
    state = read_state(data_dir, name)
    known = state.tables if state is not None else {}
    tables = {
        title: "captured" if title in known and known[title].complete else "to be read"
        for title in sorted(published | known.keys())
    }
    tables |= {title: "not captured" for title in chosen if title not in tables}
    return {
        "name": name,
        "slot": own if found is not None else "none",
        "state": "none" if found is None else "running" if found.active else "stopped",
        "wal_status": found.wal_status if found is not None else None,
        "lag_bytes": found.lag_bytes if found is not None else 0,
        "retained_bytes": found.retained_bytes if found is not None else 0,
        "tables": tables,
        "left_out": notes,
    }
