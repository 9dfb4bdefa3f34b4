"""
The log for asyncio: the same core, its blocking calls in threads.

An append that waits for the disk, and a follower that waits for news, block a thread and not the loop. Reading is done
in chunks, so the loop sees one hop per chunk of records and not one per record.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from virta.log.opening import open_log

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from virta.log.groups import Consumer, ConsumerInfo
    from virta.log.handle import Log, SegmentInfo
    from virta.log.reader import Reader
    from virta.log.record import Appended, Record


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
        return AsyncReader(self.sync.read(*args, **options))

    async def consumer(self, name: str, **options: Any) -> AsyncConsumer:
        """See `Log.consumer`."""
        return AsyncConsumer(await asyncio.to_thread(self.sync.consumer, name, **options))

    async def flush(self) -> None:
        await asyncio.to_thread(self.sync.flush)

    async def segments(self) -> list[SegmentInfo]:
        return await asyncio.to_thread(self.sync.segments)

    async def consumers(self) -> list[ConsumerInfo]:
        return await asyncio.to_thread(self.sync.consumers)

    async def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Any other method of the log, in a thread: `await log.call(log.sync.retain, max_age=60)`."""
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

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._chunk: Iterator[Record] = iter(())

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
        """The records in lists, as they were decoded."""
        source = self._reader.batches()
        try:
            while (chunk := await asyncio.to_thread(next, source, None)) is not None:
                yield chunk
        except asyncio.CancelledError:
            self._reader.close()
            raise

    @property
    def position(self) -> int:
        return self._reader.position

    async def close(self) -> None:
        self._reader.close()


class AsyncConsumer:
    """`virta.log.Consumer` with coroutines."""

    def __init__(self, consumer: Consumer) -> None:
        self.sync = consumer

    async def read(
        self,
        *,
        follow: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncIterator[Record]:
        source = self.sync.read(follow=follow, timeout=timeout)
        while (record := await asyncio.to_thread(next, source, None)) is not None:
            yield record

    def __aiter__(self) -> AsyncIterator[Record]:
        return self.read()

    async def commit(self) -> None:
        await asyncio.to_thread(self.sync.commit)

    async def close(self) -> None:
        await asyncio.to_thread(self.sync.close)
