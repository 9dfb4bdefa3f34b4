"""Engines that stand for daemons: clocks that differ, crashes, and messages lost, doubled and reordered."""

from __future__ import annotations

from journal_support import Clock

from virta.journal.engine import JournalEngine
from virta.journal.jobs.job import STATE_NAMES
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import RequestParser, encode_request
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.sessions import Session
from virta.journal.storage import records as images

KEYS = [b"a", b"b", b"c"]
URIS = [b"http://h/%d" % i for i in range(3)]
RESERVED = [b"virta:domain:h", b"virta:cron:n", b"virta:ran:n"]
HEAL_ROUNDS_MAX = 20


def copies_of(engine):
    """What all daemons must agree on."""
    store, jobs = engine.store, engine.jobs
    values = {}
    for key in KEYS + RESERVED:
        entry = store.live(key, engine.clock())
        if entry is not None:
            values[key] = (
                sorted(entry.keys),
                store.value(entry),
                entry.timestamp,
                entry.persist,
                entry.expires,
                entry.worked_until,
            )
    known = {
        (job.uri, job.timestamp): (
            job.domain.name,
            STATE_NAMES[job.state],
            job.priority,
            job.start,
            job.payload,
            job.attempts,
            job.reason,
            job.worked_until,
            job.revision,
            job.key(),
            job.id,
            job.created,
            job.persist,
            job.replaced,
        )
        for job in jobs.all()
    }
    settings = {name: place.settings for name, place in jobs.domains.items() if any(place.counts)}
    return values, known, jobs.finished.commands, settings


def check(engine):
    """Every job can be found by uri, id and state."""
    jobs = engine.jobs
    for job in jobs.all():
        assert jobs.domains[job.domain.name] is job.domain
        assert job.timestamp > jobs.finished.last(job.uri)
        if STATE_NAMES[job.state] != "dead":
            assert jobs.find(job.key()) is job
        assert (STATE_NAMES[job.state] == "held") == (
            len(jobs.entries(job.uri)) == 2 and not job.lease and not job.worked_until
        )
    for place in jobs.domains.values():
        assert sum(place.counts) == sum(job.domain is place for job in jobs.all())


def admin(do, **fields):
    return commands.admin(do, **fields).request


def value_request(rng, now):
    key, other = rng.choice(KEYS), rng.choice(KEYS)
    value = Value(Type.STRING, b"%d" % rng.randrange(100))
    two = {"key": key, "key2": other, "count": 0, "query": 1}
    persist = rng.choice([0, m.PERSIST])
    return rng.choice(
        [
            Request(Function.SET, 1, m.OVERWRITE | persist, key=key, value=value),
            Request(Function.SET, 1, persist, key=key, value=value),
            Request(Function.SET, 1, m.OVERWRITE, 0, now + 9, 5, key=key, value=value),
            # The same time as another change.
            Request(Function.SET, 1, m.OVERWRITE, now - rng.randrange(5), key=key, value=value),
            Request(Function.DELETE, 1, 0, now - rng.randrange(5), key=key),
            Request(Function.GET, 1, m.TOUCH, ttl=20, key=key),
            Request(Function.GET, 1, timeout=now + rng.randrange(-3, 30), key=key),
            Request(Function.DELETE, 1, rng.choice([0, m.OVERWRITE]), key=key),
            Request(Function.ADD, 1, key=key, value=Value(Type.INTEGER, (1).to_bytes(8))),
            Request(Function.RENAME, 1, m.OVERWRITE, **two),
            Request(Function.LINK, 1, **two),
            Request(Function.LINK, 1, **two),
            Request(Function.UNLINK, 1, key=key),
        ]
    )


def push_request(rng, now):
    return Request(
        Function.PUSH,
        1,
        rng.choice([0, m.PERSIST, m.PERSIST]),
        rng.choice([0, 0, now - rng.randrange(5)]),
        rng.choice([None, now + rng.randrange(-3, 9)]),
        key=rng.choice(URIS),
        key2=rng.choice([b"", b"", b"g"]),
        count=rng.randrange(3),
        query=1,
    )


def job_request(rng, now, keys):
    uri, key = rng.choice(URIS), rng.choice(keys)
    text = uri.decode()
    return rng.choice(
        [
            *3 * [push_request(rng, now)],
            Request(Function.NEXT, 1, timeout=now + rng.randrange(1, 9)),
            Request(Function.NEXT, 1, rng.choice([0, m.OVERWRITE])),
            Request(Function.DELETE, 1, m.OVERWRITE, key=key),
            Request(Function.DELETE, 1, key=uri),
            Request(Function.GET, 1, timeout=now + rng.randrange(-3, 9), key=key),
            Request(Function.GET, 1, timeout=now + rng.randrange(-3, 9), key=uri),
            admin("fail", key=key.decode(), reason="why", delay=rng.choice([None, 0])),
            admin("kick", uri=text),
            admin("requeue", uri=text),
            admin("drop", uri=text),
            settings_request(rng, text),
        ]
    )


def settings_request(rng, uri):
    settings = rng.choice(
        [
            {"max_attempts": rng.randrange(3)},
            {"paused": rng.random() < 0.3},
            {"mode": rng.choice(["debounce", "throttle"])},
            {"deadline": rng.choice([0, 0.000_005])},
            {"retry_delay": rng.choice([0, 0.000_003])},
        ]
    )
    cron = b'{"schedule": "@every 1s", "uri": "%s", "catch_up": "once"}' % uri.encode()
    return rng.choice(
        [
            *4 * [admin("configure", domain="h", settings=settings)],
            Request(Function.DELETE, 1, key=b"virta:domain:h"),
            Request(Function.SET, 1, 0, key=b"virta:cron:n", value=Value(Type.STRING, cron)),
            Request(Function.DELETE, 1, key=b"virta:cron:n"),
        ]
    )


class Faulty:
    """`step` at will, then `heal`: whatever is still on its way arrives, and nothing else happens."""

    def __init__(self, rng, count):
        self.rng = rng
        self.clock = Clock(1_000_000)
        self.ahead = [rng.choice([0, 0, 2, 20]) for _ in range(count)]
        self.sides = range(count)
        self.engines = [self.engine(side) for side in self.sides]
        for engine in self.engines:
            engine.start_copying()
        self.client = Session()
        self.link = Session()
        self.link.link_to("other")
        self.logs = [[] for _ in self.sides]
        self.spools = {(one, other): [] for one in self.sides for other in self.sides}
        self.keys = [b"h:000:00000000000000000000:0000000000000000"]

    def engine(self, side):
        engine = JournalEngine(lambda: self.clock.now + self.ahead[side])
        engine.jobs.use_range(side + 1)
        return engine

    def step(self):
        rng = self.rng
        self.clock.now += rng.choice([0, 1, 2, 0, 1, 2, 0, 1, 2, 500_000 * (rng.random() < 0.1)])
        side = rng.choice(self.sides)
        engine = self.engines[side]
        if rng.random() < 0.4:
            request = value_request(rng, engine.clock())
        else:
            request = job_request(rng, engine.clock(), self.keys)
        reply = engine.handle(request, self.client)
        if request.function == Function.NEXT and reply.pairs:
            self.keys.append(reply.pairs[0].key)
        if rng.random() < 0.02:
            self.crash(side)  # before any reply was sent
        self.gather(forgetful=side if rng.random() < 0.02 else None)
        for route, spool in self.spools.items():
            rng.shuffle(spool)
            while spool and rng.random() < 0.5:
                fate = rng.random()
                if fate < 0.3:
                    break  # dropped: it stays in the spool
                self.deliver(route, spool[-1])
                if fate < 0.8:
                    spool.pop()  # else doubled: sent, and kept, too
        for engine in self.engines:
            check(engine)

    def gather(self, forgetful=None):
        """Let time pass, send changes to the others, write the log; the forgetful one crashes before that."""
        sent = 0
        for side in self.sides:
            engine = self.engines[side]
            engine.tick()
            messages = [
                encode_request(request) for request in engine.replication.take(engine.clock())
            ]
            sent += len(messages)
            for other in self.sides:
                if other != side:
                    self.spools[side, other] += messages
            if side == forgetful:
                self.crash(side)
            else:
                self.logs[side] += images.drain(engine, engine.clock())
        return sent

    def crash(self, side):
        """Lose what is not in the log; spools and other daemons keep theirs."""
        before, engine = self.engines[side], self.engine(side)
        self.engines[side] = engine
        now = engine.clock()
        for topic, _, image in self.logs[side]:
            images.apply(engine, topic, image, now)
        engine.jobs.next_id = before.jobs.next_id  # ids are claimed ahead
        engine.store.restored()
        engine.jobs.restored()
        engine.admin.restored(now)
        engine.start_copying()
        for other in self.sides:
            for raw in self.spools[side, other]:
                self.deliver((side, side), raw)
        for other in self.sides:
            if other != side:
                self.pull(other, side)

    def pull(self, source, target):
        session = Session()
        while page := self.engines[source].export.page(session, 0, again=False):
            messages = [encode_request(request) for request in RequestParser().feed(page)]
            self.spools[source, target] += messages

    def deliver(self, route, raw):
        (message,) = RequestParser().feed(raw)
        error = self.engines[route[1]].handle(message, self.link).error
        assert not error, (error, message)

    def heal(self):
        for number in range(HEAL_ROUNDS_MAX):
            if number == HEAL_ROUNDS_MAX // 2:
                self.clock.now += max(self.ahead)
                self.ahead = [0] * len(self.ahead)
            for route, spool in self.spools.items():
                self.rng.shuffle(spool)
                while spool:
                    self.deliver(route, spool.pop())
            sent = self.gather()
            if not sent and number > HEAL_ROUNDS_MAX // 2:
                return
        raise AssertionError("there are always more changes to send")
