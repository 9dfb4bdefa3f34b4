"""Any split of requests gives the same responses; damaged bytes do no harm."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_harness import BATCH, STRUCTURED, event


def post(kind, body, path="/channels/pieces"):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


CHUNKED = (
    f"POST /channels/pieces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {STRUCTURED}\r\nTransfer-Encoding: chunked\r\n\r\n"
    '10\r\n{"source":"s","i\r\n8\r\nd":"c1"}\r\n0\r\n\r\n'
).encode()
CONVERSATION = b"".join(
    [
        post(STRUCTURED, json.dumps(event("p1"))),
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
        post(BATCH, "[1]"),
        CHUNKED,
        b"OPTIONS /channels/pieces HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"DELETE /channels/pieces HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /channels/pieces?x=~5 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        post("text/json", "[]", "/publish"),
        b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ]
)
STATUSES = [b"202", b"200", b"400", b"202", b"204", b"405", b"400", b"200", b"404"]


def talk(port, pieces):
    """Send pieces, each in a packet of its own, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while data := connection.recv(65536):
                answer += data
        except ConnectionError:
            pass
        return answer


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=40))
def test_any_split_gives_the_same_answers(server, cuts):
    """Pipelined requests may be split anywhere."""
    places = [0, *sorted(cuts), len(CONVERSATION)]

    answer = talk(server.port, [CONVERSATION[a:b] for a, b in itertools.pairwise(places)])

    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == STATUSES, answer


@pytest.mark.parametrize("seed", range(30))
def test_noise_does_no_harm(server, seed):
    """Damaged requests are refused or disconnected; the server keeps working."""
    noise = random.Random(seed)
    damaged = bytearray(CONVERSATION)
    for _ in range(noise.randint(1, 20)):
        where = noise.randrange(len(damaged))
        damaged[where : where + noise.randint(0, 4)] = noise.randbytes(noise.randint(0, 4))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(bytes(damaged))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionError:
            pass

    assert b" 500 " not in answer, f"seed {seed}"
    assert server.request("GET", "/readyz").status == 200


def test_a_half_closed_connection_gets_all_responses(server):
    """A client may half-close after its last request; every response still arrives."""
    half = CONVERSATION.replace(b"Connection: close\r\n", b"")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(half)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(65536):
            answer += data

    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == STATUSES, answer
