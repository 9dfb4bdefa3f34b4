"""The bytes of frames, as server-sent events and as texts of a WebSocket, and what is shown of an event."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.errors import ViewError
from virta.views.frames import (
    AGGREGATE,
    EMPTY_ID,
    FIELDS_MAX,
    LIVE,
    NO_ID,
    PING,
    RESET,
    ROW,
    SNAPSHOT,
    FrameEncoder,
    Projection,
    ViewFrame,
)

TAG = "0123456789ab"
EVENT = b'{"id":"1","source":"/s","type":"t","data":{"a":{"b":1,"c":[7,8]},"d":"x"}}'
# Every kind of frame, with the id that a client stores (None: it keeps what it has).
FRAMES = [
    (ViewFrame(SNAPSHOT, EMPTY_ID, data={"rows": 2}), "", {"rows": 2}),
    (ViewFrame(RESET, EMPTY_ID, data={"reason": "gap"}), "", {"reason": "gap"}),
    (ViewFrame(ROW, NO_ID, "k", 4, EVENT), None, {"key": "k", "offset": 4, "event": json.loads(EVENT)}),
    (ViewFrame(LIVE, 9, data={"offset": 9, "rows": 1}), f"{TAG}.9", {"offset": 9, "rows": 1}),
    (ViewFrame("enter", 5, "k", 4, EVENT), f"{TAG}.5", {"key": "k", "offset": 4, "event": json.loads(EVENT)}),
    (ViewFrame("update", 0, "k", 4, EVENT), f"{TAG}.0", {"key": "k", "offset": 4, "event": json.loads(EVENT)}),
    (ViewFrame("leave", 6, "k", 5, EVENT, "changed"), f"{TAG}.6",
     {"key": "k", "offset": 5, "reason": "changed", "event": json.loads(EVENT)}),
    (ViewFrame("leave", 6, "k", 5, None, "expired"), f"{TAG}.6", {"key": "k", "offset": 5, "reason": "expired"}),
    (ViewFrame(PING, NO_ID, data={"offset": 3}), None, {"offset": 3}),
    (ViewFrame(AGGREGATE, 7, data={"offset": 7, "groups": [], "gone": []}), f"{TAG}.7",
     {"offset": 7, "groups": [], "gone": []}),
    (ViewFrame(LIVE, 9, data={}), f"{TAG}.9", {}),
]  # fmt: skip


def read_sse(raw):
    """Return (name, id or None, data) of one server-sent event, as the standard reads it."""
    assert raw.endswith(b"\n\n")
    name, id_, data = "", None, ""
    lines = raw[:-2].decode().split("\n")
    assert all(lines)
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "id":
            id_ = value
        else:
            assert field == "data"
            data += value
    return name, id_, json.loads(data)


@pytest.mark.parametrize(("frame", "id_", "data"), FRAMES)
def test_server_sent_events(frame, id_, data):
    """Name, id and data; an empty id makes EventSource forget its position."""
    (raw,) = FrameEncoder(TAG).encode([frame])

    assert read_sse(raw) == (frame.name, id_, data)


@pytest.mark.parametrize(("frame", "id_", "data"), FRAMES)
def test_texts_of_a_websocket(frame, id_, data):
    """The same members in one object, with the name as `frame`."""
    (raw,) = FrameEncoder(TAG, texts=True).encode([frame])

    expected = {"frame": frame.name} | ({} if id_ is None else {"id": id_}) | data
    assert json.loads(raw) == expected


@given(st.text(max_size=30), st.integers(0, 2**60), st.booleans())
def test_any_key_survives(key, offset, texts):
    """Line ends and quotes in a key must not break a frame."""
    key = key.encode("utf-8", "replace").decode()
    frame = ViewFrame("enter", offset + 1, key, offset, EVENT)
    (raw,) = FrameEncoder(TAG, texts=texts).encode([frame])
    data = json.loads(raw) if texts else read_sse(raw)[2]

    assert (data["key"], data["offset"]) == (key, offset)


def test_frames_keep_their_order():
    frames = [ViewFrame("enter", n, str(n), n, EVENT) for n in range(20)]
    found = [read_sse(raw)[2]["key"] for raw in FrameEncoder(TAG).encode(frames)]

    assert found == [str(n) for n in range(20)]


def test_equal_encoders_share_and_others_do_not():
    """Consumers with equal keys get the same bytes, which are made once."""
    same = {FrameEncoder(TAG).key, FrameEncoder(TAG, None).key}
    others = {
        FrameEncoder("ba9876543210").key,
        FrameEncoder(TAG, texts=True).key,
        FrameEncoder(TAG, Projection("/data/d")).key,
        FrameEncoder(TAG, Projection("/data/a")).key,
    }

    assert len(same) == 1
    assert len(others | same) == 5


def test_a_position_is_tag_and_offset():
    assert FrameEncoder(TAG).position(12) == f"{TAG}.12"


class TestProjection:
    """`$fields`: the identity of an event and the values at some pointers, where they were."""

    @pytest.mark.parametrize(
        ("fields", "data"),
        [
            ("/data/d", {"d": "x"}),
            ("/data/a/b", {"a": {"b": 1}}),
            ("/data/a/b,/data/d", {"a": {"b": 1}, "d": "x"}),
            ("/data/a,/data/a/b", {"a": {"b": 1, "c": [7, 8]}}),
            ("/data", {"a": {"b": 1, "c": [7, 8]}, "d": "x"}),
            ("/data/nothing", None),
            ("/data/d/deeper", None),
        ],
    )
    def test_values_stay_where_they_were(self, fields, data):
        shown = json.loads(Projection(fields)(EVENT))

        assert shown.pop("data", None) == data
        assert shown == {"id": "1", "source": "/s", "type": "t"}

    def test_a_frame_has_the_projected_event(self):
        frame = ViewFrame("leave", 6, "k", 5, EVENT, "changed")
        (raw,) = FrameEncoder(TAG, Projection("/data/d")).encode([frame])

        assert read_sse(raw)[2]["event"]["data"] == {"d": "x"}
        assert frame.event == EVENT  # other consumers get all of it

    def test_identity_is_what_the_event_has(self):
        assert json.loads(Projection("/data")(b'{"id":"1","subject":"s","x":1}')) == {
            "id": "1",
            "subject": "s",
        }

    def test_values_keep_their_text(self):
        """Numbers are not rounded on the way."""
        event = b'{"id":"1","data":{"n":12345678901234567890.10,"m":0}}'
        assert b'"n":12345678901234567890.10' in Projection("/data/n")(event)

    def test_what_is_no_pointer_is_a_sentence(self):
        with pytest.raises(ViewError, match=r"\$fields is 'total': write a JSON pointer") as error:
            Projection("total")
        assert error.value.code == "invalid-pointer"

    def test_the_number_of_fields_is_limited(self):
        """More are refused, not left out."""
        names = [f"/data/{n}" for n in range(FIELDS_MAX + 1)]
        assert len(Projection(",".join(names[1:])).pointers) == FIELDS_MAX
        with pytest.raises(ViewError, match=f"names {FIELDS_MAX + 1} pointers, the limit is"):
            Projection(",".join(names))
