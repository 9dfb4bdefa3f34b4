"""
One active subscription: it follows the log at its own pace and delivers to its sink.

Events are sent in the order of the log, one at a time, at least once: the offset a subscription has
reached is stored, and a restart repeats at most what was delivered since. An event that is not accepted is
retried with growing pauses; after the last attempt, or when the sink refuses it permanently, it goes
to the dead letters (`$virta/dead-letters`) and the next one follows. A sink that answers 410 gets
nothing more, and one that has not consented yet (`virta.server.webhooks.consent`) gets nothing before it does. Deliveries are signed
(`virta.server.webhooks.signing`), and end when the token of the subscription's owner is revoked or expires.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from virta.backoff import backoff
from virta.clock import now_us, time_text
from virta.errors import LogError
from virta.filters import Filter, parse
from virta.hub.delivery import DEAD_LETTERS, Delivery
from virta.hub.event_matcher import restrict
from virta.hub.resume.history import HistoryReader, select_events
from virta.server.api.description.schemas import SubscriptionStatus
from virta.server.webhooks.client import SinkAnswer, Verdict, WebhookClient, without_user
from virta.server.webhooks.consent import Consent, to_record
from virta.server.webhooks.owner import Owner
from virta.server.webhooks.signing import read_secret, signature_headers

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from virta.server.access.scan_budget import ScanLease
    from virta.server.service import Service
    from virta.server.webhooks.outbound import Resolver

BACKOFF_S_MAX = 300.0
# Pause after an internal failure, before delivery continues.
FAILED_S = 1.0
# The offset is stored after this many events, and whenever there is nothing to do.
CURSOR_EVENTS = 100
DEAD_LETTER_TYPE = "virta.webhook.dead-letter"
PENDING, ACTIVE, GONE, EXPIRED, REVOKED = "pending", "active", "gone", "expired", "revoked"


class Webhook:
    """One active subscription."""

    def __init__(
        self,
        service: Service,
        id_: str,
        description: dict[str, Any],
        cursor: int,
        consent: Consent,
        owner: Owner = Owner(),  # noqa: B008 - immutable
    ) -> None:
        self.id = id_
        self.description = description
        self.cursor = cursor
        self.consent = consent
        self.owner = owner
        self.state = PENDING if consent.pending else ACTIVE
        self.delivered = 0
        self.dead_letters = 0
        self.last_error = ""
        self.is_failing = False  # since the last answer
        self._last_answer = ("", 0)  # with its time in microseconds
        self._service = service
        self.channel: str = description["config"]["channel"]
        self.filter, self._row_filter = restrict(
            build_filter(description), owner.row_filter(self.channel)
        )
        secrets = description.get("protocolsettings", {}).get("secrets", [])
        self._keys = [key for key in map(read_secret, secrets) if key is not None]
        self.scans: ScanLease | None = None  # its filter, if every event has to test it
        self._client = self.new_client(service.webhooks.resolver)
        self._granted = asyncio.Event()
        self._sent_at = 0.0  # when the last request was sent, by the loop's clock
        self._stored_cursor = cursor
        self.deleted = False  # not replaced: its offset need not be stored
        self.task: asyncio.Task[None] | None = None
        self._request: Future[SinkAnswer] | None = None  # the last one

    @property
    def filters(self) -> tuple[Filter, ...]:
        """The filter of the events that are sent, including the row filter of the owner."""
        return (self.filter,) if self._row_filter is None else (self.filter, self._row_filter)

    @property
    def conditions(self) -> str:
        """The filter as it was requested, as JSON; empty for everything."""
        given = {name: self.description.get(name) for name in ("filters", "types", "source")}
        asked = {name: value for name, value in given.items() if value}
        return msgspec.json.encode(asked).decode() if asked else ""

    def new_client(self, resolver: Resolver) -> WebhookClient:
        """
        Return a client of the sink, not yet connected.

        Raises:
            HubError: the sink's address is invalid.
        """
        config = self._service.config
        settings = self.description.get("protocolsettings", {})
        return WebhookClient(
            self.description["sink"],
            settings.get("headers", {}),
            config.webhook_timeout_ms / 1000,
            config.webhook_origin,
            settings.get("method", "POST"),
            resolver,
        )

    def signature(self, id_: str, body: bytes) -> dict[str, str]:
        """Return the headers that sign a delivery now."""
        return signature_headers(self._keys, id_, int(time.time()), body)

    def grant(self, rate: int | None) -> None:
        """Record the sink's consent."""
        self.consent = self.consent.granted(rate)
        if self.state == PENDING:
            self.state = ACTIVE
        self._granted.set()

    def release(self) -> None:
        """Count its filter no longer: it gets no more events."""
        if self.scans is not None:
            self.scans.release()

    def record(self) -> dict[str, Any]:
        return to_record(self.description, self.consent, self.owner)

    def status(self, *, secrets: bool = False) -> dict[str, Any]:
        """Return the subscription as its owner sees it; `secrets` shows them, right after they were made."""
        status = SubscriptionStatus(
            self.state, self.cursor, self.delivered, self.dead_letters, self.last_error
        )
        answer, answered = self._last_answer
        if answered:
            status.last_answer, status.last_answer_time = answer, time_text(answered)
        if self.consent.expires is not None:
            status.expires = time_text(int(self.consent.expires * 1_000_000))
        if self.consent.rate is not None:
            status.allowed_rate = self.consent.rate
        shown = without_secrets(self.description)
        made = self.description.get("protocolsettings", {}).get("secrets")
        if secrets and made:
            shown["protocolsettings"] = shown["protocolsettings"] | {"secrets": made}
        return shown | {"id": self.id, "status": status}

    async def run(self, executor: ThreadPoolExecutor) -> None:
        """Follow the log until the sink answers 410, does not consent in time, or the task is cancelled."""
        service = self._service
        try:
            await self._wait_for_consent()
            while self.state == ACTIVE:
                try:
                    await self._deliver_new(executor)
                except LogError as error:
                    self.last_error, self.is_failing = error.message, True
                    service.logger.warning("webhook_log_failed", id=self.id, reason=error.message)
                    await asyncio.sleep(FAILED_S)
                except Exception as error:
                    # Unexpected; a subscription that silently stopped would be worse than a repeat.
                    self.last_error = f"internal failure: {type(error).__name__}"
                    service.logger.exception("webhook_failed", id=self.id)
                    await asyncio.sleep(FAILED_S)
        finally:
            if self._request is not None:  # else no connection was ever opened
                service.webhooks.outbound.submit(self._client.close())

    async def _wait_for_consent(self) -> None:
        """Wait for the sink's callback until its deadline."""
        if self.consent.expires is None:
            return
        try:
            async with asyncio.timeout(max(0.0, self.consent.expires - time.time())):
                await self._granted.wait()
        except TimeoutError:
            if self.consent.pending:  # else it arrived just before the deadline and was accepted
                self.state = EXPIRED

    async def _deliver_new(self, executor: ThreadPoolExecutor) -> None:
        """Deliver the events between the cursor and the end of the log; wait if there are none."""
        service = self._service
        loop = asyncio.get_running_loop()
        end = service.hub.position
        credentials = service.auth.credentials
        if credentials is not None and not credentials.is_owner_active(self.owner.principal):
            self.state = REVOKED
            service.logger.info("webhook_revoked", id=self.id, principal=self.owner.principal)
            return
        if self.cursor >= end:
            await self._store_cursor()
            await service.hub.wait_past(self.cursor)
            return
        with service.log.read(
            topics=[self.channel], start=self.cursor, end=end, on_gap="skip", on_corruption="skip"
        ) as reader:
            finished = False
            history = HistoryReader(reader, select_events(self.filter, self._row_filter))
            while not finished:
                piece = await loop.run_in_executor(executor, history.read)
                finished = piece.finished
                for delivery in piece.deliveries:
                    await self._deliver(delivery)
                    self.cursor = delivery.offset + 1
                    if self.cursor - self._stored_cursor >= CURSOR_EVENTS:
                        await self._store_cursor()
                    if self.state != ACTIVE:
                        return
        self.cursor = end

    async def _deliver(self, delivery: Delivery) -> None:
        """Send an event until it is accepted or refused for good; the last resort is a dead letter."""
        config = self._service.config
        first = min(config.webhook_backoff_ms / 1000, BACKOFF_S_MAX)
        for attempt in range(1, config.webhook_attempts + 1):
            answer = await self._send(delivery)
            self._last_answer = (answer.reason, now_us())
            self.is_failing = answer.verdict is not Verdict.DELIVERED
            if answer.verdict is Verdict.DELIVERED:
                self.delivered += 1
                return
            self.last_error = answer.reason
            if answer.verdict is Verdict.GONE:
                self.state = GONE
                self._service.logger.info("webhook_gone", id=self.id)
                return
            if answer.verdict is Verdict.REFUSED:
                break
            if attempt < config.webhook_attempts:
                wait = backoff(attempt - 1, first, BACKOFF_S_MAX, jitter=0.5)
                await asyncio.sleep(max(answer.wait_s, wait))
        await self._store_dead_letter(delivery, attempt)

    async def _send(self, delivery: Delivery) -> SinkAnswer:
        """Send one request, as soon as the allowed rate permits it."""
        loop = asyncio.get_running_loop()
        if self.consent.rate is not None:
            due = self._sent_at + 60.0 / self.consent.rate
            await asyncio.sleep(max(0.0, due - loop.time()))
        self._sent_at = loop.time()
        outbound = self._service.webhooks.outbound
        signed = self.signature(f"{self.id}.{delivery.offset}", delivery.value)
        tracing = self._service.tracing
        span = None if tracing is None else tracing.deliver(delivery, self.id)
        headers = signed if span is None else signed | span.headers
        request = self._request = outbound.submit(self._client.deliver(delivery.value, headers))
        if span is not None:
            request.add_done_callback(lambda done: span.end(_why_undelivered(done)))
        try:
            return await asyncio.shield(asyncio.wrap_future(request))
        except asyncio.CancelledError:
            # An event that the sink accepts now must not be sent again after a restart or by a replacement. So its
            # response is awaited, until the request's deadline or a second cancellation.
            try:
                if not self.deleted:
                    answer = await asyncio.wrap_future(request)
                    if answer.verdict is Verdict.DELIVERED:
                        self.cursor = delivery.offset + 1
            finally:
                request.cancel()
            raise

    async def _store_dead_letter(self, delivery: Delivery, attempts: int) -> None:
        """Store an event that was not accepted, and wait until it is in the log."""
        self.dead_letters += 1
        now = time_text(now_us())
        source = self._service.config.source
        id_ = f"{self.id} {delivery.offset}"
        letter = {
            "specversion": "1.0",
            "id": id_,
            "source": source,
            "type": DEAD_LETTER_TYPE,
            "time": now,
            "subject": self.id,
            "data": {
                "channel": self.channel,
                "sink": without_user(self.description["sink"]),
                "attempts": attempts,
                "reason": self.last_error,
                "event": msgspec.Raw(delivery.value),
            },
        }
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(error: LogError | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        draft = Delivery(DEAD_LETTERS, source, id_, msgspec.json.encode(letter))
        self._service.publisher.submit([draft], answered)
        await done

    async def _store_cursor(self) -> None:
        if self.cursor != self._stored_cursor:
            service, cursor = self._service, self.cursor
            await service.webhooks.write(service.registry.keep_cursor, self.id, cursor)
            self._stored_cursor = cursor


def without_secrets(description: dict[str, Any]) -> dict[str, Any]:
    """
    Return a description in which the values of headers and the secrets are `true`.

    Subscriptions of older versions may have a password in the address of their sink; it is removed.
    """
    description = description | {"sink": without_user(description["sink"])}
    settings = description.get("protocolsettings")
    if not settings:
        return description
    shown = dict(settings)
    if settings.get("headers"):
        shown["headers"] = dict.fromkeys(settings["headers"], True)
    if settings.get("secrets"):
        shown["secrets"] = [True] * len(settings["secrets"])
    return description | {"protocolsettings": shown}


def _why_undelivered(request: Future[SinkAnswer]) -> str | None:
    """Return why a finished request did not deliver its event."""
    if request.cancelled():
        return "cancelled"
    error = request.exception()
    if error is not None:
        return str(error)
    answer = request.result()
    return None if answer.verdict is Verdict.DELIVERED else answer.reason


def build_filter(description: dict[str, Any]) -> Filter:
    """Return one filter of all conditions of a subscription; raise FilterError for an invalid one."""
    filters = list(description.get("filters", []))
    if description.get("types"):
        filters.append({"any": [{"exact": {"type": name}} for name in description["types"]]})
    if description.get("source"):
        filters.append({"exact": {"source": description["source"]}})
    if not filters:
        return parse("", "query-string")
    return parse(filters, "cloudevents")
