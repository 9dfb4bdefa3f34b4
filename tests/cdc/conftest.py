"""What the tests of change data capture share."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

import pytest

import virta
from virta.errors import LogNotFoundError


@pytest.fixture
def processes():
    """Start processes that do not outlive the test."""
    started = []

    def start(*arguments, **options):
        process = subprocess.Popen([sys.executable, *map(str, arguments)], **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def pg():
    """One PostgreSQL for all tests; each has a database of its own."""
    pytest.importorskip("psycopg2", reason="pip install virta[cdc]")
    from pg_server import PgServer, binaries

    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    server = PgServer()
    yield server
    server.stop()


@pytest.fixture
def db(pg, tmp_path):
    """A database of its own, with a capture into a folder."""
    from pg_database import Database

    made = Database(pg, tmp_path)
    yield made
    made.close()


@pytest.fixture
def shop(db):
    """The same with the tables of `pg_tables`."""
    from pg_tables import SCHEMA

    db.run(SCHEMA)
    return db


@pytest.fixture(scope="module")
def wait_for_progress():
    """Return a function that waits until a log has more records than at the last call."""
    seen = {}

    def wait(data_dir, seconds=60):
        deadline = time.monotonic() + seconds
        while True:
            with suppress(LogNotFoundError), virta.open(data_dir / "log", read_only=True) as log:
                now = log.next_offset
                if now > seen.get(data_dir, 0):
                    seen[data_dir] = now
                    return
            assert time.monotonic() < deadline, "nothing was captured"
            time.sleep(0.01)

    return wait
