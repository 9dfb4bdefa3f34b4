"""Dead letters of a webhook, sending one again, and a test event."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import Route

from virta.clock import now_us, time_text
from virta.hub.delivery import DEAD_LETTERS
from virta.server.access.rules import principal_of, require_whole
from virta.server.api.handler import ApiHandler, ErrorsAsRefusals, not_found
from virta.server.api.observe.explanations import read_typed
from virta.server.api.observe.schemas import (
    DeadLetter,
    DeadLetterPage,
    RedeliverBody,
    RedeliverResult,
    RedeliverView,
    SendResult,
)
from virta.server.api.subscriptions import may_see
from virta.server.webhooks.client import Verdict

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from virta.log import Log
    from virta.server.webhooks.delivery import Webhook

LETTERS_MAX = 100  # in one answer
# The end of the log is searched in pieces, newest first, until there are enough letters or this much was read.
PIECE_RECORDS = 65_536
SEARCH_RECORDS_MAX = 4_000_000
SEARCH_S_MAX = 2.0
TEST_TYPE = "virta.webhook.test"


class WebhooksApi(ApiHandler):
    """Handlers under `/subscriptions/ID`."""

    def routes(self) -> list[Route]:
        return [
            Route("/subscriptions/{id}/dead-letters", self.letters, methods=["GET"]),
            Route("/subscriptions/{id}/redeliver", self.redeliver, methods=["POST"]),
            Route("/subscriptions/{id}/test", self.test, methods=["POST"]),
        ]

    async def letters(self, request: Request) -> Response:
        hook = self._hook(request)
        service, principal = self._service, principal_of(request)
        if hook.owner.principal != principal.id:  # letters contain events
            require_whole(service, principal, "read", hook.channel)
        with ErrorsAsRefusals():
            page = await asyncio.get_running_loop().run_in_executor(
                service.executor, find_letters, service.log, hook.id
            )
        return self._json(page)

    async def redeliver(self, request: Request) -> Response:
        """Send the events of dead letters again, one after the other; the letters stay in the log."""
        hook = self._hook(request)
        body = await read_typed(request, RedeliverBody)
        number = len(body.offsets)
        acted = self._service.audit.acted
        acted("webhook_redelivered", principal_of(request).id, id=hook.id, letters=number)
        results = []
        for offset in body.offsets:
            with ErrorsAsRefusals():
                letter = await asyncio.to_thread(read_letter, self._service.log, offset, hook.id)
            if letter is None:
                results.append(RedeliverResult(offset, False, "no dead letter of this webhook"))
                continue
            sent = await self._send(hook, msgspec.json.encode(letter.event))
            results.append(RedeliverResult(offset, sent.delivered, sent.reason))
        return self._json(RedeliverView(results))

    async def test(self, request: Request) -> Response:
        hook = self._hook(request)
        event = {
            "specversion": "1.0",
            "id": str(uuid.uuid4()),
            "source": self._service.config.source,
            "type": TEST_TYPE,
            "time": time_text(now_us()),
            "subject": hook.id,
            "data": {"channel": hook.channel},
        }
        return self._json(await self._send(hook, msgspec.json.encode(event)))

    async def _send(self, hook: Webhook, value: bytes) -> SendResult:
        """Send one event on a connection of its own, once."""
        webhooks = self._service.webhooks
        client = hook.new_client(webhooks.resolver)
        try:
            sending = client.deliver(value, hook.signature(str(uuid.uuid4()), value))
            answer = await asyncio.wrap_future(webhooks.outbound.submit(sending))
        finally:
            webhooks.outbound.submit(client.close())
        delivered = answer.verdict is Verdict.DELIVERED
        return SendResult(delivered, "" if delivered else answer.reason)

    def _hook(self, request: Request) -> Webhook:
        hook = self._service.webhooks.hooks.get(request.path_params["id"])
        if hook is None or not may_see(principal_of(request), hook):
            raise not_found("no subscription has this id")
        return hook


def find_letters(log: Log, id_: str) -> DeadLetterPage:
    """Return the newest dead letters of a subscription; blocks."""
    began = time.monotonic()
    found: list[DeadLetter] = []
    end, first = log.next_offset, log.first_offset
    searched = 0
    while end > first and len(found) < LETTERS_MAX:
        if searched >= SEARCH_RECORDS_MAX or time.monotonic() - began > SEARCH_S_MAX:
            return DeadLetterPage(found, complete=False)
        start = max(first, end - PIECE_RECORDS)
        piece: list[DeadLetter] = []
        with log.read(
            topics=[DEAD_LETTERS], start=start, end=end, on_gap="skip", on_corruption="skip"
        ) as reader:
            for records in reader.batches():
                piece += [one for record in records if (one := _letter(record, id_)) is not None]
        found += reversed(piece)
        searched += end - start
        end = start
    return DeadLetterPage(found[:LETTERS_MAX], complete=len(found) <= LETTERS_MAX)


def read_letter(log: Log, offset: int, id_: str) -> DeadLetter | None:
    """Return the dead letter at an offset; None if there is none of this subscription. Blocks."""
    if not log.first_offset <= offset < log.next_offset:
        return None
    with log.read(
        topics=[DEAD_LETTERS], start=offset, end=offset + 1, on_gap="skip", on_corruption="skip"
    ) as reader:
        for record in reader:
            return _letter(record, id_)
    return None


def _letter(record: Any, id_: str) -> DeadLetter | None:
    try:
        event = msgspec.json.decode(bytes(record.value))
        data = event["data"]
        if event["subject"] != id_:
            return None
        return DeadLetter(
            record.offset, event["time"], data["reason"], data["attempts"], data["event"]
        )
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
