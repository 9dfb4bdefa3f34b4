"""
From a spool to a daemon: every record until it is acknowledged, then erased.

Invariant: a record is erased only after a reply without error, or after it was copied to
`rejected.fjs` because its error is permanent. So a record arrives at least once whatever is killed,
and one bad record does not block the others. One forwarder per spool (flock on `forwarder.lock`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import time
from typing import TYPE_CHECKING

from virta import files
from virta.backoff import Backoff
from virta.errors import JournalError
from virta.journal.clients.aio import AsyncClient
from virta.journal.clients.spool import PING_SOCKET, REJECTED, Spooled, SpoolFile, encode_record
from virta.journal.protocol.codec import RequestParser
from virta.journal.protocol.messages import RETRY_CODES, RefusedError, Reply, Request

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger("virta.journal")

UNANSWERED_MAX = 256
RETRY_S_MIN = 0.1
RETRY_S_MAX = 30.0
# A daemon that does not answer for so long is asked again on another connection.
ANSWER_S_MAX = 30.0
# How long a stop waits for replies that are on their way.
STOP_S_MAX = 5.0
CHECK_S = 1.0  # the longest delay: PING and inotify are only hints
_IN_MODIFY_CREATE = 0x00000002 | 0x00000100


class Forwarder:
    """
    `await run(stop)` until `stop` is set; `drained` is set whenever nothing is pending.

    `hello` is sent first on every connection; `acknowledged(file name, end of record)` is called for
    each record that a daemon has accepted. `retry_s_max` bounds the doubling pause before another connection.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        port: int,
        *,
        hello: Request | None = None,
        acknowledged: Callable[[str, int], None] | None = None,
        retry_s_max: float | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._token = token
        self._tls = tls
        self.directory = directory
        self.forwarded = 0
        self.rejected = 0
        self.connected = False
        self.drained = asyncio.Event()
        self._host = host
        self._port = port
        self._hello = hello
        self._acknowledged = acknowledged
        # Before the next connection; its `attempt` counts those in vain since the last success.
        self.waits = Backoff(RETRY_S_MIN, RETRY_S_MAX if retry_s_max is None else retry_s_max)
        self._wake = asyncio.Event()
        self._files: dict[str, SpoolFile] = {}
        files.make_directory(directory)

    async def run(self, stop: asyncio.Event) -> None:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(os.close, _claim(self.directory))
            self._listen(cleanup)
            cleanup.callback(self.forget_files)
            await self._run_until(stop)

    def wake(self) -> None:
        """Look for records now rather than at the next check."""
        self._wake.set()

    def _listen(self, cleanup: contextlib.ExitStack) -> None:
        """Wake up when something is written, until `cleanup` is closed."""
        loop = asyncio.get_running_loop()
        ping = _ping_socket(self.directory)
        if ping is not None:
            cleanup.callback((self.directory / PING_SOCKET).unlink, missing_ok=True)
            cleanup.callback(ping.close)
        watch = _inotify(self.directory)
        if watch >= 0:
            cleanup.callback(os.close, watch)
        for descriptor in (ping.fileno() if ping else -1, watch):
            if descriptor >= 0:
                loop.add_reader(descriptor, self._woken, descriptor)
                cleanup.callback(loop.remove_reader, descriptor)

    async def _run_until(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set; then wait for replies on their way, but not for a daemon that is away or stuck."""
        running = asyncio.create_task(self._run(stop))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self._wake.set()
            await asyncio.wait({running}, timeout=STOP_S_MAX if self.connected else 0)
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.wait({running, stopping})
        if not running.cancelled():
            running.result()

    def _woken(self, descriptor: int) -> None:
        try:
            os.read(descriptor, 65536)
        except BlockingIOError:
            return
        self._wake.set()

    async def _run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            failure: Exception | None = None
            try:
                async with await AsyncClient.connect(
                    self._host, self._port, token=self._token, tls=self._tls
                ) as client:
                    if self._hello is not None:
                        async with asyncio.timeout(ANSWER_S_MAX):
                            await client.request(self._hello)
                        self.waits.reset()
                    self.connected = True
                    await self._forward(client, stop)
            except (JournalError, OSError) as error:  # the connection, a timeout, or the disk
                failure = error
            self.connected = False
            self.drained.clear()
            for file in self._files.values():
                file.rewind()
            # New records do not shorten this: it would be a busy loop.
            wait = self.waits.next()
            if failure is not None:
                # A warning once, then information: a forwarder may wait for days.
                level = logging.WARNING if self.waits.attempt == 1 else logging.INFO
                log.log(level, "journal_forwarder_waits seconds=%.1f %s", wait, failure)
            await _set_within(stop, wait)

    async def _forward(self, client: AsyncClient, stop: asyncio.Event) -> None:
        """Send until stopped, refused for now, or cut off."""
        while not stop.is_set():
            self._wake.clear()
            batch = self._pending()
            if not batch:
                self._remove_forwarded_files()
                self.drained.set()
                await _set_within(self._wake, CHECK_S)
                if not client.connected:
                    return
                continue
            self.drained.clear()
            async with asyncio.timeout(ANSWER_S_MAX):
                replies = await asyncio.gather(
                    *(client.request(_request(record)) for _, record in batch),
                    return_exceptions=True,
                )
            # If the connection broke: what was answered before need not be sent again.
            outcomes = [
                self._end(file, record, reply)
                for (file, record), reply in zip(batch, replies, strict=True)
                if not isinstance(reply, BaseException)
            ]
            if outcomes:
                self.waits.reset()  # the daemon replies
            for reply in replies:
                if isinstance(reply, BaseException):
                    raise reply
            if not all(outcomes):
                return

    def _pending(self) -> list[tuple[SpoolFile, Spooled]]:
        """Return the oldest records not yet sent, in order."""
        batch: list[tuple[SpoolFile, Spooled]] = []
        for path in sorted(self.directory.glob("[0-9]*.fjs")):
            file = self._files.get(path.name)
            if file is not None and not file.current:
                file.close()  # another process removed it, and there is another of that name
                file = None
            if file is None:
                file = self._files[path.name] = SpoolFile(path)
            batch += [(file, record) for record in file.read(UNANSWERED_MAX - len(batch))]
            if len(batch) == UNANSWERED_MAX:
                break
        return batch

    def forget_files(self) -> None:
        """Close all files, after they were removed; not while `connected`."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _end(self, file: SpoolFile, record: Spooled, reply: Reply) -> bool:
        """Erase, reject or keep a record as its reply says; False if it has to be sent again."""
        code = reply.error.partition(":")[0]
        if code in RETRY_CODES:
            log.info("journal_forwarder_refused code=%s", code)
            return False
        if code:
            self._reject(record)
            self.rejected += 1
            about = _request(record).key[:60].decode(errors="replace")
            log.warning("journal_record_rejected %s (%r)", reply.error, about)
        else:
            self.forwarded += 1
        file.erase(record)
        if self._acknowledged is not None:
            self._acknowledged(file.path.name, record.end)
        return True

    def _reject(self, record: Spooled) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        path = self.directory / REJECTED
        descriptor = files.open_file(path, flags)
        kept = encode_record(record.message)
        try:
            written = os.write(descriptor, kept)
            if written != len(kept):
                # Readers skip what is there, and it stays pending where it came from.
                raise RefusedError("disk", f"{path} took {written} of {len(kept)} bytes")
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def _remove_forwarded_files(self) -> None:
        for name, file in list(self._files.items()):
            if file.remove_if_done(time.time()):
                file.close()
                del self._files[name]


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, so long at most. Not `wait_for`, which may swallow a cancellation at that time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _request(record: Spooled) -> Request:
    """Return the spooled request; for one that does not parse, a request that is refused for good."""
    messages = RequestParser().feed(record.message)
    return messages[0] if len(messages) == 1 else Request(function=0xFFFF)


def _claim(directory: Path) -> int:
    try:
        return files.lock_file(directory / "forwarder.lock")
    except BlockingIOError as error:
        raise JournalError(
            f"another forwarder uses {directory}; run one per spool", code="spool-in-use"
        ) from error


def _ping_socket(directory: Path) -> socket.socket | None:
    """Return the socket for wake-ups, None if the path is too long: then files are checked every CHECK_S."""
    path = directory / PING_SOCKET
    path.unlink(missing_ok=True)
    ping = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        ping.bind(str(path))
        os.chmod(path, files.file_mode(directory))
    except OSError:
        ping.close()
        return None
    return ping


def _inotify(directory: Path) -> int:
    """Return a descriptor that becomes readable when a file in the directory changes, or -1."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return -1
    if (
        descriptor >= 0
        and libc.inotify_add_watch(descriptor, os.fsencode(directory), _IN_MODIFY_CREATE) < 0
    ):
        os.close(descriptor)
        return -1
    return descriptor
