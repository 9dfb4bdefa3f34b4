"""The bytes that subscribers get: server-sent events, chunks and WebSocket frames."""

from __future__ import annotations

import json
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame
from websockets.streams import StreamReader

from virta.hub.delivery import (
    CHUNKED,
    ENCODERS,
    SOCKETS,
    SSE_CHUNKED,
    SSE_PLAIN,
    WEBSOCKET,
    WEBSOCKET_POSITIONS,
    Delivery,
)
from virta.hub.frames import (
    chunk,
    event_frame,
    form_encode,
    named_frame,
    position_frame,
    websocket_text,
    with_member,
)

TAG = b"1f0c9be2a7d4"
MICROS = 1_704_242_127_123_456  # 2024-01-03T00:35:27.123456Z


def test_an_event_is_the_frame_of_the_page():
    """The frame is as the module and docs/events.md show it."""
    frame = event_frame("//somewhere", "some-id", b'{"a":1}', MICROS, 4711)

    assert frame == (
        b': {"timestamp":"2024-01-03T00:35:27.123456Z","offset":4711}\n'
        b'event: data\nid: %2F%2Fsomewhere+some-id\ndata: {"a":1}\n\n'
    )


def test_an_event_that_is_not_in_the_log_has_no_offset():
    """Events of the `meta` channel have neither an offset nor a position."""
    assert b"offset" not in event_frame("s", "1", b"{}", MICROS, -1)
    assert b"\nid: " not in position_frame(TAG, b"{}", MICROS, -1)


def test_a_position_is_the_place_after_the_event():
    """A consumer that resumes from the id gets the next event, not this one."""
    assert b"\nid: 1f0c9be2a7d4.8\n" in position_frame(TAG, b"{}", MICROS, 7)


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_encoded_sources_are_one_word(text):
    """No text can end the id line or look like the `+` between source and id."""
    encoded = form_encode(text)

    assert encoded.isascii()
    assert not set(encoded) & set("+ \r\n")
    assert unquote(encoded) == text


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"id_": "p.1"}, b'event: gap\nid: p.1\ndata: {"a":1}\n\n'),
        ({"retry_ms": 5}, b'retry: 5\nevent: gap\ndata: {"a":1}\n\n'),
        ({}, b'event: gap\ndata: {"a":1}\n\n'),
    ],
)
def test_control_frames(named, expected):
    """A control frame has the members it was given and no others."""
    assert named_frame("gap", {"a": 1}, **named) == expected


@given(st.binary(max_size=70_000))
def test_a_chunk_is_read_back(body):
    """The size line is hexadecimal and counts the body alone."""
    size, _, rest = chunk(body).partition(b"\r\n")

    assert int(size, 16) == len(body)
    assert rest == body + b"\r\n"


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 70_000])
def test_websocket_frames_are_read_by_another_library(size):
    """Each of the three forms of a length is read as the one text that was sent."""
    payload = b"x" * size
    reader = StreamReader()
    reader.feed_data(websocket_text(payload))
    parse = Frame.parse(reader.read_exact, mask=False)
    with pytest.raises(StopIteration) as read:
        next(parse)

    frame = read.value.value
    assert (frame.data, frame.fin, frame.opcode) == (payload, True, 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"a":1}', {"a": 1, "position": "p"}),
        (b'{"position":"old","a":1}', {"position": "p", "a": 1}),
        (b'{"a":"position"}', {"a": "position", "position": "p"}),
        (b'{"a":"\\"position\\""}', {"a": '"position"', "position": "p"}),
        (b'{"a":1} ', {"a": 1, "position": "p"}),
    ],
)
def test_a_member_is_added_or_replaced(value, expected):
    """The result is one JSON object with the member once."""
    made = with_member(value, "position", "p")

    assert json.loads(made) == expected
    assert made.count(b'"position":"p"') == 1
    assert msgspec.json.decode(made) == expected


def test_encoders_agree_on_the_events():
    """Every output format has all events, in order; chunked ones are one chunk."""
    deliveries = [Delivery("c", "s", str(n), b'{"id":"%d"}' % n, n, MICROS) for n in range(3)]
    for encoding, encode in enumerate(ENCODERS):
        payload = encode(deliveries, TAG)
        places = [payload.index(delivery.value[:-1]) for delivery in deliveries]

        assert places == sorted(places)
        if encoding in CHUNKED:
            assert payload.count(b"\r\n") == 2
        assert (payload[0] == 0x81) == (encoding in SOCKETS)
    assert ENCODERS[SSE_CHUNKED](deliveries, TAG) == chunk(ENCODERS[SSE_PLAIN](deliveries, TAG))


def test_a_frame_is_made_once():
    """A second encoder of the same event reuses its bytes."""
    delivery = Delivery("c", "s", "1", b"{}", 3, MICROS)

    assert delivery.frame is delivery.frame
    assert delivery.positioned_frame(TAG) is delivery.positioned_frame(TAG)
    assert ENCODERS[WEBSOCKET_POSITIONS]([delivery], TAG) != ENCODERS[WEBSOCKET]([delivery], TAG)
