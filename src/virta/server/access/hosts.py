"""
The names of this server: the check of the `Host` of each request.

This prevents DNS rebinding. The owner of `evil.example` can point that name to 127.0.0.1 after a
browser has loaded a page from it; to the browser that page then has the same origin as this server, so
its requests need no `Origin` header and no preflight. Their `Host` is still `evil.example`, so a
request whose `Host` is not one of the server's names is refused.

    always allowed        loopback names and addresses, the address of --host, the host of
                          --webhook-callback-url, the entries of --allow-host
    on a wildcard address the address at which the connection arrived (0.0.0.0 and :: stand for all)

The port is not compared: it differs behind port forwarding, and rebinding is about names. An address in
`Host` cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from virta.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

ANY = "*"
# Entries of --allow-host.
HOSTS_MAX = 100
# Cached Host headers that passed the check, so that a repeat costs one lookup, and their largest size.
VERDICTS_MAX = 1024
VERDICT_BYTES_MAX = 255 + len(":65535")

_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]{0,252}[a-z0-9_])?")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.%a-z]+\]|[^\[\]:]*)(?::[0-9]{0,5})?")


def read_host(text: str) -> str | None:
    """Return a configured host in its normal form, or None if it is neither a name nor an address."""
    lowered = text.strip().lower()
    if lowered == ANY:
        return ANY
    normal = _normal(lowered.removeprefix("[").removesuffix("]"))
    is_name = _NAME.fullmatch(normal) is not None
    return normal if is_name or _address(normal) is not None else None


def host_name(authority: str) -> str | None:
    """Return the host of `host[:port]` in its normal form, or None if it is invalid."""
    found = _AUTHORITY.fullmatch(authority.strip().lower())
    if found is None or not found[1]:
        return None
    return _normal(found[1].removeprefix("[").removesuffix("]"))


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can only be reached from this machine."""
    if host == "localhost":
        return True
    address = _address(host.removeprefix("[").removesuffix("]"))
    return address is not None and address.is_loopback


def is_loopback_name(host: str) -> bool:
    """Return whether a browser resolves a name or address to its own machine (RFC 6761 §6.3)."""
    return is_loopback(host) or host.endswith(".localhost")


def _normal(host: str) -> str:
    """Return the normal form of a host: no trailing dot or zone, IPv4-mapped IPv6 as IPv4."""
    address = _address(host)
    return host.removesuffix(".") if address is None else str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


class Hosts:
    """Decides whether a request names this server."""

    def __init__(
        self, bind: str, allowed: Iterable[str] | None = None, more: Iterable[str] = ()
    ) -> None:
        names = {_normal(bind.lower()), *(allowed or ()), *more}
        address = _address(bind)
        self._everything = ANY in names
        self._wildcard = address is not None and address.is_unspecified
        self._names = frozenset(names)
        self._passed: set[bytes] = set()

    def check(self, authority: bytes, local: str | None) -> None:
        """
        Refuse a host that is not one of the server's names.

        `local` is the address at which the connection arrived.

        Raises:
            RequestError: 421.
        """
        if authority in self._passed or self._everything:
            return
        text = authority.decode("latin-1")
        name = host_name(text)
        if name is not None and (name in self._names or is_loopback_name(name)):
            if len(self._passed) >= VERDICTS_MAX:
                self._passed.clear()
            if len(authority) <= VERDICT_BYTES_MAX:
                self._passed.add(authority)
            return
        # Depends on the connection, so it is not cached.
        if self._wildcard and name is not None and local is not None and name == _normal(local):
            return
        raise RequestError(
            421,
            "misdirected-host",
            f"{text[:100]!r} is not a name of this server: use its address, or start it "
            "with --allow-host NAME if that name is correct",
        )
