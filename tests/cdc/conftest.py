"""What the tests of change data capture share."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
