"""Statements of the specification through the real daemon: jobs that are listened to, memory, moments."""

from __future__ import annotations

import asyncio

import pytest
from journal_support import Clock, connected, daemon, nop, until

from virta.journal.engine import JournalEngine
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, RefusedError, Request, Type, Value
from virta.journal.serving.embedded import Journal
from virta.journal.sessions import LISTEN_KEYS_MAX, Session
from virta.journal.values.store import TOMBSTONE_US

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


def test_a_cursor_knows_what_was_asked():
    """Touch goes on from page to page without being asked for again."""
    engine = JournalEngine(Clock(T0))
    session = Session()
    for key in ("a", "b"):
        engine.handle(commands.set_(key, 1, expires=T0 / 1e6 + 1, ttl=60).request, session)

    page = engine.handle(get(b"", m.TOUCH, query=m.QUERY_RANGE, count=1), session)
    engine.handle(get(page.cursor, query=m.QUERY_CURSOR), session)

    assert {engine.store.stored(key).expires for key in (b"a", b"b")} == {T0 + 60_000_000}


def test_a_push_needs_a_uri():
    """Without one it is refused, even if the domain is given."""
    reply = JournalEngine(Clock(T0)).handle(push(b"", key2=b"d"), Session())

    assert reply.error == "key-missing"


def test_an_attempt_is_over_at_its_deadline():
    """A DELETE at the deadline itself acknowledges nothing, whether or not anybody has looked since."""
    clock = Clock(T0)
    engine, session = JournalEngine(clock), Session()
    engine.handle(push(), session)
    key = engine.handle(Request(Function.NEXT, timeout=T0 + 5), session).pairs[0].key
    clock.now = T0 + 5

    reply = engine.handle(Request(Function.DELETE, key=key), session)

    assert reply.error == "does-not-exist"
    assert engine.handle(Request(Function.NEXT), session).pairs


@pytest.mark.parametrize(
    ("expiring", "other", "expected"),
    [(b"z", b"a", None), (b"a", b"z", b"z"), (b"z" * 300, b"a" * 300, None)],
)
def test_two_values_of_one_moment_one_of_which_expires(expiring, other, expected, tmp_path):
    """The larger wins, in whatever order they arrive, also if it is over by then or the daemon restarted."""

    def put(journal, data, expires=None):
        journal.set("k", Value(Type.BUFFER, data), timestamp=T0, expires=expires)

    results = []
    for order in ("together", "over", "restarted"):
        clock = Clock(T0)
        with Journal(tmp_path / order, clock=clock) as journal:
            put(journal, expiring, T0 / 1e6 + 1)
            if order != "together":
                clock.now += 2_000_000
                journal.ping()
            if order != "restarted":
                put(journal, other)
        clock.now = T0 + 2_000_000
        with Journal(tmp_path / order, clock=clock) as journal:
            put(journal, other)
            put(journal, expiring, T0 / 1e6 + 1)  # sent again
            results.append(journal.get("k"))
    assert results == [expected] * 3


def test_values_beyond_memory_are_on_disk(tmp_path):
    """What was not used for longest goes to disk and is read from there; the bound holds."""
    memory = 400_000
    with Journal(tmp_path, memory_bytes_max=memory) as journal:
        for i in range(100):
            journal.set(f"k{i:02}", bytes([i]) * 10_000)
            journal.get("k00")
            assert journal.admin("stats")["memory_bytes"] <= memory
        figures = journal.admin("stats")
        store = journal.engine.store
        assert store.stored(b"k00").data is not None
        assert store.stored(b"k01").data is None
        assert [journal.get(f"k{i:02}") for i in range(100)] == [
            bytes([i]) * 10_000 for i in range(100)
        ]
    assert 50 < figures["values_spilled"] < 100
    with Journal(tmp_path, memory_bytes_max=memory) as journal:
        assert journal.get("k01") == b"\1" * 10_000
        assert journal.admin("stats")["memory_bytes"] <= memory


def test_tombstones_end_on_disk_too(tmp_path):
    """For seven days an older SET stays without effect, over restarts; then nothing is left of the key."""
    clock = Clock(T0)
    with Journal(tmp_path, clock=clock) as journal:
        journal.set("k", "v", timestamp=T0 - 9)
        journal.delete("k", timestamp=T0 - 8)
    clock.now = T0 + TOMBSTONE_US // 2
    with Journal(tmp_path, clock=clock) as journal:
        journal.set("k", "old", timestamp=T0 - 9)
        assert journal.get("k") is None
    clock.now = T0 + TOMBSTONE_US  # from the delete, not from a restart
    with Journal(tmp_path, clock=clock) as journal:
        journal.ping()
        assert journal.engine.store.stored(b"k") is None
        journal.set("k", "old", timestamp=T0 - 9)
        assert journal.get("k") == "old"


def test_the_limit_of_jobs(tmp_path):
    """A job more than allowed is refused; one that replaces another is not."""
    with Journal(tmp_path, jobs_max=2) as journal:
        for number in (1, 2, 2):
            journal.push(f"http://h/{number}")
        with pytest.raises(RefusedError, match="out-of-memory"):
            journal.push("http://h/3")


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


def test_a_key_renamed_to_itself_is_not_gone():
    """Who listens hears of one change (6.1)."""

    async def run():
        async with (
            daemon(clock=Clock(T0)) as server,
            connected(server) as ear,
            connected(server) as mouth,
        ):
            value = Value(Type.STRING, b"v")
            await ear.ask(Request(Function.SET, flags=m.LISTEN, key=b"k", value=value))
            await mouth.ask(
                Request(Function.RENAME, flags=m.OVERWRITE, key=b"k", key2=b"k", count=0, query=1)
            )
            await ear.ask(nop())
            return [told(message) for message in ear.heard]

    assert asyncio.run(run()) == [(b"k", False, 2)]


def test_what_is_gone_is_not_said_to_be_on_disk(tmp_path):
    """A SET that came too late is answered with the deletion it lost against, without persist (3.2)."""

    async def run():
        async with daemon(tmp_path, clock=Clock(T0)) as server, connected(server) as wire:
            await wire.ask(Request(Function.DELETE, key=b"k", timestamp=900))
            late = Request(
                Function.SET, flags=m.PERSIST, key=b"k", timestamp=800, value=Value(1, b"v")
            )
            reply = await wire.ask(late)
            return reply.flags, reply.timestamp, reply.error

    assert asyncio.run(run()) == (0, 900, "")
