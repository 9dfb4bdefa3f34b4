"""The client's reader of server-sent events: any pieces in, the same frames out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.client import frames
from virta.client.frames import Frame, FrameReader
from virta.client.wire import Address, Cursor, channel_path, check, publication
from virta.errors import ClientError

STREAM = (
    b'event: connect\ndata: {"clientID":"1-0"}\n\n'
    b': {"timestamp":"x"}\r\nevent: data\r\nid: s+1\r\ndata: {"id":"1"}\r\n\r\n'
    b": only a comment\n\n"
    b"retry: 2000\nevent: disconnect\ndata: {}\n\n"
    b"data: two\ndata: lines\n\n"
)
WANTED = [
    Frame("connect", '{"clientID":"1-0"}'),
    Frame("data", '{"id":"1"}', "s+1"),
    Frame("disconnect", "{}", None, 2000),
    Frame("message", "two\nlines"),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_split_gives_the_same_frames(cuts):
    """Where the network cuts the stream does not matter."""
    reader = FrameReader()
    places = [0, *sorted(cuts), len(STREAM)]
    found = []
    for first, last in itertools.pairwise(places):
        found += reader.feed(STREAM[first:last])

    assert found == WANTED


def test_endless_frames_are_refused(monkeypatch):
    """A stream that never ends a frame does not fill the memory."""
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 100)

    with pytest.raises(ClientError, match="over 100 bytes"):
        FrameReader().feed(b"data: " + b"x" * 200)


def test_paths_and_bodies():
    """Names are encoded as the server decodes them; one event is structured, several a batch."""
    assert channel_path("a b/c", 5, "x=1") == "/channels/a+b%2Fc/from/5?x=1"
    assert publication("c", [{"id": "1"}])[1:] == ("application/cloudevents+json", b'{"id":"1"}')
    assert publication("c", [{}, {}])[1:] == ("application/cloudevents-batch+json", b"[{},{}]")


def test_answers():
    """A refusal is an error with the server's code and sentence."""
    assert check(202, b'{"code":"accepted"}') == {"code": "accepted"}
    with pytest.raises(ClientError) as caught:
        check(400, b'{"code":"bad","message":"because"}')
    assert (caught.value.status, caught.value.code) == (400, "bad")
    with pytest.raises(ClientError, match="plain words"):
        check(400, b"plain words")
    with pytest.raises(ClientError, match="no address"):
        Address("localhost:1", None)


def test_cursor_knows_where_to_continue():
    """Without an event the stream's position, with one its id; the server's retry is honoured once."""
    cursor = Cursor(lambda start: f"/{start}", None, None, None)
    assert cursor.request() == ("/None", {"Accept": "text/event-stream"})

    cursor.connected("17")
    assert cursor.request()[0] == "/17"
    cursor.take(Frame("data", '{"id":"1","source":"s"}', "s+1"))
    cursor.take(Frame("disconnect", "{}", None, 2000))

    assert cursor.request()[1]["Last-Event-ID"] == "s+1"
    assert cursor.wait_s() == 2.0
    assert cursor.wait_s() <= 0.1
    assert all(cursor.wait_s() <= 5.0 for _ in range(50))
