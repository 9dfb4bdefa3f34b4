"""
The door: who may talk to the server at all.

`check_head` is the one place that checks the head of a request, before any route: whether it
names this server (`virta.server.hosts`) and whether the web page that sent it is allowed
(`virta.server.origins`). It also returns the CORS headers of the response. `admit` checks the token.

Programs need no token on loopback. Anything else needs a file of bearer tokens or the word `--insecure`; without either
the server does not start. Tokens are kept as hashes and compared in constant time. A token comes in
the `Authorization` header or, for EventSource, which cannot set headers, as `access_token` in the
query.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

from virta.errors import ConfigError, RequestError
from virta.server.hosts import is_loopback
from virta.server.http.stream_options import take_parameters

if TYPE_CHECKING:
    from virta.server.hosts import Hosts
    from virta.server.origins import Origins

Headers = list[tuple[bytes, bytes]]

HASH_PREFIX = "sha256:"
TOKENS_MAX = 10_000
TOKEN_CHARS_MIN = 16  # shorter ones can be guessed

# `--thorium-compatible`: every response allows any page to read it.
THORIUM_CORS = b"Access-Control-Allow-Origin: *\r\n"
VERSIONS = frozenset({"1.0", "1.1"})
# A Host is a name or address and a port, or nothing.
HOST = re.compile(rb"[^\x00- /?#@\\\x7f]*")
# An absolute target, as proxies write it (RFC 9112 §3.2.2); the group is its host.
ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
# Links on pages of other sites may lead here: the console, and the callback of a webhook, whose address
# has a key. They answer people, and following a link does nothing that its key does not allow.
LINKED = re.compile(rb"/(?:subscriptions/[^/?#]+/confirm)?(?:\?.*)?", re.DOTALL)
# Headers in which browsers identify the page that makes a request.
BROWSERS = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"})
# Mode bits that a token file must not have. A pipe or descriptor (`<(…)`) has no lasting mode to check.
OTHERS = stat.S_IRWXG | stat.S_IRWXO

_IN_QUERY = b"access_token="


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


class Door:
    """Lets requests in or not."""

    def __init__(
        self,
        hosts: Hosts,
        origins: Origins,
        digests: list[bytes] | None = None,
        *,
        cors: bytes = b"",
    ) -> None:
        self._digests = digests or []
        self._hosts = hosts
        self._origins = origins
        self.cors = (
            cors  # for every response; empty: only responses to allowed pages have CORS headers
        )
        self.open = not self._digests  # programs need no token

    def check_head(
        self, version: str, method: bytes, target: bytes, headers: Headers, local: str | None
    ) -> bytes:
        """
        Check the Host and the Origin of a request; return the CORS headers of its response.

        `local` is the address at which the connection arrived.

        Raises:
            RequestError: 505 or 400 for an invalid version or Host, 421 for the Host of another
                server, 403 for a page that is not allowed.
        """
        if version not in VERSIONS:
            raise RequestError(505, "invalid-version", f"HTTP/{version} is not HTTP/1.1")
        hosts = [value for name, value in headers if name == b"host"]
        host = self._checked_host(version, target, hosts, local)
        sent = [pair for pair in headers if pair[0] in BROWSERS]
        if not sent:  # a program
            return self.cors
        origins = [value for name, value in sent if name == b"origin"]
        for origin in origins:
            self._origins.check(origin, host)
        fetch = dict(sent)
        if not origins and not _follows_link(method, target, fetch):
            self._origins.check_site(fetch.get(b"sec-fetch-site", b""))
        return self.cors or (_cors(origins[0]) if origins else b"")

    def _checked_host(
        self, version: str, target: bytes, hosts: list[bytes], local: str | None
    ) -> bytes:
        """Return the host of a request; RFC 9112 §3.2: exactly one is required, and one in the target wins."""
        if len(hosts) != 1 and (hosts or version == "1.1"):
            said = "no Host header" if not hosts else f"{len(hosts)} Host headers"
            raise RequestError(400, "invalid-host", f"{said}: HTTP/1.1 requires exactly one")
        if hosts:
            if not HOST.fullmatch(hosts[0]):
                raise RequestError(400, "invalid-host", "the Host header names no host")
            self._hosts.check(hosts[0], local)
        if target[:1] != b"/" and (found := ABSOLUTE.match(target)):
            self._hosts.check(found[1], local)
            return found[1]
        # Browsers always send a Host; a program that speaks HTTP/1.0 may leave it out.
        return hosts[0] if hosts else b""

    def admit(self, headers: Headers, query: bytes) -> bytes:
        """
        Check a request's token; return its query without the token.

        Raises:
            RequestError: 401, saying which check failed.
        """
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


def _follows_link(method: bytes, target: bytes, fetch: dict[bytes, bytes]) -> bool:
    """Return whether a person followed a link, as a top-level navigation, to a path that allows it."""
    return (
        method == b"GET"
        and fetch.get(b"sec-fetch-mode") == b"navigate"
        and fetch.get(b"sec-fetch-dest") == b"document"
        and LINKED.fullmatch(target) is not None
    )


def _cors(origin: bytes) -> bytes:
    """Return headers that let an allowed page read the response and its headers."""
    return (
        b"Access-Control-Allow-Origin: %b\r\nAccess-Control-Expose-Headers: *\r\nVary: Origin\r\n"
        % origin.strip()
    )


def _take_token(query: bytes) -> tuple[bytes | None, bytes]:
    """Return the first token in a query, and the query without tokens."""
    if _IN_QUERY not in query:
        return None, query
    tokens, rest = take_parameters(query, lambda piece: piece.startswith(_IN_QUERY))
    return (tokens[0].removeprefix(_IN_QUERY) if tokens else None), rest


def _unauthorized(message: str) -> RequestError:
    return RequestError(401, "unauthorized", message)
