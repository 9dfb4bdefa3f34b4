"""Group commit, in an event loop and among threads: order, errors, where the append is made, closing."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import asynccontextmanager

import pytest

import virta
from virta.errors import (
    LogClosedError,
    LogError,
    LogLockTimeoutError,
    LogSyncError,
    LogWriteError,
)
from virta.log import group_commit
from virta.log.group_commit import GroupCommit, ThreadGroupCommit
from waiting import wait_until

INLINE, THREAD = float("inf"), -1.0
PLACES = pytest.mark.parametrize("inline_s_max", [INLINE, THREAD], ids=["inline", "thread"])


class Clock:
    """Seconds that pass only when an append says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Disk:
    """An append function whose results a test chooses; each call notes its thread and its records."""

    def __init__(self, clock=None):
        self.batches = []
        self.threads = []
        self.lock_timeouts = []
        self.errors = []  # raised by the next calls, None for success
        self.seconds = 0.0
        self.clock = clock
        self.reached = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def __call__(self, records, lock_timeout):
        self.threads.append(threading.current_thread().name)
        self.lock_timeouts.append(lock_timeout)
        self.reached.set()
        assert self.open.wait(60)
        if self.clock is not None:
            self.clock.now += self.seconds
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.batches.append(records)
        return len(self.batches)

    @property
    def in_thread(self):
        return [name == "virta-commit" for name in self.threads]


class Commits:
    """A GroupCommit whose items are strings, and what its hooks were called with."""

    def __init__(self, disk, **options):
        self.answers = []
        self.committed = []
        self.idle = []
        options.setdefault("collect", lambda items: list(items) or None)
        options.setdefault("answer", self.answer)
        options.setdefault("on_committed", lambda *result: self.committed.append(result))
        self.group = GroupCommit(
            disk,
            loop=asyncio.get_running_loop(),
            on_answered=self.idle.append,
            **options,
        )

    def answer(self, item, error):
        self.answers.append((item, error and error.code))


@asynccontextmanager
async def commits(disk, **options):
    made = Commits(disk, **options)
    try:
        yield made
    finally:
        disk.open.set()
        await made.group.close()


async def reached(disk):
    assert await asyncio.to_thread(disk.reached.wait, 60)
    disk.reached.clear()


# --- in an event loop ---


@PLACES
def test_items_of_one_turn_share_an_append(inline_s_max):
    """Everything submitted in a turn of the loop is one batch, answered in order after on_committed."""

    async def scenario():
        disk = Disk()
        async with commits(disk, inline_s_max=inline_s_max) as made:
            for item in "abc":
                made.group.submit(item, size=10)
            assert (made.group.pending, made.group.pending_bytes) == (3, 30)
            await made.group.drained()
            assert (made.group.pending, made.group.pending_bytes) == (0, 0)
            return disk.batches, disk.in_thread, made.answers, made.committed, made.idle

    batches, in_thread, answers, committed, idle = asyncio.run(scenario())

    assert batches == [["a", "b", "c"]]
    assert in_thread == [inline_s_max == THREAD]
    assert answers == [("a", None), ("b", None), ("c", None)]
    assert committed == [(["a", "b", "c"], 1, None)]
    assert idle == [None]


def test_write_appends_at_once():
    """add() and write() answer in the same call: no turn of the loop passes."""

    async def scenario():
        disk = Disk()
        async with commits(disk) as made:
            made.group.add("a")
            made.group.add("b")
            assert made.answers == []
            made.group.write()
            now = list(made.answers)
            made.group.write()  # nothing is queued: nothing is collected
            return now, disk.batches

    assert asyncio.run(scenario()) == ([("a", None), ("b", None)], [["a", "b"]])


def test_what_comes_during_an_append_is_the_next_batch():
    """Items that are submitted while an append is in flight share the one after it."""

    async def scenario():
        disk = Disk()
        disk.open.clear()
        async with commits(disk, inline_s_max=THREAD) as made:
            made.group.submit("a")
            await reached(disk)
            for item in "bcd":
                made.group.submit(item)
                made.group.write()
            assert (disk.threads, made.group.pending) == (["virta-commit"], 4)
            assert made.group.append_began is not None
            disk.open.set()
            await made.group.drained()
            return disk.batches, made.answers

    batches, answers = asyncio.run(scenario())

    assert batches == [["a"], ["b", "c", "d"]]
    assert [item for item, _ in answers] == ["a", "b", "c", "d"]


def test_a_batch_is_bounded():
    """A batch stays under both limits; an item over a limit is a batch of its own."""

    async def scenario():
        disk = Disk()
        async with commits(disk, records_max=4, bytes_max=100) as made:
            for item, records, size in [
                ("a", 2, 1),
                ("b", 2, 1),
                ("c", 1, 60),
                ("d", 1, 60),
                ("huge", 9, 1000),
                ("e", 1, 1),
            ]:
                made.group.submit(item, records, size)
            await made.group.drained()
            return disk.batches, [item for item, _ in made.answers]

    batches, answered = asyncio.run(scenario())

    assert batches == [["a", "b"], ["c"], ["d"], ["huge"], ["e"]]
    assert answered == ["a", "b", "c", "d", "huge", "e"]


def test_nothing_to_append_is_answered_in_order():
    """Items without records are answered, but not before those that were submitted earlier."""

    async def scenario():
        disk = Disk()
        disk.open.clear()

        def collect(items):
            return [item for item in items if item != "empty"] or None

        async with commits(disk, inline_s_max=THREAD, collect=collect) as made:
            made.group.submit("a")
            await reached(disk)
            made.group.submit("empty")
            await asyncio.sleep(0)
            assert made.answers == []
            disk.open.set()
            await made.group.drained()
            return disk.batches, made.answers

    assert asyncio.run(scenario()) == ([["a"]], [("a", None), ("empty", None)])


def test_schedule_collects_without_an_item():
    """Changes without a waiting caller are collected too."""

    async def scenario():
        disk, changes = Disk(), ["changed by time"]

        def collect(items):
            records = [*changes, *items]
            changes.clear()
            return records or None

        async with commits(disk, collect=collect) as made:
            made.group.schedule()
            made.group.schedule()
            await made.group.drained()
            return disk.batches

    assert asyncio.run(scenario()) == [["changed by time"]]


@PLACES
def test_an_error_is_the_answer_to_its_batch_only(inline_s_max):
    """A full disk refuses one batch; the next is appended."""

    async def scenario():
        disk = Disk()
        disk.errors = [LogWriteError("disk full")]
        async with commits(disk, inline_s_max=inline_s_max) as made:
            made.group.submit("a")
            made.group.submit("b")
            await made.group.drained()
            made.group.submit("c")
            await made.group.drained()
            assert made.group.failure is None
            return disk.batches, made.answers, made.idle[0].code

    batches, answers, idle = asyncio.run(scenario())

    assert batches == [["c"]]
    assert answers == [("a", "log_write_failed"), ("b", "log_write_failed"), ("c", None)]
    assert idle == "log_write_failed"


def test_a_failed_sync_fails_the_queue_and_everything_after():
    """After a failed sync what the disk has is unknown: nothing later is appended or acknowledged."""

    async def scenario():
        disk = Disk()
        disk.errors = [LogSyncError("EIO")]
        disk.open.clear()
        async with commits(disk, inline_s_max=THREAD) as made:
            made.group.submit("a")
            await reached(disk)
            made.group.submit("queued")
            disk.open.set()
            await made.group.drained()
            assert made.committed[0] == (["a", "queued"], None, made.group.failure)
            made.group.submit("later")
            await made.group.drained()
            return disk.batches, made.answers, len(disk.threads)

    batches, answers, calls = asyncio.run(scenario())

    assert (batches, calls) == ([], 1)
    assert answers == [(item, "log_sync_failed") for item in ("a", "queued", "later")]


def test_which_errors_are_fatal_is_the_callers_choice():
    """A caller whose memory is ahead of the disk may refuse all work after any error."""

    async def scenario():
        disk = Disk()
        disk.errors = [LogWriteError("disk full")]
        async with commits(disk, is_fatal=lambda error: True) as made:
            for item in "ab":
                made.group.submit(item)
                await made.group.drained()
            return disk.batches, made.answers

    assert asyncio.run(scenario()) == ([], [("a", "log_write_failed"), ("b", "log_write_failed")])


@pytest.mark.parametrize(
    ("raised", "code"), [(OSError(5, "EIO"), "log_error"), (RuntimeError("bug"), "log_error")]
)
def test_unexpected_errors_are_answered(raised, code, caplog):
    """Whatever an append raises, its items are answered and the next batch is appended."""

    async def scenario():
        disk = Disk()
        disk.errors = [raised]
        async with commits(disk) as made:
            for item in "ab":
                made.group.submit(item)
                await made.group.drained()
            return made.answers

    assert asyncio.run(scenario()) == [("a", code), ("b", None)]


def test_an_error_in_collect_is_the_answer():
    """collect() may refuse a batch, with the log's error or by a bug."""

    async def scenario():
        disk, raised = Disk(), [LogWriteError("no space for a copy"), RuntimeError("bug")]

        def collect(items):
            if raised:
                raise raised.pop(0)
            return items

        async with commits(disk, collect=collect) as made:
            for item in "abc":
                made.group.submit(item)
                await made.group.drained()
            return made.answers

    assert asyncio.run(scenario()) == [("a", "log_write_failed"), ("b", "log_error"), ("c", None)]


def test_a_failing_hook_or_answer_keeps_nobody_waiting(caplog):
    """All items of a batch are answered, and those of the next."""

    async def scenario():
        disk = Disk()

        def answer(item, error):
            if item == "a":
                raise RuntimeError("the connection is closed")
            made.answer(item, error)

        def on_committed(items, result, error):
            raise RuntimeError("a subscriber failed")

        async with commits(disk, answer=answer, on_committed=on_committed) as made:
            for item in "abc":
                made.group.submit(item)
                if item == "b":
                    await made.group.drained()
            await made.group.drained()
            return made.answers

    assert asyncio.run(scenario()) == [("b", None), ("c", None)]
    assert "answer_failed" in caplog.text
    assert "commit_hook_failed" in caplog.text


def test_an_answer_may_submit():
    """An item submitted by an answer is in the next batch; answers do not nest."""

    async def scenario():
        disk, depth = Disk(), []

        def answer(item, error):
            depth.append(item)
            assert len(depth) == 1
            if item < 50:
                made.group.submit(item + 1)
                made.group.write()
            made.answer(item, error)
            depth.pop()

        async with commits(disk, answer=answer) as made:
            made.group.submit(0)
            await made.group.drained()
            return [item for item, _ in made.answers]

    assert asyncio.run(scenario()) == list(range(51))


def test_a_busy_lock_is_waited_for_in_the_thread():
    """The loop waits briefly for other writers; then the thread waits, with the full timeout."""

    async def scenario():
        disk = Disk()
        disk.errors = [LogLockTimeoutError("busy"), None]
        async with commits(disk, lock_timeout=7.0) as made:
            made.group.submit("a")
            await made.group.drained()
            return disk.in_thread, disk.lock_timeouts, made.answers

    in_thread, timeouts, answers = asyncio.run(scenario())

    assert in_thread == [False, True]
    assert timeouts == [group_commit.INLINE_LOCK_S_MAX, 7.0]
    assert answers == [("a", None)]


def test_a_lock_timeout_refuses_the_queue_but_not_what_comes_later():
    """Items queued behind an append that could not get the lock would only wait longer."""

    async def scenario():
        disk = Disk()
        disk.errors = [LogLockTimeoutError("busy")]
        disk.open.clear()
        async with commits(disk, inline_s_max=THREAD) as made:
            made.group.submit("a")
            await reached(disk)
            made.group.submit("queued")
            disk.open.set()
            await made.group.drained()
            made.group.submit("later")
            await made.group.drained()
            return made.answers

    code = "log_lock_timeout"
    assert asyncio.run(scenario()) == [("a", code), ("queued", code), ("later", None)]


def test_a_slow_disk_moves_appends_to_the_thread_and_back():
    """Two slow appends in a row are a slow disk; many fast ones in the thread and the loop tries again."""

    async def scenario():
        clock = Clock()
        disk = Disk(clock)
        async with commits(disk, clock=clock) as made:

            async def append(seconds, count=1):
                disk.threads.clear()
                disk.seconds = seconds
                for _ in range(count):
                    made.group.submit("x")
                    await made.group.drained()
                return disk.in_thread

            fast = await append(0.0001, 5)
            one_outlier = await append(1.0) + await append(0.0001, 20)
            slow = await append(0.01, 5)
            still = await append(0.01, 3)
            calm = await append(0.0001, group_commit.CALM_APPENDS)
            again = await append(0.0001, 3)
            relapse = await append(0.01, 4)
            return fast, one_outlier, slow, still, calm, again, relapse

    fast, one_outlier, slow, still, calm, again, relapse = asyncio.run(scenario())

    assert not any(fast)
    assert not any(one_outlier)
    assert slow == [False, False, True, True, True]
    assert all(still)
    assert all(calm)
    assert not any(again)
    assert relapse[-1]


def test_without_sync_the_loop_appends_always():
    """An append that waits for no disk is not handed to a thread however long it took."""

    async def scenario():
        clock = Clock()
        disk = Disk(clock)
        disk.seconds = 1.0
        async with commits(disk, clock=clock, synced=False) as made:
            for _ in range(10):
                made.group.submit("x")
                await made.group.drained()
            assert (made.group.commits, made.group.commit_seconds) == (10, 10.0)
            return disk.in_thread

    assert not any(asyncio.run(scenario()))


def test_when_idle_runs_between_two_batches():
    """A function that needs the log at rest is called after the append in flight, before the next."""

    async def scenario():
        disk, seen = Disk(), []
        disk.open.clear()
        async with commits(disk, inline_s_max=THREAD) as made:
            made.group.when_idle(lambda: seen.append("at once"))
            made.group.submit("a")
            await reached(disk)
            made.group.submit("b")
            made.group.when_idle(lambda: seen.append(list(disk.batches)))
            disk.open.set()
            await made.group.drained()
            return seen, disk.batches

    assert asyncio.run(scenario()) == (["at once", [["a"]]], [["a"], ["b"]])


def test_cancelling_one_who_waits_leaves_the_others():
    """drained() is shared; a cancelled caller neither stops the append nor the other callers."""

    async def scenario():
        disk = Disk()
        disk.open.clear()
        async with commits(disk, inline_s_max=THREAD) as made:
            made.group.submit("a")
            waiting = [asyncio.create_task(made.group.drained()) for _ in range(3)]
            await reached(disk)
            waiting[0].cancel()
            await asyncio.wait(waiting[:1])
            disk.open.set()
            return await asyncio.gather(*waiting[1:]), made.answers

    assert asyncio.run(scenario()) == ([None, None], [("a", None)])


@PLACES
def test_close_answers_what_is_queued_and_refuses_the_rest(inline_s_max):
    """close() drains, ends the thread and may be called again."""

    async def scenario():
        disk = Disk()
        before = threading.active_count()
        async with commits(disk, inline_s_max=inline_s_max) as made:
            made.group.submit("a")
            await made.group.close()
            with pytest.raises(LogClosedError):
                made.group.submit("b")
            assert threading.active_count() == before
            return made.answers

    assert asyncio.run(scenario()) == [("a", None)]


def test_an_append_that_ends_after_the_loop(caplog):
    """A loop that is closed meanwhile is no error of the thread."""
    disk = Disk()
    disk.open.clear()
    loop = asyncio.new_event_loop()
    group = GroupCommit(
        disk, loop=loop, collect=list, answer=lambda item, error: None, inline_s_max=THREAD
    )
    loop.call_soon(group.submit, "a")
    loop.run_until_complete(asyncio.to_thread(disk.reached.wait, 60))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    disk.open.set()
    group.thread.join(60)

    assert not group.thread.is_alive()
    assert disk.batches == [["a"]]


# --- among threads ---


def until(condition):
    wait_until(condition, seconds=60, pause=0.001)


def run_threads(count, target):
    threads = [threading.Thread(target=target, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_threads_share_appends():
    """While one thread's append waits for the disk, the others' changes gather and share the next one."""
    disk = Disk()
    disk.open.clear()
    group = ThreadGroupCommit(disk, collect=list)
    done = []

    def commit(number):
        with group.mutex:
            group.commit(number)
            done.append(number)

    first = threading.Thread(target=commit, args=(0,))
    first.start()
    assert disk.reached.wait(60)
    others = [threading.Thread(target=commit, args=(n,)) for n in range(1, 8)]
    for thread in others:
        thread.start()
    until(lambda: group.pending == 8)
    disk.open.set()
    for thread in (first, *others):
        thread.join(60)

    assert disk.batches[0] == [0]
    assert sorted(disk.batches[1]) == list(range(1, 8))
    assert len(disk.batches) == 2
    assert sorted(done) == list(range(8))


def test_a_lone_thread_appends_itself():
    """Without others each commit is one append, and errors are raised to the caller."""
    disk = Disk()
    disk.errors = [None, LogWriteError("disk full"), None]
    group = ThreadGroupCommit(disk, collect=lambda items: list(items) if items != ["no"] else None)
    with group.mutex:
        group.commit("a")
        with pytest.raises(LogWriteError):
            group.commit("b")
        group.commit("no")
        group.commit("c")
    assert disk.batches == [["a"], ["c"]]
    assert group._errors == {}


def test_a_fatal_error_is_raised_in_every_thread():
    """Threads that wait behind a failed sync get its error, and so does every later call."""
    disk = Disk()
    disk.errors = [LogSyncError("EIO")]
    disk.open.clear()
    group = ThreadGroupCommit(disk, collect=list)
    codes = []

    def commit(number):
        with group.mutex:
            try:
                group.commit(number)
            except LogError as error:
                codes.append(error.code)

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: group.pending == 4)
    disk.open.set()
    for thread in threads:
        thread.join(60)
    commit(5)

    assert codes == ["log_sync_failed"] * 5
    assert (disk.batches, len(disk.threads)) == ([], 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupt_leaves_no_thread_waiting():
    """After Ctrl-C in an append what the log has is unknown: every caller gets an error, none waits for ever."""
    disk = Disk()
    disk.errors = [KeyboardInterrupt()]
    group = ThreadGroupCommit(disk, collect=list)
    with group.mutex:
        with pytest.raises(KeyboardInterrupt):
            group.commit("a")
        with pytest.raises(LogError, match="interrupted"):
            group.commit("b")
        assert not group.busy


def test_closing_waits_for_the_append_in_flight():
    """close() returns after the last answer, and later calls are refused."""
    disk = Disk()
    disk.open.clear()
    group = ThreadGroupCommit(disk, collect=list)
    order = []

    def commit(number):
        with group.mutex:
            group.commit(number)
            order.append("committed")

    def close(number):
        with group.mutex:
            group.close()
            order.append("closed")

    writer = threading.Thread(target=commit, args=(0,))
    writer.start()
    assert disk.reached.wait(60)
    closer = threading.Thread(target=close, args=(0,))
    closer.start()
    until(lambda: group._closed)
    disk.open.set()
    writer.join(60)
    closer.join(60)

    assert sorted(order) == ["closed", "committed"]
    assert disk.batches == [[0]]
    with group.mutex, pytest.raises(LogClosedError):
        group.commit(1)


# --- on a real log ---


def to_log(log):
    return lambda records, lock_timeout: log.append_many(records, lock_timeout=lock_timeout)


@PLACES
def test_a_real_log_in_a_loop(tmp_path, either_kernel, inline_s_max):
    """Answers come in the order of the log, each after its record is durable."""

    async def scenario(log):
        answered = []

        def answer(item, error):
            assert error is None
            answered.append(item)
            assert log.durable_offset >= len(answered)

        group = GroupCommit(
            to_log(log),
            loop=asyncio.get_running_loop(),
            collect=lambda items: [("t", "", b"%d" % item) for item in items] or None,
            answer=answer,
            inline_s_max=inline_s_max,
        )

        async def submit(start):
            for item in range(start, start + 50):
                group.submit(item)
                if item % 7 == 0:
                    await group.drained()

        await asyncio.gather(*(submit(start) for start in range(0, 400, 50)))
        await group.close()
        return answered

    with virta.open(tmp_path / "log", durability="group") as log:
        answered = asyncio.run(scenario(log))

        assert [int(record.value) for record in log.read()] == answered
    assert sorted(answered) == list(range(400))


def test_a_real_log_among_threads(tmp_path, either_kernel):
    """Every commit that returned is in the log, each once."""
    with virta.open(tmp_path / "log", durability="group") as log:
        changes = []

        def collect(items):
            records = list(changes)
            changes.clear()
            return records or None

        group = ThreadGroupCommit(to_log(log), collect=collect)

        def work(number):
            for n in range(25):
                with group.mutex:
                    changes.append(("t", b"%d" % number, b"%d" % n))
                    group.commit(None)

        run_threads(6, work)

        stored = [(int(bytes(r.key)), int(r.value)) for r in log.read()]
    for number in range(6):
        assert [n for key, n in stored if key == number] == list(range(25))


def test_another_writer_with_the_lock(tmp_path):
    """An append waits in the thread while another process's writer has the lock, and succeeds after it."""

    async def scenario(log, other):
        answers = []
        group = GroupCommit(
            to_log(log),
            loop=asyncio.get_running_loop(),
            collect=lambda items: [("t", "", item) for item in items],
            answer=lambda item, error: answers.append((item, error)),
        )
        with other._writer.locked():
            group.submit(b"a")
            await asyncio.to_thread(until, lambda: group.thread is not None)
            assert (answers, group.busy) == ([], True)
        await group.close()
        return answers

    with virta.open(tmp_path / "log") as log, virta.open(tmp_path / "log") as other:
        assert asyncio.run(scenario(log, other)) == [(b"a", None)]


@PLACES
@pytest.mark.parametrize("either_kernel", ["plain"], indirect=True)
def test_a_disk_that_fails_to_sync(tmp_path, monkeypatch, either_kernel, inline_s_max):
    """No answer acknowledges what a failed fsync may have lost, also when the disk works again."""

    def fail(fd):
        raise OSError(5, "Input/output error")

    async def scenario(log):
        answers = []
        group = GroupCommit(
            to_log(log),
            loop=asyncio.get_running_loop(),
            collect=lambda items: [("t", "", item) for item in items],
            answer=lambda item, error: answers.append((item, error and error.code)),
            inline_s_max=inline_s_max,
        )
        group.submit(b"a")
        await group.drained()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            group.submit(b"b")
            await group.drained()
        group.submit(b"c")
        await group.close()
        return answers

    with virta.open(tmp_path / "log", durability="group") as log:
        answers = asyncio.run(scenario(log))

    assert answers == [(b"a", None), (b"b", "log_sync_failed"), (b"c", "log_sync_failed")]
