"""
A running journal without a transport: the engine, its log, and time that passes.

Invariant: the reply to a change that must survive leaves only after the log has it on disk; everything that
waits at that time shares one append and one fsync (`virta.log.group_commit`). After a failed fsync nothing that
must survive is accepted any more; after a full disk it is refused for RETRY_AFTER_WRITE_ERROR_S, then tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from virta.clock import now_us
from virta.errors import JournalError, LogError, LogWriteError
from virta.journal.engine import JournalEngine
from virta.journal.jobs.lifecycle import Jobs
from virta.journal.jobs.table import JOBS_MAX
from virta.journal.protocol import rules
from virta.journal.protocol.messages import OVERWRITE, PERSIST, TOUCH, Function, Reply, Request
from virta.journal.replication.interface import PeerLinks
from virta.journal.sessions import Session
from virta.journal.storage import records as images
from virta.journal.storage.directory import Durability, Persistence
from virta.journal.values.entries import MEMORY_BYTES_MAX
from virta.journal.values.store import Store
from virta.log.group_commit import INLINE_S_MAX, GroupCommit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from virta.journal.replication.interface import Ticket

    Respond = Callable[[list[Reply]], None]

    # A callback, its replies, and whether other daemons must have the changes first.
    PendingReplies = tuple[Respond, list[Reply], bool]

log = logging.getLogger("virta.journal")

RETRY_AFTER_WRITE_ERROR_S = 1.0
ROTATION_PAUSE_S = 0.002
REASON_CHARS_MAX = 200
# The longest wait of the timer, as clocks may be set, and the shortest.
TICK_S_MAX = 1.0
TICK_S_MIN = 0.0005
_TICK_US_MAX = int(TICK_S_MAX * 1_000_000)
# Plain numbers: reading a member of an enumeration is slow.
_GET, _NEXT, _QUIT = int(Function.GET), int(Function.NEXT), int(Function.QUIT)
_READING = frozenset({_GET, _NEXT, int(Function.NOP)})
# Commands that are refused while the disk fails, unless they are only about memory.
_DURABLE = frozenset(
    {Function.DELETE, Function.RENAME, Function.LINK, Function.UNLINK, Function.ADD}
    | {Function.NOT, Function.TRUNCATE}
)


class CommitLoop:
    """
    Embeddable: `start` it in a running event loop, give it requests, `stop` it.

    Without a directory everything is in memory and lost with the process. Commits that take longer than
    `inline_s_max` seconds on average are made in a thread.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        clock: Callable[[], int] = now_us,
        steady: Callable[[], float] = time.monotonic,
        durability: Durability = "fsync",
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        jobs_max: int = JOBS_MAX,
        inline_s_max: float = INLINE_S_MAX,
        open_disk: Callable[..., Persistence] = Persistence,
    ) -> None:
        self._persistence = (
            None if directory is None else open_disk(directory, durability=durability)
        )
        spill = None if self._persistence is None else self._persistence.spill
        self.engine = JournalEngine(
            clock, Store(spill, memory_bytes_max=memory_bytes_max), Jobs(jobs_max=jobs_max)
        )
        if self._persistence is not None:
            self.engine.disk_bytes = self._persistence.disk_bytes
        self.after_batch: set[Callable[[], None]] = (
            set()
        )  # called once, after the replies of a batch
        self.peers = PeerLinks()  # set before `start`, for copies on other daemons
        self._steady = steady
        self._inline_s_max = inline_s_max
        self._group: GroupCommit[PendingReplies, list[images.Record], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._backlog: list[images.Record] = []  # of the last append, if the disk was full
        self._retry_at = 0.0
        self._ticket: Ticket | None = None  # of the last changes for other daemons
        self._due = False  # the requests carried out since the last batch need one
        self._now = 0  # the time of the next batch, 0: not read yet
        self._event: int | None = None  # when the engine has something to do by itself
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0  # the time, by the clock, that the timer is for
        self.rotation: asyncio.Task[None] | None = None
        self._stopping = False
        self._closing = False  # nothing at all is carried out any more
        self._refusing = False  # something may be refused,
        self._refusal = "disk"  # and why

    # Start and stop.

    async def start(self) -> None:
        """Restore the state, which blocks, as nothing can be answered before; then let time pass."""
        self._loop = asyncio.get_running_loop()
        self._group = GroupCommit(
            self._append,
            loop=self._loop,
            collect=self._collect,
            answer=self._send_replies,
            on_committed=self._committed,
            on_answered=self._answered,
            is_fatal=lambda error: not isinstance(error, LogWriteError),
            synced=self._persistence is not None and self._persistence.synced,
            inline_s_max=self._inline_s_max,
        )
        if self._persistence is not None:
            began = time.perf_counter()
            self._persistence.restore(self.engine)
            log.info(
                "journal_restored jobs=%d keys=%d seconds=%.2f",
                len(self.engine.jobs),
                len(self.engine.store),
                time.perf_counter() - began,
            )
        await self.peers.start(self._group.schedule)
        self._arm(self.engine.next_event())

    async def stop(self) -> None:
        """Answer what is waiting, write a snapshot, release the directory; once is enough."""
        if self._stopping:
            return
        self._stopping = self._refusing = True
        assert self._group is not None
        if self._timer is not None:
            self._timer.cancel()
        await self._group.drained()
        await self.peers.stop()
        if self.rotation is not None:
            # Not cancelled: its thread would go on, and remove files that the snapshot below needs.
            await asyncio.wait({self.rotation})
        # Requests that came during these waits are answered as well; then nothing is accepted.
        self._closing = True
        await self._group.close()
        if self._persistence is not None:
            if self.failure is None:
                self._snapshot()
            self._persistence.close()
        self.engine.jobs.close()

    def _snapshot(self) -> None:
        assert self._persistence is not None
        try:
            self._persistence.commit(self._backlog + images.drain(self.engine, self.engine.clock()))
            self._persistence.snapshot(self.engine)
        except (LogError, OSError):
            log.exception("journal_snapshot_failed")  # the log has everything that was acknowledged

    @property
    def failure(self) -> LogError | None:
        """Return the error after which nothing durable is accepted, None if there was none."""
        return None if self._group is None else self._group.failure

    @property
    def commits(self) -> int:
        """Return how many commits to the log succeeded."""
        return 0 if self._group is None else self._group.commits

    @property
    def commit_seconds(self) -> float:
        """Return how long they took together."""
        return 0.0 if self._group is None else self._group.commit_seconds

    # Requests.

    def handle_all(
        self, requests: list[Request], session: Session, respond: Respond, *, alone: bool = False
    ) -> None:
        """
        Carry out requests in order; `respond` is called with replies once their effects are durable enough.

        They share a batch with other callers of this turn of the loop, unless the caller is `alone`.
        """
        group = self._group
        assert group is not None
        now = self.engine.now()
        replies: list[Reply] = []
        waiting: list[Reply] = []  # for the disk
        copied: list[Reply] = []  # and for copies on other daemons
        try:
            for request in requests:
                reply = None
                if self._refusing or session.check is not None:
                    reply = self._refusal_of(request, session, now)
                if reply is None:
                    reply = self.engine.carry_out(request, session, now)
                    if self._waits(request, reply, now):
                        if self.peers.copies > 1 and _is_copied(request, reply, session):
                            copied.append(reply)
                        else:
                            waiting.append(reply)
                        continue
                replies.append(reply)
        finally:
            if replies:
                respond(replies)
            if waiting:
                group.add((respond, waiting, False), len(waiting))
            for reply in copied:
                group.add((respond, [reply], True))
            if self._due:
                self._due = False
                if alone and group.pending and not group.busy:
                    self._now = now  # a batch at once shares the reading of the clock
                    group.write()
                else:
                    group.schedule()

    async def submit(self, request: Request, session: Session | None = None) -> Reply:
        """
        Carry out one request; return its reply once its effect is durable enough.

        Raises:
            RefusedError: it would not fit a message.
        """
        rules.check_limits(request)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def respond(replies: list[Reply]) -> None:
            if not future.done():
                future.set_result(replies[0])

        self.handle_all([request], session or Session(), respond)
        return await future

    def _refusal_of(self, request: Request, session: Session, now: int) -> Reply | None:
        """Return the reply to a request that is not carried out: it is not allowed, or the disk fails."""
        if session.check is not None and (refused := session.check(request)) is not None:
            return Reply(request.identifier, 0, now, error=refused.message)
        if self._refusing and (
            self._closing
            or ((request.flags & PERSIST or request.function in _DURABLE) and self._refuses())
        ):
            error = "shutting-down" if self._stopping else self._refusal
            return Reply(request.identifier, 0, now, error=error)
        return None

    def _waits(self, request: Request, reply: Reply, now: int) -> bool:
        """Return whether a reply has to wait for the log; note whether the request needs a batch."""
        function = request.function
        if function in _READING and not (function == _NEXT and request.flags & OVERWRITE):
            if self.peers.spools or not self._can_wait(request, reply, now):
                self._due = True
            return False
        self._due = True
        if reply.error:
            return False
        return self.peers.spools or self._must_wait(reply, function)

    def _refuses(self) -> bool:
        if self._stopping or self.failure is not None:
            return True
        return self._retry_at != 0 and self._steady() < self._retry_at

    def _can_wait(self, request: Request, reply: Reply, now: int) -> bool:
        """Return whether the timer is early enough for what a request may have left to do."""
        if request.function == _GET:
            return request.timeout is None and not request.flags & TOUCH
        if request.function == _NEXT and reply.timeout is not None:
            return reply.timeout > now + _TICK_US_MAX
        return False

    def _must_wait(self, reply: Reply, function: int) -> bool:
        """Return whether a reply has to wait for the log."""
        if self._persistence is None:
            return False
        if self.engine.jobs.wants_log or self.engine.store.wants_log:
            return True
        # It may report a change as durable whose append is still in flight.
        assert self._group is not None
        durable = bool(reply.flags & PERSIST) or function in _DURABLE or function == _QUIT
        return self._group.busy and durable

    # A batch, in the order the group commit calls these.

    def _collect(self, items: Sequence[PendingReplies]) -> list[images.Record] | None:  # noqa: ARG002
        """Return the records of everything that changed, also by time alone."""
        now, self._now = self._now or self.engine.now(), 0
        self._event = self.engine.tick(now)
        if outgoing := self.engine.replication.take(now):
            try:
                self._ticket = self.peers.replicate(outgoing)
            except (OSError, JournalError) as error:
                self.engine.replication.put_back(outgoing)
                raise LogWriteError(f"a peer's spool: {error}") from error
        persistence = self._persistence
        if persistence is None or self.failure is not None:
            self.engine.store.drain()
            self.engine.jobs.drained()
            return None
        records = persistence.changes(self.engine, now)
        if self._backlog:
            records, self._backlog = self._backlog + (records or []), []
        return records

    def _append(self, records: list[images.Record], lock_timeout: float) -> None:  # noqa: ARG002
        """Commit, in the loop or in a thread; no other process has this log's lock."""
        assert self._persistence is not None
        try:
            self._persistence.commit(records)
        except LogWriteError:
            self._backlog = records
            raise
        except OSError as error:
            raise LogError(f"the journal's log: {error}") from error

    def _committed(
        self,
        items: Sequence[PendingReplies],
        result: None,  # noqa: ARG002
        error: LogError | None,
    ) -> None:
        if error is None:
            if self._persistence is not None and self.failure is None:
                self._persistence.committed()
            return
        if items or not self._refusing:
            log.error("journal_commit_failed code=%s %s", error.code, error.message)
        self._refusing = True
        self._refusal = f"disk: {error.message[:REASON_CHARS_MAX]}"
        if isinstance(error, LogWriteError):
            self._retry_at = self._steady() + RETRY_AFTER_WRITE_ERROR_S

    def _send_replies(self, item: PendingReplies, error: LogError | None) -> None:
        respond, replies, copied = item
        if error is not None:
            now, reason = self.engine.clock(), self._refusal
            respond([Reply(reply.identifier, 0, now, error=reason) for reply in replies])
        elif copied:
            self._await_copies(self._ticket or self.peers.backlog, respond, replies[0])
        else:
            respond(replies)

    def _answered(self, error: LogError | None) -> None:  # noqa: ARG002
        self._call_after_batch()
        if self._timer is None or (self._event is not None and self._event < self._timer_us):
            self._arm(self._event)
        if self._persistence is not None and self._persistence.grown:
            self._consider_rotation(self._persistence)

    def _call_after_batch(self) -> None:
        callbacks, self.after_batch = self.after_batch, set()
        for callback in callbacks:
            callback()

    def _await_copies(self, ticket: Ticket, respond: Respond, reply: Reply) -> None:
        """Respond when enough daemons have the change, or with `no-copies` after the timeout."""
        assert self._loop is not None
        wanted = self.peers.copies
        timeout = self.peers.copies_timeout

        def respond_now(answer: Reply) -> None:
            respond([answer])
            self._call_after_batch()

        def arrived() -> None:
            timer.cancel()
            respond_now(reply)

        def late() -> None:
            have = 1 + ticket.forget(arrived)
            detail = (
                f"{have} of {wanted} daemons have it after {timeout:g} s; the others will get it"
            )
            now = self.engine.clock()
            respond_now(Reply(reply.identifier, 0, now, error=f"no-copies: {detail}"))

        timer = self._loop.call_later(timeout, late)
        ticket.when(wanted - 1, arrived)

    # Time and rotation.

    def _arm(self, event: int | None) -> None:
        """Set the timer for `event`, and no later than TICK_S_MAX."""
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
        assert self._group is not None
        self._group.schedule()

    def _consider_rotation(self, persistence: Persistence) -> None:
        if (
            self.rotation is None
            and self.failure is None
            and not self._backlog
            and not self._stopping
            and persistence.wants_rotation(self.engine)
        ):
            assert self._group is not None
            self._group.when_idle(lambda: self._begin_rotation(persistence))

    def _begin_rotation(self, persistence: Persistence) -> None:
        """Begin a generation while no append is in flight."""
        assert self._loop is not None
        try:
            persistence.rotate(self.engine)
        except (LogError, OSError):
            log.exception("journal_rotation_failed")
            persistence.abandon_rotation()
        else:
            self.rotation = self._loop.create_task(self._finish_rotation(persistence))

    async def _finish_rotation(self, persistence: Persistence) -> None:
        try:
            while not persistence.rotation_step():
                await asyncio.sleep(ROTATION_PAUSE_S)
                if self._stopping:
                    return  # a stop writes a snapshot of its own
            await asyncio.to_thread(persistence.finish_rotation)
        except (LogError, OSError):
            log.exception("journal_rotation_failed")
            persistence.abandon_rotation()
        finally:
            self.rotation = None


def _is_copied(request: Request, reply: Reply, session: Session) -> bool:
    """Return whether a change is one that enough daemons must have before it is acknowledged."""
    return (
        request.function in (Function.SET, Function.PUSH)
        and bool(reply.flags & PERSIST)
        and session.peer is None
    )
