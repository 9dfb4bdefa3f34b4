"""Topics of a shipped log: a reader of one topic fetches indexes and its batches, and gets what a full read gives."""

from __future__ import annotations

import os
import random

import pytest

import virta
from virta.log.format import topic_lookup
from virta.tier import Shipper, TierStore
from virta.tier.manifest import find_manifest

SEGMENT_BYTES = 64 * 1024


@pytest.fixture(autouse=True)
def sparse(monkeypatch):
    """Small segments use the index too: no run is merged, and no topic counts as dense."""
    monkeypatch.setattr(topic_lookup, "TOPIC_RUN_GAP_BYTES", 0)
    monkeypatch.setattr(topic_lookup, "TOPIC_DENSE_BYTES", 1)


@pytest.fixture
def log(tmp_path):
    """A log of eight segments in which 20 of 2,000 records have the topic `rare`."""
    with virta.open(tmp_path / "log", segment_bytes=SEGMENT_BYTES, durability="none") as made:
        for number in range(2000):
            topic = "rare" if number % 100 == 7 else f"t{number % 9}"
            made.append(topic, b"", b"%d" % number + bytes(200))
        yield made


@pytest.fixture
def fetched(monkeypatch):
    """Count the bytes that readers get from the store, by verb."""
    counts = {"read": 0, "read_ranges": 0, "stream": 0}

    def count(name, size_of):
        real = getattr(TierStore, name)

        def counted(self, *arguments):
            found = real(self, *arguments)
            if name == "stream":
                found = list(found)
            counts[name] += size_of(found)
            return found

        monkeypatch.setattr(TierStore, name, counted)

    count("read", len)
    count("read_ranges", lambda found: sum(map(len, found)))
    count("stream", lambda found: sum(map(len, found)))
    return counts


def ship(log, url):
    with Shipper(log, TierStore(url)) as shipper:
        shipper.ship()


def rows(log, topics=None, **options):
    return [tuple(record) for record in log.read(topics, **options)]


def test_a_rare_topic_is_read_without_fetching_segments(log, url, fetched):
    """Of sealed segments only indexes and the batches of the topic are fetched."""
    ship(log, url)
    manifest = find_manifest(TierStore(url))
    assert len(manifest.segments) >= 7
    for counter in fetched:
        fetched[counter] = 0
    with virta.open(url) as shipped:
        assert rows(shipped, "rare") == rows(log, "rare")
        first = dict(fetched)
        assert rows(shipped, "rare") == rows(log, "rare")
    assert first["stream"] == 0  # no segment was fetched whole
    assert 0 < first["read_ranges"] < sum(s.bytes for s in manifest.segments) / 20
    # The second reader finds the indexes in the cache: all it reads is batches and headers.
    assert fetched["read_ranges"] == 2 * first["read_ranges"]
    assert fetched["read"] - first["read"] < 10_000


def test_a_frequent_topic_fetches_whole_segments(log, url, fetched):
    ship(log, url)
    with virta.open(url) as shipped:
        assert rows(shipped, [f"t{n}" for n in range(9)]) == rows(log, [f"t{n}" for n in range(9)])
    assert fetched["stream"] > 0


def test_an_absent_topic_fetches_no_batch(log, url, fetched):
    ship(log, url)
    with virta.open(url) as shipped:
        assert rows(shipped, "absent", end=find_manifest(TierStore(url)).tail.base) == []
    assert (fetched["stream"], fetched["read_ranges"]) == (0, 0)


def test_after_retention_topics_are_read_from_both(log, url):
    expected = rows(log, ["rare", "t3"])
    ship(log, url)
    log.retain(max_bytes=2 * SEGMENT_BYTES)
    with virta.open(log.path) as reopened:
        assert rows(reopened, ["rare", "t3"]) == expected
        assert rows(reopened, "rare", start=450, end=1430) == rows(
            reopened, ["rare", "x"], start=450, end=1430
        )
        assert list((log.path / "cache").glob("*.ptix"))


@pytest.mark.parametrize("damage", ["cut", "flip", "none"])
def test_a_damaged_or_missing_index_in_the_store_costs_time_only(log, url, damage):
    ship(log, url)
    store = TierStore(url)
    for segment in find_manifest(store).segments:
        name = segment.name + ".ptix"
        data = bytearray(store.read(name))
        if damage == "cut":
            data = data[:70]
        elif damage == "flip":
            for at in range(64, len(data), 7):
                data[at] ^= 0x20
        else:
            data = bytearray()
        store.write(name, bytes(data))
    with virta.open(url) as shipped:
        assert rows(shipped, "rare") == rows(log, "rare")


def test_a_damaged_batch_in_the_store_is_reported_not_skipped(log, url):
    """A reader that fetched only batches falls back to the whole segment, whose checksum does not fit."""
    ship(log, url)
    store = TierStore(url)
    segment = find_manifest(store).segments[2]
    data = bytearray(store.read(segment.name))
    rare = next(r for r in log.read("rare") if segment.base <= r.offset < segment.next)
    data[data.index(bytes(rare.value))] ^= 1
    store.write(segment.name, bytes(data))
    with (
        virta.open(url) as shipped,
        pytest.raises(virta.errors.TierError, match="other bytes than were shipped"),
    ):
        rows(shipped, "rare")


def test_a_compacted_segment_gets_its_new_index(tmp_path, url):
    """The cache's index of the generation before does not fit, and is fetched again."""
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        rng = random.Random(3)
        for _ in range(600):
            log.append(f"t{rng.randrange(12)}", b"k%d" % rng.randrange(5), os.urandom(40))
        with Shipper(log, TierStore(url), garbage_age_s=0) as shipper:
            shipper.ship()
            with virta.open(url) as shipped:
                assert rows(shipped, "t1") == rows(log, "t1")
                log.compact()
                shipper.ship()
                shipper.collect_garbage(now=True)
                shipped.history.manifest(newest=True)
                assert rows(shipped, ["t1", "t2"]) == rows(log, ["t1", "t2"])
