"""
A journal inside this process: the same commands without a daemon, on the same files.

    with Journal(Path("virta-data/journal")) as journal:
        journal.push("http://example.com/page")

One process owns a journal directory at a time, be it this or a daemon. Safe to share between threads.
Invariant: as in the daemon, a call that must survive returns after fsync, and all commands of a
`pipeline` share one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from virta.clock import now_us
from virta.errors import JournalError, LogError
from virta.journal.engine import Engine
from virta.journal.jobs.lifecycle import Jobs
from virta.journal.jobs.table import JOBS_MAX
from virta.journal.protocol.messages import RefusedError
from virta.journal.protocol.methods import Calls
from virta.journal.sessions import Session
from virta.journal.storage import records as images
from virta.journal.storage.directory import Durability, Persistence
from virta.journal.values.entries import MEMORY_BYTES_MAX
from virta.journal.values.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from types import TracebackType

    from virta.journal.protocol.commands import Command

T = TypeVar("T")


class Journal(Calls):
    """Locks belong to the object: they keep nobody out who shares it."""

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = "fsync",
        clock: Callable[[], int] = now_us,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        jobs_max: int = JOBS_MAX,
    ) -> None:
        self._mutex = threading.Lock()
        self._failure: LogError | None = None
        self._closed = False
        self._session = Session()
        self._disk = Persistence(directory, durability=durability)
        self.engine = Engine(
            clock,
            Store(self._disk.spill, memory_bytes_max=memory_bytes_max),
            Jobs(jobs_max=jobs_max),
        )
        self.engine.disk_bytes = self._disk.disk_bytes
        try:
            self._disk.restore(self.engine)
        except BaseException:
            self._disk.close()
            raise

    def call(self, command: Command[T]) -> T:
        """Carry out one command."""
        with self._mutex:
            if self._closed or self._failure is not None:
                self._refuse()
            reply = self.engine.handle(command.request, self._session)
            self._commit()
        return command.result(reply)

    def pipeline(self, batch: Iterable[Command[Any]]) -> list[Any]:
        """Carry out many with one fsync; their results in order, a refusal in its place."""
        todo = list(batch)
        with self._mutex:
            if self._closed or self._failure is not None:
                self._refuse()
            handle, session = self.engine.handle, self._session
            replies = [handle(command.request, session) for command in todo]
            self._commit()
        results: list[Any] = []
        for command, reply in zip(todo, replies, strict=True):
            try:
                results.append(command.result(reply))
            except RefusedError as refused:
                results.append(refused)
        return results

    def close(self) -> None:
        """Take a snapshot and release the directory; closing again does nothing."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            try:
                if self._failure is None:
                    self._disk.snapshot(self.engine)
            finally:
                self._disk.close()
                self.engine.jobs.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse(self) -> NoReturn:
        if self._failure is None or self._closed:
            raise JournalError("the journal is closed: open it again", code="closed")
        raise RefusedError("disk", self._failure.message) from self._failure

    def _commit(self) -> None:
        """
        Everything that changed, also by time alone, in one append.

        After any failure nothing is accepted any more: what is in memory is ahead of the disk.
        """
        engine, disk = self.engine, self._disk
        now = engine.clock()
        engine.tick(now)
        next_id = engine.jobs.next_id
        if next_id < disk.ids_enough:
            if not (engine.jobs.wants_log or engine.store.unlogged):
                return
            records = images.drain(engine, now)
        else:
            records = images.drain(engine, now) + disk.id_records(next_id)
        if not records:
            return
        try:
            disk.commit(records)
            disk.settled()
            if disk.grown and disk.wants_rotation(engine):
                disk.snapshot(engine)
        except LogError as error:
            self._failure = error
            raise RefusedError("disk", error.message) from error
