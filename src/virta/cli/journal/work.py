"""
`virta journal work --exec`: one shell command per job.

Invariant: when the outcome of a job is reported, no process of its command's group still runs, unless the
command itself put it into the background and succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click

from virta.cli.journal.group import (
    TOKEN,
    ca_option,
    host_option,
    journal,
    port_option,
    start_logging,
    tls_context,
    tls_option,
    verbose_option,
)
from virta.cli.journal.output import errors_reported, plain_text
from virta.errors import JournalError

if TYPE_CHECKING:
    from virta.journal.protocol.commands import Lease

STDERR_CHARS_MAX = 500
STDERR_READ_BYTES = 65_536
# Enough for the largest pipe.
REST_READS_MAX = 16
# How long a command has to end after SIGTERM.
TERM_S_MAX = 5.0
# How often and at which interval to check that a killed process group has ended. In a container without an
# init process, zombies stay: they are not waited for.
GROUP_CHECKS = 50
GROUP_CHECK_S = 0.01
# How long to wait for the last of stderr after a command has ended; a child in the background keeps the pipe
# open, and is not waited for.
STDERR_S_MAX = 0.5


@journal.command()
@click.option("--exec", "command", required=True, help="Shell command; the payload is its input.")
@click.option("--domain", "domains", multiple=True, help="Only jobs of this domain; repeat.")
@click.option("--concurrency", default=4, help="Jobs at a time.", type=click.IntRange(1))
@click.option("--work-for", default=60.0, help="Seconds until a job lapses if this process dies.")
@click.option("--timeout", type=float, help="Seconds a command may take; then it is ended: failed.")
@click.option("--grace", default=30.0, help="Seconds that running commands get at the end.")
@click.option(
    "--max-attempts",
    type=click.IntRange(1),
    help="Failed attempts until a job is dead, if fewer than the domain allows.",
)
@click.option(
    "--retry-delay",
    type=float,
    help="Seconds before a failed job is tried again, doubled each time; default: the domain's.",
)
@host_option
@port_option
@tls_option
@ca_option
@verbose_option
def work(
    command: str,
    domains: tuple[str, ...],
    timeout: float | None,
    host: str,
    port: int,
    *,
    verbose: bool,
    **options: Any,
) -> None:
    """
    Do jobs by running a command for each: exit code 0 is done, anything else failed.

    The command finds VIRTA_JOB_URI, VIRTA_JOB_KEY and VIRTA_JOB_ATTEMPTS in its environment.
    """
    from virta.journal.clients.worker import Worker

    async def run(job: Lease) -> None:
        await run_command(command, job, timeout=timeout)

    start_logging(verbose=verbose)
    with errors_reported():
        if timeout is not None and not timeout > 0:
            raise JournalError(f"--timeout {timeout}: seconds, more than 0", code="bad-settings")
        context = tls_context(options.pop("ca"), tls=options.pop("tls"))
        worker = Worker(host, port, token=os.environ.get(TOKEN), tls=context, **options)
        for domain in dict.fromkeys(domains) or ("",):
            worker.handle(domain)(run)
        worker.run()


async def run_command(command: str, job: Lease, *, timeout: float | None = None) -> None:  # noqa: ASYNC109
    """Run a command; raise JournalError with the end of its stderr if it fails or takes too long."""
    with _Stderr() as stderr:
        process = await _start(command, job, stderr.inlet)
        feeding = asyncio.create_task(_feed(process, _input(job.payload)))
        copying = asyncio.create_task(stderr.copy())
        try:
            async with asyncio.timeout(timeout):
                await process.wait()
            if process.returncode:
                await _end(process)  # also the processes it started: the job may be tried again
        except TimeoutError:
            await _end(process)
            raise JournalError(
                f"it took longer than {timeout:g} seconds", code="command-failed"
            ) from None
        except asyncio.CancelledError:
            await _end(process)
            raise
        finally:
            feeding.cancel()
            # Not `wait_for`, here and below: it may lose a cancellation that arrives as it ends.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STDERR_S_MAX):
                    await copying
            stderr.copy_rest()
        if process.returncode:
            raise JournalError(
                f"exit code {process.returncode}: {stderr.end}", code="command-failed"
            )


async def _start(command: str, job: Lease, stderr: int) -> asyncio.subprocess.Process:
    """Start a command; if this is cancelled, no process is left."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_shell(
            command,
            stdin=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | _environment(job),
            # Ctrl-C reaches only the worker, which lets its commands finish.
            process_group=0,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # Cancelling `starting` would end only the shell, not the processes it has started.
        await _end(await starting)
        raise


def _environment(job: Lease) -> dict[str, str]:
    return {
        "VIRTA_JOB_URI": os.fsdecode(job.uri),
        "VIRTA_JOB_KEY": os.fsdecode(job.key),
        "VIRTA_JOB_ATTEMPTS": str(job.attempts),
    }


def _input(payload: Any) -> bytes:
    if isinstance(payload, bytes):
        return payload
    return plain_text(payload).encode(errors="surrogateescape")


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    """Write the payload, as far as the command reads it."""
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(data)
            await process.stdin.drain()
    finally:
        process.stdin.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command and all processes of its group: SIGTERM, then SIGKILL."""
    for number, seconds in ((signal.SIGTERM, TERM_S_MAX), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
    # Its children are not ours to reap; they have ended when their group does not exist.
    with contextlib.suppress(ProcessLookupError):
        for _ in range(GROUP_CHECKS):
            os.killpg(process.pid, 0)
            await asyncio.sleep(GROUP_CHECK_S)


class _Stderr:
    """A pipe for a command's stderr: copied to ours as it arrives, its end remembered."""

    def __init__(self) -> None:
        self._outlet, self.inlet = os.pipe()
        os.set_blocking(self._outlet, False)
        self._tail = b""

    def __enter__(self) -> _Stderr:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._outlet)
        if self.inlet >= 0:
            os.close(self.inlet)

    @property
    def end(self) -> str:
        return self._tail.decode(errors="replace").strip()[-STDERR_CHARS_MAX:]

    async def copy(self) -> None:
        """Copy until the last writer has closed the pipe."""
        os.close(self.inlet)
        self.inlet = -1
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._outlet, ready.set)
        try:
            while True:
                await ready.wait()
                ready.clear()
                if self._copy_piece() == b"":
                    return
        finally:
            loop.remove_reader(self._outlet)

    def copy_rest(self) -> None:
        """Copy what is in the pipe, in case `copy` had no time to run."""
        for _ in range(REST_READS_MAX):
            if not self._copy_piece():
                return

    def _copy_piece(self) -> bytes | None:
        """Copy a piece and return it: None if there is none yet, empty at the end."""
        try:
            piece = os.read(self._outlet, STDERR_READ_BYTES)
        except BlockingIOError:
            return None
        self._tail = (self._tail + piece)[-4 * STDERR_CHARS_MAX :]
        if piece:
            _pass_on(piece)
        return piece


def _pass_on(piece: bytes) -> None:
    """Write to our own stderr, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.buffer.write(piece)
        sys.stderr.buffer.flush()
