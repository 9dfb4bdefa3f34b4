"""Manifests: what is stored, which one is valid, and what a bad one says."""

from __future__ import annotations

import json

import msgspec
import pytest

import virta
from virta.errors import TierError
from virta.tier import Shipper, TierStore, verify_store
from virta.tier import manifest as manifests
from virta.tier.manifest import (
    FOLDER,
    ShippedSegment,
    ShippedTail,
    TailChunk,
    TierManifest,
    decode,
    encode,
    find_manifest,
    manifest_name,
    newest_manifest,
    newest_number,
    read_manifest,
)

SEGMENTS = (
    ShippedSegment(0, 10, 500, 7, 8, 1, (".puridx",)),
    ShippedSegment(10, 20, 600, 9, 10, 2, ()),
)


def manifest(number, **changes):
    made = TierManifest(number, 1, "shipper", "stream", "meta", 5, SEGMENTS)
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def store(tmp_path):
    return TierStore(f"file://{tmp_path}/store")


def put(store, *given):
    for one in given:
        store.write(manifest_name(one.number), encode(one))


def test_a_manifest_without_a_list_has_that_of_the_one_it_names(store):
    put(store, manifest(3), manifest(4, segments_in=3))

    assert b"puridx" not in store.read(manifest_name(4))
    assert read_manifest(store, 4).segments == SEGMENTS
    assert newest_manifest(store).number == 4


def test_the_highest_number_is_valid(store):
    put(store, manifest(12), manifest(9), manifest(100))

    assert newest_number(store) == 100
    assert newest_number(store, 12) == 100
    assert newest_number(store, 100) is None
    assert find_manifest(store).number == 100


def test_an_empty_store_says_what_to_do(store):
    assert newest_manifest(store) is None
    with pytest.raises(TierError, match="has no log; ship one there with virta log ship") as caught:
        find_manifest(store)
    assert caught.value.code == "tier_empty"


def test_a_manifest_removed_while_it_is_read_leads_to_the_newer_one(store, monkeypatch):
    """The shipper removes old manifests; a reader that listed one of them finds the next."""
    put(store, manifest(3))
    real = manifests.read_manifest

    def read(store, number):
        if number == 3:
            put(store, manifest(4))
            store.delete(manifest_name(3))
        return real(store, number)

    monkeypatch.setattr(manifests, "read_manifest", read)

    assert newest_manifest(store).number == 4


def test_a_manifest_that_disappears_without_a_successor_is_an_error(store, monkeypatch):
    put(store, manifest(3))
    real = manifests.read_manifest

    def read(store, number):
        store.delete(manifest_name(number))
        return real(store, number)

    monkeypatch.setattr(manifests, "read_manifest", read)

    with pytest.raises(TierError, match=r"has no object manifest/0*3\.json") as caught:
        newest_manifest(store)
    assert caught.value.code == "tier_object_missing"


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda _: b"", "tier_manifest", "is damaged"),
        (lambda data: data[: len(data) // 2], "tier_manifest", "is damaged"),
        (lambda data: data.replace(b'"epoch":1', b'"epoch":"one"'), "tier_manifest", "is damaged"),
        (lambda data: data.replace(b'"version":1', b'"version":2'), "tier_version", "upgrade"),
        # A newer version may have other fields: its number alone decides.
        (lambda _: b'{"version":7}', "tier_version", "has version 7; this Virta reads version 1"),
    ],
    ids=["empty", "cut", "other type", "version", "version without fields"],
)
def test_what_is_no_manifest_is_refused_with_its_place(change, code, said):
    data = change(encode(manifest(1)))

    with pytest.raises(TierError, match=said) as caught:
        decode(data, "s3://bucket/manifest/1")
    assert caught.value.code == code
    assert "s3://bucket/manifest/1" in caught.value.message


def test_the_end_of_a_manifest():
    """The active segment's end, or that of the last sealed one, or 0."""
    chunks = (TailChunk(0, 100, 1), TailChunk(100, 150, 2))
    tail = ShippedTail(20, 3, 1, 27, 9, chunks)

    assert manifest(1, segments=()).next == 0
    assert manifest(1).next == 20
    assert manifest(1, tail=tail).next == 27
    assert tail.bytes == 150
    assert ShippedTail(20, 3, 1, 20, 9).bytes == 0


def test_a_manifest_names_every_object_that_a_shipper_wrote(tmp_path, url):
    """And nothing else, so that what no manifest names can be removed."""
    with virta.open(tmp_path / "log", segment_bytes=4096) as log:
        for number in range(100):
            log.append("t", f"k{number}", bytes(150))
        store = TierStore(url)
        with Shipper(log, store) as shipper:
            shipper.ship()
    found = {each.name for kind in ("segments", "tail") for each in store.list(kind)}

    assert find_manifest(store).object_names == found
    assert len([name for name in found if name.startswith("tail/")]) == 1


def test_verify_reports_offsets_that_no_segment_has(tmp_path):
    """A manifest with a hole in it is not the log that was shipped."""
    url = f"file://{tmp_path}/store"
    with virta.open(tmp_path / "log", segment_bytes=4096) as log:
        for number in range(150):
            log.append("t", f"k{number}", bytes(150))
        store = TierStore(url)
        with Shipper(log, store) as shipper:
            shipper.ship()
    name = store.list(FOLDER)[-1].name
    stored = read_manifest(store, manifests.manifest_number(name))
    assert len(stored.segments) > 2
    missing = stored.segments[1]
    holed = msgspec.structs.replace(
        stored, segments=(stored.segments[0], *stored.segments[2:]), segments_in=None
    )
    store.write(name, encode(holed))

    assert verify_store(url).problems == [
        f"offsets {missing.base} to {missing.next} are in no segment"
    ]


def test_manifests_are_readable_json(tmp_path):
    """docs/tier.md promises that a person can read what the store has."""
    url = f"file://{tmp_path}/store"
    with virta.open(tmp_path / "log") as log:
        log.append("t", "k", b"v")
        with Shipper(log, TierStore(url)) as shipper:
            shipper.ship()
        (name,) = (found.name for found in TierStore(url).list(FOLDER)[-1:])
        shown = json.loads(TierStore(url).read(name))

    assert shown["stream"].replace("-", "") == str(log.id).replace("-", "")
    assert (shown["version"], shown["segments"], shown["tail"]["next"]) == (1, [], 1)
