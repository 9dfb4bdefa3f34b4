"""
Group commit: append what many callers submit in few batches, and answer each once its batch is durable.

Everything that is submitted while an append is in flight becomes the next batch, so one append and one sync serve all
of it. Two classes share the rules: `GroupCommit` for an asyncio loop, `ThreadGroupCommit` for callers in threads.

    submit(item) ──► collect(items) -> records ──► append(records) ──► on_committed ──► answer(item) … ──► on_answered
                     loop                          loop or thread      loop             loop                loop

Rules, for both:

- One append is in flight at a time. Batches, and the items in a batch, are answered in the order of submission.
- A batch has at most `records_max` records and `bytes_max` bytes, or a single item.
- `collect` runs immediately before its append: it returns the records of these items, or None if there is nothing to
  append. Then the items are answered without an append, still in order.
- An error is the answer to every item of its batch. A lock timeout also fails everything that is queued: it would
  only wait longer. After an error that `is_fatal` (by default a failed sync or a closed log) nothing is appended any
  more, and everything queued and submitted later gets that error, because what the disk has is unknown.
- Exceptions in hooks and answers are logged. Other callers are still answered and later batches still run.
- An item cannot be withdrawn: a caller that was cancelled ignores its answer, its records are appended.

A `GroupCommit` appends in the event loop while the disk is fast, because handing the append to a thread costs more
than waiting; a moving average of the time decides. On a slow disk, and while other writers have the write lock, a
thread waits and the loop continues. `append(records, lock_timeout)` must raise LogLockTimeoutError, with nothing
written, if it cannot get the log's write lock in that many seconds.

    commits = GroupCommit(
        lambda records, lock_timeout: log.append_many(records, lock_timeout=lock_timeout),
        loop=asyncio.get_running_loop(),
        collect=lambda items: [item.record for item in items],
        answer=lambda item, error: item.reply(error),
    )
    commits.submit(item)          # or add() several, then write(): no extra turn of the loop
    await commits.close()
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from virta.errors import LogClosedError, LogError, LogLockTimeoutError, LogSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Item = TypeVar("Item")
Records = TypeVar("Records")
Result = TypeVar("Result")

_Entries = list[tuple[Item, int, int]]  # each with its records and bytes

logger = logging.getLogger("virta.log")

# One append has no more than this. Even with the longest topics and keys that is a batch the log accepts, so no item
# fails because of its neighbours.
APPEND_RECORDS_MAX: Final = 16_000
APPEND_BYTES_MAX: Final = 32 * 1024 * 1024
# The event loop may wait this long for a usual append: about what a thread and back costs.
INLINE_S_MAX: Final = 0.001
# How much the last append weighs in the average, and the longest that one may count: two slow appends in a row are a
# slow disk, one is not.
AVERAGE_WEIGHT: Final = 0.2
OUTLIER_S_MAX: Final = 4 * INLINE_S_MAX
# Times measured in the thread include the wait for the interpreter, so they cannot show that the disk is fast again.
# After this many appends in a row under CALM_S the loop tries one itself.
CALM_S: Final = 0.005
CALM_APPENDS: Final = 32
# The loop waits this long for other writers, then the thread waits up to the second limit.
INLINE_LOCK_S_MAX: Final = 0.002
LOCK_S_MAX: Final = 5.0


def is_fatal(error: LogError) -> bool:
    """Return whether nothing may be appended after `error`."""
    return isinstance(error, LogSyncError | LogClosedError)


class _Commits(Generic[Item, Records, Result]):
    """The queue, the append, and the rules about errors."""

    def __init__(
        self,
        append: Callable[[Records, float], Result],
        *,
        collect: Callable[[Sequence[Item]], Records | None],
        on_committed: Callable[[Sequence[Item], Result | None, LogError | None], None]
        | None = None,
        is_fatal: Callable[[LogError], bool] = is_fatal,
        records_max: int = APPEND_RECORDS_MAX,
        bytes_max: int = APPEND_BYTES_MAX,
        lock_timeout: float = LOCK_S_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pending = 0  # records that are queued or in flight
        self.pending_bytes = 0
        self.commits = 0  # successful appends, and their total time
        self.commit_seconds = 0.0
        self.append_began: float | None = None  # by `clock`; None while no append is in flight
        self.failure: LogError | None = None  # the fatal error, if there was one
        self.busy = False  # from collect() until the last answer of a batch
        self._append = append
        self._collect = collect
        self._on_committed = on_committed
        self._is_fatal = is_fatal
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._lock_timeout = lock_timeout
        self._clock = clock
        self._queue: _Entries[Item] = []
        self._queued = self._queued_bytes = 0
        self._closed = False

    def add(self, item: Item, records: int = 1, size: int = 0) -> None:
        """Queue an item of so many records and bytes."""
        if self._closed:
            raise LogClosedError("the group commit is closed")
        self._queue.append((item, records, size))
        self._queued += records
        self._queued_bytes += size
        self.pending += records
        self.pending_bytes += size

    def _take(self) -> _Entries[Item]:
        """Remove the next batch from the queue."""
        if self._queued <= self._records_max and self._queued_bytes <= self._bytes_max:
            batch, self._queue = self._queue, []
            self._queued = self._queued_bytes = 0
            return batch
        records = size = count = 0
        for _, more_records, more_size in self._queue:
            records += more_records
            size += more_size
            if count and (records > self._records_max or size > self._bytes_max):
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        self._queued = sum(entry[1] for entry in self._queue)
        self._queued_bytes = sum(entry[2] for entry in self._queue)
        return batch

    def _prepare(self, batch: _Entries[Item]) -> tuple[Records | None, LogError | None]:
        """Return the records to append, or the error that answers the batch without an append."""
        try:
            records = self._collect([entry[0] for entry in batch])
        except LogError as error:
            return None, error
        except Exception as exc:
            logger.exception("collect_failed")
            return None, LogError(f"the records to append could not be collected: {exc}")
        if self.failure is None:
            return records, None
        return None, self.failure if batch else None

    def _attempt(
        self, records: Records, lock_timeout: float
    ) -> tuple[Result | None, LogError | None, float]:
        """Append; return the result or the error, and the seconds."""
        began = self.append_began = self._clock()
        result: Result | None = None
        error: LogError | None = None
        try:
            result = self._append(records, lock_timeout)
        except LogError as exc:
            error = exc
        except OSError as exc:
            error = LogError(f"appending to the log failed: {exc}")
        except Exception as exc:
            logger.exception("append_failed")
            error = LogError(f"unexpected error in an append: {exc}")
        except BaseException:
            self.failure = LogError("an append was interrupted; what the log has is unknown")
            raise
        finally:
            self.append_began = None
        seconds = self._clock() - began
        if error is None:
            self.commits += 1
            self.commit_seconds += seconds
        return result, error, seconds

    def _end(
        self, batch: _Entries[Item], result: Result | None, error: LogError | None
    ) -> list[Item]:
        """Account for a batch and call `on_committed`; return the items to answer."""
        if error is not None:
            if self.failure is None and self._is_fatal(error):
                self.failure = error
            if self.failure is not None or isinstance(error, LogLockTimeoutError):
                batch, self._queue = batch + self._queue, []
                self._queued = self._queued_bytes = 0
        items = []
        for item, records, size in batch:
            items.append(item)
            self.pending -= records
            self.pending_bytes -= size
        self._call(self._on_committed, items, result, error)
        return items

    def _call(self, hook: Callable[..., None] | None, *arguments: object) -> None:
        try:
            if hook is not None:
                hook(*arguments)
        except Exception:
            logger.exception("commit_hook_failed")


class GroupCommit(_Commits[Item, Records, Result]):
    """
    Group commit for an asyncio loop; all methods and hooks run in the loop, except `append`.

    Args:
        append: (records, lock_timeout) -> result; blocking, called in the loop or in a thread.
        collect: (items) -> records, or None for nothing to append. Also called, with no items, for `schedule`.
        answer: (item, error or None), once for each item.
        on_committed: (items, result or None, error or None), before the answers of a batch. When an error also
            fails what is queued, `items` includes that.
        on_answered: (error or None), after the answers of a batch.
        is_fatal: (error) -> whether nothing may be appended after it.
        synced: whether appends wait for the disk; if not they only need the thread to wait for other writers.
        inline_s_max: the average time up to which appends are made in the loop; -1 is never, infinity always.
        lock_timeout: seconds that an append in the thread waits for other writers.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        append: Callable[[Records, float], Result],
        *,
        loop: asyncio.AbstractEventLoop,
        answer: Callable[[Item, LogError | None], None],
        on_answered: Callable[[LogError | None], None] | None = None,
        synced: bool = True,
        inline_s_max: float = INLINE_S_MAX,
        **options: Any,
    ) -> None:
        super().__init__(append, **options)
        self._loop = loop
        self._answer = answer
        self._on_answered = on_answered
        self._inline_s_max = inline_s_max if synced else float("inf")
        self._average_s = 0.0  # of appends in the loop
        self._calm = 0  # appends in the thread, in a row, under CALM_S
        self._wanted = False  # something is to be collected
        self._scheduled = False
        self._when_idle: list[Callable[[], None]] = []
        self._drained: asyncio.Future[None] | None = None
        self.thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    # --- submitting ---

    def submit(self, item: Item, records: int = 1, size: int = 0) -> None:
        """Queue an item and start a batch in the next turn of the loop."""
        self.add(item, records, size)
        self.schedule()

    def add(self, item: Item, records: int = 1, size: int = 0) -> None:
        """Queue an item; `write` or `schedule` starts its batch."""
        super().add(item, records, size)
        self._wanted = True

    def schedule(self) -> None:
        """Start a batch in the next turn of the loop, also if no item is queued."""
        self._wanted = True
        if not self._scheduled and not self.busy:
            self._scheduled = True
            self._loop.call_soon(self._write_scheduled)

    def write(self) -> None:
        """
        Start a batch now, unless one is in flight: the end of that one starts the next.

        If the append is made in the loop, all of the batch is answered when this returns.
        """
        if not self._wanted or self.busy:
            return
        batch = self._take()
        self._wanted = bool(self._queue)
        self.busy = True
        records, error = self._prepare(batch)
        if records is None:
            self._finish(batch, None, error)
        elif self._average_s > self._inline_s_max:
            self._hand_over(batch, records)
        else:
            self._append_inline(batch, records)

    async def drained(self) -> None:
        """Wait until everything that was queued is answered."""
        while self.busy or self._wanted:
            if self._wanted:
                self.schedule()
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)  # shared: cancelling one caller is its own affair

    def when_idle(self, function: Callable[[], None]) -> None:
        """Call `function` as soon as no append is in flight, before the next batch."""
        if self.busy:
            self._when_idle.append(function)
        else:
            function()

    async def close(self) -> None:
        """Answer what is queued, refuse what comes later, end the thread."""
        await self.drained()
        self._closed = True
        if self.thread is not None:
            self._jobs.put(None)
            self.thread.join()
            self.thread = None

    # --- a batch ---

    def _write_scheduled(self) -> None:
        self._scheduled = False
        self.write()

    def _append_inline(self, batch: _Entries[Item], records: Records) -> None:
        lock_timeout = min(INLINE_LOCK_S_MAX, self._lock_timeout)
        try:
            result, error, seconds = self._attempt(records, lock_timeout)
        except BaseException:
            self._finish(batch, None, self.failure)
            raise
        self._average_s += AVERAGE_WEIGHT * (min(seconds, OUTLIER_S_MAX) - self._average_s)
        if isinstance(error, LogLockTimeoutError) and lock_timeout < self._lock_timeout:
            self._hand_over(batch, records)  # nothing was written
        else:
            self._finish(batch, result, error)

    def _hand_over(self, batch: _Entries[Item], records: Records) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="virta-commit", daemon=True)
            self.thread.start()
        self._jobs.put((batch, records))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, records = job
            outcome = self._attempt(records, self._lock_timeout)
            try:
                self._loop.call_soon_threadsafe(self._appended_in_thread, batch, *outcome)
            except RuntimeError:
                logger.debug("loop_closed: an append ended after the event loop")
                return

    def _appended_in_thread(
        self, batch: _Entries[Item], result: Result | None, error: LogError | None, seconds: float
    ) -> None:
        self._calm = self._calm + 1 if seconds < CALM_S else 0
        if self._calm >= CALM_APPENDS:
            self._calm = 0
            self._average_s = min(self._average_s, self._inline_s_max)
        self._finish(batch, result, error)

    def _finish(self, batch: _Entries[Item], result: Result | None, error: LogError | None) -> None:
        for item in self._end(batch, result, error):
            try:
                self._answer(item, error)
            except Exception:
                logger.exception("answer_failed")
        self._call(self._on_answered, error)
        self.busy = False
        while self._when_idle:
            self._call(self._when_idle.pop(0))
        if self._wanted:
            self.schedule()  # not at once: answers that submit again would nest
        elif self._drained is not None and not self._drained.done():
            self._drained.set_result(None)


class ThreadGroupCommit(_Commits[Item, Records, Result]):
    """
    Group commit for callers in threads: a caller that finds no append in flight appends for all that wait.

    Callers share the state that `collect` reads, so they change it with `mutex` locked and call `commit` before they
    release it. The mutex is free while an append waits for the disk.

    Args:
        append, collect, on_committed, is_fatal, …: as for GroupCommit; `append` is called without the mutex, the
            hooks with it.
    """

    def __init__(self, append: Callable[[Records, float], Result], **options: Any) -> None:
        super().__init__(append, **options)
        self.mutex = threading.Lock()
        self._changed = threading.Condition(self.mutex)
        self._added = 0  # items so far
        self._answered = 0  # of them; they are answered in order
        self._errors: dict[int, LogError] = {}  # by the number of the item; its caller removes it

    def commit(self, item: Item, records: int = 1, size: int = 0) -> None:
        """
        Return when the item is durable. The caller has locked `mutex`, and has it again afterwards.

        Raises:
            LogError: the append of its batch failed, or a fatal error came before it.
        """
        self.add(item, records, size)
        number = self._added
        self._added += 1
        while self._answered <= number:
            if self.busy:
                self._changed.wait()
            else:
                self._append_next()
        error = self._errors.pop(number, None)
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for appends in flight and refuse later calls. The caller has locked `mutex`."""
        self._closed = True
        while self._answered < self._added:
            self._changed.wait()

    def _append_next(self) -> None:
        """Append the next batch for everyone who waits."""
        batch = self._take()
        self.busy = True
        result: Result | None = None
        records, error = self._prepare(batch)
        try:
            if records is not None:
                self.mutex.release()
                try:
                    result, error, _ = self._attempt(records, self._lock_timeout)
                finally:
                    self.mutex.acquire()
        finally:  # also after an interrupt: the others must not wait for ever
            error = self.failure or error
            count = len(self._end(batch, result, error))
            if error is not None:
                self._errors.update(
                    dict.fromkeys(range(self._answered, self._answered + count), error)
                )
            self._answered += count
            self.busy = False
            self._changed.notify_all()
