"""Live views over real sockets: frames, resume, restarts, slow readers, refusals."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import quote

import pytest
from server_harness import STRUCTURED, Server
from websockets.sync.client import connect

import virta
import virta.views
from virta.filters import parse

DEADLINE_S = 30.0


def event(id_, key, **data):
    return {"specversion": "1.0", "id": str(id_), "source": "/s", "type": "order", "subject": key, "data": data}  # fmt: skip


class LiveClient:
    """Reads server-sent events and keeps rows as the guide says."""

    def __init__(self, server, query="", *, path="orders", since=""):
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
        head = f"Last-Event-ID: {since}\r\n" if since else ""
        self.socket.sendall(
            f"GET /channels/{path}/live{'?' if query else ''}{query} HTTP/1.0\r\nHost: 127.0.0.1\r\n{head}\r\n".encode()
        )
        self.file = self.socket.makefile("rb")
        self.status = int(self.file.readline().split()[1])
        while self.file.readline().strip():
            pass
        self.rows = {}
        self.id = since
        self.frames = []

    def frame(self):
        """Read one frame and apply it."""
        name, id_, data = "", None, {}
        while line := self.file.readline():
            line = line.decode().rstrip("\n")
            if not line:
                break
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "id":
                id_ = value
            elif field == "data":
                data = json.loads(value)
        if not name:
            raise EOFError
        if name == "snapshot":
            self.rows.clear()
        elif name in {"row", "enter", "update"}:
            self.rows[data["key"]] = data["event"]["data"]
        elif name == "leave":
            self.rows.pop(data["key"], None)
        if id_ is not None:
            self.id = id_
        self.frames.append((name, data))
        return name, data

    def until(self, wanted):
        """Read up to a frame of this name; return the names and keys of all."""
        names = []
        while True:
            name, data = self.frame()
            if name != "ping":
                names.append((name, data["key"]) if "key" in data else name)
            if name == wanted:
                return names

    def until_offset(self, offset):
        """Read until everything below an offset is there."""
        while not self.id or int(self.id.partition(".")[2]) < offset:
            self.frame()

    def close(self):
        self.file.close()
        self.socket.close()


@pytest.fixture
def live_server(tmp_path):
    with Server(tmp_path / "data", "--ping-interval-ms", "100") as server:
        yield server


def test_snapshot_then_enter_update_leave(live_server):
    live_server.publish("orders", event(1, "a", status="paid"))
    live_server.publish("orders", event(2, "b", status="new"))
    client = LiveClient(live_server, "status=paid")
    assert client.until("live") == ["snapshot", ("row", "a"), "live"]
    live_server.publish("orders", event(3, "b", status="paid"))
    live_server.publish("orders", event(4, "b", status="paid", total=1))
    live_server.publish("orders", event(5, "a", status="new"))
    assert client.until("leave") == [("enter", "b"), ("update", "b"), ("leave", "a")]
    assert client.frames[-1][1]["reason"] == "changed"
    live_server.publish("orders", {**event(6, "b"), "data": None})
    client.until("leave")
    assert client.frames[-1][1]["reason"] == "deleted"
    # Silence: the ping has the position, also of events that changed nothing here.
    live_server.publish("orders", event(7, "c", status="new"))
    client.until_offset(7)
    assert client.frames[-1][0] == "ping"
    client.close()


def test_resume_gets_only_what_changed(live_server):
    for number, key in enumerate("abc"):
        live_server.publish("orders", event(number, key, status="paid"))
    client = LiveClient(live_server, "status=paid")
    client.until("live")
    client.close()
    live_server.publish("orders", event(4, "a", status="new"))
    live_server.publish("orders", event(5, "d", status="paid"))
    again = LiveClient(live_server, "status=paid", since=client.id)
    assert again.until("live") == [("leave", "a"), ("enter", "d"), "live"]
    again.close()
    other = LiveClient(live_server, f"status=new&$since={client.id}")
    assert other.until("live")[0] == "reset"
    assert other.frames[0][1] == {"reason": "unknown-position"}
    other.close()


def test_records_of_another_process_count(live_server, tmp_path):
    client = LiveClient(live_server, "status=paid")
    client.until("live")
    with virta.open(tmp_path / "data" / "log") as log:
        log.append("orders", "k", event(1, "x", status="paid"))
        log.append(
            "orders", "k", event(1, "x", status="new")
        )  # a repeat, which subscribers do not get
    assert client.until("leave") == [("enter", "k"), ("leave", "k")]
    client.close()


def test_a_position_of_one_process_is_one_of_another(live_server, tmp_path):
    """A view over the log and the server have tables of their own; a client goes on at either, with right kinds."""
    for number, key in enumerate("abc"):
        live_server.publish("orders", event(number, key, status="paid"))
    with virta.open(tmp_path / "data" / "log") as log:
        own = virta.views.open(log, "orders", "status=paid")
        live_server.publish("orders", event(4, "a", status="new"), event(5, "d", status="paid"))
        client = LiveClient(live_server, "status=paid", since=own.position)
        assert client.until("live") == [("leave", "a"), ("enter", "d"), "live"]
        client.close()
        live_server.publish("orders", event(6, "d", status="new"), event(7, "b", status="paid"))
        again = virta.views.open(log, "orders", "status=paid", since=client.id)
        found = [(change.kind, change.key) for change in again.changes()]
        assert found == [("leave", "d"), ("update", "b")]


def test_websocket(live_server):
    live_server.publish("orders", event(1, "a", status="paid", total=3, other=4))
    url = f"ws://127.0.0.1:{live_server.port}/channels/orders/live?status=paid&$fields=/data/total"
    with connect(url) as client:
        frames = [json.loads(client.recv(DEADLINE_S)) for _ in range(3)]
        assert [f["frame"] for f in frames] == ["snapshot", "row", "live"]
        assert frames[0]["id"] == ""
        assert frames[1]["event"]["data"] == {"total": 3}
        live_server.publish("orders", event(2, "a", status="new"))
        frame = json.loads(client.recv(DEADLINE_S))
        assert (frame["frame"], frame["key"]) == ("leave", "a")
        position = frame["id"]
    live_server.publish("orders", event(3, "a", status="paid", total=5))
    with connect(url + "&$since=" + position) as client:
        frame = json.loads(client.recv(DEADLINE_S))
        assert (frame["frame"], frame["event"]["data"]) == ("enter", {"total": 5})


def test_rows(live_server):
    live_server.publish("orders", event(1, "a/b", status="paid", id=7))
    live_server.publish("orders", event(2, "c", status="new", id=8))
    page = live_server.request("GET", "/channels/orders/rows?status=paid").json
    assert [row["key"] for row in page["rows"]] == ["a/b"]
    client = LiveClient(live_server, "status=paid", since=page["position"])
    assert client.until("live") == ["live"]
    client.close()
    assert live_server.request("GET", "/channels/orders/rows/a%2Fb").json["offset"] == 0
    assert live_server.request("GET", "/channels/orders/rows/8?$key=/data/id").json["offset"] == 1
    assert live_server.request("GET", "/channels/orders/rows/c?status=paid").status == 404


def test_aggregates(live_server):
    for number in range(4):
        live_server.publish("orders", event(number, str(number), country="FI", total=number))
    client = LiveClient(live_server, "$select=count,sum(/data/total)&$group=/data/country")
    client.until("live")
    assert client.frames[1][1]["groups"] == [{"group": "FI", "count": 4, "sum": 6}]
    live_server.publish("orders", event(9, "1", country="SE", total=1.5))
    client.until("aggregate")
    groups = {group["group"]: group for group in client.frames[-1][1]["groups"]}
    assert groups == {
        "FI": {"group": "FI", "count": 3, "sum": 5},
        "SE": {"group": "SE", "count": 1, "sum": 1.5},
    }
    live_server.publish("orders", event(10, "1", country="FI", total=1.5))
    client.until("aggregate")
    assert client.frames[-1][1]["gone"] == ["SE"]
    client.close()


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/channels/raw/live", 409, "view-unkeyed"),
        ("/channels/orders/live?$key=/data/nothing", 409, "view-unkeyed"),
        ("/channels/orders/live?$key=nothing", 400, "invalid-pointer"),
        ("/channels/orders/live?$select=sum(/data/status)", 409, "aggregate-not-a-number"),
        ("/channels/orders/live?$select=mean(/data/status)", 400, "invalid-select"),
        ("/channels/orders/live?$group=/data/status", 400, "invalid-select"),
        ("/channels/orders/live?$row=before", 400, "invalid-option"),
        ("/channels/orders/live?$positions=1", 400, "unknown-option"),
        ("/channels/orders/live?$row=auto&%24row=auto", 400, "invalid-option"),
        ("/channels/orders/live?$dialect=koncorde&$filter=%7B", 400, "invalid-option"),
        ("/channels/orders/live?$dialect=sql&$filter=a", 400, "unknown_dialect"),
        ("/channels/orders/rows?$since=x", 400, "invalid-option"),
        ("/channels/meta/live", 400, "no-rows"),
        ("/channels/many/live", 503, "too-many-rows"),
        ("/channels/many/rows", 503, "too-many-rows"),
    ],
)
def test_refusals(refusing, path, status, code):
    answer = refusing.request("GET", path)
    assert (answer.status, answer.json["code"]) == (status, code)
    assert len(answer.json["message"].split()) > 4


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("refusing"), "--view-rows-max", "20") as server:
        server.publish("orders", event(1, "a", status="paid"))
        server.publish("raw", {k: v for k, v in event(1, "").items() if k != "subject"})
        server.publish("many", *[event(n, f"k{n}") for n in range(30)])
        yield server


def test_rows_of_any_channel_and_key(live_server):
    """Line feeds in names, too."""
    log = virta.open(live_server.data_dir / "log")
    log.append("a\nb", "k\n", event(1, "k\n", status="paid"))
    log.close()
    rows = live_server.request("GET", "/channels/a%0Ab/rows").json["rows"]
    assert [row["key"] for row in rows] == ["k\n"]
    row = live_server.request("GET", "/channels/a%0Ab/rows/k%0A").json
    assert row["key"] == "k\n"


def test_a_view_ends_when_its_channel_gets_too_many_rows(tmp_path):
    with Server(tmp_path, "--view-rows-max", "3") as server:
        client = LiveClient(server)
        client.until("live")
        for number in range(5):
            server.publish("orders", event(number, str(number)))
        assert client.until("disconnect")[-1] == "disconnect"
        assert client.frames[-1][1]["reason"] == "too-many-rows"
        client.close()


def test_a_slow_reader_is_conflated(live_server):
    """It reads nothing while 20 keys change thousands of times, and then has the newest of each."""
    client = LiveClient(live_server, "status=paid")
    client.until("live")
    text = "x" * 2000
    for number in range(200):
        batch = [
            event(f"{number}.{k}", f"k{k}", status="paid", n=number, text=text) for k in range(20)
        ]
        live_server.publish("orders", *batch)
    live_server.publish("orders", event("end", "k0", status="new"))
    client.until_offset(4001)
    assert {key: row["n"] for key, row in client.rows.items()} == {
        f"k{k}": 199 for k in range(1, 20)
    }
    assert len(client.frames) < 4000
    client.close()


FILTERS = [
    ("status=paid", parse("status=paid")),
    ("total=>3;status=new", parse("total=>3;status=new")),
    ("$dialect=cesql&$filter=" + quote("type = 'order'"), parse("type = 'order'", "cesql")),
    ("$dialect=koncorde&$filter=" + quote('{"range":{"total":{"gte":2}}}'),
     parse({"range": {"total": {"gte": 2}}}, "koncorde")),
    ("$dialect=cloudevents&$filter=" + quote('[{"prefix":{"subject":"k1"}}]'),
     parse([{"prefix": {"subject": "k1"}}], "cloudevents")),
]  # fmt: skip


class World:
    """The newest event of each key, and the clients that should have those that satisfy their filters."""

    def __init__(self, seed, log):
        self.seed = seed
        self.rand = random.Random(seed)
        self.log = log  # of another process: it compacts and retains while the server runs
        self.newest: dict[str, tuple[int, dict]] = {}
        self.clients: list[LiveClient | None] = [None] * len(FILTERS)
        self.kept: list[tuple[dict, str]] = [({}, "") for _ in FILTERS]
        self.position = 0

    def publish(self, server):
        events, rand = [], self.rand
        for _ in range(rand.randint(1, 20)):
            key = f"k{rand.randrange(12)}"
            status, total = rand.choice(["paid", "new"]), rand.randint(0, 6)
            made = event(self.position, key, status=status, total=total, text="x" * 200)
            made["partitionkey"] = key  # compaction knows the record's key
            if rand.random() < 0.2:
                made["data"] = None
                self.newest.pop(key, None)
            else:
                self.newest[key] = (self.position, made)
            events.append(made)
            self.position += 1
        server.publish("orders", *events)

    def disturb(self):
        """Compact the log, or remove its oldest segments."""
        if self.rand.random() < 0.5:
            self.log.compact()
        elif self.rand.random() < 0.5:
            self.log.retain(max_bytes=12_000)

    def move(self, server):
        """Cut clients after a few frames, and connect those that are cut; the others read nothing meanwhile."""
        for at, (query, _) in enumerate(FILTERS):
            client = self.clients[at]
            if client is None:
                rows, since = self.kept[at]
                client = self.clients[at] = LiveClient(server, query, since=since)
                client.rows = rows
            elif self.rand.random() < 0.3:
                for _ in range(self.rand.randint(0, 3)):
                    client.frame()
                self.cut(at)

    def cut(self, at):
        client = self.clients[at]
        self.kept[at] = (client.rows, client.id)
        client.close()
        self.clients[at] = None

    def check(self):
        """Compare the rows of every client that is connected with the oracle."""
        for client, (_, filter_) in zip(self.clients, FILTERS, strict=True):
            if client is not None:
                client.until_offset(self.position)
                # Rows that retention removed leave within the upkeep's second, after this position.
                end = time.monotonic() + DEADLINE_S
                while client.rows != (wanted := self.wanted(filter_)):
                    assert client.rows.keys() >= wanted.keys(), f"seed {self.seed}"
                    assert time.monotonic() < end, (
                        f"seed {self.seed}: {client.rows.keys() - wanted}"
                    )
                    client.frame()

    def wanted(self, filter_):
        first, seen = self.log.first_offset, "data" if filter_.dialect == "koncorde" else ""
        return {
            key: made["data"]
            for key, (offset, made) in self.newest.items()
            if offset >= first and filter_.matches(made[seen] if seen else made)
        }


@pytest.mark.parametrize("seed", [1, 2])
def test_clients_are_right_through_kills_of_the_server(tmp_path, seed):
    """Random events, cuts, SIGKILLs, compaction and retention: rows = filter over the newest event of each key."""
    data, flags = tmp_path / "data", ("--ping-interval-ms", "100", "--view-save-s", "1")
    with virta.open(data / "log", segment_bytes=8192) as log:
        world = World(seed, log)
        for _ in range(4):
            with Server(data, *flags) as server:
                for step in range(12):
                    world.publish(server)
                    world.move(server)
                    world.disturb()
                    if step % 4 == 3:
                        world.check()
                for at, client in enumerate(world.clients):
                    if client is not None:
                        world.cut(at)
                server.stop(world.rand.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        assert log.first_offset > 0
        assert any(segment.compacted for segment in log.segments())


def test_a_token_sees_its_own_rows_only(tmp_path):
    """The row filter of a token limits rows, live views and what a leave shows; no right is 403."""
    command = [sys.executable, "-m", "virta", "token", "create", "--data-dir", str(tmp_path)]
    made = [*command, "--read", "orders", "--filter", "tenant=1"]
    token = subprocess.run(made, capture_output=True, text=True, check=True).stdout.strip()
    made = [*command, "--publish", "**", "--read", "**"]
    writer = subprocess.run(made, capture_output=True, text=True, check=True).stdout.strip()

    with Server(tmp_path, "--require-token") as server:

        def get(path):
            return server.request("GET", path, headers={"Authorization": f"Bearer {token}"})

        def put(*arguments, **data):
            head = {"Content-Type": STRUCTURED, "Authorization": f"Bearer {writer}"}
            body = json.dumps(event(*arguments, **data))
            assert server.request("POST", "/channels/orders", body, head).status == 202

        put(1, "a", tenant=1)
        put(2, "b", tenant=2)
        assert [row["key"] for row in get("/channels/orders/rows").json["rows"]] == ["a"]
        assert get("/channels/orders/rows/b").status == 404
        assert get("/channels/others/rows").status == 403
        assert get("/channels/others/live").status == 403
        url = f"ws://127.0.0.1:{server.port}/channels/orders/live"
        with connect(url, additional_headers={"Authorization": f"Bearer {token}"}) as client:
            frames = [json.loads(client.recv(DEADLINE_S)) for _ in range(3)]
            assert frames[1]["key"] == "a"
            put(3, "a", tenant=2)
            leave = json.loads(client.recv(DEADLINE_S))
            assert (leave["frame"], leave["reason"]) == ("leave", "changed")
            assert "event" not in leave


def test_a_key_that_is_no_text_is_refused(live_server):
    """A path may have any bytes."""
    live_server.publish("orders", event(1, "a", status="paid"))
    for path in ("/channels/orders/rows/%ff", "/channels/orders/rows/%ED%A0%80"):
        answer = live_server.request("GET", path)
        assert (answer.status, answer.json["code"]) == (400, "invalid-name")
