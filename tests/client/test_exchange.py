"""What both pools share, without a network: exchanges and idle connections."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.client import calls, http
from virta.client.calls import Address, ServerCall
from virta.client.exchange import IDLE_S, Exchange, IdleConnections, RequestBytes
from virta.errors import ClientError

ANSWER = b'{"ids": ["a"]}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)
GET = RequestBytes("GET", b"", True)
POST = RequestBytes("POST", b"", False)


def received(*pieces, method="GET"):
    exchange = Exchange(method)
    for piece in pieces:
        exchange.receive(piece)
    return exchange


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=6))
def test_a_response_in_any_pieces(cuts):
    """Has the same answer, and leaves the connection to the next request."""
    ends = [0, *sorted(set(cuts)), len(WHOLE)]
    exchange = received(*[WHOLE[a:b] for a, b in pairwise(ends)])

    assert exchange.reusable
    assert exchange.answer() == ({"ids": ["a"]}, {"content-length": str(len(ANSWER))})


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=6))
def test_a_body_piece_by_piece(cuts):
    """What `take` returns as it arrives is the body, and nothing is returned twice."""
    ends = [0, *sorted(set(cuts)), len(WHOLE)]
    exchange, body = Exchange("GET"), b""
    for a, b in pairwise(ends):
        exchange.receive(WHOLE[a:b])
        if exchange.has_piece:
            body += exchange.take()

    assert body == ANSWER
    assert exchange.take() == b""


def test_the_end_of_a_connection_completes_only_a_body_without_a_length():
    assert received(b"HTTP/1.1 200 OK\r\n\r\n[]", b"").answer() == ([], {})
    for pieces in ((b"",), (WHOLE[:20], b""), (WHOLE[:-1], b"")):
        with pytest.raises(ConnectionError):
            received(*pieces)


def test_a_refusal_is_an_error():
    body = b'{"code": "denied", "message": "no"}'
    refused = received(b"HTTP/1.1 403 No\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    with pytest.raises(ClientError) as caught:
        refused.answer()

    assert (caught.value.code, caught.value.status) == ("denied", 403)


def test_a_stream_is_checked_by_its_head():
    """Its body has no end; that of a refusal is complete when it is checked."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n\r\ndata: x"
    stream = received(head % b"text/event-stream")
    stream.check_stream()
    assert stream.take() == b"data: x"
    with pytest.raises(ClientError) as caught:
        received(head % b"text/html").check_stream()
    assert caught.value.code == "not-a-stream"
    with pytest.raises(ClientError) as caught:
        received(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy").check_stream()
    assert caught.value.status == 503


def test_a_response_has_a_limit(monkeypatch):
    monkeypatch.setattr(http, "ANSWER_BYTES_MAX", 5)
    with pytest.raises(ValueError, match="over 5 bytes"):
        received(WHOLE)


@pytest.mark.parametrize("request_", [GET, POST])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("error", [ConnectionResetError(), TimeoutError()])
def test_what_is_sent_again(request_, kept, sent, answered, error):
    """Only what a kept connection lost without an answer, and not twice what must not arrive twice."""
    exchange = Exchange(request_.method)
    exchange.sent = sent
    if answered:
        exchange.receive(b"H")

    again = exchange.may_repeat(request_, error, kept=kept)

    harmless = request_ is GET or not sent
    silent = not answered and not isinstance(error, TimeoutError)
    assert again == (kept and silent and harmless)


def test_a_request_knows_whether_it_may_arrive_twice():
    address = Address("http://example.com:1", None)
    publication = RequestBytes.of(address, calls.publish("c", [{"a": 1}]))
    messages = RequestBytes.of(address, calls.publish_streams([("a:", "text")]))

    assert (publication.repeatable, messages.repeatable) == (True, False)
    assert publication.data.startswith(b"POST /channels/c HTTP/1.1\r\nHost: example.com:1\r\n")
    with pytest.raises(ValueError, match="line end"):
        RequestBytes.of(address, ServerCall("GET", "/", print, headers={"A": "b\r\nC: d"}))


def test_a_call_says_what_an_error_means():
    error = ClientError("no", code="x", status=404)
    assert calls.ready().failed(error) is False
    assert calls.collection_exists("i", "c").failed(error) is False
    with pytest.raises(ClientError):
        calls.filter_ids("i", "c").failed(error)


@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "expire"]), st.floats(0, 2 * IDLE_S))))
def test_idle_connections(steps):
    """The one used last is used next; exactly those older than the limit expire, oldest first."""
    idle, model, now, number = IdleConnections(), [], 0.0, 0
    for step, passed in steps:
        now += passed
        if step == "add":
            idle.add(number, now)
            model.append((now, number))
            number += 1
        elif step == "pop":
            assert idle.pop() == (model.pop()[1] if model else None)
        else:
            expired = [one for since, one in model if now - since >= IDLE_S]
            model = model[len(expired) :]
            assert idle.pop_expired(now) == expired
        assert idle.next_expiry() == (model[0][0] + IDLE_S if model else None)
        assert [one for one in range(number) if one in idle] == sorted(n for _, n in model)
