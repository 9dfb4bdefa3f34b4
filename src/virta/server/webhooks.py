"""
Delivery to webhooks: each subscription follows the log at its own pace.

Events go out in the order of the log, one at a time, at least once: the place a subscription has
reached is kept, and a restart repeats at most what was delivered since. An event that is not taken is
tried again with growing pauses; after the last attempt, or when the sink refuses it for good, it goes
to the dead letters (`$virta/dead-letters`) and the next one follows. A sink that answers 410 gets
nothing any more, one that has not consented yet (`virta.server.consent`) nothing so far.
"""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from virta.errors import ConfigError, HubError, LogError
from virta.filters import Filter, parse
from virta.hub.delivery import Delivery
from virta.hub.frames import timestamp_text
from virta.hub.hub import now_microseconds
from virta.hub.replay import read_piece
from virta.hub.topics import DEAD_LETTERS
from virta.server.consent import Consent, from_record, new_callback_key, to_record
from virta.server.sinks import Answer, Sink, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from virta.server.service import Service

T = TypeVar("T")

WEBHOOKS_MAX = 1000
# Of them, how many may be waiting for consent: anybody's address can be made to wait.
PENDING_MAX = 100
THREADS_MAX = 16
BACKOFF_S_MAX = 300.0
# A place in the log is kept after so many events, and whenever there is nothing to do.
CURSOR_EVENTS = 100
DEAD_LETTER_TYPE = "virta.webhook.dead-letter"
PENDING, ACTIVE, GONE, EXPIRED = "pending", "active", "gone", "expired"


class Webhook:
    """One subscription at work."""

    def __init__(
        self,
        service: Service,
        id_: str,
        description: dict[str, Any],
        cursor: int,
        consent: Consent,
    ) -> None:
        self.id = id_
        self.description = description
        self.cursor = cursor
        self.consent = consent
        self.state = PENDING if consent.pending else ACTIVE
        self.delivered = 0
        self.dead = 0
        self.last_error = ""
        self._service = service
        self.channel: str = description["config"]["channel"]
        self.filter = build_filter(description)
        config = service.config
        settings = description.get("protocolsettings", {})
        self._sink = Sink(
            description["sink"],
            settings.get("headers", {}),
            config.webhook_timeout_ms / 1000,
            config.webhook_origin,
            settings.get("method", "POST"),
        )
        self._granted = asyncio.Event()
        self._asked_at = 0.0  # when the sink was last asked anything, by the loop's clock
        self._kept = cursor
        self.dropped = False  # nobody goes on where it ends
        self.task: asyncio.Task[None] | None = None
        self._request: Future[Answer] | None = None  # the last one

    async def validate(self, executor: ThreadPoolExecutor, callback: str | None) -> None:
        """The handshake; raises HubError."""
        loop = asyncio.get_running_loop()
        permission = await loop.run_in_executor(executor, self._sink.validate, callback)
        if permission.granted:
            self.grant(permission.rate)

    def grant(self, rate: int | None) -> None:
        """The sink consents."""
        self.consent = self.consent.granted(rate)
        if self.state == PENDING:
            self.state = ACTIVE
        self._granted.set()

    def record(self) -> dict[str, Any]:
        return to_record(self.description, self.consent)

    def status(self) -> dict[str, Any]:
        status = {
            "state": self.state,
            "offset": self.cursor,
            "delivered": self.delivered,
            "deadLetters": self.dead,
            "lastError": self.last_error,
        }
        if self.consent.expires is not None:
            status["expires"] = timestamp_text(int(self.consent.expires * 1_000_000))
        if self.consent.rate is not None:
            status["allowedRate"] = self.consent.rate
        return self.description | {"id": self.id, "status": status}

    async def run(self, executor: ThreadPoolExecutor) -> None:
        """Follow the log until the sink is gone, its consent is not given, or the task is cancelled."""
        service = self._service
        try:
            await self._consented()
            while self.state == ACTIVE:
                try:
                    await self._round(executor)
                except LogError as error:
                    self.last_error = error.message
                    service.logger.warning("webhook_log_failed", id=self.id, reason=error.message)
                    await asyncio.sleep(1.0)
        finally:
            self._close_sink()

    def _close_sink(self) -> None:
        """Now, or once a request that nobody waits for is over: its thread uses the connection."""
        if self._request is None:
            self._sink.close()
        else:
            self._request.add_done_callback(lambda _: self._sink.close())

    async def _consented(self) -> None:
        """Wait for the callback, as long as it may take."""
        if self.consent.expires is None:
            return
        try:
            async with asyncio.timeout(max(0.0, self.consent.expires - time.time())):
                await self._granted.wait()
        except TimeoutError:
            if self.consent.pending:  # else it came in the last moment, and was told that it counts
                self.state = EXPIRED

    async def _round(self, executor: ThreadPoolExecutor) -> None:
        """Deliver what stands between the cursor and the end, then wait for more."""
        service = self._service
        loop = asyncio.get_running_loop()
        end = service.hub.position
        if self.cursor >= end:
            await self._keep()
            await service.hub.wait_past(self.cursor)
            return
        with service.log.read(
            topics=[self.channel], start=self.cursor, end=end, on_gap="skip", on_corruption="skip"
        ) as reader:
            finished = False
            while not finished:
                piece = await loop.run_in_executor(executor, read_piece, reader, self.filter)
                finished = piece.finished
                for delivery in piece.deliveries:
                    await self._deliver(executor, delivery)
                    self.cursor = delivery.offset + 1
                    if self.cursor - self._kept >= CURSOR_EVENTS:
                        await self._keep()
                    if self.state != ACTIVE:
                        return
        self.cursor = end

    async def _deliver(self, executor: ThreadPoolExecutor, delivery: Delivery) -> None:
        config = self._service.config
        backoff = config.webhook_backoff_ms / 1000
        for attempt in range(1, config.webhook_attempts + 1):
            answer = await self._send(executor, delivery)
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
                wait = min(backoff * float(1 << min(attempt - 1, 20)), BACKOFF_S_MAX)
                jitter = random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
                await asyncio.sleep(max(answer.wait_s, wait * jitter))
        await self._bury(delivery, attempt)

    async def _send(self, executor: ThreadPoolExecutor, delivery: Delivery) -> Answer:
        """One request; not before the allowed rate lets the next one go."""
        loop = asyncio.get_running_loop()
        if self.consent.rate is not None:
            due = self._asked_at + 60.0 / self.consent.rate
            await asyncio.sleep(max(0.0, due - loop.time()))
        self._asked_at = loop.time()
        request = self._request = executor.submit(self._sink.deliver, delivery.value)
        try:
            return await asyncio.shield(asyncio.wrap_future(request))
        except asyncio.CancelledError:
            # Whoever goes on from here, after a restart or with another sink, must not send again what was taken.
            if not self.dropped and not request.cancel():
                answer = await asyncio.wrap_future(request)
                if answer.verdict is Verdict.DELIVERED:
                    self.cursor = delivery.offset + 1
            raise

    async def _bury(self, delivery: Delivery, attempts: int) -> None:
        """Keep an event nobody would take, with what is known about it, before going on."""
        self.dead += 1
        now = timestamp_text(now_microseconds())
        source = self._service.config.source_name
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
                "sink": self.description["sink"],
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

    async def _keep(self) -> None:
        if self.cursor != self._kept:
            service, cursor = self._service, self.cursor
            await service.webhooks.write(service.registry.keep_cursor, self.id, cursor)
            self._kept = cursor


def build_filter(description: dict[str, Any]) -> Filter:
    """One filter of everything a subscription asks for; raises FilterError."""
    filters = list(description.get("filters", []))
    if description.get("types"):
        filters.append({"any": [{"exact": {"type": name}} for name in description["types"]]})
    if description.get("source"):
        filters.append({"exact": {"source": description["source"]}})
    if not filters:
        return parse("", "query-string")
    return parse(filters, "cloudevents")


class Webhooks:
    """All subscriptions with a sink."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._callback_url = _callback_url(service.config.webhook_callback_url)
        self._executor = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="virta-webhook")
        # One thread: what is written about a subscription stands in the order in which it was decided.
        self._records = ThreadPoolExecutor(1, thread_name_prefix="virta-registry")
        # Whose sinks are being asked right now: one may call back before it answers.
        self._asking: dict[str, Webhook] = {}
        self.hooks: dict[str, Webhook] = {}

    def start(self) -> None:
        """Go on with what was subscribed before; who has agreed then is not asked again."""
        registry = self._service.registry
        for id_, record in registry.subscriptions.items():
            cursor = registry.cursors.get(id_, self._service.hub.position)
            description, consent = from_record(record)
            self._run(Webhook(self._service, id_, description, cursor, consent))

    async def stop(self) -> None:
        tasks = [hook.task for hook in self.hooks.values() if hook.task is not None]
        for task in tasks:
            if not task.cancelling():  # a second time would end the wait for its last answer
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for hook in list(self.hooks.values()):
            try:
                await self.write(self._service.registry.keep_cursor, hook.id, hook.cursor)
            except LogError as error:
                # It will hear some events again; whoever else has to be stopped still is.
                self._service.logger.warning("webhook_place_lost", id=hook.id, reason=error.message)
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._records.shutdown)

    async def write(self, function: Callable[..., T], *arguments: Any) -> T:
        """Write to the registry, behind everything that is to be written before."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._records, function, *arguments)

    async def subscribe(self, id_: str, description: dict[str, Any], cursor: int) -> Webhook:
        """
        Ask the sink, keep the subscription, begin or wait for consent.

        Raises:
            HubError: the sink does not agree, or there are too many.
            FilterError: what it asks for is no filter.
        """
        if len(self.hooks) + len(self._asking) >= WEBHOOKS_MAX:
            raise _too_many(f"{WEBHOOKS_MAX} subscriptions deliver already")
        hook, callback = self._made(id_, description, cursor)
        self._asking[id_] = hook
        try:
            await self._ask(hook, callback)
            await self._keep_with_cursor(hook)
        finally:
            del self._asking[id_]
        self._run(hook)
        return hook

    async def replace(
        self, id_: str, description: dict[str, Any], cursor: int | None
    ) -> Webhook | None:
        """
        Put another description in a subscription's place; None when there is none.

        The new sink is asked while the old one is still delivered to, so a refusal changes nothing.
        Without a cursor the new one goes on where the old one is, after the answer to what is on its way.
        """
        if id_ not in self.hooks:
            return None
        if id_ in self._asking:
            raise HubError(f"{id_} is being changed already", code="invalid-subscription")
        hook, callback = self._made(id_, description, cursor or 0)
        self._asking[id_] = hook
        try:
            await self._ask(hook, callback)
            old = self.hooks.get(id_)
            if old is None:  # it was deleted meanwhile
                return None
            await _ended(old)
            if self.hooks.get(id_) is not old:
                return None
            if cursor is None:
                hook.cursor = old.cursor
            await self._keep_instead(hook, old)
            if self.hooks.get(id_) is not hook:
                return None
        finally:
            del self._asking[id_]
        self._run(hook)
        return hook

    async def _keep_instead(self, hook: Webhook, old: Webhook) -> None:
        """Put one in another's place, which has ended; if that cannot be kept, the other one goes on."""
        self.hooks[hook.id] = (
            hook  # there is always one: nobody who asks is told that there is none
        )
        try:
            await self._keep_with_cursor(hook)
        except LogError:
            if self.hooks.get(hook.id) is hook:
                self._run(old)
            raise

    def _made(
        self, id_: str, description: dict[str, Any], cursor: int
    ) -> tuple[Webhook, str | None]:
        """A webhook that has not begun, and where its sink may call back."""
        key, key_hash = new_callback_key()
        expires = time.time() + self._service.config.webhook_consent_ms / 1000
        hook = Webhook(self._service, id_, description, cursor, Consent(None, key_hash, expires))
        if self._callback_url is None:
            return hook, None
        return hook, f"{self._callback_url}/subscriptions/{id_}/confirm?key={key}"

    async def _ask(self, hook: Webhook, callback: str | None) -> None:
        await hook.validate(self._executor, callback)
        if hook.consent.pending and self._pending() >= PENDING_MAX:
            raise _too_many(f"{PENDING_MAX} subscriptions wait for consent")

    async def _keep_with_cursor(self, hook: Webhook) -> None:
        await self.write(self._service.registry.keep_cursor, hook.id, hook.cursor)
        await self._keep(hook)

    async def confirm(self, id_: str, key: str, rate: int | None) -> Webhook | None:
        """A callback was called: the sink consents. None when nothing waits under this id and key."""
        for hook in (self._asking.get(id_), self.hooks.get(id_)):
            if hook is None or not hook.consent.opens(key) or hook.state in {GONE, EXPIRED}:
                continue
            hook.grant(hook.consent.rate if rate is None else rate)
            if self.hooks.get(id_) is hook:
                await self._keep(hook)
            return hook
        return None

    async def unsubscribe(self, id_: str) -> bool:
        """End a subscription; False when there is none."""
        hook = self.hooks.pop(id_, None)
        if hook is None:
            return False
        hook.dropped = True
        await _ended(hook)
        await self.write(self._service.registry.drop_subscription, id_)
        return True

    async def _keep(self, hook: Webhook) -> None:
        """Make a subscription durable with its consent; a callback meanwhile is kept as well."""
        kept = None
        while kept != hook.consent and self._stands(hook):
            kept = hook.consent
            await self.write(self._service.registry.keep_subscription, hook.id, hook.record())

    def _stands(self, hook: Webhook) -> bool:
        """Neither dropped nor replaced: what is written about it now counts."""
        known = (self.hooks.get(hook.id), self._asking.get(hook.id))
        return hook in known and not hook.dropped

    def _pending(self) -> int:
        return sum(hook.state == PENDING for hook in self.hooks.values())

    def _run(self, hook: Webhook) -> None:
        self.hooks[hook.id] = hook
        hook.task = asyncio.ensure_future(self._work(hook))

    async def _work(self, hook: Webhook) -> None:
        await hook.run(self._executor)
        if hook.state == EXPIRED:
            self._service.logger.info("webhook_consent_expired", id=hook.id)
            self.hooks.pop(hook.id, None)
            await self.write(self._service.registry.drop_subscription, hook.id)


async def _ended(hook: Webhook) -> None:
    if hook.task is not None:
        hook.task.cancel()
        await asyncio.gather(hook.task, return_exceptions=True)
        hook.task = (
            None  # its traceback refers to the webhook: both would wait for the cyclic collector
        )


def _callback_url(url: str | None) -> str | None:
    if url is None or url.startswith(("http://", "https://")):
        return url and url.rstrip("/")
    raise ConfigError(
        f"webhook_callback_url is {url!r}: it must be the http or https address of this server",
        setting="webhook_callback_url",
    )


def _too_many(message: str) -> HubError:
    return HubError(f"{message}: no more are taken", code="too-many-subscriptions")
