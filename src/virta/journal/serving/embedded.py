"""
A journal inside this process: the same commands without a daemon, on the same files.

    with Journal(Path("virta-data/journal")) as journal:
        journal.push("http://example.com/page")

One process owns a journal directory at a time, be it this or a daemon. Threads may share a `Journal`, and then
share appends, too. Invariant: as in the daemon, a call that must survive returns after fsync, and all commands of
a `pipeline` share one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from virta.clock import now_us
from virta.errors import JournalError, LogError
from virta.journal.engine import JournalEngine
from virta.journal.jobs.lifecycle import Jobs
from virta.journal.jobs.table import JOBS_MAX
from virta.journal.protocol.messages import RefusedError
from virta.journal.protocol.methods import BlockingMethods
from virta.journal.sessions import Session
from virta.journal.storage.directory import Durability, Persistence
from virta.journal.values.entries import MEMORY_BYTES_MAX
from virta.journal.values.store import Store
from virta.log.group_commit import ThreadGroupCommit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from virta.journal.protocol.commands import Command
    from virta.journal.protocol.messages import Reply
    from virta.journal.storage import records as images

T = TypeVar("T")


class Journal(BlockingMethods):
    """A journal directory, opened by this process. Locks belong to the object, not to its threads."""

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = "fsync",
        clock: Callable[[], int] = now_us,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        jobs_max: int = JOBS_MAX,
        open_disk: Callable[..., Persistence] = Persistence,
    ) -> None:
        self._closed = False
        self._session = Session()
        self._disk = open_disk(directory, durability=durability)
        self.engine = JournalEngine(
            clock,
            Store(self._disk.spill, memory_bytes_max=memory_bytes_max),
            Jobs(jobs_max=jobs_max),
        )
        self.engine.disk_bytes = self._disk.disk_bytes
        # After any failure nothing is accepted any more: what is in memory is ahead of the disk.
        self._commits: ThreadGroupCommit[None, list[images.Record], None] = ThreadGroupCommit(
            lambda records, _: self._disk.commit(records),
            collect=self._collect,
            on_committed=self._committed,
            is_fatal=lambda _: True,
        )
        try:
            self._disk.restore(self.engine)
        except BaseException:
            self._disk.close()
            raise

    def call(self, command: Command[T]) -> T:
        """Carry out one command."""
        return command.result(self._carry_out([command])[0])

    def pipeline(self, batch: Iterable[Command[Any]]) -> list[Any]:
        """Carry out many with one fsync; return their results in order, a refusal in its place."""
        todo = list(batch)
        results: list[Any] = []
        for command, reply in zip(todo, self._carry_out(todo), strict=True):
            try:
                results.append(command.result(reply))
            except RefusedError as refused:
                results.append(refused)
        return results

    def close(self) -> None:
        """Write a snapshot and release the directory; closing again does nothing."""
        with self._commits.mutex:
            if self._closed:
                return
            self._closed = True
            self._commits.close()
            try:
                if self._commits.failure is None:
                    self._disk.snapshot(self.engine)
            finally:
                self._disk.close()
                self.engine.jobs.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _carry_out(self, batch: list[Command[Any]]) -> list[Reply]:
        commits = self._commits
        with commits.mutex:
            if self._closed or commits.failure is not None:
                self._refuse()
            handle, session, now = self.engine.handle, self._session, self.engine.now()
            replies = [handle(command.request, session, now) for command in batch]
            try:
                commits.commit(None)
            except LogError as error:
                raise RefusedError("disk", error.message) from error
        return replies

    def _refuse(self) -> NoReturn:
        failure = self._commits.failure
        if failure is None or self._closed:
            raise JournalError("the journal is closed: open it again", code="closed")
        raise RefusedError("disk", failure.message) from failure

    def _collect(self, items: Sequence[None]) -> list[images.Record] | None:  # noqa: ARG002
        """Return the records of everything that changed, also by time alone."""
        now = self.engine.now()
        self.engine.tick(now)
        return self._disk.changes(self.engine, now)

    def _committed(
        self,
        items: Sequence[None],  # noqa: ARG002
        result: None,  # noqa: ARG002
        error: LogError | None,
    ) -> None:
        if error is not None:
            return
        self._disk.committed()
        if self._disk.grown and self._disk.wants_rotation(self.engine):
            try:
                self._disk.snapshot(self.engine)
            except LogError as failure:
                self._commits.failure = failure
