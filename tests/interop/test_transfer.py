"""Puro's files into a log and out of it again."""

from __future__ import annotations

import io

import pytest

import virta
from virta.errors import LogCorruptionError, LogFormatError, LogNotFoundError, LogWriteError
from virta.interop import transfer
from virta.interop.puro import encode, read_puro
from virta.interop.transfer import export_lines, export_puro, import_puro, write_flat

RECORDS = [(b"topic", b"key %d" % n, b"value %d" % n) for n in range(50)]


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log", durability="none") as log:
        yield log


def flat(records=RECORDS, crc="plain") -> bytes:
    return b"".join(encode(*record, crc) for record in records)


def contents(log) -> list[tuple[bytes, bytes, bytes]]:
    return [(bytes(r.topic), bytes(r.key), r.value) for r in log.read()]


def test_import_appends_in_batches(log, tmp_path):
    """Records arrive in order behind what was there; the report names their offsets."""
    (tmp_path / "in.puro").write_bytes(flat())
    log.append("before", "", b"")
    calls = []
    report = import_puro(log, tmp_path / "in.puro", batch=7, progress=lambda *a: calls.append(a))

    assert contents(log)[1:] == RECORDS
    assert (report.records, report.first_offset, report.next_offset) == (50, 1, 51)
    assert log.verify().batches == 1 + 8
    assert calls == sorted(calls)
    assert calls[-1] == (len(flat()), len(flat()))


def test_import_of_nothing(log, tmp_path):
    """An empty file adds nothing; a missing one is named in the error."""
    (tmp_path / "in.puro").touch()
    report = import_puro(log, tmp_path / "in.puro")

    assert (report.records, report.first_offset) == (0, None)
    with pytest.raises(LogNotFoundError, match=r"none\.puro"):
        import_puro(log, tmp_path / "none.puro")


def test_import_stops_at_damage(log, tmp_path):
    """Valid records before the damage are in the log; with skip, so are those after it."""
    data = bytearray(flat())
    start = len(flat(RECORDS[:20]))
    data[start + 10] ^= 0xFF
    (tmp_path / "in.puro").write_bytes(data)

    with pytest.raises(LogCorruptionError) as caught:
        import_puro(log, tmp_path / "in.puro", batch=10)
    assert caught.value.byte_from == start
    assert contents(log) == RECORDS[:20]
    with virta.open(tmp_path / "other") as other:
        report = import_puro(other, tmp_path / "in.puro", on_corruption="skip")
        assert contents(other) == RECORDS[:20] + RECORDS[21:]
    assert [r.byte_from for r in report.damaged] == [start]


def test_import_refuses_reserved_topics(log, tmp_path):
    """One-byte topics below 0x20 belong to the log; the record is named by its place."""
    (tmp_path / "in.puro").write_bytes(flat(RECORDS[:1]) + encode(b"\x09", b"", b""))

    with pytest.raises(LogFormatError, match=f"byte {len(flat(RECORDS[:1]))}"):
        import_puro(log, tmp_path / "in.puro")


@pytest.mark.parametrize("crc", ["plain", "puro"])
def test_export_is_the_flat_format(log, tmp_path, crc):
    """The file is exactly the records, encoded one after the other."""
    log.append_many(RECORDS)
    calls = []
    report = export_puro(log, tmp_path / "out.puro", crc=crc, progress=lambda *a: calls.append(a))

    assert (tmp_path / "out.puro").read_bytes() == flat(crc=crc)
    assert (report.records, report.bytes) == (50, len(flat()))
    assert calls[-1][0] == calls[-1][1]


def test_export_chooses(log, tmp_path):
    """Topics, start and end are those of Log.read."""
    log.append_many(RECORDS)
    log.append("other", "", b"x")
    export_puro(log, tmp_path / "some.puro", start=10, end=12)
    export_puro(log, tmp_path / "other.puro", topics="other")

    assert [r.value for r in read_puro(tmp_path / "some.puro")] == [b"value 10", b"value 11"]
    assert [r.value for r in read_puro(tmp_path / "other.puro")] == [b"x"]


def test_export_is_whole_or_not_there(log, tmp_path):
    """An existing file stays unless asked; a failed export leaves nothing behind."""
    log.append_many(RECORDS)
    target = tmp_path / "out.puro"
    target.write_bytes(b"mine")

    with pytest.raises(LogWriteError, match="exists already"):
        export_puro(log, target)
    assert target.read_bytes() == b"mine"
    with pytest.raises(LogWriteError, match="cannot write"):
        export_puro(log, tmp_path / "no" / "such" / "place.puro")
    export_puro(log, target, overwrite=True)
    assert target.read_bytes() == flat()
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


@pytest.mark.parametrize("crc", ["plain", "puro"])
def test_export_to_a_directory(log, tmp_path, crc):
    """Segments stay within their size, all but the last end with a tombstone, and all come back."""
    log.append_many(RECORDS)
    place = tmp_path / "stream"
    place.mkdir()
    report = export_puro(log, place, crc=crc, segment_bytes=200)

    names = sorted(place.iterdir(), key=lambda p: int(p.stem.removeprefix("stream")))
    assert [str(name) for name in names] == report.files
    tombstone = encode(b"\x00", b"", b"", crc)
    assert [name.read_bytes().endswith(tombstone) for name in names] == [True] * (
        len(names) - 1
    ) + [False]
    assert all(name.stat().st_size <= 200 for name in names)
    assert [tuple(r[:3]) for r in read_puro(place)] == RECORDS
    with virta.open(tmp_path / "again") as again:
        assert import_puro(again, place).segments == len(names)
        assert contents(again) == RECORDS


def test_export_of_an_empty_log(log, tmp_path):
    """No records: an empty file, or one empty segment."""
    (tmp_path / "stream").mkdir()

    assert export_puro(log, tmp_path / "out.puro").records == 0
    assert export_puro(log, tmp_path / "stream").records == 0
    assert (tmp_path / "out.puro").read_bytes() == b""
    assert list(read_puro(tmp_path / "stream")) == []


def test_import_limits_a_batch_by_bytes(log, tmp_path, monkeypatch):
    """A batch ends at BATCH_BYTES although fewer than `batch` records are in it."""
    monkeypatch.setattr(transfer, "BATCH_BYTES", 100)
    (tmp_path / "in.puro").write_bytes(flat())
    import_puro(log, tmp_path / "in.puro", batch=1000)

    record_bytes = len("topic") + len("key 10") + len("value 10") + 5
    assert log.verify().batches >= len(RECORDS) * record_bytes // 200
    assert contents(log) == RECORDS


def test_import_with_the_wrong_checksum_appends_nothing(log, tmp_path):
    """A checksum that was named is not guessed again: the first record is damage."""
    (tmp_path / "in.puro").write_bytes(flat(crc="puro"))

    with pytest.raises(LogCorruptionError):
        import_puro(log, tmp_path / "in.puro", crc="plain", generation="flat")
    assert contents(log) == []
    assert import_puro(log, tmp_path / "in.puro", crc="puro", generation="flat").records == 50


def test_import_of_a_stream_that_was_not_finished(log, tmp_path):
    """Segments after one without tombstone are listed, and appended only with `spurious`."""
    stream = tmp_path / "stream"
    stream.mkdir()
    (stream / "stream0.puro").write_bytes(flat(RECORDS[:10]))
    (stream / "stream1.puro").write_bytes(flat(RECORDS[10:20]))

    report = import_puro(log, stream)
    assert (report.records, len(report.spurious)) == (10, 1)
    with virta.open(tmp_path / "other") as other:
        import_puro(other, stream, spurious=True)
        assert contents(other) == RECORDS[:20]


def test_import_durability_is_passed_on(log, tmp_path):
    """`durability` is that of every append: with fsync all records are durable at the end."""
    (tmp_path / "in.puro").write_bytes(flat())
    import_puro(log, tmp_path / "in.puro", durability="fsync")

    assert log.durable_offset == log.next_offset == 50


@pytest.mark.parametrize("crc", ["plain", "puro"])
def test_write_flat_to_a_stream(log, crc):
    """A stream gets the same bytes as a file, and the number of records is returned."""
    log.append_many(RECORDS)
    stream = io.BytesIO()

    assert write_flat(stream, log.read(), crc) == 50
    assert stream.getvalue() == flat(crc=crc)


def test_export_lines_is_complete_or_does_not_exist(tmp_path):
    """Lines that cannot all be made leave neither the file nor a temporary one."""
    target = tmp_path / "out.ndjson"

    def lines(*, fail: bool):
        yield b"one\n"
        if fail:
            raise OSError(5, "broken")
        yield b"two\n"

    with pytest.raises(LogWriteError, match="cannot write"):
        export_lines(lines(fail=True), target, overwrite=False)
    assert list(tmp_path.iterdir()) == []
    report = export_lines(lines(fail=False), target, overwrite=False)
    assert (report.records, report.bytes, report.files) == (2, 8, [str(target)])
    assert target.read_bytes() == b"one\ntwo\n"


def test_export_of_a_record_larger_than_a_segment(log, tmp_path):
    """A record is never split: a segment has at least one."""
    log.append_many([("t", "", bytes(500)), ("t", "", b"small"), ("t", "", bytes(500))])
    (tmp_path / "stream").mkdir()
    report = export_puro(log, tmp_path / "stream", segment_bytes=64)

    assert len(report.files) == 3
    assert [len(r.value) for r in read_puro(tmp_path / "stream")] == [500, 5, 500]
