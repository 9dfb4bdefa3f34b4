"""
The follower of the log: writes to it and follows it.

Appends and the search for what other processes appended are made in one order, so runs of records
reach the hub in the order of the log, each exactly once:

    commit ──► append_many ──► (records of others before ours) ──► done, in the event loop
    nothing to do ──► anything new in the log? ──► arrived, in the event loop

Own records are not read back: whoever committed them still has them in memory. An append that waits
for no disk, or for one that has been quick of late, is quicker than the way to another thread and back,
so it is made where it is asked for; for a slow disk the thread waits. The lock keeps appends in one
order with what the thread finds.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from virta.errors import (
    LogClosedError,
    LogError,
    LogLimitError,
    LogLockTimeoutError,
    LogSyncError,
    LogWriteError,
)
from virta.log.disk_errors import probe
from virta.log.format.codec import Encoded

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from virta.log import Log, Record
    from virta.log.log import Durability

logger = logging.getLogger("virta.hub")

# How often an idle follower looks for records of other processes: the delay they may see.
POLL_S = 0.005
# A failing log is asked again after this long, so that an error does not become a busy loop.
RETRY_S = 0.5
# The event loop may wait this long for a usual append and its sync: about what the way to a thread and
# back costs, and less than its other work takes in a turn. One that takes longer sends the next ones to
# the thread.
LOOP_APPEND_S_MAX = 0.001
# How much the last append in the loop says about the next one there.
APPEND_WEIGHT = 0.2
# In the thread the time of an append holds the wait for the interpreter too, so it cannot tell that the
# disk is quick again. After this many that were not too slow the loop tries one itself.
CALM_S = 0.005
CALM_APPENDS = 32
# The event loop waits this long for other writers; after that a thread does.
LOOP_LOCK_S_MAX = 0.002
# A publication is refused if the write lock was not free for this long: shorter than client timeouts.
LOCK_S_MAX = 5.0
# The server is not ready when one append takes longer than this.
STALL_S_MAX = 2.0
# Records of others go to the loop in runs of about this many.
FOREIGN_RUN_MAX = 4096


@dataclass
class Commit:
    """Records to append together, and what is to happen then (called in the event loop)."""

    records: Sequence[tuple[str, bytes, bytes]] | Encoded
    done: Callable[[Commit], None]
    appended: Any = None
    error: LogError | None = None
    foreign: list[Record] = field(default_factory=list)


class LogFollower:
    """Owns the writing side of a log and the position up to which it was followed."""

    def __init__(
        self,
        log: Log,
        loop: asyncio.AbstractEventLoop,
        arrived: Callable[[list[Record]], None],
        *,
        durability: Durability,
    ) -> None:
        self._log = log
        self._loop = loop
        self._arrived = arrived
        self._durability = durability
        self._synced = durability != "none"
        self._order = threading.Lock()
        # Runs of others that are on their way to the loop: nothing may overtake them.
        self._under_way = 0
        self._usual_append_s = 0.0  # of those in the loop
        self._calm = 0  # appends in the thread, one after the other, that were not too slow
        self._position = log.next_offset
        self._commits: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="virta-follower", daemon=True)
        self.failure: LogError | None = None  # the last error of following, None when all is well
        self.refused: LogError | None = None  # the error of the last append, None when it succeeded
        self._refused_bytes = 0  # of the append that was refused
        self._began: float | None = None  # when the running append began
        # A sync has failed: what the disk holds is unknown, and only a new process may find out.
        self.poisoned: LogSyncError | None = None

    @property
    def position(self) -> int:
        """The offset after the last record that was passed on."""
        return self._position

    def start(self) -> None:
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Return why publications fail or wait now, or None; it changes without another publication."""
        failure = self.poisoned or self.failure or self.refused
        if failure is not None:
            return failure.message
        began = self._began
        waited = 0.0 if began is None else time.monotonic() - began
        if waited > STALL_S_MAX:
            return f"an append has been waiting for the write lock or the disk for {waited:.1f} s"
        return None

    def commit(self, commit: Commit) -> None:
        """
        Append in order of calls; never waits for a slow disk.

        What needs no thread is done, `done` included, before this returns, unless records of others
        are to be delivered first.
        """
        if self._synced and self._usual_append_s > LOOP_APPEND_S_MAX:
            self._commits.put(commit)
            return
        with self._order:
            took = self._append(commit, LOOP_LOCK_S_MAX)
            self._usual_append_s += APPEND_WEIGHT * (took - self._usual_append_s)
            if isinstance(commit.error, LogLockTimeoutError):
                commit.error = None
                # Nothing was written, and no other append is running: the thread can wait for the lock.
                self._commits.put(commit)
                return
            self._note(commit)
            if self._under_way:
                self._loop.call_soon(commit.done, commit)
                return
        commit.done(commit)

    def stop(self) -> None:
        """Finish what was handed in, then end the thread; blocks until it has."""
        self._commits.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                well = self.failure is None and self.refused is None
                commit = self._commits.get(timeout=POLL_S if well else RETRY_S)
            except queue.Empty:
                self._probe()
                if self._is_new():
                    with self._order:
                        self._follow()
                continue
            if commit is None:
                return
            self._calm = self._calm + 1 if self._append(commit, LOCK_S_MAX) < CALM_S else 0
            self._note(commit)
            if self._calm >= CALM_APPENDS:
                self._calm = 0
                self._usual_append_s = LOOP_APPEND_S_MAX
            self._call(commit.done, commit)

    def _is_new(self) -> bool:
        """Whether to follow; when the log does not say, following finds out what is wrong."""
        try:
            return self._log.next_offset > self._position
        except LogError:
            return True

    def _append(self, commit: Commit, lock_timeout: float) -> float:
        """Append, wait until that is durable, look what others wrote before it; gives the seconds."""
        began = self._began = time.monotonic()
        try:
            appended = self._log.append_many(
                commit.records, durability=self._durability, lock_timeout=lock_timeout
            )
            commit.appended = appended
            while self._position < appended.offset:
                before = self._position
                commit.foreign += self._read(appended.offset)
                if self._position == before:
                    break
            self._position = appended.offset + appended.count
        except LogError as error:
            commit.error = error
        finally:
            self._began = None
        return time.monotonic() - began

    def _note(self, commit: Commit) -> None:
        """Remember how the last append ended, for `trouble`."""
        error = commit.error
        if error is None:
            self.refused = None
            return
        logger.warning("append_failed code=%s: %s", error.code, error.message)
        if isinstance(error, LogSyncError):
            self.poisoned = error
        if not isinstance(error, LogLimitError):  # caused by the records, not by the log
            self.refused = error
            records = commit.records
            self._refused_bytes = (
                len(records.batch)
                if isinstance(records, Encoded)
                else sum(len(value) for _, _, value in records)
            )

    def _probe(self) -> None:
        """Find out, after a refused append, whether another would succeed, without waiting for one."""
        if isinstance(self.refused, LogLockTimeoutError | LogWriteError):
            self.refused = probe(self._log.path, self._refused_bytes)

    def _follow(self) -> None:
        try:
            # Not `while`: what one round leaves is found by the next, and others get the lock.
            if (end := self._log.next_offset) > self._position:
                records = self._read(end)
                if records:
                    self._under_way += 1
                    self._call(self._come, records)
            self.failure = None
        except LogClosedError:
            return
        except LogError as error:
            if self.failure is None:
                logger.warning("follow_failed code=%s: %s", error.code, error.message)
            self.failure = error

    def _come(self, records: list[Record]) -> None:
        """In the loop: records of others, in their turn."""
        with self._order:
            self._under_way -= 1
        self._arrived(records)

    def _read(self, end: int) -> list[Record]:
        """Records from the position up to `end`, as far as they are visible."""
        records: list[Record] = []
        reader = self._log.read(start=self._position, end=end, on_gap="skip", on_corruption="skip")
        try:
            for batch in reader.batches():
                records += batch
                self._position = batch[-1].offset + 1
                if len(records) >= FOREIGN_RUN_MAX:
                    return records
            self._position = max(self._position, min(end, reader.position))
        finally:
            reader.close()
        return records

    def _call(self, function: Callable[..., None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            logger.debug("loop_closed: a result of the follower came after the end")
