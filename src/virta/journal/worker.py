"""
A loop that does jobs: takes them, keeps them alive while they are worked on, and reports how it went.

    worker = Worker()

    @worker.handle("example.com")
    async def fetch(job):          # a plain function is run in a thread
        ...

    worker.run()

Invariant: every job taken ends in exactly one of done (the handler returned), failed (it raised) or
given back (the worker stopped first); if the worker dies, its deadline gives the job back.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import time
from typing import TYPE_CHECKING, Any, TypeVar

from virta.errors import JournalError
from virta.journal import commands
from virta.journal.client import AsyncClient
from virta.journal.messages import PORT, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.commands import Lease

    Handler = Callable[[Lease], Any]
    H = TypeVar("H", bound=Handler)

log = logging.getLogger("virta.journal.worker")

WORK_FOR_S = 60.0
# A heartbeat may come late or get lost twice before the deadline passes.
HEARTBEATS_PER_DEADLINE = 3
# Asked anyway after so long, should a wake-up have gone astray.
IDLE_S_MAX = 5.0
RETRY_S_MIN = 0.1
RETRY_S_MAX = 10.0
REASON_CHARS_MAX = 500


class Worker:
    """
    Args:
        concurrency: jobs worked on at a time, all domains together.
        work_for: seconds until a job counts as lapsed; extended for as long as its handler runs.
        grace: seconds that running handlers get when the worker is told to stop.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        *,
        concurrency: int = 4,
        work_for: float = WORK_FOR_S,
        grace: float = 30.0,
    ) -> None:
        self.done = 0
        self.failed = 0
        self._host = host
        self._port = port
        self._concurrency = concurrency
        self._work_for = work_for
        self._grace = grace
        self._handlers: dict[str, Handler] = {}
        self._running: dict[asyncio.Task[None], Lease] = {}
        self._wake = asyncio.Event()

    def handle(self, domain: str = "") -> Callable[[H], H]:
        """Decorate the function that does the jobs of a domain; without a domain, of all of them."""

        def register(handler: H) -> H:
            if domain in self._handlers:
                raise JournalError(
                    f"domain {domain!r} has a handler already", code="handler-exists"
                )
            self._handlers[domain] = handler
            return handler

        return register

    def run(self) -> None:
        """Work until SIGINT or SIGTERM, then finish what is running."""

        async def main() -> None:
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            await self.work(stop)

        asyncio.run(main())

    async def work(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, over as many connections as it takes."""
        if not self._handlers:
            raise JournalError("a worker without handlers: decorate one with @worker.handle()")
        stopping = asyncio.create_task(self._on_stop(stop))
        delay = RETRY_S_MIN
        try:
            while not stop.is_set():
                try:
                    async with await AsyncClient.connect(self._host, self._port) as client:
                        delay = RETRY_S_MIN
                        await self._work(client, stop)
                except JournalError as error:
                    log.warning("worker_waits seconds=%.1f %s", delay, error.message)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), delay)
                    delay = min(delay * 2, RETRY_S_MAX)
        finally:
            stopping.cancel()

    async def _on_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._wake.set()

    async def _work(self, client: AsyncClient, stop: asyncio.Event) -> None:
        listening = asyncio.create_task(self._listen(client))
        try:
            while not stop.is_set() and client.connected:
                self._wake.clear()
                wake_up = await self._take(client)
                if wake_up is not None and not stop.is_set():
                    seconds = min(max(wake_up - time.time(), 0.001), IDLE_S_MAX)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), seconds)
        finally:
            listening.cancel()
            await self._finish(client)

    async def _take(self, client: AsyncClient) -> float | None:
        """Fill the free places; when to try again, None if at once."""
        again: float | None = None
        free = self._concurrency - len(self._running)
        for domain, handler in self._handlers.items():
            if free <= 0:
                break
            found = await client.call(
                commands.next_(domain, count=free, work_for=self._work_for, listen=True)
            )
            for lease in found.jobs:
                task = asyncio.create_task(self._do(client, handler, lease))
                self._running[task] = lease
                task.add_done_callback(self._ended)
            free -= len(found.jobs)
            if not found.jobs and found.wake_up is not None:
                again = found.wake_up if again is None else min(again, found.wake_up)
        if free <= 0:
            return time.time() + IDLE_S_MAX  # woken as soon as a place is free
        return again if again is not None else time.time() + IDLE_S_MAX

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._wake.set()

    async def _listen(self, client: AsyncClient) -> None:
        while True:
            await client.notifications.get()
            self._wake.set()

    async def _do(self, client: AsyncClient, handler: Handler, lease: Lease) -> None:
        beating = asyncio.create_task(self._heartbeat(client, lease))
        try:
            if inspect.iscoroutinefunction(handler):
                await handler(lease)
            else:
                await asyncio.to_thread(handler, lease)
        except asyncio.CancelledError:
            with contextlib.suppress(JournalError):
                await client.call(commands.give_back(lease.key))
            raise
        except Exception as error:  # noqa: BLE001  (whatever a handler raises is that job's failure)
            self.failed += 1
            log.warning("job_failed uri=%s %r", lease.uri.decode(errors="replace"), error)
            reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
            await self._report(client, commands.fail(lease.key, reason))
        else:
            self.done += 1
            await self._report(client, commands.done(lease.key))
        finally:
            beating.cancel()

    async def _report(self, client: AsyncClient, command: commands.Command[Any]) -> None:
        try:
            await client.call(command)
        except RefusedError as refused:
            # The deadline had passed, or the daemon restarted: the job is somebody else's by now.
            log.warning("job_report_refused %s", refused.message)
        except JournalError as error:
            log.warning("job_report_lost %s", error.message)

    async def _heartbeat(self, client: AsyncClient, lease: Lease) -> None:
        with contextlib.suppress(JournalError):
            while True:
                await asyncio.sleep(self._work_for / HEARTBEATS_PER_DEADLINE)
                await client.call(commands.extend(lease.key, self._work_for))

    async def _finish(self, client: AsyncClient) -> None:
        """Let running handlers end within the grace; what does not is given back."""
        if not self._running:
            return
        tasks = list(self._running)
        if client.connected:
            await asyncio.wait(tasks, timeout=self._grace)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
