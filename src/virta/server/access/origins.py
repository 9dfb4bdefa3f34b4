"""
The web pages that may use the server: the `Origin` that browsers send with a page's requests.

A browser on this machine can reach a server on loopback from any page it has open, and sends "simple"
requests (GET, or POST with `text/plain`) without asking first. So the server refuses pages of other
origins itself, for reading and writing, on every route and method. Programs send no `Origin` and no
`Sec-Fetch-Site` and are not affected.

    allow_origin   allowed pages
    not given      own pages
    a list         the pages listed, and own ones
    `*`            any page

Own pages are those of the origin the request is sent to, which the check of `Host` has confirmed
(`virta.server.access.hosts`), and on loopback those of this machine (`localhost`, `127.0.0.1`, `[::1]`, any port).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from virta.errors import RequestError
from virta.server.access.hosts import host_name, is_loopback, is_loopback_name

ANY = "*"
SELF = "self"  # own pages and no others
NULL = "null"  # pages without an origin: files, sandboxed frames
ORIGINS_MAX = 100
DEFAULT_PORTS = {"http": 80, "https": 443}

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


def read_origin(text: str) -> str | None:
    """Return a configured origin as browsers write it, or None if it is not an origin."""
    lowered = text.strip().lower().removesuffix("/")
    if lowered in {ANY, SELF, NULL}:
        return lowered
    if not lowered.isascii() or not _ORIGIN.fullmatch(lowered):
        return None
    return _normal(lowered)


def _normal(origin: str) -> str | None:
    """Return scheme and host, with the port only if it is not the scheme's default."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is None or port == DEFAULT_PORTS.get(parts.scheme):
        return f"{parts.scheme}://{host}"
    return f"{parts.scheme}://{host}:{port}"


class Origins:
    """Decides which pages may use the server."""

    def __init__(self, allowed: tuple[str, ...] | None = None, *, host: str = "127.0.0.1") -> None:
        self._allowed = frozenset(allowed or ())
        self._local = is_loopback(host)
        self.everyone = ANY in self._allowed

    def check(self, origin: bytes, host: bytes) -> None:
        """
        Refuse a page that is not allowed; `host` is the checked `Host` of the request.

        Raises:
            RequestError: 403, with the flag that would allow it.
        """
        text = origin.decode("latin-1").strip().lower()
        if self.everyone or text in self._allowed:
            return
        if self._own(text, host.decode("latin-1").strip().lower()):
            return
        raise RequestError(
            403,
            "origin-not-allowed",
            f"pages of {text[:200]!r} may not use this server: start it with --allow-origin {text[:200]}",
        )

    def check_site(self, site: bytes) -> None:
        """
        Refuse a page of another site that a browser sent without an `Origin` (images, scripts, links).

        Raises:
            RequestError: 403.
        """
        if not self.everyone and site.strip().lower() == b"cross-site":
            raise RequestError(
                403,
                "origin-not-allowed",
                "pages of other sites may not use this server, and the browser did not say which page "
                "this is: open the address itself, or use fetch from a page that --allow-origin lists",
            )

    def _own(self, origin: str, host: str) -> bool:
        """Return whether a page comes from this server, or from the machine that runs the browser."""
        normal = _normal(origin)
        if normal is None:
            return False
        parts = urlsplit(normal)
        if parts.scheme not in DEFAULT_PORTS:
            return False
        # A loopback name means that server, browser and page are on one machine.
        here = self._local or is_loopback_name(host_name(host) or "")
        if here and is_loopback_name(parts.hostname or ""):
            return True
        return normal == _normal(f"{parts.scheme}://{host}")
