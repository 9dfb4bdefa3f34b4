"""The codec: worked messages byte for byte, any split of the stream, malformed bytes; both engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_vectors import VECTORS, reply_of, request_of

from virta.journal.protocol import codec
from virta.journal.protocol import messages as m


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_worked_messages_both_ways(vector, engine):
    """Every worked message decodes to its fields and encodes to its bytes."""
    if vector["request"] is not None:
        raw = bytes.fromhex(vector["request_hex"])
        expected = request_of(vector["request"])

        assert [expected] == codec.RequestParser().feed(raw)
        assert raw == codec.encode_request(expected)

    raw = bytes.fromhex(vector["reply_hex"])
    expected_reply = reply_of(vector["reply"])

    assert [expected_reply] == codec.ReplyParser().feed(raw)
    assert raw == codec.encode_reply(expected_reply)


def test_alias_of_persist_is_read_and_never_sent():
    """Bit 12 reads as persist; the canonical form uses bit 9."""
    raw = codec.encode_request(m.Request(m.Function.SET, 1, key=b"k", value=m.Value(2, b"v")))
    aliased = raw[:8] + (int.from_bytes(raw[8:10], "big") | 1 << 12).to_bytes(2, "big") + raw[10:]

    (request,) = codec.RequestParser().feed(aliased)

    assert request.flags == m.PERSIST
    assert codec.encode_request(request)[8:10] == (0x0202).to_bytes(2, "big")


u64 = st.integers(0, 2**64 - 1)
keys = st.binary(max_size=300)
values = st.one_of(
    st.just(m.Value(0, b"")),
    st.builds(m.Value, st.integers(1, 5), st.binary(max_size=300)),
    st.builds(m.Value, st.just(1), st.integers(65_000, 66_000).map(bytes)),
)


@st.composite
def requests(draw):
    query = draw(st.integers(0, 3))
    return m.Request(
        draw(st.integers(0, 0xFFFF)),
        draw(st.integers(0, 0xFFFF)),
        draw(st.integers(0, 0xFFFF)) & m.REQUEST_FLAGS,
        draw(u64),
        draw(st.none() | u64),
        draw(st.none() | u64),
        draw(st.integers(0, 0xFFFF) if query == m.QUERY_RANGE else st.none() | st.integers(0, 9)),
        draw(keys),
        draw(keys) if query == m.QUERY_RANGE else b"",
        draw(st.none() | values),
        query,
    )


@st.composite
def replies(draw):
    query = draw(st.integers(0, 3))
    reply = m.Reply(
        draw(st.integers(0, 0xFFFF)),
        draw(st.integers(0, 0xFFFF)) & m.REPLY_FLAGS,
        draw(u64),
        draw(st.none() | u64),
    )
    if draw(st.booleans()):
        reply.error = draw(st.text(min_size=1, max_size=300))
        return reply
    detailed = draw(st.booleans())
    details = st.builds(m.Details, u64, u64, size=st.integers(0, 9)) if detailed else st.none()
    pair = st.builds(m.Pair, keys, values, details)
    if query == m.QUERY_RANGE or draw(st.booleans()):
        reply.query = query
        reply.pairs = draw(st.lists(pair, max_size=4))
    else:
        reply.query = query
        reply.pair = draw(st.none() | pair)
    reply.cursor = draw(st.none() | keys)
    return reply


def feed_in_pieces(parser, raw, cuts):
    out = []
    at = 0
    for cut in [*sorted(c % (len(raw) + 1) for c in cuts), len(raw)]:
        out += parser.feed(raw[at:cut])
        at = cut
    return out


@given(st.lists(requests(), max_size=5), st.lists(st.integers(0, 10**6), max_size=12))
def test_requests_survive_any_split_of_the_stream(engine, messages, cuts):
    """Encoding then feeding in arbitrary pieces gives the same requests and leaves nothing behind."""
    parser = codec.RequestParser()

    got = feed_in_pieces(parser, b"".join(map(codec.encode_request, messages)), cuts)

    assert messages == got
    assert parser.buffered == 0
    assert parser.error is None


@given(st.lists(replies(), max_size=5), st.lists(st.integers(0, 10**6), max_size=12))
def test_replies_survive_any_split_of_the_stream(engine, messages, cuts):
    """Encoding then feeding in arbitrary pieces gives the same replies and leaves nothing behind."""
    parser = codec.ReplyParser()

    got = feed_in_pieces(parser, codec.encode_replies(messages), cuts)

    assert messages == got
    assert parser.buffered == 0
    assert parser.error is None


@given(st.lists(st.binary(max_size=200), max_size=5), st.sampled_from([b"", b"FJ\0\1", b"JR\0\1"]))
def test_any_bytes_are_survived(engine, chunks, prefix):
    """Arbitrary bytes give messages or one error, never an exception, and buffered bytes stay bounded."""
    for parser in (codec.RequestParser(), codec.ReplyParser()):
        total = 0
        for chunk in [prefix, *chunks]:
            total += len(chunk)
            parser.feed(chunk)

            assert parser.buffered <= total


@given(requests(), st.integers(0, 10**6), st.integers(0, 255))
def test_one_wrong_byte_is_survived(engine, sent, at, byte):
    """A request with any byte replaced is decoded, refused or incomplete; never a crash."""
    raw = bytearray(codec.encode_request(sent))
    raw[at % len(raw)] = byte

    codec.RequestParser().feed(bytes(raw))


def head(flags, *, version=1, magic=b"FJ"):
    return codec._REQUEST_HEAD.pack(magic, version, 2, 7, flags, 0)


@pytest.mark.parametrize(
    ("raw", "code", "identifier"),
    [
        (b"GE", "bad-message", None),
        (b"X", "bad-message", None),
        (head(0, magic=b"JR") + b"\0", "bad-message", None),
        (head(0, version=2) + b"\0", "version", 7),
        (head(1 << 1) + b"\1k\0", "bad-message", None),
        (head(1 << 1) + b"\1k\1\x06", "bad-message", None),
        (head(1 << 1) + b"\1k\2\0x", "bad-message", None),
        (head(3 << 1) + b"\1k\xff\xff\xff\xff", "too-large", 7),
        (head(3 << 1) + b"\1k" + (m.VALUE_DATA_BYTES_MAX + 2).to_bytes(4), "too-large", 7),
    ],
)
def test_malformed_bytes_end_the_stream_at_once(raw, code, identifier, engine):
    """Wrong magic, version and sizes, also of 4 GB, are errors before any further byte is awaited."""
    parser = codec.RequestParser()
    good = codec.encode_request(m.Request(m.Function.NOP, 1))

    assert len(parser.feed(good + raw)) == 1
    assert parser.error is not None
    assert (code, identifier) == (parser.error.code, parser.error.identifier)
    assert parser.feed(good) == []
    assert parser.buffered == 0


class PlainRequests(codec.RequestParser):
    def _decode_natively(self, source):
        return [], 0


class PlainReplies(codec.ReplyParser):
    def _decode_natively(self, source):
        return [], 0


def outcome(parser, raw, cuts):
    """Return everything a caller can see of a parser after it was fed."""
    got = feed_in_pieces(parser, raw, cuts)
    error = parser.error and (parser.error.message, parser.error.code, parser.error.identifier)
    return got, error, parser.buffered


@pytest.mark.skipif(codec.native_codec is None, reason="the native module is not built")
@given(
    st.lists(requests(), max_size=4),
    st.lists(replies(), max_size=4),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3),
    st.lists(st.integers(0, 10**6), max_size=4),
)
def test_both_engines_agree(asked, answered, damage, cuts):
    """Native and plain decode the same in whole, split and damaged streams, and encode the same."""
    assert [codec.encode_request(r) for r in asked] == [
        codec.encode_request_plain(r) for r in asked
    ]
    assert [codec.encode_reply(r) for r in answered] == [
        codec.encode_reply_plain(r) for r in answered
    ]
    assert codec.encode_replies(answered) == b"".join(map(codec.encode_reply_plain, answered))
    for raw, native, plain in (
        (b"".join(map(codec.encode_request_plain, asked)), codec.RequestParser, PlainRequests),
        (b"".join(map(codec.encode_reply_plain, answered)), codec.ReplyParser, PlainReplies),
    ):
        bad = bytearray(raw)
        for at, byte in damage if raw else []:
            bad[at % len(bad)] = byte

        assert outcome(native(), bytes(bad), cuts) == outcome(plain(), bytes(bad), cuts)
