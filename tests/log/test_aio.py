"""The asyncio flavour over the same core."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import virta
from virta import errors
from virta.log import aio


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
                async for record in log.read(follow=True, timeout=60):
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


def test_more_followers_than_shared_threads(tmp_path):
    """However many wait for news, there is a thread left to append it with."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(2))
            await log.call(int)  # and they are there
            waiting = [asyncio.create_task(anext(log.read(follow=True))) for _ in range(3)]
            consumers = [await log.consumer(f"c{number}") for number in range(3)]
            waiting += [asyncio.create_task(anext(c.read(follow=True))) for c in consumers]
            await asyncio.sleep(0)
            await asyncio.wait_for(log.append("t", "", b"news"), 30)
            assert [r.value for r in await asyncio.gather(*waiting)] == [b"news"] * 6
            for consumer in consumers:
                await consumer.close()

    asyncio.run(main())


def test_a_cancelled_read_takes_no_record(tmp_path):
    """Whoever gave up waiting has not got the record that came then: a commit does not cover it, the next read has it."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            await log.append_many([("t", "", b"1"), ("t", "", b"2")])
            consumer = await log.consumer("c", partitions=1)
            records = consumer.read(follow=True)
            assert (await anext(records)).value == b"1"
            brought, go_on = threading.Event(), threading.Event()
            take = aio._Turns.take

            def slowly(turns):
                record = take(turns)
                if record is not None:
                    brought.set()
                    go_on.wait(60)
                return record

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(aio._Turns, "take", slowly)
                waiting = asyncio.ensure_future(anext(records))
                await asyncio.to_thread(brought.wait, 60)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                go_on.set()
            await consumer.commit()
            assert consumer.sync.position == 1
            assert [r.value async for r in consumer] == [b"2"]
            await consumer.commit()
            assert consumer.sync.position == 2
            await consumer.close()

    asyncio.run(main())


def test_a_commit_beside_a_waiting_follower(tmp_path):
    """One task follows and has nothing to do, another one commits what is done: it need not wait for news."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            await log.append("t", "", b"1")
            consumer = await log.consumer("c", partitions=1)
            got = asyncio.Event()

            async def follow():
                async for _ in consumer.read(follow=True):
                    got.set()

            following = asyncio.create_task(follow())
            await got.wait()
            await asyncio.wait_for(consumer.commit(), 30)
            assert consumer.sync.position == 1
            following.cancel()
            await asyncio.wait([following])
            await consumer.close()

    asyncio.run(main())


def test_a_cancelled_follower_can_be_continued(tmp_path):
    """Its position is behind what it gave out, whatever its thread had read by then."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            reader = log.read(follow=True)
            waiting = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(0)
            await log.append("t", "", b"1")
            waiting.cancel()
            await asyncio.wait([waiting])
            seen = 0 if waiting.cancelled() else 1
            assert reader.position == seen

    asyncio.run(main())
