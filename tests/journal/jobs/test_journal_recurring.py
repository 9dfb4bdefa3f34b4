"""Recurring jobs: schedules, missed times, clocks that are set."""

from __future__ import annotations

import json

import pytest
from journal_support import Clock, Console

from virta.journal.engine import JournalEngine
from virta.journal.jobs.recurring import CronSchedule
from virta.journal.protocol import commands
from virta.journal.protocol.messages import RefusedError
from virta.journal.sessions import Session
from virta.journal.storage import records as images
from virta.journal.storage.directory import Persistence

T0 = 1_700_000_000_000_000


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
    """The last time that is not later; 0 if there was none since 1970."""
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
    """The next time of a cron expression, in UTC."""
    from datetime import UTC, datetime

    def us(text):
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000

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
