"""Which credentials a server accepts, token files, and the rights of tokens to jobs."""

from __future__ import annotations

import hashlib
import os
import threading

import pytest

from virta.access import ALL_RIGHTS, Principal, Rights, TokenStore
from virta.access.credentials import Credentials, is_limited, read_token_file
from virta.access.grants import make_grant
from virta.access.journal import JobRights, JournalCredentials
from virta.access.principal import ANYONE, JWT
from virta.errors import AccessError, ConfigError

LONG = "a-token-of-many-characters"
JOBS = (make_grant(["jobs"], "mail.*"),)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Verifier:
    """Accepts every JWT as one principal; only its shape matters here."""

    def __init__(self):
        self.changed = False

    def find(self, text):
        return Principal(f"jwt:{text[:1]}", JWT, ALL_RIGHTS, expires=2000.0)

    def refresh(self):
        return self.changed


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    return TokenStore(tmp_path / "data", clock=clock)


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_shape_of_a_credential_decides_who_checks_it(store, clock):
    """Tokens of the store by their prefix, JWT by two dots, everything else is compared with the file."""
    digests = [hashlib.sha256(LONG.encode()).digest()]
    credentials = Credentials(store, digests=digests, jwt=Verifier(), clock=clock)
    text, record = store.create(JOBS)

    assert credentials.find(text).id == record.prefix
    assert credentials.find("x.y.z").kind == JWT
    assert credentials.find(LONG).rights is ALL_RIGHTS
    assert LONG not in credentials.find(LONG).id
    for unknown in ("", "x.y", LONG + "s", "virta_aaaaaaaa_x", "\udcff"):
        with pytest.raises(AccessError) as raised:
            credentials.find(unknown)
        assert raised.value.code == "token-unknown"


def test_without_keys_a_jwt_is_an_unknown_token(store, clock):
    """Nothing with two dots is accepted by accident."""
    with pytest.raises(AccessError, match="not known"):
        Credentials(store, clock=clock).find("x.y.z")


def test_who_is_still_active(store, clock):
    """Expired principals are not, revoked tokens are not; everyone on an open server is."""
    credentials = Credentials(store, clock=clock)
    text, record = store.create(JOBS)
    lasting = credentials.find(text)
    short = Principal("jwt:a", JWT, ALL_RIGHTS, expires=1500.0)

    assert credentials.is_active(lasting)
    assert credentials.is_active(short)
    assert credentials.is_active(ANYONE)
    assert credentials.is_owner_active(record.prefix)
    assert credentials.is_owner_active("jwt:a"), "only tokens of the store can be revoked"
    clock.now = 1500.0
    assert not credentials.is_active(short)
    store.revoke(record.prefix)
    assert credentials.refresh()
    assert not credentials.is_active(lasting)
    assert not credentials.is_owner_active(record.prefix)
    assert (is_limited(lasting), is_limited(short), is_limited(ANYONE)) == (True, True, False)


def test_changed_keys_are_noticed(store, clock):
    """Also when the tokens have not changed."""
    verifier = Verifier()
    credentials = Credentials(store, jwt=verifier, clock=clock)
    credentials.refresh()

    assert not credentials.refresh()
    verifier.changed = True
    assert credentials.refresh()


def test_a_token_file(tmp_path):
    """Tokens and hashes, one a line; comments and empty lines do not count."""
    digest = hashlib.sha256(b"another-token-of-many").hexdigest()
    path = write(tmp_path / "tokens", f"# comment\n\n{LONG}  # of the shop\nsha256:{digest}\n")

    found = read_token_file(path)

    assert found == [hashlib.sha256(LONG.encode()).digest(), bytes.fromhex(digest)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has 0 tokens: 1 to 10000"),
        ("# nothing\n", "has 0 tokens"),
        ("short\n", "line 1: a token of 5 characters: at least 16"),
        (f"{LONG}\nsha256:abc\n", "line 2: after `sha256:` come 64 hex digits"),
        ("sha256:" + "zz" * 32, "line 1: after `sha256:`"),
    ],
)
def test_token_files_that_are_refused(tmp_path, content, said):
    """The error names the file, the line and what would be right."""
    with pytest.raises(ConfigError) as raised:
        read_token_file(write(tmp_path / "tokens", content))

    assert said in raised.value.message
    assert str(tmp_path) in raised.value.message


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o666])
def test_a_token_file_of_other_users_is_refused(tmp_path, mode):
    """As ssh does with keys; the error says which mode it has and the command that repairs it."""
    path = write(tmp_path / "tokens", LONG, mode)

    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        read_token_file(path)


def test_a_token_file_that_cannot_be_read(tmp_path):
    """Missing, a directory, or not UTF-8."""
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"\xff" * 20)
    damaged.chmod(0o600)
    directory = tmp_path / "directory"
    directory.mkdir(mode=0o700)
    for path in (tmp_path / "none", directory, damaged):
        with pytest.raises(ConfigError, match="cannot read token file"):
            read_token_file(str(path))


def test_a_pipe_has_no_mode_to_check(tmp_path):
    """`--token-file <(command)` works: the shell makes a pipe that others cannot open."""
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o644)
    writer = threading.Thread(target=path.write_text, args=(LONG,))
    writer.start()
    found = read_token_file(str(path))
    writer.join(20)

    assert len(found) == 1


def test_rights_to_jobs():
    """By domain; a row filter gives none, since jobs are no events."""
    some = JobRights(Rights(JOBS))
    filtered = JobRights(Rights((make_grant(["jobs"], "**", "tenant=1"),)))
    other = JobRights(Rights((make_grant(["read"], "**"),)))

    assert (some.allows("mail.shop"), some.allows("crawl"), some.is_unlimited) == (
        True,
        False,
        False,
    )
    assert (filtered.allows("mail.shop"), filtered.is_unlimited) == (False, False)
    assert (other.allows("mail.shop"), other.is_unlimited) == (False, False)
    assert JobRights(ALL_RIGHTS).is_unlimited
    assert JobRights(ALL_RIGHTS).is_active()


def test_tokens_of_a_journal(tmp_path):
    """The daemon reads the same store and the same files as the server, and notices changes."""
    store = TokenStore(tmp_path)
    text, record = store.create(JOBS)
    credentials = JournalCredentials(tmp_path, write(tmp_path / "file", LONG))

    assert credentials.rights_of(LONG).is_unlimited
    rights = credentials.rights_of(text)
    assert rights.allows("mail.shop")
    assert rights.is_active()
    assert not credentials.refresh()
    store.revoke(record.prefix)
    assert credentials.refresh()
    assert not rights.is_active()
    with pytest.raises(AccessError):
        credentials.rights_of(text)


def test_a_journal_with_a_damaged_store_does_not_start(tmp_path):
    """It is an error, not a journal without tokens."""
    TokenStore(tmp_path).create(JOBS)
    (tmp_path / "access" / "tokens.json").write_text("{")

    with pytest.raises(AccessError) as raised:
        JournalCredentials(tmp_path)
    assert raised.value.code == "tokens-unreadable"
