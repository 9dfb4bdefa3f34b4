"""Finding events in the log by source and id: the oldest, at a bounded cost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import virta
from virta.hub.resume import id_index
from virta.hub.resume.id_index import IdIndex, IdSearchResult

ALL = [("s", "x"), ("s", "y")]


def value(id_, source="s", pad=""):
    return b'{"source":"%b","id":"%b","pad":"%b"}' % (
        source.encode(),
        str(id_).encode(),
        pad.encode(),
    )


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log", segment_bytes=16_384, visibility="committed") as made:
        yield made


def append(log, channel, *ids, **options):
    log.append_many([(channel, b"", value(id_, **options)) for id_ in ids], durability="none")


def test_the_oldest_of_several(log):
    """Of events with one id the first counts; other channels and sources are others."""
    append(log, "other", "x")
    append(log, "c", "x", source="t")
    append(log, "c", "a", "x", "b", "x")
    index = IdIndex(log)

    assert index.find("c", [("s", "x")], log.next_offset) == IdSearchResult(3, 0)
    assert index.find("c", [("s", "nobody")], log.next_offset) == IdSearchResult(None, 0)
    append(log, "c", "new", "x")
    assert index.find("c", [("s", "new")], log.next_offset) == IdSearchResult(6, 0)
    assert index.find("c", [("s", "new"), ("s", "x")], log.next_offset) == IdSearchResult(3, 0)
    # What came after the consumer asked is none of its past.
    assert index.find("c", [("s", "new")], 6) == IdSearchResult(None, 0)


def test_records_that_are_no_events(log):
    """They are found by the id under which consumers get them; reserved topics are not."""
    log.append("c", b"", b"plain", durability="none")
    log.append("$virta/streams", b"", value("x"), durability="none")
    log.append("$virta/dead-letters", b"", value("x"), durability="none")
    index = IdIndex(log)

    assert index.find("c", [("/log/c", "0")], 3) == IdSearchResult(0, 0)
    assert index.find("$virta/streams", [("s", "x")], 3) == IdSearchResult(None, 0)
    assert index.find("$virta/dead-letters", [("s", "x")], 3) == IdSearchResult(2, 0)


def test_unknown_ids_read_nothing_twice(log):
    """However many unknown ids are asked for, each byte of the log is read once."""
    append(log, "c", *range(3000))
    index = IdIndex(log)
    size = sum(len(record.value) for record in log.read())

    for n in range(500):
        assert index.find("c", [("s", f"unknown-{n}")], log.next_offset).offset is None
    assert index.bytes_read == size
    append(log, "c", "one more")
    assert index.find("c", [("s", "unknown")], log.next_offset).offset is None
    assert index.bytes_read == size + len(value("one more"))


def test_a_search_that_is_cut_says_so_and_the_next_goes_on(log, monkeypatch):
    """One search reads so much and no more, newest first; later ones complete it."""
    monkeypatch.setattr(id_index, "SEARCH_RECORDS_MAX", 1000)
    monkeypatch.setattr(id_index, "PART_BYTES", 4096)
    append(log, "c", "x", *range(3000), "x", "y")
    index = IdIndex(log)
    end = log.next_offset

    first = index.find("c", [("s", "x")], end)
    assert first.offset == 3001
    assert 1500 < first.searched_from < 2100
    while (found := index.find("c", [("s", "x")], end)).searched_from:
        assert found.searched_from < first.searched_from
        first = found
    assert found == IdSearchResult(0, 0)


def test_bytes_are_a_limit_too(log, monkeypatch):
    """A log of few large events is not read as a whole either."""
    monkeypatch.setattr(id_index, "SEARCH_BYTES_MAX", 100_000)
    monkeypatch.setattr(id_index, "PART_BYTES", 4096)
    append(log, "c", *range(100), pad="x" * 5000)
    index = IdIndex(log)

    found = index.find("c", [("s", "99")], log.next_offset)

    assert found.offset == 99
    assert 50 < found.searched_from < 95
    assert 100_000 <= index.bytes_read < 150_000


def test_the_index_is_bounded_and_prefers_the_newest(log, monkeypatch):
    """When it is full, older records make room for newer ones."""
    monkeypatch.setattr(id_index, "INDEX_RECORDS_MAX", 1000)
    monkeypatch.setattr(id_index, "BLOCK_RECORDS_MIN", 100)
    monkeypatch.setattr(id_index, "PART_BYTES", 4096)
    index = IdIndex(log)
    for turn in range(20):
        append(log, "c", *[f"{turn}-{n}" for n in range(200)])
        end = log.next_offset
        assert index.find("c", [("s", f"{turn}-0")], end).offset == end - 200
        assert index._records <= 1000 + 200
    found = index.find("c", [("s", "0-0")], log.next_offset)
    assert found.offset is None
    assert found.searched_from > 0


def test_trimmed_history_is_forgotten(log):
    """What retention took away is no place any more."""
    for first in range(0, 2000, 50):
        append(log, "c", *range(first, first + 50))
    index = IdIndex(log)
    assert index.find("c", [("s", "0")], log.next_offset) == IdSearchResult(0, 0)
    log.retain(max_bytes=16_384)

    found = index.find("c", [("s", "0")], log.next_offset)

    assert log.first_offset > 0
    assert found.offset is None or found.offset < log.first_offset
    assert index._blocks[0].next > log.first_offset


@pytest.mark.parametrize("seed", range(5))
def test_against_a_plain_search(log, monkeypatch, seed):
    """Whatever is appended, asked and limited, the answer is that of reading everything."""
    rng = random.Random(seed)
    monkeypatch.setattr(id_index, "SEARCH_RECORDS_MAX", rng.choice([50, 500, 10_000]))
    monkeypatch.setattr(id_index, "BLOCK_RECORDS_MIN", rng.choice([1, 64, 1000]))
    monkeypatch.setattr(id_index, "PART_BYTES", rng.choice([256, 4096, 1 << 20]))
    index = IdIndex(log)
    oldest = {}
    for _ in range(60):
        for _ in range(rng.randrange(40)):
            channel, id_ = rng.choice("cd"), str(rng.randrange(3000))
            oldest.setdefault(
                (channel, id_), log.append(channel, b"", value(id_), durability="none").offset
            )
        channel, id_ = rng.choice("cd"), str(rng.randrange(3000))
        end = log.next_offset
        found = index.find(channel, [("s", id_)], end)
        true = oldest.get((channel, id_))
        if found.searched_from == 0:
            assert found.offset == true
        elif found.offset is not None:
            assert true is not None
            assert true <= found.offset
        else:
            assert true is None or true < found.searched_from


def test_no_files_are_left_open(log):
    """Readers of a search are closed."""
    append(log, "c", *range(3000))
    index = IdIndex(log)
    index.find("c", ALL, log.next_offset)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for n in range(50):
        append(log, "c", f"n{n}")
        index.find("c", [("s", f"n{n}")], log.next_offset)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_searches_that_waited_read_nothing_again(log):
    """A search reads to the end of the log, so those that ask for less or the same cost no reading."""
    append(log, "c", *range(100))
    ends = [log.next_offset]
    for number in range(5):
        append(log, "c", f"later-{number}")
        ends.append(log.next_offset)
    index = IdIndex(log)
    assert index.find("c", [("s", "later-0")], ends[0]) == IdSearchResult(None, 0)
    read = index.bytes_read

    for number, end in enumerate(ends[1:]):
        assert index.find("c", [("s", f"later-{number}")], end) == IdSearchResult(end - 1, 0)

    assert index.bytes_read == read
