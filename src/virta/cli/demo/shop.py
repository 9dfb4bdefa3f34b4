"""A small shop in SQLite that changes by itself: orders come in, are paid, cancelled, shipped and removed."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

from virta import clock, outbox

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Seconds between two changes, on average.
PAUSE_S: Final = 0.25
ORDERS_MAX: Final = 500
BUSY_S: Final = 30.0
CITIES: Final = ("Helsinki", "Tampere", "Turku", "Oulu", "Stockholm", "Berlin", "Lisbon")
PRODUCTS: Final = (
    ("Espresso machine", 349.0), ("Grinder", 129.0), ("Kettle", 59.0), ("Filter papers", 4.5),
    ("Beans, 1 kg", 24.0), ("Cup", 9.0), ("Scale", 39.0),
)  # fmt: skip

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS products (id INTEGER PRIMARY KEY, name TEXT, price REAL, stock INTEGER);
CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY AUTOINCREMENT, product TEXT, quantity INTEGER, city TEXT,
    total REAL, status TEXT, created TEXT);
"""


class Shop:
    """The shop's database, and what happens in it."""

    def __init__(
        self, path: Path, on_paid: Callable[[int], None], *, seed: int | None = None
    ) -> None:
        """`on_paid` is called with the id of each order that was paid, after the transaction."""
        self.path = path
        self._on_paid = on_paid
        self._chance = random.Random(seed)  # noqa: S311 - a demo
        with closing(self._connect()) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(_SCHEMA)
            outbox.create_table(db)
            if not db.execute("SELECT count(*) FROM products").fetchone()[0]:
                rows = [(at, name, price, 100) for at, (name, price) in enumerate(PRODUCTS, 1)]
                db.executemany("INSERT INTO products VALUES (?, ?, ?, ?)", rows)
            db.commit()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=BUSY_S)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(self._connect()) as db, db:
            db.execute("BEGIN IMMEDIATE")
            yield db

    def run(self, stopping: threading.Event, pause_s: float = PAUSE_S) -> None:
        """Change something again and again until `stopping` is set."""
        while not stopping.wait(self._chance.uniform(0.2, 1.8) * pause_s):
            self.step()

    def step(self) -> None:
        """Do one thing that happens in a shop."""
        paid = None
        with self._transaction() as db:
            self._order(db)
            order = self._pick(db, "new")
            if order is not None and self._chance.random() < 0.9:
                if self._chance.random() < 0.12:
                    db.execute(
                        "UPDATE orders SET status = 'cancelled' WHERE id = ?", (order["id"],)
                    )
                else:
                    self._pay(db, order)
                    paid = order["id"]
            self._delete_old_orders(db)
        if paid is not None:
            self._on_paid(paid)

    def ship(self, order: int) -> None:
        """Mark a paid order as shipped."""
        with self._transaction() as db:
            db.execute(
                "UPDATE orders SET status = 'shipped' WHERE id = ? AND status = 'paid'", (order,)
            )

    def _order(self, db: sqlite3.Connection) -> None:
        at, (name, price) = self._chance.choice(list(enumerate(PRODUCTS, 1)))
        quantity = self._chance.choice([1, 1, 1, 2, 3, 5])
        db.execute(
            "INSERT INTO orders (product, quantity, city, total, status, created) VALUES (?, ?, ?, ?, 'new', ?)",
            (name, quantity, self._chance.choice(CITIES), round(price * quantity, 2), clock.time_text(clock.now_us())),
        )  # fmt: skip
        db.execute(
            "UPDATE products SET stock = CASE WHEN stock < 10 THEN 100 ELSE stock - ? END WHERE id = ?",
            (quantity, at),
        )

    def _pick(self, db: sqlite3.Connection, status: str) -> dict[str, Any] | None:
        cursor = db.execute(
            "SELECT id, city, total FROM orders WHERE status = ? ORDER BY id LIMIT 1", (status,)
        )
        row = cursor.fetchone()
        return None if row is None else dict(zip(("id", "city", "total"), row, strict=True))

    def _pay(self, db: sqlite3.Connection, order: dict[str, Any]) -> None:
        db.execute("UPDATE orders SET status = 'paid' WHERE id = ?", (order["id"],))
        data = {"order": order["id"], "city": order["city"], "total": order["total"]}
        outbox.add(
            db, "payments", data, key=str(order["id"]), type="shop.paid", source="/demo/shop"
        )

    def _delete_old_orders(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM orders WHERE id <= (SELECT max(id) FROM orders) - ?", (ORDERS_MAX,))
