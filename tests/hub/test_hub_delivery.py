"""Records of the log as deliveries, and deliveries in each format of the wire."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import virta
from odd_records import ODD
from virta.hub.delivery import (
    CHUNKED,
    DEAD_LETTERS,
    ENCODERS,
    POSITION_ATTRIBUTE,
    RESERVED_PREFIX,
    SOCKETS,
    SSE_CHUNKED,
    SSE_PLAIN,
    STREAMS,
    WEBSOCKET,
    Delivery,
    from_record,
    identity,
    is_bookkeeping,
    is_reserved,
    read_delivery,
    read_message,
)
from virta.hub.frames import chunk

TAG = b"0123456789ab"
POSITIONS = 3  # an encoder with positions comes so many after the one without


def stored(path, *records):
    with virta.open(path) as log:
        log.append_many(records)
        return list(log.read())


def delivery(number, offset=7):
    value = json.dumps({"id": str(number), "source": "s", "data": "é" * number}).encode()
    return Delivery("c", "s", str(number), value, offset, 1_700_000_000_000_000)


def test_which_topics_are_events(tmp_path):
    """Stream messages are read as such; what the server stores is not delivered, dead letters are."""
    event = b'{"id":"1","source":"s"}'
    message = b'{"publish_to":"room:1","payload":"hi"}'
    records = stored(
        tmp_path / "log",
        ("c", b"", event),
        (STREAMS, b"room:1", message),
        (STREAMS, b"", message),
        (DEAD_LETTERS, b"", event),
        (RESERVED_PREFIX + "audit", b"", event),
    )

    found = [read_delivery(record) for record in records]

    assert [(one.channel, one.id) for one in found[:4]] == [
        ("c", "1"),
        (STREAMS, "room:1"),
        (STREAMS, "room:1"),
        (DEAD_LETTERS, "1"),
    ]
    assert found[4] is None
    assert [one.offset for one in found[:4]] == [0, 1, 2, 3]


@pytest.mark.parametrize("key", [b"\xff", b""])
def test_a_message_that_cannot_be_read_is_none(tmp_path, key):
    """Neither a key that is not UTF-8 nor a value without a stream says where it goes."""
    [record] = stored(tmp_path / "log", (STREAMS, key, b"not JSON"))

    assert read_message(record) is None
    assert read_delivery(record) is None


def test_channels_of_the_server():
    assert is_reserved(STREAMS)
    assert not is_reserved("virta/streams")
    assert is_bookkeeping(STREAMS.encode())
    assert not is_bookkeeping(DEAD_LETTERS.encode())
    assert not is_bookkeeping(b"c")


def test_the_identity_of_a_record_is_that_of_its_delivery(tmp_path):
    """However odd the record is: repeats are recognised by what is delivered."""
    for record in stored(tmp_path / "log", *[("c", b"", value) for value, _ in ODD]):
        made = from_record(record)

        assert identity(record) == (made.channel, made.source, made.id)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.sampled_from(range(6)))
def test_several_deliveries_are_one_after_the_other(numbers, encoding):
    """The bytes of several are those of each; chunks are joined to one."""
    encode, made = ENCODERS[encoding], [delivery(number) for number in numbers]
    plain = SSE_PLAIN + POSITIONS * (encoding >= POSITIONS)
    if encoding in CHUNKED:
        assert encode(made, TAG) == chunk(ENCODERS[plain](made, TAG))
    else:
        assert encode(made, TAG) == b"".join([encode([one], TAG) for one in made])


def test_formats_know_what_they_are():
    assert {SSE_CHUNKED, SSE_CHUNKED + POSITIONS} == CHUNKED
    assert {WEBSOCKET, WEBSOCKET + POSITIONS} == SOCKETS


def test_a_position_over_a_websocket():
    """It is an attribute of the event; what is not in the log has none."""
    text = delivery(1, offset=41).positioned_text(TAG)
    event = json.loads(text[text.index(b"{") :])
    assert event[POSITION_ATTRIBUTE] == f"{TAG.decode()}.42"
    assert (event["id"], event["data"]) == ("1", "é")

    alone = delivery(1, offset=-1)
    assert alone.positioned_text(TAG) == ENCODERS[WEBSOCKET]([alone], TAG)
