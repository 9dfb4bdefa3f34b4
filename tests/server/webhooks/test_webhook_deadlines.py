"""Sinks that answer a byte at a time, or hang: deadlines end them, and no other webhook waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_harness import DEADLINE_S, Consumer, event
from test_webhooks import ALLOW, hooks, subscribe

from waiting import wait_until

__all__ = ["hooks"]  # a fixture

CONSENT = b"HTTP/1.1 200 OK\r\nWebHook-Allowed-Origin: *\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: 4\r\n\r\nbody"
# From where on an answer comes a byte at a time.
PARTS = {
    "status": 0,
    "headers": WHOLE.index(b"A:"),
    "body": WHOLE.index(b"body"),
    "informational": 0,  # and never anything else
    "nothing": 0,
}
# A TLS record of 16 KiB begins, with a handshake message of 8 KiB in it.
TLS = b"\x16\x03\x03\x40\x00\x02\x00\x20\x00"


class Drip:
    """A sink that consents at once and then sends its answers slowly, for ever."""

    def __init__(self, part, *, consents=True):
        self.part = part
        self.consents = consents
        self.asked = threading.Semaphore(0)
        self.over = threading.Event()
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/"
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listening.accept()
                thread = threading.Thread(target=self._answer, args=(connection,))
                self.threads.append(thread)
                thread.start()

    def _answer(self, connection):
        with connection, contextlib.suppress(OSError):
            head = connection.recv(65536)
            if not head:
                return
            if self.consents and head.startswith(b"OPTIONS"):
                connection.sendall(CONSENT)
                return
            self.asked.release()
            if self.part == "tls":
                connection.sendall(TLS)
                while not self.over.wait(0.02):
                    connection.sendall(b"\x03")
            else:
                self._drip(connection)

    def _drip(self, connection):
        at = PARTS[self.part]
        connection.sendall(WHOLE[:at])
        while not self.over.wait(0.02):
            if self.part == "nothing":
                continue
            if self.part == "informational":
                connection.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")
            elif self.part == "status":
                connection.sendall(WHOLE[at : at + 1] or b"\r")
                at = min(at + 1, len(b"HTTP/1.1 20"))
            elif self.part == "headers":
                connection.sendall(b"X")
            else:
                connection.sendall(b"b" if at < len(WHOLE) - 1 else b"")
                at += 1

    def close(self):
        self.over.set()
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def drips():
    made = []

    def make(*arguments, **named):
        made.append(Drip(*arguments, **named))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def dead_letters(port, count):
    consumer = await Consumer.open(port, "/channels/%24virta%2Fdead-letters/from/earliest")
    await consumer.connected()
    found = [made.json["data"] for made in await consumer.frames(count)]
    await consumer.close()
    return found


def test_an_answer_has_one_deadline(start, hooks, drips):
    """However a sink drips, an attempt ends with the timeout, and the event is a dead letter."""
    good = hooks()
    with start(*ALLOW, "--webhook-timeout-ms", 1500, "--webhook-attempts", 1) as server:
        for part in PARTS:
            assert subscribe(server, drips(part), "d").status == 201
        assert subscribe(server, good, "d").status == 201
        server.publish("d", event("1"))
        assert good.ids(1) == ["1"]
        found = asyncio.run(dead_letters(server.port, len(PARTS)))

    assert {letter["reason"] for letter in found} == {"no complete response within 1.5 s"}


def test_connecting_and_tls_are_part_of_it(start, drips, hooks):
    """A peer that takes no connection, or talks no TLS, is as late as one that does not answer."""
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    fillers = []
    for _ in range(8):  # until the kernel takes no more
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
        fillers.append(filler)
    server = start(*ALLOW, "--webhook-timeout-ms", 400)
    for sink in (
        f"http://127.0.0.1:{full.getsockname()[1]}/",
        drips("tls", consents=False).url.replace("http:", "https:"),
        drips("nothing", consents=False).url.replace("http:", "https:"),
        drips("headers", consents=False).url,
    ):
        body = json.dumps({"sink": sink, "config": {"channel": "c"}})
        answer = server.request("POST", "/subscriptions", body)
        assert (answer.status, answer.code) == (400, "sink-refused")
    assert subscribe(server, hooks(), "c").status == 201
    server.stop()
    for one in (full, *fillers):
        one.close()

    late = [line for said in server.said for line in said.splitlines() if "webhook_refused" in line]
    assert [json.loads(line)["reason"] for line in late] == [
        "no complete response within 0.4 s"
    ] * 4


def test_slow_sinks_delay_no_others(start, hooks, drips):
    """Forty sinks that hang leave deliveries, new subscriptions and the end of the server as they are."""
    good, later = hooks(), hooks()
    flags = ["--webhook-timeout-ms", 600_000, "--drain-timeout-ms", 500]
    with start(*ALLOW, *flags) as server:
        slow = [drips(part) for part in PARTS]
        for number in range(40):
            assert subscribe(server, slow[number % len(slow)], "s").status == 201
        subscribe(server, good, "s")
        server.publish("s", event("1"))
        for drip in slow:
            for _ in range(40 // len(slow)):
                assert drip.asked.acquire(timeout=DEADLINE_S)
        server.publish("s", *[event(str(n)) for n in range(2, 200)])
        assert good.ids(199) == [str(n) for n in range(1, 200)]
        assert subscribe(server, later, "s").status == 201
        server.publish("s", event("last"))
        assert later.ids(1) == ["last"]
        assert good.ids(1) == ["last"]

        assert server.stop() == 0  # fails when it takes longer than the deadline of the tests


def test_slow_handshakes_delay_no_others(start, hooks, drips):
    """Only so many sinks of one host are asked at a time; others are asked at once, and so is the drain."""
    drip, good = drips("headers", consents=False), hooks()
    flags = ["--webhook-timeout-ms", 600_000, "--drain-timeout-ms", 500]
    with (
        start(*ALLOW, "--webhook-allow", "localhost", *flags) as server,
        ThreadPoolExecutor() as pool,
    ):

        def ask():
            with contextlib.suppress(ConnectionError, TimeoutError):
                return subscribe(server, drip, "h")

        asking = [pool.submit(ask) for _ in range(4)]
        for _ in asking:
            assert drip.asked.acquire(timeout=DEADLINE_S)
        more = subscribe(server, drip, "h")
        good.url = good.url.replace("127.0.0.1", "localhost")
        assert subscribe(server, good, "h").status == 201
        server.publish("h", event("1"))
        assert good.ids(1) == ["1"]
        assert server.stop() == 0
        drip.close()

    assert (more.status, more.code) == (429, "too-many-handshakes")
    assert more.headers["retry-after"] == "1"


def test_a_deleted_subscription_waits_for_no_sink(start, drips):
    """Deleting and replacing do not depend on the sink, beyond its deadline."""
    drip = drips("body")
    with start(*ALLOW, "--webhook-timeout-ms", 600_000, "--drain-timeout-ms", 100) as server:
        path = f"/subscriptions/{subscribe(server, drip, 'x').json['id']}"
        server.publish("x", event("1"))
        assert drip.asked.acquire(timeout=DEADLINE_S)
        assert server.request("DELETE", path).status == 204
        assert server.stop() == 0


def test_a_long_answer_is_cut(start, hooks):
    """A sink cannot make the server read for ever; what counts is its status."""
    heard = []

    def flood(listening):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    head = connection.recv(65536)
                    if head.startswith(b"OPTIONS"):
                        connection.sendall(CONSENT)
                        continue
                    heard.append(head)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
                    while True:
                        connection.sendall(b"x" * 65536)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=flood, args=(listening,), daemon=True)
        thread.start()
        with start(*ALLOW) as server:
            body = {"sink": f"http://127.0.0.1:{listening.getsockname()[1]}/"}
            body["config"] = {"channel": "f"}
            id_ = server.request("POST", "/subscriptions", json.dumps(body)).json["id"]
            server.publish("f", event("1"), event("2"))

            def status():
                return server.request("GET", f"/subscriptions/{id_}").json["status"]

            wait_until(lambda: status()["delivered"] == 2)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()

    assert len(heard) == 2


@pytest.mark.slow
def test_kills_amid_slow_sinks_lose_nothing(start, hooks, drips):
    """Over SIGKILLs good sinks get every acknowledged event, in order, at least once."""
    chance = random.Random(11)
    good = [hooks() for _ in range(3)]
    flags = [
        *ALLOW,
        "--webhook-timeout-ms",
        200,
        "--webhook-attempts",
        100,
        "--webhook-backoff-ms",
        5,
    ]
    flags += ["--drain-timeout-ms", 500]
    server = start(*flags)
    for part in PARTS:
        subscribe(server, drips(part), "k")
    for hook in good:
        subscribe(server, hook, "k")
    acknowledged = 0
    for _ in range(4):
        killed_at = acknowledged + chance.randrange(20, 150)
        with contextlib.suppress(ConnectionError):
            while True:
                if acknowledged == killed_at:
                    # Between an event and its deliveries, while publishing continues.
                    threading.Timer(chance.random() / 50, server.process.kill).start()
                server.publish("k", event(str(acknowledged)))
                acknowledged += 1
        server.stop(signal.SIGKILL)
        server = start(*flags)
    server.publish("k", event(str(acknowledged)))

    for hook in good:
        expected = 0
        while expected <= acknowledged:
            id_ = int(hook.received.get(timeout=DEADLINE_S)[0]["id"])
            assert id_ <= expected, f"{expected} was skipped"
            expected = max(expected, id_ + 1)
    assert server.stop() == 0
