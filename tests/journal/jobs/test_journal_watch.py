"""Listening to jobs: a push, a reserve and an end are notifications."""

from __future__ import annotations

import asyncio

from journal_support import Clock, connected, daemon, eventually, nop

from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request

T0 = 1_700_000_000_000_000


URI = b"http://h/1"


def get(key, flags=0, **fields):
    return Request(Function.GET, flags=flags, key=key, **fields)


def push(uri=URI, **fields):
    return Request(Function.PUSH, key=uri, count=0, query=m.QUERY_RANGE, **fields)


def summary(message):
    return message.pair.key, bool(message.flags & m.DELETED), message.pair.value.type


def test_listening_to_a_job():
    """A newer push changes the uri of a job, its end removes it; a reserve removes its sort key."""

    async def run():
        clock = Clock(T0)
        async with (
            daemon(clock=clock) as server,
            connected(server) as listener,
            connected(server) as writer,
        ):
            await writer.ask(push(timestamp=T0))
            page = await listener.ask(get(b"", m.LISTEN, query=m.QUERY_RANGE, count=0))
            sort_key = next(pair.key for pair in page.pairs if pair.key != URI)
            await listener.ask(get(URI, m.LISTEN))
            await listener.ask(push(timestamp=T0 + 1))  # its own: no notification
            await writer.ask(push(timestamp=T0 + 2))
            lease = (await writer.ask(Request(Function.NEXT, timeout=T0 + 50))).pairs[0].key
            await writer.ask(get(lease, timeout=T0 + 60))  # a heartbeat changes nothing
            await writer.ask(Request(Function.DELETE, key=lease, flags=m.OVERWRITE))
            await listener.ask(nop())
            received = [summary(message) for message in listener.received]
            listener.received.clear()
            # And again, until its time is over and the domain takes no second attempt.
            await writer.ask(
                commands.admin("configure", domain="h", settings={"max_attempts": 1}).request
            )
            await writer.ask(push(timestamp=T0 + 3))
            await writer.ask(Request(Function.NEXT, timeout=T0 + 70))
            clock.now = T0 + 70
            await writer.ask(nop())
            later = [summary(await listener.receive()) for _ in range(2)]
            watch = server.node.engine.watch
            await listener.close()
            await eventually(lambda: not len(watch))
            return sort_key, received, later, server.node.engine.jobs.scheduler.watchers

    sort_key, received, later, watchers = asyncio.run(run())
    assert (sort_key, True, 0) in received
    assert [each for each in received if each[0] == URI] == [(URI, False, 2), (URI, True, 0)]
    assert later == [(URI, False, 2), (URI, True, 0)]
    assert watchers == 1  # that of the ordered keys
