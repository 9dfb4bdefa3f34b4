"""Starting, stopping, access, and slow consumers."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import signal
import ssl
import subprocess
import sys
import time
import uuid
from http.client import HTTPConnection

import pytest
from server_harness import DEADLINE_S, Consumer, event, ids, shut

import virta
from virta.errors import ClientError
from waiting import until

JSON = {"Content-Type": "application/json"}

TOKEN = "correct-horse-battery"


def test_health(server):
    """Both health routes answer 200 when all is well."""
    assert server.request("GET", "/livez").body == b"ok\n"
    assert server.request("GET", "/readyz").status == 200


STOPPED_AT_ONCE = """
import os, signal, sys, structlog
from virta.server import config_loader as config
from virta.server import run
make = structlog.make_filtering_bound_logger(20)
class Logger(make):
    def info(self, said, **more):
        if said == "listening":
            os.kill(os.getpid(), signal.Signals[sys.argv[2]])
        print(said, flush=True)
real = structlog.configure
structlog.configure = lambda **named: real(**named | {"wrapper_class": Logger})
run.run(config.load({"data_dir": sys.argv[1], "server_port": 0, "journal_port": 0}))
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
def test_a_signal_right_after_the_start(tmp_path, how):
    """A server can be stopped as soon as it has logged `listening`: it drains and exits with 0."""
    command = [sys.executable, "-c", STOPPED_AT_ONCE, tmp_path / "data", how]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["listening", "stopped"]), done.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--token-file", "/nonexistent"], "cannot read token file"),
        (["--tls-cert", "x"], "go together"),
        (["--tls-cert", "/nonexistent", "--tls-key", "/nonexistent"], "cannot use certificate"),
        (["--data-dir", "/proc/nope"], "cannot use data directory"),
    ],
)
def test_start_is_refused_with_a_sentence(start, flags, sentence):
    """A server that would not be safe or could not work does not start."""
    refused = start(*flags)

    assert refused.port == 0
    assert sentence in "".join(refused.said)
    assert refused.process.returncode == 1


def test_one_server_per_directory(start):
    """A second server on one directory is refused; so is a port in use."""
    first = start()

    second = start()
    assert "another server uses data directory" in "".join(second.said)
    third = start("--server-port", first.port, data_dir=first.data_dir / "other")
    assert "cannot listen on 127.0.0.1" in "".join(third.said)


def test_tokens(start, tmp_path):
    """With a token file only health routes need no token; hashed lines work too."""
    file = tmp_path / "tokens"
    hashed = hashlib.sha256(b"another-good-token").hexdigest()
    file.write_text(f"# ours\n{TOKEN}  # first\nsha256:{hashed}\n")
    file.chmod(0o600)
    with start("--token-file", file, "--token-in-url") as server:
        assert server.request("GET", "/livez").status == 200
        for path in ("/channels/a", "/metrics", "/subscribe?streams=a:&max_queued=1"):
            refused = server.request("GET", path)
            assert (refused.status, refused.code) == (401, "unauthorized")
            assert refused.headers["www-authenticate"].startswith("Bearer")
        wrong = server.request("GET", "/metrics", headers={"Authorization": "Bearer nope"})
        assert "not known" in wrong.json["message"]
        basic = server.request("GET", "/metrics", headers={"Authorization": "Basic eDp5"})
        assert "Bearer" in basic.json["message"]
        for token in (TOKEN, "another-good-token"):
            assert (
                server.request(
                    "GET", "/metrics", headers={"Authorization": f"Bearer {token}"}
                ).status
                == 200
            )
        assert asyncio.run(_by_parameter(server.port)) == ["2"]


async def _by_parameter(port):
    consumer = await Consumer.open(port, f"/channels/a?access_token={TOKEN}&x=1")
    await consumer.connected()
    body = json.dumps([event("1", {"x": 0}), event("2", {"x": 1})])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /channels/a HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: application/cloudevents-batch+json\r\n\r\n{body}".encode()
    )
    assert b" 202 " in await reader.readline()
    found = ids([await consumer.frame()])
    await shut(writer)
    await consumer.close()
    return found


def test_short_tokens_are_refused(start, tmp_path):
    """Tokens that can be guessed are refused."""
    file = tmp_path / "tokens"
    file.write_text("secret\n")
    file.chmod(0o600)

    assert "at least 16" in "".join(start("--token-file", file).said)


async def untrusting(url):
    return await anext(virta.AsyncClient(url).subscribe("x"))


def test_tls(start, tmp_path):
    """With a certificate the same routes are served over HTTPS."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    ]
    command += ["-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)

    async def scenario(port):
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"GET /channels/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"event: connect")
        await shut(writer)
        return head

    with start("--tls-cert", certificate, "--tls-key", key) as server:
        assert b" 200 OK" in asyncio.run(scenario(server.port))
        # Who does not trust the certificate will not trust it the next time.
        with pytest.raises(ClientError, match="CERTIFICATE_VERIFY_FAILED"):
            next(virta.Client(f"https://127.0.0.1:{server.port}").subscribe("x"))
        with pytest.raises(ClientError, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(untrusting(f"https://127.0.0.1:{server.port}"))


def test_log_lines_that_cannot_be_written(start):
    """A server whose standard output is closed still disconnects slow consumers, serves and drains."""
    pad = "x" * 60_000

    async def scenario(server):
        stalled = await Consumer.open(server.port, "/channels/s", narrow=True)
        await stalled.connected()
        stalled.writer.transport.pause_reading()
        while b"virta_slow_disconnects_total 1.0" not in server.request("GET", "/metrics").body:
            server.publish("s", *[event(str(uuid.uuid4()), pad) for _ in range(20)])
        last = await Consumer.open(server.port, "/channels/s")
        await last.connected()
        server.process.send_signal(signal.SIGTERM)
        goodbye = await last.frame()
        await stalled.close()
        await last.close()
        return goodbye

    server = start("--slow-consumer-bytes-max", 65536, "--durability", "none")
    server.process.stdout.close()
    goodbye = asyncio.run(scenario(server))

    assert goodbye.event == "disconnect"
    assert server.process.wait(20) == 0


def test_a_reader_of_log_lines_that_stands_still(start):
    """`virta serve | less`: the server goes on when nobody reads its log lines, and reports what it dropped."""
    server = start()
    fcntl.fcntl(server.process.stdout, fcntl.F_SETPIPE_SZ, 16384)
    for number in range(200):
        made = server.request("POST", "/filters/i/c", json.dumps({"equals": {"n": number}}), JSON)
        assert made.status in (200, 201), made
    server.stop()

    said = "".join(server.said)
    assert '"log_lines_dropped"' in said or said.count('"access_used"') < 200
    assert server.process.returncode == 0


def test_a_stalled_consumer_does_not_affect_others(start):
    """One that stops reading is disconnected at its limit; the other receives everything."""
    total, pad = 400, "x" * 50_000

    async def scenario(server):
        stalled = await Consumer.open(server.port, "/channels/s", narrow=True)
        await stalled.connected()
        stalled.writer.transport.pause_reading()
        reading = await Consumer.open(server.port, "/channels/s")
        await reading.connected()
        collecting = asyncio.ensure_future(reading.frames(total))
        for n in range(total):
            await asyncio.to_thread(server.publish, "s", event(str(n), pad))
        found = ids(await collecting)
        await reading.close()
        await stalled.close()
        return found

    with start("--durability", "none", "--slow-consumer-bytes-max", 1_000_000) as server:
        assert asyncio.run(scenario(server)) == [str(n) for n in range(total)]
        metrics = server.request("GET", "/metrics").body.decode()
        assert "virta_slow_disconnects_total 1.0" in metrics


def test_a_consumer_may_choose_to_lose_the_oldest(start):
    """With drop-oldest it stays connected, receives the newest, and the number it lost."""
    total, pad = 400, "x" * 50_000

    async def scenario(server):
        chosen = {"Virta-Slow-Consumer": "drop-oldest"}
        stalled = await Consumer.open(server.port, "/channels/s", chosen, narrow=True)
        await stalled.connected()
        stalled.writer.transport.pause_reading()
        for n in range(total):
            await asyncio.to_thread(server.publish, "s", event(str(n), pad))
        stalled.writer.transport.resume_reading()
        found = []
        while not ids(found[-1:]) or ids(found[-1:]) != [str(total - 1)]:
            found.append(await stalled.frame())
        await stalled.close()
        return found

    with start("--durability", "none", "--slow-consumer-bytes-max", 1_000_000) as server:
        found = asyncio.run(scenario(server))
        wrong = server.request("GET", "/channels/s", headers={"Virta-Slow-Consumer": "wait"})

    lost = [made.json for made in found if made.event == "overflow"]
    assert len(ids(found)) + sum(frame["dropped"] for frame in lost) == total
    assert lost[-1]["total"] == total - len(ids(found)) > 0
    assert wrong.code == "invalid-slow-consumer"


def test_a_consumer_that_reads_nothing_for_too_long_is_disconnected(start):
    """Time is a limit too."""

    async def scenario(server):
        stalled = await Consumer.open(server.port, "/channels/s", narrow=True)
        await stalled.connected()
        stalled.writer.transport.pause_reading()
        for n in range(10):
            await asyncio.to_thread(server.publish, "s", event(str(n), "x" * 900_000))
        wanted = "virta_slow_disconnects_total 1.0"
        await until(lambda: wanted in server.request("GET", "/metrics").body.decode())
        await stalled.close()

    flags = ["--slow-consumer-ms-max", 200, "--slow-consumer-bytes-max", 100_000_000]
    with start("--durability", "none", *flags) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 20))


def test_idle_connections_are_closed(start):
    """A keep-alive connection without requests is closed after the idle time."""

    async def scenario(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        rest = await asyncio.wait_for(reader.read(), 10)
        await shut(writer)
        return rest

    with start("--tcp-idle-timeout-ms", 300) as server:
        assert asyncio.run(scenario(server.port)).endswith(b"ok\n")


def test_the_journal_is_served_too(start):
    """Its TCP port and its HTTP routes serve the same keys; `none` leaves it out."""
    from virta.journal import Client

    with start() as server:
        with Client("127.0.0.1", server.journal_port) as journal:
            journal.set("greeting", "hello")
        answer = server.request("GET", "/journal/keys/greeting")
        assert (answer.status, answer.json["value"]) == (200, "hello")
        assert server.request("GET", "/journal/keys/none").status == 404
        taken = start("--journal-port", server.journal_port, data_dir=server.data_dir / "x")
        assert "for the journal" in "".join(taken.said)
    with start("--journal-port", "none") as server:
        assert server.request("GET", "/journal/keys/greeting").code == "not-found"


def test_waiting_for_a_job(start):
    """A client that disconnects while it waits gets no job; one that stays is answered when the server drains."""

    def until_read(server):
        for _ in range(3):
            server.request("GET", "/journal/stats")  # it is answered after the one before was read

    def ask(server):
        connection = HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        wait = 2 * DEADLINE_S  # no answer that comes in time is due to its end
        connection.request("POST", "/journal/jobs/next", json.dumps({"domain": "h", "wait": wait}))
        until_read(server)
        return connection

    with start() as server:
        ask(server).close()
        until_read(server)
        server.request("POST", "/journal/jobs", b'{"uri": "http://h/1"}')
        shown = server.request("GET", "/journal/jobs/show?uri=http://h/1")
        assert shown.json["state"] == "ready"
        server.request("DELETE", "/journal/keys/http:%2F%2Fh%2F1")
        refused = server.request("PATCH", "/journal/stats")
        assert (refused.status, refused.headers["allow"]) == (405, "GET")
        assert server.request("HEAD", "/journal/stats").status == 200
        assert server.request("PUT", "/journal/keys/a%0Ab", b'{"value": 1}').status == 200

        connection = ask(server)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["jobs"]) == (200, [])
        connection.close()
        assert server.stop() == 0
        assert time.monotonic() - began < 5
