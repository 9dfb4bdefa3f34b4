"""Puro's formats: the reference segments, every kind of damage, and the way into and out of a log."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virta.errors import LogCorruptionError, LogNotFoundError
from virta.interop.puro import PuroReport, PuroSegment, crc_puro, encode, read_puro
from virta.log.format.codec import decode_varlong, encode_varlong

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("VIRTA_SHARED", ROOT.parent / "shared"))
VECTORS = SHARED / "vectors" / "puro-reference-segments.json"
CRCS = ("plain", "puro")
RECORDS = [
    (b"topic", b"key", b"value"),
    (b"", b"", b""),
    (b"t" * 1024, b"k" * 1024, b"v" * 20_000),
    (b"t", b"", b"x"),
]


def flat(records=RECORDS, crc="plain") -> bytes:
    return b"".join(encode(*record, crc) for record in records)


def block(records, kind="block10", crc="puro", signal=1, *, length=None) -> bytes:
    """One block, built independently of the reader."""
    body = flat(records, crc)
    size = len(body) + (10 if kind == "block10" else 6) if length is None else length
    value = bytes([signal]) + (size.to_bytes(4, "big") if kind == "block10" else b"")
    return (
        encode(b"\x02", b"", value, crc) + body + encode(b"\x03", b"", size.to_bytes(4, "big"), crc)
    )


TOMBSTONE = {crc: encode(b"\x00", b"", b"", crc) for crc in CRCS}


def load(tmp_path, data: bytes, report=None, **options) -> list[tuple[bytes, bytes, bytes]]:
    path = tmp_path / "x.puro"
    path.write_bytes(data)
    return [(r.topic, r.key, r.value) for r in read_puro(path, report=report, **options)]


def damage(tmp_path, data: bytes, **options) -> LogCorruptionError:
    with pytest.raises(LogCorruptionError) as caught:
        load(tmp_path, data, **options)
    assert caught.value.segment == str(tmp_path / "x.puro")
    return caught.value


# The reference.


@pytest.fixture(scope="module")
def reference():
    if not VECTORS.exists():
        pytest.skip(f"reference vectors are not here: {VECTORS}")
    return json.loads(VECTORS.read_text())


def test_reference_varlongs(reference):
    """Every line of the VLQ table encodes and decodes as recorded."""
    for line in reference["vlq"]:
        written = bytes.fromhex(line["hex"])
        assert encode_varlong(line["n"]) == written
        assert decode_varlong(written, 0) == (line["n"], len(written))


def test_reference_single_records(reference):
    """Single records have the recorded bytes, with the repository's CRC and with the plain one."""
    checked = 0
    for line in reference["single_records"]:
        if line["value_hex"] is None:
            continue
        fields = [bytes.fromhex(line[f"{name}_hex"]) for name in ("topic", "key", "value")]
        assert encode(*fields, "puro").hex() == line["record_hex_repo_crc"]
        assert encode(*fields, "plain")[0] == int(line["crc_plain_std_table"], 16)
        checked += 1
    assert checked >= 5


def test_reference_segments(reference, tmp_path):
    """All six segments decode to exactly the recorded visible records, with generation and CRC detected."""
    assert len(reference["segments"]) == 6
    for segment in reference["segments"]:
        data = base64.b64decode(segment["segment_base64"])
        path = tmp_path / "reference.puro"
        path.write_bytes(data)
        report = PuroReport()
        found = list(read_puro(path, report=report))

        assert [r.position for r in found] == segment["visible_record_offsets"]
        recorded = {r["offset"]: r for r in segment["records"]}
        for record in found:
            expected = recorded[record.position]
            assert record.topic.decode() == expected["topic"]
            assert record.key.decode() == expected["key"]
            assert hashlib.sha256(record.value).hexdigest() == expected["value_sha256"]
        old = segment["blocks"][0]["format"].startswith("6")
        assert (report.generation, report.crc) == ("block6" if old else "block10", "puro")
        hidden = [(b["start"], b["end"]) for b in segment["blocks"] if not b["visible"]]
        assert [(r.byte_from, r.byte_to) for r in report.incomplete] == hidden
        assert report.damaged == []


def test_reference_two_blocks(reference, tmp_path):
    """The synthetic two-block segment is what our own block builder makes, and is read back."""
    data = bytes.fromhex(reference["synthetic_two_block_segment_hex"])
    found = load(tmp_path, data)

    cut = int.from_bytes(data[6:10], "big") + 9
    assert block(found[:1]) + block(found[1:]) == data or cut < len(data)
    assert data.startswith(block(found[: len(load(tmp_path, data[:cut]))]))


# What we can say without the reference.


def test_examples_of_the_format():
    """The example records of the format's description, by both checksums."""
    record = (b"testtopic", bytes.fromhex("badf000d"), bytes.fromhex("deadbeef"))

    assert encode(*record, "puro").hex() == "db130974657374746f70696304badf000ddeadbeef"
    assert encode(*record, "plain")[0] == 0x83
    assert encode(b"", b"", b"", "puro").hex() == "ae020000"
    assert encode(b"\x00", b"", b"", "puro").hex() == "ae03010000"
    assert crc_puro([bytes.fromhex(h) for h in ("08", "01", "02", "00", "", "0100000023")]) == 0xBC


@pytest.mark.parametrize("crc", CRCS)
def test_flat_round_trip(tmp_path, crc):
    """Flat files are read whole, with the CRC found out, and limits are inclusive."""
    report = PuroReport()

    assert load(tmp_path, flat(crc=crc), report) == RECORDS
    assert (report.generation, report.crc, report.records) == ("flat", crc, len(RECORDS))
    assert load(tmp_path, b"") == []


@given(
    records=st.lists(st.tuples(*[st.binary(min_size=2, max_size=200)] * 3), max_size=8),
    crc=st.sampled_from(CRCS),
    kind=st.sampled_from(["flat", "block6", "block10"]),
)
@settings(max_examples=60, deadline=None)
def test_any_records_round_trip(tmp_path_factory, records, crc, kind):
    """Any records survive every generation under either CRC."""
    data = (
        flat(records, crc)
        if kind == "flat"
        else block(records, kind, crc) + block(records, kind, crc)
    )
    expected = records if kind == "flat" else records * 2

    assert load(tmp_path_factory.mktemp("any"), data, generation=kind, crc=crc) == expected


@pytest.mark.parametrize("crc", CRCS)
@pytest.mark.parametrize("kind", ["block6", "block10"])
def test_incomplete_blocks_are_not_delivered(tmp_path, kind, crc):
    """A low signal hides a block, whether it is finished, torn or followed by a good one."""
    first, second = RECORDS[:1], RECORDS[1:]
    good, low = block(first, kind, crc), block(second, kind, crc, signal=0)

    for tail, end in (
        (low, len(good + low)),
        (low[:-30], len(good + low) - 30),
        (low[:12], len(good) + 12),
    ):
        report = PuroReport()
        assert load(tmp_path, good + tail, report, crc=crc) == first
        assert [(r.byte_from, r.byte_to) for r in report.incomplete] == [(len(good), end)]
    report = PuroReport()
    assert load(tmp_path, low + good, report) == first
    assert [(r.byte_from, r.byte_to) for r in report.incomplete] == [(0, len(low))]


def test_interrupted_commit_is_not_delivered(tmp_path):
    """Between the second and third write of a commit the CRC is already that of the high signal."""
    low, high = block(RECORDS, signal=0), block(RECORDS)

    assert load(tmp_path, high[:1] + low[1:]) == []


def test_stale_crc_of_a_block_start_is_accepted(tmp_path):
    """Puro's own files have wrong CRCs on start records; nothing else may have one."""
    data = bytearray(block(RECORDS))
    data[0] ^= 0xFF

    assert load(tmp_path, bytes(data)) == RECORDS


@pytest.mark.parametrize("crc", CRCS)
def test_every_truncation_of_a_flat_file(tmp_path, crc):
    """Cut anywhere, the whole records before the cut are given and the torn one is reported."""
    records = [(b"ab", b"c", b"d" * 150), (b"ef", b"", b""), (b"gh", b"i", b"j")]
    ends = [len(flat(records[:n], crc)) for n in range(4)]
    for cut in range(ends[-1]):
        report = PuroReport()
        whole = max(n for n, end in enumerate(ends) if end <= cut)
        found = load(tmp_path, flat(records, crc)[:cut], report, crc=crc, on_corruption="skip")
        assert found == records[:whole]
        expected = [] if cut in ends else [(ends[whole], cut, "short")]
        assert [tuple(r[1:]) for r in report.damaged] == expected


@pytest.mark.parametrize("kind", ["flat", "block6", "block10"])
def test_every_flipped_bit_of_a_plain_file(tmp_path, kind):
    """With the plain CRC every single-bit flip is noticed; no wrong record is ever delivered."""
    records = [(b"ab", b"c", b"d" * 20), (b"ef", b"", b"xyz")]
    data = flat(records) if kind == "flat" else block(records, kind, "plain")
    start = 0 if kind == "flat" else (6 if kind == "block6" else 10)
    for bit in range(start * 8, len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        report = PuroReport()
        found = load(
            tmp_path, bytes(flipped), report, crc="plain", generation=kind, on_corruption="skip"
        )
        assert report.damaged, bit
        assert set(found) <= set(records), bit
        assert any(r.byte_from <= bit // 8 < r.byte_to for r in report.damaged), bit


def test_damaged_block_is_lost_whole_and_the_next_is_read(tmp_path):
    """A bad record costs its block, named by its range; with skip, reading continues after it."""
    first, second = block(RECORDS[:2]), block(RECORDS[2:])
    data = bytearray(first + second)
    data[15] ^= 1
    error = damage(tmp_path, bytes(data))

    assert (error.byte_from, error.byte_to, error.reason) == (0, len(first), "bad-record")
    assert "byte 10" in error.message
    assert load(tmp_path, bytes(data), on_corruption="skip") == RECORDS[2:]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(100), "zero"),
        (flat() + bytes(100), "zero"),
        (b"\x00" + encode_varlong(10_487_813) + bytes(200), "bad-record"),
        (b"\x00\xff\xff\xff\xff\xff", "bad-record"),
        (b"\x00\x05\x09\x00\x00\x00\x00", "bad-record"),
        (encode(b"t" * 1025, b"", b""), "bad-record"),
        (encode(b"", b"k" * 1025, b""), "bad-record"),
        (encode(b"", b"", b"v" * (10 * 1024 * 1024 + 1)), "bad-record"),
        (block(RECORDS)[:-3], "short"),
        (block(RECORDS, "block6")[:-3], "short"),
        (block(RECORDS, length=9999), "bad-record"),
        (block(RECORDS, "block6", length=9999), "chain"),
        (block(RECORDS) + b"\x00" * 40, "zero"),
        (block(RECORDS) + flat(crc="puro"), "bad-header"),
        (block(RECORDS, signal=2), "bad-header"),
        (block([(b"\x02", b"", b"\x01")]), "chain"),
        (flat() + TOMBSTONE["plain"] + b"x", "chain"),
    ],
)  # fmt: skip
def test_damage_is_raised_with_its_reason(tmp_path, data, reason):
    """Torn, overlong, zeroed and contradictory files are refused with byte range and reason."""
    error = damage(tmp_path, data)

    assert error.reason == reason
    assert 0 <= error.byte_from < error.byte_to <= len(data)


@given(
    kind=st.sampled_from(["flat", "block6", "block10"]),
    crc=st.sampled_from(CRCS),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 400),
    tail=st.binary(max_size=40),
)
@settings(max_examples=150, deadline=None)
def test_garbage_never_crashes(tmp_path_factory, kind, crc, changes, cut, tail):
    """Whatever happened to a file, reading ends: with records and a list of damage, or one clear error."""
    records = [(b"ab", b"c", b"d" * 60), (b"ef", b"", b"xyz")]
    data = bytearray(flat(records, crc) if kind == "flat" else block(records, kind, crc) * 2)
    for position, byte in changes:
        data[position % len(data)] = byte
    data = bytes(data[: cut or None]) + tail
    place = tmp_path_factory.mktemp("fuzz")
    report = PuroReport()
    found = load(place, data, report, on_corruption="skip")

    assert report.records == len(found)
    assert all(
        0 <= r.byte_from < r.byte_to <= len(data) for r in report.damaged + report.incomplete
    )
    if report.damaged:
        damage(place, data)


def test_largest_record_is_read(tmp_path):
    """Topic, key and value exactly at their limits are legal."""
    record = (b"t" * 1024, b"k" * 1024, b"v" * 10 * 1024 * 1024)

    assert load(tmp_path, encode(*record)) == [record]


# Directories.


def directory(tmp_path, **segments: bytes) -> Path:
    for name, data in segments.items():
        (tmp_path / f"{name}.puro").write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("crc", CRCS)
def test_directory_is_read_in_order(tmp_path, crc):
    """Segments follow each other by number, not by name; generations may change between them."""
    numbers = range(12)
    parts = {f"stream{n}": flat([(b"top", b"", b"%d" % n)], crc) + TOMBSTONE[crc] for n in numbers}
    parts["stream5"] = block([(b"top", b"", b"5")], crc=crc) + TOMBSTONE[crc]
    place = directory(tmp_path, **parts, stream012=b"padded: not a segment", other=b"?")
    report = PuroReport()

    assert [int(r.value) for r in read_puro(place, report=report)] == list(numbers)
    assert report.segments == 12


def test_segment_without_tombstone_ends_the_stream(tmp_path):
    """What follows a segment without tombstone is spurious: listed, and read only on demand."""
    place = directory(tmp_path, stream0=flat(RECORDS[:1]), stream1=flat(RECORDS[1:]))
    report = PuroReport()

    assert len(list(read_puro(place, report=report))) == 1
    assert report.spurious == [str(place / "stream1.puro")]
    assert len(list(read_puro(place, spurious=True))) == len(RECORDS)


def test_missing_segment_is_damage(tmp_path):
    """A hole in the numbering is reported by the name of the file that is not there."""
    place = directory(tmp_path, stream0=flat() + TOMBSTONE["plain"], stream2=flat())
    with pytest.raises(LogCorruptionError) as caught:
        list(read_puro(place))

    assert (caught.value.reason, caught.value.segment) == ("missing", str(place / "stream1.puro"))
    assert len(list(read_puro(place, on_corruption="skip"))) == 2 * len(RECORDS)


def test_nothing_there(tmp_path):
    """A missing file and an empty directory are named in the error."""
    for path in (tmp_path / "no.puro", tmp_path):
        with pytest.raises(LogNotFoundError, match=str(path)):
            list(read_puro(path))
    with pytest.raises(LogNotFoundError):
        PuroSegment(tmp_path / "no.puro")
