"""Measure push + next + delete of a job with both log records, in CPU time: `python bench/job_table_bench.py`."""

from __future__ import annotations

import time

from virta.journal.engine import JournalEngine
from virta.journal.protocol.messages import Type, Value
from virta.journal.storage import records

JOBS = 20_000
ROUNDS = 5
NOW = 1_700_000_000_000_000


def microseconds_per_job() -> float:
    engine = JournalEngine(lambda: NOW)
    jobs, payload = engine.jobs, Value(Type.BUFFER, b"x" * 100)
    uris = [b"http://example.com/page/%d" % number for number in range(JOBS)]
    began = time.process_time()
    for now, uri in enumerate(uris, NOW):
        jobs.push(uri, b"example.com", now, now, start=now, payload=payload, persist=True)
        records.drain(engine, now)
        [job] = jobs.reserve(b"example.com", now)
        found = jobs.find(job.key())
        assert found is not None
        jobs.done(found, now)
        records.drain(engine, now)
    return (time.process_time() - began) / JOBS * 1e6


if __name__ == "__main__":
    rounds = sorted(microseconds_per_job() for _ in range(ROUNDS))
    print(f"{rounds[ROUNDS // 2]:.1f} µs a job ({rounds[0]:.1f} to {rounds[-1]:.1f})")
