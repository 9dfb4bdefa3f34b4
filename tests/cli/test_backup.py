"""`virta backup` and `virta restore` against a running server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from server_harness import Server, event

import virta
from waiting import wait_until


def run(*arguments, expect=0):
    done = subprocess.run(
        [sys.executable, "-m", "virta", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return done


def post(server, path, body):
    answer = server.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    assert answer.status < 300, answer
    return answer.json


@pytest.fixture
def sink():
    """A sink that consents to every webhook and keeps what it gets."""
    received = []

    class Sink(BaseHTTPRequestHandler):
        def do_OPTIONS(self):
            self.send_response(200)
            self.send_header("WebHook-Allowed-Origin", "*")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(json.loads(body)["id"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    web.received = received
    yield web
    web.shutdown()
    thread.join()
    web.server_close()


def test_a_backup_under_load_restores_everything(tmp_path, sink):
    """The log verifies and has each accepted event up to its end; filters, webhooks, jobs and keys are there."""
    data, allowed = tmp_path / "data", ["--webhook-allow", "127.0.0.1"]
    with Server(data, "--durability", "none", *allowed) as server:
        address = f"http://127.0.0.1:{sink.server_port}/"
        hook = {"sink": address, "config": {"channel": "hooked"}, "types": ["test"]}
        subscribed = post(server, "/subscriptions", hook)
        registered = post(server, "/filters/shop/orders", {"equals": {"status": "paid"}})
        post(server, "/journal/jobs", {"uri": "mail://shop/1", "payload": "hello", "delay": 600})
        server.request("PUT", "/journal/keys/answer", '{"value": 42}', {"Content-Type": "application/json"})  # fmt: skip
        token = run("token", "create", "--data-dir", data, "--all").stdout.strip()
        stop = threading.Event()
        sent = []

        def load():
            while not stop.is_set():
                n = len(sent)
                server.publish("load", *[event(f"{n}-{i}", {"pad": "x" * 500}) for i in range(20)])
                sent.append(n)

        thread = threading.Thread(target=load)
        thread.start()
        deadline = time.monotonic() + 20
        while len(sent) < 20 and time.monotonic() < deadline:
            pass
        done = run("backup", tmp_path / "copy", "--data-dir", data, "--json")
        stop.set()
        thread.join()
    said = json.loads(done.stdout)
    run("restore", tmp_path / "copy", "--data-dir", tmp_path / "again")

    with virta.open(tmp_path / "again" / "log") as log:
        assert log.verify().problems == []
        records = list(log.read("load"))
        assert log.next_offset == said["next_offset"]
        assert len(records) == said["next_offset"]
        assert len(records) >= 400
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o700
    with Server(tmp_path / "again", "--require-token") as strict:
        known = {"Authorization": f"Bearer {token}"}
        assert strict.request("GET", "/stats").status == 401
        assert strict.request("GET", "/stats", headers=known).status == 200
    with Server(tmp_path / "again", *allowed) as again:
        kept = again.request("GET", f"/subscriptions/{subscribed['id']}").json
        assert [kept[key] for key in hook] == [subscribed[key] for key in hook]
        again.publish("hooked", event("delivered"))
        wait_until(lambda: sink.received == ["delivered"])
        assert again.request("GET", f"/filters/{registered['id']}").json["collection"] == "orders"
        assert again.request("GET", "/journal/keys/answer").json["value"] == 42
        job = again.request("GET", "/journal/jobs/show?uri=mail://shop/1").json
        assert (job["state"], job["payload"]) == ("delayed", "hello")
        again.publish("load", event("new"))


@pytest.fixture
def saved(tmp_path):
    with virta.open(tmp_path / "data" / "log") as log:
        log.append("a", "k", b"v")
    run("backup", tmp_path / "copy", "--data-dir", tmp_path / "data")
    return tmp_path / "copy"


def test_a_damaged_backup_is_refused(saved, tmp_path):
    """One changed byte, a missing manifest, a manifest that leads outside: nothing is restored."""
    (segment,) = (saved / "data" / "log").glob("*.puro")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "damaged" in run("restore", saved, "--data-dir", tmp_path / "b", expect=1).stderr
    assert not (tmp_path / "b").exists()
    segment.write_bytes(whole)
    manifest = json.loads((saved / "backup.json").read_text())
    manifest["files"]["../evil"] = {"bytes": 0, "sha256": ""}
    (saved / "backup.json").write_text(json.dumps(manifest))
    assert "outside" in run("restore", saved, "--data-dir", tmp_path / "b", expect=1).stderr
    (saved / "backup.json").unlink()
    assert "not finished" in run("restore", saved, "--data-dir", tmp_path / "b", expect=1).stderr


def test_nothing_is_overwritten(saved, tmp_path):
    """Neither a backup nor a data directory is written over."""
    assert "not empty" in run("backup", saved, "--data-dir", tmp_path / "data", expect=1).stderr
    assert "not empty" in run("restore", saved, "--data-dir", tmp_path / "data", expect=1).stderr
    missing = run("backup", tmp_path / "c", "--data-dir", tmp_path / "none", expect=1).stderr
    assert "no data directory" in missing


@pytest.fixture
def small(tmp_path):
    """A data directory with some events and a token."""
    with virta.open(tmp_path / "data" / "log") as log:
        log.append_many([("orders", b"", b'{"n": %d}' % n) for n in range(50)])
    run("token", "create", "--data-dir", tmp_path / "data", "--all")
    return tmp_path / "data"


def test_a_backup_in_object_storage(small, tmp_path):
    """It comes back the same, leaves nothing behind on the disk, and is never written over."""
    pytest.importorskip("obstore", reason="object storage needs obstore")
    url = f"file://{tmp_path}/store/monday"
    said = json.loads(run("backup", url, "--data-dir", small, "--json").stdout)
    run("restore", url, "--data-dir", tmp_path / "again")
    with virta.open(tmp_path / "again" / "log") as log:
        values = [bytes(record.value) for record in log.read()]
        assert not log.verify().problems

    assert said["backup"] == url
    assert values == [b'{"n": %d}' % n for n in range(50)]
    assert (tmp_path / "again" / "access" / "tokens.json").read_bytes() == (small / "access" / "tokens.json").read_bytes()  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"data", "store", "again"}
    assert "is not empty" in run("backup", url, "--data-dir", small, expect=1).stderr


@pytest.mark.parametrize("harm", ["unfinished", "changed", "missing", "outside"])
def test_a_damaged_backup_in_object_storage(small, tmp_path, harm):
    """It is refused, and no data directory is made."""
    pytest.importorskip("obstore", reason="object storage needs obstore")
    store = tmp_path / "store"
    run("backup", f"file://{store}", "--data-dir", small)
    tokens = store / "data" / "access" / "tokens.json"
    manifest = store / "backup.json"
    if harm == "unfinished":
        manifest.unlink()
    elif harm == "changed":
        tokens.write_bytes(b"{}")
    elif harm == "missing":
        tokens.unlink()
    else:
        described = json.loads(manifest.read_text())
        described["files"]["../../outside"] = described["files"]["access/tokens.json"]
        manifest.write_text(json.dumps(described))
    said = run("restore", f"file://{store}", "--data-dir", tmp_path / "again", expect=1).stderr

    expected = {
        "unfinished": "it is no backup, or was not finished",
        "changed": "this backup is damaged",
        "missing": "has no object data/access/tokens.json",
        "outside": "names files outside of the backup",
    }
    assert expected[harm] in said
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / "outside").exists()
