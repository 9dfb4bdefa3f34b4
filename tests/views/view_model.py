"""
A model of one server and its clients, to test live views by random steps.

The tables, views, passes and consumers are the real ones; the log is a list in memory, and a connection is a list of
frames of which a client may read any part before it is cut. The oracle reads records with `json` and evaluates
filters with the reference evaluator, so it shares nothing with what it checks but the filter tree.
"""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from virta.event.row_changes import KeyRule, event_of, read_change
from virta.filters import Filter, parse
from virta.log.record import Name, Record
from virta.views import view as view_module
from virta.views.consumer import GAP, UNKNOWN_POSITION, ViewConsumer
from virta.views.frames import EMPTY_ID, ViewFrame
from virta.views.limits import ViewLimits
from virta.views.tables.passes import MembershipPass, ResumePass
from virta.views.tables.table import RowTable
from virta.views.tables.table_file import open_table, save_table, table_path
from virta.views.view import View, ViewFilter, view_tag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.views.tables.passes import Piece

CHANNEL = "orders"
KEYS = [f"k{n}" for n in range(9)]
STATES = ["new", "paid", "sent"]

FILTERS: list[tuple[Any, str]] = [
    ("", "query-string"),
    ("status=paid", "query-string"),
    ("status=paid&total=>3", "query-string"),
    ("status=new;status=sent", "query-string"),
    ({"equals": {"status": "paid"}}, "koncorde"),
    ({"and": [{"range": {"total": {"gte": 3}}}, {"not": {"equals": {"status": "new"}}}]}, "koncorde"),
    ("type = 'order' AND EXISTS subject", "cesql"),
    ([{"suffix": {"type": "er"}}], "cloudevents"),
]  # fmt: skip
ROW_FILTERS: list[tuple[Any, str] | None] = [None, None, ("tenant=1", "query-string")]


@dataclass
class SegmentLike:
    next: int
    compacted: bool


class MemoryLog:
    """The parts of a log that tables use."""

    id = "log"
    epoch = 1

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.everything: list[Record] = []  # also what was removed
        self.first_offset = 0
        self.next_offset = 0
        self.compacted_end = 0

    def append(self, topic: str, key: str, value: bytes) -> Record:
        record = Record(Name(topic.encode()), Name(key.encode()), value, self.next_offset, 0)
        self.records[record.offset] = record
        self.everything.append(record)
        self.next_offset += 1
        return record

    def segments(self) -> list[SegmentLike]:
        return [SegmentLike(self.compacted_end, compacted=self.compacted_end > 0)]

    @contextmanager
    def read(self, topics: list[str], start: int, end: int, **_: Any):
        class Reader:
            @staticmethod
            def batches():
                found = [
                    self.records[o] for o in range(start, end)
                    if o in self.records and self.records[o].topic == topics[0]
                ]  # fmt: skip
                if found:
                    yield found

        yield Reader

    def values(self, offsets: list[int]) -> dict[int, bytes]:
        return {o: event_of(self.records[o]).value for o in offsets if o in self.records}

    def retain(self, first: int) -> None:
        self.first_offset = max(self.first_offset, min(first, self.next_offset))
        self.records = {o: r for o, r in self.records.items() if o >= self.first_offset}

    def compact(self, end: int) -> None:
        """Compact as the log does: only records below `end` supersede others."""
        newest = {(r.topic, r.key): o for o, r in self.records.items() if r.key and o < end}
        for offset, record in list(self.records.items()):
            if offset < end and record.key and newest[record.topic, record.key] > offset:
                del self.records[offset]
        self.compacted_end = max(self.compacted_end, end)


# The oracle.


def oracle_change(record: Record) -> tuple[str, str | None, Any]:
    """Return (kind, key, row) of a record, by the rules of the guide."""
    key = str(record.key) or None
    if not record.value:
        return ("delete", key, None) if key else ("none", None, None)
    event = json.loads(record.value)
    key = key or event.get("subject")
    data = event.get("data")
    if isinstance(data, dict) and {"op", "source"} <= data.keys():
        if data["op"] == "t":
            return "truncate", None, None
        if data["op"] == "d":
            return "delete", key, None
        event = event | {"data": data["after"]}
    elif "data" in event and data is None:
        return "delete", key, None
    if event["type"].endswith(".deleted"):
        return "delete", key, None
    return ("set", key, event) if key else ("none", None, None)


def holds(filter_: Filter, event: dict[str, Any]) -> bool:
    if filter_.dialect != "koncorde":
        return filter_.matches(event)
    data = event.get("data")
    document = data if isinstance(data, dict) else {}
    return filter_.matches({"_id": event.get("subject") or event["id"]} | document)


class Oracle:
    """The newest event of each key below a position."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def rows(self, position: int, first: int = 0) -> dict[str, tuple[int, Any]]:
        rows: dict[str, tuple[int, Any]] = {}
        for record in self._log.everything[:position]:
            if str(record.topic) != CHANNEL:
                continue
            kind, key, row = oracle_change(record)
            if kind == "set":
                rows[key] = (record.offset, row)
            elif kind == "delete":
                rows.pop(key, None)
            elif kind == "truncate":
                rows.clear()
        return {key: row for key, row in rows.items() if row[0] >= first}

    def result(
        self, filters: list[Filter], position: int, first: int = 0
    ) -> dict[str, tuple[int, Any]]:
        rows = self.rows(position, first)
        return {k: row for k, row in rows.items() if all(holds(f, row[1]) for f in filters)}


# Clients.


@dataclass(eq=False)
class Client:
    """One client and its connection."""

    own: Filter
    row_filter: Filter | None
    rows: dict[str, tuple[int, Any]] = field(default_factory=dict)
    last_id: tuple[str, int] | None = None
    flight: list[ViewFrame] = field(default_factory=list)  # written, not read
    consumer: ViewConsumer | None = None
    blocked: bool = False
    live: bool = False
    tag: str = ""
    resumed_at: int | None = None
    seen: set[str] = field(default_factory=set)
    in_snapshot: bool = False
    waits: bool = False  # for its view

    # As a sink.

    def write_frames(self, frames, payloads) -> None:
        assert not self.blocked
        self.flight += [
            ViewFrame(f.name, f.id, f.key, f.offset, f.event, f.reason, f.data) for f in frames
        ]

    def write_bytes(self, chunk: bytes) -> None:
        """Take frames of rows as the bytes of one chunk."""
        assert not self.blocked
        size, _, rest = chunk.partition(b"\r\n")
        body, end = rest[: int(size, 16)], rest[int(size, 16) :]
        assert end == b"\r\n"
        self.flight += [read_frame(text, self.tag) for text in body.split(b"\n\n")[:-1]]

    def wants_pump(self, consumer) -> None:
        pass

    @property
    def filters(self) -> list[Filter]:
        return [self.own] if self.row_filter is None else [self.own, self.row_filter]

    def cut(self) -> None:
        if self.consumer is not None:
            self.consumer.close()
        self.consumer = None
        self.flight.clear()
        self.live = self.blocked = self.waits = self.in_snapshot = False


def read_frame(text: bytes, tag: str) -> ViewFrame:
    """Return the frame of a row in a server-sent event; the event keeps its bytes."""
    name, id_, data = text.split(b"\n")
    members = msgspec.json.decode(data.removeprefix(b"data: "), type=dict[str, msgspec.Raw])
    event = members.get("event")
    reason = json.loads(bytes(members.get("reason", b'""')))
    assert id_.startswith(b"id: " + tag.encode() + b".")
    return ViewFrame(
        name.removeprefix(b"event: ").decode(),
        int(id_.rpartition(b".")[2]),
        json.loads(bytes(members["key"])),
        json.loads(bytes(members["offset"])),
        None if event is None else bytes(event),
        reason,
    )


class Model:
    """One server process after another, over one log."""

    def __init__(self, seed: int, directory) -> None:
        self.random = random.Random(seed)
        self.log = MemoryLog()
        self.oracle = Oracle(self.log)
        self.directory = directory
        self.rule = KeyRule()
        self.limits = ViewLimits(
            view_ring=self.random.choice([8, 40, 1000]),
            view_pending_max=self.random.choice([3, 1000]),
            view_cache_bytes_max=self.random.choice([0, 600, 1_000_000]),
        )
        self.table = RowTable(CHANNEL, self.rule, limits=self.limits)
        self.views: dict[str, View] = {}
        # Each with the pieces that are to come, the one that is matched, and whether views may join it.
        self.passes: list[tuple[MembershipPass, Iterator[Piece], Piece | None, bool]] = []
        count = self.random.randint(2, 5)
        self.clients = [self.new_client() for _ in range(count)]
        self.frames = 0

    def new_client(self) -> Client:
        own = parse(*self.random.choice(FILTERS))
        return Client(own, self.row_filter())

    def row_filter(self) -> Filter | None:
        row = self.random.choice(ROW_FILTERS)
        return None if row is None else parse(*row)

    # Records.

    def value(self) -> tuple[str, bytes]:
        rand = self.random
        key = rand.choice(KEYS)
        data: Any = {
            "status": rand.choice(STATES),
            "total": rand.randint(0, 6),
            "tenant": rand.randint(1, 2),
        }
        event: dict[str, Any] = {
            "specversion": "1.0", "id": str(self.log.next_offset), "source": "/s", "type": "order", "data": data,
        }  # fmt: skip
        record_key = key
        choice = rand.random()
        if choice < 0.15:
            record_key, event["subject"] = "", key
        elif choice < 0.2:
            record_key = ""
        elif choice < 0.3:
            return key, b""
        elif choice < 0.35:
            event["data"] = None
        elif choice < 0.4:
            event["type"] = "order.deleted"
        elif choice < 0.5:
            op = rand.choice("cuurd")
            after = None if op == "d" else data
            event["data"] = {"op": op, "source": {}, "before": data, "after": after}
        elif choice < 0.505:
            record_key = ""  # it is of no key; compaction would take it for a row
            event["data"] = {"op": "t", "source": {}, "before": None, "after": None}
        elif choice < 0.55:
            event["data"] = {"op": "d", "status": "paid"}  # not Debezium's shape
        return record_key, json.dumps(event).encode()

    def append(self) -> None:
        changes = []
        for _ in range(self.random.randint(1, 4)):
            if self.random.random() < 0.1:
                self.log.append("other", "x", b"{}")
                continue
            key, value = self.value()
            record = self.log.append(CHANNEL, key, value)
            changes.append((record.offset, read_change(record, self.rule)))
        view_module.deliver_all(self.table.apply(changes, self.log.next_offset), 0.0)

    # The server.

    def view_of(self, client: Client) -> View:
        """Return the standing view of a client; a new one needs a pass."""
        filter_ = ViewFilter(client.own, client.row_filter)
        client.tag = view_tag(self.log.id, self.log.epoch, CHANNEL, self.rule, filter_)
        view = self.views.get(filter_.id)
        if view is None:
            view = self.views[filter_.id] = View(self.table, filter_)
            self.table.index.add(view)
            running = [job for job, _, _, joinable in self.passes if joinable]
            if running and self.random.random() < 0.5:
                self.random.choice(running).join([view])
            else:
                job = MembershipPass(self.table, [view])
                self.passes.append((job, job.pieces(), None, True))
        return view

    def connect(self, client: Client) -> None:
        if self.random.random() < 0.1:
            client.row_filter = self.row_filter()  # it comes back with another token
        client.waits = True
        self.view_of(client)

    def start_ready(self) -> None:
        """Attach the clients whose view is complete."""
        for client in self.clients:
            if client.waits:
                view = self.view_of(client)
                if view.exact_since is not None:
                    client.waits = False
                    self.attach(client, view)

    def attach(self, client: Client, view: View) -> None:
        consumer = client.consumer = ViewConsumer(view, client)
        if self.clients.index(client) % 2:
            consumer.output = (client.write_bytes, client.tag.encode(), True)
        client.seen.clear()
        client.resumed_at = None
        if client.last_id is None:
            consumer.begin_snapshot()
            return
        tag, position = client.last_id
        if tag != client.tag or position > self.log.next_offset:
            consumer.begin_snapshot(UNKNOWN_POSITION)
            return
        resume = ResumePass(self.table, [(view, position)])
        resume.run(self.log.values)
        if self.random.random() < 0.3:
            self.append()  # between the pass and the consumer
        touched = resume.touched(view, position)
        if touched is None:
            consumer.begin_snapshot(GAP)
        else:
            client.resumed_at = position
            consumer.begin_resume(touched, position)

    def pass_step(self) -> None:
        """Match a piece, or put the findings of a matched one into the table."""
        if not self.passes:
            return
        at = self.random.randrange(len(self.passes))
        job, pieces, matched, joinable = self.passes[at]
        if matched is not None:
            job.finish(matched)
            matched = None
        elif (matched := next(pieces, None)) is not None:
            matched.match(self.log.values)
        else:
            job.end()
            del self.passes[at]
            if (rest := job.rest()) is not None:
                self.passes.append((rest, rest.pieces(), None, False))
            self.start_ready()
            return
        self.passes[at] = (job, pieces, matched, joinable)

    def pump(self, client: Client) -> None:
        if client.consumer is None or client.blocked:
            return
        missing = client.consumer.pump()
        if missing:
            values = self.log.values(missing)
            if lost := set(missing) - values.keys():
                view_module.deliver_all(self.table.lose(lost), 0.0)
            client.consumer.pump(values)

    def remove_view(self) -> None:
        unused = [i for i, v in self.views.items() if not v.consumers and v.exact_since is not None]
        unused = [
            i
            for i in unused
            if not any(c.waits and self.view_of(c) is self.views[i] for c in self.clients)
        ]
        if unused:
            self.table.index.remove(self.views.pop(self.random.choice(unused)))

    def expire(self) -> None:
        view_module.deliver_all(self.table.expire(self.log.first_offset), 0.0)

    def save(self) -> None:
        save_table(self.log, self.table, self.directory)  # type: ignore[arg-type]

    def restart(self) -> None:
        for client in self.clients:
            self.read(client, self.random.randint(0, len(client.flight)))
            client.cut()
        self.views.clear()
        self.passes.clear()
        if self.random.random() < 0.3:
            table_path(self.directory, CHANNEL, self.rule).unlink(missing_ok=True)
        self.table = open_table(
            self.log,
            CHANNEL,
            self.rule,
            directory=self.directory,
            limits=self.limits,  # type: ignore[arg-type]
        )

    # The client.

    def read(self, client: Client, count: int) -> None:
        for frame in client.flight[:count]:
            self.frames += 1
            self.apply(client, frame)
        del client.flight[:count]

    def apply(self, client: Client, frame: ViewFrame) -> None:
        if frame.name == "snapshot":
            client.rows.clear()
            client.in_snapshot = True
            client.resumed_at = None
        elif frame.name == "live":
            client.in_snapshot = False
            client.resumed_at = None
        elif frame.name == "reset":
            client.resumed_at = None
        elif frame.name in {"row", "enter", "update"}:
            assert frame.event is not None
            event = json.loads(frame.event)
            assert all(holds(f, event) for f in client.filters), (frame, event)
            self.check_kind(client, frame)
            client.rows[frame.key] = (frame.offset, event)
        elif frame.name == "leave":
            self.check_kind(client, frame)
            if frame.event is not None and client.row_filter is not None:
                assert holds(client.row_filter, json.loads(frame.event)), "a foreign row is shown"
            client.rows.pop(frame.key, None)
        if frame.id >= 0:
            if (
                client.last_id is not None
                and client.last_id[0] == client.tag
                and not client.in_snapshot
            ):
                assert frame.id >= client.last_id[1], "positions go backwards"
            client.last_id = (client.tag, frame.id)
            self.check_behind(client)
        elif frame.id == EMPTY_ID:
            client.last_id = None

    def check_kind(self, client: Client, frame: ViewFrame) -> None:
        """The first frame of a key after a resume says what happened since the position."""
        if client.resumed_at is None or frame.key in client.seen:
            return
        client.seen.add(frame.key)
        was = frame.key in self.oracle.result(
            client.filters, client.resumed_at, self.log.first_offset
        )
        if self.log.first_offset > self.table.first_offset or (not was and self.log.first_offset):
            return
        if frame.name == "update":
            assert was, f"{frame}: it was not in the result at {client.resumed_at}"
        elif frame.name == "enter":
            assert not was, f"{frame}: it was in the result at {client.resumed_at}"

    def check_behind(self, client: Client) -> None:
        """A client at a position has what was in the result there and has not changed since."""
        assert client.last_id is not None
        position = client.last_id[1]
        then = self.oracle.result(client.filters, position)
        now = self.oracle.rows(self.log.next_offset)
        for key, row in then.items():
            if now.get(key) == row and row[0] >= self.log.first_offset:
                assert client.rows.get(key) == row, f"{key} is missing at {position}"
        for key, (offset, _) in client.rows.items():
            if offset < self.log.first_offset:
                continue
            newest = self.oracle.rows(position).get(key, (-1, None))[0]
            deleted = key not in self.oracle.rows(position) and offset < position
            assert offset >= newest, f"{key} is stale at {position}"
            assert not deleted, f"{key} is deleted at {position}"

    # Checks.

    def quiet(self) -> None:
        """Let everything finish; then every connected client has exactly the result."""
        self.expire()
        while self.passes:
            self.pass_step()
        self.start_ready()
        for client in self.clients:
            client.blocked = False
            for _ in range(10_000):
                if client.consumer is None or client.consumer.idle:
                    break
                self.pump(client)
            self.read(client, len(client.flight))
            if client.consumer is not None:
                wanted = self.oracle.result(
                    client.filters, self.table.position, self.table.first_offset
                )
                assert client.rows == wanted, (client.own, client.row_filter)
                assert client.consumer.view.count == len(wanted)

    def step(self) -> None:
        rand = self.random
        client = rand.choice(self.clients)
        choice = rand.random()
        if choice < 0.3:
            self.append()
        elif choice < 0.4:
            if client.consumer is None and not client.waits:
                self.connect(client)
                self.start_ready()
        elif choice < 0.5:
            self.pass_step()
        elif choice < 0.68:
            self.pump(client)
        elif choice < 0.78:
            self.read(client, rand.randint(0, len(client.flight)))
        elif choice < 0.83:
            client.blocked = not client.blocked
            if client.blocked and client.consumer is not None:
                client.consumer.pause()
        elif choice < 0.88:
            self.read(client, rand.randint(0, len(client.flight)))
            client.cut()
        elif choice < 0.90:
            self.remove_view()
        elif choice < 0.92:
            self.save()
        elif choice < 0.94:
            self.restart()
        elif choice < 0.945:
            self.log.retain(rand.randint(self.log.first_offset, self.log.next_offset))
        elif choice < 0.955:
            self.expire()
        elif choice < 0.97:
            self.log.compact(rand.randint(0, self.log.next_offset))
        else:
            self.quiet()
