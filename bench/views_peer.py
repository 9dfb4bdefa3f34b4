"""
A peer of live views: PostgreSQL with LISTEN/NOTIFY, and the queries run again after every notification.

That is what applications do that have no live views: a trigger notifies, and a client that shows a result asks for it again.
Every query is prepared and has an index; all of them are asked over one connection, which waits for notifications
first. One round serves all notifications that arrived meanwhile.
"""

from __future__ import annotations

import random
import select
import sys
import threading
import time
from pathlib import Path

from views_workload import PAD, percentiles

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cdc"))

TABLE = """
CREATE TABLE orders (id int PRIMARY KEY, "group" int, status text, text text, t bigint);
INSERT INTO orders SELECT n, n % {views}, 'paid', '{pad}', 0 FROM generate_series(0, {rows} - 1) AS n;
CREATE INDEX ON orders ("group", status);
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN PERFORM pg_notify('orders', NEW.t::text); RETURN NULL; END $$;
CREATE TRIGGER tell AFTER UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION tell();
ANALYZE orders;
"""
READ = "PREPARE read (int) AS SELECT * FROM orders WHERE \"group\" = $1 AND status = 'paid'"


def measure_peer(rows: int, views: int, subscribers: int, seconds: float, pace: int) -> None:
    try:
        from pg_server import PgServer, binaries  # noqa: PLC0415 - needs psycopg2
    except ImportError:
        print("peer: skipped: psycopg2 is not installed")
        return
    if binaries() is None:
        print("peer: skipped: PostgreSQL is not installed")
        return
    server = PgServer(shared_buffers="'256MB'")
    try:
        _measure(server, rows, views, subscribers, seconds, pace)
    finally:
        server.stop()
    print("peer: RethinkDB is skipped: it is not in Debian")


def _measure(server, rows: int, views: int, subscribers: int, seconds: float, pace: int) -> None:
    connection = server.connect()
    cursor = connection.cursor()
    cursor.execute(TABLE.format(rows=rows, views=views, pad=PAD))
    cursor.execute(READ)
    cursor.execute("LISTEN orders")
    done = threading.Event()
    writer = threading.Thread(target=_update, args=(server, rows, seconds, pace, done))
    writer.start()
    latencies: list[float] = []
    rounds = 0
    began, used = time.monotonic(), time.process_time()
    # A round may take longer than the whole load: what was asked by then counts.
    while not done.is_set() or rounds == 0:
        if not select.select([connection], [], [], 0.1)[0]:
            continue
        connection.poll()
        if not connection.notifies:
            continue
        times = [int(one.payload) for one in connection.notifies]
        connection.notifies.clear()
        for number in range(subscribers):
            cursor.execute(f"EXECUTE read({number % views})")
            cursor.fetchall()
        rounds += 1
        now = time.time_ns()
        latencies += [(now - at) / 1e6 for at in times]
    lasted = time.monotonic() - began
    writer.join()
    print(
        f"peer: PostgreSQL with LISTEN/NOTIFY, {subscribers} queries asked again, {pace} updates/s: "
        f"{rounds / lasted:.1f} rounds/s; update -> result {percentiles(latencies)}; "
        f"CPU of the client {100 * (time.process_time() - used) / lasted:.0f} % of a core"
    )
    cursor.close()
    connection.close()


def _update(server, rows: int, seconds: float, pace: int, done: threading.Event) -> None:
    connection = server.connect()
    try:
        with connection.cursor() as cursor:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                row = (random.choice(["paid", "new"]), time.time_ns(), random.randrange(rows))
                cursor.execute("UPDATE orders SET status = %s, t = %s WHERE id = %s", row)
                time.sleep(1 / pace)
    finally:
        connection.close()
        done.set()
