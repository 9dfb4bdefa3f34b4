"""
The door: who may talk to the server at all.

Loopback is open. Anything else needs a file of bearer tokens or the word `--insecure`; without either
the server does not start. Tokens are kept as hashes and compared in constant time. A token comes in
the `Authorization` header or, for EventSource, which cannot set headers, as `access_token` in the
query.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

from virta.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from virta.server.origins import Origins

HASH_PREFIX = "sha256:"
TOKENS_MAX = 10_000
TOKEN_CHARS_MIN = 16  # shorter ones can be guessed

# What nobody but the owner of a token file may do. A pipe or descriptor (`<(…)`) has no lasting mode to check.
OTHERS = stat.S_IRWXG | stat.S_IRWXO

_IN_QUERY = b"access_token="


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, token_file: str | None, *, insecure: bool) -> None:
    """Refuse to listen where everyone is without asking who they are."""
    if is_loopback(host) or token_file is not None or insecure:
        return
    raise ConfigError(
        f"host {host!r} can be reached from other machines: give --token-file FILE to ask for a "
        "bearer token, or --insecure to let everyone in",
        setting="host",
    )


def read_tokens(path: str) -> list[bytes]:
    """Read a token file: one token or `sha256:<hex>` a line; `#` starts a comment."""
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
        if not text:
            continue
        digests.append(_digest(text, f"{path}, line {number}"))
    if not 1 <= len(digests) <= TOKENS_MAX:
        raise ConfigError(
            f"{path} has {len(digests)} tokens: 1 to {TOKENS_MAX} are allowed", setting="token_file"
        )
    return digests


def _check_private(path: str) -> None:
    """Refuse a file whose tokens other users of the machine can read, as ssh does with its keys."""
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


class Door:
    """Lets requests in or not."""

    def __init__(self, origins: Origins, digests: list[bytes] | None = None) -> None:
        self._digests = digests or []
        self.origins = origins
        self.open = not self._digests and origins.all_requests  # nobody is asked

    def admit(self, headers: list[tuple[bytes, bytes]], query: bytes) -> bytes:
        """
        Check a request; give back its query without the token.

        Raises:
            RequestError: 401 or 403, saying which check failed.
        """
        self.origins.check(headers)
        if not self._digests:
            return query
        found, rest = _take_token(query)
        authorization = next((v for n, v in headers if n == b"authorization"), None)
        if authorization is not None:
            scheme, _, credential = authorization.partition(b" ")
            if scheme.lower() != b"bearer":
                raise _unauthorized("the Authorization header is not of the Bearer scheme")
            token = credential.strip()
        elif found is not None:
            token = unquote_plus(found.decode("latin-1")).encode("utf-8", "replace")
        else:
            raise _unauthorized(
                "no token: send `Authorization: Bearer …` or the parameter access_token"
            )
        digest = hashlib.sha256(token).digest()
        # Every token is compared, so that time does not tell which one came close.
        if not sum([hmac.compare_digest(digest, known) for known in self._digests]):
            raise _unauthorized("the token is not known")
        return rest


def _take_token(query: bytes) -> tuple[bytes | None, bytes]:
    """
    The first token in a query, and the query without any.

    A part between semicolons that held nothing else goes as a whole: left empty, it would be a
    query that everything satisfies.
    """
    if _IN_QUERY not in query:
        return None, query
    tokens: list[bytes] = []
    parts = []
    for part in query.split(b";"):
        kept = []
        for piece in part.split(b"&"):
            if piece.startswith(_IN_QUERY):
                tokens.append(piece.removeprefix(_IN_QUERY))
            else:
                kept.append(piece)
        if kept:
            parts.append(b"&".join(kept))
    return (tokens[0] if tokens else None), b";".join(parts)


def _unauthorized(message: str) -> RequestError:
    return RequestError(401, "unauthorized", message)
