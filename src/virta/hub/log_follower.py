"""
Follow the log: read what other processes append, in order with this process's own appends.

A thread sleeps on the log's futex (`EndWatcher`) and reads new records of others. Own records are not read back: the
publisher has them in memory. Both are delivered in the event loop, in the order of the log, each record once:

    thread:   wait ──► read records of others ──► queue ──┐
    append:   append_many ──► records of others before ──►├──► queue ──► deliver, in the event loop
                              ours ──► mark of own append ─┘

`append` and the thread's reading exclude each other, so the queue is in log order. A mark in the queue stands for an own
append: records after it are delivered after the publisher has delivered its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from virta.errors import (
    LogClosedError,
    LogError,
    LogLimitError,
    LogLockTimeoutError,
    LogSyncError,
    LogWriteError,
)
from virta.log.aio import EndWatcher
from virta.log.disk_errors import probe

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from virta.log import Appended, Log, Record
    from virta.log.format.codec import Encoded
    from virta.log.log import Durability

logger = logging.getLogger("virta.hub")

# A log that cannot be read, and a disk that refused an append, are tried again after this time.
RETRY_S = 0.5
# The server is not ready while one append takes longer than this.
STALL_S_MAX = 2.0
# Records of others are delivered in runs of about this many.
RUN_RECORDS_MAX = 4096


class LogFollower:
    """The position up to which the log was followed, and the appends of this process."""

    def __init__(
        self,
        log: Log,
        loop: asyncio.AbstractEventLoop,
        arrived: Callable[[list[Record]], None],
        *,
        durability: Durability,
    ) -> None:
        self.durability = durability
        self.failure: LogError | None = None  # why the log cannot be followed now
        self.refused: LogError | None = None  # why the last append failed
        # A sync has failed: what the disk has is unknown until a new process opens the log.
        self.poisoned: LogSyncError | None = None
        self._log = log
        self._loop = loop
        self._arrived = arrived
        self._position = log.next_offset
        # Runs of records of others; None stands for an own append.
        self._queue: deque[list[Record] | None] = deque()
        self._reading = threading.Lock()
        self._append_began: float | None = None
        self._refused_bytes = 0
        self._watcher = EndWatcher(log, self._follow)
        self._stopped = False
        self._probing = False

    @property
    def position(self) -> int:
        """The offset after the last record that was queued or appended."""
        return self._position

    @property
    def trouble(self) -> str | None:
        """Why publications fail or wait now, or None; it ends without another publication."""
        failure = self.poisoned or self.failure or self.refused
        if failure is not None:
            return failure.message
        began = self._append_began
        waited = 0.0 if began is None else time.monotonic() - began
        if waited > STALL_S_MAX:
            return f"an append has been waiting for the write lock or the disk for {waited:.1f} s"
        return None

    def start(self) -> None:
        self._watcher.start()

    def stop(self) -> None:
        """End the thread; blocks until it has ended."""
        self._stopped = True
        self._watcher.close()

    # Own appends.

    def append(
        self, records: Sequence[tuple[str, bytes, bytes]] | Encoded, lock_timeout: float
    ) -> Appended:
        """Append records, and queue what others appended before them; blocks, in any thread."""
        with self._reading:
            self._append_began = time.monotonic()
            try:
                appended = self._log.append_many(
                    records, durability=self.durability, lock_timeout=lock_timeout
                )
                while self._position < appended.offset and self._read(appended.offset):
                    pass
                self._position = appended.offset + appended.count
                self._queue.append(None)
            finally:
                self._append_began = None
        return appended

    def append_ended(self, error: LogError | None, size: int) -> None:
        """Remember for `trouble` how an append of `size` bytes ended; called in the loop."""
        if error is None:
            self.refused = None
            return
        logger.warning("append_failed code=%s: %s", error.code, error.message)
        if isinstance(error, LogSyncError):
            self.poisoned = error
        if isinstance(error, LogLimitError):
            return  # caused by the records, not by the log
        self.refused = error
        self._refused_bytes = size
        if isinstance(error, LogLockTimeoutError | LogWriteError) and not self._probing:
            self._probing = True
            self._loop.call_later(RETRY_S, self._probe)

    def _probe(self) -> None:
        """Find out whether an append would succeed again, without waiting for one."""
        self._probing = False
        if self._stopped or not isinstance(self.refused, LogLockTimeoutError | LogWriteError):
            return
        self._probing = True
        asked = self._loop.run_in_executor(None, probe, self._log.path, self._refused_bytes)
        asked.add_done_callback(self._probed)

    def _probed(self, asked: asyncio.Future[LogError | None]) -> None:
        if asked.cancelled() or self.refused is None:
            self._probing = False
            return
        self.refused = asked.result()
        self._probing = self.refused is not None
        if self._probing:
            self._loop.call_later(RETRY_S, self._probe)

    # Delivery, in the loop.

    def deliver(self) -> None:
        """Deliver the records of others up to the next own append."""
        while self._queue and (run := self._queue[0]) is not None:
            self._queue.popleft()
            try:
                self._arrived(run)
            except Exception:  # later records and own appends are delivered all the same
                logger.exception("delivery_failed offset=%d", run[0].offset)

    def pass_own(self) -> None:
        """Deliver the records of others before the own append that ended, and remove its mark."""
        self.deliver()
        mark = self._queue.popleft()
        assert mark is None

    # The thread.

    def _follow(self) -> float | None:
        """Queue new records of others; return None, or the seconds after which to try again."""
        try:
            found = False
            if self._log.next_offset > self._position:
                with self._reading:
                    found = self._read(self._log.next_offset)
            self.failure = None
        except LogClosedError:
            return None
        except LogError as error:
            if self.failure is None:
                logger.warning("follow_failed code=%s: %s", error.code, error.message)
            self.failure = error
            return RETRY_S
        if found:
            try:
                self._loop.call_soon_threadsafe(self.deliver)
            except RuntimeError:
                logger.debug("loop_closed: records of others arrived after the end")
            # A run has a maximum: continue with the next one.
            return 0.0 if self._log.next_offset > self._position else None
        return None

    def _read(self, end: int) -> bool:
        """Queue visible records below `end`; return whether the position moved."""
        before = self._position
        if before >= end:
            return False
        records: list[Record] = []
        with self._log.read(start=before, end=end, on_gap="skip", on_corruption="skip") as reader:
            for batch in reader.batches():
                records += batch
                self._position = batch[-1].offset + 1
                if len(records) >= RUN_RECORDS_MAX:
                    break
            else:
                self._position = max(self._position, min(end, reader.position))
        if records:
            self._queue.append(records)
        return self._position > before
