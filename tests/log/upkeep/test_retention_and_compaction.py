"""Upkeep of a log: retention, pins, compaction, verify, repair."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

import virta
from virta import errors
from virta.log.upkeep import compaction, retention

pytestmark = pytest.mark.usefixtures("either_kernel")


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as handle:
        yield handle


def fill(log, count, start=0, keys=10):
    for i in range(start, start + count):
        log.append("t", f"k{i % keys}", b"%d" % i + bytes(40))


def test_retention_by_bytes(log):
    """Oldest segments go until the log is small enough; the active one always stays."""
    fill(log, 300)
    before = log.segments()
    dry = log.retain(max_bytes=10_000, dry_run=True)
    assert log.segments() == before

    report = log.retain(max_bytes=10_000)

    assert report == dry
    assert 0 < log.bytes <= 10_000
    assert report.segments == len(before) - len(log.segments())
    assert report.records == report.first_offset == log.first_offset
    assert [r.offset for r in log.read()] == list(range(log.first_offset, 300))
    assert log.retain(max_bytes=0).segments > 0
    assert len(log.segments()) == 1
    assert log.append("t", "", b"") == 300
    assert len(list(log.path.glob("*.pidx"))) == 0


def test_retention_by_age(log, monkeypatch):
    """Segments whose last record is older than the limit go."""
    fill(log, 100)
    cut = log.segments()[1].next
    split = log.segments()[1].last_time
    assert log.retain(max_age=timedelta(hours=1)).segments == 0
    monkeypatch.setattr(retention, "now_us", lambda: split + 3_600_000_001)
    assert log.retain(max_age=3600).first_offset == cut


def test_retention_by_slowest_consumer(log):
    """What all consumers have read may go; keep_unread protects what one has not."""
    fill(log, 200)
    with log.consumer("fast") as fast, log.consumer("slow") as slow:
        list(fast)
        fast.commit()
        assert log.retain(consumed=True).segments == 0
        slow.seek(150)
        report = log.retain(consumed=True)
        assert 0 < report.first_offset <= 150
        assert log.retain(max_bytes=0, keep_unread=True).segments == 0
        assert log.retain(max_bytes=0).first_offset > 150


def test_pins_end_with_their_process(log):
    """A pin keeps its offset; closed or orphaned it is ignored."""
    fill(log, 200)
    with log.pin(50):
        assert log.retain(max_bytes=0).first_offset <= 50
    pin = log.path / "pins" / "orphan"
    pin.write_text('{"offset": 60}')
    assert log.retain(max_bytes=0).first_offset > 100
    assert not pin.exists()


def test_a_reader_in_mid_file_is_undisturbed(log):
    """Retention and compaction under an open reader: it finishes its file, then raises for the gap."""
    fill(log, 200)
    reader = log.read()
    next(reader)
    compacted = log.read()
    next(compacted)
    log.compact()
    assert next(compacted).offset == 1
    log.retain(max_bytes=0)
    assert next(reader).offset == 1
    with pytest.raises(errors.LogGapError):
        list(reader)


def test_compaction_keeps_the_newest_of_each_key(log):
    """Offsets and order stay; older values go; records without key stay."""
    fill(log, 300, keys=10)
    log.append("t", "", b"keyless")
    fill(log, 100, start=300, keys=10)
    sealed_end = log.segments()[-1].base

    report = log.compact()

    left = list(log.read())
    assert report.bytes_after < report.bytes_before
    assert report.records_after == len([r for r in left if r.offset < sealed_end])
    newest = {r.key: r.value for r in left}
    assert {newest[f"k{i % 10}".encode()][:3] for i in range(390, 400)} == {
        b"%d" % i for i in range(390, 400)
    }
    assert b"keyless" in [r.value for r in left]
    assert [r.offset for r in left] == sorted({r.offset for r in left})
    assert all(s.compacted for s in log.segments()[:-1])
    assert log.verify().problems == []
    assert log.compact().segments == 0
    assert log.append("t", "", b"") == 401


def test_compaction_of_keys_that_occur_once_in_a_segment(log):
    """A sealed segment supersedes earlier ones though it loses nothing itself; it is marked for readers."""
    fill(log, 600, keys=200)
    sealed = log.segments()[:-1]
    end = sealed[-1].next
    assert max(info.next - info.base for info in sealed) < 200

    report = log.compact()

    assert report.records_after == 200
    assert [r.offset for r in log.read(end=end)] == list(range(end - 200, end))
    assert log.segments()[-2].compacted
    assert log.verify().problems == []
    assert log.compact().segments == 0


def test_compaction_of_chosen_topics(log):
    """Other topics are left alone."""
    for i in range(100):
        log.append("state", "k", b"%d" % i + bytes(30))
        log.append("events", "k", b"%d" % i + bytes(30))
    log.compact(topics="state")
    sealed_end = log.segments()[-1].base
    left = [r for r in log.read() if r.offset < sealed_end]
    # The newest record of the sealed segments stays: those of the active one supersede nothing.
    assert [r.offset for r in left if r.topic == "state"] == [(sealed_end - 1) // 2 * 2]
    assert len([r for r in left if r.topic == "events"]) == sealed_end // 2


def test_an_empty_value_deletes_its_key(log, monkeypatch):
    """The older values go at once, the empty record after a day."""
    fill(log, 30, keys=3)
    log.append("t", "k1", b"")
    fill(log, 100, start=200, keys=1)
    log.compact()
    left = [r for r in log.read() if r.key == "k1"]
    assert [r.value for r in left] == [b""]
    monkeypatch.setattr(compaction, "TOMBSTONE_AGE_S", -1.0)
    log.compact()
    assert not [r for r in log.read() if r.key == "k1"]


def test_idempotence_survives_compaction(log):
    """A producer's last batch may be compacted away: its sequence is still known."""
    log.append_many([("t", "k", b"v")], producer=(9, 4))
    fill(log, 200, keys=1)
    for i in range(3):
        log.append("t", "k", b"%d" % i)
    fill(log, 100, keys=1)
    log.compact()
    path = log.path
    log.close()
    with virta.open(path) as again:
        assert again.append_many([("t", "k", b"v")], producer=(9, 4)).duplicate


def test_verify_reports_and_repair_fixes(log):
    """A damaged batch in the middle: reported with file and range, set aside, then an explicit gap."""
    fill(log, 150)
    victim = log.segments()[1]
    with open(victim.path, "r+b") as file:
        file.seek(200)
        byte = file.read(1)
        file.seek(200)
        file.write(bytes([byte[0] ^ 0x10]))

    (problem,) = log.verify().problems
    assert problem.segment == victim.path
    assert problem.byte_from <= 200 < problem.byte_to
    with pytest.raises(errors.LogCorruptionError, match="are damaged") as caught:
        list(log.read())
    assert caught.value.segment == victim.path
    assert (caught.value.offset_from, caught.value.offset_to) == (
        problem.offset_from,
        problem.offset_to,
    )
    lost = problem.offset_to - problem.offset_from
    reader = log.read(on_corruption="skip")
    assert len(list(reader)) == 150 - lost
    assert reader.problems == [problem]

    report = log.repair()

    assert report.offsets_lost == lost
    assert len(report.quarantined) == 1
    assert os.path.getsize(report.quarantined[0]) == problem.byte_to - problem.byte_from
    assert log.verify().problems == []
    with pytest.raises(errors.LogGapError) as gap:
        list(log.read())
    assert (gap.value.first, gap.value.next) == (problem.offset_from, problem.offset_to)
    assert len(list(log.read(on_gap="skip"))) == 150 - lost
    # As the error says: reading from the end of the gap works, wherever in the segment that is.
    for start in (gap.value.next, gap.value.next + 1, 149):
        assert [r.offset for r in log.read(start=start)] == list(range(start, 150))
    with pytest.raises(errors.LogGapError):
        list(log.read(start=gap.value.next - 1))
    assert log.append("t", "", b"") == 150


@pytest.mark.parametrize("field", [0, 5, 9, 20, 30, 41, 45, 50, 57, 61])
def test_a_damaged_segment_header_is_rebuilt(log, field):
    """Every byte of a header is known from elsewhere, the salt from the first batch's checksum."""
    fill(log, 150)
    victim = log.segments()[1]
    with open(victim.path, "r+b") as file:
        data = bytearray(file.read(64))
        data[field] ^= 0x08
        file.seek(0)
        file.write(data)

    assert next(p.segment for p in log.verify().problems) == victim.path
    with pytest.raises((errors.LogCorruptionError, errors.LogFormatError)):
        list(log.read())
    log.repair()

    assert log.verify().problems == []
    assert [r.offset for r in log.read()] == list(range(150))


def test_progress_is_reported(log):
    """Long work reports how far it is."""
    fill(log, 100)
    seen = []
    log.verify(progress=lambda done, total: seen.append((done, total)))
    log.compact(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert all(0 <= done <= total for done, total in seen)
