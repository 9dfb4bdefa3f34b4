"""`/health`: checks with a sentence each, the segments of the log, versions; and verifying the log."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from starlette.routing import Route

from virta import __version__, files, native
from virta.clock import time_text
from virta.errors import RequestError
from virta.journal.jobs.job import DEAD
from virta.server.access.auth import requires_credentials
from virta.server.access.hosts import is_loopback
from virta.server.api.handler import ApiHandler, ErrorsAsRefusals
from virta.server.api.observe.schemas import (
    HealthCheck,
    HealthView,
    SegmentView,
    TierView,
    VerifyView,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from virta.log import Log
    from virta.server.api.observe.schemas import CheckState
    from virta.server.service import Service
    from virta.tier.background import ShippingStatus

SEGMENTS_MAX = 200  # listed, newest first
PROBLEMS_MAX = 100
NAMED_MAX = 3  # things that one sentence names
REASON_CHARS = 200
PACKAGES = ("uvicorn", "starlette", "websockets", "httpx", "msgspec")
# Used shares of the disk from which on there is a warning, and a fault.
DISK_WARNING, DISK_WRONG = 0.85, 0.97
APPEND_MS_WARNING = 100.0  # on average, in the last second with appends
CLOCK_S_MAX = 5.0
ORDER = {"wrong": 0, "warning": 1, "ok": 2}


class HealthApi(ApiHandler):
    """Handlers under `/health`."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._verifying = False

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.show, methods=["GET"]),
            Route("/health/verify", self.verify, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:  # noqa: ARG002
        service = self._service
        with ErrorsAsRefusals():
            segments = await asyncio.to_thread(segment_views, service.log)
        tier = None if service.shipper is None else tier_view(service.shipper.status(), segments)
        checks = [*_log_checks(service), *_access_checks(service), *_part_checks(service)]
        if tier is not None:
            checks.append(_tier_check(tier))
        checks.sort(key=lambda check: ORDER[check.state])
        view = HealthView(
            checks[0].state, checks, segments[:SEGMENTS_MAX], len(segments), _versions(), tier
        )
        return self._json(view)

    async def verify(self, request: Request) -> Response:  # noqa: ARG002
        if self._verifying:
            raise RequestError(
                409, "verify-running", "the log is being verified already: wait for it"
            )
        self._verifying = True
        began = time.monotonic()
        try:
            with ErrorsAsRefusals():
                report = await asyncio.to_thread(self._service.log.verify)
        finally:
            self._verifying = False
        problems = [
            f"{one.segment}, bytes {one.byte_from} to {one.byte_to}: {one.reason}"
            for one in report.problems[:PROBLEMS_MAX]
        ]
        seconds = time.monotonic() - began
        return self._json(
            VerifyView(
                not problems, report.segments, report.records, report.bytes, seconds, problems
            )
        )


def segment_views(log: Log) -> list[SegmentView]:
    """Return the segments, newest first; blocks."""
    return [
        SegmentView(
            one.base, one.next, one.bytes, time_text(one.created), time_text(one.last_time),
            one.sealed, one.compacted,
        )
        for one in reversed(log.segments())
    ]  # fmt: skip


def tier_view(status: ShippingStatus, segments: list[SegmentView]) -> TierView:
    """Return how far the store is behind the log."""
    pending = 0.0
    for one in segments:
        count = max(one.next_offset - one.base_offset, 1)
        left = one.next_offset - max(one.base_offset, status.next_offset)
        pending += one.bytes * max(left, 0) / count
    return TierView(status.url, status.next_offset, status.lag, math.ceil(pending), status.problem)


def _tier_check(tier: TierView) -> HealthCheck:
    if tier.problem is not None:
        return HealthCheck("tier", "wrong", f"The log is not shipped to {tier.url}: {tier.problem}")
    if tier.pending_records:
        text = f"{tier.pending_records:,} records are not in {tier.url} yet"
    else:
        text = f"Every record is in {tier.url}"
    return HealthCheck("tier", "ok", text)


def _log_checks(service: Service) -> list[HealthCheck]:
    found = []
    trouble = service.follower.trouble
    if trouble is not None:
        found.append(HealthCheck("log", "wrong", f"The log has a problem: {trouble}"))
    else:
        text = f"The log is written and read; the next offset is {service.log.next_offset:,}"
        found.append(HealthCheck("log", "ok", text))
    append_ms = service.figures.last.append_ms
    if append_ms is not None:
        state: CheckState = "warning" if append_ms > APPEND_MS_WARNING else "ok"
        text = f"An append takes {append_ms:.2f} ms, sync included ({service.config.durability})"
        found.append(HealthCheck("append", state, text))
    if service.config.durability in ("none", "interval"):
        text = f"Durability is {service.config.durability}: a power cut may lose accepted events"
        found.append(HealthCheck("durability", "warning", text))
    if (ahead := service.log.clock_ahead) > CLOCK_S_MAX:
        text = f"The newest record is {ahead:.0f} s ahead of this machine's clock: check the clock"
        found.append(HealthCheck("clock", "warning", text))
    disk = os.statvfs(service.config.data_dir)
    used = 1 - disk.f_bavail / max(disk.f_blocks, 1)
    fullness: CheckState = (
        "wrong" if used >= DISK_WRONG else "warning" if used >= DISK_WARNING else "ok"
    )
    free = disk.f_bavail * disk.f_frsize / 2**30
    found.append(
        HealthCheck("disk", fullness, f"The disk is {used:.0%} full, {free:,.1f} GiB are free")
    )
    return found


def _access_checks(service: Service) -> list[HealthCheck]:
    config = service.config
    found = []
    local = is_loopback(config.host)
    asks = requires_credentials(config)
    if not asks and not local:
        text = (
            f"Everyone who reaches {config.host} may do anything: give tokens instead of --insecure"
        )
        found.append(HealthCheck("tokens", "wrong", text))
    elif not asks:
        text = "No tokens: programs on this machine may do anything, other machines reach nothing"
        found.append(HealthCheck("tokens", "ok", text))
    else:
        found.append(HealthCheck("tokens", "ok", "Every request needs a token, a JWT or a session"))
    if config.tls_cert is None and not local:
        text = (
            "No TLS: tokens and events cross the network in clear; give --tls-cert, or use a proxy"
        )
        found.append(HealthCheck("tls", "warning", text))
    if exposed := files.open_to_others(config.data_dir):
        found.append(HealthCheck("data directory", "warning", exposed))
    return found


def _part_checks(service: Service) -> list[HealthCheck]:
    found = []
    journal = service.journal
    if journal is not None and journal.node.failure is not None:
        text = "The journal accepts nothing persistent since a sync failed: restart the server"
        found.append(HealthCheck("journal", "wrong", text))
    if text := _dead_jobs(service):
        found.append(HealthCheck("jobs", "warning", text))
    pipelines = service.pipelines
    failed = [(one.name, one.overview()["reason"]) for one in pipelines.invalid.values()]
    for name, one in pipelines.supervised.items():
        facts = one.facts()
        if facts["state"] == "failed":
            failed.append((name, facts["last_error"] or ""))
    if failed:
        text = f"{_count(failed, 'pipeline')} failed or cannot be used: {_list_names(failed)}"
        found.append(HealthCheck("pipelines", "wrong", text))
    failing = [
        (hook.description["sink"], hook.last_error)
        for hook in service.webhooks.hooks.values()
        if hook.is_failing
    ]
    if failing:
        text = f"The last delivery of {_count(failing, 'webhook')} failed: {_list_names(failing)}"
        found.append(HealthCheck("webhooks", "warning", text))
    plain = [name for name in native.MODULES[:4] if native.load(name) is None]
    if plain:
        text = f"{', '.join(plain)} run as plain Python, which is slower: see virta doctor"
        found.append(HealthCheck("native", "warning", text))
    return found


def _dead_jobs(service: Service) -> str:
    """Return how many jobs are dead, in which domains, and when one died last; empty if none is."""
    journal = service.journal
    if journal is None:
        return ""
    domains = journal.node.engine.jobs.domains
    dead = {name.decode(errors="replace"): place.counts[DEAD] for name, place in domains.items()}
    most = sorted(((n, name) for name, n in dead.items() if n), reverse=True)
    if not most:
        return ""
    total = sum(number for number, _ in most)
    where = ", ".join(f"{number:,} in {name}" for number, name in most[:NAMED_MAX])
    more = ", …" if len(most) > NAMED_MAX else ""
    last = max(place.last_death for place in domains.values() if place.counts[DEAD])
    since = _ago(time.time() - last / 1e6)
    return f"{total:,} dead job{'s' if total > 1 else ''}: {where}{more}; the last died {since}"


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def _count(all_: list[tuple[str, str]], noun: str) -> str:
    return f"{len(all_)} {noun}{'s' if len(all_) > 1 else ''}"


def _list_names(all_: list[tuple[str, str]]) -> str:
    """Return the names, with the reason if there is one name."""
    if len(all_) == 1:
        name, reason = all_[0]
        return f"{name}, {reason[:REASON_CHARS]}" if reason else name
    return ", ".join(name for name, _ in all_[:NAMED_MAX]) + (", …" if all_[NAMED_MAX:] else "")


def _versions() -> dict[str, str]:
    found = {"virta": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
