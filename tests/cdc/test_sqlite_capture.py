"""Replaying the events of a SQLite capture rebuilds the tables, whatever happens to the capture."""

from __future__ import annotations

import random
import signal
import sqlite3
import threading

import pytest
from cdc_replay import Replay, plain
from hypothesis import given, settings
from hypothesis import strategies as st

import virta
from virta.cdc import sqlite_admin
from virta.cdc.sqlite_capture import SqliteCapture
from virta.errors import CaptureError

SCHEMA = """
CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT, total REAL, photo BLOB, ref TEXT UNIQUE);
CREATE TABLE pairs (a TEXT, b INTEGER, v, PRIMARY KEY (a, b)) WITHOUT ROWID;
CREATE TABLE lines (id INTEGER PRIMARY KEY AUTOINCREMENT, order_id REFERENCES orders ON DELETE CASCADE,
    n INTEGER, twice INTEGER GENERATED ALWAYS AS (n * 2) STORED);
"""


def open_db(path):
    db = sqlite3.connect(path, timeout=30, isolation_level=None)
    db.execute("PRAGMA foreign_keys = ON")
    return db


def capture(path, data_dir, **options):
    """Capture everything that is committed now."""
    one = SqliteCapture(path, data_dir, **options)
    try:
        one.run(threading.Event(), until_caught_up=True)
        return one.changes
    finally:
        one.close()


def tables_of(db):
    names = [
        name
        for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        if not name.startswith(("sqlite_", "virta_"))
    ]
    found = {}
    for name in names:
        cursor = db.execute(f'SELECT * FROM "{name}"')
        columns = [column[0] for column in cursor.description]
        rows = [{c: plain(v) for c, v in zip(columns, row, strict=True)} for row in cursor]
        found[f"main.{name}"] = sorted(rows, key=repr)
    return found


def check_equal(db, data_dir, server="shop"):
    """Compare the tables with their replay; columns may come in another order."""
    replay = Replay(data_dir, server)
    for name, rows in tables_of(db).items():
        expected = sorted((tuple(sorted(row.items())) for row in rows), key=repr)
        rebuilt = sorted((tuple(sorted(row.items())) for row in replay.rows(name)), key=repr)
        assert rebuilt == expected, name
    return replay


@pytest.fixture
def shop(tmp_path):
    path = tmp_path / "shop.db"
    db = open_db(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(SCHEMA)
    yield path, db, tmp_path / "data"
    db.close()


class TestEvents:
    """The shape of events, and what is special about SQLite."""

    def test_a_change_is_a_debezium_event(self, shop):
        """Topic, key, attributes and data are those of the documentation."""
        path, db, data = shop
        capture(path, data)
        db.execute("INSERT INTO orders VALUES (7, 'new', 2.5, NULL, NULL)")
        db.execute("UPDATE orders SET status = 'paid'")
        capture(path, data)

        with virta.open(data / "log") as log:
            created, updated = log.read("shop.main.orders")
        event = virta.event.Event.from_json(updated.value)
        assert str(updated.key) == '{"id":7}'
        assert event.type == "io.debezium.sqlite.datachangeevent"
        assert event.source == "/debezium/sqlite/shop"
        assert event.extensions["iodebeziumop"] == "u"
        assert event.data["before"]["status"] == "new"
        assert event.data["after"] == {
            "id": 7, "status": "paid", "total": 2.5, "photo": None, "ref": None,
        }  # fmt: skip
        assert event.data["source"]["table"] == "orders"
        assert virta.event.Event.from_json(created.value).data["op"] == "c"

    def test_rows_that_were_there_are_read_in_key_order(self, shop):
        """A table's rows come first, as op r, ordered by key."""
        path, db, data = shop
        db.executemany("INSERT INTO orders (id) VALUES (?)", [(3,), (1,), (2,)])
        capture(path, data)

        ops = [(op, key) for name, op, key in Replay(data, "shop").ops if name == "main.orders"]
        assert ops == [("r", '{"id":1}'), ("r", '{"id":2}'), ("r", '{"id":3}')]

    def test_a_changed_key_is_two_events(self, shop):
        """A delete of the old key and an insert of the new one."""
        path, db, data = shop
        db.execute("INSERT INTO orders (id) VALUES (1)")
        capture(path, data)
        db.execute("UPDATE orders SET id = 2")
        capture(path, data)

        ops = [(op, key) for _, op, key in check_equal(db, data).ops]
        assert ops[-2:] == [("d", '{"id":1}'), ("c", '{"id":2}')]

    @pytest.mark.parametrize("recursive", ["OFF", "ON"])
    def test_replace_removes_other_rows(self, shop, recursive):
        """A row that INSERT OR REPLACE removes by another unique column is deleted; one that IGNORE keeps is not."""
        path, db, data = shop
        db.execute(f"PRAGMA recursive_triggers = {recursive}")
        db.execute("INSERT INTO orders (id, ref) VALUES (1, 'x'), (2, 'y'), (3, 'z')")
        capture(path, data)
        db.execute("INSERT OR REPLACE INTO orders (id, ref) VALUES (9, 'x')")
        db.execute("INSERT OR IGNORE INTO orders (id, ref) VALUES (8, 'y')")
        db.execute("UPDATE OR REPLACE orders SET ref = 'z' WHERE id = 9")
        db.execute(
            "INSERT INTO orders (ref) VALUES ('y') ON CONFLICT (ref) DO UPDATE SET status = 'twice'"
        )
        capture(path, data)

        check_equal(db, data)

    def test_deletes_of_foreign_keys_are_seen(self, shop):
        """ON DELETE CASCADE removes rows of another table."""
        path, db, data = shop
        db.execute("INSERT INTO orders (id) VALUES (1)")
        db.execute("INSERT INTO lines (order_id, n) VALUES (1, 4), (1, 5)")
        capture(path, data)
        db.execute("DELETE FROM orders")
        capture(path, data)

        assert check_equal(db, data).rows("main.lines") == []

    def test_values_keep_their_type(self, shop):
        """Blobs, infinities, large integers and texts that are no UTF-8 survive."""
        path, db, data = shop
        db.execute("INSERT INTO pairs VALUES ('i', 1, ?)", (2**63 - 1,))
        db.execute("INSERT INTO pairs VALUES ('r', 1, 0.1), ('r', 2, 1.0), ('r', 3, 9e999)")
        db.execute("INSERT INTO pairs VALUES ('b', 1, x'00ff'), ('n', 1, NULL)")
        db.execute(
            "INSERT INTO pairs VALUES ('t', 1, CAST(x'ff41' AS TEXT)), ('t', 2, 'a' || char(0))"
        )
        capture(path, data)
        db.execute("UPDATE pairs SET b = b + 10")
        capture(path, data)

        found = {(row["a"], row["b"]): row["v"] for row in Replay(data, "shop").rows("main.pairs")}
        assert found == {
            ("i", 11): 2**63 - 1, ("r", 11): 0.1, ("r", 12): 1.0, ("r", 13): "Infinity",
            ("b", 11): b"\x00\xff", ("n", 11): None, ("t", 11): b"\xffA", ("t", 12): "a\0",
        }  # fmt: skip
        assert type(found["r", 12]) is float

    def test_recorded_changes_are_removed(self, shop):
        """The database does not grow: what the log has is removed from it."""
        path, db, data = shop
        capture(path, data)
        db.execute("BEGIN")
        db.executemany("INSERT INTO orders (status) VALUES (?)", [("x",)] * 3000)
        db.execute("COMMIT")
        assert db.execute("SELECT count(*) FROM virta_cdc_changes").fetchone() == (3000,)
        capture(path, data)

        assert db.execute("SELECT count(*) FROM virta_cdc_changes").fetchone() == (0,)
        check_equal(db, data)

    def test_a_large_transaction_takes_several_batches(self, shop, monkeypatch):
        """Memory is bounded: batches of a limited size, no event lost between them."""
        path, db, data = shop
        monkeypatch.setattr("virta.cdc.change_log.BATCH_RECORDS", 100)
        capture(path, data)
        db.execute("BEGIN")
        db.executemany("INSERT INTO orders (status) VALUES (?)", [("x",)] * 1050)
        db.execute("COMMIT")
        one = SqliteCapture(path, data)
        one.run(threading.Event(), until_caught_up=True)
        batches = one._changes.batches
        one.close()

        assert batches == 11
        check_equal(db, data)


class TestSchemaChanges:
    """Tables that appear, change and vanish are followed."""

    def test_columns_and_tables_come_and_go(self, shop):
        """A new column is read for every row, a dropped table is emptied, a new one is read."""
        path, db, data = shop
        db.execute("INSERT INTO orders (id) VALUES (1)")
        capture(path, data)
        db.execute("ALTER TABLE orders ADD COLUMN note TEXT DEFAULT 'none'")
        db.execute("INSERT INTO orders (id, note) VALUES (2, 'two')")
        db.execute("ALTER TABLE orders RENAME COLUMN status TO state")
        db.execute("CREATE TABLE late (k TEXT PRIMARY KEY)")
        db.execute("INSERT INTO late VALUES ('a')")
        db.execute("DROP TABLE pairs")
        capture(path, data)
        db.execute("UPDATE orders SET note = 'changed', state = 's' WHERE id = 1")
        db.execute("INSERT INTO late VALUES ('b')")
        capture(path, data)

        replay = check_equal(db, data)
        assert ("ALTER", "main.orders") in replay.schemas
        assert ("DROP", "main.pairs") in replay.schemas
        assert replay.rows("main.pairs") == []

    def test_a_table_made_again_or_renamed(self, shop):
        """Equal columns are not enough: a table that was dropped and created again is read again."""
        path, db, data = shop
        db.execute("INSERT INTO pairs VALUES ('a', 1, 1)")
        db.execute("INSERT INTO orders (id) VALUES (1)")
        capture(path, data)
        db.execute("DROP TABLE pairs")
        db.execute("CREATE TABLE pairs (a TEXT, b INTEGER, v, PRIMARY KEY (a, b)) WITHOUT ROWID")
        db.execute("INSERT INTO pairs VALUES ('b', 2, 2)")
        db.execute("ALTER TABLE orders RENAME TO sales")
        db.execute("INSERT INTO sales (id) VALUES (2)")
        capture(path, data)

        replay = check_equal(db, data)
        assert replay.rows("main.orders") == []

    def test_tables_without_a_key_are_named(self, shop, caplog):
        """They are left out, with a warning that says why."""
        path, db, data = shop
        db.execute("CREATE TABLE loose (x)")
        capture(path, data)

        assert "table 'loose' has no primary key" in caplog.text

    def test_only_the_tables_asked_for(self, shop):
        """`tables` limits the capture."""
        path, db, data = shop
        db.execute("INSERT INTO orders (id) VALUES (1)")
        db.execute("INSERT INTO pairs VALUES ('a', 1, 1)")
        capture(path, data, tables=["pairs"])

        assert set(Replay(data, "shop").tables) == {"main.pairs"}


class TestRefusals:
    """Each is one sentence that says what to do."""

    def test_no_such_file(self, tmp_path):
        with pytest.raises(CaptureError, match="there is no database file"):
            SqliteCapture(tmp_path / "none.db", tmp_path / "data")

    def test_a_second_process(self, shop):
        path, _, data = shop
        one = SqliteCapture(path, data)
        with pytest.raises(CaptureError, match="another process captures changes as 'shop'"):
            SqliteCapture(path, data)
        one.close()

    def test_another_log(self, shop, tmp_path):
        path, _, data = shop
        capture(path, data)
        with pytest.raises(CaptureError, match="go to another log"):
            capture(path, tmp_path / "other")

    def test_an_older_copy_of_the_database(self, shop, tmp_path):
        path, db, data = shop
        capture(path, data)
        copy = sqlite3.connect(tmp_path / "copy.db")
        db.backup(copy)
        db.execute("INSERT INTO orders (id) VALUES (1)")
        capture(path, data)
        copy.backup(db)
        copy.close()

        with pytest.raises(CaptureError, match="older than the log"):
            capture(path, data)

    def test_drop_and_start_again(self, shop):
        """`drop` removes everything from the database; the next capture reads all rows again."""
        path, db, data = shop
        db.execute("INSERT INTO orders (id) VALUES (1)")
        capture(path, data)
        sqlite_admin.drop(path, data, "shop")
        names = [n for (n,) in db.execute("SELECT name FROM sqlite_schema")]
        assert not [n for n in names if n.startswith("virta_")]
        db.execute("DELETE FROM orders")
        db.execute("INSERT INTO orders (id) VALUES (5)")
        capture(path, data)

        check_equal(db, data)


# Random changes.

VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
    st.binary(max_size=8),
)
KEYS = st.integers(0, 6)
CHANGES = st.one_of(
    st.tuples(st.just("INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?, ?)"), KEYS, VALUES, VALUES, VALUES, KEYS),
    st.tuples(st.just("INSERT OR IGNORE INTO orders VALUES (?, ?, ?, ?, ?)"), KEYS, VALUES, VALUES, VALUES, KEYS),
    st.tuples(st.just("UPDATE OR REPLACE orders SET ref = ? WHERE id = ?"), KEYS, KEYS),
    st.tuples(st.just("UPDATE OR REPLACE orders SET id = ? WHERE id = ?"), KEYS, KEYS),
    st.tuples(st.just("DELETE FROM orders WHERE id >= ?"), KEYS),
    st.tuples(st.just("INSERT OR REPLACE INTO pairs (a, b, v) VALUES (?, ?, ?)"), KEYS, KEYS, VALUES),
    st.tuples(st.just("UPDATE OR REPLACE pairs SET b = ? WHERE b = ?"), KEYS, KEYS),
    st.tuples(st.just("DELETE FROM pairs")),
    st.tuples(st.just("ALTER TABLE pairs ADD COLUMN c DEFAULT 'later'")),
    st.tuples(st.just("COMMIT")),
    st.tuples(st.just("ROLLBACK")),
    st.tuples(st.just("capture")),
)  # fmt: skip


@settings(max_examples=40)
@given(steps=st.lists(CHANGES, max_size=30), limit=st.sampled_from([1, 3, 10_000]))
def test_random_changes_are_rebuilt(tmp_path_factory, steps, limit):
    """Whatever is written, with rollbacks, replaces and schema changes: replay equals the tables."""
    folder = tmp_path_factory.mktemp("shop")
    path, data = folder / "shop.db", folder / "data"
    db = open_db(path)
    db.executescript("PRAGMA journal_mode = WAL;" + SCHEMA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("virta.cdc.change_log.BATCH_RECORDS", limit)
        for statement, *values in steps:
            if statement in {"capture", "COMMIT", "ROLLBACK"}:
                if db.in_transaction:
                    db.execute("ROLLBACK" if statement == "ROLLBACK" else "COMMIT")
                if statement == "capture":
                    capture(path, data)
                    check_equal(db, data)
                continue
            if not db.in_transaction:
                db.execute("BEGIN")
            try:
                db.execute(statement, values)
            except sqlite3.Error as error:
                assert "duplicate column" in str(error) or "constraint" in str(error)  # noqa: PT017
        if db.in_transaction:
            db.execute("COMMIT")
        capture(path, data)
        check_equal(db, data)
    db.close()


@pytest.mark.slow
@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_kills_at_any_point_lose_and_double_nothing(shop, processes, wait_for_progress, journal):
    """The capturing process is killed again and again while another writes."""
    path, db, data = shop
    db.execute(f"PRAGMA journal_mode = {journal}")
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    stopping = threading.Event()

    def write():
        own = open_db(path)
        mine = random.Random(seed)
        while not stopping.is_set():
            own.execute("BEGIN IMMEDIATE")
            for _ in range(mine.randrange(1, 30)):
                key = mine.randrange(200)
                own.execute(
                    mine.choice([
                        "INSERT OR REPLACE INTO orders (id, total, ref) SELECT k, random(), k % 50 FROM (SELECT ? AS k)",
                        "UPDATE orders SET status = hex(randomblob(20)) WHERE id = ?",
                        "DELETE FROM orders WHERE id = ?",
                    ]),
                    (key,),
                )  # fmt: skip
            own.execute("COMMIT")
            stopping.wait(0.002)
        own.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(8):
            process = processes("-m", "virta", "cdc", "sqlite", path, "--data-dir", data)
            wait_for_progress(data)
            stopping.wait(chance.uniform(0, 0.4))  # the kill may hit anything
            process.send_signal(signal.SIGKILL)
            process.wait()
    finally:
        stopping.set()
        writer.join()
    capture(path, data)

    replay = check_equal(db, data)
    assert len(replay.ops) > 100
