"""Stores inside the process: virta, SQLite, LMDB, and the bare file that none of them can beat."""

from __future__ import annotations

import os
import sqlite3
import struct
import time
from typing import TYPE_CHECKING, ClassVar

import virta

if TYPE_CHECKING:
    from pathlib import Path

# What a store without wake-up does while it waits for the next record.
POLL_S = 0.001
LMDB_MAP_BYTES = 4 * 1024**3
READ_ROWS = 1000


class Virta:
    name = "virta"
    levels: ClassVar = {"none": "none", "durable": "group"}

    def __init__(self, directory: Path, level: str):
        self.log = virta.open(directory / "virta", durability=self.levels[level])

    def append(self, batch):
        self.log.append_many(batch)

    def append_one(self, record):
        self.log.append(*record)

    def read_all(self):
        count = 0
        with self.log.read() as reader:
            for records in reader.batches():
                count += len(records)
        return count

    def follow(self):
        with self.log.read(start="latest", follow=True) as reader:
            yield None  # from here on nothing is missed
            for record in reader:
                yield record.value

    def close(self):
        self.log.close()


class Sqlite:
    name = "SQLite WAL"
    levels: ClassVar = {"none": "NORMAL", "durable": "FULL"}

    def __init__(self, directory: Path, level: str):
        self.db = sqlite3.connect(directory / "log.db", isolation_level=None, cached_statements=16)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute(f"PRAGMA synchronous={self.levels[level]}")
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS log(offset INTEGER PRIMARY KEY, topic BLOB, key BLOB, value BLOB)"
        )

    def append(self, batch):
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany("INSERT INTO log(topic, key, value) VALUES (?, ?, ?)", batch)
        self.db.execute("COMMIT")

    def append_one(self, record):
        self.db.execute("INSERT INTO log(topic, key, value) VALUES (?, ?, ?)", record)

    def read_all(self):
        cursor = self.db.execute("SELECT offset, topic, key, value FROM log ORDER BY offset")
        count = 0
        while rows := cursor.fetchmany(READ_ROWS):
            count += len(rows)
        return count

    def follow(self):
        last = self.db.execute("SELECT coalesce(max(offset), 0) FROM log").fetchone()[0]
        yield None
        while True:
            rows = self.db.execute(
                "SELECT offset, value FROM log WHERE offset > ? ORDER BY offset", (last,)
            ).fetchall()
            if not rows:
                time.sleep(POLL_S)
            for last, value in rows:  # noqa: B007
                yield value

    def close(self):
        self.db.close()


class Lmdb:
    name = "LMDB"
    levels: ClassVar = {"none": "nosync", "durable": "sync"}

    def __init__(self, directory: Path, level: str):
        import lmdb  # noqa: PLC0415

        path = directory / "lmdb"
        path.mkdir(exist_ok=True)
        sync = level == "durable"
        self.env = lmdb.open(str(path), map_size=LMDB_MAP_BYTES, sync=sync, metasync=sync)
        with self.env.begin() as txn, txn.cursor() as cursor:
            self.next = struct.unpack(">Q", cursor.key())[0] + 1 if cursor.last() else 0

    def append(self, batch):
        with self.env.begin(write=True) as txn:
            for topic, key, value in batch:
                row = struct.pack(">HH", len(topic), len(key)) + topic + key + value
                txn.put(struct.pack(">Q", self.next), row, append=True)
                self.next += 1

    def append_one(self, record):
        self.append((record,))

    @staticmethod
    def _row(row):
        topic, key = struct.unpack_from(">HH", row)
        return row[4 : 4 + topic], row[4 + topic : 4 + topic + key], row[4 + topic + key :]

    def read_all(self):
        with self.env.begin() as txn, txn.cursor() as cursor:
            return sum(1 for row in cursor.iternext(keys=False, values=True) if self._row(row))

    def follow(self):
        last = self.next - 1
        yield None
        while True:
            with self.env.begin() as txn, txn.cursor() as cursor:
                rows = (
                    list(cursor.iternext()) if cursor.set_range(struct.pack(">Q", last + 1)) else []
                )
            if not rows:
                time.sleep(POLL_S)
            for key, row in rows:
                last = struct.unpack(">Q", key)[0]
                yield self._row(row)[2]

    def close(self):
        self.env.close()


class RawFile:
    """One write(2) per batch of ready bytes and, when durable, one fdatasync: the physical limit."""

    name = "raw file (limit)"
    levels: ClassVar = {"none": "write", "durable": "+fdatasync"}

    def __init__(self, directory: Path, level: str):
        self.fd = os.open(directory / "raw", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.sync = level == "durable"
        self._ready: dict[int, bytes] = {}

    def append(self, batch):
        # The bytes are made once: what is measured is the kernel and the disk.
        data = self._ready.get(len(batch))
        if data is None:
            data = self._ready[len(batch)] = bytes(300 * len(batch))
        os.write(self.fd, data)
        if self.sync:
            os.fdatasync(self.fd)

    def append_one(self, record):
        self.append((record,))

    def read_all(self):
        position = 0
        while data := os.pread(self.fd, 1024 * 1024, position):
            position += len(data)
        return position // 300

    follow = None

    def close(self):
        os.close(self.fd)


PEERS = (RawFile, Virta, Sqlite, Lmdb)
