"""
All subscriptions with a sink: handshakes with sinks, and starting, replacing and ending subscriptions.

Sinks do not wait for each other: each subscription (`virta.server.webhooks.delivery`) has one request
at a time, on its own connection, and each request has a deadline (`virta.server.webhooks.client`).
Handshakes have their own limits, so that they never wait for deliveries.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from virta.errors import ConfigError, HubError, LogError
from virta.server.webhooks.addresses import SinkRules
from virta.server.webhooks.consent import Consent, from_record, new_callback_key
from virta.server.webhooks.delivery import EXPIRED, GONE, PENDING, Webhook
from virta.server.webhooks.outbound import OutboundLoop, Resolver

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.server.service import Service

T = TypeVar("T")

# Each has one connection at most, so this also bounds the connections to sinks.
WEBHOOKS_MAX = 1000
# Of them, how many may be waiting for consent: anybody's address can be made to wait.
PENDING_MAX = 100
# Concurrent handshakes, in total and with one host: no host can block handshakes with others.
HANDSHAKES_MAX = 64
HANDSHAKES_PER_HOST_MAX = 4
# Threads that read the log for deliveries; nothing in them waits for a sink.
READERS_MAX = 4
# After the drain's deadline, cancelled requests have this long to end.
CANCEL_S = 1.0


class Webhooks:
    """All subscriptions with a sink."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._callback_url = _callback_url(service.config.webhook_callback_url)
        self._executor = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="virta-webhook")
        rules = SinkRules(service.config.webhook_allow)
        self.outbound = OutboundLoop()
        self.resolver = Resolver(rules)
        # Handshakes do not wait for lookups of deliveries.
        self._handshake_resolver = Resolver(rules)
        self._handshakes: Counter[str] = Counter()  # running, by host
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
            try:
                hook = Webhook(self._service, id_, description, cursor, consent)
            except HubError as error:
                # Its record stays, and the other subscriptions start. The message is not logged: it
                # quotes the address, which may contain a password.
                self._service.logger.warning("webhook_unusable", id=id_, code=error.code)
            else:
                self._run(hook)

    def stop_soon(self) -> list[asyncio.Task[None]]:
        """Stop sending; running requests continue. Return the tasks that have not ended."""
        tasks = [hook.task for hook in self.hooks.values() if hook.task is not None]
        for task in tasks:
            if not task.cancelling():  # a second time would end the wait for its last answer
                task.cancel()
        return tasks

    async def stop(self, wait_s: float = 0.0) -> None:
        """End everything; running requests may take `wait_s`, then they are cancelled."""
        tasks = self.stop_soon()
        for limit_s in (wait_s, CANCEL_S):
            running = [task for task in tasks if not task.done()]
            if running:
                _, late = await asyncio.wait(running, timeout=limit_s)
                for task in late:
                    task.cancel()
        for hook in list(self.hooks.values()):
            try:
                await self.write(self._service.registry.keep_cursor, hook.id, hook.cursor)
            except LogError as error:
                # It will hear some events again; whoever else has to be stopped still is.
                self._service.logger.warning("webhook_place_lost", id=hook.id, reason=error.message)
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._records.shutdown)
        await asyncio.to_thread(self.outbound.stop)

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
        """
        Do the handshake.

        Raises:
            HubError: the sink does not consent. The text is the same for all reasons: a subscriber must not learn
                which addresses and ports answer inside the server's network.
        """
        sink = hook.new_sink(self._handshake_resolver)
        if (
            self._handshakes.total() >= HANDSHAKES_MAX
            or self._handshakes[sink.host] >= HANDSHAKES_PER_HOST_MAX
        ):
            raise HubError(
                f"too many handshakes with sinks are in progress: at most {HANDSHAKES_MAX} at a time, and "
                f"{HANDSHAKES_PER_HOST_MAX} with one host; try again",
                code="too-many-handshakes",
            )
        self._handshakes[sink.host] += 1
        try:
            permission = await asyncio.wrap_future(self.outbound.submit(sink.validate(callback)))
        finally:
            self._handshakes[sink.host] -= 1
            self._handshakes += Counter()  # forgets hosts with none
        if permission.refusal:
            reason = permission.refusal
            self._service.logger.info("webhook_refused", host=sink.host, reason=reason)
            raise self._not_agreed()
        if permission.granted:
            hook.grant(permission.rate)
        if hook.consent.pending and self._pending() >= PENDING_MAX:
            raise _too_many(f"{PENDING_MAX} subscriptions wait for consent")

    def _not_agreed(self) -> HubError:
        config = self._service.config
        return HubError(
            f"the sink did not consent within {config.webhook_timeout_ms} ms: it must have a public address "
            "(or one that --webhook-allow lists), and answer OPTIONS with the header "
            f"WebHook-Allowed-Origin: {config.webhook_origin}; the server's log has the reason",
            code="sink-refused",
        )

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
        hook.task = None  # its traceback refers to the webhook, so both would wait for the garbage collector


def _callback_url(url: str | None) -> str | None:
    if url is None or url.startswith(("http://", "https://")):
        return url and url.rstrip("/")
    raise ConfigError(
        f"webhook_callback_url is {url!r}: it must be the http or https address of this server",
        setting="webhook_callback_url",
    )


def _too_many(message: str) -> HubError:
    return HubError(f"{message}: no more are taken", code="too-many-subscriptions")
