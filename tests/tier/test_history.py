"""Reading a shipped log: the cache of segments, ranges of bytes, and the ways to open one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

import virta
from virta.errors import LogReadOnlyError, TierError
from virta.log.format.directory import segment_name
from virta.tier import Shipper, TierHistory, TierStore, restore_log, verify_store
from virta.tier import shipper as shipper_module
from virta.tier.manifest import find_manifest

SEGMENT_BYTES = 4096


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log", segment_bytes=SEGMENT_BYTES) as made:
        yield made


def append(log, count):
    for number in range(count):
        log.append("t", f"k{number % 7}", os.urandom(100))


def ship(log, url):
    with Shipper(log, TierStore(url)) as shipper:
        shipper.ship()
    return find_manifest(TierStore(url))


def rows(log):
    return [tuple(record) for record in log.read()]


def test_the_active_segment_grows_in_the_file_that_readers_have_open(log, url, tmp_path):
    """Also when it is sealed meanwhile: the file gets the rest, it is not replaced."""
    history = TierHistory(url, tmp_path / "cache", refresh_s=0)
    append(log, 5)
    ship(log, url)
    path = history.fetch(0) / segment_name(0)
    opened = path.stat().st_ino
    sizes = [path.stat().st_size]
    for count in (5, 40):  # within the segment, and beyond its end
        append(log, count)
        ship(log, url)
        history.fetch(0)
        sizes.append(path.stat().st_size)

    assert len(find_manifest(TierStore(url)).segments) > 0
    assert sizes == sorted(set(sizes))
    assert path.stat().st_ino == opened
    assert path.read_bytes() == (log.path / segment_name(0)).read_bytes()


def test_a_segment_that_was_compacted_is_fetched_anew(log, url, tmp_path):
    history = TierHistory(url, tmp_path / "cache", refresh_s=0)
    append(log, 100)
    ship(log, url)
    path = history.fetch(0) / segment_name(0)
    before = path.read_bytes()
    log.compact()
    assert (log.path / segment_name(0)).read_bytes() != before
    ship(log, url)

    history.fetch(0)

    assert path.read_bytes() == (log.path / segment_name(0)).read_bytes()


def test_a_damaged_chunk_of_the_active_segment_is_refused(log, url, tmp_path):
    append(log, 5)
    tail = ship(log, url).tail
    name = tail.name(tail.chunks[0])
    store = TierStore(url)
    data = bytearray(store.read(name))
    data[-1] ^= 1
    store.write(name, bytes(data))

    with pytest.raises(TierError, match=f"{name} has other bytes than were shipped") as caught:
        TierHistory(url, tmp_path / "cache").fetch(0)
    assert caught.value.code == "tier_corrupt"
    assert not (tmp_path / "cache" / segment_name(0)).exists()


def test_what_the_store_does_not_have(log, url, tmp_path):
    """Offsets inside a segment, and beyond the end."""
    append(log, 50)
    bases = [segment.base for segment in ship(log, url).segments]
    history = TierHistory(url, tmp_path / "cache")

    assert history.bases()[: len(bases)] == bases
    for base in (bases[1] + 1, 10**6):
        with pytest.raises(FileNotFoundError, match=f"no segment that begins at offset {base}"):
            history.fetch(base)
        assert history.remote(base) is None
        assert history.index(base) is None
        assert history.topic_index(base) is None
        assert history.fetch_ranges(base, [(64, 65)]) is None


def test_objects_removed_for_good_end_in_a_sentence(log, url, tmp_path):
    """A reader asks for a newer manifest, which names the same object, and gives up."""
    append(log, 50)
    name = ship(log, url).segments[0].name
    TierStore(url).delete(name)

    with pytest.raises(TierError, match=f"has no object {name}") as caught:
        TierHistory(url, tmp_path / "cache").fetch(0)
    assert caught.value.code == "tier_object_missing"


def test_ranges_over_several_chunks(log, url, monkeypatch):
    """A range may begin in one object and end in another; a pickled description reads the same."""
    monkeypatch.setattr(shipper_module, "CHUNK_BYTES_MAX", 700)
    append(log, 20)
    ship(log, url)
    remote = pickle.loads(pickle.dumps(TierHistory(url, log.path / "cache").remote(0)))
    whole = (log.path / segment_name(0)).read_bytes()[: remote.size]

    assert len(remote.parts) > 2
    assert remote.header() == whole[:64]
    begin, end = remote.parts[0].end - 10, remote.parts[2].start + 10
    with remote.open(begin, end) as segment:
        assert segment.partial
        assert segment.size == len(whole)
        assert os.pread(segment.fd, end - begin, begin) == whole[begin:end]
        assert os.pread(segment.fd, 50, end) == bytes(50)  # not fetched


def test_an_object_that_is_too_short_is_reported(log, url):
    append(log, 50)
    segment = ship(log, url).segments[0]
    store = TierStore(url)
    store.write(segment.name, store.read(segment.name)[:200])
    remote = TierHistory(url, log.path / "cache").remote(0)

    with pytest.raises(TierError) as caught:
        remote.open(100, 300)
    assert caught.value.code in {"tier_corrupt", "tier_unreachable"}
    assert [f"{segment.name} has 200 bytes" in p for p in verify_store(url).problems] == [True]
    (problem,) = verify_store(url, deep=False).problems  # one request for the last byte of each
    assert segment.name in problem


# --- opening ---


def test_a_url_can_only_be_read(log, url):
    append(log, 3)
    ship(log, url)

    with pytest.raises(LogReadOnlyError, match="is a shipped log, which can only be read"):
        virta.open(url, read_only=False)
    with virta.open(url) as shipped, pytest.raises(LogReadOnlyError):
        shipped.append("t", "", b"x")


def test_the_cache_of_a_url_is_removed_with_the_log_unless_it_is_given(
    log, url, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    append(log, 50)
    ship(log, url)
    shipped = virta.open(url)
    assert rows(shipped) == rows(log)
    assert list(Path(shipped.path, "cache").glob("*.puro"))
    shipped.close()
    del shipped
    assert list((tmp_path / "tmp").iterdir()) == []

    with virta.open(url, tier_cache=tmp_path / "given") as shipped:
        assert rows(shipped) == rows(log)
    assert list((tmp_path / "given" / "cache").glob("*.puro"))
    with virta.open(url, tier_cache=tmp_path / "given") as again:
        assert rows(again) == rows(log)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"url": 7}', b"{"])
def test_a_damaged_note_of_the_store_costs_only_the_store(log, tmp_path, content):
    """`shipped.json` says where older segments are; the directory itself still opens."""
    append(log, 5)
    ship(log, f"file://{tmp_path}/store")
    expected = rows(log)
    log.close()
    (log.path / "shipped.json").write_bytes(content)

    with virta.open(log.path) as again:
        assert again.history is None
        assert rows(again) == expected


# --- restoring ---


def test_a_restore_replaces_nothing(log, url, tmp_path):
    append(log, 50)
    ship(log, url)
    with pytest.raises(TierError, match="is a log already; restore to a new directory") as caught:
        restore_log(url, log.path)
    assert caught.value.code == "tier_exists"

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / segment_name(3)).write_bytes(b"of another log")
    with pytest.raises(TierError, match=r"a segment of another log \(offset 3\)") as caught:
        restore_log(url, tmp_path / "other")
    assert caught.value.code == "tier_exists"
    assert (tmp_path / "other" / segment_name(3)).read_bytes() == b"of another log"


def test_progress_counts_segments(log, url, tmp_path):
    append(log, 100)
    stored = ship(log, url)
    restored, verified = [], []
    restore_log(url, tmp_path / "r", progress=lambda *done: restored.append(done))
    verify_store(url, progress=lambda *done: verified.append(done))
    count = len(stored.segments) + 1  # the active one

    assert restored == verified == [(n + 1, count) for n in range(count)]
