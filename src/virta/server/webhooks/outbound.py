"""
Requests to other servers: an event loop in its own thread, and name lookups that are shared.

HTTP clients take CPU time and their connections may hang at any byte; the thread keeps both away from
the loop that serves. Requests do not wait for each other: each has its own deadline, and a
name server that does not answer delays one host.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

    from virta.server.webhooks.addresses import SinkRules

T = TypeVar("T")

# Running lookups, each in a thread: the system's resolver may take half a minute, and cannot be stopped.
LOOKUPS_MAX = 64
# Addresses of one host that are tried, one after the other.
ADDRESSES_MAX = 4
# Cancelled requests have this long to close their connections.
STOP_S = 1.0


class OutboundLoop:
    """Runs coroutines in its own thread, which starts with the first one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there; cancelling the future cancels it."""
        if self._loop is None:
            # A closed connection of asyncio's own loop refers to itself, and waits for the cyclic collector.
            self._loop = uvloop.new_event_loop()
            # A daemon thread: the process does not wait for it at exit.
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="virta-outbound", daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel running requests and end the thread. Blocks for `STOP_S` at most."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop = self._thread = None
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(STOP_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_S)
        if not thread.is_alive():
            loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Resolver:
    """
    Finds the permitted addresses of hosts; concurrent lookups of one host share a result.

    Callers connect to the returned addresses, never to the name: a second lookup could
    return another address than the one that was checked.
    """

    def __init__(self, rules: SinkRules) -> None:
        self._rules = rules
        self._running: dict[str, asyncio.Future[list[str]]] = {}

    async def addresses(self, host: str) -> list[str]:
        """
        Return the permitted addresses of a host, at least one.

        Raises:
            OSError: the name cannot be resolved now, or none of its addresses is permitted.
        """
        found = [host]
        if not _is_address(host):
            found = await asyncio.shield(self._running.get(host) or self._start(host))
        permitted = [address for address in found if self._rules.permits(host, address)]
        if not permitted:
            raise OSError("the sink's address is not allowed: see --webhook-allow")
        return permitted[:ADDRESSES_MAX]

    def _start(self, host: str) -> asyncio.Future[list[str]]:
        if len(self._running) >= LOOKUPS_MAX:
            raise OSError(f"{LOOKUPS_MAX} names are being looked up: that is the limit")
        loop = asyncio.get_running_loop()
        running: asyncio.Future[list[str]] = loop.create_future()
        # It may fail after all its waiters were cancelled.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._running[host] = running
        threading.Thread(
            target=self._look_up, args=(loop, host), name="virta-lookup", daemon=True
        ).start()
        return running

    def _look_up(self, loop: asyncio.AbstractEventLoop, host: str) -> None:
        found: list[str] | OSError
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys(str(row[4][0]) for row in rows))
        except (OSError, UnicodeError) as error:
            found = OSError(f"the sink's name cannot be resolved: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(partial(self._finish, host, found))

    def _finish(self, host: str, found: list[str] | OSError) -> None:
        running = self._running.pop(host)
        if running.done():
            return
        if isinstance(found, OSError):
            running.set_exception(found)
        else:
            running.set_result(found)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
