"""The daemon on a real socket: job scenarios, worked exchanges, listeners, bad input."""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc

import msgspec
import pytest
from journal_support import Clock, Wire, connected, daemon, eventually, nop
from journal_vectors import (
    SCENARIOS,
    delete,
    get,
    next_,
    play,
    push,
    reply_of,
    request_of,
    set_,
    text,
)
from journal_vectors import VECTORS as WIRE_VECTORS

import virta
from virta.journal.jobs.job import WORKING
from virta.journal.jobs.lifecycle import Jobs
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import encode_reply, encode_request
from virta.journal.protocol.messages import Function, Request, Value
from virta.journal.serving.tcp import JournalServer

T0 = 1_700_000_000_000_000


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s["scenario"])
def test_job_scenarios(scenario, tmp_path):
    """Every scenario gives its results through the real daemon, with its log on disk."""

    async def run():
        clock = Clock()
        results = []
        async with daemon(tmp_path, clock=clock) as server, connected(server) as wire:
            for step in scenario["steps"]:
                results.append(await play(step, wire, clock, results))
        return results

    assert [step["result"] for step in scenario["steps"]] == asyncio.run(run())


async def stage(name, server, clock):
    """What the worked exchange takes for granted."""
    engine = server.node.engine
    now = clock.now

    def put(key, value, ts, **options):
        engine.store.set(key, value, ts, now, **options)

    if name == "SET without overwrite on an existing key" or name in (
        "GET color",
        "GET with details",
        "DELETE with tombstone",
    ):
        put(b"color", text(b"blue"), T0 + 1, persist=True)
    elif name in ("GET probe (no data) with touch", "DELETE immediate and complete"):
        ttl = 60_000_000
        put(b"sess:7", Value(1, b"\0\xff"), T0 + 2, expires=T0 + ttl, ttl=ttl)
    elif name.startswith(("GET range", "GET cursor", "GET regex")):
        put(b"a", Value(3, (1).to_bytes(8)), T0)
        put(b"b", Value(3, (-2).to_bytes(8, signed=True)), T0)
        put(b"c", Value(0, b""), T0)
    elif name == "ADD 5 to counter":
        put(b"hits", Value(3, (42).to_bytes(8)), T0)
    elif name == "LOCK held by somebody else":
        put(b"hits", Value(3, (47).to_bytes(8)), T0 + 12)
        engine.store.lock(b"hits", object(), T0 + 12_000_000, now)
    elif name == "NOT on a boolean":
        put(b"on", Value(5, b"\0"), T0)
    elif name == "RENAME old to new":
        put(b"old", text(b"x"), T0)
    elif name.startswith(("NEXT: not yet", "NEXT: a job", "job finished")):
        engine.jobs.push(
            b"http://example.com/page", b"", T0 + 16, T0, priority=20, start=T0 + 10_000_000
        )
        if name.startswith("job finished"):
            engine.jobs.reserve(b"example.com", T0 + 10_000_001)


@pytest.mark.parametrize(
    "vector", [v for v in WIRE_VECTORS if v["request"] is not None], ids=lambda v: v["name"]
)
def test_worked_exchanges(vector):
    """Each worked request, sent to a daemon in the state it assumes, gets its reply to the byte."""
    name = vector["name"]
    expected = reply_of(vector["reply"])
    request = request_of(vector["request"])

    async def run():
        clock = Clock(expected.timestamp)
        if "touch" in name:
            clock.now = T0 + 3
        if "details" in name:
            clock.now = T0 + 5
        async with daemon(clock=clock) as server, connected(server) as wire:
            await stage(name, server, clock)
            if name.startswith("GET cursor"):
                first = await wire.ask(
                    Request(Function.GET, 77, m.DATA, T0, count=2, key=b"a", key2=b"d", query=1)
                )
                request.key = first.cursor
            return await wire.ask(request)

    reply = asyncio.run(run())
    if name.startswith("GET range"):
        assert reply.cursor is not None
        reply.cursor = expected.cursor  # opaque: ours says more
    assert encode_reply(expected) == encode_reply(reply)


def test_listeners_are_notified_of_changes_by_others():
    """A listener is notified of every change and of the end of a key, but not of its own changes."""

    async def run():
        clock = Clock(T0)
        async with (
            daemon(clock=clock) as server,
            connected(server) as listener,
            connected(server) as writer,
        ):
            await listener.ask(set_(b"sess:7", flags=m.OVERWRITE | m.LISTEN, timestamp=T0 - 9))
            await listener.ask(set_(b"sess:7", timestamp=T0 - 8))
            await writer.ask(
                Request(
                    Function.SET,
                    flags=m.OVERWRITE,
                    key=b"sess:7",
                    value=Value(1, b"x"),
                    timestamp=T0 - 7,
                )
            )
            await writer.ask(delete(b"sess:7", timestamp=T0 - 6))
            await writer.ask(set_(b"sess:7", timestamp=T0 - 5, timeout=T0 + 5))
            clock.now = T0 + 5
            await writer.ask(nop())
            return [await listener.receive() for _ in range(4)]

    received = asyncio.run(run())
    assert {(0, True)} == {(h.identifier, bool(h.flags & m.NOTIFICATION)) for h in received}
    assert [(h.timestamp, h.flags & m.DELETED, h.pair.value.type) for h in received] == [
        (T0 - 7, 0, 1),
        (T0 - 6, m.DELETED, 0),
        (T0 - 5, 0, 2),
        (T0 + 5, m.DELETED, 0),
    ]


def test_next_listens_for_work_earlier_than_announced():
    """A worker that waits is woken once when something becomes due before the announced time."""

    async def run():
        clock = Clock(T0)
        async with daemon(clock=clock) as server, connected(server) as listener:
            await listener.ask(push(b"late", timeout=T0 + 1000, flags=0))
            reply = await listener.ask(next_(flags=m.LISTEN))
            assert (reply.timeout, reply.pairs) == (T0 + 1000, [])
            await listener.ask(push(b"soon", timeout=T0 + 10, flags=0))
            clock.now = T0 + 10
            await listener.ask(nop())
            woken = await listener.receive()
            got = await listener.ask(next_())
            return woken, got

    woken, got = asyncio.run(run())
    assert (woken.identifier, woken.pair.key) == (0, b"d")
    assert got.pairs[0].value.data == b"soon"


class StoppedClock(Clock):
    """A clock that stands still until `go`, however slow the machine is, and then is as quick as any."""

    def __init__(self):
        super().__init__(T0)
        self._began = None

    def go(self):
        self._began = time.monotonic_ns()

    def __call__(self):
        passed = 0 if self._began is None else time.monotonic_ns() - self._began
        return self.now + passed // 1_000


def test_a_lapse_is_seen_by_itself(monkeypatch):
    """A work deadline that passes is handled at its time, although no request comes and no tick is near."""
    monkeypatch.setattr("virta.journal.serving.commit_loop.TICK_S_MAX", 3600)

    async def run():
        clock = StoppedClock()
        async with daemon(clock=clock) as server, connected(server) as wire:
            await wire.ask(push(b"x", flags=0))
            await wire.ask(next_(timeout=T0 + 150_000))
            reply = await wire.ask(next_(flags=m.LISTEN))
            assert reply.timeout == T0 + 150_000
            clock.go()
            # Announced for then, so nothing is sent; the timer must have handled the lapse.
            job = server.node.engine.jobs.find(b"x")
            await eventually(lambda: job.attempts)
            return clock() - reply.timeout

    assert 0 <= asyncio.run(run()) < 3_000_000


def test_deadlines_on_time_with_a_set_clock():
    """Ten thousand deadlines at random times: each lapse is counted at its time, none before."""
    rng = random.Random(3)
    jobs = Jobs()
    now = 1_000
    for i in range(10_000):
        jobs.push(b"http://h%d/%d" % (i % 50, i), b"", 1, now, start=now)
    deadlines = {}
    while taken := jobs.reserve(b"", now, until=now + rng.randrange(1, 10_000)):
        deadlines[taken[0].uri] = (taken[0], taken[0].worked_until)
    for _ in range(200):
        now += rng.randrange(100)
        jobs.tick(now)

        assert all(job.attempts == (until <= now) for job, until in deadlines.values())


def test_deadlines_on_time_under_load():
    """On a busy daemon a thousand lapses are handled with the first requests after their time."""

    async def run():
        clock = StoppedClock()
        async with daemon(clock=clock) as server, connected(server) as wire:
            for i in range(1_000):
                wire.send(push(b"http://h/%d" % i, b"", flags=0))
            await wire.ask(nop())
            deadline = T0 + 300_000
            taken = await wire.ask(next_(b"h", timeout=deadline, count=1_000))
            clock.go()
            late = 0
            while server.node.engine.jobs.domains[b"h"].counts[WORKING]:
                late += clock() >= deadline
                for i in range(100):
                    wire.send(set_(b"load%d" % i))
                await wire.ask(nop())
            return len(taken.pairs), late, clock() - deadline

    taken, late, microseconds = asyncio.run(run())
    assert taken == 1_000
    assert late <= 1
    assert microseconds < 3_000_000


def test_removed_on_delivery_is_on_disk(tmp_path):
    """A job that counts as done when handed out is removed from the log before the reply."""

    async def run():
        async with daemon(tmp_path) as server, connected(server) as wire:
            await wire.ask(push(b"x"))
            await wire.ask(next_(flags=m.OVERWRITE))
            with virta.open(tmp_path / f"{0:020}.log", visibility="committed") as log:
                records = [(str(record.topic), record.value) for record in log.read()]
            return [msgspec.msgpack.decode(value)[3] for topic, value in records if topic == "job"]

    entries = asyncio.run(run())
    assert (len(entries), entries[-1]) == (2, [])


def test_a_pattern_that_matches_little_comes_in_pages():
    """A search passes over a bounded number of keys per reply, and still finds what is at the end."""

    async def run():
        async with daemon() as server, connected(server) as wire:
            store, now = server.node.engine.store, server.node.engine.clock()
            for i in range(45_000):
                store.set(b"k%06d" % i, text(b""), now, now)
            reply = await wire.ask(get(b"44999", query=m.QUERY_REGEX))
            pages = [reply]
            while reply.cursor is not None:
                reply = await wire.ask(get(reply.cursor, query=m.QUERY_CURSOR))
                pages.append(reply)
            return [len(page.pairs) for page in pages]

    assert asyncio.run(run()) == [0, 0, 1]


def test_patterns_that_hang_others_are_quick_here():
    """Nested repetition over a long key takes linear time."""

    async def run():
        async with daemon() as server, connected(server) as wire:
            await wire.ask(set_(b"a" * 60_000 + b"b"))
            began = time.process_time()
            for pattern in (b"(a+)+$", b"(a|a)*c", b"(a*)*c", b"(.*a){12}c"):
                reply = await wire.ask(get(pattern, query=m.QUERY_REGEX))
                assert (reply.error, reply.pairs) == ("", [])
            return time.process_time() - began

    assert asyncio.run(run()) < 5


def test_a_taken_port_releases_the_journal(tmp_path):
    """A daemon that cannot listen gives its directory back."""

    async def run():
        async with daemon() as first:
            second = JournalServer(tmp_path, port=first.address[1])
            with pytest.raises(OSError, match="in use"):
                await second.start()
            await second.stop()
            async with daemon(tmp_path) as third, connected(third) as wire:
                return (await wire.ask(nop())).error

    assert asyncio.run(run()) == ""


def test_locks_end_with_their_connection():
    """A lock binds other connections and vanishes with its own."""

    async def run():
        async with daemon() as server, connected(server) as other:
            owner = await Wire.open(server.address)
            await owner.ask(set_(b"k"))
            locked = await owner.ask(Request(Function.LOCK, key=b"k"))
            refused = await other.ask(set_(b"k", b"new"))
            seen = await other.ask(get(b"k"))
            await owner.close()
            while (reply := await other.ask(set_(b"k", b"new"))).error:
                pass
            return locked, refused, seen, reply

    locked, refused, seen, reply = asyncio.run(run())
    assert locked.flags & m.LOCKED
    assert refused.error == "locked"
    assert refused.timeout > 0
    assert seen.flags & m.LOCKED
    assert reply.error == ""


@pytest.mark.parametrize(
    ("request_", "token"),
    [
        (Request(15), "unknown-function"),
        (set_(b"k", flags=m.TOUCH), "bad-flags"),
        (Request(Function.SET, key=b"k"), "value-missing"),
        (Request(Function.SET, value=text(b"")), "key-missing"),
        (Request(Function.GET), "key-missing"),
        (Request(Function.DELETE, key=b"a", key2=b"b", count=0, query=1), "bad-query"),
        (Request(Function.LOCK, key=b"a", ttl=5), "bad-flags"),
        (Request(Function.NOT, key=b"a", value=text(b"")), "bad-flags"),
        (Request(Function.RENAME, key=b"a", key2=b"b", count=3, query=1), "bad-query"),
        (Request(Function.RENAME, key=b"a"), "bad-query"),
        (Request(Function.RENAME, key=b"a", key2=b"b", count=0, query=1), "does-not-exist"),
        (Request(Function.LINK, key=b"a", key2=b"b", count=0, query=1), "does-not-exist"),
        (Request(Function.UNLOCK, key=b"a"), "not-owner"),
        (Request(Function.TRUNCATE, key=b"a", value=Value(3, b"\1")), "does-not-exist"),
        (Request(Function.ADD, key=b"a", value=text(b"1")), "type-mismatch"),
        (get(b"(a", query=m.QUERY_REGEX), "bad-regex"),
        (get(rb"(a)\1", query=m.QUERY_REGEX), "bad-regex"),
        (get(rb"(?=a)", query=m.QUERY_REGEX), "bad-regex"),
        (get(b"((a{0,100}){0,100}){0,100}", query=m.QUERY_REGEX), "bad-regex"),
        (get(b"a" * 1025, query=m.QUERY_REGEX), "bad-regex"),
        (get(b"c1:nonsense", query=m.QUERY_CURSOR), "bad-cursor"),
        (get(b"other", query=m.QUERY_CURSOR), "bad-cursor"),
        (push(b"http://x/", priority=256), "bad-priority"),
        (push(b"no-host", b""), "bad-uri"),
        (set_(b"k", timestamp=T0 + 300_000_001), "clock-skew"),
        (set_(b"virta:nonsense"), "bad-settings"),
        (set_(b"virta:domain:d", b"{}x"), "bad-settings"),
        (set_(b"virta:domain:d", b'{"max_attempts": -1}'), "bad-settings"),
        (set_(b"virta:cron:c", b'{"schedule": "61 * * * *", "uri": "http://x/"}'), "bad-settings"),
        (set_(b"virta:cron:c", b'{"schedule": "0 0 31 2 *", "uri": "http://x/"}'), "bad-settings"),
        (set_(b"virta:admin", b'{"do": "__class__"}'), "unknown-function"),
    ],
)
def test_refusals(request_, token):
    """Every wrong argument has its coded error, and the connection goes on."""

    async def run():
        async with daemon(clock=Clock(T0)) as server, connected(server) as wire:
            reply = await wire.ask(request_)
            return reply, await wire.ask(nop())

    reply, after = asyncio.run(run())
    assert token == reply.error.partition(":")[0]
    assert after.error == ""


def test_clock_skew_edge():
    """A timestamp exactly 300 s ahead is taken."""

    async def run():
        async with daemon(clock=Clock(T0)) as server, connected(server) as wire:
            return await wire.ask(set_(b"k", timestamp=T0 + 300_000_000))

    assert asyncio.run(run()).error == ""


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (encode_request(set_(b"k"))[:-2] + b"\x09x", None),
        (encode_request(nop())[:2] + b"\0\2" + encode_request(nop())[4:], "version"),
        (b"FJ\0\1\0\2\0\1\0\6" + bytes(8) + b"\1k\xff\xff\xff\xff", "too-large"),
    ],
)
def test_untrustworthy_bytes_end_the_connection(raw, error):
    """Wrong magic, types, versions and 4 GB announced: at most one error, then the end; others live on."""

    async def run():
        async with daemon() as server, connected(server) as other:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(encode_request(nop()) + raw)
            wire = Wire(reader, writer)
            received = []
            try:
                while True:
                    received.append(await wire.receive())
            except EOFError:
                pass
            await wire.close()
            assert (await other.ask(nop())).error == ""
            return received

    _, *rest = asyncio.run(run())
    assert ([] if error is None else [error]) == [r.error.partition(":")[0] for r in rest]


def test_quit_answers_everything_before(tmp_path):
    """QUIT is answered after the requests before it, and nothing after it is carried out."""

    async def run():
        async with daemon(tmp_path) as server, connected(server) as wire:
            for i in range(50):
                wire.send(set_(b"k%d" % i, flags=m.PERSIST))
            last = wire.send(Request(Function.QUIT))
            wire.send(set_(b"after"))
            replies = []
            try:
                while True:
                    replies.append(await wire.receive())
            except EOFError:
                pass
            assert server.node.engine.store.live(b"after", 0) is None
            return last, replies

    last, replies = asyncio.run(run())
    assert last == replies[-1].identifier
    assert list(range(1, 52)) == sorted(r.identifier for r in replies)
    assert {""} == {r.error for r in replies}


def test_many_slow_messages_cost_no_memory():
    """Connections that announce the largest value and send nothing cost next to no memory."""

    async def run():
        async with daemon() as server:
            head = b"FJ\0\1\0\2\0\1\0\6" + bytes(8) + b"\1k" + m.VALUE_DATA_BYTES_MAX.to_bytes(4)
            tracemalloc.start()
            connections = [await asyncio.open_connection(*server.address) for _ in range(50)]
            for _, writer in connections:
                writer.write(head)
            async with connected(server) as wire:
                await wire.ask(nop())
            used = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            for _, writer in connections:
                writer.close()
                await writer.wait_closed()
            return used

    assert asyncio.run(run()) < 32 * 1024 * 1024


def test_range_regex_and_cursor_walk_everything_once():
    """Pages of any size, by range or by pattern, give every live key once and in order."""

    async def run():
        keys = sorted(b"key:%03d" % i for i in range(120))
        async with daemon() as server, connected(server) as wire:
            for key in keys:
                await wire.ask(set_(key, key))

            async def pages(first):
                got = []
                reply = await wire.ask(first)
                while True:
                    got += [pair.key for pair in reply.pairs]
                    if reply.cursor is None:
                        return got
                    reply = await wire.ask(get(reply.cursor, query=m.QUERY_CURSOR))

            whole = await pages(get(b"", key2=b"", count=7, query=m.QUERY_RANGE))
            part = await pages(get(b"key:010", key2=b"key:020", count=3, query=m.QUERY_RANGE))
            fives = await pages(get(b"5$", count=4, query=m.QUERY_REGEX))
            return keys, whole, part, fives

    keys, whole, part, fives = asyncio.run(run())
    assert keys == whole
    assert keys[10:20] == part
    assert [key for key in keys if key.endswith(b"5")] == fives


def test_jobs_are_in_ranges_and_patterns():
    """A job is found under both its keys, in order among the values, marked and passed over alike."""

    async def run():
        async with daemon() as server, connected(server) as wire:
            for key in (b"a", b"x:1", b"zz"):
                await wire.ask(set_(key))
            for name in (b"http://x/2", b"http://x/1"):
                await wire.ask(push(name, domain=b""))

            async def keys(**fields):
                reply = await wire.ask(Request(Function.GET, flags=m.DATA, **fields))
                return [(pair.key, pair.value.data) for pair in reply.all_pairs()], reply.cursor

            everything, _ = await keys(query=m.QUERY_RANGE, count=0)
            page, cursor = await keys(query=m.QUERY_RANGE, count=3)
            rest, _ = await keys(query=m.QUERY_CURSOR, key=cursor, count=9)
            sort_keys, _ = await keys(
                query=m.QUERY_RANGE, key=b"x:000", key2=b"x:001", count=0, timeout=1 << 60
            )
            unmarked = await wire.ask(
                Request(Function.GET, flags=m.WORKED_ON, query=m.QUERY_REGEX, key=b"http")
            )
            await wire.ask(Request(Function.DELETE, key=sort_keys[0][0]))
            left, _ = await keys(query=m.QUERY_REGEX, key=b"^http")
            return everything, page + rest, sort_keys, unmarked.pairs, left

    everything, paged, sort_keys, unmarked, left = asyncio.run(run())
    assert everything == paged
    assert [key for key, _ in everything if not key.startswith(b"x:000")] == [
        b"a",
        b"http://x/1",
        b"http://x/2",
        b"x:1",
        b"zz",
    ]
    assert [value for _, value in sort_keys] == [b"http://x/2", b"http://x/1"]
    assert unmarked == []
    assert left == [(b"http://x/1", b"http://x/1")]


def test_marking_in_a_range_is_atomic():
    """Two workers that mark what they read never get the same value."""

    async def run():
        async with daemon() as server, connected(server) as one, connected(server) as two:
            for i in range(40):
                await one.ask(set_(b"w%02d" % i))
            until = server.node.engine.clock() + 10**9
            flags = m.WORKED_ON
            for _ in range(4):
                for wire in (one, two):
                    wire.send(
                        get(b"w", flags, key2=b"x", count=5, timeout=until, query=m.QUERY_RANGE)
                    )
            for wire in (one, two):
                for _ in range(4):
                    taken.extend(pair.key for pair in (await wire.receive()).pairs)
            last = await one.ask(get(b"w", flags, key2=b"x", count=0, query=m.QUERY_RANGE))
            single = await one.ask(get(b"w00", flags))
            return last, single

    taken = []
    last, single = asyncio.run(run())
    assert len(taken) == len(set(taken)) == 40
    assert last.pairs == []
    assert single.error == "worked-on"
