"""Records and batches: the native and the plain codec agree, and neither delivers a wrong byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.log.engine import kernel
from virta.log.format import checksums, codec
from virta.log.format.codec import Status
from virta.log.limits import BATCH_HEADER_BYTES, KEY_BYTES_MAX, TOPIC_BYTES_MAX, VALUE_BYTES_MAX

SALT = 0xC0FFEE11
topics = st.binary(max_size=40).filter(lambda b: not (len(b) == 1 and b[0] < 0x20))
records = st.lists(st.tuples(topics, st.binary(max_size=40), st.binary(max_size=300)), min_size=1)

pytestmark = pytest.mark.skipif(not kernel.NATIVE, reason="the native kernel is not built")


def batch_of(rows, base=0, prev=0, **fields):
    buf = codec.encode(rows)
    codec.fill_header(buf, salt=SALT, base=base, time=7, count=len(rows), prev=prev, **fields)
    return bytes(buf)


def read_with(read, data, **options):
    given_options = {"start": 0, "stop": 1 << 62, "topics": None, "verify": True} | options
    return read(data, 0, len(data), SALT, 0, 0, *given_options.values(), False, 1 << 62)


def test_checksums_have_the_published_check_values():
    """CRC-8 0x31 gives A2 and CRC-32C gives E3069283 for the digits 1 to 9, in both codecs."""
    for module in (codec, kernel):
        assert module.crc8(b"123456789") == 0xA2
        assert module.crc32c(b"123456789") == 0xE3069283


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 255))
def test_checksums_agree_and_continue(first, second, seed):
    """Both codecs give one sum, from any seed, whole or in two parts."""
    assert codec.crc8(first + second, seed) == kernel.crc8(second, kernel.crc8(first, seed))
    salted = kernel.crc32c(first, seed)
    assert codec.crc32c(first + second, seed) == kernel.crc32c(second, salted)


@given(st.binary(max_size=80), st.integers(0, 2**32 - 1))
def test_a_lost_salt_is_found_by_running_the_checksum_backwards(data, seed):
    """crc32c_seed inverts crc32c in its seed."""
    assert checksums.crc32c_seed(data, codec.crc32c(data, seed)) == seed


@pytest.mark.parametrize(
    ("n", "hexed"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "8001"),
        (300, "ac02"),
        (16384, "808001"),
        (2**28 - 1, "ffffff7f"),
    ],
)
def test_varlong_table(n, hexed):
    """Unsigned LEB128, least significant group first."""
    assert codec.encode_varlong(n).hex() == hexed
    assert codec.decode_varlong(bytes.fromhex(hexed), 0) == (n, len(hexed) // 2)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff\xff\xff\xff\x01"])
def test_varlong_must_end(data):
    """A number that does not end in four bytes is refused, not read on."""
    with pytest.raises(ValueError, match="does not end"):
        codec.decode_varlong(data, 0)


@given(records)
def test_both_encoders_write_the_same_bytes(rows):
    """encode() of both engines is equal, and is the documented record format."""
    assert bytes(kernel.encode(rows)) == bytes(codec.encode(rows))
    expected = b"".join(codec.encode_record(*row) for row in rows)
    assert bytes(codec.encode(rows))[BATCH_HEADER_BYTES:] == expected


@given(records, st.integers(0, 30), st.integers(0, 30))
def test_round_trip_through_both_decoders(rows, start, stop):
    """What was encoded is read back by both, cut to the offsets asked for."""
    data = batch_of(rows)

    results = [read_with(m.read, data, start=start, stop=stop) for m in (codec, kernel)]

    assert results[0] == results[1]
    got, pos, _, following, status, _ = results[0]
    if stop == 0:
        assert (got, pos, status) == ([], 0, Status.STOP)
        return
    expected = [(*row, i, 7) for i, row in enumerate(rows) if start <= i < stop]
    assert [tuple(r) for r in got] == expected
    assert (pos, following) == (len(data), len(rows))


@given(records, st.data())
def test_no_flipped_bit_goes_unnoticed(rows, data):
    """One flipped bit anywhere in a batch: both decoders refuse it with the same reason."""
    batch = bytearray(batch_of(rows))
    bit = data.draw(st.integers(0, len(batch) * 8 - 1))
    batch[bit // 8] ^= 1 << bit % 8

    results = [read_with(m.read, bytes(batch)) for m in (codec, kernel)]

    assert results[0] == results[1]
    got, pos, _, _, status, _ = results[0]
    assert got == []
    assert pos == 0
    assert status in {Status.BAD_HEADER, Status.BAD_PAYLOAD}


@given(records, st.data())
def test_no_prefix_of_a_batch_is_delivered(rows, data):
    """A batch that is cut anywhere is short, never half delivered."""
    batch = batch_of(rows)
    cut = data.draw(st.integers(1, len(batch) - 1))

    results = [read_with(m.read, batch[:cut]) for m in (codec, kernel)]

    assert results[0] == results[1]
    assert results[0][0] == []
    assert results[0][4] == Status.SHORT


@given(st.binary(min_size=1, max_size=400))
def test_garbage_never_crashes_or_decodes(data):
    """Arbitrary bytes: both decoders and walkers stop at once, for the same reason."""
    assert read_with(codec.read, data) == read_with(kernel.read, data)
    walked = [m.walk(data, 0, len(data), SALT, 0, 0, True) for m in (codec, kernel)]
    assert walked[0][1:] == walked[1][1:]
    assert walked[0][0] == []


def test_chain_salt_and_offsets_are_checked():
    """A valid batch in the wrong place is refused: other salt, other offset, other predecessor."""
    row = [("t", "k", b"v")]
    for module in (codec, kernel):
        ok = batch_of(row)
        assert module.read(ok, 0, len(ok), SALT, 0, 0, 0, 9, None, True, False, 9)[4] == Status.END
        assert module.read(ok, 0, len(ok), SALT + 1, 0, 0, 0, 9, None, True, False, 9)[4] == 3
        assert module.read(ok, 0, len(ok), SALT, 0, 5, 0, 9, None, True, False, 9)[4] == 6
        assert module.read(ok, 0, len(ok), SALT, 1, 0, 0, 9, None, True, False, 9)[4] == 6
        zeros = bytes(100)
        assert module.walk(zeros, 0, 100, SALT, 0, 0, True)[4] == Status.ZERO


def test_topics_are_filtered_in_the_decoder():
    """Only wanted topics come out; offsets count all."""
    data = batch_of([("a", "", b"1"), ("b", "", b"2"), ("a", "", b"3")])
    for module in (codec, kernel):
        got = read_with(module.read, data, topics=frozenset({b"a"}))[0]
        assert [(r.offset, r.value) for r in got] == [(0, b"1"), (2, b"3")]


@pytest.mark.parametrize(
    "row",
    [
        ("t" * (TOPIC_BYTES_MAX + 1), "", b""),
        ("", "k" * (KEY_BYTES_MAX + 1), b""),
        ("", "", bytes(VALUE_BYTES_MAX + 1)),
        ("\x05", "", b""),
        ("t", "k", "text"),
        ("t", "k", 7),
        ("t", None, b""),
        ("\ud800", "", b""),
        ("t", "k"),
        "tkv",
    ],
)
def test_bad_records_are_refused_by_index(row):
    """Both encoders name the record they cannot take."""
    for module in (codec, kernel):
        with pytest.raises(IndexError) as caught:
            module.encode([("t", "k", b"v"), row])
        assert caught.value.args == (1,)


def test_the_limits_themselves_are_fine():
    """A record at every limit goes through."""
    row = ("t" * TOPIC_BYTES_MAX, "k" * KEY_BYTES_MAX, bytes(VALUE_BYTES_MAX))
    data = batch_of([row])

    (record,) = read_with(kernel.read, data)[0]

    assert (len(record.topic), len(record.key), len(record.value)) == (1024, 1024, 10485760)


def test_a_batch_has_a_limit():
    """Over 64 MiB the encoder says at which record."""
    rows = [("t", "", bytes(VALUE_BYTES_MAX))] * 7
    with pytest.raises(OverflowError) as caught:
        kernel.encode(rows)
    assert caught.value.args == (6,)


def test_buffers_of_every_kind_are_accepted():
    """bytes, bytearray, memoryview, str; also slices of them."""
    view = memoryview(bytearray(b"xvaluex"))[1:-1]
    for module in (codec, kernel):
        data = bytes(module.encode([(bytearray(b"topic"), memoryview(b"key"), view)]))
        assert data[BATCH_HEADER_BYTES:] == codec.encode_record(b"topic", b"key", b"value")


def batch_bytes(base, count, prev=0):
    """A batch of `count` records, and its header."""
    buf = codec.encode([("t", b"k%d" % n, b"v%d" % (base + n)) for n in range(count)])
    codec.fill_header(buf, salt=SALT, base=base, time=7 + base, count=count, prev=prev)
    status, header, _ = codec.parse_header(buf, 0, len(buf), SALT, prev, base)
    assert status == Status.END
    return bytes(buf), header


def test_headers_and_records_for_other_decoders():
    """parse_header and decode_batch give a decoder all it needs; its chain is checked by what came before."""
    first, header = batch_bytes(0, 3)
    second, following = batch_bytes(3, 2, prev=header.header_crc)
    data = first + second

    assert (header.end, header.chain, header.payload_pos) == (len(first), header.header_crc, 56)
    found = codec.decode_batch(data, header, 0, 1 << 62, None, True)
    assert [tuple(record) for record in found] == [
        (b"t", b"k%d" % n, b"v%d" % n, n, 7) for n in range(3)
    ]
    assert codec.decode_batch(data, header, 1, 2, {b"t"}, False) == found[1:2]
    assert codec.decode_batch(data, header, 0, 9, {b"other"}, False) == []
    status, again, _ = codec.parse_header(data, header.end, len(data), SALT, header.chain, 3)
    assert (status, again) == (Status.END, following._replace(pos=header.end))
    assert codec.parse_header(data, header.end, len(data), SALT, 1, 3)[0] == Status.CHAIN
    assert codec.parse_header(data, header.end, len(data), SALT, -1, 4)[0] == Status.CHAIN
    assert codec.parse_header(data, header.end, header.end + 20, SALT, -1, 3)[0] == Status.SHORT


def test_records_of_a_batch_that_does_not_add_up():
    """A wrong number of offsets, a control record or a wrong checksum makes all of the batch bad."""
    data, header = batch_bytes(0, 3)
    with pytest.raises(codec.BadRecordError):
        codec.decode_batch(data, header._replace(span=4), 0, 9, None, False)
    for payload in (codec.seal_record(9, 64), codec.encode_record(b"\x05", b"", b"")):
        bad = header._replace(payload_len=len(payload), span=0)
        with pytest.raises(codec.BadRecordError):
            codec.decode_batch(bytes(56) + payload, bad, 0, 9, None, False)
    broken = bytearray(data)
    broken[-1] ^= 1
    assert len(codec.decode_batch(broken, header, 0, 9, None, False)) == 3
    with pytest.raises(codec.BadRecordError):
        codec.decode_batch(broken, header, 0, 9, None, True)


def test_find_header_skips_damage():
    """The next valid header in a range of offsets is found; patterns in values and torn headers are not."""
    fake = b"\x36\x01\x04\x00\x01" * 3
    first, _ = batch_bytes(0, 1)
    second, _ = batch_bytes(5, 1)
    data = fake + first + fake + second + second[:40]

    found = codec.find_header(data, 0, SALT, 0, 100)
    assert (found.pos, found.base) == (len(fake), 0)
    found = codec.find_header(data, found.pos + 1, SALT, 0, 100)
    assert (found.pos, found.base) == (2 * len(fake) + len(first), 5)
    assert codec.find_header(data, found.pos + 1, SALT, 0, 100) is None
    assert codec.find_header(data, 0, SALT, 1, 100).base == 5
    assert codec.find_header(data, 0, SALT, 6, 100) is None
    assert codec.find_header(data, 0, SALT + 1, 0, 100) is None
