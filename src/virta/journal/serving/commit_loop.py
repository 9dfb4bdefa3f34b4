"""
A running journal without a transport: the engine, its log, and time that passes.

Invariant: a reply to a change that must survive leaves only after the log has it on disk; everything
that waits at that moment shares one append and one fsync. After a failed fsync nothing that must
survive is accepted any more; after a full disk it is refused for a moment and then tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from virta.clock import now_us
from virta.errors import JournalError, LogError, LogWriteError
from virta.journal.engine import Engine
from virta.journal.jobs.lifecycle import Jobs
from virta.journal.jobs.table import JOBS_MAX
from virta.journal.protocol.messages import OVERWRITE, PERSIST, TOUCH, Function, Reply, Request
from virta.journal.sessions import Session
from virta.journal.storage import records as images
from virta.journal.storage.directory import Durability, Persistence
from virta.journal.values.entries import MEMORY_BYTES_MAX
from virta.journal.values.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.journal.replication.peers import Peers, Ticket

    Respond = Callable[[Reply], None]

    # Whom to tell, what, and whether other daemons must have it first.
    Waiting = tuple[Respond, Reply, bool]

log = logging.getLogger("virta.journal")

# Handing a commit to a thread costs two wake-ups: waiting for a disk that syncs in less than this is
# cheaper, and what arrives meanwhile shares the next sync. A slower disk must not keep readers waiting.
INLINE_COMMIT_S_MAX = 0.001
# One hiccup is not a slow disk: two in a row are.
HICCUP_S_MAX = 4 * INLINE_COMMIT_S_MAX
RETRY_AFTER_WRITE_ERROR_S = 1.0
ROTATION_PAUSE_S = 0.002
STOP_LOOK_S = 0.001
REASON_CHARS_MAX = 200
TICK_S_MAX = 1.0
TICK_S_MIN = 0.0005
_TICK_US_MAX = int(TICK_S_MAX * 1_000_000)
# Members of an enumeration are looked up by name every time; numbers are just there.
_GET, _NEXT = int(Function.GET), int(Function.NEXT)
_READING = frozenset({_GET, _NEXT, int(Function.NOP)})
# Commands that are refused while the disk is, unless they are only about memory.
_LASTING = frozenset(
    {Function.DELETE, Function.RENAME, Function.LINK, Function.UNLINK, Function.ADD}
    | {Function.NOT, Function.TRUNCATE}
)


class Node:
    """
    Embeddable: `start` it in a running event loop, give it requests, `stop` it.

    Without a directory everything lives in memory and dies with the process.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        clock: Callable[[], int] = now_us,
        durability: Durability = "fsync",
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        jobs_max: int = JOBS_MAX,
    ) -> None:
        self._persistence = (
            None if directory is None else Persistence(directory, durability=durability)
        )
        spill = None if self._persistence is None else self._persistence.spill
        self.engine = Engine(
            clock, Store(spill, memory_bytes_max=memory_bytes_max), Jobs(jobs_max=jobs_max)
        )
        if self._persistence is not None:
            self.engine.disk_bytes = self._persistence.disk_bytes
        self.on_batch: list[Callable[[], None]] = []  # called when replies of a batch were given
        self.failure: LogError | None = None
        self._retry_at = 0.0
        self._backlog: list[images.Record] = []
        self.peers: Peers | None = None  # set by whoever wants copies, before `start`
        self._waiting: list[Waiting] = []
        self._ticket: Ticket | None = None  # of the last changes other daemons have to hear
        self._scheduled = False
        self._held = False  # whoever holds it calls the next batch himself
        self._committing = False
        self._overdue = False  # a batch was asked for meanwhile
        self._commit_s = 0.0
        self.commits = 0  # commits to the log, and their total time, for statistics
        self.commit_seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0  # the moment of the clock that the timer is for
        self._rotation_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._closing = False  # nothing at all is carried out any more
        self._uneasy = False  # something may be refused
        self._refusal = "disk"  # and why

    # Life.

    async def start(self) -> None:
        """Restore the state (blocking: nothing can be answered before) and let time pass."""
        self._loop = asyncio.get_running_loop()
        if self._persistence is not None:
            began = time.perf_counter()
            self._persistence.restore(self.engine)
            log.info(
                "journal_restored jobs=%d keys=%d seconds=%.2f",
                len(self.engine.jobs),
                len(self.engine.store),
                time.perf_counter() - began,
            )
        if self.peers is not None:
            await self.peers.start(self._schedule)
            self._schedule()
        self._arm(self.engine.next_event())

    async def stop(self) -> None:
        """Answer what is waiting, take a snapshot, release the directory; once is enough."""
        if self._stopping:
            return
        self._stopping = self._uneasy = True
        if self._timer is not None:
            self._timer.cancel()
        await self._answered()
        if self.peers is not None:
            await self.peers.stop()
        if self._rotation_task is not None:
            # Not cancelled: a thread of it would go on, and remove what the snapshot below rests on.
            await asyncio.wait({self._rotation_task})
        # What came while those ended is answered, too; then there is no turn of the loop before the end.
        self._closing = True
        await self._answered()
        if self._persistence is not None:
            if self.failure is None:
                self._snapshot()
            self._persistence.close()
        self.engine.jobs.close()

    async def _answered(self) -> None:
        """Until nothing waits for the disk, nor to be written or told."""
        while self._waiting or self._committing or (self._closing and self._scheduled):
            self._schedule()
            await asyncio.sleep(STOP_LOOK_S)

    def _snapshot(self) -> None:
        assert self._persistence is not None
        try:
            self._persistence.commit(self._backlog + images.drain(self.engine, self.engine.clock()))
            self._persistence.snapshot(self.engine)
        except (LogError, OSError):
            log.exception("journal_snapshot_failed")  # the log has everything that was acknowledged

    # Requests.

    def handle(self, request: Request, session: Session, respond: Respond) -> None:
        """Carry out a request now; `respond` is called when its effect is as lasting as it must be."""
        function = request.function
        if self._uneasy and (
            self._closing or ((request.flags & PERSIST or function in _LASTING) and self._refuses())
        ):
            error = "shutting-down" if self._stopping else self._refusal
            respond(Reply(request.identifier, 0, self.engine.clock(), error=error))
            return
        reply = self.engine.handle(request, session)
        peers = self.peers
        if function in _READING and not (function == _NEXT and request.flags & OVERWRITE):
            respond(reply)
            hurry = peers is not None or not self._can_wait(request, reply)
        else:
            copied = peers is not None and self._wants_copies(request, reply, session)
            if not reply.error and (copied or self._must_wait(reply, function)):
                self._waiting.append((respond, reply, copied))
            else:
                respond(reply)
            hurry = True
        if hurry and not self._scheduled:
            self._schedule()

    def _wants_copies(self, request: Request, reply: Reply, session: Session) -> bool:
        return (
            self.peers is not None
            and self.peers.copies > 1
            and request.function in (Function.SET, Function.PUSH)
            and bool(reply.flags & PERSIST)
            and session.peer is None
        )

    def _can_wait(self, request: Request, reply: Reply) -> bool:
        """Whether the next turn of the timer is early enough for what a request may have left to do."""
        if request.function == _GET:
            return request.timeout is None and not request.flags & TOUCH
        if request.function == _NEXT and reply.timeout is not None:
            return reply.timeout > self.engine.clock() + _TICK_US_MAX
        return False

    async def submit(self, request: Request, session: Session | None = None) -> Reply:
        """The same for callers that can await."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def respond(reply: Reply) -> None:
            if not future.done():
                future.set_result(reply)

        self.handle(request, session or Session(), respond)
        return await future

    def _refuses(self) -> bool:
        if self._stopping or self.failure is not None:
            return True
        return self._retry_at != 0 and time.monotonic() < self._retry_at

    def _must_wait(self, reply: Reply, function: int) -> bool:
        if self._persistence is None:
            return False
        if self.engine.jobs.wants_log or self.engine.store.wants_log:
            return True
        # Said to be on disk because of a change that is on its way there just now.
        lasting = bool(reply.flags & PERSIST) or function in _LASTING or function == Function.QUIT
        return self._committing and lasting

    # Batches.

    def _schedule(self) -> None:
        """Once per turn of the loop, so that all connections that were ready share a batch."""
        if not self._scheduled:
            assert self._loop is not None
            self._scheduled = True
            if not self._held:
                self._loop.call_soon(self._batch)

    def hold(self) -> None:
        """What is asked until `release` is one batch, done there: a turn of the loop less."""
        self._held = not self._scheduled

    def release(self) -> None:
        held, self._held = self._held, False
        if held and self._scheduled:
            self._batch()

    def _batch(self) -> None:
        self._scheduled = False
        if self._committing:
            self._overdue = True  # what waits goes with the next one, which follows at once
            return
        event = self.engine.tick()
        if self.peers is not None and (outgoing := self.engine.gather()):
            try:
                self._ticket = self.peers.spool(outgoing)
            except (OSError, JournalError) as error:
                self.engine.outgoing = outgoing
                self._settle(LogWriteError(f"a peer's spool: {error}"), event)
                return
        persistence = self._persistence
        if persistence is None or self.failure is not None:
            self.engine.store.drain()
            self.engine.jobs.drained()
        else:
            records = images.drain(self.engine, self.engine.clock())
            records += persistence.id_records(self.engine.jobs.next_id)
            if self._backlog:
                records = self._backlog + records
                self._backlog = []
            if records:
                self._commit(records, event)
                return
        # What has to survive, but is not known to be of that kind beforehand, is refused here.
        self._settle(self.failure if self._waiting else None, event)

    def _commit(self, records: list[images.Record], event: int | None) -> None:
        assert self._persistence is not None
        assert self._loop is not None
        if self._commit_s > INLINE_COMMIT_S_MAX and self._persistence.synced:
            self._committing = True
            waiting, self._waiting = self._waiting, []
            future = self._loop.run_in_executor(None, self._append, records)
            future.add_done_callback(lambda done: self._committed(done.result(), waiting))
        else:
            self._settle(self._append(records), event)

    def _append(self, records: list[images.Record]) -> LogError | None:
        """In a thread or not; the error is for whoever waits."""
        assert self._persistence is not None
        began = time.perf_counter()
        try:
            self._persistence.commit(records)
        except LogError as error:
            if isinstance(error, LogWriteError):
                self._backlog = records
            return error
        except OSError as error:
            return LogError(f"the journal's log: {error}")
        took = time.perf_counter() - began
        self.commits += 1
        self.commit_seconds += took
        self._commit_s = 0.8 * self._commit_s + 0.2 * min(took, HICCUP_S_MAX)
        return None

    def _committed(self, error: LogError | None, waiting: list[Waiting]) -> None:
        self._committing = False
        later, self._waiting = self._waiting, waiting
        if error is not None and not isinstance(error, LogWriteError):
            self._waiting += later  # nothing will be written any more
            later = []
        self._settle(error, self.engine.next_event())
        self._waiting = later
        if later or self._overdue or self.engine.wants_log:
            self._overdue = False
            self._schedule()

    def _settle(self, error: LogError | None, event: int | None) -> None:
        """Give the replies that waited for this batch, and see to what comes next."""
        if error is not None:
            self._failed(error)
        elif self._persistence is not None and self.failure is None:
            self._persistence.settled()
        waiting, self._waiting = self._waiting, []
        for respond, reply, copied in waiting:
            if error is not None:
                respond(Reply(reply.identifier, 0, self.engine.clock(), error=self._refusal))
            elif copied and self.peers is not None:
                self._await_copies(self._ticket or self.peers.backlog, respond, reply)
            else:
                respond(reply)
        for callback in self.on_batch:
            callback()
        if self._timer is None or (event is not None and event < self._timer_us):
            self._arm(event)
        if self._persistence is not None and self._persistence.grown:
            self._consider_rotation(self._persistence)

    def _await_copies(self, ticket: Ticket, respond: Respond, reply: Reply) -> None:
        """Answer when enough daemons have it, or say that they do not."""
        assert self._loop is not None
        assert self.peers is not None
        wanted = self.peers.copies
        timeout = self.peers.copies_timeout

        def arrived() -> None:
            timer.cancel()
            self._answer(respond, reply)

        def late() -> None:
            have = 1 + ticket.forget(arrived)
            detail = (
                f"{have} of {wanted} daemons have it after {timeout:g} s; the others will get it"
            )
            now = self.engine.clock()
            self._answer(respond, Reply(reply.identifier, 0, now, error=f"no-copies: {detail}"))

        timer = self._loop.call_later(timeout, late)
        ticket.when(wanted - 1, arrived)

    def _answer(self, respond: Respond, reply: Reply) -> None:
        respond(reply)
        for callback in self.on_batch:
            callback()

    def _failed(self, error: LogError) -> None:
        log.error("journal_commit_failed code=%s %s", error.code, error.message)
        self._uneasy = True
        self._refusal = f"disk: {error.message[:REASON_CHARS_MAX]}"
        if isinstance(error, LogWriteError):
            self._retry_at = time.monotonic() + RETRY_AFTER_WRITE_ERROR_S
        else:
            self.failure = error

    # Time and housekeeping.

    def _arm(self, event: int | None) -> None:
        """Look again when something is due by itself, and now and then anyway: clocks are set."""
        if self._stopping:
            return
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        now = self.engine.clock()
        wait = TICK_S_MAX
        if event is not None:
            wait = min(max((event - now) / 1e6, TICK_S_MIN), TICK_S_MAX)
        self._timer_us = now + int(wait * 1e6)
        self._timer = self._loop.call_later(wait, self._tick)

    def _tick(self) -> None:
        self._timer = None  # the batch arms it again
        self._schedule()

    def _consider_rotation(self, persistence: Persistence) -> None:
        if (
            self._rotation_task is None
            and self.failure is None
            and not self._backlog
            and not self._stopping
            and persistence.wants_rotation(self.engine)
        ):
            assert self._loop is not None
            self._rotation_task = self._loop.create_task(self._rotate(persistence))

    async def _rotate(self, persistence: Persistence) -> None:
        try:
            while self._committing:  # noqa: ASYNC110  (microseconds, rarely)
                await asyncio.sleep(ROTATION_PAUSE_S)
            persistence.rotate(self.engine)
            while not persistence.rotation_step():
                await asyncio.sleep(ROTATION_PAUSE_S)
                if self._stopping:
                    return  # a stop takes a snapshot of its own
            await asyncio.to_thread(persistence.finish_rotation)
        except (LogError, OSError):
            log.exception("journal_rotation_failed")
            persistence.abandon_rotation()
        finally:
            self._rotation_task = None
