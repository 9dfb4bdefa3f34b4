"""
Short connections for the soak: each is opened, gets the expected response, and is closed.

The kinds take turns: streams with and without history, both kinds of WebSocket, short publications with and without
keep-alive, filters that are registered, listened to and removed, and requests that are refused.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from itertools import count, cycle

STRUCTURED = "application/cloudevents+json"
JSON = "application/json"
CHANNEL = "/channels/churn"
KEY = base64.b64encode(b"0123456789abcdef").decode()
# A connection without a response after this long has failed.
ANSWER_S = 30.0
TICK_S = 0.02
# Open connections at a time; more would only show that the server is slower than the rate.
OPEN_MAX = 256
FAILURES_SHOWN = 5


class Churn:
    """Opens and closes connections at a rate, and counts them by kind."""

    def __init__(self, port):
        self.port = port
        self.done = {}
        self.failed = 0
        self.failures = []
        self._numbers = count()
        self._open = set()
        self._kinds = [
            *(self.stream, self.stream_with_filter, self.resumed_stream, self.old_stream),
            *(self.subtub_socket, self.events_socket, self.post, self.kept_posts, self.messages),
            *(self.filter_stream, self.health, self.bad_request, self.bad_event, self.long_line),
        ]

    async def run(self, rate):
        """Open connections at the rate until cancelled; then wait for the open ones."""
        began, started = time.perf_counter(), 0
        kinds = cycle(self._kinds)
        try:
            while rate:
                due = int((time.perf_counter() - began) * rate) - started
                for _ in range(min(due, OPEN_MAX - len(self._open))):
                    task = asyncio.ensure_future(self._one(next(kinds)))
                    self._open.add(task)
                    task.add_done_callback(self._open.discard)
                started += due  # those over the limit are skipped, not made up for later
                await asyncio.sleep(TICK_S)
        finally:
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _one(self, kind):
        try:
            async with asyncio.timeout(ANSWER_S):
                await kind()
        except Exception as error:  # noqa: BLE001 - counted and shown
            self.failed += 1
            if len(self.failures) < FAILURES_SHOWN:
                self.failures.append(f"{kind.__name__}: {error!r}")
        self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1

    # One connection.

    def _head(self, line, *lines):
        return "\r\n".join([line, f"Host: 127.0.0.1:{self.port}", *lines, "", ""]).encode()

    def _post(self, path, body, kind, *lines):
        size = f"Content-Length: {len(body)}"
        return self._head(f"POST {path} HTTP/1.1", f"Content-Type: {kind}", size, *lines) + body

    async def _talk(self, *steps):
        """Open a connection; for each step send bytes and read up to a mark (None: to the end)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        said = b""
        try:
            for sent, mark in steps:
                writer.write(sent)
                said = await (reader.read() if mark is None else reader.readuntil(mark))
        finally:
            writer.close()
        return said

    def _event(self):
        number = next(self._numbers)
        return json.dumps(
            {
                "specversion": "1.0",
                "type": "churn",
                "source": "//churn",
                "id": str(number),
                "data": {},
            }
        ).encode()

    # The kinds.

    async def stream(self):
        await self._talk((self._head(f"GET {CHANNEL} HTTP/1.1"), b"event: connect"))

    async def stream_with_filter(self):
        path = f"{CHANNEL}?n={next(self._numbers)}"
        await self._talk((self._head(f"GET {path} HTTP/1.1"), b"event: connect"))

    async def resumed_stream(self):
        """Resume with the id of an event that was just published."""
        event = self._event()
        id_ = json.loads(event)["id"]
        await self._talk((self._post(CHANNEL, event, STRUCTURED), b"accepted"))
        line = f"Last-Event-ID: %2F%2Fchurn+{id_}"
        await self._talk((self._head(f"GET {CHANNEL} HTTP/1.1", line), b"event: connect"))

    async def old_stream(self):
        """Open a stream with HTTP/1.0, where the body ends with the connection."""
        await self._talk((self._head(f"GET {CHANNEL} HTTP/1.0"), b"event: connect"))

    async def _socket(self, path, *lines):
        upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
        head = self._head(f"GET {path} HTTP/1.1", *upgrade, f"Sec-WebSocket-Key: {KEY}", *lines)
        close = b"\x88\x82\0\0\0\0" + struct.pack(">H", 1000)
        await self._talk((head, b"\r\n\r\n"), (close, b"\x88\x02\x03\xe8"))

    async def subtub_socket(self):
        await self._socket("/subscribe?streams=churn:a&max_queued=10")

    async def events_socket(self):
        path = f"/channels/quiet?n={next(self._numbers)}"
        await self._socket(path, "Sec-WebSocket-Protocol: cloudevents.json")

    async def post(self):
        sent = self._post(CHANNEL, self._event(), STRUCTURED, "Connection: close")
        _expect(await self._talk((sent, None)), 202)

    async def kept_posts(self):
        """Publish twice on one connection, then close it."""
        first, second = (self._post(CHANNEL, self._event(), STRUCTURED) for _ in range(2))
        await self._talk((first, b"accepted"), (second, b"accepted"))

    async def messages(self):
        body = b'[{"publish_to":"churn:b","payload":"x"}]'
        _expect(
            await self._talk((self._post("/publish", body, JSON, "Connection: close"), None)), 200
        )

    async def filter_stream(self):
        """Register a filter, open its stream, and remove the filter, which ends the stream."""
        body = json.dumps({"filter": {"equals": {"churn": next(self._numbers)}}}).encode()
        made = await self._talk(
            (self._post("/filters/churn/c", body, JSON, "Connection: close"), None)
        )
        id_ = json.loads(made.partition(b"\r\n\r\n")[2])["id"]
        stream = asyncio.ensure_future(
            self._talk(
                (self._head(f"GET /filters/{id_}/events HTTP/1.1"), b"event: connect"),
                (b"", b"filter-removed"),
            )
        )
        await asyncio.sleep(TICK_S)
        remove = self._head(f"DELETE /filters/{id_} HTTP/1.1", "Connection: close")
        _expect(await self._talk((remove, None)), 204)
        try:
            await stream
        except asyncio.IncompleteReadError as error:
            if b" 404 " not in error.partial:  # it came after the filter was removed
                raise

    async def health(self):
        _expect(
            await self._talk((self._head("GET /readyz HTTP/1.1", "Connection: close"), None)), 200
        )

    async def bad_request(self):
        _expect(await self._talk((b"NOT HTTP\r\n\r\n", None)), 400)

    async def bad_event(self):
        sent = self._post(CHANNEL, b"{", STRUCTURED, "Connection: close")
        _expect(await self._talk((sent, None)), 400)

    async def long_line(self):
        _expect(await self._talk((self._head(f"GET /{'x' * 5000} HTTP/1.1"), None)), 414)


def _expect(answer, status):
    if not answer.startswith(b"HTTP/1.1 %d " % status):
        raise RuntimeError(f"{status} expected, got {answer[:80]!r}")
