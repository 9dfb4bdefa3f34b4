"""
A row table that follows the hub, its views, and the work that waits for a thread.

    complete   ─┐  opened together: one pass over the rows
    touched    ─┼─ resumed together: one pass over the ring      in a thread; findings go to the table in short steps,
    read_values ┘  asked for together: one read of the log       and those who wait continue a few at a time

Consumers come in thousands after a restart: what they need is read once for all of them, and the event loop is never
busy with them for longer than some milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from virta.errors import ViewError
from virta.views.tables.passes import MembershipPass, ResumePass, reader_of
from virta.views.view import deliver_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from virta.event.row_changes import RowChange
    from virta.log import Log
    from virta.views.tables.passes import Piece
    from virta.views.tables.table import RowTable
    from virta.views.view import View

# Views that are opened within this time of each other share one pass over the rows: it waits for more of them, for at
# most as long as it is going to take.
GATHER_S: Final = 0.02
PASS_ROW_S: Final = 5e-6
# Waiting consumers that continue in one step of the event loop.
RELEASED: Final = 16
# A resume over at most this many touches is done at once, if no row has to be read for it.
RESUME_AT_ONCE: Final = 500
# Values of one read: some ten MB.
READ_OFFSETS_MAX: Final = 100_000

logger = logging.getLogger("virta.views")


class LiveTable:
    """A table with its views, in the event loop."""

    def __init__(self, table: RowTable, run: Callable[..., Any], log: Log) -> None:
        self.table = table
        self.views: dict[str, View] = {}
        self.changes: list[tuple[int, RowChange]] = []  # of the present step
        self.used_at = time.monotonic()
        self.saved_at = time.monotonic()
        self.saved_position = -1
        self.failure: ViewError | None = None
        self._run = run
        self._read = reader_of(log, table.channel)
        self._new: dict[View, asyncio.Future[None]] = {}
        self._resumes: list[tuple[View, int, asyncio.Future[ResumePass]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._reads: list[tuple[list[int], asyncio.Future[dict[int, bytes]]]] = []
        self._reader: asyncio.Task[None] | None = None

    def step(self, position: int) -> None:
        """Apply the changes of a step and hand the hits to the consumers."""
        changes, self.changes = self.changes, []
        if changes:
            self.deliver(self.table.apply(changes, position))
        else:
            self.table.position = max(self.table.position, position)

    def deliver(self, views: Iterable[View]) -> None:
        deliver_all(list(views), time.monotonic())

    def end(self, error: ViewError) -> None:
        """End every consumer: the table cannot go on."""
        self.failure = error
        for view in self.views.values():
            for consumer in tuple(view.consumers):
                consumer.sink.failed(error)

    # Passes.

    async def complete(self, view: View) -> None:
        """Wait until the memberships of a view are right."""
        if view.exact_since is None:
            if view not in self._new:
                self._new[view] = asyncio.get_running_loop().create_future()
                self._wake()
            await asyncio.shield(self._new[view])

    async def touched(self, view: View, position: int) -> dict[str, bool] | None:
        """Return the keys that a consumer at `position` has to get, as `ResumePass.touched` does."""
        if position < self.table.exact_from:
            return None
        if view.exact_since is not None and position >= view.exact_since:
            resume = ResumePass(self.table, [(view, position)])
            if len(resume) <= RESUME_AT_ONCE:
                resume.run(self._read)  # reads nothing: the ring has it all
                return resume.touched(view, position)
        future: asyncio.Future[ResumePass] = asyncio.get_running_loop().create_future()
        self._resumes.append((view, position, future))
        self._wake()
        return (await future).touched(view, position)

    def _wake(self) -> None:
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._run_passes())

    async def _run_passes(self) -> None:
        """Run passes; views and resumes that wait together share one."""
        while self._new or self._resumes:
            await self._gather()
            new, resumes = dict(self._new), self._resumes
            self._resumes = []
            try:
                if new:
                    await self._fill_memberships(new)
                if resumes:
                    resume = ResumePass(self.table, [(view, at) for view, at, _ in resumes])
                    await self._run(resume.run, self._read)
                    await _release((future, resume) for _, _, future in resumes)
            except Exception as error:
                logger.exception("view_pass_failed channel=%s", self.table.channel)
                self._new = {v: f for v, f in self._new.items() if v not in new}
                failed = ViewError(f"reading the rows failed: {error}", code="view-pass-failed")
                _fail([*new.values(), *(future for _, _, future in resumes)], failed)

    async def _gather(self) -> None:
        """Wait while more views and resumes come: what misses the beginning of a pass needs another."""
        end = time.monotonic() + self.table.rows * PASS_ROW_S
        before = 0
        while len(self._new) + len(self._resumes) > before:
            before = len(self._new) + len(self._resumes)
            await asyncio.sleep(GATHER_S)
            if time.monotonic() > end:
                break

    async def _fill_memberships(self, new: dict[View, asyncio.Future[None]]) -> None:
        """Fill the memberships of views, and of those that come meanwhile, which are added to `new`."""
        work = MembershipPass(self.table, list(new))
        await self._run(work.prepare)
        for piece in work.pieces():
            if len(self._new) > len(new):
                late = {view: done for view, done in self._new.items() if view not in new}
                work.join(list(late))
                new.update(late)
            await self._match(work, piece)
        await self._completed(work)
        rest = work.rest()
        if rest is not None:
            for piece in rest.pieces():
                await self._match(rest, piece)
            await self._completed(rest)

    async def _match(self, work: MembershipPass, piece: Piece) -> None:
        await self._run(piece.match, self._read)
        for _ in work.steps(piece):
            await asyncio.sleep(0)
        if piece.lost:
            self.deliver(self.table.lose(piece.lost))

    async def _completed(self, work: MembershipPass) -> None:
        """End a pass and let those continue who wait for its views."""
        work.end()
        done = [view for view in self._new if view.exact_since is not None]
        await _release([(self._new.pop(view), None) for view in done])

    # Values.

    async def read_values(self, offsets: list[int]) -> dict[int, bytes]:
        """Read values; rows whose values are no longer in the log leave."""
        future: asyncio.Future[dict[int, bytes]] = asyncio.get_running_loop().create_future()
        self._reads.append((offsets, future))
        if self._reader is None or self._reader.done():
            self._reader = asyncio.ensure_future(self._read_waiting())
        return await future

    async def _read_waiting(self) -> None:
        """Read for all consumers that wait: their rows are spread over the log, and one reader passes them all."""
        while self._reads:
            group, wanted = self._next_reads()
            futures = [future for _, future in group]
            try:
                values = await self._run(self._read, sorted(wanted))
            except Exception as error:
                logger.exception("view_read_failed channel=%s", self.table.channel)
                _fail(futures, error)
                continue
            lost = wanted - values.keys()
            if lost:
                self.deliver(self.table.lose(lost))
            await _release(
                (future, {o: values[o] for o in offsets if o in values})
                for offsets, future in group
            )

    def _next_reads(self) -> tuple[list[tuple[list[int], asyncio.Future[Any]]], set[int]]:
        wanted: set[int] = set()
        taken = 0
        for offsets, future in self._reads:
            if wanted and len(wanted) + len(offsets) > READ_OFFSETS_MAX:
                break
            taken += 1
            if not future.done():
                wanted.update(offsets)
        group, self._reads = self._reads[:taken], self._reads[taken:]
        return group, wanted


async def _release(results: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
    """Let those who wait continue, a few in each step of the event loop."""
    for at, (future, value) in enumerate(results, 1):
        if not future.done():
            future.set_result(value)
        if at % RELEASED == 0:
            await asyncio.sleep(0)


def _fail(futures: Iterable[asyncio.Future[Any]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
