"""A real `virta serve` in its own process, and a small HTTP client for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
DEADLINE_S = 20.0


class Server:
    """`virta serve` on a free port; use as a context manager."""

    def __init__(self, data_dir, *flags, environ=None):
        self.data_dir = data_dir
        command = [sys.executable, "-m", "virta", "serve", "--server-port", "0"]
        command += ["--journal-port", "0"]
        command += ["--data-dir", str(data_dir), *map(str, flags)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTA_", "THORIUM_"))}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean | (environ or {})
        )
        self.port = 0
        self.said = []
        for line in self.process.stdout:
            self.said.append(line.decode())
            if b'"listening"' in line:
                said = json.loads(line)
                self.port = int(said["url"].rsplit(":", 1)[1])
                self.journal_port = said["journal"]
                break
        if not self.port:
            self.process.wait(DEADLINE_S)

    def __enter__(self):
        assert self.port, "".join(self.said)
        return self

    def __exit__(self, *exc):
        self.stop()

    def stop(self, how=signal.SIGTERM):
        """Stop it and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            rest, _ = self.process.communicate(timeout=DEADLINE_S)
            self.said.append(rest.decode())
        except ValueError:
            self.process.wait(DEADLINE_S)
        return self.process.returncode

    def request(self, method, path, body=None, headers=None):
        """Send one request on a new connection."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, headers or {})
            return Answer.of(connection.getresponse())
        finally:
            connection.close()

    def publish(self, channel, *events):
        """Publish structured events (several as one batch) and check for 202."""
        single = len(events) == 1
        body = json.dumps(events[0] if single else list(events))
        kind = STRUCTURED if single else BATCH
        answer = self.request("POST", f"/channels/{channel}", body, {"Content-Type": kind})
        assert answer.status == 202, answer
        return answer


@dataclass
class Answer:
    """A response, read whole."""

    status: int
    headers: dict
    body: bytes

    @classmethod
    def of(cls, response):
        headers = {name.lower(): value for name, value in response.getheaders()}
        assert len(headers) == len(response.getheaders()), "a header was sent twice"
        return cls(response.status, headers, response.read())

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def code(self):
        return self.json["code"]


def event(id_, data=None, source="//test", **more):
    made = {"specversion": "1.0", "type": "test", "source": source, "id": id_}
    if data is not None:
        made["data"] = data
    return made | more


@dataclass
class Frame:
    """One server-sent event."""

    event: str = ""
    id: str | None = None
    data: str = ""
    comment: str | None = None
    retry: str | None = None
    raw: bytes = b""

    @property
    def json(self):
        return json.loads(self.data)


@dataclass
class Consumer:
    """An open stream of server-sent events."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict = field(default_factory=dict)
    buffer: bytes = b""
    ended: bool = False

    @classmethod
    async def open(cls, port, path, headers=None, *, expect=200, narrow=False):
        """Open a stream; a narrow one stalls soon when it is not read."""
        where = {"sock": narrow_socket(port)} if narrow else {"host": "127.0.0.1", "port": port}
        reader, writer = await asyncio.open_connection(**where, limit=2**24)
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
        self = cls(reader, writer)
        try:
            await self._read_head(expect)
        except BaseException:
            writer.transport.abort()
            raise
        return self

    async def _read_head(self, expect):
        head = (await _soon(self.reader.readuntil(b"\r\n\r\n"))).decode().split("\r\n")
        self.status = int(head[0].split()[1])
        self.headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])
        }
        assert self.status == expect, head

    async def body(self):
        """Return the body of a response that is not a stream."""
        return await _soon(self.reader.readexactly(int(self.headers["content-length"])))

    async def frame(self):
        """Return the next frame, or None at the end of the stream."""
        while b"\n\n" not in self.buffer:
            if not await self._chunk():
                return None
        text, _, self.buffer = self.buffer.partition(b"\n\n")
        made = Frame(raw=text + b"\n\n")
        for line in text.decode().split("\n"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            setattr(made, name or "comment", value)
        return made

    async def frames(self, count):
        return [await self.frame() for _ in range(count)]

    async def rest(self):
        """Return every frame until the end."""
        found = []
        while (made := await self.frame()) is not None:
            found.append(made)
        return found

    async def connected(self):
        made = await self.frame()
        assert made.event == "connect", made
        return made

    async def _chunk(self):
        size = int(await _soon(self.reader.readuntil(b"\r\n")), 16)
        data = await _soon(self.reader.readexactly(size + 2))
        self.buffer += data[:-2]
        self.ended = size == 0
        return not self.ended

    async def close(self):
        await shut(self.writer)


def read(connection, until=None):
    """Read from a socket until the server closes or `until` was received."""
    answer = b""
    while until is None or until not in answer:
        data = connection.recv(65536)
        if not data:
            break
        answer += data
    return answer


def narrow_socket(port):
    """
    A connection whose window does not grow.

    Otherwise the kernel may buffer tens of megabytes for a client that does not read.
    """
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    narrow.connect(("127.0.0.1", port))
    narrow.setblocking(False)
    return narrow


def lasting_port():
    """
    A free port that stays free while no server has it.

    Ports below the kernel's own range are not used for outgoing connections.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, lowest // 2), lowest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


async def shut(writer):
    """Close a connection whatever state it is in."""
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


async def _soon(waiting):
    return await asyncio.wait_for(waiting, DEADLINE_S)


def ids(frames):
    """Ids of the events among frames."""
    return [made.json["id"] for made in frames if made.event == "data"]


def command(server, *arguments, text=None):
    """Run a `virta` command against a server."""
    url = f"http://127.0.0.1:{server.port}"
    whole = [sys.executable, "-m", "virta", *arguments, "--url", url]
    return subprocess.run(
        whole, input=text, capture_output=True, text=True, timeout=30, check=False
    )
