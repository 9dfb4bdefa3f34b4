"""
Who sends a request: the one place that decides, for every route and both request paths.

`Authenticator.check` looks at the head of a request: whether it names this server (`virta.server.access.hosts`),
whether the web page that sent it is allowed (`virta.server.access.origins`), and for which principal its credential
stands (`virta.access`). It also returns the CORS headers of the response. What the principal may do is the
matter of `virta.server.access.rules`.

Programs need no credential on loopback, unless `--require-token`, `--token-file` or `--jwt-keys` is given. Anything
else needs tokens, JWT or `--insecure`; without them the server does not start. A credential comes in the
`Authorization` header, in the cookie of a session, or as a ticket in the query: `ticket=vt_…`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_plus

from uvicorn.protocols.utils import get_remote_addr

from virta.access.grants import Rights
from virta.access.principal import ANYONE, OPEN, Principal
from virta.access.tickets import TICKET_PREFIX
from virta.errors import AccessError, ConfigError, RequestError
from virta.server.access.hosts import is_loopback
from virta.server.access.rules import PUBLIC_PATHS
from virta.server.http.stream_options import split_parameters

if TYPE_CHECKING:
    from virta.access.credentials import Credentials
    from virta.access.rates import RateLimiter
    from virta.server.access.audit import Audit
    from virta.server.access.hosts import Hosts
    from virta.server.access.origins import Origins
    from virta.server.config_loader import Config

Headers = list[tuple[bytes, bytes]]

# `--thorium-compatible`: every response allows any page to read it.
THORIUM_CORS = b"Access-Control-Allow-Origin: *\r\n"
VERSIONS = frozenset({"1.0", "1.1"})
# A Host is a name or address and a port, or nothing.
HOST = re.compile(rb"[^\x00- /?#@\\\x7f]*")
# An absolute target, as proxies write it (RFC 9112 §3.2.2); the group is its host.
ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
# Paths that links on pages of other sites may lead to: the console, and the callback of a webhook.
LINKED = re.compile(rb"/(?:subscriptions/[^/?#]+/confirm)?(?:\?.*)?", re.DOTALL)
# Headers in which browsers identify the page that makes a request.
BROWSERS = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"})
COOKIE = "virta_session"
# Of a public path, if a request has no credential.
NOBODY = Principal("nobody", OPEN, Rights(()))

_TOKEN = b"access_token="
_TICKET = b"ticket=" + TICKET_PREFIX.encode()


def requires_credentials(config: Config) -> bool:
    """Return whether a server asks for credentials."""
    asked = config.require_token or config.token_file or config.jwt_keys
    return bool(asked) or not (is_loopback(config.host) or config.insecure)


def check_exposure(config: Config, token_count: int) -> None:
    """Refuse to serve without credentials that could be checked."""
    if config.token_file or config.jwt_keys or token_count or not requires_credentials(config):
        return
    create = f"`virta token create --data-dir {config.data_dir} --read '**'`"
    if config.require_token:
        raise ConfigError(
            f"--require-token, and there is no token: create one with {create}, or give --token-file "
            "or --jwt-keys",
            setting="require_token",
        )
    raise ConfigError(
        f"host {config.host!r} can be reached from other machines: create a token with {create}, give "
        "--token-file FILE or --jwt-keys FILE, or --insecure to let everyone in",
        setting="host",
    )


class Access(NamedTuple):
    """The result of a check that found no fault in the Host and the Origin."""

    target: bytes  # path and query, without a token
    cors: bytes  # CORS headers of the response
    refusal: RequestError | None  # 401 for the credential, 429 beyond a rate limit
    principal: Principal  # who sends it


class RequestRates(NamedTuple):
    """Limits on requests a second; None is no limit."""

    principal: RateLimiter | None = None
    address: RateLimiter | None = None


class Authenticator:
    """Decides which requests are served, and for whom."""

    def __init__(
        self,
        hosts: Hosts,
        origins: Origins,
        audit: Audit,
        credentials: Credentials | None = None,
        *,
        cors: bytes = b"",
        token_in_url: bool = False,
        rates: RequestRates | None = None,
    ) -> None:
        self.credentials = credentials  # None: everyone may do everything
        self.rates = rates or RequestRates()
        self.is_rate_limited = self.rates != RequestRates()
        self._audit = audit
        self._hosts = hosts
        self._origins = origins
        self._token_in_url = token_in_url
        self.cors = cors  # of every response; empty: only allowed pages get CORS headers

    def check(
        self,
        version: str,
        method: bytes,
        target: bytes,
        headers: Headers,
        local: str | None,
        transport: Any = None,
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
        # Before its credential is looked at: an address can try only so many.
        if (refusal := self._check_address(transport)) is not None:
            return Access(target, cors, refusal, NOBODY)
        principal = ANYONE
        if self.credentials is not None and method != b"OPTIONS":  # a preflight has no credential
            target, principal, refusal = self._identify(
                self.credentials, target, headers, transport
            )
        return Access(
            target, cors, refusal or self._check_principal(principal, transport), principal
        )

    def check_rates(self, principal: Principal, transport: Any) -> RequestError | None:
        """Count a request whose head is known; return the refusal if it is one too many."""
        return self._check_address(transport) or self._check_principal(principal, transport)

    def _check_address(self, transport: Any) -> RequestError | None:
        if self.rates.address is None:
            return None
        address = _address(transport)
        return self._too_many(self.rates.address.wait_s(address), address=address)

    def _check_principal(self, principal: Principal, transport: Any) -> RequestError | None:
        if self.rates.principal is None or principal.kind == OPEN:
            return None
        wait = self.rates.principal.wait_s(principal.id)
        return self._too_many(wait, principal=principal.id, address=_address(transport))

    def _too_many(self, wait: float, **who: str) -> RequestError | None:
        if not wait:
            return None
        self._audit.refused("rate-limit", **who)
        return RequestError(
            429, "rate-limit", f"too many requests: try again in {wait:.1f} s", retryAfter=wait
        )

    def _identify(
        self, credentials: Credentials, target: bytes, headers: Headers, transport: Any
    ) -> tuple[bytes, Principal, RequestError | None]:
        """Return the target without its credential, and the principal or why there is none."""
        path, _, query = target.partition(b"?")
        given, query = _split_credentials(query)
        target = path + b"?" + query if query else path
        try:
            return target, self._principal(credentials, headers, given), None
        except AccessError as error:
            if error.code == "no-credential" and PUBLIC_PATHS.fullmatch(path):
                return target, NOBODY, None
            shown = path.decode("latin-1")[:200]
            self._audit.refused(error.code, address=_address(transport), path=shown)
            return (
                target,
                NOBODY,
                RequestError(401, "unauthorized", error.message, reason=error.code),
            )

    def _principal(
        self, credentials: Credentials, headers: Headers, given: list[bytes]
    ) -> Principal:
        """
        Return the principal of a request's credential; the header wins, then the cookie, then the query.

        Raises:
            AccessError: there is none, or it is not accepted.
        """
        for name, value in headers:
            if name == b"authorization":
                scheme, _, credential = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    raise AccessError(
                        "the Authorization header is not of the Bearer scheme", code="no-bearer"
                    )
                return credentials.find(credential.strip().decode("utf-8", "replace"))
        session = read_session(headers)
        if session is not None:
            return credentials.sessions.find(session, once=False)
        for piece in given:
            if piece.startswith(_TICKET):
                ticket = piece.removeprefix(b"ticket=").decode("latin-1")
                return credentials.tickets.find(unquote_plus(ticket), once=True)
        if given:
            if not self._token_in_url:
                raise AccessError(
                    "tokens in addresses are refused, because addresses are written to logs: ask "
                    "for a ticket with POST /tickets, or start the server with --token-in-url",
                    code="token-in-url",
                )
            text = given[0].removeprefix(_TOKEN).decode("latin-1")
            return credentials.find(unquote_plus(text))
        raise AccessError(
            "no credential: send `Authorization: Bearer …`, or a ticket of POST /tickets",
            code="no-credential",
        )

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


def read_session(headers: Headers) -> str | None:
    """Return the session in the cookies of a request."""
    for name, value in headers:
        if name == b"cookie":
            for piece in value.decode("latin-1").split(";"):
                key, _, text = piece.strip().partition("=")
                if key == COOKIE:
                    return text
    return None


def _split_credentials(query: bytes) -> tuple[list[bytes], bytes]:
    """Return the credentials in a query, and the query without them."""
    if _TOKEN not in query and _TICKET not in query:
        return [], query
    return split_parameters(query, lambda piece: piece.startswith((_TOKEN, _TICKET)))


def _address(transport: Any) -> str:
    address = None if transport is None else get_remote_addr(transport)
    return address[0] if address else "unknown"
