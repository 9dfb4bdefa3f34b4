"""Connections that listen: limits, and one notification a change."""

from __future__ import annotations

import asyncio

from journal_support import Clock, Console, connected, daemon, nop

from virta.journal.engine import JournalEngine
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.sessions import LISTEN_KEYS_MAX, Session

T0 = 1_700_000_000_000_000


def get(key, flags=0, **fields):
    return Request(Function.GET, flags=flags, key=key, **fields)


def summary(message):
    return message.pair.key, bool(message.flags & m.DELETED), message.pair.value.type


def test_too_many_keys_to_listen_to_change_nothing():
    """A GET that marks, or a SET, is refused whole when the connection would listen to too many keys."""
    engine = JournalEngine(Clock(T0))
    session = Session(lambda _: None)
    session.keys = {b"%d" % i for i in range(LISTEN_KEYS_MAX)}
    engine.handle(commands.set_("k", 1).request, Session())

    marked = engine.handle(get(b"k", m.LISTEN, timeout=T0 + 9), session)
    stored = engine.handle(commands.set_("new", 1, listen=True).request, session)

    assert {marked.error.partition(":")[0], stored.error.partition(":")[0]} == {"too-large"}
    assert engine.handle(get(b"k", m.WORKED_ON), session).error == ""
    assert engine.handle(get(b"new"), session).error == "does-not-exist"


def test_a_key_renamed_to_itself_is_not_removed():
    """A listener gets one notification (6.1)."""

    async def run():
        async with (
            daemon(clock=Clock(T0)) as server,
            connected(server) as listener,
            connected(server) as writer,
        ):
            value = Value(Type.STRING, b"v")
            await listener.ask(Request(Function.SET, flags=m.LISTEN, key=b"k", value=value))
            await writer.ask(
                Request(Function.RENAME, flags=m.OVERWRITE, key=b"k", key2=b"k", count=0, query=1)
            )
            await listener.ask(nop())
            return [summary(message) for message in listener.received]

    assert asyncio.run(run()) == [(b"k", False, 2)]


def test_listening_is_bounded():
    """A connection listens to so many keys and no more."""
    console = Console()
    session = Session(lambda _: None)
    for i in range(LISTEN_KEYS_MAX):
        console.engine.listeners.listen(session, [b"%d" % i])

    request = commands.set_("one more", 1, listen=True).request
    assert console.engine.handle(request, session).error.startswith("too-large")
    console.engine.close(session)
    assert len(console.engine.listeners) == 0
