"""
The log for asyncio: blocking calls run in threads.

Reading is done in chunks: one call in a thread per chunk of records, not per record. A follower has a thread of its
own: in the shared pool a few followers would leave no thread for the append they wait for. So does a consumer,
which is not safe for several threads; a record that a cancelled read had fetched is delivered again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from virta.errors import LogClosedError
from virta.log.limits import POLL_S, WATCH_INTERVAL_S, WATCH_S_MAX
from virta.log.opening import open_log

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from virta.log.consumers.consumer import Consumer, ConsumerInfo
    from virta.log.log import Log
    from virta.log.reader import Reader
    from virta.log.record import Appended, Record
    from virta.log.seek import SegmentInfo
    from virta.log.topics import TopicInfo

logger = logging.getLogger("virta.log")


async def open_async(path: str | os.PathLike[str], **options: Any) -> AsyncLog:
    """Open a log for asyncio; the options are those of `virta.open`."""
    return AsyncLog(await asyncio.to_thread(open_log, path, **options))


class AsyncLog:
    """`virta.Log` with coroutines; `sync` is the Log itself."""

    def __init__(self, log: Log) -> None:
        self.sync = log

    async def append(self, *args: Any, **options: Any) -> Appended:
        """See `Log.append`."""
        return await asyncio.to_thread(self.sync.append, *args, **options)

    async def append_many(self, records: Iterable[Sequence[Any]], **options: Any) -> Appended:
        """See `Log.append_many`."""
        return await asyncio.to_thread(self.sync.append_many, records, **options)

    def read(self, *args: Any, **options: Any) -> AsyncReader:
        """See `Log.read`; iterate with `async for`."""
        return AsyncReader(self.sync.read(*args, **options), follow=options.get("follow", False))

    async def consumer(self, name: str, **options: Any) -> AsyncConsumer:
        """See `Log.consumer`."""
        return AsyncConsumer(await asyncio.to_thread(self.sync.consumer, name, **options))

    async def flush(self) -> None:
        await asyncio.to_thread(self.sync.flush)

    async def topics(self, **options: Any) -> list[TopicInfo]:
        """See `Log.topics`."""
        return await asyncio.to_thread(self.sync.topics, **options)

    async def segments(self) -> list[SegmentInfo]:
        return await asyncio.to_thread(self.sync.segments)

    async def consumers(self) -> list[ConsumerInfo]:
        return await asyncio.to_thread(self.sync.consumers)

    async def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call any other method of the log in a thread: `await log.call(log.sync.retain, max_age=60)`."""
        return await asyncio.to_thread(method, *args, **options)

    async def close(self) -> None:
        await asyncio.to_thread(self.sync.close)

    @property
    def first_offset(self) -> int:
        return self.sync.first_offset

    @property
    def next_offset(self) -> int:
        return self.sync.next_offset

    @property
    def durable_offset(self) -> int:
        return self.sync.durable_offset

    async def __aenter__(self) -> AsyncLog:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncReader:
    """An asynchronous iterator of records."""

    def __init__(self, reader: Reader, *, follow: bool = False) -> None:
        self._reader = reader
        self._chunk: Iterator[Record] = iter(())
        self._position = reader.position
        self._thread = ThreadPoolExecutor(1, "virta-log-follow") if follow else None

    def __aiter__(self) -> AsyncReader:
        return self

    async def __anext__(self) -> Record:
        for record in self._chunk:
            return record
        async for chunk in self.batches():
            self._chunk = iter(chunk)
            for record in self._chunk:
                return record
        raise StopAsyncIteration

    async def batches(self) -> AsyncIterator[list[Record]]:
        """Yield the records in lists, as they were decoded."""
        loop = asyncio.get_running_loop()
        source = self._reader.batches()
        try:
            while True:
                chunk = await loop.run_in_executor(self._thread, next, source, None)
                if chunk is None:
                    return
                self._position = self._reader.position
                yield chunk
        except asyncio.CancelledError:
            self._reader.close()
            raise

    @property
    def position(self) -> int:
        """The offset after the last chunk that was yielded, also after a cancellation."""
        return self._position

    async def close(self) -> None:
        self._reader.close()


class AsyncConsumer:
    """`virta.log.Consumer` with coroutines."""

    def __init__(self, consumer: Consumer) -> None:
        self.sync = consumer
        self._thread = ThreadPoolExecutor(1, "virta-log-consumer")

    async def read(
        self,
        *,
        follow: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncIterator[Record]:
        source = ConsumerRead(self.sync, follow, timeout)
        while not source.ended:
            taking = asyncio.get_running_loop().run_in_executor(self._thread, source.take)
            try:
                record = await asyncio.shield(taking)
            except asyncio.CancelledError:
                # In the same thread, after the read and before a commit: that must not include this record.
                self._thread.submit(source.put_back)
                raise
            if record is not None:
                yield record

    def __aiter__(self) -> AsyncIterator[Record]:
        return self.read()

    async def commit(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.sync.commit)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.sync.close)


class EndWatcher:
    """
    Call `changed` in a thread of its own whenever the published end of a log has moved, in any process.

    The thread waits on the control page's futex, so an idle log costs no CPU time. Changes in quick succession are
    reported together, WATCH_INTERVAL_S apart. A server compares `log.next_offset` with its position in `changed`
    and passes what it read to its event loop with `call_soon_threadsafe`.

    Args:
        changed: called first at the start. It returns None, or the seconds after which to call it again even if
            nothing changes (for a retry). Exceptions are logged, and it is called again.
    """

    def __init__(self, log: Log, changed: Callable[[], float | None]) -> None:
        self._source = log.source
        self._changed = changed
        self._closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="virta-log-watch", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def wake(self) -> None:
        """Have `changed` called soon, although nothing was published."""
        self._source.wake()

    def close(self) -> None:
        """End the thread; return when the last call of `changed` has."""
        self._closing.set()
        self._source.wake()
        if self.thread.is_alive():
            self.thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            retry = WATCH_S_MAX
            try:
                seen = self._source.notified()
                wanted = self._changed()
                if wanted is not None:
                    retry = min(wanted, retry)
            except LogClosedError:
                return
            except Exception:
                logger.exception("log_watch_failed")
            self._closing.wait(WATCH_INTERVAL_S)
            try:
                self._source.wait(seen, retry)
            except LogClosedError:
                return


class ConsumerRead:
    """One read of a consumer, in its thread; a follower waits for POLL_S at a time, so commits are not blocked."""

    def __init__(self, consumer: Consumer, follow: bool, timeout: float | None) -> None:  # noqa: FBT001
        self.ended = False
        self._consumer = consumer
        self._follow = follow
        self._timeout = timeout
        self._idle_since = time.monotonic()
        self._source: Iterator[Record] | None = None
        self._taken: Record | None = None

    def take(self) -> Record | None:
        """Return the next record; None for nothing yet, or nothing more (`ended`)."""
        if self._source is None:
            turn = POLL_S if self._timeout is None else min(POLL_S, self._timeout)
            self._source = self._consumer.read(follow=self._follow, timeout=turn)
        self._taken = next(self._source, None)
        now = time.monotonic()
        if self._taken is not None:
            self._idle_since = now
            return self._taken
        self._source = None
        overdue = self._timeout is not None and now - self._idle_since >= self._timeout
        self.ended = overdue or not self._follow
        return None

    def put_back(self) -> None:
        if self._taken is not None:
            self._consumer.put_back(self._taken)
