"""The engine: whatever is asked, there is a reply; administration, settings and recurring jobs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_support import Clock

from virta.journal.engine import JournalEngine
from virta.journal.jobs.recurring import CronSchedule
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import RequestParser, encode_reply, encode_request
from virta.journal.protocol.messages import RefusedError, Request, Type, Value
from virta.journal.protocol.rules import RULES, Rule
from virta.journal.sessions import LISTEN_KEYS_MAX, Session
from virta.journal.storage import records as images
from virta.journal.storage.directory import Persistence

T0 = 1_700_000_000_000_000
KEYS = st.sampled_from(
    [
        b"",
        b"a",
        b"b",
        b"c",
        b"http://h/1",
        b"virta:domain:h",
        b"virta:cron:x",
        b"virta:admin",
        b"virta:done:x",
        b"h:000:%020d:%016x" % (T0, 1),
        b"h:000:%020d:%016x" % (T0, 2),
    ]
)
TIMES = st.none() | st.integers(T0 - 5, T0 + 50) | st.sampled_from([0, 2**64 - 1])
VALUES = st.none() | st.builds(
    Value,
    st.integers(1, 5),
    st.binary(max_size=9)
    | st.sampled_from([b"{}", b'{"do":"stats"}', b'{"do":"list"}', b'{"paused":true}', b"[]"])
    | st.sampled_from(
        [json.dumps({"do": do, "domain": "h"}).encode() for do in ("kick", "requeue", "drop")]
    ),
)


@st.composite
def any_request(draw):
    """Mostly of the shape its function wants, so that more than refusals is tried."""
    function = draw(st.integers(0, 15))
    rule = RULES.get(function, Rule())
    if draw(st.integers(0, 3)):
        return Request(
            function,
            1,
            draw(st.integers(0, 0xFFFF)) & rule.flags,
            draw(st.sampled_from([0, 0, T0, T0 + 1])),
            draw(TIMES) if rule.timeout else None,
            draw(st.none() | st.sampled_from([0, 5, 2**64 - 1])) if rule.ttl else None,
            draw(st.integers(0, 300)) if rule.count else 0 if rule.queries == (1,) else None,
            draw(KEYS),
            draw(KEYS),
            None if rule.value is None else draw(VALUES),
            draw(st.sampled_from(rule.queries)),
        )
    return Request(
        function,
        1,
        draw(st.integers(0, 0xFFFF)) & m.REQUEST_FLAGS,
        draw(st.sampled_from([0, T0, T0 + 1, T0 + 10**10])),
        draw(TIMES),
        draw(st.none() | st.sampled_from([0, 5, 2**64 - 1])),
        draw(st.none() | st.integers(0, 300)),
        draw(KEYS),
        draw(KEYS),
        draw(VALUES),
        draw(st.integers(0, 3)),
    )


@settings(max_examples=300)
@given(st.lists(st.tuples(any_request(), st.booleans(), st.integers(0, 9)), max_size=30))
def test_any_request_gets_a_reply(steps):
    """Any sequence of any requests from a client and a peer: replies that encode, images that encode."""
    clock = Clock(T0)
    engine = JournalEngine(clock)
    engine.start_copying()
    sessions = [Session(lambda _: None), Session(lambda _: None)]
    sessions[1].peer = "p"
    for request, peer, pause in steps:
        # What the wire would make of it, so that only what can be sent is tried.
        if request.query != m.QUERY_RANGE:
            request.key2 = b""
        for parsed in RequestParser().feed(encode_request(request)):
            encode_reply(engine.handle(parsed, sessions[peer]))
        clock.now += pause
        engine.tick()
        images.drain(engine, clock.now)
    for outgoing in engine.replication.take(clock.now):
        encode_request(outgoing)
    for session in sessions:
        engine.close(session)


class Console:
    """Admin commands on an engine with a clock to set."""

    def __init__(self):
        self.clock = Clock(T0)
        self.engine = JournalEngine(self.clock)
        self.session = Session()

    def __call__(self, do, **fields):
        return self.call(commands.admin(do, **fields))

    def call(self, command):
        return command.result(self.engine.handle(command.request, self.session))


def test_settings_are_values():
    """Settings can be set, read, listed and deleted like any value, and are obeyed at once."""
    console = Console()
    console.call(commands.push("http://h/1"))
    console.call(commands.set_("virta:domain:h", '{"paused": true}'))

    assert console.call(commands.next_()).jobs == []
    assert console.call(commands.scan("virta:", "virta;")).items[0][0] == b"virta:domain:h"
    console.call(commands.delete("virta:domain:h"))
    assert len(console.call(commands.next_()).jobs) == 1
    assert console("configure", domain="H", settings={"max_attempts": 2})["max_attempts"] == 2
    assert console("configure", domain="h", settings={"paused": True})["max_attempts"] == 2
    # Daemons from before the setting refuse it; what is at its default need not be stored.
    assert "retry_delay_max" not in console.call(commands.get("virta:domain:h"))
    assert console("configure", domain="h", settings={"retry_delay_max": 9})["retry_delay_max"] == 9
    assert console("configure", domain="h")["retry_delay_max"] == 9
    for bad in ({"deadline": -1}, {"retry_delay": 1e9}, {"mode": "x"}, {"what": 1}):
        with pytest.raises(RefusedError, match="bad-settings"):
            console("configure", domain="h", settings=bad)
    for command in (
        commands.add("virta:n", 1),
        commands.rename("virta:domain:h", "x"),
        commands.link("virta:domain:h", "x"),
        commands.set_("virta:domain:h", "{}", expires=T0 / 1e6 + 5),
    ):
        with pytest.raises(RefusedError):
            console.call(command)


def test_lists_and_figures():
    """Jobs are listed by domain and state, shown one by one, and counted."""
    console = Console()
    for i in range(5):
        console.call(commands.push(f"http://h{i % 2}/{i}", start=T0 / 1e6 + (i > 2)))
    console.call(commands.next_("h0"))

    assert len(console("list")["jobs"]) == 5
    assert len(console("list", domain="h0")["jobs"]) == 3
    assert [j["uri"] for j in console("list", state="working")["jobs"]] == ["http://h0/0"]
    assert len(console("list", limit=2, offset=4)["jobs"]) == 1
    assert console("show", uri="http://h1/1")["state"] == "ready"
    stats = console("stats")
    assert stats["jobs"] == {"delayed": 2, "ready": 2, "held": 0, "working": 1, "dead": 0}
    assert stats["domains_count"] == 2
    for bad in (("show", {"uri": "none"}), ("kick", {"uri": "none"}), ("drop", {"uri": "none"})):
        with pytest.raises(RefusedError, match="does-not-exist"):
            console(bad[0], **bad[1])
    with pytest.raises(RefusedError, match="bad-settings"):
        console("list", state="odd")


def test_recurring_jobs():
    """A recurring job is pushed at each of its times, once, whatever time is skipped."""
    console = Console()
    console.call(
        commands.set_("virta:cron:c", json.dumps({"schedule": "@every 10s", "uri": "http://h/c"}))
    )
    first = T0 - T0 % 10_000_000 + 10_000_000
    pushed = []
    for now in (first - 1, first, first + 1, first + 35_000_000, first + 36_000_000):
        console.clock.now = now
        console.engine.tick()
        pushed += [job.uri for job in console.call(commands.next_(remove=True, count=9)).jobs]

    assert pushed == [b"http://h/c", b"http://h/c"]
    assert console.engine.next_event() == first + 40_000_000


HOUR = 3600 * 1_000_000


def recurring(engine, catch_up, schedule="0 * * * *"):
    fields = {"schedule": schedule, "uri": "http://h/x", "catch_up": catch_up}
    request = commands.set_("virta:cron:x", json.dumps(fields)).request
    assert engine.handle(request, Session()).error == ""


@pytest.mark.parametrize(("catch_up", "expected"), [("none", []), ("once", [105 * HOUR])])
def test_times_missed_while_down(catch_up, expected, tmp_path):
    """Five times pass while no daemon runs: one push for all of them, or none; and only once."""
    clock = Clock(100 * HOUR + 5)

    def restarted():
        disk = Persistence(tmp_path, durability="none")
        engine = JournalEngine(clock)
        disk.restore(engine)
        return disk, engine

    disk, engine = restarted()
    recurring(engine, catch_up)
    disk.commit(images.drain(engine, clock.now))
    disk.close()
    clock.now = 105 * HOUR + 7
    seen = []
    for _ in range(2):
        disk, engine = restarted()
        engine.tick()
        seen += [job.timestamp for job in engine.jobs.reserve(b"", clock.now, remove=True)]
        disk.commit(images.drain(engine, clock.now))
        disk.close()

    assert seen == expected


def test_a_daemon_that_becomes_primary_makes_up():
    """The time that passed between two primaries is not lost, and one that ran is not repeated."""
    clock = Clock(100 * HOUR + 5)
    engine = JournalEngine(clock)
    engine.primary = False
    recurring(engine, "once")
    clock.now = 101 * HOUR + 1
    engine.tick()
    before = len(engine.jobs)
    engine.primary = True
    clock.now += HOUR // 60
    engine.tick()

    assert (before, [job.timestamp for job in engine.jobs.all()]) == (0, [101 * HOUR])


def test_a_recurring_job_keeps_its_turn():
    """One that waits is not put behind what came after it each time it is due again."""
    clock = Clock(100 * HOUR + 5)
    engine = JournalEngine(clock)
    recurring(engine, "none", "@every 1h")
    clock.now = 101 * HOUR + 1
    engine.tick()
    engine.jobs.push(b"http://other/", b"", clock.now, clock.now, start=clock.now)
    clock.now = 102 * HOUR + 1
    engine.tick()
    (first,) = engine.jobs.reserve(b"", clock.now)

    assert (first.uri, first.start, first.timestamp) == (b"http://h/x", 101 * HOUR, 102 * HOUR)


def test_a_clock_that_is_set():
    """Ahead: one push, not one per time passed. Back: it goes on by the new time and repeats nothing."""
    clock = Clock(100 * HOUR + 5)
    engine = JournalEngine(clock)
    recurring(engine, "none", "@every 1h")
    engine.tick()
    done = []
    for now in (200 * HOUR + 5, 150 * HOUR, 150 * HOUR + 9, 151 * HOUR, 201 * HOUR):
        clock.now = now
        engine.tick()
        done += [job.timestamp // HOUR for job in engine.jobs.reserve(b"", now, remove=True)]

    assert done == [101, 151, 152]


@pytest.mark.parametrize(
    ("text", "time", "expected"),
    [
        ("@every 1h", 5 * HOUR + 1, 5 * HOUR),
        ("0 * * * *", 5 * HOUR, 5 * HOUR),
        ("30 2 * * *", 24 * HOUR, 2 * HOUR + HOUR // 2),
        ("0 0 29 2 *", 59 * 24 * HOUR, 0),
    ],
)
def test_the_latest_time(text, time, expected):
    """The last moment that is not later; 0 if there was none since 1970."""
    assert CronSchedule(text).latest(time) == expected


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("*/5 * * * *", "2026-01-01T00:00", "2026-01-01T00:05"),
        ("0 0 1 1 *", "2026-01-01T00:00", "2027-01-01T00:00"),
        ("30 9 * * 1-5", "2026-11-13T10:00", "2026-11-16T09:30"),
        ("0 12 13 * 5", "2026-11-14T00:00", "2026-11-20T12:00"),
        ("0 0 29 2 *", "2026-01-01T00:00", "2028-02-29T00:00"),
        ("15,45 */6 * * 7", "2026-11-14T23:00", "2026-11-15T00:15"),
        ("59 23 31 12 *", "2026-12-31T23:58", "2026-12-31T23:59"),
        ("30 9 * * Mon-FRI", "2026-11-13T10:00", "2026-11-16T09:30"),
        ("0 0 1 feb,AUG *", "2026-03-01T00:00", "2026-08-01T00:00"),
        ("@daily", "2026-11-13T10:00", "2026-11-14T00:00"),
        (" @Weekly", "2026-11-13T10:00", "2026-11-15T00:00"),
        ("@hourly", "2026-11-13T10:00", "2026-11-13T11:00"),
        ("@monthly", "2026-11-13T10:00", "2026-12-01T00:00"),
        ("@yearly", "2026-11-13T10:00", "2027-01-01T00:00"),
    ],
)
def test_schedules(text, after, expected):
    """The next moment of a cron expression, in UTC."""
    from datetime import UTC, datetime

    def us(moment):
        return int(datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp()) * 1_000_000

    assert us(expected) == CronSchedule(text).after(us(after))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "* * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * 8",
        "5-1 * * * *",
        "*/0 * * * *",
        "a * * * *",
        "@every",
        "@every 0s",
        "@every 5y",
        "0 0 30 2 *",
        "1,,2 * * * *",
        "mon * * * *",
        "* * * mon *",
        "* * * * mo",
        "@often",
    ],
)
def test_bad_schedules(text):
    """What is no schedule, or never comes true, is refused."""
    with pytest.raises(RefusedError, match="bad-settings"):
        CronSchedule(text)


def test_listening_is_bounded():
    """A connection listens to so many keys and no more."""
    console = Console()
    session = Session(lambda _: None)
    for i in range(LISTEN_KEYS_MAX):
        console.engine.listeners.listen(session, [b"%d" % i])

    request = commands.set_("one more", 1, listen=True).request
    assert console.engine.handle(request, session).error.startswith("too-large")
    console.engine.close(session)
    assert console.engine.listeners._keys == {}


def test_touch_and_value_types_over_the_wire():
    """A void value has no data; a type is kept as it came."""
    console = Console()
    console.call(commands.set_("v", Value(Type.VOID, b"")))

    assert console.call(commands.get("v", default=1)) is None
