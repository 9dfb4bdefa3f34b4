"""
The service: everything behind the connections, started and stopped in order.

    log ── follower ── publisher ── hub ── subscriptions
            └────── idempotency (rebuilt from the log's tail) ── replayer

`start` returns after the log's tail is read: only then does the server listen, so that a repeat of an
event accepted before a crash is recognised by the first request.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

import virta
from virta import files
from virta.access.credentials import Credentials, read_token_file
from virta.access.journal import JobRights
from virta.access.principal import ANYONE
from virta.access.rates import RateLimiter
from virta.access.tokens import TokenStore
from virta.errors import AccessError, ConfigError, RequestError, ViewError
from virta.event.row_changes import KeyRule
from virta.filters import preload
from virta.hub.delivery import identity, is_bookkeeping
from virta.hub.hub import Hub
from virta.hub.idempotency import Idempotency, key_of
from virta.hub.log_follower import LogFollower
from virta.hub.publisher import Publisher
from virta.hub.registry import Registry
from virta.hub.resume.positions import tag_of
from virta.hub.resume.replay import Replayer
from virta.hub.subscription import SlowPolicy
from virta.journal.serving.tcp import JournalServer
from virta.server.access.audit import Audit
from virta.server.access.auth import (
    THORIUM_CORS,
    Authenticator,
    RequestRates,
    requires_credentials,
)
from virta.server.access.hosts import Hosts, host_name, is_loopback
from virta.server.access.origins import Origins
from virta.server.access.scan_budget import REGISTERED, FilterPlace, ScanBudget, ScanLease
from virta.server.capture_supervisor import Captures
from virta.server.config_loader import LOG_NAME
from virta.server.http.deadlines import TimerWheel
from virta.server.http.limits import UnfinishedBodies
from virta.server.http.responses import Responder
from virta.server.operating.figures import Figures
from virta.server.operating.retention import LogRetention
from virta.server.operating.tracing import make_tracing
from virta.server.pipeline_supervisor import Pipelines, RestartLimits
from virta.server.webhooks.subscriptions import Webhooks
from virta.tier.background import BackgroundShipper
from virta.views.limits import ViewLimits
from virta.views.live_views import LiveViews

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virta.log.log import Visibility
    from virta.server.config_loader import Config
    from virta.server.consumers.sse import SseConsumer

# Threads that read history; more would compete for the disk.
READERS_MAX = 4
# What was appended last is shipped before the server ends, if the store answers within this time.
SHIP_S_MIN = 2.0
# Threads that build tables and match rows, so that replays do not wait for them.
VIEW_THREADS = 2
LOCK_NAME = "serve.lock"
# How often token and key files are checked for changes.
ACCESS_CHECK_S = 1.0
REGISTRY_NAME = "registry"
JOURNAL_NAME = "journal"
VIEWS_NAME = "views"
VIEW_LIMITS = [field.name for field in fields(ViewLimits)]
PIPELINES_NAME = "pipelines"


class Service:
    """What the protocol and the application share."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.logger: Any = structlog.get_logger("virta.server")
        self.audit = Audit(self.logger)
        hosts = Hosts(config.host, config.allow_host, _own_hosts(config))
        origins = Origins(config.allow_origin, host=config.host)
        cors = THORIUM_CORS if config.thorium_compatible else b""
        self.auth = Authenticator(
            hosts,
            origins,
            self.audit,
            read_credentials(config) if requires_credentials(config) else None,
            cors=cors,
            token_in_url=config.token_in_url,
            rates=RequestRates(
                _rate(config.max_requests_per_principal), _rate(config.max_requests_per_address)
            ),
        )
        # Called when tokens or keys have changed.
        self.on_access_changed: list[Callable[[], None]] = []
        self._access_watch: asyncio.Task[None] | None = None
        self.responder = Responder(
            config.source, config.durability, cors, thorium=config.thorium_compatible
        )
        self.idle_s = config.tcp_idle_timeout_ms / 1000
        self.body_s = config.body_timeout_ms / 1000
        self.ping_s = config.ping_interval_ms / 1000
        # Read for every request: plain attributes are faster than settings.
        self.percent_decode = bool(config.percent_decode_headers)
        self.body_bytes_max: int = config.max_body_size_bytes
        self.line_bytes_max: int = config.max_request_line_bytes
        self.head_bytes_max: int = config.max_header_bytes
        self.unfinished = UnfinishedBodies(config.max_unfinished_body_bytes)
        self.slow_policy = SlowPolicy(
            config.slow_consumer,
            config.slow_consumer_bytes_max,
            config.slow_consumer_ms_max / 1000,
        )
        self.draining = False
        self._drain_until = 0.0
        self.ready = False
        self.started_at = time.time()
        # Counters for /metrics; labels stay bounded: statuses, never names.
        self.requests = 0
        self.connections_opened = 0
        self.translations = 0
        self.translation_seconds = 0.0
        self.view_keys = _view_keys(config.view_keys or ())
        self.journal: JournalServer | None = None
        self.shipper: BackgroundShipper | None = None
        self.tracing = make_tracing(config.otel_endpoint, config.source)
        self.filter_streams: dict[str, set[SseConsumer]] = {}
        self.scans = ScanBudget(config.max_scanned_filters_per_principal)
        self.filter_leases: dict[str, ScanLease] = {}  # of registered filters, by id

    async def start(self) -> None:
        """Open the log, read its tail, begin to follow it."""
        config = self.config
        loop = asyncio.get_running_loop()
        self._lock = _lock_directory(config.data_dir, int(config.data_mode, 8))
        if exposed := files.open_to_others(config.data_dir):
            self.logger.warning("data_directory_open", detail=exposed)
        visibility: Visibility | None = "committed" if config.durability == "none" else None
        self.log = await asyncio.to_thread(
            virta.open,
            config.log_path,
            durability=config.durability,
            visibility=visibility,
            compression=config.log_compression,
        )
        if config.tier_url:
            interval_s = config.tier_interval_ms / 1000
            self.shipper = BackgroundShipper(self.log, config.tier_url, interval_s=interval_s)
            self.shipper.start()
        self.executor = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="virta-reader")
        self.view_threads = ThreadPoolExecutor(VIEW_THREADS, thread_name_prefix="virta-views")
        self.idempotency = Idempotency(
            keys_max=config.max_idempotency_keys,
            horizon_s=config.idempotency_expiration_ms / 1000,
        )
        self.registry = await asyncio.to_thread(Registry, Path(config.data_dir) / REGISTRY_NAME)
        await asyncio.to_thread(self._count_stored_filters)
        await asyncio.to_thread(preload)
        self.hub = Hub(
            source_name=config.source, thorium=config.thorium_compatible, tag=tag_of(self.log.id)
        )
        self.follower = LogFollower(self.log, loop, self._arrived, durability=config.durability)
        self.hub.position = self.follower.position
        await asyncio.to_thread(self._read_tail, self.follower.position)
        self.publisher = Publisher(
            self.hub,
            self.follower,
            self.idempotency,
            loop,
            outstanding_max=config.max_outstanding_events_per_router_thread,
        )
        self.replayer = Replayer(self.hub, self.log, self.idempotency, self.executor)
        self.views = LiveViews(
            self.log,
            self.hub,
            self.view_threads,
            directory=Path(config.data_dir) / VIEWS_NAME,
            limits=ViewLimits(**{name: getattr(config, name) for name in VIEW_LIMITS}),
        )
        self.hub.rows = self.views
        self.timers = TimerWheel(loop)
        await self._start_journal()
        self.webhooks = Webhooks(self)
        self.timers.start()
        self.follower.start()
        self.views.start()
        self.webhooks.start()
        self.pipelines = self._listed_pipelines()
        self.pipelines.start()
        self.figures = Figures(self)
        self.figures.start()
        self.captures = Captures(
            config.cdc or (), Path(config.data_dir), self._restart_limits(), self.logger
        )
        self.captures.start()
        self.retention = LogRetention(self)
        self.retention.start()
        if self.auth.credentials is not None:
            self._access_watch = asyncio.create_task(self._watch_access(self.auth.credentials))
        self.ready = True

    def drain(self) -> None:
        """Begin to drain: accept nothing new, and give running requests until the drain's deadline."""
        self.draining = True
        self._drain_until = time.monotonic() + self.config.drain_timeout_ms / 1000
        self.figures.stop()
        self.pipelines.stop_soon()
        self.captures.stop_soon()
        self.webhooks.stop_soon()

    async def stop(self) -> None:
        """Finish what was accepted, then close the log."""
        self.ready = False
        self.figures.stop()
        await self.retention.stop()
        if self._access_watch is not None:
            self._access_watch.cancel()
        self.timers.stop()
        await asyncio.to_thread(self.pipelines.stop)
        await asyncio.to_thread(self.captures.stop)
        await self.webhooks.stop(max(0.0, self._drain_until - time.monotonic()))
        if self.journal is not None:
            await self.journal.stop()
        await self.publisher.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        await asyncio.to_thread(self.follower.stop)
        await self.views.stop()
        await asyncio.to_thread(self.view_threads.shutdown)
        await asyncio.to_thread(self.executor.shutdown)
        await asyncio.to_thread(self.registry.close)
        if self.shipper is not None:
            left = max(SHIP_S_MIN, self._drain_until - time.monotonic())
            await asyncio.to_thread(self.shipper.stop, left)
        await asyncio.to_thread(self.log.close)
        os.close(self._lock)

    @property
    def now(self) -> float:
        """The time in seconds since 1970, by which credentials expire."""
        return time.time()

    async def _watch_access(self, credentials: Credentials) -> None:
        """Notice tokens that were created or revoked, and new keys."""
        failed = ""
        while True:
            await asyncio.sleep(ACCESS_CHECK_S)
            try:
                changed = credentials.refresh()
                failed = ""
            except AccessError as error:
                if error.message != failed:
                    self.logger.warning("access_unreadable", code=error.code, reason=error.message)
                failed, changed = error.message, False
            if changed:
                self.audit.acted("credentials_changed", "server", tokens=len(credentials.store))
                for notify in self.on_access_changed:
                    notify()

    async def _start_journal(self) -> None:
        """Serve the journal, with the same credentials and certificate; without any, on loopback only."""
        config = self.config
        if config.journal_port is None:
            return
        host, authenticate, tls = config.host, None, None
        if self.auth.credentials is not None:
            authenticate = self._journal_rights
        if config.tls_cert is not None and not is_loopback(host):
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(config.tls_cert, config.tls_key)
        directory = Path(config.data_dir) / JOURNAL_NAME
        files.make_inside(directory)
        self.journal = JournalServer(
            directory, host=host, port=config.journal_port, authenticate=authenticate, tls=tls
        )
        try:
            await self.journal.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{config.journal_port} for the journal: {error.strerror}; "
                "choose another --journal-port, or none",
                setting="journal_port",
            ) from error

    def _journal_rights(self, token: str) -> JobRights:
        """Return the rights of a token to the journal; raise AccessError if it is not accepted."""
        credentials = self.auth.credentials
        assert credentials is not None
        try:
            principal = credentials.find(token)
        except AccessError as error:
            self.audit.refused(error.code, port="journal")
            raise
        return JobRights(principal.rights, lambda: credentials.is_active(principal))

    def _restart_limits(self) -> RestartLimits:
        config = self.config
        return RestartLimits(
            failures_max=config.pipeline_failures_max,
            window_ms=config.pipeline_failure_window_ms,
            backoff_ms=config.pipeline_backoff_ms,
            stop_ms=config.pipeline_stop_ms,
        )

    def _listed_pipelines(self) -> Pipelines:
        logs = Path(self.config.data_dir) / PIPELINES_NAME
        return Pipelines(self.config.pipelines or (), logs, self._restart_limits(), self.logger)

    def overloaded(self, refused: int) -> RequestError:
        """Return the 429 for a publication of `refused` events."""
        routers = self.config.router_threads
        limit = self.config.max_outstanding_events_per_router_thread
        return RequestError(
            429,
            "exceeded-outstanding-event-limit",
            count=(self.publisher.outstanding + refused) * routers,
            limit=limit * routers,
        )

    def filter_removed(self, id_: str) -> None:
        """Release a registered filter that was removed, and end its streams."""
        lease = self.filter_leases.pop(id_, None)
        if lease is not None:
            lease.release()
        for consumer in list(self.filter_streams.get(id_, ())):
            consumer.finish("filter-removed")

    def _count_stored_filters(self) -> None:
        for stored in self.registry.filters():
            place = FilterPlace(REGISTERED, stored.channel)
            lease = self.scans.charge(stored.owner or ANYONE.id, place, [stored.filter])
            self.filter_leases[stored.id] = lease

    def _arrived(self, records: list[virta.log.Record]) -> None:
        self.publisher.arrived(records)

    def _read_tail(self, end: int) -> None:
        """Read the events whose repeats are still to be recognised after a restart."""
        horizon = timedelta(milliseconds=self.config.idempotency_expiration_ms)
        if end == self.log.first_offset or not horizon:
            return
        since = datetime.now(UTC) - horizon
        age = time.monotonic() - time.time()
        with self.log.read(start=since, end=end, on_gap="skip") as found_at:
            # A record has at most one key: more records than keys are not worth reading.
            first = max(found_at.position, end - max(1, self.config.max_idempotency_keys))
        reader = self.log.read(start=first, end=end, on_gap="skip", on_corruption="skip")
        try:
            for records in reader.batches():
                keys: list[str] = []
                offsets: list[int] = []
                for record in records:
                    if is_bookkeeping(record.topic):
                        continue
                    key = key_of(*identity(record))
                    if self.idempotency.claim(key):
                        keys.append(key)
                        offsets.append(record.offset)
                written = records[-1].timestamp / 1_000_000 + age if records else 0.0
                if offsets and offsets[-1] - offsets[0] == len(offsets) - 1:
                    self.idempotency.commit_run(keys, offsets[0], written)
                else:
                    self.idempotency.commit(list(zip(keys, offsets, strict=True)), written)
        finally:
            reader.close()


def read_credentials(config: Config) -> Credentials:
    """
    Return the credentials that a server accepts.

    Raises:
        ConfigError: a file cannot be used.
    """
    store = TokenStore(config.data_dir)
    digests = read_token_file(config.token_file) if config.token_file else None
    verifier = None
    try:
        store.refresh()
        if config.jwt_keys:
            from virta.access.jwt import JwtVerifier  # noqa: PLC0415 - loads cryptography

            verifier = JwtVerifier(
                config.jwt_keys,
                issuer=config.jwt_issuer,
                audience=config.jwt_audience,
                claim=config.jwt_claim,
            )
    except AccessError as error:
        raise ConfigError(error.message) from error
    return Credentials(store, digests=digests, jwt=verifier)


def _rate(limit: int | None) -> RateLimiter | None:
    return None if limit is None else RateLimiter(limit)


def _view_keys(items: Sequence[str]) -> dict[str, str]:
    """Return the pointer to the key of each channel that has one."""
    keys = {}
    for item in items:
        channel, _, pointer = item.partition("=")
        try:
            keys[channel] = KeyRule(pointer).text
        except ViewError:
            pointer = ""
        if not channel or not pointer:
            raise ConfigError(
                f"view_keys has {item!r}: write CHANNEL=POINTER, as in orders=/data/id",
                setting="view_keys",
            )
    return keys


def _own_hosts(config: Config) -> list[str]:
    """Return names of the server from other settings: the host of the webhook callback."""
    name = host_name(urlsplit(config.webhook_callback_url or "").netloc)
    return [name] if name else []


def _lock_directory(data_dir: str, mode: int) -> int:
    """Lock the data directory: two servers would not recognise each other's repeats."""
    try:
        files.make_directory(data_dir, mode)
        for name in (LOG_NAME, REGISTRY_NAME):
            files.make_inside(os.path.join(data_dir, name))
        return files.lock_file(os.path.join(data_dir, LOCK_NAME))
    except BlockingIOError:
        raise ConfigError(
            f"another server uses data directory {data_dir}: stop it, or choose another --data-dir",
            setting="data_dir",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot use data directory {data_dir}: {error.strerror}", setting="data_dir"
        ) from error
