"""
A loop that does jobs: reserves them, extends their deadlines while they run, and reports the outcome.

    worker = Worker()

    @worker.handle("example.com")
    async def fetch(job):          # a plain function is run in a thread
        ...

    worker.run()

Invariant: every reserved job ends in exactly one of done (the handler returned), failed (it raised) or
given back (the worker stopped first); if the worker dies, the deadline ends the attempt. Handlers
outlive the connection: a daemon that was away gets the report when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import signal
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

from virta.backoff import Backoff
from virta.errors import JournalError
from virta.journal.admin import DELAY_S_MAX
from virta.journal.clients.aio import AsyncClient
from virta.journal.jobs.domain import BACK_OFF_S_MAX
from virta.journal.jobs.failures import TRACEBACK_CHARS_MAX
from virta.journal.jobs.job import domain_of, retry_delay_s
from virta.journal.protocol import commands
from virta.journal.protocol.messages import PORT, RETRY_CODES, RefusedError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from virta.journal.protocol.commands import Command, Lease

    Handler = Callable[[Lease], Any]
    H = TypeVar("H", bound=Handler)
    T = TypeVar("T")

log = logging.getLogger("virta.journal.worker")

WORK_FOR_S = 60.0
# A heartbeat may come late or get lost twice before the deadline passes.
HEARTBEATS_PER_DEADLINE = 3
# Jobs are requested after so long even without a wake-up.
IDLE_S_MAX = 5.0
# A broken connection is noticed within this, also by a worker that waits.
CHECK_S = 1.0
RETRY_S_MIN = 0.1
RETRY_S_MAX = 10.0
REASON_CHARS_MAX = 500
TRACEBACK_FRAMES_MAX = 20
# How often the clocks of worker and daemon are compared: either may be set at any time.
COMPARE_CLOCKS_S = 10.0
TAKE_MAX = 1_000  # what one NEXT gives
GIVE_BACK_S_MAX = 5.0  # at the end, for a daemon that does not answer


class Worker:
    """
    Args:
        concurrency: jobs worked on at a time, all domains together.
        work_for: seconds until a job counts as lapsed; extended for as long as its handler runs.
        grace: seconds that running handlers get when the worker stops.
        max_attempts: failed attempts until a job is dead, if fewer than its domain allows (None: the domain's).
        retry_delay: seconds until a failed job is tried again, doubled each time up to `retry_delay_max`
            and up to a quarter shorter (None: the domain's).
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        *,
        concurrency: int = 4,
        work_for: float = WORK_FOR_S,
        grace: float = 30.0,
        max_attempts: int | None = None,
        retry_delay: float | None = None,
        retry_delay_max: float = BACK_OFF_S_MAX,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._token = token
        self._tls = tls
        _check_setting("concurrency", concurrency, right="at least 1", fits=concurrency >= 1)
        _check_setting("work_for", work_for, right="seconds, more than 0", fits=work_for > 0)
        _check_setting("grace", grace, right="seconds, not below 0", fits=grace >= 0)
        if max_attempts is not None:
            _check_setting("max_attempts", max_attempts, right="at least 1", fits=max_attempts >= 1)
        for name, seconds in (("retry_delay", retry_delay), ("retry_delay_max", retry_delay_max)):
            if seconds is not None:
                fits = 0 <= seconds <= DELAY_S_MAX
                _check_setting(name, seconds, right=f"seconds, 0 to {DELAY_S_MAX}", fits=fits)
        self._max_attempts = max_attempts
        self._retry_delay = retry_delay
        self._retry_delay_max = retry_delay_max
        self.done = 0
        self.failed = 0
        self._host = host
        self._port = port
        self._concurrency = concurrency
        self._work_for = work_for
        self._grace = grace
        self._handlers: dict[bytes, Handler] = {}
        self._ahead_us = 0  # of the daemon's clock
        self._compare_at = 0.0
        self._turn = 0  # which domain is asked first
        self._running: set[asyncio.Task[None]] = set()
        self.stopping = False  # what comes now is given back
        self._client: AsyncClient | None = None
        self._online = asyncio.Event()
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._asked = asyncio.Event()  # no jobs are on their way here

    def handle(self, domain: str = "") -> Callable[[H], H]:
        """
        Decorate the function that does the jobs of a domain.

        The one without a domain does those of all domains that have no function of their own.
        """

        def register(handler: H) -> H:
            name = domain.encode().lower()  # ASCII letters only, as the daemon does
            if name in self._handlers:
                raise JournalError(
                    f"domain {domain!r} has a handler already", code="handler-exists"
                )
            self._handlers[name] = handler
            return handler

        return register

    def run(self) -> None:
        """Work until SIGINT or SIGTERM, then finish what is running; a second one ends the grace."""

        async def main() -> None:
            stop = asyncio.Event()

            def on_signal() -> None:
                self.hurry() if stop.is_set() else stop.set()

            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().add_signal_handler(number, on_signal)
            await self.work(stop)

        asyncio.run(main())

    @property
    def running(self) -> int:
        """Return how many jobs are being done."""
        return len(self._running)

    def hurry(self) -> None:
        """Wait no longer for running jobs when the worker stops."""
        self._hurry.set()

    async def work(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, over as many connections as it takes."""
        if not self._handlers:
            raise JournalError("a worker without handlers: decorate one with @worker.handle()")
        self._online, self._wake, self._hurry, self._asked = (asyncio.Event() for _ in range(4))
        self._asked.set()
        self.stopping = False
        line = asyncio.create_task(self._keep_line(stop))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({line, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if line.done():
                line.result()  # it ends by an exception only
            self._wake.set()
            await self._finish()
        finally:
            stopped.cancel()
            try:
                await self._give_all_back()
            finally:
                line.cancel()
                await asyncio.wait({line, stopped})

    async def _give_all_back(self) -> None:
        """Return running jobs, and those of a NEXT on its way, on the connection that is still open."""
        self.stopping = True
        await asyncio.sleep(0)  # a task that is cancelled before it began would report nothing
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S_MAX):
                await self._asked.wait()
        if self._running:
            await asyncio.wait(self._running)

    async def _keep_line(self, stop: asyncio.Event) -> None:
        """Connect, and again after every loss, and request jobs until `stop` is set."""
        waits = Backoff(RETRY_S_MIN, RETRY_S_MAX)
        while True:
            problem = ""
            try:
                async with await AsyncClient.connect(
                    self._host, self._port, token=self._token, tls=self._tls
                ) as client:
                    self._client = client
                    await self._compare_clocks(client)
                    self._online.set()
                    async for _ in self._run_jobs(client, stop):
                        waits.reset()
            except JournalError as error:
                problem = error.message
            finally:
                self._online.clear()
            wait = waits.next()
            if problem:
                log.warning("worker_waits seconds=%.1f %s", wait, problem)
            await asyncio.sleep(wait)

    async def _compare_clocks(self, client: AsyncClient) -> None:
        """Compare the clocks: deadlines are times of the daemon's clock, which may differ from ours."""
        self._compare_at = time.monotonic() + COMPARE_CLOCKS_S
        before = commands.own_time()
        daemons = await client.call(commands.ping())
        self._ahead_us = daemons - (before + commands.own_time()) // 2

    def _by_its_clock(self, command: Command[T]) -> Command[T]:
        """Convert a command's deadline to the daemon's clock."""
        request = command.request
        assert request.timeout is not None
        request.timeout = max(request.timeout + self._ahead_us, 1)
        return command

    def _time(self) -> float:
        """Return the daemon's time in Unix seconds."""
        return (commands.own_time() + self._ahead_us) / 1e6

    async def _run_jobs(self, client: AsyncClient, stop: asyncio.Event) -> AsyncIterator[None]:
        """Request jobs until the connection breaks; yield after each reply."""
        listening = asyncio.create_task(self._listen(client))
        try:
            while client.connected:
                self._wake.clear()
                wake_up = None
                if not stop.is_set():
                    self._asked.clear()
                    try:
                        if time.monotonic() >= self._compare_at:
                            await self._compare_clocks(client)
                        wake_up = await self._reserve(client)
                    finally:
                        self._asked.set()
                yield
                await self._rest(client, IDLE_S_MAX if wake_up is None else wake_up - self._time())
        finally:
            listening.cancel()

    async def _rest(self, client: AsyncClient, seconds: float) -> None:
        """Wait until woken, so long at most; less if the connection breaks."""
        end = time.monotonic() + min(max(seconds, 0.001), IDLE_S_MAX)
        while client.connected and (left := end - time.monotonic()) > 0:
            # Not `wait_for`, which may swallow a cancellation while it is woken.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, CHECK_S)):
                    await self._wake.wait()
                return

    async def _reserve(self, client: AsyncClient) -> float | None:
        """Reserve as many jobs as may run; return when to ask again, None if unknown."""
        again: float | None = None
        free = self._concurrency - len(self._running)
        for domain in self._domains():
            if free <= 0 or self.stopping:
                return None  # woken as soon as a job ends
            command = commands.next_(
                domain, count=min(free, TAKE_MAX), work_for=self._work_for, listen=True
            )
            found = await client.call(self._by_its_clock(command))
            for lease in found.jobs:
                handler = self._handlers.get(domain or domain_of(lease.key))
                task = asyncio.create_task(self._do(handler or self._handlers[b""], lease))
                self._running.add(task)
                task.add_done_callback(self._ended)
            free -= len(found.jobs)
            if found.jobs and free > 0:
                again = self._time()  # only a worker that got "no job" is notified of the next one
            elif not found.jobs and found.wake_up is not None:
                again = found.wake_up if again is None else min(again, found.wake_up)
        return again

    def _domains(self) -> list[bytes]:
        """Return the domains to request: all of them if there is a handler for that, else each first in turn."""
        if b"" in self._handlers:
            return [b""]
        names = list(self._handlers)
        self._turn = (self._turn + 1) % len(names)
        return names[self._turn :] + names[: self._turn]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._wake.set()

    async def _listen(self, client: AsyncClient) -> None:
        while True:
            await client.notifications.get()
            self._wake.set()

    async def _do(self, handler: Handler, lease: Lease) -> None:
        if self.stopping:
            await self._give_back(lease)
            return
        beating = asyncio.create_task(self._heartbeat(lease))
        try:
            await _call_handler(handler, lease)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                await self._give_back(lease)
                raise
            log.warning("job_failed uri=%s %s", lease.uri.decode(errors="replace"), _reason(error))
            if await self._report(self._failure(lease, error)):
                self.failed += 1
        else:
            if await self._report(commands.done(lease.key)):
                self.done += 1
        finally:
            beating.cancel()

    def _failure(self, lease: Lease, error: BaseException) -> Command[Any]:
        """Return the fields of a failure report; the daemon applies the domain's settings."""
        delay = None
        if self._retry_delay is not None:
            delay = retry_delay_s(
                self._retry_delay, self._retry_delay_max, lease.attempts, lease.key
            )
        last = self._max_attempts is not None and lease.attempts + 1 >= self._max_attempts
        text = _traceback(error)
        return commands.fail(lease.key, _reason(error), delay=delay, traceback=text, dead=last)

    async def _report(self, command: commands.Command[Any]) -> bool:
        """Repeat a report until the daemon has it, as leases survive its restart; return False if it is too late."""
        while True:
            await self._online.wait()
            assert self._client is not None
            try:
                await self._client.call(command)
            except RefusedError as refused:
                if refused.code not in RETRY_CODES:
                    # The deadline had passed: another worker may have the job by now.
                    log.warning("job_report_refused %s", refused.message)
                    return False
                log.warning("job_report_waits %s", refused.message)
            except JournalError as error:
                log.warning("job_report_waits %s", error.message)
                self._wake.set()
            else:
                return True
            await asyncio.sleep(RETRY_S_MIN)

    async def _give_back(self, lease: Lease) -> None:
        """Return a job to the queue if the daemon is there; else its deadline does."""
        if self._client is not None and self._online.is_set():
            with contextlib.suppress(JournalError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S_MAX):
                    await self._client.call(commands.give_back(lease.key))

    async def _heartbeat(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(self._work_for / HEARTBEATS_PER_DEADLINE)
            if self._client is None or not self._online.is_set():
                continue
            try:
                command = commands.extend(lease.key, self._work_for)
                await self._client.call(self._by_its_clock(command))
            except RefusedError as refused:
                if refused.code not in RETRY_CODES:
                    log.warning("job_lost uri=%s %s", lease.uri.decode(errors="replace"), refused)
                    return
            except JournalError:
                self._wake.set()  # the connection is broken

    async def _finish(self) -> None:
        """Let running handlers end within the grace, those of jobs of a NEXT on its way, too."""
        hurry = asyncio.create_task(self._hurry.wait())
        asked = asyncio.create_task(self._asked.wait())
        end = time.monotonic() + self._grace
        try:
            await asyncio.wait(
                {hurry, asked}, timeout=self._grace, return_when=asyncio.FIRST_COMPLETED
            )
            while self._running and not hurry.done() and (left := end - time.monotonic()) > 0:
                await asyncio.wait(
                    {hurry, *self._running}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            hurry.cancel()
            asked.cancel()


async def _call_handler(handler: Handler, lease: Lease) -> None:
    """Run a coroutine function in the loop, anything else in a thread; await an awaitable result."""
    result = handler(lease) if inspect.iscoroutinefunction(handler) else None
    if result is None:
        result = await _in_thread(handler, lease)
    if inspect.isawaitable(result):
        await result


async def _in_thread(handler: Handler, lease: Lease) -> Any:
    """
    Run a handler in a daemon thread of its own: one that is stuck does not keep a worker from ending.

    (The loop's own pool may have fewer threads than a worker runs jobs, and is waited for.)
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def set_outcome(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def main() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(handler, lease)
        except StopIteration as stop:  # cannot be raised into a coroutine
            error = RuntimeError(f"the handler raised {stop!r}")
        except BaseException as raised:  # noqa: BLE001  (any exception is a failure of the job)
            error = raised
        with contextlib.suppress(RuntimeError):  # the worker ended before
            loop.call_soon_threadsafe(set_outcome, result, error)

    threading.Thread(target=main, name=f"job {lease.uri[:60]!r}", daemon=True).start()
    return await outcome


def _reason(error: BaseException) -> str:
    """Return the reason shown with dead letters; the messages of our own errors are sentences."""
    text = error.message if isinstance(error, JournalError) else f"{type(error).__name__}: {error}"
    # Lone surrogates, as in names of files, are no JSON.
    return text[:REASON_CHARS_MAX].encode(errors="replace").decode()


def _traceback(error: BaseException) -> str:
    """Return the end of the traceback; a shell command has none, and its output is the reason."""
    if isinstance(error, JournalError) and error.code == "command-failed":
        return ""
    lines = traceback.format_exception(error, limit=-TRACEBACK_FRAMES_MAX)
    text = "".join(lines)[-TRACEBACK_CHARS_MAX:]
    return text.encode(errors="replace").decode()


def _is_cancelled() -> bool:
    """Whether this task was cancelled, and not only something that the handler awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check_setting(name: str, value: float, *, right: str, fits: bool) -> None:
    if not fits:
        raise JournalError(f"{name} {value!r} of a worker: {right}", code="bad-settings")
