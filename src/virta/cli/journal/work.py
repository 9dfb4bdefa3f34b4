"""
`virta journal work --exec`: a command of the shell per job.

Invariant: when a job is reported, in whatever way, nothing of its command's group of processes is left that
would do it still, unless the command itself put something into the background and ended well.
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

from virta.cli.journal.jobs import talk
from virta.cli.journal.keys import PORTS, journal
from virta.cli.journal.output import plain_text, reported
from virta.errors import JournalError
from virta.journal.protocol.messages import PORT

if TYPE_CHECKING:
    from virta.journal.protocol.commands import Lease

STDERR_CHARS_MAX = 500
STDERR_READ_BYTES = 65_536
# All that a pipe holds, as large as anybody may make it.
REST_READS_MAX = 16
# A command that is told to end has so long to do so.
TERM_S_MAX = 5.0
# Killed, it is gone in a moment; where nobody reaps, its remains stay, and are not waited for.
GONE_LOOKS = 50
GONE_LOOK_S = 0.01
# What a command said last may still be on its way when it has ended; a child of its that goes on keeps the
# pipe open, and is not waited for.
SAID_S_MAX = 0.5


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
@click.option("--host", default="127.0.0.1", envvar="VIRTA_JOURNAL_HOST", help="The daemon's host.")
@click.option(
    "--port", default=PORT, envvar="VIRTA_JOURNAL_PORT", type=PORTS, help="The daemon's port."
)
@click.option("--verbose", is_flag=True, help="Say what happens.")
def work(
    command: str,
    domains: tuple[str, ...],
    timeout: float | None,
    verbose: bool,  # noqa: FBT001
    host: str,
    port: int,
    **options: Any,
) -> None:
    """
    Do jobs by running a command for each: exit code 0 is done, anything else failed.

    The command finds VIRTA_JOB_URI, VIRTA_JOB_KEY and VIRTA_JOB_ATTEMPTS in its environment.
    """
    from virta.journal.clients.worker import Worker

    async def run(job: Lease) -> None:
        await run_command(command, job, timeout=timeout)

    talk(verbose)
    with reported():
        if timeout is not None and not timeout > 0:
            raise JournalError(f"--timeout {timeout}: seconds, more than 0", code="bad-settings")
        worker = Worker(host, port, **options)
        for domain in dict.fromkeys(domains) or ("",):
            worker.handle(domain)(run)
        worker.run()


async def run_command(command: str, job: Lease, *, timeout: float | None = None) -> None:  # noqa: ASYNC109
    """Raise with the end of what the command had to say if it fails or takes too long."""
    with _Stderr() as said:
        process = await _start(command, job, said.inlet)
        feeding = asyncio.create_task(_feed(process, _input(job.payload)))
        listening = asyncio.create_task(said.listen())
        try:
            async with asyncio.timeout(timeout):
                await process.wait()
            if process.returncode:
                await _end(
                    process
                )  # of what it started, too, nothing goes on while it is tried again
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
            # Not `wait_for`, here and below, which may swallow being cancelled in the moment it ends.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAID_S_MAX):
                    await listening
            said.hear_rest()
        if process.returncode:
            raise JournalError(f"exit code {process.returncode}: {said.end}", code="command-failed")


async def _start(command: str, job: Lease, stderr: int) -> asyncio.subprocess.Process:
    """The command's process; if this is cancelled, none."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_shell(
            command,
            stdin=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | _environment(job),
            # Ctrl-C is for the worker, which lets its commands finish.
            process_group=0,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # Cancelled itself, it would end the shell, and what that has started already would go on.
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
    """The payload, as far as the command wants it."""
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(data)
            await process.stdin.drain()
    finally:
        process.stdin.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """The command and what it started: asked to end, then made to."""
    for number, seconds in ((signal.SIGTERM, TERM_S_MAX), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
    # Those it started are not ours to wait for; they are gone when their group is.
    with contextlib.suppress(ProcessLookupError):
        for _ in range(GONE_LOOKS):
            os.killpg(process.pid, 0)
            await asyncio.sleep(GONE_LOOK_S)


class _Stderr:
    """What a command says: passed on as it comes, and the end of it kept. `inlet` is where it is said."""

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

    async def listen(self) -> None:
        """Until nobody can say anything any more."""
        os.close(self.inlet)
        self.inlet = -1
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._outlet, ready.set)
        try:
            while True:
                await ready.wait()
                ready.clear()
                if self._hear() == b"":
                    return
        finally:
            loop.remove_reader(self._outlet)

    def hear_rest(self) -> None:
        """What is there already, though this process did not have the time to listen."""
        for _ in range(REST_READS_MAX):
            if not self._hear():
                return

    def _hear(self) -> bytes | None:
        """A piece; None: nothing right now, empty: never again."""
        try:
            piece = os.read(self._outlet, STDERR_READ_BYTES)
        except BlockingIOError:
            return None
        self._tail = (self._tail + piece)[-4 * STDERR_CHARS_MAX :]
        if piece:
            _pass_on(piece)
        return piece


def _pass_on(piece: bytes) -> None:
    """To where this process complains, if that leads anywhere."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.buffer.write(piece)
        sys.stderr.buffer.flush()
