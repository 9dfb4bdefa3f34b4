"""Jobs against a list that is searched from end to end: order, dedupe, deadlines, dead letters."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from virta.journal.jobs.domain import HEAP_SLACK
from virta.journal.jobs.domain import DomainSettings as Settings
from virta.journal.jobs.failures import last_failure
from virta.journal.jobs.job import DEAD, DELAYED, READY, WORKING, host_of, parse_key
from virta.journal.jobs.key_index import JobKeys
from virta.journal.jobs.lifecycle import WORK_DEADLINE_US, Jobs
from virta.journal.jobs.table import FINISHED_US
from virta.journal.protocol.messages import RefusedError
from virta.journal.storage import records as images

URIS = [b"u1", b"u2", b"u3"]
DOMAINS = [b"a", b"b"]


class Model:
    """The rules of the specification, section 7, written for the eye: no heaps, no tables."""

    def __init__(self):
        self.entries = []
        self.finished = {}
        self.next_id = 1
        self.settings = {name: Settings() for name in DOMAINS}

    def new_id(self):
        self.next_id += 1
        return self.next_id - 1

    def of(self, uri, *, working):
        for entry in self.entries:
            if entry["uri"] == uri and bool(entry["until"]) == working and not entry["dead"]:
                return entry
        return None

    def push(self, uri, domain, ts, prio, start):
        known = [e["ts"] for e in self.entries if e["uri"] == uri]
        if max([*known, self.finished.get(uri, -1)]) >= ts:
            return False
        self.entries = [e for e in self.entries if not (e["uri"] == uri and e["dead"])]
        entry = self.of(uri, working=False)
        if entry is None:
            entry = {"uri": uri, "id": self.new_id(), "until": 0, "dead": False, "spent": False}
            self.entries.append(entry)
        elif self.settings[entry["domain"]].mode == "throttle":
            start = min(start, entry["start"])
        entry.update(domain=domain, ts=ts, prio=prio, start=start, attempts=0)
        return True

    def lapse(self, now):
        for entry in sorted(self.entries, key=lambda e: e["until"]):
            if entry["until"] and entry["until"] <= now and not entry["dead"]:
                self.attempt_over(entry)

    def attempt_over(self, entry, start=None):
        entry["until"] = 0
        entry["spent"] = True
        if [e for e in self.entries if e["uri"] == entry["uri"] and e is not entry]:
            self.entries.remove(entry)
            return
        entry["attempts"] += 1
        limit = self.settings[entry["domain"]].max_attempts
        if limit and entry["attempts"] >= limit:
            entry["dead"] = True
        elif start is not None:
            entry["start"] = start

    def eligible(self, domain, now):
        return sorted(
            (
                e
                for e in self.entries
                if not e["until"]
                and not e["dead"]
                and e["start"] <= now
                and (not domain or e["domain"] == domain)
                and not self.settings[e["domain"]].paused
                and not self.of(e["uri"], working=True)
            ),
            key=lambda e: (e["prio"], e["start"], e["id"]),
        )

    def wake_up(self, domain, now):
        times = []
        for e in self.entries:
            if (domain and e["domain"] != domain) or e["dead"]:
                continue
            if e["until"]:
                times.append(e["until"])
            elif e["start"] > now and not self.of(e["uri"], working=True):
                times.append(e["start"])
        return min(times, default=None)


def sort_key(entry):
    return b"%s:%03d:%020d:%016x" % tuple(entry[name] for name in ("domain", "prio", "start", "id"))


class JobsMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.jobs = Jobs()
        self.model = Model()
        self.now = 100
        self.job_keys = JobKeys(self.jobs)
        self.keys = [b"a:000:00000000000000000000:00000000000000ff"]

    @rule(
        uri=st.sampled_from(URIS),
        domain=st.sampled_from(DOMAINS),
        ts=st.integers(1, 60),
        prio=st.integers(0, 2),
        start=st.integers(-20, 20),
        persist=st.booleans(),
    )
    def push(self, uri, domain, ts, prio, start, persist):
        self.jobs.tick(self.now)
        self.model.lapse(self.now)
        start += self.now

        applied = self.jobs.push(
            uri, domain, ts, self.now, priority=prio, start=start, persist=persist
        )

        assert applied == self.model.push(uri, domain, ts, prio, start)

    @rule(
        domain=st.sampled_from([b"", *DOMAINS]),
        count=st.integers(1, 3),
        until=st.none() | st.integers(1, 30),
        remove=st.booleans(),
    )
    def take(self, domain, count, until, remove):
        self.model.lapse(self.now)
        until = None if until is None else self.now + until
        expected = []
        for entry in self.model.eligible(domain, self.now)[:count]:
            if remove:
                self.model.entries.remove(entry)
                uri, ts = entry["uri"], entry["ts"]
                self.model.finished[uri] = max(ts, self.model.finished.get(uri, -1))
            else:
                entry.update(id=self.model.new_id(), spent=False)
                entry["until"] = self.now + WORK_DEADLINE_US if until is None else until
            expected.append(sort_key(entry))

        got = [
            job.key()
            for job in self.jobs.reserve(domain, self.now, until=until, count=count, remove=remove)
        ]

        assert expected == got
        self.keys += got

    @rule(data=st.data())
    def done(self, data):
        key = data.draw(st.sampled_from(self.keys))
        self.model.lapse(self.now)
        self.jobs.tick(self.now)
        expected = next(
            (e for e in self.model.entries if sort_key(e) == key and not e["dead"]), None
        )

        job = self.jobs.find(key)

        assert (expected is None) == (job is None)
        if job is not None and not job.lease:
            assert job.fenced == expected["spent"]
        if job is not None and not job.fenced:
            self.jobs.done(job, self.now)
            self.model.entries.remove(expected)
            uri, ts = expected["uri"], expected["ts"]
            self.model.finished[uri] = max(ts, self.model.finished.get(uri, -1))

    @rule(data=st.data(), until=st.integers(-5, 20), failed=st.booleans())
    def mark_or_fail(self, data, until, failed):
        key = data.draw(st.sampled_from(self.keys))
        self.model.lapse(self.now)
        self.jobs.tick(self.now)
        job = self.jobs.find(key)
        if job is None or job.state != WORKING:
            return
        entry = next(e for e in self.model.entries if sort_key(e) == key)
        if failed:
            self.jobs.fail(job, "failed", self.now, delay=7)
            self.model.attempt_over(entry, start=self.now + 7)
        elif until > 0:
            self.jobs.mark(job, self.now + until, self.now)
            entry["until"] = self.now + until
        else:
            self.jobs.mark(job, self.now + until, self.now)
            entry["until"] = 0
            if [e for e in self.model.entries if e["uri"] == entry["uri"]] != [entry]:
                self.model.entries.remove(entry)

    @rule(
        domain=st.sampled_from(DOMAINS),
        paused=st.booleans(),
        attempts=st.integers(0, 2),
        mode=st.sampled_from(["debounce", "throttle"]),
    )
    def configure(self, domain, paused, attempts, mode):
        self.model.lapse(self.now)
        self.jobs.tick(self.now)
        new = Settings(paused=paused, max_attempts=attempts, mode=mode)
        self.jobs.configure(domain, new)
        self.model.settings[domain] = new

    @rule(uri=st.sampled_from(URIS))
    def requeue(self, uri):
        self.model.lapse(self.now)
        self.jobs.tick(self.now)
        entry = next((e for e in self.model.entries if e["uri"] == uri and e["dead"]), None)
        job = self.jobs.dead(uri)

        assert (entry is None) == (job is None)
        if job is not None:
            self.jobs.requeue(job, self.now)
            entry.update(dead=False, attempts=0, start=min(entry["start"], self.now))

    @rule(steps=st.integers(1, 25))
    def time_passes(self, steps):
        self.now += steps

    @invariant()
    def same_wake_up(self):
        self.model.lapse(self.now)
        for domain in [b"", *DOMAINS]:
            expected = self.model.wake_up(domain, self.now)
            assert expected == self.jobs.wake_up(domain, self.now)

    @invariant()
    def keys_are_in_order(self):
        live = [job for job in self.jobs.all() if job.state != DEAD]
        expected = sorted({job.uri for job in live} | {job.key() for job in live})
        assert list(self.job_keys.in_order().scan(b"", None)) == expected

    @invariant()
    def counts_add_up(self):
        places = self.jobs.domains.values()
        assert len(self.jobs) == sum(sum(place.counts) for place in places)
        assert len(self.jobs) == len(self.model.entries)


TestJobsMachine = JobsMachine.TestCase
TestJobsMachine.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(
    ("uri", "host"),
    [
        (b"http://example.com/a", b"example.com"),
        (b"https://User@EXAMPLE.com:8080/p?q#f", b"example.com"),
        (b"//h?x=//other/", b"h"),
        (b"redis://[::1]:6379/0", b"::1"),
        (b"http://a:b@c:1@host#/@x", b"host"),
    ],
)
def test_host_of(uri, host):
    """The domain is the host, lower case, without user and port."""
    assert host == host_of(uri)


@pytest.mark.parametrize(
    "uri",
    [
        b"task:resize/42",
        b"http:///x",
        b"mailto:a@b",
        b"http://:80/",
        b"task:a//host/x",  # slashes of the path
        b"http:/a//host/x",
        b"1x://host/",
        b"://host/",
    ],
)
def test_no_host(uri):
    """A uri without host needs an explicit domain."""
    with pytest.raises(RefusedError, match="bad-uri"):
        host_of(uri)


def test_colon_in_a_domain_is_escaped():
    """The sort key of a domain with colons still has four parts."""
    jobs = Jobs()
    jobs.push(b"x", b"::1", 1, 1, start=0)

    (job,) = jobs.reserve(b"::1", 1)

    assert job.key() == b"%3A%3A1:000:00000000000000000000:0000000000000002"
    assert parse_key(job.key()) == 2
    assert jobs.find(job.key()) is job


def test_repushing_does_not_grow_the_heaps():
    """Debouncing one job ten thousand times leaves short heaps and one job."""
    jobs = Jobs()
    for ts in range(1, 10_000):
        jobs.push(b"x", b"d", ts, 0, priority=ts % 7, start=ts)
        jobs.push(b"y", b"d", ts, 0, priority=ts % 7, start=-ts)
    place = jobs.domains[b"d"]

    assert len(jobs) == 2
    assert place.heap_sizes[DELAYED] <= HEAP_SLACK + 3
    assert place.heap_sizes[READY] <= HEAP_SLACK + 3
    assert place.counts[READY] == 1


def test_heartbeats_do_not_grow_the_heaps():
    """Extending one job ten thousand times leaves short heaps."""
    jobs = Jobs()
    jobs.push(b"x", b"d", 1, 0)
    (job,) = jobs.reserve(b"d", 0, until=10)
    for until in range(11, 10_000):
        jobs.mark(job, until, 5)

    assert job.domain.heap_sizes[WORKING] <= HEAP_SLACK + 3
    assert jobs.wake_up(b"", 5) == 9_999


def test_domains_come_and_go():
    """A domain without jobs and settings takes no memory."""
    jobs = Jobs()
    for i in range(100):
        jobs.push(b"http://host%d/" % i, b"", 1, 0)
        assert len(jobs.reserve(b"", 0, remove=True)) == 1

    assert not jobs.domains


def test_finished_commands_are_remembered_for_seven_days():
    """A replay is ignored for seven days after the work was done, and then no more."""
    jobs = Jobs()
    jobs.push(b"x", b"d", 5, 0)
    jobs.reserve(b"d", 0, remove=True)

    assert jobs.push(b"x", b"d", 5, FINISHED_US - 1) is False
    assert jobs.push(b"x", b"d", 5, FINISHED_US) is True


def test_a_retried_job_comes_after_its_equals():
    """It keeps the id of its last attempt, whose key acknowledges nothing, unless it was given back."""
    jobs = Jobs()
    for uri in (b"x", b"y", b"z"):
        jobs.push(uri, b"d", 1, 0, start=0)
    lapsed, given_back = jobs.reserve(b"d", 0, until=5, count=2)
    jobs.mark(given_back, 0, 0)
    jobs.tick(5)

    assert [lapsed.fenced, given_back.fenced] == [True, False]
    jobs.push(
        b"x", b"d", 2, 5, start=0
    )  # a newer command in the same place is not acknowledged either
    assert lapsed.fenced
    assert [job.uri for job in jobs.reserve(b"d", 5, count=9)] == [b"z", b"x", b"y"]


def test_limits():
    """Priorities and the number of jobs are bounded."""
    jobs = Jobs(jobs_max=1)
    with pytest.raises(RefusedError, match="bad-priority"):
        jobs.push(b"x", b"d", 1, 0, priority=256)
    jobs.push(b"x", b"d", 1, 0)

    assert jobs.push(b"x", b"d", 2, 0) is True
    with pytest.raises(RefusedError, match="out-of-memory"):
        jobs.push(b"y", b"d", 1, 0)


def test_retry_delay_doubles():
    """A domain's retry delay is doubled with each failed attempt, and max attempts buries the job."""
    jobs = Jobs()
    jobs.configure(b"d", Settings(retry_delay=1, max_attempts=3))
    jobs.push(b"x", b"d", 1, 0)
    starts = []
    now = 0
    for _ in range(2):
        (job,) = jobs.reserve(b"d", now)
        jobs.fail(job, "boom", now)
        starts.append(job.start - now)
        now = job.start
    (job,) = jobs.reserve(b"d", now)
    jobs.fail(job, "last words", now)

    # A delay is up to a quarter shorter, so that jobs that failed together are not retried together.
    assert 750_000 <= starts[0] <= 1_000_000
    assert 1_500_000 <= starts[1] <= 2_000_000
    assert last_failure(jobs.dead(b"x").reason) == ("last words", "")
    assert jobs.reserve(b"d", now * 100) == []
    assert jobs.push(b"x", b"d", 1, now) is False
    assert jobs.push(b"x", b"d", 2, now) is True
    assert jobs.dead(b"x") is None


def test_kick_makes_delayed_jobs_due():
    """Kick moves the earliest delayed jobs of a domain to now."""
    jobs = Jobs()
    for i in range(4):
        jobs.push(b"u%d" % i, b"d", 1, 0, start=1000 - i)

    assert jobs.kick(b"d", 2, 5) == 2
    assert [job.uri for job in jobs.reserve(b"d", 5, count=9)] == [b"u2", b"u3"]
    assert jobs.kick(b"none", 2, 5) == 0


def test_a_merged_state_is_found_in_its_domain():
    """A later state of the only job of a domain replaces it for workers of that domain."""
    jobs = Jobs()
    jobs.push(b"x", b"d", 5, 5)
    known = list(images.job_fields(jobs.entries(b"x")[0]))
    known[13] = 7  # its revision

    jobs.merge(b"x", -1, 0, [images.job_of(jobs, b"x", known)], 6)

    assert [job.uri for job in jobs.reserve(b"d", 7)] == [b"x"]
