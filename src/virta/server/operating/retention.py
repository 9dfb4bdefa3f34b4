"""
Retention while the server runs: old segments by age and size, and old events of single channels.

Whole sealed segments are removed, oldest first. Events of channels with a rule of their own are removed from sealed
segments by rewriting these; offsets never change, and readers see a gap. The active segment always stays, so what is
removed is a little older than asked for. Nothing that a named consumer or a webhook has not read is removed, unless
`retention_unread` allows it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from virta.clock import now_us
from virta.errors import LogError
from virta.hub.delivery import is_bookkeeping
from virta.log.consumers.consumer import advance_consumers
from virta.log.upkeep.compaction import expire
from virta.quantities import parse_duration, parse_size
from virta.server.operating.rules import parse_retention_rule

if TYPE_CHECKING:
    from virta.server.service import Service

# Channels whose rule is remembered.
MATCHES_MAX = 10_000


class LogRetention:
    """Removes what is too old or too much, once per interval."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self._service = service
        age, size = config.retention_age, config.retention_bytes
        self._age = None if age is None else parse_duration(age)
        self._bytes = None if size is None else parse_size(size)
        self._words = config.retention_age
        self._rules = [parse_retention_rule(text) for text in config.retention_channel or ()]
        self._unread = bool(config.retention_unread)
        self._interval_s = config.retention_interval_ms / 1000
        self._ages: dict[bytes, int | None] = {}
        self._due: dict[int, int | None] = {}  # by segment: when more of it expires
        self._task: asyncio.Task[None] | None = None
        # Counters for /metrics.
        self.removed_bytes = 0
        self.removed_records = 0

    @property
    def active(self) -> bool:
        """Whether anything is ever removed."""
        return self._age is not None or self._bytes is not None or bool(self._rules)

    def kept(self, channel: str) -> str:
        """Return how long events of a channel are kept, in words."""
        for rule in self._rules:
            if rule.matches(channel):
                return rule.text
        if self._words is not None:
            return str(self._words)
        return "for ever" if self._bytes is None else f"in {self._service.config.retention_bytes}"

    def start(self) -> None:
        if self.active:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        logger = self._service.logger
        while True:
            await asyncio.sleep(self._interval_s)
            cursors = [hook.cursor for hook in self._service.webhooks.hooks.values()]
            try:
                removed = await asyncio.shield(asyncio.to_thread(self._retain_once, cursors))
            except LogError as error:
                logger.warning("retention_failed", code=error.code, reason=error.message)
                continue
            if removed != (0, 0):
                records, size = removed
                first = self._service.log.first_offset
                logger.info("retention", records=records, bytes=size, first_offset=first)

    def _retain_once(self, cursors: list[int]) -> tuple[int, int]:
        """Remove once; return records and bytes. Blocks."""
        log = self._service.log
        records = size = 0
        unread = min(cursors) if cursors and not self._unread else None
        pin = None if unread is None else log.pin(unread)
        try:
            if self._age is not None or self._bytes is not None:
                report = log.retain(
                    max_age=self._age, max_bytes=self._bytes, keep_unread=not self._unread
                )
                records, size = report.records, report.bytes
            if self._rules:
                before = log.next_offset
                if not self._unread:
                    before = min([before, *advance_consumers(log, dry_run=True)])
                for one in expire(log, self._age_of, before=before, skip=self._waits):
                    self._due[one.base] = one.next_due
                    records += one.records
                    size += one.bytes
                self._forget_removed(log.first_offset)
        finally:
            if pin is not None:
                pin.close()
        self.removed_records += records
        self.removed_bytes += size
        return records, size

    def _age_of(self, topic: bytes) -> int | None:
        if topic not in self._ages:
            if len(self._ages) >= MATCHES_MAX:
                self._ages.clear()
            name = topic.decode("utf-8", "replace")
            found = next((rule.age_us for rule in self._rules if rule.matches(name)), None)
            self._ages[topic] = None if is_bookkeeping(topic) else found
        return self._ages[topic]

    def _waits(self, base: int) -> bool:
        """Return whether nothing of a segment can have expired since it was searched."""
        if base not in self._due:
            return False
        due = self._due[base]
        return due is None or due > now_us()

    def _forget_removed(self, first: int) -> None:
        for base in [base for base in self._due if base < first]:
            # The first segment may begin below the first offset only if it was removed.
            del self._due[base]
