"""Replaying the events of a PostgreSQL capture rebuilds the tables, whatever happens to the capture or the server."""

from __future__ import annotations

import random
import threading
import time

import pytest

import virta
import virta.views

psycopg2 = pytest.importorskip("psycopg2", reason="pip install virta[cdc]")

from pg_database import DEADLINE_S, Database, numbers, wait_for  # noqa: E402
from pg_server import PgServer, binaries  # noqa: E402
from pg_tables import VALUES  # noqa: E402

from virta import outbox  # noqa: E402
from virta.cdc.postgres import admin, catalog  # noqa: E402
from virta.cdc.postgres.capture import PostgresCapture  # noqa: E402
from virta.errors import CaptureError  # noqa: E402


class TestEvents:
    """The shape of events, and what is special about PostgreSQL."""

    def test_a_change_is_a_debezium_event(self, db):
        """Topic, key, attributes and data are those of the documentation."""
        db.run("CREATE TABLE orders (id int PRIMARY KEY, status text)")
        db.capture()
        db.run("INSERT INTO orders VALUES (7, 'new')")
        db.run("UPDATE orders SET status = 'paid'")
        db.capture()

        with virta.open(db.data / "log") as log:
            _, updated = log.read(f"{db.name}.public.orders")
        event = virta.event.Event.from_json(updated.value)
        assert str(updated.key) == '{"id":7}'
        assert event.type == "io.debezium.postgresql.datachangeevent"
        assert event.source == f"/debezium/postgresql/{db.name}"
        assert event.extensions["iodebeziumop"] == "u"
        assert event.extensions["iodebeziumlsn"] == str(event.data["source"]["lsn"])
        assert event.extensions["iodebeziumtxid"] == str(event.data["source"]["txId"])
        assert event.id.startswith(f"name:{db.name};lsn:{event.data['source']['lsn']};txId:")
        assert event.data["after"] == {"id": 7, "status": "paid"}

    def test_every_type(self, shop):
        """Each value of each type, read from the table and from the stream, is rebuilt exactly."""
        width = max(map(len, VALUES.values()))

        def insert(first):
            for at in range(width):
                names = ", ".join(VALUES)
                texts = [texts[at % len(texts)] for texts in VALUES.values()]
                shop.run(
                    f"INSERT INTO every (id, {names}) VALUES (%s, {', '.join(['%s'] * len(texts))})",
                    first + at,
                    *texts,
                )
            shop.run("INSERT INTO every (id) VALUES (%s)", first + width)

        insert(0)
        shop.capture()
        insert(100)
        shop.capture()

        replay = shop.check("every")
        assert len(replay.tables["public.every"]) == 2 * (width + 1)
        assert {op for _, op, _ in replay.ops} == {"r", "c"}

    def test_a_changed_key_is_two_events(self, shop):
        """A delete of the old key and an insert of the new one."""
        shop.run("INSERT INTO pairs VALUES ('a', 1, 'x')")
        shop.capture()
        shop.run("UPDATE pairs SET b = 2")
        shop.capture()

        ops = [(op, key) for _, op, key in shop.check("pairs").ops]
        assert ops == [("r", '{"b":1,"a":"a"}'), ("d", '{"b":1,"a":"a"}'), ("c", '{"b":2,"a":"a"}')]

    def test_values_that_are_not_sent(self, shop):
        """An unchanged long value is marked, or filled from the old row with REPLICA IDENTITY FULL."""
        shop.run("INSERT INTO docs (n, body) VALUES (1, repeat('long', 2000))")
        shop.capture()
        shop.run("UPDATE docs SET n = 2")
        shop.capture()
        with virta.open(shop.data / "log") as log:
            *_, last = log.read(f"{shop.name}.public.docs")
        data = virta.event.Event.from_json(last.value).data
        assert data["after"]["body"] == "__unchanged"
        assert data["unchanged"] == ["body"]

        shop.run("ALTER TABLE docs DROP COLUMN twice, REPLICA IDENTITY FULL")
        shop.run("UPDATE docs SET n = 3")
        shop.capture()
        with virta.open(shop.data / "log") as log:
            *_, last = log.read(f"{shop.name}.public.docs")
        data = virta.event.Event.from_json(last.value).data
        assert data["after"]["body"] == "long" * 2000
        assert data["before"]["n"] == 2
        shop.check("docs")

    def test_a_generated_column_and_the_whole_row_as_identity(self, shop, caplog):
        """PostgreSQL 18 refuses updates of such a table in a publication: it is left out before that hurts."""
        shop.run("ALTER TABLE docs REPLICA IDENTITY FULL")
        shop.capture()
        shop.run("INSERT INTO docs (n) VALUES (1)")
        shop.run("UPDATE docs SET n = 2")
        shop.capture()
        left_out = shop.connection.server_version >= catalog.GENERATED_REFUSED

        assert (
            "public.docs has REPLICA IDENTITY FULL and a generated column" in caplog.text
        ) == left_out
        assert len(shop.replay().rows("public.docs")) == (0 if left_out else 1)
        shop.run("ALTER TABLE docs REPLICA IDENTITY DEFAULT")
        shop.capture()
        shop.check("docs")

    def test_truncate(self, shop):
        """Every table of a TRUNCATE is emptied."""
        shop.run("INSERT INTO pairs VALUES ('a', 1, 'x'); INSERT INTO evolving VALUES (1, 'x')")
        shop.capture()
        shop.run("TRUNCATE pairs, evolving")
        shop.run("INSERT INTO pairs VALUES ('b', 1, 'x')")
        shop.capture()

        replay = shop.check("pairs", "evolving")
        assert [op for _, op, _ in replay.ops].count("t") == 2

    def test_a_transaction_is_one_batch(self, shop):
        """All of its changes are visible together, whatever else happens in between."""
        shop.capture()
        with psycopg2.connect(shop.dsn) as other, other.cursor() as cursor:
            cursor.execute("INSERT INTO pairs VALUES ('a', 1, 'x')")
            shop.run("INSERT INTO evolving VALUES (1, 'between')")
            cursor.execute("INSERT INTO pairs VALUES ('b', 1, 'x')")
        other.close()
        shop.capture()

        names = [name for name, _, _ in shop.replay().ops]
        assert names == ["public.evolving", "public.pairs", "public.pairs"]

    def test_a_large_transaction_takes_several_batches(self, shop, monkeypatch):
        """Memory is bounded; the last batch says that the transaction is complete."""
        monkeypatch.setattr("virta.cdc.change_log.BATCH_RECORDS", 100)
        shop.capture()
        shop.run("INSERT INTO evolving SELECT g, 'x' FROM generate_series(1, 1050) g")
        shop.capture()

        replay = shop.check("evolving")
        assert [(t["status"], t["event_count"]) for t in replay.transactions] == [("END", 1050)]

    def test_partitions_are_one_table(self, db):
        """Rows of partitions are rows of their root."""
        db.run(
            "CREATE TABLE parts (id int, day int, PRIMARY KEY (id, day)) PARTITION BY RANGE (day);"
            "CREATE TABLE p1 PARTITION OF parts FOR VALUES FROM (0) TO (10);"
            "CREATE TABLE p2 PARTITION OF parts FOR VALUES FROM (10) TO (20);"
            "INSERT INTO parts VALUES (1, 1), (2, 11)"
        )
        db.capture()
        db.run("UPDATE parts SET day = 12 WHERE id = 1; DELETE FROM parts WHERE id = 2")
        db.capture()

        assert set(db.check("parts").tables) == {"public.parts"}

    def test_the_outbox(self, db):
        """Events of committed transactions are forwarded once, and their rows removed."""
        outbox.create_table(db.connection)
        outbox.add(db.connection, "payments", {"order": 1}, key="1")
        db.capture()
        outbox.add(db.connection, "payments", {"order": 2}, key="2")
        db.capture()

        with virta.open(db.data / "log") as log:
            found = [virta.event.Event.from_json(r.value).data for r in log.read("payments")]
        assert found == [{"order": 1}, {"order": 2}]
        assert db.one("SELECT count(*) FROM virta_outbox") == 0

    def test_the_outbox_after_a_crash(self, db, monkeypatch):
        """A row that was forwarded but not removed is removed by the next run, and not forwarded again."""
        outbox.create_table(db.connection)
        db.capture()
        outbox.add(db.connection, "payments", {"order": 1})
        with monkeypatch.context() as patch:
            patch.setattr(PostgresCapture, "_remove_sent", lambda _: None)
            db.capture()
        assert db.one("SELECT count(*) FROM virta_outbox") == 1
        db.capture()

        with virta.open(db.data / "log") as log:
            assert len(list(log.read("payments"))) == 1
        assert db.one("SELECT count(*) FROM virta_outbox") == 0


def test_a_live_view_equals_its_select(shop):
    """At every quiet point, rows of a view over the channel are those of SELECT … WHERE."""
    shop.run("INSERT INTO pairs SELECT 'k', g, 'v' || g % 3 FROM generate_series(1, 30) g")
    shop.capture()
    chance = random.Random(7)
    with virta.open(shop.data / "log") as log:
        view = virta.views.open(log, f"{shop.name}.public.pairs", "v=v1&b=>3")
        for step in range(15):
            at = chance.randrange(1, 35)
            shop.run("UPDATE pairs SET v = 'v' || (random() * 2)::int WHERE mod(b, 5) = %s", at % 5)
            shop.run("DELETE FROM pairs WHERE b = %s", at)
            shop.run("INSERT INTO pairs VALUES ('k', %s, 'v1') ON CONFLICT DO NOTHING", at + 1)
            shop.run("UPDATE pairs SET b = b + %s WHERE b = %s", 100 * (step + 1), at + 2)
            if step == 9:
                shop.run("TRUNCATE pairs")
            shop.capture()
            view.refresh()
            shop.run("SELECT b, v FROM pairs WHERE v = 'v1' AND b > 3 ORDER BY b")
            rows = [event["data"] for event in view.rows.values()]
            assert sorted((row["b"], row["v"]) for row in rows) == shop.cursor.fetchall()
        view.close()


def test_a_role_without_superuser(shop, pg):
    """REPLICATION, CREATE on the database and ownership of the tables are enough."""
    role = f"role_{shop.name}"
    shop.run(
        f"CREATE ROLE {role} LOGIN REPLICATION; GRANT CREATE ON DATABASE {shop.name} TO {role}"
    )
    shop.run(f"ALTER TABLE pairs OWNER TO {role}")
    shop.run("INSERT INTO pairs VALUES ('a', 1, 'x')")
    own = PostgresCapture(
        shop.dsn.replace("user=virta", f"user={role}"), shop.data, name=shop.name, tables=["pairs"]
    )
    own.run(threading.Event(), until_caught_up=True)
    own.close()
    shop.check("pairs")

    foreign = PostgresCapture(
        shop.dsn.replace("user=virta", f"user={role}"), shop.data, name="foreign", tables=["docs"]
    )
    with pytest.raises(CaptureError, match="must be owner of table docs") as caught:
        foreign.run(threading.Event())
    foreign.close()
    assert not caught.value.retry


class TestSchemaChanges:
    """Tables that appear, change and vanish are followed."""

    def test_columns_come_and_go(self, shop):
        """Also where PostgreSQL replicates nothing: defaults of new columns, changed types, new names."""
        shop.run("INSERT INTO evolving VALUES (1, '10'), (2, '20')")
        shop.capture()
        steps = [
            "ALTER TABLE evolving ADD COLUMN b int",
            "ALTER TABLE evolving ADD COLUMN c text DEFAULT 'later'",
            "ALTER TABLE evolving ALTER COLUMN a TYPE int USING a::int",
            "ALTER TABLE evolving RENAME COLUMN a TO renamed",
            "ALTER TABLE evolving DROP COLUMN b",
            "ALTER TABLE evolving ADD COLUMN d int GENERATED ALWAYS AS IDENTITY",
            "ALTER TABLE evolving DROP CONSTRAINT evolving_pkey, ADD PRIMARY KEY (id, d)",
        ]
        for number, step in enumerate(steps):
            shop.run("UPDATE evolving SET id = id + 10")
            shop.run(step)
            shop.run("INSERT INTO evolving (id) VALUES (%s)", number)
            shop.capture()
            shop.check("evolving")
        assert ("ALTER", "public.evolving") in shop.replay().schemas

    def test_a_column_with_a_default_is_noticed_without_a_change(self, shop):
        """The next check of the tables finds it."""
        shop.run("INSERT INTO evolving VALUES (1, 'x')")
        shop.capture()
        shop.run("ALTER TABLE evolving ADD COLUMN c int DEFAULT 7")
        shop.capture()

        shop.check("evolving")

    def test_columns_are_noticed_without_a_change(self, shop):
        """A column that was added without a default, or dropped, is a schema event and nothing else."""
        shop.run("INSERT INTO evolving VALUES (1, 'x')")
        shop.capture()
        shop.run("ALTER TABLE evolving ADD COLUMN b int")
        shop.capture()
        shop.check("evolving")
        shop.run("ALTER TABLE evolving DROP COLUMN a")
        shop.capture()

        assert [op for _, op, _ in shop.check("evolving").ops] == ["r"]

    def test_new_and_dropped_tables_while_it_runs(self, shop):
        """A table that is created is added to the publication and read; one that is dropped is emptied."""
        stopping = threading.Event()
        capture = PostgresCapture(shop.dsn, shop.data, name=shop.name, heartbeat_s=0.2)
        thread = threading.Thread(target=capture.run, args=(stopping,))
        shop.run("INSERT INTO evolving VALUES (1, 'x')")
        thread.start()
        try:
            shop.run("CREATE TABLE late (id int PRIMARY KEY)")
            shop.run("INSERT INTO late VALUES (1)")
            wait_for(lambda: "public.late" in shop.replay().tables)
            shop.run("INSERT INTO late VALUES (2)")
            shop.run("DROP TABLE evolving")
            wait_for(lambda: ("DROP", "public.evolving") in shop.replay().schemas)
        finally:
            stopping.set()
            thread.join()
            capture.close()
        shop.capture()

        assert shop.check("late").rows("public.evolving") == []

    def test_tables_that_cannot_be_captured_are_named(self, db, caplog):
        """They are left out with a reason, and writing to them still works."""
        db.run("CREATE TABLE loose (x int); CREATE TABLE mute (id int PRIMARY KEY)")
        db.run("ALTER TABLE mute REPLICA IDENTITY NOTHING")
        db.capture(tables=["loose", "mute", "nowhere"])
        db.run("INSERT INTO loose VALUES (1); UPDATE loose SET x = 2; INSERT INTO mute VALUES (1)")
        db.run("UPDATE mute SET id = 2; DELETE FROM mute")

        assert "public.loose has no primary key" in caplog.text
        assert "public.mute has REPLICA IDENTITY NOTHING" in caplog.text
        assert "there is no table 'nowhere'" in caplog.text


class TestRefusals:
    """Each is one sentence that says what to do."""

    @pytest.mark.parametrize(
        ("dsn", "words"),
        [
            ("nonsense", "a DSN is postgresql://"),
            ("host=127.0.0.1 port=1 dbname=x", "127.0.0.1:1/x: .*refused"),
        ],
    )
    def test_no_database(self, tmp_path, dsn, words):
        with pytest.raises(CaptureError, match=words):
            PostgresCapture(dsn, tmp_path / "data", name="x")

    def test_a_missing_slot(self, db):
        db.run("CREATE TABLE orders (id int PRIMARY KEY)")
        db.capture()
        wait_for(lambda: not catalog.slot(db.connection, f"virta_{db.name}").active)
        db.run(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
        )
        with pytest.raises(CaptureError, match=r"does not exist any more, so changes .* are lost"):
            db.capture()
        admin.drop(db.dsn, db.data, db.name)
        db.run("INSERT INTO orders VALUES (1)")
        db.capture()

        db.check("orders")

    def test_another_database(self, db, pg, tmp_path):
        db.run("CREATE TABLE orders (id int PRIMARY KEY)")
        db.capture()
        other = pg.database(f"other{next(numbers)}")
        capture = PostgresCapture(other, db.data, name=db.name)
        with pytest.raises(CaptureError, match="belongs to another database"):
            capture.run(threading.Event())
        capture.close()

    def test_status_and_create(self, db):
        db.run("CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE loose (x int)")
        admin.create(db.dsn, db.data, db.name)
        db.run("INSERT INTO orders VALUES (1)")
        status = admin.status(db.dsn, db.data, db.name)
        assert (status["state"], status["tables"]) == ("stopped", {"public.orders": "to be read"})
        assert "public.loose has no primary key" in status["left_out"][0]
        db.capture()

        assert admin.status(db.dsn, db.data, db.name)["tables"] == {"public.orders": "captured"}
        db.check("orders")


def test_a_large_key_and_row_are_sentences(db):
    """What the log cannot store stops the capture, with the table and the limit."""
    db.run("CREATE TABLE keys (k text PRIMARY KEY)")
    db.capture()
    db.run("INSERT INTO keys VALUES (repeat('k', 2000))")
    with pytest.raises(CaptureError, match=r"primary key of public\.keys takes 2008 bytes"):
        db.capture()


@pytest.mark.slow
def test_an_invalidated_slot_is_a_sentence(tmp_path):
    """PostgreSQL removed WAL that the slot needs: the capture stops and says what to do; `drop` starts again."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    server = PgServer(max_slot_wal_keep_size="'1MB'", max_wal_size="'32MB'", min_wal_size="'32MB'")
    try:
        db = Database(server, tmp_path)
        db.run(
            "CREATE TABLE orders (id int PRIMARY KEY, t text); INSERT INTO orders VALUES (1, 'x')"
        )
        db.capture()
        deadline = time.monotonic() + DEADLINE_S
        while catalog.slot(db.connection, f"virta_{db.name}").wal_status != "lost":
            assert time.monotonic() < deadline
            db.run("UPDATE orders SET t = repeat('y', 100000)")
            db.run("SELECT pg_switch_wal()")
            db.run("CHECKPOINT")
        with pytest.raises(CaptureError, match=r"was invalidated, .*max_slot_wal_keep_size"):
            db.capture()
        admin.drop(db.dsn, db.data, db.name)
        db.capture()
        db.check("orders")
        db.close()
    finally:
        server.stop()


@pytest.mark.slow
def test_an_idle_table_retains_no_wal(db):
    """Another table is busy: the slot of the idle one keeps up, although no change of its own arrives."""
    db.run("CREATE TABLE idle (id int PRIMARY KEY); CREATE TABLE busy (id int PRIMARY KEY, t text)")
    stopping = threading.Event()
    capture = PostgresCapture(db.dsn, db.data, name=db.name, tables=["idle"], heartbeat_s=0.3)
    thread = threading.Thread(target=capture.run, args=(stopping,))
    thread.start()
    try:
        wait_for(lambda: catalog.slot(db.connection, f"virta_{db.name}") is not None)
        start = db.one("SELECT pg_current_wal_lsn() - '0/0'")
        for _ in range(4):
            db.run("INSERT INTO busy SELECT g, repeat('x', 200) FROM generate_series(1, 20000) g")
            db.run("DELETE FROM busy")
            db.run("CHECKPOINT")
        written = db.one("SELECT pg_current_wal_lsn() - '0/0'") - start

        def retained():
            db.run("CHECKPOINT")  # the slot's restart position follows such records
            return catalog.slot(db.connection, f"virta_{db.name}").retained_bytes

        wait_for(lambda: retained() < 1_000_000)
        print(f"{written} bytes written, {retained()} retained")
        assert written > 20_000_000
    finally:
        stopping.set()
        thread.join()
        capture.close()
    assert capture.changes <= 1  # the schema event
