"""The token store: keyed hashes, expiry, changes by other processes."""

from __future__ import annotations

import json
import stat
import threading

import pytest

from virta.access import TokenStore
from virta.access import tokens as module
from virta.access.grants import make_grant
from virta.errors import AccessError

READ = (make_grant(["read"], "orders.*", "tenant=42"),)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    return TokenStore(tmp_path / "data", clock=clock)


def test_a_token_is_found_by_its_text_alone(store):
    """The principal has its rights; the id is no secret."""
    text, record = store.create(READ, name="shop")
    principal = store.find(text)

    assert text.startswith(record.prefix + "_")
    assert principal.id == record.prefix
    assert principal.rights.permission("read", "orders.eu").row_filter.matches(
        {"data": {"tenant": 42}}
    )
    assert principal.rights.permission("publish", "orders.eu") is None


@pytest.mark.parametrize(
    "change", [lambda t: t[:-1], lambda t: t + "x", lambda t: t.swapcase(), lambda t: t[:15]]
)
def test_anything_else_is_not_known(store, change):
    """One character decides."""
    text, _ = store.create(READ)
    with pytest.raises(AccessError) as refused:
        store.find(change(text))

    assert refused.value.code == "token-unknown"


def test_the_secret_is_not_stored(store):
    """Neither in the file of tokens nor beside it; all files are private."""
    text, _ = store.create(READ)
    secret = text.split("_", 2)[2]

    for file in store.directory.iterdir():
        assert secret.encode() not in file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


def test_the_hash_is_keyed(store, tmp_path):
    """With another key the same file knows no token."""
    text, _ = store.create(READ)
    (store.directory / "key").write_bytes(bytes(32))
    with pytest.raises(AccessError, match="not known"):
        TokenStore(tmp_path / "data").find(text)


def test_tokens_expire(store, clock):
    """The message says which check failed."""
    text, record = store.create(READ, expires=clock.now + 60)
    assert store.find(text).id == record.prefix
    assert store.is_active(record.prefix)
    clock.now += 60
    with pytest.raises(AccessError, match="has expired") as refused:
        store.find(text)

    assert refused.value.code == "token-expired"
    assert not store.is_active(record.prefix)


def test_a_running_server_sees_changes(store, tmp_path):
    """Another process creates and revokes; the store notices by the file."""
    server = TokenStore(tmp_path / "data")
    first, record = store.create(READ)
    assert server.find(first).id == record.prefix
    second, _ = store.create(READ)
    server.find(second)
    store.revoke(record.prefix)
    with pytest.raises(AccessError):
        server.find(first)
    assert server.refresh() is False
    assert len(server) == 1


def test_revoking_by_a_prefix(store):
    """Part of the id is enough if it is unique; several or none are refused with the reason."""
    text, record = store.create(READ)
    store.create(READ)
    with pytest.raises(AccessError, match="no token begins with"):
        store.revoke("virta_00000000")
    with pytest.raises(AccessError, match="no token begins with"):
        store.revoke("")
    assert store.revoke(text).id == record.id
    assert len(store.records()) == 1


def test_an_ambiguous_prefix_revokes_nothing(store, monkeypatch):
    """The message lists what it could be."""
    ids = iter(["aaaabbbb", "aaaacccc"])
    monkeypatch.setattr(module, "_new_id", lambda: next(ids))
    store.create(READ)
    store.create(READ)
    with pytest.raises(
        AccessError, match="2 tokens begin with 'aaaa': virta_aaaabbbb, virta_aaaacccc"
    ):
        store.revoke("aaaa")

    assert len(store.records()) == 2


def test_processes_that_create_at_once_lose_nothing(tmp_path):
    """The file is changed under a lock."""

    def create():
        TokenStore(tmp_path / "data").create(READ)

    threads = [threading.Thread(target=create) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(TokenStore(tmp_path / "data").records()) == 10


@pytest.mark.parametrize("content", [b"", b"{", b'{"tokens": 1}', b'{"tokens": [{"id": 1}]}'])
def test_a_damaged_file_is_an_error_not_an_open_door(store, content):
    """Reading it fails with its path; what was read before still counts."""
    text, record = store.create(READ)
    store.find(text)
    (store.directory / "tokens.json").write_bytes(content)
    with pytest.raises(AccessError, match="cannot read") as refused:
        store.refresh()

    assert refused.value.code == "tokens-unreadable"
    assert store.find(text).id == record.prefix


def test_a_missing_key_is_an_error(store, tmp_path):
    """Without it no token could be checked."""
    store.create(READ)
    (store.directory / "key").unlink()
    with pytest.raises(AccessError, match="create new tokens"):
        TokenStore(tmp_path / "data").refresh()


def test_limits(store, monkeypatch):
    """Their number and their names are limited, and each has a right."""
    monkeypatch.setattr(module, "TOKENS_MAX", 1)
    with pytest.raises(AccessError, match="at least one right"):
        store.create(())
    with pytest.raises(AccessError, match="printable"):
        store.create(READ, name="a\nb")
    store.create(READ)
    with pytest.raises(AccessError, match="revoke some"):
        store.create(READ)


def test_the_file_is_json_that_people_can_read(store):
    """Ids, rights and times; nothing else is needed for a backup but the key."""
    _, record = store.create(READ, name="shop", expires=5000.0)
    stored = json.loads((store.directory / "tokens.json").read_bytes())

    assert stored["version"] == 1
    (token,) = stored["tokens"]
    assert token["id"] == record.id
    assert token["grants"] == [
        {"verbs": ["read"], "pattern": "orders.*", "filter": "tenant=42", "dialect": "query-string"}
    ]
    assert (token["name"], token["created"], token["expires"]) == ("shop", 1000.0, 5000.0)
