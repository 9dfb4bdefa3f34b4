"""Killed shippers, interrupted restores, and stores that answer wrongly, slowly or not at all."""

from __future__ import annotations

import http.client
import os
import random
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import virta
from virta.errors import TierError
from virta.tier import Shipper, TierStore, restore_log, verify_store

CHILD = Path(__file__).parent / "ship_child.py"
ROUNDS = 12
SEED = int(os.environ.get("VIRTA_TEST_SEED", "17"))


def start_child(log, url, seed):
    child = subprocess.Popen(
        [sys.executable, CHILD, log.path, url, str(seed)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "started\n"
    return child


@pytest.mark.slow
def test_a_shipper_may_be_killed_at_any_time(tmp_path):
    """SIGKILL while shipping, collecting garbage and removing segments: nothing is lost, nothing is doubled."""
    print(f"VIRTA_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    url = f"file://{tmp_path}/store"
    values = []
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        for number in range(ROUNDS):
            child = start_child(log, url, rng.randrange(1 << 30))
            deadline = time.monotonic() + rng.uniform(0, 0.3)
            while time.monotonic() < deadline:
                values.append(rng.randbytes(rng.randrange(1, 300)))
                assert log.append("t", b"", values[-1]) == len(values) - 1
            child.kill()
            child.wait()
            child.stdout.close()
            if number % 3 == 2:
                assert verify_store(url).problems == []
        with Shipper(log, TierStore(url), garbage_age_s=0) as shipper:
            shipper.ship()
            shipper.collect_garbage(now=True)
    restore_log(url, tmp_path / "restored")
    for path in (tmp_path / "log", tmp_path / "restored", url):
        with virta.open(path, read_only=True) as log:
            assert [bytes(record.value) for record in log.read()] == values, path


def test_an_interrupted_restore_is_no_log_and_can_be_continued(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store"
    with virta.open(tmp_path / "log", segment_bytes=4096) as log:
        for _ in range(200):
            log.append("t", b"", os.urandom(100))
        with Shipper(log, TierStore(url)) as shipper:
            shipper.ship()
        expected = [tuple(record) for record in log.read()]

    def interrupt(done, _total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore_log(url, tmp_path / "restored", progress=interrupt)
    assert not (tmp_path / "restored" / "META").exists()
    (tmp_path / "restored" / "00000000000000000999.fetch").write_bytes(b"cut")

    restore_log(url, tmp_path / "restored")

    with virta.open(tmp_path / "restored") as restored:
        assert [tuple(record) for record in restored.read()] == expected
    with pytest.raises(TierError, match="is a log already"):
        restore_log(url, tmp_path / "restored")


class FaultyProxy(BaseHTTPRequestHandler):
    """Forwards to S3, and for a share of the requests answers wrongly, by half, late or not at all."""

    protocol_version = "HTTP/1.1"
    target = ("", 0)
    rng = random.Random(0)
    share = 0.0

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.rng.choice(["503", "409", "412", "cut", "lost", "half", "slow"])
        if self.rng.random() >= self.share:
            fault = None
        if fault == "cut":
            self.close_connection = True
            return
        if fault in {"503", "409", "412"}:
            self.answer(int(fault), {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        upstream = http.client.HTTPConnection(*self.target, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers))
        reply = upstream.getresponse()
        data = reply.read()
        headers = {
            name: value
            for name, value in reply.getheaders()
            if name.lower() not in {"transfer-encoding", "connection", "content-length", "date"}
        }
        upstream.close()
        if fault == "lost":  # done, but the client does not learn of it
            self.close_connection = True
            return
        if fault == "slow":
            threading.Event().wait(0.05)
        length = reply.getheader("Content-Length") or str(len(data))
        if fault == "half":  # the rest of the answer never comes
            self.close_connection = True
            data = data[: len(data) // 2]
        self.answer(reply.status, headers, data, length)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

    def answer(self, status, headers, data, length=None):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_args):
        pass


@pytest.fixture
def faulty_url(s3_url, s3_endpoint, monkeypatch):
    """Return a URL that obstore reaches through the proxy; `FaultyProxy.share` of the requests fail."""
    parts = urlsplit(s3_endpoint)
    FaultyProxy.target = (parts.hostname, parts.port)
    FaultyProxy.rng = random.Random(SEED)
    FaultyProxy.share = 0.0
    server = ThreadingHTTPServer(("127.0.0.1", 0), FaultyProxy)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield s3_url
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_a_faulty_store_delays_but_loses_nothing(tmp_path, faulty_url):
    """503, 409, 412, cut connections, lost, cut and slow answers: shipping goes on until everything is there."""
    print(f"VIRTA_TEST_SEED={SEED}")
    failed = []
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        with Shipper(log, TierStore(faulty_url, retry_s=0.3)) as shipper:
            FaultyProxy.share = 0.35
            for _ in range(15):
                for _ in range(20):
                    log.append("t", b"", os.urandom(100))
                try:
                    shipper.ship()
                except TierError as exc:
                    failed.append(exc.code)
            FaultyProxy.share = 0.0
            assert shipper.ship().next == 300
        expected = [tuple(record) for record in log.read()]
    assert "tier_fenced" not in failed
    assert verify_store(faulty_url).problems == []
    FaultyProxy.share = 0.2
    refused = set()
    for _ in range(3):  # reading through the same faults gives everything, or an error
        try:
            with virta.open(faulty_url) as shipped:
                assert [tuple(record) for record in shipped.read()] == expected
        except TierError as exc:
            refused.add(exc.code)
    assert refused <= {"tier_unreachable"}
    FaultyProxy.share = 0.0
    with virta.open(faulty_url) as shipped:
        assert [tuple(record) for record in shipped.read()] == expected


def test_a_store_that_refuses_every_claim_ends_in_a_sentence(tmp_path, monkeypatch):
    """412 for an object that does not exist, again and again: an error, not an endless loop."""
    monkeypatch.setattr(TierStore, "create", lambda *_: False)
    with (
        virta.open(tmp_path / "log") as log,
        pytest.raises(TierError, match="refused 200 manifests") as caught,
    ):
        Shipper(log, TierStore(f"file://{tmp_path}/store")).start()
    assert caught.value.code == "tier_contended"
