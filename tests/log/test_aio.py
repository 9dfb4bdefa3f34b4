"""The asyncio interface of the log."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import virta
from virta import errors
from virta.log import aio
from virta.log.engine import kernel


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
    """With more waiting followers than shared threads, an append still gets a thread."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(2))
            await log.call(int)  # and they are there
            waiting = [asyncio.create_task(anext(log.read(follow=True))) for _ in range(3)]
            consumers = [await log.consumer(f"c{number}") for number in range(3)]
            waiting += [asyncio.create_task(anext(c.read(follow=True))) for c in consumers]
            await asyncio.sleep(0)
            await asyncio.wait_for(log.append("t", "", b"new"), 30)
            assert [r.value for r in await asyncio.gather(*waiting)] == [b"new"] * 6
            for consumer in consumers:
                await consumer.close()

    asyncio.run(main())


def test_a_cancelled_read_takes_no_record(tmp_path):
    """A record that arrives after a read was cancelled is not committed and is returned by the next read."""

    async def main():
        async with await virta.open_async(tmp_path / "log") as log:
            await log.append_many([("t", "", b"1"), ("t", "", b"2")])
            consumer = await log.consumer("c", partitions=1)
            records = consumer.read(follow=True)
            assert (await anext(records)).value == b"1"
            brought, go_on = threading.Event(), threading.Event()
            take = aio.ConsumerRead.take

            def slowly(turns):
                record = take(turns)
                if record is not None:
                    brought.set()
                    go_on.wait(60)
                return record

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(aio.ConsumerRead, "take", slowly)
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
    """A commit does not wait for a follower of the same consumer that is waiting for records."""

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


class Watched:
    """A watcher, how often it called, and a way to wait for the next call."""

    def __init__(self, log):
        self.ends = []
        self.called = threading.Semaphore(0)
        self.retry = None
        self.log = log
        self.watcher = aio.EndWatcher(log, self.changed)

    def changed(self):
        self.ends.append(self.log.next_offset)
        self.called.release()
        return self.retry

    def wait_for(self, end):
        deadline = time.monotonic() + 30
        while not self.ends or self.ends[-1] < end:
            assert self.called.acquire(timeout=deadline - time.monotonic())

    def __enter__(self):
        self.watcher.start()
        return self

    def __exit__(self, *exc):
        self.watcher.close()


def test_a_watcher_reports_appends_of_any_handle(tmp_path, either_kernel):
    """The end moves by this handle and by another one; each move is reported."""
    with (
        virta.open(tmp_path / "log", durability="none") as log,
        virta.open(tmp_path / "log", durability="none") as other,
        Watched(log) as watched,
    ):
        watched.wait_for(0)
        for number in range(1, 5):
            (log if number % 2 else other).append("t", "", b"")
            watched.wait_for(number)


def test_a_watcher_reports_appends_of_another_process(tmp_path, monkeypatch):
    """Another process wakes the watcher: without that wake-up it would report after an hour."""
    if not kernel.NATIVE:
        pytest.skip("the native kernel is not built")
    monkeypatch.setattr(aio, "WATCH_S_MAX", 3600.0)
    path = tmp_path / "log"
    with virta.open(path) as log, Watched(log) as watched:
        watched.wait_for(0)
        code = f"import virta; virta.open({str(path)!r}).append('t', '', b'')"
        subprocess.run([sys.executable, "-c", code], check=True)
        watched.wait_for(1)


def test_an_idle_watcher_does_nothing(tmp_path, monkeypatch):
    """While nothing is published the thread sleeps in one call of the kernel."""
    if not kernel.NATIVE:
        pytest.skip("the plain kernel polls")
    monkeypatch.setattr(aio, "WATCH_S_MAX", 3600.0)
    with virta.open(tmp_path / "log") as log, Watched(log) as watched:
        watched.wait_for(0)
        calls = len(watched.ends)
        before = time.process_time()
        time.sleep(0.5)

        assert len(watched.ends) <= calls + 1
        assert time.process_time() - before < 0.02


def test_a_busy_log_is_reported_in_intervals(tmp_path):
    """Thousands of appends are a few calls, and the last end is among them."""
    with virta.open(tmp_path / "log", durability="none") as log, Watched(log) as watched:
        began = time.monotonic()
        for _ in range(3000):
            log.append("t", "", b"")
        took = time.monotonic() - began
        watched.wait_for(3000)

        assert len(watched.ends) <= took / aio.WATCH_INTERVAL_S + 10


def test_a_watcher_can_be_woken_and_can_ask_to_be_called_again(tmp_path, either_kernel):
    """wake() and a returned delay call `changed` although nothing was published."""
    with virta.open(tmp_path / "log") as log, Watched(log) as watched:
        watched.wait_for(0)
        watched.watcher.wake()
        assert watched.called.acquire(timeout=30)
        watched.retry = 0.01
        watched.watcher.wake()
        for _ in range(5):
            assert watched.called.acquire(timeout=30)


def test_a_watcher_survives_a_truncated_control_page(tmp_path, either_kernel):
    """After another process truncated the control page, appends are still reported."""
    with (
        virta.open(tmp_path / "log", durability="none") as log,
        virta.open(tmp_path / "log", durability="none") as other,
        Watched(log) as watched,
    ):
        other.append("t", "", b"")
        watched.wait_for(1)
        os.truncate(tmp_path / "log" / "control", 0)
        other.append("t", "", b"")
        watched.wait_for(2)
        other.append("t", "", b"")
        watched.wait_for(3)


def test_a_watcher_survives_a_rollover_and_retention(tmp_path):
    """New segments and removed ones change nothing for the watcher."""
    with virta.open(tmp_path / "log", segment_bytes=4096) as log, Watched(log) as watched:
        for number in range(1, 21):
            log.append("t", "", bytes(1000))
            log.retain(max_bytes=8192)
            watched.wait_for(number)


def test_an_error_in_changed_does_not_end_the_watcher(tmp_path, caplog):
    """An exception is logged and the next change is reported."""
    with virta.open(tmp_path / "log") as log:
        watched = Watched(log)
        original, failures = watched.changed, [RuntimeError("bug")]

        def changed():
            if failures:
                raise failures.pop()
            return original()

        watched.watcher = aio.EndWatcher(log, changed)
        with watched:
            log.append("t", "", b"")
            watched.wait_for(1)

    assert "log_watch_failed" in caplog.text


@pytest.mark.parametrize("first", ["watcher", "log"])
def test_closing_ends_the_thread_at_once(tmp_path, monkeypatch, either_kernel, first):
    """Neither the watcher nor its log waits for a timeout when one of them is closed."""
    monkeypatch.setattr(aio, "WATCH_S_MAX", 3600.0)
    log = virta.open(tmp_path / "log")
    watched = Watched(log)
    watched.watcher.start()
    watched.wait_for(0)
    began = time.monotonic()
    if first == "log":
        log.close()
    watched.watcher.close()
    log.close()

    assert not watched.watcher.thread.is_alive()
    assert time.monotonic() - began < 10


def test_a_watcher_of_a_log_that_is_only_read(tmp_path):
    """A read-only handle cannot be woken; it checks the page, also one that is made later."""
    with virta.open(tmp_path / "log") as log:
        log.append("t", "", b"")
        with virta.open(tmp_path / "log", read_only=True) as reading, Watched(reading) as watched:
            watched.wait_for(1)
            log.append("t", "", b"")
            watched.wait_for(2)
