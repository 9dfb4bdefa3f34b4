"""`GET /channels`: the channels, what the log contains of each, and their current subscriptions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from virta.clock import time_text
from virta.errors import LogError, RequestError
from virta.hub.topics import META, is_reserved
from virta.log.limits import TOPICS_MAX
from virta.server.http.responses import log_refusal
from virta.server.http.routes import name_fault

if TYPE_CHECKING:
    from starlette.requests import Request

    from virta.log import Log, TopicInfo
    from virta.server.service import Service

# Channels in one answer.
PAGE_DEFAULT = 100
PAGE_MAX = 1000
# The first response waits for a scan of the whole log. After this long the client has to try again; the
# scan continues, and its counts are kept.
COUNT_S_MAX = 10.0


class ChannelsApi:
    """The handler. It counts records in its own thread, so readers of history do not wait for it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="virta-channels")
        self._counting: asyncio.Future[list[TopicInfo]] | None = None

    def routes(self) -> list[Route]:
        return [Route("/channels", self.list, methods=["GET"])]

    async def list(self, request: Request) -> Response:
        limit = _limit(request.query_params.get("limit"))
        after = request.query_params.get("after") or None
        log, subscribers = self._service.log, self._service.hub.subscribers()
        live = {name: count for name, count in subscribers.items() if _is_shown(name)}
        try:
            async with asyncio.timeout(COUNT_S_MAX):
                await self._count(log)
                page = await asyncio.get_running_loop().run_in_executor(
                    self._thread, channel_page, log, live, after, limit
                )
        except TimeoutError:
            raise RequestError(
                503, "channels-not-counted", "the log is still being counted: try again later"
            ) from None
        except LogError as error:
            raise log_refusal(error) from error
        return Response(msgspec.json.encode(page), 200, self._service.responder.event_headers())

    async def _count(self, log: Log) -> None:
        """Update the counts; requests share one scan, which continues if they are cancelled."""
        if self._counting is None or self._counting.done():
            loop = asyncio.get_running_loop()
            self._counting = loop.run_in_executor(self._thread, lambda: log.topics(limit=1))
        await asyncio.shield(self._counting)


def channel_page(log: Log, live: dict[str, int], after: str | None, limit: int) -> dict[str, Any]:
    """Return up to `limit` channels after the name `after`, in order of their UTF-8, and the next page's `after`."""
    behind = b"" if after is None else after.encode("utf-8", "surrogatepass")
    found = {name: _row(name, None, live[name]) for name in live if name.encode() > behind}
    logged = 0
    cursor: str | bytes | None = after
    while logged <= limit:
        asked = min(limit + 1, TOPICS_MAX)
        topics = log.topics(after=cursor, limit=asked)
        for info in topics:
            name = _name(info.topic)
            if name is not None:
                found[name] = _row(name, info, live.get(name, 0))
                logged += 1
        if len(topics) < asked:
            break
        cursor = topics[-1].topic
    rows = [found[name] for name in sorted(found, key=str.encode)]
    more = len(rows) > limit
    return {"channels": rows[:limit], "next": rows[limit - 1]["name"] if more else None}


def _row(name: str, info: TopicInfo | None, subscribers: int) -> dict[str, Any]:
    return {
        "name": name,
        "records": info.records if info else 0,
        "bytes": info.bytes if info else 0,
        "firstOffset": info.first_offset if info else None,
        "firstTime": time_text(info.first_timestamp) if info else None,
        "lastOffset": info.last_offset if info else None,
        "lastTime": time_text(info.last_timestamp) if info else None,
        "subscribers": subscribers,
    }


def _name(topic: bytes) -> str | None:
    """Return the channel of a topic; None for the server's own, and for topics that cannot be channel names."""
    try:
        name = bytes(topic).decode()
    except UnicodeDecodeError:
        return None
    return name if _is_shown(name) else None


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
