"""
All live views of a process, in its event loop.

    hub ──► append, advance ──► tables: one step ──► views ──► consumers that keep up
    open ──► table (built in a thread) ──► pass for new filters (in a thread, in pieces) ──► attach in one step

A table stands from its first view until `view_idle_s` after its last, a filter until `view_linger_s` after its last
consumer: a consumer that comes back soon needs no pass. Neither is dropped while a consumer opens it. Everything that blocks
runs in `executor`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from virta import files
from virta.errors import LogError, ViewError
from virta.event.row_changes import read_event_change
from virta.hub.delivery import META, is_bookkeeping
from virta.views.changes import read_changes, read_record
from virta.views.consumer import GAP, UNKNOWN_POSITION, ViewConsumer
from virta.views.limits import DEFAULT_LIMITS
from virta.views.live_table import LiveTable
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
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from virta.event.row_changes import KeyRule
    from virta.hub.hub import Hub
    from virta.log import Log, Record
    from virta.views.consumer import FrameSink
    from virta.views.limits import ViewLimits
    from virta.views.tables.table import RowTable

# Upkeep: expired rows are noticed, and unused views and tables dropped, so often.
UPKEEP_S: Final = 1.0

logger = logging.getLogger("virta.views")


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
        # How many are opening a table and have no view of it yet.
        self._openers: Counter[tuple[str, KeyRule]] = Counter()
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

    def append_batch(self, channel: str, offset: int, values: Sequence[bytes]) -> None:
        for live in self.channels[channel]:
            known = max(0, live.table.position - offset)  # the table has them
            live.changes += read_changes(values[known:], offset + known, live.table.rule)

    def append_record(self, record: Record) -> None:
        for live in self.channels[str(record.topic)]:
            if record.offset >= live.table.position:
                live.changes.append((record.offset, read_record(record, live.table.rule)))

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
            with self._opening(channel, rule):
                live = await self.table(channel, rule)
                check_keyed(channel, rule, live.table.keyed, live.table.unkeyed)
                view = live.views.get(filter_.id)
                if view is None:
                    self._check_filters()
                    view = live.views[filter_.id] = View(live.table, filter_)
                    live.table.index.add(view)
            with _keeping(view):
                await live.complete(view)
            if live.failure is None and live.views.get(filter_.id) is view:
                return live, view

    @contextmanager
    def _opening(self, channel: str, rule: KeyRule) -> Iterator[None]:
        """Keep a table, which may not stand yet, until a view of it stands."""
        self._openers[channel, rule] += 1
        try:
            yield
        finally:
            self._openers[channel, rule] -= 1
            if not self._openers[channel, rule]:
                del self._openers[channel, rule]

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

        Raises:
            ViewError: the table has ended meanwhile.
        """
        if position is not None and position > self._log.next_offset:
            position, reset = None, UNKNOWN_POSITION
        touched = None
        if position is not None:
            with _keeping(view):
                if position > live.table.position:
                    await self._hub.wait_past(position - 1)
                touched = await live.touched(view, position)
            reset = GAP
            if live.failure is not None:
                raise live.failure
        # From here to the end nothing is awaited: a change between would be missed.
        consumer = ViewConsumer(view, sink)
        if position is None or touched is None:
            consumer.begin_snapshot(reset)
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
                await self.keep_once()
            except LogError as error:
                logger.warning("view_upkeep_failed code=%s: %s", error.code, error.message)
            except Exception:
                logger.exception("view_upkeep_failed")

    async def keep_once(self) -> None:
        if not self.channels:
            return
        now = time.monotonic()
        first = await self._run(lambda: self._log.first_offset)
        for live in self._live():
            live.deliver(live.table.expire(first))
            if live.table.rule.steps:
                await self._check_key(live)
            for id_, view in list(live.views.items()):
                if view.consumers or view.openers:
                    view.unused_since = now
                elif (
                    now - view.unused_since > self.limits.view_linger_s
                    and view.exact_since is not None
                ):
                    live.table.index.remove(view)
                    del live.views[id_]
            if live.views:
                live.used_at = now
            if self._is_idle(live) or now - live.saved_at > self.limits.view_save_s:
                await self._save(live)
            # Saving takes time: the table may have ended meanwhile, and another may stand in its place.
            if live.failure is None and self._is_idle(live):
                self._remove(live)

    def _is_idle(self, live: LiveTable) -> bool:
        """Return whether a table can be dropped: unused for `view_idle_s`, and no consumer is opening it."""
        opened = live.views or self._openers[live.table.channel, live.table.rule]
        return not opened and time.monotonic() - live.used_at > self.limits.view_idle_s

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


@contextmanager
def _keeping(view: View) -> Iterator[None]:
    """Keep a view that has no consumer yet."""
    view.openers += 1
    try:
        yield
    finally:
        view.openers -= 1
        view.unused_since = time.monotonic()
