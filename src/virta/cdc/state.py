"""
What a capture remembers between runs beside the log: `<data-dir>/cdc/<name>.json`.

The log alone says up to which change it is complete. This file makes finding that position quick (`offset`, the
place in the log up to which `position` counts) and has what the log does not: which tables were read completely,
with which columns, and the identity of the database. It is replaced whole, always after the log was synced.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from virta import files
from virta.errors import CaptureError

DIRECTORY: Final = "cdc"
NAME_MAX: Final = 63
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


class TableState(msgspec.Struct):
    """A table whose rows are in the log: its columns, its key, and up to where changes are part of those rows."""

    columns: list[dict[str, Any]]
    key: list[str]
    # Changes up to here are not captured again: the rows were read later (SQLite: a sequence number; PostgreSQL: a
    # snapshot such as 10:20:11,12 and the position of the WAL at that time).
    read_at: str = ""
    read_lsn: int = 0
    complete: bool = False
    number: int = 0  # SQLite: its id in virta_cdc_tables; a table that is dropped and created again gets another


class CaptureState(msgspec.Struct):
    """The whole file."""

    kind: str
    database: str = ""
    log: str = ""
    offset: int = 0
    position: dict[str, Any] = {}
    reads: int = (
        0  # number of the last read of a table, from the clock: makes ids of its rows unique
    )
    tables: dict[str, TableState] = {}


class StateFile:
    """The state of one capture, locked for one process."""

    def __init__(self, data_dir: str | Path, name: str, kind: str) -> None:
        """
        Raises:
            CaptureError: another process captures under this name, or the file belongs to another kind of database.
        """
        check_name(name)
        directory = Path(data_dir) / DIRECTORY
        files.make_directory(data_dir)
        files.make_inside(directory)
        self.path = directory / f"{name}.json"
        try:
            self._lock: int | None = files.lock_file(directory / f"{name}.lock")
        except BlockingIOError:
            raise CaptureError(
                f"another process captures changes as {name!r} into {data_dir}: stop it, or choose another --name",
                code="capture_running",
            ) from None
        try:
            self.state = _require_kind(
                read_state(data_dir, name) or CaptureState(kind), kind, self.path
            )
        except BaseException:
            self.close()
            raise

    def save(self) -> None:
        """Replace the file durably."""
        files.write_whole(self.path, msgspec.json.encode(self.state))

    def close(self) -> None:
        if self._lock is not None:
            files.unlock_file(self._lock)
            self._lock = None


def read_state(data_dir: str | Path, name: str) -> CaptureState | None:
    """Return the saved state of a capture, None if there is none."""
    path = Path(data_dir) / DIRECTORY / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=CaptureState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise CaptureError(
            f"{path} cannot be read ({error}): remove it, and every table is read again",
            code="capture_state_invalid",
        ) from error


def _require_kind(state: CaptureState, kind: str, path: Path) -> CaptureState:
    if state.kind != kind:
        raise CaptureError(
            f"{path} belongs to a capture of {state.kind}, not {kind}: choose another --name",
            code="capture_state_invalid",
        )
    return state


def check_name(name: str) -> None:
    """Refuse a name that is no file name and no first part of a channel."""
    if not _NAME.fullmatch(name) or len(name) > NAME_MAX:
        raise CaptureError(
            f"--name is {name!r}: it must be 1 to {NAME_MAX} letters, digits, _ or -",
            code="capture_name_invalid",
        )
