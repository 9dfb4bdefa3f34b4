"""Clocks that are set: nothing is acknowledged without effect, no job waits for days, no lease lapses early."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from journal_support import Clock, Daemon, Disks, daemon_thread

from virta.clock import now_us
from virta.journal import Client, Spool, Worker
from virta.journal.clients.spool import STAMP, scan
from virta.journal.clock_steps import StepWatch
from virta.journal.engine import JournalEngine
from virta.journal.jobs.job import DELAYED, READY, WORKING
from virta.journal.protocol import commands
from virta.journal.protocol.codec import RequestParser
from virta.journal.protocol.messages import Function, RefusedError, Request, Type, Value
from virta.journal.protocol.rules import CLOCK_SKEW_US_MAX
from virta.journal.replication.peers import Peer, Peers
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.embedded import Journal
from virta.journal.sessions import Session

T0 = 1_700_000_000_000_000
S = 1_000_000
DAY = 86_400 * S
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


class Restarting:
    """An embedded journal that is closed, or killed, and opened again by a clock to set."""

    def __init__(self, directory, now, *, killed):
        self.directory, self.killed, self.clock = directory, killed, Clock(now)
        self.disks = Disks()
        self.journal = Journal(directory, clock=self.clock, open_disk=self.disks)

    def restart(self, now):
        if self.killed:
            self.disks.opened.close()  # no snapshot: the log alone, as after a SIGKILL
            self.journal.engine.jobs.close()
        else:
            self.journal.close()
        self.clock.now = now
        self.journal = Journal(self.directory, clock=self.clock, open_disk=self.disks)
        return self.journal

    def handed_out(self):
        return [job.uri for job in self.journal.next(count=100).jobs]


@pytest.fixture(params=["killed", "closed"])
def journals(request, tmp_path):
    made = []

    def make(now):
        made.append(Restarting(tmp_path / str(len(made)), now, killed=request.param == "killed"))
        return made[-1]

    yield make
    for each in made:
        each.journal.close()


@pytest.mark.parametrize("back", [2 * S, CLOCK_SKEW_US_MAX + S, 3 * DAY])
def test_commands_after_a_restart_by_a_corrected_clock_have_their_effect(journals, back):
    """SET, DELETE, RENAME and PUSH answered `ok` on keys of every kind, and did nothing."""
    each = journals(T0 + back)
    before = each.journal
    for key in ("value", "deleted", "renamed", "linked", "again"):
        before.set(key, "old")
    before.delete("deleted")
    before.rename("renamed", "target")
    before.link("linked", "other key")
    before.delete("again")
    for uri in ("x://waiting", "x://working", "x://done", "x://dead", "x://cancelled"):
        before.push(uri, domain=uri[4:])
    before.next("working")
    before.done(before.next("done").jobs[0].key)
    before.admin("configure", domain="dead", settings={"max_attempts": 1})
    before.fail(before.next("dead").jobs[0].key, "no")
    before.delete("x://cancelled")

    journal = each.restart(T0)
    for key in ("value", "deleted", "renamed", "target", "linked", "again"):
        journal.set(key, "new")
        assert journal.get(key) == "new", key
    journal.set("other key", "newest")
    assert journal.get("linked") == "newest"
    assert journal.delete("value") is True
    assert journal.get("value") is None
    journal.set("value", "third")
    journal.rename("value", "target", overwrite=True)
    assert (journal.get("target"), journal.get("value")) == ("third", None)

    for uri in ("x://waiting", "x://done", "x://dead", "x://cancelled"):
        journal.push(uri, domain=uri[4:], payload="new")
        (job,) = journal.next(uri[4:]).jobs
        assert (job.uri, job.payload) == (uri.encode(), "new"), uri
        assert journal.done(job.key) is True
    journal.push("x://working", domain="working", payload="new")
    assert journal.next("working").jobs == []  # it waits for the one that is worked on
    each.clock.now += DAY
    assert journal.next("working").jobs[0].payload == "new"


def test_stamps_continue_above_the_stored_ones_but_not_above_the_clock_for_long(journals):
    """After a small correction all timestamps keep rising; after a large one only those of the same keys."""
    each = journals(T0 + 10 * S)
    first = each.journal.set("a", 1)
    assert each.restart(T0).set("b", 1) > first
    each = journals(T0 + 3 * DAY)
    first = each.journal.set("a", 1)
    journal = each.restart(T0)
    assert journal.set("a", 2) > first
    # A client with a right clock must be able to win.
    assert journal.set("b", 1) <= T0 + S
    assert journal.push("x://b", domain="d") <= T0 + S
    journal.set("b", "spooled", timestamp=T0 + S)
    assert journal.get("b") == "spooled"


def test_a_command_without_timestamp_wins_over_what_other_clocks_wrote(tmp_path):
    """A client ahead by less than is refused, a peer ahead by days: what comes after them counts."""
    with Journal(tmp_path, clock=Clock(T0)) as journal:
        journal.set("k", "ahead", timestamp=T0 + 200 * S)
        journal.set("k", "now")
        assert journal.get("k") == "now"
        journal.push("x://a", domain="d", payload="ahead", timestamp=T0 + 200 * S)
        journal.push("x://a", domain="d", payload="now")
        assert journal.next("d").jobs[0].payload == "now"
        peer = Session()
        peer.link_to("b")
        copy = Request(
            Function.SET, 1, timestamp=T0 + DAY, key=b"t", value=Value(Type.STRING, b"copy")
        )
        assert not journal.engine.handle(copy, peer).error
        journal.set("t", "own")
        assert journal.get("t") == "own"
        # Nothing could be newer than that.
        copy.key, copy.timestamp = b"end", (1 << 64) - 1
        assert journal.engine.handle(copy, peer).error.startswith("clock-skew")


def test_jobs_and_leases_after_a_restart_by_a_corrected_clock(journals):
    """What was ready is ready, 10 seconds are 10 seconds, a deadline keeps what was left of it."""
    each = journals(T0 + 3 * DAY)
    journal = each.journal
    journal.push("x://ready", domain="d")
    journal.push("x://later", domain="d", start=(T0 + 3 * DAY) / 1e6 + 10)
    journal.push("x://working", domain="w")
    assert len(journal.next("w", work_for=None).jobs) == 1
    journal.admin("configure", domain="w", settings={"deadline": 60})
    each.clock.now += 20 * S
    journal.get("anything")  # a turn, in which the clock is noted

    # Within the minute after the job was handed out; the default deadline is a day.
    journal = each.restart(T0)
    assert sorted(each.handed_out()) == [b"x://later", b"x://ready"]  # both were due
    each.clock.now = T0 + DAY - 21 * S
    assert journal.next("w").jobs == []
    each.clock.now = T0 + DAY - 19 * S
    assert [job.uri for job in journal.next("w").jobs] == [b"x://working"]
    # It lasts: the times on disk are the corrected ones.
    journal.push("x://still", domain="d", start=(each.clock.now + 10 * S) / 1e6)
    back = each.clock.now - DAY
    each.restart(back)
    each.clock.now = back + 9 * S
    assert each.handed_out() == []
    each.clock.now = back + 11 * S
    assert each.handed_out() == [b"x://still"]
    assert each.restart(back + 12 * S).next("d").jobs == []  # it is worked on


def test_a_forward_step_between_two_runs_is_a_long_pause(journals):
    """Documented: leases are over, delays too; nothing is lost."""
    each = journals(T0)
    each.journal.push("x://later", domain="d", start=T0 / 1e6 + 10)
    each.journal.push("x://working", domain="d")
    each.journal.next("d")
    each.restart(T0 + 3 * DAY)
    assert sorted(each.handed_out()) == [b"x://later", b"x://working"]


class Stepped:
    """An engine with a clock to set beside a steady one."""

    def __init__(self):
        self.clock, self.steady = Clock(T0), Clock(0)
        self.engine = JournalEngine(self.clock, steady=self.steady)
        self.session = Session()

    def passes(self, seconds):
        self.clock.now += int(seconds * S)
        self.steady.now += int(seconds * S)
        self.engine.tick()

    def step(self, seconds):
        self.clock.now += int(seconds * S)

    def __call__(self, command):
        return command.result(self.engine.handle(command.request, self.session))

    def states(self):
        return {job.uri: job.state for job in self.engine.jobs.all()}


@pytest.mark.parametrize("step", [-3 * 86_400, -30, 30, 3 * 86_400])
@pytest.mark.parametrize("ticked", [False, True])
def test_leases_keep_what_was_left_when_the_clock_is_set(step, ticked):
    """Neither do all lapse at a forward step, nor does any last for days after one back."""
    run = Stepped()
    run(commands.push("x://a", domain="d"))
    run(commands.set_("mark", 1))
    run(commands.set_("session", 1, expires=T0 / 1e6 + 60, ttl=60))
    request = Request(Function.NEXT, key=b"d", timeout=T0 + 60 * S)
    key = run.engine.handle(request, run.session).pairs[0].key
    run.engine.handle(Request(Function.GET, key=b"mark", timeout=T0 + 60 * S), run.session)
    run.engine.handle(Request(Function.LOCK, key=b"mark", timeout=T0 + 60 * S), run.session)
    run.passes(20)
    run.step(step)
    if ticked:
        run.passes(0)
    assert run(commands.next_("d")).jobs == []
    run.passes(39)
    assert run.states() == {b"x://a": WORKING}
    assert run.engine.jobs.find(key) is not None
    assert run.engine.store.live(b"session", run.clock.now) is not None
    details = run(commands.details("mark"))
    assert details.bits & 6 == 6  # locked and worked on
    run.passes(2)
    assert run.states() == {b"x://a": READY}
    assert run.engine.store.live(b"session", run.clock.now) is None
    assert run(commands.details("mark")).bits & 6 == 0


def test_a_start_never_moves_further_away():
    """Back: 10 seconds are 10 seconds. Forward: a start is a Unix time, so it is earlier."""
    run = Stepped()
    run(commands.push("x://ready", domain="other"))
    run(commands.push("x://a", domain="d", start=T0 / 1e6 + 10))
    run.step(-3 * 86_400)
    run.passes(9)
    assert run.states() == {b"x://ready": READY, b"x://a": DELAYED}
    run.passes(2)
    assert run.states()[b"x://a"] == READY
    run(commands.push("x://b", domain="d", start=run.clock.now / 1e6 + 10))
    run.step(20)
    run.passes(0)
    assert run.states()[b"x://b"] == READY


def test_a_forward_step_forgets_no_finished_command():
    """A spool sends a command again a minute later; the window of 7 days is not over."""
    run = Stepped()
    first = run(commands.push("x://a", domain="d"))
    run(commands.done(run(commands.next_("d")).jobs[0].key))
    run(commands.set_("k", "old", timestamp=T0))
    run(commands.delete("k"))
    run.step(30 * 86_400)
    run.passes(60)
    run(commands.push("x://a", domain="d", timestamp=first))
    run(commands.set_("k", "old", timestamp=T0))
    assert run(commands.next_("d")).jobs == []
    assert run(commands.get("k")) is None


def test_a_slewed_clock_and_a_stopped_process_are_not_steps():
    """Small differences are not counted together, and a pause between two readings concludes nothing."""
    run = Stepped()
    run(commands.push("x://a", domain="d"))
    run.engine.handle(Request(Function.NEXT, key=b"d", timeout=T0 + 60 * S), run.session)
    for _ in range(50):
        run.step(0.9)
        run.passes(0)
    (job,) = run.engine.jobs.all()
    assert job.worked_until == T0 + 60 * S
    ticks = count(0, S)
    stopped = StepWatch(run.engine.clock, lambda: next(ticks))  # a second between any two readings
    run.step(100)
    assert stopped.step(run.engine.clock()) == 0


def test_recurring_jobs_go_on_when_a_wrong_clock_was_corrected():
    """Dated by a clock that was three days ahead, they would not be pushed for three days."""
    run = Stepped()
    cron = b'{"schedule": "@every 60s", "uri": "x://a", "domain": "d"}'
    run(commands.set_("virta:cron:a", Value(Type.STRING, cron)))
    for step in (0, -3 * 86_400, -100):
        run.step(step)
        run.passes(0)
        for _ in range(6 if step == -100 else 1):
            run.passes(61)
        jobs = run(commands.next_("d")).jobs
        assert [job.uri for job in jobs] == [b"x://a"], step
        run(commands.done(jobs[0].key))


def test_only_the_daemon_that_hands_out_ends_attempts():
    """Another daemon's clock may be an hour ahead: running work must not be handed out twice."""
    run = Stepped()
    run(commands.push("x://a", domain="d"))
    key = run(commands.next_("d")).jobs[0].key
    run.engine.primary = False
    run.passes(2 * 86_400)
    assert run.states() == {b"x://a": WORKING}
    assert run.engine.next_event() > run.clock.now  # and it does not turn in circles
    run.engine.primary = True
    run.passes(2)
    assert run.states() == {b"x://a": READY}
    assert run.engine.jobs.find(key).attempts == 1


def test_copies_take_over_what_a_set_clock_moved(tmp_path):
    """The state from before, which a peer still has, must not bring the old times back."""
    run = Stepped()
    run.engine.start_copying()
    run(commands.push("x://a", domain="d", start=T0 / 1e6 + 10))
    run(commands.push("x://b", domain="w"))
    run(commands.next_("w"))
    before = run.engine.replication.take(run.clock.now)
    run.step(-3 * 86_400)
    run.passes(0)
    assert {request.key for request in run.engine.replication.take(run.clock.now)} == {b"virta:job"}
    peer = Session()
    peer.link_to("b")
    for request in before:
        assert not run.engine.handle(request, peer).error
    run.passes(11)
    assert run.states() == {b"x://a": READY, b"x://b": WORKING}
    assert run.engine.jobs.find(b"x://b").worked_until < run.clock.now + 2 * DAY
    # A daemon with peers copies, and is not the one that hands out, from before it restores.
    disks = Disks()
    node = CommitLoop(tmp_path, open_disk=disks)
    Peers(node.engine, tmp_path, "a", [Peer("b", "127.0.0.1", 1)])
    engine = node.engine
    assert engine.replication.older_may_arrive
    assert engine.jobs.replication is engine.store.replication is engine.replication
    assert not engine.primary
    disks.opened.close()


def test_spooled_commands_keep_their_order_when_the_clock_is_set_back(tmp_path, monkeypatch):
    """Each process stamped by the clock alone: the later SET was the older one, and lost."""

    def stamps():
        found = []
        for path in sorted(tmp_path.glob("[0-9]*.fjs")):
            for record in scan(path.read_bytes()):
                found += [request.timestamp for request in RequestParser().feed(record.message)]
        return found

    for now in (T0 + 120 * S, T0, T0 + S):
        monkeypatch.setattr("virta.journal.clients.spool.now_us", lambda now=now: now)
        with Spool(tmp_path) as spool:
            spool.put(commands.set_("k", now).request)
            spool.put(commands.push("x://a", domain="d").request)
    assert stamps() == [T0 + 120 * S + n for n in range(6)]
    # What was too far ahead is refused by every daemon; what comes after it must not be.
    (tmp_path / STAMP).write_text(f"{T0 + DAY:020d}")
    with Spool(tmp_path) as spool:
        spool.put(commands.set_("k", 1).request)
    assert stamps()[-1] == T0 + S
    (tmp_path / STAMP).write_text("damaged")
    with Spool(tmp_path) as spool:
        spool.put(commands.set_("k", 1).request)


def test_a_stopped_process_does_not_stop_the_spool_of_others(tmp_path):
    """A process that was stopped with the stamp's lock is waited for once, not for ever and not for each command."""
    spooled = 20  # a second for each is more than the deadline
    with Spool(tmp_path) as spool:
        spool.put(commands.set_("k", 0).request)
        holder = os.open(tmp_path / STAMP, os.O_RDWR)
        fcntl.flock(holder, fcntl.LOCK_EX)
        done = threading.Event()

        def put_all():
            for n in range(spooled):
                spool.put(commands.set_("k", n).request)
            done.set()

        threading.Thread(target=put_all, daemon=True).start()
        try:
            assert done.wait(10), "it waits for the stopped process again and again"
        finally:
            os.close(holder)
        stamps = [
            request.timestamp
            for path in sorted(tmp_path.glob("[0-9]*.fjs"))
            for record in scan(path.read_bytes())
            for request in RequestParser().feed(record.message)
        ]
        assert len(stamps) == spooled + 1
        assert stamps == sorted(set(stamps))


@pytest.mark.parametrize("ahead", [-7200, 120])
def test_a_worker_by_another_clock(tmp_path, ahead):
    """A worker whose clock differs keeps its jobs: deadlines are measured by the daemon's clock."""
    with daemon_thread(tmp_path, clock=lambda: now_us() + ahead * S) as server:
        worker = Worker(*server.address, work_for=30)
        stop = asyncio.Event()
        seen = []

        @worker.handle("d")
        async def handle(job):
            seen.append(
                server.node.engine.jobs.find(job.key).worked_until - server.node.engine.clock()
            )
            stop.set()

        with Client(*server.address) as client:
            client.push("x://a", domain="d")
            asyncio.run(asyncio.wait_for(worker.work(stop), 20))
            assert (worker.done, worker.failed) == (1, 0)
            assert 20 * S < seen[0] <= 31 * S
            assert client.admin("stats")["jobs"]["working"] == 0


class Fake:
    """A daemon whose clock is set by writing a file, also while it runs; killed and started again."""

    def __init__(self, directory, half):
        self.directory, self.file = directory, directory / "clock"
        self.env = {
            **os.environ,
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "VIRTA_PLAIN": "1" if half == "plain" else "0",
        }

    def set(self, seconds):
        temporary = self.file.with_suffix(".new")
        temporary.write_text(f"{seconds:+d}\n")
        temporary.rename(self.file)

    def start(self):
        return Daemon(self.directory / "data", env=self.env)


def acknowledged(client, job):
    """Whether it was in time: on a busy machine the deadline may pass in between."""
    try:
        return client.done(job.key)
    except RefusedError as refused:
        assert refused.code == "does-not-exist"  # noqa: PT017  (any other is a fault)
        return False


@pytest.mark.slow
@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime is not installed")
@pytest.mark.parametrize("half", ["native", "plain"])
def test_kill_rounds_with_clock_steps(tmp_path, half):
    """SIGKILL and clocks set at random: every `ok` has its effect, every job is handed out."""
    seed = int(os.environ.get("VIRTA_SEED", "11"))
    rng = random.Random(seed)
    fake = Fake(tmp_path, half)
    values, pending, done, lost = {}, set(), set(), count()
    steps = [0, 5, -5, 200, -200, 3600, -3600, 259_200, -259_200]
    for turn in range(4):
        fake.set(rng.choice(steps))
        with fake.start() as daemon, Client("127.0.0.1", daemon.port) as client:
            client.admin("configure", domain="d", settings={"deadline": 2, "max_attempts": 0})
            for key, value in values.items():
                assert client.get(key) == value, (seed, turn, key)
            for _ in range(50):
                if rng.random() < 0.1:
                    fake.set(rng.choice(steps))
                name = rng.randrange(8)
                act = rng.random()
                if act < 0.3:
                    values[f"k{name}"] = rng.randrange(1000)
                    client.set(f"k{name}", values[f"k{name}"])
                    assert client.get(f"k{name}") == values[f"k{name}"], (seed, turn)
                elif act < 0.4:
                    client.delete(f"k{name}")
                    values[f"k{name}"] = None
                    assert client.get(f"k{name}") is None, (seed, turn)
                elif act < 0.75:
                    uri = f"x://{name}-{next(lost) % 20}"
                    client.push(uri, domain="d", start=client.ping() / 1e6 + rng.choice([0, 1]))
                    pending.add(uri)
                    done.discard(uri)
                else:
                    for job in client.next("d").jobs:
                        assert job.uri.decode() in pending, (seed, turn, job)
                        # A newer push may wait for its end, so it is certainly over only if none did.
                        if rng.random() < 0.5 and acknowledged(client, job):
                            done.add(job.uri.decode())
    finished_by_hand = set(done)
    fake.set(rng.choice(steps))
    handed = set()
    with fake.start() as daemon, Client("127.0.0.1", daemon.port) as client:
        end = time.monotonic() + 30
        while not pending - finished_by_hand <= handed:
            assert time.monotonic() < end, (seed, pending - finished_by_hand - handed)
            for job in client.next("d", count=10).jobs:
                handed.add(job.uri.decode())
                acknowledged(client, job)
            client.wait(0.05)
