"""Engines side by side: each with a table of leases and a clock of its own, asked for the same things."""

from __future__ import annotations

from virta.journal.engine import Engine
from virta.journal.protocol.messages import (
    DATA,
    DETAILS,
    LISTEN,
    OVERWRITE,
    PERSIST,
    QUERY_RANGE,
    Function,
    Request,
    Type,
    Value,
)
from virta.journal.sessions import Session
from virta.journal.storage import records as images
from virta.journal.storage.leases import Leases

URIS = [b"http://A.example/%d" % i for i in range(6)] + [b"http://b.example:80", b"c//x", b"nohost"]
DOMAINS = [b"", b"", b"", b"b.example", b"Other", b"co:lon"]


class Side:
    """An engine with a table of leases and a clock of its own."""

    def __init__(self, path, shortcuts):
        self.now = 1_000_000_000
        self.engine = Engine(lambda: self.now)
        self.engine.shortcuts = shortcuts
        self.engine.jobs.leases = self.leases = Leases(path)
        self.leases.begin([])
        self.session = Session(lambda _: None)

    def commit(self):
        records = images.drain(self.engine, self.now)
        self.leases.settled()
        return records

    def state(self):
        jobs = self.engine.jobs
        return (
            [
                (job.uri, images.job_image(job), job.state, job.logged, job.slot)
                for job in jobs.all()
            ],
            sorted((place.name, place.counts) for place in jobs.schedule.domains.values()),
            jobs.next_id,
            jobs.wants_log,
            jobs.finished.commands,
            jobs.finished.all(),
            bytes(self.leases._map),
            self.engine.next_event(),
        )


def random_request(rng, now, keys):
    """Mostly what a producer and a worker ask for; now and then what nobody should."""
    kind = rng.random()
    stamp = rng.choice([0, 0, 0, 0, now, now - 5, now + 400_000_000])
    if kind < 0.45:
        return Request(
            Function.PUSH if rng.random() < 0.5 else 12,
            rng.randrange(65_536),
            rng.choice([PERSIST, PERSIST, 0, LISTEN]),
            stamp,
            rng.choice([None, None, now, now - 9, now + 40, (1 << 64) - 1]),
            None,
            rng.choice([None, 0, 0, 7, 255, 256]),
            rng.choice(URIS),
            rng.choice(DOMAINS),
            rng.choice([None, Value(Type.STRING, b"payload"), Value(1, b"")]),
            QUERY_RANGE if rng.random() < 0.98 else 0,
        )
    if kind < 0.65:
        return Request(
            11,
            1,
            rng.choice([DATA, DATA | DETAILS, 0, DETAILS | LISTEN, OVERWRITE | DATA]),
            0,
            rng.choice([None, None, now + 30, now - 1]),
            None,
            rng.choice([None, 0, 1, 2, 1_000]),
            rng.choice([b"", b"", b"a.example", b"OTHER", b"co:lon", b"absent"]),
        )
    if kind < 0.9:
        key = rng.choice([*keys[-4:], rng.choice(URIS), b"x", b"x:000:1:2"])
        return Request(4, 2, rng.choice([OVERWRITE, 0]), stamp, key=rng.choice([key, key.upper()]))
    if kind < 0.95:  # a value under the key of a job, a heartbeat or a return
        key = rng.choice([*keys[-4:], b"x"])
        if rng.random() < 0.3:
            return Request(2, 3, PERSIST | OVERWRITE, 0, key=key, value=Value(1, b"v"))
        return Request(3, 3, 0, 0, rng.choice([0, now + 60]), key=key)
    return Request(3, 4, DATA | LISTEN, 0, None, None, 5, b"", b"", None, QUERY_RANGE)
