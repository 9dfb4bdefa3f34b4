"""Positions and ids of frames: what they mean, and that no two events share one."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.hub.frames import event_frame, named_frame, position_frame, with_member
from virta.hub.resume.positions import (
    NOWHERE,
    EventId,
    ResumePosition,
    parse_last_event_id,
    parse_position,
    tag_of,
)

PART = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def frame_id(source, id_):
    frame = event_frame(source, id_, b"{}", 0, 7)
    return next(line[4:] for line in frame.decode().split("\n") if line.startswith("id: "))


@given(st.tuples(PART, PART), st.tuples(PART, PART))
def test_frame_ids_are_equal_for_equal_events_only(one, other):
    """An id names one source and one id, whatever characters they have."""
    assert (frame_id(*one) == frame_id(*other)) == (one == other)


@given(PART, PART)
def test_a_frame_id_is_read_back(source, id_):
    """What a frame says is what `Last-Event-ID` understands, with one meaning."""
    assert parse_last_event_id(frame_id(source, id_)) == EventId(frame_id(source, id_))
    assert EventId(frame_id(source, id_)).pairs() == [(source, id_)]


def test_blanks_do_not_make_two_events_one():
    """A blank inside a part is no end of it."""
    assert frame_id("s", "1 2") == "s+1%202"
    assert frame_id("s 1", "2") == "s%201+2"


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("a+b+c", [("a", "b c"), ("a b", "c")]),  # as older servers wrote blanks
        ("/shop 1", [("/shop", "1")]),  # decoded once too often
        ("nothing", []),
        ("+1", [("", "1")]),
    ],
)
def test_other_spellings_of_ids(text, pairs):
    """Ids from older servers, or decoded by a URL, give every event they can mean."""
    assert EventId(text).pairs() == pairs


def test_places():
    """Positions, offsets and events are distinguished."""
    tag = tag_of("some log")

    assert tag == hashlib.sha256(b"some log").hexdigest()[:12]
    assert parse_last_event_id(f"{tag}.5") == ResumePosition(tag, 5)
    assert parse_last_event_id("5") == 6  # the record at 5 was seen
    assert parse_last_event_id("5+6") == EventId("5+6")
    assert parse_position(NOWHERE) is not None
    for text in (
        f"{tag.upper()}.5",
        f"{tag}.",
        f"{tag}.-1",
        tag,
        f"{tag}.{'9' * 20}",
        f"{tag}.5\n",
    ):
        assert parse_position(text) is None


def test_frames_with_positions():
    """The id of an event's frame is the position after it; events outside the log have none."""
    assert b"\nid: abc.8\n" in position_frame(b"abc", b"{}", 0, 7)
    assert b"id:" not in position_frame(b"abc", b"{}", 0, -1)
    assert b'"offset":7}\n' in position_frame(b"abc", b"{}", 0, 7)
    assert b"offset" not in event_frame("s", "1", b"{}", 0, -1)
    assert named_frame("ping", {}, id_="abc.7") == b"event: ping\nid: abc.7\ndata: {}\n\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"id":"1"}', b'{"id":"1","p":"x"}'),
        (b'{"id":"1"} ', b'{"id":"1","p":"x"}'),
        (b'{"p":"old","id":"1"}', b'{"p":"x","id":"1"}'),
        (b'{"id":"p","n":1e999}', b'{"id":"p","n":1e999,"p":"x"}'),
    ],
)
def test_a_member_is_added_or_replaced(value, expected):
    """A message that was received and sent again has one position, the new one."""
    assert with_member(value, "p", "x") == expected
