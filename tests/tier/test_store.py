"""The verbs of a store, against a directory and S3."""

from __future__ import annotations

import io

import pytest

from virta.errors import TierError
from virta.tier import TierStore, is_store_url


def test_create_succeeds_once(url):
    """Of two creations of one name the second is refused, and changes nothing."""
    store = TierStore(url)

    assert store.create("manifest/1.json", b"first") is True
    assert TierStore(url).create("manifest/1.json", b"second") is False
    assert store.read("manifest/1.json") == b"first"


def test_write_read_range_stream_and_delete(url):
    store = TierStore(url)
    data = bytes(range(256)) * 5000
    store.write("a/b", io.BytesIO(data))
    store.write("a/b", data)

    assert store.read("a/b") == data
    assert store.read_range("a/b", 1000, 1010) == data[1000:1010]
    assert b"".join(store.stream("a/b")) == data

    store.delete("a/b")
    store.delete("a/b")
    with pytest.raises(TierError, match="has no object a/b") as caught:
        store.read("a/b")
    assert caught.value.code == "tier_object_missing"


def test_list_is_in_order_and_begins_after_a_name(url):
    store = TierStore(url)
    names = [f"manifest/{number:03d}" for number in range(25)]
    for name in reversed(names):
        store.write(name, b"x")
    store.write("other/1", b"x")

    assert [found.name for found in store.list("manifest")] == names
    assert [found.name for found in store.list("manifest", after=names[20])] == names[21:]
    assert {found.bytes for found in store.list("manifest")} == {1}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("ftp://host/x", "is not the URL of a store"),
        ("/just/a/path", "is not the URL of a store"),
        ("s3://key:secret@bucket/x", "credentials come from the environment"),
        ("s3://bucket/x?endpoint=evil", "credentials come from the environment"),
    ],
)
def test_a_bad_url_is_refused_without_repeating_its_credentials(bad, said):
    with pytest.raises(TierError, match=said) as caught:
        TierStore(bad)
    assert caught.value.code == "tier_url"
    assert "secret" not in caught.value.message


def test_which_paths_are_urls():
    assert is_store_url("s3://bucket/prefix")
    assert is_store_url("file:///var/store")
    assert not is_store_url("data/log")
    assert not is_store_url(b"s3://bucket")


def test_a_store_that_cannot_be_reached_is_a_sentence(monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    store = TierStore("s3://bucket/x", retry_s=0.1)

    with pytest.raises(TierError, match="reading manifest/1 at s3://bucket/x failed") as caught:
        store.read("manifest/1")
    assert caught.value.code == "tier_unreachable"
