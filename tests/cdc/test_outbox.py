"""Events of the outbox are published if and only if their transaction commits."""

from __future__ import annotations

import sqlite3
import threading

import pytest

import virta
from virta import outbox
from virta.cdc.sqlite_capture import SqliteCapture
from virta.errors import EventError
from virta.event import Event


@pytest.fixture
def shop(tmp_path):
    db = sqlite3.connect(tmp_path / "shop.db")
    outbox.create_table(db)
    db.commit()
    yield db, tmp_path
    db.close()


def capture(folder):
    one = SqliteCapture(folder / "shop.db", folder / "data")
    one.run(threading.Event(), until_caught_up=True)
    one.close()
    with virta.open(folder / "data" / "log") as log:
        return [record for record in log.read() if not record.topic.startswith(b"$")]


def test_events_of_committed_transactions_are_forwarded(shop):
    """Those before the capture, those after, none of a rollback; each once, and the table is emptied."""
    db, folder = shop
    outbox.add(db, "payments", {"order": 1}, key="1", type="paid", subject="one")
    db.commit()
    capture(folder)
    outbox.add(db, "payments", {"order": 2})
    db.rollback()
    own = Event.new("paid", "/shop", {"order": 3}, partitionkey="three")
    assert outbox.add(db, "refunds", own) == own.id
    db.commit()
    capture(folder)
    found = [r for r in capture(folder) if not str(r.topic).startswith("shop.")]

    assert [(str(r.topic), str(r.key)) for r in found] == [("payments", "1"), ("refunds", "three")]
    first, second = (Event.from_json(r.value) for r in found)
    assert (first.type, first.subject, first.data) == ("paid", "one", {"order": 1})
    assert second == own
    assert db.execute("SELECT count(*) FROM virta_outbox").fetchone() == (0,)


def test_rows_that_cannot_be_forwarded_are_kept_as_events(shop, caplog):
    """A row written by hand with a bad event goes to a channel of its own, with a warning."""
    db, folder = shop
    rows = [("a", "ok", "", "no json"), ("b", "$virta/streams", "", '{"id":"1","source":"/s"}')]
    db.executemany("INSERT INTO virta_outbox VALUES (?, ?, ?, ?)", rows)
    db.commit()
    found = [r for r in capture(folder) if str(r.topic) == "shop.outbox-invalid"]

    assert [Event.from_json(r.value).data["after"]["id"] for r in found] == ["a", "b"]
    assert "is not a JSON object with source and id" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("", {}), "channel is ''"), (("c" * 1025, {}), "1 to 1024 bytes"), ((7, {}), "channel is 7")],
)
def test_bad_arguments(shop, arguments, words):
    """The error names the argument and the limit."""
    with pytest.raises(EventError, match=words):
        outbox.add(shop[0], *arguments)


def test_sqlalchemy(tmp_path):
    """Connections and sessions of SQLAlchemy work like DB-API connections."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.orm import Session

    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with engine.begin() as connection:
        outbox.create_table(connection)
        outbox.add(connection, "payments", {"order": 1})
    with Session(engine) as session:
        outbox.add(session, "payments", {"order": 2})
        session.commit()
        outbox.add(session, "payments", {"order": 3})
    engine.dispose()

    events = [Event.from_json(r.value) for r in capture(tmp_path) if str(r.topic) == "payments"]
    assert [event.data["order"] for event in events] == [1, 2]
