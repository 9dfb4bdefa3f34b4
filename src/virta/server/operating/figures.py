"""
Figures over time: one sample a second, and three histories of 300 points.

A sample is the difference of counters that the server keeps anyway, so sampling costs nothing while events flow.
Histories have a point each second, each 12 s and each 288 s: five minutes, one hour and one day. They are in
memory only and start anew with the server.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from virta.hub.delivery import META, is_reserved
from virta.hub.publisher import DELAY_BOUNDS
from virta.journal.jobs.job import STATE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.server.service import Service

POINTS_MAX = 300
STEPS = (1, 12, 288)  # seconds between the points of a history
BUSIEST_MAX = 20  # channels in one sample
# Samples that the growth of the log is measured over, at least; at most POINTS_MAX.
GROWTH_POINTS_MIN = 10
MS = 1000.0


class ChannelRate(Struct, rename="camel"):
    """Events a second of one channel."""

    name: str
    events_per_second: float


class FigureSample(Struct, rename="camel"):
    """What the server did in the last second; times in milliseconds, null without publications."""

    time: float
    events_per_second: float
    bytes_per_second: float
    deliveries_per_second: float
    p50_ms: float | None
    p99_ms: float | None
    append_ms: float | None
    subscribers: int
    filters: int
    log_bytes: int
    next_offset: int
    disk_bytes: int
    disk_free_bytes: int
    full_in_seconds: float | None
    channels: list[ChannelRate]
    jobs: dict[str, int] | None
    oldest_ready_seconds: float | None
    webhooks: int
    webhooks_failing: int
    pipelines: int
    pipelines_failed: int


class FigureHistory(Struct, rename="camel"):
    """Points of one history, oldest first; `times` are seconds since 1970."""

    step: int
    times: list[float]
    events_per_second: list[float]
    deliveries_per_second: list[float]
    p50_ms: list[float | None]
    p99_ms: list[float | None]


class Counters(NamedTuple):
    """Counters at one time, of which two make a point."""

    at: float  # by the monotonic clock
    published: int
    delivered: int
    log_bytes: int
    appends: int
    append_seconds: float
    delays: list[int]


class Point(NamedTuple):
    time: float
    events: float
    deliveries: float
    p50: float | None
    p99: float | None


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Return the upper end, in seconds, of the class that the given share of publications does not exceed."""
    total = sum(counts)
    if not total:
        return None
    wanted, seen = total * share, 0
    for index, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return DELAY_BOUNDS[min(index, len(DELAY_BOUNDS) - 1)]
    return DELAY_BOUNDS[-1]


class FigureRing:
    """The last points, `step` seconds apart."""

    def __init__(self, step: int, first: Counters) -> None:
        self.step = step
        self.points: deque[Point] = deque(maxlen=POINTS_MAX)
        self._before = first
        self._ticks = 0

    def tick(self, now: Counters) -> None:
        """Add a point if one is due."""
        self._ticks += 1
        if self._ticks < self.step:
            return
        self._ticks = 0
        self.points.append(point_between(self._before, now))
        self._before = now

    def view(self) -> FigureHistory:
        points = list(self.points)
        return FigureHistory(
            self.step,
            [p.time for p in points],
            [p.events for p in points],
            [p.deliveries for p in points],
            [p.p50 for p in points],
            [p.p99 for p in points],
        )


def point_between(before: Counters, now: Counters) -> Point:
    seconds = max(now.at - before.at, 0.001)
    delays = [b - a for a, b in zip(before.delays, now.delays, strict=True)]
    p50, p99 = percentile(delays, 0.5), percentile(delays, 0.99)
    return Point(
        time.time(),
        (now.published - before.published) / seconds,
        (now.delivered - before.delivered) / seconds,
        None if p50 is None else p50 * MS,
        None if p99 is None else p99 * MS,
    )


class Figures:
    """Samples a service once a second while it runs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._sizes: deque[tuple[float, int]] = deque(maxlen=POINTS_MAX)  # of the log
        self._before = self._count()
        self._by_channel = dict(service.publisher.figures.by_channel)
        self.rates: dict[str, float] = {}  # events a second of each channel that had any
        self.histories = {step: FigureRing(step, self._before) for step in STEPS}
        self.last = self._sample()
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """End sampling and everyone who waits for a sample."""
        if self._task is not None:
            self._task.cancel()
        if not self._next.done():
            self._next.set_result(None)

    async def next_sample(self) -> FigureSample:
        """Wait for the next sample; returns the last one again when sampling has ended."""
        await asyncio.shield(self._next)
        return self.last

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + 1.0, loop.time())
            await asyncio.sleep(due - loop.time())
            self.last = self._sample()
            waiting, self._next = self._next, loop.create_future()
            waiting.set_result(None)

    def _count(self) -> Counters:
        service = self._service
        publisher = service.publisher
        appends, seconds = publisher.append_figures
        figures = publisher.figures
        return Counters(
            time.monotonic(), sum(figures.by_channel.values()), service.hub.delivered,
            service.log.bytes, appends, seconds, list(figures.delays),
        )  # fmt: skip

    def _sample(self) -> FigureSample:
        service = self._service
        before, now = self._before, self._count()
        self._before = now
        for history in self.histories.values():
            history.tick(now)
        point = point_between(before, now)
        seconds = max(now.at - before.at, 0.001)
        appends = now.appends - before.appends
        disk = os.statvfs(service.config.data_dir)
        free = disk.f_bavail * disk.f_frsize
        jobs, oldest = self._jobs()
        pipelines = [one.facts()["state"] for one in service.pipelines.supervised.values()]
        hooks = service.webhooks.hooks.values()
        return FigureSample(
            time=point.time,
            events_per_second=point.events,
            bytes_per_second=max(0.0, (now.log_bytes - before.log_bytes) / seconds),
            deliveries_per_second=point.deliveries,
            p50_ms=point.p50,
            p99_ms=point.p99,
            append_ms=(now.append_seconds - before.append_seconds) / appends * MS if appends else None,
            subscribers=service.hub.subscription_count + service.hub.stream_consumer_count,
            filters=len(service.hub.groups()),
            log_bytes=now.log_bytes,
            next_offset=service.log.next_offset,
            disk_bytes=disk.f_blocks * disk.f_frsize,
            disk_free_bytes=free,
            full_in_seconds=self._full_in(now.log_bytes, free),
            channels=self._busiest(seconds),
            jobs=jobs,
            oldest_ready_seconds=oldest,
            webhooks=len(hooks),
            webhooks_failing=sum(hook.is_failing for hook in hooks),
            pipelines=len(pipelines) + len(service.pipelines.invalid),
            pipelines_failed=pipelines.count("failed") + len(service.pipelines.invalid),
        )  # fmt: skip

    def _busiest(self, seconds: float) -> list[ChannelRate]:
        counts, before = self._service.publisher.figures.by_channel, self._by_channel
        grown = [
            (total - before.get(name, 0), name)
            for name, total in counts.items()
            if total != before.get(name, 0) and name != META and not is_reserved(name)
        ]
        self._by_channel = dict(counts)
        self.rates = {name: count / seconds for count, name in grown}
        best = heapq.nlargest(BUSIEST_MAX, grown)
        return [ChannelRate(name, count / seconds) for count, name in best]

    def _full_in(self, log_bytes: int, free: int) -> float | None:
        """Return when the disk is full if the log grows as it has; None if it does not grow."""
        sizes = self._sizes
        sizes.append((time.monotonic(), log_bytes))
        (first_at, first), (last_at, last) = sizes[0], sizes[-1]
        if len(sizes) < GROWTH_POINTS_MIN or last <= first:
            return None
        return free / ((last - first) / (last_at - first_at))

    def _jobs(self) -> tuple[dict[str, int] | None, float | None]:
        server = self._service.journal
        if server is None:
            return None, None
        engine = server.node.engine
        now = engine.clock()
        engine.jobs.tick(now)
        counts = dict(zip(STATE_NAMES, engine.jobs.counts(), strict=False))
        return counts, engine.jobs.oldest_ready(now) / 1e6
