"""The sparse index of a sealed segment: positions, runs of batches, producers, and indexes that do not fit."""

from __future__ import annotations

import itertools

import pytest

import virta
from virta.log.format import index as index_module
from virta.log.format.codec import Status
from virta.log.format.directory import index_name, segment_bases
from virta.log.format.index import build_index, load_index, save_index
from virta.log.format.segment import Position, Segment, Walk


@pytest.fixture
def sealed(tmp_path, monkeypatch, either_kernel):
    """A log directory whose first segment is sealed, with an index entry every 500 bytes."""
    monkeypatch.setattr(index_module, "INDEX_STEP_BYTES", 500)
    with virta.open(tmp_path / "log", segment_bytes=8192, durability="none") as log:
        for number in range(40):
            log.append_many([("t", "", bytes(100)), ("t", "", bytes(100))], producer=(7, number))
    return tmp_path / "log"


def first_index(directory):
    with Segment(directory, 0) as segment:
        return segment, load_index(directory, 0, segment.header.salt)


def test_positions_are_at_or_before_what_is_looked_for(sealed):
    """Reading from a position finds the offset, and no entry is passed over."""
    _, index = first_index(sealed)
    for offset in range(index.base, index.next):
        at = index.position(offset)
        assert at.next <= offset
        later = [entry.offset for entry in index.entries if at.next < entry.offset <= offset]
        assert later == []
    entry = index.entries[3]
    assert index.position_at(entry.time).next <= entry.offset
    assert index.position_at(0) is None
    assert index._replace(entries=[]).position(5) is None


def test_runs_cover_all_batches_once(sealed):
    """The runs of a segment follow each other, start at batches and end with the seal."""
    _, index = first_index(sealed)
    with Segment(sealed, 0) as segment:
        runs = index.runs(segment.size)
        assert len(runs) > 5
        assert (runs[0].pos, runs[0].base) == (64, 0)
        assert (runs[-1].end, runs[-1].next) == (segment.size, index.next)
        for run, following in itertools.pairwise(runs):
            assert (run.end, run.next) == (following.pos, following.base)
        for run in runs:
            walk = Walk(segment, Position(run.pos, -1, run.base), run.end)
            batches = [batch for found in walk for batch in found]
            assert (batches[0].pos, batches[0].base, batches[0].time) == (
                run.pos,
                run.base,
                run.time,
            )
            assert walk.end.at.next == run.next
            assert all(run.time <= batch.time <= run.last_time for batch in batches)
        assert walk.end.status == Status.SEAL


def test_an_index_is_used_only_if_it_fits(sealed):
    """Another salt, another base, a flipped bit or a cut file: there is no index."""
    segment, index = first_index(sealed)
    path = sealed / index_name(0)
    data = path.read_bytes()
    assert load_index(sealed, 0, segment.header.salt ^ 1) is None
    assert load_index(sealed, 999, segment.header.salt) is None
    for at in (0, 9, 17, 24, len(data) - 1):
        path.write_bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
        assert load_index(sealed, 0, segment.header.salt) is None
    for size in (0, 10, len(data) - 1):
        path.write_bytes(data[:size])
        assert load_index(sealed, 0, segment.header.salt) is None
    save_index(sealed, index)
    assert path.read_bytes() == data


def test_an_index_is_rebuilt_from_its_segment(sealed):
    """What build_index finds is what was saved, producers included; the active segment has none."""
    _, index = first_index(sealed)
    with Segment(sealed, 0) as segment:
        assert build_index(segment, {}) == index
    assert index.producers[7][0] < 40
    active = segment_bases(sealed)[-1]
    with Segment(sealed, active) as segment:
        assert build_index(segment, {}) is None
    (sealed / index_name(0)).unlink()
    assert index_module.index_sealed(sealed)
    assert first_index(sealed)[1] == index


def test_producers_beyond_the_limit_are_forgotten(monkeypatch):
    """The least recently used producer goes first."""
    monkeypatch.setattr(index_module, "PRODUCERS_MAX", 2)
    table = {}
    for producer, sequence in [(1, 0), (2, 0), (1, 1), (3, 0)]:
        index_module.remember(table, producer, sequence, 10 * producer)
    assert table == {1: (1, 10), 3: (0, 30)}
