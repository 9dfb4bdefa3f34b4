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
from virta.server.access.scan_budget import WEBHOOK, FilterPlace
from virta.server.webhooks.addresses import SinkRules
from virta.server.webhooks.consent import Consent, from_record, new_callback_key
from virta.server.webhooks.delivery import EXPIRED, GONE, PENDING, Webhook
from virta.server.webhooks.outbound import OutboundLoop, Resolver

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.server.service import Service
    from virta.server.webhooks.owner import Owner

T = TypeVar("T")

# Each has one connection at most, so this also bounds the connections to sinks.
WEBHOOKS_MAX = 1000
# Of them, how many may wait for consent: anyone can subscribe an address that never answers.
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
        # One thread, so that records of a subscription are written in the order of its changes.
        self._registry_thread = ThreadPoolExecutor(1, thread_name_prefix="virta-registry")
        # Subscriptions whose handshake is running: a sink may call back before it answers.
        self._in_handshake: dict[str, Webhook] = {}
        self.hooks: dict[str, Webhook] = {}

    def start(self) -> None:
        """Continue the stored subscriptions; sinks that have consented are not asked again."""
        registry = self._service.registry
        for id_, record in registry.subscriptions.items():
            cursor = registry.cursors.get(id_, self._service.hub.position)
            description, consent, owner = from_record(record)
            try:
                hook = Webhook(self._service, id_, description, cursor, consent, owner)
            except HubError as error:
                # Its record stays, and the other subscriptions start. The message is not logged: it
                # quotes the address, which may contain a password.
                self._service.logger.warning("webhook_unusable", id=id_, code=error.code)
            else:
                place = FilterPlace(WEBHOOK, id_)
                hook.scans = self._service.scans.charge(owner.principal, place, [hook.filter])
                self._run(hook)

    def stop_soon(self) -> list[asyncio.Task[None]]:
        """Stop sending; running requests continue. Return the tasks that have not ended."""
        tasks = [hook.task for hook in self.hooks.values() if hook.task is not None]
        for task in tasks:
            if not task.cancelling():  # a second time would end the wait for its last response
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
                await self._store_cursor(hook)
            except LogError as error:
                # Some events will be delivered again; the others still have to be stopped.
                self._service.logger.warning("webhook_place_lost", id=hook.id, reason=error.message)
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._registry_thread.shutdown)
        await asyncio.to_thread(self.outbound.stop)

    async def write(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the registry after all earlier calls."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._registry_thread, function, *arguments)

    async def subscribe(
        self, id_: str, description: dict[str, Any], cursor: int, owner: Owner
    ) -> Webhook:
        """
        Do the handshake with the sink, store the subscription, deliver or wait for consent.

        Raises:
            HubError: the sink does not consent, or there are too many.
            FilterError: an invalid filter.
        """
        if len(self.hooks) + len(self._in_handshake) >= WEBHOOKS_MAX:
            raise _too_many(f"{WEBHOOKS_MAX} subscriptions deliver already")
        hook, callback = self._new_hook(id_, description, cursor, owner)
        self._in_handshake[id_] = hook
        try:
            await self._handshake(hook, callback)
            await self._store_cursor(hook)
            await self._store(hook)
        except BaseException:
            hook.release()
            raise
        finally:
            del self._in_handshake[id_]
        self._run(hook)
        return hook

    async def replace(
        self, id_: str, description: dict[str, Any], cursor: int | None, owner: Owner
    ) -> Webhook | None:
        """
        Give a subscription another description; return None if there is none.

        Delivery by the old description continues during the handshake, so a refusal changes nothing. Without
        a cursor the new one continues where the old one is, after the response to a running request.
        """
        if id_ not in self.hooks:
            return None
        if id_ in self._in_handshake:
            raise HubError(f"{id_} is being changed already", code="invalid-subscription")
        hook, callback = self._new_hook(id_, description, cursor or 0, owner)
        self._in_handshake[id_] = hook
        old = None
        try:
            await self._handshake(hook, callback)
            old = self.hooks.get(id_)
            if old is None:  # it was deleted meanwhile
                return None
            await _cancel(old)
            if self.hooks.get(id_) is not old:
                return None
            if cursor is None:
                hook.cursor = old.cursor
            await self._swap(hook, old)
            if self.hooks.get(id_) is not hook:
                return None
        finally:
            del self._in_handshake[id_]
            for one in (hook, old):
                if one is not None and self.hooks.get(id_) is not one:
                    one.release()
        self._run(hook)
        return hook

    async def _swap(self, hook: Webhook, old: Webhook) -> None:
        """Store a subscription instead of one that has ended; if that fails, the old one continues."""
        self.hooks[hook.id] = hook  # before it is stored: requests always find one of the two
        try:
            await self._store_cursor(hook)
            await self._store(hook)
        except LogError:
            if self.hooks.get(hook.id) is hook:
                self._run(old)
            raise

    def _new_hook(
        self, id_: str, description: dict[str, Any], cursor: int, owner: Owner
    ) -> tuple[Webhook, str | None]:
        """
        Return a webhook that is not running, and the address at which its sink may consent later.

        Raises:
            RequestError: its filter is beyond the owner's budget for scanned filters.
        """
        key, key_hash = new_callback_key()
        expires = time.time() + self._service.config.webhook_consent_ms / 1000
        consent = Consent(None, key_hash, expires)
        hook = Webhook(self._service, id_, description, cursor, consent, owner)
        place = FilterPlace(WEBHOOK, id_)
        hook.scans = self._service.scans.reserve(owner.principal, place, [hook.filter])
        if self._callback_url is None:
            return hook, None
        return hook, f"{self._callback_url}/subscriptions/{id_}/confirm?key={key}"

    async def _handshake(self, hook: Webhook, callback: str | None) -> None:
        """
        Request the sink's consent.

        Raises:
            HubError: the sink does not consent. The text is the same for all reasons: a subscriber must not learn
                which addresses and ports answer inside the server's network.
        """
        client = hook.new_client(self._handshake_resolver)
        running = self._handshakes
        if (
            running.total() >= HANDSHAKES_MAX
            or running[client.host] >= HANDSHAKES_PER_HOST_MAX
        ):  # fmt: skip
            raise HubError(
                f"too many handshakes with sinks are in progress: at most {HANDSHAKES_MAX} at a time, and "
                f"{HANDSHAKES_PER_HOST_MAX} with one host; try again",
                code="too-many-handshakes",
            )
        running[client.host] += 1
        try:
            permission = await asyncio.wrap_future(self.outbound.submit(client.validate(callback)))
        finally:
            running[client.host] -= 1
            if not running[client.host]:
                del running[client.host]
        if permission.refusal:
            reason = permission.refusal
            self._service.logger.info("webhook_refused", host=client.host, reason=reason)
            raise self._no_consent()
        if permission.granted:
            hook.grant(permission.rate)
        pending = sum(hook.state == PENDING for hook in self.hooks.values())
        if hook.consent.pending and pending >= PENDING_MAX:
            raise _too_many(f"{PENDING_MAX} subscriptions wait for consent")

    def _no_consent(self) -> HubError:
        config = self._service.config
        return HubError(
            f"the sink did not consent within {config.webhook_timeout_ms} ms: it must have a public address "
            "(or one that --webhook-allow lists), and answer OPTIONS with the header "
            f"WebHook-Allowed-Origin: {config.webhook_origin}; the server's log has the reason",
            code="sink-refused",
        )

    async def confirm(self, id_: str, key: str, rate: int | None) -> Webhook | None:
        """Record consent given by callback; return None if no subscription waits under this id and key."""
        for hook in (self._in_handshake.get(id_), self.hooks.get(id_)):
            if hook is None or not hook.consent.opens(key) or hook.state in {GONE, EXPIRED}:
                continue
            hook.grant(hook.consent.rate if rate is None else rate)
            if self.hooks.get(id_) is hook:
                await self._store(hook)
            return hook
        return None

    async def unsubscribe(self, id_: str) -> bool:
        """End a subscription; return False if there is none."""
        hook = self.hooks.pop(id_, None)
        if hook is None:
            return False
        hook.deleted = True
        hook.release()
        await _cancel(hook)
        await self.write(self._service.registry.drop_subscription, id_)
        return True

    async def _store_cursor(self, hook: Webhook) -> None:
        await self.write(self._service.registry.keep_cursor, hook.id, hook.cursor)

    async def _store(self, hook: Webhook) -> None:
        """Store a subscription with its consent, again if it is confirmed meanwhile."""
        stored = None
        while stored != hook.consent and self._is_current(hook):
            stored = hook.consent
            await self.write(self._service.registry.keep_subscription, hook.id, hook.record())

    def _is_current(self, hook: Webhook) -> bool:
        """Whether a subscription is neither deleted nor replaced, so that its record may be written."""
        known = (self.hooks.get(hook.id), self._in_handshake.get(hook.id))
        return hook in known and not hook.deleted

    def _run(self, hook: Webhook) -> None:
        self.hooks[hook.id] = hook
        hook.task = asyncio.ensure_future(self._run_to_end(hook))

    async def _run_to_end(self, hook: Webhook) -> None:
        await hook.run(self._executor)
        hook.release()
        if hook.state == EXPIRED:
            self._service.logger.info("webhook_consent_expired", id=hook.id)
            self.hooks.pop(hook.id, None)
            await self.write(self._service.registry.drop_subscription, hook.id)


async def _cancel(hook: Webhook) -> None:
    """Stop a webhook and wait for its end."""
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
