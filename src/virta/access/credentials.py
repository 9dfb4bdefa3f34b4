"""The credentials that a server accepts: tokens of its store, tokens of a file, JWT, tickets, sessions."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from virta.access.grants import ALL_RIGHTS
from virta.access.principal import JWT, TOKEN, TOKEN_FILE, Principal
from virta.access.tickets import new_sessions, new_tickets
from virta.access.tokens import PREFIX
from virta.errors import AccessError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.access.tokens import TokenStore

HASH_PREFIX = "sha256:"
TOKENS_MAX = 10_000  # of a token file
TOKEN_CHARS_MIN = 16  # shorter ones can be guessed
# Mode bits that a token file must not have. A pipe or descriptor (`<(…)`) has no lasting mode to check.
OTHERS = stat.S_IRWXG | stat.S_IRWXO


class TokenVerifier(Protocol):
    """Finds the principal of a token; see `virta.access.jwt.JwtVerifier`."""

    def find(self, text: str) -> Principal: ...
    def refresh(self) -> bool: ...


class Credentials:
    """Finds the principal of a credential."""

    def __init__(
        self,
        store: TokenStore,
        *,
        digests: list[bytes] | None = None,
        jwt: TokenVerifier | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.tickets = new_tickets(clock)
        self.sessions = new_sessions(clock)
        self._digests = digests or []
        self._jwt = jwt
        self._clock = clock

    def find(self, text: str) -> Principal:
        """
        Return the principal of a bearer token.

        Raises:
            AccessError: which check failed.
        """
        if text.startswith(PREFIX):
            return self.store.find(text)
        if self._jwt is not None and text.count(".") == 2:
            return self._jwt.find(text)
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        # Every token is compared, so that the time does not depend on which one is similar.
        if not sum([hmac.compare_digest(digest, known) for known in self._digests]):
            raise AccessError("the token is not known", code="token-unknown")
        return Principal(f"file:{digest.hex()[:8]}", TOKEN_FILE, ALL_RIGHTS)

    def is_active(self, principal: Principal) -> bool:
        """Return whether a principal may still act: it has not expired and is not revoked."""
        if principal.expires <= self._clock():
            return False
        return principal.kind != TOKEN or self.store.is_active(principal.id)

    def is_owner_active(self, owner: str) -> bool:
        """Return whether the principal of a stored id exists; only tokens of the store can be revoked."""
        return not owner.startswith(PREFIX) or self.store.is_active(owner)

    def refresh(self) -> bool:
        """Read tokens and keys again if their files have changed; return whether any had."""
        changed = self.store.refresh()
        return (self._jwt is not None and self._jwt.refresh()) or changed


def is_limited(principal: Principal) -> bool:
    """Return whether a principal can lose its rights while the server runs."""
    return principal.kind in {TOKEN, JWT}


def read_token_file(path: str) -> list[bytes]:
    """
    Read a token file: one token or `sha256:<hex>` a line; `#` starts a comment. Each has all rights.

    Raises:
        ConfigError: it cannot be read, is open to other users, or has an invalid line.
    """
    try:
        _check_private(path)
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read token file {path}: {error}", setting="token_file"
        ) from error
    digests = []
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if text:
            digests.append(_digest(text, f"{path}, line {number}"))
    if not 1 <= len(digests) <= TOKENS_MAX:
        raise ConfigError(
            f"{path} has {len(digests)} tokens: 1 to {TOKENS_MAX} are allowed", setting="token_file"
        )
    return digests


def _check_private(path: str) -> None:
    """Refuse a token file that other users of the machine can read, as ssh does with its keys."""
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) and mode & OTHERS:
        raise ConfigError(
            f"token file {path} can be read or changed by other users (mode {stat.S_IMODE(mode):04o}): "
            f"chmod 600 {path}",
            setting="token_file",
        )


def _digest(text: str, place: str) -> bytes:
    if text.startswith(HASH_PREFIX):
        try:
            digest = bytes.fromhex(text.removeprefix(HASH_PREFIX))
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise ConfigError(f"{place}: after `sha256:` come 64 hex digits", setting="token_file")
        return digest
    if len(text) < TOKEN_CHARS_MIN:
        raise ConfigError(
            f"{place}: a token of {len(text)} characters: at least {TOKEN_CHARS_MIN}",
            setting="token_file",
        )
    return hashlib.sha256(text.encode()).digest()
