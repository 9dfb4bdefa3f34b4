"""GET of many keys: cursors keep what was asked, details describe their pair."""

from __future__ import annotations

import asyncio

from journal_support import Clock, connected, daemon

from virta.journal.engine import JournalEngine
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.sessions import Session

T0 = 1_700_000_000_000_000


URI = b"http://h/1"


def get(key, flags=0, **fields):
    return Request(Function.GET, flags=flags, key=key, **fields)


def push(uri=URI, **fields):
    return Request(Function.PUSH, key=uri, count=0, query=m.QUERY_RANGE, **fields)


def test_a_cursor_knows_what_was_asked():
    """Touch goes on from page to page without being asked for again."""
    engine = JournalEngine(Clock(T0))
    session = Session()
    for key in ("a", "b"):
        engine.handle(commands.set_(key, 1, expires=T0 / 1e6 + 1, ttl=60).request, session)

    page = engine.handle(get(b"", m.TOUCH, query=m.QUERY_RANGE, count=1), session)
    engine.handle(get(page.cursor, query=m.QUERY_CURSOR), session)

    assert {engine.store.stored(key).expires for key in (b"a", b"b")} == {T0 + 60_000_000}


def test_details_are_those_of_their_pair():
    """The size is that of the pair's data, uri or payload, whichever command shows the job (3.2)."""

    async def run():
        async with daemon(clock=Clock(T0)) as server, connected(server) as wire:
            await wire.ask(push(timestamp=T0 - 1, value=Value(Type.BUFFER, b"pay")))
            flags = m.DATA | m.DETAILS
            page = await wire.ask(get(b"", flags, query=m.QUERY_RANGE, count=0))
            one = await wire.ask(get(URI, flags))
            quick = await wire.ask(Request(Function.NEXT, flags=flags, timeout=T0 + 5))
            await wire.ask(get(quick.pairs[0].key, timeout=0))
            slow = await wire.ask(Request(Function.NEXT, flags=flags, timeout=T0 + 5))
            return [
                [pair.details for pair in each.all_pairs()] for each in (page, one, quick, slow)
            ]

    page, one, quick, slow = asyncio.run(run())
    assert [details.size for details in page] == [10, 10]
    assert [details.size for details in one] == [10]
    assert [details.size for details in quick] == [10, 3]
    assert quick == slow
    assert {(d.created, d.modified, d.worked_until, d.bits) for d in quick} == {
        (T0 - 1, T0 - 1, T0 + 5, 4)
    }
