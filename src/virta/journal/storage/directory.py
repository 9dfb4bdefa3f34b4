"""
The journal on disk: a log of images per generation, and snapshots that replace old ones.

    <directory>/lock                 flock: one process owns a journal
    <directory>/<n>.log/             a virta.log, generation n (20 digits)
    <directory>/<n>.snap             everything that happened before generation n
    <directory>/leases               who works on what, see `leases`

Restart: load the newest snapshot, replay the logs of its generation and later ones, in order.
Rotation: begin generation n+1, write its snapshot little by little, publish it, remove all before. A
crash at any point leaves a snapshot and every log after it, so nothing acknowledged is ever lost; disk
use follows live data, as rotation comes whenever the log outgrows them.

Reserves (NEXT) are not logged but mapped: a process that is killed leaves them in the table of leases.
Ids are claimed in blocks, so that an attempt from before a crash can never acknowledge another after it.
"""

from __future__ import annotations

import gc
import os
import shutil
from typing import TYPE_CHECKING, Literal

from virta import files
from virta.errors import JournalError
from virta.journal import clock_steps as clocks
from virta.journal.storage import records as images
from virta.journal.storage.leases import LeaseTable
from virta.journal.storage.snapshot import load_snapshot, publish, write_snapshot
from virta.journal.storage.spill import FileSpill
from virta.log import open as open_log

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from virta.journal.engine import JournalEngine
    from virta.log import Log

Durability = Literal["none", "interval", "group", "fsync"]
# Replaying is about ten times slower than loading a snapshot: keep it to half a second of start, or to a part
# of what loading takes anyway. A part that is too small writes the same jobs and finished commands again and again.
ROTATE_RECORDS_MIN = 100_000
ENTRIES_PER_RECORD = 2
FINISHED_PER_RECORD = 4
ROTATE_BYTES_MIN = 32 * 1024 * 1024
ID_BLOCK = 1 << 20
FREEZE_ENTRIES_MIN = 50_000
# Far below the largest batch of the log, so that one more large value always fits.
BATCH_BYTES_MAX = 16 * 1024 * 1024


class Persistence:
    """One journal directory, owned by this process until closed."""

    def __init__(self, directory: Path, *, durability: Durability = "fsync") -> None:
        self.directory = directory
        self.durability: Durability = durability
        self.synced = durability in ("fsync", "group")  # whether a commit waits for the disk
        files.make_directory(directory)
        self._lock = _claim(directory / "lock")
        self.spill = FileSpill(directory)
        self._leases = LeaseTable(directory / "leases")
        self._log: Log | None = None
        self._generation = 0
        self._records = 0
        self._bytes = 0
        self._snapshot_bytes = 0
        self._ids_enough = 0  # up to this id no more have to be claimed
        self._rotation: Generator[None, None, None] | None = None

    # Start.

    def restore(self, engine: JournalEngine) -> None:
        """Bring an empty engine to the state that was acknowledged, then open the log for more."""
        now = engine.clock()
        collecting = gc.isenabled()
        gc.disable()  # a million new objects, none of them garbage
        try:
            self._restore(engine, now)
        except OSError as error:
            raise JournalError(
                f"the journal in {self.directory} cannot be opened: {error.strerror or error}; "
                f"nothing in it was changed, see to the disk and start again",
                code="disk",
            ) from error
        finally:
            if collecting:
                gc.enable()
            if len(engine.jobs) + len(engine.store) > FREEZE_ENTRIES_MIN:
                gc.freeze()  # they stay for long: exclude them from collections
        self._claim_ids(engine.jobs.next_id)

    def _restore(self, engine: JournalEngine, now: int) -> None:
        for leftover in self.directory.glob("*.tmp"):
            leftover.unlink()
        snapshots = sorted(self.directory.glob("*.snap"))
        first = 0
        if snapshots:
            first = int(snapshots[-1].stem)
            self._snapshot_bytes = snapshots[-1].stat().st_size
            load_snapshot(engine, snapshots[-1], now)
        generations = sorted(int(path.stem) for path in self.directory.glob("*.log"))
        current = [generation for generation in generations if generation >= first]
        if current and current != list(range(first, first + len(current))):
            raise JournalError(
                f"the journal in {self.directory} has logs {current}, one is missing in between or "
                f"before: restore the directory from a copy",
                code="journal-damaged",
            )
        for generation in current or [first]:
            self._open(generation)
            self._replay(engine, now)
        for lease in self._leases.load():
            engine.jobs.restore_lease(lease)
        engine.jobs.leases = self._leases
        engine.store.restored()
        engine.jobs.restored()
        engine.restored()
        back = clocks.went_back(engine, self._leases.clock, now)
        if back:
            clocks.shift(engine, back, now)
            # Written before the clock's new time: after a crash in between, the old time must be found.
            self.commit(images.drain(engine, now))
        self._leases.note_clock(now)
        engine.admin.restored(now)
        engine.store.tick(now)
        engine.jobs.lapsing = engine.primary
        engine.jobs.tick(now)
        self._remove_before(first)

    def _open(self, generation: int) -> None:
        """Switch to the log of a generation; if it cannot be opened, nothing changes."""
        opened = open_log(
            self.directory / f"{generation:020d}.log",
            durability=self.durability,
            visibility="committed",
        )
        if self._log is not None:
            self._log.close()
        self._log = opened
        self._generation = generation

    def _replay(self, engine: JournalEngine, now: int) -> None:
        assert self._log is not None
        for record in self._log.read():
            images.apply(engine, str(record.topic), record.value, now)
            self._records += 1
            self._bytes += len(record.value)

    # Work.

    def commit(self, records: list[images.Record]) -> None:
        """
        Make images durable, all together; may block for as long as the disk takes.

        Raises:
            LogError: they may or may not be on disk; nothing must be acknowledged any more.
        """
        assert self._log is not None
        total = sum([len(image) for _, _, image in records])
        batch = records if total <= BATCH_BYTES_MAX else self._append_all_but_last(records)
        if len(batch) == 1:
            self._log.append(*batch[0], durability=self.durability)
        elif batch:
            self._log.append_many(batch, durability=self.durability)
        self._records += len(records)
        self._bytes += total

    def _append_all_but_last(self, records: list[images.Record]) -> list[images.Record]:
        """Append batches of BATCH_BYTES_MAX without a sync; return the last one."""
        assert self._log is not None
        begin = size = 0
        for at, (_, _, image) in enumerate(records):
            if size + len(image) > BATCH_BYTES_MAX and at > begin:
                self._log.append_many(records[begin:at], durability="none")
                begin, size = at, 0
            size += len(image)
        return records[begin:]

    def committed(self) -> None:
        """Free the leases whose end is durable now, note the clock; not while another thread commits."""
        if self._leases.leaving:
            self._leases.free_ended()
        if self._leases.clock_read:
            # Not before what a clock step changed is on disk: a kill in between would change it twice, or never.
            self._leases.note_clock(self._leases.clock_read)
            self._leases.clock_read = 0

    def changes(self, engine: JournalEngine, now: int) -> list[images.Record] | None:
        """Return the records of what changed, with a claim of ids long before those run short; None for nothing."""
        next_id = engine.jobs.next_id
        if next_id >= self._ids_enough:
            return images.drain(engine, now) + self._id_records(next_id)
        if not (engine.jobs.wants_log or engine.store.unlogged):
            return None
        return images.drain(engine, now) or None

    def _id_records(self, next_id: int) -> list[images.Record]:
        """Claim more ids: a record to commit."""
        self._ids_enough = next_id + ID_BLOCK // 2
        return [images.ids_record(next_id + ID_BLOCK)]

    def _claim_ids(self, next_id: int) -> None:
        self.commit(self._id_records(next_id))

    # Rotation.

    @property
    def grown(self) -> bool:
        """Whether `wants_rotation` may be true."""
        return self._records > ROTATE_RECORDS_MIN or self._bytes > ROTATE_BYTES_MIN

    def wants_rotation(self, engine: JournalEngine) -> bool:
        live = (len(engine.jobs) + len(engine.store)) // ENTRIES_PER_RECORD
        finished = len(engine.jobs.finished) // FINISHED_PER_RECORD
        return self._rotation is None and (
            self._records > max(ROTATE_RECORDS_MIN, live, finished)
            or self._bytes > max(ROTATE_BYTES_MIN, self._snapshot_bytes)
        )

    def rotate(self, engine: JournalEngine) -> None:
        """Begin a generation; `rotation_step` does the rest. No records may be waiting for `commit`."""
        assert self._rotation is None
        self._open(self._generation + 1)
        self._records = self._bytes = 0
        self._claim_ids(engine.jobs.next_id)
        self._rotation = write_snapshot(engine, self._path("tmp"))

    @property
    def rotating(self) -> bool:
        return self._rotation is not None

    def rotation_step(self) -> bool:
        """Write a little more; True once all is written, and `finish_rotation` may be called."""
        assert self._rotation is not None
        return next(self._rotation, True) is True

    def abandon_rotation(self) -> None:
        """Drop a snapshot that could not be written; the logs before it stay, nothing is lost."""
        if self._rotation is not None:
            self._rotation.close()
            self._rotation = None
            self._path("tmp").unlink(missing_ok=True)

    def finish_rotation(self) -> None:
        """Sync and publish the snapshot, and remove everything before it. May block."""
        temporary = self._path("tmp")
        files.sync_file(temporary)
        self._snapshot_bytes = temporary.stat().st_size
        publish(temporary, self._path("snap"))
        self._remove_before(self._generation)
        self._rotation = None

    def snapshot(self, engine: JournalEngine) -> None:
        """Rotate in one go: at a graceful stop, so that marks are kept and the next start is quick."""
        self.abandon_rotation()
        self.rotate(engine)
        assert self._rotation is not None
        for _ in self._rotation:
            pass
        self.finish_rotation()

    def _path(self, suffix: str) -> Path:
        return self.directory / f"{self._generation:020d}.{suffix}"

    def _remove_before(self, generation: int) -> None:
        for path in self.directory.iterdir():
            if path.suffix in (".log", ".snap") and int(path.stem) < generation:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        files.sync_directory(self.directory)

    def disk_bytes(self) -> int:
        """Return about how many bytes are on disk: the snapshot and the log since."""
        return self._bytes + self._snapshot_bytes

    def close(self) -> None:
        self.abandon_rotation()
        if self._log is not None:
            self._log.close()
            self._log = None
        self.spill.close()
        self._leases.close()
        os.close(self._lock)


def _claim(path: Path) -> int:
    try:
        return files.lock_file(path)
    except BlockingIOError as error:
        raise JournalError(
            f"the journal in {path.parent} is in use by another process; ask that one, or stop it",
            code="journal-in-use",
        ) from error
