"""
ChangeLog: appends the changes of one database to a log, each exactly once.

Every batch ends with a record on the topic `$virta/cdc/<name>` that has the position up to which the log is then
complete. A batch is in the log whole or not at all, so after any crash the newest such record says where to go on.
Batches are appended without waiting for the disk; `sync` waits, and only what was synced is confirmed to the
database.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import virta.log
from virta import files
from virta.cdc.state import StateFile
from virta.errors import CaptureError

if TYPE_CHECKING:
    from virta.cdc.events import ChangeRecord

LOG_NAME: Final = "log"
POSITION_TOPIC: Final = "$virta/cdc/"
# A transaction or a read of a table that is larger is appended in several batches: this bounds memory.
BATCH_BYTES: Final = 4 * 1024 * 1024
BATCH_RECORDS: Final = 10_000


class ChangeLog:
    """The log, the state file, and the batch that is being collected."""

    def __init__(self, data_dir: str | Path, name: str, kind: str) -> None:
        self.name = name
        self.file = StateFile(data_dir, name, kind)
        try:
            files.make_inside(Path(data_dir) / LOG_NAME)
            self.log = virta.log.open(Path(data_dir) / LOG_NAME)
        except BaseException:
            self.file.close()
            raise
        self._topic = POSITION_TOPIC + name
        self._records: list[ChangeRecord] = []
        self._bytes = 0
        self.batches = 0
        self.changes = 0
        self._unsynced = False
        self.state = self.file.state
        # Whether nothing was ever captured under this name: the log has no rows that a read of a table must remove.
        self.fresh = not self.state.position and not self.state.offset
        try:
            self._check_log()
            self.position = self._find_position()
        except BaseException:
            self.close()
            raise

    def _check_log(self) -> None:
        if self.state.log and self.state.log != self.log.id:
            raise CaptureError(
                f"{self.file.path} was written for another log than {self.log.path}: remove it, and every table is "
                "read again",
                code="capture_state_invalid",
            )
        self.state.log = self.log.id

    def _find_position(self) -> dict[str, Any]:
        """Return the newest position in the log: that of the file, or a later one."""
        start = max(self.state.offset, self.log.first_offset)
        position = self.state.position
        if start > self.log.next_offset:
            raise CaptureError(
                f"{self.file.path} says that the log has {start} records, but it has {self.log.next_offset}: the log "
                "was replaced; remove the file, and every table is read again",
                code="capture_state_invalid",
            )
        with self.log.read(self._topic, start=start, on_gap="skip") as reader:
            for record in reader:
                position = msgspec.json.decode(record.value)
                self.fresh = False
        return position

    @property
    def full(self) -> bool:
        """Whether the collected records make a batch that should be appended now."""
        return self._bytes >= BATCH_BYTES or len(self._records) >= BATCH_RECORDS

    @property
    def pending(self) -> int:
        return len(self._records)

    def add(self, records: list[ChangeRecord]) -> None:
        """Collect records for the next batch; append it when it is `full`."""
        self._records += records
        for topic, key, value in records:
            self._bytes += len(topic) + len(key) + len(value)

    def append(self, position: dict[str, Any]) -> None:
        """Append the collected records as one batch: the log is then complete up to `position`."""
        mark = (self._topic, b"position", msgspec.json.encode(position))
        self.log.append_many([*self._records, mark], durability="none")
        self.changes += len(self._records)
        self.batches += 1
        self._records = []
        self._bytes = 0
        self._unsynced = True
        self.position = position

    def discard(self) -> None:
        """Forget what was collected and not appended."""
        self._records = []
        self._bytes = 0

    def sync(self) -> None:
        """Wait until everything appended is on disk."""
        if self._unsynced:
            self.log.flush()
            self._unsynced = False

    def save(self) -> None:
        """Sync the log, then save the state with the present position."""
        self.sync()
        self.state.offset = self.log.next_offset
        self.state.position = self.position
        self.file.save()

    def forget(self) -> None:
        """Start again: the next run reads every table, and each read removes the rows of the table first."""
        self.discard()
        self.append({})
        for table in self.state.tables.values():
            table.complete = False
        self.state.database = ""
        self.save()

    def close(self) -> None:
        self.log.close()
        self.file.close()
