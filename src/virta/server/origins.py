"""
Which web pages may talk to the server: the `Origin` that browsers send with a page's requests.

The door asks who someone is; this asks on whose behalf a browser speaks. A server on loopback asks
nobody for a token, and a browser on the same machine can reach it from any page it has open: a
WebSocket is not held back by CORS, so the server itself has to refuse it.

    allow_origin   sockets                                   other requests
    not given      own pages; any page when it has a token   any page (Thorium's `*`)
    a list         the pages listed, and own ones            the same
    `*`            any page                                  any page

Programs that are no browsers send no Origin and are never asked.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from virta.errors import RequestError
from virta.server.door import is_loopback

ANY = "*"
SELF = "self"  # own pages and nobody else
NULL = "null"  # pages without a place: files, sandboxed frames
ORIGINS_MAX = 100
DEFAULT_PORTS = {"http": 80, "https": 443}

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


def read_origin(text: str) -> str | None:
    """A configured origin as browsers write it, or None when it is none."""
    lowered = text.strip().lower().removesuffix("/")
    if lowered in {ANY, SELF, NULL}:
        return lowered
    if not lowered.isascii() or not _ORIGIN.fullmatch(lowered):
        return None
    return _normal(lowered)


def _normal(origin: str) -> str | None:
    """Scheme and host, with the port only where it is not the scheme's own."""
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
    """Judges the origin of a request."""

    def __init__(
        self, allowed: tuple[str, ...] | None = None, *, host: str = "127.0.0.1", tokens: bool
    ) -> None:
        self._allowed = frozenset(allowed or ())
        self._local = is_loopback(host)
        everyone = ANY in self._allowed
        # Whom nobody has to look at.
        self.all_requests = everyone or allowed is None
        # A page that has a token was given it: nothing is lent to it by where the browser runs.
        self.all_sockets = everyone or (allowed is None and tokens)

    def check(self, headers: list[tuple[bytes, bytes]], *, socket: bool = False) -> None:
        """
        Refuse a page that may not.

        Raises:
            RequestError: 403, with the flag that would allow it.
        """
        if self.all_sockets if socket else self.all_requests:
            return
        raw = next((value for name, value in headers if name == b"origin"), None)
        if raw is None:
            return
        origin = raw.decode("latin-1").strip().lower()
        host = next((value for name, value in headers if name == b"host"), b"").decode("latin-1")
        if origin in self._allowed or self._own(origin, host.strip().lower()):
            return
        raise RequestError(
            403,
            "origin-not-allowed",
            f"pages of {origin!r} may not use this server: start it with --allow-origin {origin}",
        )

    def _own(self, origin: str, host: str) -> bool:
        """
        Tell whether a page comes from this server, or from this machine when that is all it serves.

        On loopback a page under any other name is not ours, even if that name leads here now:
        whoever owns the name decides where it leads.
        """
        normal = _normal(origin)
        if normal is None:
            return False
        parts = urlsplit(normal)
        if parts.scheme not in DEFAULT_PORTS:
            return False
        name = parts.hostname or ""
        if self._local and (is_loopback(name) or name.endswith(".localhost")):
            return True
        if self._local and not _is_address(name):
            return False
        return normal == _normal(f"{parts.scheme}://{host}")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
