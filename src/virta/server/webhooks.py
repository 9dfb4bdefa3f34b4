"""
Delivery to webhooks: each subscription follows the log at its own pace.

Events go out in the order of the log, one at a time, at least once: the place a subscription has
reached is kept, and a restart repeats at most what was delivered since. An event that is not taken is
tried again with growing pauses; after the last attempt, or when the sink refuses it for good, it goes
to the dead letters (`$virta/dead-letters`) and the next one follows. A sink that answers 410 gets
nothing any more.
"""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from virta.errors import HubError, LogError
from virta.filters import Filter, parse
from virta.hub.delivery import Delivery
from virta.hub.frames import timestamp_text
from virta.hub.hub import now_microseconds
from virta.hub.replay import read_piece
from virta.hub.topics import DEAD_LETTERS
from virta.server.sinks import Sink, Verdict

if TYPE_CHECKING:
    from virta.server.service import Service

WEBHOOKS_MAX = 1000
THREADS_MAX = 16
BACKOFF_S_MAX = 300.0
# A place in the log is kept after so many events, and whenever there is nothing to do.
CURSOR_EVENTS = 100
DEAD_LETTER_TYPE = "virta.webhook.dead-letter"


class Webhook:
    """One subscription at work."""

    def __init__(
        self, service: Service, id_: str, description: dict[str, Any], cursor: int
    ) -> None:
        self.id = id_
        self.description = description
        self.cursor = cursor
        self.state = "active"
        self.delivered = 0
        self.dead = 0
        self.last_error = ""
        self._service = service
        self.channel: str = description["config"]["channel"]
        self.filter = build_filter(description)
        config = service.config
        headers = description.get("protocolsettings", {}).get("headers", {})
        self._sink = Sink(description["sink"], headers, config.webhook_timeout_ms / 1000)
        self._interval_s = 0.0
        self._kept = cursor
        self.task: asyncio.Task[None] | None = None

    async def validate(self, executor: ThreadPoolExecutor) -> None:
        """The handshake; raises HubError."""
        loop = asyncio.get_running_loop()
        origin = self._service.config.webhook_origin
        rate = await loop.run_in_executor(executor, self._sink.validate, origin)
        self._interval_s = 60.0 / rate if rate else 0.0

    def status(self) -> dict[str, Any]:
        return self.description | {
            "id": self.id,
            "status": {
                "state": self.state,
                "offset": self.cursor,
                "delivered": self.delivered,
                "deadLetters": self.dead,
                "lastError": self.last_error,
            },
        }

    async def run(self, executor: ThreadPoolExecutor) -> None:
        """Follow the log until the sink is gone or the task is cancelled."""
        service = self._service
        try:
            while self.state == "active":
                try:
                    await self._round(executor)
                except LogError as error:
                    self.last_error = error.message
                    service.logger.warning("webhook_log_failed", id=self.id, reason=error.message)
                    await asyncio.sleep(1.0)
        finally:
            self._sink.close()

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
                    if self.state != "active":
                        return
        self.cursor = end

    async def _deliver(self, executor: ThreadPoolExecutor, delivery: Delivery) -> None:
        loop = asyncio.get_running_loop()
        config = self._service.config
        backoff = config.webhook_backoff_ms / 1000
        for attempt in range(1, config.webhook_attempts + 1):
            answer = await loop.run_in_executor(executor, self._sink.deliver, delivery.value)
            if answer.verdict is Verdict.DELIVERED:
                self.delivered += 1
                await asyncio.sleep(self._interval_s)
                return
            self.last_error = answer.reason
            if answer.verdict is Verdict.GONE:
                self.state = "gone"
                self._service.logger.info("webhook_gone", id=self.id)
                return
            if answer.verdict is Verdict.REFUSED:
                break
            if attempt < config.webhook_attempts:
                wait = min(backoff * float(1 << min(attempt - 1, 20)), BACKOFF_S_MAX)
                jitter = random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
                await asyncio.sleep(max(answer.wait_s, wait * jitter))
        await self._bury(delivery, attempt)

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
            await asyncio.to_thread(self._service.registry.keep_cursor, self.id, self.cursor)
            self._kept = self.cursor


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
        self._executor = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="virta-webhook")
        self.hooks: dict[str, Webhook] = {}

    def start(self) -> None:
        """Go on with what was subscribed before; their sinks have agreed already."""
        registry = self._service.registry
        for id_, description in registry.subscriptions.items():
            cursor = registry.cursors.get(id_, self._service.hub.position)
            self._run(Webhook(self._service, id_, description, cursor))

    async def stop(self) -> None:
        tasks = [hook.task for hook in self.hooks.values() if hook.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for hook in self.hooks.values():
            self._service.registry.keep_cursor(hook.id, hook.cursor)
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    async def subscribe(self, id_: str, description: dict[str, Any], cursor: int) -> Webhook:
        """Agree with the sink, keep the subscription, begin; raises HubError and FilterError."""
        if len(self.hooks) >= WEBHOOKS_MAX:
            raise HubError(
                f"{WEBHOOKS_MAX} subscriptions deliver already: no more are taken",
                code="too-many-subscriptions",
            )
        hook = Webhook(self._service, id_, description, cursor)
        await hook.validate(self._executor)
        registry = self._service.registry
        await asyncio.to_thread(registry.keep_subscription, id_, description)
        await asyncio.to_thread(registry.keep_cursor, id_, cursor)
        self._run(hook)
        return hook

    async def unsubscribe(self, id_: str) -> bool:
        """End a subscription; False when there is none."""
        hook = self.hooks.pop(id_, None)
        if hook is None:
            return False
        if hook.task is not None:
            hook.task.cancel()
            await asyncio.gather(hook.task, return_exceptions=True)
        await asyncio.to_thread(self._service.registry.drop_subscription, id_)
        return True

    def _run(self, hook: Webhook) -> None:
        self.hooks[hook.id] = hook
        hook.task = asyncio.ensure_future(hook.run(self._executor))
