"""A database with a capture into a folder, and the comparison of its tables with events and live views."""

from __future__ import annotations

import itertools
import threading
import time

import psycopg2
from cdc_replay import Replay
from pg_tables import check_rebuilt

import virta
import virta.views
from virta.cdc.postgres import admin
from virta.cdc.postgres.capture import PostgresCapture
from virta.errors import CaptureError
from waiting import wait_until

DEADLINE_S = 60
numbers = itertools.count()


# Filters and the WHERE of the same meaning; rows are compared by these columns.
KEYS = {"every": "id, c_bool, c_int8", "pairs": "a, b, v", "docs": "id, n"}
VIEWS = {
    "every": [("id=>2&c_bool=true", "id > 2 AND c_bool"), ("", "true"), ("c_int2=<10", "c_int2 < 10")],
    "pairs": [("b=>3", "b > 3"), ("v=u", "v = 'u'")],
    "docs": [("n=<4", "n < 4"), ("n=>20", "n > 20")],
}  # fmt: skip


class Database:
    """A database of its own with a capture into a folder."""

    def __init__(self, pg, folder):
        self.name = f"shop{next(numbers)}"
        self.dsn = pg.database(self.name)
        self.data = folder / "data"
        self.connection = psycopg2.connect(self.dsn)
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()

    def run(self, statement, *values):
        self.cursor.execute(statement, values or None)

    def one(self, statement, *values):
        self.run(statement, *values)
        return self.cursor.fetchone()[0]

    def capture(self, **options):
        """Capture everything that is committed now; return the number of records."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            capture = PostgresCapture(self.dsn, self.data, name=self.name, **options)
            try:
                capture.run(threading.Event(), until_caught_up=True)
            except (
                CaptureError
            ) as error:  # such as the slot, which the last capture has just released
                if not error.retry or time.monotonic() > deadline:
                    raise
            else:
                return capture.changes
            finally:
                capture.close()

    def close(self):
        """Drop slot and database, so that the server keeps no WAL for them."""
        admin.drop(self.dsn, self.data, self.name)
        self.connection.close()

    def replay(self):
        return Replay(self.data, self.name)

    def check(self, *tables):
        """Compare what the events rebuild with the tables, and live views with SELECT … WHERE."""
        self.check_views(*tables)
        return check_rebuilt(self.connection, self.data, self.name, tables)

    def check_views(self, *tables):
        with virta.open(self.data / "log", read_only=True) as log:
            for table in tables:
                for query, where in VIEWS.get(table, ()):
                    self.run(f"SELECT {KEYS[table]} FROM {table} WHERE {where}")
                    wanted = [list(row) for row in self.cursor.fetchall()]
                    view = virta.views.open(log, f"{self.name}.public.{table}", query)
                    rows = [event["data"] for event in view.rows.values()]
                    found = [[row[name] for name in KEYS[table].split(", ")] for row in rows]
                    assert sorted(found, key=str) == sorted(wanted, key=str), (table, query)


def wait_for(condition):
    wait_until(condition, seconds=DEADLINE_S)
