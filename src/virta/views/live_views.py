"""
All live views of a process, in its event loop.

    hub ──► append, advance ──► tables: one step ──► views ──► consumers that keep up
    open ──► table (built in a thread) ──► pass for new filters (in a thread, in pieces) ──► attach in one step

A table stands from its first view until `view_idle_s` after its last, a filter until `view_linger_s` after its last
consumer: a consumer that comes back soon needs no pass. Everything that blocks runs in `executor`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from virta import files
from virta.errors import LogError, ViewError
from virta.hub.delivery import META, is_bookkeeping
from virta.views.consumer import GAP, UNKNOWN_POSITION, ViewConsumer
from virta.views.limits import DEFAULT_LIMITS
from virta.views.tables.changes import read_change, read_event_change
from virta.views.tables.passes import (
    HistoryPass,
    MembershipPass,
    needs_history,
    reader_of,
    touched_since,
)
from virta.views.tables.table_file import (
    TableImage,
    check_compaction,
    check_keyed,
    open_table,
    read_on,
    table_path,
)
from virta.views.view import View, ViewFilter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Executor
    from pathlib import Path

    from virta.hub.hub import Hub
    from virta.log import Log, Record
    from virta.views.consumer import FrameSink
    from virta.views.limits import ViewLimits
    from virta.views.tables.changes import KeyRule, RowChange
    from virta.views.tables.table import RowTable

# Upkeep: expired rows are noticed, and unused views and tables dropped, so often.
UPKEEP_S: Final = 1.0
# Views that are opened within this time share one pass over the rows.
GATHER_S: Final = 0.02

logger = logging.getLogger("virta.views")


class LiveTable:
    """A table that follows the hub, its views, and the work that waits for a thread."""

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
        self._resumes: list[tuple[View, int, asyncio.Future[HistoryPass]]] = []
        self._worker: asyncio.Task[None] | None = None

    def step(self, position: int) -> None:
        """Apply the changes of a step and hand the hits to the consumers."""
        changes, self.changes = self.changes, []
        if changes:
            for view in self.table.apply(changes, position):
                view.deliver()
        else:
            self.table.position = max(self.table.position, position)

    def deliver(self, views: Iterable[View]) -> None:
        for view in views:
            view.deliver()

    # Passes.

    async def complete(self, view: View) -> None:
        """Wait until the memberships of a view are right."""
        if view.exact_since is None:
            if view not in self._new:
                self._new[view] = asyncio.get_running_loop().create_future()
                self._wake()
            await asyncio.shield(self._new[view])

    async def history(self, view: View, position: int) -> HistoryPass:
        """Return what the rows before each touch since a position were."""
        future: asyncio.Future[HistoryPass] = asyncio.get_running_loop().create_future()
        self._resumes.append((view, position, future))
        self._wake()
        return await future

    def _wake(self) -> None:
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        """Run passes; views and resumes that wait together share one."""
        while self._new or self._resumes:
            await asyncio.sleep(GATHER_S)
            futures: list[asyncio.Future[Any]] = []
            try:
                if self._new:
                    new = dict(self._new)
                    futures += new.values()
                    await self._pass(list(new))
                    self._new = {v: f for v, f in self._new.items() if v not in new}
                    _resolve(new.values(), None)
                resumes, self._resumes = self._resumes, []
                futures += [future for _, _, future in resumes]
                if resumes:
                    history = await self._history(resumes)
                    _resolve([future for _, _, future in resumes], history)
            except Exception as error:
                logger.exception("view_pass_failed channel=%s", self.table.channel)
                self._new = {v: f for v, f in self._new.items() if f not in futures}
                failed = ViewError(f"reading the rows failed: {error}", code="view-pass-failed")
                for future in futures:
                    if not future.done():
                        future.set_exception(failed)

    async def _pass(self, views: list[View]) -> None:
        work = MembershipPass(self.table, views)
        await self._run(work.prepare)
        for piece in work.pieces():
            await self._run(piece.match, self._read)
            work.finish(piece)
            if piece.lost:
                self.deliver(self.table.lose(piece.lost))
        work.end()

    async def _history(self, resumes: list[tuple[View, int, Any]]) -> HistoryPass:
        views = list({view: None for view, _, _ in resumes})
        work = HistoryPass(self.table, views, min(position for _, position, _ in resumes))
        for piece in work.pieces():
            await self._run(piece.match, self._read)
            work.finish(piece)
        return work

    async def read_values(self, offsets: list[int]) -> dict[int, bytes]:
        """Read values; rows whose values are no longer in the log leave."""
        values: dict[int, bytes] = await self._run(self._read, offsets)
        lost = set(offsets) - values.keys()
        if lost:
            self.deliver(self.table.lose(lost))
        return values

    def end(self, error: ViewError) -> None:
        """End every consumer: the table cannot go on."""
        self.failure = error
        for view in self.views.values():
            for consumer in tuple(view.consumers):
                consumer.sink.failed(error)


def _resolve(futures: Iterable[asyncio.Future[Any]], value: Any) -> None:
    for future in futures:
        if not future.done():
            future.set_result(value)


class LiveViews:
    """The row tables of a process; the hub's `rows`."""

    def __init__(
        self,
        log: Log,
        hub: Hub,
        executor: Executor,
        *,
        directory: Path | None = None,
        limits: ViewLimits = DEFAULT_LIMITS,
    ) -> None:
        self.limits = limits
        self.channels: dict[str, list[LiveTable]] = {}
        self.epoch = log.epoch
        self.unkeyed = 0  # records without a key, in tables that ended
        self._log = log
        self._hub = hub
        self._executor = executor
        self._directory = directory
        self._tables: dict[tuple[str, KeyRule], asyncio.Future[LiveTable]] = {}
        self._upkeep: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        self._upkeep = asyncio.ensure_future(self._keep())

    async def stop(self) -> None:
        """Save every table."""
        self._stopped = True
        if self._upkeep is not None:
            self._upkeep.cancel()
        for live in self._live():
            await self._save(live)

    # The live step, called by the publisher.

    def append(self, channel: str, offset: int, key: bytes, value: bytes) -> None:
        for live in self.channels[channel]:
            if offset >= live.table.position:
                live.changes.append((offset, read_event_change(key, value, live.table.rule)))

    def append_record(self, record: Record) -> None:
        for live in self.channels[str(record.topic)]:
            if record.offset >= live.table.position:
                live.changes.append((record.offset, read_change(record, live.table.rule)))

    def advance(self, position: int) -> None:
        for live in self._live():
            try:
                live.step(position)
            except ViewError as error:
                self._drop(live, error)
            except Exception as error:
                # Publications and plain subscriptions go on.
                logger.exception("view_step_failed channel=%s", live.table.channel)
                self._drop(live, ViewError(f"the view failed: {error}", code="internal-failure"))

    # Opening.

    async def open(
        self, channel: str, rule: KeyRule, filter_: ViewFilter
    ) -> tuple[LiveTable, View]:
        """
        Return the table and the standing view of a filter; its memberships are right.

        Raises:
            ViewError: view-unkeyed, view-key-compacted, too-many-rows, too-many-views, no-rows.
        """
        while True:
            live = await self.table(channel, rule)
            check_keyed(channel, rule, live.table.keyed, live.table.unkeyed)
            view = live.views.get(filter_.id)
            if view is None:
                self._check_filters()
                view = live.views[filter_.id] = View(live.table, filter_)
                live.table.index.add(view)
            view.unused_since = time.monotonic()
            await live.complete(view)
            if live.failure is None and live.views.get(filter_.id) is view:
                return live, view

    async def table(self, channel: str, rule: KeyRule) -> LiveTable:
        """Return the table of a channel, built if there is none."""
        if channel == META or is_bookkeeping(channel.encode()):
            raise ViewError(
                f"channel {channel!r} has no rows: it is the server's own", code="no-rows"
            )
        key = (channel, rule)
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= self.limits.view_tables_max:
                raise ViewError(
                    f"{self.limits.view_tables_max} tables stand already: raise view_tables_max",
                    code="too-many-views",
                )
            found = self._tables[key] = asyncio.ensure_future(self._build(channel, rule))
        try:
            live = await asyncio.shield(found)
        except BaseException:
            if found.done() and self._tables.get(key) is found:
                del self._tables[key]
            raise
        live.used_at = time.monotonic()
        return live

    async def _build(self, channel: str, rule: KeyRule) -> LiveTable:
        def build() -> RowTable:
            return open_table(
                self._log,
                channel,
                rule,
                directory=self._directory,
                limits=self.limits,
                stopped=lambda: self._stopped,
            )

        table = await self._run(build)
        while table.position < self._hub.position:
            await self._run(read_on, self._log, table, self._hub.position)
        live = LiveTable(table, self._run, self._log)
        # From this step on the hub gives it everything.
        self.channels.setdefault(channel, []).append(live)
        return live

    def _check_filters(self) -> None:
        if sum(len(live.views) for live in self._live()) >= self.limits.view_filters_max:
            raise ViewError(
                f"{self.limits.view_filters_max} distinct filters stand already: raise view_filters_max",
                code="too-many-views",
            )

    async def attach(
        self, live: LiveTable, view: View, sink: FrameSink, position: int | None, reset: str = ""
    ) -> ViewConsumer:
        """
        Begin a consumer: with a snapshot, or with what changed since a position.

        Args:
            reset: why a position that was given cannot be used, if it cannot.
        """
        history = None
        if position is not None and position > self._log.next_offset:
            position, reset = None, UNKNOWN_POSITION
        if position is not None:
            if position > live.table.position:
                await self._hub.wait_past(position - 1)
            if needs_history(view, position) and position >= live.table.exact_from:
                history = await live.history(view, position)
        consumer = ViewConsumer(view, sink)
        if position is None:
            consumer.begin_snapshot(reset)
            return consumer
        touched = touched_since(view, position, history)
        if touched is None:
            consumer.begin_snapshot(GAP)
        else:
            consumer.begin_resume(touched, position)
        return consumer

    # Upkeep.

    def statistics(self) -> dict[str, int]:
        """Return counts for /metrics."""
        tables = list(self._live())
        views = [view for live in tables for view in live.views.values()]
        return {
            "tables": len(tables),
            "rows": sum(live.table.rows for live in tables),
            "views": len(views),
            "consumers": sum(len(view.consumers) for view in views),
            "unkeyed": self.unkeyed + sum(live.table.unkeyed for live in tables),
        }

    def _live(self) -> list[LiveTable]:
        return [live for tables in self.channels.values() for live in tables]

    def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_S)
            try:
                await self._keep_once()
            except LogError as error:
                logger.warning("view_upkeep_failed code=%s: %s", error.code, error.message)
            except Exception:
                logger.exception("view_upkeep_failed")

    async def _keep_once(self) -> None:
        if not self.channels:
            return
        now = time.monotonic()
        first = await self._run(lambda: self._log.first_offset)
        for live in self._live():
            live.deliver(live.table.expire(first))
            if live.table.rule.steps:
                await self._check_key(live)
            for id_, view in list(live.views.items()):
                if view.consumers:
                    view.unused_since = now
                elif (
                    now - view.unused_since > self.limits.view_linger_s
                    and view.exact_since is not None
                ):
                    live.table.index.remove(view)
                    del live.views[id_]
            if live.views:
                live.used_at = now
            idle = now - live.used_at > self.limits.view_idle_s
            if idle or now - live.saved_at > self.limits.view_save_s:
                await self._save(live)
            if idle and not live.views:
                self._remove(live)

    async def _check_key(self, live: LiveTable) -> None:
        """End a table with a pointer as key when another process has compacted the log."""
        table = live.table
        try:
            await self._run(check_compaction, self._log, table.channel, table.rule)
        except ViewError as error:
            self._drop(live, error)

    async def _save(self, live: LiveTable) -> None:
        live.saved_at = time.monotonic()
        table = live.table
        if self._directory is None or table.position == live.saved_position or live.failure:
            return
        directory, live.saved_position = self._directory, table.position
        image = TableImage(self._log, table)

        def write() -> None:
            files.make_inside(directory)
            image.write(table_path(directory, table.channel, table.rule))

        try:
            await self._run(write)
        except OSError as error:
            logger.warning("table_file_not_written channel=%s: %s", table.channel, error)

    def _drop(self, live: LiveTable, error: ViewError) -> None:
        self._remove(live)
        live.end(error)

    def _remove(self, live: LiveTable) -> None:
        table = live.table
        self.unkeyed += table.unkeyed
        self._tables.pop((table.channel, table.rule), None)
        tables = self.channels.get(table.channel, [])
        if live in tables:
            tables.remove(live)
        if not tables:
            self.channels.pop(table.channel, None)
