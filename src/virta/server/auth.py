"""
Who may use the server: the one place that decides, for every route and both request paths.

`Authenticator.check` looks at the head of a request: whether it names this server (`virta.server.hosts`),
whether the web page that sent it is allowed (`virta.server.origins`), and whether its token is known.
It also returns the CORS headers of the response.

Programs need no token on loopback. Anything else needs a file of bearer tokens or `--insecure`; without
either the server does not start. Tokens are stored as hashes and compared in constant time. A token comes
in the `Authorization` header or, for EventSource, which cannot set headers, as `access_token` in the
query.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_plus

from virta.errors import ConfigError, RequestError
from virta.server.hosts import is_loopback
from virta.server.http.stream_options import split_parameters

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
# Paths that need no token: probes, the files of the console, and a webhook's callback, whose address contains a key.
WITHOUT_TOKEN = re.compile(rb"/(?:livez|readyz|console/.*|subscriptions/[^/%]+/confirm)?")
# Paths that links on pages of other sites may lead to: the console, and the callback of a webhook.
LINKED = re.compile(rb"/(?:subscriptions/[^/?#]+/confirm)?(?:\?.*)?", re.DOTALL)
# Headers in which browsers identify the page that makes a request.
BROWSERS = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"})
# Mode bits that a token file must not have. A pipe or descriptor (`<(…)`) has no lasting mode to check.
OTHERS = stat.S_IRWXG | stat.S_IRWXO

_IN_QUERY = b"access_token="


def check_exposure(host: str, token_file: str | None, *, insecure: bool) -> None:
    """Refuse to listen on an address that other machines can reach without a check of tokens."""
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


class Access(NamedTuple):
    """The result of a check that found no fault in the Host and the Origin."""

    target: bytes  # path and query, without a token
    cors: bytes  # CORS headers of the response
    refusal: RequestError | None  # 401 if the token is missing or not known


class Authenticator:
    """Decides which requests are served."""

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
        self.cors = cors  # of every response; empty: only allowed pages get CORS headers

    def check(
        self, version: str, method: bytes, target: bytes, headers: Headers, local: str | None
    ) -> Access:
        """
        Check the head of a request.

        `local` is the address at which the connection arrived.

        Raises:
            RequestError: 505 or 400 for an invalid version or Host, 421 for the Host of another
                server, 403 for a page that is not allowed.
        """
        if version not in VERSIONS:
            raise RequestError(505, "invalid-version", f"HTTP/{version} is not HTTP/1.1")
        authority = None
        if target[:1] != b"/" and (found := ABSOLUTE.match(target)):
            authority = found[1]
            target = b"/" + target[found.end() :].removeprefix(b"/")
        hosts = [value for name, value in headers if name == b"host"]
        host = self._check_host(version, authority, hosts, local)
        cors = self._check_page(method, target, headers, host)
        if not self._digests or method == b"OPTIONS":  # a preflight has no token
            return Access(target, cors, None)
        path, _, query = target.partition(b"?")
        if WITHOUT_TOKEN.fullmatch(path):
            return Access(target, cors, None)
        token, rest = _split_token(query)
        return Access(path + b"?" + rest if rest else path, cors, self._check_token(headers, token))

    def _check_host(
        self, version: str, authority: bytes | None, hosts: list[bytes], local: str | None
    ) -> bytes:
        """Return the host of a request; RFC 9112 §3.2: exactly one is required, and one in the target wins."""
        if len(hosts) != 1 and (hosts or version == "1.1"):
            said = "no Host header" if not hosts else f"{len(hosts)} Host headers"
            raise RequestError(400, "invalid-host", f"{said}: HTTP/1.1 requires exactly one")
        if hosts:
            if not HOST.fullmatch(hosts[0]):
                raise RequestError(400, "invalid-host", "the Host header names no host")
            self._hosts.check(hosts[0], local)
        if authority is not None:
            self._hosts.check(authority, local)
            return authority
        # Browsers always send a Host; a program that speaks HTTP/1.0 may leave it out.
        return hosts[0] if hosts else b""

    def _check_page(self, method: bytes, target: bytes, headers: Headers, host: bytes) -> bytes:
        """Refuse a page that is not allowed; return the CORS headers for one that is."""
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

    def _check_token(self, headers: Headers, in_query: bytes | None) -> RequestError | None:
        """Return the refusal of a request whose token is missing or not known."""
        authorization = next((v for n, v in headers if n == b"authorization"), None)
        if authorization is not None:
            scheme, _, credential = authorization.partition(b" ")
            if scheme.lower() != b"bearer":
                return _unauthorized("the Authorization header is not of the Bearer scheme")
            token = credential.strip()
        elif in_query is not None:
            token = unquote_plus(in_query.decode("latin-1")).encode("utf-8", "replace")
        else:
            return _unauthorized(
                "no token: send `Authorization: Bearer …` or the parameter access_token"
            )
        digest = hashlib.sha256(token).digest()
        # Every token is compared, so that the time does not depend on which one is similar.
        if not sum([hmac.compare_digest(digest, known) for known in self._digests]):
            return _unauthorized("the token is not known")
        return None


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


def _split_token(query: bytes) -> tuple[bytes | None, bytes]:
    """Return the first token in a query, and the query without tokens."""
    if _IN_QUERY not in query:
        return None, query
    tokens, rest = split_parameters(query, lambda piece: piece.startswith(_IN_QUERY))
    return (tokens[0].removeprefix(_IN_QUERY) if tokens else None), rest


def _unauthorized(message: str) -> RequestError:
    return RequestError(401, "unauthorized", message)
