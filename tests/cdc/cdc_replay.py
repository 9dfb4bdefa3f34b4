"""Rebuild tables from the events in a log, with nothing but the documented shape."""

from __future__ import annotations

import json
import math
from base64 import b64decode

import virta
from virta.event import Event

UNCHANGED = "__unchanged"


class Replay:
    """The tables that the change events of one server describe."""

    def __init__(self, data_dir, server):
        self.tables = {}  # "schema.table" -> {record key: row}
        self.ops = []  # (table, op, key)
        self.schemas = []  # (kind, table)
        self.ids = []
        self.transactions = []
        prefix = f"{server}."
        with virta.open(data_dir / "log", read_only=True) as log:
            for record in log.read(visibility="committed"):
                topic = str(record.topic)
                if topic.startswith(prefix):
                    self.apply(topic.removeprefix(prefix), record)
        assert len(set(self.ids)) == len(self.ids), "an event is doubled"

    def apply(self, name, record):
        event = Event.from_json(record.value)  # strict: every event is a valid CloudEvent
        self.ids.append((event.source, event.id))
        if name == "schema-changes":
            (change,) = event.data["tableChanges"]
            self.schemas.append((change["type"], change["id"].replace('"', "")))
            name = self.schemas[-1][1]
            if change["type"] == "DROP":
                self.tables.pop(name, None)
                return
            # Rows from before have no value in new columns, and those that are dropped vanish.
            columns = [column["name"] for column in change["table"]["columns"]]
            for key, row in self.tables.get(name, {}).items():
                self.tables[name][key] = {column: row.get(column) for column in columns}
            return
        if name == "transaction":
            self.transactions.append(event.data)
            return
        data = event.data
        rows = self.tables.setdefault(name, {})
        key = str(record.key)
        op = data["op"]
        assert event.extensions["iodebeziumop"] == op
        self.ops.append((name, op, key))
        if op == "t":
            rows.clear()
            return
        if op == "d":
            rows.pop(key, None)
            return
        assert json.loads(key).items() <= data["after"].items()
        row = {
            column: b64decode(value) if column in data.get("base64", ()) else value
            for column, value in data["after"].items()
        }
        for column in data.get("unchanged", ()):
            assert row[column] == UNCHANGED
            row[column] = rows[key][column]
        rows[key] = row

    def rows(self, table):
        return sorted(self.tables.get(table, {}).values(), key=repr)


def plain(value):
    """Return a value of SQLite as an event has it."""
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
