"""Shipping a log: everything durable gets there, once, and only from one shipper."""

from __future__ import annotations

import os
import threading

import pytest

import virta
from virta.errors import TierError
from virta.tier import Shipper, TierStore, restore_log, verify_store
from virta.tier import shipper as shipper_module
from virta.tier.background import BackgroundShipper
from virta.tier.manifest import find_manifest
from waiting import wait_until

SEGMENT_BYTES = 4096


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log", segment_bytes=SEGMENT_BYTES) as made:
        yield made


def append(log, count, size=100):
    for number in range(count):
        log.append(f"t{number % 3}", f"k{number % 7}", os.urandom(size))


def records(log):
    return [tuple(record) for record in log.read()]


def same_files(left, right):
    """Return whether two log directories have the same segments, byte for byte, as far as the second goes."""
    for path in sorted(right.glob("*.puro")):
        data = path.read_bytes()
        assert (left / path.name).read_bytes()[: len(data)] == data, path.name
    return True


def test_a_restored_log_is_the_shipped_one_byte_for_byte(log, url, tmp_path):
    append(log, 200)
    with Shipper(log, TierStore(url)) as shipper:
        shipper.ship()
        append(log, 3)
        done = shipper.ship()

    restored = restore_log(url, tmp_path / "restored")

    assert done.next == restored.next == 203
    assert same_files(log.path, tmp_path / "restored")
    with virta.open(tmp_path / "restored") as other:
        assert other.id == log.id
        assert records(other) == records(log)
        assert other.verify().problems == []
        assert other.append("t", b"", b"more") == 203
    assert verify_store(url).problems == []


def test_an_open_url_reads_and_follows(log, url):
    append(log, 60)
    with Shipper(log, TierStore(url)) as shipper:
        shipper.ship()
        with virta.open(url) as shipped:
            assert records(shipped) == records(log)
            assert shipped.next_offset == 60
            reader = shipped.read(follow=True, timeout=30)
            got = [next(reader).offset for _ in range(60)]
            for _ in range(5):
                append(log, 40)
                shipper.ship()
                got += [next(reader).offset for _ in range(40)]
            assert got == list(range(260))


def test_readers_continue_into_the_store_after_retention(log, url):
    """Retention removes what is shipped; a reader of the directory does not notice."""
    append(log, 300)
    expected = records(log)
    with Shipper(log, TierStore(url)) as shipper:
        shipper.ship()
        report = log.retain(max_bytes=0)
        assert report.segments > 3

        with virta.open(log.path) as reopened:
            assert reopened.first_offset == 0
            assert records(reopened) == expected
            assert [r.offset for r in reopened.read(start=17, end=40)] == list(range(17, 40))


def test_the_cache_is_bounded(log, url):
    append(log, 400)
    with Shipper(log, TierStore(url)) as shipper:
        shipper.ship()
    expected = records(log)
    log.retain(max_bytes=0)

    with virta.open(log.path, tier_cache_bytes_max=3 * SEGMENT_BYTES) as reopened:
        assert records(reopened) == expected
        kept = sum(path.stat().st_size for path in (log.path / "cache").glob("*.puro"))
        assert kept <= 4 * SEGMENT_BYTES


def test_retention_keeps_what_is_not_shipped(log, url):
    append(log, 100)
    with Shipper(log, TierStore(url)) as shipper:
        shipper.ship()
        shipped = shipper.shipped
        append(log, 200)
        report = log.retain(max_bytes=0)

        assert 0 < report.first_offset <= shipped
        assert log.retain(max_bytes=0, unshipped=True).first_offset > shipped


def test_small_appends_make_few_chunks(log, url):
    with virta.open(log.path.parent / "large", segment_bytes=1 << 20) as large:
        with Shipper(large, TierStore(url)) as shipper:
            for _ in range(100):
                append(large, 1)
                shipper.ship()
            manifest = find_manifest(TierStore(url))
            assert len(manifest.tail.chunks) <= 10
        with virta.open(url) as shipped:
            assert records(shipped) == records(large)


def test_one_shipper_on_a_machine(log, url):
    with (
        Shipper(log, TierStore(url)),
        pytest.raises(TierError, match="another process ships the log") as caught,
    ):
        Shipper(log, TierStore(url)).start()
    assert caught.value.code == "tier_busy"


def test_a_shipper_elsewhere_takes_over_and_the_first_stops(log, url, tmp_path):
    """The later shipper wins; the earlier one stops at its next upload, and nothing of it is seen."""
    append(log, 20)
    with Shipper(log, TierStore(url)) as first:
        first.ship()
        restore_log(url, tmp_path / "moved")
        with virta.open(tmp_path / "moved") as moved, Shipper(moved, TierStore(url)) as second:
            append(log, 5)
            with pytest.raises(TierError, match="another process ships this log") as caught:
                first.ship()
            assert caught.value.code == "tier_fenced"
            with pytest.raises(TierError) as caught:
                first.collect_garbage(now=True)
            assert caught.value.code == "tier_fenced"

            moved.append("t", b"", b"of the second")
            second.ship()
    with virta.open(url) as shipped:
        assert [bytes(r.value) for r in shipped.read(start=20)] == [b"of the second"]


def test_a_late_shipper_notices_though_its_number_is_free_again(log, url, tmp_path):
    """Manifests are removed after a while, so a free number alone proves nothing."""
    append(log, 5)
    with Shipper(log, TierStore(url), garbage_age_s=0) as first:
        first.ship()
        restore_log(url, tmp_path / "moved")
        with (
            virta.open(tmp_path / "moved") as moved,
            Shipper(moved, TierStore(url), garbage_age_s=0) as second,
        ):
            for _ in range(5):
                append(moved, 1)
                second.ship()
            assert second.collect_garbage(now=True) > 0
            append(log, 1)
            with pytest.raises(TierError) as caught:
                first.ship()
            assert caught.value.code == "tier_fenced"


def test_another_log_is_refused(log, url, tmp_path):
    with Shipper(log, TierStore(url)) as shipper:
        shipper.ship()
    with (
        virta.open(tmp_path / "other") as other,
        pytest.raises(TierError, match="give each log a prefix of its own"),
    ):
        Shipper(other, TierStore(url)).start()


def test_a_log_older_than_the_store_is_refused(log, url, tmp_path):
    append(log, 10)
    with Shipper(log, TierStore(url)) as shipper:
        shipper.ship()
        restore_log(url, tmp_path / "older")
        append(log, 10)
        shipper.ship()
    with (
        virta.open(tmp_path / "older") as older,
        pytest.raises(TierError, match="restore it from the store"),
    ):
        Shipper(older, TierStore(url)).start()


def test_a_compacted_segment_replaces_the_shipped_one(log, url):
    append(log, 200)
    with Shipper(log, TierStore(url), garbage_age_s=0) as shipper:
        shipper.ship()
        before = len(TierStore(url).list("segments"))
        log.compact()
        assert shipper.ship().segments > 0
        assert shipper.collect_garbage(now=True) > 0
        assert len(TierStore(url).list("segments")) <= before
    with virta.open(url) as shipped:
        assert records(shipped) == records(log)
    assert verify_store(url).problems == []


def test_verify_names_what_is_missing_or_damaged(log, url):
    append(log, 200)
    store = TierStore(url)
    with Shipper(log, store) as shipper:
        shipper.ship()
    first, second = (segment.name for segment in find_manifest(store).segments[:2])
    store.delete(first)
    store.write(second, b"x" * 100)

    problems = verify_store(url).problems

    assert len(problems) == 2
    assert f"has no object {first}" in problems[0]
    assert f"{second} has 100 bytes" in problems[1]


def test_a_damaged_object_is_refused_by_readers_and_restore(log, url, tmp_path):
    append(log, 200)
    store = TierStore(url)
    with Shipper(log, store) as shipper:
        shipper.ship()
    name = find_manifest(store).segments[1].name
    data = bytearray(store.read(name))
    data[2000] ^= 1
    store.write(name, bytes(data))

    for read in (lambda: records(virta.open(url)), lambda: restore_log(url, tmp_path / "r")):
        with pytest.raises(TierError, match="has other bytes than were shipped"):
            read()
    assert not (tmp_path / "r" / "META").exists()


def test_run_continues_after_failures(log, url, monkeypatch):
    """A store that fails is tried again; stopping ships what is left."""
    append(log, 10)
    store = TierStore(url)
    failures = [TierError("no network", code="tier_unreachable")] * 3
    stop, shipped = threading.Event(), threading.Event()
    monkeypatch.setattr(shipper_module, "RETRY_S", 0.001)

    class Flaky(Shipper):
        def ship(self):
            if failures:
                raise failures.pop()
            done = super().ship()
            shipped.set()
            return done

    with Flaky(log, store) as shipper:
        thread = threading.Thread(target=shipper.run, args=(stop,), kwargs={"interval_s": 0.001})
        thread.start()
        assert shipped.wait(30)
        append(log, 10)
        stop.set()
        thread.join(30)
        assert shipper.shipped == 20


def test_a_stopped_shipper_still_says_how_far_it_is(log, url):
    """After stopping, or after another shipper took over, the lag is not the whole log."""
    append(log, 30)
    background = BackgroundShipper(log, url, interval_s=0.001)
    background.start()
    background.stop(30)
    append(log, 2)

    assert background.status() == (url, 30, 2, None)


def test_a_background_shipper_ends_when_it_is_fenced(log, url, tmp_path):
    append(log, 5)
    background = BackgroundShipper(log, url, interval_s=0.001)
    background.start()
    wait_until(lambda: background.status().next_offset == 5, "the first upload")
    restore_log(url, tmp_path / "moved")
    with virta.open(tmp_path / "moved") as moved, Shipper(moved, TierStore(url)):
        append(log, 3)
        wait_until(lambda: background.status().problem is not None, "the fence")
        background.stop(30)
    status = background.status()
    assert "this one stops. Run one shipper per log" in status.problem
    assert (status.next_offset, status.lag) == (5, 3)
