"""
The writing side of one log handle: append, roll over, make durable.

The kernel does the common case (lock, one pwrite, publish) without Python. This module does the rest: attach to the
active segment (recover it first if needed), roll to a new one, remember idempotent producers. Invariants: sealed
segments are durable; a published batch is whole and valid; after a failed fsync this writer refuses every append.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from virta import files
from virta.clock import now_us
from virta.errors import (
    LogClosedError,
    LogCorruptionError,
    LogError,
    LogLockTimeoutError,
    LogSyncError,
    LogWriteError,
)
from virta.log.disk_errors import already_written, disk_error
from virta.log.engine import kernel
from virta.log.engine.append_batch import AppendBatch
from virta.log.engine.indexer import Indexer
from virta.log.engine.interval_sync import IntervalSync
from virta.log.engine.kernel import FOREIGN, Snapshot
from virta.log.engine.plain_kernel import SYNC_FSYNC, SYNC_GROUP, SYNC_NONE
from virta.log.engine.producers import ProducerTable
from virta.log.format.codec import FLAG_SEAL, PRODUCER_ANONYMOUS, seal_record
from virta.log.format.damage import LOST_MAX
from virta.log.format.directory import CONTROL, segment_bases, segment_name
from virta.log.format.segment import (
    FLAG_ZSTD,
    NO_SEGMENT,
    Position,
    Segment,
    SegmentHeader,
    create_segment,
    describe_ahead,
    is_ahead,
    new_salt,
    rewrite_header,
)
from virta.log.limits import BATCH_HEADER_BYTES, OPEN_LOCK_TIMEOUT_S, SEGMENT_HEADER_BYTES
from virta.log.record import Appended
from virta.log.upkeep.recovery import Recovered, logger, recover, trusted_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any
    from uuid import UUID

    from virta.log.format.directory import Meta

DURABILITIES: Final = ("none", "interval", "group", "fsync")
# What the kernel waits for; `interval` is synced by a thread.
_SYNC: Final = {
    "none": SYNC_NONE,
    "interval": SYNC_NONE,
    "group": SYNC_GROUP,
    "fsync": SYNC_FSYNC,
}
# Attach, roll, append: more rounds than that have another cause.
_ATTEMPTS_MAX: Final = 16


class Writer:
    """Appends to one directory for one log handle; safe to use from many threads."""

    def __init__(
        self,
        directory: Path,
        core: Any,
        *,
        stream: UUID,
        segment_bytes: int,
        lock_timeout: float,
        compression: str = "none",
    ) -> None:
        self.directory = directory
        self.recovered: list[Recovered] = []
        self._core = core
        self._stream = stream.bytes
        self._segment_bytes = segment_bytes
        self._lock_timeout = lock_timeout
        self._segment: Segment | None = None  # its header; the kernel has the descriptor
        self._first_flags = FLAG_ZSTD if compression == "zstd" else 0  # of a log without segments
        self._compressing = False  # batches of the active segment
        self._poison: str | None = None
        self._indexer = Indexer(directory)
        self._faults = 0
        self._producers = ProducerTable(directory)
        self._interval: IntervalSync | None = None
        self._making = threading.Lock()
        # The position our own appends have waited for; a stopped leader publishes it later.
        self.synced_next = 0
        self._closed = False
        self._warned = False
        self._open()

    def _open(self) -> None:
        """Attach, unless a stopped process has the lock: reading works without it."""
        current = self.snapshot().current
        timeout = min(self._lock_timeout, OPEN_LOCK_TIMEOUT_S) if current else self._lock_timeout
        try:
            # Every append reports damage again, and repair needs an open handle.
            with suppress(LogCorruptionError), self.locked(timeout):
                self._attach()
        except LogLockTimeoutError:
            if not current:
                raise  # the log may need recovery before it can be read
        self._indexer.run_after_opening()
        self._check_clock(self.snapshot().last_time)

    def _check_clock(self, last_time: int) -> None:
        """Warn once if the newest record is from the future: every append gets its time until then."""
        if is_ahead(last_time) and not self._warned:
            self._warned = True
            logger.warning("log_clock_ahead %s: %s", self.directory, describe_ahead(last_time))

    # --- appending ---

    def append(
        self,
        buf: bytearray,
        count: int,
        durability: str,
        producer: tuple[int, int] | None = None,
        lock_timeout: float | None = None,
    ) -> Appended:
        """Append one encoded batch and wait until `durability` is met."""
        patience = self._lock_timeout if lock_timeout is None else lock_timeout
        batch, data, flags = None, buf, 0  # most appends make no object of their own
        if self._compressing or producer is not None:
            batch = AppendBatch.of(buf, compressing=self._compressing)
            if producer is not None:
                return self._append_once(batch, count, durability, producer, patience)
            data, flags = batch.form(compressing=self._compressing)
        sync = _SYNC[durability]
        if self._poison is not None:
            raise LogSyncError(self._poison)
        try:
            limit = self._segment_bytes
            status, base, time, segment, end, unsynced = self._core.append(
                data, count, PRODUCER_ANONYMOUS, 0, flags, limit, patience, False, sync
            )
        except (OSError, ValueError) as exc:
            raise self._refused(exc, len(data)) from exc
        if status == kernel.TIMEOUT:
            raise self._lock_timeout_error(patience)
        if status != kernel.APPENDED:
            with self.locked(patience):
                base, time, segment, end = self._append_locked(
                    batch or AppendBatch(buf, None), count, sync, (PRODUCER_ANONYMOUS, 0)
                )
            unsynced = sync
            self._indexer.run()
        if unsynced < 0:
            raise self._poisoned(OSError(-unsynced, os.strerror(-unsynced)))
        if unsynced or durability == "interval":
            self._make_durable(segment, end, durability)
        if sync and base + count > self.synced_next:
            self.synced_next = base + count
        return Appended(base, count, time, durability)

    def _append_core(
        self, batch: AppendBatch, count: int, sync: int, producer: tuple[int, int]
    ) -> tuple[int, int, int, int, int]:
        """Append with the lock; the caller makes it durable afterwards."""
        if self._poison is not None:
            raise LogSyncError(self._poison)
        limit, timeout = self._segment_bytes, self._lock_timeout
        data, flags = batch.form(compressing=self._compressing)
        try:
            return self._core.append(data, count, *producer, flags, limit, timeout, True, sync)[:5]  # type: ignore[no-any-return]
        except (OSError, ValueError) as exc:
            raise self._refused(exc, len(data)) from exc

    def _append_locked(
        self, batch: AppendBatch, count: int, sync: int, producer: tuple[int, int]
    ) -> tuple[int, int, int, int]:
        """Attach, recover or roll as the kernel asks for it, and append."""
        for _ in range(_ATTEMPTS_MAX):
            status, base, time, segment, end = self._append_core(batch, count, sync, producer)
            if status == kernel.APPENDED:
                return base, time, segment, end
            if status == kernel.ROLL:
                self._roll()
            else:
                self._attach()
        raise LogWriteError(
            f"the log at {self.directory} changes under the lock: is something else writing its files?"
        )

    def _append_once(
        self,
        batch: AppendBatch,
        count: int,
        durability: str,
        numbered: tuple[int, int],
        patience: float,
    ) -> Appended:
        """Append unless the log has this batch of the producer, or a later one."""
        producer, sequence = numbered
        with self.locked(patience):
            self._attach_if_moved()
            known = self._producers.last(producer, self.snapshot)
            if known is not None and sequence <= known[0]:
                offset = known[1] if sequence == known[0] else -1
                snapshot = self.snapshot()
                segment, end = snapshot.active, snapshot.end
                result = Appended(offset, count, 0, durability, duplicate=True)
            else:
                base, time, segment, end = self._append_locked(
                    batch, count, _SYNC[durability], (producer, sequence)
                )
                result = Appended(base, count, time, durability)
        self._indexer.run()
        if durability != "none":
            self._make_durable(segment, end, durability)
        return result

    @contextmanager
    def locked(self, timeout: float | None = None) -> Iterator[None]:
        """Take the write lock; wait for it at most `timeout` seconds, or the log's own limit."""
        patience = self._lock_timeout if timeout is None else timeout
        try:
            got = self._core.lock(patience)
        except ValueError as exc:
            raise LogClosedError(f"the log at {self.directory} is closed") from exc
        except OSError as exc:
            raise disk_error(exc, f"locking {self.directory}") from exc
        if not got:
            raise self._lock_timeout_error(patience)
        try:
            yield
        except ValueError as exc:
            if not self._closed:
                raise
            raise LogClosedError(f"the log at {self.directory} was closed meanwhile") from exc
        finally:
            self._core.unlock()

    def _lock_timeout_error(self, seconds: float) -> LogLockTimeoutError:
        holder = self.snapshot().holder
        return LogLockTimeoutError(
            f"the write lock of {self.directory} was not free for {seconds:g} s"
            + (f"; process {holder} has it" if holder else "")
        )

    # --- durability ---

    def _make_durable(self, segment: int, end: int, durability: str) -> None:
        if durability == "interval" and not self._closed:
            self._make_interval().need()
            if not self._closed:
                return
            # Closed meanwhile: the thread may have ended before this append.
        self.sync(segment, end, group=durability != "fsync")

    def _make_interval(self) -> IntervalSync:
        if self._interval is None:
            with self._making:  # several threads may be here
                if self._interval is None:
                    self._interval = IntervalSync(self.flush)
        return self._interval

    def sync(self, segment: int, end: int, *, group: bool = True) -> None:
        """Return when everything up to byte `end` of segment `segment` is on disk."""
        for _ in range(_ATTEMPTS_MAX):
            if self._poison is not None:
                raise LogSyncError(self._poison)
            try:
                if self._core.sync(segment, end, group):
                    return
            except OSError as exc:
                raise self._poisoned(exc) from exc
            except ValueError as exc:
                raise LogClosedError(f"the log at {self.directory} is closed") from exc
            snapshot = self.snapshot()
            if (snapshot.durable_base, snapshot.durable_pos) >= (segment, end):
                return
            with already_written(self.directory), self.locked():
                self._attach_if_moved()
        raise LogWriteError(f"the active segment of {self.directory} changes too fast to sync")

    def flush(self) -> None:
        snapshot = self.snapshot()
        self.sync(snapshot.active, snapshot.end)

    def snapshot(self) -> Snapshot:
        try:
            return Snapshot(*self._core.snapshot())
        except ValueError as exc:
            raise LogClosedError(f"the log at {self.directory} is closed") from exc

    def close(self) -> None:
        self._closed = True
        if self._interval is not None:
            self._interval.stop()
        self._indexer.close()
        with suppress(OSError, ValueError):  # headroom that stays is harmless
            self._core.trim()
        self._segment = None

    # --- under the lock: attach, recover, roll ---

    def reattach(self, *, lost: bool) -> None:
        """Attach after a repair, under the lock, without relying on the control page."""
        self._attach(distrust=True)
        segment = self._segment
        if lost and segment is not None:
            header = segment.header._replace(epoch=segment.header.epoch + 1)
            if self.snapshot().end > SEGMENT_HEADER_BYTES:
                self._roll(epoch=header.epoch)
            else:  # empty: a new segment would have the same name
                rewrite_header(segment, header)

    def set_compression(self, change_meta: Callable[[], Meta]) -> None:
        """Have `change_meta` record the log's compression, and begin a segment that has it, if this one has not."""
        with self.locked():
            self._first_flags = flags = FLAG_ZSTD if change_meta().compression == "zstd" else 0
            self._attach_if_moved()
            segment = self._segment
            if segment is None or segment.header.flags & FLAG_ZSTD == flags:
                return
            if self.snapshot().end > SEGMENT_HEADER_BYTES:
                self._roll(flags=flags)
            else:  # empty: a new segment would have the same name
                rewrite_header(segment, segment.header._replace(flags=flags))
                self._compressing = bool(flags)
        self._indexer.run()

    def _attach_if_moved(self) -> None:
        snapshot = self.snapshot()
        if not snapshot.current or self._segment is None or snapshot.active != self._segment.base:
            self._attach()

    def _attach(self, *, distrust: bool = False) -> None:
        """Find the active segment, recover it unless the control page confirms it, attach the kernel."""
        try:
            self._find_active(distrust=distrust)
        except LogSyncError as exc:
            self._poison = str(exc)
            raise
        except OSError as exc:
            raise self._write_error(exc, 0) from exc

    def _find_active(self, *, distrust: bool) -> None:
        bases = segment_bases(self.directory)
        snapshot = self.snapshot()
        if self._core.faults() > self._faults:
            self._faults = self._core.faults()
            logger.warning(
                "log_control_truncated %s was truncated by another process; it is made again from the segments",
                self.directory / CONTROL,
            )
        page = snapshot.state != FOREIGN
        if not bases:
            first = snapshot.next if page else 0  # no offset twice, even if all files were removed
            header = SegmentHeader(first, now_us(), self._stream, new_salt(), 0, NO_SEGMENT, 0)
            self._begin(header._replace(flags=self._first_flags), 0)
            return
        # Closed here: an exception may keep its frames for long.
        with Segment(self.directory, bases[-1]) as segment:
            self._attach_to(segment, snapshot, page=page, distrust=distrust)

    def _attach_to(
        self, segment: Segment, snapshot: Snapshot, *, page: bool, distrust: bool
    ) -> None:
        """Attach the kernel to the last segment; recover it first unless the page confirms its end."""
        trusted = None if distrust else trusted_end(segment, snapshot)
        self._adopt(segment)
        sound = segment.size == snapshot.file_size and not snapshot.writing
        if trusted is not None and sound:
            return
        # The process that created it may have died before the directory was synced.
        files.sync_directory(self.directory)
        near = page and snapshot.next - segment.base <= LOST_MAX
        if near and snapshot.active > segment.base:
            self._begin_after_missing(segment, snapshot)
            return
        promised = snapshot.next if near and snapshot.active == segment.base else 0
        start = trusted or segment.start()
        found = recover(
            self.directory, segment, start, promised=promised, exact=trusted is not None
        )
        if found.problems:
            self.recovered.append(found)
        last_pos = found.last_pos or (snapshot.last_pos if trusted else 0)
        last_time = max(found.last_time, snapshot.last_time if trusted else 0)
        if found.sealed_next is not None:
            epoch = segment.header.epoch + (found.lost > 0)
            self._begin_after(segment, found.at, last_time, epoch)
            return
        end, following = segment.size, found.at.next
        self._core.publish(segment.base, end, following, max(found.at.prev, 0), last_time, last_pos)
        self._core.publish_durable(segment.base, end, following)
        if found.lost:
            self._roll(epoch=segment.header.epoch + 1)

    def _adopt(self, segment: Segment) -> None:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._core.attach(fd, segment.base, segment.header.salt)
        except ValueError:  # closed meanwhile
            os.close(fd)
            raise
        self._segment = segment
        self._compressing = bool(segment.header.flags & FLAG_ZSTD)
        self.synced_next = 0  # after a repair offsets may be given again

    def _begin(self, header: SegmentHeader, last_time: int) -> None:
        create_segment(self.directory, header)
        with Segment(self.directory, header.base) as segment:
            self._adopt(segment)
        start = SEGMENT_HEADER_BYTES
        self._core.publish(header.base, start, header.base, header.prev_crc, last_time, 0)
        self._core.publish_durable(header.base, start, header.base)

    def _begin_after_missing(self, segment: Segment, snapshot: Snapshot) -> None:
        """The active segment was removed: seal the one before it over the offsets that are lost."""
        found = recover(self.directory, segment, segment.start(), following=snapshot.next)
        self.recovered.append(found)
        last_time = max(found.last_time, snapshot.last_time)
        epoch = segment.header.epoch + (found.lost > 0)
        self._begin_after(segment, found.at, last_time, epoch)

    def _begin_after(
        self, sealed: Segment, at: Position, last_time: int, epoch: int, flags: int | None = None
    ) -> None:
        """Create the segment that follows; `at` is the position after the seal. It is compressed like the last one."""
        kind = sealed.header.flags & FLAG_ZSTD if flags is None else flags
        link = max(at.prev, 0)
        header = SegmentHeader(
            at.next, now_us(), self._stream, new_salt(), link, sealed.base, epoch, kind
        )
        try:
            self._begin(header, last_time)
        except OSError as exc:
            raise self._write_error(exc, SEGMENT_HEADER_BYTES) from exc
        self._indexer.note_sealed()
        self._check_clock(last_time)

    def _roll(self, epoch: int | None = None, flags: int | None = None) -> None:
        """Seal the active segment, make it durable, create the next."""
        sealed = self._segment
        if sealed is None:
            raise LogClosedError(f"the log at {self.directory} was closed meanwhile")
        snapshot = self.snapshot()
        buf = bytearray(BATCH_HEADER_BYTES) + seal_record(snapshot.next, snapshot.end)
        try:
            status, _, time, _, end, _ = self._core.append(
                buf, 0, 0, 0, FLAG_SEAL, NO_SEGMENT, 0.0, True, SYNC_NONE
            )
        except OSError as exc:
            raise self._write_error(exc, len(buf)) from exc
        if status != kernel.APPENDED:
            return  # something changed: the caller's next attempt attaches again
        try:
            # Through the descriptor that wrote: the system reports an earlier write-back error there.
            self._core.sync(sealed.base, end, False)
        except OSError as exc:
            raise self._poisoned(exc) from exc
        after = Position(end, int.from_bytes(buf[52:56], "little"), snapshot.next)
        epoch = sealed.header.epoch if epoch is None else epoch
        self._begin_after(sealed, after, time, epoch, flags)

    # --- errors ---

    def _poisoned(self, exc: OSError) -> LogSyncError:
        self._poison = (
            f"fsync of {self.directory} failed ({exc.strerror}): what was not yet durable may be lost, "
            "and this handle refuses to write on; close it, check the disk, open again"
        )
        return LogSyncError(self._poison)

    def _refused(self, exc: OSError | ValueError, size: int) -> LogError:
        if isinstance(exc, OSError):
            return self._write_error(exc, size)
        return LogClosedError(f"the log at {self.directory} is closed")

    def _write_error(self, exc: OSError, size: int) -> LogError:
        if self._closed:
            return LogClosedError(f"the log at {self.directory} was closed meanwhile")
        active = segment_name(self._segment.base) if self._segment else "a new segment"
        doing = f"writing {size} bytes to {self.directory / active}"
        return disk_error(exc, doing, "nothing was appended")
