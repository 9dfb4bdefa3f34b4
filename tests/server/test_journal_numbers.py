"""Absurd numbers in every field of the journal, over its socket and over HTTP: refused with a message, and the journal keeps working."""

from __future__ import annotations

import json
import os
import random
import socket
import struct

import msgspec
import pytest

from virta.journal import Client
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import ReplyParser, encode_request
from virta.journal.protocol.messages import Function, Request, Value

TIMES = [0, 1, 300_000_000, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
COUNTS = [0, 1, 255, 256, 65_535]
JOB_KEY = b"d:000:18446744073709551615:ffffffffffffffff"
KEYS = [b"k", b"n", b"x://a/", b"http://h/", JOB_KEY, b"virta:domain:d", b"virta:cron:c", b""]
FLAGS = [m.TOUCH, m.OVERWRITE, m.WORKED_ON, m.PERSIST, m.DATA, m.LISTEN, m.DETAILS]
JSON_NUMBERS = [
    *(
        "0",
        "-1",
        "-0.0",
        "1.5",
        "1e308",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "true",
        "null",
        '"5"',
    ),
    *("9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616"),
    *("9" * 400, "-" + "9" * 400, "9" * 5000, "1e-400", "[" * 1_000 + "]" * 1_000, "[" * 100_000),
    *('{"a":' * 1_000 + "1" + "}" * 1_000, "-9223372036854775809", "253402300800", "1e15"),
]
ADMIN = [
    '{"do": "stats", "limit": N}',
    '{"do": "list", "limit": N, "offset": N}',
    '{"do": "list", "limit": 1, "offset": N}',
    '{"do": "kick", "domain": "d", "limit": N}',
    '{"do": "requeue", "domain": "d", "limit": N}',
    '{"do": "drop", "domain": "d", "limit": N}',
    '{"do": "fail", "key": "KEY", "delay": N}',
    '{"do": "fail", "key": "KEY", "reason": N}',
    '{"do": "export", "offset": N}',
    '{"do": "configure", "domain": "d", "settings": {"deadline": N}}',
    '{"do": "configure", "domain": "d", "settings": {"max_attempts": N}}',
    '{"do": "configure", "domain": "d", "settings": {"retry_delay": N}}',
    '{"do": "configure", "domain": "d", "settings": {"retry_delay_max": N}}',
    '{"do": "configure", "domain": "d", "settings": N}',
    '{"do": N}',
    "N",
]
HTTP = [
    ("PUT", "/journal/keys/k", '{"value": N}'),
    ("PUT", "/journal/keys/e", '{"value": 1, "expires": N}'),
    ("PUT", "/journal/keys/e", '{"value": 1, "ttl": N}'),
    ("PUT", "/journal/keys/e", '{"value": {"base64": N}}'),
    ("POST", "/journal/keys/n/add", '{"amount": N}'),
    ("POST", "/journal/keys/text/truncate", '{"size": N}'),
    ("POST", "/journal/keys/k/rename", '{"to": N}'),
    ("POST", "/journal/jobs", '{"uri": "x://h/a", "priority": N}'),
    ("POST", "/journal/jobs", '{"uri": "x://h/b", "start": N}'),
    ("POST", "/journal/jobs", '{"uri": "x://h/c", "delay": N}'),
    ("POST", "/journal/jobs", '{"uri": "x://h/d", "payload": N}'),
    ("POST", "/journal/jobs", '{"uri": N}'),
    ("POST", "/journal/jobs/next", '{"count": N}'),
    ("POST", "/journal/jobs/next", '{"work_for": N}'),
    ("POST", "/journal/jobs/next", '{"domain": N}'),
    ("POST", "/journal/jobs/extend", '{"key": "KEY", "seconds": N}'),
    ("POST", "/journal/jobs/fail", '{"key": "KEY", "delay": N}'),
    ("POST", "/journal/jobs/fail", '{"key": "KEY", "reason": N}'),
    ("POST", "/journal/jobs/kick", '{"domain": "d", "limit": N}'),
    ("POST", "/journal/jobs/drop", '{"domain": "d", "limit": N}'),
    ("PUT", "/journal/jobs/domains/d", '{"deadline": N}'),
    ("PATCH", "/journal/jobs/domains/d", '{"max_attempts": N}'),
    ("PATCH", "/journal/jobs/domains/d", '{"retry_delay": N}'),
    ("PATCH", "/journal/jobs/domains/d", "N"),
    ("PUT", "/journal/jobs/recurring/c", '{"schedule": "@every Ns", "uri": "x://h/c"}'),
    ("PUT", "/journal/jobs/recurring/c", '{"schedule": "@daily", "uri": "x://h/c", "priority": N}'),
    ("GET", "/journal/keys?count=N", None),
    ("GET", "/journal/jobs?limit=N", None),
    ("GET", "/journal/jobs?offset=N", None),
]
TOKENS = {
    "does-not-exist",
    "already-exists",
    "not-owner",
    "key-missing",
    "value-missing",
    "type-mismatch",
    "overflow",
    "bad-flags",
    "bad-query",
    "bad-regex",
    "bad-cursor",
    "bad-uri",
    "bad-priority",
    "bad-settings",
    "clock-skew",
    "unknown-function",
    "too-large",
    "worked-on",
    "locked",
    "not-yet",
    "bad-request",
    "method-not-allowed",
}


class Line:
    """A connection to the daemon that asks for many things at a time."""

    def __init__(self, port):
        self._socket = socket.create_connection(("127.0.0.1", port), 20)
        self._parser = ReplyParser()
        self._identifier = 0

    def ask(self, requests):
        wanted = {}
        for request in requests:
            self._identifier = self._identifier % 0xFFFF + 1
            request.identifier = self._identifier
            wanted[request.identifier] = request
        self._socket.sendall(b"".join(map(encode_request, requests)))
        while wanted:
            data = self._socket.recv(1 << 20)
            assert data, (
                f"the connection ended with {len(wanted)} unanswered: {list(wanted.values())[:3]}"
            )
            for reply in self._parser.feed(data):
                request = wanted.pop(reply.identifier, None)
                if request is not None:
                    yield request, reply

    def close(self):
        self._socket.close()


def some_value(rng):
    kind = rng.randrange(1, 6)
    data = rng.choice(
        [b"", b"\0", b"\x7f" * 3, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + b"\0" * 7]
    )
    if kind == m.Type.FLOAT:
        number = rng.choice([float("nan"), float("inf"), float("-inf"), 1.8e308, -0.0, 5e-324])
        data = rng.choice([data, struct.pack(">d", number)])
    return Value(kind, data)


def some_request(rng):
    """Each field absurd or left out, on keys of every kind."""
    two = rng.random() < 0.4
    return Request(
        rng.choice([*Function, 15, 65_535]) if rng.random() < 0.95 else 99,
        flags=sum({flag for flag in FLAGS if rng.random() < 0.2}),
        timestamp=rng.choice([0, 0, *TIMES]),
        timeout=rng.choice([None, *TIMES]),
        ttl=rng.choice([None, None, None, *TIMES]),
        count=rng.choice(COUNTS) if two else rng.choice([None, None, *COUNTS]),
        key=rng.choice(KEYS),
        key2=rng.choice(KEYS) if two else b"",
        value=some_value(rng) if rng.random() < 0.5 else None,
        query=1 if two else rng.choice([0, 0, 0, 2, 3]),
    )


def copied_job(rng):
    """What a daemon says of a job, with numbers as large as they come."""
    number = lambda: rng.choice([*TIMES, -1])  # noqa: E731
    state = [
        *(b"d", number(), rng.choice([0, 255, 256, -1]), number(), number(), number(), -1, b""),
        *(
            rng.choice([0, 65_535, 65_536, -1]),
            "",
            rng.random() < 0.3,
            number(),
            number(),
            number(),
        ),
        *(True, {number(): number()}),
    ]
    message = [b"x://job/%d" % rng.randrange(5), number(), number(), [state] * rng.randrange(3)]
    return Request(
        Function.SET,
        timestamp=rng.choice(TIMES),
        key=b"virta:job",
        value=Value(m.Type.BUFFER, msgspec.msgpack.encode(message)),
    )


@pytest.fixture(params=["native", "plain"])
def running(request, start):
    plain = {"VIRTA_PLAIN": "1"} if request.param == "plain" else {}
    with start("--durability", "none", environ=plain) as server:
        yield server
        server.stop()
        said = "".join(server.said)
        assert "Traceback" not in said, said[-3000:]
        assert server.process.returncode == 0, said[-3000:]


def test_over_the_socket(running):
    """An error that names what was wrong, a connection that stays, and a daemon that works."""
    rng = random.Random(int(os.environ.get("VIRTA_SEED", "13")))
    line = Line(running.journal_port)
    asked = 0
    for turn in range(30):
        requests = [some_request(rng) for _ in range(200)]
        requests = [
            r for r in requests if r.function != Function.QUIT and not r.key.startswith(b"peer:")
        ]
        for request, reply in line.ask(requests):
            asked += 1
            token = reply.error.partition(":")[0]
            assert not token or token in TOKENS, (turn, request, reply)
    assert asked > 5_000
    for template in ADMIN:
        requests = [
            Request(
                Function.SET,
                key=b"virta:admin",
                value=Value(
                    m.Type.STRING, template.replace("N", number).replace("KEY", "k").encode()
                ),
            )
            for number in JSON_NUMBERS
        ]
        for request, reply in line.ask(requests):
            token = reply.error.partition(":")[0]
            assert not token or token in TOKENS, (request, reply)
    line.close()
    with Client("127.0.0.1", running.journal_port) as client:
        client.set("after", 1)
        client.push("x://after", domain="after")
        assert client.get("after") == 1
        assert client.next("after").jobs[0].uri == b"x://after"


def test_between_daemons(running):
    """What a peer says is checked as well: nothing it says may stop the others."""
    rng = random.Random(int(os.environ.get("VIRTA_SEED", "13")))
    line = Line(running.journal_port)
    assert [r.error for _, r in line.ask([Request(Function.NOP, key=b"peer:b")])] == [""]
    for _ in range(10):
        requests = [
            copied_job(rng) if rng.random() < 0.5 else some_request(rng) for _ in range(100)
        ]
        for request, reply in line.ask([r for r in requests if r.function != Function.QUIT]):
            token = reply.error.partition(":")[0]
            assert not token or token in TOKENS, (request, reply)
    line.close()
    with Client("127.0.0.1", running.journal_port) as client:
        client.push("x://after", domain="after")
        assert client.next("after").jobs[0].uri == b"x://after"
        client.admin("stats")
        client.admin("list")


def test_over_http(running):
    """A problem document with a code, never a 500, for every number in every body and query."""
    running.request("PUT", "/journal/keys/text?persist=0", b"text", {"Content-Type": "text/plain"})
    for method, path, template in HTTP:
        for number in JSON_NUMBERS:
            if template is None and len(number) > 1_000:  # no URL is that long
                continue
            body = (
                None
                if template is None
                else template.replace("N", number).replace("KEY", JOB_KEY.decode())
            )
            quoted = number.replace('"', "%22").replace("{", "%7B").replace("}", "%7D")
            answer = running.request(
                method, path.replace("N", quoted), body, {"Content-Type": "application/json"}
            )
            seen = (method, path, (body or number)[:80], answer.status, answer.body[:200])
            assert answer.status < 500 or answer.status == 507, seen
            if answer.status >= 400:
                assert answer.code in TOKENS, seen
                assert answer.json["detail"], seen
            else:
                json.loads(answer.body)
    assert running.request("GET", "/journal/stats").status == 200
