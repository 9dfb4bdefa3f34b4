"""The asyncio flavour over the same core."""

from __future__ import annotations

import asyncio

import pytest

import virta
from virta import errors


def test_append_and_read(tmp_path):
    """The same calls with await, many at once."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            done = await asyncio.gather(*(log.append("t", "", b"%d" % i) for i in range(50)))
            assert sorted(done) == list(range(50))
            assert (await log.append_many([("t", "", b"x")])).count == 1
            assert len([r async for r in log.read()]) == 51
            assert [len(b) async for b in log.read(start=50).batches()] == [1]
            assert len(await log.segments()) == 1
            assert (log.first_offset, log.next_offset, log.durable_offset) == (0, 51, 51)
            await log.flush()
            assert (await log.call(log.sync.verify)).records == 51

    asyncio.run(main())


def test_following_does_not_block_the_loop(tmp_path):
    """A follower and a writer in one loop."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            got = []

            async def follow():
                async for record in log.read(follow=True, timeout=10):
                    got.append(record.offset)
                    if len(got) == 30:
                        return

            task = asyncio.create_task(follow())
            for i in range(30):
                await log.append("t", "", b"%d" % i)
            await task
            assert got == list(range(30))

    asyncio.run(main())


def test_consumers(tmp_path):
    """Named consumers with await."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            await log.append_many([("t", "", b"1"), ("t", "", b"2")])
            consumer = await log.consumer("c")
            assert [r.value async for r in consumer] == [b"1", b"2"]
            await consumer.commit()
            assert [c.position for c in await log.consumers()] == [2]
            await consumer.close()

    asyncio.run(main())


def test_cancelling_a_follower(tmp_path):
    """A cancelled follower gives its thread back."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            task = asyncio.create_task(anext(log.read(follow=True)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(errors.LogClosedError):
            await log.append("t", "", b"")

    asyncio.run(main())
