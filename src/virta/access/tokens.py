"""
API tokens: `virta_<id>_<secret>`.

The store is a directory with the tokens' ids, rights and hashes, and the key of the hashes; both files are
private. The secret itself is not stored. The id identifies a token in lists and log lines.

    <data-dir>/access/tokens.json   {"version": 1, "tokens": [{id, hash, name, grants, created, expires}]}
    <data-dir>/access/key           32 random bytes

Commands change the file under a lock and replace it as a whole; a running server reads it again when it
has changed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import time
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from virta import files
from virta.access.grants import Grant, Rights, read_grants
from virta.access.principal import TOKEN, Principal
from virta.errors import AccessError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PREFIX = "virta_"
ID_BYTES = 5  # eight characters of base32
SECRET_BYTES = 32
KEY_BYTES = 32
TOKENS_MAX = 10_000
NAME_CHARS_MAX = 200
DIRECTORY_NAME = "access"
_FILE, _KEY, _LOCK = "tokens.json", "key", "lock"


class TokenRecord(msgspec.Struct):
    """What is stored of a token; times are seconds since 1970."""

    id: str
    hash: str
    grants: list[dict[str, Any]]
    created: float
    name: str = ""
    expires: float | None = None

    @property
    def prefix(self) -> str:
        return PREFIX + self.id


class _StoredTokens(msgspec.Struct):
    tokens: list[TokenRecord] = []
    version: int = 1


class TokenStore:
    """The tokens of one data directory; `find` is for servers, the other methods are for commands."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(data_dir) / DIRECTORY_NAME
        self._clock = clock
        self._key = b""
        self._signature: tuple[int, ...] | None = None
        self._principals: dict[str, tuple[bytes, Principal]] = {}

    # For commands.

    def create(
        self, grants: tuple[Grant, ...], *, name: str = "", expires: float | None = None
    ) -> tuple[str, TokenRecord]:
        """
        Store a new token; return its text, which cannot be shown again, and its record.

        Raises:
            AccessError: it has no rights, a name that is too long, or there are too many tokens.
        """
        if not grants:
            raise AccessError("a token needs at least one right", code="invalid-grant")
        if len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise AccessError(
                f"a token's name has at most {NAME_CHARS_MAX} printable characters",
                code="invalid-token-name",
            )
        Rights(grants)  # checks that they go together
        with self._changing() as stored:
            if len(stored.tokens) >= TOKENS_MAX:
                raise AccessError(
                    f"there are {TOKENS_MAX} tokens already: revoke some", code="too-many-tokens"
                )
            known = {record.id for record in stored.tokens}
            while (id_ := _new_id()) in known:
                pass
            text = f"{PREFIX}{id_}_{secrets.token_urlsafe(SECRET_BYTES)}"
            record = TokenRecord(
                id_,
                self._hash(text).hex(),
                [grant.describe() for grant in grants],
                self._clock(),
                name,
                expires,
            )
            stored.tokens.append(record)
        return text, record

    def records(self) -> list[TokenRecord]:
        """Return all tokens, also expired ones, oldest first."""
        return self._stored().tokens

    def revoke(self, prefix: str) -> TokenRecord:
        """
        Remove the token whose id begins with `prefix` (or the whole token).

        Raises:
            AccessError: no token does, or several do.
        """
        wanted = prefix.removeprefix(PREFIX).split("_", 1)[0]
        with self._changing() as stored:
            found = [record for record in stored.tokens if record.id.startswith(wanted)]
            if not wanted or not found:
                raise AccessError(f"no token begins with {prefix[:40]!r}", code="token-unknown")
            if len(found) > 1:
                shown = ", ".join(record.prefix for record in found[:5])
                raise AccessError(
                    f"{len(found)} tokens begin with {prefix[:40]!r}: {shown}; give more characters",
                    code="token-ambiguous",
                )
            stored.tokens.remove(found[0])
        return found[0]

    # For servers.

    def __len__(self) -> int:
        return len(self._principals)

    def find(self, text: str) -> Principal:
        """
        Return the principal of a token.

        Raises:
            AccessError: it is not known, or has expired.
        """
        with suppress(AccessError):  # what was read last still counts
            self.refresh()
        id_ = text.removeprefix(PREFIX).partition("_")[0]
        # An unknown id takes as long as a wrong secret.
        known, principal = self._principals.get(id_, (bytes(32), None))
        if not hmac.compare_digest(known, self._hash(text)) or principal is None:
            raise AccessError("the token is not known", code="token-unknown")
        if principal.expires <= self._clock():
            raise AccessError(f"token {principal.id} has expired", code="token-expired")
        return principal

    def is_active(self, principal_id: str) -> bool:
        """Return whether a token of this id exists and has not expired."""
        found = self._principals.get(principal_id.removeprefix(PREFIX))
        return found is not None and found[1].expires > self._clock()

    def refresh(self) -> bool:
        """
        Read the file again if it has changed; return whether it had.

        Raises:
            AccessError: it cannot be read.
        """
        signature = _signature(self.directory / _FILE)
        if signature == self._signature:
            return False
        stored = self._stored()
        self._signature = signature
        if stored.tokens:
            self._load_key()
        self._principals = {
            record.id: (
                bytes.fromhex(record.hash),
                Principal(
                    record.prefix,
                    TOKEN,
                    Rights(read_grants(record.grants)),
                    inf if record.expires is None else record.expires,
                ),
            )
            for record in stored.tokens
        }
        return True

    # Files.

    @contextmanager
    def _changing(self) -> Iterator[_StoredTokens]:
        """Lock the store, yield its content, and write it."""
        files.make_directory(self.directory.parent)
        files.make_inside(self.directory)
        lock = files.lock_file(self.directory / _LOCK, wait=True)
        try:
            self._load_key(create=True)
            stored = self._stored()
            yield stored
            files.write_whole(self.directory / _FILE, msgspec.json.encode(stored))
        finally:
            files.unlock_file(lock)

    def _stored(self) -> _StoredTokens:
        path = self.directory / _FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=_StoredTokens)
        except FileNotFoundError:
            return _StoredTokens()
        except (OSError, msgspec.DecodeError) as error:
            raise AccessError(f"cannot read {path}: {error}", code="tokens-unreadable") from error

    def _load_key(self, *, create: bool = False) -> None:
        path = self.directory / _KEY
        try:
            self._key = path.read_bytes()
        except FileNotFoundError:
            if create:
                self._key = os.urandom(KEY_BYTES)
                files.write_whole(path, self._key)
                return
            raise AccessError(
                f"{path} is missing: without it no token can be checked; create new tokens",
                code="tokens-unreadable",
            ) from None
        except OSError as error:
            raise AccessError(f"cannot read {path}: {error}", code="tokens-unreadable") from error

    def _hash(self, text: str) -> bytes:
        return hmac.new(self._key, text.encode("utf-8", "replace"), hashlib.sha256).digest()


def _new_id() -> str:
    return base64.b32encode(os.urandom(ID_BYTES)).decode().lower()


def _signature(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is replaced; empty if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size)
