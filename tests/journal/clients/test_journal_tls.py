"""TLS and tokens on the port of `virta journal serve`, from every client; real sockets and certificates."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import time

import pytest

from virta.access.grants import make_grant
from virta.access.tokens import TokenStore
from virta.errors import JournalError
from virta.journal.clients.aio import AsyncClient
from virta.journal.clients.client import Client
from virta.journal.clients.worker import Worker
from virta.journal.protocol import commands
from virta.journal.protocol.messages import RefusedError

VIRTA = [sys.executable, "-m", "virta", "journal"]
# More than the buffers of a connection hold, both ways.
PAYLOAD = b"x" * 60_000
JOBS = 300


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    place = tmp_path_factory.mktemp("tls")
    files = place / "cert.pem", place / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += [
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=journal",
        "-out",
        files[0],
        "-keyout",
        files[1],
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return files


class Daemon:
    def __init__(self, process, data_dir, ca):
        self.process = process
        self.data_dir = data_dir
        self.ca = ca
        self.port = int(process.stdout.readline().rsplit(":", 1)[1])
        self.tls = ssl.create_default_context(cafile=ca)

    def token(self, pattern):
        """Create a token for jobs and wait until the daemon accepts it."""
        store = TokenStore(self.data_dir)
        text, record = store.create((make_grant(["jobs"], pattern, None),))
        self.until(lambda: self.client(text).close(), "unauthorized")
        return text, record.prefix

    def until(self, done, code):
        """Repeat until there is no refusal with that code; the daemon reads its tokens every second."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return done()
            except JournalError as error:
                if error.code != code or time.monotonic() > deadline:
                    raise

    def client(self, token):
        return Client(port=self.port, token=token, tls=self.tls, timeout=20)

    def run(self, *words, token):
        command = [*VIRTA, *words, "--port", str(self.port), "--ca", str(self.ca)]
        environment = {"VIRTA_TOKEN": token, "PATH": ""}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60, check=False
        )


@pytest.fixture(scope="module")
def daemon(certificate, tmp_path_factory):
    """`virta journal serve` that asks for tokens and has TLS."""
    data_dir = tmp_path_factory.mktemp("data")
    command = [*VIRTA, "serve", "--port", "0", "--data-dir", data_dir, "--require-token"]
    command += ["--tls-cert", certificate[0], "--tls-key", certificate[1], "--durability", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Daemon(process, data_dir, certificate[0])
        finally:
            process.terminate()
            process.wait(30)


def test_blocking_client(daemon):
    """Calls, a pipeline that is larger than all buffers, and waiting work over TLS."""
    token, _ = daemon.token("**")
    with daemon.client(token) as client:
        pushed = client.pipeline(
            commands.push(f"x://big/{number}", domain="big", payload=PAYLOAD)
            for number in range(JOBS)
        )
        reserved = client.next("big", count=JOBS).jobs
        finished = client.pipeline([commands.done(job.key) for job in reserved])

        assert all(isinstance(stamp, int) for stamp in pushed)
        assert {job.payload for job in reserved} == {PAYLOAD}
        assert finished == [True] * len(reserved)
        assert client.wait(0.01) is None
        assert client.set("k", 5)
        assert client.get("k") == 5


def test_asyncio_client_and_worker(daemon):
    """The asyncio client and the worker take the same token and context."""
    token, _ = daemon.token("mail")

    async def scenario():
        client = await AsyncClient.connect(port=daemon.port, token=token, tls=daemon.tls)
        async with client:
            await client.push("x://letter", domain="mail", payload=b"hello")
        stop = asyncio.Event()
        worker = Worker(port=daemon.port, token=token, tls=daemon.tls)
        seen = []

        @worker.handle("mail")
        async def send(job):
            seen.append(job.payload)
            stop.set()

        await asyncio.wait_for(worker.work(stop), 30)
        return seen

    assert asyncio.run(scenario()) == [b"hello"]


def test_commands_and_forwarder(daemon, tmp_path):
    """`virta journal` commands and `forward` reach the port with --ca and VIRTA_TOKEN."""
    token, _ = daemon.token("**")
    spool = tmp_path / "spool"
    push = [*VIRTA, "push", "x://spooled", "--domain", "s", "--spool", spool]
    subprocess.run(push, check=True)
    sent = daemon.run("forward", str(spool), "--once", token=token)
    got = daemon.run("next", "s", token=token)

    assert "forwarded 1, rejected 0" in sent.stdout, sent.stderr
    assert "x://spooled" in got.stdout, got.stderr


def push_until_refused(client):
    """Push for as long as the daemon has not noticed that the token was revoked."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        client.push("x://a", domain="mail")


def test_who_is_refused(daemon):
    """Without trust, TLS, token or right there is an error that says so; a revoked token ends."""
    token, prefix = daemon.token("mail")
    with pytest.raises(JournalError, match="CERTIFICATE_VERIFY_FAILED"):
        Client(port=daemon.port, token=token, tls=ssl.create_default_context())
    with pytest.raises(JournalError) as plain:
        Client(port=daemon.port, token=token, timeout=5)
    assert plain.value.code == "disconnected"
    with daemon.client(None) as client, pytest.raises(RefusedError, match="unauthorized"):
        client.push("x://a", domain="mail")
    with daemon.client(token) as client:
        assert client.push("x://a", domain="mail")
        with pytest.raises(RefusedError, match="forbidden"):
            client.push("x://a", domain="other")
        with pytest.raises(RefusedError, match="forbidden"):
            client.set("k", 1)
        TokenStore(daemon.data_dir).revoke(prefix)
        with pytest.raises(JournalError, match="revoked"):
            push_until_refused(client)
    refused = daemon.run("get", "k", token=token)
    assert refused.returncode == 1
    assert "unauthorized" in refused.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tls-cert", "/nonexistent"], "go together"),
        (["--tls-cert", "/nonexistent", "--tls-key", "/nonexistent"], "cannot use certificate"),
        (["--require-token", "--name", "a", "--peer", "b=127.0.0.1:1"], "private network"),
    ],
)
def test_settings_that_are_refused(options, text, tmp_path):
    """What does not go together ends the daemon with a reason."""
    command = [*VIRTA, "serve", "--port", "0", "--data-dir", tmp_path, *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert text in done.stderr
