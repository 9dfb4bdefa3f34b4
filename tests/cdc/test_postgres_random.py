"""Random changes of PostgreSQL, with captures and servers killed: replay and live views equal the tables."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

psycopg2 = pytest.importorskip("psycopg2", reason="pip install virta[cdc]")

from pg_database import Database, numbers, wait_for  # noqa: E402
from pg_server import PgServer, binaries  # noqa: E402
from pg_tables import SCHEMA, VALUES  # noqa: E402
from psycopg2.extensions import TRANSACTION_STATUS_IDLE  # noqa: E402

from virta.cdc.postgres import admin, catalog  # noqa: E402

IDS = st.integers(0, 5)


def column_value():
    return st.sampled_from(sorted(VALUES)).flatmap(
        lambda name: st.tuples(st.just(name), st.one_of(st.none(), st.sampled_from(VALUES[name])))
    )


STEPS = st.one_of(
    st.tuples(st.just("INSERT INTO every (id, {0}) VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET {0} = excluded.{0}"), column_value(), IDS),
    st.tuples(st.just("UPDATE every SET {0} = %s WHERE id >= %s"), column_value(), IDS),
    st.tuples(st.just("DELETE FROM every WHERE id = %s"), IDS),
    st.tuples(st.just("UPDATE every SET id = id + 6 WHERE id = %s"), IDS),
    st.tuples(st.just("INSERT INTO docs (n, body) VALUES (%s, repeat('long', 1500))"), IDS),
    st.tuples(st.just("UPDATE docs SET n = n + 1 WHERE n = %s"), IDS),
    st.tuples(st.just("INSERT INTO evolving (id) VALUES (%s) ON CONFLICT DO NOTHING"), IDS),
    st.tuples(st.just("UPDATE pairs SET b = b + 1 WHERE b = %s"), IDS),
    st.tuples(st.just("INSERT INTO pairs SELECT 'a' || g, %s, 'x' FROM generate_series(1, 40) g ON CONFLICT DO NOTHING"), IDS),
    st.tuples(st.sampled_from([
        "TRUNCATE pairs", "TRUNCATE every, docs", "BEGIN", "BEGIN", "COMMIT", "ROLLBACK", "capture", "capture",
        "ALTER TABLE evolving ADD COLUMN b int", "ALTER TABLE evolving ADD COLUMN c text DEFAULT 'later'",
        "ALTER TABLE evolving DROP COLUMN c", "ALTER TABLE evolving RENAME COLUMN b TO bb",
        "ALTER TABLE evolving ALTER COLUMN a TYPE varchar(9)",
    ])),
)  # fmt: skip


@pytest.fixture(scope="module")
def random_db(pg, tmp_path_factory):
    made = Database(pg, tmp_path_factory.mktemp("random"))
    made.run(SCHEMA)
    yield made
    made.connection.close()


def statement_of(statement, values):
    """Return the statement and its values in order, with the name of the column filled in."""
    if not values or not isinstance(values[0], tuple):
        return statement, *values
    (name, value), id_ = values
    pair = (id_, value) if statement.startswith("INSERT") else (value, id_)
    return statement.format(name), *pair


@pytest.mark.slow
@settings(max_examples=25)
@given(steps=st.lists(STEPS, max_size=25), limit=st.sampled_from([3, 10_000]))
def test_random_changes_are_rebuilt(random_db, tmp_path_factory, steps, limit):
    """Whatever is written, with rollbacks and schema changes: replay equals the tables."""
    db = random_db
    db.name = f"random{next(numbers)}"
    db.data = tmp_path_factory.mktemp("random") / "data"
    in_transaction = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("virta.cdc.change_log.BATCH_RECORDS", limit)
        for statement, *values in steps:
            if statement == "BEGIN":
                if not in_transaction:
                    db.run("BEGIN")
                in_transaction = True
                continue
            if statement in {"COMMIT", "ROLLBACK", "capture"}:
                if in_transaction:
                    db.run("ROLLBACK" if statement == "ROLLBACK" else "COMMIT")
                in_transaction = False
                if statement == "capture":
                    db.capture()
                    db.check("every", "pairs", "docs", "evolving")
                continue
            try:
                db.run(*statement_of(statement, values))
            except psycopg2.Error:  # such as a duplicate key: the transaction is over
                if in_transaction:
                    db.run("ROLLBACK")
                in_transaction = False
        if in_transaction:
            db.run("COMMIT")
        try:
            db.capture()
            db.check("every", "pairs", "docs", "evolving")
        finally:
            admin.drop(db.dsn, db.data, db.name)


KILLS = st.tuples(
    st.sampled_from(["kill capture", "kill server", "quiet"]),
)
# More than a batch of the log has: it is split, and a kill may come between two batches.
BIG = st.tuples(
    st.just("INSERT INTO docs (n, body) SELECT %s, repeat(md5(g::text), 4000) FROM generate_series(1, 40) g"),
    IDS,
)  # fmt: skip
TABLES = ("every", "pairs", "docs", "evolving", "marks")


class KilledDatabase(Database):
    """A database whose server and whose capturing process are killed between statements."""

    def __init__(self, server, folder, processes):
        super().__init__(server, folder)
        self.server = server
        self.processes = processes
        self.process = None
        self.run(SCHEMA + "CREATE TABLE marks (n serial PRIMARY KEY);")

    def begin(self, folder):
        """Capture under another name, from nothing."""
        self.name = f"killed{next(numbers)}"
        self.data = folder / "data"
        self.start()

    def start(self):
        command = ("-m", "virta", "cdc", "postgres", self.dsn, "--data-dir", self.data)
        self.process = self.processes(*command, "--name", self.name, stderr=subprocess.DEVNULL)

    def kill_capture(self):
        """Kill it just after it has appended something, which is not confirmed yet."""
        # A new slot, and the read of a table, may have to wait for the end of an open transaction.
        if self.connection.info.transaction_status == TRANSACTION_STATUS_IDLE:
            self.run("INSERT INTO marks DEFAULT VALUES")
            self.wait_for_progress(self.data)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def kill_server(self):
        self.server.kill()
        self.server.start()
        self.connection = psycopg2.connect(self.dsn)
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()

    def quiet(self):
        """Kill the capture, capture what it left, and compare every table and view."""
        self.kill_capture()
        self.capture()
        return self.check(*TABLES)

    def step(self, statement, *values):
        if statement == "kill capture":
            self.kill_capture()
            self.start()
        elif statement == "kill server":
            self.kill_server()
        elif statement in {"quiet", "capture"}:
            self.run("COMMIT")  # without a transaction: a warning
            self.quiet()
            self.start()
        else:
            try:
                self.run(*statement_of(statement, values))
            except psycopg2.Error:  # such as a duplicate key: the transaction is over
                self.run("ROLLBACK")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A server of its own: others would be killed with it."""
    started = []

    def start(*arguments, **options):
        started.append(subprocess.Popen([sys.executable, *map(str, arguments)], **options))
        return started[-1]

    if binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    server = PgServer()
    try:
        yield KilledDatabase(server, tmp_path_factory.mktemp("killed"), start)
    finally:
        for process in started:
            process.kill()
            process.wait()
        server.stop()


@pytest.mark.slow
@settings(
    max_examples=5, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # shrinking takes long
@given(steps=st.lists(st.one_of(STEPS, STEPS, STEPS, KILLS, BIG), min_size=15, max_size=40))
def test_random_changes_through_kills_of_both(killed, tmp_path_factory, wait_for_progress, steps):
    """Any changes, with both sides killed anywhere: at each quiet point replay and live views equal the tables."""
    killed.wait_for_progress = wait_for_progress
    killed.begin(tmp_path_factory.mktemp("killed"))
    try:
        for step in steps:
            killed.step(*step)
        killed.run("COMMIT")
        killed.quiet()
    finally:
        killed.process.kill()
        killed.process.wait()
        killed.run("TRUNCATE docs")
        admin.drop(killed.dsn, killed.data, killed.name)


@pytest.mark.slow
def test_kills_of_capture_and_server_lose_and_double_nothing(
    tmp_path, processes, wait_for_progress
):
    """Both are killed again and again while a client writes."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    server = PgServer()
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    stopping = threading.Event()
    try:
        db = Database(server, tmp_path)
        db.run(SCHEMA)

        def write():
            mine = random.Random(seed)
            while not stopping.is_set():
                try:
                    connection = psycopg2.connect(db.dsn)
                    while not stopping.is_set():
                        with connection, connection.cursor() as cursor:
                            for _ in range(mine.choice([1, 5, 300])):
                                random_change(cursor, mine)
                        stopping.wait(0.002)
                except (psycopg2.OperationalError, psycopg2.InterfaceError):
                    stopping.wait(0.02)  # the server was killed

        writer = threading.Thread(target=write)
        writer.start()
        command = (
            "-m",
            "virta",
            "cdc",
            "postgres",
            db.dsn,
            "--data-dir",
            db.data,
            "--name",
            db.name,
        )
        process = processes(*command)
        for _ in range(8):
            wait_for_progress(db.data)
            stopping.wait(chance.uniform(0, 0.6))  # the kill may hit anything
            if chance.random() < 0.6:
                process.send_signal(signal.SIGKILL)
                process.wait()
                process = processes(*command)
            else:
                server.kill()
                server.start()
        stopping.set()
        writer.join()
        process.send_signal(signal.SIGKILL)
        process.wait()
        db.connection = psycopg2.connect(db.dsn)
        db.connection.autocommit = True
        db.cursor = db.connection.cursor()
        wait_for(lambda: not catalog.slot(db.connection, f"virta_{db.name}").active)
        db.capture()

        replay = db.check("pairs", "docs")
        assert len(replay.ops) > 200
        db.close()
    finally:
        stopping.set()
        server.stop()


def random_change(cursor, chance):
    key = chance.randrange(100)
    statement = chance.choice([
        "INSERT INTO pairs VALUES ('a', %s, md5(random()::text)) ON CONFLICT (a, b) DO UPDATE SET v = excluded.v",
        "UPDATE pairs SET v = 'u' WHERE b = %s",
        "DELETE FROM pairs WHERE b = %s",
        "INSERT INTO docs (n, body) VALUES (%s, repeat('long', 1500))",
        "UPDATE docs SET n = n + 1 WHERE n = %s",
        "DELETE FROM docs WHERE n > %s + 50",
    ])  # fmt: skip
    cursor.execute(statement, (key,))
