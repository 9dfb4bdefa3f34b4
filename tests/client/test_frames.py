"""The client's reader of server-sent events: any pieces in, the same frames out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.client import frames
from virta.client.calls import Address, Published, channel_path, check, is_repeatable, publish
from virta.client.frames import Frame, FrameReader
from virta.client.resume import ResumeState
from virta.errors import ClientError
from virta.event import Event

STREAM = (
    b'event: connect\ndata: {"clientID":"1-0"}\n\n'
    b': {"timestamp":"x"}\r\nevent: data\r\nid: s+1\r\ndata: {"id":"1"}\r\n\r\n'
    b": only a comment\n\n"
    b"retry: 2000\nevent: disconnect\ndata: {}\n\n"
    b"data: two\ndata: lines\n\n"
)
WANTED = [
    Frame("connect", '{"clientID":"1-0"}'),
    Frame("data", '{"id":"1"}', "s+1", None, '{"timestamp":"x"}'),
    Frame("disconnect", "{}", None, 2000),
    Frame("message", "two\nlines"),
]


def sent(channel, events):
    """Content type and body of a publication."""
    call = publish(channel, events)
    return call.headers["Content-Type"], call.body


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
    one = {"source": "s", "id": "1"}
    line = b'{"source":"s","id":"1"}'
    assert sent("c", [one]) == ("application/cloudevents+json", line)
    batch = b"[%b,%b]" % (line, line)
    assert sent("c", [one, one]) == ("application/cloudevents-batch+json", batch)


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


def test_where_a_subscription_continues():
    """Without an event the stream's position, with one its id; the server's retry is honoured once."""
    state = ResumeState(lambda start: f"/{start}", None, None)
    assert state.request() == ("/None", {"Accept": "text/event-stream", "Virta-Positions": "1"})

    state.connected("17")
    assert state.request()[0] == "/17"
    state.read_frame(Frame("data", '{"id":"1","source":"s"}', "s+1"))
    state.read_frame(Frame("disconnect", "{}", None, 2000))

    assert state.request()[1]["Last-Event-ID"] == "s+1"
    assert state.wait_s() == 2.0
    assert state.wait_s() <= 0.1
    assert all(state.wait_s() <= 5.0 for _ in range(50))


def test_every_position_is_remembered():
    """Frames without an event move the position, too; the position after a record gives its offset."""
    gaps = []
    state = ResumeState(lambda start: f"/{start}", None, None, on_gap=gaps.append)
    for name, place in (("connect", 5), ("ping", 9), ("gap", 12)):
        assert state.read_frame(Frame(name, '{"x":1}', f"0123456789ab.{place}")) is None
        assert state.request()[1]["Last-Event-ID"] == f"0123456789ab.{place}"
    assert gaps == [{"x": 1}]

    received = state.read_frame(Frame("data", '{"id":"1","source":"s"}', "0123456789ab.18"))

    assert (received.event.id, received.id, received.offset) == ("1", "0123456789ab.18", 17)


@pytest.mark.parametrize(
    ("comment", "offset"),
    [('{"timestamp":"x","offset":7}', 7), ('{"timestamp":"x"}', None), ("", None), ("[", None)],
)
def test_offsets_of_a_server_without_positions(comment, offset):
    """The frame's comment says it, if anything does."""
    state = ResumeState(lambda start: f"/{start}", None, None)

    received = state.read_frame(Frame("data", '{"id":"1","source":"s"}', "s+1", None, comment))

    assert (received.id, received.offset) == ("s+1", offset)


def test_an_id_alone_is_noted():
    """A frame of an id and no data delivers nothing, and is remembered (HTML §9.2.6)."""
    assert FrameReader().feed(b"event: data\nid: x.1\n\n") == [Frame("message", "", "x.1")]


def test_publications_tell_what_they_achieved():
    """The result is the durability as before, with the offset and whether it was a repeat."""
    made = Published.of(
        {"virta-durability": "group", "virta-offset": "12", "virta-duplicate": "true"}
    )
    assert made == "group"
    assert (made.durability, made.offset, made.duplicate) == ("group", 12, True)
    assert repr(made) == "Published('group', offset=12, duplicate=True)"

    old = Published.of({})
    assert (old, old.offset, old.duplicate) == ("none", None, False)


def test_mappings_that_are_no_events_become_data():
    """What names no source is the data of a new event; a list is most likely events to unpack."""
    made = Event.from_json(sent("c", [{"total": 7}])[1])
    assert (made.data, made.type, made.source) == ({"total": 7}, "virta.client", "/virta/client")

    for wrong in ([{"total": 7}], "text", 5):
        with pytest.raises(ClientError, match=r"publish\(channel, \*events\)") as caught:
            publish("c", [wrong])
        assert caught.value.code == "bad-event"


def test_mappings_that_json_cannot_say_are_refused():
    """Callers catch one class of errors, whether it is the data or a member of an event."""
    endless = {}
    endless["again"] = endless
    for wrong in ({"at": object()}, {"source": "/s", "id": "1", "data": object()}, endless):
        with pytest.raises(ClientError, match="as JSON") as caught:
            publish("c", [wrong])
        assert caught.value.code == "bad-event"


def test_what_may_arrive_twice():
    """Publications may, since the server drops repeats; messages to streams may not."""
    assert is_repeatable("GET", "/x")
    assert is_repeatable("POST", "/channels/c")
    assert not is_repeatable("POST", "/publish")
    assert not is_repeatable("POST", "/journal/jobs/next")
