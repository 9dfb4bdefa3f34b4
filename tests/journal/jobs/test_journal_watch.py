"""Listening to jobs: a push, a reserve and an end are notifications."""

from __future__ import annotations

import asyncio

from journal_support import Clock, connected, daemon, nop, until

from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request

T0 = 1_700_000_000_000_000


URI = b"http://h/1"


def get(key, flags=0, **fields):
    return Request(Function.GET, flags=flags, key=key, **fields)


def push(uri=URI, **fields):
    return Request(Function.PUSH, key=uri, count=0, query=m.QUERY_RANGE, **fields)


def told(message):
    return message.pair.key, bool(message.flags & m.DELETED), message.pair.value.type


def test_listening_to_a_job():
    """The uri of a job changes with a newer push and is gone when it is done; its key when it is handed out."""

    async def run():
        clock = Clock(T0)
        async with (
            daemon(clock=clock) as server,
            connected(server) as ear,
            connected(server) as mouth,
        ):
            await mouth.ask(push(timestamp=T0))
            page = await ear.ask(get(b"", m.LISTEN, query=m.QUERY_RANGE, count=0))
            sort_key = next(pair.key for pair in page.pairs if pair.key != URI)
            await ear.ask(get(URI, m.LISTEN))
            await ear.ask(push(timestamp=T0 + 1))  # its own: not told
            await mouth.ask(push(timestamp=T0 + 2))
            lease = (await mouth.ask(Request(Function.NEXT, timeout=T0 + 50))).pairs[0].key
            await mouth.ask(get(lease, timeout=T0 + 60))  # a heartbeat changes nothing
            await mouth.ask(Request(Function.DELETE, key=lease, flags=m.OVERWRITE))
            await ear.ask(nop())
            heard = [told(message) for message in ear.heard]
            ear.heard.clear()
            # And again, until its time is over and the domain takes no second attempt.
            await mouth.ask(
                commands.admin("configure", domain="h", settings={"max_attempts": 1}).request
            )
            await mouth.ask(push(timestamp=T0 + 3))
            await mouth.ask(Request(Function.NEXT, timeout=T0 + 70))
            clock.now = T0 + 70
            await mouth.ask(nop())
            later = [told(await ear.hear()) for _ in range(2)]
            watch = server.node.engine.watch
            await ear.close()
            await until(lambda: not watch._seen)
            return sort_key, heard, later, server.node.engine.jobs.scheduler._watchers

    sort_key, heard, later, watchers = asyncio.run(run())
    assert (sort_key, True, 0) in heard
    assert [each for each in heard if each[0] == URI] == [(URI, False, 2), (URI, True, 0)]
    assert later == [(URI, False, 2), (URI, True, 0)]
    assert len(watchers) == 1  # that of the ordered keys
