"""`GET /channels`: the channels, what the log contains of each, and their current subscriptions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from starlette.routing import Route

from virta.clock import time_text
from virta.errors import RequestError
from virta.hub.delivery import META, is_reserved
from virta.log.limits import TOPICS_MAX
from virta.server.access.rules import principal_of
from virta.server.api.description.schemas import ChannelPage, ChannelSummary
from virta.server.api.handler import ApiHandler, ErrorsAsRefusals
from virta.server.http.routes import name_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from virta.log import Log, TopicInfo
    from virta.server.service import Service

# Channels in one response.
PAGE_DEFAULT = 100
PAGE_MAX = 1000
# The first response waits for a scan of the whole log. After this long the client has to try again; the
# scan continues, and its counts are kept.
COUNT_S_MAX = 10.0


class ChannelsApi(ApiHandler):
    """Count records in a thread of its own, so that readers of history do not wait for it."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="virta-channels")
        self._counting: asyncio.Future[list[TopicInfo]] | None = None

    def routes(self) -> list[Route]:
        return [Route("/channels", self.list, methods=["GET"])]

    async def list(self, request: Request) -> Response:
        limit = _limit(request.query_params.get("limit"))
        after = request.query_params.get("after") or None
        log, subscribers = self._service.log, self._service.hub.subscribers()
        rights = principal_of(request).rights

        def is_shown(name: str) -> bool:
            return _is_shown(name) and rights.permission("read", name) is not None

        live = {name: count for name, count in subscribers.items() if is_shown(name)}
        try:
            with ErrorsAsRefusals():
                async with asyncio.timeout(COUNT_S_MAX):
                    await self._count(log)
                    page = await asyncio.get_running_loop().run_in_executor(
                        self._thread, channel_page, log, live, after, limit, is_shown
                    )
        except TimeoutError:
            raise RequestError(
                503, "channels-not-counted", "the log is still being counted: try again later"
            ) from None
        rates = self._service.figures.rates
        for channel in page.channels:
            channel.events_per_second = rates.get(channel.name, 0.0)
            channel.kept = self._service.retention.kept(channel.name)
        return self._json(page)

    async def _count(self, log: Log) -> None:
        """Update the counts; requests share one scan, which continues if they are cancelled."""
        if self._counting is None or self._counting.done():
            loop = asyncio.get_running_loop()
            self._counting = loop.run_in_executor(self._thread, lambda: log.topics(limit=1))
        await asyncio.shield(self._counting)


def channel_page(
    log: Log,
    live: dict[str, int],
    after: str | None,
    limit: int,
    is_shown: Callable[[str], bool] | None = None,
) -> ChannelPage:
    """
    Return up to `limit` channels after the name `after`, in order of their UTF-8.

    Args:
        live: channels with subscriptions, and how many.
        is_shown: whether a name is a channel that the client may read.
    """
    is_shown = is_shown or _is_shown
    behind = b"" if after is None else after.encode("utf-8", "surrogatepass")
    found = {name: _summary(name, None, live[name]) for name in live if name.encode() > behind}
    logged = 0
    cursor: str | bytes | None = after
    while logged <= limit:
        count = min(limit + 1, TOPICS_MAX)
        topics = log.topics(after=cursor, limit=count)
        for info in topics:
            name = _name(info.topic)
            if name is not None and is_shown(name):
                found[name] = _summary(name, info, live.get(name, 0))
                logged += 1
        if len(topics) < count:
            break
        cursor = topics[-1].topic
    rows = [found[name] for name in sorted(found, key=str.encode)]
    return ChannelPage(rows[:limit], rows[limit - 1].name if len(rows) > limit else None)


def _summary(name: str, info: TopicInfo | None, subscribers: int) -> ChannelSummary:
    if info is None:
        return ChannelSummary(name, 0, 0, None, None, None, None, subscribers)
    first, last = time_text(info.first_timestamp), time_text(info.last_timestamp)
    return ChannelSummary(
        name, info.records, info.bytes, info.first_offset, first, info.last_offset, last, subscribers
    )  # fmt: skip


def _name(topic: bytes) -> str | None:
    """Return the text of a topic; None if it is none."""
    try:
        return bytes(topic).decode()
    except UnicodeDecodeError:
        return None


def _is_shown(name: str) -> bool:
    return not (name == META or is_reserved(name) or name_fault(name))


def _limit(text: str | None) -> int:
    if text is None:
        return PAGE_DEFAULT
    if text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= PAGE_MAX:
        return int(text)
    raise RequestError(
        400, "invalid-limit", f"limit is {text!r}: it must be a whole number from 1 to {PAGE_MAX}"
    )
