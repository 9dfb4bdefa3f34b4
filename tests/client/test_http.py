"""The clients' reader of HTTP responses: any pieces in, the same response out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.client import http
from virta.client.calls import Address
from virta.client.http import ResponseReader, request_bytes

ADDRESS = Address("http://h:1", None)

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2;x=1\r\nhe\r\n003\r\nllo\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"


@pytest.mark.parametrize(
    ("response", "keep"), [(LENGTH, True), (CHUNKED, True), (UNTIL_CLOSED, False)]
)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_any_split_gives_the_same_response(response, keep, cuts):
    """Where the network cuts a response does not matter."""
    reader = ResponseReader("GET")
    places = [0, *sorted(min(c, len(response)) for c in cuts), len(response)]
    pieces = [response[a:b] for a, b in itertools.pairwise(places) if a < b]

    body = b"".join(reader.feed(piece) for piece in pieces)
    reader.end()

    assert (reader.status, body, reader.complete, reader.keep) == (200, b"hello", True, keep)


@pytest.mark.parametrize(
    "wrong",
    [
        b"hello\r\n\r\n",
        b"\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n",
        b"x" * (http.HEAD_BYTES_MAX + 1),
    ],
)
def test_what_is_not_http_is_refused(wrong):
    """Nothing is guessed."""
    with pytest.raises(ValueError):
        ResponseReader("GET").feed(wrong)


def test_bodiless_responses():
    """A HEAD's answer announces a length and has no body; 204 has none either."""
    for method, response in (("HEAD", LENGTH[:-5]), ("GET", b"HTTP/1.1 204 No\r\n\r\n")):
        reader = ResponseReader(method)

        assert reader.feed(response) == b""
        assert (reader.complete, reader.keep) == (True, True)


@pytest.mark.parametrize("response", [LENGTH, CHUNKED])
def test_an_early_end_is_an_error(response):
    """A response that has a length is not whole before it."""
    for size in range(len(response) - 25 if response is CHUNKED else len(response)):
        reader = ResponseReader("GET")
        reader.feed(response[:size])
        with pytest.raises(ConnectionError):
            reader.end()


def test_a_surplus_ends_the_connection():
    """Bytes after a response belong to no request: the connection is not used again."""
    for pieces in ([LENGTH + b"x"], [LENGTH, b"x"], [CHUNKED + b"x"]):
        reader = ResponseReader("GET")
        for piece in pieces:
            reader.feed(piece)
        assert (reader.complete, reader.keep) == (True, False)


def test_headers_cannot_be_split():
    """A line end in a header would let its value write further ones."""
    assert request_bytes(ADDRESS, "GET", "/x", {"A": "b"}, None) == (
        b"GET /x HTTP/1.1\r\nHost: h:1\r\nA: b\r\n\r\n"
    )
    with pytest.raises(ValueError, match="line end"):
        request_bytes(ADDRESS, "GET", "/x", {"A": "b\r\nC: d"}, b"")
