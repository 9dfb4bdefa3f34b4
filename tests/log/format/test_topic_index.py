"""The topic index: a reader with topics gets exactly what a filter over a full read gives, however the log was made."""

from __future__ import annotations

import os
import random
import shutil
import struct
from datetime import timedelta
from pathlib import Path

import pytest

import virta
from virta import errors
from virta.log.engine import kernel
from virta.log.format import topic_index, topic_lookup, topic_table
from virta.log.format.directory import segment_bases, topic_index_name
from virta.log.format.segment import Segment
from virta.log.format.topic_index import TopicIndex, TopicIndexError, build_topic_index
from virta.log.format.topic_table import REPAIRS

TOPICS = [b"t%d" % n for n in range(40)]


@pytest.fixture(autouse=True)
def sparse(monkeypatch):
    """Small segments use the index too: no run is merged, and no topic counts as dense."""
    monkeypatch.setattr(topic_lookup, "TOPIC_RUN_GAP_BYTES", 0)
    monkeypatch.setattr(topic_lookup, "TOPIC_DENSE_BYTES", 1)
    monkeypatch.setattr(topic_lookup, "ACTIVE_TABLE_BYTES_MIN", 0)


def fill(log, rng, batches, topics=TOPICS):
    for _ in range(batches):
        count = rng.choice((1, 1, 2, 7))
        log.append_many(
            [
                (rng.choice(topics), b"k%d" % rng.randrange(9), rng.randbytes(rng.randrange(40)))
                for _ in range(count)
            ],
            durability="none",
        )


def make(path, seed=1, batches=300, segment_bytes=4096):
    log = virta.open(path, segment_bytes=segment_bytes, durability="none")
    fill(log, random.Random(seed), batches)
    return log


def bytes_read():
    """Return how many bytes this process has read so far."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def filtered(log, topics, **options):
    wanted = {t if isinstance(t, bytes) else t.encode() for t in topics}
    return [r for r in log.read(**options) if bytes(r.topic) in wanted]


@pytest.mark.parametrize("seed", range(5))
def test_reading_topics_is_filtering_a_full_read(tmp_path, seed):
    """Random logs, with appends, retention, compaction, damage and repair between the reads."""
    rng = random.Random(seed)
    path = tmp_path / "log"
    with make(path, seed) as log:
        for step in range(8):
            action = rng.choice(("append", "retain", "compact", "reopen", "repair", "unlink"))
            if action == "append":
                fill(log, rng, rng.randrange(80))
            elif action == "retain":
                log.retain(max_bytes=int(log.bytes * 0.8))
            elif action == "compact":
                log.compact(topics=rng.sample(TOPICS, 10))
            elif action == "unlink":
                for file in rng.sample(
                    list(path.glob("*.ptix")), k=len(list(path.glob("*.ptix"))) // 2
                ):
                    file.unlink()
            elif action == "repair" and len(segment_bases(path)) > 2:
                damage(path, rng)
                log.repair()
            other = virta.open(path, read_only=rng.random() < 0.5) if action == "reopen" else log
            for _ in range(4):
                topics = rng.sample([*TOPICS, b"absent"], rng.choice((1, 1, 2, 5)))
                start = rng.choice(
                    ("earliest", rng.randrange(log.first_offset, log.next_offset + 1))
                )
                end = rng.choice((None, rng.randrange(log.next_offset + 1)))
                options = {"start": start, "end": end, "on_gap": "skip"}
                expected = filtered(log, topics, **options)

                assert list(other.read(topics, **options)) == expected, (seed, step, action)
            if other is not log:
                other.close()


def damage(path, rng):
    """Flip a byte in the data of a sealed segment."""
    base = rng.choice(segment_bases(path)[:-1])
    with Segment(path, base) as segment, open(segment.path, "r+b") as file:
        at = rng.randrange(64, segment.size - 80)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_a_rare_topic_is_read_without_the_rest(tmp_path):
    """Ten records of one topic among thousands: the reader reads only their batches."""
    path = tmp_path / "log"
    with virta.open(path, segment_bytes=256 * 1024, durability="none") as log:
        for n in range(6000):
            log.append("rare" if n % 600 == 5 else f"t{n % 50}", "", b"%d" % n + bytes(200))
        expected = filtered(log, ["rare"])
        list(log.read(["rare"]))
        list(log.read(["rare"]))  # fills the table of the active segment
        before = bytes_read()
        found = list(log.read(["rare"]))
        read, total = bytes_read() - before, log.bytes

    assert found == expected
    assert len(found) == 10
    assert read < total / 8


def test_segments_without_the_topic_are_not_opened(tmp_path, monkeypatch):
    """A segment that the index excludes is skipped by a stat of its file alone."""
    with make(tmp_path / "log") as log:
        list(log.read(["absent"]))
        opened = []
        real = Segment.__init__
        monkeypatch.setattr(
            Segment, "__init__", lambda self, d, base: (opened.append(base), real(self, d, base))[1]
        )

        assert list(log.read(["absent"])) == []
        assert opened == [segment_bases(log.path)[-1]]


def test_every_flipped_byte_of_an_index_is_found(tmp_path):
    """A damaged index is ignored: all topics are read in order instead."""
    path = tmp_path / "log"
    with make(path, batches=60) as log:
        file = path / topic_index_name(0)
        good = file.read_bytes()
        topics = [[t] for t in TOPICS[:3]]
        expected = [filtered(log, t) for t in topics]
    rng = random.Random(3)
    for at in {*range(80), *(rng.randrange(len(good)) for _ in range(300))}:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        with virta.open(path, read_only=True) as log:
            assert [list(log.read(t)) for t in topics] == expected, at


@pytest.mark.parametrize("cut", [0, 10, 64, 100, -1])
def test_a_truncated_index_is_ignored(tmp_path, cut):
    """Nothing is missing from the answer when the index file is cut."""
    path = tmp_path / "log"
    with make(path, batches=60) as log:
        expected = filtered(log, TOPICS[:2])
        file = path / topic_index_name(0)
        file.write_bytes(file.read_bytes()[:cut])
        with virta.open(path, read_only=True) as other:
            assert list(other.read(TOPICS[:2])) == expected


def found_by(find, fd, arguments, topic):
    """Return the places, or that the index is damaged."""
    try:
        return find(fd, *arguments, topic)
    except ValueError:
        return "damaged"


def test_both_lookups_agree_on_good_and_damaged_indexes(tmp_path):
    """The native lookup and the plain one return the same places, and find the same damage."""
    if not kernel.NATIVE:
        pytest.skip("the native kernel is not built")
    path = tmp_path / "log"
    rng = random.Random(5)
    with make(path, batches=60), Segment(path, 0) as segment:
        good = (path / topic_index_name(0)).read_bytes()
        head = struct.unpack_from("<8sQIIQQIIIQ", good)
        arguments = (len(good), segment.header.salt, head[7])
    topics = [*TOPICS, b"absent", REPAIRS, b""]
    broken = 0
    for round_number in range(400):
        bad = bytearray(good)
        if round_number:
            bad[rng.randrange(64, len(bad))] ^= 1 << rng.randrange(8)
        if round_number % 5 == 4:
            del bad[rng.randrange(64, len(bad)) :]
        (tmp_path / "index").write_bytes(bad)
        with open(tmp_path / "index", "rb") as file:
            for topic in rng.sample(topics, 6) if round_number else topics:
                native = found_by(kernel.find_places, file.fileno(), arguments, topic)
                plain = found_by(topic_table.find_places, file.fileno(), arguments, topic)
                assert native == plain, (round_number, topic)
                broken += native == "damaged"
    assert broken > 10


def test_an_index_of_another_generation_is_ignored(tmp_path):
    """The salt and the size of the segment must fit."""
    path = tmp_path / "log"
    with make(path) as log, Segment(path, 0) as segment:
        salt, size = segment.header.salt, segment.size
        TopicIndex(path, 0, salt, size).close()
        for wrong in ((salt ^ 1, size), (salt, size + 1)):
            with pytest.raises(TopicIndexError):
                TopicIndex(path, 0, *wrong)
        second = segment_bases(path)[1]
        shutil.copy(path / topic_index_name(second), path / topic_index_name(0))

        assert list(log.read(TOPICS[:4])) == filtered(log, TOPICS[:4])


def test_missing_indexes_are_written_when_a_log_is_opened(tmp_path):
    """A log without topic indexes, as an older version leaves it, gets them; they are what sealing writes."""
    path = tmp_path / "log"
    make(path).close()
    written = {file.name: file.read_bytes() for file in path.glob("*.ptix")}
    for file in path.glob("*.ptix"):
        file.unlink()
    (path / ".00000000000000000000.ptix.1.tmp").write_bytes(b"of a killed process")
    virta.open(path).close()

    assert {file.name: file.read_bytes() for file in path.glob("*.ptix")} == written
    assert len(written) == len(segment_bases(path)) - 1
    assert list(path.glob(".*tmp")) == []


def test_large_segments_are_indexed_by_a_thread(tmp_path, monkeypatch):
    """Above the inline limit an append does not wait for the index; closing does."""
    monkeypatch.setattr("virta.log.engine.indexer.TOPIC_INDEX_INLINE_BYTES", 0)
    path = tmp_path / "log"
    with make(path) as log:
        expected = filtered(log, TOPICS[:2])
    with virta.open(path) as log:
        pass  # the thread of this handle writes what is left

    assert len(list(path.glob("*.ptix"))) >= 1
    with virta.open(path, read_only=True) as log:
        assert list(log.read(TOPICS[:2])) == expected


def test_counts_of_an_index(tmp_path):
    """Each row has what counting the segment's records gives."""
    path = tmp_path / "log"
    with make(path) as log, Segment(path, 0) as segment:
        index = TopicIndex(path, 0, segment.header.salt, segment.size)
        rows = {row.topic: row for row in index.counts()}
        records = list(log.read(end=segment_bases(path)[1]))
    assert index.topics == len(rows) == len({r.topic for r in records})
    for topic, row in rows.items():
        own = [r for r in records if r.topic == topic]
        assert row[1:-1] == (
            len(own),
            sum(len(r.key) + len(r.value) for r in own),
            own[0].offset,
            own[-1].offset,
            own[0].timestamp,
            own[-1].timestamp,
        )


def test_lost_offsets_are_reported_to_readers_of_every_topic(tmp_path):
    """The topics of lost records are unknown after a repair: readers of all topics get the gap."""
    path = tmp_path / "log"
    with make(path) as log:
        damage(path, random.Random(1))
        lost = log.repair()
        assert lost.offsets_lost
        base = int(Path(lost.problems[0].segment).stem)
        with Segment(path, base) as segment:
            index = TopicIndex(path, base, segment.header.salt, segment.size)
        assert index.repairs == 1
        assert index.find(REPAIRS) != b""
        with pytest.raises(errors.LogGapError):
            list(log.read(["absent"]))
        assert list(log.read(["absent"], on_gap="skip")) == []


def test_damage_of_other_topics_does_not_stop_a_reader(tmp_path):
    """A damaged batch that has no record of the topic is not read; one that has is reported."""
    path = tmp_path / "log"
    with virta.open(path, segment_bytes=4096, durability="none") as log:
        for n in range(100):
            log.append("a" if n % 2 else "b", "", b"%d" % n + bytes(60))
        rows = list(log.read(["a"]))
        with open(path / "00000000000000000000.puro", "r+b") as file:
            content = file.read()
            file.seek(content.index(b"12\0"))
            file.write(b"!")

        assert list(log.read(["a"])) == rows
        with pytest.raises(errors.LogCorruptionError) as caught:
            list(log.read(["b"]))
        assert caught.value.offset_from == 12
        skipped = list(log.read(["b"], on_corruption="skip"))
        assert [r.offset for r in skipped] == [n for n in range(0, 100, 2) if n != 12]


def test_too_many_topics_are_not_indexed(tmp_path, monkeypatch):
    """A segment over the limit gets an empty index once, and is read in order."""
    monkeypatch.setattr(topic_index, "TOPIC_INDEX_TOPICS_MAX", 5)
    path = tmp_path / "log"
    with make(path) as log:
        assert (path / topic_index_name(0)).stat().st_size == 64 + 4
        assert list(log.read(TOPICS[:2])) == filtered(log, TOPICS[:2])


def test_the_active_segment_is_looked_up_from_the_second_reader_on(tmp_path):
    """The first reader of topics reads it in order, later ones only what they need and what is new."""
    with virta.open(tmp_path / "log", durability="none") as log:
        for n in range(20_000):
            log.append("rare" if n % 5000 == 7 else f"t{n % 50}", "", b"%d" % n + bytes(200))
        first, second = list(log.read(["rare"])), list(log.read(["rare"]))
        before = bytes_read()
        third = list(log.read(["rare"]))
        read, total = bytes_read() - before, log.bytes
        log.append("rare", "", b"new")
        fourth = list(log.read(["rare"]))

    assert first == second == third == fourth[:-1]
    assert fourth[-1].value == b"new"
    assert read < total / 8


def test_following_continues_after_the_indexed_part(tmp_path):
    """A follower of a topic reads sealed segments by index, then the active one, then what arrives."""
    with make(tmp_path / "log") as log:
        reader = log.read(TOPICS[:1], follow=True, timeout=0.2)
        history = filtered(log, TOPICS[:1])
        found = [next(reader) for _ in history]
        log.append(TOPICS[0], "", b"new")
        found.append(next(reader))

        assert [r.offset for r in found] == [*(r.offset for r in history), log.next_offset - 1]


def test_compaction_and_retention_replace_and_remove_indexes(tmp_path):
    """After upkeep every sealed segment has an index that fits, and no other index is left."""
    path = tmp_path / "log"
    with make(path) as log:
        log.compact()
        log.retain(max_bytes=log.bytes // 2, max_age=timedelta(days=1))
        sealed = segment_bases(path)[:-1]
        for base in sealed:
            with Segment(path, base) as segment:
                data = build_topic_index(segment)
            assert (path / topic_index_name(base)).read_bytes() == data

        assert sorted(path.glob("*.ptix")) == [path / topic_index_name(base) for base in sealed]
        assert os.path.exists(path / topic_index_name(sealed[0]))
