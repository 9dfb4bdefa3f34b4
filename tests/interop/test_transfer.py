"""Puro's files into a log and out of it again."""

from __future__ import annotations

import pytest

import virta
from virta.errors import LogCorruptionError, LogFormatError, LogNotFoundError, LogWriteError
from virta.interop.puro import encode, read_puro
from virta.interop.transfer import export_puro, import_puro

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
    """An empty file adds nothing; a missing one is told by name."""
    (tmp_path / "in.puro").touch()
    report = import_puro(log, tmp_path / "in.puro")

    assert (report.records, report.first_offset) == (0, None)
    with pytest.raises(LogNotFoundError, match=r"none\.puro"):
        import_puro(log, tmp_path / "none.puro")


def test_import_stops_at_damage(log, tmp_path):
    """What was whole before the damage is in the log; skipping takes what is whole behind it too."""
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
