"""Triggers and tables of a SQLite capture: every write is recorded, none fails because of them."""

from __future__ import annotations

import sqlite3
import threading

import pytest
from cdc_replay import Replay

from virta.cdc import sqlite_admin, sqlite_capture, sqlite_schema
from virta.cdc.sqlite_capture import SqliteCapture, default_name
from virta.errors import CaptureError


@pytest.fixture
def db(tmp_path):
    db = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    yield db
    db.close()


def install(db, wanted=None):
    return sqlite_schema.install(db, "log", None if wanted is None else frozenset(wanted))


def recorded(db):
    return db.execute("SELECT op, o0, n0 FROM virta_cdc_changes ORDER BY seq").fetchall()


def capture(folder):
    one = SqliteCapture(folder / "shop.db", folder / "data")
    try:
        one.run(threading.Event(), until_caught_up=True)
    finally:
        one.close()
    return Replay(folder / "data", "shop")


def test_every_kind_of_write_is_recorded(db):
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v)")
    install(db)
    db.execute("INSERT INTO t VALUES (1, 'a')")
    db.execute("UPDATE t SET id = 2")
    db.execute("INSERT INTO t VALUES (2, 'b') ON CONFLICT (id) DO UPDATE SET v = excluded.v")
    db.execute("DELETE FROM t")

    assert recorded(db) == [("c", None, 1), ("u", 1, 2), ("u", 2, 2), ("d", 2, None)]


def test_a_rollback_leaves_nothing(db):
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    install(db)
    db.execute("BEGIN")
    db.execute("INSERT INTO t VALUES (1)")
    db.execute("ROLLBACK")

    assert recorded(db) == []


@pytest.mark.parametrize("name", ['quoted "name"', "select", "with space", "tab\tin", "\u00e4", "x'y"])  # fmt: skip
def test_names_are_quoted(db, tmp_path, name):
    """Tables and columns may have any name."""
    quoted = sqlite_schema.quote(name)
    db.execute(f"CREATE TABLE {quoted} ({quoted} INTEGER PRIMARY KEY, v)")
    capture(tmp_path)
    db.execute(f"INSERT INTO {quoted} VALUES (1, 'a')")
    db.execute(f"UPDATE {quoted} SET v = 'b'")

    assert capture(tmp_path).rows(f"main.{name}") == [{name: 1, "v": "b"}]


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("CREATE TABLE t (x)", "table 't' has no primary key"),
        (f"CREATE TABLE t (id INTEGER PRIMARY KEY, {', '.join(f'c{n}' for n in range(990))})",
         "table 't' has 991 columns, the limit is 990"),
    ],
)  # fmt: skip
def test_what_cannot_be_captured_is_named(db, statement, words):
    """It gets no trigger, so writing to it goes on."""
    db.execute(statement)
    _, notes = install(db)

    assert [words in note for note in notes] == [True]
    db.execute("INSERT INTO t DEFAULT VALUES")
    assert sqlite_schema.active_tables(db) == {}


def test_a_table_that_was_asked_for_and_is_missing_is_named(db):
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    _, notes = install(db, ["t", "nowhere"])

    assert notes == ["there is no table 'nowhere'"]
    assert set(sqlite_schema.active_tables(db)) == {"t"}


VIRTUAL = """
CREATE VIRTUAL TABLE words USING fts5(text);
CREATE VIRTUAL TABLE old USING fts4(text);
CREATE VIRTUAL TABLE boxes USING rtree(id, x0, x1);
"""


@pytest.mark.parametrize("known", [True, False])
def test_virtual_tables_and_their_data_are_left_alone(db, monkeypatch, known):
    """A trigger on the tables behind FTS5 crashes the process that writes; also where SQLite does not name them."""
    if known:
        monkeypatch.setattr(sqlite_schema, "SHADOW_PARTS", ())
        if not db.execute("PRAGMA table_list").fetchall():
            pytest.skip("this SQLite does not list tables")
    db.executescript(VIRTUAL)
    db.executescript("CREATE TABLE words_more (id INTEGER PRIMARY KEY); CREATE VIEW v AS SELECT 1;")
    if not known:
        monkeypatch.setattr(sqlite_schema, "_ROWS_OF_TABLES", "SELECT 1, 2, 3 WHERE 0")
    install(db)

    assert set(sqlite_schema.active_tables(db)) == {"words_more"}
    for table in ("words", "old"):
        db.execute(f"INSERT INTO {table} VALUES ('still works')")
        assert db.execute(f"SELECT * FROM {table} WHERE {table} MATCH 'works'").fetchall()
    db.execute("INSERT INTO boxes VALUES (1, 0, 1)")
    db.execute("INSERT INTO words_more VALUES (1)")
    assert recorded(db) == [("c", None, 1)]


def test_an_index_on_an_expression_is_a_warning(db):
    """SQLite does not say which rows REPLACE removes because of it."""
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT)")
    db.execute("CREATE UNIQUE INDEX folded ON t (lower(name))")
    _, notes = install(db)

    assert ["recursive_triggers = ON" in note for note in notes] == [True]


def test_a_unique_index_that_appears_later_is_followed(db, tmp_path):
    """Rows that REPLACE removes because of it are deleted, too."""
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, ref TEXT)")
    db.execute("INSERT INTO t VALUES (1, 'x')")
    capture(tmp_path)
    db.execute("CREATE UNIQUE INDEX refs ON t (ref)")
    capture(tmp_path)
    db.execute("INSERT OR REPLACE INTO t VALUES (2, 'x')")

    assert capture(tmp_path).rows("main.t") == [{"id": 2, "ref": "x"}]


def test_other_indexes_and_triggers_of_the_application_change_nothing(db, tmp_path):
    """The table is not read again."""
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, ref TEXT)")
    db.execute("INSERT INTO t VALUES (1, 'x')")
    capture(tmp_path)
    db.execute("CREATE INDEX refs ON t (ref)")
    db.execute("CREATE TABLE audit (n)")
    db.execute("CREATE TRIGGER own AFTER INSERT ON t BEGIN INSERT INTO audit VALUES (NEW.id); END")
    db.execute("INSERT INTO t VALUES (2, 'y')")

    assert [op for _, op, _ in capture(tmp_path).ops] == ["r", "c"]


def test_a_dropped_column_needs_a_drop_of_the_capture(db, tmp_path):
    """SQLite refuses it while triggers use the column; the guide says what to do."""
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b)")
    db.execute("INSERT INTO t VALUES (1, 2, 3)")
    capture(tmp_path)
    with pytest.raises(sqlite3.OperationalError):
        db.execute("ALTER TABLE t DROP COLUMN b")
    sqlite_admin.drop(tmp_path / "shop.db", tmp_path / "data", "shop")
    db.execute("ALTER TABLE t DROP COLUMN b")

    assert capture(tmp_path).rows("main.t") == [{"id": 1, "a": 2}]


def test_a_second_install_changes_nothing(db):
    """Triggers are made again only for tables that changed: a running writer is not disturbed."""
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    first = install(db)
    before = db.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall()

    assert install(db) == first
    assert db.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall() == before


def test_remove_leaves_the_database_as_it_was(db):
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, ref UNIQUE)")
    before = db.execute("SELECT name FROM sqlite_schema").fetchall()
    install(db)
    sqlite_schema.remove(db)

    assert db.execute("SELECT name FROM sqlite_schema WHERE name != 'sqlite_sequence'").fetchall() == before  # fmt: skip


def test_a_database_goes_to_one_log(db):
    install(db)
    with pytest.raises(CaptureError, match=r"go to another log \(log\)") as error:
        sqlite_schema.install(db, "other", None)
    assert error.value.code == "capture_other_log"


def test_create_records_changes_before_the_first_run(db, tmp_path):
    """They are part of the rows that the first run reads."""
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY); ")
    assert sqlite_admin.create(tmp_path / "shop.db", tmp_path / "data", "shop") == []
    db.execute("INSERT INTO t VALUES (1)")
    status = sqlite_admin.status(tmp_path / "shop.db", tmp_path / "data", "shop")
    assert (status["state"], status["recorded"], status["tables"]) == ("created", 1, {"t": "to be read"})  # fmt: skip

    assert [op for _, op, _ in capture(tmp_path).ops] == ["r"]
    status = sqlite_admin.status(tmp_path / "shop.db", tmp_path / "data", "shop")
    assert (status["recorded"], status["tables"]) == (0, {"t": "captured"})


def test_a_missing_file_is_a_sentence_for_every_command(tmp_path):
    for call in (sqlite_admin.create, sqlite_admin.drop, sqlite_admin.status):
        with pytest.raises(CaptureError, match="there is no database file"):
            call(tmp_path / "none.db", tmp_path / "data", "x")


def test_what_is_no_database_is_a_sentence(tmp_path):
    (tmp_path / "shop.db").write_text("just text, and long enough to be read as a header" * 10)
    with pytest.raises(CaptureError, match="not a database") as error:
        capture(tmp_path)
    assert not error.value.retry


def test_a_locked_database_may_be_tried_again(db, tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_capture, "BUSY_S", 0.0)
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    db.execute("BEGIN EXCLUSIVE")
    with pytest.raises(CaptureError, match="locked") as error:
        capture(tmp_path)
    db.execute("ROLLBACK")
    assert error.value.retry
    capture(tmp_path)


def test_changes_are_removed_in_pieces(db, tmp_path, monkeypatch):
    """Other writers wait for a transaction that removes: it is short."""
    monkeypatch.setattr(sqlite_capture, "REMOVE_ROWS", 10)
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    capture(tmp_path)
    db.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(95)])
    replay = capture(tmp_path)

    assert len(replay.rows("main.t")) == 95
    assert recorded(db) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [("data/shop.db", "shop"), ("my shop.v2.sqlite", "my_shop_v2"), ("\u00e4.db", "_"), ("a-b_1", "a-b_1")],
)  # fmt: skip
def test_the_name_is_that_of_the_file(path, name):
    assert default_name(path) == name
