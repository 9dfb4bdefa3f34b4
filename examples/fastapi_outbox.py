"""
FastAPI with the outbox: the order and its event are one transaction.

    pip install 'virta[server]' fastapi
    python examples/fastapi_outbox.py shop.db 8000
    virta serve --cdc sqlite:shop.db          # forwards the events to the channel `orders`
    curl -N http://127.0.0.1:8232/channels/orders &
    curl http://127.0.0.1:8000/orders -d '{"product": "Kettle", "total": 59}' -H 'Content-Type: application/json'
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from virta import outbox


class NewOrder(BaseModel):
    """What a customer sends."""

    product: str
    total: float


def build(path: str) -> FastAPI:
    """Return the application over a database file."""
    app = FastAPI()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(
            "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, product TEXT, total REAL)"
        )
        outbox.create_table(db)
        db.commit()

    @app.post("/orders", status_code=201)
    def create(order: NewOrder) -> dict[str, int]:
        with closing(sqlite3.connect(path)) as db, db:
            values = (order.product, order.total)
            id_ = db.execute("INSERT INTO orders (product, total) VALUES (?, ?)", values).lastrowid
            data = {"order": id_, "product": order.product, "total": order.total}
            outbox.add(db, "orders", data, key=str(id_), type="order.created", source="/shop")
            if order.total < 0:  # too late for the event? No: it is rolled back with the row
                raise HTTPException(422, "a total is not below 0")
        return {"id": id_ or 0}

    return app


if __name__ == "__main__":
    uvicorn.run(build(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]))
